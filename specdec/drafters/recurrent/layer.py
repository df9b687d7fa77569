"""A Llama layer of a draft's own, which takes its shape, and may copy its weights, from the target.

Letters: B batch, N states, A anchors, D width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.drafters.recurrent.attention import Attention, KeyValue, Sight, attended
from specdec.target.parts import Parts

UPDATE = 0.25  # what a copied layer adds to a feature before training, relative to the feature


class Layer(nn.Module):
    """A Llama layer whose attention reads `width` numbers, preceded by the family's `norms`; with
    `head_norms`, a Qwen3 layer."""

    input_layernorm: LlamaRMSNorm
    hidden_norm: LlamaRMSNorm

    def __init__(
        self,
        llama: LlamaConfig,
        width: int,
        norms: tuple[str, ...] = (),
        head_norms: bool = False,
    ) -> None:
        super().__init__()
        for name in norms:
            self.add_module(name, LlamaRMSNorm(llama.hidden_size, llama.rms_norm_eps))
        self.self_attn = Attention(llama, width, head_norms)
        self.post_attention_layernorm = LlamaRMSNorm(llama.hidden_size, llama.rms_norm_eps)
        self.mlp = LlamaMLP(llama)

    def entered(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of the stream [..., D] from below, and the residual."""
        return self.input_layernorm(stream), stream

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        stream = residual + attended
        return self.leave(stream + self.mlp(self.post_attention_layernorm(stream)))

    def leave(self, stream: Tensor) -> Tensor:
        """The layer's output, from the stream after its MLP."""
        return stream

    def at(
        self,
        pairs: tuple[Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
        shared: KeyValue,
        sight: Sight,
        own: tuple[KeyValue, ...] = (),
    ) -> Tensor:
        """The output [B, A, D] at anchors. `pairs` holds what attention reads there, and the
        residual."""
        attention, (read, residual) = self.self_attn, pairs
        heads = attended(attention.query(read, rope), shared, sight, own)
        return self.finish(residual, attention.joined(heads))

    def silence(self) -> None:
        """Set the output weights to zero: the layer adds nothing to the residual."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

    def temper(self, state_ND: Tensor, read_ND: Tensor) -> None:
        """Scale the output weights of attention and MLP so that both together add `UPDATE` times
        the size of states like `state_ND`, if attention sees only the state's own `read_ND`."""
        attention = self.self_attn
        mlp_ND = self.mlp(self.post_attention_layernorm(state_ND))
        added_ND = torch.cat([attention.alone(read_ND), mlp_ND], 1)
        size, added = (x.square().sum(1).mean().sqrt() for x in (state_ND, added_ND))
        for writes in (attention.o_proj, self.mlp.down_proj):
            writes.weight.mul_(UPDATE * size / added)


def away_from_zero(weight_D: Tensor) -> Tensor:
    """A norm's weights as divisors: those near 0 are replaced by a tenth of their mean size."""
    size_D = weight_D.abs().clamp_min(0.1 * float(weight_D.abs().mean()))
    return torch.where(weight_D < 0, -size_D, size_D)


def fits(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> bool:
    """Whether `theirs` holds all tensors of `ours`, in the same shapes and not quantised."""
    found = [theirs.get(name, torch.empty(0)) for name in ours]
    same = [x.shape == y.shape for x, y in zip(found, ours.values(), strict=True)]
    return all(same) and all(x.element_size() > 1 for x in found)


def copy_fitting(x: Tensor, found: Tensor | None) -> None:
    """Copy a tensor of the target's, if there is one, to a weight of the same shape."""
    if found is not None and found.shape == x.shape:
        x.copy_(found)


def copy_last(target: Parts, ours: Mapping[str, Tensor]) -> Tensor | None:
    """Copy tensors of the target's last layer to those of the same names. Returns the weight of the
    norm after that layer. If there is no such norm, or a tensor does not fit, copies nothing and
    returns None."""
    theirs, after = target.as_llama(-1), target.norm_weight
    if after is None or not fits(theirs, ours):
        return None
    for name, x in ours.items():
        x.copy_(theirs[name])
    return after


def llama_of(target: Parts, intermediate_size: int | None = None) -> dict[str, Any]:
    """The keys of a LlamaConfig for a layer shaped like the target's own."""
    theirs = target.config
    heads = theirs.num_attention_heads

    def of_target(key: str, default: Any) -> Any:
        return getattr(theirs, key, None) or default

    return {
        "hidden_size": target.width,
        "intermediate_size": intermediate_size or of_target("intermediate_size", 4 * target.width),
        "num_attention_heads": heads,
        "num_key_value_heads": of_target("num_key_value_heads", heads),
        "head_dim": of_target("head_dim", target.width // heads),
        "rms_norm_eps": of_target("rms_norm_eps", 1e-5),
        "max_position_embeddings": theirs.max_position_embeddings,
        "rope_parameters": of_target("rope_parameters", None),
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
    }
