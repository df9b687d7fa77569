"""Encoder-decoder targets: speculation is greedy decoding, and transformers' own.

Run alone: python -m pytest tests/lab/targets/test_seq2seq.py
"""

import copy
import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    BartConfig,
    LlamaConfig,
    MT5Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM
from transformers.models.llama import LlamaForCausalLM

from specdec.context import Context, HiddenStateSpec, Proposal
from specdec.decoding.decode import decode, generate
from specdec.decoding.verification_methods import VERIFICATION_METHODS
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.ngram import NgramConfig
from specdec.errors import UserError
from specdec.forcing.teacher import AcceptanceTable, TeacherForcing
from specdec.formats import draft_checkpoint
from specdec.lab.decoding.beam import beam_search
from specdec.lab.drafters.seq2seq_lm import Seq2SeqLM, Seq2SeqLMConfig
from specdec.lab.targets.seq2seq import Seq2SeqCache, Seq2SeqTarget
from specdec.measure.results import Results
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Dynamic, Shape, Static
from specdec.targets.target import Target
from tests.laws import law
from tests.tiny import batch_of, make_tiny, make_tokenizer

V = 53
T5 = dict(
    vocab_size=V,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_heads=4,
    num_layers=3,  # transformers counts these for its decoder cache too: no fewer
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    decoder_start_token_id=0,
)
BART = dict(
    vocab_size=V,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=128,
    init_std=0.1,
    forced_eos_token_id=None,
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "t5": T5Config(**T5),
    "t5-v1.1": T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5-eager": T5Config(**T5),
    "mt5": MT5Config(**T5),
    "bart": BartConfig(**BART),
}


def make_target(kind: str, seed: int = 0) -> Seq2SeqTarget:
    """A random model whose weights, biases of positions among them, all matter."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[kind])
    attention = "eager" if kind == "t5-eager" else "sdpa"
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and "weight" in name:  # or a tied head repeats what was read last
                weight *= torch.randint(0, 2, weight.shape) * 2 - 1
            elif "shared" not in name and kind != "bart":  # whose layers are normed after
                weight += (1.0 if "relative" in name else 0.2) * torch.randn_like(weight)
        if kind in ("t5-v1.1", "bart"):  # a head of its own, as T5-v1.1's checkpoints have it
            model.lm_head.weight = torch.nn.Parameter(torch.randn(V, 32))
        if kind == "bart":
            model.final_logits_bias += torch.randn_like(model.final_logits_bias)
    return Seq2SeqTarget(model, None, f"tiny-{kind}")


def prompts(target: Seq2SeqTarget, lengths: tuple[int, ...] = (9, 4, 13)) -> list[list[int]]:
    """Encoder tokens, the eos, and the decoder's start token, of several lengths."""
    draw = torch.Generator().manual_seed(0)
    eos = 2 if target.seq2seq.twice else 1
    return [
        torch.randint(3, V, (n,), generator=draw).tolist() + [eos, target.seq2seq.start]
        for n in lengths
    ]


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_plain_decoding_is_transformers(kind: str) -> None:
    target = make_target(kind)
    many = prompts(target)
    for prompt in many:
        theirs = target.model.generate(
            torch.tensor([prompt[:-1]]),
            max_new_tokens=30,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
        )[0, 1:].tolist()
        ours = generate(target, prompt, max_new_tokens=30, eos=())
        assert ours.ids == theirs and len(theirs) == 30
        assert len(set(theirs)) > 2
    together = decode(target, many, max_new_tokens=30, eos=())
    assert [g.ids for g in together] == [
        generate(target, p, max_new_tokens=30, eos=()).ids for p in many
    ]


def make_drafter(name: str, target: Seq2SeqTarget) -> Drafter:
    """A small T5 of its own, near enough to the target to be right now and then."""
    torch.manual_seed(1)
    config = {
        "seq2seq_lm": Seq2SeqLMConfig(depth=3, source="random", overrides={}),
        "ngram": NgramConfig(depth=3),
        "medusa": MedusaConfig(depth=3),
    }[name]
    drafter = DRAFTERS[name].build(config, target).float().eval()
    if name == "seq2seq_lm":
        drafter.model.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    return drafter


TREES: list[Shape] = [
    Static([[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 0]]),
    Dynamic(3, 10, 4),
]


