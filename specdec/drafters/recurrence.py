"""Decoder layers unrolled on their own output: the common part of EAGLE's heads.

The first layer reads pairs of a token and the target's feature at the position before it. At depth
0 the pair is (x_a, feature of a - 1), with the pairs of all earlier positions as context; at later
depths the output of the last layer replaces the feature, which the target has not computed yet.
Training unrolls the layers in the same way (training-time test, EAGLE-3), so they train on the
inputs that they will see. Pair a - 1 belongs to anchor a and has the rotary position a - 1, as in
engines.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec.context import Context, Moment
from specdec.drafters.attention import Attend
from specdec.drafters.gather import entries, pieces, text_after, unread
from specdec.drafters.layer import Layer, config_of, llama_of
from specdec.drafters.over_slots import OverSlots
from specdec.drafters.over_text import At, Keys, OverDrafts, OverPairs, Sight
from specdec.drafters.proposer import Sizes
from specdec.drafters.rope import Rope
from specdec.drafters.trainable import AnchorsConfig, Trainable
from specdec.frozen import Frozen
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu.compiled_pass import SHORT, Compiled
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts


@dataclass
class RecurrentConfig:
    """`start=target` copies what fits of the target's last layer and at first passes the feature
    through to it; `start=random` draws the weights at random, as the papers do."""

    name: str
    depth: int = 3
    start: str = "target"
    intermediate_size: int | None = None  # None: the target's
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)


@dataclass(kw_only=True)
class RecurrentSizes(Sizes):
    """`llama`: the keys of a LlamaConfig for a layer shaped like the target's own."""

    llama: dict[str, Any]


