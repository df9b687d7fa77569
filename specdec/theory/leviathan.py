"""The expected gain from speculation: the closed forms of Leviathan et al. 2023, by its numbering.

α is one number (the paper's i.i.d. assumption, Section 3.1) or one per depth: α_k, the probability
that the token at depth k is accepted given that all before it were. Times are in target steps: c is
one draft step (Definition 3.7), and v a pass over γ + 1 tokens, which the paper takes as 1 (Section
3.3, "enough compute"). No form includes prefill or the cut at the end of a response. Impossible
values (an α outside 0 … 1, a negative γ or c, v <= 0, fewer α than depths) raise UserError. γ
(`gamma`) is the number of drafted tokens per speculation step.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from specdec.errors import require
from specdec.theory.alpha import overlap

Alpha = float | Sequence[float]
PassCost = Callable[[int], float]  # v by γ: a pass over γ + 1 tokens, in target steps


def lk_divergence(p_NS: Tensor, q_NS: Tensor) -> Tensor:
    """D_LK(p, q) = Σ_x |p(x) - (p(x) + q(x)) / 2| [N] (Definition 3.2), which is 1 - Σ_x min(p, q)
    (Lemma 3.3), so that β = 1 - D_LK (Theorem 3.5) and α = 1 - E[D_LK] (Corollary 3.6). p stays
    normalised over the whole vocabulary. A row of q without mass has D_LK = 1."""
    missing_N = (2 - p_NS.sum(-1) - q_NS.sum(-1)).clamp_min(0)
    return ((p_NS - q_NS).abs().sum(-1) + missing_N) / 2


def tokens_by_gamma(alpha: Alpha, limit: int) -> list[float]:
    """E[tokens per target pass] for γ = 0 … limit: 1 + Σ_{k<γ} Π_{j<=k} α_j; with one α for all
    depths, (1 - α^{γ+1}) / (1 - α) (Equation 1). The sum is exact for α at or near 1."""
    require(limit >= 0, f"gamma={limit}: give 0 or more")
    by_depth = [float(alpha)] * limit if isinstance(alpha, int | float) else list(alpha)[:limit]
    require(
        len(by_depth) == limit, f"gamma={limit} needs {limit} alphas by depth, not {len(by_depth)}"
    )
    for k, a in enumerate(by_depth):
        require(0 <= a <= 1, f"alpha={a} at depth {k}: a probability is between 0 and 1")
    return list(accumulate(accumulate(by_depth, mul), initial=1.0))


def expected_tokens(alpha: Alpha, gamma: int) -> float:
    """E[tokens per target pass], including the bonus token: the predicted τ (Equation 1), and the
    factor by which reads of the target's weights and KV cache shrink (Section 3.4)."""
    return tokens_by_gamma(alpha, gamma)[-1]


def walltime_factor(alpha: Alpha, gamma: int, c: float, v: float = 1.0) -> float:
    """Expected speedup over vanilla decoding: E[tokens] / (γc + v), which is Theorem 3.8 at v =
    1."""
    return expected_tokens(alpha, gamma) / _cost(gamma, c, v)


def step_cost(gamma: int, c: float, v: float, share: float = 1.0) -> float:
    """The cost of a speculation step in vanilla steps: γc + v. If steps draft only a `share` of γ
    on average, the cost is interpolated linearly between a vanilla step and a full speculation
    step."""
    return share * (gamma * c + v - 1) + 1


def guaranteed_factor(alpha: float, c: float) -> float:
    """The guaranteed speedup of the best γ: (1 + α) / (1 + c) if α > c, else 1 (Corollary 3.9)."""
    return max(1.0, walltime_factor(alpha, 1, c))


def step_operations(gamma: float, c_hat: float) -> float:
    """Arithmetic operations of a speculation step that drafts γ tokens, in units of a vanilla step:
    γĉ + γ + 1, where ĉ is the draft's operations per token divided by the target's (Definition
    3.10)."""
    require(c_hat >= 0, f"c_hat={c_hat}: a ratio of operations is 0 or more")
    return gamma * c_hat + gamma + 1


