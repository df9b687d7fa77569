"""The sizes of a target and of a draft, counted from their configs without any weights: both are
made on torch's meta device, where tensors have shapes alone."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from specdec.drafters import family
from specdec.drafters.base import Trainable
from specdec.errors import UserError, first_line
from specdec.runtime.quantised import itemsize
from specdec.targets.gguf import model_path
from specdec.targets.loading import kind_of
from specdec.targets.parts import TargetParts
from specdec.targets.target_config import DTYPES, TargetConfig
from specdec.targets.tensor_parallel import divided_weights

FULL = 4  # bytes of a weight in training
# config keys that say how many experts a layer has, and how many of them read a token
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class Outline:
    """A target's sizes. Weights are counted in numbers; `itemsize` is the mean number of bytes that
    one takes in memory, and `cached` the bytes that a token takes in the KV cache."""

    title: str
    weights: int
    experts: int  # of the weights, those that only some tokens are multiplied by
    share: float  # of a layer's experts, those that read one token
    embedding: int  # of the weights, those of which a pass reads single rows
    head: int
    layers: int
    width: int
    vocab: int
    itemsize: float
    cached: float
    state: int = 2  # bytes of a number in a hidden state
    divided: int = 0  # of the weights, those that `target.tensor_parallel` divides
    heads: int = 0  # it does so over as many processes as this number can be divided by

    @property
    def bytes(self) -> float:
        return self.weights * self.itemsize

    def held(self, processes: int) -> float:
        """The bytes of the weights in each of so many processes that hold the target together."""
        return (self.weights - self.divided * (1 - 1 / processes)) * self.itemsize

    def divides(self, processes: int) -> bool:
        """Whether so many processes can hold the target together."""
        return processes > 1 and self.divided > 0 and self.heads % processes == 0

    @property
    def parts_bytes(self) -> float:
        """Of the embedding and the head, which training keeps."""
        return (self.embedding + self.head) * self.state

    @property
    def active(self) -> float:
        """The weights that one token is multiplied by."""
        return self.weights - self.embedding - self.experts * (1 - self.share)

    def bytes_read(self, tokens: int) -> float:
        """The bytes of the weights that a pass over so many tokens reads: of experts, those that at
        least one token is expected to choose."""
        unread = self.experts * (1 - self.share) ** tokens
        return (self.weights - self.embedding - unread) * self.itemsize


@dataclass(frozen=True)
class DraftOutline:
    """A draft's sizes, in numbers: `weights` are its own, `trained` those with a gradient, `read`
    those that a step of drafting multiplies by, with the target's head where it uses that. A
    `parallel` draft takes one step for all depths, others one for each. `linear` is the total width
    of what its products, except the head's, read and write for a token."""

    weights: int
    trained: int
    read: int
    head: int  # rows of the head that it uses: its vocabulary
    linear: int
    depth: int
    parallel: bool
    stored: int  # of the target's layers that it reads


def outline(cfg: TargetConfig, dtype: str, on_cpu: bool = False) -> tuple[Outline, TargetParts]:
    """The sizes of the target that `cfg` names, in this dtype, and its parts without weights. On a
    CPU, transformers loads some quantised checkpoints as plain weights. Raises UserError where
    there is no config of a model that transformers knows."""
    path = model_path(cfg.path, Path(cfg.cache))
    options = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        model = unfilled(config, DTYPES[dtype])
    except Exception as error:  # transformers raises errors of many classes
        raise UserError(
            f"target.path={cfg.path!r}: no sizes could be worked out ({first_line(error)}): give a "
            "hub name or a folder with the config.json of a model of transformers"
        ) from error
    parts = TargetParts(model, None, cfg.path)
    parts.reads_pairs = kind_of(config).reads_pairs
    layers = next((m for m in model.modules() if _is_stack(m, parts.config)), None)
    if layers is not None:
        parts.layers = layers
    return outline_of(parts, DTYPES[dtype], on_cpu), parts


def unfilled(config: Any, dtype: torch.dtype) -> Any:
    """The model of a config on the meta device."""
    auto = kind_of(config).auto_class(config)
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype)


