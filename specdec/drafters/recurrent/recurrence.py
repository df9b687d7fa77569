"""Decoder layers unrolled on their own output: the common part of EAGLE's heads.

The first layer reads pairs of a token and the target's feature at the position before it. At depth
0 the pair is (x_a, feature of a - 1), with the pairs of all earlier positions as context; at later
depths the output of the last layer replaces the feature, which the target has not computed yet.
Training unrolls the layers in the same way (training-time test, EAGLE-3), so they train on the
inputs that they will see. Pair a - 1 belongs to anchor a and has the rotary position a - 1, as in
engines.

Letters: B batch, T time, P pairs (T - 1), A anchors, W new pairs, L pairs whose logits are wanted,
K depth, D width, F features, E head width, S draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.context import Context, Moment
from specdec.drafters.base import Drafter, Sizes, entries, pieces, text_after, unread
from specdec.drafters.recurrent.attention import (
    Attention,
    KeyValue,
    Rope,
    Sight,
    fused,
)
from specdec.errors import require_known
from specdec.runtime.cache import Place, SlotCache
from specdec.runtime.compiled import SHORT, Compiled
from specdec.sampling.trees import Growth
from specdec.target.parts import Parts

UPDATE = 0.25  # what a copied layer adds to a feature before training, relative to the feature


@dataclass(kw_only=True)
class RecurrentSizes(Sizes):
    """`llama`: the keys of a LlamaConfig for a layer shaped like the target's own."""

    llama: dict[str, Any]


