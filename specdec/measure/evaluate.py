"""Evaluation: a drafter on held-out prompts, measured by the decoder and by teacher forcing.

For each temperature, every batch of prompts is answered plainly and speculatively in turn in the
same process; α is then taken over the target's own plain text, at all its positions and at the
anchors that the decoder visited. Intervals are bootstraps over prompts, of seconds over batches.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from specdec.decoding.answers import Generation
from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode, fitting_rule
from specdec.decoding.length import oracle
from specdec.decoding.policy import Length
from specdec.decoding.rules import rule_name
from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.forcing.teacher import Answer, TeacherForcing, answers, batch_of
from specdec.measure.costs import costs
from specdec.measure.strategy import LEARNING, Strategy, strategy
from specdec.sampling.sampler import Sampler
from specdec.target.base import Target
from specdec.theory.alpha import repetition, visits
from specdec.theory.intervals import Interval, ratio_interval

VARIANTS = ("sampled", "greedy_draft", "greedy")


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    cfg: DecodeConfig,
    on_prompt: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure a drafter on the first `cfg.prompts` prompts; a JSON-able dict (see `specdec.report`
    for its reader). Where a tree or a stop classifier is chosen first, the prompts after those
    serve for it.

    `on_prompt` is called with a line of progress after each prompt at each temperature. Raises
    UserError where there is no prompt.
    """
    chosen = [list(p) for p in prompts[: cfg.prompts]]
    if not chosen:
        raise UserError("no prompts to evaluate on: give a prompts file or held-out conversations")
    cfg = replace(cfg, batch=min(cfg.batch, len(chosen)))
    learning = [list(p) for p in prompts[cfg.prompts : cfg.prompts + LEARNING]]
    batches = [chosen[i : i + cfg.batch] for i in range(0, len(chosen), cfg.batch)]
    results = []
    for temperature in cfg.temperatures:
        sampler = Sampler(temperature, cfg.top_k, cfg.top_p)
        how = strategy(cfg, target, drafter, learning or chosen, sampler)
        results.append(_at(target, drafter, batches, cfg, how, sampler, on_prompt))
    found = costs(
        target,
        drafter,
        chosen[0],
        how.shape,
        compiled=cfg.compile,
        batch=cfg.batch,
        max_new_tokens=cfg.max_new_tokens,
    )
    cost = {name: value["value"] for name, value in asdict(found).items()}
    for at in results:
        at["oracle"] = _oracle(at.pop("pairs"), cost)
    return {
        "gamma": how.shape.depth,
        "nodes": how.shape.nodes,
        "tree": cfg.tree,
        "length": cfg.length,
        "notes": {"paths": how.learned.paths} if how.learned.paths else {},
        "learned_on": f"{len(learning)} other prompts" if learning else "the measured prompts",
        "prompts": len(chosen),
        "batch": cfg.batch,
        "max_new_tokens": cfg.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "compiled": cfg.compile,
        "costs": cost,
        "temperatures": results,
    }


def _oracle(rounds: list[tuple[int, int]], cost: dict[str, float]) -> dict[str, Any] | None:
    """The bound of `specdec.decoding.length.oracle` for the rounds that were decoded."""
    if not any(drafted for drafted, _ in rounds):
        return None
    return oracle(rounds, cost["c"], None)._asdict()


