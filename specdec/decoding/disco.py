"""DISCO (Mamou et al. 2024): a classifier of drafted tokens decides when a round stops drafting.

Decode some prompts with a `Recorder`, with the sampler that the classifier is for; `fit` a
`StopClassifier` to what was accepted; and give it to `Disco`, which is `decode.length=disco`.

Letters: B rows of the batch, S draft vocabulary, F features, N records.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specdec.decoding.policy import Length, check_limit, check_threshold
from specdec.errors import UserError, require
from specdec.files import read_record

FEATURES = ("log_q", "entropy", "margin", "depth", "cumulative_log_q")


class TokenFeatures:
    """What the stop classifier knows of each drafted token [B, F], in the order of `FEATURES`.

    From q at this depth come log q(token), the entropy in nats, and the first less the second
    probability; then the depth, and Σ log q of the chain so far. log q is at least log 1e-9.
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
                len(values) == len(FEATURES),
                f"stop classifier: {name} must be {len(FEATURES)} numbers",
            )
        for value in [*self.weight, self.bias, *self.mean, *self.scale]:
            require(math.isfinite(value), f"stop classifier: {value!r} is not a finite number")
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
        return read_record(cls, path, "fit a stop classifier and save it there")


def fit(features_NF: Tensor, accepted_N: Tensor, ridge: float = 1.0) -> StopClassifier:
    """The classifier that minimises Σ_N cross-entropy + ridge / 2 · ‖weight‖² over features scaled
    to mean 0 and variance 1; the bias is not penalised. The problem is convex, so the result does
    not depend on where the search starts. Raises UserError where all or none of the N tokens were
    accepted."""
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


class Recorder(Length):
    """Drafts a fixed length and records what `fit` needs.

    Only tokens before which all were accepted are recorded: the others were rejected whatever
    they were.
    """

    reads_q = True

    def __init__(self, limit: int) -> None:
        check_limit(limit)
        self.limit = limit
        self.features = TokenFeatures()
        self._round: list[Tensor] = []
        self._features: list[Tensor] = []
        self._accepted: list[bool] = []

    def gamma(self, batch: int) -> int:
        self._round = []
        return self.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        self._round.append(self.features(depth, q_BS, token_B))
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
    """`limit` is the most to draft. A chain ends after a token whose probability of acceptance is
    below `threshold`. `path` is the JSON file of a `StopClassifier`; not needed where one is given
    in memory."""

    limit: int = 16
    threshold: float = 0.5
    path: str = ""

    def __post_init__(self) -> None:
        check_limit(self.limit)
        check_threshold(self.threshold)


class Disco(Length):
    """Stops where the classifier expects the token just drafted to be rejected (DISCO, Mamou et
    al. 2024). Raises UserError where there is no classifier, or it cannot be read."""

    Config = DiscoConfig
    reads_q = True

    def __init__(self, config: DiscoConfig, classifier: StopClassifier | None = None) -> None:
        if classifier is None:
            require(
                bool(config.path),
                "length.path is missing: disco needs the JSON file of a fitted stop classifier",
            )
            classifier = StopClassifier.load(Path(config.path))
        self.config, self.classifier, self.features = config, classifier, TokenFeatures()

    def gamma(self, batch: int) -> int:
        return self.config.limit

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor) -> Tensor:
        features_BF = self.features(depth, q_BS, token_B)
        return self.classifier.probability(features_BF) < self.config.threshold
