"""The subjects of the decoding benchmarks: a target, drafts for it, and held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
from command_line import target_of

from specdec.drafters import DRAFTERS, Drafter
from specdec.errors import UserError, require
from specdec.formats import draft_checkpoint
from specdec.progress import console
from specdec.targets.target import Target
from train.data.run_data import held_out_prompts
from train.folder import data_of_run


@dataclass
class Timing:
    """The responses that a benchmark makes: the number of held-out prompts, and the settings."""

    prompts: int = 12
    new: Annotated[int, "new tokens per response, at least 2"] = 96
    dtype: Annotated[str, "of target and draft"] = "auto"
    gamma: Annotated[int | None, "default: as trained; in speed, at most 5"] = None
    compiled: Annotated[bool, "use torch.compile; speed and engine time both ways"] = False

    @property
    def modes(self) -> dict[str, bool]:
        """For each suffix of a row's name, whether forward passes are compiled."""
        return {"": False} | ({", compiled": True} if self.compiled else {})


@dataclass
class BenchSetting:
    """A target, drafts for it by name, prompts to answer, and other prompts to choose a tree on."""

    target: Target
    drafters: dict[str, Drafter]
    prompts: list[list[int]]
    learning: list[list[int]] = field(default_factory=list)

    @property
    def drafter(self) -> Drafter:
        """The only drafter, or the first."""
        return next(iter(self.drafters.values()))


def setting(drafts: Sequence[Path], timing: Timing, others: int = 0) -> BenchSetting:
    """The target of the first draft, all `drafts`, and prompts from the held-out side of the first
    draft's run: those to answer, and up to `others` more. Prints a summary. Raises UserError if
    there is no prompt to answer or, with `others`, no other prompt."""
    run, count = drafts[0].parent, timing.prompts
    require(timing.new > 1, f"--new {timing.new}: give 2 or more, since prefill emits the first")
    target = target_of(drafts[0], timing.dtype)
    # without these limits there are more held-out prompts, but the first ones are the same
    data = replace(data_of_run(run), limit=None, records=None)
    few = islice(held_out_prompts(data, target.tokenizer), count + others)
    found = [p.ids.tolist() for p in few]
    require(bool(found), f"{run} has no held-out prompts: train on more conversations")
    require(
        not others or len(found) > count,
        f"{run} has only {len(found)} held-out prompts, so none is left to choose a tree on: give "
        "a smaller --prompts",
    )
    made = BenchSetting(target, drafters_of(drafts, target), found[:count], found[count:])
    console.print(
        f"{len(made.prompts)} held-out prompts, up to {timing.new} new tokens, {target.dtype}, "
        f"{torch.get_num_threads()} threads{', compiled' * timing.compiled}"
    )
    return made


def drafters_of(drafts: Sequence[Path], target: Target) -> dict[str, Drafter]:
    """Drafts by the name of their run, or of their method if they need no training. Raises
    UserError for a method that must learn from texts first, and for a name given twice."""
    found: dict[str, Drafter] = {}
    for draft in drafts:
        untrained = not draft.exists() and DRAFTERS.get(str(draft))
        name = str(draft) if untrained else draft.absolute().parent.name
        require(name not in found, f"{draft}: a draft named {name} is measured already")
        if not untrained:
            found[name] = draft_checkpoint.load_draft(draft, target)
            continue
        counts = untrained.fits_texts and not untrained.copies
        if untrained.trains(untrained.Config()) or counts:
            raise UserError(
                f"{draft} learns from texts: run `python train.py drafter={draft} name=NAME` and "
                "give runs/NAME/best"
            )
        found[name] = untrained.build(untrained.Config(), target)
    return found
