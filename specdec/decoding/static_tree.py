"""Choosing a static tree by the acceptance of each rank and the time that a round takes. Letters:
D depths, R ranks among siblings."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.decoding.decode import generate
from specdec.drafters.base import Drafter
from specdec.sampling.trees import Static, best_paths
from specdec.target.base import Target


def acceptance_by_rank(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    depth: int,
    width: int = 6,
    **options: Any,
) -> Tensor:
    """Acceptance by depth and rank [D, R]: the share of rounds that reached a node of the
    first-ranked chain and went on to its child of that rank, while decoding `prompts` with the
    `decode` options that the tree is for and `width` children after each node of that chain. Rank r
    is the r-th likeliest token if siblings are picked (greedy decoding, or `greedy_draft`), else
    the r-th token drawn."""
    paths = [(0,) * d + (rank,) for d in range(depth) for rank in range(width)]  # in node order
    options |= {"drafter": drafter, "shape": Static(paths), "max_new_tokens": max_new_tokens}
    taken, reached = torch.zeros(depth, width), torch.zeros(depth, 1)
    for prompt in prompts:
        for r in generate(target, prompt, **options).rounds:
            kept = paths[r.path[-1]] if r.path else ()
            for d in range(min(depth, len(kept) + 1)):
                if any(kept[:d]):
                    break
                reached[d] += 1
                if len(kept) > d:
                    taken[d, kept[d]] += 1
    return taken / reached.clamp_min(1)


def best_static(acceptance_DR: Tensor, nodes: int) -> Static:
    """The static tree of this many nodes with the largest expected accepted length (Sequoia, Chen
    et al. 2024; Medusa's own), from `acceptance_by_rank`."""
    falling_DR = acceptance_DR.clamp(1e-6, 1).cummin(-1).values
    return Static(best_paths(falling_DR.log().tolist(), nodes))


def expected_static(acceptance_DR: Tensor, paths: Sequence[Sequence[int]]) -> float:
    """Expected tokens of a round that drafts these paths, including the target's own token."""
    shares = (acceptance_DR[range(len(path)), list(path)].prod() for path in paths)
    return 1 + float(sum(shares))


def fastest_static(
    acceptance_DR: Tensor, seconds: Callable[[int, int], float], most: int
) -> Static:
    """The static tree of at most `most` nodes that commits most tokens per second (as Sequoia
    chooses for the hardware, Chen et al. 2024), if a round takes `seconds(depth, nodes)`."""
    depths, sizes = range(1, len(acceptance_DR) + 1), range(1, most + 1)
    return max(
        (best_static(acceptance_DR[:d], n) for d in depths for n in sizes),
        key=lambda t: expected_static(acceptance_DR, t.paths) / seconds(t.depth, t.nodes),
    )
