"""What sets in beyond a length is found by a twin whose lengths are cut, or it is read rightly.

Run alone: python -m pytest tests/targets/test_shrunken_twin.py (about 20 s)
"""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specdec.compat import attention_of
from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode, generate
from specdec.drafters.pretrained import fresh
from specdec.errors import UserError
from specdec.lab.targets.seq2seq import Seq2SeqTarget
from specdec.runtime import cache
from specdec.runtime.cpu import grouped_attention
from specdec.runtime.cpu.grouped_attention import use_grouped_attention
from specdec.targets import sequence_packing, shrunken_twin
from specdec.targets.loading import opening
from specdec.targets.shrunken_config import POSITIONS, shrunken_config
from specdec.targets.shrunken_twin import (
    NoTwin,
    ShrunkenTwin,
    TwinChecks,
    errors_of_texts,
    errors_over_cache,
)
from specdec.targets.target import Reading, Target
from specdec.targets.target_config import TargetConfig
from tests.targets.test_architectures import CHUNKED, LONGROPE, SMALL, words
from tests.tiny import make_tokenizer

V = 61
MINISTRAL = {
    **SMALL,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
MINIMAX_M3 = {
    **SMALL,
    "head_dim": 8,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def computed_anew() -> Iterator[None]:
    """No twin's verdict is taken from another test, nor left to one."""
    TwinChecks.forget()
    yield
    TwinChecks.forget()


def model_of(kind: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    made = AutoConfig.for_model(kind, **{"vocab_size": V, "initializer_range": 0.3} | ids | config)
    model = AutoModelForCausalLM.from_config(made).float().eval()
    model.generation_config.eos_token_id = None
    return model


def loaded(kind: str, config: dict[str, Any]) -> tuple[Target, Any]:
    """A target as `load_target` makes it, and the same model, untouched."""
    model = model_of(kind, config)
    theirs = copy.deepcopy(model)
    use_grouped_attention(model)
    return Target(model, None, kind), theirs


def transformers_ids(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return made[0, len(prompt) :].tolist()


def test_a_scale_that_grows_with_the_position() -> None:
    """Ministral 3 scales queries from `original_max_position_embeddings` on; the fused fast path,
    which leaves this out, is right for short texts alone."""
    target, theirs = loaded("ministral3", MINISTRAL)
    prompt = words(20)
    made = generate(target, prompt, max_new_tokens=40, eos=())
    assert made.ids == transformers_ids(theirs, prompt, 40)
    assert target.lean is None


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_the_fused_fast_path_is_used_where_it_is_right(kind: str) -> None:
    more = {"sliding_window": 8} if kind == "mistral" else {}
    target, _ = loaded(kind, {**SMALL, "head_dim": 8, **more})
    assert target.lean is not None and target.without_twin is None


def test_sparse_layers_of_any_name_stay_sparse() -> None:
    """MiniMax-M3 hides blocks of keys under the names of eager and sdpa alone."""
    target, theirs = loaded("minimax_m3_vl_text", MINIMAX_M3)
    ids = torch.tensor([words(40)])
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    ours = target.logits(target.hidden_states(ids, HiddenStateSpec())[1])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert attention_of(target.model.config) == "sdpa" and target.without_twin is None
    prompts = [words(30), words(6, 4)]
    made = decode(target, prompts, max_new_tokens=16, eos=())
    assert [x.ids for x in made] == [transformers_ids(theirs, x, 16) for x in prompts]


# --- What the twin finds ------------------------------------------------------------------------


def worst(kind: str, config: dict[str, Any], reading: Reading = Reading.SLOTS) -> float:
    """The largest error that the twin of a kind of model shows, as it is read in `reading`."""
    twin = ShrunkenTwin(model_of(kind, config), "sdpa")
    target = Target(twin.ours, None, kind, checked=False)
    target.reading, target.lean_allowed = reading, False
    return max(max(errors_of_texts(target, twin)), max(errors_over_cache(target, twin)))


LONG = {"max_position_embeddings": 128}
CHUNKS = {**CHUNKED, **LONG, "floor_scale": 16, "attn_temperature_tuning": True}
LINE = {**SMALL, **LONG, **LONGROPE}


def test_lengths_of_the_longest_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 asks the cache for the position of its queries."""
    assert worst("llama4_text", CHUNKS) < 1e-4
    monkeypatch.setattr(cache, "counts_positions", lambda _: False)
    assert worst("llama4_text", CHUNKS) > 0.01


def test_batches_across_the_line_of_longrope_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst("phi3", LINE) < 1e-4
    apart = sequence_packing.document_groups
    monkeypatch.setattr("specdec.targets.target.document_groups", lambda p, d, lines: apart(p, d))
    assert worst("phi3", LINE) > 0.01


def test_windows_that_are_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**SMALL, "head_dim": 8, "sliding_window": 40, **LONG}
    assert worst("mistral", config) < 1e-4
    seen = cache.model_inputs

    def unbounded(config: Any, *rest: Any) -> Any:
        config = copy.copy(config)
        config.sliding_window = None
        return seen(config, *rest)

    monkeypatch.setattr("specdec.targets.target.model_inputs", unbounded)
    assert worst("mistral", config) > 0.01


def test_documents_that_see_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(self: Any, ids: Any, needs: Any, *_: Any) -> Any:
        return self._pass(ids, needs)

    monkeypatch.setattr(Target, "_read", joined)
    assert worst("opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}) > 0.01


def test_a_difference_that_no_reading_avoids_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are wrong beyond the 14 tokens of the target's own check."""
    model = model_of("llama", SMALL)
    base = type(model.model.layers[0].self_attn)
    plain = base.forward

    def fading(self: Any, hidden_states: Any, **more: Any) -> Any:
        out, weights = plain(self, hidden_states, **more)
        return (out if hidden_states.shape[1] < 30 or not ours(self) else 0 * out), weights

    def ours(module: Any) -> bool:
        return bool(attention_of(module.config) == "grouped")

    monkeypatch.setattr(base, "forward", fading)
    use_grouped_attention(model)
    target = Target(model, None, "fading")
    assert attention_of(model.config) == "sdpa" and target.reading is Reading.SLOTS
    TwinChecks.forget()
    monkeypatch.setattr(shrunken_twin, "errors_of_texts", lambda *_: iter([0.5]))
    with pytest.raises(UserError, match="once a text is longer than one of the lengths"):
        Target(model, None, "fading")


# --- The twin itself ----------------------------------------------------------------------------


def test_a_twin_is_small_and_changes_nothing_global() -> None:
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    with torch.device("meta"):
        made = AutoConfig.for_model(
            "qwen3",
            **{**large, **heads, "vocab_size": 150000, "sliding_window": 4096},
            use_sliding_window=True,
            max_position_embeddings=32768,
            layer_types=["full_attention"] * 36 + ["sliding_attention"] * 12,
        )
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    twin = ShrunkenTwin(model, "grouped")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert torch.get_default_dtype() is torch.float32
    assert sum(x.nbytes for x in twin.plain.parameters()) < 1e6
    assert twin.config.layer_types == ["full_attention", "sliding_attention"] * 2
    assert twin.config.sliding_window == 8
    assert model.config.sliding_window == 4096
    same = ShrunkenTwin(model, "grouped")
    assert all(map(torch.equal, twin.plain.parameters(), same.plain.parameters()))


def test_lengths_that_no_text_reaches_are_not_cut() -> None:
    config = AutoConfig.for_model("mistral", **SMALL, sliding_window=4096)
    assert shrunken_config(config).sliding_window == 8
    config.max_position_embeddings = 4096
    assert shrunken_config(config).sliding_window == POSITIONS


def test_without_a_twin_transformers_modules_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: Any) -> Any:
        raise ValueError("no small one can be made")

    monkeypatch.setattr(shrunken_twin, "shrunken_config", none)
    model = model_of("llama", SMALL)
    use_grouped_attention(model)
    target = Target(model, None, "alone")
    assert target.without_twin == "no small one can be made"
    assert target.lean is None and attention_of(model.config) == "sdpa"
    assert "could be made to check ours (no small one can be made)" in opening(
        target, TargetConfig("alone", "float32", "cpu")
    )
    with pytest.raises(NoTwin, match="no small one"):
        ShrunkenTwin(model, "sdpa")
    assert grouped_attention.attention_of(model.config) == "sdpa"


# --- Models that change themselves --------------------------------------------------------------

RWKV = {
    **{"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 4},
    **{"rescale_every": 2, "context_length": 128},
}
BLOCKS = {
    **{"d_model": 32, "vocab_size": V, "max_position_embeddings": 128, "init_std": 0.3},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "block_size": 4},
    **{"num_random_blocks": 1, "attention_type": "block_sparse"},
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2},
}


def test_weights_that_a_forward_pass_rescales(tmp_path: Path) -> None:
    """RWKV divides weights of its later layers in place, in its first forward pass."""
    model = model_of("rwkv", RWKV)
    stored = {name: x.clone() for name, x in model.state_dict().items()}
    target = Target(model, make_tokenizer(), "rwkv")
    before, ids = target.checksum(), torch.tensor([words(20)])
    theirs = target.model(ids).logits
    assert model.rwkv.layers_are_rescaled
    last, k = target.layer(-1), len(target.layers) - 1
    theirs = target.model(ids).logits
    for name, x in last.items():
        assert torch.equal(x, stored[f"rwkv.blocks.{k}.{name}"])
    target.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids).logits, theirs, rtol=1e-5, atol=1e-5)
    target.model(ids)
    assert target.checksum() == before == Target(again, None, "again").checksum()


