"""The sampler against a slow reference, and its summary against the whole.

Run alone: python -m pytest tests/sampling/test_sampler.py
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import UserError
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import COLDEST, Sampler, draws, sample
from tests.device import DEVICE

INF = math.inf
SETTINGS = [
    Sampler(),
    Sampler(0.5),
    Sampler(3.0),
    Sampler(1.0, top_k=1),
    Sampler(1.0, top_k=5),
    Sampler(0.7, top_k=10_000),  # more than there are
    Sampler(1.0, top_p=0.9),
    Sampler(0.6, top_p=0.3),
    Sampler(1.5, top_p=0.01),
    Sampler(0.8, top_k=20, top_p=0.9),
    Sampler(2.0, top_k=7, top_p=0.5),
    Sampler(0.05, top_k=3, top_p=0.95),
]
NAMES = [f"T{s.temperature}-k{s.top_k}-p{s.top_p}" for s in SETTINGS]


def slow(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """One row, one step after the other, in float64; ties with the last one kept are kept."""
    kept = [z / temperature for z in logits]
    if top_k:
        least = sorted(kept, reverse=True)[:top_k][-1]
        kept = [z if z >= least else -INF for z in kept]
    weights = [math.exp(z - max(kept)) for z in kept]
    if top_p < 1:
        mass = 0.0
        for weight in sorted(weights, reverse=True):
            mass += weight / sum(weights)
            if mass >= top_p:
                break
        weights = [w if w >= weight else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- distributions ---------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SETTINGS, ids=NAMES)
def test_against_the_slow_reference(sampler: Sampler) -> None:
    """No logit of these ties and no sum falls on top_p, so the tokens kept are the same; float32
    keeps logits up to about 15 / T to 1e-6 / T of themselves, 2e-4 at T = 0.05."""
    logits = noise(40, 50)
    got = sampler.probs(logits)
    wanted = torch.tensor(
        [slow(row, sampler.temperature, sampler.top_k, sampler.top_p) for row in logits.tolist()]
    )
    assert got.dtype == torch.float32
    assert torch.equal(got > 1e-30, wanted > 1e-30)
    assert torch.allclose(got, wanted, atol=1e-6 * max(1, 10 / sampler.temperature))
    assert torch.allclose(got, sampler.log_probs(logits).exp(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sampler", SETTINGS, ids=NAMES)
def test_rows_are_distributions(sampler: Sampler) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        log_probs = sampler.log_probs(noise(2, 5, 50).to(dtype))
        assert log_probs.shape == (2, 5, 50) and log_probs.dtype == torch.float32
        assert not log_probs.isnan().any()
        assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, 5), atol=1e-5)


def test_on_paper() -> None:
    """p = 8/15, 4/15, 2/15, 1/15."""
    logits = torch.tensor([8.0, 4.0, 2.0, 1.0]).log()
    fifteenths = torch.tensor([8.0, 4.0, 2.0, 1.0]) / 15
    assert torch.allclose(Sampler().probs(logits), fifteenths)
    # T = 1/2 squares the weights
    squares = torch.tensor([64.0, 16.0, 4.0, 1.0]) / 85
    assert torch.allclose(Sampler(0.5).probs(logits), squares)
    assert torch.allclose(Sampler(top_k=2).probs(logits), torch.tensor([2.0, 1, 0, 0]) / 3)
    # the first reaches .533: top_p .5 stops there; .54 takes the second as well
    assert Sampler(top_p=0.5).probs(logits).tolist() == pytest.approx([1, 0, 0, 0])
    assert torch.allclose(Sampler(top_p=0.54).probs(logits), torch.tensor([2.0, 1, 0, 0]) / 3)
    # after T = 1/2 the first has .753: temperature comes before top-p
    assert Sampler(0.5, top_p=0.7).probs(logits).tolist() == pytest.approx([1, 0, 0, 0])
    # of the two that top-k keeps the first has .667: top-k comes before top-p
    assert Sampler(top_k=2, top_p=0.6).probs(logits).tolist() == pytest.approx([1, 0, 0, 0])
    assert Sampler(top_p=0.6).probs(logits).count_nonzero() == 2


def test_top_p_always_keeps_the_likeliest() -> None:
    probs = Sampler(top_p=1e-9).probs(noise(20, 50))
    assert torch.equal(probs.argmax(-1), noise(20, 50).argmax(-1))
    assert probs.count_nonzero() == 20


def test_ties_are_kept() -> None:
    """Whatever the order of the tokens."""
    for row in set(itertools.permutations([3.0, 1.0, 1.0, 1.0, -2.0])):
        logits = torch.tensor(row)
        kept = logits >= 1
        for sampler in (Sampler(top_k=2), Sampler(top_k=3), Sampler(top_p=0.75)):
            assert torch.equal(sampler.probs(logits) > 0, kept)
    flat = torch.zeros(2, 8)
    for sampler in (Sampler(top_k=3), Sampler(top_p=0.2), Sampler(top_k=3, top_p=0.2)):
        assert torch.allclose(sampler.probs(flat), torch.full((2, 8), 1 / 8))


def test_ties_of_bfloat16_are_kept() -> None:
    """bfloat16 rounds many logits to one value. One step at a time, as top-k and top-p each are."""
    logits = noise(20, 50).round().bfloat16()
    for sampler in (Sampler(top_k=9), Sampler(0.7, top_k=4), Sampler(top_p=0.77)):
        wanted = torch.tensor(
            [slow(x, sampler.temperature, sampler.top_k, sampler.top_p) for x in logits.tolist()]
        )
        assert torch.allclose(sampler.probs(logits), wanted, atol=1e-5)


def test_ties_that_top_k_keeps_count_for_top_p() -> None:
    """Weights 8, 3, 3, 3, 3: top-k of 2 keeps all five, so the first has .4 of the mass and
    top-p of .7 needs more. Over the first two alone it has .73 and stands alone: other tokens
    than Hugging Face and vLLM keep, which mask one step after the other."""
    logits = torch.tensor([8.0, 3, 3, 3, 3]).log()
    wanted = slow(logits.tolist(), 1.0, 2, 0.7)
    assert wanted == pytest.approx([0.4, 0.15, 0.15, 0.15, 0.15])
    assert Sampler(top_k=2, top_p=0.7).probs(logits).tolist() == pytest.approx(wanted)


# --- rows without mass, and single tokens without any ----------------------------------------


@pytest.mark.parametrize("sampler", [Sampler(0.0), *SETTINGS], ids=["greedy", *NAMES])
def test_a_row_of_minus_infinity_has_no_mass(sampler: Sampler) -> None:
    logits = noise(3, 50)
    logits[1] = -INF
    probs, alone = sampler.probs(logits), sampler.probs(logits[[0, 2]])
    assert probs[1].eq(0).all() and sampler.log_probs(logits)[1].isneginf().all()
    assert torch.equal(probs[[0, 2]], alone)  # and its neighbours do not notice


@pytest.mark.parametrize("sampler", [Sampler(0.0), *SETTINGS], ids=["greedy", *NAMES])
def test_tokens_of_minus_infinity_are_never_kept(sampler: Sampler) -> None:
    """Three finite logits: the others have no mass, and do not disturb those."""
    logits = torch.full((2, 50), -INF)
    logits[:, [4, 20, 33]] = torch.tensor([[1.0, 0.5, 0.2], [0.1, 0.2, 3.0]])
    probs = sampler.probs(logits)
    assert not probs.isnan().any() and probs[logits.isneginf()].eq(0).all()
    assert torch.allclose(probs[:, [4, 20, 33]], sampler.probs(logits[:, [4, 20, 33]]))


def test_gradients_pass_through_truncation() -> None:
    """Of the likeliest token's log q, over the tokens kept: (onehot - q) / T, and 0 elsewhere."""
    logits = noise(6, 50).requires_grad_()
    log_q = Sampler(0.8, top_k=20, top_p=0.9).log_probs(logits)
    log_q.max(-1).values.sum().backward()
    best = torch.eye(50)[logits.argmax(-1)]
    assert logits.grad is not None
    assert torch.allclose(logits.grad, (best - log_q.detach().exp()) / 0.8, atol=1e-6)


