"""Loading a target: its attention is the model's own, its compiled passes are as many as needed.

Run alone: python -m pytest tests/targets/test_target.py
"""

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.context import Context, HiddenStateSpec
from specdec.drafters import DRAFTERS
from specdec.drafters.lm import LM
from specdec.drafters.pretrained import LoraOptions
from specdec.drafters.target_views import adapted_layers
from specdec.errors import UserError
from specdec.runtime.cpu.grouped_attention import grouped_attention, stacked
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.tiny import architectures, make_tokenizer, random_target

TOKENIZER = make_tokenizer()


def config_of(kind: str) -> PreTrainedConfig:
    """A tiny config; `gpt_oss` has attention sinks, `gemma2` a soft cap."""
    if kind != "gpt_oss":
        return architectures(len(TOKENIZER), 4)[kind]
    return GptOssConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        rope_scaling={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )


def saved(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind))
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):  # large enough that leaving them out would be seen
            nn.init.normal_(weight, mean=2.0)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "attention"), [("llama", "grouped"), ("gpt_oss", "eager"), ("gemma2", "eager")]
)
def test_the_default_attention_is_the_models_own(tmp_path: Path, kind: str, attention: str) -> None:
    """Logits of a prefill and of two passes after it, as the model's eager attention has them; a
    draft LM cut from the target attends as it does."""
    folder = saved(tmp_path, kind)
    target = load_target(TargetConfig(str(folder), dtype="float32", device="cpu"))
    assert target.config._attn_implementation == attention
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.randint(3, len(TOKENIZER), (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = eager(input_ids=ids).logits
        cache, ours = target.new_cache(), []
        for part in ids.split([14, 1, 5], 1):
            ours.append(target.step(part, HiddenStateSpec(), cache)[1])
            cache.commit([part.shape[1]])
    assert torch.allclose(torch.cat(ours, 1), theirs, atol=1e-4)
    draft = LM.build(LM.Config(), target)
    assert draft.model.config._attn_implementation == attention


@pytest.mark.parametrize("asked", [{"s_aux": torch.zeros(4)}, {"softcap": 30.0}])
def test_grouped_attention_refuses_what_sdpa_leaves_out(asked: dict[str, Any]) -> None:
    query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 3, 8)
    with pytest.raises(UserError, match="attn_implementation=eager"):
        grouped_attention(nn.Module(), query, key, key, None, **asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_share_one_mask_for_their_groups(dtype: torch.dtype) -> None:
    """Two rows with masks of their own give what sdpa gives with repeated keys. The stacked mask is
    made once, and freed with the mask that it was made from."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, tokens, 8, generator=generator).to(dtype)
        for heads, tokens in ((6, 3), (2, 7), (2, 7))
    )
    mask = torch.rand(2, 1, 3, 7, generator=generator) > 0.4
    mask[..., 0] = True
    layer = nn.Module()
    layer.num_key_value_groups = 3  # type: ignore[assignment]
    ours, _ = grouped_attention(layer, query, key, value, mask)
    theirs = nn.functional.scaled_dot_product_attention(
        query, *(x.repeat_interleave(3, 1) for x in (key, value)), attn_mask=mask
    )
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=tolerance, rtol=tolerance)
    first = stacked(mask, 3, dtype)
    assert stacked(mask, 3, dtype) is first
    kept = ref(first)
    del first, mask
    assert kept() is None


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "gemma2", "qwen3"])
def test_documents_of_packed_rows_are_read_as_if_each_were_alone(tmp_path: Path, kind: str) -> None:
    """Of unlike lengths, a shorter one at the very end of the batch, padding in between: each as
    the model itself reads it, 0 at the padding, and documents of like length in one pass."""
    target = load_target(TargetConfig(str(saved(tmp_path, kind)), dtype="float32", device="cpu"))
    rows = [[20], [3], [1, 19]]
    ids = torch.randint(3, len(TOKENIZER), (3, 20), generator=torch.Generator().manual_seed(1))
    position = torch.zeros(3, 20, dtype=torch.long)
    document = torch.full((3, 20), -1)
    for b, row in enumerate(rows):
        for n, part in enumerate(torch.arange(sum(row)).split(row)):
            position[b, part], document[b, part] = part - part[0], n
    passes: list[tuple[int, ...]] = []
    target.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    ctx, final = target.hidden_states(
        ids, HiddenStateSpec((1, 4)), position_BT=position, document_BT=document
    )
    assert sorted(passes) == [(1, 1), (1, 3), (2, 20)]
    assert ctx.layers_BTF is not None
    for b, row in enumerate(rows):
        for part in torch.arange(sum(row)).split(row):
            alone, theirs = target.hidden_states(ids[b, part][None], HiddenStateSpec((1, 4)))
            assert alone.layers_BTF is not None
            torch.testing.assert_close(final[b, part], theirs[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                ctx.layers_BTF[b, part], alone.layers_BTF[0], atol=1e-4, rtol=1e-4
            )
    assert final[1, 3:].abs().max() == ctx.layers_BTF[1, 3:].abs().max() == 0


@pytest.mark.parametrize("family", ["falcon", "hydra", "eagle"])
def test_drafts_that_read_embeddings_need_them_as_wide_as_the_states(family: str) -> None:
    """As Reformer's are not, through whose layers two streams pass."""
    target = random_target(architectures(64, layers=2)["llama"])
    target.embedding = torch.nn.Embedding(64, 16)
    ctx = Context(torch.arange(8)[None], None, torch.randn(1, 8, 32))
    told = "width 16, but its head reads a width of 32: give"
    kind: Any = DRAFTERS[family]
    with pytest.raises(UserError, match=told):
        kind.build(kind.Config(), target).hidden(ctx, torch.tensor([[3]]), torch.tensor([[[1]]]))
    with pytest.raises(UserError, match=told):
        adapted_layers(target, 2, LoraOptions())
