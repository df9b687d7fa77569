"""The number of tokens to draft in a speculation step: fixed, fitted to acceptance and cost, or
stopped early by confidence.

A policy is lossless if the length is a *stopping time* of the draft. Whether a chain ends after its
i-th token may depend on past speculation steps and on the tokens drafted up to and including the
i-th, and the i-th token stays in the chain. Then both `rejection` and `block` give p exactly (see
tests/decoding/test_length_laws.py).
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from specdec.errors import require, require_between
from specdec.files import read_record, record, write_whole
from specdec.integrity import sealed
from specdec.plugins import Plugins
from specdec.sampling.trees import DEEPEST
from specdec.theory import leviathan

T = TypeVar("T")


@dataclass
class Length:
    """A policy for the number of tokens in a speculation step: by default always `limit`, the
    maximum of every policy. The fields of a policy are its settings. Rows keep their order during a
    step."""

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
        """Measure the figures that the setting `measured` lacks, for at most γ tokens. Returns
        further settings, and the figures for `use`. Called for policies with such a setting."""
        return {}, None

    def use(self, figures: Any = None) -> None:
        """Take measured figures or, without them, those in the settings. Raises UserError if some
        are missing."""

    def gamma(self, batch: int) -> int:
        """The maximum number of tokens to draft in the next speculation step of `batch` rows; 0 is
        a vanilla step."""
        return self.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        """A mask [B] of the rows that stop drafting, after `token_B` (indices into S) were drawn
        from q at `depth` with this confidence. It is also called after the last token, for policies
        that learn. For stopped rows, inputs are arbitrary and the result is ignored."""
        return torch.zeros_like(token_B, dtype=torch.bool)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record the outcome of a speculation step: the numbers of drafted and accepted tokens, one
        entry for each row."""


class Trials(Protocol):
    """Measurements that a policy may request before decoding (`specdec.measure.choosing`)."""

    def step_costs(self) -> tuple[float, float]:
        """c, the time of a draft step, and v, the time of a verification pass over γ + 1 tokens,
        both in vanilla steps."""

    def cost_table(self) -> "SavedFigures":
        """The times of complete speculation steps, by batch size and γ."""

    def decode_then(self, policy: Length, outcome: Callable[[], T]) -> T:
        """Decode some prompts with chains that `policy` shortens, then return `outcome()`."""


class SavedFigures(ABC):
    """Figures that are measured once and kept in a JSON file; a setting names the file."""

    setting: ClassVar[str]
    remedy: ClassVar[str]  # how to get the file
    stem: ClassVar[str]  # stem of the file's name in the folder of a report

    @abstractmethod
    def summary(self, where: str) -> str:
        """A sentence for the report; `where` names the temperature and the prompts."""

    def document(self) -> str:
        """The file's contents as text."""
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


@dataclass
class Fixed(Length):
    """γ = `limit` tokens in every speculation step (Leviathan et al. 2023, Algorithm 1)."""

    limit: int = 4


@dataclass
class Adaptive(Length, ABC):
    """Drafts the γ with the most tokens per unit of time at the acceptance so far, and sometimes
    one token more.

    `alpha` is the initial acceptance by depth, with the weight of `weight` tested tokens; a depth
    beyond the list starts from the estimate of the depth before it. Each speculation step that
    tests a depth multiplies its earlier counts by `forget`. Every `explore_every`-th step (0:
    never) drafts one token more than seems best: otherwise an abandoned depth would never be tested
    again. It does not if the longer draft could not pay even with all of its extra tokens accepted.
    """

    alpha: list[float] = field(default_factory=lambda: [0.6])
    weight: float = 10.0
    forget: float = 0.99
    explore_every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.alpha),
            "decode.draft_length_settings.alpha is empty: give at least one acceptance",
        )
        for a in self.alpha:
            require(
                0 <= a <= 1,
                f"decode.draft_length_settings.alpha holds {a}: an acceptance is between 0 and 1",
            )
        require(
            self.weight > 0, f"decode.draft_length_settings.weight={self.weight}: give more than 0"
        )
        require(
            0 < self.forget <= 1,
            f"decode.draft_length_settings.forget={self.forget}: give more than 0, at most 1",
        )
        require_between("decode.draft_length_settings.explore_every", self.explore_every, 0)
        self.tested, self.accepted = [0.0] * self.limit, [0.0] * self.limit
        self.steps = 0

    @abstractmethod
    def speed_by_gamma(self, alpha: list[float], batch: int) -> list[float]:
        """Tokens per unit of time for γ = 0 … limit, in an arbitrary unit."""

    def gamma(self, batch: int) -> int:
        self.steps += 1
        alpha = self.by_depth()
        rates = self.speed_by_gamma(alpha, batch)
        best, every = rates.index(max(rates)), self.explore_every
        if every == 0 or self.steps % every or best == self.limit:
            return best
        hoped = self.speed_by_gamma(alpha[:best] + [1.0] * (len(alpha) - best), batch)
        return best + (max(hoped[best + 1 :]) > rates[best])

    def by_depth(self) -> list[float]:
        """The estimated acceptance by depth [K], K = limit: P(the token at depth k is accepted | it
        was drafted, and all tokens before it were accepted), estimated as (weight · prior +
        accepted) / (weight + tested)."""
        alpha: list[float] = []
        for k, (tested, accepted) in enumerate(zip(self.tested, self.accepted, strict=True)):
            start = self.alpha[k] if k < len(self.alpha) else alpha[-1]
            alpha.append((self.weight * start + accepted) / (self.weight + tested))
        return alpha

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for k in range(self.limit):
            tested = sum(d > k and a >= k for d, a in zip(drafted, accepted, strict=True))
            if tested:
                kept = sum(a > k for a in accepted)
                self.tested[k] = self.forget * self.tested[k] + tested
                self.accepted[k] = self.forget * self.accepted[k] + kept


