"""Decoding: plain and speculative, one prompt or many, chain or tree: one loop.

Prefill emits the first token of each row; then a round drafts, runs the target once over the
anchors and what was drafted, and commits what the verification rule keeps and one token more.
Plain decoding is a round that drafts nothing, and a chain the tree with one branch. A round is
counted whole, as serving engines count it, also where the end of an answer cuts its tokens
short. Letters: B batch (rows still going), T time, N drafted nodes, M = N + 1, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.context import Context, Needs, Proposal
from specdec.decoding.length import Length
from specdec.decoding.rows import Rows
from specdec.decoding.rules import named
from specdec.decoding.stream import Stops
from specdec.decoding.verify import Rule, Verdict, greedy, verify
from specdec.drafters.base import Drafter, last_of
from specdec.errors import UserError, require
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose, Processor
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape, line
from specdec.target.base import Target


@dataclass
class Round:
    """One pass of the target over one row: where it started, what was drafted, what was kept."""

    anchor: int  # position in the text of the last committed token
    drafted: int  # tokens on the longest drafted path
    accepted: int
    nodes: int  # tokens drafted in all: more than `drafted` in a tree
    tested: int  # `accepted`, and one more where the draft went on after those
    path: tuple[int, ...] = ()  # the nodes that were kept

    @property
    def bonus(self) -> bool:
        """Whether the target's own token of the round corrected none: no draft was there."""
        return self.tested == self.accepted


@dataclass
class Generation:
    """What one prompt's decoding produced, and what it cost."""

    prompt: list[int]
    ids: list[int]  # the new tokens, cut at eos, a stop string or max_new_tokens
    overrun: list[int]  # what the last round committed beyond that cut
    rounds: list[Round]
    prefill_seconds: float
    seconds: float  # of the rounds until this row ended, prefill apart
    spent: dict[str, float] = field(default_factory=dict)  # draft, verify, judge, commit

    @property
    def emitted(self) -> int:
        """Tokens that the rounds committed, before any cut: τ is emitted / rounds, pooled."""
        return sum(r.accepted + 1 for r in self.rounds)


