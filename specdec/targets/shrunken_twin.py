"""A shrunken twin of a target: the same classes and configuration, with few layers, narrow widths
and every length threshold reduced to a few tokens.

A target's own check reads some 14 tokens and compares the model with itself. It cannot detect
effects that begin later (a scale that grows with the position, a window, sparse blocks, other
rotary factors), nor parts that our own attention and fused fast path skip. A twin reaches all of
these within a few dozen tokens. Its logits are compared with those of a model that this project's
code has not changed.
"""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.compat import attention_of, random_model
from specdec.context import HiddenStateSpec
from specdec.errors import first_line
from specdec.runtime.cache import cache_argument
from specdec.runtime.recurrent_states import bounds_steps, in_steps
from specdec.targets.shrunken_config import LONGEST, WORDS, shrunken_config

MOST = 8_000_000  # weights; a model of more is no twin, since a rule has missed a key
# The largest distance of logits in float32. Models that are read correctly stay below 1e-5, even
# with very large weights; MPT, whose biases depend on slots, is off by 7e-3 to 8e-2.
SHARP = 1e-3


class NoTwin(Exception):
    """No twin can be made of this model; the message says why."""


@torch.no_grad()
def shrunken_model(kind: Any, config: Any, attention: str | None) -> Any:
    """A random model of class `kind` in float32 on the CPU, as transformers makes it. Its matrices
    have the size of new ones, and every part has an effect: norms and biases are random too. The
    states of all random generators are unchanged."""
    with _random_states_kept(), torch.device("cpu"):
        torch.manual_seed(0)
        model = random_model(kind, config, attention)
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if not weight.is_floating_point():
            continue
        if weight.dim() < 2:
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=draw)
    return model.float().eval().requires_grad_(False)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


# --- What is compared ---------------------------------------------------------------------------

# prompts of rows that are read together: on each side of every threshold, and just before some
PROMPTS = (4, 7, 13, LONGEST - 12)
TREE = (-1, 0, -1, 1)  # parent of each node; -1: the last committed token
PATHS = ((0, 1, 3), (2,))  # the nodes of the tree that follow one another
# for each speculation step after the prompt: how many tokens it reads, and what each row keeps of
# them
STEPS: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (4, ((0, 1, 3), (2,), (0, 1), (0, 1, 3))),
    (1, ((0,), (0,), (0,), (0,))),
    (4, ((0,), (0, 1, 3), (2,), (0, 1))),
    (1, ((0,), (0,), (0,), (0,))),
    (4, ((0, 1, 3), (0, 1), (0, 1, 3), (2,))),
)
# lengths in packed rows; padding follows those of the second row
DOCUMENTS = (12, 13, 11, 4), (20, 16)


