"""Targets with states that cannot be rolled back: decoded and trained for like any other.

Run alone: python -m pytest tests/targets/test_recurrent_states.py (under 60 s on 2 cores)
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.context import HiddenStateSpec, Proposal
from specdec.decoding.decode import decode
from specdec.decoding.speculative import speculative_generate
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.lm import LMConfig
from specdec.drafters.suffix import SuffixConfig
from specdec.errors import UserError
from specdec.forcing.batch import read_drafts
from specdec.lab.decoding.beam import beam_search
from specdec.lab.drafters.counts import BigramConfig
from specdec.lab.drafters.early_exit import EarlyExitConfig
from specdec.lab.drafters.lookahead import LookaheadConfig
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Static
from specdec.targets import self_check
from specdec.targets.target import Reading, Target
from tests.laws import law
from tests.tiny import Tiny, conversations, learn, make_tokenizer, random_drafter, write_jsonl

V = 61
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    # Qwen3.5: gated delta rule
    "qwen3_5_text": DELTA,
    # LFM2: short convolutions
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    # Nemotron-H: Mamba 2, and layers with neither states nor keys
    "nemotron_h": {
        **MAMBA,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "chunk_size": 8,
    },
    # Falcon-H1: states and keys in the same layer
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    # Mamba 1: goes on from a state by one token only
    "mamba": {"state_size": 8, "time_step_rank": 4},
    # RecurrentGemma: its modules keep the states, and go on from them by one token only
    "recurrent_gemma": {
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    # MiniMax-01: lightning attention, in a cache of its own class
    "minimax": {
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "num_local_experts": 2,
        "block_size": 8,
    },
    # RWKV: a list of tensors, which is replayed
    "rwkv": {"attention_hidden_size": 32},
}
XLSTM = {"hidden_size": 128, "num_blocks": 4, "num_heads": 4}
REAL = ("qwen3_5_text", "lfm2", "nemotron_h")


def model_of(kind: str, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SHAPE, **KINDS.get(kind, {}), **more})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.generation_config.eos_token_id = None
    return model


def target_of(kind: str, **more: Any) -> Target:
    return Target(model_of(kind, **more), None, kind)


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


def texts(count: int, length: int, seed: int = 3) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, V, (count, length), generator=draw).tolist()


def bigram(target: Target, learnt: list[list[int]], depth: int = 3) -> Any:
    drafter = DRAFTERS["bigram"].build(BigramConfig(depth=depth), target)
    learn(drafter, learnt)
    return drafter


def transformers_responses(target: Target, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Prompts of one length, continued by transformers. RWKV mixes up the rows of a batch when it
    reads single tokens."""
    if target.name == "rwkv" and len(prompts) > 1:
        return [transformers_responses(target, [prompt], new)[0] for prompt in prompts]
    ids = torch.tensor(prompts)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    made = target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return made[:, ids.shape[1] :].tolist()


def by_transformers(target: Target, prompt: list[int], after: torch.Tensor) -> torch.Tensor:
    """The logits [B, 1 + T, V] of the last token of a prompt and of those after it [B, T], read as
    transformers' `generate` reads them: the prompt at once, then one token at a time."""
    ids, kept = torch.tensor([prompt]).expand(len(after), -1), dict[str, Any]()
    if target.name == "recurrent_gemma":  # which makes a cache, but does not return it
        kept["cache"] = DynamicCache(config=target.config)
    with torch.no_grad():
        out = target.model(ids, use_cache=True, **kept)
        kept = kept or {key: out[key] for key in ("cache", "state") if key in out}
        logits = [out.logits[:, -1:]]
        for column in after.split(1, 1):
            logits.append(target.model(column, use_cache=True, **kept).logits)
    return torch.cat(logits, 1)


# --- Decoding -----------------------------------------------------------------------------------


