"""A draft in a serving engine: acceptance by position, τ and tokens/s, beside plain serving.

All figures are the engine's own. Acceptance comes from the figures that vLLM 0.32 gives with each
response (`metrics.speculative_decoding`, with --per-request-spec-decode-metrics) or, without them,
from its counters of speculation, read before and after each response, so that nobody else may use
the engine meanwhile. Prompts are answered one at a time, in turn with and without drafts. τ counts
the tokens of the responses, without those that a round accepts beyond their end.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.progress import Progress

from specdec.engines.client import (
    COMPLETIONS,
    Model,
    RequestRejected,
    Server,
    ServerUnavailable,
    model_of,
    sampling,
)
from specdec.errors import UserError, require
from specdec.files import write_json
from specdec.sampling.sampler import Sampler
from specdec.targets.parts import Parts
from specdec.theory.intervals import (
    Interval,
    product_interval,
    ratio_interval,
    share_interval,
)

FILE = "served.json"  # in the folder of an evaluation
COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{(.*)\})? ([\d.e+]+)$", re.M)
POSITION = re.compile(r'position="(\d+)"')
SETTLING = 5.0  # seconds within which an engine counts what it has answered


@dataclass(frozen=True)
class TimedResponse:
    """An answer, the seconds that it took with its prefill, the rounds that were drafted for it,
    and how many of these accepted each position, beyond the end of the answer too."""

    ids: list[int]
    seconds: float
    rounds: int = 0
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServedAt:
    """The figures at a temperature; intervals are over prompts. The last three need an engine that
    serves plainly."""

    temperature: float
    rounds: int
    tau: Interval  # tokens of the responses per pass of the target
    accepted: list[Interval]  # the share of rounds that accepted each position and all before it
    tokens_per_second: Interval
    plain_tokens_per_second: Interval | None = None
    speedup: Interval | None = None
    identical: int | None = None  # answers that are the same with and without drafts


@dataclass(frozen=True)
class Served:
    """What was measured, and where."""

    draft: str
    engine: str
    plain: str | None
    prompts: int
    origin: str  # of the prompts
    max_new_tokens: int
    asked: list[ServedAt]

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))


class MeasuredServer:
    """A server that answers one prompt at a time. Raises UserError as `model_of` does."""

    def __init__(self, server: Server, target: Parts, speculates: bool) -> None:
        self.server, self.target, self.speculates = server, target, speculates
        self.model: Model = model_of(server, [target.name, Path(target.name).name])
        if speculates:
            require(
                bool(self.counts()),
                f"{server.url} has no counters of speculation (vllm:spec_decode in its /metrics): "
                "serve the target with the draft, as scripts/serve --draft does",
            )

    @property
    def title(self) -> str:
        try:
            version = f"vLLM {self.server.get(f'{self.server.root}/version')['version']}"
        except (RequestRejected, ServerUnavailable, TypeError, KeyError):
            version = "the engine"
        return f"{version} at {self.server.url}"

    def counts(self) -> Counter[str]:
        """vLLM's counters of speculation since it started: drafts, accepted_tokens, and by position
        accepted_tokens_per_pos/0 and so on."""
        counts = Counter[str]()
        for name, labels, value in COUNTER.findall(
            str(self._asked("GET", f"{self.server.root}/metrics"))
        ):
            position = POSITION.search(labels)
            counts[f"{name}/{position[1]}" if position else name] += int(float(value))
        return counts

    def reply(
        self, prompt: Sequence[int], limit: int, sampler: Sampler, seed: int
    ) -> TimedResponse:
        """The engine's answer. Raises UserError if it gives no ids, or if its counters count more
        or less than this answer."""
        body = {
            "model": self.model.name,
            "prompt": list(prompt),
            "max_tokens": limit,
            "stop_token_ids": list(self.target.eos),
            "return_token_ids": True,
            **sampling(sampler, seed),
        }
        before = self.counts() if self.speculates else Counter[str]()
        started = time.perf_counter()
        reply = self._asked("POST", COMPLETIONS, body)
        seconds = time.perf_counter() - started
        try:
            choice = reply["choices"][0]
            ids, read = choice["token_ids"], choice["prompt_token_ids"]
        except (TypeError, KeyError, IndexError):
            ids = read = None
        require(
            isinstance(ids, list) and bool(ids) and read == list(prompt),
            f"{self.server.url} does not return the ids of the prompt and of its answer: this "
            "needs vLLM, or another engine that obeys return_token_ids",
        )
        if not self.speculates:
            return TimedResponse(ids, seconds)
        if (own := self._figures_of(reply, len(ids))) is not None:
            return TimedResponse(ids, seconds, *own)
        counted = self._counted(before, len(ids))
        names = [f"accepted_tokens_per_pos/{k}" for k in range(1 + _deepest(counted))]
        return TimedResponse(
            ids, seconds, counted["drafts"], tuple(counted[name] for name in names)
        )

    def _figures_of(self, reply: Any, length: int) -> tuple[int, tuple[int, ...]] | None:
        """The rounds of this response of `length` tokens, and how many accepted each position, from
        the figures that vLLM gives with it; None if it gives none."""
        metrics = reply.get("metrics")
        figures = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if figures is None:
            return None
        try:
            by_accepted = [int(count) for count in figures["acceptance_histogram"]]
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"{self.server.url} gives figures of speculation without an acceptance_histogram: "
                "serve without --per-request-spec-decode-metrics, so that its counters are read"
            ) from error
        committed = 1 + sum((1 + n) * count for n, count in enumerate(by_accepted))
        # the rounds while a long prompt is read emit nothing, so there may be more than these
        require(
            committed >= length,
            f"{self.server.url} says that its rounds made {committed} tokens for a response of "
            f"{length}: its figures do not fit its responses",
        )
        positions = range(1, len(by_accepted))
        return sum(by_accepted), tuple(sum(by_accepted[k:]) for k in positions)

    def _counted(self, before: Counter[str], length: int) -> Counter[str]:
        """What was counted for an answer of this many tokens, once all of it is: one from prefill
        and, in each round, the accepted ones and one more."""
        waited = time.monotonic()
        while True:
            now = self.counts()
            counted = Counter({name: now[name] - before[name] for name in now})
            tokens = 1 + counted["drafts"] + counted["accepted_tokens"]
            if tokens >= length:
                break
            require(
                time.monotonic() - waited < SETTLING,
                f"{self.server.url} counted {tokens} tokens for an answer of {length}: its "
                "counters do not fit its answers",
            )
            time.sleep(0.02)
        beyond = 2 + _deepest(now)  # of the last round, and of one that was already under way
        require(
            tokens <= length + 2 * beyond,
            f"{self.server.url} counted {tokens} tokens for an answer of {length}: somebody else "
            "uses this engine, and its counters count them too",
        )
        return counted

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return self.server.ask(method, path, body)
        except (RequestRejected, ServerUnavailable) as error:
            raise UserError(f"the engine failed ({error}): nothing was measured") from error


def _deepest(counts: Counter[str]) -> int:
    """The last position that the counters know."""
    names = [
        name.partition("/")[2] for name in counts if name.startswith("accepted_tokens_per_pos/")
    ]
    return max(map(int, names), default=-1)


def measure_served(
    engine: MeasuredServer,
    plain: MeasuredServer | None,
    prompts: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    limit: int,
    seed: int,
    progress: Progress,
) -> list[ServedAt]:
    """Answer every prompt with each engine at each temperature; which comes first changes from
    prompt to prompt. Both warm up on the first one. Raises UserError as `MeasuredServer.reply`
    does."""
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
            )
        )
    progress.remove_task(task)
    return asked


def figures(
    temperature: float, drafted: Sequence[TimedResponse], plain: Sequence[TimedResponse] | None
) -> ServedAt:
    """The figures of answers with drafts, and of plain ones to the same prompts."""
    rounds = [reply.rounds for reply in drafted]
    by_position = [*zip_longest(*(reply.accepted for reply in drafted), fillvalue=0)]
    tokens = [max(0, len(reply.ids) - 1) for reply in drafted]  # prefill emits the first

    def speed(replies: Sequence[TimedResponse]) -> Interval:
        return ratio_interval([len(r.ids) for r in replies], [r.seconds for r in replies])

    at = ServedAt(
        temperature=temperature,
        rounds=sum(rounds),
        tau=ratio_interval(tokens, rounds),
        accepted=[share_interval(counts, rounds) for counts in by_position],
        tokens_per_second=speed(drafted),
    )
    if plain is None:
        return at
    lengths, plain_lengths = ([len(r.ids) for r in x] for x in (drafted, plain))
    seconds, plain_seconds = ([r.seconds for r in x] for x in (drafted, plain))
    same = sum(a.ids == b.ids for a, b in zip(drafted, plain, strict=True))
    beside = {"plain_tokens_per_second": speed(plain), "identical": same}
    # the one speed over the other: each prompt has both
    beside["speedup"] = product_interval([(lengths, seconds), (plain_seconds, plain_lengths)])
    return ServedAt(**{**vars(at), **beside})