@pytest.mark.parametrize(
    "kind,name,shape",
    [(kind, "seq2seq_lm", Chain(3)) for kind in CONFIGS]
    + [(kind, name, Chain(3)) for kind in ("t5", "bart") for name in ("ngram", "medusa")]
    + [(kind, "seq2seq_lm", tree) for kind in ("t5", "t5-eager", "bart") for tree in TREES],
)
def test_speculation_is_greedy_decoding(kind: str, name: str, shape: Shape) -> None:
    """One prompt or a ragged batch, rows that end at different times, chain or tree."""
    target = make_target(kind)
    drafter = make_drafter(name, target)
    many = prompts(target)
    eos = tuple(range(3, 9))
    plain = [generate(target, p, max_new_tokens=20, eos=eos).ids for p in many]
    way, options = Way(drafter, shape), {"max_new_tokens": 20, "eos": eos}
    alone = [decode(target, [p], way, **options)[0] for p in many]  # type: ignore[arg-type]
    together = decode(target, many, way, **options)  # type: ignore[arg-type]
    assert [g.ids for g in alone] == plain
    assert [g.ids for g in together] == plain
    assert [g.steps for g in together] == [g.steps for g in alone]
    if name == "seq2seq_lm":
        assert sum(r.accepted for g in alone for r in g.steps) > 0


def test_its_depth_is_that_of_its_decoder() -> None:
    """BART's config has other numbers of layers: 12 by default, and those of the encoder."""
    for kind in CONFIGS:
        target = make_target(kind)
        assert target.depth == len(target.layers) == target.config.num_hidden_layers


def test_only_the_decoders_own_tokens_take_its_positions() -> None:
    """BART has 128 for either side: an encoder's 121 leave 127 new ones after the start token."""
    target = make_target("bart")
    (prompt,) = prompts(target, (120,))
    options = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
    theirs, beams = (
        target.model.generate(torch.tensor([prompt[:-1]]), num_beams=n, **options)[0, 1:].tolist()
        for n in (1, 2)
    )
    medusa = make_drafter("medusa", target)
    made = generate(target, prompt, Way(medusa, Chain(3)), max_new_tokens=12, eos=())
    assert made.ids == generate(target, prompt, max_new_tokens=12, eos=()).ids == theirs
    assert all(r.drafted == 3 for r in made.steps)
    assert beam_search(target, prompt, beams=2, max_new_tokens=12, eos=()).ids == beams
    for decoded in (generate, partial(beam_search, beams=2)):
        with pytest.raises(UserError, match="a prompt of 1 tokens and 128 new ones"):
            decoded(target, prompt, max_new_tokens=128)


def test_the_memory_of_a_generation_is_free_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, as of a causal target."""
    target = make_target("t5")
    drafter = make_drafter("seq2seq_lm", target)
    made: list[weakref.ref[Seq2SeqCache]] = []
    build = Seq2SeqCache.__init__

    def recorded(cache: Seq2SeqCache, layers: int) -> None:
        build(cache, layers)
        made.append(weakref.ref(cache))

    monkeypatch.setattr(Seq2SeqCache, "__init__", recorded)
    gc.collect()
    gc.disable()
    try:
        decode(target, prompts(target), Way(drafter), max_new_tokens=6)
        alive = [cache() is not None for cache in made]
    finally:
        gc.enable()
    assert alive == [False, False]  # the target's and the draft's


def test_one_pass_over_documents_is_each_alone() -> None:
    """Teacher forcing's pass: packed documents, padding, hidden states of layers, 0 in the
    encoder."""
    target = make_target("t5")
    one, two = ([*p, 7, 9, 11, 6] for p in prompts(target)[:2])
    needs = HiddenStateSpec(layers=(1, 2), final_hidden=True)
    ids = torch.tensor([one + two + [0] * 3])
    position = torch.tensor([[*range(len(one)), *range(len(two)), 0, 1, 2]])
    document = torch.tensor([[0] * len(one) + [1] * len(two) + [-1] * 3])
    ctx, final = target.hidden_states(ids, needs, position_BT=position, document_BT=document)
    assert ctx.layers_BTF is not None
    for text, first in ((one, 0), (two, len(one))):
        alone, alone_final = target.hidden_states(torch.tensor([text]), needs)
        assert alone.layers_BTF is not None
        here = slice(first, first + len(text))
        torch.testing.assert_close(final[:, here], alone_final, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ctx.layers_BTF[:, here], alone.layers_BTF, atol=1e-4, rtol=1e-4)
        start = text.index(0)
        assert not final[0, first : first + start].any()
        theirs = target.model(
            input_ids=torch.tensor([text[:start]]), decoder_input_ids=torch.tensor([text[start:]])
        ).logits
        torch.testing.assert_close(
            target.logits(final[:, first + start : first + len(text)]), theirs, atol=1e-4, rtol=1e-4
        )


def forced(target: Seq2SeqTarget, drafter: Drafter, texts: list[list[int]]) -> AcceptanceTable:
    batch = batch_of(
        target,
        drafter.needs,
        Sampler(1.0),
        texts,
        [[False] * (t.index(0) + 1) + [True] * (len(t) - t.index(0) - 1) for t in texts],
    )
    table = TeacherForcing(drafter, target, Sampler(1.0))(batch, measure=True)
    assert isinstance(table, AcceptanceTable)
    return table


def test_alpha_of_the_decoder_is_alpha_of_teacher_forcing(tmp_path: Path) -> None:
    """A draft that is the target has α = 1 everywhere; a coarser one accepts, greedily, exactly
    where teacher forcing over the target's own text says so."""
    target = make_target("t5")
    target.model.save_pretrained(tmp_path / "same")
    same = Seq2SeqLM.build(Seq2SeqLMConfig(depth=3, source=str(tmp_path / "same")), target)
    many = prompts(target)
    texts = [p + generate(target, p, max_new_tokens=24, eos=()).ids for p in many]
    table = forced(target, same.eval(), texts)
    valid = table.anchors.valid_NK
    torch.testing.assert_close(table.alpha.sampled[valid], torch.ones(int(valid.sum())))
    for sampler in (Sampler(0.0), Sampler(1.0)):
        results = decode(
            target,
            many,
            Way(same, sampler=sampler, verification="rejection"),
            max_new_tokens=20,
            eos=(),
        )
        assert all(r.accepted == r.drafted == 3 for g in results for r in g.steps)

    drafter = make_drafter("seq2seq_lm", target)
    table = forced(target, drafter, texts)
    rows, positions = table.anchors.row_N, table.anchors.position_N
    hits = {
        (b, a): greedy.cumprod(0).sum()
        for b, a, greedy in zip(rows.tolist(), positions.tolist(), table.alpha.greedy)
    }
    kept = 0
    for b, prompt in enumerate(many):
        spec = generate(target, prompt, Way(drafter, Chain(3)), max_new_tokens=24, eos=())
        for r in spec.steps:
            if r.anchor + 3 < len(texts[b]):
                assert r.accepted == hits[b, r.anchor]
                kept += r.accepted
    assert kept > 0


