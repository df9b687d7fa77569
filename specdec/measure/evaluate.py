"""Evaluation: a drafter on held-out prompts, measured by the decoder and by teacher forcing.

For each temperature, every batch of prompts is answered plainly and speculatively in turn. α is
taken over the target's own plain text at all positions, and over the decoded text at the anchors
where rounds started. Intervals are bootstraps over prompts, those of seconds over batches.

Several processes share the prompts out (see `specdec.ranks`). What is counted comes from all of
them and is what one process would count: batches, seeds and order are the same. Seconds come from
the first process alone, on the first part of the prompts, by its own clock, while the others wait:
processes that decode on one machine at the same time slow each other down, more so the more there
are. A length policy may learn from one prompt to the next, so with one, the first process answers
all prompts.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress

from specdec.context import Needs
from specdec.decoding.answers import Generation, Round, pieces_of
from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode
from specdec.decoding.logs import log_rounds
from specdec.decoding.policy import Length
from specdec.drafters.base import Drafter
from specdec.drafters.capabilities import Calibrated, Copies
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing, divergence
from specdec.measure.confidence import believed, reliability
from specdec.measure.costs import Costs, costs, operations
from specdec.measure.forced import (
    Text,
    along,
    decoded,
    drafting,
    forced,
    foreseen,
    prompt_counts,
    whole,
)
from specdec.measure.machine import machine_of
from specdec.measure.results import AtTemperature, Results, Sample, Shift
from specdec.measure.setup import Setup
from specdec.measure.strategy import LEARNING, Strategy, strategy
from specdec.progress import bars, console
from specdec.ranks import ALONE, Ranks
from specdec.sampling.confidence import Calibrations
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape
from specdec.targets.base import Target
from specdec.theory.alpha import repetition
from specdec.theory.intervals import Interval, ratio_interval
from specdec.theory.leviathan import pass_cost
from specdec.theory.oracle import Oracle, oracle

LONG = 8  # tokens per round for the oracle, which must see where rejections fall
SHOWN = 6  # sample answers that are kept in the results
TIMED = 12  # prompts that the first of several processes times at least, for the intervals of times


@dataclass
class Subject:
    """What is measured: a run's draft, for its target, on some data. A second draft, `also`,
    may take turns with it. If the target was trained too, `original` is what it was before.
    `origin` says what the prompts are."""

    name: str  # of the run
    target: Target
    drafter: Drafter
    data: str
    also: Drafter | None = None
    original: Target | None = None
    origin: str = Results.origin


def evaluate(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    cfg: DecodeConfig,
    progress: Progress | None = None,
    words: Sequence[str] = (),
    log: Path | None = None,
    ranks: Ranks = ALONE,
    earlier: Sequence[Sequence[tuple[str, str]]] = (),
) -> Results:
    """Measure a drafter on the first `cfg.prompts` prompts, in turn with plain decoding, with its
    fastest shape if `cfg.fastest`, and with `subject.also` if there is one. A shape or a length is
    chosen on the prompts that follow those. `words` are what the user says last in each prompt, for
    the samples (default: the decoded prompt), and `earlier` the turns before, as roles and texts.
    The draft's rounds are appended to the file `log`. All of
    `ranks` call this with the same arguments and get the same results. Raises UserError if there is
    no prompt."""
    target, drafter = subject.target, subject.drafter
    chosen = [list(p) for p in prompts[: cfg.prompts]]
    if not chosen:
        raise UserError("no prompts to evaluate on: give a prompts file or held-out conversations")
    cfg = replace(cfg, batch=min(cfg.batch, len(chosen)))
    others = [list(p) for p in prompts[cfg.prompts : cfg.prompts + LEARNING]]
    learning = others or chosen
    ways = [(drafter, cfg)]
    if cfg.fastest:
        ways.append((drafter, replace(cfg, tree="static", fastest=False)))
    if subject.also is not None:  # its chains have the length that it was built for
        longest = cfg.gamma if cfg.tree else None
        ways.append((subject.also, replace(cfg, gamma=longest, fastest=False)))
    found = [list[AtTemperature]() for _ in ways]
    known: dict[tuple[Drafter, str], Costs] = {}
    progress = progress or bars(console, shown=False)
    task = progress.add_task("decoding", total=len(chosen) * len(cfg.temperatures))
    for temperature in cfg.temperatures:
        sampler = Sampler(temperature, cfg.top_k, cfg.top_p)
        setups = [Setup(target, *way, sampler, ranks) for way in ways]
        hows = [strategy(setup, learning) for setup in setups]
        answers = _answered(setups, hows, chosen, partial(progress.update, task))
        for of_way, setup, how, made in zip(found, setups, hows, answers, strict=True):
            key = setup.drafter, repr(how.shape)
            cost = known[key] = known.get(key) or costs(setup, chosen[0], how.shape)
            at, timed = _figures(setup, how, made, cost, words, earlier), made.timed
            if of_way is found[0]:
                if log is not None and ranks.rank == 0:
                    log_rounds(log, made.drafted)
                at.oracle = _oracle(setup, how.shape, cost, learning, made.rounds)
            of_way.append(at)
    progress.remove_task(task)

    def results(way: tuple[Drafter, DecodeConfig], temperatures: list[AtTemperature]) -> Results:
        (each, cfg), gamma = way, temperatures[0].gamma
        counted = partial(operations, Setup(target, each, cfg, sampler), chosen[0], gamma)
        c_hat, step = ranks.first(counted)
        return Results(
            name=subject.name,
            drafter=each.config.name,
            target=target.name,
            data=subject.data,
            origin=subject.origin,
            prompts=len(chosen),
            timed=timed,
            processes=ranks.world,
            batch=cfg.batch,
            max_new_tokens=cfg.max_new_tokens,
            tree=cfg.tree,
            length=cfg.length,
            compiled=cfg.compile,
            machine=machine_of(target),
            temperatures=temperatures,
            learned_on=f"{len(others)} other prompts" if others else "the measured prompts",
            calibrated_on=each.calibrations.prompts if isinstance(each, Calibrated) else 0,
            operations=c_hat,
            target_operations=step,
            weight_bytes=sum(w.numel() * w.element_size() for w in {*target.model.parameters()}),
        )

    measured, *others_measured = map(results, ways, found)
    measured.fastest = others_measured.pop(0) if cfg.fastest else None
    measured.also = others_measured.pop(0) if subject.also is not None else None
    before = subject.original
    if before is not None and before is not target:
        measured.shift = shift(before, target, chosen, cfg.max_new_tokens, cfg.batch, ranks)
    return measured


@dataclass
class Answered:
    """All prompts answered plainly and speculatively. Seconds and `tokens` have one entry for each
    batch that was timed: `tokens` counts those of its plain answers, without the first of each."""

    plain: list[Generation] = field(default_factory=list)
    drafted: list[Generation] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # for the same number of tokens
    spent: list[dict[str, float]] = field(default_factory=list)
    timed: int = 0  # how many prompts were timed: the first ones

    @property
    def rounds(self) -> list[Round]:
        return [r for g in self.drafted for r in g.rounds]

    def add(self, plain: Sequence[Generation], drafted: Sequence[Generation]) -> None:
        """Add the answers to a batch of prompts."""
        self.plain += plain
        self.drafted += drafted


def _answered(
    setups: Sequence[Setup],
    hows: Sequence[Strategy],
    prompts: list[list[int]],
    tell: Callable[..., None],
) -> list[Answered]:
    """Answer every batch plainly and with each draft. Those that are timed are answered
    `cfg.repeats` times, in turn: counts come from the first time, seconds are medians. `tell` is
    called with the progress after each batch."""
    cfg, ranks = setups[0].cfg, setups[0].ranks
    policies, untimed = ([how.length and how.length() for how in hows] for _ in range(2))
    starts = range(0, len(prompts), cfg.batch)
    timed = len(starts)
    if ranks.world > 1 and not any(policies):
        least = max(2, -(-TIMED // cfg.batch))  # a single batch shows no variation
        timed = min(timed, max(-(-timed // ranks.world), least))

    def turns(first: int, lengths: Sequence[Length | None], repeat: int) -> list[list[Generation]]:
        """The batch that starts with prompt `first`, plainly and with each draft."""
        batch = prompts[first : first + cfg.batch]
        seeds = [cfg.seed + i * 1009 + repeat for i in range(first, first + len(batch))]
        made = [setups[0].answers(batch, None, seeds=seeds)]
        for setup, how, length in zip(setups, hows, lengths, strict=True):
            made.append(setup.answers(batch, how.shape, seeds=seeds, length=length))
        return made

    def in_time() -> list[Answered]:
        """The batches that are timed."""
        many = [Answered() for _ in setups]
        for first in starts[:timed]:
            # warm-up; if compiled, each number of rows and tokens has its own graph
            if cfg.compile or not first:
                turns(first, untimed, 0)
            repeats = [turns(first, policies, repeat) for repeat in range(cfg.repeats)]
            plain, *drafts = repeats[0]
            tokens = _after_the_first(plain)
            for way, (made, drafted) in enumerate(zip(many, drafts, strict=True), 1):
                made.add(plain, drafted)
                made.timed = len(made.plain)
                made.tokens.append(tokens)
                for seconds, of in ((made.plain_seconds, 0), (made.seconds, way)):
                    seconds.append(tokens * statistics.median(_a_token(r[of]) for r in repeats))
                slowest = max(drafted, key=lambda g: g.seconds)
                other = slowest.seconds - sum(slowest.spent.values())
                made.spent.append(slowest.spent | {"other": other})
            said(many, len(plain))
        return many

    def said(many: Sequence[Answered], count: int) -> None:
        taus = [sum(g.emitted for g in m.drafted) / max(1, len(m.rounds)) for m in many]
        by_way = " and ".join(f"{tau:.2f}" for tau in taus)
        at = f"decoding  T={setups[0].sampler.temperature:g}"
        tell(advance=count, description=f"{at}  τ {by_way}")

    many = ranks.first(in_time)
    for plain, *drafts in ranks.shared(starts[timed:], lambda first: turns(first, policies, 0)):
        for made, drafted in zip(many, drafts, strict=True):
            made.add(plain, drafted)
        said(many, len(plain))
    return many


def _after_the_first(batch: Sequence[Generation]) -> int:
    """How many tokens of these answers the rounds made, since prefill emits the first of each; at
    least 1, because callers divide by it."""
    return max(1, sum(len(g.ids) - 1 for g in batch))


def _a_token(batch: Sequence[Generation]) -> float:
    """Seconds per token of a batch, which lasts as long as its slowest row."""
    return max(g.seconds for g in batch) / _after_the_first(batch)


def _figures(
    setup: Setup,
    how: Strategy,
    made: Answered,
    cost: Costs,
    words: Sequence[str],
    earlier: Sequence[Sequence[tuple[str, str]]],
) -> AtTemperature:
    """The figures of one temperature."""
    target, sampler, greedy, shape = setup.target, setup.sampler, setup.sampler.greedy, how.shape
    gamma, depths, rounds, rule = shape.depth, range(shape.depth), made.rounds, setup.rule(shape)
    drafter = drafting(setup.drafter, gamma)
    forcing = TeacherForcing(drafter, target, Sampler(1.0) if greedy else sampler)

    def texts(answers: tuple[Generation, Generation]) -> tuple[Text, Text]:
        """What is measured along one prompt's plain answer, and along the drafted one."""
        plain, drafted = answers
        read = along(forcing, target, drafted.prompt, [*drafted.ids, *drafted.overrun])
        at_visits = decoded(read, drafted, gamma, greedy)
        if plain.ids != drafted.ids:
            read = along(forcing, target, plain.prompt, plain.ids)
        return whole(read, len(plain.ids), drafter.depth), at_visits

    both = setup.ranks.shared([*zip(made.plain, made.drafted, strict=True)], texts)
    every, visited = map(list, zip(*both, strict=True))

    variant = setup.variant(shape)
    beliefs = [] if isinstance(drafter, Copies) else [believed(t, variant, gamma) for t in visited]
    own = drafter.calibrations if isinstance(drafter, Calibrated) else Calibrations()
    calibration = own.of(variant)

    def share(
        one: Callable[[Round], float], of: Callable[[Round], float] = lambda r: 1
    ) -> Interval:
        """Σ `one` / Σ `of` over all rounds, bootstrapped over prompts."""
        numerators, denominators = (
            [sum(map(x, g.rounds)) for g in made.drafted] for x in (one, of)
        )
        return ratio_interval(numerators, denominators)

    def accepted(k: int, of_tested: bool = False) -> Interval:
        """The share of rounds that accepted depth k: of all, or of those that tested it."""
        return share(lambda r: r.accepted > k, lambda r: r.tested > k or not of_tested)

    def text(ids: Sequence[int]) -> str:
        return str(target.tokenizer.decode(ids, skip_special_tokens=True))

    same = sum(p.ids == d.ids for p, d in zip(made.plain, made.drafted, strict=True))
    shown = made.drafted[:SHOWN]
    said = [*words[: len(shown)], *(text(g.prompt) for g in shown[len(words) :])]
    before = [*earlier[: len(shown)], *([()] * len(shown[len(earlier) :]))]
    coloured = [pieces_of(target.tokenizer, g) for g in shown]
    return AtTemperature(
        temperature=sampler.temperature,
        rule="greedy" if greedy and rule.at_zero is None else rule.name,
        lossless=rule.keeps_p(greedy),
        gamma=gamma,
        nodes=shape.nodes,
        chain=isinstance(shape, Chain),
        tau=share(lambda r: r.accepted + 1),
        speedup=ratio_interval(made.plain_seconds, made.seconds),
        tokens_per_second=ratio_interval(made.tokens, made.seconds),
        plain_tokens_per_second=ratio_interval(made.tokens, made.plain_seconds),
        rounds=len(rounds),
        drafted_per_round=share(lambda r: r.nodes),
        accepted_lengths=[sum(r.accepted == n for r in rounds) for n in range(gamma + 1)],
        drafted=[sum(r.drafted > k for r in rounds) for k in depths],
        accepted=[sum(r.accepted > k for r in rounds) for k in depths],
        repetition=ratio_interval([repetition(g.ids) for g in made.plain], [1] * len(made.plain)),
        alpha=forced(every, visited, gamma),
        costs=cost,
        reached=[accepted(k) for k in depths],
        conditional_acceptance=[accepted(k, of_tested=True) for k in depths],
        identical=same if greedy else None,
        learned=how.learned,
        foreseen=None if greedy else foreseen(every, visited, gamma),
        confidence=reliability(beliefs) if beliefs else [],
        calibrated=reliability(beliefs, calibration) if beliefs and calibration else [],
        seconds_spent={phase: sum(s[phase] for s in made.spent) for phase in made.spent[0]},
        samples=[
            Sample(prompt, text(g.ids), g.emitted / max(1, len(g.rounds)), [*turns], parts)
            for prompt, g, turns, parts in zip(said, shown, before, coloured, strict=True)
        ],
        prompts=[
            prompt_counts(t, g, gamma, greedy) for t, g in zip(every, made.drafted, strict=True)
        ],
    )


