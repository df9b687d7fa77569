"""Decoding: plain and speculative, one loop. Plain decoding is speculation with γ = 0.

Prefill emits the first token; then each round drafts a chain, runs the target once over the
anchor and the chain, and commits what the verification rule keeps and one token more. A round
is counted whole, as serving engines count it, also where the end of the answer cuts its
tokens short. Letters: B batch (1 here), T time, N drafted, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.context import Context, Needs, Pick
from specdec.drafters.base import Drafter
from specdec.errors import UserError, nearest
from specdec.sampler import Sampler, sample
from specdec.target import Target
from specdec.verify import RULES, Verdict, draw, greedy


@dataclass
class Round:
    """One pass of the target: where it started, what was drafted, how much was kept."""

    anchor: int  # position in the text of the last committed token
    drafted: int
    accepted: int


@dataclass
class Generation:
    """What one prompt's decoding produced, and what it cost."""

    prompt: list[int]
    ids: list[int]  # the new tokens, cut at eos or max_new_tokens
    overrun: list[int]  # what the last round committed beyond that cut
    rounds: list[Round]
    prefill_seconds: float
    seconds: float  # of the rounds, prefill apart
    spent: dict[str, float] = field(default_factory=dict)  # draft, verify, judge

    @property
    def emitted(self) -> int:
        """Tokens that the rounds committed, before any cut: τ is emitted / rounds, pooled."""
        return sum(r.accepted + 1 for r in self.rounds)


class History:
    """The growing context: committed tokens, and target features of all but the anchor."""

    def __init__(self, ids_1T: Tensor, needs: Needs) -> None:
        self.needs = needs
        self.ids = ids_1T
        self._layers: Tensor | None = None
        self._final: Tensor | None = None
        self.seen = 0  # positions whose features are here

    def extend(self, tokens_1N: Tensor, features: Context, count: int) -> None:
        """Commit tokens, and the features of the first `count` positions of a target pass."""
        self.ids = torch.cat([self.ids, tokens_1N], 1)
        self._layers = self._append(self._layers, features.layers_BTF, count)
        self._final = self._append(self._final, features.final_BTD, count)
        self.seen += count

    def context(self) -> Context:
        layers = None if self._layers is None else self._layers[:, : self.seen]
        final = None if self._final is None else self._final[:, : self.seen]
        return Context(self.ids, layers, final)

    def _append(self, buffer: Tensor | None, new: Tensor | None, count: int) -> Tensor | None:
        if new is None:
            return None
        end = self.seen + count
        if buffer is None or end > buffer.shape[1]:
            grown = new.new_empty(new.shape[0], max(256, 2 * end), new.shape[2])
            if buffer is not None:
                grown[:, : self.seen] = buffer[:, : self.seen]
            buffer = grown
        buffer[:, self.seen : end] = new[:, :count]
        return buffer


def picker(sampler: Sampler, generator: torch.Generator | None, greedy_draft: bool = False) -> Pick:
    """How a drafter chooses tokens: drawn from q, or the likeliest (then q is one-hot)."""
    if sampler.greedy or greedy_draft:
        return lambda logits_BS: (logits_BS.argmax(-1), None)

    def draw_token(logits_BS: Tensor) -> tuple[Tensor, Tensor]:
        q_BS = sampler.probs(logits_BS)
        return sample(q_BS, generator), q_BS

    return draw_token


