"""An independent draft language model (Leviathan et al. 2023): any small causal LM.

It reads tokens and nothing else of the target. It is loaded from a hub or a folder, starts from
random weights, or is cut from the target (its embedding, some of its layers, its head).
Letters: B batch, T time, A anchors, K depth, D width, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.context import Context
from specdec.drafters.base import entries, pieces, states, unread
from specdec.drafters.models.pretrained import (
    LMSizes,
    LoraOptions,
    Pretrained,
    described,
    fresh,
    overridden,
)
from specdec.drafters.models.views import decoder_layers
from specdec.errors import UserError
from specdec.runtime.cache import SlotCache, model_inputs, new_cache, size
from specdec.runtime.compiled import Short
from specdec.sampling.trees import Growth
from specdec.target.parts import Parts, config_of_layers, head_scaling


@dataclass
class LMConfig:
    """Where the draft LM comes from.

    `source`: "target" cuts `layers` (0-based; None: the first two and the last two) out of the
    target; "random" is the target's architecture with `overrides` of its config and fresh
    weights; anything else is a hub name or a folder. `train_embeddings=false` leaves the
    embedding and the LM head as they start: most of a small model's weights and of its cost.
    `lora.rank` above 0 trains adapters alone, of which nothing is left in the finished draft.
    """

    name: str = "lm"
    depth: int = 4
    source: str = "target"
    layers: list[int] | None = None
    overrides: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 2})
    train_embeddings: bool = False
    lora: LoraOptions = field(default_factory=LoraOptions)


class LM(Pretrained):
    Config = LMConfig
    Auto = AutoModelForCausalLM
    in_transformers = "assistant"

    def __init__(self, config: LMConfig, sizes: LMSizes) -> None:
        super().__init__(config, sizes)
        self.positions = getattr(self.model.config, "max_position_embeddings", None)
        self.short = Short(self, self.read)
        self._scale = head_scaling(self.model.config.get_text_config(decoder=True))

    @classmethod
    def plan(cls, config: LMConfig, target: Parts) -> LMSizes:
        decoder_layers(target, config.name)
        if config.source in ("target", "random"):
            model = target.config.to_dict()
            if config.source == "random":
                model = overridden(config, model)
                kept = list(range(model["num_hidden_layers"]))
            else:
                kept = _cut(config, target)
                model["num_hidden_layers"] = len(kept)
            model |= config_of_layers(model, kept)
        else:
            model = described(
                config.source,
                "target, random, a hub name or a folder with a Hugging Face causal LM",
            )
        if model["vocab_size"] != target.vocab_size:
            raise UserError(
                f"drafter.source={config.source!r} has a vocabulary of {model['vocab_size']}, the "
                f"target one of {target.vocab_size}: they must be the same tokenizer"
            )
        try:
            with torch.device("meta"):
                fresh(AutoModelForCausalLM, model, config.train_embeddings)
        except Exception as error:  # whatever a config's or a model's own checks raise
            reason = str(error).strip().splitlines() or [repr(error)]
            raise UserError(
                f"drafter.source={config.source!r}: no draft can be made of this "
                f"{model['model_type']} ({reason[0].strip()}): give random, a hub name or a folder"
            ) from error
        return LMSizes(target_vocab=target.vocab_size, model=model)

    def start(self, target: Parts) -> None:
        if self.config.source != "target":
            return super().start(target)
        kept = _cut(self.config, target)
        try:
            self.model.load_state_dict(target.cut(kept))
        except RuntimeError as error:
            raise UserError(
                f"layers {kept} of a {target.config.model_type} do not make a model by themselves "
                f"({str(error).splitlines()[-1].strip()}): give other drafter.layers, "
                "drafter.source=random, a hub name or a folder"
            ) from error

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        return states(self._whole, ctx, anchors_BA, drafted_BAk, self.depth)

    def _whole(self, ids: Tensor, position: Tensor | None, document: Tensor | None) -> Tensor:
        model = self.model.base_model
        return model(input_ids=ids, position_ids=position, use_cache=False).last_hidden_state

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self._scale(self.model.get_output_embeddings()(hidden))

    def new_cache(self) -> SlotCache:
        return new_cache(self.model.config)

    def compiled_cache(self, slots: int) -> SlotCache:
        return new_cache(self.model.config, slots)

    def read(self, cache: SlotCache, last: Tensor | None, **inputs: Any) -> tuple[Tensor]:
        """Logits [B, T, V] of a pass over the cache, or [B, 1, V] at the indices `last` [B, 1]."""
        out = self.model.base_model(past_key_values=cache, use_cache=True, **inputs)
        hidden = out.last_hidden_state
        return (self.unembed(hidden if last is None else entries(hidden, last), 0),)

    def begin(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        return super().begin(ctx) if cache is None else CachedGrowth(self, ctx, cache)


class CachedGrowth:
    """Growth over the draft LM's own KV cache, which first reads the tokens committed since."""

    def __init__(self, drafter: LM, ctx: Context, cache: SlotCache) -> None:
        self.drafter, self.cache = drafter, cache
        new = unread(cache, ctx.counts())
        ids = pieces(ctx.ids_BT, cache.lengths, max(new))
        last_B1 = torch.tensor(new, device=ids.device)[:, None] - 1
        self.logits_BS = self._read(ids, None, last_B1)[:, 0]
        cache.keep(new)

    def grow(self, tokens_BW: Tensor, parents_BW: Tensor | None) -> Tensor:
        return self._read(tokens_BW, parents_BW, None)

    def marginals(self, depth: int) -> Tensor | None:
        return None

    def _read(self, ids_BT: Tensor, parents_BT: Tensor | None, last_B1: Tensor | None) -> Tensor:
        drafter, model = self.drafter, self.drafter.model
        place = self.cache.place(*size(ids_BT), parents_BT)
        inputs = model_inputs(model.config, place, model.dtype)
        (logits,) = drafter.short(
            self.cache, ids_BT.shape[1], last=last_B1, input_ids=ids_BT, **inputs
        )
        assert logits is not None
        return logits


def _cut(config: LMConfig, target: Parts) -> list[int]:
    """The target's layers that are kept, ascending."""
    L = target.config.num_hidden_layers
    kept = sorted(set(config.layers or [0, 1, L - 2, L - 1]))
    if kept[0] < 0 or kept[-1] >= L:
        raise UserError(f"drafter.layers={kept}: layers of this target run from 0 to {L - 1}")
    return kept