def test_committed_tokens_follow_p() -> None:
    """One token drafted from q at the first anchor, judged by rejection: Σ_x q(x) law(x) = p."""
    target = make_target("t5")
    drafter = make_drafter("seq2seq_lm", target)
    text = torch.tensor([prompts(target)[0] + [7]])
    sampler = Sampler(1.0)
    p = sampler.probs(target.logits(target.hidden_states(text, HiddenStateSpec())[1][0, -2:]))[
        1
    ].double()
    ctx, cache = Context(text), drafter.new_cache()
    choose = Choose(sampler, "none", RowDraws([0]), None, V)
    q = drafter.draft(ctx, Chain(1), choose, cache).q_BGV
    assert q is not None
    q = q[0, 0].double()
    assert 0.01 < float(torch.minimum(p, q).sum()) < 0.999  # neither hopeless nor the target
    tokens = torch.arange(V)[:, None]
    laws = law(
        VERIFICATION_METHODS["rejection"], Proposal(tokens, q.expand(V, 1, V)), p.expand(V, 2, V)
    )
    first = (q[:, None] * laws.stop_BM[:, :1] * laws.next_BMV[:, 0]).sum(0) + q * laws.stop_BM[:, 1]
    torch.testing.assert_close(first, p)


def test_the_draft_can_be_trained_and_saved(tmp_path: Path) -> None:
    target = make_target("t5-v1.1")
    drafter = make_drafter("seq2seq_lm", target)
    texts = [[*p, 7, 9, 11, 6, 8] for p in prompts(target)]
    masks = [[False] * (len(t) - 5) + [True] * 5 for t in texts]
    batch = batch_of(target, drafter.needs, Sampler(1.0), texts, masks)
    loss, _ = TeacherForcing(drafter, target, Sampler(1.0))(batch)
    loss.backward()
    names = {n for n, x in drafter.named_parameters() if x.grad is not None and x.grad.any()}
    assert any("encoder" in n for n in names) and any("EncDecAttention" in n for n in names)
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    loaded = draft_checkpoint.load_draft(tmp_path / "draft", target)
    anchors = torch.tensor([[12, 13]])
    ids = torch.tensor(texts[:1])
    same = [d.hidden(Context(ids), anchors, None) for d in (drafter, loaded)]
    assert torch.equal(*same)


