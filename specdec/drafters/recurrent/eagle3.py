"""EAGLE-3 (Li et al. 2025): one decoder layer over fused target features, unrolled on itself.

At step 0 the pair (embedding of x_a, features at a - 1) enters for every position; the layer's
own output replaces the features at later steps (training-time test), where a query sees the
step-0 keys of its context and one key of its own for each step before it. The tensors are
named and shaped as vLLM and SGLang load them.

Letters: B batch, T time, P pairs (T - 1), A anchors, K depth, D width, F features, H heads,
G query heads a KV head, E head width, S draft vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from specdec.context import Context, Needs
from specdec.drafters.base import Drafter, Sizes, entries, pieces, text_after, unread
from specdec.errors import UserError, nearest
from specdec.runtime.cache import SlotCache, size
from specdec.runtime.compiled import Short
from specdec.sampling.trees import Growth

if TYPE_CHECKING:
    from specdec.target.base import Target

STARTS = ("target", "random")


@dataclass
class Eagle3Config:
    """EAGLE-3. `layers` None: residual after 2, L/2 and L - 3 layers, as engines default to.

    `start=target` copies the target's last layer and LM head and passes the highest feature
    through; `random` is the paper's start. `draft_vocab` null keeps the whole vocabulary.
    """

    name: str = "eagle3"
    depth: int = 3
    layers: list[int] | None = None
    draft_vocab: int | None = 8192
    start: str = "target"
    intermediate_size: int | None = None  # None: the target's
    norm_before_residual: bool = False


@dataclass(kw_only=True)
class Eagle3Sizes(Sizes):
    """`layers`: those of the target that are read; `llama`: the keys of a Llama's config."""

    layers: list[int]
    llama: dict[str, Any]


