"""An independent draft language model (Leviathan et al. 2023): any small causal LM.

It reads only the target's tokens. It is loaded from a hub or a folder, initialised at random, or
cut from the target (its embedding, some of its layers, its head).
"""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specdec.context import Context
from specdec.drafters.attention import entries
from specdec.drafters.base import Drafter
from specdec.drafters.pretrained import DraftLMConfig, LMSizes, Pretrained, fitted, fresh
from specdec.drafters.target_views import decoder_layers
from specdec.errors import UserError, first_line, require
from specdec.runtime.cache import (
    Place,
    SlotCache,
    cache_argument,
    keeps_states,
    masks_by_slots,
    model_inputs,
    new_cache,
)
from specdec.runtime.cpu.compiled_pass import LIMITS, SHORT, Compiled
from specdec.runtime.cpu.lean_pass import LeanPass
from specdec.runtime.quantised import without_method
from specdec.targets.output_head import transform_of
from specdec.targets.parts import TargetParts, body_of, config_of_layers


@dataclass
class LMConfig(DraftLMConfig):
    """A draft language model, by default made of the target's own layers."""

    name: str = "lm"
    depth: int = 4
    # hub name or folder of the draft model; target: made of layers of the target; random: the
    # target's architecture with fresh weights
    source: str = "target"
    overrides: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 2})
    # numbers of target layers, from 0, with source=target; null: the first two and the last two
    layers: list[int] | None = None


