"""Verification methods: the choice of drafted tokens to keep, and of the next token.

A draft is a tree of nodes below the anchor; a chain is a tree with one child per node. A
verification method maps the draft's tokens, the q they were drawn from and the target's p to the
*law* of the speculation step: the distribution of the end of the committed path, and that of the
next token. It is lossless if the committed tokens follow p, taken over the draft's randomness too.
`verify` draws from the law.

Most verification methods are local: a function judges the children of one node, from the anchor
downwards, so p is required only along the path taken. The others judge whole paths and require p
everywhere.

`p_BMV` is the target's distribution after each place.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from specdec.context import Proposal
from specdec.errors import UserError, require
from specdec.plugins import Plugins
from specdec.runtime.device import perhaps_any, row_groups
from specdec.sampling.choose import Choose
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.sampler import sample


class Law(NamedTuple):
    stop_BM: Tensor  # P(the committed path ends at this place); 0 = nothing is accepted
    next_BMV: Tensor  # distribution of the token that follows there


class Verdict(NamedTuple):
    accepted_B: Tensor  # number of nodes kept
    next_B: Tensor  # the token that the target adds
    path_BK: Tensor  # the kept nodes by depth, then -1; as wide as the batch's longest path


# (tokens_BC, q_BV or None, p_BV) -> take_BC, P(child is taken | those before it were not), 0 where
# there is no child; and rest_BV, the distribution of the next token when none is taken.
JudgeChildren = Callable[..., tuple[Tensor, Tensor]]
JudgeTree = Callable[..., Law]  # (proposal, p_BMV) -> Law
JudgeGreedily = Callable[..., Verdict]  # (proposal, logits_BMV) -> Verdict


@dataclass(frozen=True)
class VerificationMethod:
    """A function of one node's children or of the whole tree, and its guarantees.

    `siblings` is how the children of a node must be drawn: "none" means chains only, "without"
    replacement, "with" replacement (duplicates stay), or "fixed": chosen deterministically, as with
    a q of None. `at_zero` judges at temperature 0; None is `greedy`, which is lossless.
    `parameters` maps each name to its largest value; values must be above 0.
    """

    node: JudgeChildren | None = None
    whole: JudgeTree | None = None
    siblings: Literal["none", "without", "with", "fixed"] = "none"
    lossless: bool = True
    at_zero: JudgeGreedily | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    name: str = "this verification method"

    @property
    def trees(self) -> bool:
        return self.siblings != "none"

    def keeps_p(self, greedy: bool) -> bool:
        """Whether committed tokens follow the target's distribution, at temperature 0 (`greedy`) or
        above."""
        return self.at_zero is None if greedy else self.lossless

    def tuned(self, **values: float) -> "VerificationMethod":
        """This verification method with other parameters:
        VERIFICATION_METHODS["lenience"].tuned(factor=0.8). Raises UserError for a parameter that it
        does not have, or a value out of range."""
        known = f"; known: {', '.join(self.parameters)}"
        has = known if self.parameters else ", which has no parameters"
        for key, value in values.items():
            said = f"decode.verification: {key!r} is not a parameter of {self.name}{has}"
            require(key in self.parameters, said)
            most = self.parameters[key]
            bound = f" and at most {most:g}" if most < math.inf else ""
            said = f"decode.verification={self.name}: {key}={value}; give a number above 0{bound}"
            require(0 < value <= most, said)
        settings = ",".join(f"{key}={value:g}" for key, value in values.items())
        judges = {kind: getattr(self, kind) for kind in ("node", "whole", "at_zero")}
        tuned: dict[str, Any] = {k: partial(j, **values) for k, j in judges.items() if j}
        return replace(self, name=f"{self.name}:{settings}", **tuned)


# --- the verdict on a speculation step ----------------------------------------------------------


def judged(
    method: VerificationMethod, proposal: Proposal, logits_BMV: Tensor, choose: Choose
) -> Verdict:
    """The verdict for all rows, drawn at random; `logits_BMV` are logits after the processors."""
    if choose.sampler.greedy:
        if method.at_zero is not None:
            return method.at_zero(proposal, logits_BMV.float())
        return greedy(proposal, logits_BMV.float().argmax(-1))
    groups = row_groups(len(logits_BMV), logits_BMV[0].numel(), logits_BMV.device)
    draws, verdicts = choose.draws.groups(groups), list[Verdict]()
    for rows, of_rows in zip(groups, draws, strict=True):
        logits = logits_BMV[rows]
        row_B = torch.arange(len(logits), device=logits.device)

        def p_of(place_B: Tensor | None, x: Tensor = logits, row_B: Tensor = row_B) -> Tensor:
            return choose.sampler.probs(x if place_B is None else x[row_B, place_B])

        verdicts.append(verify(method, proposal.rows(rows), p_of, of_rows))
    choose.draws.regroup(draws)
    if len(verdicts) == 1:
        return verdicts[0]
    accepted_B, next_B = (torch.cat([v[i] for v in verdicts]) for i in (0, 1))
    paths = [path_K for v in verdicts for path_K in v.path_BK]
    return Verdict(accepted_B, next_B, pad_sequence(paths, batch_first=True, padding_value=-1))


def verify(
    method: VerificationMethod,
    proposal: Proposal,
    p_of: Callable[[Tensor | None], Tensor],
    draws: RowDraws,
) -> Verdict:
    """Draw a verdict from the law of the speculation step, for all rows at once. `p_of(place_B) ->
    p_BV` is the target's distribution after one place of each row, and `p_of(None) -> p_BMV` after
    all; local verification methods call it only for nodes that they reach. A row's verdict depends
    on its own draft and random numbers only. Raises ValueError for a tree if the verification
    method supports chains only."""
    B, device = len(proposal.tokens_BG), proposal.tokens_BG.device
    if not method.trees and proposal.parents_BG is not None:
        chain_BG = Proposal(proposal.tokens_BG).above_BG
        if bool(((proposal.above_BG != chain_BG) & (proposal.tokens_BG >= 0)).any()):
            raise ValueError("this verification method judges chains only, but the draft is a tree")
    row_B = torch.arange(B, device=device)
    at_B = torch.zeros_like(row_B)
    if method.whole is not None:
        p_BMV = p_of(None)
        nothing_drafted = Law(torch.ones_like(p_BMV[..., 0]), p_BMV)
        drafted = proposal.tokens_BG.shape[1] > 0
        return draw(method.whole(proposal, p_BMV) if drafted else nothing_drafted, proposal, draws)
    assert method.node is not None
    going_B1 = torch.ones_like(row_B[:, None], dtype=torch.bool)
    children_BMC, next_BV = proposal.children_BMC(), p_of(at_B)
    while bool(((child_BC := children_BMC[row_B, at_B]) > 0).any()):
        # a stopped row is judged again at its node, which gives the same next_BV
        tokens_BC = proposal.tokens_at(row_B[:, None], child_BC)
        take_BC, next_BV = method.node(tokens_BC, proposal.q_at(row_B, child_BC[:, 0]), next_BV)
        used_B = going_B1[:, 0] * (child_BC > 0).sum(-1)
        taken_BC = draws.uniform(child_BC.shape[1], used_B) < take_BC
        going_B1 = going_B1 & taken_BC.any(-1, keepdim=True)
        if not going_B1.any():
            break
        child_B1 = child_BC.gather(1, taken_BC.long().argmax(-1, keepdim=True))
        at_B = torch.where(going_B1, child_B1, at_B[:, None])[:, 0]
        next_BV = p_of(at_B)
    return verdict(proposal, at_B, sample(next_BV, draws.uniform(1)[:, 0]))


def draw(law: Law, proposal: Proposal, draws: RowDraws) -> Verdict:
    """A verdict drawn from a law: first the end of the path, then the next token."""
    uniform_B2 = draws.uniform(2)
    end_B = sample(law.stop_BM, uniform_B2[:, 0])
    row_B = torch.arange(len(end_B), device=end_B.device)
    return verdict(proposal, end_B, sample(law.next_BMV[row_B, end_B], uniform_B2[:, 1]))


# --- local verification methods: the children of one node ----------------------------------------


def rejection(
    tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor, replacement: bool = True
) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023, Algorithm 1: accept x with probability min(1, p(x) / q(x)); else the
    next token follows norm(max(p - q, 0)). With several children, that distribution replaces p for
    the next child: SpecInfer's multi-step speculative sampling (Miao et al. 2023, Algorithm 2).
    Without q, each child is a point mass."""
    takes = []
    for x_B1 in tokens_BC.split(1, -1):
        there_B1, index_B1 = x_B1 >= 0, x_B1.clamp_min(0)
        if q_BV is None:
            takes.append(torch.where(there_B1, p_BV.gather(-1, index_B1), 0.0).clamp_max(1))
            left_BV = p_BV.scatter(-1, index_B1, 0.0)
        else:
            takes.append(probability_ratio(p_BV, q_BV, x_B1).clamp_max(1))
            left_BV = (p_BV - q_BV).clamp_min(0)
        p_BV = torch.where(there_B1, normalised(left_BV, p_BV), p_BV)
        if q_BV is not None and not replacement and len(takes) < tokens_BC.shape[1]:
            q_BV = without_token(q_BV, index_B1)
    return torch.cat(takes, -1), p_BV


