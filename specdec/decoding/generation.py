"""The growing responses of a batch: where each response ends, and a record of its speculation
steps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.context import Context, HiddenStateSpec, Proposal
from specdec.decoding.rows import Rows
from specdec.decoding.stream import Stops, Stream
from specdec.decoding.verification_methods import Verdict
from specdec.runtime.device import Stopwatch

PHASES = ("draft", "verify", "judge", "commit")  # phases of a speculation step


@dataclass
class SpeculationStep:
    """One speculation step of one row: its start, its draft, and the tokens kept."""

    anchor: int  # position in the text of the last committed token
    drafted: int  # tokens on the longest drafted path
    accepted: int
    nodes: int  # all drafted tokens: more than `drafted` in a tree
    tested: int  # `accepted`, plus one if the draft continued after the accepted tokens
    path: tuple[int, ...] = ()  # the nodes that were kept
    tokens: tuple[int, ...] = ()  # the drafted tokens, if they are a chain
    rejected: tuple[int, ...] = ()  # drafted after the accepted tokens; of a tree, a first branch

    @property
    def bonus(self) -> bool:
        """Whether the target's own token extended a fully accepted draft; otherwise it corrected a
        rejection."""
        return self.tested == self.accepted


# called for each prompt and speculation step: the prompt's number, the tokens its response gained,
# the step; for the first token, from prefill, the step is None
OnTokens = Callable[[int, list[int], SpeculationStep | None], None]


@dataclass
class Generation:
    """The result of decoding one prompt, and its cost."""

    prompt: list[int]
    ids: list[int]  # the new tokens, cut at eos, a stop string or max_new_tokens
    overrun: list[int]  # tokens that the last speculation step committed beyond that cut
    steps: list[SpeculationStep]
    prefill_seconds: float
    seconds: float  # time of the speculation steps until this row ended, without prefill
    spent: dict[str, float] = field(default_factory=dict)  # seconds by phase, see `PHASES`

    @property
    def emitted(self) -> int:
        """The number of response tokens that speculation steps emitted: all but the first, which
        prefill emits, and without those after the end of the response. τ is emitted / steps,
        pooled."""
        return max(0, len(self.ids) - 1)


# a text, and what its tokens are: "accepted" drafts, "rejected" ones that are not in the response,
# or the target's own, which "corrected" a draft, followed it as a "bonus", or came without
# ("plain")
Piece = tuple[str, str]


def pieces(stream: Stream, ids: Sequence[int], last: SpeculationStep | None) -> list[Piece]:
    """The text that a speculation step adds to a response, as `OnTokens` receives it, in reading
    order: a rejected draft comes right before its correction."""
    if last is None:
        parts = [("plain", stream.add(ids))]
    else:
        parts = [("accepted", stream.add(ids[: last.accepted]))]
        if own := ids[last.accepted :]:  # the response may have ended within the draft
            parts.append(("rejected", stream.preview(last.rejected)))
            parts.append(("bonus" if last.bonus else "corrected", stream.add(own)))
    return [(kind, text) for kind, text in parts if text]


def pieces_of(tokenizer: Any, response: Generation) -> list[Piece]:
    """All `pieces` of a response."""
    stream, parts, ids = Stream(tokenizer), list[Piece](), response.ids
    for last in (None, *response.steps):
        count = 1 if last is None else last.accepted + 1
        parts += pieces(stream, ids[:count], last)
        ids = ids[count:]
    rest = stream.rest()
    return [*parts, ("plain", rest)] if rest else parts


class Clock:
    """Seconds spent in prefill and in each phase of the speculation steps, on the device's
    timeline."""

    def __init__(self, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self._seconds = dict.fromkeys(("prefill", *PHASES), 0.0)
        self._ended: list[tuple[str, Any, Any]] = []  # phases that are not counted yet
        self.began, self._last = time.perf_counter(), self._watch.mark()

    def restart(self) -> None:
        self._last = self._watch.mark()

    def end(self, phase: str) -> None:
        """Add the time since the last call to this phase."""
        last, self._last = self._last, self._watch.mark()
        self._ended.append((phase, last, self._last))

    @property
    def spent(self) -> dict[str, float]:
        """The seconds by phase. Waits until the device has finished the last one."""
        for phase, start, end in self._ended:
            self._seconds[phase] += self._watch.seconds(start, end)
        self._ended.clear()
        return dict(self._seconds)


@dataclass(frozen=True)
class Record:
    """The choice of the target's hidden states to keep from vanilla responses. When a response
    ends, `keep(text, ctx)` receives its prompt and response and the hidden states of all but the
    last token."""

    needs: HiddenStateSpec  # and the final hidden state, always
    keep: Callable[[list[int], Context], None]


@dataclass
class GrowingResponses:
    """The responses to all prompts, the set of finished ones, and the prompts still in the
    batch."""

    prompts: Sequence[Sequence[int]]
    openings: Sequence[Sequence[int]]  # the parts of the prompts in which a stop string may begin
    limit: int
    eos: tuple[int, ...]
    stops: Stops | None
    on_tokens: OnTokens | None
    record: Record | None
    device: torch.device
    at_once: int | None = None  # rows of the batch; None: all prompts
    goes_on: Callable[[], bool] | None = None  # whether prompts that wait still get a row

    def __post_init__(self) -> None:
        numbers = list(range(len(self.prompts)))
        size = self.at_once or len(numbers)
        self.in_batch = numbers[:size]  # the prompt of each row of the batch
        # the prompts that get a row when another's response has ended
        self._waiting = numbers[size:]
        self._count = len(numbers)  # number of continued prompts
        self.clock = Clock(self.device)
        self._steps: list[list[SpeculationStep]] = [[] for _ in self.prompts]
        self._done: dict[int, Generation] = {}

    @property
    def all_ended(self) -> bool:
        return not self._waiting and len(self._done) == self._count

    def add(
        self,
        rows: Rows,
        new: list[list[int]],
        steps: list[SpeculationStep] | None = None,
        only: Sequence[int] | None = None,
    ) -> None:
        """Add the tokens that a speculation step committed to each row of the batch, or to the rows
        `only`; `steps` is None for prefill."""
        for n, b in enumerate(range(len(self.in_batch)) if only is None else only):
            i = self.in_batch[b]
            if i in self._done:  # the response has ended, but its row is still in the batch
                continue
            ids = rows.texts[b][len(self.prompts[i]) :]
            before = len(ids) - len(new[n])
            if steps is not None:
                self._steps[i].append(steps[n])
            end = self._end(self.openings[i], ids, before)
            if self.on_tokens:
                self.on_tokens(i, ids[before:end], steps[n] if steps else None)
            if end is None:
                continue
            spent, passed = self.clock.spent, time.perf_counter() - self.clock.began
            prefill = spent.pop("prefill")
            self._done[i] = Generation(
                prompt=list(self.prompts[i]),
                ids=ids[:end],
                overrun=ids[end:],
                steps=self._steps[i],
                prefill_seconds=prefill,
                seconds=passed - prefill,
                spent=spent,
            )
            if self.record is not None:
                self.record.keep(rows.texts[b], rows.known(b))

    def remaining(self, patient: bool) -> list[int] | None:
        """The rows that remain if finished rows are removed now, else None. Removing rows copies
        the caches, so a `patient` batch waits until more than a tenth of its rows are finished."""
        rows = [b for b, i in enumerate(self.in_batch) if i not in self._done]
        if self._waits(len(rows), patient):
            return None
        self.in_batch = [self.in_batch[b] for b in rows]
        return rows

    def refilled(self) -> list[int]:
        """Rows whose responses are finished, each of which is reassigned to a waiting prompt. None
        until more than a tenth of the rows are finished, since prompts are read faster together."""
        if not self._waiting:
            return []
        ended = [b for b, i in enumerate(self.in_batch) if i in self._done]
        if self._waits(len(self.in_batch) - len(ended), patient=True):
            return []
        if self.goes_on is not None and not self.goes_on():
            self._count -= len(self._waiting)
            self._waiting = []
        rows = ended[: len(self._waiting)]
        for b in rows:
            self.in_batch[b] = self._waiting.pop(0)
        return rows

    def _waits(self, going: int, patient: bool) -> bool:
        """Whether the batch keeps its rows while so many of them are unfinished."""
        return going == len(self.in_batch) or (patient and going >= 0.9 * len(self.in_batch))

    def generations(self) -> list[Generation]:
        """One generation for each prompt that got a row, in order, after all have finished."""
        return [self._done[i] for i in range(self._count)]

    def _end(self, opening: Sequence[int], ids: list[int], before: int) -> int | None:
        """The length at which the response ends, if that is beyond its first `before` tokens; else
        None."""
        for n in range(before + 1, min(len(ids), self.limit) + 1):
            if ids[n - 1] in self.eos or (self.stops and self.stops.ends(opening, ids[:n])):
                return n
        return self.limit if len(ids) >= self.limit else None


def outcome(
    proposal: Proposal, verdict: Verdict, texts: list[list[int]]
) -> tuple[list[SpeculationStep], list[list[int]]]:
    """The speculation step of each row, and its new tokens: the accepted ones and the target's
    own."""
    paths, following = verdict.path_BK.tolist(), verdict.next_B.tolist()
    drafted = zip(proposal.tokens_BG.tolist(), proposal.above_BG.tolist(), strict=True)
    steps, new = [], []
    for b, (ids, above) in enumerate(drafted):
        path = tuple(i for i in paths[b] if i >= 0)
        depths, after = [0], dict[int, int]()  # by place; the first that was drafted after a place
        for i, (token, place) in enumerate(zip(ids, above, strict=True)):
            depths.append(1 + depths[place] if token >= 0 else 0)
            if token >= 0:
                after.setdefault(place, 1 + i)
        rejected, place = list[int](), 1 + path[-1] if path else 0
        while place in after:
            place = after[place]
            rejected.append(ids[place - 1])
        nodes = sum(token >= 0 for token in ids)
        tested = len(path) + bool(rejected)
        chain = () if proposal.parents_BG is not None else tuple(ids[:nodes])
        counts = max(depths), len(path), nodes, tested
        steps.append(SpeculationStep(len(texts[b]) - 1, *counts, path, chain, tuple(rejected)))
        new.append([*(ids[i] for i in path), following[b]])
    return steps, new
