"""A second implementation of drafts in GGUF files, as llama.cpp's graphs compute them from a file's
keys and tensors alone (src/models/eagle3.cpp, dflash.cpp; ggml_rope_ext). Like the networks of
other layouts (reference_networks.py), it serves only to compare an export with the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from specdec.formats.check_text import CheckText, ExportFolder
from specdec.targets.output_head import soft_cap


@dataclass(frozen=True)
class GgufDraft:
    """A file's keys, without the architecture's name in front, and its tensors."""

    files: ExportFolder
    neighbours: bool  # whether neighbouring numbers of a head are rotated together, or halves

    def key(self, name: str, default: Any = None) -> Any:
        config = self.files.config
        return config.get(f"{config['general.architecture']}.{name}", default)

    def tensor(self, name: str) -> Tensor:
        stored: Tensor = self.files.tensors[name].float()
        return stored

    def multiply(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tensor(f"{name}.weight"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps: float = self.key("attention.layer_norm_rms_epsilon")
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.tensor(f"{name}.weight")

    def embed(self, ids: Tensor) -> Tensor:
        own = self.files.tensors.get("token_embd.weight")
        return embedding(ids, self.files.target.embedding.weight if own is None else own).float()

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V] of the draft's own head or of the target's, -inf outside `d2t`."""
        own, shared = self.files.tensors.get("output.weight"), self.files.target.head.weight
        weight = shared if own is None else own
        scores = linear(states.to(weight.dtype), weight).float()
        if (ids := self.files.tensors.get("d2t")) is None:
            return scores
        whole = scores.new_full((*scores.shape[:-1], self.key("vocab_size")), -torch.inf)
        return whole.index_copy(-1, ids, scores)

    def rotate(self, heads_THD: Tensor) -> Tensor:
        """Heads at the positions from 0 on."""
        width, T = self.key("rope.dimension_count"), len(heads_THD)
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
        frequencies = self.key("rope.freq_base") ** -exponent / self.key("rope.scaling.factor", 1.0)
        if (factors := self.files.tensors.get("rope_freqs.weight")) is not None:
            frequencies = frequencies / factors.cpu()
        angles = (torch.arange(T)[:, None] * frequencies)[:, None].to(heads_THD.device)
        scale = self.key("rope.scaling.attn_factor", 1.0)
        cos, sin = angles.cos().float() * scale, angles.sin().float() * scale
        turned, rest = heads_THD[..., :width], heads_THD[..., width:]
        pairs = turned.unflatten(-1, (-1, 2)) if self.neighbours else turned.unflatten(-1, (2, -1))
        axis = -1 if self.neighbours else -2
        a, b = pairs.unbind(axis)
        both = torch.stack([a * cos - b * sin, a * sin + b * cos], axis)
        return torch.cat([both.flatten(-2), rest], -1)

    def heads(self, name: str, x: Tensor, norm: str = "") -> Tensor:
        """x [T, D] -> [T, H, D], normed for each head if there is such a norm."""
        heads = self.multiply(name, x).unflatten(-1, (-1, self.key("attention.key_length")))
        return self.norm(norm, heads) if norm else heads

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
        """The output [T, D] of heads [T, H, D], where `sees` [T, T] says which read which."""
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, attn_mask=sees)
        return self.multiply(f"{layer}.attn_output", out[0].transpose(0, 1).flatten(1))

    def feed_forward(self, layer: str, x: Tensor) -> Tensor:
        gated = silu(self.multiply(f"{layer}.ffn_gate", x)) * self.multiply(f"{layer}.ffn_up", x)
        return self.multiply(f"{layer}.ffn_down", gated)

    def features(self, trial: CheckText) -> Tensor:
        """What the encoder reads [T, F]: the states that enter the target's layers."""
        return torch.cat([trial.state(k) for k in self.key("target_layers")], -1)


