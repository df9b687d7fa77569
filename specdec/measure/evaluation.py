"""Evaluation: measures a drafter on held-out prompts, by the decoder and by teacher forcing.

Seconds come from the first prompts alone: each batch of them is answered by vanilla decoding and
with each decoding configuration in turn. The other prompts are decoded many at a time, since in
float32 a row's tokens do not depend on its batch (in bfloat16 a near-tie may flip, as between any
two forward passes). τ and all counts thus come from many prompts, and a speedup combines them with
the timed seconds of a speculation step and of a vanilla step. α is taken over the target's own
vanilla text at all positions, and over the decoded text at the anchors where speculation steps
started. Intervals are over conversations, which have one prompt or several, those of seconds over
batches (see `theory.intervals`).

Several processes divide the prompts (see `specdec.ranks`). Counts come from all of them and equal
those of one process: batches, seeds and order are the same. Seconds come from the first process
alone, by its own clock, while the others wait: processes that decode on one machine at the same
time slow each other down. An adaptive draft length depends on the batch and may learn from one
prompt to the next, so with one, all prompts are timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.progress import Progress

from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import require_room
from specdec.decoding.generation import Generation, SpeculationStep, pieces_of
from specdec.decoding.logs import log_steps
from specdec.decoding.way import Way
from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.formats.draft_export import rejected_layouts
from specdec.integrity import of_value
from specdec.measure.calibration import believed, joined, reliability
from specdec.measure.choosing import LEARNING, Learned, chosen, paths_of
from specdec.measure.costs import Costs, costs, operations
from specdec.measure.decoded_prompts import DecodedPrompts, Until, counting, decoded_in_turn
from specdec.measure.forced import (
    ForcedText,
    along,
    decoded,
    drafting,
    forced,
    foreseen,
    prompt_counts,
    shift,
    whole,
)
from specdec.measure.machine import machine_of
from specdec.measure.results import (
    RIVAL,
    Described,
    Measured,
    PromptCounts,
    Results,
    Sample,
    Slice,
)
from specdec.measure.setup import Setup
from specdec.measure.slices import PromptTraits, conversations_of, slices
from specdec.progress import bars, console
from specdec.ranks import ALONE, Ranks
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Static
from specdec.targets.target import Target
from specdec.theory.alpha import repeated_ngrams
from specdec.theory.intervals import (
    FEWEST,
    Interval,
    product_interval,
    ratio_interval,
    share_interval,
    summed_by,
)
from specdec.theory.leviathan import pass_cost
from specdec.theory.oracle import Oracle, oracle

LONG = 8  # tokens per speculation step for the oracle, which must see where rejections fall
SHOWN = 6  # sample responses that are kept in the results
FASTEST = "fastest"  # the title of the shape that was expected to be fastest


@dataclass(frozen=True)
class Rival:
    """Another draft for the same target, with the topology of its own settings."""

    drafter: Drafter
    cfg: DecodeConfig


@dataclass
class Subject:
    """The subject of a measurement: a run's draft, for its target, on some data. A second draft,
    `combined`, may take turns with it, and so may a `rival`, whose α is measured too. If the target
    was trained too, `original` is the untrained one. `origin` describes the prompts."""

    name: str  # name of the run
    target: Target
    drafter: Drafter
    data: str
    combined: Drafter | None = None
    original: Target | None = None
    origin: str = Results.origin
    rival: Rival | None = None


def evaluate(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    cfg: DecodeConfig,
    progress: Progress | None = None,
    words: Sequence[str] = (),
    log: Path | None = None,
    ranks: Ranks = ALONE,
    earlier: Sequence[Sequence[tuple[str, str]]] = (),
    traits: Sequence[PromptTraits] = (),
    left: Callable[[], float] | None = None,
) -> Results:
    """Measure a drafter on the first `cfg.prompts` prompts, in turn with vanilla decoding, with its
    fastest topology if `cfg.fastest` (once, if that is the requested one), and with
    `subject.combined` and `subject.rival` if there are any. A topology or a length is chosen on the
    prompts after those. `words` are the user's last turns in each prompt, for the samples (default:
    the decoded prompt), and `earlier` the turns before, as roles and texts. `traits` give the
    conversation and the properties of each prompt; prompts that differ in a property have their own
    figures. `left` returns the remaining
    seconds: then as many prompts are decoded at the first temperature as its part of them allows,
    but at least `FEWEST_PROMPTS`, and the same prompts at other temperatures. The draft's
    speculation steps are appended to the file `log`. All of `ranks` call this with the same
    arguments and get the same results. Raises UserError if there is no prompt."""
    target, drafter = subject.target, subject.drafter
    asked = [list(p) for p in prompts[: cfg.prompts]]
    if not asked:
        raise UserError("no prompts to evaluate on: give a prompts file or held-out conversations")
    require_room(target, asked, cfg.max_new_tokens)
    cfg = replace(cfg, batch=min(cfg.batch, len(asked)))
    others = [list(p) for p in prompts[cfg.prompts : cfg.prompts + LEARNING]]
    learning = others or asked
    setup = replace(Setup.from_config(target, cfg, ranks), brief=left is not None)
    ways = _shapes(drafter, cfg)
    first = [ways[0][0]]
    if (rival := subject.rival) is not None:
        of_rival = [(RIVAL + t, each, own) for t, each, own in _shapes(rival.drafter, rival.cfg)]
        ways += of_rival
        first.append(of_rival[0][0])
    # its chains have the length that it was built for
    if (combined := subject.combined) is not None:
        own = replace(cfg, gamma=cfg.gamma if cfg.tree else None, fastest=False)
        ways.append((combined.config.name, combined, own))
    drafts = {id(each): each for _, each, _ in ways}.values()
    together = min(counting(setup, cfg, asked, each.needs) for each in drafts)
    measured: dict[str, list[Measured]] = {title: [] for title, _, _ in ways}
    known: dict[tuple[Drafter, str], Costs] = {}
    progress = progress or bars(console, shown=False)
    task = progress.add_task("decoding", total=len(asked) * len(cfg.temperatures))
    until = None
    for number, temperature in enumerate(cfg.temperatures):
        if left is not None:
            until = Until(left, left() / len(cfg.temperatures)) if not number else None
        choices = [chosen(setup, own, each, temperature, learning) for _, each, own in ways]
        repeated = {
            n
            for n, (way, _) in enumerate(choices)
            if any(same_way(way, before) for before, _ in choices[:n])
        }
        at_this = [x for n, x in enumerate(zip(ways, choices, strict=True)) if n not in repeated]
        tell = partial(progress.update, task)
        responses = decoded_in_turn(
            setup, cfg, [way for _, (way, _) in at_this], asked, together, tell, until
        )
        asked = asked[: len(responses[0].drafted)]  # with `until`, these were all
        cfg = replace(cfg, prompts=len(asked), timed=responses[0].timed) if until else cfg
        for ((title, each, own), (way, learned)), decodings in zip(at_this, responses, strict=True):
            key = each, repr(way.shape)
            cost = known[key] = known.get(key) or costs(setup, way, asked[0])
            groups = conversations_of(traits, len(asked))
            one = _figures(setup, recorded_way(title, own, way), learned, decodings, cost, groups)
            if title in first:
                _by_forcing(setup, one, way, decodings, groups)
                one.oracle = _oracle(setup, way, cost, learning, decodings.steps)
                one.samples = _samples(target, decodings, words, earlier)
                one.fastest = any(ways[n][1] is each for n in repeated)
                if title == first[0] and log is not None and ranks.rank == 0:
                    log_steps(log, decodings.drafted)
            one.slices = _slices(one, decodings, traits)
            measured[title].append(one)
    progress.remove_task(task)
    for (_, each, _), of_way in zip(ways, measured.values(), strict=True):
        if not of_way:
            continue
        chains = Way(each, Chain(of_way[0].way.gamma))
        c_hat, step = ranks.first(partial(operations, target, chains, asked[0]))
        for one in of_way:
            one.operations = c_hat
    results = Results(
        name=subject.name,
        drafter=drafter.config.name,
        target=target.name,
        data=subject.data,
        origin=subject.origin,
        prompt_keys=[of_value(ids) for ids in asked],
        conversations=_numbers(conversations_of(traits, len(asked))),
        target_fingerprint=target.fingerprint(),
        prompts=len(asked),
        timed=responses[0].timed,
        counting=together,
        processes=ranks.world,
        batch=cfg.batch,
        max_new_tokens=cfg.max_new_tokens,
        machine=machine_of(target),
        rendering=target.rendering,
        rejected_layouts=rejected_layouts(drafter, target),
        measured=[one for of_way in measured.values() for one in of_way],
        learned_on=f"{len(others)} other prompts" if others else "the measured prompts",
        calibrated_on=drafter.calibrations.prompts,
        target_operations=step,
        weight_bytes=sum(w.numel() * w.element_size() for w in {*target.model.parameters()}),
    )
    before = subject.original
    if before is not None and before is not target:
        results.shift = shift(before, target, asked, cfg.max_new_tokens, cfg.batch, ranks)
    return results


def _shapes(drafter: Drafter, cfg: DecodeConfig) -> list[tuple[str, Drafter, DecodeConfig]]:
    """The configurations in which a draft alone is measured: title, draft and settings."""
    ways = [("trees" if cfg.tree else "chains", drafter, cfg)]
    if cfg.fastest:
        ways.append((FASTEST, drafter, replace(cfg, tree="static", fastest=False)))
    return ways


def same_way(one: Way, other: Way) -> bool:
    """Whether two decoding configurations draft the same tokens and verify them alike, so that one
    measurement counts for both. Adaptive draft lengths learn, so two of them are never the same."""
    fixed = one.draft_length is other.draft_length is None
    how = [
        (w.sampler, w.verification, w.greedy_draft, w.compiled, repr(w.shape)) for w in (one, other)
    ]
    return fixed and one.drafter is other.drafter and how[0] == how[1]


def recorded_way(title: str, cfg: DecodeConfig, way: Way) -> Described:
    """A record of the decoding configuration for `cfg`."""
    assert way.drafter is not None and way.shape is not None
    greedy, method = way.sampler.greedy, way.verification_method
    return Described(
        title=title,
        drafter=way.drafter.config.name,
        temperature=way.sampler.temperature,
        gamma=way.shape.depth,
        nodes=way.shape.nodes,
        chain=isinstance(way.shape, Chain),
        verification="greedy" if greedy and method.at_zero is None else method.name,
        lossless=method.keeps_p(greedy),
        tree=cfg.tree,
        draft_length=cfg.draft_length,
        top_k=way.sampler.top_k,
        top_p=way.sampler.top_p,
        greedy_draft=way.greedy_draft,
        compiled=way.compiled,
        asked=cfg.verification,
        paths=paths_of(way.shape) if isinstance(way.shape, Static) else None,
        branches=cfg.branches if cfg.tree == "dynamic" else None,
        draft_length_settings=dict(cfg.draft_length_settings),
    )


def _numbers(conversations: list[int]) -> list[int]:
    """The numbers of conversations, or none if each has one prompt."""
    return conversations if len({*conversations}) < len(conversations) else []


def _figures(
    setup: Setup,
    way: Described,
    learned: Learned,
    decodings: DecodedPrompts,
    cost: Costs,
    groups: Sequence[int],
) -> Measured:
    """The counts and timings of one decoding configuration. `groups` are the conversations of the
    prompts."""
    gamma, depths, steps = way.gamma, range(way.gamma), decodings.steps

    def of_prompts(count: Callable[[SpeculationStep], float]) -> list[float]:
        """The sum of a count over the speculation steps of each conversation."""
        return summed_by(groups, [sum(map(count, g.steps)) for g in decodings.drafted])

    def accepted(k: int, of_tested: bool = False) -> Interval:
        """The share of speculation steps that accepted depth k: of all, or of those that tested
        it."""
        tested = of_prompts(lambda r: r.tested > k or not of_tested)
        return share_interval(of_prompts(lambda r: r.accepted > k), tested)

    firsts = [sum(decodings.of_batches[:n]) for n in range(len(decodings.of_batches))]
    of_batch = [groups[first] for first in firsts]  # the conversation that a batch begins with
    plain_seconds, plain_tokens, seconds, row_steps, step_seconds = (
        summed_by(of_batch, column)
        for column in (
            decodings.plain_seconds,
            decodings.plain_tokens,
            decodings.seconds,
            decodings.row_steps,
            decodings.speculation_seconds,
        )
    )
    plain_step, a_step = (plain_seconds, plain_tokens), (row_steps, step_seconds)
    emitted = summed_by(groups, [g.emitted for g in decodings.drafted])
    kept = emitted, of_prompts(lambda _: 1)
    timed_speedup = ratio_interval(plain_seconds, seconds)
    if decodings.timed < len(decodings.drafted):
        speedup = product_interval([kept], [plain_step, a_step])
        tokens_per_second = product_interval([kept], [a_step])
    else:
        speedup = timed_speedup
        tokens_per_second = ratio_interval(plain_tokens, seconds)
    if len(seconds) < FEWEST:  # the counts alone would make too narrow an interval
        speedup = speedup.without_interval()
        tokens_per_second = tokens_per_second.without_interval()
    same = sum(p.ids == d.ids for p, d in zip(decodings.plain, decodings.drafted, strict=True))
    return Measured(
        way=way,
        tau=ratio_interval(*kept).within(1, gamma + 1),
        speedup=speedup,
        timed_speedup=timed_speedup,
        tokens_per_second=tokens_per_second,
        plain_tokens_per_second=ratio_interval(plain_tokens, plain_seconds),
        speculation_steps=len(steps),
        drafted_per_step=ratio_interval(of_prompts(lambda r: r.nodes), kept[1]),
        accepted_lengths=[sum(r.accepted == n for r in steps) for n in range(gamma + 1)],
        drafted=[sum(r.drafted > k for r in steps) for k in depths],
        accepted=[sum(r.accepted > k for r in steps) for k in depths],
        repetition=share_interval(
            *(
                summed_by(groups, column)
                for column in zip(*(repeated_ngrams(g.ids) for g in decodings.plain))
            )
        ),
        costs=cost,
        reached=[accepted(k) for k in depths],
        conditional_acceptance=[accepted(k, of_tested=True) for k in depths],
        identical=same if way.temperature == 0 else None,
        learned=learned,
        prompts=[PromptCounts(g.emitted, len(g.steps)) for g in decodings.drafted],
        times=decodings.times,
        seconds_spent={
            phase: sum(s[phase] for s in decodings.spent) for phase in decodings.spent[0]
        },
    )


def _by_forcing(
    setup: Setup, one: Measured, way: Way, decodings: DecodedPrompts, groups: Sequence[int]
) -> None:
    """Add the figures of teacher forcing for the draft along the responses."""
    assert way.drafter is not None
    target, gamma, greedy = setup.target, one.way.gamma, way.sampler.greedy
    drafter = drafting(way.drafter, gamma)
    forcing = TeacherForcing(drafter, target, Sampler(1.0) if greedy else way.sampler)

    def texts(responses: tuple[Generation, Generation]) -> tuple[ForcedText, ForcedText]:
        """The figures along one prompt's vanilla response, and along the drafted one."""
        plain, drafted = responses
        read = along(forcing, target, drafted.prompt, [*drafted.ids, *drafted.overrun])
        at_visits = decoded(read, drafted, gamma, greedy)
        if plain.ids != drafted.ids:
            read = along(forcing, target, plain.prompt, plain.ids)
        return whole(read, len(plain.ids), drafter.depth), at_visits

    both = setup.ranks.map([*zip(decodings.plain, decodings.drafted, strict=True)], texts)
    every, visited = map(list, zip(*both, strict=True))
    beliefs = []
    if not drafter.copies:
        beliefs = [believed(t, way.variant, gamma) for t in visited]
    beliefs = joined(beliefs, groups)
    calibration = drafter.calibrations.for_variant(way.variant)
    one.forced = forced(every, visited, gamma, groups)
    one.foreseen = None if greedy else foreseen(every, visited, gamma, groups)
    one.confidence = reliability(beliefs) if beliefs else []
    one.calibrated = reliability(beliefs, calibration) if beliefs and calibration else []
    one.prompts = [
        prompt_counts(text, plain, drafted, gamma, greedy)
        for text, plain, drafted in zip(every, decodings.plain, decodings.drafted, strict=True)
    ]


