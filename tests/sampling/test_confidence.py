"""Confidence in decoding: what calibrations do to it, and what chains, trees and hybrids do by it.

Run alone: python -m pytest tests/sampling/test_confidence.py
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.context import Context, Proposal
from specdec.decoding.decode import decode
from specdec.decoding.draft_length import Confidence
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.drafters.base import vocabulary
from specdec.drafters.hybrid import Hybrid, HybridConfig
from specdec.errors import UserError
from specdec.sampling.choose import Choose
from specdec.sampling.confidence import Calibration, Calibrations
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import BestFirst, Chain, Dynamic, Growth, Shape
from specdec.targets.target import Target
from tests.drafters.families import V, make_drafter, make_target, text

PROMPTS = [text(seed, length)[0].tolist() for seed, length in ((0, 6), (1, 14), (2, 9))]
NEVER, ALWAYS = (Calibration([1.0], [shift], [0.5]) for shift in (-30.0, 30.0))
SAMPLERS = {"greedy": Sampler(0.0), "sampled": Sampler(1.0)}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def calibrated(drafter: Drafter, variant: str, calibration: Calibration) -> Drafter:
    drafter.calibrations = replace(Calibrations(), **{variant: calibration})
    return drafter


def test_a_calibration_by_hand() -> None:
    """σ(2 · logit .8 - 1), logit .8 = log 4; the last depth stands for all after it; certainty, and
    a token that q says cannot be, stay finite or -inf."""
    found = Calibration([2.0, 1.0], [-1.0, 0.0], [0.5, 0.5])
    log_c = torch.tensor([0.8, 0.3, 1.0, 0.0], dtype=torch.float64).log()
    first, second, deep = (found.log(log_c, k).exp() for k in (0, 1, 9))
    by_hand = [1 / (1 + math.exp(1 - 2 * math.log(4))), 1 / (1 + math.exp(1 - 2 * math.log(3 / 7)))]
    assert first[:2].tolist() == pytest.approx(by_hand)
    assert second.tolist() == pytest.approx([0.8, 0.3, 1.0, 0.0], abs=1e-5)
    assert torch.equal(second, deep)
    grid = found.log(torch.linspace(0.001, 1, 999, dtype=torch.float64).log(), 0)
    assert (grid.diff() > 0).sum() >= 997 and (grid.diff() >= 0).all() and (grid < 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": [0.0]}, "scale holds 0.0: give more than 0"),
        ({"scale": [1e300]}, "at most 1000"),
        ({"shift": [math.nan]}, "shift holds nan: give -1000 to 1000"),
        ({"shift": [1.0, 2.0]}, "shift has 2 numbers, but scale has 1"),
        ({"accepted": [1.5]}, "a share from 0 to 1"),
        ({"scale": []}, "scale is empty"),
    ],
)
def test_an_impossible_calibration_is_refused(change: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Calibration(**({"scale": [1.0], "shift": [0.0], "accepted": [0.5]} | change))


def test_an_own_estimate_is_about_the_likeliest_child() -> None:
    unread = torch.zeros(1, 3)
    growth = Growth(unread, lambda tokens, parents: unread, own_BT=torch.tensor([[0.9, 0.2]]))
    log_q_BTC = torch.tensor([[[0.5, 0.25], [0.4, 0.1]]]).log()
    found = growth.log_confidence(0, log_q_BTC).exp()
    torch.testing.assert_close(found, torch.tensor([[[0.9, 0.45], [0.2, 0.05]]]))
    growth.calibration = Calibration([1.0], [math.log(2)], [0.5])  # doubles the odds
    found = growth.log_confidence(0, log_q_BTC).exp()
    odds = torch.tensor([[[18.0, 18 / 11], [0.5, 2 / 19]]])
    torch.testing.assert_close(found, odds / (1 + odds))


@pytest.mark.parametrize("variant", SAMPLERS)
@pytest.mark.parametrize("name", ["eagle3", "dspark", "lm"])
def test_a_chain_stops_by_calibrated_confidence(target: Target, name: str, variant: str) -> None:
    """It stops by the calibration of its own variant of α alone. At T = 0 the responses remain
    those of vanilla decoding."""
    drafter = make_drafter(name, target, noise=0.05)
    plain, lengths = decode(target, PROMPTS, max_new_tokens=8), dict[str, set[int]]()
    cases = (NEVER, variant, {1}), (ALWAYS, variant, {3}), (NEVER, "greedy_draft", None)
    for shift, of, drafted in cases:
        made = decode(
            target,
            PROMPTS,
            Way(
                calibrated(drafter, of, shift),
                sampler=SAMPLERS[variant],
                draft_length=Confidence(3, threshold=0.3),
            ),
            max_new_tokens=8,
        )
        lengths[of] = {r.drafted for g in made for r in g.steps}
        assert drafted is None or lengths[of] == drafted
        if variant == "greedy":
            assert [g.ids for g in made] == [g.ids for g in plain]
    raw = decode(
        target,
        PROMPTS,
        Way(
            calibrated(drafter, variant, Calibration([1.0], [0.0], [0.5])),
            sampler=SAMPLERS[variant],
            draft_length=Confidence(3, threshold=0.3),
        ),
        max_new_tokens=8,
    )
    assert {r.drafted for g in raw for r in g.steps} == lengths["greedy_draft"]


def proposed(drafter: Drafter, target: Target, shape: Shape, temperature: float) -> Proposal:
    ids = torch.tensor([PROMPTS[1]])
    ctx, _ = target.hidden_states(ids, drafter.needs)
    choose = Choose(Sampler(temperature), "fixed", RowDraws([]), vocabulary(drafter), V)
    return drafter.draft(ctx, shape, choose)


@pytest.mark.parametrize(("temperature", "variant"), [(0.0, "greedy"), (1.0, "greedy_draft")])
@pytest.mark.parametrize("name", ["eagle3", "dspark", "best_first"])
def test_a_tree_grows_where_calibrated_confidence_is(
    target: Target, name: str, temperature: float, variant: str
) -> None:
    """Where depth 1 is believed to fail, all nodes are at depth 0; where depths after 0 are
    certain, a chain of the likeliest comes before a second child of the anchor."""
    drafter = make_drafter("medusa" if name == "best_first" else name, target, noise=0.05)
    shape: Shape = BestFirst(3, 4) if name == "best_first" else Dynamic(3, 4, 4)
    flat = calibrated(drafter, variant, Calibration([1.0] * 3, [5.0, -40.0, 0.0], [0.5] * 3))
    assert proposed(flat, target, shape, temperature).parents_BG.tolist() == [[-1] * 4]
    deep = calibrated(drafter, variant, Calibration([1.0] * 3, [-9.0, 40.0, 40.0], [0.5] * 3))
    above = proposed(deep, target, shape, temperature).parents_BG[0].tolist()
    assert above.count(-1) == 1
    other = {"greedy": "sampled", "greedy_draft": "greedy"}[variant]
    found = [
        proposed(calibrated(drafter, other, c), target, shape, temperature).tokens_BG
        for c in (NEVER, ALWAYS)
    ]
    assert torch.equal(*found)


def test_a_tree_by_calibrated_confidence_leaves_greedy_decoding_as_it_is(target: Target) -> None:
    plain = decode(target, PROMPTS, max_new_tokens=16)
    drafter = make_drafter("eagle3", target, noise=0.05)
    calibrated(drafter, "greedy", Calibration([0.5, 2.0], [1.0, -1.0], [0.5, 0.5]))
    made = decode(target, PROMPTS, Way(drafter, Dynamic(3, 8, 3)), max_new_tokens=16)
    assert [g.ids for g in made] == [g.ids for g in plain]


def test_a_hybrid_expects_of_its_head_what_the_calibration_saw(target: Target) -> None:
    """Each temperature has its own figure; the α of its config holds where nothing was
    calibrated."""
    head = make_drafter("eagle3", target)
    config = HybridConfig(copying="ngram", depth=4, alpha=[0.5], gamma=3)
    hybrid = Hybrid.build(config, target, earlier=head).eval()
    assert isinstance(hybrid, Hybrid)
    hybrid.calibrations = Calibrations(
        greedy=Calibration([1.0], [0.0], [0.0]), sampled=Calibration([1.0], [0.0], [0.999])
    )
    assert head.calibrations is hybrid.calibrations
    drafts = {}
    for variant in ("greedy", "greedy_draft", "sampled"):
        hybrid.weigh(lambda member, gamma: (0.2, 1.0 + 0.1 * gamma), [], [], variant)
        drafts[variant] = hybrid.head_draft_length(), hybrid.alpha
    assert drafts == {"greedy": (0, [0.0]), "greedy_draft": (1, [0.5]), "sampled": (3, [0.999])}


def test_a_familys_own_estimate_is_read_in_decoding(target: Target) -> None:
    """In chains and trees, cached or not, the estimate is `confidence` of the states after the same
    path."""
    drafter = make_drafter("dspark", target, noise=0.3)
    ids = torch.tensor([PROMPTS[1]])
    ctx, _ = target.hidden_states(ids, drafter.needs)
    for cache in (None, drafter.new_cache()):
        growth, path = drafter.draft_growth(ctx, cache), list[int]()
        for k in range(3):
            drafted = torch.tensor([[path]], dtype=torch.long)
            states = drafter.hidden(ctx, torch.tensor([[len(PROMPTS[1]) - 1]]), drafted)
            own = drafter.confidence(states)
            assert own is not None and growth.own_BT is not None
            torch.testing.assert_close(growth.own_BT[:, 0], own[:, 0, k], atol=1e-5, rtol=1e-4)
            path.append(7 + k)
            if k < 2:
                growth.grow(torch.tensor([[7 + k]]), None)


def test_what_a_length_is_told_is_the_own_estimate_after_calibration(target: Target) -> None:
    drafter = make_drafter("dspark", target, noise=0.3)
    told: list[Tensor] = []

    def stop(depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
        told.append(confidence_B)
        return torch.zeros_like(token_B, dtype=torch.bool)

    ctx, _ = target.hidden_states(torch.tensor([PROMPTS[1]]), drafter.needs)

    def drafted(ctx: Context) -> Proposal:
        choose = Choose(Sampler(0.0), "fixed", RowDraws([]), vocabulary(drafter), V)
        return drafter.draft(ctx, Chain(3, stop), choose)

    tokens = drafted(ctx).tokens_BG
    at = torch.tensor([[len(PROMPTS[1]) - 1]])
    own = drafter.confidence(drafter.hidden(ctx, at, tokens[:, None, :-1]))
    assert own is not None
    torch.testing.assert_close(torch.stack(told, 1), own[:, 0], atol=1e-5, rtol=1e-4)
    calibrated(drafter, "greedy", Calibration([2.0], [0.5], [0.5]))
    told.clear()
    drafted(ctx)
    wanted = (2.0 * own[:, 0].logit() + 0.5).sigmoid()
    torch.testing.assert_close(torch.stack(told, 1), wanted, atol=1e-5, rtol=1e-4)