@dataclass
class OptimalLength(Adaptive):
    """The γ with the largest τ / (γc + v(γ)): Theorem 3.8 (Leviathan et al. 2023, Section 3.5) with
    acceptance by depth and measured costs. It ignores the batch size. `c` is draft-step time /
    target-step time; `v` holds points of v(γ), the time of a verification pass over γ + 1 tokens in
    the same unit (see `leviathan.pass_cost`)."""

    c: float | None = None
    v: dict[int, float] = field(default_factory=dict)

    measured = "c"

    @classmethod
    def learn(cls, trials: Trials, gamma: int) -> tuple[dict[str, Any], None]:
        c, v = trials.step_costs()
        return {"c": c, "v": {gamma: v}}, None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pass_cost = leviathan.pass_cost(self.v)

    def use(self, figures: Any = None) -> None:
        require(
            self.c is not None,
            "decode.draft_length_settings.c is missing: give the time of a draft step divided by "
            "that of a target step, which an evaluation reports under costs",
        )

    def speed_by_gamma(self, alpha: list[float], batch: int) -> list[float]:
        assert self.c is not None
        return leviathan.walltime_by_gamma(alpha, self.c, self.limit, self.pass_cost)


@dataclass
class CostTable(SavedFigures):
    """The time of a complete speculation step, drafting and verifying: `seconds[i][j]` for
    `batches[i]` rows and `gammas[j]` drafted tokens. Both lists rise; the first γ is 0, the vanilla
    step."""

    batches: list[int]
    gammas: list[int]
    seconds: list[list[float]]

    setting, remedy = "table", "measure a cost table and save it there"
    stem = "cost-table"

    def summary(self, where: str) -> str:
        return f"Speculation steps were timed {where}."

    def __post_init__(self) -> None:
        for name in ("batches", "gammas"):
            sizes = getattr(self, name)
            rising = all(a < b for a, b in pairwise(sizes))
            require(bool(sizes) and rising, f"cost table: {name} {sizes} must be numbers that rise")
        require(self.gammas[0] == 0, f"cost table: gammas {self.gammas} must start at 0")
        require(self.batches[0] >= 1, f"cost table: batches {self.batches} must start at 1 or more")
        require(
            [len(row) for row in self.seconds] == [len(self.gammas)] * len(self.batches),
            f"cost table: seconds must have {len(self.batches)} rows of {len(self.gammas)}",
        )
        for cell in (cell for row in self.seconds for cell in row):
            timed = math.isfinite(cell) and cell > 0
            require(timed, f"cost table: {cell!r} in seconds is not a finite time above 0")

    def step(self, gamma: int, batch: int) -> float:
        """T_step(γ, batch) in seconds, by `leviathan.interpolate` over γ, then over the batch."""
        by_batch = [leviathan.interpolate(self.gammas, row, gamma) for row in self.seconds]
        return leviathan.interpolate(self.batches, by_batch, batch)


@dataclass
class Goodput(Adaptive):
    """The γ with the largest goodput, E[tokens emitted] / T_step(γ, batch) (SmartSpec, Liu et al.
    2024); 0 in batches where drafts do not pay. `table` is the JSON file of a `CostTable`."""

    table: str = ""

    measured = "table"

    @classmethod
    def learn(cls, trials: Trials, gamma: int) -> tuple[dict[str, Any], SavedFigures]:
        return {}, trials.cost_table()

    def use(self, figures: CostTable | None = None) -> None:
        self.costs = figures or CostTable.load(self.table)

    def speed_by_gamma(self, alpha: list[float], batch: int) -> list[float]:
        tokens = leviathan.tokens_by_gamma(alpha, self.limit)
        return [t / self.costs.step(gamma, batch) for gamma, t in enumerate(tokens)]


@dataclass
class Confidence(Length):
    """Stops after a token if its confidence (see specdec.sampling.confidence) is below `threshold`
    or, if `cumulative`, the product of the confidences along the chain is. That token is still
    verified."""

    threshold: float = 0.4
    cumulative: bool = False

    reads_q = True

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        if self.cumulative and depth > 0:
            confidence_B = confidence_B * self.chain_B
        self.chain_B: Tensor = confidence_B
        return self.chain_B < self.threshold


LENGTHS: Plugins[type[Length]] = Plugins(
    "draftsmith.draft_lengths",
    "decode.draft_length",
    {"fixed": Fixed, "optimal": OptimalLength, "confidence": Confidence, "goodput": Goodput},
)


def length(name: str, settings: Mapping[str, Any] | None = None, figures: Any = None) -> Length:
    """The policy with this name, these settings and the measured `figures`. Raises UserError for an
    unknown name or setting, or if a required figure is missing."""
    policy = record(LENGTHS.named(name), dict(settings or {}), "decode.draft_length_settings")
    policy.use(figures)
    return policy
