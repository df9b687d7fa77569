"""DISCO (Mamou et al. 2024): a classifier of drafted tokens decides when a speculation step stops
drafting.

Decode some prompts with a `Recorder`, `fit` a `StopClassifier` to the records, and give it to
`Disco`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specdec.decoding.draft_length import Length, SavedFigures, Trials
from specdec.errors import require
from specdec.theory.logistic import minimise

FEATURES = ("log_q", "entropy", "margin", "depth", "cumulative_log_q")


class TokenFeatures:
    """The stop classifier's features of each row's drafted token [B, F], in order of `FEATURES`:
    log q(token) (at least log 1e-9); q's entropy in nats; its largest probability minus the second;
    the depth; and Σ log q over the chain up to this token."""

    total_B: Tensor

    def __call__(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        q_BS = q_BS.float()
        log_q_B = q_BS.gather(-1, token_B[:, None])[:, 0].clamp_min(1e-9).log()
        self.total_B = log_q_B if depth == 0 else self.total_B + log_q_B
        entropy_B = torch.special.entr(q_BS).sum(-1)
        first_B, second_B = q_BS.topk(2).values.unbind(-1)
        depth_B = torch.full_like(log_q_B, depth)
        return torch.stack([log_q_B, entropy_B, first_B - second_B, depth_B, self.total_B], -1)


@dataclass(frozen=True)
class StopClassifier(SavedFigures):
    """P(this token is accepted | all before it were), by logistic regression over `FEATURES`."""

    weight: list[float]
    bias: float
    mean: list[float]  # means of the features in fitting
    scale: list[float]
    records: int
    features: list[str] = field(default_factory=lambda: list(FEATURES))

    setting, remedy = "path", "fit a stop classifier and save it there"
    stem = "stop-classifier"

    def summary(self, where: str) -> str:
        return f"The stop classifier was fitted {where}, to {self.records:,} drafted tokens."

    def __post_init__(self) -> None:
        alike = self.features == list(FEATURES)
        require(alike, f"stop classifier: its features {self.features} must be {FEATURES}")
        for name in ("weight", "mean", "scale"):
            known = len(getattr(self, name)) == len(FEATURES)
            require(known, f"stop classifier: {name} must be {len(FEATURES)} numbers")
        for value in [*self.weight, self.bias, *self.mean, *self.scale]:
            require(math.isfinite(value), f"stop classifier: {value!r} is not a finite number")
        require(min(self.scale) > 0, "stop classifier: a scale is not above 0")

    def probability(self, features_NF: Tensor) -> Tensor:
        """Probabilities of acceptance [N], in the dtype of the features."""
        kept = (self.mean, self.scale, self.weight)
        mean_F, scale_F, weight_F = map(features_NF.new_tensor, kept)
        return (((features_NF - mean_F) / scale_F) @ weight_F + self.bias).sigmoid()


def fit(features_NF: Tensor, accepted_N: Tensor, ridge: float = 1.0) -> StopClassifier:
    """The classifier that minimises Σ_N cross-entropy + ridge / 2 · ‖weight‖² over features scaled
    to mean 0 and variance 1. Raises UserError if all or none of the N tokens were accepted."""
    kept, n = int(accepted_N.sum()), len(accepted_N)
    require(
        0 < kept < n,
        f"stop classifier: {kept} of {n} recorded tokens were accepted, so there is no boundary to "
        "learn: record more speculation steps, or draft a fixed length",
    )
    with torch.inference_mode(False), torch.enable_grad():  # even when called during decoding
        y_N, x_NF = accepted_N.double().cpu(), features_NF.double().cpu()
        mean_F, scale_F = x_NF.mean(0), x_NF.std(0, correction=0)
        scale_F = torch.where(scale_F > 1e-9, scale_F, 1.0)
        x_NF = (x_NF - mean_F) / scale_F
        weight_F = torch.zeros(x_NF.shape[1], dtype=torch.float64, requires_grad=True)
        bias = torch.tensor(math.log(kept / (n - kept)), dtype=torch.float64, requires_grad=True)

        def loss() -> Tensor:
            misfit = binary_cross_entropy_with_logits(x_NF @ weight_F + bias, y_N, reduction="sum")
            return (misfit + ridge / 2 * weight_F.square().sum()) / n

        minimise(loss, weight_F, bias)
    return StopClassifier(weight_F.tolist(), bias.item(), mean_F.tolist(), scale_F.tolist(), n)


@dataclass
class Recorder(Length):
    """Drafts a fixed length and records, for `fit`, the tokens whose predecessors were all
    accepted: tokens after a rejected one are rejected with it."""

    reads_q = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.features = TokenFeatures()
        self._step: list[Tensor] = []  # features [B, F] of each depth
        self._records: list[tuple[Tensor, bool]] = []

    def gamma(self, batch: int) -> int:
        self._step = []
        return super().gamma(batch)

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        self._step.append(self.features(depth, q_BS, token_B))
        return super().stop(depth, q_BS, token_B, confidence_B)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for k, features_BF in enumerate(x.cpu() for x in self._step):
            for features_F, d, a in zip(features_BF, drafted, accepted, strict=True):
                if d > k and a >= k:
                    self._records.append((features_F, a > k))

    def records(self) -> tuple[Tensor, Tensor]:
        """Features [N, F] and whether each token was accepted [N]. Raises UserError if there are
        none."""
        require(bool(self._records), "nothing was recorded: decode with the recorder first")
        features, accepted = zip(*self._records, strict=True)
        return torch.stack(features), torch.tensor(accepted)


@dataclass
class Disco(Length):
    """Stops when the classifier's probability of acceptance for the last drafted token is below
    `threshold` (DISCO, Mamou et al. 2024). `path` is the JSON file of a `StopClassifier`."""

    limit: int = 16
    threshold: float = 0.5
    path: str = ""

    reads_q, measured = True, "path"

    @classmethod
    def learn(cls, trials: Trials, gamma: int) -> tuple[dict[str, Any], StopClassifier]:
        recorder = Recorder(gamma)
        return {}, trials.decode_then(recorder, lambda: fit(*recorder.records()))

    def use(self, figures: StopClassifier | None = None) -> None:
        self.classifier, self.features = figures or StopClassifier.load(self.path), TokenFeatures()

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        features_BF = self.features(depth, q_BS, token_B)
        return self.classifier.probability(features_BF) < self.threshold
