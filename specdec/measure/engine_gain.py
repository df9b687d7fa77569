"""What a draft gains in an engine on this machine, beside the target alone in the same engine, and
why: what a speculation step costs there.

Times are the engine's own, after the first token of each response, which the prefill emits.
"""

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from specdec.engines.engine_interface import CompletionRequest
from specdec.errors import UserError
from specdec.measure.served import MeasuredServer, TimedResponse, asked_of
from specdec.sampling.sampler import Sampler
from specdec.theory.intervals import FEWEST, Interval, product_interval, ratio_interval

COST_TOKENS = 24  # of a response that times steps
COST_PROMPT = 8  # of its prompt: so short that one prefill hardly delays the steps of the others
COST_REPEATS = 3
GREEDY = Sampler(0.0)


@dataclass(frozen=True)
class EngineGain:
    """Figures at T = 0 in chains of `gamma` tokens; intervals are over prompts. c is the time of a
    draft step over that of a plain step of the target, and v that of verifying γ + 1 tokens, as in
    Leviathan et al. (2023), Theorem 3.8, which has v = 1. Both are measured in the engine."""

    engine: str  # with its version
    weights: str  # how the engine's file stores the target, such as Q4_1
    gamma: int
    prompts: int
    max_new_tokens: int
    tau: Interval
    tokens_per_second: Interval
    plain_tokens_per_second: Interval
    speedup: Interval
    identical: int  # responses that are the same with and without the draft
    c: float
    v: float
    commands: list[str] = field(default_factory=list)  # that serve with the draft

    @property
    def step_cost(self) -> float:
        """A speculation step over a plain step, in time: v + γ c. The draft pays where τ is
        larger."""
        return self.v + self.gamma * self.c


def responses_in_turn(
    drafting: MeasuredServer,
    plain: MeasuredServer,
    prompts: Sequence[Sequence[int]],
    limit: int,
    left: Callable[[], float] | None,
) -> tuple[list[TimedResponse], list[TimedResponse]]:
    """The responses of both servers to the prompts, with drafts and plain. Which comes first
    changes from prompt to prompt. Both warm up on the first prompt. No further prompt is sent
    once fewer seconds are `left` than one takes, but for the first `FEWEST`."""
    servers = drafting, plain
    seconds = sum(one.reply(prompts[0], limit, GREEDY, 0).seconds for one in servers)
    replies: tuple[list[TimedResponse], list[TimedResponse]] = [], []
    for n, prompt in enumerate(prompts):
        if left is not None and n >= FEWEST and left() < seconds:
            break
        for place in (0, 1) if n % 2 else (1, 0):
            replies[place].append(servers[place].reply(prompt, limit, GREEDY, 0))
    return replies


def cost_of_verifying(plain: MeasuredServer, prompt: Sequence[int], gamma: int) -> float:
    """v: a step of γ + 1 responses at once over a step of one. Both read one token for each, and
    compute logits for each, as a verification does for its γ + 1 tokens. The server must serve
    that many at once."""

    def step(at_once: int) -> float:
        pool = ThreadPoolExecutor(at_once)
        try:
            timed = [pool.submit(_seconds_of_a_step, plain, prompt) for _ in range(at_once)]
            return statistics.median(each.result() for each in timed)
        finally:  # an interruption does not wait for the requests
            pool.shutdown(wait=False, cancel_futures=True)

    one, several = list[float](), list[float]()
    for _ in range(COST_REPEATS):  # in turn
        one.append(step(1))
        several.append(step(gamma + 1))
    return statistics.median(several) / statistics.median(one)


def _seconds_of_a_step(server: MeasuredServer, prompt: Sequence[int]) -> float:
    """Of a response that does not end early."""
    request = CompletionRequest(prompt[-COST_PROMPT:], COST_TOKENS, GREEDY, 0)
    reply = asked_of(server, request, ignore_eos=True)
    return _decoding(server.engine.decoding_seconds_of(reply)) / (COST_TOKENS - 1)


def gain_of(
    drafting: MeasuredServer,
    drafted: Sequence[TimedResponse],
    plain: Sequence[TimedResponse],
    *,
    weights: str,
    gamma: int,
    limit: int,
    v: float,
    commands: Sequence[str],
) -> EngineGain:
    """The figures of responses to the same prompts. c is what a speculation step takes beyond
    verification, for each drafted token. Raises UserError for responses without steps."""
    later, plain_later = ([len(r.ids) - 1 for r in x] for x in (drafted, plain))
    seconds, plain_seconds = ([_decoding(r.decoding) for r in x] for x in (drafted, plain))
    steps = [r.speculation_steps for r in drafted]
    if min(sum(steps), sum(plain_later), sum(plain_seconds)) <= 0:
        raise UserError("its responses are of one token, and have no steps to time")
    step = sum(seconds) / max(1, sum(steps))
    plain_step = sum(plain_seconds) / max(1, sum(plain_later))
    return EngineGain(
        engine=drafting.engine.title_at(drafting.server).partition(" at ")[0],
        weights=weights,
        gamma=gamma,
        prompts=len(drafted),
        max_new_tokens=limit,
        tau=ratio_interval(later, steps),
        tokens_per_second=ratio_interval(later, seconds),
        plain_tokens_per_second=ratio_interval(plain_later, plain_seconds),
        speedup=product_interval([(later, seconds), (plain_seconds, plain_later)]),
        identical=sum(a.ids == b.ids for a, b in zip(drafted, plain, strict=True)),
        c=max(0.0, step / plain_step - v) / gamma,
        v=v,
        commands=[*commands],
    )


def _decoding(seconds: float | None) -> float:
    if seconds is None:
        raise UserError("the engine does not say how long it decoded: nothing was measured")
    return seconds
