"""The parts of a target that are read without running it: config, tokenizer, embedding, head.

`TargetParts` alone leaves the layers in the checkpoint's files (checkpoint_files.py), or has sizes
but no weights, for a plan. `Target` (target.py) has the layers in memory and runs them. A job's
`TargetLoader` (loading.py) decides which of the two it holds.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec.compat import restore_rescaled_weights
from specdec.errors import UserError, require
from specdec.runtime.cache import keeps_states
from specdec.runtime.quantised import dense_linear, plain, plain_state
from specdec.targets.checkpoint_files import SafetensorsFiles, StoredLayers
from specdec.targets.fingerprint import (
    computing_keys,
    digest_of_weights,
    fingerprint_of,
    untied,
)
from specdec.targets.output_head import (
    flat,
    head_factor,
    head_scaling,
    head_without_padding,
    transform_of,
)
from specdec.targets.prompt_rendering import DEFAULT_RENDERING, PromptRendering
from specdec.targets.response_end import TurnEnds, turn_ends
from specdec.targets.spread import is_spread, tensors

NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")  # before the head
UNBOUNDED = 1 << 30  # stands for the positions of a model that sets no limit


def configs_of_layers(config: Any) -> Sequence[Any]:
    """The config of each layer. Gemma 4's layers differ in size, and reading these sizes from the
    model's config raises an error."""
    various = getattr(config, "is_heterogeneous", False)
    return list(config.per_layer_config) if various else [config] * config.num_hidden_layers


