"""The contract of every drafter family: one class for training and decoding, lossless.

Run alone: python -m pytest tests/drafters/test_contract.py
"""

import functools
import gc
import itertools
import weakref
from copy import deepcopy

import pytest
import torch
from transformers import CohereConfig, GraniteConfig, PreTrainedConfig

from specdec.context import Context, HiddenStateSpec, Proposal
from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.base import Predictor, Trainable, initialisations_of, vocabulary
from specdec.drafters.lm import LMConfig
from specdec.drafters.registry import shipped
from specdec.forcing.teacher import TeacherForcing
from specdec.lab.drafters.translated import Translated
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape, Static
from specdec.targets.target import Target
from tests.drafters.families import (
    CONFIGS,
    SHAPES,
    TARGETS,
    L,
    T,
    V,
    context,
    logits_at,
    make_drafter,
    make_target,
    text,
)
from tests.tiny import (
    DRAFTER_OVERRIDES,
    REPOSITORY,
    batch_of,
    learn,
    random_target,
)

EOS = (5, 17)  # ids that end responses


@pytest.fixture(scope="module")
def target() -> Target:
    return of_kind("llama")


@pytest.fixture(params=list(CONFIGS))
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return make_drafter(request.param, target)


def test_depth_k_does_not_read_later_drafted_tokens(target: Target, drafter: Drafter) -> None:
    ctx, anchors = context(target, drafter, text(0)), torch.tensor([[6, 9]])
    drafted = torch.randint(0, V, (1, 2, 2), generator=torch.Generator().manual_seed(3))
    base = logits_at(drafter, ctx, anchors, drafted)
    for k in range(2):
        changed = drafted.clone()
        changed[..., k] = (changed[..., k] + 7) % V
        other = logits_at(drafter, ctx, anchors, changed)
        torch.testing.assert_close(other[:, :, : k + 1], base[:, :, : k + 1])
    one = logits_at(drafter, ctx, anchors, drafted[..., :0])
    torch.testing.assert_close(one, base[:, :, :1], atol=1e-4, rtol=1e-4)


def test_nothing_at_or_after_the_anchor_is_read_but_its_token(
    target: Target, drafter: Drafter
) -> None:
    ids, a = text(1), 8
    drafted = torch.tensor([[[5, 9]]])
    ctx = context(target, drafter, ids)
    base = logits_at(drafter, ctx, torch.tensor([[a]]), drafted)
    spoiled = Context(
        ids.clone(),
        None if ctx.layers_BTF is None else ctx.layers_BTF.clone(),
        None if ctx.final_BTD is None else ctx.final_BTD.clone(),
    )
    spoiled.ids_BT[:, a + 1 :] = 3
    for hidden_states in (spoiled.layers_BTF, spoiled.final_BTD):
        if hidden_states is not None:
            hidden_states[:, a:] = 50 * torch.randn_like(hidden_states[:, a:])
    after = logits_at(drafter, spoiled, torch.tensor([[a]]), drafted)
    torch.testing.assert_close(after, base)
    moved = Context(ids.clone(), ctx.layers_BTF, ctx.final_BTD)
    moved.ids_BT[:, a] = (ids[0, a] + 11) % V
    there = logits_at(drafter, moved, torch.tensor([[a]]), drafted)
    if drafter.config.name not in ("medusa", "mtp_heads", "unigram"):  # which read no token at all
        assert not torch.allclose(there, base)


def test_many_anchors_in_one_pass_equal_one_truncated_context_each(
    target: Target, drafter: Drafter
) -> None:
    ids = torch.cat([text(2), text(3)])
    anchors = torch.tensor([[4, 7, 10], [5, 6, 9]])
    drafted = torch.randint(0, V, (2, 3, 2), generator=torch.Generator().manual_seed(5))
    many = logits_at(drafter, context(target, drafter, ids), anchors, drafted)
    for b, i in itertools.product(range(2), range(3)):
        a = int(anchors[b, i])
        whole = context(target, drafter, ids[b : b + 1, : a + 1])
        ctx = first_tokens(whole, a + 1, a)  # hidden states as a decoder has them: up to a - 1
        one = logits_at(drafter, ctx, torch.tensor([[a]]), drafted[b : b + 1, i : i + 1])
        # the longer pass rounds differently, and layers of random weights amplify that
        torch.testing.assert_close(one[0, 0], many[b, i], atol=1e-3, rtol=1e-3)