class Attention(nn.Module):
    """Grouped-query attention over concat(embedding, feature), width 2D in and D out."""

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__()
        D, E = llama.hidden_size, int(llama.head_dim or 0)
        self.heads = llama.num_attention_heads
        self.kv_heads = llama.num_key_value_heads or self.heads
        self.head_dim = E
        self.q_proj = nn.Linear(2 * D, self.heads * E, bias=False)
        self.k_proj = nn.Linear(2 * D, self.kv_heads * E, bias=False)
        self.v_proj = nn.Linear(2 * D, self.kv_heads * E, bias=False)
        self.o_proj = nn.Linear(self.heads * E, D, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, A, H·E] -> [B, H, A, E]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x_BP2D: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotated(self.split(self.k_proj(x_BP2D)), rope), self.split(self.v_proj(x_BP2D))

    def query(self, x_BA2D: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[B, Hkv, G, A, E]"""
        query = rotated(self.split(self.q_proj(x_BA2D)), rope)
        return query.unflatten(1, (self.kv_heads, -1))

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask_BAP: Tensor | None,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Attention over shared keys [B, Hkv, P, E] and each query's own later keys.

        `own` holds a key and a value [B, Hkv, A, E] a step; query i sees only entry i of each.
        """
        G, A, E = query.shape[2:]
        if not own:
            rows = query.flatten(2, 3)  # the group as further query rows: K and V are not copied
            mask = None if mask_BAP is None else mask_BAP[:, None].repeat(1, 1, G, 1)
            out = nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
            out = out.unflatten(2, (G, A))
        else:
            shared = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (G, A))
            if mask_BAP is not None:
                shared = shared.masked_fill(~mask_BAP[:, None, None], -torch.inf)
            diagonal = torch.stack([(query * k[:, :, None]).sum(-1) for k, _ in own], -1)
            scores = torch.cat([shared, diagonal], -1).float() * E**-0.5
            weights = scores.softmax(-1).to(values.dtype)
            P = keys.shape[-2]
            out = (weights[..., :P].flatten(2, 3) @ values).unflatten(2, (G, A))
            for j, (_, v) in enumerate(own):
                out = out + weights[..., P + j, None] * v[:, :, None]
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """The draft's one decoder layer."""

    def __init__(self, llama: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        D, eps = llama.hidden_size, llama.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = LlamaRMSNorm(D, eps)  # of the embedding
        self.hidden_norm = LlamaRMSNorm(D, eps)  # of the feature
        self.self_attn = Attention(llama)
        self.post_attention_layernorm = LlamaRMSNorm(D, eps)
        self.mlp = LlamaMLP(llama)

    def read(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2D], and the residual stream [..., D]."""
        normed = self.hidden_norm(feature)
        both = torch.cat([self.input_layernorm(embedding), normed], -1)
        return both, normed if self.norm_before_residual else feature

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        stream = residual + attended
        return stream + self.mlp(self.post_attention_layernorm(stream))


class Eagle3(Drafter):
    Config = Eagle3Config
    Sizes = Eagle3Sizes

    def __init__(self, config: Eagle3Config, sizes: Eagle3Sizes) -> None:
        super().__init__(config, sizes)
        if config.start not in STARTS:
            raise UserError(f"drafter.start={config.start!r}{nearest(config.start, STARTS)}")
        self.llama = llama = LlamaConfig(**sizes.llama)
        self.needs = Needs(layers=tuple(sizes.layers))
        D = llama.hidden_size
        self.fc = nn.Linear(len(self.needs.layers) * D, D, bias=False)
        self.midlayer = Layer(llama, config.norm_before_residual)
        self.norm = LlamaRMSNorm(D, llama.rms_norm_eps)
        size = sizes.draft_vocab or sizes.target_vocab
        self.lm_head = nn.Linear(D, size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        self._embedding: tuple[nn.Module, ...] = ()
        self._rope: tuple[Tensor, Tensor] | None = None
        self.short = Short(self, self.read)

    @classmethod
    def plan(cls, config: Eagle3Config, target: "Target") -> Eagle3Sizes:
        theirs, L = target.config, target.config.num_hidden_layers
        layers = config.layers or sorted({2, L // 2, L - 3})
        if any(not 0 < k <= L for k in layers):
            raise UserError(
                f"drafter.layers={list(layers)}: layers of this target run from 1 to {L}"
                + ("" if config.layers else "; name some, the default needs 6 layers or more")
            )
        llama = {
            "hidden_size": target.width,
            "intermediate_size": config.intermediate_size
            or getattr(theirs, "intermediate_size", None)
            or 4 * target.width,
            "num_attention_heads": theirs.num_attention_heads,
            "num_key_value_heads": getattr(theirs, "num_key_value_heads", None)
            or theirs.num_attention_heads,
            "head_dim": getattr(theirs, "head_dim", None)
            or target.width // theirs.num_attention_heads,
            "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-5),
            "max_position_embeddings": theirs.max_position_embeddings,
            "rope_parameters": getattr(theirs, "rope_parameters", None),
            "hidden_act": "silu",
            "vocab_size": target.vocab_size,
        }
        pruned = config.draft_vocab if (config.draft_vocab or 0) < target.vocab_size else None
        return Eagle3Sizes(
            target_vocab=target.vocab_size, draft_vocab=pruned, layers=list(layers), llama=llama
        )

    def start(self, target: "Target") -> None:
        """Random, or the target's own last layer and head around a pass-through of the feature.

        Of an architecture whose last layer has other parts, only those that fit are taken.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if self.config.start == "random":
            return
        D = self.llama.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -D:] = torch.eye(D)
        rows = slice(None) if self.vocab_S is None else self.vocab_S
        self.lm_head.weight.copy_(target.head.weight[rows])
        theirs = dict(target.layers[-1].named_parameters())
        ours = dict(self.midlayer.named_parameters())
        ours["hidden_norm.weight"].copy_(theirs.get("input_layernorm.weight", torch.ones(D)))
        for name, weight in ours.items():
            if (source := theirs.get(name)) is None or name == "input_layernorm.weight":
                continue
            if source.shape == weight.shape:
                weight.copy_(source)
            elif source.shape == (weight.shape[0], D):  # q, k, v: the feature's half
                weight[:, D:] = source
        final = getattr(target.model.base_model, "norm", None)
        if final is not None and final.weight.shape == self.norm.weight.shape:
            self.norm.weight.copy_(final.weight)

    def attach(self, target: "Target") -> None:
        self._embedding = (target.embedding,)

    def embed(self, ids: Tensor) -> Tensor:
        return self._embedding[0](ids).to(self.fc.weight.dtype)

    def rope(self, position: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin [..., E] at positions below `end`, from a table that grows as needed."""
        weight = self.fc.weight
        table = self._rope
        if table is None or len(table[0]) < end or table[0].device != weight.device:
            with torch.inference_mode(False), torch.no_grad():  # it may be trained with later
                steps = torch.arange(max(2 * end, 1024), device=weight.device)[None]
                like = torch.zeros((), device=weight.device)
                cos, sin = self.rotary(like, steps)
            table = self._rope = cos[0], sin[0]
        return table[0][position], table[1][position]

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        if drafted_BAk is None:
            drafted_BAk = text_after(ctx.ids_BT, anchors_BA, self.depth - 1)
        ids_BP, layers_BTF = ctx.ids_BT[:, 1:], ctx.layers_BTF
        assert layers_BTF is not None
        B, P = ids_BP.shape
        position_BP = torch.arange(P, device=ids_BP.device).expand(B, P)
        key_ok_BP = None
        if ctx.position_BT is not None and ctx.document_BT is not None:
            position_BP = (ctx.position_BT[:, 1:] - 1).clamp_min(0)
            key_ok_BP = ctx.position_BT[:, 1:] > 0
        feature_BPD = self.fc(layers_BTF[:, :P].to(self.fc.weight.dtype))
        attention = self.midlayer.self_attn
        read_BP2D, residual_BPD = self.midlayer.read(self.embed(ids_BP), feature_BPD)
        end = P + drafted_BAk.shape[-1]
        keys, values = attention.keys_values(read_BP2D, self.rope(position_BP, end))

        pair_BA = (anchors_BA - 1).clamp_min(0)  # anchor a is read by pair a - 1
        mask_BAP = torch.arange(P, device=ids_BP.device) <= pair_BA[..., None]
        if key_ok_BP is not None:
            document_BP = ctx.document_BT[:, 1:]  # type: ignore[index]
            mask_BAP &= document_BP.gather(1, pair_BA)[..., None] == document_BP[:, None]
            mask_BAP &= key_ok_BP[:, None]
            mask_BAP = mask_BAP.scatter(2, pair_BA[..., None], True)  # an empty row would be NaN
        position_BA = position_BP.gather(1, pair_BA)
        read_BA2D, residual_BAD = entries(read_BP2D, pair_BA), entries(residual_BPD, pair_BA)

        own: list[tuple[Tensor, Tensor]] = []
        steps: list[Tensor] = []
        for k in range(drafted_BAk.shape[-1] + 1):
            if k > 0:
                token_BA = drafted_BAk[..., k - 1]
                read_BA2D, residual_BAD = self.midlayer.read(self.embed(token_BA), steps[-1])
            rope = self.rope(position_BA + k, end)
            if k > 0:
                own.append(attention.keys_values(read_BA2D, rope))
            query = attention.query(read_BA2D, rope)
            attended = attention.attend(query, keys, values, mask_BAP, own)
            steps.append(self.midlayer.finish(residual_BAD, attended))
        return torch.stack(steps, 2)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def unembed_parameters(self) -> list[nn.Parameter]:
        return [*self.norm.parameters(), *self.lm_head.parameters()]

    def new_cache(self) -> SlotCache:
        return SlotCache(1)

    def compiled_cache(self, slots: int) -> SlotCache:
        return SlotCache(1, slots)

    def read(
        self,
        cache: SlotCache,
        layers: Tensor | None,
        own: Tensor | None,
        embedding: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        last: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The layer over new pairs: its output [B, W, D] and the logits [B, W, S]; with `last`
        [B, 1], those of that pair of each row alone. Features are the target's `layers`
        [B, W, F], or the layer's `own` earlier output [B, W, D]."""
        layer = self.midlayer
        feature = own if layers is None else self.fc(layers.to(self.fc.weight.dtype))
        assert feature is not None
        read, residual = layer.read(embedding, feature)
        keys, values = cache.update(*layer.self_attn.keys_values(read, (cos, sin)), 0)
        if last is not None:
            read, residual, cos, sin = (entries(x, last) for x in (read, residual, cos, sin))
            mask = None if mask is None else entries(mask, last)
        query = layer.self_attn.query(read, (cos, sin))
        hidden = layer.finish(residual, layer.self_attn.attend(query, keys, values, mask, []))
        return hidden, self.unembed(hidden, 0)

    def begin(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        return super().begin(ctx) if cache is None else Cached(self, ctx, cache)


class Cached:
    """The draft layer at its anchors, over a cache of its own: pairs with the target's features
    are committed to it, pairs with its own output are scratch."""

    def __init__(self, drafter: Eagle3, ctx: Context, cache: SlotCache) -> None:
        self.drafter, self.cache = drafter, cache
        pairs = [n - 1 for n in ctx.counts()]
        new = unread(cache, pairs)
        assert ctx.layers_BTF is not None
        layers = pieces(ctx.layers_BTF, cache.lengths, max(new))
        tokens = pieces(ctx.ids_BT[:, 1:], cache.lengths, max(new))
        # of the anchor, then of every node
        self.nodes_BWD, logits = self._read(layers, None, tokens, None, new)
        cache.keep(new)
        self.logits_BS = logits[:, 0]

    def grow(self, tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        nodes = self.nodes_BWD
        own = nodes[:, -1:] if parents_BW is None else entries(nodes, parents_BW + 1)
        hidden_BWD, logits = self._read(None, own, tokens_BW, parents_BW, None)
        self.nodes_BWD = torch.cat([self.nodes_BWD, hidden_BWD], 1)
        return logits

    def marginals(self, depth: int) -> Tensor | None:
        return None

    def _read(
        self,
        layers: Tensor | None,
        own: Tensor | None,
        tokens: Tensor,
        parents: Tensor | None,
        counts: list[int] | None,
    ) -> tuple[Tensor, Tensor]:
        """`Eagle3.read` of new pairs; with `counts`, at each row's last."""
        drafter = self.drafter
        place = self.cache.place(*size(tokens), parents)
        mask, last = place.mask_BTP, None
        if counts is not None:
            last = torch.tensor(counts, device=tokens.device)[:, None] - 1
            if mask is None and len(set(counts)) > 1:  # a prefill: each row sees its own pairs
                slots = torch.arange(self.cache.shown, device=tokens.device)
                mask = (slots <= last)[:, None].expand(-1, tokens.shape[1], -1)
        cos, sin = drafter.rope(place.position_BT, self.cache.shown + 1)
        hidden, logits = drafter.short(
            self.cache,
            tokens.shape[1],
            layers=layers,
            own=own,
            embedding=drafter.embed(tokens),
            cos=cos,
            sin=sin,
            mask=mask,
            last=last,
        )
        assert hidden is not None and logits is not None
        return hidden, logits


def rotated(x_BHAE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of heads, given cos and sin [B, A, E]."""
    cos, sin = (t[:, None].to(x_BHAE.dtype) for t in rope)
    return x_BHAE * cos + rotate_half(x_BHAE) * sin
