"""Measures a draft in a serving engine: acceptance by position, τ and tokens/s, compared with
serving without a draft.

All figures are the engine's own. Acceptance comes from figures in each response or, without them,
from the engine's counters of speculation, read before and after each response, so that nobody else
may use the engine meanwhile. Prompts are answered one at a time, in turn with and without drafts. τ
counts the tokens of the responses, without those that a speculation step accepts beyond their end.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.progress import Progress

from specdec.engines.client import RequestRejected, Server, ServerUnavailable
from specdec.engines.engine_interface import CompletionRequest, SpeculationCounts
from specdec.engines.known_engines import model_of
from specdec.errors import UserError, require
from specdec.files import write_json
from specdec.sampling.sampler import Sampler
from specdec.theory.intervals import (
    Interval,
    product_interval,
    ratio_interval,
    share_interval,
    summed_by,
)

T = TypeVar("T")
FILE = "served.json"  # in the folder of an evaluation
SETTLING = 5.0  # seconds within which an engine counts what it has answered


@dataclass(frozen=True)
class TimedResponse:
    """A response, its seconds with prefill, the number of its speculation steps, and how many of
    these accepted each position, also beyond the end of the response. `accepted` is empty if the
    engine does not count by position."""

    ids: list[int]
    seconds: float
    speculation_steps: int = 0
    accepted: tuple[int, ...] = ()
    decoding: float | None = None  # seconds after the first token, if the engine says so
    accepted_in_all: int = 0  # an engine may say no more than that


@dataclass(frozen=True)
class ServedAt:
    """The figures at a temperature; intervals are over conversations, of one prompt or several. The
    last three need an engine without a draft for comparison."""

    temperature: float
    speculation_steps: int
    tau: Interval  # tokens of the responses per pass of the target
    accepted: list[Interval]  # the share of steps that accepted each position and all before it
    tokens_per_second: Interval
    plain_tokens_per_second: Interval | None = None
    speedup: Interval | None = None
    identical: int | None = None  # responses that are the same with and without drafts


@dataclass(frozen=True)
class Served:
    """The figures and their origin."""

    draft: str
    engine: str
    plain: str | None
    prompts: int
    origin: str  # a description of the prompts
    max_new_tokens: int
    asked: list[ServedAt]
    conversations: int = 0  # number of conversations; 0: each prompt is its own

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))


class ServedTarget(Protocol):
    """What is known of the target that a server serves."""

    @property
    def name(self) -> str: ...

    @property
    def eos(self) -> Sequence[int]: ...


class MeasuredServer:
    """A server that answers one prompt at a time. Raises UserError as `model_of` does."""

    def __init__(self, server: Server, target: ServedTarget, speculates: bool) -> None:
        self.server, self.target, self.speculates = server, target, speculates
        self.model = model_of(server, [target.name, Path(target.name).name])
        self.engine = self.model.engine
        if speculates:
            _measured(lambda: self.engine.require_drafting(server))

    @property
    def title(self) -> str:
        return self.engine.title_at(self.server)

    def reply(
        self,
        prompt: Sequence[int],
        limit: int,
        sampler: Sampler,
        seed: int,
        fresh: bool = False,
    ) -> TimedResponse:
        """The engine's response. `fresh` is as in `CompletionRequest`. Raises UserError if it has
        no ids or no figures of speculation, or if the engine's counters do not fit this
        response."""
        request = CompletionRequest(prompt, limit, sampler, seed, self.target.eos, fresh=fresh)
        before = self._counters() if self.speculates else None
        started = time.perf_counter()
        reply = asked_of(self, request)
        seconds = time.perf_counter() - started
        try:
            response = self.engine.completion(reply)
            ids, read = response.ids, response.prompt
        except ServerUnavailable:
            ids = read = None
        require(
            isinstance(ids, list) and bool(ids) and read in (None, list(prompt)),
            f"{self.server.url} does not return the ids of the prompt and of its response: this "
            "needs an engine that obeys return_token_ids (docs/engines.md)",
        )
        decoding = self.engine.decoding_seconds_of(reply)
        if not self.speculates:
            return TimedResponse(ids, seconds, decoding=decoding)
        counted = self.engine.speculation_counts_of(reply, self.server)
        if counted is None:
            counted = self._counted(before, len(ids))
        else:
            if before is not None and not counted.by_position:
                counted = self._with_positions(before, counted)
            committed = 1 + counted.steps + counted.accepted
            # the steps while a long prompt is read emit nothing, so there may be more than these
            require(
                committed >= len(ids),
                f"{self.server.url} says that its steps made {committed} tokens for a response of "
                f"{len(ids)}: its figures do not fit its responses",
            )
        return TimedResponse(
            ids, seconds, counted.steps, counted.by_position, decoding, counted.accepted
        )

    def _counters(self) -> SpeculationCounts | None:
        return _measured(lambda: self.engine.speculation_so_far(self.server))

    def _with_positions(
        self, before: SpeculationCounts, own: SpeculationCounts
    ) -> SpeculationCounts:
        """The figures that a response gives for itself, with what the counters add: the positions,
        and steps whose tokens lie beyond its end. Raises UserError if they count another's too."""
        now = self._counters()
        counted = own if now is None else now.since(before)
        require(
            counted.accepted == own.accepted,
            f"{self.server.url} counted {counted.accepted} accepted tokens for a response with "
            f"{own.accepted}: somebody else uses this engine, and its counters count them too",
        )
        return replace(counted, steps=max(counted.steps, own.steps))

    def _counted(self, before: SpeculationCounts | None, length: int) -> SpeculationCounts:
        """The counts for a response of `length` tokens, once they are complete: one token from
        prefill and, in each step, the accepted ones and one more."""
        waited = time.monotonic()
        while True:
            now = self._counters()
            if before is None or now is None:
                raise UserError(
                    f"{self.server.url} gives no figures of speculation: nothing was measured"
                )
            counted = now.since(before)
            tokens = 1 + counted.steps + counted.accepted
            if tokens >= length:
                break
            require(
                time.monotonic() - waited < SETTLING,
                f"{self.server.url} counted {tokens} tokens for a response of {length}: its "
                "counters do not fit its responses",
            )
            time.sleep(0.02)
        # counts of the last step, and of one that was already running
        beyond = 1 + len(now.by_position)
        require(
            tokens <= length + 2 * beyond,
            f"{self.server.url} counted {tokens} tokens for a response of {length}: somebody else "
            "uses this engine, and its counters count them too",
        )
        return counted


