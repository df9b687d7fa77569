"""Teacher forcing of a draft along known text: acceptance at every anchor, and the figures of p and
q for the theory section; and of a target along the text of another."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.context import Context, HiddenStateSpec
from specdec.decoding.decode import decode
from specdec.decoding.generation import Generation
from specdec.drafters.base import Drafter
from specdec.forcing.batch import batch_of
from specdec.forcing.teacher import TeacherForcing, predicted_steps
from specdec.losses.loss_terms import LossInputs, kl_divergence
from specdec.measure.results import Alpha, Forced, Foreseen, Lenient, PromptCounts, Shift
from specdec.ranks import ALONE, Ranks
from specdec.sampling.sampler import sample
from specdec.targets.target import Target
from specdec.theory.alpha import Acceptance, block_expected_tokens, expected_tokens
from specdec.theory.intervals import Interval, ratio_interval, share_interval
from specdec.theory.leviathan import lenient_alpha, lk_divergence, non_iterative_alpha

LENIENCES = (
    1.0,
    0.5,
    0.3,
    0.1,
)  # l, as in Table 5 of Leviathan et al. 2023; l = 1 is α itself
MOST = 1e6  # cap on q(x) / p(x), for text that the target would hardly write


class Along(NamedTuple):
    """The figures at each anchor t of a response and each depth [T, K]. Anchor 0 is the response's
    first token, which prefill emits; depths beyond the end of the text are 0."""

    alpha: Acceptance
    lenient: list[Tensor]  # α_l, for each of `LENIENCES`
    ratio: Tensor  # q(x) / p(x) at the text's own token x
    lk_divergence: Tensor  # D_LK (Leviathan et al. 2023, Definition 3.2)
    non_iterative: Tensor  # α of non-iterative rejection sampling (Appendix A.2)
    picked: Tensor  # the confidence in argmax q
    written: Tensor  # 1 where argmax q is the text's own token
    drawn: Tensor  # the confidence in a token drawn from q
    kept: Tensor  # the probability that this token is accepted, min(1, p / q)


def drafting(drafter: Drafter, gamma: int) -> Drafter:
    """The drafter, set to draft γ tokens if it copies: its first tokens then depend on the number
    of tokens to copy. For other drafters, γ tokens are the beginning of any longer draft."""
    if not drafter.copies or drafter.depth == gamma:
        return drafter
    same = copy(drafter)
    same.depth = gamma
    return same


def beyond_acceptance(piece: LossInputs, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The columns of `Along` after acceptance: those of `lenient`, then the others in order."""
    p, q, label = piece.p, piece.q, piece.label.clamp_min(0)[..., None]
    log_ratio = (piece.log_q.gather(-1, label) - piece.log_p.gather(-1, label))[..., 0]
    ratio = log_ratio.exp().nan_to_num(0.0, MOST).clamp_max(MOST) * (piece.label >= 0)
    lenient = (lenient_alpha(p, q, factor) for factor in LENIENCES)
    plain = non_iterative_alpha(p, q)
    picked, best = piece.logits.float().softmax(-1).nan_to_num(0.0).max(-1)
    none = q.sum(-1) <= 0  # a drafter with nothing to propose
    uniform = torch.rand(none.shape, dtype=torch.float64, generator=generator, device=q.device)
    drawn = sample(q.masked_fill(none[..., None], 1.0), uniform)[..., None]
    q_drawn, p_drawn = (x.gather(-1, drawn)[..., 0] for x in (q, p))
    kept = (p_drawn / q_drawn).nan_to_num(0.0).clamp_max(1.0)
    if piece.confidence is not None:
        picked = q_drawn = piece.confidence
    believed = picked, (best == piece.label).float(), q_drawn * ~none, kept
    return (*lenient, ratio, lk_divergence(p, q), plain, *believed)


