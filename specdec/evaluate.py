"""Evaluation: a drafter on held-out prompts, measured by the decoder and by teacher forcing.

For each temperature, every prompt is answered plainly and speculatively in turn in the same
process; α is then taken over the target's own plain text, at all its positions and at the
anchors that the decoder visited. All intervals are bootstraps over prompts.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.choose import Choose
from specdec.context import Needs
from specdec.decode import Generation, Rows, generate
from specdec.drafters.base import Drafter
from specdec.errors import UserError, nearest, require
from specdec.forcing import Answer, TeacherForcing, answers, batch_of
from specdec.metrics import Interval, ratio_interval, repetition, visits
from specdec.sampler import Sampler
from specdec.target import Target
from specdec.trees import Chain
from specdec.verify import RULES

VARIANTS = ("sampled", "greedy_draft", "greedy")


@dataclass
class DecodeConfig:
    """How drafts are decoded and measured.

    `gamma` null drafts as deep as was trained. `temperatures` are each measured apart, with
    `top_p` and `top_k`. `repeats` times every prompt is decoded, for steadier seconds; counts
    come from the first.
    """

    gamma: int | None = None
    prompts: int = 40
    max_new_tokens: int = 96
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_p: float = 1.0
    top_k: int = 0
    rule: str = "block"
    greedy_draft: bool = False
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "repeats"):
            value = getattr(self, name)
            require(value >= 1, f"decode.{name}={value}: give 1 or more")
        require(
            self.gamma is None or self.gamma >= 1,
            f"decode.gamma={self.gamma}: give 1 or more, or null for the trained depth",
        )
        require(bool(self.temperatures), "decode.temperatures is empty: give at least one")
        require(
            self.rule in RULES, f"decode.rule={self.rule!r} is unknown{nearest(self.rule, RULES)}"
        )
        for temperature in self.temperatures:
            Sampler(temperature, self.top_k, self.top_p)  # raises where one is out of range


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    cfg: DecodeConfig,
    on_prompt: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure a drafter on prompts; a JSON-able dict (see `specdec.report` for its reader).

    `on_prompt` is called with a line of progress after each prompt at each temperature. Raises
    UserError where there is no prompt.
    """
    chosen = [list(p) for p in prompts[: cfg.prompts]]
    if not chosen:
        raise UserError("no prompts to evaluate on: give a prompts file or held-out conversations")
    gamma = drafter.depth if cfg.gamma is None else cfg.gamma
    if drafter.max_depth is not None and gamma > drafter.max_depth:
        raise UserError(
            f"decode.gamma={gamma}: this drafter has {drafter.max_depth} heads and drafts no more"
        )
    generate(target, chosen[0], max_new_tokens=8, drafter=drafter, gamma=gamma)  # warm up
    results = []
    for temperature in cfg.temperatures:
        sampler = Sampler(temperature, cfg.top_k, cfg.top_p)
        results.append(_at(target, drafter, chosen, cfg, gamma, sampler, on_prompt))
    return {
        "gamma": gamma,
        "rule": cfg.rule,
        "prompts": len(chosen),
        "max_new_tokens": cfg.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "costs": costs(target, drafter, chosen[0], gamma),
        "temperatures": results,
    }


