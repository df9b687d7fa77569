"""Drafts that are transformers models: they read only the target's tokens, are initialised from
another model or at random, and are trained completely or by adapters.

LoRA (Hu et al. 2022) trains W + (alpha / rank) B A with W frozen. Adapters exist only in training
and its checkpoints: a draft on disk holds the weights with the adapters added, so it needs nothing
else, and drafting costs no more than with the plain model.

The vocabulary is the target's, with as many rows as the target's own embedding. Embeddings are
padded differently: the same tokenizer comes with 151,936 rows in one model and with 152,064 in a
larger one, but engines only draft with a model of exactly the target's rows. Extra rows of the
draft are removed. Missing rows are added as zeros and excluded from the draft vocabulary, so q is 0
there (`fitted`, `resize`).
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from specdec.compat import keep_stored_weights
from specdec.context import Context
from specdec.drafters.attention import states
from specdec.drafters.base import Drafter, DrafterConfig, Sizes, Trainable, growth_over
from specdec.errors import UserError, first_line, require
from specdec.hub import require_on_hub
from specdec.runtime.cache import SlotCache
from specdec.runtime.cpu.grouped_attention import use_grouped_attention
from specdec.runtime.quantised import without_method
from specdec.sampling.trees import Growth
from specdec.targets.checkpoint_files import file_of_model
from specdec.targets.output_head import head_scaling
from specdec.targets.parts import TargetParts, body_of, longrope_lines
from specdec.targets.sequence_packing import by_document
from specdec.targets.transformers_model import load_source

# a tokenizer has at least one of these; without any, transformers makes up an empty one
FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
OF_TARGET = ("target", "random")  # sources whose tokenizer is the target's
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def fitted(
    source: str, model: Mapping[str, Any], target: TargetParts
) -> tuple[dict[str, Any], int | None]:
    """The config of a draft's model (`model`, as in `source`) with the target's V rows, and its own
    number S of rows if that is smaller. Raises UserError for a model with another tokenizer or, if
    one of the two has no tokenizer, with another number of rows."""
    V, rows = target.vocab_size, model.get("vocab_size")
    stored = source not in OF_TARGET
    if not isinstance(rows, int) or not (stored and _compared(source, target)):
        require(
            rows == V,
            f"drafter.source={source!r} has vocab_size={rows}, but the target has {V}: give a "
            "model with the target's tokenizer",
        )
        return dict(model), None
    cut: dict[str, Any] = {n: None for n in IDS if isinstance(i := model.get(n), int) and i >= V}
    return {**model, "vocab_size": V, **cut}, rows if rows < V else None


def resize(model: Any, V: int) -> None:
    """Give a model V rows of embedding and head: extra rows are removed, missing ones are 0."""
    rows = model.config.vocab_size
    if rows == V:
        return
    model.resize_token_embeddings(V, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[rows:] = 0
            if getattr(layer, "bias", None) is not None:
                layer.bias[rows:] = 0


def _compared(source: str, target: TargetParts) -> bool:
    """Whether the tokenizers of a draft's source and of the target could be compared. Raises
    UserError naming the first id with different meanings."""
    if target.tokenizer is None or not any(file_of_model(source, name) for name in FILES):
        return False
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # tokenizers raise any error
        raise UserError(
            f"drafter.source={source!r}: its tokenizer could not be loaded ({first_line(error)}): "
            "copy or download it again, or give another model"
        ) from error
    ours, theirs = _by_id(tokenizer), _by_id(target.tokenizer)
    both = sorted(ours.keys() & theirs.keys())
    remedy = "give a model with the target's tokenizer, or drafter=translated"
    require(bool(both), f"drafter.source={source!r} has no token of the target's: {remedy}")
    for i in both:
        require(
            not ours[i].isdisjoint(theirs[i]),
            f"drafter.source={source!r} has another tokenizer than the target: token {i} is "
            f"{min(ours[i])!r} there, and {min(theirs[i])!r} in the target: {remedy}",
        )
    return True


def _by_id(tokenizer: Any) -> dict[int, set[str]]:
    """The names of each id; a few tokenizers have two names for one."""
    names = defaultdict[int, set[str]](set)
    for name, i in tokenizer.get_vocab().items():
        names[i].add(name)
    return names


LINEAR = (nn.Linear, Conv1D)


@dataclass
class LoraOptions:
    """LoRA adapters, trained while the draft model's own weights are frozen; the saved draft has
    them merged. Dropout masks are drawn for a complete micro-batch, so they depend on
    `loop.rows`."""

    key: ClassVar[str] = "drafter.lora"
    rank: int = 0  # rank of the adapters; 0: no adapters
    alpha: float | None = None  # scale of the adapters, α / rank; null: twice the rank
    dropout: float = 0.0  # probability of zeroing an input of the adapters in training
    # names of adapted layers, such as [q_proj, v_proj]; null: all linear layers but the LM head
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int):  # OmegaConf also builds a schema from the class
            return
        for name, fits, give in (
            ("rank", self.rank >= 0, "1 or more, or 0 for none"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and less than 1"),
            ("alpha", self.alpha is None or self.alpha > 0, "more than 0, or null"),
        ):
            require(fits, f"{self.key}.{name}={getattr(self, name)}: give {give}")


@dataclass
class DraftLMConfig(DrafterConfig):
    """A draft language model. With `lora.rank=0` its weights are trained; above 0 only adapters,
    which are merged into the weights when the draft is saved."""

    name: str
    depth: int
    # hub name or folder of the draft model; random: the target's architecture with fresh weights
    source: str
    # changes to the config of the target's architecture, with source=random
    overrides: dict[str, Any] = field(default_factory=dict)
    # train the embedding and the LM head too, most of a small model's weights and cost
    train_embeddings: bool = False
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass(kw_only=True)
class LMSizes(Sizes):
    """`model`: the config of the draft LM in transformers' format."""

    model: dict[str, Any]


