"""The interface of draft-length policies (length.py, disco.py), and code that they share.

A policy is lossless if the length is a *stopping time* of the draft: whether a chain ends after its
i-th token may depend on past rounds and on the tokens drafted up to and including that one, and the
token stays in the chain. Then both `rejection` and `block` give p exactly (see
tests/decoding/test_length_laws.py).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specdec.errors import require, require_between
from specdec.files import read_record, write_json
from specdec.sampling.trees import DEEPEST


@dataclass
class Length:
    """How many tokens a round drafts: by default always `limit`, the maximum for every policy.
    The fields of a policy are its settings. Rows keep their order during a round."""

    limit: int = 8

    reads_q: ClassVar[bool] = False  # whether `stop` is called (q is at T = 1 if drafts are greedy)
    measured: ClassVar[str] = ""  # the setting that is measured if it is not given; "": none

    def __post_init__(self) -> None:
        require_between("length.limit", self.limit, 0, DEEPEST)
        require_between("length.threshold", getattr(self, "threshold", None), 0, 1)

    def use(self, figures: Any = None) -> None:
        """Use measured figures, or else those in the settings; UserError if some are missing."""

    def gamma(self, batch: int) -> int:
        """The most tokens to draft in the coming round of `batch` rows; 0 is a plain step."""
        return self.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        """Which rows stop drafting [B] bool, after `token_B` (indices into S) were drawn from q at
        `depth` with this confidence; also called after the last token, for policies that learn. For
        a row that has stopped, the inputs are arbitrary and the answer is ignored."""
        return torch.zeros_like(token_B, dtype=torch.bool)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take the outcome of a round: tokens drafted and accepted, one entry for each row."""


class Measured:
    """A dataclass that is measured once and kept in a JSON file, which a setting names."""

    setting: ClassVar[str]
    remedy: ClassVar[str]  # how to get the file

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))  # type: ignore[call-overload]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file. Raises UserError if no file is named, or if it is missing or damaged."""
        require(bool(path), f"length.{cls.setting} is missing: name a file ({cls.remedy})")
        return read_record(cls, Path(path), cls.remedy)