def test_a_text_becomes_a_prompt_and_a_chat_too(tmp_path: Path) -> None:
    """`target.prompt` and the chat template give the same tokens; the answer is the decoder's."""
    words = ["<pad>", "</s>", "<unk>", "a", "b", "c", "d"]
    raw = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    raw.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    model = make_target("t5").model
    target = Seq2SeqTarget(model, tokenizer, "tiny")
    assert target.prompt("a b c") == [3, 4, 5, 1, 0]
    assert tokenizer.chat_template is None, "the given tokenizer stays as it was"
    chat = [{"role": "user", "content": "a b c"}]
    ids = target.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == [3, 4, 5, 1, 0]
    chat.append({"role": "assistant", "content": "d a"})
    assert target.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) == [
        *ids, 6, 3, 1,
    ]  # fmt: skip


def test_mistakes_are_told_in_one_line() -> None:
    target = make_target("t5")
    with pytest.raises(UserError, match="no decoder start token"):
        generate(target, [5, 6, 7], max_new_tokens=3)
    with pytest.raises(UserError, match="no decoder start token"):  # not even in a batch,
        decode(target, [[5, 6, 1, 0, 9], [5, 6]], max_new_tokens=3)  # where it is padded with 0
    with pytest.raises(UserError, match="leave compiled off"):
        decode(target, prompts(target), Way(compiled=True), max_new_tokens=3)
    with pytest.raises(UserError, match="the target's tokenizer"):
        config = Seq2SeqLMConfig(source="random", overrides={"vocab_size": 7})
        Seq2SeqLM.build(config, target)
    with pytest.raises(UserError, match=r"overrides\.layers is not a key"):
        Seq2SeqLM.build(Seq2SeqLMConfig(source="random", overrides={"layers": 7}), target)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1,
        intermediate_size=16, num_attention_heads=2))  # fmt: skip
    with pytest.raises(UserError, match="encoder-decoder target"):
        Seq2SeqLM.build(Seq2SeqLMConfig(source="random"), Target(llama, None, "llama"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [Chain(3), *TREES], ids=lambda s: type(s).__name__)
def test_cached_draft_equals_the_uncached_default(temperature: float, shape: Shape) -> None:
    """Ragged contexts that grow by unequal steps; the same anchor twice is the same draft."""
    target = make_target("t5")
    drafter = make_drafter("seq2seq_lm", target)
    cache, draw = drafter.new_cache(), torch.Generator().manual_seed(3)
    after = torch.randint(3, V, (2, 12), generator=draw).tolist()
    many = [p + more for p, more in zip(prompts(target), after)]
    first = [len(p) for p in prompts(target)]
    for n, steps in enumerate([(1, 1), (1, 1), (2, 4), (6, 5), (7, 10)]):
        texts = [t[: f + s] for t, f, s in zip(many, first, steps)]
        ids = torch.zeros(2, max(map(len, texts)), dtype=torch.long)
        for b, text in enumerate(texts):
            ids[b, : len(text)] = torch.tensor(text)

        def drafted(ctx: Context, seeds: list[int], cache: object) -> Proposal:
            rows = RowDraws(seeds)
            choose = Choose(Sampler(temperature), "without", rows, None, V)
            return drafter.draft(ctx, shape, choose, cache)

        cached = drafted(Context(ids, lengths=[len(t) for t in texts]), [n, n + 9], cache)
        for b, text in enumerate(texts):
            plain = drafted(Context(torch.tensor([text])), [n + 9 * b], None)
            assert cached.tokens_BG[b].tolist() == plain.tokens_BG[0].tolist()
            if cached.q_BGV is not None and plain.q_BGV is not None:
                torch.testing.assert_close(cached.q_BGV[b], plain.q_BGV[0], atol=1e-4, rtol=1e-4)


def save_t5(folder: Path) -> Path:
    """A random T5 with a tokenizer, as a Hugging Face folder."""
    tokenizer = make_tokenizer(None)
    start, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    shape = T5 | dict(vocab_size=len(tokenizer), decoder_start_token_id=start)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(
        T5Config(**shape, eos_token_id=eos, pad_token_id=start)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_whole_job_runs_on_an_encoder_decoder(tmp_path: Path) -> None:
    """The target answers, the draft is trained, decoded and reported, as for a causal target."""
    job, t5 = make_tiny(tmp_path), save_t5(tmp_path / "t5")
    tau = job.job(
        tmp_path / "run",
        "seq2seq_lm",
        f"target.path={t5}",
        "data.responses=target",
        "drafter.source=random",
        "drafter.depth=2",
        "drafter.overrides={num_layers: 1, num_decoder_layers: 1}",
    )
    at = Results.load(tmp_path / "run" / "report").asked[0]
    assert at.identical == 2  # float32, greedy
    assert tau >= 1
    assert [x.value for x in at.alpha.visited.greedy] == [x.value for x in at.reached]