class Pretrained(Trainable):
    """A drafter whose `model` is a transformers model. A subclass defines how it reads new
    tokens."""

    Sizes = LMSizes
    Auto: ClassVar[Any]
    model: Any

    def __init__(self, config: Any, sizes: LMSizes) -> None:
        super().__init__(config, sizes)
        self.model = fresh(self.Auto, sizes.model, config.train_embeddings)
        self._scale = head_scaling(self.model.config.get_text_config(decoder=True))

    @staticmethod
    def model_config(
        config: DraftLMConfig, theirs: Mapping[str, Any], options: str
    ) -> dict[str, Any]:
        """The config of the draft's model: for a random draft, the target's with `overrides`,
        else that of a model on a hub or in a folder. `options` names the possible settings in
        messages."""
        if config.source == "random":
            if unknown := sorted(set(config.overrides) - set(theirs)):
                raise UserError(
                    f"drafter.overrides.{unknown[0]} is not a key of the target's config: omit it"
                )
            return {**theirs, **config.overrides}
        require_on_hub("drafter.source", config.source)
        try:
            return without_method(AutoConfig.from_pretrained(config.source).to_dict())
        except (OSError, ValueError) as error:
            source = f"drafter.source={config.source!r}"
            raise UserError(f"{source} could not be loaded: give {options}") from error

    @classmethod
    def build(
        cls,
        config: Any,
        target: TargetParts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> Self:
        """Like `Trainable.build`. Only a model with fewer rows than the target has a draft
        vocabulary, which consists of those rows. Raises UserError for a larger `vocab_S`."""
        drafter = super().build(config, target, None, earlier)
        require(
            vocab_S is None or drafter.vocab_S is None or len(vocab_S) <= len(drafter.vocab_S),
            "initialisation.new_tokens cannot add to the vocabulary of a draft LM: omit it",
        )
        drafter.add_adapters(inherited=earlier is not None)
        return drafter

    @property
    def train_depth(self) -> int:
        return 1  # given the text, depth k at anchor a is depth 0 at anchor a + k

    def initialise(self, target: TargetParts) -> None:
        if self.config.source != "random":
            trained = load_source(self.Auto, self.config.source, str(target.device))
            resize(trained, self.sizes.target_vocab)
            self.model.load_state_dict(trained.state_dict())

    def add_adapters(self, inherited: bool) -> None:
        """Add the configured adapters to weights `inherited` from an earlier draft or to those of
        the source. Raises UserError for random weights."""
        if self.config.lora.rank:
            require(
                inherited or self.config.source != "random",
                "drafter.lora.rank: there is nothing to adapt in random weights: give another "
                "drafter.source, drafter.from=FOLDER, or drafter.lora.rank=0",
            )
            with_adapters(self.model, self.config.lora)
            for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
                module.requires_grad_(self.config.train_embeddings)

    def weights_to_save(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the weights, with peft's adapters merged."""
        if not any(".lora_" in name for name in weights):
            return dict(weights)
        with torch.device("meta"):
            plain = type(self)(self.config, self.sizes)
            adapted = with_adapters(plain.model, self.config.lora)
        plain.load_state_dict(weights, strict=False, assign=True)
        adapted.merge_and_unload(safe_merge=True)
        return {name: x.detach() for name, x in plain.state_dict().items() if not x.is_meta}

    def step(self, ids: Tensor, **attend: Any) -> Tensor:
        """Hidden states [B, T, D] of tokens [B, T]. `attend` holds transformers' arguments for
        attention: over the tokens of their text, or over the slots of a cache."""
        states: Tensor = body_of(self.model)(input_ids=ids, **attend).last_hidden_state
        return states

    def over_text(self, ids: Tensor, position: Tensor | None, document: Tensor | None) -> Tensor:
        """Hidden states [B, T, D] of texts [B, T], packed as for `Target.features`."""

        def read(ids_NT: Tensor) -> Tensor:
            position_1T = torch.arange(ids_NT.shape[1], device=ids_NT.device)[None]
            return self.step(ids_NT, position_ids=position_1T, use_cache=False)

        lines = longrope_lines(self.model.config.get_text_config(decoder=True))
        return by_document(read, ids, position, document, lines)

    @abstractmethod
    def over_cache(
        self, cache: Any, ids_BT: Tensor, parents_BT: Tensor | None, last_B1: Tensor | None
    ) -> Tensor:
        """Logits [B, T, V] of tokens that continue the content of the cache; with `last_B1`, only
        those [B, 1, V] at that token of each row."""

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        return states(self.over_text, ctx, anchors_BA, drafted_BAK, self.depth)

    def unembed(self, hidden: Tensor, k: int) -> Tensor:
        """Draft logits [..., V], or [..., S] for a model that was padded."""
        logits = self._scale(self.model.get_output_embeddings()(hidden))
        return logits[..., : self.sizes.draft_vocab]

    def draft_growth(self, ctx: Context, cache: SlotCache | None = None) -> Growth:
        if cache is None:
            return super().draft_growth(ctx)
        return growth_over(cache, ctx, partial(self.over_cache, cache))


class ConfiglessModel(nn.Module):
    """A model without its config. peft would otherwise read from the config that the model is a
    mixture of experts, and adapt experts that are stored as one weight. Neither a view nor a draft
    can hold such adapters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def with_adapters(model: Any, lora: LoraOptions) -> Any:
    """Add adapters to a model, freeze its own weights, and return peft's wrapper of it. Experts
    stored as one weight get none."""
    from peft import LoraConfig, get_peft_model  # as slow to import as transformers itself

    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if _is_linear(m) and m is not head]
    require(
        bool(lora.targets or linear),
        f"{lora.key}.rank={lora.rank}: this model has no linear layers to adapt: give 0",
    )
    options = LoraConfig(
        r=lora.rank,
        # peft only divides by the rank, so any number works
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) if lora.targets else [f"model.{n}" for n in linear],
    )
    try:
        return get_peft_model(ConfiglessModel(model), options)
    except ValueError as error:
        raise UserError(f"{lora.key}: {' '.join(str(error).split())}") from error


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, quantised or not. transformers' routers can be subclasses
    of linear layers but compute something else."""
    of_model = type(module).__module__.startswith(("transformers.models.", "transformers_modules."))
    return isinstance(module, LINEAR) and not of_model


def fresh(auto: Any, keys: dict[str, Any], train_embeddings: bool) -> Any:
    """A model of one of transformers' auto classes with random weights, from its config keys."""
    config = AutoConfig.for_model(**keys)
    model = auto.from_config(config, trust_remote_code=False).float()
    keep_stored_weights(model)
    use_grouped_attention(model)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(train_embeddings)
    return model