def test_the_draft_of_such_a_model_keeps_its_weights() -> None:
    config = AutoConfig.for_model("rwkv", vocab_size=V, **RWKV).to_dict()
    draft, ids = fresh(AutoModelForCausalLM, config, True).eval(), torch.tensor([words(20)])
    stored = {name: x.clone() for name, x in draft.state_dict().items()}
    expected = draft(ids).logits
    assert all(torch.equal(x, stored[name]) for name, x in draft.state_dict().items())
    draft(ids)
    draft.load_state_dict(stored)
    torch.testing.assert_close(draft(ids).logits, expected)


def test_block_sparse_encoders_stay_sparse() -> None:
    """BigBird-Pegasus switches to full attention at the first short text, and never back. In a
    batch, its blocks would depend on the longest text."""
    torch.manual_seed(0)
    made = AutoConfig.for_model("bigbird_pegasus", **BLOCKS)
    model = AutoModelForSeq2SeqLM.from_config(made).float().eval()
    theirs = copy.deepcopy(model)
    target = Seq2SeqTarget(model, None, "blocks")
    assert target.without_twin is None
    texts = [words(40), words(9, 4), words(55, 5)]  # blocks are sparse from 29 tokens on
    prompts = [target.prompt_for_decoding(text) for text in texts]
    made_ids = [response.ids for response in decode(target, prompts, max_new_tokens=8, eos=())]
    for text, ids in zip(texts, made_ids, strict=True):
        fresh_model, given = copy.deepcopy(theirs), torch.tensor([text])
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "eos_token_id": None}
        whole = fresh_model.generate(given, attention_mask=torch.ones_like(given), **options)
        assert ids == whole[0, -8:].tolist()
