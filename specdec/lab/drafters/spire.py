"""SPIRe (Neelam et al. 2025, arXiv 2504.06419): a draft made of the target's last layers, which
attend to a short window of the target's own states.

The draft is initialised with the target's embedding, its last `num_layers` layers and its head (the
paper's pruned initialisation). All but the embedding are then trained. Each layer attends as
follows:

- Before the anchor, draft layer i makes its keys and values of the stream that enters the target's
  matching layer, so it attends to states of the complete target.
- It sees only the last `window` tokens before the anchor and the first `sink` tokens of the text
  (StreamingLLM, Xiao et al. 2024), in training too, so a draft's cache does not grow with the text.
  All depths of a speculation step share one window.
- Within the draft, a token reads the *memories* of the tokens before it. For layer i, a memory is
  Σ_l softmax(w_i)_l r_l, where r_0 … r_n are the streams before, between and after the draft's n
  layers (the Feedback Transformer, Fan et al. 2020). So a token's first layer reads what the last
  layer made of the token before. A token's own key is still made of the layer's input, so each step
  projects first its stream and then its memory, as in the authors' count of operations (the
  notebook under the tag SPIRe of MatX-inc/seqax).

The paper trains with half of the cross-entropy and half of the negated α: `experiment=spire_paper`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.context import Context, HiddenStateSpec
from specdec.drafters.attention import (
    Keys,
    OverSequence,
    Rotation,
    Sight,
    entries,
    fused,
    tokens_from,
)
from specdec.drafters.base import AnchorsConfig, DraftVocabConfig, Sizes, Trainable
from specdec.drafters.layers import (
    Attention,
    KeyValue,
    Layer,
    RMSNorm,
    Rope,
    config_of,
    copy_alike,
    copy_fitting,
    llama_of,
)
from specdec.drafters.target_views import decoder_layers
from specdec.errors import require
from specdec.runtime.cache import SlotCache
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts

HEAD_NORM = "self_attn.q_norm.weight"


@dataclass
class SpireConfig(DraftVocabConfig):
    """A draft of the target's last layers, which attend to a short window of the target's own
    states."""

    bounds: ClassVar = {"num_layers": 1, "window": 1, "sink": 0}
    name: str = "spire"
    depth: int = 4
    num_layers: int = 2  # layers of the draft
    window: int = 64  # tokens before the anchor that the draft attends to
    sink: int = 1  # first tokens of the text that the draft attends to
    # a drafted token's keys and values come from a mix of all layers (feedback memory); false: from
    # its own stream at each layer, as in any transformer
    feedback: bool = True
    # target: copy the target's last layers and LM head; random: draw the weights at random
    initialisation: str = "target"
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)


@dataclass(kw_only=True)
class SpireSizes(Sizes):
    """`llama`: the keys of a LlamaConfig for a layer like the target's; `head_norms`: whether its
    layers norm each query and key head; `layers`: the streams that are read, the inputs of its last
    layers."""

    llama: dict[str, Any]
    head_norms: bool
    layers: list[int]


class WindowCache(SlotCache):
    """Keys and values of the first `sink` tokens of a text and, in a ring, of its latest `window`.
    `lengths` is the number of tokens of each row's text that were read. The last slot is a dummy
    for rows with fewer new tokens, and is never attended to."""

    def __init__(self, layers: int, sink: int, window: int) -> None:
        super().__init__(layers, sink + window + 1)
        self.sink, self.window, self.shown = sink, window, self.capacity

    def advance(self, counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Read the texts up to `counts`. Returns the positions [B, T] of the tokens to write (0 for
        padding), and a mask [B, P] of the slots that are then visible."""
        if len(self.lengths) != len(counts):
            self.lengths = [0] * len(counts)
        new = []
        for known, count in zip(self.lengths, counts, strict=True):
            first = max(known, count - self.window)
            new.append([*range(known, min(self.sink, first)), *range(first, count)])
        wide = max(map(len, new))
        padded = [at + [-1] * (wide - len(at)) for at in new]
        position_BT = torch.tensor(padded, dtype=torch.long, device=device).view(len(new), wide)
        ring_BT = self.sink + (position_BT - self.sink) % self.window
        slot_BT = torch.where(position_BT < self.sink, position_BT, ring_BT)
        self.slots = torch.where(position_BT < 0, self.capacity - 1, slot_BT)
        self.rows_B1 = torch.arange(len(new), device=device)[:, None]
        self.lengths = list(counts)
        slot_P = torch.arange(self.capacity, device=device)
        seen_BP = slot_P < torch.tensor(counts, device=device)[:, None]
        seen_BP[:, -1] = False
        return position_BT.clamp_min(0), seen_BP


