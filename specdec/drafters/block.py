"""A block of tokens drafted in one pass: the common part of the parallel block drafters.

The target's hidden states are fused once, c = RMSNorm(fc(hidden states)), and every layer reads
them as keys and values at the positions before the anchor. The queries are the slots of a block,
which attend to each other: slot 0 is the anchor's token, the others the embedding of a mask token,
so one pass drafts all depths. The target's own embedding and LM head are used as they are. A cache
holds keys of the target's hidden states, never of a block.

Layers are Qwen3's, which norm each query and key head, but the weights of key norms stay 1: those
of query norms can do the same work, and on a CPU vLLM 0.32 norms the hidden states' keys in every
layer with the first layer's weights (its kernel reads only one row of the stacked weights).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.attention import (
    Keys,
    OverSequence,
    OverSlots,
    Sight,
    last_of,
    pieces,
    reading,
)
from specdec.drafters.base import (
    AnchorsConfig,
    DraftVocabConfig,
    Limits,
    Sizes,
    Trainable,
    WindowConfig,
    chosen_layers,
    reading_no_draft,
    require_rising,
)
from specdec.drafters.layers import (
    Attend,
    Layer,
    RMSNorm,
    Rope,
    config_of,
    copy_alike,
    copy_fitting,
    llama_of,
    require_width,
)
from specdec.errors import require, require_between
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu.compiled_pass import SHORT, Compiled
from specdec.runtime.sliding_cache import SlidingCache
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts

MANY = 4096  # slots from which what follows attention is computed again in the backward pass


@dataclass
class BlockConfig(WindowConfig, DraftVocabConfig):
    """`depth` tokens drafted in one forward pass."""

    bounds: ClassVar[dict[str, Any]] = {"num_layers": (1, 64)}
    name: str
    depth: int = 7
    num_layers: int = 3  # layers of the draft
    # ascending numbers, from 1, of the target layers after which hidden states are read; null: as
    # many as the draft has, spread as in the reference
    layers: list[int] | None = None
    # token id whose embedding stands for tokens not yet known; null: the last id of the vocabulary
    mask_token: int | None = None
    # target: copy the target's last layers and final norm; random: draw the weights at random, as
    # in the paper
    initialisation: str = "target"
    intermediate_size: int | None = None  # width of the MLP; null: the target's
    # keys of the draft's layers that differ from the target's, such as head_dim: those of a draft
    # that drafter.from imports
    layer_config: dict[str, Any] = field(default_factory=dict)
    anchors: AnchorsConfig = field(default_factory=lambda: AnchorsConfig(per_row=64))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_rising(self.layers)


@dataclass(kw_only=True)
class BlockSizes(Sizes):
    """`llama`: LlamaConfig keys of the draft's layers; `layers`: the target's layers to read."""

    llama: dict[str, Any]
    layers: list[int]
    mask_token: int


class Block(Trainable):
    Sizes = BlockSizes
    parallel: ClassVar[bool] = False  # whether no depth reads a drafted token
    causal: ClassVar[bool] = False  # whether a slot sees only itself and the slots before it
    first: ClassVar[int] = 1  # the slot that predicts depth 0, the token after the anchor
    target: TargetParts
    _head: Callable[[Tensor], Tensor]

    def __init__(self, config: BlockConfig, sizes: BlockSizes) -> None:
        super().__init__(config, sizes)
        require_between("drafter.mask_token", sizes.mask_token, 0, sizes.target_vocab - 1)
        self.needs = HiddenStateSpec(layers=tuple(sizes.layers))
        self.llama = config_of(sizes.llama)
        self.slots = config.depth + self.first
        require(
            config.window is None or config.window >= self.slots,
            f"drafter.window={config.window}: a block has {self.slots} tokens, which see each "
            f"other: give at least {self.slots}, or null",
        )
        self.limits = Limits(depth=config.depth, slots=self.slots, parallel=self.parallel)
        D, eps = self.llama.hidden_size, self.llama.rms_norm_eps
        self.fc = nn.Linear(len(sizes.layers) * D, D, bias=False)
        self.hidden_norm, self.norm = RMSNorm(D, eps), RMSNorm(D, eps)
        numbers = range(config.num_layers)
        layers = [Layer(self.llama, D, ("input_layernorm",), head_norms=True) for _ in numbers]
        for layer in layers:
            layer.self_attn.k_norm.requires_grad_(False)
        self.layers: Any = nn.ModuleList(layers)
        self.rope = Rope(self.llama)
        self.compiled = Compiled(self.run, SHORT + self.slots)

    @classmethod
    def plan(cls, config: BlockConfig, target: TargetParts) -> BlockSizes:
        num_layers, n = target.depth, config.num_layers
        spread = (
            [2 + round(i * (num_layers - 4) / (n - 1)) for i in range(n)]
            if n > 1
            else [num_layers // 2 + 1]
        )
        layers = chosen_layers(config.layers, spread, target)
        llama = llama_of(target, config.intermediate_size, config.layer_config)
        require_width(llama, target)
        mask = target.vocab_size - 1 if config.mask_token is None else config.mask_token
        return cls.Sizes.of_config(config, target, layers=layers, llama=llama, mask_token=mask)

    def attach(self, target: TargetParts) -> None:
        self.target, self._head = target, target.unembedding(self.vocab_S)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The fused hidden states c [B, T, D], input of keys and values, from the target's hidden
        states [B, T, F]."""
        read: Tensor = self.hidden_norm(self.fc(hidden_states.to(self.fc.weight.dtype)))
        return read

    def enter(self, anchor_BA: Tensor) -> Tensor:
        """The embeddings [B, A, M, D] of blocks that begin with these tokens."""
        ids_BAM = anchor_BA[..., None].repeat(1, 1, self.slots)
        ids_BAM[..., 1:] = self.sizes.mask_token
        return self.target.embed(ids_BAM).to(self.fc.weight.dtype)

    def layer_input(self, layer: Layer, x: Tensor) -> tuple[Tensor, Any]:
        """The input of attention, from the slots' residual stream [..., D], and a value that is
        passed on to `finish`."""
        return layer.input_layernorm(x), None

    def finish(self, layer: Layer, x: Tensor, attended: Tensor, kept: Any) -> Tensor:
        """The stream after a layer."""
        return layer.finish(x, attended)

    def step(self, embedding: Tensor, attend: Attend) -> Tensor:
        """The states [B, A, K, D] that predict the depths after each anchor, from the embeddings
        [B, N, D] of its block's slots. Both training and drafting call it, each with its own
        attention."""
        x, many = embedding, embedding.shape[:2].numel() >= MANY and torch.is_grad_enabled()
        again: Any = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is drawn
        for i, layer in enumerate(self.layers):
            read, kept = self.layer_input(layer, x)  # normed [B, N, D]
            attended = attend(i, layer.self_attn, read)  # over the text's c and the block [B, N, D]
            finish = partial(self.finish, layer, kept=kept)
            x = checkpoint(finish, x, attended, **again) if many else finish(x, attended)
        blocks: Tensor = self.norm(x).unflatten(1, (-1, self.slots))  # [B, N, D] -> [B, A, M, D]
        drafted = blocks[:, :, self.first :]  # [B, A, K, D]
        return drafted

    def blocks(self, ctx: Context, anchors_BA: Tensor) -> Tensor:
        """The states [B, A, K, D] that predict the depths after each anchor."""
        context_BTD, M = self.fuse(ctx.hidden_states(self.needs)), self.slots  # from [B, T, F]
        T = context_BTD.shape[1]
        # the last hidden state that the anchor's block reads
        pair_BA = (anchors_BA - 1).clamp_min(0)
        position_BT, document_BT = (x[:, :T] for x in ctx.documents())
        sight, window = Sight.of_anchors(pair_BA, position_BT, document_BT), self.config.window
        if window is not None and window < T + M:  # else it hides nothing
            sight = sight._replace(window=window, sink=self.config.sink_tokens)
        keys = Keys(sight, M, self.causal)
        keys.read_ahead(1)  # slot 0 is one position after the last hidden state
        slots_M = torch.arange(1, M + 1, device=pair_BA.device)
        position_BN = (position_BT.gather(1, pair_BA)[..., None] + slots_M).flatten(1)  # N = A · M
        of_text, of_slots = (self.rope(x, T + M + 1) for x in (position_BT, position_BN))
        embedding_BND = self.enter(ctx.ids_BT.gather(1, anchors_BA)).flatten(1, 2)
        attend = OverSequence(keys, of_slots, text=lambda _: (context_BTD, of_text))
        return self.step(embedding_BND, attend)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """Computed for complete blocks, since earlier slots may attend to those of later depths."""
        depths = self.depth if drafted_BAK is None else drafted_BAK.shape[-1] + 1
        return self.blocks(ctx, anchors_BA)[:, :, :depths]

    def head(self, states: Tensor) -> Tensor:
        """The target's logits [..., S] of states [..., D]."""
        return self._head(states.to(self.target.dtype))

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self.head(hidden)

    def growth(
        self, ctx: Context, logits_BKS: Tensor, states_BKD: Tensor, anchor_B: Tensor
    ) -> Growth:
        """The growth after the anchors of a context, from the logits and states of all depths."""
        return reading_no_draft(lambda k: logits_BKS[:, k])

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        """With a window, a cache that stays small and is never of fixed size, so its passes are not
        compiled."""
        if self.config.window is not None:
            return SlidingCache(len(self.layers), self.config.window, self.config.sink_tokens)
        return SlotCache(len(self.layers), capacity)

    def draft_growth(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        """One forward pass for any draft topology. A cache keeps the keys of hidden states only."""
        anchor_B = last_of(ctx.ids_BT, ctx.counts())
        if cache is None:
            anchor_B1 = torch.tensor(ctx.counts(), device=ctx.ids_BT.device)[:, None] - 1
            states_BKD = self.blocks(ctx, anchor_B1)[:, 0]
            logits_BKS = self.head(states_BKD)
        else:
            logits_BKS, states_BKD = self._cached(ctx, anchor_B, cache)
        return self.growth(ctx, logits_BKS, states_BKD, anchor_B)

    def _cached(self, ctx: Context, anchor_B: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        for new in reading(cache, [n - 1 for n in ctx.counts()]):
            outputs = self._read(ctx, anchor_B, cache, new)
            cache.commit(new)
        return outputs

    def _read(
        self, ctx: Context, anchor_B: Tensor, cache: SlotCache, new: list[int]
    ) -> tuple[Tensor, Tensor]:
        """`run` on the next `new[b]` hidden states of each row, followed by its block."""
        num_read, M, device = max(new), self.slots, anchor_B.device
        hidden_states = pieces(ctx.hidden_states(self.needs), cache.lengths, num_read)
        known_B1, first_B1, new_B1 = (
            torch.tensor(x, device=device)[:, None]
            for x in (cache.lengths, cache.first_scratch(), new)
        )
        cache.place(anchor_B.new_zeros(len(new), num_read + M))
        steps = torch.arange(num_read + M, device=device)
        of_slots_BM = known_B1 + new_B1 + steps[:M]
        positions = torch.cat([known_B1 + steps[:num_read], of_slots_BM], 1)
        inner_B1P = (torch.arange(cache.shown, device=device) - first_B1)[:, None]
        end_M1 = num_read + (steps[:M, None] + 1 if self.causal else M)
        of_text_BMP, of_block_BMP = (
            inner_B1P < new_B1[..., None],
            (inner_B1P >= num_read) & (inner_B1P < end_M1),
        )
        if isinstance(cache, SlidingCache):
            of_text_BMP = of_text_BMP & cache.near(of_slots_BM, cache.positions(device))
        mask = (of_text_BMP | of_block_BMP).expand(-1, M, -1)
        cos, sin = self.rope(positions, cache.end + 1)
        outputs: tuple[Tensor, Tensor] = self.compiled(
            cache,
            hidden_states=hidden_states,
            embedding=self.enter(anchor_B[:, None])[:, 0],
            cos=cos,
            sin=sin,
            mask=mask,
        )
        return outputs

    def run(
        self,
        cache: SlotCache,
        hidden_states: Tensor,
        embedding: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The logits [B, K, S] and states [B, K, D] of one block in each row. Its embeddings
        [B, M, D] follow the new hidden states [B, T, F]; both get keys in the cache, with `mask`
        [B, M, P] over all of them."""
        over_slots = OverSlots(cache, (cos, sin), lambda _: mask, text=self.fuse(hidden_states))
        states = self.step(embedding, over_slots)[:, 0]
        return self.head(states), states

    def initialise(self, target: TargetParts) -> None:
        """Draw linear weights and embeddings from a normal distribution of standard deviation 0.02.
        `initialisation=target` then copies the parts of the target's last layers that fit, around a
        pass-through of the highest hidden state. Query norms are set to keep the size of scores."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if self.config.initialisation != "target":
            return

        D, depth = self.llama.hidden_size, target.depth
        self.fc.weight.zero_()
        self.fc.weight[:, -D:] = torch.eye(D)
        copy_fitting(self.hidden_norm.weight, target.as_llama(-1).get("input_layernorm.weight"))
        copy_fitting(self.norm.weight, target.norm_weight)
        for k, layer in enumerate(self.layers, depth - len(self.layers)):
            theirs, attention = target.as_llama(max(0, k)), layer.self_attn
            gain_D = theirs.pop("self_attn.k_norm.weight", None)
            copy_alike(theirs, dict(layer.named_parameters()), D)
            if gain_D is None or gain_D.shape != attention.q_norm.weight.shape:
                read_D, projections = layer.input_layernorm.weight, ("q_proj", "k_proj")
                sizes = [getattr(attention, name).weight * read_D for name in projections]
                gain_D = torch.stack([x.square().sum(1).mean().sqrt() for x in sizes]).prod()
            attention.q_norm.weight.mul_(gain_D)