@torch.no_grad()
def along(
    forcing: TeacherForcing, target: Target, prompt: Sequence[int], ids: Sequence[int]
) -> Along:
    """Teacher forcing over a response `ids`, as far as target and draft have positions."""
    drafter, placed = forcing.drafter, target.placed(prompt)
    room = target.room(placed)
    room = room if drafter.limits.positions is None else min(room, drafter.limits.positions)
    read = list(ids[: max(0, room - placed)])
    count = len(Acceptance._fields) + len(Along._fields) - 2 + len(LENIENCES)
    columns = [torch.zeros(len(ids), drafter.depth, dtype=torch.float64) for _ in range(count)]
    if len(read) > 1:
        text = Context(torch.tensor([[*prompt, *read]], device=target.device))
        mask_1T = text.documents()[0] >= len(prompt)
        batch = batch_of(target, drafter.needs, forcing.sampler, text, mask_1T)
        generator = torch.Generator(target.device).manual_seed(sum(read))
        more = partial(beyond_acceptance, generator=generator)
        table = forcing(batch, measure=True, more=more)
        at_N = table.anchors.position_N.cpu() - len(prompt)
        for column_TK, figure_NK in zip(columns, (*table.alpha, *table.more), strict=True):
            column_TK[at_N[at_N >= 0]] = figure_NK.double().cpu()[at_N >= 0]
    alpha, others = Acceptance(*columns[:3]), columns[3:]
    return Along(alpha, others[: len(LENIENCES)], *others[len(LENIENCES) :])


class ForcedText(NamedTuple):
    """The figures along a response, and a mask of the anchors that count."""

    measured: Along
    anchors: list[int]
    drafted: list[int]  # at each of them: the most depths that were drafted


def whole(measured: Along, length: int, depth: int) -> ForcedText:
    """Every anchor of a response of `length` tokens at which all depths are known."""
    anchors = range(max(0, length - depth))
    return ForcedText(measured, list(anchors), [depth] * len(anchors))


def decoded(measured: Along, response: Generation, gamma: int, greedy: bool) -> ForcedText:
    """The anchors at which a decoding's speculation steps started; `measured` holds the figures
    along its text. At T = 0 all of them count, so that the products of greedy acceptance are the
    decoder's own counts: a depth past the end of the text was not accepted. Above 0 only those
    followed by γ tokens of text count, since sampled acceptance past the end is unknown."""
    length = len(response.ids) + len(response.overrun)
    steps = [(r.anchor - len(response.prompt), r.drafted) for r in response.steps]
    kept = [(t, drafted) for t, drafted in steps if greedy or t + gamma < length]
    return ForcedText(measured, [t for t, _ in kept], [drafted for _, drafted in kept])


def forced(
    every: Sequence[ForcedText],
    visited: Sequence[ForcedText],
    gamma: int,
    groups: Sequence[int],
) -> Forced:
    """α by depth over all positions, and at visited anchors, with intervals over the `groups` of
    responses, which are their conversations."""

    def in_a_row(text: ForcedText, column_TK: Tensor) -> Tensor:
        product_TK = column_TK[text.anchors, :gamma].cumprod(-1)
        depths_K = torch.arange(product_TK.shape[1])
        return product_TK * (torch.tensor(text.drafted)[:, None] > depths_K)

    variants = range(len(Acceptance._fields))
    given_text = (
        by_depth(_joined([t.measured.alpha[v][t.anchors] for t in every], groups)) for v in variants
    )
    steps = (
        by_depth(_joined([in_a_row(t, t.measured.alpha[v]) for t in visited], groups))
        for v in variants
    )
    return Forced(Alpha(*given_text), Alpha(*steps))


def _joined(tables: Sequence[Tensor], groups: Sequence[int]) -> list[Tensor]:
    """The tables [T, …] of each group of responses, one after another."""
    of: dict[int, list[Tensor]] = {}
    for group, table in zip(groups, tables, strict=True):
        of.setdefault(group, []).append(table)
    return [torch.cat(some) for some in of.values()]


def mean(columns: Sequence[Tensor]) -> Interval:
    """The pooled mean of columns [T] of probabilities, one column per response."""
    return share_interval([float(c.sum()) for c in columns], [len(c) for c in columns])