class ShrunkenTwin:
    """A twin of a target, and transformers' logits for it. Raises NoTwin if none can be made."""

    def __init__(self, model: Any, attention: str | None) -> None:
        """`attention` is that of the target; `grouped` is replaced by transformers' own choice."""
        self.attention = attention if attention in ("eager", "sdpa", "grouped") else None
        try:
            self.config = shrunken_config(model.config)
            own = self.attention if self.attention in ("eager", "sdpa") else None
            with torch.device("meta"), _random_states_kept():
                empty = random_model(type(model), self.config)
            if sum(x.numel() for x in empty.parameters()) > MOST:
                raise NoTwin("its configuration has widths that are not known")
            lacking = _classes(model) - _classes(empty)
            if lacking:
                raise NoTwin(f"a small one would lack its {min(lacking)}")
            # the parts of a model that sees may have other attention than their whole
            if own == attention_of(empty.config):
                own = None
            self.plain = shrunken_model(type(model), self.config, own)
            self.ours = copy.deepcopy(self.plain)
            if (self.attention is not None and own is not None) or self.attention == "grouped":
                self.ours.set_attn_implementation(self.attention)
            self._steps = any(map(bounds_steps, self.plain.modules()))
            self._known: dict[Any, Tensor] = {}
        except (NoTwin, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # configurations and models may raise anything
            raise NoTwin(first_line(error)) from error

    @torch.no_grad()
    def logits(self, target: Any, ids: Sequence[int], prompt: int = 0) -> Tensor:
        """transformers' logits [T, V] of one text, or of its last tokens (see `Target.own_logits`
        of the `target`): from one pass or, if one-token steps are bounded differently (Mamba 2) and
        a `prompt` length is given, from steps."""
        text = torch.tensor([ids])
        positions = bool(target.position_inputs(text))
        key = tuple(ids), positions, prompt if self._steps else 0
        if key not in self._known:
            if self._steps and prompt:
                self._known[key] = self._stepped(text, prompt)
            else:
                self._known[key] = target.own_logits(text, self.plain)[0]
        return self._known[key]

    def _stepped(self, ids_1T: Tensor, prompt: int) -> Tensor:
        taken, kept, logits = cache_argument(self.plain), None, list[Tensor]()
        for part in (
            ids_1T[:, :prompt],
            *(ids_1T[:, t, None] for t in range(prompt, len(ids_1T[0]))),
        ):
            more: dict[str, Any] = {} if kept is None else {taken: kept}
            out = self.plain(input_ids=part, use_cache=True, **more)
            logits.append(out.logits[0])
            kept = next(out[key] for key in (taken, "cache", "past_key_values") if key in out)
        return torch.cat(logits)


def _classes(model: Any) -> set[str]:
    """The names of the classes of a model's parts that its own file defines."""
    own = type(model).__module__
    return {type(part).__name__ for part in model.modules() if type(part).__module__ == own}


def _words(seed: int, count: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS.start, WORDS.stop, (count,), generator=draw).tolist()


def _text(target: Any, seed: int, length: int) -> list[int]:
    """A text of so many tokens that the target can read."""
    text: list[int] = target.example(_words(seed, length))
    return text


@torch.no_grad()
def errors_of_texts(target: Any, twin: ShrunkenTwin) -> Iterator[float]:
    """The distances of logits from transformers' own for a long text, for a batch, and for
    documents that share rows. `target` is a target made of `twin.ours`."""
    for batch in ((0,), (1, 2)):
        rows = [_text(target, seed, LONGEST) for seed in batch]
        _, final = target.hidden_states(torch.tensor(rows), HiddenStateSpec())
        for ids, ours in zip(rows, target.logits(final), strict=True):
            theirs = twin.logits(target, ids)
            yield distance(ours[-len(theirs) :], theirs)
    texts = [[_text(target, 3 + n, n) for n in lengths] for lengths in DOCUMENTS]
    width = max(sum(map(len, row)) for row in texts)
    ids_BT = torch.full((len(texts), width), WORDS.start)
    position_BT, document_BT = torch.zeros_like(ids_BT), torch.full_like(ids_BT, -1)
    places = list[tuple[int, slice, list[int]]]()
    for b, row in enumerate(texts):
        begin = 0
        for n, text in enumerate(row):
            part = slice(begin, begin + len(text))
            ids_BT[b, part], document_BT[b, part] = torch.tensor(text), n
            position_BT[b, part] = torch.arange(len(text))
            places.append((b, part, text))
            begin = part.stop
        position_BT[b, begin:] = torch.arange(width - begin)
    _, final = target.hidden_states(
        ids_BT, HiddenStateSpec(), position_BT=position_BT, document_BT=document_BT
    )
    ours_BTV = target.logits(final)
    for b, part, text in places:
        theirs = twin.logits(target, text)
        yield distance(ours_BTV[b, part][-len(theirs) :], theirs)


@torch.no_grad()
def errors_over_cache(target: Any, twin: ShrunkenTwin) -> Iterator[float]:
    """The distances of logits over a cache from transformers' own: prompts of unequal length, trees
    whose paths are kept, single tokens, and rows that change places."""
    for lengths in _together(target, PROMPTS):
        cache = target.new_cache()
        texts = [_text(target, 10 + n, n) for n in lengths]
        prompts = list(map(len, texts))
        padded = [text + [WORDS.start] * (max(prompts) - len(text)) for text in texts]
        _, final = target.hidden_states(torch.tensor(padded), HiddenStateSpec(), cache=cache)
        for text, ours in zip(texts, target.logits(final), strict=True):
            theirs = twin.logits(target, text, len(text))
            yield distance(ours[: len(text)][-len(theirs) :], theirs)
        cache.commit(prompts)
        for seed, (tokens, kept) in enumerate(STEPS):
            room = target.room(min(map(len, texts))) - max(map(len, texts))
            if tokens > room:
                break
            if seed == 2:
                cache.select(range(len(texts))[::-1])
                texts, prompts = texts[::-1], prompts[::-1]
            ids = [_words(100 * seed + b, tokens) for b in range(len(texts))]
            trees = target.reads_trees and tokens > 1
            paths = PATHS if trees else (tuple(range(tokens)),)
            parents = torch.tensor([TREE] * len(texts)) if trees else None
            _, final = target.hidden_states(
                torch.tensor(ids), HiddenStateSpec(), cache=cache, parents_BT=parents
            )
            for b, ours in enumerate(target.logits(final)):
                for path in paths:
                    text = texts[b] + [ids[b][i] for i in path]
                    theirs = twin.logits(target, text, prompts[b])
                    yield distance(ours[list(path)], theirs[-len(path) :])
            some = [kept[b] if trees else tuple(range(len(kept[b]))) for b in range(len(texts))]
            padded_path = [[*path, *[-1] * (tokens - len(path))] for path in some]
            cache.commit(list(map(len, some)), torch.tensor(padded_path) if trees else None)
            texts = [texts[b] + [ids[b][i] for i in some[b]] for b in range(len(texts))]


def _together(target: Any, prompts: Sequence[int]) -> list[list[int]]:
    """The prompts that may share a batch: with LongRoPE, those on one side of its length limit."""
    by_room: dict[int, list[int]] = {}
    for n in prompts:
        by_room.setdefault(target.room(n), []).append(n)
    return list(by_room.values())


class TwinChecks:
    """The results of checks on the target's twin, computed on demand and once for all targets of
    one kind in this process. Raises NoTwin if no twin can be made."""

    _known: dict[Any, dict[Any, bool | str]] = {}

    def __init__(self, target: Any) -> None:
        self._target, self._attention = target, attention_of(target.model.config)
        try:
            small = json.dumps(shrunken_config(target.model.config).to_dict(), default=str)
        except Exception as error:  # a configuration may raise anything
            raise NoTwin(first_line(error)) from error
        model = target.model
        key = type(model), small, self._attention, *sorted(_classes(model))
        self._verdicts = self._known.setdefault(key, {})
        self._made: tuple[ShrunkenTwin, Any] | None = None

    @classmethod
    def forget(cls) -> None:
        """Discard all results, including those for kinds of targets checked before."""
        cls._known.clear()

    def texts_right(self) -> bool:
        """Whether long texts, batches and packed documents give transformers' logits."""

        def errors(ours: Any, twin: ShrunkenTwin) -> Iterator[float]:
            ours.texts_apart = self._target.texts_apart
            return errors_of_texts(ours, twin)

        return self._once(("texts", self._target.texts_apart), errors)

    def lean_right(self) -> bool:
        """Whether passes over a cache give transformers' logits in the fused fast path, which must
        exist."""
        if self._target.lean is None or not self.texts_right():
            return False

        def errors(ours: Any, twin: ShrunkenTwin) -> Iterator[float]:
            (ours.reading, ours.counted), ours.lean_allowed = self._way, True
            return iter([math.inf]) if ours.lean is None else errors_over_cache(ours, twin)

        return self._once("lean", errors)

    def cache_right(self, steps: bool = False) -> bool:
        """Whether passes over a cache give transformers' logits in the target's current reading.
        `steps`: modules with states read one token at a time from now on (`in_steps`)."""

        def errors(ours: Any, twin: ShrunkenTwin) -> Iterator[float]:
            (ours.reading, ours.counted), ours.lean_allowed = self._way, False
            ours.texts_apart = self._target.texts_apart
            for module in ours.holders if steps else ():
                in_steps(module)
            return errors_over_cache(ours, twin)

        return self._once(("cache", self._way, self._target.texts_apart, steps), errors)

    @property
    def _way(self) -> tuple[Any, bool]:
        """The target's current reading, and whether modules with states read one token at a
        time."""
        return self._target.reading, self._target.counted

    def _once(self, what: Any, errors: Callable[[Any, ShrunkenTwin], Iterator[float]]) -> bool:
        if isinstance(reason := self._verdicts.get("none"), str):
            raise NoTwin(reason)
        if what not in self._verdicts:
            try:
                ours, twin = self._twin()
                self._verdicts[what] = all(error <= SHARP for error in errors(ours, twin))
            except NoTwin as error:
                self._verdicts["none"] = str(error)
                raise
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception:  # a model may refuse our masks or our cache in any way
                self._verdicts[what] = False
        return bool(self._verdicts[what])

    def _twin(self) -> tuple[Any, ShrunkenTwin]:
        """The twin as a target, and transformers' side of it."""
        if self._made is None:
            twin = ShrunkenTwin(self._target.model, self._attention)
            try:
                ours = self._target.as_twin(twin.ours)
                text = _text(ours, 0, LONGEST // 2)
                if not twin.logits(ours, text).isfinite().all():
                    raise NoTwin("its logits are not finite")
                ours.settle_head()
                self._made = twin, ours
            except (NoTwin, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                raise NoTwin(first_line(error)) from error
        return self._made[1], self._made[0]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The distance of logits [..., V], relative to their spread; infinite if shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = (x.double() - x.double().mean(-1, keepdim=True) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-9))