class Spire(Trainable):
    Config = SpireConfig
    Sizes = SpireSizes
    target: TargetParts

    def __init__(self, config: SpireConfig, sizes: SpireSizes) -> None:
        super().__init__(config, sizes)
        self.needs = HiddenStateSpec(layers=tuple(sizes.layers))
        self.llama = config_of(sizes.llama)
        D, n = self.llama.hidden_size, config.num_layers
        self.layers: Any = nn.ModuleList(
            Layer(self.llama, D, ("input_layernorm",), sizes.head_norms) for _ in range(n)
        )
        self.memory = nn.Parameter(torch.zeros(n, n + 1)) if config.feedback else None
        self.norm = RMSNorm(D, self.llama.rms_norm_eps)
        self.lm_head = nn.Linear(D, sizes.draft_vocab or sizes.target_vocab, bias=False)
        self.rope = Rope(self.llama)

    @classmethod
    def plan(cls, config: SpireConfig, target: TargetParts) -> SpireSizes:
        num_layers, n = decoder_layers(target, config.name), config.num_layers
        require(
            n < num_layers,
            f"drafter.num_layers={n}: give at most {num_layers - 1}, since the draft reads what "
            f"enters the last layers of this target, which has {num_layers}",
        )
        return cls.Sizes.of_config(
            config,
            target,
            llama=llama_of(target),
            head_norms=HEAD_NORM in target.as_llama(-1),
            layers=list(range(num_layers - n, num_layers)),
        )

    def initialise(self, target: TargetParts) -> None:
        """The target's last layers, final norm and head, as far as they fit; with
        `initialisation=random` the layers are drawn from a normal distribution of standard
        deviation 0.02. Memories begin as means of the streams."""
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.lm_head.weight.copy_(target.own_head(self.vocab_S))
        copy_fitting(self.norm.weight, target.norm_weight)
        if self.config.initialisation == "random":
            return
        for i, layer in enumerate(self.layers):
            theirs = target.as_llama(i - len(self.layers))
            copy_alike(theirs, dict(layer.named_parameters()), self.llama.hidden_size)

    def attach(self, target: TargetParts) -> None:
        self.target = target

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def embed(self, ids: Tensor) -> Tensor:
        embeddings: Tensor = self.target.embedding(ids).to(self.lm_head.weight.dtype)
        return embeddings

    def of_text(self, hidden_states_BTF: Tensor, i: int) -> Tensor:
        """The input of layer i from the target's streams, from which it makes the text's keys."""
        streams = hidden_states_BTF.to(self.lm_head.weight.dtype).chunk(len(self.layers), -1)
        normed: Tensor = self.layers[i].input_layernorm(streams[i])
        return normed

    def step(self, embedding: Tensor, attend: "OverSequence | OverWindow") -> Tensor:
        """The output [B, A, D] for one token at each place, from its embedding. Both training and
        drafting call it, each with its own attention."""
        streams = [embedding]
        for i, layer in enumerate(self.layers):
            streams.append(layer(*layer.entered(streams[-1]), attend, i))
        if self.memory is not None:
            weights = self.memory.softmax(-1).to(streams[0].dtype)
            memories = torch.einsum("nl,lbad->nbad", weights, torch.stack(streams))
            for i, (layer, memory) in enumerate(zip(self.layers, memories, strict=True)):
                attend.replace_own(i, layer.self_attn, layer.input_layernorm(memory))
        return streams[-1]

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        token_BAK = tokens_from(ctx, anchors_BA, drafted_BAK, self.depth)
        K, hidden_states_BTF = token_BAK.shape[2], ctx.hidden_states(self.needs)
        T = hidden_states_BTF.shape[1]
        position_BT, document_BT = (x[:, :T] for x in ctx.documents())
        pair_BA = (anchors_BA - 1).clamp_min(0)  # the last token whose stream is read
        sight = Sight.of_anchors(pair_BA, position_BT, document_BT)
        keys = Keys(sight._replace(window=self.config.window, sink=self.config.sink))
        end = T + K + 1
        rope, position_BA = self.rope(position_BT, end), position_BT.gather(1, pair_BA) + 1

        def text(i: int) -> tuple[Tensor, Rotation]:
            return self.of_text(hidden_states_BTF, i), rope

        outputs = []
        for k in range(K):
            of_token = self.rope(position_BA + k, end)
            attend = OverSequence(keys, of_token, text=None if k else text)
            outputs.append(self.step(self.embed(token_BAK[..., k]), attend))
        return torch.stack(outputs, 2)

    def new_cache(self, capacity: int | None = None) -> WindowCache:
        return WindowCache(len(self.layers), self.config.sink, self.config.window)

    def draft_growth(self, ctx: Context, cache: WindowCache | None = None) -> Growth:
        """A cache holds keys and values of the target's streams; those of drafted tokens live as
        long as the speculation step."""
        if cache is None:
            return super().draft_growth(ctx)
        counts, device = [n - 1 for n in ctx.counts()], ctx.ids_BT.device
        position_BT, seen_BP = cache.advance(counts, device)
        hidden_states = entries(ctx.hidden_states(self.needs), position_BT)
        end = max(counts) + 1
        of_text = self.rope(position_BT, end)
        before: list[KeyValue] = []  # for each layer: the window's, then the nodes'
        start_B1 = torch.tensor(counts, device=device)[:, None]
        above_BMM = seen_BP.new_zeros(len(counts), 0, 0)  # a node's ancestors, and itself

        def text(i: int) -> tuple[Tensor, Rotation]:
            return self.of_text(hidden_states, i), of_text

        def read(ids_BT: Tensor, follows_BT: Tensor | None) -> Tensor:
            """The logits [B, T, S] after nodes that follow these; None for the anchor."""
            nonlocal above_BMM
            (B, num_read), M = ids_BT.shape, above_BMM.shape[1]
            line_BTM = above_BMM.new_zeros(B, num_read, 0)
            if follows_BT is not None:
                line_BTM = entries(above_BMM, follows_BT)
            own_BTT = torch.eye(num_read, dtype=torch.bool, device=device).expand(B, -1, -1)
            above_BMM = torch.cat(
                [pad(above_BMM, (0, num_read)), torch.cat([line_BTM, own_BTT], 2)], 1
            )
            mask = torch.cat([seen_BP[:, None].expand(-1, num_read, -1), above_BMM[:, M:]], 2)
            rope = self.rope(start_B1 + line_BTM.sum(-1), end + M + num_read)
            over_window = OverWindow(cache, before, rope, mask, None if before else text)
            return self.unembed(self.step(self.embed(ids_BT), over_window), 0)

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None) -> Tensor:
            last = torch.full_like(tokens_BT, above_BMM.shape[1] - 1)
            return read(tokens_BT, last if parents_BT is None else parents_BT + 1)

        return Growth(read(ctx.ids_BT.gather(1, start_B1), None)[:, 0], grow)


