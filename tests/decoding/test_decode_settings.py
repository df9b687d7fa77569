"""What a user sets for decoding: what is wrong is refused in one line, what is right is followed.

Run alone: python -m pytest tests/decoding/test_decode_settings.py
"""

import re
from typing import Any

import pytest
import torch

from specdec.decoding.config import DecodeConfig, beyond_training
from specdec.decoding.decode import decode, generate
from specdec.decoding.draft_length import length
from specdec.decoding.speculative import speculative_generate
from specdec.decoding.verification_methods import named
from specdec.decoding.way import Way, fitting_verification
from specdec.drafters import with_copying
from specdec.errors import UserError
from specdec.measure.choosing import chosen
from specdec.measure.costs import costs
from specdec.measure.setup import Setup
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import BestFirst, Chain, Dynamic, Shape, Static
from specdec.targets.target import Target
from tests.drafters.families import make_drafter, make_target, text
from tests.tiny import compose

PROMPTS = [text(seed, length)[0].tolist() for seed, length in ((0, 6), (1, 14), (2, 9))]
T1 = Sampler(1.0)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_length": "confidence", "draft_length_settings": {"threshold": "x"}}, "threshold"),
        ({"draft_length": "confidence", "draft_length_settings": {"limit": 2.5}}, "limit"),
        ({"draft_length": "optimal", "draft_length_settings": {"alpha": 0.5, "c": 0.1}}, "alpha"),
        ({"draft_length": "optimal", "draft_length_settings": {"thresh": 1, "c": 0.1}}, "thresh"),
        ({"tree": "dynamic", "draft_length_settings": {"limit": 3}}, "chains"),
        ({"paths": [[0]]}, "static"),
        ({"tree": "static", "paths": [[1]]}, "sibling"),
        ({"draft_length_settings": {"limit": 4}}, "would never be reached: give decode.gamma=4"),
        (
            {"gamma": 2, "draft_length": "confidence", "draft_length_settings": {"limit": 3}},
            "above γ = 2",
        ),
    ],
)
def test_wrong_settings_are_one_line(target: Target, options: dict[str, Any], words: str) -> None:
    drafter = make_drafter("lm", target)
    with pytest.raises(UserError, match=words):
        chosen(Setup(target), DecodeConfig(**options), drafter, 1.0, PROMPTS)


