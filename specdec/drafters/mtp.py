"""Multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437), and FastMTP's one module for all
depths (arXiv 2509.18362).

Module k reads a token and a state (the target's final one, or that of module k - 1) through
eh_proj(cat[enorm(e), hnorm(h)]), a Llama layer and a norm of its own. The target's embedding and
head are shared and frozen, and the draft vocabulary is the target's.

`modules=1` reuses one module at every depth and unrolls it as engines do, also in training: depth k
has the rotary position a - 1 + k and attends to the pairs of the text and its own earlier depths in
one cache. With several modules, module k attends only to its own keys. These belong to tokens up to
a + k, each read together with the state of module k - 1 at the token before, as in DeepSeek-V3's
training. No engine serves several modules exactly: vLLM 0.32 runs its only module at every depth.

Traps, with their sources:
- The paper and vLLM's mimo_mtp concatenate [h; e]. Checkpoints, speculators, and vLLM's
  deepseek_mtp and mimo_v2_mtp concatenate [e; h].
- FastMTP's code (speculators, models/mtp/core.py) keeps the position of depth 0 at every depth and
  gives a depth only keys of that depth. No engine does so: in engines, positions advance.
- The state that the next depth reads is the normed one (vLLM 0.32, speculators). In older vLLM it
  was the one before the norm.
- deepseek_mtp replaces the embedding at position 0 by zeros; mimo_v2_mtp, whose block is Llama's
  and which therefore serves these modules, does not, and neither do we.

A module that comes from a target's own checkpoint has the decoder layer of that target, with
latent attention, gates or experts (`layer=`, native_layers.py), and runs as its engine runs it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig

from specdec.context import Context, HiddenStateSpec, KnownAnchors
from specdec.drafters.attention import (
    Keys,
    OverSequence,
    OverSlots,
    Sight,
    entries,
    pieces,
    truncated_contexts,
    unread,
)
from specdec.drafters.base import grow_with_depth
from specdec.drafters.layers import Attend, Layer, RMSNorm, away_from_zero, copy_last, fits
from specdec.drafters.native_layers import NATIVE, NativeModule, NativeRope
from specdec.drafters.recurrence import INITIALISATIONS, RecurrentConfig, RecurrentSizes, Solved
from specdec.errors import require, require_known
from specdec.runtime.cache import SlotCache
from specdec.sampling.trees import Growth
from specdec.targets.parts import TargetParts

# The state [B, T, D] of module k - 1 at the token before each one, given the state that it has just
# made of these tokens; None: it made none, as it cannot read them.
Below = Callable[[int, Tensor | None], Tensor]


@dataclass
class MTPConfig(RecurrentConfig):
    """Multi-token prediction modules, as in DeepSeek-V3. If the target's checkpoint has such
    modules, training starts from them, except with `initialisation=random`."""

    initialisations: ClassVar[tuple[str, ...]] = INITIALISATIONS
    name: str = "mtp"
    # without modules in the checkpoint: closed_form solves for the best linear draft (least
    # squares), target copies the target's last layer; random: draw the weights at random. The
    # default learning rate depends on this setting alone
    initialisation: str = "closed_form"
    # 1: one module for every depth; or the same number as depth: one module for each
    modules: int = 1
    # the module's layer: llama, or the architecture of the target whose own MTP module
    # drafter.from imports, such as deepseek_v3; layer_config then has the keys of that layer
    layer: str = "llama"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("drafter", self, layer=("llama", *NATIVE))
        require(
            not self.native or (self.modules == 1 and self.initialisation == "random"),
            f"drafter.layer={self.layer} is the target's own MTP module, which drafter.from reads: "
            "give drafter.from=CHECKPOINT alone",
        )
        require(
            not self.native or self.window is None,
            f"drafter.window={self.window}: a target's own MTP module has no window: omit "
            "drafter.window",
        )
        require(
            self.window is None or self.modules == 1,
            f"drafter.window={self.window}: only a single module can have a window: give "
            "drafter.modules=1",
        )
        require(
            self.modules in (1, self.depth),
            f"drafter.modules={self.modules}: give 1, which is reused at every depth, or "
            f"{self.depth}, one for each depth",
        )

    @property
    def native(self) -> bool:
        """Whether the module is the target's own, with a layer of its architecture."""
        return self.layer != "llama"