class TargetParts:
    """The frozen parts of a model around its layers, and facts from its config."""

    head: nn.Linear
    embedding: nn.Embedding
    layers: nn.ModuleList  # the decoder's; empty if they stay on disk
    _turn_ends: tuple[Any, TurnEnds] | None = None  # and their template
    head_factor: float  # by which the head's logits are multiplied, where that is all
    weights: SafetensorsFiles | None = None  # the checkpoint's files, if they are safetensors
    stored: StoredLayers | None = None  # where the weights of layers are read; None: from memory
    transform: nn.Module | None = None  # from the last hidden state to the head's input
    reads_pairs: str | None = None  # its kind, if it reads a prompt apart from its response
    # rendering of prompts; see `render_prompts_with`
    rendering: PromptRendering = DEFAULT_RENDERING

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str | None = None,
        quantisation: str | None = None,
        *,
        fingerprint: str | None = None,
        stored: StoredLayers | None = None,
    ) -> None:
        """`quantisation` is the quantisation method of the checkpoint, such as "fp8"; None: not
        quantised. `fingerprint` is that of the checkpoint; None: for a model without files, it is
        computed here, before a forward pass can change a weight (RWKV rescales its own). `stored`
        are the layers of a `model` that was made without them."""
        self.quantisation = quantisation
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.config = model.config.get_text_config(decoder=True)
        self.embedding = model.get_input_embeddings()
        require(
            plain(self.embedding.weight),
            f"{self.title} keeps its embedding quantised, and drafts read it: give a target whose "
            "embedding is not quantised",
        )
        self.head = model.get_output_embeddings()
        if not plain(self.head.weight):
            self.head = dense_linear(self.head, self.dtype)
        if 0 < (getattr(self.config, "unpadded_vocab_size", None) or 0) < self.vocab_size:
            self.head = head_without_padding(self.head, self.config.unpadded_vocab_size)
        self._scale, self.head_factor = head_scaling(self.config), head_factor(self.config)
        if fingerprint is None and self.embedding.weight.is_meta:  # sizes alone, for a plan
            fingerprint = ""
        if fingerprint is None:
            held = self._tensors()
            weights = digest_of_weights(held if is_spread(self.model) else untied(held))
            fingerprint = fingerprint_of(weights, computing_keys(self.model.config))
        self._fingerprint = fingerprint
        if stored is not None:
            self.stored, self.weights = stored, stored.files
            self.config = stored.config.get_text_config(decoder=True)
            stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList))
            self.layers = next(m for m in stacks if not len(m))

    @property
    def title(self) -> str:
        """The name of the target in messages."""
        return f"target {self.name!r} ({type(self.model).__name__})"

    @property
    def body(self) -> Any:
        """The model without its head."""
        return body_of(self.model)

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
    def depth(self) -> int:
        """The number of layers that a text passes through in the list of layers."""
        return depth_of(self.config)

    @property
    def norm(self) -> nn.Module | None:
        """The norm after the last layer, if it has the usual name and the same parent as the
        layers."""
        around = self.model.get_submodule(self.prefix.rpartition(".")[0])
        return getattr(around, "norm", None)

    def normed(self, last: Tensor) -> Tensor:
        """The final hidden state [..., D], given the residual stream [..., D] after the last layer.
        Raises UserError for a model whose final norm has another parent than its layers."""
        around = self.model.get_submodule(self.prefix.rpartition(".")[0])
        norms = [around.get_submodule(n) for n in NORMS if hasattr(around, n)]
        require(
            len(norms) == 1,
            f"{self.title} has no final norm that is known to us, which the states of an engine "
            "lack: leave out hidden_states.from",
        )
        return self.before_head(norms[0](last))

    @property
    def norm_weight(self) -> Tensor | None:
        """The factors [D] of that norm; None if there is none. Gemma stores each factor minus 1."""
        weight_D = getattr(self.norm, "weight", None)
        return None if weight_D is None else self._factor(weight_D)

    def _factor(self, weight_D: Tensor) -> Tensor:
        """The factors of a norm with stored weight `weight_D`. The sum is rounded in float32, not
        in the target's dtype."""
        return weight_D.float() + 1 if self._stored_less else weight_D

    @property
    def _stored_less(self) -> int:
        """The difference between a norm's factors and its stored weights: 1 or 0."""
        if self.norm is None:
            return 0
        # in float32: in 16 bits, 1 is less than a large weight is rounded by
        state = {name: x.detach().float() for name, x in self.norm.named_parameters()}
        weight_D = state["weight"]
        unit_D = torch.ones_like(weight_D)
        unit_D[1::2] = -1  # mean 0 and mean square 1, so that a norm only multiplies it
        normed_D, bias_D = (
            torch.func.functional_call(self.norm, state, (x,))
            for x in (unit_D, torch.zeros_like(unit_D))
        )
        factor_D = (normed_D - bias_D) * unit_D
        return int(abs(float((factor_D - weight_D).mean()) - 1) < 0.1)

    @property
    def positions(self) -> int:
        """The maximum number of positions of a text; see `room`."""
        return getattr(self.config, "max_position_embeddings", None) or UNBOUNDED

    @property
    def reads_trees(self) -> bool:
        """Whether one forward pass can read branches. It cannot with recurrent state, of which each
        branch would need a copy."""
        return not keeps_states(self.config)

    @property
    def only_chains(self) -> str:
        """The reason why the target reads no branches, as a phrase after "the target"."""
        return "keeps a state in some of its layers, and each branch would need its own"

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a response: those of the model's generation config and the tokenizer's
        eos. If none of them closes a response in the chat template, the template's own end token is
        added: otherwise the draft would train on text after the end of a response."""
        ids = dict.fromkeys([*self.declared_eos, *self.turn_ends.beyond(self.declared_eos)])
        return tuple(i for i in ids if i < self.vocab_size)

    @property
    def response_end(self) -> int | None:
        """The id of `eos` that the chat template writes after the last response of a chat, or after
        an earlier one; without such a template, the first of `eos`. None if no token ends a
        response."""
        marks = (self.turn_ends.last, self.turn_ends.earlier)
        return next((mark for mark in marks if mark in self.eos), next(iter(self.eos), None))

    @property
    def declared_eos(self) -> tuple[int, ...]:
        """The ids that end a response for engines, which do not read the chat template: those of
        the generation config and the tokenizer's eos. A tokenizer's eos that the template writes
        within a response, after its reasoning, is not included."""
        ids, own = self.generation_eos, None
        if self.tokenizer is not None:
            own = self.tokenizer.eos_token_id
        if own is not None and own not in ids and own not in self.turn_ends.within:
            ids = (*ids, own)
        return tuple(dict.fromkeys(ids))

    @property
    def generation_eos(self) -> tuple[int, ...]:
        """The ids in the generation config, or the tokenizer's eos if it has none."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)

    @property
    def turn_ends(self) -> TurnEnds:
        """The `TurnEnds` of the chat template (`specdec.targets.response_end`), computed once."""
        template = getattr(self.tokenizer, "chat_template", None)
        if self._turn_ends is None or self._turn_ends[0] != template:
            self._turn_ends = template, turn_ends(self.tokenizer)
        return self._turn_ends[1]

    def render_prompts_with(self, rendering: PromptRendering) -> None:
        """Render prompts with these arguments and this chat template from now on. The tokenizer
        takes the template, and new drafts record it."""
        self.rendering = rendering
        if rendering.chat_template is not None and self.tokenizer is not None:
            self.tokenizer.chat_template = rendering.chat_template

    def require_embedded(self, ids: Sequence[int], where: str) -> None:
        """Raise UserError naming the first of the ids without a row in the embedding, and its text.
        Some tokenizers have such ids (Gemma's has one), which matter only in a text that contains
        them. `where` names the text."""
        rows = self.embedding.num_embeddings
        outside = next((int(i) for i in ids if not 0 <= i < rows), None)
        if outside is None:
            return
        name = None
        if self.tokenizer is not None and 0 <= outside < len(self.tokenizer):
            name = self.tokenizer.convert_ids_to_tokens(outside)
        remedy = "give ids of its own tokenizer"
        if name is not None:
            remedy = "leave it out of the text, or give a target that has a row for it"
        raise UserError(
            f"{where} holds token {outside}{'' if name is None else f' ({name!r})'}, but the "
            f"target's embedding has {rows} rows: {remedy}"
        )

    def placed(self, prompt: Sequence[int]) -> int:
        """The number of decoder positions that a prompt takes."""
        return len(prompt)

    def room(self, shortest: int) -> int:
        """The number of positions that texts may take while the shortest of them takes `shortest`.
        This is the model's maximum, except with LongRoPE: a cache or a batch is read with one set
        of rotary factors, so texts must not cross the length at which they change."""
        ahead = [line for line in longrope_lines(self.config) if shortest <= line]
        return min([self.positions, *ahead])

    def before_head(self, state: Tensor) -> Tensor:
        """The final hidden state [..., D], the input of the linear head, from the body's last
        hidden state."""
        final: Tensor = state if self.transform is None else self.transform(state)
        return final

    def find_transform(self) -> None:
        """Make `before_head` call the modules between the model's body and its head."""
        transform = transform_of(self.model, self.body, self.model.get_output_embeddings())
        self.transform = None if transform is None else transform.requires_grad_(False)

    def flatten_head(self) -> None:
        """Replace the head by a plain linear layer with the same logits."""
        if "forward" in vars(type(self.head)) and type(self.head) is not nn.Linear:
            self.head = flat(self.head)

    def leave_scale(self) -> None:
        """Do not scale logits, even if the config has a factor: Aya Vision ignores it."""
        self._scale, self.head_factor = head_scaling(None), 1.0

    def logits(self, final: Tensor) -> Tensor:
        """Logits [..., V] of the final hidden state [..., D]."""
        return self._scale(self.head(final))

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [..., D] of the embedding table as stored. Some models scale the rows (Gemma 3),
        but engines share the table itself with a draft. Raises UserError as `require_one_width`
        does."""
        self.require_one_width()
        return nn.functional.embedding(ids, self.embedding.weight)

    def require_one_width(self) -> None:
        """Raise UserError if the head reads wider states than an embedding, as in Reformer, where
        two streams pass through the layers."""
        width = self.embedding.weight.shape[1]
        require(
            width == self.width,
            f"{self.title} has embeddings of width {width}, but its head reads a width of "
            f"{self.width}: give a drafter that reads only the target's final state",
        )

    def own_head(self, vocab_S: Tensor | None = None) -> Tensor:
        """The weights [S, D] with which a draft's own linear head gives the target's logits over
        part of the vocabulary, up to nonlinear scaling such as a soft cap."""
        rows = self.head.weight if vocab_S is None else self.head.weight[vocab_S]
        return rows * self.head_factor

    def unembedding(self, vocab_S: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """`logits` over part of the vocabulary only: a function [..., D] -> [..., S]."""
        if vocab_S is None:
            return self.logits
        weight = self.head.weight[vocab_S]
        bias = None if self.head.bias is None else self.head.bias[vocab_S]
        return lambda final: self._scale(nn.functional.linear(final, weight, bias))

    @property
    def prefix(self) -> str:
        """The prefix of the layers' weight names in the model's state dict."""
        prefix: str = next(name for name, m in self.model.named_modules() if m is self.layers)
        return prefix

    def layer(self, k: int) -> dict[str, Tensor]:
        """The weights of layer k (the last: -1) by their names within the layer, as plain numbers
        even if they are quantised. Raises UserError if they cannot be read this way."""
        if self.stored is None:
            return self._state(self.layers[k])
        name = f"{self.prefix}.{k % self.depth}"
        tensors = {} if self.quantisation else self.stored.weights(name)
        if not tensors:
            of_layer: dict[str, Tensor] = self.stored.whole().layer(k)
            return of_layer
        return {name: x.to(self.device, self.dtype) for name, x in tensors.items()}

    def _state(self, module: nn.Module, without: str | None = None) -> dict[str, Tensor]:
        """The state dict of a submodule, as plain numbers. Quantised weights at the path `without`
        are skipped."""
        rescales = restore_rescaled_weights(self.model)
        if self.quantisation:
            return plain_state(module, self.dtype, without)
        state = module.state_dict()
        if any(x.is_meta for x in state.values()):  # offloaded
            state = {n: x for n, x in tensors(module) if not (without and n.startswith(without))}
        # the next forward pass would change these in place
        return {n: x.clone() for n, x in state.items()} if rescales else state

    def as_llama(self, k: int) -> dict[str, Tensor]:
        """The weights of layer k, named as in a Llama layer where it has the same submodules. A
        norm's weight is its factor, even if it is stored as 1 less. Of Gemma's two norms around the
        MLP, the first is taken."""
        tensors = dict(self.layer(k))
        if (before_mlp := tensors.get("pre_feedforward_layernorm.weight")) is not None:
            tensors["post_attention_layernorm.weight"] = before_mlp
        norms = [name for name in tensors if name.endswith("norm.weight")]
        return tensors | {name: self._factor(tensors[name]) for name in norms}

    def beyond(self, k: int) -> dict[str, Tensor]:
        """The tensors that the checkpoint stores as layer L + k, beyond the model's own L layers: a
        module for multi-token prediction, which transformers does not load. Empty if absent."""
        num_layers = self.depth
        tensors = self.weights.under(f"{self.prefix}.{num_layers + k}.") if self.weights else {}
        for name, x in tensors.items():
            require(
                plain(x),
                f"{self.title} stores its modules for multi-token prediction quantised ({name} as "
                f"{str(x.dtype).removeprefix('torch.')}), and transformers does not read them: "
                "give a drafter.initialisation that does not copy them",
            )
        return {name: x.to(self.device) for name, x in tensors.items()}

    def cut(self, layers: Sequence[int]) -> dict[str, Tensor]:
        """The state dict of the model with only these layers, renumbered from 0."""
        state = self._state(self.model, without=self.prefix)
        kept = {n: x for n, x in state.items() if not n.startswith(f"{self.prefix}.")}
        for i, k in enumerate(layers):
            kept |= {f"{self.prefix}.{i}.{name}": x for name, x in self.layer(k).items()}
        return kept

    def fingerprint(self) -> str:
        """A hash that identifies the target; see fingerprint.py."""
        return self._fingerprint

    def checksum(self) -> str:
        """A checksum over every weight in memory, to show that none was changed. See `sum_of`."""
        digest = hashlib.blake2b(digest_size=12)
        sums = {name: sum_of(name, value) for name, value in self._tensors()}
        for name in sorted(sums):
            digest.update(sums[name].encode())
        return digest.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight in memory by name, as it is stored there."""
        restore_rescaled_weights(self.model)
        if is_spread(self.model):
            return tensors(self.model)
        if not self.quantisation:
            return _stored(self.model.state_dict())
        # making the state dict of a bitsandbytes layer of 4 bits on a CPU lays its weight out anew,
        # and the layer then multiplies by something else (version 0.50)
        return _stored({**dict(self.model.named_parameters()), **dict(self.model.named_buffers())})