def outline_of(parts: TargetParts, dtype: torch.dtype, on_cpu: bool = False) -> Outline:
    """The sizes of a model, whose weights are not read."""
    named = dict(parts.model.named_parameters())  # tied weights have one name
    config, weights = parts.config, sum(p.numel() for p in named.values())
    count, chosen = _first(config, EXPERTS), _first(config, CHOSEN)
    routed = [p.numel() for name, p in named.items() if re.search(r"\bexperts\b", name)]
    tied = parts.embedding.weight is parts.head.weight
    embedding = 0 if tied else parts.embedding.weight.numel()
    return Outline(
        title=f"{parts.name} ({type(parts.model).__name__})",
        weights=weights,
        experts=sum(routed) if count and chosen else 0,
        share=chosen / count if count and chosen else 1.0,
        embedding=embedding,
        head=parts.head.weight.numel(),
        layers=config.num_hidden_layers,
        width=parts.width,
        vocab=parts.vocab_size,
        itemsize=_itemsize(parts.model.config, dtype, weights, embedding, on_cpu),
        cached=_cached(config) * dtype.itemsize,
        state=dtype.itemsize,
        divided=divided_weights(parts.model),
        heads=_heads(config),
    )


def _heads(config: Any) -> int:
    """The largest number that divides all numbers of heads of a config."""
    names = ("num_attention_heads", "num_key_value_heads")
    counts = (getattr(config, name, None) or 0 for name in names)
    flat = [n for x in counts for n in (x if isinstance(x, list | tuple) else [x])]
    return math.gcd(*flat)


def draft_outline(config: Any, parts: TargetParts) -> DraftOutline | None:
    """The sizes of a draft of this config; None if they cannot be known without the weights of the
    target or of a draft model, or if it has no weights of its own to count."""
    kind = family(config.name)
    if kind.runs_target:
        return None
    try:
        sizes = kind.plan(config, parts)
        with torch.device("meta"):
            drafter = kind(config, sizes)
    # a plan or a draft that reads weights, which are absent here or on the meta device
    except (UserError, AssertionError, AttributeError, NotImplementedError, RuntimeError):
        return None
    V, S = parts.vocab_size, sizes.draft_vocab or parts.vocab_size
    linear = [m for m in drafter.modules() if isinstance(m, nn.Linear)]
    own_head = any(m.out_features in (S, V) for m in linear)
    tables = (m.weight for m in drafter.modules() if isinstance(m, nn.Embedding))
    embedding = _count(x for x in tables if all(x is not m.weight for m in linear))  # not tied
    weights = _count(drafter.parameters())
    trained = kind.trains(config)
    reads_head = trained and not own_head
    return DraftOutline(
        weights=weights,
        trained=_count(p for p in drafter.parameters() if p.requires_grad) if trained else 0,
        read=weights - embedding + (S * parts.width if reads_head else 0),
        head=S,
        linear=sum(m.in_features + m.out_features for m in linear if m.out_features not in (S, V)),
        depth=drafter.train_depth if isinstance(drafter, Trainable) else drafter.depth,
        parallel=drafter.limits.parallel,
        stored=len(drafter.needs.layers),
    )


def _count(weights: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() for x in weights)


def _is_stack(module: nn.Module, config: Any) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers


def _first(config: Any, keys: tuple[str, ...]) -> int | None:
    """The first of these keys that a config has as a number."""
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _cached(config: Any) -> int:
    """The numbers that the KV cache holds for a token: keys and values of every layer that keeps
    them. Recurrent and convolutional layers hold a state instead, whatever the length."""
    kinds = getattr(config, "layer_types", None)
    layers = config.num_hidden_layers
    if isinstance(kinds, list):
        layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    heads = config.num_attention_heads
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:  # transformers caches all heads
        keys = (getattr(config, "qk_nope_head_dim", 0) or 0) + config.qk_rope_head_dim
        return int(layers * heads * (keys + (getattr(config, "v_head_dim", None) or rank)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * layers * kv_heads * head_dim)


def _itemsize(config: Any, dtype: torch.dtype, weights: int, embedding: int, on_cpu: bool) -> float:
    """Mean bytes of a weight, of which the embedding and the head are never quantised."""
    part = 2 * embedding / weights
    return itemsize(config, dtype, on_cpu) * (1 - part) + dtype.itemsize * part