def _at(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    cfg: DecodeConfig,
    gamma: int,
    sampler: Sampler,
    on_prompt: Callable[[str], None] | None,
) -> dict[str, Any]:
    """All figures at one temperature."""
    plain: list[Generation] = []
    spec: list[Generation] = []
    plain_seconds, spec_seconds = [], []
    for i, prompt in enumerate(prompts):
        pairs = []
        for repeat in range(cfg.repeats):
            options: dict[str, Any] = {
                "max_new_tokens": cfg.max_new_tokens,
                "sampler": sampler,
                "seed": cfg.seed + i * 1009 + repeat,
            }
            both = [
                generate(target, prompt, **options),
                generate(
                    target,
                    prompt,
                    drafter=drafter,
                    gamma=gamma,
                    rule=cfg.rule,
                    greedy_draft=cfg.greedy_draft,
                    **options,
                ),
            ]
            pairs.append(both)
        plain.append(pairs[0][0])
        spec.append(pairs[0][1])
        plain_seconds.append(
            statistics.median(p.seconds / max(1, len(p.ids) - 1) for p, _ in pairs)
        )
        spec_seconds.append(statistics.median(s.seconds / max(1, len(s.ids) - 1) for _, s in pairs))
        if on_prompt:
            so_far = sum(g.emitted for g in spec) / max(1, sum(len(g.rounds) for g in spec))
            on_prompt(f"T={sampler.temperature:g}  τ {so_far:.2f}")

    rounds = [r for g in spec for r in g.rounds]
    tested = [sum(r.drafted > k and r.accepted >= k for r in rounds) for k in range(gamma)]
    accepted = [sum(r.accepted > k for r in rounds) for k in range(gamma)]
    # seconds per token, weighted by the plain answer's tokens: the same work on both sides
    weight = [max(1, len(p.ids) - 1) for p in plain]
    plain_time = [w * s for w, s in zip(weight, plain_seconds, strict=True)]
    spec_time = [w * s for w, s in zip(weight, spec_seconds, strict=True)]
    forced = _forced(target, drafter, plain, sampler)
    return {
        "temperature": sampler.temperature,
        "tau": _interval([g.emitted for g in spec], [len(g.rounds) for g in spec]),
        "speedup": _interval(plain_time, spec_time),
        "plain_tokens_per_second": _interval(weight, plain_time),
        "tokens_per_second": _interval(weight, spec_time),
        "rounds": len(rounds),
        "accepted_lengths": [sum(r.accepted == n for r in rounds) for n in range(gamma + 1)],
        "drafted": [sum(r.drafted > k for r in rounds) for k in range(gamma)],
        "accepted": accepted,
        "conditional_acceptance": [a / t if t else 0.0 for a, t in zip(accepted, tested)],
        "seconds_spent": {k: sum(g.spent[k] for g in spec) for k in ("draft", "verify", "judge")},
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


def _forced(
    target: Target, drafter: Drafter, plain: list[Generation], sampler: Sampler
) -> dict[str, Any]:
    """Teacher-forced α over the target's own text: at all positions, and at visited anchors.

    `all` divides by every anchor; `visited` weighs an anchor by how often a decoder starts a
    round there. At T = 0 the greedy walk is the decoder's own, so that `visited.greedy` is what
    the decoder counts, depth by depth (unconditional, as engines report it).
    """
    warm = sampler if not sampler.greedy else Sampler(1.0)
    forcing = TeacherForcing(drafter, target, warm)
    found: list[Answer] = []
    for generation in plain:
        if len(generation.ids) > drafter.depth + 1:
            found += forced_answers(forcing, target, generation.prompt, generation.ids, warm)
    every: dict[str, list[dict[str, Any]]] = {}
    visited: dict[str, list[dict[str, Any]]] = {}
    for variant in VARIANTS:
        tables = [getattr(a.alpha, variant).double() for a in found]
        walked = [visits(t) for t in tables]
        every[variant], visited[variant] = [], []
        for k in range(drafter.depth):
            every[variant].append(
                _interval([float(t[:, k].sum()) for t in tables], [len(t) for t in tables])
            )
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


@torch.inference_mode()
def costs(
    target: Target, drafter: Drafter, prompt: list[int], gamma: int, repeats: int = 15
) -> dict[str, float]:
    """Medians in seconds after a prompt: one plain step, one verification of γ + 1 tokens, one
    drafting of γ. From them c = draft / (γ · step), the cost of one draft step over one target
    step, and v = verify / step."""
    rows = Rows([prompt], target.device)
    cache, draft_cache = target.new_cache(), drafter.new_cache()
    features, final = target.features(rows.ids(), drafter.needs, cache=cache)
    cache.keep([len(prompt)])
    first = int(target.logits(final[:, -1]).argmax(-1))
    rows.extend([[first]], features, [len(prompt)], None)
    choose = Choose(Sampler(0.0), "fixed", [], drafter.vocab_S, target.vocab_size)
    shape = Chain(gamma)

    def clock(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(repeats + 2):
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def step(count: int, needs: Needs) -> None:
        _, hidden = target.features(rows.anchors().expand(1, count), needs, cache=cache)
        target.logits(hidden).float().argmax(-1)
        cache.drop()

    plain = clock(lambda: step(1, Needs()))
    verify = clock(lambda: step(gamma + 1, drafter.needs))
    draft = clock(lambda: drafter.draft(rows.context(), shape, choose, draft_cache))
    return {
        "step_seconds": plain,
        "verify_seconds": verify,
        "draft_seconds": draft,
        "c": draft / gamma / plain,
        "v": verify / plain,
    }


def _interval(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    interval: Interval = ratio_interval(numerators, denominators)
    return {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}
