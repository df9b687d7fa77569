"""Which lengths are lossless: summed exactly in float64 over every draft of a toy vocabulary.

Run alone: python -m pytest tests/decoding/test_length_laws.py

The tolerance of 1e-12 leaves room for rounding alone.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from specdec.context import Proposal
from specdec.decoding.draft_length import Confidence, Fixed, Length, OptimalLength, length
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.sampling.confidence import Calibration
from specdec.sampling.trees import Growth
from tests.laws import law
from tests.lengths import likely, rows

EXACT = 1e-12

Prefix = tuple[int, ...]
Chain = tuple[Prefix, float]  # drafted tokens, and their probability
Conditional = dict[Prefix, list[float]]
Drafts = Callable[[Length, Conditional, Prefix, int], list[Chain]]
HORIZON = 4


def conditionals(V: int, seed: int) -> Conditional:
    """A distribution after every prefix shorter than the horizon; some have zeros, as top-p
    leaves them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for size in range(HORIZON):
        for prefix in product(range(V), repeat=size):
            row = torch.rand(V, generator=generator, dtype=torch.float64) ** 2
            if torch.rand(1, generator=generator) < 0.2:
                row[torch.randint(V, (1,), generator=generator)] = 0
            found[prefix] = (row / row.sum()).tolist()
    return found


def joint(p: Conditional, V: int) -> dict[Prefix, float]:
    """The target's own law of all HORIZON tokens."""
    return {
        x: math.prod(p[x[:i]][x[i]] for i in range(HORIZON))
        for x in product(range(V), repeat=HORIZON)
    }


def drafts(
    policy: Length,
    q: Conditional,
    prefix: Prefix,
    gamma: int,
    calibration: Calibration | None = None,
) -> list[Chain]:
    """Every chain that a speculation step drafts after a prefix, as the decoder does it: the token
    is drawn, and then the policy is asked whether to go on."""
    leaves: list[Chain] = []
    unread = torch.zeros(1, 1)
    growth = Growth(unread, lambda tokens, parents: unread, calibration=calibration)

    def grow(policy: Length, chain: Prefix, mass: float) -> None:
        if len(chain) == gamma:
            leaves.append((chain, mass))
            return
        row = q[prefix + chain]
        for x in range(len(row)):
            if row[x] > 0:
                branch = deepcopy(policy)
                k, log_q_111 = len(chain), rows([row[x]]).log()[None]
                confidence_B = growth.log_confidence(k, log_q_111)[0, 0].exp()
                stop = branch.stop(k, rows(row), torch.tensor([x]), confidence_B)
                if bool(stop):
                    leaves.append((chain + (x,), mass * row[x]))
                else:
                    grow(branch, chain + (x,), mass * row[x])

    grow(policy, (), 1.0)
    return leaves


def step_laws(
    verification: str, chains: list[Chain], p: Conditional, q: Conditional, prefix: Prefix
) -> list[tuple[Prefix, int, float, list[float]]]:
    """(chain, accepted, probability, next token's law) for all chains at once, the shorter ones
    padded with -1 as in a batch."""
    V, G = len(p[()]), max(len(chain) for chain, _ in chains)
    if G == 0:
        return [((), 0, mass, p[prefix]) for _, mass in chains]
    tokens_BG = torch.tensor([chain + (-1,) * (G - len(chain)) for chain, _ in chains])
    uniform = [1 / V] * V  # what stands beyond a chain's end must not matter
    q_at = [[q[prefix + x[:i]] if i < len(x) else uniform for i in range(G)] for x, _ in chains]
    p_at = [
        [p[prefix + x[:i]] if i <= len(x) else uniform for i in range(G + 1)] for x, _ in chains
    ]
    q_BGV, p_BMV = rows(*q_at), rows(*p_at)
    stop_BM, next_BMV = law(VERIFICATION_METHODS[verification], Proposal(tokens_BG, q_BGV), p_BMV)
    return [
        (chain, n, mass * stop_BM[b, n].item(), next_BMV[b, n].tolist())
        for b, (chain, mass) in enumerate(chains)
        for n in range(G + 1)
        if stop_BM[b, n] != 0
    ]


def committed(
    policy: Length,
    verification: str,
    p: Conditional,
    q: Conditional,
    drafts: Drafts = drafts,
    steps: int = 2,
) -> dict[Prefix, float]:
    """The exact law of HORIZON committed tokens: speculation steps of the policy, told what came of
    each, and then the target's own tokens."""
    V = len(p[()])
    total = dict.fromkeys(product(range(V), repeat=HORIZON), 0.0)

    def go(policy: Length, prefix: Prefix, mass: float, left: int) -> None:
        if len(prefix) == HORIZON:
            total[prefix] += mass
            return
        policy = deepcopy(policy)
        gamma = min(policy.gamma(1), HORIZON - len(prefix) - 1) if left else 0
        chains = drafts(policy, q, prefix, gamma)
        for chain, n, weight, after in step_laws(verification, chains, p, q, prefix):
            assert n <= len(chain)
            told = deepcopy(policy)
            told.observe([len(chain)], [n])
            for x in range(V):
                if after[x] > 0:
                    go(told, prefix + chain[:n] + (x,), mass * weight * after[x], left - 1)

    go(policy, (), 1.0, steps)
    return total


def error(found: dict[Prefix, float], p: Conditional, V: int) -> float:
    return max(abs(found[x] - exact) for x, exact in joint(p, V).items())