def test_teacher_forcing_is_drafting_the_texts_own_tokens(target: Target, drafter: Drafter) -> None:
    ctx, anchors = context(target, drafter, text(4)), torch.tensor([[3, 6, 9]])
    forced = logits_at(drafter, ctx, anchors, None)
    own = torch.stack([ctx.ids_BT[0, a + 1 : a + drafter.depth] for a in (3, 6, 9)])[None]
    given = logits_at(drafter, ctx, anchors, own)
    torch.testing.assert_close(forced, given, atol=1e-4, rtol=1e-4)


def test_a_cast_leaves_rotary_frequencies_exact(drafter: Drafter) -> None:
    """In bfloat16, position 1,000 would be turned by the angle of some other one."""
    exact = {n: x.clone() for n, x in drafter.named_buffers() if n.endswith("inv_freq")}
    rounded = deepcopy(drafter).to(torch.bfloat16)
    assert all(p.dtype is torch.bfloat16 for p in rounded.parameters())
    for name, x in exact.items():
        assert torch.equal(rounded.get_buffer(name), x)


def test_packed_documents_do_not_see_each_other(target: Target, drafter: Drafter) -> None:
    one, two = text(5), text(6, 10)
    packed = torch.cat([one, two], 1)
    position = torch.cat([torch.arange(T), torch.arange(10)])[None]
    document = torch.tensor([[0] * T + [1] * 10])
    ctx, final = target.hidden_states(
        packed, drafter.needs, position_BT=position, document_BT=document
    )
    alone, alone_final = target.hidden_states(two, drafter.needs)
    torch.testing.assert_close(final[:, T:], alone_final, atol=1e-4, rtol=1e-4)
    here = logits_at(drafter, ctx, torch.tensor([[T + 1, T + 3, T + 6]]), None)
    there = logits_at(drafter, alone, torch.tensor([[1, 3, 6]]), None)
    torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)


def drafted(
    drafter: Drafter, ctx: Context, shape: Shape, sampler: Sampler, seed: int, cache: object = None
) -> Proposal:
    draws = RowDraws(range(seed, seed + len(ctx.ids_BT)), ctx.ids_BT.device)
    choose = Choose(sampler, "without", draws, vocabulary(drafter), V)
    return drafter.draft(ctx, shape, choose, cache)


def first_tokens(ctx: Context, ids: int, states: int, rows: slice = slice(None)) -> Context:
    """These rows of a context with so many ids, and hidden states of so many."""
    layers, final = (
        None if x is None else x[rows, :states] for x in (ctx.layers_BTF, ctx.final_BTD)
    )
    return Context(ctx.ids_BT[rows, :ids], layers, final)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_draft_equals_the_uncached_default(
    target: Target, drafter: Drafter, temperature: float, shape: Shape
) -> None:
    sampler = Sampler(temperature)
    whole, cache = (
        context(target, drafter, torch.cat([text(7, 24), text(8, 24)])),
        drafter.new_cache(),
    )
    # a decoder's history: contexts that grow by unequal steps, each drafted from once
    for n, ends in enumerate([(6, 9), (7, 12), (9, 13), (13, 14), (14, 18), (20, 19)]):
        ctx = first_tokens(whole, max(ends), max(ends))
        ctx.lengths = list(ends)
        cached = drafted(drafter, ctx, shape, sampler, 9 * n, cache)
        for b, end in enumerate(ends):  # a row alone, cut where a decoder would
            alone = first_tokens(whole, end, end - 1, slice(b, b + 1))
            plain = drafted(drafter, alone, shape, sampler, 9 * n + b)
            tokens = cached.tokens_BG[b, : plain.tokens_BG.shape[1]].tolist()
            assert tokens == plain.tokens_BG[0].tolist()
            assert (cached.tokens_BG[b, plain.tokens_BG.shape[1] :] == -1).all()
            if cached.parents_BG is not None and plain.parents_BG is not None:
                parents = cached.parents_BG[b, : plain.tokens_BG.shape[1]].tolist()
                assert parents == plain.parents_BG[0].tolist()
            if cached.q_BGV is not None and plain.q_BGV is not None:
                q_NV = cached.q_BGV[b, : plain.tokens_BG.shape[1]]
                torch.testing.assert_close(q_NV, plain.q_BGV[0], atol=1e-4, rtol=1e-4)