@pytest.mark.parametrize("name", ["eagle3", "eagle", "falcon", "spire"])
@pytest.mark.parametrize(
    ("options", "deepest"),
    [
        ({"gamma": 9}, 9),
        ({"tree": "dynamic", "gamma": 5}, 5),
        ({"tree": "static", "paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, 4),
        ({"gamma": 9, "draft_length_settings": {"limit": 2}}, 2),
        ({}, 0),
    ],
)
def test_a_draft_deeper_than_it_was_trained_for_is_told(
    target: Target, name: str, options: dict[str, Any], deepest: int
) -> None:
    drafter = make_drafter(name, target)
    told = beyond_training(DecodeConfig(**options), drafter)
    if deepest <= drafter.depth:
        assert told == ""
    else:
        assert f"{name} was trained to draft {drafter.depth} tokens in a row" in told
        assert f"drafts {deepest} here" in told


def test_what_has_no_trained_depth_may_draft_as_deep_as_it_likes(target: Target) -> None:
    """A language model and copied tokens; heads that cannot draft deeper are refused anyway."""
    for name in ("lm", "early_exit", "suffix", "bigram", "medusa"):
        assert beyond_training(DecodeConfig(gamma=9), make_drafter(name, target)) == ""
    hybrid = with_copying(make_drafter("eagle3", target), "suffix", target, gamma=9)
    assert "eagle3 was trained" in beyond_training(DecodeConfig(), hybrid)
    hybrid = with_copying(make_drafter("eagle3", target), "suffix", target)
    assert beyond_training(DecodeConfig(), hybrid) == ""


def test_settings_of_a_length_are_keys_of_the_command_line() -> None:
    one = compose(
        [
            "drafter=lm",
            "decode.draft_length=confidence",
            "decode.draft_length_settings.threshold=0.3",
        ]
    )
    assert one.decode.draft_length_settings == {"threshold": 0.3}
    two = compose(
        [
            "drafter=lm",
            "decode.draft_length=optimal",
            "decode.draft_length_settings={c: 0.1, v: {4: 1.2}}",
        ]
    )
    dotted = {"c": 0.1, "v": {"4": 1.2}}  # as --draft-length-settings v.4=1.2 gives it
    for settings in (two.decode.draft_length_settings, dotted):
        assert length("optimal", settings).pass_cost(4) == pytest.approx(1.2)  # type: ignore[attr-defined]


def test_families_without_ranks_or_q_say_so_and_the_others_do_not(target: Target) -> None:
    for name, options in (
        ("suffix", {"tree": "static"}),
        ("ngram", {"draft_length": "confidence"}),
    ):
        with pytest.raises(UserError, match="copies tokens"):
            cfg = DecodeConfig(**options)
            chosen(Setup(target), cfg, make_drafter(name, target), 1.0, PROMPTS)
    cfg = DecodeConfig(tree="static", nodes=4, gamma=2, max_new_tokens=8)
    way, _ = chosen(
        Setup.from_config(target, cfg), cfg, make_drafter("early_exit", target), 1.0, PROMPTS
    )
    assert way.shape is not None and way.shape.nodes == 4


@pytest.mark.parametrize("shape", [Chain(3), Static([[0], [1], [0, 0]])], ids=["chain", "tree"])
def test_a_verification_costs_all_that_the_shape_can_draft(
    target: Target, monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    """After two tokens prompt lookup has one to copy at most, or none."""
    widths, step = set(), target.step

    def recorded(ids_BT: torch.Tensor, *args: Any) -> Any:
        widths.add(ids_BT.shape[1])
        return step(ids_BT, *args)

    monkeypatch.setattr(target, "step", recorded)
    costs(Setup(target), Way(make_drafter("ngram", target), shape, T1), [5], turns=1)
    assert widths == {1, 1 + shape.nodes}


def test_no_shape_is_the_trained_depth_and_no_way_is_plain(target: Target) -> None:
    drafter = make_drafter("lm", target, noise=0.05)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos": ()}
    ways = Way(drafter), Way(drafter, Chain(3)), Way()
    made = [generate(target, PROMPTS[0], way, **options) for way in ways]
    assert made[0].steps == made[1].steps and made[0].steps[0].drafted == drafter.depth == 3
    assert made[2].steps == generate(target, PROMPTS[0], **options).steps


def test_a_length_that_would_not_be_asked_is_refused(target: Target) -> None:
    lm, copies = make_drafter("lm", target), make_drafter("ngram", target)
    policy = length("confidence", {"limit": 2})
    with pytest.raises(UserError, match="chains, not trees"):
        Way(lm, Static([[0], [1]]), draft_length=policy)
    with pytest.raises(UserError, match="Confidence needs q, but ngram copies tokens"):
        Way(copies, draft_length=policy)


def test_the_method_that_is_named_instead_does_fit(target: Target) -> None:
    for shape in (Static([[0], [1], [0, 0]]), Dynamic(3, 5, 2)):
        with pytest.raises(UserError, match="judges chains only") as caught:
            fitting_verification("block", shape, T1)
        (name,) = re.findall(r"give (\w+) for this tree", str(caught.value))
        assert fitting_verification(name, shape, T1).trees


def test_what_would_end_or_draft_nothing_is_refused(target: Target) -> None:
    for stop, words in (([""], "at once"), (["x"], "tokenizer, but this target has none")):
        with pytest.raises(UserError, match=words):
            decode(target, PROMPTS, max_new_tokens=2, stop=stop)
    for depth, nodes, words in ((3, 0, "nodes=0"), (0, 3, "depth=0")):
        with pytest.raises(UserError, match=words):
            BestFirst(depth, nodes)


def test_parameters_of_a_method_follow_its_name(target: Target) -> None:
    for words in ("block", "lenience:factor=0.8", "typical:epsilon=0.2,delta=0.05"):
        assert named(words).name == words
    drafter = make_drafter("lm", target, noise=0.3)
    kept = [
        sum(g.emitted for g in made) / sum(len(g.steps) for g in made)
        for factor in ("1", "0.2")
        for way in [Way(drafter, sampler=T1, verification=f"lenience:factor={factor}")]
        for made in [decode(target, PROMPTS * 4, way, max_new_tokens=24, eos=())]
    ]
    assert kept[1] > kept[0]
    zero = [
        decode(target, PROMPTS, Way(drafter, verification=verification), max_new_tokens=24, eos=())
        for verification in ("auto", "typical", "lenience:factor=1", "lenience:factor=0.2")
    ]  # at T = 0
    ids = [[g.ids for g in made] for made in zero]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    steps = [sum(len(g.steps) for g in made) for made in zero]
    assert steps[3] < steps[2]
    for wrong, words in (
        ("lenience:foo=1", "known: factor"),
        ("block:x=1", "no parameters"),
        ("lenience:factor", "factor=0.8"),
        ("lenient", "lenience"),
        ("lenience:factor=2", "factor=2.0; give"),
        ("lenience:factor=nan", "factor=nan; give"),
    ):
        with pytest.raises(UserError, match=words):
            DecodeConfig(verification=wrong)


def test_seeds_are_one_a_row(target: Target) -> None:
    for seeds in ([1], [1, 2, 3, 4]):
        with pytest.raises(UserError, match="seeds"):
            decode(target, PROMPTS, Way(sampler=T1), max_new_tokens=2, seeds=seeds)


def test_a_row_draws_by_the_seed_and_its_place(target: Target) -> None:
    ids = torch.tensor([PROMPTS[0]] * 2)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 3.0}
    made = speculative_generate(target, None, ids, seed=3, **options).sequences
    alone = speculative_generate(target, None, ids[:1], seed=3, **options).sequences
    assert made[0].tolist() == alone[0].tolist() != made[1].tolist()