@torch.inference_mode()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    shape: Shape | None = None,
    sampler: Sampler | None = None,
    rule: str | Rule = "auto",
    greedy_draft: bool = False,
    length: Length | None = None,
    eos: tuple[int, ...] | None = None,
    stop: Sequence[str] = (),
    processors: Sequence[Processor] = (),
    seeds: Sequence[int] | None = None,
    compiled: bool = False,
    on_tokens: Callable[[int, list[int], Round | None], None] | None = None,
) -> list[Generation]:
    """Continue every prompt, speculatively where there is a drafter.

    Prompts may be of any lengths, and the same one several times, which is then read once; rows
    that end leave the batch, and no row's output depends on its neighbours (sampled, its law does
    not; its draws may, by a `length` that looks at the batch, and where the longest row is about
    to use up the positions). `shape` is what a round drafts (None: a chain of the trained depth),
    `length` a policy that shortens chains.
    `sampler` None is greedy. `rule` judges sampled drafts; "auto" takes block for chains,
    recursive for static trees, point_mass for trees picked by likelihood. `greedy_draft` drafts
    the likeliest token at T > 0, as engines do by default. `eos` None takes the target's own; ()
    never stops early. `stop` strings end an answer with the token that completes one, and may begin
    in the prompt. `processors`
    are transformers' logits processors, applied to p and q alike. `seeds`: one a row. `compiled`
    runs the passes of target and draft through `torch.compile`, over caches of fixed size (256
    tokens, or the next power of two). `on_tokens(row, ids, round)` gets what each round committed,
    cut to the answer (for the first token, which prefill emits, with round None).

    Raises UserError for no or an empty prompt, ids that the target has not, an unknown rule, one
    that does not fit the shape, a length that nothing asks, and more tokens than the target has
    positions.
    """
    require_room(target, prompts, max_new_tokens)
    eos, B, device = target.eos if eos is None else eos, len(prompts), target.device
    require("" not in stop, "stop='' would end every answer at once: give strings of some length")
    require(
        not stop or target.tokenizer is not None,
        "stop strings need the target's tokenizer, and it has none: give eos ids instead",
    )
    require(
        seeds is None or len(seeds) == B,
        f"{len(seeds or ())} seeds for {B} prompts: give one a row",
    )
    sampler = sampler or Sampler(temperature=0.0)
    if drafter is not None:
        shape = shape or Chain(drafter.depth)
        if shape.depth > (drafter.max_depth or shape.depth):
            raise UserError(
                f"a draft of depth {shape.depth} was asked of one that drafts {drafter.max_depth} "
                "tokens and no more: give a smaller gamma or tree"
            )
        require(
            length is None or isinstance(shape, Chain),
            "a length policy shortens chains, and a tree has none: leave out length, or the tree",
        )
        require(
            length is None or not length.reads_q or not drafter.copies,
            f"{type(length).__name__} reads q: {drafter.config.name} copies tokens and has none",
        )
    judge = fitting_rule(rule, shape, sampler, greedy_draft)
    choose = Choose(
        sampler,
        "fixed" if greedy_draft else judge.siblings,
        [torch.Generator(device).manual_seed(s) for s in seeds or range(B)],
        None if drafter is None else drafter.vocab_S,
        target.vocab_size,
        target.shown(processors),
    )
    stops = Stops(stop, target.tokenizer) if stop else None
    openings = [p[len(p) - target.placed(p) :] for p in prompts] if stop else prompts
    needs = Needs() if drafter is None else drafter.needs
    longest = max(map(len, prompts))
    slots = capacity(longest + max_new_tokens, drafter, shape) if compiled else None
    cache = target.new_cache(slots)
    draft_cache = None
    if drafter is not None:
        draft_cache = drafter.compiled_cache(slots) if slots else drafter.new_cache()
    spent = dict.fromkeys(("draft", "verify", "judge", "commit"), 0.0)
    done: dict[int, Generation] = {}
    answers: list[list[int]] = [[] for _ in prompts]
    rounds: list[list[Round]] = [[] for _ in prompts]

    started = time.perf_counter()
    each = list(dict.fromkeys(map(tuple, prompts)))  # prompts that are the same are read once
    rows, alive = Rows(each, device), list(range(B))
    features, final_BTD = target.features(rows.ids(), needs, cache=cache)
    counts = [len(p) for p in each]
    cache.keep(counts)
    first_BV = target.logits(last_of(final_BTD, counts))
    rows.extend([[] for _ in each], features, counts, None)
    if len(each) < B:
        among = [each.index(tuple(p)) for p in prompts]
        rows.select(among)
        cache.select(among)
        first_BV = first_BV[among]
    choose.texts = rows.texts
    first_B = choose.token(choose.processed(first_BV[:, None], lambda: [[[]]] * B)[:, 0])
    new = [[t] for t in first_B.tolist()]
    rows.extend(new, Context(rows.ids()), [0] * B, None)
    del features, final_BTD, first_BV
    prefill_done = time.perf_counter()
    last: list[Round] = []  # of each row; none yet

    while True:
        ended = []
        for b, row in enumerate(alive):
            before = len(answers[row])
            answers[row] += new[b]
            end = _end(openings[row], answers[row], before, eos, max_new_tokens, stops)
            if row in done:  # it ended, but has not left the batch
                continue
            if on_tokens:
                on_tokens(row, answers[row][before:end], last[b] if last else None)
            if end is not None:
                ended.append(b)
                done[row] = Generation(
                    prompt=list(prompts[row]),
                    ids=answers[row][:end],
                    overrun=answers[row][end:],
                    rounds=rounds[row],
                    prefill_seconds=prefill_done - started,
                    seconds=time.perf_counter() - prefill_done,
                    spent=dict(spent),
                )
        if len(done) == B:
            return [done[row] for row in range(B)]
        going = [b for b, row in enumerate(alive) if row not in done]
        if ended and (drafter is not None or len(going) < 0.9 * len(alive)):
            alive = [alive[b] for b in going]  # leaving copies the caches: not at every end
            for part in (rows, cache, choose, draft_cache):
                if part is not None:
                    part.select(going)
            choose.texts = rows.texts

        t0 = time.perf_counter()
        proposal = _drafted(target, drafter, rows, shape, length, choose, draft_cache, cache)
        t1 = time.perf_counter()
        tokens_BN, parents_BN = proposal.tokens_BN, proposal.parents_BN
        block_BM = torch.cat([rows.anchors(), tokens_BN.clamp_min(0)], 1)
        parents_BM = None
        if parents_BN is not None:
            parents_BM = torch.cat([parents_BN[:, :1] * 0 - 1, parents_BN + 1], 1)
        features, logits_BMV = target.step(block_BM, needs, cache, parents_BM)
        t2 = time.perf_counter()
        if processors:
            logits_BMV = choose.processed(logits_BMV, partial(_paths, proposal))
        verdict = _judged(judge, proposal, logits_BMV, choose)
        t3 = time.perf_counter()
        tokens = tokens_BN.tolist()
        last = _rounds(tokens, proposal.parents_BN, verdict, rows.texts)
        accepted = [r.accepted for r in last]
        path_BK = None
        if parents_BN is not None:
            path_BK = verdict.path_BN[:, : max(accepted)].clamp_min(0)
            path_BK = torch.cat([path_BK.new_zeros(len(accepted), 1), path_BK + 1], 1)
        new = [
            [ids[i] for i in r.path] + [following]
            for ids, r, following in zip(tokens, last, verdict.next_B.tolist(), strict=True)
        ]
        for b, row in enumerate(alive):
            if row not in done:
                rounds[row].append(last[b])
        counts = [n + 1 for n in accepted]
        cache.keep(counts, path_BK)
        rows.extend(new, features, counts, path_BK)
        if length is not None:
            length.observe([r.drafted for r in last], accepted)
        t4 = time.perf_counter()
        for name, seconds in zip(spent, (t1 - t0, t2 - t1, t3 - t2, t4 - t3), strict=True):
            spent[name] += seconds