LIKE_LLAMA = {k: v for k, v in TARGETS["llama"].to_dict().items() if k != "model_type"}


@pytest.mark.parametrize(
    "kind",
    [
        TARGETS["llama"],
        TARGETS["gemma2"],
        CohereConfig(**LIKE_LLAMA, logit_scale=0.25),
        GraniteConfig(**LIKE_LLAMA, logits_scaling=8.0),
    ],
    ids=lambda c: c.model_type,
)
def test_oracle_draft_has_alpha_one_at_every_depth(kind: PreTrainedConfig) -> None:
    """A draft that is the target: α = 1; with labels shifted by one, or without the scale that its
    kind gives logits, it would be far lower."""
    target = random_target(kind)
    config = LMConfig(depth=3, layers=list(range(L)), train_embeddings=True)
    drafter = DRAFTERS["lm"].build(config, target).float().eval()
    ids = text(8, 40)[0].tolist()
    batch = batch_of(target, drafter.needs, Sampler(1.0), [ids], [[False] * 4 + [True] * 36])
    alpha = TeacherForcing(drafter, target, Sampler(1.0))(batch, measure=True).alpha
    valid = alpha.sampled > 0
    assert valid.sum() > 90
    torch.testing.assert_close(alpha.sampled[valid], torch.ones(int(valid.sum())))
    assert (alpha.greedy[valid] == 1).all()
    result = generate(target, ids[:8], Way(drafter, Chain(3)), max_new_tokens=30)
    assert all(r.accepted == r.drafted for r in result.steps)


@functools.cache
def of_kind(kind: str) -> Target:
    return make_target(kind)


@functools.cache
def greedy(kind: str, *prompt: int) -> list[int]:
    """The target's own response of at most 16 tokens."""
    return generate(of_kind(kind), prompt, max_new_tokens=16, eos=EOS).ids