class LM(Pretrained):
    Config = LMConfig
    Auto = AutoModelForCausalLM
    in_transformers = "assistant"

    def __init__(self, config: LMConfig, sizes: LMSizes) -> None:
        super().__init__(config, sizes)
        self.limits.positions = getattr(self.model.config, "max_position_embeddings", None)
        self.takes = cache_argument(body_of(self.model))
        self.compiled = Compiled(self.run, SHORT)
        self._lean: tuple[nn.Module, LeanPass | None] | None = None

    @classmethod
    def plan(cls, config: LMConfig, target: TargetParts) -> LMSizes:
        decoder_layers(target, config.name)
        theirs = without_method(target.config.to_dict())
        if config.source == "target":
            kept = _cut(config, target)
            model = theirs | {"num_hidden_layers": len(kept)} | config_of_layers(theirs, kept)
        else:
            options = "target, random, a hub name or a folder with a Hugging Face causal LM"
            model = cls.model_config(config, theirs, options)
        if config.source == "random":
            model |= config_of_layers(model, list(range(model["num_hidden_layers"])))
        model, rows = fitted(config.source, model, target)
        try:
            with torch.device("meta"):
                draft = fresh(AutoModelForCausalLM, model, config.train_embeddings)
        except Exception as error:  # configs and models raise any error
            raise UserError(
                f"drafter.source={config.source!r}: no draft can be made from this "
                f"{model['model_type']} ({first_line(error)}): give random, a hub name or a folder"
            ) from error
        require(
            not keeps_states(draft.config.get_text_config(decoder=True)),
            f"drafter.source={config.source!r}: the draft would have layers that "
            "keep a state, and its rejected tokens could not be dropped from it: give a "
            "drafter.source with attention layers only, or a family with a head of its own",
        )
        return cls.Sizes.of_config(config, target, model=model, draft_vocab=rows)

    @classmethod
    def build(
        cls,
        config: LMConfig,
        target: TargetParts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> Self:
        """Like `Pretrained.build`. Raises UserError for a draft that this project would run
        wrongly."""
        drafter = super().build(config, target, vocab_S, earlier)
        body, head = body_of(drafter.model), drafter.model.get_output_embeddings()
        modes = [(module, module.training) for module in drafter.modules()]
        drafter.eval()  # without dropout
        kind = next(drafter.parameters()).device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            plain = transform_of(drafter.model, body, head) is None
            right = plain and not masks_by_slots(drafter.model.config) and drafter._reads_slots()
        for module, mode in modes:
            module.training = mode
        require(
            right,
            f"drafter.source={config.source!r}: a {drafter.model.config.model_type} "
            + ("makes its own masks or positions" if plain else "transforms states in its head")
            + ", so it cannot draft: give a drafter.source of another kind, or a family with a "
            "head of its own",
        )
        return drafter

    def _reads_slots(self) -> bool:
        """Whether a small tree after rows of unequal length gives the hidden states of complete
        texts."""
        device = self.model.get_input_embeddings().weight.device
        ids = (7 * torch.arange(16, device=device).view(2, 8) + 3) % self.model.config.vocab_size
        cache, worst = self.new_cache(), 0.0

        def read(some: Tensor, parents_BT: Tensor | None = None) -> Tensor:
            inputs = model_inputs(
                self.model.config, cache.place(some, parents_BT), self.model.dtype
            )
            return self.step(some, use_cache=True, **inputs, **{self.takes: cache})

        try:
            read(ids[:, :5])
            cache.commit([5, 3])
            tree = read(ids[:, 5:], torch.tensor(2 * [[-1, 0, -1]], device=device))
            for b, n in enumerate([5, 3]):
                for path in ([0, 1], [2]):
                    text = torch.cat([ids[b, :n], ids[b, 5:][path]])[None]
                    position = torch.arange(text.shape[1], device=device)[None]
                    theirs = self.over_text(text, position, None)[0, -len(path) :].float()
                    distance = (tree[b, path].float() - theirs).norm() / theirs.norm()
                    worst = max(worst, float(distance))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model may refuse our masks or our cache in any way
            return False
        return worst < LIMITS[self.model.dtype]

    def initialise(self, target: TargetParts) -> None:
        if self.config.source != "target":
            return super().initialise(target)
        kept = _cut(self.config, target)
        try:
            self.model.load_state_dict(target.cut(kept))
        except RuntimeError as error:
            raise UserError(
                f"layers {kept} of a {target.config.model_type} do not make a model by themselves "
                f"({str(error).splitlines()[-1].strip()}): give other drafter.layers, "
                "drafter.source=random, a hub name or a folder"
            ) from error

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        """One forward pass over the text and, as its branches, the tokens drafted at all
        anchors."""
        if drafted_BAK is None:
            return super().hidden(ctx, anchors_BA, None)
        whole_ids_BT, place = with_branches(ctx, anchors_BA, drafted_BAK)
        inputs = model_inputs(self.model.config, place, self.model.dtype)
        states_BTD = self.step(whole_ids_BT, use_cache=False, **inputs)
        of_text, of_drafts = states_BTD.tensor_split([ctx.ids_BT.shape[1]], 1)
        first_BA1D = entries(of_text, anchors_BA)[:, :, None]
        return torch.cat([first_BA1D, of_drafts.unflatten(1, drafted_BAK.shape[1:])], 2)

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        return new_cache(self.model.config, capacity)

    def over_cache(
        self, cache: SlotCache, ids_BT: Tensor, parents_BT: Tensor | None, last_B1: Tensor | None
    ) -> Tensor:
        place = cache.place(ids_BT, parents_BT)
        logits: Tensor
        lean = None if cache.fixed else self.lean
        if lean is not None and lean.takes(ids_BT):
            inputs = lean.inputs(place, cache)
            hidden, _ = lean(cache, input_ids=ids_BT, wanted=(), **inputs)
            return self.unembed(hidden if last_B1 is None else entries(hidden, last_B1), 0)
        inputs = model_inputs(self.model.config, place, self.model.dtype)
        (logits,) = self.compiled(cache, last=last_B1, input_ids=ids_BT, **inputs)
        return logits

    @property
    def lean(self) -> LeanPass | None:
        """The fused fast path; None if the layers are not Llama-like, or if it differs from the
        modules."""
        if self._lean is None or self._lean[0] is not self.model:
            body = body_of(self.model)
            layers = getattr(body, "layers", None)
            lean = None
            if isinstance(layers, nn.ModuleList):
                lean = LeanPass.recognise(self.model, body, layers, self.model.config)
            self._lean = self.model, lean if lean is not None and self._agrees(lean) else None
        return self._lean[1]

    def _agrees(self, lean: LeanPass) -> bool:
        """Whether the fused fast path gives the same hidden states as the modules for a short
        chain."""
        ids = torch.arange(8)[None] % self.model.config.vocab_size
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            theirs = self.step(ids, use_cache=False)
            cache, ours = self.new_cache(), list[Tensor]()
            try:
                for some in ids.split([5, 3], 1):
                    inputs = lean.inputs(cache.place(some), cache)
                    ours.append(lean(cache, input_ids=some, wanted=(), **inputs)[0])
                    cache.commit([some.shape[1]])
            except torch.OutOfMemoryError:
                raise
            except Exception:  # parts with the usual names may take other arguments
                return False
        distance = (torch.cat(ours, 1) - theirs).float().norm() / theirs.float().norm()
        return bool(distance < LIMITS[self.model.dtype])

    def run(
        self, cache: SlotCache, last: Tensor | None, input_ids: Tensor, **inputs: Any
    ) -> tuple[Tensor]:
        """The forward pass of `over_cache`, which can be compiled."""
        hidden = self.step(input_ids, use_cache=True, **inputs, **{self.takes: cache})
        return (self.unembed(hidden if last is None else entries(hidden, last), 0),)


def with_branches(ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor) -> tuple[Tensor, Place]:
    """The ids [B, T] of a text followed by the tokens drafted at each anchor, and their place. Each
    drafted token attends to its document up to its anchor and to the tokens drafted there before
    it."""
    (B, T), k, device = ctx.ids_BT.shape, drafted_BAK.shape[2], anchors_BA.device
    step_T, (position_BT, document_BT) = torch.arange(T, device=device), ctx.documents()
    anchor_BN = anchors_BA.repeat_interleave(k, 1)
    step_N = torch.arange(k, device=device).repeat(anchors_BA.shape[1])
    anchor_N = torch.arange(anchors_BA.shape[1], device=device).repeat_interleave(k)
    position_BN = position_BT.gather(1, anchor_BN) + 1 + step_N
    whole_position_BT = torch.cat([position_BT, position_BN], 1)
    whole_document_BT = torch.cat([document_BT, document_BT.gather(1, anchor_BN)], 1)
    last_BT = torch.cat([step_T.expand(B, T), anchor_BN], 1)  # last text token that each sees
    alike_BTT = whole_document_BT[:, :, None] == document_BT[:, None]
    of_text_BTT = alike_BTT & (last_BT[:, :, None] >= step_T)
    own_NN = (anchor_N[:, None] == anchor_N) & (step_N[:, None] >= step_N)
    own_TN = torch.cat([own_NN.new_zeros(T, len(step_N)), own_NN])
    mask_BTT = torch.cat([of_text_BTT, own_TN.expand(B, -1, -1)], 2)
    whole_ids_BT = torch.cat([ctx.ids_BT, drafted_BAK.flatten(1)], 1)
    return whole_ids_BT, Place(whole_position_BT, mask_BTT, whole_position_BT)


def _cut(config: LMConfig, target: TargetParts) -> list[int]:
    """The indices of the target's kept layers, ascending."""
    num_layers = target.depth
    kept = sorted(set(config.layers or [0, 1, num_layers - 2, num_layers - 1]))
    if kept[0] < 0 or kept[-1] >= num_layers:
        raise UserError(
            f"drafter.layers={kept}: layers of this target run from 0 to {num_layers - 1}"
        )
    return kept
