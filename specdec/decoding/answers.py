"""The answers of a batch while they grow: where each one ends, and what its rounds did."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.context import Context, Needs, Proposal
from specdec.decoding.rules import Verdict
from specdec.decoding.stream import Stops


@dataclass
class Round:
    """One pass of the target over one row: where it started, what was drafted, what was kept."""

    anchor: int  # position in the text of the last committed token
    drafted: int  # tokens on the longest drafted path
    accepted: int
    nodes: int  # tokens drafted in all: more than `drafted` in a tree
    tested: int  # `accepted`, and one more where the draft went on after those
    path: tuple[int, ...] = ()  # the nodes that were kept

    @property
    def bonus(self) -> bool:
        """Whether the target's own token of the round corrected none: no draft was there."""
        return self.tested == self.accepted


# for each prompt and round: the prompt's number, the tokens that its answer gained, the round
OnTokens = Callable[[int, list[int], Round | None], None]


@dataclass
class Generation:
    """What one prompt's decoding produced, and what it cost."""

    prompt: list[int]
    ids: list[int]  # the new tokens, cut at eos, a stop string or max_new_tokens
    overrun: list[int]  # what the last round committed beyond that cut
    rounds: list[Round]
    prefill_seconds: float
    seconds: float  # of the rounds until this row ended, prefill apart
    spent: dict[str, float] = field(default_factory=dict)  # by phase of a round, see `Clock`

    @property
    def emitted(self) -> int:
        """Tokens that the rounds committed, before any cut: τ is emitted / rounds, pooled."""
        return sum(r.accepted + 1 for r in self.rounds)


class Clock:
    """Seconds since decoding began, and those spent in each phase of the rounds so far."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(("draft", "verify", "judge", "commit"), 0.0)
        self.prefill = 0.0
        self._began = self._last = time.perf_counter()

    def prefilled(self) -> None:
        self.prefill = time.perf_counter() - self._began

    def rounds(self) -> float:
        """Seconds since prefill."""
        return time.perf_counter() - self._began - self.prefill

    def start(self) -> None:
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """What passed since the last call belongs to this phase."""
        now = time.perf_counter()
        self.spent[phase] += now - self._last
        self._last = now


@dataclass(frozen=True)
class Record:
    """What is to be kept of the target's features of plain answers: once an answer has ended,
    `keep(text, ctx)` is given its prompt and answer, and the features of all but the last token.
    """

    needs: Needs  # and the final hidden state, always
    keep: Callable[[list[int], Context], None]


class Answers:
    """The answers to all prompts, those that have ended, and the prompts still in the batch.

    `openings` are the parts of the prompts in which a stop string may begin.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        openings: Sequence[Sequence[int]],
        eos: tuple[int, ...],
        limit: int,
        stops: Stops | None,
        on_tokens: OnTokens | None,
    ) -> None:
        self.prompts, self.openings = prompts, openings
        self.eos, self.limit, self.stops, self.on_tokens = eos, limit, stops, on_tokens
        self.in_batch = list(range(len(prompts)))  # the prompt of each row of the batch
        self.clock = Clock()
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._rounds: list[list[Round]] = [[] for _ in prompts]
        self._done: dict[int, Generation] = {}

    @property
    def all_ended(self) -> bool:
        return len(self._done) == len(self.prompts)

    def add(self, new: list[list[int]], rounds: list[Round] | None) -> list[int]:
        """What a round committed to each row of the batch; None: prefill did. Returns the rows
        whose answers have ended with it."""
        ended = []
        for b, prompt in enumerate(self.in_batch):
            if prompt in self._done:  # it has ended, but its row is still in the batch
                continue
            ids, last = self._ids[prompt], None
            if rounds is not None:
                last = rounds[b]
                self._rounds[prompt].append(last)
            before = len(ids)
            ids += new[b]
            end = self._end(prompt, before)
            if self.on_tokens:
                self.on_tokens(prompt, ids[before:end], last)
            if end is not None:
                ended.append(b)
                self._done[prompt] = Generation(
                    prompt=list(self.prompts[prompt]),
                    ids=ids[:end],
                    overrun=ids[end:],
                    rounds=self._rounds[prompt],
                    prefill_seconds=self.clock.prefill,
                    seconds=self.clock.rounds(),
                    spent=dict(self.clock.spent),
                )
        return ended

    def remaining(self, patient: bool) -> list[int] | None:
        """The rows of the batch that go on, where those that have ended leave it now.

        Leaving copies the caches: a `patient` batch waits until a tenth of its rows have ended.
        """
        rows = [b for b, prompt in enumerate(self.in_batch) if prompt not in self._done]
        if len(rows) == len(self.in_batch) or (patient and len(rows) >= 0.9 * len(self.in_batch)):
            return None
        self.in_batch = [self.in_batch[b] for b in rows]
        return rows

    def generations(self) -> list[Generation]:
        """One for each prompt, in their order, once all have ended."""
        return [self._done[prompt] for prompt in range(len(self.prompts))]

    def _end(self, prompt: int, before: int) -> int | None:
        """How many tokens the answer keeps where it ends behind its first `before`; None: it
        goes on."""
        ids = self._ids[prompt]
        for i in range(before, min(len(ids), self.limit)):
            if ids[i] in self.eos:
                return i + 1
            if self.stops is not None and self.stops.ends(self.openings[prompt], ids[: i + 1]):
                return i + 1
        return self.limit if len(ids) >= self.limit else None


def outcome(
    proposal: Proposal, verdict: Verdict, texts: list[list[int]]
) -> tuple[list[Round], list[list[int]]]:
    """What became of each row's draft, and the tokens that the row gains: the drafted ones that
    were kept, and the target's own."""
    paths, following = verdict.path_BK.tolist(), verdict.next_B.tolist()
    parents = None if proposal.parents_BN is None else proposal.parents_BN.tolist()
    rounds, new = [], []
    for b, ids in enumerate(proposal.tokens_BN.tolist()):
        nodes = sum(t >= 0 for t in ids)
        path = tuple(i for i in paths[b] if i >= 0)
        depth, went_on = nodes, nodes > len(path)
        if parents is not None:
            last, depths = path[-1] if path else -1, {-1: 0}
            went_on = False
            for i, (token, parent) in enumerate(zip(ids, parents[b], strict=True)):
                depths[i] = 1 + depths[parent] if token >= 0 else 0
                went_on = went_on or (token >= 0 and parent == last)
            depth = max(depths.values())
        tested = len(path) + went_on
        rounds.append(Round(len(texts[b]) - 1, depth, len(path), nodes, tested, path))
        new.append([*(ids[i] for i in path), following[b]])
    return rounds, new