def test_gradients_of_rows_without_mass() -> None:
    """One such row would make every weight NaN, though its own loss is masked out."""
    logits = noise(3, 50)
    logits[1] = -INF
    logits.requires_grad_()
    Sampler().log_probs(logits)[[0, 2], 7].sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


# --- greedy ----------------------------------------------------------------------------------


def test_greedy_is_one_hot() -> None:
    logits = noise(4, 5, 50)
    sampler = Sampler(0.0)
    assert sampler.greedy and not Sampler(1e-3).greedy
    assert torch.equal(sampler.probs(logits), torch.eye(50)[logits.argmax(-1)])
    one = sampler.probs(torch.tensor([1.0, 7.0, 7.0, 0.0]))
    assert one.sum() == 1 and one[1:3].sum() == 1  # of two that tie, one


def test_greedy_is_the_limit_of_low_temperatures_and_of_top_k_1() -> None:
    logits = noise(20, 50)
    greedy = Sampler(0.0).probs(logits)
    assert torch.allclose(Sampler(1e-4).probs(logits), greedy)
    assert torch.allclose(Sampler(1.0, top_k=1).probs(logits), greedy)


# --- the summary -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_summary_gives_p_over_part_of_the_vocabulary(sampler: Sampler, dtype: torch.dtype) -> None:
    """Bit for bit the same logits go in, so the same tokens are kept, and log p is the same
    subtraction. The subset is in no order, and lacks the argmax of some rows."""
    logits = noise(40, 60).to(dtype)
    logits[3:6, :30] = -INF
    subset = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:25]
    summary = sampler.summarise(logits)
    got = sampler.log_probs_of(logits[:, subset], summary)
    wanted = sampler.log_probs(logits)[:, subset]
    assert got.dtype == torch.float32
    assert torch.equal(got.isneginf(), wanted.isneginf())
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    mass = got.exp().sum(-1)
    assert (mass < 0.999).any() and (mass <= 1 + 1e-5).all()  # never renormalised
    assert torch.equal(summary.argmax_N, logits.float().argmax(-1))
    assert all(x.shape == (40,) for x in summary)
    assert summary.log_z_N.dtype == summary.threshold_N.dtype == torch.float32


