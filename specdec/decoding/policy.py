"""The interface of draft-length policies, and code that they share.

A policy is lossless if the length is a *stopping time* of the draft: whether a chain ends after its
i-th token may depend on past speculation steps and on the tokens drafted up to and including that
one, and the token stays in the chain. Then both `rejection` and `block` give p exactly (see
tests/decoding/test_length_laws.py).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from specdec.errors import require, require_between
from specdec.files import read_record, write_whole
from specdec.integrity import sealed
from specdec.sampling.trees import DEEPEST

T = TypeVar("T")


@dataclass
class Length:
    """How many tokens a speculation step drafts: by default always `limit`, the maximum for every
    policy. The fields of a policy are its settings. Rows keep their order during a step."""

    limit: int = 8

    reads_q: ClassVar[bool] = False  # whether `stop` is called (q is at T = 1 if drafts are greedy)
    measured: ClassVar[str] = ""  # the setting that is measured if it is not given; "": none

    def __post_init__(self) -> None:
        require_between("decode.draft_length_settings.limit", self.limit, 0, DEEPEST)
        require_between(
            "decode.draft_length_settings.threshold", getattr(self, "threshold", None), 0, 1
        )

    @classmethod
    def learn(cls, trials: "Trials", gamma: int) -> "tuple[dict[str, Any], SavedFigures | None]":
        """Measure what the setting `measured` lacks, for at most γ tokens: further settings, and
        the figures for `use`. Called for policies that name such a setting."""
        return {}, None

    def use(self, figures: Any = None) -> None:
        """Use measured figures, or else those in the settings; UserError if some are missing."""

    def gamma(self, batch: int) -> int:
        """The most tokens to draft in the coming speculation step of `batch` rows; 0 is a plain
        step."""
        return self.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        """Which rows stop drafting [B] bool, after `token_B` (indices into S) were drawn from q at
        `depth` with this confidence; also called after the last token, for policies that learn. For
        a row that has stopped, the inputs are arbitrary and the answer is ignored."""
        return torch.zeros_like(token_B, dtype=torch.bool)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take the outcome of a speculation step: tokens drafted and accepted, one entry for each
        row."""


class Trials(Protocol):
    """Measurements that a policy may ask for before decoding (`specdec.measure.choosing`)."""

    def step_costs(self) -> tuple[float, float]:
        """c, the time of a draft step, and v, that of a target pass over γ + 1 tokens, both in
        steps of vanilla decoding."""

    def cost_table(self) -> "SavedFigures":
        """The times of whole speculation steps, by batch and γ."""

    def decode_then(self, policy: Length, outcome: Callable[[], T]) -> T:
        """`outcome()` after some prompts were decoded with chains that `policy` shortens."""


class SavedFigures(ABC):
    """A dataclass that is measured once and kept in a JSON file, which a setting names."""

    setting: ClassVar[str]
    remedy: ClassVar[str]  # how to get the file
    stem: ClassVar[str]  # of the file's name in the folder of a report

    @abstractmethod
    def summary(self, where: str) -> str:
        """A sentence for the report; `where` says at which temperature and on which prompts."""

    def document(self) -> str:
        """The contents of the file."""
        return json.dumps(sealed(asdict(self)), indent=1)  # type: ignore[call-overload]

    def save(self, path: Path) -> None:
        write_whole(path, self.document())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file. Raises UserError if no file is named, or if it is missing or damaged."""
        require(
            bool(path),
            f"decode.draft_length_settings.{cls.setting} is missing: name a file ({cls.remedy})",
        )
        return read_record(cls, Path(path), cls.remedy)