@torch.inference_mode()
def generate(
    target: Target,
    prompt: list[int],
    *,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    gamma: int = 0,
    sampler: Sampler | None = None,
    rule: str = "block",
    greedy_draft: bool = False,
    eos: tuple[int, ...] | None = None,
    seed: int = 0,
    on_tokens: Callable[[list[int], Round | None], None] | None = None,
) -> Generation:
    """Decode one prompt, speculatively where there is a drafter and γ > 0.

    `sampler` None is greedy. `rule` verifies sampled chains (greedy ones need none).
    `greedy_draft` drafts the likeliest token at T > 0, as engines do by default. `eos` None
    takes the target's own; () never stops early. `on_tokens` gets the committed tokens of
    each round as they come (for the first token, which prefill emits, with round None).
    Raises UserError for an empty prompt or an unknown rule.
    """
    if not prompt:
        raise UserError("the prompt has no tokens: there is nothing to continue")
    if rule not in RULES:
        raise UserError(f"decode.rule={rule!r} is unknown{nearest(rule, RULES)}")
    sampler = sampler or Sampler(temperature=0.0)
    eos = target.eos if eos is None else eos
    generator = torch.Generator(target.device).manual_seed(seed)
    pick = picker(sampler, generator, greedy_draft)
    needs = drafter.needs if drafter is not None and gamma else Needs()
    cache, draft_cache = target.new_cache(), drafter.new_cache() if drafter else None
    spent = dict.fromkeys(("draft", "verify", "judge"), 0.0)

    started = time.perf_counter()
    history = History(torch.tensor([prompt], device=target.device), needs)
    features, final_BTD = target.features(history.ids, needs, cache=cache)
    first_B = _plain_pick(target.logits(final_BTD[:, -1]), sampler, generator)
    history.extend(first_B[:, None], features, len(prompt))
    committed = [int(first_B)]
    if on_tokens:
        on_tokens(committed, None)
    prefill_done = time.perf_counter()

    rounds: list[Round] = []
    ended = _end(committed, eos, max_new_tokens)
    while ended is None:
        t0 = time.perf_counter()
        anchor_11 = history.ids[:, -1:]
        tokens_BN, q_BNV = anchor_11[:, :0], None
        if drafter is not None and gamma:
            proposal = drafter.draft(history.context(), gamma, pick, draft_cache)
            tokens_BN, q_BNV = proposal.tokens_BN, proposal.q_BNV
        t1 = time.perf_counter()
        block_BM = torch.cat([anchor_11, tokens_BN], 1)
        features, final_BMD = target.features(block_BM, needs, cache=cache)
        logits_BMV = target.logits(final_BMD)
        t2 = time.perf_counter()
        verdict = _judge(tokens_BN, q_BNV, logits_BMV, sampler, rule, generator)
        accepted, drafted = int(verdict.accepted_B), tokens_BN.shape[1]
        if accepted < drafted:
            cache.crop(accepted - drafted)
        new_1N = torch.cat([tokens_BN[:, :accepted], verdict.next_B[:, None]], 1)
        rounds.append(Round(history.ids.shape[1] - 1, drafted, accepted))
        history.extend(new_1N, features, accepted + 1)
        new = new_1N[0].tolist()
        before = len(committed)
        committed += new
        ended = _end(committed, eos, max_new_tokens, start=before)
        if on_tokens:
            on_tokens(new if ended is None else committed[before:ended], rounds[-1])
        t3 = time.perf_counter()
        spent["draft"] += t1 - t0
        spent["verify"] += t2 - t1
        spent["judge"] += t3 - t2
    return Generation(
        prompt=prompt,
        ids=committed[:ended],
        overrun=committed[ended:],
        rounds=rounds,
        prefill_seconds=prefill_done - started,
        seconds=time.perf_counter() - prefill_done,
        spent=spent,
    )


def _judge(
    tokens_BN: Tensor,
    q_BNV: Tensor | None,
    logits_BMV: Tensor,
    sampler: Sampler,
    rule: str,
    generator: torch.Generator,
) -> Verdict:
    if sampler.greedy:
        return greedy(tokens_BN, logits_BMV.float().argmax(-1))
    p_BMV = sampler.probs(logits_BMV)
    if tokens_BN.shape[1] == 0:
        return Verdict(torch.zeros(1, dtype=torch.long), sample(p_BMV[:, 0], generator))
    return draw(RULES[rule](tokens_BN, q_BNV, p_BMV), generator)


def _plain_pick(logits_BV: Tensor, sampler: Sampler, generator: torch.Generator) -> Tensor:
    if sampler.greedy:
        return logits_BV.float().argmax(-1)  # bfloat16 argmax is slow on a CPU
    return sample(sampler.probs(logits_BV), generator)


def _end(ids: list[int], eos: tuple[int, ...], limit: int, start: int = 0) -> int | None:
    """How many of `ids` remain when the answer ends among those from `start`; None: goes on."""
    for i in range(start, min(len(ids), limit)):
        if ids[i] in eos:
            return i + 1
    return limit if len(ids) >= limit else None


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    generator: torch.Generator,
    on_step: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Plain answers to many prompts at once; rows that end leave the batch.

    Prompts are padded on the left, so a batch of like lengths wastes least. `on_step` gets the
    number of tokens that each step added. Returns the new ids of each prompt, eos included.
    """
    B, T = len(prompts), max(map(len, prompts))
    ids = torch.zeros(B, T, dtype=torch.long)
    mask = torch.zeros(B, T, dtype=torch.long)
    for b, prompt in enumerate(prompts):
        ids[b, T - len(prompt) :] = torch.tensor(prompt)
        mask[b, T - len(prompt) :] = 1
    ids, mask = ids.to(target.device), mask.to(target.device)
    eos = torch.tensor(target.eos, device=target.device)
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = target.new_cache()
    answers: list[list[int]] = [[] for _ in prompts]
    rows, alive = list(range(B)), torch.ones(B, dtype=torch.bool, device=target.device)
    for step in range(max_new_tokens):
        _, final_BTD = target.features(
            ids, Needs(), cache=cache, position_BT=position, attention_mask=mask
        )
        token_B = _plain_pick(target.logits(final_BTD[:, -1]), sampler, generator)
        for row, token, going in zip(rows, token_B.tolist(), alive.tolist(), strict=True):
            if going:
                answers[row].append(token)
        if on_step:
            on_step(int(alive.sum()))
        alive &= ~torch.isin(token_B, eos)
        if not alive.any() or step + 1 == max_new_tokens:
            break
        if alive.float().mean() < 0.9:  # dropping rows copies the cache: not at every end
            keep = alive.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            rows = [rows[i] for i in keep.tolist()]
            token_B, mask, position, alive = (x[keep] for x in (token_B, mask, position, alive))
        ids, position = token_B[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return answers
