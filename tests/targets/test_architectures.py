"""Models with habits of their own: decoded as transformers decodes them, or refused in one line.

Run alone: python -m pytest tests/targets/test_architectures.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, CLIPVisionConfig, LlamaConfig, LlavaConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
)
from transformers.models.llama import modeling_llama

from specdec.compat import attention_of
from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.drafters.lm import LMConfig
from specdec.drafters.ngram import NgramConfig
from specdec.drafters.pretrained import LoraOptions, with_adapters
from specdec.errors import UserError
from specdec.lab.drafters.counts import BigramConfig
from specdec.lab.drafters.sparse import SparseConfig
from specdec.lab.targets.seq2seq import Seq2SeqTarget
from specdec.runtime.cpu.grouped_attention import use_grouped_attention
from specdec.sampling.trees import Chain, Static
from specdec.targets import self_check
from specdec.targets.loading import load_parts, load_target
from specdec.targets.target import Reading, Target
from specdec.targets.target_config import TargetConfig
from tests.lab.targets.test_seq2seq import make_target as make_seq2seq
from tests.tiny import learn, make_tokenizer

V = 61
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, **HEADS}
LONGROPE = {
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 6.0],
        "original_max_position_embeddings": 24,
    },
}
SHARED = {
    **SMALL,
    "head_dim": 8,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": V,
    "hidden_size_per_layer_input": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def target_of(kind: str, **config: Any) -> Target:
    torch.manual_seed(0)
    made = AutoConfig.for_model(
        kind,
        **{"vocab_size": V, "initializer_range": 0.3, "pad_token_id": 0} | config,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(made).float().eval()
    model.generation_config.eos_token_id = None
    return Target(model, None, kind)


def phi3() -> Target:
    return target_of("phi3", **SMALL, max_position_embeddings=128, **LONGROPE)


def words(count: int, seed: int = 3) -> list[int]:
    return torch.randint(3, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def transformers_ids(target: Target, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    made = target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return made[0, len(prompt) :].tolist()


# --- LongRoPE: the factors of a whole pass go by its longest position ---------------------------


@pytest.mark.parametrize("length", [12, 30])
def test_longrope_on_either_side_of_its_line(length: int) -> None:
    """Up to the line of 24, drafts end at it: a token beyond would change what comes before."""
    target, prompt = phi3(), words(length)
    new = 12 if length == 12 else 30
    expected = transformers_ids(target, prompt, new)
    drafter = DRAFTERS["ngram"].build(NgramConfig(depth=6, min_ngram=1), target)
    for draft in (None, drafter):
        made = generate(target, prompt, Way(draft), max_new_tokens=new, eos=())
        assert made.ids == expected


def test_longrope_across_its_line_is_refused() -> None:
    target = phi3()
    with pytest.raises(UserError, match="do not fit the 24 positions of the target"):
        decode(target, [words(12)], max_new_tokens=13)
    with pytest.raises(UserError, match="do not fit the 24 positions of the target"):
        decode(target, [words(12), words(40)], max_new_tokens=2)
    # as transformers has it, the long factors begin after the line: a text of 24 has short ones
    assert (target.room(23), target.room(24), target.room(25)) == (24, 24, 128)


def test_documents_on_both_sides_of_a_line_are_read_with_their_own_factors() -> None:
    """23 to 26 tokens are within a tenth of each other. Packed in one row, each has the logits that
    transformers gives it alone."""
    target, line = phi3(), 24
    texts = [words(line + n, 5 + n) for n in (-1, 1, 0, 2)]
    position = torch.cat([torch.arange(len(ids)) for ids in texts])[None]
    document = torch.cat([torch.full((len(ids),), n) for n, ids in enumerate(texts)])[None]
    packed = torch.cat([torch.tensor(ids) for ids in texts])[None]
    _, final = target.hidden_states(
        packed, HiddenStateSpec(), position_BT=position, document_BT=document
    )
    for n, ids in enumerate(texts):
        made = AutoModelForCausalLM.from_config(target.model.config).eval()
        made.load_state_dict(target.model.state_dict())
        with torch.no_grad():
            theirs = made(torch.tensor([ids])).logits
        torch.testing.assert_close(
            target.logits(final[document == n]), theirs[0], atol=1e-4, rtol=1e-4
        )


# --- Scales that grow with the position -----------------------------------------------------------


def llama4(**options: Any) -> Target:
    """Every second layer has no RoPE, and scales its queries anew every 4 tokens."""
    scales = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 1.0}
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": [1, 3]}
    kinds = {"no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 16}
    options = SMALL | {"head_dim": 8} | scales | experts | kinds | options
    return target_of("llama4_text", **options, max_position_embeddings=256)


@torch.no_grad()
def cache_errors(target: Target) -> list[float]:
    """By how much logits over a cache are off those of whole texts: for a tree after rows of 9 and
    5 tokens, for a chain that continues its scratch slots, and for a chain after other rows."""
    ids = torch.tensor([words(20, 1), words(20, 2)])
    cache, worst = target.new_cache(), list[float]()

    def logits(some: torch.Tensor, parents: list[int] | None = None) -> torch.Tensor:
        parents_BT = None if parents is None else torch.tensor([parents] * len(some))
        return target.logits(
            target.hidden_states(some, HiddenStateSpec(), cache=cache, parents_BT=parents_BT)[1]
        )

    def compare(ours: torch.Tensor, text: torch.Tensor) -> None:
        theirs = target.model(text[None], use_cache=False).logits[0, -len(ours) :]
        worst.append(float((ours - theirs).abs().max()))

    logits(ids[:, :9])
    cache.commit([9, 5])
    tree = logits(ids[:, 9:12], [-1, 0, -1])
    for b, n in enumerate((9, 5)):
        for path in ([0, 1], [2]):
            compare(tree[b, path], torch.cat([ids[b, :n], ids[b, 9:12][path]]))
    cache.commit([2, 1], torch.tensor([[0, 1], [2, -1]]))
    cache.select([1, 0])
    texts = [torch.cat([ids[1, :5], ids[1, 11:12]]), torch.cat([ids[0, :9], ids[0, 9:11]])]
    first, second = logits(ids[[1, 0], 12:15]), logits(ids[[1, 0], 15:18])
    for b, (text, row) in enumerate(zip(texts, (1, 0), strict=True)):
        compare(first[b], torch.cat([text, ids[row, 12:15]]))
        compare(second[b], torch.cat([text, ids[row, 12:18]]))
    return worst


def test_llama4_scales_the_queries_of_each_row_and_branch_by_their_own_positions() -> None:
    target = llama4()
    assert target.reads_trees and max(cache_errors(target)) < 1e-4
    prompts = [words(30), words(5)]
    expected = [transformers_ids(target, prompt, 12) for prompt in prompts]
    drafter = DRAFTERS["ngram"].build(NgramConfig(depth=4, min_ngram=1), target)
    for way in (Way(), Way(drafter)):
        made = decode(target, prompts, way, max_new_tokens=12, eos=())
        assert [row.ids for row in made] == expected


def test_a_layer_that_asks_for_a_length_reads_rows_of_one_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it makes of the response begins far beyond what a check reads: after 1,000 tokens."""
    plain, longest = modeling_llama.LlamaAttention.forward, list[int]()

    def asks(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None:
            longest.append(cache.get_seq_length(self.layer_idx))
            hidden_states = hidden_states * (1 + longest[-1] // 1000)
        return plain(self, hidden_states, *args, **kwargs)

    assert target_of("llama", **SMALL).reading is Reading.SLOTS
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", asks)
    target = target_of("llama", **SMALL)
    assert target.reading is Reading.ROWS and not target.reads_trees
    longest.clear()
    decode(target, [words(9), words(5)], max_new_tokens=2, eos=())
    assert {9, 5} <= set(longest)


@pytest.mark.parametrize("family", ["bigram", "sparse"])
def test_llama4_drafts_for_itself(family: str) -> None:
    """A cache that keeps a part of the text has the true positions, too."""
    target, prompt = llama4(), words(30)
    config: Any = BigramConfig(depth=2)
    if family == "sparse":
        config = SparseConfig(depth=3, budget=64, window=2, refresh=3, sink=1, pool=3)
    drafter = DRAFTERS[family].build(config, target)
    made = generate(target, prompt, Way(drafter), max_new_tokens=20, eos=())
    assert made.ids == transformers_ids(target, prompt, 20)
    if family == "sparse":  # its budget holds all of the text, so it drafts what the target writes
        assert all(r.accepted == r.drafted for r in made.steps[:-1])


# --- Layers that share keys and values ----------------------------------------------------------


@pytest.mark.parametrize("family", ["bigram", "sparse"])
@pytest.mark.parametrize("shape", [Chain(2), Static([[0], [1], [2], [0, 0], [1, 0]])])
def test_layers_may_read_the_keys_of_others(family: str, shape: Any) -> None:
    target = target_of("gemma4_text", **SHARED, max_position_embeddings=256)
    prompt = list(range(3, 20))
    plain = generate(target, prompt, max_new_tokens=40, eos=()).ids
    assert plain == transformers_ids(target, prompt, 40)
    config: Any = BigramConfig(depth=2)
    if family == "sparse":
        config = SparseConfig(depth=2, budget=3, window=2, refresh=3, sink=1, pool=3)
    drafter = DRAFTERS[family].build(config, target)
    learn(drafter, [prompt + plain, [plain[0], plain[3]] * 3])
    made = generate(target, prompt, Way(drafter, shape), max_new_tokens=40, eos=())
    assert made.ids == plain
    assert any(r.accepted for r in made.steps)


# --- Other kinds of attention -------------------------------------------------------------------

TREE = Static([[0], [1], [2], [0, 0], [1, 0]])
CHUNKED = {
    **SMALL,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention"] * 2,
    "no_rope_layers": [1, 0, 1, 0],
}
SPARSE = {
    **SMALL,
    **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "index_topk": 20, "index_n_heads": 32, "index_head_dim": 16},
}


@pytest.mark.parametrize(
    ("kind", "config"),
    [("llama4_text", CHUNKED), ("deepseek_v32", SPARSE)],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_chunks_and_sparse_attention_in_batches_and_trees(kind: str, config: Any) -> None:
    """Responses that cross the border of a chunk, or that are longer than what an indexer
    chooses."""
    target = target_of(kind, **config, max_position_embeddings=256)
    prompts = [words(13), words(6, 4)]
    expected = [transformers_ids(target, prompt, 24) for prompt in prompts]
    drafter = DRAFTERS["bigram"].build(BigramConfig(depth=2), target)
    learn(drafter, [prompts[0] + expected[0], prompts[1] + expected[1][::2]])
    for shape in (Chain(2), TREE):
        made = decode(target, prompts, Way(drafter, shape), max_new_tokens=24, eos=())
        assert [g.ids for g in made] == expected
        assert any(r.accepted for g in made for r in g.steps)


def test_sparse_attention_keeps_its_name() -> None:
    """Under another name than sdpa, transformers would not hide what the indexer leaves out."""
    target = target_of("deepseek_v32", **SPARSE, max_position_embeddings=256)
    ids = torch.tensor([words(40)])
    before = target.model(ids).logits
    use_grouped_attention(target.model)
    assert attention_of(target.model.config) == "sdpa"
    torch.testing.assert_close(target.model(ids).logits, before)


# --- Models that see ----------------------------------------------------------------------------


def test_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    text = LlamaConfig(**SMALL, vocab_size=len(tokenizer), initializer_range=0.3)
    seeing = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = LlavaConfig(text_config=text, vision_config=seeing, image_token_index=0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = load_target(TargetConfig(str(tmp_path), "float32", "cpu", cache=str(tmp_path / "c")))
    assert len(target.layers) == 4 and target.width == 32
    prompt = list(range(8, 20))
    drafter = DRAFTERS["ngram"].build(NgramConfig(depth=3, min_ngram=1), target)
    made = generate(target, prompt, Way(drafter, TREE), max_new_tokens=16, eos=())
    target.model.generation_config.eos_token_id = None
    assert made.ids == transformers_ids(target, prompt, 16)
    parts = load_parts(TargetConfig(str(tmp_path), "float32", "cpu", cache=str(tmp_path / "c")))
    assert parts is None or parts.width == 32


# --- A draft cut from the target ----------------------------------------------------------------


@pytest.mark.parametrize("first", ["full_attention", "sliding_attention"])
def test_kept_layers_keep_their_kind(first: str) -> None:
    """Layer 0 adds nothing, so that layers 1 to 3 are the target: all they draft is accepted."""
    target = target_of(
        "qwen3",
        **SMALL,
        head_dim=8,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=[first] + ["full_attention"] * 3,
    )
    for part in (target.layers[0].self_attn.o_proj, target.layers[0].mlp.down_proj):
        nn.init.zeros_(part.weight)
    drafter = DRAFTERS["lm"].build(LMConfig(depth=3, layers=[1, 2, 3]), target).float().eval()
    made = generate(target, list(range(3, 30)), Way(drafter), max_new_tokens=40, eos=())
    assert all(r.accepted == 3 for r in made.steps)


@pytest.mark.parametrize("layers", [None, [3, 7]])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 2}),
        ("qwen3_moe", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [2]}),
        (
            "deepseek_v3",
            {
                **EXPERTS,
                "num_key_value_heads": 4,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 3,
            },
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_a_config_says_by_layer_is_cut_with_the_layers(
    kind: str, config: dict[str, Any], layers: list[int] | None
) -> None:
    target = target_of(kind, **SMALL | {"num_hidden_layers": 8} | config)
    drafter = DRAFTERS["lm"].build(LMConfig(depth=2, layers=layers), target)
    assert drafter.model.config.num_hidden_layers == len(layers or [0, 1, 6, 7])
    if kind == "smollm3" and layers:
        assert drafter.model.config.no_rope_layers == [0, 0]


def test_a_draft_of_another_kind_of_model_is_refused() -> None:
    with pytest.raises(UserError, match="drafter=lm needs a decoder-only target"):
        DRAFTERS["lm"].build(LMConfig(), make_seq2seq("t5"))
    target = target_of("gemma4_text", **SHARED, max_position_embeddings=256)
    with pytest.raises(UserError, match=r"no draft can be made from this|do not make a model"):
        DRAFTERS["lm"].build(LMConfig(layers=[0, 3]), target)


# --- Heads that transform states, and models with masks or positions of their own ---------------

DECODER = {"is_decoder": True, **SMALL, "num_key_value_heads": 4, "max_position_embeddings": 64}
BART = {
    **{"d_model": 32, "decoder_layers": 4, "decoder_ffn_dim": 48, "decoder_attention_heads": 4},
    **{
        "is_encoder_decoder": False,
        "is_decoder": True,
        "init_std": 0.3,
        "forced_eos_token_id": None,
    },
}
WINDOWS = {"attention_types": [[["global", "local"], 2]], "window_size": 8}
OWN: dict[str, tuple[Reading, dict[str, Any]]] = {
    "bert": (Reading.SLOTS, DECODER),
    "electra": (Reading.SLOTS, DECODER | {"embedding_size": 32}),
    "roberta": (Reading.SLOTS, DECODER | {"max_position_embeddings": 66, "pad_token_id": 1}),
    "modernbert-decoder": (Reading.SLOTS, SMALL | {"local_attention": 8}),
    "bloom": (Reading.ROWS, {"hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "mpt": (Reading.ROWS, {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}),
    "gpt_neo": (Reading.ROWS, {"hidden_size": 32, "num_layers": 4, "num_heads": 4} | WINDOWS),
    "bart": (Reading.ROWS, BART),
    "openai-gpt": (Reading.RECOMPUTE, {"n_embd": 32, "n_layer": 4, "n_head": 4}),
    "rwkv": (
        Reading.APART,
        {"hidden_size": 32, "num_hidden_layers": 4, "attention_hidden_size": 32},
    ),
    "xlstm": (
        Reading.REPLAY,
        {"hidden_size": 128, "num_hidden_layers": 4, "num_blocks": 4, "num_heads": 4},
    ),
    "recurrent_gemma": (
        Reading.SLOTS,
        SMALL
        | {"num_key_value_heads": 1, "head_dim": 8, "lru_width": 32}
        | {"attention_window_size": 8},
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_models_with_ways_of_their_own(kind: str) -> None:
    """Two rows of unequal length, whose drafts are accepted in part, and hidden states of documents
    that share a row."""
    reading, config = OWN[kind]
    target = target_of(kind, **config)
    assert isinstance(target, Target) and target.reading is reading
    prompts = [words(13), words(6, 4)]
    expected = [transformers_ids(target, prompt, 16) for prompt in prompts]
    drafter = DRAFTERS["bigram"].build(BigramConfig(depth=2), target)
    learn(drafter, [prompts[0] + expected[0], prompts[1] + expected[1][::2]])
    for shape in (Chain(2), TREE) if target.reads_trees else (Chain(2),):
        made = decode(target, prompts, Way(drafter, shape), max_new_tokens=16, eos=())
        assert [response.ids for response in made] == expected
        assert any(r.accepted for response in made for r in response.steps)
    needs = HiddenStateSpec(layers=(1, 4))
    alone = [target.hidden_states(torch.tensor([ids]), needs)[0].layers_BTF for ids in prompts]
    position = torch.tensor([[*range(13), *range(6)]])
    document = torch.tensor([[0] * 13 + [1] * 6])
    both, _ = target.hidden_states(
        torch.tensor([prompts[0] + prompts[1]]), needs, position_BT=position, document_BT=document
    )
    torch.testing.assert_close(both.layers_BTF, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["recurrent_gemma", "xlstm"])
def test_a_soft_cap_of_any_name_is_obeyed(kind: str) -> None:
    target = target_of(kind, **OWN[kind][1])
    ids, head = torch.tensor([words(9)]), target.model.get_output_embeddings()
    head.weight.data *= 20
    with torch.no_grad():
        theirs = target.model(ids, use_cache=False).logits
        ours = target.logits(target.hidden_states(ids, HiddenStateSpec())[1])
    assert theirs.abs().max() > 15
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bloom", "openai-gpt", "xlstm"])
def test_trees_of_models_with_masks_of_their_own_are_refused(kind: str) -> None:
    reading, config = OWN[kind]
    target = target_of(kind, **config)
    drafter = DRAFTERS["ngram"].build(NgramConfig(depth=3, min_ngram=1), target)
    with pytest.raises(UserError, match=f"{reading.value}: draft chains"):
        generate(target, words(9), Way(drafter, TREE), max_new_tokens=4, eos=())
    with pytest.raises(UserError, match="not compiled"):
        target.new_cache(64)


@pytest.mark.parametrize("kind", ["bert", "roformer"])
def test_a_draft_that_would_be_read_wrongly_is_refused(kind: str) -> None:
    target = target_of(kind, **DECODER)
    with pytest.raises(UserError, match="so it cannot draft"):
        DRAFTERS["lm"].build(LMConfig(source="random", overrides={}), target)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("bert", DECODER | {"is_decoder": False}),
        ("xlm", {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": V}),
    ],
)
def test_what_is_not_causal_is_refused(kind: str, config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not causal or depends on the length") as caught:
        target_of(kind, **config)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_model_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no way of reading works, the last one, which is the plainest, tells why."""

    def fail(*_: Any) -> bool:
        raise ValueError("an odd shape")

    monkeypatch.setattr(self_check, "_reads_on", fail)
    with pytest.raises(UserError, match=r"cannot be read \(an odd shape\): give another"):
        target_of("llama", **SMALL)


def test_an_encoder_decoder_of_an_unknown_kind_is_refused() -> None:
    config = AutoConfig.for_model(
        "umt5", vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    )
    config.decoder_start_token_id = 0
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UserError, match="UMT5"):
        Seq2SeqTarget(model, None, "umt5")


def test_a_mask_for_each_head_is_obeyed() -> None:
    """Doge masks each head by itself: attention by groups of heads leaves that to sdpa."""
    target = target_of("doge", **SMALL, max_position_embeddings=256)
    target.model.set_attn_implementation("grouped")
    prompt = words(9)
    assert generate(target, prompt, max_new_tokens=20, eos=()).ids == transformers_ids(
        target, prompt, 20
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "qwen3"])
def test_norms_are_told_by_what_they_multiply_by(kind: str) -> None:
    """Gemma's store 1 less, and its norm before the MLP has another name."""
    target = target_of(kind, **SMALL, head_dim=8)
    layer = target.layers[-1]
    before_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
    for norm in (target.norm, layer.input_layernorm, before_mlp):
        nn.init.normal_(norm.weight)
    found, x = target.as_llama(-1), torch.randn(3, 32)
    for norm, weight in (
        (target.norm, target.norm_weight),
        (layer.input_layernorm, found["input_layernorm.weight"]),
        (before_mlp, found["post_attention_layernorm.weight"]),
    ):
        torch.testing.assert_close(norm(x), weight * nn.functional.rms_norm(x, (32,), eps=1e-6))


def test_a_norm_in_bfloat16_is_told_by_large_weights_too() -> None:
    """400 + 1 is 400 in bfloat16; and 1 + 2^-9, which Gemma's norm multiplies by, would be 1."""
    made = target_of("gemma2", **SMALL, head_dim=8)
    target = Target(made.model.bfloat16(), None, "gemma2")
    target.norm.weight.data.fill_(400.0)
    assert torch.equal(target.norm_weight, torch.full((32,), 401.0))
    target.norm.weight.data.fill_(2**-9)
    assert torch.equal(target.norm_weight, torch.full((32,), 1 + 2**-9))


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "peagle", "mtp_heads", "dflash"])
def test_drafts_for_norms_that_store_one_less_can_start_and_learn(name: str) -> None:
    """With Gemma's weights of 0, the starts of some divided by 0, and their MLPs never learnt."""
    target, family = target_of("gemma2", **SMALL, head_dim=8), DRAFTERS[name]
    options = {"layers": [1, 2, 3]} if name in ("eagle3", "peagle", "dflash") else {}
    drafter = family.build(family.Config(initialisation="target", **options), target)
    ids = torch.randint(2, V, (2, 12))
    ctx, _ = target.hidden_states(ids, drafter.needs)
    hidden = drafter.hidden(ctx, torch.tensor([[4, 6], [4, 6]]), None)
    drafter.unembed(hidden[:, :, 0], 0).logsumexp(-1).sum().backward()
    gates = [(n, p) for n, p in drafter.named_parameters() if "mlp.gate_proj" in n]
    assert gates and all(p.isfinite().all() for p in drafter.parameters())
    name, gate = gates[0]
    assert gate.grad is not None and gate.grad.isfinite().all() and gate.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["cohere", "nemotron"])
def test_norms_that_take_out_the_mean(kind: str) -> None:
    """Cohere's LayerNorm has no bias; Nemotron's has one and stores 1 less."""
    target = target_of(kind, **SMALL)
    nn.init.normal_(target.norm.weight, 1.0)
    x = torch.randn(3, 32)
    expected = target.norm_weight * nn.functional.layer_norm(x, (32,), eps=1e-5)
    torch.testing.assert_close(target.norm(x), expected)


def test_the_norm_of_a_model_that_also_sees_is_found_beside_its_layers() -> None:
    text = dict(**SMALL, head_dim=8, vocab_size=V, pad_token_id=0)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    target = Target(AutoModelForCausalLM.from_config(config).float(), None, "tiny")
    assert target.norm is target.model.base_model.language_model.norm
    assert target.norm_weight is not None and bool((target.norm_weight == 1).all())


@pytest.mark.parametrize(("kind", "option"), [("cohere", 0.0625), ("granite", 8.0)])
def test_a_head_of_a_drafts_own_starts_with_the_targets_scale(kind: str, option: float) -> None:
    scale = {"logit_scale" if kind == "cohere" else "logits_scaling": option}
    target = target_of(kind, **SMALL, **scale)
    final = torch.randn(3, 32)
    vocab = torch.arange(3, 40)
    torch.testing.assert_close(final @ target.own_head().T, target.logits(final))
    torch.testing.assert_close(final @ target.own_head(vocab).T, target.logits(final)[:, vocab])
    drafter = DRAFTERS["hydra"].build(DRAFTERS["hydra"].Config(draft_vocab=None), target)
    assert torch.equal(drafter.lm_heads[0].weight, target.own_head())


# --- Layers that are found, and layers that loop ------------------------------------------------


def test_the_layers_of_a_model_that_also_sees_are_those_that_read_the_text() -> None:
    """Its vision tower has as many layers, which come first and never run on a text."""
    text = dict(**SMALL, head_dim=8, vocab_size=V, pad_token_id=0)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    target = Target(AutoModelForCausalLM.from_config(config).float(), None, "tiny")
    assert target.layers is target.model.base_model.language_model.layers
    ctx, _ = target.hidden_states(torch.tensor([words(9)]), HiddenStateSpec(layers=(1, 4)))
    assert ctx.layers_BTF is not None and ctx.layers_BTF.shape == (1, 9, 2 * 32)


def dory() -> Target:
    """A model with loops, whose head has a factor for each token."""
    torch.manual_seed(0)
    loops = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    shape = {**SMALL, **loops, **kinds, "head_dim": 8, "max_position_embeddings": 256}
    config = AutoConfig.for_model("dory", vocab_size=V, initializer_range=0.3, **shape)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.generation_config.eos_token_id = None
    nn.init.normal_(model.lm_head.logit_scale, 0.3, 0.1)
    return Target(model, None, "dory")


def test_a_head_with_factors_of_its_own_becomes_a_linear_one() -> None:
    """Dory's head scales each token's logit, and so must a part of its weights."""
    target, final, vocab = dory(), torch.randn(3, 32), torch.arange(3, 40)
    expected = target.model.lm_head(final)
    torch.testing.assert_close(target.logits(final), expected)
    torch.testing.assert_close(target.unembedding(vocab)(final), expected[:, vocab])
    torch.testing.assert_close(final @ target.own_head(vocab).T, expected[:, vocab])


def test_a_model_that_runs_layers_twice_keeps_its_rows_and_paths() -> None:
    """Dory's later loops write to copies of its layers' keys, which it adds to the cache. Rows that
    leave the batch leave them too, and so do the nodes of a tree that are not accepted."""
    target = dory()
    prompts = [words(9), words(14, seed=4)]
    expected = [transformers_ids(target, p, 20) for p in prompts]
    drafter = DRAFTERS["bigram"].build(BigramConfig(depth=2), target)
    learn(drafter, [prompts[0] + expected[0], [*expected[1][::2], *prompts[0]]])
    shape = Static([[0], [1], [2], [0, 0], [1, 0]])
    made = decode(target, prompts, Way(drafter, shape), max_new_tokens=20, eos=())
    assert [response.ids for response in made] == expected
    assert any(r.accepted for response in made for r in response.steps)


def test_layers_that_pass_other_states_than_the_head_reads_are_refused_in_one_line() -> None:
    narrow = {"word_embed_proj_dim": 16, "ffn_dim": 48, "max_position_embeddings": 64}
    target = target_of("opt", **SMALL, **narrow)
    target.hidden_states(torch.tensor([words(5)]), HiddenStateSpec(final_hidden=True))
    with pytest.raises(UserError, match="cannot read its layers") as caught:
        target.hidden_states(torch.tensor([words(5)]), HiddenStateSpec(layers=(2,)))
    assert "\n" not in str(caught.value)


def test_of_several_streams_between_layers_a_draft_reads_the_mean() -> None:
    streams = {"intermediate_size": [48] * 4, "num_kv_shared_layers": 0}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    target = target_of("gemma3n_text", **{**SHARED, **streams, **kinds}, laurel_rank=4)
    seen, ids = list[torch.Tensor](), torch.tensor([words(4)] * 4)  # as many rows as streams
    with target.layers[1].register_forward_hook(lambda _, __, out: seen.append(out)):
        ctx, _ = target.hidden_states(ids, HiddenStateSpec(layers=(2,)))
    assert seen[0].shape == (4, 4, 4, 32) and target.streams == 0
    assert ctx.layers_BTF is not None
    torch.testing.assert_close(ctx.layers_BTF, seen[0].mean(0))


# --- Adapters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "phimoe"])
def test_adapters_are_on_linear_layers_alone(kind: str) -> None:
    """Experts that are kept as one weight are no linear layer, and neither is a router that is
    made from one but returns two things."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, vocab_size=V, **SMALL, **experts)
    model = AutoModelForCausalLM.from_config(config)
    with_adapters(model, LoraOptions(rank=2))
    adapted = {name for name, m in model.named_modules() if hasattr(m, "lora_A")}
    of_layer = {f"self_attn.{part}_proj" for part in "qkvo"}
    assert adapted == {f"model.layers.{k}.{part}" for k in range(4) for part in of_layer}
    assert model(input_ids=torch.tensor([words(5)])).logits.isfinite().all()
