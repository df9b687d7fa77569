"""A way of decoding: what does not go together is refused when it is built, and what it says of
itself.

Run alone: python -m pytest tests/decoding/test_way.py
"""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from specdec.decoding.decode import decode
from specdec.decoding.draft_length import Length, length
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.decoding.way import Way
from specdec.errors import UserError
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Static
from specdec.targets.target import Target
from tests.drafters.families import make_drafter, make_target, text

T0, T1 = Sampler(0.0), Sampler(1.0)
DRAWN, PICKED = Static([[0], [1], [0, 0]]), Dynamic(3, 6, 2)
PROMPTS = [text(seed, length)[0].tolist() for seed, length in ((0, 6), (1, 14), (2, 9))]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("medusa", {"shape": Chain(9)}, "gamma=9 .* is too deep: this medusa drafts at most"),
        ("medusa", {"shape": Dynamic(9, 12, 2)}, "gamma=9 .* is too deep"),
        (
            "ngram",
            {"draft_length": length("confidence", {})},
            "Confidence needs q, but ngram copies",
        ),
        ("lm", {"shape": DRAWN, "draft_length": Length(2)}, "shortens chains, not trees"),
        ("lm", {"verification": "blok"}, "verification='blok' is unknown.*block"),
        (
            "lm",
            {"shape": DRAWN, "sampler": T1, "verification": "block"},
            "chains only: give recursive",
        ),
        (
            "lm",
            {"shape": PICKED, "sampler": T1, "verification": "block"},
            "chains only: give point_mass",
        ),
        (
            "lm",
            {"shape": PICKED, "sampler": T1, "verification": "recursive"},
            "needs siblings drawn from",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    target: Target, name: str, options: dict[str, Any], words: str
) -> None:
    drafter = make_drafter(name, target)
    with pytest.raises(UserError, match=words):
        Way(drafter, **options)


def test_no_shape_is_a_chain_as_deep_as_trained_and_no_drafter_is_plain(target: Target) -> None:
    drafter = make_drafter("lm", target)
    assert Way(drafter).shape == Chain(drafter.depth)
    assert Way() == Way(sampler=T0) and Way().drafter is Way().shape is None
    plain = Way(drafter, PICKED, T1, compiled=True).plain
    assert plain == Way(sampler=T1, compiled=True)
    assert [g.ids for g in decode(target, PROMPTS, max_new_tokens=6)] == [
        g.ids for g in decode(target, PROMPTS, Way(drafter).plain, max_new_tokens=6)
    ]
    with pytest.raises(FrozenInstanceError):
        plain.compiled = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "verification", "variant"),
    [
        ({}, "block", "greedy"),
        ({"greedy_draft": True}, "block", "greedy"),
        ({"sampler": T1}, "block", "sampled"),
        ({"sampler": T1, "greedy_draft": True}, "block", "greedy_draft"),
        ({"sampler": T1, "verification": "rejection"}, "rejection", "sampled"),
        (
            {"sampler": T1, "verification": VERIFICATION_METHODS["rejection"]},
            "rejection",
            "sampled",
        ),
        ({"sampler": T1, "shape": DRAWN}, "recursive", "sampled"),
        ({"sampler": T1, "shape": DRAWN, "greedy_draft": True}, "point_mass", "greedy_draft"),
        ({"sampler": T1, "shape": PICKED}, "point_mass", "greedy_draft"),
        ({"shape": PICKED}, "point_mass", "greedy"),
    ],
)
def test_the_method_and_the_alpha_that_fit(
    target: Target, options: dict[str, Any], verification: str, variant: str
) -> None:
    way = Way(make_drafter("lm", target), **options)
    assert (way.verification_method.name, way.variant) == (verification, variant)


def test_another_shape_leaves_the_rest_as_it_is(target: Target) -> None:
    drafter, policy = make_drafter("lm", target), Length(2)
    way = Way(drafter, Chain(3), T1, draft_length=policy, compiled=True)
    assert way.drafting(DRAWN) == Way(drafter, DRAWN, T1, compiled=True)
    assert way.drafting(Chain(2), policy) == Way(
        drafter, Chain(2), T1, draft_length=policy, compiled=True
    )
    with pytest.raises(UserError, match="judges chains only"):
        Way(drafter, sampler=T1, verification="rejection").drafting(DRAWN)


def test_a_fresh_way_learns_apart(target: Target) -> None:
    """`goodput` and `optimal` learn from what is accepted; a warm-up must not teach them."""
    policy = length("optimal", {"limit": 3, "c": 0.1, "v": {3: 1.2}})
    way = Way(make_drafter("lm", target, noise=0.05), draft_length=policy)
    before, fresh = repr(vars(policy)), way.fresh()
    decode(target, PROMPTS, fresh, max_new_tokens=12)
    assert repr(vars(policy)) == before != repr(vars(fresh.draft_length))
    assert (fresh.drafter, fresh.shape, fresh.sampler) == (way.drafter, way.shape, way.sampler)
    decode(target, PROMPTS, way, max_new_tokens=12)
    assert repr(vars(policy)) == repr(vars(fresh.draft_length))