def _oracle(
    setup: Setup, shape: Shape, cost: Costs, learning: list[list[int]], rounds: list[Round]
) -> Oracle | None:
    """The bound of `specdec.theory.oracle.oracle`, for chains: from rounds of `LONG` tokens on
    some prompts if the family can draft that many, otherwise from the measured rounds."""
    if not isinstance(shape, Chain):
        return None
    if (long := min(LONG, setup.drafter.limits.depth or LONG)) > shape.depth:
        rounds = setup.rounds(learning[:LEARNING], long)
    if not any(r.drafted for r in rounds):
        return None
    found = [(r.drafted, r.accepted) for r in rounds]
    return oracle(found, cost.c.value, pass_cost({shape.depth: cost.v.value}))


def shift(
    original: Target,
    adapted: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batch: int,
    ranks: Ranks = ALONE,
) -> Shift:
    """How far `adapted`, which was trained with its draft, has moved from `original`, over answers
    of up to `tokens` tokens. The prompts are shared out."""

    @torch.inference_mode()
    def moved(start: int) -> list[tuple[float, int, bool]]:
        """The summed KL of each answer in a batch, its tokens, and whether it stayed the same."""
        asked, found = prompts[start : start + batch], []
        told = (decode(t, asked, max_new_tokens=tokens) for t in (original, adapted))
        for before, after in zip(*told, strict=True):
            ids, first = torch.tensor([[*before.prompt, *before.ids]]), len(before.prompt) - 1
            logits = (
                t.logits(t.features(ids.to(t.device), Needs())[1][0, first:-1])
                for t in (original, adapted)
            )
            kl = float(divergence(*logits).sum())
            found.append((kl, len(before.ids), before.ids == after.ids))
        return found

    batches = ranks.shared(range(0, len(prompts), batch), moved)
    kl, counts, same = map(list, zip(*(answer for of in batches for answer in of), strict=True))
    return Shift(original.name, ratio_interval(kl, counts), ratio_interval(same, [1] * len(same)))