class Recurrent(Trainable):
    """A family gives its `layers` and how a pair enters the first of them. All pairs of a text are
    keys, but queries of the last layer and later steps are computed only at anchors, so training on
    a sample of anchors saves most of the work."""

    Sizes: ClassVar[type[Sizes]] = RecurrentSizes
    fc: nn.Linear
    layers: Any
    _target: Frozen[TargetParts]  # set by `attach`

    def __init__(self, config: Any, sizes: RecurrentSizes) -> None:
        super().__init__(config, sizes)
        self.llama = config_of(sizes.llama)
        self.rope = Rope(self.llama)
        self.compiled = Compiled(self.run, SHORT)

    @classmethod
    def plan(cls, config: Any, target: TargetParts) -> Any:
        return cls.Sizes.of(config, target, llama=llama_of(target, config.intermediate_size))

    @property
    def layer(self) -> Layer:
        """The first layer."""
        first: Layer = self.layers[0]
        return first

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.self_attn.o_proj.weight.dtype

    @property
    def fusions(self) -> list[nn.Linear]:
        """The linear maps through which a pair enters. Their last D columns read the feature (of
        several features, the highest)."""
        return [self.fc]

    @property
    def upper(self) -> Sequence[Layer]:
        """The layers above the first, which read the stream alone, and no embedding."""
        return ()

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., F] in the form of the layer's own output [..., D]."""
        return features.to(self.dtype)

    @abstractmethod
    def enter(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention for a pair [..., width], and the residual stream [..., D]."""

    def onward(self, hidden: Tensor) -> Tensor:
        """What the next depth reads in place of a feature, from the output [..., D]."""
        return hidden

    def copy_from(self, target: TargetParts) -> None:
        """Copy the parts of the target's last layer that fit."""

    def start(self, target: TargetParts) -> None:
        """EAGLE's own start, with all linear weights drawn from a normal distribution of standard
        deviation 0.02, or the target's last layer around a pass-through of the feature."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if getattr(self.config, "start", "random") != "random":
            D = self.llama.hidden_size
            for fc in self.fusions:
                fc.weight.zero_()
                fc.weight[:, -D:] = torch.eye(D)
            self.copy_from(target)

    def attach(self, target: TargetParts) -> None:
        self._target = Frozen(target)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """The target's own head, frozen, unless the family has one."""
        return self._target.held.logits(hidden.to(self._target.held.dtype))

    def embed(self, ids: Tensor) -> Tensor:
        return self._target.held.embed(ids).to(self.dtype)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        if drafted_BAk is None:
            drafted_BAk = text_after(ctx.ids_BT, anchors_BA, self.depth - 1)
        return torch.stack(self.unrolled(ctx, anchors_BA, drafted_BAk), 2)

    def step(self, embedding: Tensor, state: Tensor, attend: Attend) -> Tensor:
        """The output [B, Wo, D] after pairs of an embedding and a state [B, W, D]. A state is a
        feature (see `fuse`), or what `onward` makes of an earlier output. Both training and
        drafting take this step, each with its own attention."""
        read, residual = self.enter(embedding, state)
        stream: Tensor = self.layer(read, residual, attend)
        for i, layer in enumerate(self.upper, 1):
            stream = layer(*layer.entered(stream), attend, i)
        return stream

    def unrolled(
        self,
        ctx: Context,
        anchors_BA: Tensor,
        drafted_BAk: Tensor,
        widths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The output [B, A, D] of each depth. With `widths`, depth k > 0 is computed only at the
        first `widths[k]` anchors of each row; widths must not rise with the depth."""
        ids_BP, k = ctx.ids_BT[:, 1:], drafted_BAk.shape[-1]
        B, P = ids_BP.shape
        pair_BA = (anchors_BA - 1).clamp_min(0)
        position_BP, sight = pairs_of(ctx)
        position_BA = position_BP.gather(1, pair_BA)
        every_BP = torch.arange(P, device=ids_BP.device).expand(B, P)
        keys, at = Keys(sight(pair_BA)), At(pair_BA, self.rope(position_BA, P + k))
        rope, count = self.rope(position_BP, P + k), len(self.upper)
        over_pairs = OverPairs(keys, rope, lambda i: sight(every_BP), count, at)
        state = self.fuse(ctx.features(self.needs)[:, :P])
        steps = [self.step(self.embed(ids_BP), state, over_pairs)]
        for depth in range(1, k + 1):
            stream, width = steps[-1], anchors_BA.shape[1] if widths is None else widths[depth]
            if width < stream.shape[1]:  # keep only the anchors that this depth counts
                stream, position_BA = stream[:, :width], position_BA[:, :width]
                keys.cut(width)
            over_drafts = OverDrafts(keys, self.rope(position_BA + depth, P + k))
            embedding = self.embed(drafted_BAk[:, :width, depth - 1])
            steps.append(self.step(embedding, self.onward(stream), over_drafts))
        return steps

    def noisy(self, ctx: Context, moment: Moment, noise: float) -> Context:
        """The context with uniform noise of width `noise` · 512/n on the features of each
        document of n tokens. The features that the objective compares with get no noise."""
        if not noise:
            return ctx
        position_BT, document_BT = ctx.documents()
        which_BT, real_BT = (position_BT == 0).cumsum(1) - 1, (document_BT >= 0).long()
        count_BT = torch.zeros_like(which_BT).scatter_add_(1, which_BT, real_BT).gather(1, which_BT)
        width_BT1 = noise * 512 / count_BT.clamp_min(1)[..., None]
        final_BTD = ctx.features(self.needs)
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
        """Run the layers over new pairs: the output [B, W, D] and the logits [B, W, S]. With `last`
        [B, Wo], they are only those of these pairs of each row. The pairs have the target's
        `features` [B, W, F] or the layers' `own` earlier output [B, W, D]."""
        earlier = features if own is None else own
        assert earlier is not None
        state = self.fuse(earlier) if own is None else self.onward(earlier)
        over_slots = OverSlots(cache, (cos, sin), mask, 1 + len(self.upper), last)
        hidden = self.step(embedding, state, over_slots)
        return hidden, self.unembed(hidden, 0)

    def begin(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        """With a cache, pairs with the target's features are committed to it, and pairs with the
        layers' own output are scratch."""
        if cache is None:
            return super().begin(ctx)
        new = unread(cache, [n - 1 for n in ctx.counts()])
        features = pieces(ctx.features(self.needs), cache.lengths, max(new))
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
        """`run` on new pairs; with `counts`, the output is only that of the last of each row's
        `counts[b]` pairs and of `more` pairs after it."""
        place = cache.place(tokens, parents)
        mask, last = place.mask_BTP, None
        if counts is not None and tokens.shape[1] > 1:
            last = torch.tensor(counts, device=tokens.device)[:, None] - 1
            last = last + torch.arange(1 + more, device=tokens.device)
            sees_all = not (more or self.upper or len(set(counts)) > 1)  # each sees its row's slots
            if mask is None and tokens.shape[1] > 1 and not sees_all:  # a prefill
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
        return hidden, logits


def pairs_of(ctx: Context) -> tuple[Tensor, Callable[[Tensor], Sight]]:
    """The position [B, P] of each pair of a text in its document, and what anchors with these pairs
    [B, A] see: the pairs of their document up to their own."""
    place_BP, document_BP = (x[:, 1:] for x in ctx.documents())
    position_BP = (place_BP - 1).clamp_min(0)
    of_one_BP = document_BP.masked_fill(place_BP == 0, -2)  # its feature is of another document

    def sight(pair_BA: Tensor) -> Sight:
        return Sight.of(pair_BA, position_BP, document_BP)._replace(document_BP=of_one_BP)

    return position_BP, sight
