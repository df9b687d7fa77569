"""What draft models of transformers have in common: they are made of its configs, start from its
weights, and are trained whole or by adapters.

LoRA (Hu et al. 2022) trains W + (alpha / rank) B A with W frozen. Adapters live in training and
in its checkpoints alone: a draft on disk holds their sum with the weights, so that it needs
nothing else, and drafting with it costs what the model alone costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from specdec.drafters.base import Drafter, Sizes
from specdec.errors import UserError, require
from specdec.target.attention import group
from specdec.target.parts import Parts


@dataclass
class LoraOptions:
    """`rank` 0 trains the weights themselves. `alpha` null: twice the rank. `dropout` is that of
    what the adapters read. `targets`: names of the layers that get adapters, as in
    [q_proj, v_proj]; null: all linear layers but the LM head."""

    rank: int = 0
    alpha: float | None = None
    dropout: float = 0.0
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int):  # OmegaConf also builds a schema from the class
            return
        require(self.rank >= 0, f"drafter.lora.rank={self.rank}: give 1 or more, or 0 for none")
        require(
            0 <= self.dropout < 1,
            f"drafter.lora.dropout={self.dropout}: give a number of at least 0 and below 1",
        )
        require(
            self.alpha is None or self.alpha > 0,
            f"drafter.lora.alpha={self.alpha}: give a number above 0, or null",
        )


@dataclass(kw_only=True)
class LMSizes(Sizes):
    """`model`: the config of the draft LM, as transformers writes it."""

    model: dict[str, Any]


class Pretrained(Drafter):
    """A drafter with a `model` of one of transformers' auto classes."""

    Sizes = LMSizes
    Auto: ClassVar[Any]
    model: Any

    def __init__(self, config: Any, sizes: LMSizes) -> None:
        super().__init__(config, sizes)
        self.model = fresh(self.Auto, sizes.model, config.train_embeddings)

    @classmethod
    def build(
        cls,
        config: Any,
        target: Parts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> Self:
        require(
            config.lora.rank == 0 or config.source != "random" or earlier is not None,
            "drafter.lora.rank: there is nothing to adapt in random weights: give another "
            "drafter.source, drafter.from=FOLDER, or drafter.lora.rank=0",
        )
        return super().build(config, target, vocab_S, earlier)

    @property
    def train_depth(self) -> int:
        return 1  # given the text, depth k at anchor a is depth 0 at anchor a + k

    def start(self, target: Parts) -> None:
        if self.config.source != "random":
            trained = self.Auto.from_pretrained(self.config.source, dtype="float32")
            self.model.load_state_dict(trained.state_dict())

    def begin_training(self) -> None:
        if self.config.lora.rank:
            with_adapters(self.model, self.config.lora)
            for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
                module.requires_grad_(self.config.train_embeddings)

    def finished(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights with the adapters added to them, by peft, on copies."""
        if not any(".lora_" in name for name in weights):
            return dict(weights)
        with torch.device("meta"):
            plain = type(self)(self.config, self.sizes)
            adapted = with_adapters(plain.model, self.config.lora)
        plain.load_state_dict(weights, strict=False, assign=True)
        adapted.merge_and_unload(safe_merge=True)
        return {name: x.detach() for name, x in plain.state_dict().items() if not x.is_meta}


def with_adapters(model: nn.Module, lora: LoraOptions) -> Any:
    """Put adapters into a model, whose own weights are frozen; peft's handle on them."""
    from peft import LoraConfig, get_peft_model  # as slow to import as transformers itself

    alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
    options = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it, and takes any number
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) if lora.targets else "all-linear",
    )
    try:
        return get_peft_model(model, options)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"drafter.lora: {' '.join(str(error).split())}") from error


def fresh(auto: Any, keys: dict[str, Any], train_embeddings: bool) -> Any:
    """A model of one of transformers' auto classes with fresh weights, from its config."""
    config = AutoConfig.for_model(**keys)
    model = auto.from_config(config, trust_remote_code=False).float()
    group(model)
    if not train_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(False)
    return model


def described(source: str, options: str) -> dict[str, Any]:
    """The config of a model on a hub or in a folder. `options` says what else can be given."""
    try:
        return AutoConfig.from_pretrained(source).to_dict()
    except (OSError, ValueError) as error:
        raise UserError(f"drafter.source={source!r} could not be loaded: give {options}") from error


def overridden(config: Any, theirs: dict[str, Any]) -> dict[str, Any]:
    """The target's config with the `overrides` of a draft that starts at random."""
    if unknown := sorted(set(config.overrides) - set(theirs)):
        raise UserError(f"drafter.overrides.{unknown[0]} is not a key of the target's config")
    return theirs | config.overrides
