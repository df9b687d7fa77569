"""Expected tokens of a round by rejection and by block verification, read off the target's text.

Both rules judge a chain X₁ … X_γ drawn from q. With r_i = p(X_i) / q(X_i) the probability that at
least i tokens are accepted is, given X,

    rejection   Π_{l<=i} min(1, r_l)                    (Leviathan et al. 2023, Algorithm 1)
    block       p_i = min(1, p_{i-1} r_i), p_0 = 1      (Sun et al. 2024, Algorithm 2)

and p_i = min over 0 <= j <= i of r_{j+1} … r_i. Its mean over X ~ q is a mean over text X ~ p of
the same times Π q / p, which with s_l = q(X_l) / p(X_l) becomes

    rejection   Π_{l<=i} min(1, s_l)            block   min over 0 <= j <= i of s_1 … s_j

so that text which the target wrote itself gives both, without drawing any draft; and each term
lies between 0 and 1. Both need s along the text only, where α needs Σ min(p, q).

Letters: N anchors, K depths.
"""

import torch
from torch import Tensor


def rejection_expected_tokens(ratio_NK: Tensor) -> Tensor:
    """E[tokens of a round] [N], the bonus token included, by rule rejection and a chain of K.

    `ratio_NK` is q(x) / p(x) at the text's own token x of each depth, given the text before it.
    """
    return 1 + ratio_NK.clamp_max(1).cumprod(-1).sum(-1)


def block_expected_tokens(ratio_NK: Tensor) -> Tensor:
    """E[tokens of a round] [N] by rule block; as `rejection_expected_tokens`, and never less."""
    products = ratio_NK.cumprod(-1)
    return 1 + torch.cummin(products.clamp_max(1), -1).values.sum(-1)
