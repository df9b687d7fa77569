"""Rounds: training that goes on with text which the draft of the round before helped to write."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator
from rich.progress import Progress

from specdec.decoding.decode import fitting_rule
from specdec.errors import nearest, require, require_between
from specdec.formats import draft as drafts
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import DEEPEST, Chain
from specdec.target.loading import TargetOnDemand
from train.data.answers import AnswersConfig, Author, answered
from train.data.template import Document, Prompt

DATA = ("target", "draft", "mixed")


@dataclass
class RoundsConfig:
    """Training in `count` rounds of `loop.epochs` each, on one learning-rate schedule.

    `data` is what the rounds after the first read. "target": the target's answers, which are drawn
    anew where `answers.temperature` is above 0 and the same otherwise. "draft": answers that the
    draft and the target write together. The draft, as it is when the round begins, proposes `gamma`
    tokens at a time (null: its depth), which stand as far as `rule` accepts them; the target adds
    the next. "mixed": every second conversation is the target's, the others both write.

    `rule` is one of decode.rule's. With a lossless one the text is the target's in law. By default
    a token of the draft's stands with probability min(1, p / (factor · q)), so that the text goes
    where the draft would go. What is learnt is lossless all the same: p is what the target says
    after that very text.
    """

    count: int = 1
    data: str = "target"
    rule: str = "lenience:factor=0.1"
    gamma: int | None = None

    def __post_init__(self) -> None:
        require_between("rounds.count", self.count, 1)
        require(
            self.data in DATA, f"rounds.data={self.data!r} is unknown{nearest(self.data, DATA)}"
        )
        require(
            self.gamma is None or 1 <= self.gamma <= DEEPEST,
            f"rounds.gamma={self.gamma}: give 1 to {DEEPEST}, or null for the trained depth",
        )
        fitting_rule(self.rule, Chain(1), Sampler(), False)


def written(
    cfg: RoundsConfig,
    number: int,
    folder: Path,
    target: TargetOnDemand,
    prompts: Sequence[Prompt],
    first: Sequence[Document],
    answers: AnswersConfig,
    accelerator: Accelerator,
    progress: Progress,
) -> list[Document]:
    """The texts of round `number` (from 0), which the draft in `folder`/draft helps to write;
    `first` are those of round 0, one for each of the `prompts`.

    Answers are kept in `folder` as they come, so that an interrupted round goes on where it was.
    """
    same = cfg.data == "target" and (answers.temperature == 0 or not prompts)
    if number == 0 or same:
        return list(first)
    if cfg.data == "target":
        other = replace(answers, seed=(answers.seed + number) % 2**32)
        return answered(target, prompts, other, accelerator, progress)
    step = 2 if cfg.data == "mixed" else 1
    drafter = drafts.load(folder / "draft", target.whole())
    author = Author(drafter, cfg.gamma or drafter.depth, cfg.rule, folder / "answers")
    both = answered(target, prompts[::step], answers, accelerator, progress, author=author)
    documents = list(first)
    documents[::step] = both
    return documents
