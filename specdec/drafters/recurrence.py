"""Decoder layers unrolled on their own output: the common part of EAGLE's heads and MTP.

The first layer reads pairs of a token and the target's hidden state at the position before it. At
depth 0 the pair is (x_a, hidden state of a - 1), with the pairs of all earlier positions as
context; at later depths the output of the last layer replaces the hidden state, which the target
has not computed yet. Training unrolls the layers in the same way (training-time test, EAGLE-3), so
training and drafting have the same inputs. Pair a - 1 belongs to anchor a and has the rotary
position a - 1, as in engines.

`Solved` adds a closed-form initialisation, by least squares. At this initialisation attention adds
nothing, or a token attends only to itself. Depths 0 and 1 then depend only on their own input, and
are linear in some of the weights.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context, KnownAnchors
from specdec.drafters.attention import (
    At,
    Keys,
    OverSequence,
    OverSlots,
    Sight,
    entries,
    pieces,
    reading,
    text_after,
)
from specdec.drafters.base import AnchorsConfig, Sizes, Trainable, WindowConfig
from specdec.drafters.layers import (
    Attend,
    Layer,
    RMSNorm,
    Rope,
    away_from_zero,
    config_of,
    llama_of,
    require_width,
)
from specdec.errors import require
from specdec.frozen import Frozen
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu.compiled_pass import SHORT, Compiled
from specdec.runtime.sliding_cache import SlidingCache
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts


@dataclass
class RecurrentConfig(WindowConfig):
    """A drafter that reads its own output at each further depth."""

    name: str
    depth: int = 3
    # target: copy what fits of the target's last layer, so that its hidden state passes through;
    # random: draw the weights at random
    initialisation: str = "target"
    intermediate_size: int | None = None  # width of the MLP; null: the target's
    # keys of the draft's layers that differ from the target's, such as head_dim: those of a draft
    # that drafter.from imports
    layer_config: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = False  # a frozen embedding of its own, as some imported drafts have
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)


@dataclass(kw_only=True)
class RecurrentSizes(Sizes):
    """`llama`: the keys of a LlamaConfig for a layer with the target's sizes."""

    llama: dict[str, Any]


