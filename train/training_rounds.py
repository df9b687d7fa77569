"""Rounds of training: a new round can train on text written with the help of the current draft."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator
from rich.progress import Progress

from specdec.decoding.way import fitting_verification
from specdec.errors import require_known, require_within
from specdec.formats import draft_checkpoint
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import DEEPEST, Chain
from specdec.targets.loading import TargetLoader
from train.budget import READING, Budget, StageTime
from train.data.response_files import ResponsesConfig, ResponsesRead
from train.data.responses import Author, documents_with_responses
from train.data.sequences import Document, Prompt

DATA = ("target", "draft", "mixed", "draft_alone", "mixed_alone", "on_policy")


@dataclass
class RoundsConfig:
    """Training in several rounds on one learning-rate schedule.

    `data` is the training data of the rounds after the first:
    - target: the target's responses, sampled anew if `responses.temperature` is above 0, otherwise
      the same.
    - draft: responses that the target and the current draft write together. The draft proposes
      `gamma` tokens at a time, `verification` accepts some of them, and the target adds the next
      one.
    - mixed: as draft for every second conversation; the others keep the target's first responses.
    - draft_alone, mixed_alone: the same, except that the draft writes without the target, as in
      DistillSpec (Zhou et al. 2024, arXiv 2310.08461). Only drafts that do not read the target's
      hidden states can do so.
    - on_policy: in every round, even the first, the prompts are decoded losslessly with the current
      draft. The draft is then trained at the anchors of the decoder, on the tokens drafted there,
      as in Draft-OPD (arXiv 2605.29343), with any loss.

    With a lossless `verification` the text follows the target's distribution. The default keeps a
    drafted token with probability min(1, p / (factor · q)), or at temperature 0 if
    p >= factor · max p. The generated text follows the draft more closely; the loss still uses the
    target's p.
    """

    count: int = 1  # rounds, each of loop.epochs
    data: str = "target"  # target, draft, mixed, draft_alone, mixed_alone or on_policy (see above)
    # verification method of the generated text, as in decode.verification
    verification: str = "lenience:factor=0.1"
    # tokens drafted per speculation step of the generated text; null: drafter.depth
    gamma: int | None = None

    def __post_init__(self) -> None:
        require_within("rounds", self, count=1, gamma=(1, DEEPEST))
        require_known("rounds", self, data=DATA)
        fitting_verification(self.verification, Chain(1), Sampler(), False)

    @property
    def generates_again(self) -> bool:
        """Whether a draft helps to answer the prompts in any of the rounds."""
        return self.data == "on_policy" or (self.data != "target" and self.count > 1)

    def writes_texts(self, temperature: float) -> list[bool]:
        """For each round, whether it has its own texts, if the target answers at this
        temperature."""
        later = self.data != "target" or temperature > 0
        return [self.data == "on_policy", *[later] * (self.count - 1)]


def draft_of_round(cfg: RoundsConfig, folder: Path, number: int) -> Path | None:
    """The folder where round `number`, from 0, of the run in `folder` keeps the draft that helps to
    write its texts; None if no draft does."""
    helps = cfg.data == "on_policy" or (cfg.data != "target" and number > 0)
    return folder / "rounds" / str(number) / "draft" if helps else None


def written(
    cfg: RoundsConfig,
    responses: ResponsesConfig,
    number: int,
    documents: Sequence[Document],
    asked: Sequence[Prompt],
    draft: Path | None,
    target: TargetLoader,
    accelerator: Accelerator,
    progress: Progress,
    budget: Budget,
    responses_read: ResponsesRead | None = None,
    stored: bool = False,
) -> list[Document]:
    """The texts that round `number`, from 0, trains on: responses to the `asked` prompts, written
    with the draft in the folder `draft`, if there is one. The responses so far are stored beside
    that folder, so that an interrupted round resumes. `documents` are the texts of round 0.
    `responses_read` is as in `documents_with_responses`. The `budget` limits the number of prompts;
    if hidden states are `stored`, they take a part of the time."""
    stage, key = f"texts of round {number + 1}", f"responses of round {number + 1}"
    part = 1 - READING if stored else 1.0
    if draft is None:
        if responses.sampler.greedy or not asked:
            return list(documents)
        other = replace(responses, seed=(responses.seed + number) % 2**32)

        def sampled_anew(some: Sequence[Prompt], time: StageTime | None) -> list[Document]:
            return documents_with_responses(
                target,
                some,
                other,
                accelerator,
                progress,
                responses_read=responses_read,
                time=time,
            )

        return budget.texts_in_time(stage, key, asked, sampled_anew, part, budget.cfg.floor)
    drafter = draft_checkpoint.load_draft(draft, target.whole())
    author = Author(
        drafter=drafter,
        gamma=cfg.gamma or drafter.depth,
        verification=cfg.verification,
        folder=draft.parent / "responses",
        key=draft_checkpoint.digest_of_draft(draft),
    )
    if cfg.data == "on_policy":
        author = replace(author, verification="auto", logged_depth=drafter.depth)
    elif cfg.data.endswith("alone"):
        author = replace(author, verification=None)
    step = 2 if cfg.data.startswith("mixed") else 1

    def with_draft(some: Sequence[Prompt], time: StageTime | None) -> list[Document]:
        return documents_with_responses(
            target, some, responses, accelerator, progress, author=author, time=time
        )

    floor = budget.cfg.floor // step
    texts = budget.texts_in_time(stage, key, asked[::step], with_draft, part, floor)
    if step == 1:
        return texts
    again = {text.ids[~text.mask].tobytes(): text for text in texts}
    mixed = list(documents)
    mixed[::step] = [again.get(text.ids[~text.mask].tobytes(), text) for text in mixed[::step]]
    return mixed
