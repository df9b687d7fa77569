"""The inputs of a plan: the memory and speed of devices, and the sizes of a target and a draft.

Models are built from their configs on torch's meta device, where tensors have shapes only, so the
counts are exact and no weight is read.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig

from specdec.drafters import family
from specdec.drafters.base import Trainable, WindowConfig
from specdec.drafters.layers import Attention
from specdec.errors import UserError, first_line, require_known, require_within
from specdec.measure.costs import timed
from specdec.runtime.device import capability, free_bytes
from specdec.runtime.quantised import itemsize, method
from specdec.targets.gguf import model_path
from specdec.targets.loading import kind_of
from specdec.targets.parts import TargetParts, configs_of_layers
from specdec.targets.target_config import DTYPES, TargetConfig
from specdec.targets.tensor_parallel import count_of_divided_weights
from train.optim import OptimConfig, trained_by_muon

GIB = 2**30
REPEATS = 5  # timings of a product, of which the fastest counts
# config keys for the number of experts in a layer, and for how many of them read a token
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class Device:
    """`memory` in bytes; `bandwidth` in bytes/s and `rate` in operations/s of forward passes;
    `training` in operations/s of training steps (None: `rate`). A layer takes `launch` seconds more
    if Python starts the kernels of a GPU. `capability` is CUDA's, 0 for a CPU."""

    name: str
    memory: float
    bandwidth: float
    rate: float
    training: float | None = None
    launch: float = 0.0
    capability: float = 9.0

    @property
    def gpu(self) -> bool:
        return self.capability > 0


def _sheet(name: str, gib: float, terabytes: float, teraflops: float, capability: float) -> Device:
    """A GPU by its data sheet. Forward passes are assumed to reach 60 % of the bandwidth, 40 % of
    the rate and 95 % of the memory."""
    rates = 0.6e12 * terabytes, 0.4e12 * teraflops
    return Device(name, 0.95 * gib * GIB, *rates, launch=3e-4, capability=capability)


# memory in GiB, bandwidth in TB/s, dense bfloat16 Tflop/s and CUDA capability, from NVIDIA's data
# sheets
DEVICES = {
    name: _sheet(name, *figures)
    for name, figures in {
        "a100": (80, 2.04, 312, 8.0),
        "a100-40": (40, 1.56, 312, 8.0),
        "b200": (180, 8.0, 2250, 10.0),
        "h100": (80, 3.35, 989, 9.0),
        "h200": (141, 4.8, 989, 9.0),
        "l4": (24, 0.3, 121, 8.9),
        "l40s": (48, 0.864, 362, 8.9),
        "rtx4090": (24, 1.008, 165, 8.9),
    }.items()
}


@dataclass
class PlanningConfig:
    """The assumptions of `plan=true`."""

    # here: this machine, which is measured; or a GPU: a100, a100-40, b200, h100, h200, l4, l40s or
    # rtx4090
    device: str = "here"
    # number of devices, each with a copy of the target unless target.tensor_parallel or
    # target.device_map says otherwise
    devices: int = 1
    # training tokens, without the responses still to be generated; null: counted in the data
    tokens: int | None = None
    alpha: float = 0.6  # expected acceptance rate, 0 to 1
    fsdp: bool = False  # the processes shard the draft, as in conf/accelerate/fsdp2.yaml

    def __post_init__(self) -> None:
        require_known("planning", self, device=("here", *DEVICES))
        require_within("planning", self, devices=1, tokens=1, alpha=(0, 1))


@torch.inference_mode()
def device_here(device: torch.device, dtype: torch.dtype) -> Device:
    """This machine's device, from a second of matrix products. Forward passes are assumed to reach
    80 % of their bandwidth and 70 % of their rate."""
    generator = torch.Generator().manual_seed(0)
    many, one, square, wide = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((1024, 1024), (1, 1024), (1024, 1024), (32768, 1024))
    )
    free = free_bytes(device)
    return Device(
        name="this machine",
        memory=float(psutil.virtual_memory().total if free is None else free),
        bandwidth=0.8 * wide.nbytes / fastest(lambda: F.linear(one, wide), device),
        rate=0.7 * 2 * 1024**3 / fastest(lambda: F.linear(many, square), device),
        capability=capability(device),
    )