def _slices(
    one: Measured, decodings: DecodedPrompts, traits: Sequence[PromptTraits]
) -> dict[str, Slice]:
    """The figures of prompts that differ in a trait or in length."""
    both = [*zip(decodings.plain, decodings.drafted, strict=True)]
    lengths = [(len(plain.prompt), len(plain.ids)) for plain, _ in both]
    same = [plain.ids == drafted.ids for plain, drafted in both]
    greedy = one.way.temperature == 0
    return slices(traits, lengths, one.prompts, one.times, same if greedy else None)


def _samples(
    target: Target,
    decodings: DecodedPrompts,
    words: Sequence[str],
    earlier: Sequence[Sequence[tuple[str, str]]],
) -> list[Sample]:
    """The first responses, with their prompts."""

    def text(ids: Sequence[int]) -> str:
        return str(target.tokenizer.decode(ids, skip_special_tokens=True))

    shown = decodings.drafted[:SHOWN]
    said = [*words[: len(shown)], *(text(g.prompt) for g in shown[len(words) :])]
    before = [*earlier[: len(shown)], *([()] * len(shown[len(earlier) :]))]
    coloured = [pieces_of(target.tokenizer, g) for g in shown]
    return [
        Sample(prompt, text(g.ids), g.emitted / max(1, len(g.steps)), [*turns], parts)
        for prompt, g, turns, parts in zip(said, shown, before, coloured, strict=True)
    ]


def _oracle(
    setup: Setup, way: Way, cost: Costs, learning: list[list[int]], steps: list[SpeculationStep]
) -> Oracle | None:
    """The bound of `specdec.theory.oracle.oracle`, for chains: from speculation steps of `LONG`
    tokens on some prompts if the drafter can draft that many, otherwise from the measured steps."""
    drafter, shape = way.drafter, way.shape
    if not isinstance(shape, Chain) or drafter is None:
        return None
    if (long := min(LONG, drafter.limits.depth or LONG)) > shape.depth:
        longer = replace(way, shape=Chain(long), draft_length=None, compiled=False)
        steps = setup.steps(learning[:LEARNING], longer)
    if not any(r.drafted for r in steps):
        return None
    pairs = [(r.drafted, r.accepted) for r in steps]
    return oracle(pairs, cost.c.value, pass_cost({shape.depth: cost.v.value}))
