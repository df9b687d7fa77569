"""Recurrent and convolutional states, which cannot be rolled back.

A forward pass updates such a state with every token that it reads, including rejected ones.
Therefore the states from before the pass are kept until the caller says how many tokens each row
keeps (`settle`). A row that keeps all of them takes the updated states. For other rows, the modules
with states run once more, from the kept states, over their inputs for the tokens that the row
keeps. Rows that keep equally many tokens run together, so no padding passes through a state. The
other modules do not run again: their outputs for a kept token have not changed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdec.compat import own_forward, replace_forward, with_attributes

# conv, recurrent or held (by a module itself), the layer, and the number of the state in the layer
Key = tuple[str, int, int]


class RecurrentStates:
    """The states of a cache's rows, by layer; empty for a model with attention only."""

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}  # after the committed tokens
        self._moved: dict[Key, Tensor] = {}  # after those of the passes since then
        self._read: dict[
            nn.Module, tuple[Any, Any]
        ] = {}  # arguments of each module's calls in these passes
        self._rows: Tensor | None = None  # while modules run again: the rows that do
        self.ran: set[nn.Module] = set()  # the modules that asked `begun` since the last commit
        self.touched: Callable[[], None] | None = None  # called whenever a module asks for a state

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._kept.values())

    def current(self, key: Key) -> Tensor | None:
        """A state, which the model may write to; None before the rows have read anything."""
        if self.touched is not None:
            self.touched()
        if key not in self._moved and key in self._kept:
            kept = self._kept[key]
            self._moved[key] = kept.clone() if self._rows is None else kept[self._rows]
        return self._moved.get(key)

    def move_conv(self, key: Key, x_BCT: Tensor, size: int | None) -> Tensor:
        """Append inputs of a convolution, and keep the last `size` of them (None: all). Returns
        everything that the new outputs depend on, like transformers' cache."""
        state, size = self.current(key), x_BCT.shape[-1] if size is None else size
        if state is not None:
            size, x_BCT = state.shape[-1], torch.cat([state, x_BCT], -1)
        elif x_BCT.shape[-1] < size:
            x_BCT = pad(x_BCT, (size - x_BCT.shape[-1], 0))
        self._moved[key] = x_BCT[..., -size:].clone()
        return x_BCT

    def move(self, key: Key, state: Tensor) -> Tensor:
        """Replace a recurrent state."""
        if self.touched is not None:
            self.touched()
        self._moved[key] = state
        return state

    def begun(self, module: nn.Module) -> bool:
        """Whether a module continues from a state."""
        return bool(self._kept) or (self._rows is None and module in self.ran)

    def heard(self, module: nn.Module, arguments: Any) -> None:
        """Record the arguments of a call to a module with states. A further pass since the last
        commit continues where the one before it ended."""
        if self._rows is None:
            before = self._read.get(module)
            self._read[module] = arguments if before is None else _joined(before, arguments)

    def settle(self, counts: Sequence[int], tokens: int) -> None:
        """Commit the first `counts[b]` of the `tokens` that each row has read since the last
        commit."""
        after, self._moved, read = self._moved, {}, self._read
        self._read, self.ran = {}, set()
        by_count: dict[int, list[int]] = {}
        for b, count in enumerate(counts):
            if count != tokens:
                by_count.setdefault(count, []).append(b)
        for count, rows in by_count.items() if after else ():
            self._rows = torch.tensor(rows, device=next(iter(after.values())).device)
            with torch.no_grad():
                for module, arguments in read.items() if count else ():
                    cut = partial(self._cut, rows=len(counts), count=count)
                    args, kwargs = _changed(arguments, tokens, cut)
                    module.forward(*args, **kwargs)
                for key, x in after.items():
                    x[self._rows] = self._moved[key] if count else self._before(key, x)
            self._moved = {}
        self._rows, self._kept = None, self._kept if not after else self._kept | after

    def _cut(self, x: Tensor, rows: int, count: int) -> Tensor:
        """The first `count` tokens of the current rows, from a tensor [rows, T, …] or [1, T, …]."""
        assert self._rows is not None
        return (x if len(x) != rows else x[self._rows.to(x.device)])[:, :count]

    def _before(self, key: Key, x: Tensor) -> Tensor:
        """The kept states of the current rows: zeros before the first token."""
        kept, rows = self._kept.get(key), self._rows
        assert rows is not None
        return torch.zeros_like(x[rows]) if kept is None else kept[rows]

    def drop(self) -> None:
        """Discard the tokens read since the last commit."""
        self._moved, self._read, self.ran = {}, {}, set()

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        self._kept = {key: x[torch.tensor(rows, device=x.device)] for key, x in self._kept.items()}

    def replace(self, rows: Sequence[int], other: "RecurrentStates") -> None:
        """Give these rows the committed states of the rows of `other`, in order."""
        for key, x in self._kept.items():
            x[torch.tensor(rows, device=x.device)] = other._kept[key]


def holders(model: Any, states: RecurrentStates, run: Callable[[], object]) -> list[Any]:
    """The modules of a model that use states when it is `run` over a cache with these states: the
    innermost ones, but none that is inside another. From then on they report the arguments of each
    call to the cache."""
    calls, asking = list[nn.Module](), dict[Any, None]()
    states.touched = lambda: asking.setdefault(calls[-1]) if calls else None
    with _watching(model, calls):
        run()
    states.touched = None
    inner = {id(part) for module in asking for part in module.modules() if part is not module}
    outer = [module for module in asking if id(module) not in inner]
    for module in outer:
        if not hasattr(module, "tells_states"):  # a copy has the hook of its original
            module.register_forward_pre_hook(note_arguments, with_kwargs=True)
            module.tells_states = True
            if bounds_steps(module):
                replace_forward(module, partial(_unbounded, module))
    return outer


