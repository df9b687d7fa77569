"""What speculation should gain: the closed forms of Leviathan et al. 2023, in its numbering.

α is one number (the paper's i.i.d. assumption, Section 3.1) or one a depth: α_k, the
probability that the token at depth k is accepted given that all before it were. Times are in
target steps: c is one draft step over one target step (Definition 3.7), and v a pass over
γ + 1 tokens over a pass over one, which the paper takes as 1 (Section 3.3, "enough compute").
All assume long answers: prefill and the cut at the end are not in them.

Letters: N positions, V vocabulary; γ (`gamma`) drafted tokens a round.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from specdec.errors import require

Alpha = float | Sequence[float]
PassCost = Callable[[int], float]  # v by γ: a pass over γ + 1 tokens, in target steps


def divergence(p_NS: Tensor, q_NS: Tensor) -> Tensor:
    """D_LK(p, q) = Σ_x |p(x) - (p(x) + q(x)) / 2| [N], in 0 … 1 (Definition 3.2).

    It is total variation, and 1 - Σ_x min(p, q) (Lemma 3.3), so that β = 1 - D_LK (Theorem 3.5)
    and α = 1 - E[D_LK] (Corollary 3.6); β itself is `alpha.overlap`. Both may be given over a
    draft vocabulary alone, p normalised over the whole one: what p has outside it, q has not. A
    row of q without mass, where nothing is drafted, is 1 from p.
    """
    missing_N = (2 - p_NS.sum(-1) - q_NS.sum(-1)).clamp_min(0)
    return ((p_NS - q_NS).abs().sum(-1) + missing_N) / 2


def tokens_by_gamma(alpha: Alpha, limit: int) -> list[float]:
    """E[tokens per target pass] for γ = 0 … limit: 1 + Σ_{k<γ} Π_{j<=k} α_j.

    With one α for all depths it is 1 + α + … + α^γ = (1 - α^{γ+1}) / (1 - α) (Equation 1),
    summed, which is exact also where α is 1 or near it. Raises UserError for an α outside
    0 … 1, a negative limit, or fewer α than depths.
    """
    require(limit >= 0, f"gamma={limit}: give 0 or more")
    by_depth = [float(alpha)] * limit if isinstance(alpha, int | float) else list(alpha)[:limit]
    require(
        len(by_depth) == limit, f"gamma={limit} needs {limit} alpha by depth, not {len(by_depth)}"
    )
    for k, a in enumerate(by_depth):
        require(0 <= a <= 1, f"alpha={a} at depth {k}: a probability is between 0 and 1")
    return list(accumulate(accumulate(by_depth, mul), initial=1.0))


def expected_tokens(alpha: Alpha, gamma: int) -> float:
    """E[tokens per target pass], the bonus token included: τ as foreseen (Equation 1).

    Raises as `tokens_by_gamma`. By depth over many positions at once: `alpha.expected_tokens`.
    """
    return tokens_by_gamma(alpha, gamma)[-1]


def memory_factor(alpha: Alpha, gamma: int) -> float:
    """By how much reads of the target's weights and KV cache shrink: Equation 1 (Section 3.4).

    They are read once a pass, whatever its width; the draft's own reads are not counted.
    """
    return expected_tokens(alpha, gamma)


def walltime_factor(alpha: Alpha, gamma: int, c: float, v: float = 1.0) -> float:
    """Expected speedup over plain decoding: E[tokens] / (γc + v).

    With v = 1 it is (1 - α^{γ+1}) / ((1 - α)(γc + 1)) (Theorem 3.8). c < 1 or not, it may be
    below 1: a slowdown. Raises UserError for c < 0 or v <= 0, and as `tokens_by_gamma`.
    """
    _check_costs(c, v)
    return expected_tokens(alpha, gamma) / (gamma * c + v)


def round_cost(gamma: int, c: float, v: float, share: float = 1.0) -> float:
    """Plain steps that a round costs: γc + v; where rounds draft only a `share` of γ on average,
    so much of the way from a plain step to there."""
    return share * (gamma * c + v - 1) + 1


def guaranteed_factor(alpha: float, c: float) -> float:
    """What the best γ gains at least: (1 + α) / (1 + c) where α > c, else 1 (Corollary 3.9).

    It is Theorem 3.8 at γ = 1, and where α <= c no γ helps at v = 1: γ = 0 gives 1.
    """
    _check_costs(c)
    return walltime_factor(alpha, 1, c) if alpha > c else 1.0


def operations_factor(alpha: Alpha, gamma: int, c_hat: float) -> float:
    """Expected growth of arithmetic operations: (γĉ + γ + 1) / E[tokens] (Theorem 3.11).

    With one α, (1 - α)(γĉ + γ + 1) / (1 - α^{γ+1}). ĉ is the draft's operations a token over
    the target's (Definition 3.10). Operations at once grow by γ + 1 (Section 3.4).
    """
    require(c_hat >= 0, f"c_hat={c_hat}: a ratio of operations is 0 or more")
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def walltime_by_gamma(alpha: Alpha, c: float, limit: int, v: PassCost | None = None) -> list[float]:
    """`walltime_factor` for γ = 0 … limit, v by γ (None: 1 for every γ). γ = 0 is the plain
    step, 1 whatever v says of it. Raises as `walltime_factor`."""
    factors = [1.0]
    for gamma, tokens in enumerate(tokens_by_gamma(alpha, limit)[1:], start=1):
        pass_cost = v(gamma) if v else 1.0
        _check_costs(c, pass_cost)
        factors.append(tokens / (gamma * c + pass_cost))
    return factors


def best_gamma(alpha: Alpha, c: float, limit: int, v: PassCost | None = None) -> int:
    """The γ in 0 … limit of the largest `walltime_factor` (Section 3.5, found by trying).

    0, whose factor is 1, where none gains; the smallest of equals. Raises as it does.
    """
    factors = walltime_by_gamma(alpha, c, limit, v)
    return factors.index(max(factors))


def pass_cost(points: Mapping[int, float]) -> PassCost:
    """v by γ from measured points: v(0) = 1, and `interpolate` through the points and that.

    No points: 1 everywhere. Raises UserError for a cost of 0 or less, or a negative γ.
    """
    for gamma, v in points.items():
        require(gamma >= 0 and v > 0, f"v at gamma {gamma} is {v}: give v > 0 for gamma >= 0")
    known = sorted(({0: 1.0} | dict(points)).items())
    xs, ys = [x for x, _ in known], [y for _, y in known]
    return lambda gamma: interpolate(xs, ys, gamma)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Straight lines through points of rising x: flat before the first; past the last, the last
    slope, but never falling."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    if x > xs[-1]:
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    return ys[i - 1] + slope * (x - xs[i - 1])


def oracle_factor(alpha: float, c: float) -> float:
    """Speedup where each round drafts just what will be accepted: 1 / (1 - α + αc).

    Then E[tokens] = 1 / (1 - α) (Section 3.5) after α / (1 - α) draft steps and one pass of
    the target, which still runs to verify (footnote 4), at v = 1. The paper's remark: up to
    about 60 % above the best fixed γ for typical c and α. Infinite where α = 1 and c = 0.
    """
    expected_tokens(alpha, 1)
    _check_costs(c)
    cost = 1 - alpha + alpha * c
    return 1 / cost if cost else float("inf")


def lenient_alpha(p_NV: Tensor, q_NV: Tensor, lenience: float) -> Tensor:
    """α_l = Σ_x min(p(x) / l, q(x)) [N]: acceptance where q is multiplied by l in 0 … 1 before
    it is compared with p (Appendix A.5). Lossy for l < 1: no token becomes likelier than
    p(x) / l, but some may become rarer without bound. l = 1 is β. Raises UserError for an l
    outside (0, 1].
    """
    require(0 < lenience <= 1, f"lenience={lenience}: give more than 0 and at most 1")
    return torch.minimum(p_NV / lenience, q_NV).sum(-1)


def beam_passes(width: int, draft_width: int, gamma: int) -> int:
    """Positions that the target judges when γ steps of a draft's beam of u are checked for a
    beam of w <= u: w + uγ (Appendix A.4). A step's guesses hold while top_w of the target is
    within top_u of the draft; the paper gives no closed form for how often.
    """
    require(
        1 <= width <= draft_width,
        f"beam widths {width} (target) and {draft_width} (draft): the draft's must be as wide",
    )
    return width + draft_width * gamma


def _check_costs(c: float, v: float = 1.0) -> None:
    require(c >= 0, f"c={c}: a draft step over a target step is 0 or more")
    require(v > 0, f"v={v}: a verification pass over a target step is more than 0")
