"""An independent draft language model (Leviathan et al. 2023): any small causal LM.

It reads tokens alone. From a hub or a folder, from random weights, or cut from the target
(its embedding, some of its layers, its head). Letters: B batch, T time, A anchors, K depth.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.context import Context
from specdec.drafters.base import Drafter, Sizes, entries, pieces, unread
from specdec.drafters.models.early_exit import decoder_layers
from specdec.errors import UserError
from specdec.runtime.cache import SlotCache, model_inputs, new_cache, size
from specdec.runtime.compiled import Short
from specdec.sampling.trees import Growth
from specdec.target.attention import group
from specdec.target.parts import Parts, config_of_layers, head_scaling


@dataclass
class LMConfig:
    """Where the draft LM comes from.

    `source`: "target" cuts `layers` (0-based; None: the first two and the last two) out of the
    target; "random" is the target's architecture with `overrides` of its config and fresh
    weights; anything else is a hub name or a folder. `train_embeddings=false` leaves the
    embedding and the LM head as they start: most of a small model's weights and of its cost.
    """

    name: str = "lm"
    depth: int = 4
    source: str = "target"
    layers: list[int] | None = None
    overrides: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 2})
    train_embeddings: bool = False


@dataclass(kw_only=True)
class LMSizes(Sizes):
    """`model`: the config of the draft LM, as transformers writes it."""

    model: dict[str, Any]


class LM(Drafter):
    Config = LMConfig
    Sizes = LMSizes

    def __init__(self, config: LMConfig, sizes: LMSizes) -> None:
        super().__init__(config, sizes)
        self.model = fresh(AutoModelForCausalLM, sizes.model, config.train_embeddings)
        self.positions = getattr(self.model.config, "max_position_embeddings", None)
        self.short = Short(self, self.read)
        self._scale = head_scaling(self.model.config.get_text_config(decoder=True))

    @property
    def train_depth(self) -> int:
        return 1  # given the text, depth k at anchor a is depth 0 at anchor a + k

    @classmethod
    def plan(cls, config: LMConfig, target: Parts) -> LMSizes:
        decoder_layers(target, config.name)
        if config.source in ("target", "random"):
            model = target.config.to_dict()
            if config.source == "random":
                if unknown := sorted(set(config.overrides) - set(model)):
                    raise UserError(f"drafter.overrides.{unknown[0]} is no key of the target")
                model |= config.overrides
                kept = list(range(model["num_hidden_layers"]))
            else:
                kept = _cut(config, target)
                model["num_hidden_layers"] = len(kept)
            model |= config_of_layers(model, kept)
        else:
            try:
                model = AutoConfig.from_pretrained(config.source).to_dict()
            except (OSError, ValueError) as error:
                raise UserError(
                    f"drafter.source={config.source!r} could not be loaded: give target, random, "
                    "a hub name or a folder with a Hugging Face causal LM"
                ) from error
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
        if self.config.source == "random":
            return
        if self.config.source != "target":
            trained = AutoModelForCausalLM.from_pretrained(self.config.source, dtype="float32")
            self.model.load_state_dict(trained.state_dict())
            return
        kept = _cut(self.config, target)
        try:
            self.model.load_state_dict(target.cut(kept))
        except RuntimeError as error:
            raise UserError(
                f"layers {kept} of a {target.config.model_type} are no model by themselves "
                f"({str(error).splitlines()[-1].strip()}): give other drafter.layers, "
                "drafter.source=random, a hub name or a folder"
            ) from error

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAk: Tensor | None) -> Tensor:
        if drafted_BAk is None:
            out_BTD = self.model.base_model(
                input_ids=ctx.ids_BT, position_ids=ctx.position_BT, use_cache=False
            ).last_hidden_state
            steps = torch.arange(self.depth, device=anchors_BA.device)
            index = (anchors_BA[..., None] + steps).clamp_max(ctx.ids_BT.shape[1] - 1)
            rows = out_BTD.gather(1, index.flatten(1)[..., None].expand(-1, -1, out_BTD.shape[-1]))
            return rows.view(*index.shape, -1)
        rows = [
            torch.stack([self._after(ctx.ids_BT[b, : a + 1], drafted_BAk[b, i]) for i, a in line])
            for b, line in enumerate(enumerate(x) for x in anchors_BA.tolist())
        ]
        return torch.stack(rows)

    def _after(self, ids_T: Tensor, drafted_k: Tensor) -> Tensor:
        """Hidden states [k + 1, D] at the last of `ids_T` and at each drafted token."""
        ids = torch.cat([ids_T, drafted_k])[None]
        out = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return out[0, len(ids_T) - 1 :]

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        return self._scale(self.model.get_output_embeddings()(hidden))

    def new_cache(self) -> SlotCache:
        return new_cache(self.model.config)

    def compiled_cache(self, slots: int) -> SlotCache:
        return new_cache(self.model.config, slots)

    def read(self, cache: SlotCache, last: Tensor | None, **inputs: Any) -> tuple[Tensor]:
        """Logits [B, T, V] of a pass over the cache; with `last` [B, 1], those there alone."""
        out = self.model.base_model(past_key_values=cache, use_cache=True, **inputs)
        hidden = out.last_hidden_state
        return (self.unembed(hidden if last is None else entries(hidden, last), 0),)

    def begin(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        return super().begin(ctx) if cache is None else Cached(self, ctx, cache)


class Cached:
    """The draft LM at its anchors, over its own KV cache: it first reads what was committed."""

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


def fresh(family: Any, shape: dict[str, Any], train_embeddings: bool) -> Any:
    """A model of one of transformers' auto classes with fresh weights, from its config."""
    model = family.from_config(AutoConfig.for_model(**shape)).float()
    group(model)
    if not train_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(False)
    return model


def _cut(config: LMConfig, target: Parts) -> list[int]:
    """The target's layers that are kept, ascending."""
    L = target.config.num_hidden_layers
    kept = sorted(set(config.layers or [0, 1, L - 2, L - 1]))
    if kept[0] < 0 or kept[-1] >= L:
        raise UserError(f"drafter.layers={kept}: layers of this target run from 0 to {L - 1}")
    return kept