class Module(Layer):
    """One prediction module, with the tensor names of DeepSeek's and MiMo-V2's checkpoints."""

    enorm: RMSNorm
    hnorm: RMSNorm
    final_layernorm: RMSNorm

    def __init__(self, llama: LlamaConfig) -> None:
        D = llama.hidden_size
        super().__init__(llama, D, ("enorm", "hnorm", "input_layernorm", "final_layernorm"))
        self.eh_proj = nn.Linear(2 * D, D, bias=False)

    def joined(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The input of eh_proj for a pair [..., 2D]."""
        return torch.cat([self.enorm(embedding), self.hnorm(state)], -1)

    def enter(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.entered(self.eh_proj(self.joined(embedding, state)))

    def leave(self, stream: Tensor) -> Tensor:
        output: Tensor = self.final_layernorm(stream)
        return output

    def before_head(self, output: Tensor) -> Tensor:
        """The input of the head [..., D] for an output."""
        return output

    def copy_last(self, target: TargetParts) -> None:
        """Copy the target's last layer if it is Llama-like. Its input comes from after the final
        norm, so `hnorm` divides by that norm's weight and `final_layernorm` applies it again."""
        own = ("enorm.", "hnorm.", "final_layernorm.", "eh_proj.")
        block = {n: x for n, x in self.named_parameters() if not n.startswith(own)}
        if (after := copy_last(target, block)) is None:
            return
        self.final_layernorm.weight.copy_(after)
        self.hnorm.weight.copy_(1 / away_from_zero(after.to(self.hnorm.weight)))
        generator = torch.Generator().manual_seed(0)
        drawn_ND = torch.randn(256, len(after), generator=generator).to(self.hnorm.weight)
        stream_ND = self.hnorm(drawn_ND * self.final_layernorm.weight)
        self.temper(stream_ND, self.input_layernorm(stream_ND))


class MTP(Solved):
    Config = MTPConfig
    needs = HiddenStateSpec(final_hidden=True)

    def __init__(self, config: MTPConfig, sizes: RecurrentSizes) -> None:
        super().__init__(config, sizes)
        if config.native:
            self.rope = NativeRope(config.layer, config.layer_config)
        self.layers = nn.ModuleList(self.new_module() for _ in range(config.modules))
        self.of_target = False  # whether training starts from the target's own MTP modules
        self.several = config.modules > 1
        if self.several:
            self.limits.depth = config.modules

    @classmethod
    def plan(cls, config: Any, target: TargetParts) -> Any:
        if not config.native:
            return super().plan(config, target)
        return super().plan(replace(config, layer_config={}), target)

    def new_module(self) -> nn.Module:
        config = self.config
        return (
            NativeModule(config.layer, config.layer_config) if config.native else Module(self.llama)
        )

    @property
    def stack(self) -> list[Module]:
        return list(self.layers)

    @property
    def layer(self) -> Module:
        return self.stack[0]

    @property
    def fusions(self) -> list[nn.Linear]:
        return [module.eh_proj for module in self.stack]

    def embed_pairs(self, ids: Tensor, position: Tensor) -> Tensor:
        """The embeddings [..., D] of pairs; some targets' own modules skip that of position 0."""
        embedding = self.embed(ids)
        if self.config.native and NATIVE[self.config.layer].skips_first_embedding:
            embedding = embedding.masked_fill((position == 0)[..., None], 0)
        return embedding

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return super().unembed(self.layer.before_head(hidden), k)

    def copy_from(self, target: TargetParts) -> None:
        """Copy the target's own MTP modules; the last of them serves all further depths. If there
        is none whose tensors all fit, because its block is not Llama's, copy the target's last
        layer."""
        theirs: dict[str, Tensor] = {}
        for k, module in enumerate(self.stack):
            stored = target.beyond(k)
            stored["final_layernorm.weight"] = stored.pop("shared_head.norm.weight", torch.empty(0))
            ours = dict(module.named_parameters())
            theirs = stored if fits(stored, ours) else theirs
            for name, x in ours.items() if theirs else ():
                x.copy_(theirs[name])
            if not theirs:
                module.copy_last(target)
        self.of_target = bool(theirs)

    @property
    def closed_form_initialisation(self) -> bool:
        return super().closed_form_initialisation and not self.of_target

    def solve_closed_form(self, known: Callable[[], Iterable[KnownAnchors]]) -> None:
        """Initialise as the best linear draft (`solve_pairs`). At first attention adds nothing, and
        the MLP adds the result of `solve_mlp`. Modules after the first are initialised like the
        first."""
        first = self.layer
        self.scale_last_norm(known())
        first.enorm.weight.fill_(1.0)
        first.hnorm.weight.copy_(1 / away_from_zero(first.final_layernorm.weight))
        self.solve_pairs(first.eh_proj, known)
        first.silence()
        self.solve_mlp(known)
        for module in self.stack[1:]:
            module.load_state_dict(first.state_dict())

    @property
    def last_norm(self) -> RMSNorm:
        return self.layer.final_layernorm

    def joined(self, embedding: Tensor, hidden_state: Tensor) -> Tensor:
        return self.layer.joined(embedding, hidden_state)

    def enter(self, embedding: Tensor, hidden_state: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.enter(embedding, hidden_state)

    def step(
        self,
        embedding: Tensor,
        state: Tensor,
        attend: Attend,
        first: int = 0,
        below: Below | None = None,
    ) -> Tensor:
        """With one module, the `step` of recurrent drafts. With several, the states [B, T, K, D] of
        the K modules from `first` on. Each reads an embedding and, at the token before, the state
        of the module below: `state` for the first of them, `below(k, state)` for the others."""
        if below is None:
            return super().step(embedding, state, attend)
        states: list[Tensor] = []
        for k, module in enumerate(self.stack[first:], first):
            if states:
                state = below(k, states[-1])
            states.append(module(*module.enter(embedding, state), attend, k))
        return torch.stack(states, 2)

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        if not self.several:
            return super().hidden(ctx, anchors_BA, drafted_BAK)
        if drafted_BAK is None:
            states_BPKD = self.over_text(ctx)
            last = states_BPKD.shape[1] - 1
            at = [(anchors_BA - 1 + k).clamp(0, last) for k in range(self.depth)]
            return torch.stack([entries(states_BPKD[:, :, k], at[k]) for k in range(self.depth)], 2)
        depths = torch.arange(drafted_BAK.shape[-1] + 1, device=anchors_BA.device)
        each = truncated_contexts(ctx, anchors_BA, drafted_BAK)
        states = [self.over_text(one)[0, a - 1 + depths, depths] for a, one in each]
        return torch.stack(states).view(*anchors_BA.shape, len(depths), -1)

    def over_text(self, ctx: Context) -> Tensor:
        """Every module's state [B, P, K, D] for each token of a text but the first."""
        (B, T), device = ctx.ids_BT.shape, ctx.ids_BT.device
        place_BP, document_BP = (x[:, 1:] for x in ctx.documents())
        position_BP = (place_BP - 1).clamp_min(0)
        every_BP = torch.arange(T - 1, device=device).expand(B, T - 1)
        every = Sight.of_anchors(every_BP, position_BP, document_BP)

        def sight(k: int) -> Sight:
            early = place_BP <= k  # module k - 1 has no state for the token before these
            return every._replace(document_BP=document_BP.masked_fill(early, -2))

        embedding, rope = self.embed(ctx.ids_BT[:, 1:]), self.rope(position_BP, T)
        state = self.fuse(ctx.hidden_states(self.needs)[:, : T - 1])
        attend = OverSequence(Keys(every), rope, sight)

        def below(k: int, state_BPD: Tensor | None) -> Tensor:
            assert state_BPD is not None  # every module reads all tokens of a text
            return pad(state_BPD, (0, 0, 1, 0))[:, :-1]

        return self.step(embedding, state, attend, below=below)

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        """With several modules, a layer of keys for each module, followed by a layer of states for
        each but the last."""
        return SlotCache(2 * len(self.layers) - 1) if self.several else super().new_cache(capacity)

    def draft_growth(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        """All modules read every committed token. A drafted token at depth d is read by the modules
        from d on, since only they have a state for the token before it."""
        if not self.several or cache is None:
            return super().draft_growth(ctx, cache)
        new = unread(cache, [n - 1 for n in ctx.counts()])
        hidden_states = pieces(ctx.hidden_states(self.needs), cache.lengths, max(new))
        tokens = pieces(ctx.ids_BT[:, 1:], cache.lengths, max(new))
        attend, below = self._over_slots(cache, tokens, None)
        state = self.fuse(hidden_states)
        state_BTD = self.step(self.embed(tokens), state, attend, below=below)[:, :, 0]
        cache.commit(new)
        last_B1 = torch.tensor(new, device=tokens.device)[:, None] - 1

        def grow(tokens_BT: Tensor, parents_BT: Tensor | None, depth: int) -> Tensor:
            attend, below = self._over_slots(cache, tokens_BT, parents_BT)
            state, embedding = below(depth, None), self.embed(tokens_BT)
            states_BTKD = self.step(embedding, state, attend, depth, below)
            return self.unembed(states_BTKD[:, :, 0], depth)

        return Growth(self.unembed(entries(state_BTD, last_B1)[:, 0], 0), grow_with_depth(grow))

    def _over_slots(
        self, cache: SlotCache, tokens_BT: Tensor, parents_BT: Tensor | None
    ) -> tuple[OverSlots, Below]:
        """Attention over a cache of the K modules' keys, followed by the states of all but the
        last of them, and `Below` over these states."""
        (B, num_read), device, start = tokens_BT.shape, tokens_BT.device, cache.scratch
        length_B1 = torch.tensor(cache.lengths, device=device)[:, None]
        place = cache.place(tokens_BT, parents_BT)
        if parents_BT is None:
            parents_BT = torch.arange(start - 1, start + num_read - 1, device=device).expand(
                B, num_read
            )
        above_BT = (length_B1 + parents_BT).clamp_min(0)  # the slot of the token before
        rope = self.rope(place.position_BT, cache.shown + 1)
        seen_BTP, modules = place.seen(cache.shown), len(self.layers)

        def mask(i: int) -> Tensor:
            """Module i has no key of the first i tokens."""
            sight = seen_BTP & (torch.arange(seen_BTP.shape[2], device=device) >= i)
            return sight | ~sight.any(-1, keepdim=True)  # else NaN for a token too early for it

        def below(k: int, state_BTD: Tensor | None) -> Tensor:
            layer = modules + k - 1
            if state_BTD is not None:
                cache.update(state_BTD[:, None], state_BTD[:, None, :, :0], layer)
            return entries(cache.slot_layers[layer].keys[:, 0], above_BT)

        return OverSlots(cache, rope, mask), below