def _at(
    target: Target,
    drafter: Drafter,
    batches: list[list[list[int]]],
    cfg: DecodeConfig,
    how: Strategy,
    sampler: Sampler,
    on_prompt: Callable[[str], None] | None,
) -> dict[str, Any]:
    """All figures at one temperature; seconds are of whole batches."""
    plain: list[Generation] = []
    spec: list[Generation] = []
    weight: list[int] = []  # of each batch, the tokens of its plain answers: the same on both sides
    plain_seconds, spec_seconds = [], []  # a token
    spent: list[dict[str, float]] = []
    rule = fitting_rule(cfg.rule, how.shape, sampler, cfg.greedy_draft)

    def both(policy: Length | None, first: int, repeat: int) -> tuple[list[Generation], ...]:
        """The batch that starts with prompt `first`, plainly and speculatively."""
        batch = batches[first // cfg.batch]
        options: dict[str, Any] = {
            "max_new_tokens": cfg.max_new_tokens,
            "sampler": sampler,
            "seeds": [cfg.seed + i * 1009 + repeat for i in range(first, first + len(batch))],
            "compiled": cfg.compile,
        }
        drafts: dict[str, Any] = {
            "drafter": drafter,
            "shape": how.shape,
            "length": policy,
            "rule": cfg.rule,
            "greedy_draft": cfg.greedy_draft,
        }
        return decode(target, batch, **options), decode(target, batch, **drafts, **options)

    policy, untimed = (how.length and how.length() for _ in range(2))
    for batch in batches:
        first = len(plain)
        if cfg.compile or not first:  # numbers of rows and tokens compile to graphs of their own
            both(untimed, first, 0)
        pairs = [both(policy, first, repeat) for repeat in range(cfg.repeats)]
        plain += pairs[0][0]
        spec += pairs[0][1]
        weight.append(_after_the_first(pairs[0][0]))
        plain_seconds.append(statistics.median(_seconds_a_token(p) for p, _ in pairs))
        spec_seconds.append(statistics.median(_seconds_a_token(s) for _, s in pairs))
        spent.append(max(pairs[0][1], key=lambda g: g.seconds).spent)
        if on_prompt:
            so_far = sum(g.emitted for g in spec) / max(1, sum(len(g.rounds) for g in spec))
            for _ in batch:
                on_prompt(f"T={sampler.temperature:g}  τ {so_far:.2f}")

    gamma = how.shape.depth
    rounds = [r for g in spec for r in g.rounds]
    tested = [sum(r.tested > k for r in rounds) for k in range(gamma)]
    accepted = [sum(r.accepted > k for r in rounds) for k in range(gamma)]
    plain_time = [w * s for w, s in zip(weight, plain_seconds, strict=True)]
    spec_time = [w * s for w, s in zip(weight, spec_seconds, strict=True)]
    forced = _forced(target, drafter, plain, sampler, gamma)
    return {
        "temperature": sampler.temperature,
        "rule": "greedy" if sampler.greedy and rule.at_zero is None else rule_name(rule),
        "lossless": rule.keeps_p(sampler.greedy),
        "pairs": [(r.drafted, r.accepted) for r in rounds],
        "drafted_per_round": sum(r.nodes for r in rounds) / max(1, len(rounds)),
        "tau": _interval([g.emitted for g in spec], [len(g.rounds) for g in spec]),
        "speedup": _interval(plain_time, spec_time),
        "plain_tokens_per_second": _interval(weight, plain_time),
        "tokens_per_second": _interval(weight, spec_time),
        "rounds": len(rounds),
        "accepted_lengths": [sum(r.accepted == n for r in rounds) for n in range(gamma + 1)],
        "drafted": [sum(r.drafted > k for r in rounds) for k in range(gamma)],
        "accepted": accepted,
        "conditional_acceptance": [a / t if t else 0.0 for a, t in zip(accepted, tested)],
        "seconds_spent": {k: sum(times[k] for times in spent) for k in spent[0]},
        "identical": sum(p.ids == s.ids for p, s in zip(plain, spec)) if sampler.greedy else None,
        "repetition": statistics.mean(repetition(p.ids) for p in plain),
        "alpha": forced,
        "samples": [
            {
                "prompt": target.tokenizer.decode(s.prompt[-160:], skip_special_tokens=True),
                "answer": target.tokenizer.decode(s.ids, skip_special_tokens=True),
                "tau": s.emitted / max(1, len(s.rounds)),
            }
            for s in spec[:6]
        ],
    }


def _after_the_first(batch: Sequence[Generation]) -> int:
    """Tokens after the first of each answer, which prefill emits; at least one."""
    return max(1, sum(len(g.ids) - 1 for g in batch))


def _seconds_a_token(batch: Sequence[Generation]) -> float:
    return max(g.seconds for g in batch) / _after_the_first(batch)


def _forced(
    target: Target, drafter: Drafter, plain: list[Generation], sampler: Sampler, gamma: int
) -> dict[str, Any]:
    """Teacher-forced α over the target's own text: at all positions, and at visited anchors.

    `all` divides by every anchor; `visited` weighs an anchor by how often a decoder of chains of γ
    starts a round there. At T = 0 the greedy walk is the decoder's own, so that `visited.greedy`
    is what the decoder counts, depth by depth (unconditional, as engines report it).
    """
    warm = sampler if not sampler.greedy else Sampler(1.0)
    forcing = TeacherForcing(drafter, target, warm)
    found: list[Answer] = []
    for generation in plain:
        ids = generation.ids
        if drafter.positions is not None:  # beyond them nothing is drafted either
            ids = ids[: max(0, drafter.positions - target.placed(generation.prompt))]
        if len(ids) > drafter.depth + 1:
            found += forced_answers(forcing, target, generation.prompt, ids, warm)
    every: dict[str, list[dict[str, Any]]] = {}
    visited: dict[str, list[dict[str, Any]]] = {}
    for variant in VARIANTS:
        tables = [getattr(a.alpha, variant).double() for a in found]
        walked = [visits(t[:, :gamma]) for t in tables]
        every[variant], visited[variant] = [], []
        for k in range(drafter.depth):
            every[variant].append(
                _interval([float(t[:, k].sum()) for t in tables], [len(t) for t in tables])
            )
            if k >= gamma:
                continue
            reached = [
                float((v * t[:, : k + 1].prod(-1)).sum())
                for t, v in zip(tables, walked, strict=True)
            ]
            visited[variant].append(_interval(reached, [float(v.sum()) for v in walked]))
    return {"all": every, "visited": visited}


@torch.no_grad()
def forced_answers(
    forcing: TeacherForcing, target: Target, prompt: list[int], ids: list[int], sampler: Sampler
) -> list[Answer]:
    """Acceptance at the anchors of one generated text, from the first that a decoder visits."""
    mask = [False] * len(prompt) + [True] * len(ids)
    batch = batch_of(target, forcing.drafter.needs, sampler, [prompt + ids], [mask])
    table = forcing(batch, measure=True)
    return answers(table, batch)


def _interval(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    interval: Interval = ratio_interval(numerators, denominators)
    return {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}
