"""What the benchmarks measure: a target, drafts of it, and held-out prompts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hydra import compose, initialize_config_dir
from rich.console import Console

from specdec.decoding.answers import Generation
from specdec.drafters import DRAFTERS, Drafter
from specdec.errors import UserError, require
from specdec.formats import draft as checkpoint
from specdec.target.base import Target
from specdec.target.loading import TargetConfig, load_target, opening
from train.config import Config, data_of_run, register, resolve
from train.data.split import held_out_prompts

CONF = Path(__file__).resolve().parents[2] / "conf"
console = Console(highlight=False, soft_wrap=True)


def configured(*overrides: str) -> Config:
    """The configuration of `python train.py OVERRIDES`."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolve(compose("config", list(overrides)))


def target_of(draft: Path, dtype: str, packed: bool = True) -> Target:
    """The target that a draft was trained for."""
    theirs = checkpoint.read_card(draft).target
    wanted = TargetConfig(path=theirs.name, revision=theirs.revision, dtype=dtype, packed=packed)
    target = load_target(wanted)
    console.print(opening(target, wanted))
    return target


def drafts_of(drafts: list[Path], target: Target) -> dict[str, Drafter]:
    """Drafts by the name of their run, or of their family where they need no training. Raises
    UserError for a family that knows nothing before it has seen texts, and for a name given
    twice."""
    found: dict[str, Drafter] = {}
    for draft in drafts:
        trained = draft.exists() or str(draft) not in DRAFTERS
        name = draft.absolute().parent.name if trained else str(draft)
        require(name not in found, f"{draft}: a draft named {name} is measured already")
        if trained:
            found[name] = checkpoint.load(draft, target)
            continue
        kind = DRAFTERS[str(draft)]
        counted = kind.fit is not Drafter.fit and not kind.copies
        if kind.trainable or counted:
            raise UserError(
                f"{draft} learns from texts: run `python train.py drafter={draft} name=NAME` and "
                "give runs/NAME/best"
            )
        found[name] = kind.build(kind.Config(), target)
    return found


def held_out(draft: Path, target: Target, count: int) -> list[list[int]]:
    """Prompts from the held-out side of a draft's run. Raises UserError where there is none."""
    require(count >= 1, f"--prompts {count}: give 1 or more")
    data = replace(data_of_run(draft.parent), limit=None, records=None)
    # the held-out side of more data begins with this one's
    found = [p.ids.tolist() for p in islice(held_out_prompts(data, target.tokenizer), count)]
    require(bool(found), f"{draft.parent} has no held-out prompts: train on more conversations")
    return found


def apart(prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[list[int]]]:
    """The first `count` prompts, and others to choose a tree on. Raises UserError for no others."""
    require(len(prompts) > count, f"only {len(prompts)} held-out prompts: give a smaller --prompts")
    return prompts[:count], prompts[count:]


def warm_ups(prompts: list[list[int]], compiled: bool) -> list[list[int]]:
    """What is decoded before anything is timed: all prompts where passes are compiled, so that no
    graph is built on the clock, else the first and the longest."""
    return prompts if compiled else [prompts[0], max(prompts, key=len)]


def tau_of(made: Sequence[Generation]) -> str:
    """τ of these answers together, as the tables show it."""
    return f"{sum(g.emitted for g in made) / max(1, sum(len(g.rounds) for g in made)):.3f}"