def recursive(tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Recursive rejection sampling without replacement (Jeon et al. 2024; Chen et al. 2024,
    Sequoia): like `rejection`, but when x is rejected, q becomes norm(q without x)."""
    return rejection(tokens_BC, q_BV, p_BV, replacement=False)


def point_mass(tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor) -> tuple[Tensor, Tensor]:
    """EAGLE's trees at T > 0 (Li et al. 2024), with children chosen without randomness: accept x
    with probability p(x); else p becomes norm(p without x). It never reads q, and is lossless."""
    return rejection(tokens_BC, None, p_BV)


def lenience(
    tokens_BC: Tensor, q_BV: Tensor | None, p_BV: Tensor, factor: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023, Appendix A.5: `rejection` with factor · q for q, factor in (0, 1].
    Lossy, but no token becomes likelier than p / factor."""
    if q_BV is None:
        q_BV = one_hot(tokens_BC[:, 0], p_BV)
    return rejection(tokens_BC, factor * q_BV, p_BV)


# --- verification methods of the whole tree ------------------------------------------------------


def block(proposal: Proposal, p_BMV: Tensor) -> Law:
    """Block verification (Sun et al. 2024, Algorithm 2): the chain is judged as a whole.

    w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)); S_i = Σ_v max(w_i p_{i+1}(v) -
    q_{i+1}(v), 0); h_i = S_i / (S_i + 1 - w_i). The accepted length is the largest i whose own
    coin, of probability h_i, succeeds (0 if none); the next token follows max(w_i p - q, 0). It
    never accepts fewer in expectation than `rejection`. After a row's last node h_i = w_i.
    """
    tokens_BG, q_BGV, before_BGV = proposal.tokens_BG, proposal.q_BGV, p_BMV[:, :-1]
    if q_BGV is None:
        q_BGV = one_hot(tokens_BG, before_BGV)
    weights = [torch.ones_like(p_BMV[:, 0, 0])]
    for ratio_B in probability_ratio(before_BGV, q_BGV, tokens_BG[..., None])[..., 0].unbind(-1):
        weights.append((weights[-1] * ratio_B).clamp_max(1))
    weight_BM = torch.stack(weights, -1)
    if perhaps_any(missing_BG := tokens_BG < 0):
        q_BGV = q_BGV.masked_fill(missing_BG[..., None], 0.0)
    next_BMV = pad(weight_BM[:, :-1], (0, 1), value=1.0)[..., None] * p_BMV
    residual_BGV = next_BMV[:, :-1].sub_(q_BGV).clamp_min_(0)
    coin_BG = survival(residual_BGV.sum(-1), weight_BM[:, :-1])
    coin_BM = torch.cat([coin_BG, weight_BM[:, -1:]], -1)
    none_later = (1 - coin_BM).flip(-1).cumprod(-1).flip(-1)
    none_after_BM = pad(none_later[:, 1:], (0, 1), value=1.0)
    stop_BM = torch.cat([none_after_BM[:, :1], (coin_BM * none_after_BM)[:, 1:]], -1)
    return Law(stop_BM, normalised(next_BMV, p_BMV))


def typical(proposal: Proposal, p_BMV: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Law:
    """Typical acceptance (Cai et al. 2024, Medusa, Section 2.3.1): x is kept if p(x) > min(ε, δ
    e^{-H(p)}), independent of q; the longest kept path wins (of equally long ones, the most
    likely), and the next token follows p. Lossy. ε and δ are the reference implementation's
    `posterior_threshold` and `posterior_alpha`."""
    threshold_BM = (delta * (-torch.special.entr(p_BMV).sum(-1)).exp()).clamp_max(epsilon)
    p_BG = drafted_values(p_BMV, proposal)
    end_B = longest_path_end(p_BG > proposal.above(threshold_BM), proposal, p_BG.log())
    return Law(torch.zeros_like(threshold_BM).scatter_(1, end_B[:, None], 1.0), p_BMV)


# --- temperature 0 ---------------------------------------------------------------------------


def greedy(proposal: Proposal, argmax_BM: Tensor) -> Verdict:
    """Keep the longest path on which every token is the target's argmax."""
    end_B = longest_path_end(proposal.tokens_BG == proposal.above(argmax_BM), proposal)
    return verdict(proposal, end_B, argmax_BM.gather(1, end_B[:, None])[:, 0])


def lenience_at_zero(proposal: Proposal, logits_BMV: Tensor, factor: float = 0.5) -> Verdict:
    """Leviathan et al. 2023, Appendix A.5, at T = 0: keep x if p(x) >= factor · max p, with p at
    T = 1; the longest kept path wins, and the next token is the argmax after it. Lossy."""
    best_BM, argmax_BM = logits_BMV.max(-1)
    kept_BG = drafted_values(logits_BMV, proposal) >= proposal.above(best_BM) + math.log(factor)
    end_B = longest_path_end(kept_BG, proposal)
    return verdict(proposal, end_B, argmax_BM.gather(1, end_B[:, None])[:, 0])


# --- by name -----------------------------------------------------------------------------------

_CORE = {
    "rejection": VerificationMethod(rejection),
    "block": VerificationMethod(whole=block),
    "recursive": VerificationMethod(recursive, siblings="without"),
    "specinfer": VerificationMethod(rejection, siblings="with"),
    "point_mass": VerificationMethod(point_mass, siblings="fixed"),
    "typical": VerificationMethod(
        whole=typical,
        siblings="fixed",
        lossless=False,
        parameters={"epsilon": 1, "delta": math.inf},
    ),
    "lenience": VerificationMethod(
        lenience, lossless=False, at_zero=lenience_at_zero, parameters={"factor": 1}
    ),
}
VERIFICATION_METHODS: Plugins[VerificationMethod] = Plugins(
    "draftsmith.verification_methods",
    "decode.verification",
    {name: replace(method, name=name) for name, method in _CORE.items()},
)


def named(text: str) -> VerificationMethod:
    """A verification method by its name (of the core, the lab or an installed package), with
    optional parameters after a colon: "typical:epsilon=0.2,delta=0.05". Raises UserError as
    `VerificationMethod.tuned`, and for unknown names."""
    name, _, settings = text.partition(":")
    method = VERIFICATION_METHODS.named(name)
    values = {}
    for part in filter(None, settings.split(",")):
        key, _, value = part.partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            message = f"decode.verification={text!r}: {part!r} is not of the form factor=0.8"
            raise UserError(message) from None
    return method.tuned(**values) if values else method


# --- paths and numbers -------------------------------------------------------------------------


def verdict(proposal: Proposal, end_B: Tensor, next_B: Tensor) -> Verdict:
    """The verdict for committed paths that end at these places."""
    path_BK = proposal.path_BK(end_B)
    return Verdict((path_BK >= 0).sum(-1), next_B, path_BK)


def drafted_values(x_BMV: Tensor, proposal: Proposal) -> Tensor:
    """The value of each drafted token [B, G], from the values [B, M, V] at the place of its
    parent."""
    row_B1 = torch.arange(len(x_BMV), device=x_BMV.device)[:, None]
    return x_BMV[row_B1, proposal.above_BG, proposal.tokens_BG.clamp_min(0)]


def longest_path_end(kept_BG: Tensor, proposal: Proposal, score_BG: Tensor | None = None) -> Tensor:
    """The deepest place [B] whose whole path is kept; of equally deep places, the one with the
    largest sum of scores along its path or, without scores, the one drafted first."""
    kept_BG = kept_BG & (proposal.tokens_BG >= 0)
    if proposal.parents_BG is None:
        return kept_BG.long().cumprod(-1).sum(-1)
    above_BG = proposal.above_BG
    depth_BM = pad(torch.zeros_like(above_BG), (1, 0))
    score_BG = torch.zeros_like(kept_BG, dtype=torch.float32) if score_BG is None else score_BG
    total_BM = pad(score_BG, (1, 0))
    for _ in range(kept_BG.shape[1]):  # each iteration reaches one depth further
        parent_BG = depth_BM.gather(1, above_BG)
        reached_BG = kept_BG & ((parent_BG > 0) | (above_BG == 0))
        further_BM = pad(torch.where(reached_BG, parent_BG + 1, 0), (1, 0))
        if torch.equal(further_BM, depth_BM):
            break
        depth_BM = further_BM
        total_BM = pad(total_BM.gather(1, above_BG) + score_BG, (1, 0))
    deepest_BM = depth_BM == depth_BM.amax(-1, keepdim=True)
    return total_BM.masked_fill(~deepest_BM, -torch.inf).argmax(-1)


def smallest_normal(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Point masses with the shape and dtype of `like`; arbitrary where there is no token."""
    return torch.zeros_like(like).scatter_(-1, tokens.clamp_min(0)[..., None], 1.0)


def normalised(rows: Tensor, without_mass: Tensor) -> Tensor:
    """Rows [..., V] scaled to sum to 1. A row without mass, which decoding reaches only
    through rounding, is replaced by `without_mass`."""
    mass = rows.sum(-1, keepdim=True)
    if perhaps_any(~(some := mass > smallest_normal(mass))):
        rows = torch.where(some, rows, without_mass)
        mass = rows.sum(-1, keepdim=True)
    return rows / mass


def without_token(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """norm(q without x); all 0 once q has no token left, and then no further child is accepted."""
    left_BV = q_BV.scatter(-1, x_B1, 0.0)
    return left_BV.div_(left_BV.sum(-1, keepdim=True).clamp_min(smallest_normal(q_BV)))


def probability_ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """p(x) / q(x), in the shape of `tokens`; 0 where there is no token, or where q(x) = 0 (such an
    x cannot have been drawn)."""
    index = tokens.clamp_min(0)
    p_x, q_x = p.gather(-1, index), q.gather(-1, index)
    return torch.where((tokens >= 0) & (q_x > 0), p_x / q_x.clamp_min(smallest_normal(q_x)), 0.0)


def survival(mass: Tensor, weight: Tensor) -> Tensor:
    """S / (S + 1 - w), computed so that it never exceeds 1; 0 if the denominator is 0."""
    whole = mass + (1 - weight)
    return torch.where(whole > 0, mass / whole, 0.0)