class Recurrent(Trainable):
    """A drafter that unrolls its layers. A subclass defines its `layers` and how a pair enters the
    first of them. All pairs of a text are keys, but queries of the last layer and later steps are
    computed only at anchors, so training on a sample of anchors saves most of the work."""

    Sizes: ClassVar[type[Sizes]] = RecurrentSizes
    fc: Any
    layers: Any
    _target: Frozen[TargetParts]  # set by `attach`

    def __init__(self, config: Any, sizes: RecurrentSizes) -> None:
        super().__init__(config, sizes)
        self.llama = config_of(sizes.llama)
        self.rope = Rope(self.llama)
        self.embed_tokens: nn.Embedding | None = None
        if getattr(config, "own_embedding", False):
            self.embed_tokens = nn.Embedding(sizes.target_vocab, self.llama.hidden_size)
            self.embed_tokens.requires_grad_(False)
        self.compiled = Compiled(self.run, SHORT)
        # of the pairs of a text, which each layer sees
        self.window: int | None = getattr(config, "window", None)
        self.sink: int = getattr(config, "sink_tokens", 0)

    @classmethod
    def plan(cls, config: Any, target: TargetParts) -> Any:
        changes = getattr(config, "layer_config", None)
        llama = llama_of(target, config.intermediate_size, changes)
        require_width(llama, target)
        return cls.Sizes.of_config(config, target, llama=llama)

    @property
    def layer(self) -> Layer:
        """The first layer."""
        first: Layer = self.layers[0]
        return first

    @property
    def upper(self) -> Sequence[Layer]:
        """The layers above the first, which read the residual stream alone, without an
        embedding."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.self_attn.o_proj.weight.dtype

    def attach(self, target: TargetParts) -> None:
        self._target = Frozen(target)

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings [..., D] of ids, from the target's table or the draft's own."""
        if self.embed_tokens is not None:
            return nn.functional.embedding(ids, self.embed_tokens.weight).to(self.dtype)
        return self._target.held.embed(ids).to(self.dtype)

    def embed_pairs(self, ids: Tensor, position: Tensor) -> Tensor:
        """The embeddings [..., D] of the pairs at these positions in their document, whose tokens
        are `ids`."""
        return self.embed(ids)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The target's hidden states [..., F] in the form of the layer's own output [..., D]."""
        return hidden_states.to(self.dtype)

    @abstractmethod
    def enter(self, embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention for a pair [..., width], and the residual stream [..., D]."""

    def state_for_next_depth(self, hidden: Tensor) -> Tensor:
        """The next depth's replacement for a hidden state, from the output [..., D]."""
        return hidden

    def step(self, embedding: Tensor, state: Tensor, attend: Attend) -> Tensor:
        """The output [B, T, D] after pairs of an embedding and a state [B, T, D]. A state is a
        fused hidden state (see `fuse`) or the result of `state_for_next_depth`. Both training and
        drafting call it, each with its own attention."""
        read, residual = self.enter(embedding, state)  # [B, T, width], [B, T, D]
        stream: Tensor = self.layer(read, residual, attend)  # [B, T, D]; [B, T, D] of the last
        for i, layer in enumerate(self.upper, 1):
            stream = layer(*layer.entered(stream), attend, i)  # layer.entered: normed, residual
        return stream

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Logits of the target's own frozen head; methods with their own head override this."""
        return self._target.held.logits(hidden.to(self._target.held.dtype))

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        if drafted_BAK is None:
            drafted_BAK = text_after(ctx.ids_BT, anchors_BA, self.depth - 1)
        return torch.stack(self.unrolled(ctx, anchors_BA, drafted_BAK), 2)

    def unrolled(
        self,
        ctx: Context,
        anchors_BA: Tensor,
        drafted_BAK: Tensor,
        widths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The output [B, A, D] of each depth. With `widths`, depth k > 0 is computed only at the
        first `widths[k]` anchors of each row; widths must not increase with the depth."""
        ids_BP, k = ctx.ids_BT[:, 1:], drafted_BAK.shape[-1]  # pair p has token p + 1
        P, count = ids_BP.shape[1], len(self.upper)
        every_BP = torch.arange(P, device=ids_BP.device).expand(len(ids_BP), P)
        pair_BA = (anchors_BA - 1).clamp_min(0)  # pair a - 1 belongs to anchor a
        position_BP, sight = pairs_of(ctx, self.window, self.sink)
        position_BA = position_BP.gather(1, pair_BA)
        # depth 0: all pairs of the text, with the target's hidden states
        keys, at = Keys(sight(pair_BA)), At(pair_BA, self.rope(position_BA, P + k))
        rope = self.rope(position_BP, P + k)  # cos and sin [B, P, D]
        attend = OverSequence(keys, rope, lambda i: sight(every_BP), count, at)
        state_BPD = self.fuse(ctx.hidden_states(self.needs)[:, :P])  # from [B, P, F]
        embedding_BPD = self.embed_pairs(ids_BP, position_BP)
        output_BAD = self.step(embedding_BPD, state_BPD, attend)
        steps = [output_BAD]
        for depth in range(1, k + 1):  # a drafted token at each anchor, with the output before it
            width = anchors_BA.shape[1] if widths is None else widths[depth]
            if width < output_BAD.shape[1]:  # keep only the anchors that this depth counts
                output_BAD, position_BA = output_BAD[:, :width], position_BA[:, :width]
                keys.cut(width)
            keys.read_ahead(depth)
            attend = OverSequence(keys, self.rope(position_BA + depth, P + k))
            embedding_BAD = self.embed(drafted_BAK[:, :width, depth - 1])
            output_BAD = self.step(embedding_BAD, self.state_for_next_depth(output_BAD), attend)
            steps.append(output_BAD)
        return steps

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        """With a window, a cache that stays small and is never of fixed size, so its passes are not
        compiled."""
        layers = 1 + len(self.upper)
        if self.window is not None:
            return SlidingCache(layers, self.window, self.sink)
        return SlotCache(layers, capacity)

    def draft_growth(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        """With a cache, pairs with the target's hidden states are committed to it, and pairs with
        the layers' own output use scratch slots."""
        if cache is None:
            return super().draft_growth(ctx)
        for new in reading(cache, [n - 1 for n in ctx.counts()], 1 + len(self.upper)):
            hidden_states = pieces(ctx.hidden_states(self.needs), cache.lengths, max(new))
            tokens = pieces(ctx.ids_BT[:, 1:], cache.lengths, max(new))
            # the output at the anchor, then at every node
            nodes_BTD, logits = self._cached(cache, hidden_states, None, tokens, None, new)
            cache.commit(new)

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
            nonlocal nodes_BTD
            own = nodes_BTD[:, -1:] if parents_BT is None else entries(nodes_BTD, parents_BT + 1)
            hidden_BTD, logits = self._cached(cache, None, own, tokens_BT, parents_BT, None)
            nodes_BTD = torch.cat([nodes_BTD, hidden_BTD], 1)
            return logits

        return Growth(logits[:, 0], grow)

    def _cached(
        self,
        cache: SlotCache,
        hidden_states: Tensor | None,
        own: Tensor | None,
        tokens: Tensor,
        parents: Tensor | None,
        counts: list[int] | None,
        more: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Call `run` on new pairs. With `counts`, the output is only that of the last of each row's
        `counts[b]` pairs and of `more` pairs after it."""
        place = cache.place(tokens, parents)
        mask, last = place.mask_BTP, None
        if counts is not None and tokens.shape[1] > 1:
            last = torch.tensor(counts, device=tokens.device)[:, None].clamp_min(1) - 1
            last = last + torch.arange(1 + more, device=tokens.device)
            sees_all = not (more or self.upper or len(set(counts)) > 1)  # each sees its row's slots
            if mask is None and tokens.shape[1] > 1 and not sees_all:  # a prefill
                slots = torch.arange(cache.shown, device=tokens.device)
                mask = (slots <= slots[:, None]).expand(len(tokens), -1, -1)
        cos, sin = self.rope(place.position_BT, cache.end + 1)
        hidden, logits = self.compiled(
            cache,
            hidden_states=hidden_states,
            own=own,
            embedding=self.embed_pairs(tokens, place.position_BT),
            cos=cos,
            sin=sin,
            mask=mask,
            last=last,
        )
        return hidden, logits

    def run(
        self,
        cache: SlotCache,
        hidden_states: Tensor | None,
        own: Tensor | None,
        embedding: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        last: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layers over new pairs. Returns the output [B, T, D] and the logits [B, T, S];
        with `last` [B, T], only those of these pairs of each row. The pairs have either the
        target's `hidden_states` [B, T, F] or the layers' `own` earlier output [B, T, D]."""
        earlier = hidden_states if own is None else own
        assert earlier is not None
        state = self.fuse(earlier) if own is None else self.state_for_next_depth(earlier)
        over_slots = OverSlots(cache, (cos, sin), lambda _: mask, 1 + len(self.upper), last)
        hidden = self.step(embedding, state, over_slots)
        return hidden, self.unembed(hidden, 0)

    @property
    def fusions(self) -> list[nn.Linear]:
        """The linear maps that read a pair. Their last D columns read the hidden state (of several
        hidden states, the highest)."""
        return [self.fc]

    def copy_from(self, target: TargetParts) -> None:
        """Copy the parts of the target's last layer that fit."""

    def initialise(self, target: TargetParts) -> None:
        """EAGLE's own initialisation, with all linear weights from a normal distribution of
        standard deviation 0.02; or the target's last layer around a pass-through of the hidden
        state. An embedding of the draft's own is a copy of the target's, if it has its width."""
        if self.embed_tokens is not None:
            table = target.embedding.weight
            if table.shape == self.embed_tokens.weight.shape:
                self.embed_tokens.weight.copy_(table)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    module.bias.zero_()
        if getattr(self.config, "initialisation", "random") != "random":
            D = self.llama.hidden_size
            for fc in self.fusions:
                fc.weight.zero_()
                fc.weight[:, -D:] = torch.eye(D)
            self.copy_from(target)


def pairs_of(
    ctx: Context, window: int | None = None, sink: int = 0
) -> tuple[Tensor, Callable[[Tensor], Sight]]:
    """The position [B, P] of each pair of a text in its document, and a function that returns what
    anchors with these pairs [B, A] attend to: the pairs of their document up to their own, or only
    those of a `window` and the first `sink`."""
    place_BP, document_BP = (x[:, 1:] for x in ctx.documents())
    position_BP = (place_BP - 1).clamp_min(0)
    # its hidden state is of another document
    of_one_BP = document_BP.masked_fill(place_BP == 0, -2)

    def sight(pair_BA: Tensor) -> Sight:
        every = Sight.of_anchors(pair_BA, position_BP, document_BP)
        return every._replace(document_BP=of_one_BP, window=window, sink=sink)

    return position_BP, sight


RIDGE = 3e-3  # penalty of a weight, relative to the sum of squares of its input


class Squares:
    """The sums xᵀx [F, F] and xᵀy [F, D] over all added rows x, y. They are kept in float64, and on
    the CPU if the device has no float64 (a Mac's GPU)."""

    def __init__(self) -> None:
        self.xx = self.xy = torch.zeros((), dtype=torch.float64)
        self.rows = 0

    def add(self, x_NF: Tensor, y_ND: Tensor) -> None:
        if not self.rows:
            F, D = x_NF.shape[1], y_ND.shape[1]
            device = "cpu" if x_NF.device.type == "mps" else x_NF.device
            self.xx = torch.zeros(F, F, dtype=torch.float64, device=device)
            self.xy = torch.zeros(F, D, dtype=torch.float64, device=device)
        self.xx += (x_NF.T @ x_NF).to(self.xx.device)
        self.xy += (x_NF.T @ y_ND).to(self.xy.device)
        self.rows += len(x_NF)


def ridge(xx_FF: Tensor, xy_FD: Tensor) -> Tensor:
    """The weights W [F, D] with the smallest Σ ‖xW - y‖² + `RIDGE` Σ_i xx_ii ‖W_i‖². This
    penalty is invariant to a rescaling of the inputs. Raises UserError if a row in the sums was
    not finite."""
    require(
        bool(xx_FF.isfinite().all() and xy_FD.isfinite().all()),
        "the target's states are not finite numbers on the training texts, so no start can be "
        "solved for: its weights are damaged, or they overflow in this dtype (give "
        "target.dtype=float32)",
    )
    size_F = xx_FF.diagonal()
    penalty_F = RIDGE * size_F + 1e-12 * size_F.max().clamp_min(1e-12)
    penalised_FF = xx_FF.clone()
    penalised_FF.diagonal().add_(penalty_F)
    weight_FD: Tensor = torch.linalg.solve(penalised_FF, xy_FD)
    return weight_FD


def low_rank(weight_FD: Tensor, xx_FF: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [F, N] and [N, D] of equal norm and rank at most `rank`, whose product best
    approximates the weights on the rows in xᵀx (reduced-rank regression)."""
    size_F, basis_FF = torch.linalg.eigh(xx_FF)
    root_F = size_F.clamp_min(float(size_F.max()) * 1e-9).sqrt()
    left, size, right = torch.linalg.svd((basis_FF * root_F).T @ weight_FD, full_matrices=False)
    left, size, right = left[:, :rank], size[:rank].sqrt(), right[:rank]
    inner, outer = (basis_FF / root_F) @ (left * size), size[:, None] * right
    balance = (outer.norm() / inner.norm()).sqrt()
    return inner * balance, outer / balance


INITIALISATIONS = ("closed_form", "target", "random")  # values of the setting `initialisation`


class Solved(Recurrent):
    """The closed-form initialisation. A subclass implements `solve_closed_form` with the methods
    here."""

    def joined(self, embedding: Tensor, hidden_state: Tensor) -> Tensor:
        """The input of `fc` for a pair [..., 2D], in methods where it reads both parts."""
        return torch.cat([embedding, hidden_state], -1)

    @property
    def last_norm(self) -> RMSNorm | None:
        """The norm between the residual stream and the LM head, if the drafter has one."""
        return None

    def before(self, some: KnownAnchors) -> Tensor:
        """The hidden states [N, F] that depth 0 reads at known anchors."""
        return some.before(some.ctx.hidden_states(self.needs)).to(self.dtype)

    def token(self, some: KnownAnchors, depth: int) -> Tensor:
        """The embedding [N, D] of the text's own token that a depth reads at known anchors."""
        return self.embed(some.tokens(depth))

    def wanted(self, some: KnownAnchors, depth: int) -> Tensor:
        """The wanted value [N, D] of the residual stream after a depth at known anchors: the
        target's final state, divided by the weight of the norm that follows."""
        final_ND = some.wanted(depth).to(self.dtype)
        return final_ND / away_from_zero(self.last_norm.weight) if self.last_norm else final_ND

    def scale_last_norm(self, known: Iterable[KnownAnchors]) -> None:
        """Check that final states divided by the norm's weight have a mean square near 1. If not
        (the target's norm adds a bias, or was not copied), set the weight to the sizes of the
        states."""
        assert self.last_norm is not None
        weight_D, final_ND = self.last_norm.weight, next(iter(known)).wanted(0).to(self.dtype)
        if not 0.8 < float((final_ND / away_from_zero(weight_D)).square().mean()) < 1.25:
            size_D = final_ND.square().mean(0).sqrt()
            weight_D.copy_(size_D.clamp_min(1e-3 * float(size_D.max())))

    def solve_pairs(self, fc: nn.Linear, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Set `fc`, by least squares, to the map that best predicts the target's next final state
        from the `joined` pairs of two depths: depth 0 reads a token and the target's state before
        it, depth 1 the next token and the output of depth 0."""
        pairs = Squares()
        for some in known():
            read = self.joined(self.token(some, 0), self.before(some))
            pairs.add(read, self.wanted(some, 0))
        fc.weight.copy_(ridge(pairs.xx, pairs.xy).T)
        for some in known():
            state = self.layer.leave(fc(self.joined(self.token(some, 0), self.before(some))))
            pairs.add(self.joined(self.token(some, 1), state), self.wanted(some, 1))
        fc.weight.copy_(ridge(pairs.xx, pairs.xy).T)

    def solve_mlp(self, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Set the output weights of the first layer's MLP, by least squares, so that the MLP adds
        the remaining error of the layer at depths 0 and 1. Its other weights are unchanged."""
        layer, mlp, rest = self.layer, self.layer.mlp, Squares()
        mlp.down_proj.weight.zero_()
        for some in known():
            hidden_state = self.fuse(self.before(some))
            for depth in (0, 1):
                read, residual = self.enter(self.token(some, depth), hidden_state)
                stream = residual + layer.self_attn.own_output(read)
                normed = layer.post_attention_layernorm(stream)
                inner = mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
                rest.add(inner, self.wanted(some, depth) - stream)
                hidden_state = self.state_for_next_depth(layer.leave(stream))
        mlp.down_proj.weight.copy_(ridge(rest.xx, rest.xy).T)


class Prefix(Recurrent):
    """A recurrent draft layer that reads hidden states alone, is used at depth 0 only, and has a
    norm in place of an LM head."""

    def __init__(self, llama: dict[str, Any], vocab: int) -> None:
        config = RecurrentConfig("prefix", depth=1, initialisation="random")
        super().__init__(config, RecurrentSizes(target_vocab=vocab, llama=llama))
        D = self.llama.hidden_size
        self.layers = nn.ModuleList([Layer(self.llama, D, ("input_layernorm",))])
        self.norm = RMSNorm(D, self.llama.rms_norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        return ids  # `enter` does not read embeddings

    def enter(self, embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.entered(hidden_state)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed
