"""The decoder beyond losslessness: ends, streaming, processors, lengths, the transformers call.

Run alone: python -m pytest tests/decoding/test_decode.py
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode, generate
from specdec.decoding.draft_length import LENGTHS
from specdec.decoding.generation import Generation, SpeculationStep, pieces_of
from specdec.decoding.speculative import speculative_generate
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.lm import LMConfig
from specdec.errors import UserError
from specdec.measure.choosing import (
    acceptance_by_rank,
    best_static,
    candidates,
    chosen,
    fastest_shape,
    paths_of,
)
from specdec.measure.setup import Setup
from specdec.runtime.cpu.compiled_pass import Compiled
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape, Static
from specdec.targets.target import Target
from tests.drafters.families import SHAPES, VOCAB, V, make_drafter, make_target, text
from tests.tiny import architectures, make_tokenizer, random_drafter, random_target


def kept(generation: Generation) -> int:
    return sum(r.accepted for r in generation.steps)


PROMPTS = [text(seed, length)[0].tolist() for seed, length in ((0, 6), (1, 14), (2, 9))]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(params=["eagle3", "near"])
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    """One that accepts nothing, as its weights are random, and one that accepts most."""
    return make_drafter("eagle3", target) if request.param == "eagle3" else near(target, 0.01)


def near(target: Target, noise: float = 0.0) -> Drafter:
    """The target itself as a draft LM, or with noise on its weights one much like it."""
    layers = list(range(target.config.num_hidden_layers))
    return random_drafter(LMConfig(depth=3, layers=layers), target, noise)


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 17])
def test_max_new_tokens_is_exact(target: Target, drafter: Drafter, new: int) -> None:
    plain = generate(target, PROMPTS[0], max_new_tokens=32).ids
    for g in decode(target, PROMPTS[:1] * 2, Way(drafter), max_new_tokens=new):
        assert g.ids == plain[:new]
        assert g.emitted == new - 1
        assert sum(r.accepted + 1 for r in g.steps) == g.emitted + len(g.overrun)
        assert new < 17 or drafter.config.name == "eagle3" or kept(g) > 0


def test_eos_within_an_accepted_run_ends_the_response(target: Target) -> None:
    oracle = near(target)
    plain = generate(target, PROMPTS[0], max_new_tokens=32).ids
    eos = plain[6]
    first = plain.index(eos)
    for shape in SHAPES:
        g = generate(target, PROMPTS[0], Way(oracle, shape), max_new_tokens=32, eos=(eos,))
        assert g.ids == plain[: first + 1] and kept(g) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
def test_streaming_gives_each_rows_answer_in_order(
    target: Target, drafter: Drafter, shape: Shape
) -> None:
    streamed: dict[int, list[int]] = {}
    steps: dict[int, list[SpeculationStep | None]] = {}

    def show(row: int, ids: list[int], last: SpeculationStep | None) -> None:
        streamed.setdefault(row, []).extend(ids)
        steps.setdefault(row, []).append(last)

    way = Way(drafter, shape)
    made = decode(target, PROMPTS, way, max_new_tokens=20, on_tokens=show, eos=(5,))
    for row, g in enumerate(made):
        assert streamed[row] == g.ids
        assert steps[row] == [None, *g.steps]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
def test_rejected_drafts_stand_before_what_corrects_them(
    target: Target, drafter: Drafter, shape: Shape
) -> None:
    """Without them the pieces are the response. What is rejected is the rest of a chain, or a
    branch of a tree; at T = 0 its first token is not the one that the target writes there."""
    words = Target(target.model, make_tokenizer(), "words")
    kinds: set[str] = set()
    for g in decode(words, PROMPTS, Way(drafter, shape), max_new_tokens=20, eos=(5,)):
        at = 1
        for r in g.steps:
            assert bool(r.rejected) is not r.bonus and len(r.rejected) <= r.drafted
            if isinstance(shape, Chain):
                assert r.rejected == r.tokens[r.accepted :]
            at += r.accepted + 1
            assert not r.rejected or r.rejected[0] != [*g.ids, *g.overrun][at - 1]
        found = pieces_of(words.tokenizer, g)
        said = "".join(text for kind, text in found if kind != "rejected")
        assert said == words.tokenizer.decode(g.ids, skip_special_tokens=True)
        kinds |= {kind for kind, _ in found}
    assert "corrected" in kinds and "rejected" in kinds


def test_stop_strings_end_with_the_token_that_completes_one(target: Target) -> None:
    """A tokenizer of words and spaces, one token each, over the same 61 ids."""
    words = Target(target.model, make_tokenizer(), "words")
    drafter = make_drafter("lm", target, noise=0.05)
    plain = generate(words, PROMPTS[0], max_new_tokens=40).ids
    said = [words.tokenizer.decode([i]) for i in plain]
    wanted = said[9] + said[10]
    whole = "".join(said)
    end = next(n for n in range(1, 41) if wanted in words.tokenizer.decode(plain[:n]))
    for way in (None, Way(drafter, Chain(4))):
        g = generate(words, PROMPTS[0], way, max_new_tokens=40, stop=["never!", wanted])
        assert g.ids == plain[:end]
    assert wanted in whole and end <= 11


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
def test_logits_processors_apply_to_target_and_draft(
    target: Target, drafter: Drafter, shape: Shape
) -> None:
    """Greedy with a repetition penalty and no repeated bigrams: what transformers generates."""
    processors = [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)]
    way = Way(drafter, shape)
    made = decode(target, PROMPTS, way, max_new_tokens=16, processors=processors)
    for prompt, g in zip(PROMPTS, made, strict=True):
        hf = target.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            repetition_penalty=1.3,
            no_repeat_ngram_size=2,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert g.ids == hf
    oracle = near(target)
    made = decode(target, PROMPTS, Way(oracle), max_new_tokens=16, processors=processors)
    plain = decode(target, PROMPTS, max_new_tokens=16, processors=processors)
    assert [g.ids for g in made] == [g.ids for g in plain]
    assert all(r.accepted == r.tested for g in made for r in g.steps)  # it says what p says


def test_a_processor_makes_sampled_drafts_follow_its_p(target: Target) -> None:
    """min-p on both sides: no token is committed that p forbids, under either verification
    method."""
    drafter = make_drafter("eagle3", target, noise=0.05)
    processor = MinPLogitsWarper(0.2)
    for verification in ("rejection", "block"):
        for g in decode(
            target,
            PROMPTS * 4,
            Way(drafter, sampler=Sampler(1.0), verification=verification),
            max_new_tokens=12,
            processors=[processor],
        ):
            ids = torch.tensor([g.prompt + g.ids])
            _, final = target.hidden_states(ids, drafter.needs)
            for t in range(len(g.prompt), ids.shape[1]):
                logits = processor(ids[:, :t], target.logits(final[:, t - 1]).float().clone())
                assert not logits[0, ids[0, t]].isneginf()


def test_a_sampled_rows_draws_do_not_depend_on_its_neighbours(
    target: Target, drafter: Drafter
) -> None:
    for shape in (Chain(3), Static([[0], [1], [0, 0]])):
        way = Way(drafter, shape, Sampler(1.0))
        together = decode(target, PROMPTS, way, max_new_tokens=16, seeds=[7, 8, 9])
        for seed, prompt, g in zip((7, 8, 9), PROMPTS, together, strict=True):
            (alone,) = decode(target, [prompt], way, max_new_tokens=16, seeds=[seed])
            assert alone.ids == g.ids and alone.steps == g.steps


@pytest.mark.parametrize("name", list(LENGTHS))
def test_every_length_leaves_greedy_decoding_as_it_is(
    target: Target, drafter: Drafter, name: str
) -> None:
    settings = {"confidence": {"threshold": 0.3}, "optimal": {"c": 0.2}}.get(name, {})
    cfg = DecodeConfig(draft_length=name, draft_length_settings=settings, max_new_tokens=24)
    way, _ = chosen(Setup.from_config(target, cfg), cfg, drafter, 0.0, PROMPTS)
    plain = decode(target, PROMPTS, max_new_tokens=24)
    made = decode(target, PROMPTS, way, max_new_tokens=24)
    assert [g.ids for g in made] == [g.ids for g in plain]


def test_acceptance_by_rank_is_counted_with_the_sampler_it_is_for(target: Target) -> None:
    """A draft that is its target. Greedily the likeliest token is always kept. At T = 1 a sibling
    drawn from q = p is kept with min(1, p / q) = 1, so that no second one is ever judged; the
    likeliest token is kept with its p alone, and then others are."""
    same = near(target)
    setup = Setup(target, max_new_tokens=24)
    for sampler in (Sampler(0.0), Sampler(1.0)):
        way = Way(same, Chain(2), sampler)
        found = acceptance_by_rank(setup, way, PROMPTS, 3)
        assert found.tolist() == [[1, 0, 0], [1, 0, 0]]
    found = acceptance_by_rank(setup, replace(way, greedy_draft=True), PROMPTS, 3)
    assert 0 < found[0, 0] < 1 and found[0, 1:].sum() > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain(129),
        lambda: Dynamic(129, 4, 4),
        lambda: Dynamic(3, 10**9, 4),
        lambda: Dynamic(3, 4, 10**9),
        lambda: Static([[rank] for rank in range(1025)]),
        lambda: Static([[0] * n for n in range(1, 130)]),
    ],
)
def test_a_draft_that_would_not_end_is_refused(make: Callable[[], Shape]) -> None:
    with pytest.raises(UserError, match=r"128|1024"):
        make()


def test_best_static_takes_the_paths_of_largest_expected_length() -> None:
    """Acceptance .6 and .2 at depth 0, .5 and .1 at depth 1: by product, [0] .6, [0, 0] .3, [1]
    .2, [1, 0] .1, [0, 1] .06."""
    table = torch.tensor([[0.6, 0.2], [0.5, 0.1]])
    for nodes, paths in (
        (1, [[0]]),
        (2, [[0], [0, 0]]),
        (3, [[0], [1], [0, 0]]),
        (4, [[0], [1], [0, 0], [1, 0]]),
        (5, [[0], [1], [0, 0], [0, 1], [1, 0]]),
    ):
        assert [list(p) for p in best_static(table, nodes).paths] == paths


@pytest.mark.parametrize(
    "draft,verify,paths",
    [
        ([1.0, 1.0], lambda n: 8.0, [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]),  # all is free
        ([0.0, 9.0], lambda n: 8.0, [[0], [1]]),  # depth is dear: 1.8 / 8, and 2.18 / 17
        ([1.0, 1.0], lambda n: 1.0 + 5 * n, [[0]]),  # nodes are dear: 1.6 / 7, and 1.9 / 12
        ([1.0, 1.5], lambda n: 8.0 + (n > 3), [[0], [1], [0, 0]]),  # 2.1 / 9.5; 2.2 / 10.5
    ],
)
def test_the_fastest_shape_weighs_tokens_against_seconds(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    draft: list[float],
    verify: Callable[[int], float],
    paths: list[list[int]],
) -> None:
    """Acceptance .6 and .2 at depth 0, .5 and .1 at depth 1: [0] .6, [0, 0] .3, [1] .2, [1, 0] .1,
    [0, 1] .06, [1, 1] .02."""
    table = torch.tensor([[0.6, 0.2], [0.5, 0.1]])

    def times(_: Setup, ways: list[Way], __: Any) -> list[float]:
        shapes = [way.shape for way in ways if way.shape is not None]
        return [draft[shape.depth - 1] + verify(shape.nodes) for shape in shapes]

    monkeypatch.setattr("specdec.measure.choosing.steps_in_turn", times)
    way = Way(make_drafter("lm", target), Chain(2))
    shape = fastest_shape(Setup(target), way, PROMPTS, table)
    assert paths_of(shape) == paths


def test_no_shape_is_timed_twice() -> None:
    """Of 2, 3, 4 and 6 nodes by the acceptance above, in one level and in two: a chain of 2 is the
    best tree of 2 nodes; one level has 2 nodes at most."""
    shapes = candidates(torch.tensor([[0.6, 0.2], [0.5, 0.1]]), (2, 3, 4, 6))
    assert shapes[:2] == [Chain(1), Chain(2)]
    assert all(isinstance(shape, Static) for shape in shapes[2:])
    assert [paths_of(shape) for shape in shapes[2:]] == [
        [[0], [1]],
        [[0], [1], [0, 0]],
        [[0], [1], [0, 0], [1, 0]],
        [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]],
    ]


@pytest.mark.parametrize("dear", ["drafting", "nodes", "trees"])
def test_a_static_tree_without_nodes_is_chosen_by_its_times(
    target: Target, monkeypatch: pytest.MonkeyPatch, dear: str
) -> None:
    """Where drafting on takes as long as 20 speculation steps, one level of siblings; where every
    node does, one token; and where trees take longer than chains, a chain."""

    def times(_: Setup, ways: list[Way], __: Any) -> list[float]:
        found = []
        for shape in (way.shape for way in ways if way.shape is not None):
            draft = 1.0 + 20 * (shape.depth - 1) * (dear == "drafting")
            rest = 1.0 + 20 * shape.nodes * (dear == "nodes")
            rest += 20 * (dear == "trees" and isinstance(shape, Static))
            found.append(draft + rest)
        return found

    monkeypatch.setattr("specdec.measure.choosing.steps_in_turn", times)
    # of equally fast shapes the shortest is taken, so a chain of 3 must be accepted
    drafter = near(target) if dear == "trees" else make_drafter("lm", target, noise=0.3)
    cfg = DecodeConfig(tree="static", gamma=3, max_new_tokens=24)
    way, learned = chosen(Setup.from_config(target, cfg), cfg, drafter, 0.0, PROMPTS)
    shape = way.shape
    assert shape is not None
    if dear == "trees":
        assert shape == Chain(3) and learned.paths == [[0], [0, 0], [0, 0, 0]]
    else:
        assert shape.depth == 1 and (shape.nodes > 1) == (dear == "drafting")


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_a_tree_accepts_at_least_what_its_chain_does(target: Target, tree: str) -> None:
    drafter = make_drafter("lm", target, noise=0.1)
    cfg = DecodeConfig(tree=tree, nodes=14, gamma=3)
    way, _ = chosen(Setup.from_config(target, cfg), cfg, drafter, 0.0, PROMPTS)
    chain = decode(target, PROMPTS, Way(drafter, Chain(3)), max_new_tokens=40, eos=())
    made = decode(target, PROMPTS, way, max_new_tokens=40, eos=())
    assert sum(len(g.steps) for g in made) <= sum(len(g.steps) for g in chain)
    assert [g.ids for g in made] == [g.ids for g in chain]


def test_transformers_style_call(target: Target, drafter: Drafter) -> None:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    config = GenerationConfig(max_new_tokens=12, do_sample=False, repetition_penalty=1.2)
    made = speculative_generate(
        target, drafter, input_ids=ids, attention_mask=mask, generation_config=config
    )
    for b, prompt in enumerate(PROMPTS):
        hf = target.model.generate(
            torch.tensor([prompt]), generation_config=config, pad_token_id=0
        )[0].tolist()
        assert made.sequences[b, : len(hf)].tolist() == hf
    assert made.tau >= 1 and sum(made.accepted_lengths) == sum(
        len(g.steps) for g in made.generations
    )
    again = speculative_generate(target, drafter, ids[1:2], max_new_tokens=3)
    assert again.sequences.shape == (1, longest + 3)


@pytest.mark.parametrize(
    "options,word",
    [
        ({"num_beams": 2}, "num_beams"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"verification": "blok"}, "block"),
        ({"shape": Dynamic(2, 4, 2), "do_sample": True, "verification": "recursive"}, "point_mass"),
        ({"shape": Static([[0], [1]]), "do_sample": True, "verification": "block"}, "chains only"),
    ],
)
def test_what_cannot_be_done_is_said(target: Target, options: dict[str, Any], word: str) -> None:
    drafter = make_drafter("lm", target)
    ids = torch.tensor(PROMPTS[:1])
    with pytest.raises(UserError, match=word):
        speculative_generate(target, drafter, ids, **{"max_new_tokens": 4} | options)


def test_a_tree_path_needs_its_parent_and_prompts_their_room(target: Target) -> None:
    with pytest.raises(UserError, match="no parent"):
        Static([[0], [1, 0]])
    with pytest.raises(UserError, match="positions"):
        generate(target, [3] * 250, max_new_tokens=10)
    with pytest.raises(UserError, match="no tokens"):
        decode(target, [[1], []], max_new_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "shape", "asked"),
    [
        (Eagle3Config(depth=2, draft_vocab=40, layers=[1, 2]), Dynamic(2, 5, 3), PROMPTS[1:2]),
        (LMConfig(depth=2, layers=[0]), Chain(2), PROMPTS[:2]),
    ],
    ids=["a tree", "rows of unlike length"],
)
def test_compiled_passes_decode_the_same(
    config: Any, shape: Shape, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target and the draft have few layers and two graphs each, since a graph takes seconds:
    what comes after these runs uncompiled. The draft's passes really are compiled."""
    monkeypatch.setattr("specdec.runtime.cpu.compiled_pass.GRAPHS", 2)
    target = random_target(architectures(V, 2)["llama"])
    drafter = random_drafter(config, target, 0.05, VOCAB)
    passes: list[int] = []
    call = Compiled.__call__

    def counted(one: Compiled, cache: Any, **inputs: Any) -> Any:
        if one is drafter.compiled:
            passes.append(cache.capacity)
        return call(one, cache, **inputs)

    monkeypatch.setattr(Compiled, "__call__", counted)
    plain = decode(target, asked, Way(drafter, shape), max_new_tokens=6)
    passes.clear()
    fast = decode(target, asked, Way(drafter, shape, compiled=True), max_new_tokens=6)
    assert [g.ids for g in fast] == [g.ids for g in plain]
    assert [g.steps for g in fast] == [g.steps for g in plain]
    assert set(passes) == {256} and len(passes) > max(len(g.steps) for g in plain)
    assert drafter.compiled.ways