@pytest.mark.parametrize("sampler", SETTINGS, ids=NAMES)
def test_summary_keeps_ties(sampler: Sampler) -> None:
    logits = noise(30, 60).round()
    got = sampler.log_probs_of(logits, sampler.summarise(logits))
    torch.testing.assert_close(got, sampler.log_probs(logits), atol=1e-6, rtol=1e-6)


def test_summary_of_a_token_alone() -> None:
    """p = 8/15, 4/15, 2/15, 1/15, of which top-k of 3 keeps 8/14, 4/14, 2/14."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0]]).log()
    sampler = Sampler(top_k=3)
    summary = sampler.summarise(logits)
    assert summary.log_z_N.item() == pytest.approx(math.log(14))
    assert summary.threshold_N.item() == pytest.approx(math.log(2))
    assert summary.argmax_N.item() == 0
    of = [sampler.log_probs_of(logits[:, i : i + 1], summary).exp().item() for i in range(4)]
    assert of == pytest.approx([8 / 14, 4 / 14, 2 / 14, 0])
    everything = Sampler().summarise(logits)
    assert everything.threshold_N.item() == -INF
    assert everything.log_z_N.item() == pytest.approx(math.log(15))


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", -INF),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_p", 90),
    ],
)
def test_mistakes_are_named(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^sampler\.{key}={value}: give (a|0)[^\n]*$"):
        Sampler(**{key: value})


def test_an_infinite_temperature_is_a_mistake() -> None:
    with pytest.raises(UserError):
        Sampler(INF)


# --- sample ----------------------------------------------------------------------------------


def test_sample_follows_probabilities() -> None:
    """Chi-square over 4 tokens that can occur, 3 degrees of freedom, fixed seed; another seed
    would exceed 21.1 once in 10,000 times. The weights need not sum to 1."""
    weights = torch.tensor([2.0, 0.0, 1.0, 0.5, 0.25])
    drawn = sample(weights.expand(40_000, 5), RowDraws(range(40_000), DEVICE).uniform(1)[:, 0])
    counts = torch.bincount(drawn, minlength=5)
    expected = 40_000 * weights / weights.sum()
    assert counts[1] == 0
    possible = weights > 0
    assert ((counts - expected) ** 2 / expected)[possible].sum() < 21.1


def test_draws_of_a_row_are_independent() -> None:
    """Pairs of two draws, 3 tokens that can occur, 8 degrees of freedom: 31.8 is exceeded once in
    10,000 times. A mass that is nearly nothing is all there is."""
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0, 0.0])
    pairs = draws(weights.expand(30_000, 6), RowDraws(range(30_000), DEVICE).uniform(2))
    counts = torch.bincount(pairs[:, 0] * 6 + pairs[:, 1], minlength=36).view(6, 6)
    expected = 30_000 * weights[:, None] * weights / weights.sum() ** 2
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected) ** 2 / expected)[possible].sum() < 31.8
    for only in (torch.tensor([[0.0, 0.0, 1e-38]]), torch.tensor([[1e-38, 0.0, 0.0]])):
        assert (draws(only, RowDraws([0], DEVICE).uniform(50)) == only.argmax()).all()


@pytest.mark.parametrize("temperature", [1e-38, 1e-5, -1.0, math.nan, INF])
def test_temperatures_at_which_logits_would_not_be_finite(temperature: float) -> None:
    with pytest.raises(UserError, match=r"sampler\.temperature=.*: give 0 for greedy decoding"):
        Sampler(temperature)
    coldest = Sampler(COLDEST).probs(torch.tensor([[1e34, -1e34, 0.0]]))
    assert coldest.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("weight", [0.0, math.nan, INF])
def test_nothing_is_drawn_from_a_row_without_mass(weight: float) -> None:
    probs = torch.full((2, 5), 0.2)
    probs[1] = weight
    with pytest.raises(UserError, match="nothing to draw from"):
        draws(probs, RowDraws([0, 1], DEVICE).uniform(1))


def test_sample_keeps_shapes_and_rows() -> None:
    ids = torch.randint(9, (2, 3, 4), generator=torch.Generator().manual_seed(3))
    uniform = RowDraws([0], DEVICE).uniform(24).view(2, 3, 4)
    assert torch.equal(sample(torch.eye(9)[ids], uniform), ids)
    assert sample(torch.eye(9)[4], uniform[0, 0, 0]).shape == ()


def test_sample_depends_on_the_seeds_alone() -> None:
    probs = Sampler().probs(noise(200, 50))
    one, two, other = (
        sample(probs, RowDraws(range(s, s + 200), DEVICE).uniform(1)[:, 0]) for s in (4, 4, 500)
    )
    assert torch.equal(one, two) and not torch.equal(one, other)