@pytest.mark.parametrize("kind", list(TARGETS))
def test_greedy_decoding_is_transformers(kind: str) -> None:
    for seed in range(3):
        prompt = text(seed, 12)
        theirs = of_kind(kind).model.generate(
            prompt, max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        ours = generate(of_kind(kind), prompt[0].tolist(), max_new_tokens=40)
        assert ours.ids == theirs[0, 12:].tolist()


# every family with every kind and every shape, and every kind with every shape, but not all three
PAIRS = [
    (name, kind, SHAPES[(i + j) % len(SHAPES)])
    for i, name in enumerate(CONFIGS)
    for j, kind in enumerate(TARGETS)
]


@pytest.mark.parametrize(
    ("name", "kind", "shape"), PAIRS, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_speculation_is_greedy_decoding(name: str, kind: str, shape: Shape) -> None:
    """Rows of unequal length end at different times. Each has the tokens and the speculation steps
    that it would have alone."""
    target = of_kind(kind)
    drafter = make_drafter(name, target, noise=0.05)
    prompts = [text(seed, length)[0].tolist() for seed, length in ((0, 4), (1, 14), (2, 8))]
    way, options = Way(drafter, shape), {"max_new_tokens": 16, "eos": EOS}
    plain = [greedy(kind, *p) for p in prompts]
    alone = [decode(target, [p], way, **options)[0] for p in prompts]
    together = decode(target, prompts, way, **options)
    assert [g.ids for g in alone] == plain
    assert [g.ids for g in together] == plain
    assert [g.steps for g in together] == [g.steps for g in alone]
    assert all(sum(r.accepted + 1 for r in g.steps) == g.emitted + len(g.overrun) for g in together)


@functools.cache
def looping() -> list[list[int]]:
    """Prompts with their responses. The responses of random targets end in a loop, and the prompts
    reach into it, so that what follows can be copied."""
    begun = [text(seed, 12)[0].tolist() for seed in range(3)]
    prompts = [p + generate(of_kind("llama"), p, max_new_tokens=40).ids for p in begun]
    return [p + generate(of_kind("llama"), p, max_new_tokens=40).ids for p in prompts]


def taught(name: str, target: Target, texts: list[list[int]]) -> Drafter:
    """A drafter that has learned these texts by heart, so that it is right about many of them."""
    drafter = make_drafter(name, target, noise=0.05)
    learn(drafter, texts)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    if drafter.trains(drafter.config):
        forcing = TeacherForcing(drafter, target, Sampler(1.0))
        masks = [[True] * len(ids) for ids in texts]
        batch = batch_of(target, drafter.needs, Sampler(1.0), texts, masks)
        optimizer = torch.optim.Adam(weights, lr=1e-2)
        for _ in range(30):
            loss = forcing(batch)[0]
            optimizer.zero_grad()
            (loss / sum(map(len, texts))).backward()
            optimizer.step()
    return drafter.eval()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_family_accepts_and_stays_identical(target: Target, name: str) -> None:
    """A family that accepted nothing would pass every test of identity. Taught the very responses,
    each commits more than one token a pass somewhere, in chains and in trees."""
    texts = looping()
    drafter = taught(name, target, texts)
    for shape in SHAPES:
        prompts = [ids[:-40] for ids in texts]
        fast = decode(target, prompts, Way(drafter, shape), max_new_tokens=40)
        assert [p + g.ids for p, g in zip(prompts, fast, strict=True)] == texts
        assert sum(r.accepted for g in fast for r in g.steps) >= 3, shape


DECLARES = {  # the attribute that declares an ability, and the methods that a family then gives
    "copies": ("copied",),
    "fits_texts": ("fit",),
    "weighs_choices": ("weigh",),
    "sends_scouts": ("hear",),
    "estimates_acceptance": ("confidence",),
    "separate_heads": ("read_by_heads", "heads_of"),
}


@pytest.mark.parametrize("kind", shipped(), ids=lambda kind: kind.__name__)
def test_a_drafter_gives_the_methods_that_its_attributes_declare(kind: type[Drafter]) -> None:
    """And no method of an ability that it does not declare."""

    def gives(method: str) -> bool:
        default = getattr(Trainable, method)
        return getattr(kind, method, default) is not default

    if kind is Translated:  # which copies with one of its methods, and has a q with the other
        assert gives("copied") and not kind.copies
        return
    for attribute, methods in DECLARES.items():
        assert [*map(gives, methods)] == [getattr(kind, attribute, False)] * len(methods), attribute
    assert gives("solve_closed_form") or "closed_form" not in initialisations_of(kind.Config)
    adapts = kind.adapts_target.__func__ is not Drafter.adapts_target.__func__  # type: ignore[attr-defined]
    assert gives("adapted") == gives("with_adapters_merged") == adapts
    assert kind.copies != issubclass(kind, Predictor)  # else it has a distribution of its own
    assert issubclass(kind, Trainable) or not kind.trains(kind.Config())


def test_no_family_is_forgotten() -> None:
    """Here, in the jobs on a tiny target, or in a file of its own because it wants another one."""
    elsewhere = {"seq2seq_lm": "lab/targets/test_seq2seq.py"}
    elsewhere["translated"] = "lab/drafters/test_translated.py"
    for name, file in elsewhere.items():
        assert DRAFTERS[name].__name__ in (REPOSITORY / "tests" / file).read_text()
    assert {config.name for config in CONFIGS.values()} | set(elsewhere) == set(DRAFTERS)
    assert set(DRAFTER_OVERRIDES) | set(elsewhere) == set(DRAFTERS)


TREE = Static([[0], [1], [0, 0], [0, 1], [1, 0]])


VERIFICATIONS: list[
    tuple[str, bool, Shape]
] = [  # for all families: q of a chain, q of siblings, no q
    ("block", False, Chain(2)),
    ("recursive", False, TREE),
    ("point_mass", False, Dynamic(2, 6, 3)),
]
MORE_VERIFICATIONS: list[tuple[str, bool, Shape]] = [
    ("rejection", False, Chain(2)),
    ("block", True, Chain(2)),
    ("specinfer", False, TREE),
    ("kseq", False, TREE),
    ("traversal", False, TREE),
    ("point_mass", True, TREE),
]
SAMPLED, PROMPT = Sampler(0.7, top_k=4), text(9, 8)[0].tolist()


@functools.cache
def first_two() -> dict[tuple[int, int], float]:
    """The target's probability of every pair of first tokens after PROMPT."""
    target, found = of_kind("llama"), {}

    def after(ids: list[int]) -> torch.Tensor:
        final = target.hidden_states(torch.tensor([ids]), HiddenStateSpec())[1]
        return SAMPLED.probs(target.logits(final[:, -1]))[0]

    first = after(PROMPT)
    for x in first.nonzero()[:, 0].tolist():
        second = after([*PROMPT, x])
        for y in second.nonzero()[:, 0].tolist():
            found[x, y] = float(first[x] * second[y])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verification", "greedy_draft", "shape"),
    [(name, *VERIFICATIONS[(i + j) % 3]) for i, name in enumerate(CONFIGS) for j in range(2)]
    + [
        (name, *verification)
        for name in ("eagle3", "medusa")
        for verification in MORE_VERIFICATIONS
    ],
)
def test_committed_tokens_follow_p(
    target: Target, name: str, verification: str, greedy_draft: bool, shape: Shape
) -> None:
    """test_verify.py enumerates the verification methods exactly; this test counts, end to end.

    Verification methods know no family, so all run with a family that reads drafted tokens and one
    that does not. The first two tokens of many generations are compared with p computed by the
    target. With n draws the L1 distance of an empirical distribution over its c cells is about
    sqrt(2 c / (π n)); twice that, .2 for 16 cells, is the bound, which a verification method that
    keeps every draft exceeds many times over.
    """
    drafter, expected, n = make_drafter(name, target), first_two(), 1000
    counts = dict.fromkeys(expected, 0)
    for start in range(0, n, 100):
        results = decode(
            target,
            [PROMPT] * 100,
            Way(
                drafter,
                shape,
                sampler=SAMPLED,
                verification=verification,
                greedy_draft=greedy_draft,
            ),
            max_new_tokens=2,
            seeds=range(start, start + 100),
        )
        for result in results:
            counts[tuple(result.ids)] += 1  # a token that p forbids is a KeyError
    distance = sum(abs(counts[k] / n - expected[k]) for k in expected)
    assert distance < 2 * (2 * len(expected) / (3.1416 * n)) ** 0.5


def test_the_memory_of_a_generation_is_free_when_it_ends(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector: caches of large batches would pile up between its speculation
    steps."""
    made: list[weakref.ref[SlotCache]] = []
    build = SlotCache.__init__

    def recorded(cache: SlotCache, *given: object) -> None:
        build(cache, *given)
        made.append(weakref.ref(cache))

    monkeypatch.setattr(SlotCache, "__init__", recorded)
    gc.disable()
    try:
        prompts = [text(1)[0].tolist(), text(2, 9)[0].tolist()]
        decode(target, prompts, Way(drafter, Chain(drafter.depth)), max_new_tokens=6)
        alive = sum(cache() is not None for cache in made)
    finally:
        gc.enable()
    assert made
    assert alive == 0
