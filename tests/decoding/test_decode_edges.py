"""The decoder at its edges: positions that end, rows that stop early, settings that are wrong.

Run alone: python -m pytest tests/decoding/test_decode_edges.py
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from specdec.context import HiddenStateSpec, Proposal
from specdec.decoding.decode import capacity, decode, generate
from specdec.decoding.draft_length import Length, length
from specdec.decoding.rows import Rows
from specdec.decoding.stream import Stops
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.decoding.way import Way
from specdec.drafters.lm import LMConfig
from specdec.errors import UserError
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape, Static
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS, L, V, make_drafter, make_target, text
from tests.laws import law
from tests.tiny import architectures, random_drafter, random_target

PROMPTS = [text(seed, length)[0].tolist() for seed, length in ((0, 6), (1, 14), (2, 9))]
T1 = Sampler(1.0)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


# --- positions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ngram", "lm", "eagle3", "lookahead", "early_exit"])
@pytest.mark.parametrize("shape", [Chain(3), Dynamic(3, 6, 2)], ids=lambda s: type(s).__name__)
def test_drafts_end_where_the_targets_positions_do(name: str, shape: Shape) -> None:
    """GPT-2 learns a row for each position: one beyond its table is an error."""
    small = random_target(architectures(V, L, positions=32)["gpt2"])
    drafter = make_drafter(name, small, noise=0.05)
    prompt = text(0, 12)[0].tolist()
    plain = generate(small, prompt, max_new_tokens=20, eos=())
    made = generate(small, prompt, Way(drafter, shape), max_new_tokens=20, eos=())
    assert made.ids == plain.ids and len(made.ids) == 20
    if name in ("lm", "eagle3"):  # the others find little in so short a response
        assert any(r.accepted for r in made.steps)


def test_a_draft_of_fewer_positions_stops_drafting(target: Target) -> None:
    config = architectures(V, L, positions=24)["gpt2"]
    short = random_target(config)
    drafter = random_drafter(LMConfig(depth=3, layers=[0, 1]), short, 0.0)
    prompt = text(0, 12)[0].tolist()
    plain = generate(target, prompt, max_new_tokens=40, eos=())
    made = generate(target, prompt, Way(drafter, Chain(3)), max_new_tokens=40, eos=())
    assert made.ids == plain.ids
    assert all(r.drafted == 0 for r in made.steps if r.anchor >= 24)
    assert any(r.drafted == 3 for r in made.steps)


@pytest.mark.parametrize("name", ["eagle3", "lookahead", "early_exit"])
@pytest.mark.parametrize(
    "shape",
    [Chain(3), Static([[0], [1], [0, 0]]), Dynamic(5, 4, 8)],
    ids=lambda s: type(s).__name__,
)
def test_a_fixed_cache_has_room_for_all_that_is_grown(
    name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled path's cache, without the compiler: from one token left to a full cache."""
    monkeypatch.setattr("specdec.targets.target.Compiled", lambda run: run)
    target = make_target()
    drafter = make_drafter(name, target, noise=0.05)
    slots = capacity(220, drafter, shape)
    cache = target.new_cache(slots)
    assert cache.fixed
    prompt = text(3, 180)[0].tolist()
    plain = generate(target, prompt, max_new_tokens=40, eos=()).ids
    monkeypatch.setattr(target, "new_cache", lambda capacity=None: cache)
    made = generate(target, prompt, Way(drafter, shape), max_new_tokens=40, eos=())
    assert made.ids == plain


def test_ids_of_another_tokenizer_are_refused(target: Target) -> None:
    for prompt in ([3, V], [-1, 3]):
        with pytest.raises(UserError, match="give ids of its own tokenizer"):
            decode(target, [[3, 4], prompt], max_new_tokens=3)


