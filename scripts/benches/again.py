"""Measures a finished run's draft once more, with other settings of the decoder."""

from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from command_line import target_of

from specdec.decoding.config import DecodeConfig
from specdec.drafters.base import Drafter
from specdec.files import make_folder, record
from specdec.formats import draft_checkpoint
from specdec.measure.evaluation import Subject, evaluate
from specdec.measure.results import FILE, Results
from specdec.progress import bars, console
from specdec.targets.target import Target
from train.data.run_data import held_out_prompts
from train.folder import config_of, data_of_run


class Opened(NamedTuple):
    target: Target
    drafter: Drafter
    decode: dict[str, Any]  # the run's settings
    prompts: list[list[int]]  # held out
    words: list[str]  # the user's last turn in each


@lru_cache(maxsize=1)
def opened(run: Path, prompts: int) -> Opened:
    """The draft of a run's folder, its target, and the first `prompts` of its held-out prompts."""
    described = config_of(run)
    target = target_of(run / "best", described["target"]["dtype"])
    drafter = draft_checkpoint.load_draft(run / "best", target)
    asked = list(islice(held_out_prompts(data_of_run(run), target.tokenizer), prompts))
    ids, words = [p.ids.tolist() for p in asked], [p.words for p in asked]
    return Opened(target, drafter, described["decode"], ids, words)


def again(run: Path, name: str, of: Results, **changes: Any) -> Results:
    """Measure a run's draft with `changes` to its decoder's settings, on the prompts of its report
    `of`. If the results are already in the folder `name` of the run's folder, read them. Raises
    UserError for settings that this draft does not support."""
    kept = run / name
    if not (kept / FILE).exists():
        at_hand = opened(run, of.prompts + 1)  # one more, for choices
        fixed = {"prompts": of.prompts, "fastest": False}
        cfg = record(DecodeConfig, at_hand.decode | fixed | changes, "decode")
        subject = Subject(of.name, at_hand.target, at_hand.drafter, of.data)
        with bars(console) as progress:
            made = evaluate(subject, at_hand.prompts, cfg, progress, at_hand.words)
        made.write(make_folder(kept))
    return Results.load(kept)