class OverWindow:
    """The attention of drafting. It reads a cache of the text's window and the keys and values of
    the speculation step's nodes, which come after those of the window in `before`, for each layer.
    The first pass of a step writes each layer's keys and values of the new `text` to the cache.

    `OverSlots` does not suffice: the window is a ring without scratch slots, and a node's keys and
    values are replaced by those of its memory after the step.
    """

    def __init__(
        self,
        cache: WindowCache,
        before: list[KeyValue],
        rope: Rotation,
        mask: Tensor,
        text: Callable[[int], tuple[Tensor, Rotation]] | None,
    ) -> None:
        self.cache, self.before, self.rope, self.mask = cache, before, rope, mask
        self.text = text

    def asked(self, i: int, x: Tensor) -> Tensor:
        return x

    def __call__(self, i: int, attention: Attention, read: Tensor) -> Tensor:
        if self.text is not None:
            self.before.append(self.cache.update(*attention.keys_values(*self.text(i)), i))
        own, query = attention.keys_values(read, self.rope), attention.query(read, self.rope)
        self.before[i] = joined(self.before[i], own)
        return attention.joined(fused(query, *self.before[i], self.mask))

    def replace_own(self, i: int, attention: Attention, read: Tensor) -> None:
        keys, values = (x[:, :, : -read.shape[1]] for x in self.before[i])
        self.before[i] = joined((keys, values), attention.keys_values(read, self.rope))


def joined(before: KeyValue, after: KeyValue) -> KeyValue:
    """Keys and values, concatenated with others."""
    keys, values = (torch.cat(both, 2) for both in zip(before, after, strict=True))
    return keys, values