def fastest(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The shortest of some timings in seconds, after a warm-up."""
    times = [timed(run, device)[0] for _ in range(1 + repeats)]
    return min(times[1:])


@dataclass(frozen=True)
class TargetSizes:
    """Weights are given as numbers of values; `itemsize` is the mean number of bytes of a value in
    memory, and `cached` the bytes of a token in the KV cache."""

    title: str
    weights: int
    experts: int  # weights by which only some tokens are multiplied
    share: float  # fraction of a layer's experts that read one token
    embedding: int  # weights of which a forward pass reads single rows
    head: int
    layers: int
    width: int
    vocab: int
    itemsize: float
    cached: float
    state: int = 2  # bytes of a number in a hidden state
    divided: int = 0  # weights that `target.tensor_parallel` divides
    heads: int = 0  # it does so over as many processes as this number can be divided by

    @property
    def bytes(self) -> float:
        return self.weights * self.itemsize

    @property
    def parts_bytes(self) -> float:
        """The bytes of the embedding and the head, which training keeps."""
        return (self.embedding + self.head) * self.state

    @property
    def active(self) -> float:
        """The number of weights by which one token is multiplied."""
        return self.weights - self.embedding - self.experts * (1 - self.share)

    def bytes_read(self, tokens: int) -> float:
        """The bytes of weights that a forward pass over `tokens` tokens reads; of experts, those
        that at least one token is expected to choose."""
        unread = self.experts * (1 - self.share) ** tokens
        return (self.weights - self.embedding - unread) * self.itemsize

    def divides(self, processes: int) -> bool:
        """Whether this number of processes can hold the target together."""
        return processes > 1 and self.divided > 0 and self.heads % processes == 0

    def most_processes(self, most: int) -> int | None:
        """The largest number of processes up to `most` that can hold the target together; None if
        there is none."""
        return next((n for n in range(most, 1, -1) if self.divides(n)), None)

    def held(self, processes: int) -> float:
        """The bytes of weights in each of `processes` processes that hold the target together."""
        return (self.weights - self.divided * (1 - 1 / processes)) * self.itemsize


@dataclass(frozen=True)
class DraftFootprint:
    """A draft's sizes, in numbers of values: `weights` are its own, `trained` those with a
    gradient, and `moments` those that the optimizer keeps. A draft step multiplies by `read`,
    including the target's head if the draft uses it. A `parallel` draft takes one step for all
    depths, others one for each. `linear` is the total width of the inputs and outputs of its
    products for a token, without the head's."""

    weights: int
    trained: int
    moments: int
    read: int
    head: int  # rows of the head that it uses: its vocabulary
    linear: int
    depth: int
    parallel: bool
    stored: int  # number of the target's layers that it reads
    anchors: int | None  # in each row of training; None: every position
    solved: bool  # whether it has a closed-form initialisation
    cached: int  # numbers that a token takes in its KV cache
    window: int | None  # tokens that its KV cache holds at most; None: the whole text

    def held(self, tokens: float) -> float:
        """The numbers in the KV cache of a text of so many tokens."""
        return self.cached * (tokens if self.window is None else min(tokens, self.window))


def sizes_of_target(
    cfg: TargetConfig, dtype: str, capability: float = 9.0
) -> tuple[TargetSizes, TargetParts]:
    """The sizes of the target in `cfg`, in this dtype, and its parts without weights. On a CPU
    (`capability` 0) and on older GPUs, transformers dequantises some quantised checkpoints. Raises
    UserError if there is no config of a model that transformers supports."""
    options = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(model_path(cfg.path, Path(cfg.cache)), **options)
        model = unfilled(config, DTYPES[dtype])
    except Exception as error:  # transformers raises errors of many classes
        raise UserError(
            f"target.path={cfg.path!r}: no sizes could be worked out ({first_line(error)}): give a "
            "hub name or a folder with the config.json of a model of transformers"
        ) from error
    parts = TargetParts(model, None, cfg.path)
    parts.reads_pairs = kind_of(config).reads_pairs
    count = parts.config.num_hidden_layers
    stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    parts.layers = next(stacks, nn.ModuleList())
    return target_sizes(parts, DTYPES[dtype], capability), parts


def unfilled(config: Any, dtype: torch.dtype) -> Any:
    """The model of a config on the meta device."""
    auto = kind_of(config).auto_class(config)
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype)