class Layer(nn.Module):
    """A Llama layer whose attention reads `width` numbers, preceded by the family's `norms`; with
    `head_norms`, a Qwen3 layer."""

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

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        stream = residual + attended
        return stream + self.mlp(self.post_attention_layernorm(stream))

    def at(
        self,
        pairs: tuple[Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
        shared: KeyValue,
        sight: Sight,
        own: tuple[KeyValue, ...] = (),
    ) -> Tensor:
        """The output [B, A, D] at anchors, given what attention reads there and the residual."""
        attention, (read, residual) = self.self_attn, pairs
        attended = attention.over_anchors(attention.query(read, rope), shared, sight, own)
        return self.finish(residual, attended)

    def temper(self, state_ND: Tensor, read_ND: Tensor) -> None:
        """Scale the output weights of attention and MLP so that, on states like `state_ND`, whose
        attention reads `read_ND` at one position, both together add `UPDATE` times their size."""
        attention = self.self_attn
        values_NHE = attention.v_proj(read_ND).unflatten(-1, (attention.kv_heads, -1))
        heads_NHE = values_NHE.repeat_interleave(attention.heads // attention.kv_heads, 1)
        mlp_ND = self.mlp(self.post_attention_layernorm(state_ND))
        added_ND = torch.cat([attention.o_proj(heads_NHE.flatten(1)), mlp_ND], 1)
        size, added = (x.square().sum(1).mean().sqrt() for x in (state_ND, added_ND))
        for writes in (attention.o_proj, self.mlp.down_proj):
            writes.weight.mul_(UPDATE * size / added)


class UpperLayer(Layer):
    """A Llama layer above the first: it reads the stream alone, and no embedding."""

    input_layernorm: LlamaRMSNorm

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__(llama, llama.hidden_size, ("input_layernorm",))

    def enter(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        return self.input_layernorm(stream), stream


class Recurrent(Drafter):
    """A family gives its first `layer`, the features that it reads, and how a pair enters the
    layer. All pairs of a text are keys, but queries of the last layer and later steps are computed
    only at anchors, so training on a sample of anchors saves most of the work."""

    Sizes: ClassVar[type[Sizes]] = RecurrentSizes
    fc: nn.Linear

    def __init__(self, config: Any, sizes: RecurrentSizes) -> None:
        super().__init__(config, sizes)
        if hasattr(config, "start"):
            require_known("drafter", config, start=("target", "random"))
        self.llama = LlamaConfig(**sizes.llama)
        self._embedding: tuple[nn.Module, ...] = ()
        self._head: Callable[[Tensor], Tensor] | None = None
        self._head_dtype = torch.float32
        self.rope = Rope(self.llama)
        self.compiled = Compiled(self.run, SHORT)

    @property
    @abstractmethod
    def layer(self) -> Layer: ...

    @property
    def fusions(self) -> list[nn.Linear]:
        """The linear maps through which a pair enters. Their last D columns read the feature (of
        several features, the highest)."""
        return [self.fc]

    @property
    def upper(self) -> Sequence[UpperLayer]:
        """The layers above the first."""
        return ()

    @classmethod
    def plan(cls, config: Any, target: Parts) -> Any:
        llama = llama_of(target, config.intermediate_size)
        return RecurrentSizes(target_vocab=target.vocab_size, llama=llama)

    def features_of(self, ctx: Context) -> Tensor:
        """The target's features that the family reads [B, T, F]; by default its final state."""
        assert ctx.final_BTD is not None
        return ctx.final_BTD

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., F] in the form of the layer's own output [..., D]."""
        return features.to(self.layer.self_attn.o_proj.weight.dtype)

    @abstractmethod
    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention for a pair [..., width], and the residual stream [..., D]."""

    def onward(self, hidden: Tensor) -> Tensor:
        """What the next depth reads in the place of a feature, from the output [..., D]."""
        return hidden

    def copy_from(self, target: Parts) -> None:
        """Copy the parts of the target's last layer that fit."""

    def start(self, target: Parts) -> None:
        """EAGLE's own start, with all linear weights drawn from a normal distribution of standard
        deviation 0.02, or the target's last layer around a pass-through of the feature."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if getattr(self.config, "start", "random") == "target":
            D = self.llama.hidden_size
            for fc in self.fusions:
                fc.weight.zero_()
                fc.weight[:, -D:] = torch.eye(D)
            self.copy_from(target)

    def attach(self, target: Parts) -> None:
        self._embedding = (target.embedding,)
        self._head, self._head_dtype = target.logits, target.dtype

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """The target's own head, frozen, unless the family has one."""
        assert self._head is not None
        return self._head(hidden.to(self._head_dtype))

    def anchors(self, valid_TK: Tensor, generator: torch.Generator) -> Tensor:
        return self.config.anchors.draw(valid_TK, generator)

    def embed(self, ids: Tensor) -> Tensor:
        return self._embedding[0](ids).to(self.layer.self_attn.o_proj.weight.dtype)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        if drafted_BAk is None:
            drafted_BAk = text_after(ctx.ids_BT, anchors_BA, self.depth - 1)
        return torch.stack(self.unrolled(ctx, anchors_BA, drafted_BAk), 2)

    def unrolled(
        self,
        ctx: Context,
        anchors_BA: Tensor,
        drafted_BAk: Tensor,
        widths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The output [B, A, D] of each depth, or with `widths` [B, widths[k], D] of depth k at the
        first anchors of each row; widths must not rise with the depth."""
        ids_BP, k = ctx.ids_BT[:, 1:], drafted_BAk.shape[-1]
        B, P = ids_BP.shape
        pair_BA = (anchors_BA - 1).clamp_min(0)
        position_BP, sight = pairs_of(ctx)
        layers: list[Layer] = [self.layer, *self.upper]
        feature_BPD = self.fuse(self.features_of(ctx)[:, :P])
        pairs = self.enter(self.embed(ids_BP), feature_BPD)
        rope = self.rope(position_BP, P + k)
        shared = [self.layer.self_attn.keys_values(pairs[0], rope)]
        for below, above in zip(layers, self.upper, strict=False):  # all but the last layer
            every_BP = torch.arange(P, device=ids_BP.device).expand(B, P)
            pairs = above.enter(below.at(pairs, rope, shared[-1], sight(every_BP)))
            shared.append(above.self_attn.keys_values(pairs[0], rope))
        position_BA = position_BP.gather(1, pair_BA)
        pairs = entries(pairs[0], pair_BA), entries(pairs[1], pair_BA)
        rope = self.rope(position_BA, P + k)
        seen = sight(pair_BA)
        steps = [layers[-1].at(pairs, rope, shared[-1], seen)]
        own: list[tuple[KeyValue, ...]] = [() for _ in layers]
        for depth in range(1, k + 1):
            stream = steps[-1]
            if widths is not None:  # the anchors that are left
                stream, position_BA, pair_BA = (
                    x[:, : widths[depth]] for x in (stream, position_BA, pair_BA)
                )
                left = slice(None), slice(None), slice(widths[depth])
                own = [tuple((key[left], value[left]) for key, value in of) for of in own]
                seen = sight(pair_BA)
            rope = self.rope(position_BA + depth, P + k)
            token_BA = drafted_BAk[:, : stream.shape[1], depth - 1]
            pairs = self.enter(self.embed(token_BA), self.onward(stream))
            for i, layer in enumerate(layers):
                if i > 0:
                    pairs = self.upper[i - 1].enter(stream)
                own[i] = *own[i], layer.self_attn.keys_values(pairs[0], rope)
                stream = layer.at(pairs, rope, shared[i], seen, own[i])
            steps.append(stream)
        return steps

    def noisy(self, ctx: Context, moment: Moment) -> Context:
        """The context with uniform noise of width `noise`·512/n on the features of each document of
        n tokens. The features that the objective compares with get no noise."""
        if not self.config.noise:
            return ctx
        assert ctx.position_BT is not None and ctx.document_BT is not None
        which_BT, real_BT = (ctx.position_BT == 0).cumsum(1) - 1, (ctx.document_BT >= 0).long()
        count_BT = torch.zeros_like(which_BT).scatter_add_(1, which_BT, real_BT).gather(1, which_BT)
        width_BT1 = self.config.noise * 512 / count_BT.clamp_min(1)[..., None]
        final_BTD = self.features_of(ctx)
        draws = [
            torch.rand(final_BTD.shape[1:], generator=generator, device=final_BTD.device)
            for generator in moment.generators(final_BTD.device)
        ]
        noise_BTD = (torch.stack(draws) - 0.5) * width_BT1
        return replace(ctx, final_BTD=final_BTD + noise_BTD.to(final_BTD.dtype))

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        return SlotCache(1 + len(self.upper), capacity)

    def run(
        self,
        cache: SlotCache,
        features: Tensor | None,
        own: Tensor | None,
        embedding: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        last: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layers over new pairs: the output [B, W, D] and the logits [B, W, S], or with
        `last` [B, L] only those of these pairs of each row. The pairs have the target's `features`
        [B, W, F] or the layers' `own` earlier output [B, W, D]."""
        if features is None:
            assert own is not None
            feature = self.onward(own)
        else:
            feature = self.fuse(features)
        read, residual = self.enter(embedding, feature)
        layers: list[Layer] = [self.layer, *self.upper]
        for i, layer in enumerate(layers):
            attention = layer.self_attn
            keys, values = cache.update(*attention.keys_values(read, (cos, sin)), i)
            if last is not None and i == len(self.upper):
                read, residual, cos, sin = (entries(x, last) for x in (read, residual, cos, sin))
                mask = None if mask is None else entries(mask, last)
            attended = attention.joined(
                fused(attention.query(read, (cos, sin)), keys, values, mask)
            )
            hidden = layer.finish(residual, attended)
            if i < len(self.upper):
                read, residual = self.upper[i].enter(hidden)
        return hidden, self.unembed(hidden, 0)

    def begin(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        """With a cache, pairs with the target's features are committed to it, and pairs with the
        layers' own output are scratch."""
        if cache is None:
            return super().begin(ctx)
        new = unread(cache, [n - 1 for n in ctx.counts()])
        features = pieces(self.features_of(ctx), cache.lengths, max(new))
        tokens = pieces(ctx.ids_BT[:, 1:], cache.lengths, max(new))
        # the output at the anchor, then at every node
        nodes_BWD, logits = self._cached(cache, features, None, tokens, None, new)
        cache.keep(new)

        def grow(tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
            nonlocal nodes_BWD
            own = nodes_BWD[:, -1:] if parents_BW is None else entries(nodes_BWD, parents_BW + 1)
            hidden_BWD, logits = self._cached(cache, None, own, tokens_BW, parents_BW, None)
            nodes_BWD = torch.cat([nodes_BWD, hidden_BWD], 1)
            return logits

        return Growth(logits[:, 0], grow)

    def _cached(
        self,
        cache: SlotCache,
        features: Tensor | None,
        own: Tensor | None,
        tokens: Tensor,
        parents: Tensor | None,
        counts: list[int] | None,
        more: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """`run` on new pairs; with `counts`, only for the last pair of each row and `more` pairs
        after it."""
        place = cache.place(tokens, parents)
        mask, last = place.mask_BTP, None
        if counts is not None:
            last = torch.tensor(counts, device=tokens.device)[:, None] - 1
            last = last + torch.arange(1 + more, device=tokens.device)
            alone = not (more or self.upper or len(set(counts)) > 1)  # sees all slots
            if mask is None and tokens.shape[1] > 1 and not alone:  # a prefill
                slots = torch.arange(cache.shown, device=tokens.device)
                mask = (slots <= slots[:, None]).expand(len(tokens), -1, -1)
        cos, sin = self.rope(place.position_BT, cache.shown + 1)
        hidden, logits = self.compiled(
            cache,
            features=features,
            own=own,
            embedding=self.embed(tokens),
            cos=cos,
            sin=sin,
            mask=mask,
            last=last,
        )
        assert hidden is not None and logits is not None
        return hidden, logits


def pairs_of(ctx: Context) -> tuple[Tensor, Callable[[Tensor], Sight]]:
    """The position [B, P] of each pair of a text in its document, and what anchors with these pairs
    [B, A] see: the pairs of their document up to their own."""
    B, P = ctx.ids_BT[:, 1:].shape
    position_BP = torch.arange(P, device=ctx.ids_BT.device).expand(B, P)
    document_BP = own_BP = None
    if ctx.position_BT is not None and ctx.document_BT is not None:
        position_BP = (ctx.position_BT[:, 1:] - 1).clamp_min(0)
        document_BP = ctx.document_BT[:, 1:]
        of_two = ctx.position_BT[:, 1:] == 0  # the feature is from the previous document
        own_BP = document_BP.masked_fill(of_two, -2)

    def sight(pair_BA: Tensor) -> Sight:
        if document_BP is None:
            return Sight(pair_BA, torch.zeros_like(pair_BA))
        first_BA = (pair_BA - position_BP.gather(1, pair_BA)).clamp_min(0)
        return Sight(pair_BA, first_BA, own_BP, document_BP.gather(1, pair_BA))

    return position_BP, sight


def position_of(ctx: Context) -> Tensor:
    """The position of each token in its document [B, T]."""
    if ctx.position_BT is not None:
        return ctx.position_BT
    return torch.arange(ctx.ids_BT.shape[1], device=ctx.ids_BT.device).expand_as(ctx.ids_BT)


def seen_slots(place: Place, shown: int) -> Tensor:
    """The slots that each token of a pass sees [B, W, P], also where the plain mask is right."""
    if place.mask_BTP is not None:
        return place.mask_BTP
    return torch.arange(shown, device=place.position_BT.device) <= place.position_BT[..., None]


def away_from_zero(weight_D: Tensor) -> Tensor:
    """A norm's weights as divisors: those near 0 are replaced by a tenth of their mean size."""
    size_D = weight_D.abs().clamp_min(0.1 * float(weight_D.abs().mean()))
    return torch.where(weight_D < 0, -size_D, size_D)


def fits(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> bool:
    """Whether `theirs` holds all tensors of `ours`, in the same shapes and not quantised."""
    found = [theirs.get(name, torch.empty(0)) for name in ours]
    same = [x.shape == y.shape for x, y in zip(found, ours.values(), strict=True)]
    return all(same) and all(x.element_size() > 1 for x in found)


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