def operations_factor(alpha: Alpha, gamma: int, c_hat: float) -> float:
    """Expected growth of arithmetic operations: `step_operations` / E[tokens] (Theorem 3.11)."""
    return step_operations(gamma, c_hat) / expected_tokens(alpha, gamma)


def walltime_by_gamma(alpha: Alpha, c: float, limit: int, v: PassCost | None = None) -> list[float]:
    """`walltime_factor` for γ = 0 … limit, with v by γ (None: 1). The factor of γ = 0 is 1."""
    tokens = tokens_by_gamma(alpha, limit)
    costs = [_cost(gamma, c, v(gamma) if v else 1.0) for gamma in range(1, limit + 1)]
    return [1.0, *(t / cost for t, cost in zip(tokens[1:], costs, strict=True))]


def best_gamma(alpha: Alpha, c: float, limit: int, v: PassCost | None = None) -> int:
    """The γ in 0 … limit with the largest `walltime_factor` (Section 3.5), found by trying all. The
    smallest wins a tie, so the result is 0 if drafting gains nothing."""
    factors = walltime_by_gamma(alpha, c, limit, v)
    return factors.index(max(factors))


def pass_cost(points: Mapping[int, float]) -> PassCost:
    """v by γ: `interpolate` through v(0) = 1 and measured points; 1 everywhere without points."""
    for gamma, v in points.items():
        require(gamma >= 0 and v > 0, f"v at gamma {gamma} is {v}: give v > 0 for gamma >= 0")
    xs, ys = zip(*sorted(({0: 1.0} | dict(points)).items()), strict=True)
    return lambda gamma: interpolate(xs, ys, gamma)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation between points of rising x: flat before the first; after the last, the
    last slope, or flat if that is negative."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    if x > xs[-1]:
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    return ys[i - 1] + slope * (x - xs[i - 1])


def oracle_factor(alpha: float, c: float) -> float:
    """The speedup if each speculation step drafts exactly the tokens that will be accepted: 1 / (1
    - α + αc). The 1 / (1 - α) expected tokens of a step (Section 3.5) then cost α / (1 - α) draft
    steps and one forward pass of the target, which still verifies (footnote 4), at v = 1. Infinite
    if α = 1 and c = 0."""
    walltime_factor(alpha, 1, c)  # raises for an impossible α or c
    cost = 1 - alpha + alpha * c
    return 1 / cost if cost else float("inf")


def lenient_alpha(p_NV: Tensor, q_NV: Tensor, lenience: float) -> Tensor:
    """α_l = Σ_x min(p(x) / l, q(x)) [N]: acceptance if q is multiplied by l in 0 … 1 before it is
    compared with p (Appendix A.5). Lossy for l < 1: no token becomes likelier than p(x) / l, but
    some may become rarer without bound. l = 1 gives β."""
    require(0 < lenience <= 1, f"lenience={lenience}: give more than 0 and at most 1")
    return overlap(p_NV / lenience, q_NV)


def non_iterative_alpha(p_NS: Tensor, q_NS: Tensor) -> Tensor:
    """α of non-iterative rejection sampling [N], 1 / M = min_x q(x) / p(x) over the tokens with
    p(x) > 0 (Appendix A.2): x is accepted with p(x) / (M q(x)), and each x is drawn with q(x). At
    most β, and 0 if p has mass outside the draft vocabulary (1e-4 or more: less is rounding)."""
    ratio_NS = torch.where(p_NS > 0, q_NS / p_NS, torch.inf)
    whole_N = p_NS.sum(-1) > 1 - 1e-4
    return torch.where(whole_N, ratio_NS.amin(-1), 0.0).clamp_max(1)


def beam_passes(width: int, draft_width: int, gamma: int) -> int:
    """Positions that the target judges when γ steps of a draft's beam of u are checked for a
    beam of w <= u: w + uγ (Appendix A.4)."""
    require(
        1 <= width <= draft_width,
        f"beam widths {width} (target) and {draft_width} (draft): give 1 <= target <= draft",
    )
    return width + draft_width * gamma


def _cost(gamma: int, c: float, v: float) -> float:
    """γc + v."""
    require(c >= 0, f"c={c}: the cost of a draft step in target steps is 0 or more")
    require(v > 0, f"v={v}: the cost of a verification in target steps is more than 0")
    return gamma * c + v
