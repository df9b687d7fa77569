"""Rounds: training that goes on with text which the draft of the round before helped to write."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specdec.decoding.decode import fitting_rule
from specdec.errors import require_known, require_within
from specdec.formats import draft as drafts
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import DEEPEST, Chain
from train.data.answers import Author, answered
from train.data.template import Document

if TYPE_CHECKING:
    from train.job import Job
    from train.loop import Keep
    from train.texts import Texts

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
        require_within("rounds", self, count=1, gamma=(1, DEEPEST))
        require_known("rounds", self, data=DATA)
        fitting_rule(self.rule, Chain(1), Sampler(), False)


def written(job: "Job", number: int, texts: "Texts", keep: "Keep") -> list[Document]:
    """The texts of round `number`, from 1 on; `texts` are those of round 0.

    The draft that helps to write them, which `keep` saves, and the answers as they come lie in a
    folder of the round, so that an interrupted round goes on where it was.
    """
    cfg, answers, documents = job.cfg.rounds, job.cfg.answers, list(texts.train)
    if cfg.data == "target":
        if answers.temperature == 0 or not texts.asked:
            return documents
        other = replace(answers, seed=(answers.seed + number) % 2**32)
        return answered(job.target, texts.asked, other, job.accelerator, job.progress)
    folder = job.folder / "rounds" / str(number)
    missing = not (folder / "draft").exists()
    job.accelerator.wait_for_everyone()  # all have seen the same
    if missing:
        keep(folder / "draft")
    step = 2 if cfg.data == "mixed" else 1
    drafter = drafts.load(folder / "draft", job.target.whole())
    author = Author(drafter, cfg.gamma or drafter.depth, cfg.rule, folder / "answers")
    documents[::step] = answered(
        job.target, texts.asked[::step], answers, job.accelerator, job.progress, author=author
    )
    return documents
