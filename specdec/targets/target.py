"""The target: a frozen language model of Hugging Face, run over texts and over caches.

`Target` is a causal LM: any `AutoModelForCausalLM` whose layers have keys and values, or states.
Other classes, which packages register through `draftsmith.targets` (see loading.py), override what
differs. Both the parts around the layers (parts.py) and the layers are in memory.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from specdec.compat import restore_rescaled_weights
from specdec.context import Context, HiddenStateSpec
from specdec.errors import UserError, require
from specdec.runtime.cache import (
    SlotCache,
    cache_argument,
    cacheable,
    counts_positions,
    keeps_states,
    masks_by_slots,
    model_inputs,
    new_cache,
)
from specdec.runtime.cpu.compiled_pass import Compiled, Pass
from specdec.runtime.cpu.lean_pass import LeanPass
from specdec.runtime.cpu.packed_linear import PackedLinear
from specdec.runtime.quantised import method
from specdec.runtime.recurrent_states import bring_in, holders
from specdec.runtime.replay import RecomputeCache, ReplayCache, ReplayMemory
from specdec.targets.parts import TargetParts, longrope_lines
from specdec.targets.saved import save_model, save_tokenizer
from specdec.targets.self_check import check_causal, check_head, understood
from specdec.targets.sequence_packing import document_groups
from specdec.targets.spread import is_spread

# The layers of a `HiddenStateSpec` [B, T, F], None if it names none, and the final states [B, T, D]
PassStates = tuple[Tensor | None, Tensor]


class Reading(Enum):
    """The way in which a forward pass continues from a cache."""

    SLOTS = "reads rows of any length together"
    ROWS = "makes its own masks or positions, so only rows of equal length are read together"
    REPLAY = (
        "keeps what it has read in a way of its own, so accepted tokens are read again from the "
        "start of their speculation step"
    )
    APART = (
        "keeps what it has read in a way of its own, so rows are read one by one, and accepted "
        "tokens again from the start of their speculation step"
    )
    RECOMPUTE = "has no cache that can be used here, so every pass reads the whole text anew"


class Target(TargetParts):
    """A frozen causal LM with its layers: hidden states of a text, and logits. Raises UserError for
    a model that this project would run wrongly."""

    # What another kind of target may change, beside methods
    separable = True  # whether its parts are loaded without its layers, and these over processes
    refills = True  # whether a row of its caches can be given to another text
    texts_apart = False  # whether texts of unequal length are not read in one batch
    # What the checks find out, or what a library does
    lean_allowed = True  # False if the checks find a difference
    without_twin: str | None = None  # why no shrunken twin was checked (see self_check.py)
    processes = 1  # number of processes that hold its layers together (see tensor_parallel.py)
    streams: int | None = None  # the dimension of the streams, where layers pass several
    holders: Sequence[nn.Module] = ()  # the modules with recurrent states

    @classmethod
    def loads(cls, config: Any) -> bool:
        """Whether this class supports a model with this config. `Target` itself takes the models
        that no other class does."""
        return False

    @classmethod
    def auto_class(cls, config: Any) -> Any:
        """The auto class of transformers that loads such a model: for a multimodal model, the one
        with a head for text."""
        sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if sees and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return AutoModelForImageTextToText
        return AutoModelForCausalLM

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str | None = None,
        quantisation: str | None = None,
        *,
        fingerprint: str | None = None,
        checked: bool = True,
    ) -> None:
        """`checked=False` skips the self-check, for the twin that the self-check makes."""
        super().__init__(model, tokenizer, name, revision, quantisation, fingerprint=fingerprint)
        with understood(self):
            self.layers = self.decoder_layers()
        self._compiled: dict[HiddenStateSpec, Pass] = {}
        self._lean: tuple[nn.ModuleList, LeanPass | None] | None = None
        self._graph_hooks = 0  # hooks on layers that graphs of passes read
        self.reading, self.counted = Reading.SLOTS, False
        self.readings = self.possible_readings()
        self.reading = self.readings[0]
        if checked:
            self.check()

    def check(self) -> None:
        """Compare this project's results with transformers (self_check.py), and choose how passes
        continue from a cache. Raises UserError for a model that this project would run wrongly."""
        check_causal(self)
        if self.lean is not None:  # it packs weights itself; the check has used the modules too
            for layer in self.layers.modules():
                if isinstance(layer, PackedLinear):
                    layer.forget()

    @torch.no_grad()
    def decoder_layers(self) -> nn.ModuleList:
        """The layers that read a text. Their name depends on the architecture, so a text is run to
        find them: they are the list with as many modules as the model has layers, all of which then
        run (the last such list if a model has two, as HRM). A vision tower may have as many, but
        does not run. Raises UserError if there is no such list."""
        count, order = self.depth, list[nn.Module]()

        def note(layer: nn.Module, _: Any, out: Any) -> None:
            order.append(layer)
            stream = out[0] if type(out) in (tuple, list) else out
            if isinstance(stream, Tensor) and stream.dim() == 4:
                self.streams = 2 if stream.shape[:2] == ids.shape else 0

        modules = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        lists = [m for m in modules if len(m) == count]
        with ExitStack() as stack:
            for layer in (layer for some in lists for layer in some):
                hook = layer.register_forward_hook(note)
                stack.enter_context(hook)
            ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
            self.body(input_ids=ids, use_cache=False)
        last = {module: n for n, module in enumerate(order)}
        read = [some for some in lists if last.keys() >= set(some)]
        if not read:
            raise UserError(f"{self.title} has no list of {count} decoder layers: give another")
        return max(read, key=lambda some: last[some[-1]])

    def possible_readings(self) -> list[Reading]:
        """The possible ways to continue from a cache, fastest first."""
        last = [Reading.REPLAY, Reading.APART, Reading.RECOMPUTE]
        if keeps_states(self.config):
            require(
                not is_spread(self.model),
                f"{self.title} keeps states that cannot be rolled back, and target.device_map is "
                "not supported for such layers: leave it out",
            )
            return [Reading.SLOTS, *last] if self._watch_states() else last
        if not cacheable(self.config):
            return last
        own = [Reading.ROWS, *last]
        by_rows = masks_by_slots(self.config) or self._layers_ask_for_lengths()
        return own if by_rows else [Reading.SLOTS, *own]

    @torch.no_grad()
    def _layers_ask_for_lengths(self) -> bool:
        """Whether a layer asks the cache for its length, which is right only for rows of one
        length. The effect may begin beyond any length that is checked. Llama 4 is given true
        positions (see `TokensBefore`)."""
        if counts_positions(self.config):
            return False
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        cache, inside, asked = new_cache(self.config), list[nn.Module](), list[nn.Module]()
        cache.asked = lambda: asked.extend(inside[:1])
        try:
            with ExitStack() as stack:
                for layer in self.layers:
                    begin = layer.register_forward_pre_hook(lambda m, _: inside.append(m))
                    end = layer.register_forward_hook(lambda *_: inside.clear())
                    stack.enter_context(begin)
                    stack.enter_context(end)
                inputs = model_inputs(self.config, cache.place(ids), self.dtype)
                self._pass(ids, HiddenStateSpec(), cache, **inputs)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception:  # a model may refuse our masks or our cache in any way
            return False
        return bool(asked)

    @torch.no_grad()
    def _watch_states(self) -> bool:
        """Make the modules with recurrent state report their inputs to a cache (see
        recurrent_states.py). Returns False if they keep their state elsewhere."""
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size

        def run(rows: int, cache: SlotCache) -> None:
            self.hidden_states(ids.expand(rows, -1), HiddenStateSpec(), cache=cache)

        def asking() -> list[Any]:
            cache = new_cache(self.config)
            return holders(self.model, cache.states, partial(run, 1, cache))

        try:
            if cacheable(self.config) and not (some := asking()):
                bring_in(self.model, lambda rows: run(rows, new_cache(self.config)))
                some = asking()
            self.holders = some if cacheable(self.config) else []
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception:  # a model may want a kind of cache of its own
            self.holders = []
        return bool(self.holders)

    @cached_property
    def memory(self) -> ReplayMemory | None:
        """The format of the memory that the model returns, if it does."""

        def kept(rows: int) -> Any:
            ids = (torch.arange(16, device=self.device) + 1) % self.vocab_size
            return self.body(input_ids=ids.expand(rows, -1), use_cache=True)

        with torch.no_grad():
            out, taken = kept(1), inspect.signature(type(self.body).forward).parameters
            name = next((key for key in out if key in taken and out[key] is not None), None)
            return None if name is None else ReplayMemory.learn(name, lambda rows: kept(rows)[name])

    def as_twin(self, model: Any) -> "Target":
        """A target of the same kind of a small `model` of the same classes, for the self-check."""
        return type(self)(model, None, self.name, fingerprint="", checked=False)

    def settle_head(self) -> None:
        """Find the modules and factors between the model's last hidden state and its logits
        (`check_head`)."""
        check_head(self)

    def own_logits(self, ids_BT: Tensor, model: Any = None) -> Tensor:
        """The logits of transformers' own forward pass of the model, or of a `model` like it, for
        complete texts: [B, T, V], or those of the last tokens that have any."""
        model = self.model if model is None else model
        inputs = self.position_inputs(ids_BT)
        logits: Tensor = model(input_ids=ids_BT, use_cache=False, **inputs).logits
        return logits

    def example(self, words: Sequence[int]) -> list[int]:
        """A text for a trial, with these tokens and as many of them, that the target can read."""
        return list(words)

    def prompt_for_decoding(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that `decode` continues, given the tokenizer's output: a model that reads a
        prompt apart from its response may have a token between them."""
        return list(tokens)

    @property
    def only_chains(self) -> str:
        return super().only_chains if self.reading is Reading.SLOTS else self.reading.value

    @property
    def restricted(self) -> bool:
        """Whether passes over its caches use a slower reading (see `only_chains`)."""
        return self.reading is not Reading.SLOTS

    @property
    def reads_trees(self) -> bool:
        return super().reads_trees and self.reading is Reading.SLOTS

    @property
    def takes_positions(self) -> bool:
        """Whether transformers' `generate` passes positions to the model."""
        return "position_ids" in inspect.signature(type(self.model).forward).parameters

    def position_inputs(self, ids_BT: Tensor) -> dict[str, Tensor]:
        """The inputs that give the model the positions of a complete text, if its own count differs
        from that of `generate`: RoBERTa's begins after the padding token's id."""
        if not self.counted:
            return {}
        return {"position_ids": torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]}

    @property
    def lean(self) -> LeanPass | None:
        """The fused fast path over a cache; None if there is none. A copy of this target with other
        layers makes its own."""
        if not self.lean_allowed or self.reading is not Reading.SLOTS:
            return None
        if self._lean is None or self._lean[0] is not self.layers:
            body = self.model.get_submodule(self.prefix.rpartition(".")[0])
            lean = LeanPass.recognise(self.model, body, self.layers, self.config)
            self._lean = self.layers, lean
        return self._lean[1]

    def new_cache(self, capacity: int | None = None) -> SlotCache:
        """An empty KV cache; `capacity` fixes its slots, for compiled passes."""
        require(
            capacity is None or self.reading is Reading.SLOTS,
            f"{self.title} {self.reading.value}, so its passes are not compiled: leave compiled "
            "off",
        )
        if self.reading is Reading.RECOMPUTE:
            return RecomputeCache()
        if self.reading in (Reading.REPLAY, Reading.APART):
            assert self.memory is not None
            return ReplayCache(self.memory, self.reading is Reading.REPLAY)
        cache = new_cache(self.config, capacity)
        cache.chains_only |= self.reading is not Reading.SLOTS
        return cache

    @torch.no_grad()
    def hidden_states(
        self,
        ids_BT: Tensor,
        needs: HiddenStateSpec,
        *,
        cache: SlotCache | None = None,
        parents_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
    ) -> tuple[Context, Tensor]:
        """Run the target over `ids_BT`. Returns the context and the final hidden state [B, T, D],
        for which a caller can compute `logits` in chunks.

        With `position_BT` and no cache, rows hold documents, which begin at position 0. Each
        document is read as if it were alone; at padding (`document_BT` below 0) hidden states are
        0. With `cache`, `ids_BT` continues the cached tokens, as a tree if `parents_BT` is given
        (see `SlotCache.place`); the caller then commits or drops these tokens.
        """
        if cache is not None:
            layers, final_BTD = self._continued(ids_BT, needs, cache, parents_BT)
        else:
            layers, final_BTD = self._read(ids_BT, needs, position_BT, document_BT)
        final = final_BTD if needs.final_hidden else None
        return Context(ids_BT, layers, final, document_BT, position_BT), final_BTD

    def step(
        self,
        ids_BT: Tensor,
        needs: HiddenStateSpec,
        cache: SlotCache,
        parents_BT: Tensor | None = None,
    ) -> tuple[Context, Tensor]:
        """A forward pass of decoding: the context and the logits [B, T, V]. It is compiled if
        `cache` has a fixed capacity."""
        if not cache.fixed:
            ctx, final_BTD = self.hidden_states(ids_BT, needs, cache=cache, parents_BT=parents_BT)
            return ctx, self.logits(final_BTD)
        inputs = model_inputs(self.config, cache.place(ids_BT, parents_BT), self.dtype)
        final, layers, logits = self._through_graph(needs)(cache, input_ids=ids_BT, **inputs)
        assert logits is not None
        return Context(ids_BT, layers, final if needs.final_hidden else None), logits

    def _read(
        self,
        ids_BT: Tensor,
        needs: HiddenStateSpec,
        position_BT: Tensor | None,
        document_BT: Tensor | None,
    ) -> PassStates:
        """`hidden_states` without a cache. Each document is read separately with plain causal
        attention, which is faster on a CPU than a mask over complete rows, and correct for every
        architecture."""
        if position_BT is None:
            return self._pass(ids_BT, needs)
        read: list[Tensor | None] = [None, None]  # the layers and the final states of all tokens
        for slots_NT, mine_NT in document_groups(
            position_BT, document_BT, longrope_lines(self.config)
        ):
            slots_NT, mine_NT = slots_NT.to(ids_BT.device), mine_NT.to(ids_BT.device)
            for i, x_NTD in enumerate(self._pass(ids_BT.flatten()[slots_NT], needs)):
                if x_NTD is not None:
                    if (whole := read[i]) is None:
                        whole = read[i] = x_NTD.new_zeros(ids_BT.numel(), x_NTD.shape[-1])
                    whole[slots_NT[mine_NT]] = x_NTD[mine_NT]
        layers, final = (x if x is None else x.unflatten(0, ids_BT.shape) for x in read)
        assert final is not None
        return layers, final

    def _continued(
        self, ids_BT: Tensor, needs: HiddenStateSpec, cache: SlotCache, parents_BT: Tensor | None
    ) -> PassStates:
        """`hidden_states` over a cache."""
        place = cache.place(ids_BT, parents_BT)
        if isinstance(cache, ReplayCache):
            return cache.replayed(partial(self._after_memory, needs))
        if isinstance(cache, RecomputeCache):
            return self._reread(needs, cache)
        if self.reading is Reading.ROWS:
            return self._by_length(ids_BT, needs, cache)
        lean = self.lean
        if lean is None or not lean.takes(ids_BT, self._graph_hooks):
            return self._pass(ids_BT, needs, cache, **model_inputs(self.config, place, self.dtype))
        inputs = lean.inputs(place, cache)
        final, seen = lean(cache, input_ids=ids_BT, wanted=needs.layers, **inputs)
        return concatenated(seen, needs), self.before_head(final)

    def _by_length(self, ids_BT: Tensor, needs: HiddenStateSpec, cache: SlotCache) -> PassStates:
        """A forward pass in which rows of equal length are read together, with the model's own
        masks."""
        layers, final = list[Tensor | None](), list[Tensor]()
        rows = list[Tensor]()
        for rows_N in cache.alike(ids_BT):
            some, last = self._pass(ids_BT[rows_N], needs, cache)
            rows.append(rows_N)
            layers.append(some)
            final.append(last)
        order_B = torch.cat(rows).argsort()
        known = [x for x in layers if x is not None]
        return torch.cat(known)[order_B] if known else None, torch.cat(final)[order_B]

    def _after_memory(
        self, needs: HiddenStateSpec, ids_NT: Tensor, kept: Any, read: int
    ) -> tuple[PassStates, Any]:
        """A pass that continues from the model's memory of the `read` tokens before, and the new
        memory."""
        assert self.memory is not None
        name = self.memory.argument
        with self._watched(needs) as seen:
            out = self.body(
                input_ids=ids_NT, use_cache=True, **({} if kept is None else {name: kept})
            )
        final = self.before_head(out.last_hidden_state).to(self.dtype)
        return (concatenated(seen, needs), final), out[name]

    def _reread(self, needs: HiddenStateSpec, cache: RecomputeCache) -> PassStates:
        """A pass over complete texts, which returns the states of the last tokens. Padding comes
        after the texts, where no earlier token attends to it."""
        ids_BP, place_BT = cache.sequences()
        rows_B1 = torch.arange(len(ids_BP), device=ids_BP.device)[:, None]
        layers, final = (
            None if x is None else x[rows_B1, place_BT] for x in self._pass(ids_BP, needs)
        )
        assert final is not None
        return layers, final

    def _pass(
        self, ids_BT: Tensor, needs: HiddenStateSpec, cache: SlotCache | None = None, **inputs: Any
    ) -> PassStates:
        model = self.body
        if cache is not None:
            inputs[cache_argument(model)] = cache
        if cache is None:
            inputs = self.position_inputs(ids_BT) | inputs
        with self._watched(needs) as seen:
            out = model(input_ids=ids_BT, use_cache=cache is not None, **inputs)
        return concatenated(seen, needs), self.before_head(out.last_hidden_state).to(self.dtype)

    def _through_graph(self, needs: HiddenStateSpec) -> Pass:
        """A pass through `torch.compile` that returns the final hidden state, the hidden states of
        the layers in `needs` (None if there are none) and the logits."""
        if needs in self._compiled:
            return self._compiled[needs]
        seen: dict[int, Tensor] = {}
        for k in needs.layers:
            self._hook(k, seen)  # never removed: a graph cannot add hooks
        self._graph_hooks += len(needs.layers)
        taken = cache_argument(self.body)

        def run(cache: SlotCache, **inputs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
            out = self.body(use_cache=True, **inputs, **{taken: cache})
            final = self.before_head(out.last_hidden_state)
            return final, concatenated(seen, needs), self.logits(final)

        self._compiled[needs] = Compiled(run)
        return self._compiled[needs]

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in a format that engines load (a GGUF target becomes dense).
        Raises UserError for a model that is quantised in memory."""
        require(
            method(self.model.config) is None,
            f"{folder}: not written: {self.title} is quantised ({self.quantisation}), and an "
            "engine can load it from where it is: export the draft alone",
        )
        require(
            not getattr(self.model, "_hf_peft_config_loaded", False),
            f"{folder}: not written: an adapter was loaded with {self.title}, such as from an "
            "adapter_config.json in its folder, and engines would load the model without it: merge "
            "it into the weights, or remove it, and train for that target",
        )
        # engines must stop where responses end here
        eos = self.eos if set(self.eos) - set(self.generation_eos) else None
        restore_rescaled_weights(self.model)
        save_model(self.model, folder, eos)
        save_tokenizer(self.tokenizer, folder)

    @contextmanager
    def _watched(self, needs: HiddenStateSpec) -> Iterator[dict[int, Tensor]]:
        """A dict of the residual stream after each layer of `needs`, filled by passes inside the
        block."""
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for k in needs.layers:
                stack.enter_context(self._hook(k, seen))
            yield seen

    def _hook(self, k: int, seen: dict[int, Tensor]) -> Any:
        """A removable hook that stores the residual stream after k layers in `seen`; of several
        streams, their mean."""
        num_layers = len(self.layers)
        require(
            0 < k <= num_layers,
            f"drafter.layers asks for layer {k} of the target: give 1 to {num_layers}",
        )

        def note_stream(_layer: nn.Module, _args: Any, out: Any) -> None:
            stream = out[0] if type(out) in (tuple, list) else out
            require(
                isinstance(stream, Tensor),
                f"{self.title} passes more than one tensor between layers, so a draft cannot read "
                "its layers: give a drafter that reads only the target's final state",
            )
            if stream.dim() == 4 and self.streams is not None:
                stream = stream.mean(self.streams)
            alike = stream.dim() == 3 and stream.shape[-1] == self.width
            require(
                alike,
                f"{self.title} passes states {list(stream.shape)} between layers, but its head "
                f"reads a width of {self.width}, so a draft cannot read its layers: give a drafter "
                "that reads only the target's final state",
            )
            # Mamba keeps it in float32; a layer may be on another device than the text
            seen[k] = stream.to(self.device, self.dtype)

        return self.layers[k - 1].register_forward_hook(note_stream)


def concatenated(seen: dict[int, Tensor], needs: HiddenStateSpec) -> Tensor | None:
    """The hidden states of the layers of `needs` [B, T, F], in order, or None if it names none."""
    return torch.cat([seen[k] for k in needs.layers], -1) if needs.layers else None
