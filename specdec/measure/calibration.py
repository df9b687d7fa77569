"""Measures the gap between a draft's confidence and its acceptance, and fits a calibration that
reduces it.

Confidence and acceptance are compared at the anchors where a decoder's speculation steps started
and, at each depth, over the cases in which all earlier tokens were accepted. The comparison uses
teacher forcing, where p gives the probability of acceptance, so no outcome has to be drawn.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specdec.decoding.config import DecodeConfig
from specdec.decoding.way import Way
from specdec.drafters.base import Drafter
from specdec.errors import require
from specdec.forcing.teacher import TeacherForcing
from specdec.measure.forced import ForcedText, along, decoded
from specdec.measure.results import Bin, Reliability
from specdec.measure.setup import Setup
from specdec.ranks import ALONE, Ranks
from specdec.sampling.confidence import Calibration, Calibrations, logit
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.targets.target import Target
from specdec.theory.intervals import share_interval
from specdec.theory.logistic import minimise

CALIBRATING = 24  # prompts for a calibration
AT_ONCE = 8  # prompts answered together
BINS = 10  # bins of equal width, for the calibration error
LEAST = 1e-12  # the smallest confidence, and the smallest divisor
PRIOR = 1.0  # strength of the prior from the depth before; see `fit`


class ConfidenceAndAcceptance(NamedTuple):
    """The drafted tokens at the anchors of one response, each [T, K]."""

    confidence: Tensor
    accepted: Tensor  # the probability that the target accepts the token
    weight: Tensor  # P(all tokens before it were accepted); 0 where confidence is 0


def believed(text: ForcedText, variant: str, gamma: int) -> ConfidenceAndAcceptance:
    """The first γ tokens drafted at the anchors of a text that the target wrote. A drafted token
    counts as accepted, for the weights of later tokens, if it is the text's own. If drafts are
    drawn from q, the text's token x, drawn from p, represents it with weight min(1, q(x) /
    p(x))."""
    measured, drawn = text.measured, variant == "sampled"
    accepted = measured.kept if drawn else getattr(measured.alpha, variant)
    went_on = measured.ratio.clamp_max(1) if drawn else measured.written
    c = measured.drawn if drawn else measured.picked
    c, accepted, went_on = (x[text.anchors, :gamma] for x in (c, accepted, went_on))
    before = torch.ones_like(went_on)
    before[:, 1:] = went_on[:, :-1].cumprod(-1)
    return ConfidenceAndAcceptance(c, accepted, before * (c > 0))


def calibrate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    cfg: DecodeConfig,
    ranks: Ranks = ALONE,
) -> Calibrations:
    """The drafter's calibrations, fitted at the temperatures in `cfg` to its chains in responses to
    `prompts`, on which nothing else should be measured. All temperatures above 0 share one fit. If
    `cfg` lacks 0, or any temperature above it, the calibrations for that are unchanged. The prompts
    are distributed over `ranks`. Raises UserError for a drafter that copies."""
    name = drafter.config.name
    require(not drafter.copies, f"{name} copies tokens: it has no confidence to calibrate")
    beliefs: dict[str, list[ConfidenceAndAcceptance]] = {}
    gamma = drafter.depth if cfg.gamma is None else cfg.gamma
    for temperature in cfg.temperatures:
        sampler = Sampler(temperature, cfg.top_k, cfg.top_p)
        way = Way(drafter, Chain(gamma), sampler, greedy_draft=cfg.greedy_draft)
        forcing = TeacherForcing(drafter, target, Sampler(1.0) if sampler.greedy else sampler)
        variants = ("greedy",) if sampler.greedy else ("greedy_draft", "sampled")
        of_batch = partial(
            _believed, Setup.from_config(target, cfg), way, forcing, prompts, variants
        )
        for responses in ranks.map(range(0, len(prompts), AT_ONCE), of_batch):
            for by_variant in responses:
                for variant, response in zip(variants, by_variant, strict=True):
                    beliefs.setdefault(variant, []).append(response)
    fitted = {name: fit(responses) for name, responses in beliefs.items()}
    return replace(drafter.calibrations, **fitted, prompts=len(prompts))


def _believed(
    setup: Setup,
    way: Way,
    forcing: TeacherForcing,
    prompts: Sequence[Sequence[int]],
    variants: Sequence[str],
    first: int,
) -> list[list[ConfidenceAndAcceptance]]:
    """For each response to the `AT_ONCE` prompts from `first` on: its drafted tokens, by
    variant."""
    assert way.shape is not None
    gamma = way.shape.depth
    some, seed, beliefs = prompts[first : first + AT_ONCE], setup.seed + first, []
    seeds = range(seed, seed + len(some))
    for response in setup.responses(some, way, seeds=seeds):
        read = along(forcing, setup.target, response.prompt, [*response.ids, *response.overrun])
        text = decoded(read, response, gamma, way.sampler.greedy)
        beliefs.append([believed(text, variant, gamma) for variant in variants])
    return beliefs


def fit(responses: Sequence[ConfidenceAndAcceptance]) -> Calibration:
    """The calibration that minimises, depth by depth, the cross-entropy with acceptance. Log scale
    and shift are regularised towards those of the depth before (at depth 0: 0, the identity), so a
    depth that was seldom reached is calibrated almost like the one before."""
    map_2, maps, shares = torch.zeros(2, dtype=torch.float64), list[Tensor](), [0.5]
    with torch.inference_mode(False), torch.enable_grad():  # even when called during decoding
        for k in range(responses[0].confidence.shape[1]):
            columns = (torch.cat([x[:, k] for x in xs]) for xs in zip(*responses, strict=True))
            whole = ConfidenceAndAcceptance(*(x.double().cpu().clone() for x in columns))
            map_2 = _fitted(whole, map_2)
            maps.append(map_2)
            kept, seen = float((whole.weight * whole.accepted).sum()), float(whole.weight.sum())
            shares.append((PRIOR * shares[-1] + kept) / (PRIOR + seen))
    log_scale_K, shift_K = torch.stack(maps, 1)
    return Calibration(log_scale_K.exp().tolist(), shift_K.tolist(), shares[1:])


def _fitted(at_N: ConfidenceAndAcceptance, before_2: Tensor) -> Tensor:
    """Log scale and shift [2] for the tokens of one depth."""
    logit_N = logit(at_N.confidence.clamp_min(LEAST).log())
    map_2 = before_2.clone().requires_grad_()

    def loss() -> Tensor:
        x_N = map_2[0].exp() * logit_N + map_2[1]
        misfit_N = binary_cross_entropy_with_logits(x_N, at_N.accepted, reduction="none")
        distance = (map_2 - before_2).square().sum()
        return (misfit_N * at_N.weight).sum() + PRIOR / 2 * distance

    minimise(loss, map_2)
    return map_2.detach()


def joined(
    responses: Sequence[ConfidenceAndAcceptance], groups: Sequence[int]
) -> list[ConfidenceAndAcceptance]:
    """The drafted tokens of each group of responses, such as those of one conversation."""
    of: dict[int, list[ConfidenceAndAcceptance]] = {}
    for group, response in zip(groups, responses, strict=False):
        of.setdefault(group, []).append(response)
    return [ConfidenceAndAcceptance(*map(torch.cat, zip(*some))) for some in of.values()]


def reliability(
    responses: Sequence[ConfidenceAndAcceptance], calibration: Calibration | None = None
) -> list[Reliability]:
    """Confidence, raw or calibrated, and acceptance at each depth."""
    by_depth = []
    for k in range(responses[0].confidence.shape[1]):
        sums: list[list[list[float]]] = []  # by response and bin: weight, confidence, acceptance
        for response in responses:
            c, accepted, weight = (x[:, k] for x in response)
            if calibration is not None:
                c = calibration.log(c.clamp_min(LEAST).log(), k).exp()
            bin_T = (c * BINS).long().clamp(0, BINS - 1)
            one_BT = torch.nn.functional.one_hot(bin_T, BINS).T.to(weight)
            columns = torch.stack([weight, weight * c, weight * accepted], -1)
            sums.append((one_BT @ columns).tolist())
        by_bin = list(zip(*sums, strict=True))
        bins = [_bin(list(of_bin)) for of_bin in by_bin if sum(w for w, _, _ in of_bin) > 0]
        whole = _bin([[sum(x) for x in zip(*response, strict=True)] for response in sums])
        gaps = sum(abs(b.predicted - b.observed.value) * b.weight for b in bins)
        by_depth.append(Reliability(whole, gaps / max(whole.weight, LEAST), bins))
    return by_depth


def _bin(sums: Sequence[Sequence[float]]) -> Bin:
    """A bin, from its sums of weight, confidence and acceptance over the tokens of each
    response."""
    weight, c, accepted = zip(*sums, strict=True)
    total = sum(weight)
    return Bin(sum(c) / max(total, LEAST), share_interval(accepted, weight), total)