def test_200_responses_are_those_of_transformers(target: Target) -> None:
    """Prompts of unequal lengths share a batch, drafts are accepted and rejected. Fewer than 200
    prompts for the kinds that are not among the most wanted."""
    prompts, expected = [], []
    lengths = range(2, 22) if target.name in REAL else range(2, 22, 4)
    for length in lengths:
        some = texts(10, length, length)
        prompts += some
        expected += transformers_responses(target, some, 12)
    drafter = DRAFTERS["suffix"].build(SuffixConfig(depth=3), target)
    learn(drafter, [p + a for p, a in zip(prompts[::2], expected[::2], strict=True)])
    order = [i for start in range(10) for i in range(start, len(prompts), 10)]  # lengths alternate
    same, counts = 0, list[int]()
    for start in range(0, len(prompts), 20):
        batch = order[start : start + 20]
        made = decode(target, [prompts[i] for i in batch], Way(drafter), max_new_tokens=12, eos=())
        same += sum(g.ids == expected[i] for g, i in zip(made, batch, strict=True))
        counts += [r.accepted for g in made for r in g.steps]
    assert same == len(prompts) == 10 * len(lengths)
    assert {0, 1, 2, 3} == set(counts)


def test_rows_leave_a_batch_and_prompts_repeat(target: Target) -> None:
    """Rows that end early, of which one prompt occurs twice."""
    prompts = [texts(1, 9)[0], texts(1, 4)[0], texts(1, 9)[0]]
    plain = decode(target, prompts, max_new_tokens=16, eos=())
    ends = plain[1].ids[5]
    alone = [decode(target, [p], max_new_tokens=16, eos=(ends,))[0].ids for p in prompts]
    drafter = bigram(target, [p + g.ids for p, g in zip(prompts, plain, strict=True)])
    together = decode(target, prompts, Way(drafter), max_new_tokens=16, eos=(ends,))
    assert [g.ids for g in together] == alone
    assert len({len(ids) for ids in alone}) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits_states_are_kept_and_moved_as_well(kind: str) -> None:
    """Also where a model passes float32 between its layers. In 16 bits, chains and vanilla decoding
    may round to other tokens, so what is compared is logits."""
    target = Target(model_of(kind).bfloat16(), None, kind)
    prompt = texts(1, 7)[0]
    cache = target.new_cache()
    needs = HiddenStateSpec((2,), final_hidden=True)
    target.hidden_states(torch.tensor([prompt]), needs, cache=cache)
    cache.commit([7])
    ctx, _ = target.hidden_states(torch.tensor([[5, 9, 11]]), needs, cache=cache)
    assert ctx.layers_BTF.dtype == ctx.final_BTD.dtype == torch.bfloat16
    cache.commit([2])
    ours = target.step(torch.tensor([[8]]), needs, cache)[1][0, -1].float()
    theirs = by_transformers(target, prompt, torch.tensor([[5, 9, 8]]))[0, -1].float()
    assert (ours - theirs).norm() < 0.05 * theirs.norm()  # 8 bits, through four layers


def test_padding_on_either_side_changes_nothing(target: Target) -> None:
    short, long = texts(1, 5)[0], texts(1, 8)[0]
    ids = torch.tensor([[0, 0, 0, *short], long])
    made = speculative_generate(
        target, bigram(target, [long]), ids, ids != 0, max_new_tokens=6, do_sample=False
    )
    assert made.generations[0].ids == transformers_responses(target, [short], 6)[0]