def asked_of(server: MeasuredServer, request: CompletionRequest, **more: Any) -> Any:
    """The server's reply to a request, with more fields of the engine's. Raises UserError if it
    fails."""
    url = server.engine.completion_url(server.server)
    body = {"model": server.model.name, **server.engine.completion_body(request), **more}
    return _measured(lambda: server.server.ask("POST", url, body))


def _measured(ask: Callable[[], T]) -> T:
    """The result of a request to an engine. Raises UserError if it fails."""
    try:
        return ask()
    except (RequestRejected, ServerUnavailable) as error:
        raise UserError(f"the engine failed ({error}): nothing was measured") from error


def greedy_replies(
    engine: MeasuredServer, prompts: Sequence[Sequence[int]], limit: int, tokenizer: Any
) -> list[str]:
    """The engine's greedy responses of up to `limit` tokens as texts, for later turns of a
    conversation. Raises UserError as `MeasuredServer.reply` does."""
    replies = [engine.reply(prompt, limit, Sampler(0.0), 0) for prompt in prompts]
    return [str(tokenizer.decode(reply.ids, skip_special_tokens=True)) for reply in replies]


def measure_served(
    engine: MeasuredServer,
    plain: MeasuredServer | None,
    prompts: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    limit: int,
    seed: int,
    progress: Progress,
    groups: Sequence[int] = (),
) -> list[ServedAt]:
    """Answer every prompt with each engine at each temperature, in an alternating order. Both warm
    up on the first prompt. `groups` are the prompts' conversations (default: each is its own).
    Raises UserError as `MeasuredServer.reply` does."""
    engines = [engine] if plain is None else [engine, plain]
    task = progress.add_task("served", total=len(samplers) * len(prompts))
    asked = []
    for sampler in samplers:
        for one in engines:
            one.reply(prompts[0], limit, sampler, seed)
        replies: dict[int, list[TimedResponse]] = {id(one): [] for one in engines}
        for n, prompt in enumerate(prompts):
            for one in engines if n % 2 else engines[::-1]:
                replies[id(one)].append(one.reply(prompt, limit, sampler, seed + n))
            progress.advance(task)
        asked.append(
            figures(
                sampler.temperature,
                replies[id(engine)],
                None if plain is None else replies[id(plain)],
                groups,
            )
        )
    progress.remove_task(task)
    return asked


def figures(
    temperature: float,
    drafted: Sequence[TimedResponse],
    plain: Sequence[TimedResponse] | None,
    groups: Sequence[int] = (),
) -> ServedAt:
    """The figures of responses with drafts, and of vanilla ones to the same prompts. `groups` are
    the prompts' conversations (default: each is its own), each of which is one observation."""
    groups = groups or range(len(drafted))

    def summed(values: Sequence[float]) -> list[float]:
        return summed_by(groups, values)

    def speed(replies: Sequence[TimedResponse]) -> tuple[list[float], list[float]]:
        return summed([len(r.ids) for r in replies]), summed([r.seconds for r in replies])

    speculation_steps = summed([reply.speculation_steps for reply in drafted])
    by_position = [*zip_longest(*(reply.accepted for reply in drafted), fillvalue=0)]
    tokens = summed([max(0, len(reply.ids) - 1) for reply in drafted])  # prefill emits the first
    at = ServedAt(
        temperature=temperature,
        speculation_steps=int(sum(speculation_steps)),
        tau=ratio_interval(tokens, speculation_steps),
        accepted=[share_interval(summed(counts), speculation_steps) for counts in by_position],
        tokens_per_second=ratio_interval(*speed(drafted)),
    )
    if plain is None:
        return at
    plain_lengths, plain_seconds = speed(plain)
    same = sum(a.ids == b.ids for a, b in zip(drafted, plain, strict=True))
    beside = {
        "plain_tokens_per_second": ratio_interval(plain_lengths, plain_seconds),
        "identical": same,
        # the one speed over the other: each prompt has both
        "speedup": product_interval([speed(drafted), (plain_seconds, plain_lengths)]),
    }
    return ServedAt(**{**vars(at), **beside})