def fitting_rule(
    name: str | Rule, shape: Shape | None, sampler: Sampler, greedy_draft: bool = False
) -> Rule:
    """The verification rule of this name, if it fits what is drafted; "auto" is the best that
    does. Raises UserError where it does not."""
    if isinstance(name, Rule):
        return name
    tree, picked = not isinstance(shape, Chain | None), shape is not None and shape.fixed
    if name == "auto":
        name = "block" if not tree else "point_mass" if picked or greedy_draft else "recursive"
    rule = named(name)
    if tree and not rule.trees and not sampler.greedy:
        fitting = "point_mass" if picked else "recursive"
        raise UserError(f"decode.rule={name} judges chains only: give {fitting} for this tree")
    if tree and picked and rule.siblings != "fixed" and not sampler.greedy:
        raise UserError(
            f"decode.rule={name} wants siblings drawn from q, and this tree picks the likeliest: "
            "give decode.rule=point_mass, or a static tree"
        )
    return rule


def require_room(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    drafter: Drafter | None = None,
) -> None:
    """Raise UserError for no or an empty prompt, and where an answer would not fit the positions
    of the target, or of a drafter that cannot leave off drafting before they end."""
    require(len(prompts) > 0, "no prompts were given: there is nothing to continue")
    require(
        all(len(p) > 0 for p in prompts), "the prompt has no tokens: there is nothing to continue"
    )
    require(max_new_tokens >= 1, f"max_new_tokens={max_new_tokens}: give 1 or more")
    for ids in prompts:
        require(
            min(ids) >= 0 and max(ids) < target.embedding.num_embeddings,
            f"the prompt holds token {max(ids) if min(ids) >= 0 else min(ids)}, and the target has "
            f"{target.embedding.num_embeddings}: give ids of its own tokenizer",
        )
    placed = [target.placed(ids) for ids in prompts]
    longest, shortest = max(placed), min(placed)
    rooms = {"target": target.room(shortest)}
    if drafter is not None and drafter.positions is not None:
        rooms["draft"] = drafter.positions
    for name, room in rooms.items():
        require(
            longest + max_new_tokens <= room,
            f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit the {room} "
            f"positions of the {name}: give fewer",
        )


def _drafted(
    target: Target,
    drafter: Drafter | None,
    rows: Rows,
    shape: Shape | None,
    length: Length | None,
    choose: Choose,
    draft_cache: object,
    cache: SlotCache,
) -> Proposal:
    """What this round drafts; nothing where there is no drafter, the policy says so, or the
    positions of target or draft are used up."""
    if drafter is None or shape is None:
        return Proposal(rows.anchors()[:, :0])
    positions = target.room(min(cache.lengths))
    taken = max(cache.lengths) + 1  # the anchor's, too
    room = min(positions, drafter.positions or positions) - taken
    if isinstance(shape, Chain):
        shape = replace(shape, depth=min(room, shape.depth))
    if room < max(1, shape.depth):
        return Proposal(rows.anchors()[:, :0])
    stop = None
    if length is not None:
        gamma = length.gamma(len(rows.texts))
        if gamma < 1:
            return Proposal(rows.anchors()[:, :0])
        if isinstance(shape, Chain):
            shape = replace(shape, depth=min(gamma, shape.depth))
        stop = length.stop if length.reads_q else None
    ctx = rows.context()
    ctx.cache = cache
    return drafter.draft(ctx, shape, choose, draft_cache, stop)