def bring_in(model: Any, run: Callable[[int], object]) -> None:
    """Move states that modules keep as attributes into the cache. `run(B)` makes the model read B
    rows over a new cache. An attribute is such a state if the pass sets it to a tensor [B, …]. Its
    owner is the innermost module around it that is called with the cache."""
    before = {module: dict(vars(module)) for module in model.modules()}
    called = list[Any]()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(_states_in(args, kwargs)):
            called.append(module)

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in before]
    try:
        run(3)
    finally:
        for hook in hooks:
            hook.remove()
    held: dict[Any, list[tuple[nn.Module, str]]] = {}
    for module, attributes in before.items():
        for name, value in list(vars(module).items()):
            new = isinstance(value, Tensor) and value is not attributes.get(name)
            if name in attributes and new and value.dim() > 1 and len(value) == 3:
                setattr(module, name, attributes[name])
                around = [m for m in called if any(part is module for part in m.modules())]
                if around:
                    held.setdefault(around[-1], []).append((module, name))
    for n, (module, of_parts) in enumerate(held.items()):
        replace_forward(module, partial(_brought_in, module, n, of_parts))


def _brought_in(
    module: Any, number: int, held: Sequence[tuple[nn.Module, str]], *args: Any, **kwargs: Any
) -> Any:
    """Call a module with the states from the cache set as attributes of its parts, and store the
    updated states."""
    states = next(_states_in(args, kwargs), None)
    if states is None:
        return type(module).forward(module, *args, **kwargs)
    with ExitStack() as lent:
        for i, (part, name) in enumerate(held):
            state = states.current(("held", number, i))
            lent.enter_context(with_attributes(part, **{name: state}))
        out = type(module).forward(module, *args, **kwargs)
        for i, (part, name) in enumerate(held):
            states.move(("held", number, i), getattr(part, name))
    return out


def bounds_steps(module: Any) -> bool:
    """Whether a module's steps of one token differ from its pass over several tokens. Mamba 2
    bounds the time step (`time_step_limit`) only for several tokens."""
    least, most = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    return least > 0 or most < math.inf


def _unbounded(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Continue from a state with the numerics of one-token steps, as transformers' `generate` does.
    The beginning of a text is read with the bounds, as `generate` reads a prompt."""
    states = next(_states_in(args, kwargs), None)
    begun = states is not None and states.begun(module)
    limit = (0.0, math.inf) if begun else module.time_step_limit
    try:
        with with_attributes(module, time_step_limit=limit):
            return type(module).forward(module, *args, **kwargs)
    finally:
        if states is not None:
            states.ran.add(module)


def note_arguments(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook before a module's call, which reports the arguments to the states of its cache."""
    for states in _states_in(args, kwargs):
        states.heard(module, (args, kwargs))


@contextmanager
def _watching(model: nn.Module, calls: list[nn.Module]) -> Iterator[None]:
    """Keep the modules that are currently running in `calls`, the innermost last."""
    hooks = []

    def ended(*_: Any) -> None:
        calls.pop()

    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda m, _: calls.append(m)))
        hooks.append(module.register_forward_hook(ended))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_steps(module: Any) -> None:
    """Make a module with states read one token at a time, except at the beginning of a text: some
    modules (Mamba 1) forget their state before a pass over several tokens."""
    replace_forward(module, partial(_stepwise, module, own_forward(module)))


def _stepwise(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    states = next(_states_in(args, kwargs), None)
    first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == 3)
    T = first.shape[1]
    if states is None or not states.begun(module) or T == 1:
        out = own(*args, **kwargs)
    else:
        outs = []
        for t in range(T):
            one: Any = _changed((args, kwargs), T, partial(torch.narrow, dim=1, start=t, length=1))
            outs.append(own(*one[0], **one[1]))
        out = reduce(_joined, outs)
    if states is not None:
        states.ran.add(module)
    return out


def _states_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[RecurrentStates]:
    """The states of the caches among a call's arguments."""
    for x in (*args, *kwargs.values()):
        if isinstance(states := getattr(x, "states", None), RecurrentStates):
            yield states


def _changed(x: Any, tokens: int, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's arguments with `change` applied to each tensor [B, T, …] or [1, T, …] of `tokens`
    tokens."""
    if isinstance(x, Tensor):
        return change(x) if x.dim() >= 2 and x.shape[1] == tokens else x
    if isinstance(x, tuple | list):
        return type(x)(_changed(y, tokens, change) for y in x)
    if type(x) is dict:
        return {name: _changed(y, tokens, change) for name, y in x.items()}
    return x


def _joined(first: Any, then: Any) -> Any:
    """Arguments or results of a module over some tokens, concatenated with those over the next
    ones."""
    if isinstance(first, Tensor):
        alike = first.shape[:1] + first.shape[2:] == then.shape[:1] + then.shape[2:]
        return torch.cat([first, then], 1) if first.dim() >= 2 and alike else then
    if isinstance(first, tuple | list):
        return type(first)(map(_joined, first, then))
    if type(first) is dict:
        return {name: _joined(first[name], then[name]) for name in first}
    return then