@pytest.mark.parametrize("kind", [*REAL, "recurrent_gemma", "minimax"])
def test_sampled_tokens_follow_p_exactly(kind: str) -> None:
    """On a vocabulary of 4, the law of three tokens is added up over every draft of two tokens and
    every number of accepted ones. All that is not drafted is drawn from logits over states that
    were rolled back, each row by another number of tokens; expected is transformers' own p."""
    V, prompt, sampler = 4, [1, 3, 2, 3, 3, 0], Sampler(0.8)
    target = target_of(kind, vocab_size=V, eos_token_id=None, pad_token_id=None, bos_token_id=None)

    def p_of(logits: torch.Tensor) -> torch.Tensor:
        return sampler.probs(logits).double()

    draw = torch.Generator().manual_seed(1)
    first_V, then_VV = (torch.rand(*n, V, generator=draw).double() for n in ((), (V,)))
    first_V, then_VV = first_V / first_V.sum(), then_VV / then_VV.sum(-1, keepdim=True)
    chains = [(a, b, n) for a in range(V) for b in range(V) for n in range(3)]  # n: accepted
    a, b, n = (torch.tensor(column) for column in zip(*chains, strict=True))
    cache, rows = target.new_cache(), torch.arange(len(chains))
    target.hidden_states(torch.tensor([prompt[:-1]]), HiddenStateSpec(), cache=cache)
    cache.commit([len(prompt) - 1])
    cache.select([0] * len(chains))
    ids = torch.stack([torch.full_like(a, prompt[-1]), a, b], 1)
    p_BMV = p_of(target.step(ids, HiddenStateSpec(), cache)[1])
    cache.commit((n + 1).tolist())
    q_BGV = torch.stack([first_V.expand(len(a), -1), then_VV[a]], 1)
    rule = law(VERIFICATION_METHODS["rejection"], Proposal(ids[:, 1:], q_BGV), p_BMV)
    mass_B = first_V[a] * then_VV[a, b] * rule.stop_BM[rows, n]
    next_BV, joint = rule.next_BMV[rows, n], torch.zeros(V, V, V, dtype=torch.float64)

    # two accepted: the third token is the target's own
    two = n == 2
    joint.index_put_((a[two], b[two]), mass_B[two, None] * next_BV[two], accumulate=True)
    # fewer: the target's own token x is read next, and after it y, if there is room for one more
    some = (n < 2).nonzero()[:, 0].repeat_interleave(V)
    x, every = torch.arange(V).repeat(len(some) // V), torch.arange(len(some))
    cache.select(some.tolist())
    p_NV = p_of(target.step(x[:, None], HiddenStateSpec(), cache)[1][:, -1])
    cache.commit([1] * len(some))
    mass_N = mass_B[some] * next_BV[some, x]
    one = n[some] == 1
    joint.index_put_((a[some[one]], x[one]), mass_N[one, None] * p_NV[one], accumulate=True)
    none = every[~one].repeat_interleave(V)
    y = torch.arange(V).repeat(len(none) // V)
    cache.select(none.tolist())
    p_SV = p_of(target.step(y[:, None], HiddenStateSpec(), cache)[1][:, -1])
    mass_S = mass_N[none] * p_NV[none, y]
    joint.index_put_((x[none], y), mass_S[:, None] * p_SV, accumulate=True)

    last, every = torch.tensor(prompt[-1:]), torch.arange(V)
    p_BTV = p_of(by_transformers(target, prompt[:-1], torch.cartesian_prod(last, every, every)))
    p_BTV = p_BTV[:, 1:].view(V, V, 3, V)
    expected = p_BTV[:, 0, 0].diagonal()[:, None, None] * p_BTV[:, 0, 1][..., None] * p_BTV[:, :, 2]
    torch.testing.assert_close(joint, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(joint.sum(), torch.ones((), dtype=torch.float64))


def test_what_is_dropped_leaves_no_trace(target: Target) -> None:
    prompt = texts(1, 7)[0]
    cache = target.new_cache()
    target.hidden_states(torch.tensor([prompt]), HiddenStateSpec(), cache=cache)
    cache.commit([7])
    read = [5, 9, 11, 4]
    expected = target.step(torch.tensor([read]), HiddenStateSpec(), cache)[1]
    cache.drop()
    target.step(torch.tensor([[8, 8]]), HiddenStateSpec(), cache)
    cache.drop()
    parts = [
        target.step(torch.tensor([x]), HiddenStateSpec(), cache)[1] for x in (read[:1], read[1:])
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    cache.commit([2])  # of the tokens of two passes
    ours = target.step(torch.tensor([[6, 3]]), HiddenStateSpec(), cache)[1]
    theirs = by_transformers(target, prompt, torch.tensor([[*read[:2], 6, 3]]))[:, -2:]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert cache.nbytes > 0 and cache.lengths == [9]


# --- What a target with states cannot do --------------------------------------------------------


def test_what_needs_branches_is_refused() -> None:
    target, prompt = target_of("lfm2"), texts(1, 6)[0]
    drafter, tree = bigram(target, [prompt]), Static([[0], [1]])
    with pytest.raises(UserError, match=r"keeps a state .* draft chains"):
        decode(target, [prompt], Way(drafter, tree), max_new_tokens=4)
    with pytest.raises(UserError, match="decode without beams"):
        beam_search(target, prompt, beams=2, max_new_tokens=4)
    lookahead = DRAFTERS["lookahead"].build(LookaheadConfig(depth=2), target)
    with pytest.raises(UserError, match="sends scouts"):
        decode(target, [prompt], Way(lookahead), max_new_tokens=4)
    with pytest.raises(UserError, match=r"decode\.compile=false"):
        decode(target, [prompt], Way(drafter, compiled=True), max_new_tokens=4)
    with pytest.raises(UserError, match="cannot read a branch"):
        target.step(
            torch.tensor([prompt]), HiddenStateSpec(), target.new_cache(), torch.zeros(1, 6)
        )
    with pytest.raises(UserError, match="which drafts would move"):
        DRAFTERS["early_exit"].build(EarlyExitConfig(layers=2), target)
    for source in ("target", "random"):
        with pytest.raises(UserError, match="attention layers only"):
            DRAFTERS["lm"].build(LMConfig(source=source, layers=None), target)


def test_states_that_move_otherwise_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Zamba 2's, whose steps of one token do not bound what its whole pass bounds."""
    right = self_check._step_error

    def wrong(target: Target) -> float:
        return right(target) + 0.01 * (target.reading is not Reading.RECOMPUTE)

    monkeypatch.setattr(self_check, "_step_error", wrong)
    assert target_of("lfm2").reading is Reading.RECOMPUTE
    monkeypatch.setattr(self_check, "_step_error", lambda target: right(target) + 0.01)
    with pytest.raises(UserError, match="other logits for a text when more tokens") as caught:
        target_of("lfm2")
    assert "\n" not in str(caught.value)


def test_how_each_kind_is_read(target: Target) -> None:
    assert isinstance(target, Target)
    assert target.reading is (Reading.APART if target.name == "rwkv" else Reading.SLOTS)


def test_positions_do_not_depend_on_what_the_first_layer_keeps() -> None:
    """MiniMax-01 begins with lightning attention, and counts its positions by the first layer."""
    target = target_of("minimax", layer_types=["linear_attention", "full_attention"] * 2)
    assert isinstance(target, Target) and target.reading is Reading.SLOTS


def test_what_is_replayed_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that accepts all tokens of its passes reads none of them again. Another one reads what
    it has accepted since again in its next passes, and by itself once that is more than 16."""
    target = target_of("xlstm", **XLSTM)
    read: list[tuple[int, ...]] = []
    forward = type(target.body).forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["use_cache"]:
            read.append(tuple(kwargs["input_ids"].shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target.body), "forward", noted)
    cache, rows, ends = target.new_cache(), torch.tensor(texts(2, 60)), [0, 0]
    for tokens, kept, expected in (
        (20, (20, 20), [(2, 20)]),
        (5, (5, 2), [(2, 5)]),
        (3, (3, 1), [(1, 3), (1, 2 + 3)]),
        (9, (9, 8), [(1, 9), (1, 3 + 9)]),
        (9, (9, 8), [(1, 9), (1, 11 + 9)]),
        (2, (0, 1), [(1, 2), (1, 19), (1, 2)]),
        (1, (1, 1), [(1, 1), (1, 1 + 1)]),
    ):
        read.clear()
        more = torch.stack([row[n : n + tokens] for row, n in zip(rows, ends, strict=True)])
        logits = target.step(more, HiddenStateSpec(), cache)[1]
        assert read == expected
        for row, n, ours in zip(rows, ends, logits, strict=True):
            whole = target.model(row[None, : n + tokens], use_cache=False).logits[0, n:]
            torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)
        cache.commit(kept)
        ends = [n + count for n, count in zip(ends, kept, strict=True)]
    assert cache.nbytes > 2 * 4 * 4 * 16 * 32 * 4  # 2 rows, 4 layers, 4 heads, in 4 bytes


# --- Training -----------------------------------------------------------------------------------


def test_documents_of_a_row_do_not_leak(target: Target) -> None:
    """Two documents and padding in one row: the hidden states of each are those of it alone."""
    one, two = texts(1, 9)[0], texts(1, 6, 4)[0]
    ids = torch.tensor([[*one, *two, 0, 0]])
    position = torch.tensor([[*range(9), *range(6), 0, 1]])
    document = torch.tensor([[0] * 9 + [1] * 6 + [-1] * 2])
    needs = HiddenStateSpec((1, 3), final_hidden=True)
    ctx, _ = target.hidden_states(ids, needs, position_BT=position, document_BT=document)
    for alone, part in ((one, slice(0, 9)), (two, slice(9, 15))):
        theirs, _ = target.hidden_states(torch.tensor([alone]), needs)
        for ours, own in ((ctx.layers_BTF, theirs.layers_BTF), (ctx.final_BTD, theirs.final_BTD)):
            torch.testing.assert_close(ours[:, part], own, atol=1e-4, rtol=1e-4)


def test_a_draft_is_accepted_as_often_as_teacher_forcing_says(target: Target) -> None:
    """At T = 0 and at the anchors of a decoder, a head's own argmax given hidden states of whole
    texts is what it drafted over the cache, and is accepted where it is the target's."""
    prompts = texts(4, 8)
    drafter = random_drafter(Eagle3Config(depth=2, layers=[1, 2, 3], draft_vocab=None), target, 0.3)
    made = decode(target, prompts, Way(drafter), max_new_tokens=14, eos=())
    for g in made:
        whole = torch.tensor([g.prompt + g.ids + g.overrun])
        ctx, final = target.hidden_states(whole, drafter.needs)
        best = target.logits(final)[0].argmax(-1).tolist()
        for r in g.steps:
            hidden = drafter.hidden(
                ctx, torch.tensor([[r.anchor]]), torch.tensor([[r.tokens[:-1]]])
            )
            tokens = [int(drafter.unembed(h, k).argmax()) for k, h in enumerate(hidden[0, 0])]
            assert tuple(tokens) == r.tokens
            assert r.accepted == 0 or r.tokens[0] == best[r.anchor]


def test_the_states_after_each_draft_are_those_of_a_plain_pass(target: Target) -> None:
    """What training on the draft's own speculation steps reads: the rejected tokens branch off the
    text."""
    ids = texts(1, 12)[0]
    steps = [(3, 1, [ids[4], 7, 8]), (5, 0, [9, 9, 2]), (6, 2, [ids[7], ids[8], 5])]
    anchors, accepted, drafted = zip(*steps, strict=True)
    ctx, final, after = read_drafts(target, HiddenStateSpec((2,)), ids, anchors, accepted, drafted)
    whole, theirs = target.hidden_states(torch.tensor([ids]), HiddenStateSpec((2,)))
    torch.testing.assert_close(final, theirs)
    torch.testing.assert_close(ctx.layers_BTF, whole.layers_BTF)
    for (anchor, _, draft), states in zip(steps, after, strict=True):
        for k, state in enumerate(states):
            text = torch.tensor([[*ids[: anchor + 1], *draft[:k]]])
            own = target.hidden_states(text, HiddenStateSpec())[1][0, -1]
            torch.testing.assert_close(state, own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "drafter", "more"),
    [
        (
            "qwen3_5_text",
            "eagle3",
            ["data.responses=target", "decode.fastest=true", "combine_with=ngram"],
        ),
        (
            "nemotron_h",
            "dflash",
            ["data.responses=target", "rounds.count=2", "rounds.data=on_policy"],
        ),
        ("lfm2", "dflash", ["decode.batch=2"]),
        ("lfm2", "eagle3", ["decode.draft_length=goodput"]),
    ],
)
def test_a_whole_job(kind: str, drafter: str, more: list[str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = model_of(kind, vocab_size=len(tokenizer), max_position_embeddings=512, **ends)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    data = write_jsonl(tmp_path / "chats.jsonl", conversations(29))
    tiny = Tiny(tmp_path, tmp_path / "target", data)
    tiny.job(tmp_path / "run", drafter, "loop.epochs=1", *more)
    report = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "tree" not in report.split("##")[1]
    assert list((tmp_path / "run" / "export").glob("*.safetensors"))
