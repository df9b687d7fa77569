"""The oracle length: an upper bound on the gain of any adaptive draft length, for reports."""

from collections.abc import Iterable
from dataclasses import dataclass

from specdec.errors import require
from specdec.theory import leviathan


@dataclass(frozen=True)
class Oracle:
    """The gain from drafting exactly as many tokens as are accepted, next to the best fixed γ."""

    speedup: float
    fixed_gamma: int
    fixed_speedup: float
    censored: float  # share of steps that were fully accepted, so no rejection was reached
    speculation_steps: int = 0
    drafted: int = 0  # the most tokens in a speculation step


def oracle(
    speculation_steps: Iterable[tuple[int, int]], c: float, v: leviathan.PassCost | None = None
) -> Oracle:
    """The cost if each speculation step had drafted exactly as many tokens as were accepted
    (Leviathan et al. 2023, Section 3.5 and footnote 4). `speculation_steps` are pairs (drafted,
    accepted) that were decoded with a long fixed γ. A step that accepted n tokens emits n + 1 at
    the lowest cost: in one step that drafts n, or in several if a wide pass costs more than a
    second one. A step that accepted everything counts as if a rejection followed, which lowers the
    bound. c and v are those of `leviathan`. Raises UserError if there are no steps."""
    pairs = list(speculation_steps)
    require(bool(pairs), "the oracle has no speculation steps: decode some first")
    longest = max(max(d, a) for d, a in pairs)
    cost = [1.0] + [g * c + (v(g) if v else 1.0) for g in range(1, longest + 1)]
    cheapest = [0.0]  # time to emit m tokens, all of which the draft would get right
    for m in range(1, longest + 2):
        cheapest.append(min(cheapest[m - g - 1] + cost[g] for g in range(m)))
    tokens = sum(a + 1 for _, a in pairs)
    fixed = [sum(a // (g + 1) + 1 for _, a in pairs) * cost[g] for g in range(longest + 1)]
    return Oracle(
        speedup=tokens / sum(cheapest[a + 1] for _, a in pairs),
        fixed_gamma=fixed.index(min(fixed)),
        fixed_speedup=tokens / min(fixed),
        censored=sum(a >= d for d, a in pairs) / len(pairs),
        speculation_steps=len(pairs),
        drafted=longest,
    )