def target_sizes(parts: TargetParts, dtype: torch.dtype, capability: float = 9.0) -> TargetSizes:
    """The sizes of a model, without reading its weights."""
    named = dict(parts.model.named_parameters())  # tied weights have one name
    config, weights = parts.config, _count(named.values())
    experts, chosen = _first(config, EXPERTS), _first(config, CHOSEN)
    sparse = experts is not None and chosen is not None
    routed = _count(p for name, p in named.items() if re.search(r"\bexperts\b", name))
    tied = parts.embedding.weight is parts.head.weight
    embedding = 0 if tied else parts.embedding.weight.numel()
    around = 2 * embedding / weights  # the embedding and the head are never quantised
    stored = itemsize(parts.model.config, dtype, capability)
    kinds = ("attention", "key_value")
    heads = (
        getattr(layer, f"num_{kind}_heads", None) or 0
        for layer in configs_of_layers(config)
        for kind in kinds
    )
    return TargetSizes(
        title=f"{parts.name} ({type(parts.model).__name__})",
        weights=weights,
        experts=routed if sparse else 0,
        share=chosen / experts if experts and chosen else 1.0,
        embedding=embedding,
        head=parts.head.weight.numel(),
        layers=config.num_hidden_layers,
        width=parts.width,
        vocab=parts.vocab_size,
        itemsize=stored * (1 - around) + dtype.itemsize * around,
        cached=_cached(config) * dtype.itemsize,
        state=dtype.itemsize,
        divided=0 if method(parts.model.config) else count_of_divided_weights(parts.model),
        heads=math.gcd(*(n for x in heads for n in (x if isinstance(x, list | tuple) else [x]))),
    )


def draft_sizes(config: Any, parts: TargetParts, optim: OptimConfig) -> DraftFootprint | None:
    """The sizes of a draft of this config; None if they depend on the weights of the target or of a
    draft model, or if it has no weights of its own."""
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
    weights, learns = _count(drafter.parameters()), kind.trains(config)
    trained = [p for p in drafter.parameters() if p.requires_grad and learns]
    muon = _count(p for p in trained if trained_by_muon(p, optim, sizes))
    window = None
    if isinstance(config, WindowConfig) and config.window is not None:
        window = config.window + config.sink_tokens
    return DraftFootprint(
        weights=weights,
        trained=_count(trained),
        moments=2 * _count(trained) - muon,  # AdamW keeps two, Muon one
        read=weights - embedding + (S * parts.width if learns and not own_head else 0),
        head=S,
        linear=sum(m.in_features + m.out_features for m in linear if m.out_features not in (S, V)),
        depth=drafter.train_depth if isinstance(drafter, Trainable) else drafter.depth,
        parallel=drafter.limits.parallel,
        stored=len(drafter.needs.layers),
        anchors=getattr(getattr(config, "anchors", None), "per_row", None),
        solved=isinstance(drafter, Trainable) and drafter.closed_form_initialisation,
        cached=sum(
            2 * m.kv_heads * m.head_dim for m in drafter.modules() if isinstance(m, Attention)
        ),
        window=window,
    )


def _count(weights: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() for x in weights)


def _first(config: Any, keys: tuple[str, ...]) -> int | None:
    """The value of the first of these keys that is a number in a config."""
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _cached(config: Any) -> int:
    """The number of values that the KV cache holds for a token: keys and values of every layer that
    has them. Recurrent and convolutional layers hold a state of constant size."""
    kinds = getattr(config, "layer_types", None)
    layers = configs_of_layers(config)
    if isinstance(kinds, list):
        pairs = zip(layers, kinds, strict=False)
        layers = [x for x, kind in pairs if "attention" in kind and "linear" not in kind]
    return sum(map(_cached_by_layer, layers))


def _cached_by_layer(config: Any) -> int:
    heads = config.num_attention_heads
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:  # transformers caches all heads
        keys = (getattr(config, "qk_nope_head_dim", 0) or 0) + config.qk_rope_head_dim
        return int(heads * (keys + (getattr(config, "v_head_dim", None) or rank)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * kv_heads * head_dim)