# --- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize(
    ("name", "policy"),
    [("ngram", ""), ("suffix", ""), ("lookahead", ""), ("copy", ""), ("lm", "confidence")],
)
def test_rows_that_draft_less_draw_as_if_alone(
    target: Target, name: str, policy: str, verification: str
) -> None:
    """T = 1: chains of unequal length in one batch; a row's tokens depend on its own seed only."""
    drafter = make_drafter(name, target, noise=0.05)
    seeds = [7, 8, 9]
    settings = {"limit": 4, "threshold": 0.2}

    def run(prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        how = length(policy, settings) if policy else None
        way = Way(drafter, Chain(4), T1, verification, draft_length=how)
        return decode(target, prompts, way, max_new_tokens=24, seeds=seeds)

    repeated = [p * 2 for p in PROMPTS]  # something to copy
    together = run(repeated, seeds)
    assert len({r.drafted for g in together for r in g.steps}) > 1  # they do differ
    for seed, prompt, g in zip(seeds, repeated, together, strict=True):
        (alone,) = run([prompt], [seed])
        assert alone.ids == g.ids and alone.steps == g.steps


@pytest.mark.parametrize(
    ("shape", "sampler", "policy"),
    [
        (Chain(5), T1, "confidence"),
        (Static([[0], [1], [2], [0, 0], [2, 0], [2, 0, 0]]), Sampler(1.0, top_k=2), ""),
    ],
    ids=["chain", "static"],
)
def test_processors_see_tokens_where_a_row_has_none(
    target: Target, shape: Shape, sampler: Sampler, policy: str
) -> None:
    """Absent nodes, -1, are no index for a processor; those that are there draw as if alone."""
    drafter = make_drafter("lm", target, noise=0.05)
    processors = [RepetitionPenaltyLogitsProcessor(1.3)]

    def run(prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        how = length(policy, {"limit": 5, "threshold": 0.05}) if policy else None
        way = Way(drafter, shape, sampler, draft_length=how)
        return decode(target, prompts, way, max_new_tokens=12, seeds=seeds, processors=processors)

    together = run(PROMPTS, [7, 8, 9])
    nodes = zip(*[[r.nodes for r in g.steps] for g in together])
    assert any(min(n) + 1 < (max(n) if policy else shape.nodes) for n in nodes)  # a level went on
    for g, prompt, seed in zip(together, PROMPTS, (7, 8, 9), strict=True):
        (alone,) = run([prompt], [seed])
        assert (alone.ids, alone.steps) == (g.ids, g.steps)


class Pausing(Length):
    """Two plain speculation steps, then three drafted tokens."""

    def __init__(self) -> None:
        self.steps = 0

    def gamma(self, batch: int) -> int:
        self.steps += 1
        return 0 if self.steps <= 2 else 3


@pytest.mark.parametrize("name", list(CONFIGS))
def test_rows_may_leave_before_anything_was_drafted(target: Target, name: str) -> None:
    drafter = make_drafter(name, target, noise=0.05)
    first = generate(target, PROMPTS[0], max_new_tokens=1, eos=()).ids[0]
    options: dict[str, Any] = {"max_new_tokens": 10, "eos": (first,)}
    plain = decode(target, PROMPTS, **options)
    for policy in (None, Pausing()):
        made = decode(target, PROMPTS, Way(drafter, Chain(2), draft_length=policy), **options)
        assert [g.ids for g in made] == [g.ids for g in plain]


def test_a_length_reads_the_q_of_the_token_that_was_drafted(target: Target) -> None:
    """A pruned vocabulary, processors and T = 0: q and the token's index are of one vocabulary."""
    drafter = make_drafter("eagle3", target, noise=0.05)
    seen: list[float] = []

    class Watching(Length):
        reads_q = True

        def gamma(self, batch: int) -> int:
            return 3

        def stop(self, depth: int, q_BS: Tensor, token_B: Tensor, confidence_B: Tensor) -> Tensor:
            q_B = q_BS.gather(-1, token_B[:, None])[:, 0]
            assert torch.allclose(q_B, confidence_B)
            assert torch.allclose(q_B, q_BS.max(-1).values)  # greedy drafts are the likeliest
            seen.extend(q_B.tolist())
            return torch.zeros_like(token_B, dtype=torch.bool)

    processors = [RepetitionPenaltyLogitsProcessor(1.3)]
    way = Way(drafter, draft_length=Watching())
    decode(target, PROMPTS, way, max_new_tokens=12, processors=processors)
    assert seen


# --- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [[], [-1]])
def test_a_path_without_a_node_is_refused(path: list[int]) -> None:
    with pytest.raises(UserError, match="is empty or has a rank below 0"):
        Static([path])


@pytest.mark.parametrize("verification", ["recursive", "traversal"])
def test_a_second_sibling_alone_is_refused_for_it_would_not_follow_p(verification: str) -> None:
    """q = p = (.9, .1): the second of two draws, judged as the first, makes token 1 too likely."""
    with pytest.raises(UserError, match="no sibling before it"):
        Static([[1]])
    with pytest.raises(UserError, match="no sibling before it"):
        Static([[0], [0, 0], [0, 2]])
    p = torch.tensor([[[0.9, 0.1]] * 2]).double()
    found = torch.zeros(2).double()
    for second, chance in ((1, 0.9), (0, 0.1)):  # the first draw took the other one
        made = law(
            VERIFICATION_METHODS[verification],
            Proposal(torch.tensor([[second]]), p[:, :1], torch.tensor([[-1]])),
            p,
        )
        found[second] += chance * made.stop_BM[0, 1]
        found += chance * made.stop_BM[0, 0] * made.next_BMV[0, 0]
    assert (found - p[0, 0]).abs().max() > 0.1  # so this is why


def test_what_was_tested_is_the_kept_path_and_its_children(target: Target) -> None:
    """A path that ends at a leaf was not rejected there."""
    drafter = make_drafter("lm", target, noise=0.1)
    shape = Static([[0], [1], [0, 0], [0, 0, 0]])  # [1] is a leaf
    steps = [
        r
        for g in decode(target, PROMPTS, Way(drafter, shape), max_new_tokens=60, eos=())
        for r in g.steps
    ]
    leaves = [r for r in steps if r.path == (1,)]
    assert leaves and all(r.tested == r.accepted == 1 for r in leaves)
    assert all(r.tested == r.accepted + 1 for r in steps if r.path in ((), (0,), (0, 2)))
    assert all(r.bonus == (r.path in ((1,), (0, 2, 3))) for r in steps)
    assert all(r.bonus for r in generate(target, PROMPTS[0], max_new_tokens=5, eos=()).steps)


def test_a_stop_string_of_many_bytes_is_found() -> None:
    """Five characters of four one-byte tokens each."""
    stop = "\N{FIRE}" * 5
    text_bytes = list(("ab" + stop + "cd").encode())

    class Bytes:
        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode(errors="replace")

    stops = Stops([stop], Bytes())
    found = [n for n in range(1, len(text_bytes) + 1) if stops.ends([], text_bytes[:n])]
    assert found == [2 + 20]
    for cut in (1, 2, 5, 21):  # where the prompt ends and the response begins
        assert stops.ends(text_bytes[:cut], text_bytes[cut:22])
        assert not stops.ends(text_bytes[:cut], text_bytes[cut:23])


@pytest.mark.parametrize("name", ["eagle3", "lm", "suffix"])
def test_the_same_prompt_is_read_once_for_all_its_rows(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(name, target, noise=0.05)
    asked, seeds = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]], [3, 4, 5, 6]
    way = Way(drafter, sampler=T1)
    alone = [
        decode(target, [p], way, max_new_tokens=12, seeds=[s])[0] for p, s in zip(asked, seeds)
    ]
    read: list[int] = []
    hidden_states = target.hidden_states

    def counted(ids_BT: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(len(ids_BT))
        return hidden_states(ids_BT, *args, **kwargs)

    monkeypatch.setattr(target, "hidden_states", counted)
    made = decode(target, asked, way, max_new_tokens=12, seeds=seeds)
    assert read[0] == 2
    assert [(g.ids, g.steps) for g in made] == [(g.ids, g.steps) for g in alone]


@pytest.mark.parametrize("lengths", [[6], [6, 6], [6, 4]], ids=str)
def test_a_tree_deeper_than_the_window_sees_by_positions(lengths: list[int]) -> None:
    """A window of 2: the slots of a tree lie further apart than its positions. The deepest node's
    logits are those of its path as a text."""
    windowed = random_target(architectures(61, 2, window=2)["mistral"])
    prompts = [text(b, n)[0].tolist() for b, n in enumerate(lengths)]
    rows, cache = Rows(prompts, windowed.device), windowed.new_cache()
    windowed.hidden_states(rows.ids(), HiddenStateSpec(), cache=cache)
    cache.commit(lengths)
    nodes_BM = torch.tensor([[3, 5, 7, 9, 11, 13, 15, 17]]).expand(len(lengths), -1)
    parents_BM = torch.tensor([[-1, 0, 0, 1, 1, 3, 3, 5]]).expand(len(lengths), -1)
    _, logits = windowed.step(nodes_BM, HiddenStateSpec(), cache, parents_BM)
    for b, prompt in enumerate(prompts):
        _, final = windowed.hidden_states(
            torch.tensor([[*prompt, 3, 5, 9, 13, 17]]), HiddenStateSpec()
        )
        torch.testing.assert_close(logits[b, -1], windowed.logits(final)[0, -1])
