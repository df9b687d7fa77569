"""Evaluation: a drafter on held-out prompts, measured by the decoder and by teacher forcing.

For each temperature, every batch of prompts is answered plainly and speculatively in turn in the
same process. α is taken over the target's own plain text at all positions, and over the decoded
text at the anchors where the decoder's rounds started. Intervals are bootstraps over prompts,
those of seconds over batches.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from specdec.decoding.answers import Generation, Round
from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode, fitting_rule
from specdec.decoding.length import oracle
from specdec.decoding.policy import Length
from specdec.decoding.rules import rule_name
from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.costs import Costs, costs, operations_ratio
from specdec.measure.forced import along, decoded, drafting, forced, foreseen, prompt_counts, whole
from specdec.measure.machine import machine_of
from specdec.measure.results import AtTemperature, OracleBound, Results, Sample
from specdec.measure.strategy import LEARNING, Strategy, rounds_of, strategy
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.target.base import Target
from specdec.theory.alpha import repetition
from specdec.theory.intervals import Interval, ratio_interval
from specdec.theory.leviathan import pass_cost

LONG = 8  # tokens a round, for the oracle: it asks where rejections fall, wherever that is
SHOWN = 6  # samples that are kept


@dataclass
class Subject:
    """What is measured: a draft of a run, and on which data."""

    name: str  # of the run
    target: Target
    drafter: Drafter
    data: str


def evaluate(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    cfg: DecodeConfig,
    on_prompt: Callable[[str], None] | None = None,
    words: Sequence[str] = (),
) -> Results:
    """Measure a drafter on the first `cfg.prompts` prompts. Where a tree or a length must be
    chosen first, the prompts after those serve for it.

    `words` are what the user says in each prompt, for the samples (default: the decoded prompt).
    `on_prompt` is called with a line of progress after each prompt at each temperature. Raises
    UserError where there is no prompt.
    """
    target, drafter = subject.target, subject.drafter
    chosen = [list(p) for p in prompts[: cfg.prompts]]
    if not chosen:
        raise UserError("no prompts to evaluate on: give a prompts file or held-out conversations")
    cfg = replace(cfg, batch=min(cfg.batch, len(chosen)))
    learning = [list(p) for p in prompts[cfg.prompts : cfg.prompts + LEARNING]] or chosen
    batches = [chosen[i : i + cfg.batch] for i in range(0, len(chosen), cfg.batch)]
    temperatures, measured = [], list[tuple[Strategy, Costs]]()
    for temperature in cfg.temperatures:
        sampler = Sampler(temperature, cfg.top_k, cfg.top_p)
        how = strategy(cfg, target, drafter, learning, sampler)
        made = _answered(subject, batches, cfg, how, sampler, on_prompt)
        at = _figures(subject, made, cfg, how, sampler, words)
        known = next((c for h, c in measured if h.shape == how.shape), None)
        at.costs = known or costs(target, drafter, chosen[0], how.shape, cfg)
        measured.append((how, at.costs))
        at.oracle = _oracle(subject, learning, cfg, how, sampler, at.costs, made.rounds)
        temperatures.append(at)
    return Results(
        name=subject.name,
        drafter=drafter.config.name,
        target=target.name,
        data=subject.data,
        prompts=len(chosen),
        batch=cfg.batch,
        max_new_tokens=cfg.max_new_tokens,
        tree=cfg.tree,
        length=cfg.length,
        compiled=cfg.compile,
        machine=machine_of(target),
        temperatures=temperatures,
        learned_on=(
            f"{len(learning)} other prompts" if learning is not chosen else "the measured prompts"
        ),
        operations=operations_ratio(target, drafter, chosen[0], temperatures[0].gamma),
        weight_bytes=sum(w.numel() * w.element_size() for w in {*target.model.parameters()}),
    )


@dataclass
class Answered:
    """All prompts answered plainly and speculatively; the lists of seconds have an entry a batch,
    and `tokens` counts those of its plain answers after the first of each."""

    plain: list[Generation] = field(default_factory=list)
    drafted: list[Generation] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of as many tokens
    spent: list[dict[str, float]] = field(default_factory=list)

    @property
    def rounds(self) -> list[Round]:
        return [r for g in self.drafted for r in g.rounds]


def _answered(
    subject: Subject,
    batches: list[list[list[int]]],
    cfg: DecodeConfig,
    how: Strategy,
    sampler: Sampler,
    on_prompt: Callable[[str], None] | None,
) -> Answered:
    """Every batch answered `cfg.repeats` times both ways, in turn; counts are of the first time,
    seconds medians."""

    def both(policy: Length | None, first: int, repeat: int) -> tuple[list[Generation], ...]:
        """The batch that starts with prompt `first`, plainly and speculatively."""
        batch = batches[first // cfg.batch]
        answer = partial(
            decode,
            subject.target,
            batch,
            max_new_tokens=cfg.max_new_tokens,
            sampler=sampler,
            seeds=[cfg.seed + i * 1009 + repeat for i in range(first, first + len(batch))],
            compiled=cfg.compile,
        )
        return answer(), answer(
            drafter=subject.drafter,
            shape=how.shape,
            length=policy,
            rule=cfg.rule,
            greedy_draft=cfg.greedy_draft,
        )

    made = Answered()
    policy, untimed = (how.length and how.length() for _ in range(2))
    for batch in batches:
        first = len(made.plain)
        if cfg.compile or not first:  # each number of rows and tokens compiles to its own graph
            both(untimed, first, 0)
        pairs = [both(policy, first, repeat) for repeat in range(cfg.repeats)]
        made.plain += pairs[0][0]
        made.drafted += pairs[0][1]
        tokens = _after_the_first(pairs[0][0])
        made.tokens.append(tokens)
        made.plain_seconds.append(tokens * statistics.median(_a_token(p) for p, _ in pairs))
        made.seconds.append(tokens * statistics.median(_a_token(s) for _, s in pairs))
        slowest = max(pairs[0][1], key=lambda g: g.seconds)
        other = slowest.seconds - sum(slowest.spent.values())
        made.spent.append(slowest.spent | {"other": other})
        if on_prompt:
            so_far = sum(g.emitted for g in made.drafted) / max(1, len(made.rounds))
            for _ in batch:
                on_prompt(f"T={sampler.temperature:g}  τ {so_far:.2f}")
    return made


def _figures(
    subject: Subject,
    made: Answered,
    cfg: DecodeConfig,
    how: Strategy,
    sampler: Sampler,
    words: Sequence[str],
) -> AtTemperature:
    """All figures of one temperature but those that are measured apart."""
    rule = fitting_rule(cfg.rule, how.shape, sampler, cfg.greedy_draft)
    gamma, rounds, greedy = how.shape.depth, made.rounds, sampler.greedy
    drafter = drafting(subject.drafter, gamma)
    forcing = TeacherForcing(drafter, subject.target, sampler if not greedy else Sampler(1.0))
    every, visited = [], []
    for plain, drafted in zip(made.plain, made.drafted, strict=True):
        text = [*drafted.ids, *drafted.overrun]
        read = along(forcing, subject.target, drafted.prompt, text)
        visited.append(decoded(read, drafted, gamma, greedy))
        if plain.ids != drafted.ids:
            read = along(forcing, subject.target, plain.prompt, plain.ids)
        every.append(whole(read, len(plain.ids), drafter.depth))

    def share(one: Callable[[Round], float], of: Callable[[Round], float]) -> Interval:
        """Σ one / Σ of over all rounds, bootstrapped over prompts."""
        return ratio_interval(
            [sum(map(one, g.rounds)) for g in made.drafted],
            [sum(map(of, g.rounds)) for g in made.drafted],
        )

    depths = range(gamma)
    same = sum(p.ids == d.ids for p, d in zip(made.plain, made.drafted, strict=True))
    tokenizer = subject.target.tokenizer

    def sample(i: int, made: Generation) -> Sample:
        both = (made.prompt, made.ids)
        prompt, answer = (tokenizer.decode(ids, skip_special_tokens=True) for ids in both)
        said = words[i] if i < len(words) else prompt
        return Sample(said, answer, made.emitted / max(1, len(made.rounds)))

    return AtTemperature(
        temperature=sampler.temperature,
        rule="greedy" if greedy and rule.at_zero is None else rule_name(rule),
        lossless=rule.keeps_p(greedy),
        gamma=gamma,
        nodes=how.shape.nodes,
        chain=isinstance(how.shape, Chain),
        tau=share(lambda r: r.accepted + 1, lambda r: 1),
        speedup=ratio_interval(made.plain_seconds, made.seconds),
        tokens_per_second=ratio_interval(made.tokens, made.seconds),
        plain_tokens_per_second=ratio_interval(made.tokens, made.plain_seconds),
        rounds=len(rounds),
        drafted_per_round=share(lambda r: r.nodes, lambda r: 1),
        accepted_lengths=[sum(r.accepted == n for r in rounds) for n in range(gamma + 1)],
        drafted=[sum(r.drafted > k for r in rounds) for k in depths],
        accepted=[sum(r.accepted > k for r in rounds) for k in depths],
        repetition=ratio_interval([repetition(g.ids) for g in made.plain], [1] * len(made.plain)),
        alpha=forced(every, visited, gamma),
        reached=[share(lambda r, k=k: r.accepted > k, lambda r: 1) for k in depths],  # type: ignore[misc]
        conditional_acceptance=[
            share(lambda r, k=k: r.accepted > k, lambda r, k=k: r.tested > k)  # type: ignore[misc]
            for k in depths
        ],
        identical=same if greedy else None,
        learned=how.learned,
        foreseen=None if greedy else foreseen(every, visited, gamma),
        seconds_spent={k: sum(times[k] for times in made.spent) for k in made.spent[0]},
        samples=[sample(i, g) for i, g in enumerate(made.drafted[:SHOWN])],
        prompts=[prompt_counts(t, g) for t, g in zip(every, made.drafted, strict=True)],
    )


def _oracle(
    subject: Subject,
    prompts: list[list[int]],
    cfg: DecodeConfig,
    how: Strategy,
    sampler: Sampler,
    cost: Costs,
    rounds: list[Round],
) -> OracleBound | None:
    """The bound of `specdec.decoding.length.oracle`, for chains: from rounds of `LONG` tokens on
    some prompts where the family drafts so many, else from the rounds that were measured."""
    if not isinstance(how.shape, Chain):
        return None
    gamma = how.shape.depth
    if (long := min(LONG, subject.drafter.max_depth or LONG)) > gamma:
        learning = prompts[:LEARNING]
        rounds = rounds_of(cfg, subject.target, subject.drafter, learning, sampler, long)
    seen = [(r.drafted, r.accepted) for r in rounds]
    if not any(drafted for drafted, _ in seen):
        return None
    bound = oracle(seen, cost.c.value, pass_cost({gamma: cost.v.value}))
    known = bound.speedup, bound.fixed_gamma, bound.fixed_speedup, bound.censored
    return OracleBound(*known, rounds=len(seen), drafted=max(drafted for drafted, _ in seen))


def _after_the_first(batch: Sequence[Generation]) -> int:
    """Tokens after the first of each answer, which prefill emits; at least one."""
    return max(1, sum(len(g.ids) - 1 for g in batch))


def _a_token(batch: Sequence[Generation]) -> float:
    """Seconds a token of a batch, which lasts as long as its slowest row."""
    return max(g.seconds for g in batch) / _after_the_first(batch)