def _judged(rule: Rule, proposal: Proposal, logits_BMV: Tensor, choose: Choose) -> Verdict:
    """The verdict on each row, drawn with its own generator."""
    tokens_BN, parents_BN, q_BNV = proposal.tokens_BN, proposal.parents_BN, proposal.q_BNV
    if choose.sampler.greedy:
        if rule.at_zero is not None:
            return rule.at_zero(tokens_BN, parents_BN, logits_BMV.float())
        return greedy(tokens_BN, parents_BN, logits_BMV.float().argmax(-1))
    verdicts = []
    drafted = [
        max((i + 1 for i, t in enumerate(ids) if t >= 0), default=0) for ids in tokens_BN.tolist()
    ]
    for b, (generator, n) in enumerate(zip(choose.generators, drafted, strict=True)):
        one = slice(b, b + 1)  # without its padding, which is as wide as its neighbours

        def p_of(index_B: Tensor, b: int = b) -> Tensor:
            return choose.sampler.probs(logits_BMV[b, index_B])

        verdicts.append(
            verify(
                rule,
                tokens_BN[one, :n],
                None if parents_BN is None else parents_BN[one, :n],
                None if q_BNV is None else q_BNV[one, :n],
                p_of,
                generator,
            )
        )
    widest = max(v.path_BN.shape[1] for v in verdicts)
    paths = [pad(v.path_BN, (0, widest - v.path_BN.shape[1]), value=-1) for v in verdicts]
    accepted_B, next_B = (torch.cat([v[i] for v in verdicts]) for i in (0, 1))
    return Verdict(accepted_B, next_B, torch.cat(paths))


def _rounds(
    tokens: list[list[int]], parents_BN: Tensor | None, verdict: Verdict, texts: list[list[int]]
) -> list[Round]:
    """What became of each row's draft."""
    paths = verdict.path_BN.tolist()
    parents = parents_BN.tolist() if parents_BN is not None else None
    found = []
    for b, ids in enumerate(tokens):
        nodes = sum(t >= 0 for t in ids)
        path = tuple(i for i in paths[b] if i >= 0)
        depth, went_on = nodes, nodes > len(path)
        if parents is not None:
            depths, last = [0], path[-1] if path else -1
            for t, parent in zip(ids, parents[b], strict=True):
                depths.append(1 + depths[parent + 1] if t >= 0 else 0)
            depth = max(depths)
            went_on = any(t >= 0 and p == last for t, p in zip(ids, parents[b], strict=True))
        tested = len(path) + went_on
        found.append(Round(len(texts[b]) - 1, depth, len(path), nodes, tested, path))
    return found


def _paths(proposal: Proposal) -> list[list[list[int]]]:
    """For each row, the drafted tokens up to the anchor (none) and to every node."""
    tokens = proposal.tokens_BN.clamp_min(0).tolist()
    N = proposal.tokens_BN.shape[1]
    if proposal.parents_BN is None:
        return [[ids[:n] for n in range(N + 1)] for ids in tokens]
    parents = proposal.parents_BN.tolist()
    return [[line(tokens, parents, b, i) for i in range(-1, N)] for b in range(len(tokens))]


def _end(
    prompt: Sequence[int],
    ids: list[int],
    start: int,
    eos: tuple[int, ...],
    limit: int,
    stops: Stops | None,
) -> int | None:
    """How many of `ids` remain when the answer ends among those from `start`; None: goes on.
    `prompt` is what stop strings may begin in."""
    for i in range(start, min(len(ids), limit)):
        if ids[i] in eos or (stops is not None and stops.ends(prompt, ids[: i + 1])):
            return i + 1
    return limit if len(ids) >= limit else None


def capacity(tokens: int, drafter: Drafter | None, shape: Shape | None) -> int:
    """Slots of a fixed cache for a text of so many tokens and what is drafted after it: few
    sizes, since each is compiled anew."""
    drafted = max(shape.nodes, shape.grown) if shape else 0
    room = tokens + 2 * (drafted + 1) + (drafter.scratch if drafter else 0)
    return max(256, 1 << (room - 1).bit_length())


def generate(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    drafter: Drafter | None = None,
    gamma: int | None = None,
    seed: int = 0,
    on_tokens: Callable[[list[int], Round | None], None] | None = None,
    **options: object,
) -> Generation:
    """`decode` of one prompt, by a chain of γ = `gamma` tokens (None: as deep as the drafter was
    trained; 0: plain)."""
    show = None
    if on_tokens is not None:

        def show(_row: int, ids: list[int], last: Round | None) -> None:
            on_tokens(ids, last)

    if "shape" not in options:
        options["shape"] = Chain(gamma) if gamma else None
        drafter = None if gamma == 0 else drafter
    return decode(
        target,
        [prompt],
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        seeds=[seed],
        on_tokens=show,
        **options,  # type: ignore[arg-type]
    )[0]
