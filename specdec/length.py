"""How many tokens to draft in a round: fixed, fitted to acceptance and cost, or stopped early.

The decoder asks `gamma` before a round, `stop` after each drafted token, and tells `observe`
what came of it. Which lengths are lossless: the length must be a *stopping time* of the draft.
Whether a chain ends after its i-th token may depend on past rounds and on what was drafted up
to and including that token, and the token stays in the chain. A length that looks at a token
and then leaves it out, or that looks past it, changes what is committed, whatever it looks at:
q or p. Under that rule both `rejection` and `block` give p exactly (tests/test_length.py).

Letters: B rows of the batch, S draft vocabulary, K depths, F features, N records.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specdec.errors import UserError, nearest, require
from specdec.theory import PassCost, line, pass_cost, tokens_by_gamma, walltime_by_gamma

T = TypeVar("T")


class Length(Protocol):
    """What the decoder calls, and nothing else.

    `reads_q`: `stop` reads q, so that the decoder computes it also where it drafts greedily, at
    temperature 1; where it does not, `stop` is never asked. Rows keep their order through a
    round; of a row that has stopped, what comes in is arbitrary and what goes out unused.
    """

    reads_q: bool

    def gamma(self, batch: int) -> int:
        """The most tokens to draft in the coming round of `batch` rows; 0 is a plain step."""
        ...

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        """Rows that draft no further [B] bool, after `token_B`, an index into S, was drawn at
        `depth` from q. The token stays in the chain. Not asked where the round ends anyway."""
        ...

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """After a round: tokens drafted and accepted, one entry a row."""
        ...


class Whole:
    """A length that is settled before the round: it never stops within one."""

    reads_q = False

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        return torch.zeros_like(token_B, dtype=torch.bool)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@dataclass
class FixedConfig:
    """`limit`: tokens drafted in every round (the paper's γ)."""

    limit: int = 4

    def __post_init__(self) -> None:
        _check_limit(self.limit)


class Fixed(Whole):
    """γ tokens in every round (Leviathan et al. 2023, Algorithm 1)."""

    Config = FixedConfig

    def __init__(self, config: FixedConfig) -> None:
        self.config = config

    def gamma(self, batch: int) -> int:
        return self.config.limit


# --- Lengths that follow measured acceptance and cost ----------------------------------------


@dataclass
class AdaptiveConfig:
    """How acceptance by depth is estimated.

    `limit`: the most to draft. `alpha`: acceptance by depth to start from, as measured or
    guessed, worth `weight` tested tokens; a depth beyond the list starts from what is known of
    the one before it. `forget`: what earlier rounds count for, each round anew; 1 forgets
    nothing. Every `explore_every`-th round drafts one token more than seems best, or a depth
    given up once would never be tried again; 0 never does.
    """

    limit: int = 8
    alpha: list[float] = field(default_factory=lambda: [0.6])
    weight: float = 10.0
    forget: float = 0.99
    explore_every: int = 50

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        require(bool(self.alpha), "length.alpha is empty: give at least one acceptance")
        for a in self.alpha:
            require(0 <= a <= 1, f"length.alpha holds {a}: an acceptance is between 0 and 1")
        require(self.weight > 0, f"length.weight={self.weight}: give more than 0")
        require(0 < self.forget <= 1, f"length.forget={self.forget}: give more than 0, at most 1")
        require(
            self.explore_every >= 0,
            f"length.explore_every={self.explore_every}: give 0 for never, or more",
        )


class AcceptanceByDepth:
    """α_k = P(token at depth k accepted | all before it were, and it was drafted), online.

    Counts with a prior: (weight · prior_k + accepted_k) / (weight + tested_k), each count
    `forget` times what it was before a round that tests depth k again.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        self.config = config
        self.tested = [0.0] * config.limit
        self.accepted = [0.0] * config.limit

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for k in range(self.config.limit):
            tested = sum(d > k and a >= k for d, a in zip(drafted, accepted, strict=True))
            if tested:
                kept = sum(a > k for a in accepted)
                self.tested[k] = self.config.forget * self.tested[k] + tested
                self.accepted[k] = self.config.forget * self.accepted[k] + kept

    def alpha(self) -> list[float]:
        """α by depth [K], K = limit."""
        prior, weight, found = self.config.alpha, self.config.weight, list[float]()
        for k, (tested, accepted) in enumerate(zip(self.tested, self.accepted)):
            start = prior[k] if k < len(prior) else (found[-1] if found else prior[-1])
            found.append((weight * start + accepted) / (weight + tested))
        return found


class Adaptive(Whole):
    """The γ of the highest rate that acceptance so far promises, and rarely one more.

    Explores by counting rounds, never by chance: the same rounds give the same lengths. It
    does not where even tokens that were all accepted would not pay.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        self.settings = config
        self.acceptance = AcceptanceByDepth(config)
        self.rounds = 0

    def rates(self, alpha: list[float], batch: int) -> list[float]:
        """Tokens over time by γ = 0 … limit, in whatever unit of time."""
        raise NotImplementedError

    def gamma(self, batch: int) -> int:
        self.rounds += 1
        alpha = self.acceptance.alpha()
        rates = self.rates(alpha, batch)
        best = rates.index(max(rates))
        every = self.settings.explore_every
        if every == 0 or self.rounds % every or best == self.settings.limit:
            return best
        hoped = self.rates(alpha[:best] + [1.0] * (len(alpha) - best), batch)
        return best + (max(hoped[best + 1 :]) > rates[best])

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.acceptance.observe(drafted, accepted)


@dataclass
class OptimalConfig(AdaptiveConfig):
    """`c`: one draft step over one target step. `v`: by γ, a pass over γ + 1 tokens over one
    step; straight lines between the points given, and from (0, 1); none given means 1."""

    c: float | None = None
    v: dict[int, float] = field(default_factory=dict)


class Optimal(Adaptive):
    """The γ of the largest τ / (γc + v(γ)): Theorem 3.8 (Leviathan et al. 2023, Section 3.5)
    with acceptance by depth and a pass that costs what it costs. The batch is not looked at:
    see `Goodput`. Raises UserError where c is not given."""

    Config = OptimalConfig

    def __init__(self, config: OptimalConfig) -> None:
        super().__init__(config)
        if config.c is None:
            raise UserError(
                "length.c is not given: it is a draft step over a target step in time, "
                "as an evaluation reports it under costs"
            )
        self.c, self.v = config.c, pass_cost(config.v)

    def rates(self, alpha: list[float], batch: int) -> list[float]:
        return walltime_by_gamma(alpha, self.c, self.settings.limit, self.v)


@dataclass
class CostTable:
    """Seconds of a whole round, drafting and verifying: `seconds[i][j]` at `batches[i]` rows
    and `gammas[j]` drafted tokens, both rising, gammas from 0, the plain step."""

    batches: list[int]
    gammas: list[int]
    seconds: list[list[float]]

    def __post_init__(self) -> None:
        for name in ("batches", "gammas"):
            found = getattr(self, name)
            rising = all(a < b for a, b in pairwise(found))
            require(bool(found) and rising, f"cost table: {name} {found} must rise")
        require(self.gammas[0] == 0, f"cost table: gammas {self.gammas} must start at 0")
        require(self.batches[0] >= 1, f"cost table: batches {self.batches} must start at 1 or more")
        require(
            [len(row) for row in self.seconds] == [len(self.gammas)] * len(self.batches),
            f"cost table: seconds must have {len(self.batches)} rows of {len(self.gammas)}",
        )
        for row in self.seconds:
            for cell in row:
                require(
                    isinstance(cell, int | float) and math.isfinite(cell) and cell > 0,
                    f"cost table: seconds hold {cell!r}; give finite times above 0",
                )

    def step(self, gamma: int, batch: int) -> float:
        """T_step(γ, batch) in seconds: bilinear; beyond the table its last slope, never falling."""
        by_batch = [line(self.gammas, row, gamma) for row in self.seconds]
        return line(self.batches, by_batch, batch)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "CostTable":
        """Raises UserError where the file is missing, damaged or not such a table."""
        return _load(cls, path, "cost table", "measure one and save it there")


@dataclass
class GoodputConfig(AdaptiveConfig):
    """`table`: JSON file of a `CostTable`, unless one is given in memory."""

    table: str = ""


class Goodput(Adaptive):
    """The γ of the largest E[tokens emitted] / T_step(γ, batch) (SmartSpec, Liu et al. 2024:
    goodput). Where the batch is large a wider pass costs more than its tokens bring: then 0.
    Raises UserError where there is no table, or it cannot be read."""

    Config = GoodputConfig

    def __init__(self, config: GoodputConfig, table: CostTable | None = None) -> None:
        super().__init__(config)
        if table is None:
            require(
                bool(config.table),
                "length.table is not given: goodput needs a measured cost table (JSON)",
            )
            table = CostTable.load(Path(config.table))
        self.table = table

    def rates(self, alpha: list[float], batch: int) -> list[float]:
        tokens = tokens_by_gamma(alpha, self.settings.limit)
        return [t / self.table.step(gamma, batch) for gamma, t in enumerate(tokens)]


# --- Lengths that stop within a round ---------------------------------------------------------


@dataclass
class ConfidenceConfig:
    """`limit`: the most to draft. `threshold`: stop after a token whose q is below it, or, if
    `cumulative`, where the product of q over the chain is."""

    limit: int = 8
    threshold: float = 0.4
    cumulative: bool = False

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        _check_threshold(self.threshold)


class Confidence(Whole):
    """Stops after a token that the draft itself thinks unlikely; that token is still verified."""

    Config = ConfidenceConfig
    reads_q = True

    def __init__(self, config: ConfidenceConfig) -> None:
        self.config = config
        self.q_B: Tensor | None = None

    def gamma(self, batch: int) -> int:
        return self.config.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        q_B = q_BS.gather(-1, token_B[:, None])[:, 0]
        if self.config.cumulative and depth > 0 and self.q_B is not None:
            q_B = q_B * self.q_B
        self.q_B = q_B
        return q_B < self.config.threshold


FEATURES = ("log_q", "entropy", "margin", "depth", "cumulative_log_q")


class Reader:
    """What the stop classifier reads of each drafted token [B, F], in the order of `FEATURES`.

    Of q at this depth: log q(token), entropy in nats, first less second probability; the depth;
    and Σ log q of the chain's tokens. log q is kept above log 1e-9.
    """

    total_B: Tensor

    def __call__(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        q_BS = q_BS.float()
        log_q_B = q_BS.gather(-1, token_B[:, None])[:, 0].clamp_min(1e-9).log()
        self.total_B = log_q_B if depth == 0 else self.total_B + log_q_B
        first_B2 = q_BS.topk(2).values
        return torch.stack(
            [
                log_q_B,
                torch.special.entr(q_BS).sum(-1),
                first_B2[:, 0] - first_B2[:, 1],
                torch.full_like(log_q_B, depth),
                self.total_B,
            ],
            -1,
        )


@dataclass(frozen=True)
class StopClassifier:
    """P(this token is accepted | all before it were), by logistic regression over `FEATURES`."""

    weight: list[float]
    bias: float
    mean: list[float]  # of the features it was fitted on
    scale: list[float]
    records: int
    features: list[str] = field(default_factory=lambda: list(FEATURES))

    def __post_init__(self) -> None:
        if self.features != list(FEATURES):
            raise UserError(f"stop classifier: its features {self.features} are not {FEATURES}")
        for name in ("weight", "mean", "scale"):
            values = getattr(self, name)
            require(
                isinstance(values, list) and len(values) == len(FEATURES),
                f"stop classifier: {name} must be {len(FEATURES)} numbers",
            )
        for value in [*self.weight, self.bias, *self.mean, *self.scale]:
            finite = isinstance(value, int | float) and math.isfinite(value)
            require(finite, f"stop classifier: {value!r} is not a finite number")
        require(min(self.scale) > 0, "stop classifier: a scale is not above 0")

    def probability(self, features_NF: Tensor) -> Tensor:
        """[N] in the dtype of the features."""
        mean_F, scale_F, weight_F = (
            features_NF.new_tensor(x) for x in (self.mean, self.scale, self.weight)
        )
        return (((features_NF - mean_F) / scale_F) @ weight_F + self.bias).sigmoid()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "StopClassifier":
        """Raises UserError where the file is missing, damaged or not such a classifier."""
        return _load(cls, path, "stop classifier", "fit one and save it there")


def fit(features_NF: Tensor, accepted_N: Tensor, ridge: float = 1.0) -> StopClassifier:
    """The classifier of the least Σ_N cross-entropy + ridge / 2 · ‖weight‖², over features made
    zero-mean and unit-variance; the bias is free. Convex: the answer does not depend on where
    it starts. Raises UserError where all or none of the N tokens were accepted."""
    kept, n = int(accepted_N.sum()), len(accepted_N)
    if not 0 < kept < n:
        raise UserError(
            f"stop classifier: {kept} of {n} recorded tokens were accepted, so there is no "
            "boundary to learn: record more rounds, or draft a fixed length"
        )
    with torch.inference_mode(False), torch.enable_grad():  # also from within decoding
        y_N, x_NF = accepted_N.double().cpu(), features_NF.double().cpu()
        mean_F, scale_F = x_NF.mean(0), x_NF.std(0, correction=0)
        scale_F = torch.where(scale_F > 1e-9, scale_F, 1.0)
        x_NF = (x_NF - mean_F) / scale_F
        weight_F = torch.zeros(x_NF.shape[1], dtype=torch.float64, requires_grad=True)
        bias = torch.tensor(math.log(kept / (n - kept)), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [weight_F, bias],
            max_iter=500,
            tolerance_grad=1e-10,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            misfit = binary_cross_entropy_with_logits(x_NF @ weight_F + bias, y_N, reduction="sum")
            total = (misfit + ridge / 2 * weight_F.square().sum()) / n
            total.backward()
            return total

        optimizer.step(loss)
    return StopClassifier(
        weight_F.tolist(), bias.item(), mean_F.tolist(), scale_F.tolist(), records=n
    )


class Recorder(Whole):
    """Drafts a fixed length and keeps what `fit` needs: decode with it before `Disco`.

    A drafted token is a record if all before it were accepted: what became of the others says
    nothing of them. The token at the last depth is none, since `stop` is not asked there.
    """

    reads_q = True

    def __init__(self, limit: int) -> None:
        _check_limit(limit)
        self.limit = limit
        self.read = Reader()
        self._round: list[Tensor] = []
        self._features: list[Tensor] = []
        self._accepted: list[bool] = []

    def gamma(self, batch: int) -> int:
        self._round = []
        return self.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        self._round.append(self.read(depth, q_BS, token_B))
        return super().stop(depth, q_BS, token_B)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for k, features_BF in enumerate(x.cpu() for x in self._round):
            for b, (d, a) in enumerate(zip(drafted, accepted, strict=True)):
                if d > k and a >= k:
                    self._features.append(features_BF[b])
                    self._accepted.append(a > k)
        self._round = []

    def records(self) -> tuple[Tensor, Tensor]:
        """Features [N, F] and whether the token was accepted [N]. Raises UserError for none."""
        require(bool(self._features), "nothing was recorded: decode with the recorder first")
        return torch.stack(self._features), torch.tensor(self._accepted)


@dataclass
class DiscoConfig:
    """`limit`: the most to draft. `threshold`: stop after a token whose acceptance is less
    probable. `path`: JSON file of a `StopClassifier`, unless one is given in memory."""

    limit: int = 16
    threshold: float = 0.5
    path: str = ""

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        _check_threshold(self.threshold)


class Disco(Whole):
    """Stops where a classifier thinks that the token just drafted will not be accepted (DISCO,
    Mamou et al. 2024). Raises UserError where there is no classifier, or it cannot be read."""

    Config = DiscoConfig
    reads_q = True

    def __init__(self, config: DiscoConfig, classifier: StopClassifier | None = None) -> None:
        if classifier is None:
            require(
                bool(config.path),
                "length.path is not given: disco needs a fitted stop classifier (JSON)",
            )
            classifier = StopClassifier.load(Path(config.path))
        self.config, self.classifier, self.read = config, classifier, Reader()

    def gamma(self, batch: int) -> int:
        return self.config.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        features_BF = self.read(depth, q_BS, token_B)
        return self.classifier.probability(features_BF) < self.config.threshold


# --- By name, and the bound -------------------------------------------------------------------

LENGTHS: dict[str, Any] = {
    "fixed": Fixed,
    "optimal": Optimal,
    "confidence": Confidence,
    "disco": Disco,
    "goodput": Goodput,
}


def length(name: str, settings: Mapping[str, Any] | None = None) -> Length:
    """The length of this name, its config made of `settings`. Raises UserError for an unknown
    name or setting, and as the length itself."""
    require(name in LENGTHS, f"length {name!r} is unknown{nearest(name, LENGTHS)}")
    kind, settings = LENGTHS[name], settings or {}
    known = [f.name for f in fields(kind.Config)]
    for key in settings:
        require(key in known, f"length.{key} is unknown to {name!r}{nearest(key, known)}")
    found: Length = kind(kind.Config(**settings))
    return found


class Oracle(NamedTuple):
    """What knowing where each first rejection falls gives, beside the best fixed γ."""

    tau: float
    time_per_token: float  # in target steps
    speedup: float
    fixed_gamma: int
    fixed_speedup: float
    gain: float  # speedup over fixed_speedup
    censored: float  # share of rounds accepted whole, whose rejection was not reached


def oracle(rounds: Iterable[tuple[int, int]], c: float, v: PassCost | None = None) -> Oracle:
    """A bound for reports, no policy: rounds (drafted, accepted) decoded with a long fixed γ,
    and what drafting just as far as is accepted would have cost.

    A round of n accepted tokens emits n + 1; the oracle emits them at the least cost, in one
    round of n drafted, or in several where a wide pass costs more than a second one. The fixed
    γ is the best for the same rounds. Both take acceptances to fall where they fell, and still
    run the target (Leviathan et al. 2023, Section 3.5 and footnote 4: up to about 60 % above a
    fixed γ). Censored rounds end where they were cut, which lowers the bound: draft longer.
    c and v as in `specdec.theory`. Raises UserError where there are no rounds.
    """
    found = list(rounds)
    require(bool(found), "the oracle has no rounds to look at: decode some first")
    longest = max(max(d, a) for d, a in found)
    cost = [1.0] + [g * c + (v(g) if v else 1.0) for g in range(1, longest + 1)]
    cheapest = [(0.0, 0)]  # (time, rounds) to emit m tokens all of which the draft would get
    for m in range(1, longest + 2):
        splits = [(cost[g], cheapest[m - g - 1]) for g in range(m)]
        cheapest.append(min((t + time, count + 1) for t, (time, count) in splits))
    tokens = sum(a + 1 for _, a in found)
    time = sum(cheapest[a + 1][0] for _, a in found)
    passes = sum(cheapest[a + 1][1] for _, a in found)
    fixed = [sum(a // (g + 1) + 1 for _, a in found) * cost[g] for g in range(longest + 1)]
    best = min(range(longest + 1), key=lambda g: (fixed[g], g))
    return Oracle(
        tau=tokens / passes,
        time_per_token=time / tokens,
        speedup=tokens / time,
        fixed_gamma=best,
        fixed_speedup=tokens / fixed[best],
        gain=fixed[best] / time,
        censored=sum(a >= d for d, a in found) / len(found),
    )


# --- Shared by the above ----------------------------------------------------------------------


def _load(kind: type[T], path: Path, what: str, remedy: str) -> T:
    """A dataclass from its JSON file; each fault is a UserError that names the file."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            raise TypeError
        return kind(**found)
    except FileNotFoundError:
        raise UserError(f"{path}: no {what} there; {remedy}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the {what} cannot be read ({error}); {remedy}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None
    except TypeError:
        held = ", ".join(names)
        raise UserError(f"{path}: not a {what}, which holds {held}; {remedy}") from None


def _check_limit(limit: int) -> None:
    require(limit >= 0, f"length.limit={limit}: give 0 or more tokens to draft")


def _check_threshold(threshold: float) -> None:
    require(0 <= threshold <= 1, f"length.threshold={threshold}: give a probability, 0 to 1")