def mean_count(columns: Sequence[Tensor]) -> Interval:
    """The pooled mean of columns [T] of positive numbers, one column per response."""
    return ratio_interval([float(c.sum()) for c in columns], [len(c) for c in columns])


def by_depth(tables: Sequence[Tensor]) -> list[Interval]:
    """`mean` at each depth of tables [T, K], one per response."""
    return [mean(columns) for columns in zip(*(table.unbind(1) for table in tables))]


def foreseen(
    every: Sequence[ForcedText],
    visited: Sequence[ForcedText],
    gamma: int,
    groups: Sequence[int],
) -> Foreseen | None:
    """The predictions of the theory for these texts; None if they are too short. Expected tokens
    are those of a chain of γ (or of the trained depth, if less) at visited anchors."""
    if not any(text.anchors for text in every) or not any(text.anchors for text in visited):
        return None
    divergences = _joined([t.measured.lk_divergence[t.anchors] for t in every], groups)
    ratios = _joined([t.measured.ratio[t.anchors, :gamma] for t in visited], groups)

    def lenient(i: int, texts: Sequence[ForcedText]) -> Interval:
        return mean(_joined([t.measured.lenient[i][t.anchors, 0] for t in texts], groups))

    by_lenience = [
        Lenient(factor, lenient(i, every), lenient(i, visited))
        for i, factor in enumerate(LENIENCES)
    ]
    rejection = mean_count([expected_tokens(r.clamp_max(1)) for r in ratios])
    block = mean_count([block_expected_tokens(r) for r in ratios])
    non_iterative = mean(_joined([t.measured.non_iterative[t.anchors, 0] for t in every], groups))
    return Foreseen(by_depth(divergences), by_lenience, rejection, block, non_iterative)


def prompt_counts(
    every: ForcedText, plain: Generation, response: Generation, gamma: int, greedy: bool
) -> PromptCounts:
    """The counts of a prompt, from the figures along its vanilla response and from its speculation
    steps."""
    alpha = every.measured.alpha
    by_anchor = [column_TK[every.anchors] for column_TK in alpha]
    sums = Acceptance(*(column_TK.sum(0).tolist() for column_TK in by_anchor))  # type: ignore[arg-type]
    positions = [len(every.anchors)] * alpha.sampled.shape[1]
    along_TK = (alpha.sampled, alpha.greedy)[greedy]
    walked = predicted_steps(along_TK[: plain.emitted, :gamma])
    return PromptCounts(
        emitted=response.emitted,
        speculation_steps=len(response.steps),
        positions=positions,
        sampled=sums.sampled,  # type: ignore[arg-type]
        greedy=sums.greedy,  # type: ignore[arg-type]
        walked=walked,
        greedy_draft=sums.greedy_draft,  # type: ignore[arg-type]
    )


def shift(
    original: Target,
    adapted: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batch: int,
    ranks: Ranks = ALONE,
) -> Shift:
    """The distance of `adapted`, which was trained with its draft, from `original`, over responses
    of up to `tokens` tokens. The prompts are distributed over the processes."""

    @torch.inference_mode()
    def moved(start: int) -> list[tuple[float, int, bool]]:
        """The summed KL of each response in a batch, its number of tokens, and whether it is
        unchanged."""
        asked, shifts = prompts[start : start + batch], []
        told = (decode(t, asked, max_new_tokens=tokens) for t in (original, adapted))
        for before, after in zip(*told, strict=True):
            ids, first = torch.tensor([[*before.prompt, *before.ids]]), len(before.prompt) - 1
            logits = (
                t.logits(t.hidden_states(ids.to(t.device), HiddenStateSpec())[1][0, first:-1])
                for t in (original, adapted)
            )
            kl = float(kl_divergence(*logits).sum())
            shifts.append((kl, len(before.ids), before.ids == after.ids))
        return shifts

    batches = ranks.map(range(0, len(prompts), batch), moved)
    kl, counts, same = map(list, zip(*(response for of in batches for response in of), strict=True))
    return Shift(original.name, ratio_interval(kl, counts), share_interval(same, [1] * len(same)))