def body_of(model: Any) -> Any:
    """A model without its head. Some models (Llama 4) do not declare its name."""
    base = model.base_model
    if base is not model:
        return base
    text = model.get_decoder()
    return getattr(text, "model", text)


def sum_of(name: str, value: Tensor) -> str:
    """A tensor's contribution to the `checksum`. The tensor is rounded to bfloat16 and its bits are
    read as integers; on its device, two exact sums are taken: over all values and over a sample
    weighted by position. Quantised weights are summed as stored."""
    rounded = value.to(torch.bfloat16) if plain(value) else value
    bits = torch.uint8 if rounded.itemsize == 1 else torch.int16
    whole = (rounded if rounded.dim() else rounded[None]).contiguous().view(bits)
    ramp = whole.reshape(-1)[:: max(1, whole.numel() // 4096)].to(torch.int64)
    order = (ramp * torch.arange(1, len(ramp) + 1, device=ramp.device)).sum()
    return json.dumps([name, list(value.shape), int(whole.sum(dtype=torch.int64)), int(order)])


def _stored(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state dict; tensor subclasses are split into their plain tensors."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue  # a library's note beside the weights, such as the name of a layout
        inner = value.data
        if type(inner) is not Tensor and hasattr(inner, "__tensor_flatten__"):
            parts, _ = inner.__tensor_flatten__()
            yield from _stored({f"{name}.{part}": getattr(inner, part) for part in parts})
        else:
            yield name, inner


def longrope_lines(config: Any) -> list[int]:
    """The text lengths beyond which LongRoPE uses its long rotary factors, ascending; empty for
    other models. A text of exactly such a length uses the short ones."""
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [rope, *(x for x in rope.values() if isinstance(x, dict))]
    lines = {
        of_kind.get("original_max_position_embeddings")
        for of_kind in of_kinds
        if of_kind.get("rope_type") == "longrope"
    }
    return sorted(int(line) for line in lines if line)


def depth_of(config: Any) -> int:
    """The length of a model's list of decoder layers, for configs that count differently: BART's
    counts the encoder's layers first, LongCat's counts a layer twice since it holds two attentions,
    and HRM's counts a layer as often as a text passes it."""
    if decoder := getattr(config, "decoder_layers", None):
        return int(decoder)
    derived = isinstance(getattr(type(config), "num_hidden_layers", None), property)
    if derived and hasattr(config, "num_layers"):
        return int(config.num_layers)
    return int(getattr(config, "num_layers_per_stack", None) or config.num_hidden_layers)


def config_of_layers(model: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """The per-layer entries of a config (`model`, as a dict), for the layers that are kept."""
    per_layer: dict[str, Any] = {}
    lists = {key: x for key, x in model.items() if isinstance(x, list)}
    for key in lists.keys() & {"layer_types", "mlp_layer_types", "no_rope_layers"}:
        per_layer[key] = [lists[key][k] for k in kept if k < len(lists[key])]  # one entry per layer
    for key in lists.keys() & {"mlp_only_layers", "moe_layers"}:
        per_layer[key] = [kept.index(k) for k in lists[key] if k in kept]  # which layers
    if first := model.get("first_k_dense_replace"):
        per_layer["first_k_dense_replace"] = sum(k < first for k in kept)
    return per_layer