def eagle3(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    draft = GgufDraft(files, neighbours=True)
    features = draft.features(trial)[:anchor]
    if draft.key("norm_before_fc", False):
        features = draft.norm("enc.output_norm", features)
    states_PD, ids_P = draft.multiply("fc", features), trial.ids_T[1 : anchor + 1]
    layer, logits = "blk.0", []
    for depth in range(trial.depths):
        normed = draft.norm(f"{layer}.attn_norm_2", states_PD)
        residual = normed if draft.key("norm_before_residual", False) else states_PD
        read = torch.cat([draft.norm(f"{layer}.attn_norm", draft.embed(ids_P)), normed], -1)
        query, key = (draft.rotate(draft.heads(f"{layer}.attn_{x}", read)) for x in "qk")
        sees = torch.ones(len(read), len(read), dtype=torch.bool, device=read.device).tril()
        value = draft.heads(f"{layer}.attn_v", read)
        stream = residual + draft.attend(layer, query, key, value, sees)
        stream = stream + draft.feed_forward(layer, draft.norm(f"{layer}.ffn_norm", stream))
        logits.append(draft.head(draft.norm("output_norm", stream[-1])))
        states_PD = torch.cat([states_PD, stream[-1:]])
        ids_P = torch.cat([ids_P, trial.following(anchor)[depth : depth + 1]])
    return torch.stack(logits)


def block_states(draft: GgufDraft, trial: CheckText, anchor: int) -> Tensor:
    """The states [M, D] of a block's slots, which see each other and the text before them."""
    device, M = trial.ids_T.device, draft.key("block_size")
    context = draft.norm("enc.output_norm", draft.multiply("fc", draft.features(trial)[:anchor]))
    ids = torch.full((M,), draft.files.config["tokenizer.ggml.mask_token_id"], device=device)
    ids[0] = trial.ids_T[anchor]
    stream = draft.embed(ids)
    sees = torch.ones(M, anchor + M, dtype=torch.bool, device=device)
    for i in range(draft.key("block_count")):
        layer = f"blk.{i}"
        read = draft.norm(f"{layer}.attn_norm", stream)
        around = GgufConvolution.named(draft, f"{layer}.attn_conv", read)
        both = torch.cat([context, around(read, 0)])
        key = draft.rotate(draft.heads(f"{layer}.attn_k", both, f"{layer}.attn_k_norm"))
        # positions count from the text's first token, so queries are rotated along with it
        query = draft.heads(f"{layer}.attn_q", both, f"{layer}.attn_q_norm")
        query = draft.rotate(query)[anchor:]
        attended = draft.attend(layer, query, key, draft.heads(f"{layer}.attn_v", both), sees)
        stream = stream + around(attended, 1)
        read = draft.norm(f"{layer}.ffn_norm", stream)
        around = GgufConvolution.named(draft, f"{layer}.ffn_conv", read)
        stream = stream + around(draft.feed_forward(layer, around(read, 0)), 1)
    return draft.norm("output_norm", stream)


@dataclass(frozen=True)
class GgufConvolution:
    """DFlash 2's convolutions before (side 0) and after (1) a part of a layer: a kernel for each
    channel and tap, plus a correction that a group of channels shares. None: plain DFlash."""

    kernels: Tensor | None  # [M, 2, taps, D]

    @classmethod
    def named(cls, draft: GgufDraft, name: str, read: Tensor) -> "GgufConvolution":
        if f"{name}_base" not in draft.files.tensors:
            return cls(None)
        taps, group = draft.key("conv_kernel_size"), draft.key("conv_group_size")
        corrections = draft.multiply(f"{name}_proj", read).view(len(read), 2, taps, -1)
        return cls(draft.tensor(f"{name}_base") + corrections.repeat_interleave(group, -1))

    def __call__(self, x: Tensor, side: int) -> Tensor:
        """x [M, D], each slot mixed with those before it."""
        if self.kernels is None:
            return x
        mixed = torch.zeros_like(x)
        for tap in range(min(self.kernels.shape[2], len(x))):
            mixed[tap:] += self.kernels[tap:, side, tap] * x[: len(x) - tap]
        return mixed


def scaled(scores: Tensor, factor: float, cap: float | None) -> Tensor:
    scores = scores * factor
    return cap * torch.tanh(scores / cap) if cap else scores


def dflash(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """Scaled as the target's logits are, which llama.cpp leaves out, as it changes no greedy
    draft."""
    draft = GgufDraft(files, neighbours=False)
    states = block_states(draft, trial, anchor)[1 : 1 + trial.depths]
    return scaled(draft.head(states), files.target.head_factor, soft_cap(files.target.config))


def dflash2(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """The selector's score of each token after the text's own one."""
    draft = GgufDraft(files, neighbours=False)
    states = block_states(draft, trial, anchor)[1 : 1 + trial.depths]
    factor, cap = draft.key("logit_scale", 1.0), draft.key("final_logit_softcapping")
    scores = scaled(draft.head(states), factor, cap)
    before = trial.ids_T[anchor : anchor + trial.depths]
    gate = draft.multiply("selector_hidden", states)
    gate = gate * draft.tensor("selector_predecessor.weight")[before]
    return scores + draft.multiply("selector_successor", gate)


def dspark(files: ExportFolder, trial: CheckText, anchor: int) -> Tensor:
    """Each slot, the anchor's first, biased by the text's own token before it."""
    draft = GgufDraft(files, neighbours=False)
    scores = draft.head(block_states(draft, trial, anchor)[: trial.depths])
    before = trial.ids_T[anchor : anchor + trial.depths]
    bias = draft.multiply("markov_w2", draft.tensor("markov_w1.weight")[before])
    if (ids := files.tensors.get("d2t")) is not None:
        bias = torch.zeros_like(scores).index_copy(-1, ids, bias)
    return scores + bias


GGUF_NETWORKS: dict[str, Callable[[ExportFolder, CheckText, int], Tensor]] = {
    "eagle3": eagle3,
    "dflash": dflash,
    "dflash2": dflash2,
    "dspark": dspark,
}