class Alternating(Fixed):
    """A length that hangs on past speculation steps as strongly as can be: 3 after a step in which
    something was rejected, else 1."""

    rejected = True

    def gamma(self, batch: int) -> int:
        return 3 if self.rejected else 1

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.rejected = accepted[0] < drafted[0]


LOSSLESS: dict[str, Callable[[], Length]] = {
    "confidence": lambda: Confidence(3, threshold=0.35),
    "cumulative": lambda: Confidence(3, threshold=0.2, cumulative=True),
    "disco": lambda: length("disco", {"limit": 3, "threshold": 0.5}, likely(0.4)),
    "past speculation steps": lambda: Alternating(),
    "optimal": lambda: OptimalLength(3, weight=0.5, c=0.3, explore_every=2),
    "fixed": lambda: Fixed(3),
}


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_length_that_stops_after_a_token_and_keeps_it_is_lossless(
    name: str, verification: str
) -> None:
    for V, seed in ((2, 0), (2, 1), (2, 2), (3, 3)):
        p, q = conditionals(V, seed), conditionals(V, seed + 100)
        found = committed(LOSSLESS[name](), verification, p, q, steps=2 if V == 2 else 1)
        assert error(found, p, V) < EXACT


def test_the_lengths_above_do_vary() -> None:
    """Else the test above would show nothing."""
    q = conditionals(3, 103)
    for name in ("confidence", "cumulative", "disco"):
        lengths = {len(chain) for chain, _ in drafts(LOSSLESS[name](), q, (), 3)}
        assert len(lengths) > 1, name


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("name", ["confidence", "cumulative"])
def test_calibrated_confidence_is_lossless_too(name: str, verification: str) -> None:
    """Calibration changes the lengths, since q = .35 at depth 0 becomes .30, but not the law."""
    calibrated = partial(drafts, calibration=Calibration([2.0, 0.5], [0.4, 0.2], [0.5, 0.5]))
    for V, seed in ((2, 1), (3, 3)):
        p, q = conditionals(V, seed), conditionals(V, seed + 100)
        found = committed(
            LOSSLESS[name](), verification, p, q, calibrated, steps=2 if V == 2 else 1
        )
        assert error(found, p, V) < EXACT
    plain, other = (make(LOSSLESS[name](), q, (), 3) for make in (drafts, calibrated))
    assert plain != other and len({len(chain) for chain, _ in other}) > 1


def drops_what_it_looked_at(looks_at: Conditional) -> Drafts:
    """A length broken on purpose: it draws a token, looks at its probability, and where that is
    low it ends the chain before the token instead of after it."""

    def drafts(policy: Length, q: Conditional, prefix: Prefix, gamma: int) -> list[Chain]:
        leaves: list[Chain] = []

        def grow(chain: Prefix, mass: float) -> None:
            if len(chain) == gamma:
                leaves.append((chain, mass))
                return
            for x, share in enumerate(q[prefix + chain]):
                if share > 0 and looks_at[prefix + chain][x] < 0.35:
                    leaves.append((chain, mass * share))
                elif share > 0:
                    grow(chain + (x,), mass * share)

        grow((), 1.0)
        return leaves

    return drafts


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("looks_at", ["p", "q"])
def test_a_length_that_drops_the_token_it_looked_at_is_caught(
    looks_at: str, verification: str
) -> None:
    """Looking at the target's p of the drafted tokens is the classical mistake; looking at q
    alone is no excuse. The bound is half a percent, nine orders above the tolerance."""
    p, q = conditionals(3, 3), conditionals(3, 103)
    broken = drops_what_it_looked_at(p if looks_at == "p" else q)
    found = committed(Fixed(3), verification, p, q, drafts=broken, steps=1)
    assert sum(found.values()) == pytest.approx(1)  # a law, but not the target's
    assert error(found, p, 3) > 0.005


def looks_ahead(p: Conditional) -> Drafts:
    """Broken too: drafts the whole chain, then cuts it before the first token that p is below
    q at, so that more of what remains is accepted."""

    def cut(policy: Length, q: Conditional, prefix: Prefix, gamma: int) -> list[Chain]:
        found = []
        for chain, mass in drafts(Fixed(gamma), q, prefix, gamma):
            n = 0
            while n < len(chain):
                x, before = chain[n], prefix + chain[:n]
                if p[before][x] < q[before][x]:
                    break
                n += 1
            found.append((chain[:n], mass))
        return found

    return cut


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_length_that_cuts_where_the_target_would_reject_is_caught(verification: str) -> None:
    p, q = conditionals(3, 3), conditionals(3, 103)
    found = committed(Fixed(3), verification, p, q, drafts=looks_ahead(p), steps=1)
    assert error(found, p, 3) > 0.005


class LooksAtP(Fixed):
    """Stops by the target's p of the token just drawn, but keeps that token."""

    def __init__(self, p: Conditional) -> None:
        super().__init__(3)
        self.p, self.chain = p, ()

    def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        self.chain = (self.chain if depth else ()) + (int(token_B),)
        return torch.tensor([self.p[self.chain[:-1]][self.chain[-1]] < 0.35])


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_what_counts_is_keeping_the_token_not_what_is_looked_at(verification: str) -> None:
    """p of the drafted tokens is a function of them, so that stopping by it after the token is
    a stopping time like any other, and lossless: the mistake is to leave the token out."""
    p, q = conditionals(3, 3), conditionals(3, 103)
    assert error(committed(LooksAtP(p), verification, p, q, steps=1), p, 3) < EXACT
