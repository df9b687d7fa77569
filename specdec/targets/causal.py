"""A causal target: any `AutoModelForCausalLM` whose layers have keys and values, or states."""

import inspect
from contextlib import ExitStack
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.context import Context, FeatureSpec
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
from specdec.runtime.recurrent_states import bring_in, holders
from specdec.runtime.replay import RecomputeCache, ReplayCache, ReplayMemory
from specdec.targets.parts import longrope_lines
from specdec.targets.self_check import check_causal, check_head, understood
from specdec.targets.sequence_packing import document_groups
from specdec.targets.spread import is_spread
from specdec.targets.target import PassStates, Target, concatenated


class Reading(Enum):
    """How a pass goes on from what is known of a text."""

    SLOTS = "reads rows of any length together"
    ROWS = "makes its own masks or positions, so only rows of equal length are read together"
    REPLAY = (
        "keeps what it has read in a way of its own, so accepted tokens are read again from the "
        "start of their round"
    )
    APART = (
        "keeps what it has read in a way of its own, so rows are read one by one, and accepted "
        "tokens again from the start of their round"
    )
    RECOMPUTE = "has no cache that can be used here, so every pass reads the whole text anew"


class CausalTarget(Target):
    """A frozen causal LM. Raises UserError for a model that would be read wrongly."""

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
        """`checked=False` leaves out the self-check, for the twin that the self-check makes."""
        super().__init__(model, tokenizer, name, revision, quantisation, fingerprint=fingerprint)
        with understood(self):
            self.layers = self._decoder_layers()
        self._compiled: dict[FeatureSpec, Pass] = {}
        self._lean: tuple[nn.ModuleList, LeanPass | None] | None = None
        self._graph_hooks = 0  # hooks on layers that graphs of passes read
        self.reading, self.counted = Reading.SLOTS, False
        self.readings = self._readings()
        self.reading = self.readings[0]
        if not checked:
            return
        check_causal(self)
        if self.lean is not None:  # it packs weights itself; the check has used the modules too
            for layer in self.layers.modules():
                if isinstance(layer, PackedLinear):
                    layer.forget()

    @torch.no_grad()
    def _decoder_layers(self) -> nn.ModuleList:
        """The layers that read a text. Their name depends on the architecture, so a text is read:
        they are the list of as many modules as the model has layers, all of which then run, the
        last one if a model has two such stacks (HRM). A vision tower may have as many, but does not
        run. Raises UserError if there is no such list."""
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

    def _readings(self) -> list[Reading]:
        """The ways in which passes over a cache may be right, the fastest first."""
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
        """Whether a layer asks the cache how long it is: the answer is right for rows of one length
        alone. What a layer makes of it may begin beyond any length that is checked. Llama 4 is told
        true positions (see `TokensBefore`)."""
        if counts_positions(self.config):
            return False
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        cache, inside, asked = new_cache(self.config), list[nn.Module](), list[nn.Module]()
        answer = cache.get_seq_length

        def noted(*args: Any, **kwargs: Any) -> int:
            asked.extend(inside[:1])
            return answer(*args, **kwargs)

        cache.get_seq_length = noted  # type: ignore[method-assign]
        try:
            with ExitStack() as stack:
                for layer in self.layers:
                    begin = layer.register_forward_pre_hook(lambda m, _: inside.append(m))
                    end = layer.register_forward_hook(lambda *_: inside.clear())
                    stack.enter_context(begin)
                    stack.enter_context(end)
                inputs = model_inputs(self.config, cache.place(ids), self.dtype)
                self._pass(ids, FeatureSpec(), cache, **inputs)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception:  # a model may refuse our masks or our cache in any way
            return False
        return bool(asked)

    @torch.no_grad()
    def _watch_states(self) -> bool:
        """Have the modules that hold states tell a cache what they read (see recurrent_states.py).
        False if they keep them elsewhere."""
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size

        def run(rows: int, cache: SlotCache) -> None:
            self.features(ids.expand(rows, -1), FeatureSpec(), cache=cache)

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
        """What the model keeps of a text by itself, if it returns it."""

        def kept(rows: int) -> Any:
            ids = (torch.arange(16, device=self.device) + 1) % self.vocab_size
            return self.body(input_ids=ids.expand(rows, -1), use_cache=True)

        with torch.no_grad():
            out, taken = kept(1), inspect.signature(type(self.body).forward).parameters
            name = next((key for key in out if key in taken and out[key] is not None), None)
            return None if name is None else ReplayMemory.learn(name, lambda rows: kept(rows)[name])

    def twin_target(self, model: Any) -> "CausalTarget":
        """A small model of the same classes as a target, for the self-check."""
        twin = CausalTarget(model, None, self.name, fingerprint="", checked=False)
        check_head(twin)
        return twin

    @property
    def only_chains(self) -> str:
        return super().only_chains if self.reading is Reading.SLOTS else self.reading.value

    @property
    def restricted(self) -> bool:
        return self.reading is not Reading.SLOTS

    @property
    def takes_positions(self) -> bool:
        """Whether transformers' `generate` tells the model the positions of its tokens."""
        return "position_ids" in inspect.signature(type(self.model).forward).parameters

    def position_inputs(self, ids_BT: Tensor) -> dict[str, Tensor]:
        if not self.counted:
            return {}
        return {"position_ids": torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]}

    @property
    def reads_trees(self) -> bool:
        return super().reads_trees and self.reading is Reading.SLOTS

    def new_cache(self, capacity: int | None = None) -> SlotCache:
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

    def _continued(
        self, ids_BT: Tensor, needs: FeatureSpec, cache: SlotCache, parents_BT: Tensor | None
    ) -> PassStates:
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

    def _by_length(self, ids_BT: Tensor, needs: FeatureSpec, cache: SlotCache) -> PassStates:
        """A pass in which rows of equal length are read together, with the model's own masks."""
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
        self, needs: FeatureSpec, ids_NT: Tensor, kept: Any, read: int
    ) -> tuple[PassStates, Any]:
        """A pass that goes on from what the model has kept of the tokens that it has `read`, and
        what it has kept then."""
        assert self.memory is not None
        name = self.memory.argument
        with self._watched(needs) as seen:
            out = self.body(
                input_ids=ids_NT, use_cache=True, **({} if kept is None else {name: kept})
            )
        final = self.before_head(out.last_hidden_state).to(self.dtype)
        return (concatenated(seen, needs), final), out[name]

    def _reread(self, needs: FeatureSpec, cache: RecomputeCache) -> PassStates:
        """A pass over the whole texts; it returns the states of the last tokens. Padding follows
        the texts, where no earlier token sees it."""
        ids_BP, place_BT = cache.sequences()
        rows_B1 = torch.arange(len(ids_BP), device=ids_BP.device)[:, None]
        layers, final = (
            None if x is None else x[rows_B1, place_BT] for x in self._pass(ids_BP, needs)
        )
        assert final is not None
        return layers, final

    @property
    def lean(self) -> LeanPass | None:
        """See `Target.lean`. A copy of this target with other layers makes a pass of its own."""
        if not self.lean_allowed or self.reading is not Reading.SLOTS:
            return None
        if self._lean is None or self._lean[0] is not self.layers:
            body = self.model.get_submodule(self.prefix.rpartition(".")[0])
            lean = LeanPass.recognise(self.model, body, self.layers, self.config)
            self._lean = self.layers, lean
        return self._lean[1]

    def _read(
        self,
        ids_BT: Tensor,
        needs: FeatureSpec,
        position_BT: Tensor | None,
        document_BT: Tensor | None,
    ) -> PassStates:
        """Read each document by itself, with plain causal attention: this is faster on a CPU than
        a mask over whole rows, and right for every architecture."""
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

    def _pass(
        self, ids_BT: Tensor, needs: FeatureSpec, cache: SlotCache | None = None, **inputs: Any
    ) -> PassStates:
        model = self.body
        if cache is not None:
            inputs[cache_argument(model)] = cache
        if cache is None:
            inputs = self.position_inputs(ids_BT) | inputs
        with self._watched(needs) as seen:
            out = model(input_ids=ids_BT, use_cache=cache is not None, **inputs)
        return concatenated(seen, needs), self.before_head(out.last_hidden_state).to(self.dtype)

    def step(
        self, ids_BT: Tensor, needs: FeatureSpec, cache: SlotCache, parents_BT: Tensor | None = None
    ) -> tuple[Context, Tensor]:
        """Like `Target.step`, but compiled if `cache` has a fixed capacity."""
        if not cache.fixed:
            return super().step(ids_BT, needs, cache, parents_BT)
        inputs = model_inputs(self.config, cache.place(ids_BT, parents_BT), self.dtype)
        final, layers, logits = self._through_graph(needs)(cache, input_ids=ids_BT, **inputs)
        assert logits is not None
        return Context(ids_BT, layers, final if needs.final_hidden else None), logits

    def _through_graph(self, needs: FeatureSpec) -> Pass:
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
