"""One loop for all decoding: vanilla and speculative, one prompt or many, chain or tree.

Prefill emits the first token of each row. Then every speculation step drafts, runs the target once
over the anchors and the drafted tokens, and commits the tokens that the verification method keeps
and one more. Vanilla decoding is a step without drafts. Tokens that the last step commits beyond
the end of a response are dropped and not counted in τ.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.context import HiddenStateSpec, Proposal
from specdec.decoding.draft_length import Length
from specdec.decoding.generation import Generation, GrowingResponses, OnTokens, Record, outcome
from specdec.decoding.rows import Rows
from specdec.decoding.stream import Stops
from specdec.decoding.verification_methods import judged
from specdec.decoding.way import Way, require_read
from specdec.drafters.attention import last_of
from specdec.drafters.base import Drafter, vocabulary
from specdec.errors import require
from specdec.runtime.cache import SlotCache
from specdec.sampling.choose import Choose, Processor
from specdec.sampling.row_draws import RowDraws
from specdec.sampling.trees import Chain, Shape
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target


@torch.inference_mode()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    way: Way | None = None,
    *,
    max_new_tokens: int,
    eos: tuple[int, ...] | None = None,
    stop: Sequence[str] = (),
    processors: Sequence[Processor] = (),
    seeds: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    record: Record | None = None,
    at_once: int | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> list[Generation]:
    """Continue every prompt as `way` says (None: greedily, without a draft). Finished rows leave
    the batch or, with `at_once` (the number of rows, for vanilla decoding only), are reused for
    waiting prompts. A row's tokens do not depend on its neighbours, even if they are sampled: its
    random numbers depend on its seed alone. Draft lengths may depend on them, if `way.draft_length`
    considers the batch or the longest row runs out of positions.

    `eos` None is the target's own; () never ends a response early. A `stop` string ends a response
    at the token that completes it, and may begin in the prompt. `processors` are transformers'
    logits processors, applied to p and q alike. `seeds` has one number for each prompt. `on_tokens`
    is called after each speculation step, and `record` keeps hidden states of vanilla responses.
    Once `goes_on` returns False, no waiting prompt is started, and only the responses to the
    started ones are returned. Raises UserError as `require_room` does, and for options that do not
    go together.
    """
    way = way or Way()
    drafter, shape = way.drafter, way.shape
    length, method = way.draft_length, way.verification_method
    require_room(target, prompts, max_new_tokens)
    require_read(target, drafter, not isinstance(shape, Chain | None), way.compiled)
    asked = len(prompts)
    fitting = seeds is None or len(seeds) == asked
    require(fitting, f"{len(seeds or ())} seeds for {asked} prompts: give one for each prompt")
    require(
        at_once is None or (drafter is None and at_once >= 1 and target.refills),
        f"at_once={at_once}: give 1 or more, and neither a draft nor an encoder-decoder",
    )
    require("" not in stop, "stop='' would end every response at once: leave it out")
    require(
        not stop or target.tokenizer is not None,
        "stop strings need a tokenizer, but this target has none: give eos ids instead",
    )
    needs = replace(record.needs, final_hidden=True) if record else HiddenStateSpec()
    needs = needs if drafter is None else drafter.needs
    slots = None
    if way.compiled:
        slots = capacity(max(map(len, prompts)) + max_new_tokens, drafter, shape)
    openings = [p[len(p) - target.placed(p) :] for p in prompts]
    if any(len(opening) < len(p) for opening, p in zip(openings, prompts, strict=True)):
        processors = [_of_decoder(processor, target) for processor in processors]
    stops = Stops(stop, target.tokenizer) if stop else None
    eos = target.eos if eos is None else eos
    ends = max_new_tokens, eos, stops
    responses = GrowingResponses(
        prompts, openings, *ends, on_tokens, record, target.device, at_once, goes_on
    )
    seeds = seeds or range(asked)

    def begun(numbers: Sequence[int], cache: SlotCache) -> tuple[Rows, Choose, list[list[int]]]:
        """Prefill: the target reads these prompts and emits the first token of each response."""
        rows, first_BV = prefill(target, [prompts[i] for i in numbers], needs, cache)
        choose = Choose(
            way.sampler,
            "fixed" if way.greedy_draft else method.siblings,
            RowDraws([seeds[i] for i in numbers], target.device),
            vocabulary(drafter),
            target.vocab_size,
            processors,
            rows.texts,
        )
        nothing = Proposal(rows.anchors()[:, :0])
        first_B = choose.token(choose.processed(first_BV[:, None], nothing)[:, 0])
        new = [[token] for token in first_B.tolist()]
        rows.extend(new)
        return rows, choose, new

    cache = target.new_cache(slots)
    rows, choose, new = begun(responses.in_batch, cache)
    own = drafter.new_cache(slots) if drafter else None
    responses.clock.end("prefill")
    responses.add(rows, new)

    while not responses.all_ended:
        # Prompts that wait get the rows of responses that have ended.
        if fresh := responses.refilled():
            responses.clock.restart()
            other = target.new_cache(slots)
            theirs, choosing, new = begun([responses.in_batch[b] for b in fresh], other)
            rows.replace(fresh, theirs)
            cache.replace(fresh, other)
            choose.replace(fresh, choosing)
            responses.clock.end("prefill")
            responses.add(rows, new, only=fresh)
            continue
        if responses.all_ended:  # `goes_on` has just ended those that waited
            break

        # Rows whose response has ended leave the batch.
        if (going := responses.remaining(patient=drafter is None)) is not None:
            for part in (rows, cache, choose, own):
                if part is not None:
                    part.select(going)
        responses.clock.restart()

        # The draft proposes a chain or a tree after each row's anchor, if there is room for one.
        proposal = Proposal(rows.anchors()[:, :0])
        if drafter and shape and (fits := shortened(shape, length, target, drafter, cache)):
            proposal = drafter.draft(rows.context(cache), fits, choose, own)
        responses.clock.end("draft")

        # The target reads the anchors and all drafted tokens in one pass.
        ids_BM, above_BM = proposal.block(rows.anchors())
        hidden_states, logits_BMV = target.step(ids_BM, needs, cache, above_BM)
        if drafter and proposal.scouts is not None:
            M = 1 + proposal.tokens_BG.shape[1]
            drafter.hear(logits_BMV[:, M:], own)
            logits_BMV = logits_BMV[:, :M]
        responses.clock.end("verify")

        # The verification method keeps a path of each draft, and the target adds a token of its
        # own.
        verdict = judged(method, proposal, choose.processed(logits_BMV, proposal), choose)
        responses.clock.end("judge")

        # The kept tokens are committed to the cache, the texts and the responses.
        steps, new = outcome(proposal, verdict, rows.texts)
        counts, kept_BM = [len(ids) for ids in new], proposal.kept_places(verdict.path_BK)
        cache.commit(counts, kept_BM)
        rows.extend(new, hidden_states, counts, kept_BM)
        if length is not None:
            length.observe([r.drafted for r in steps], [r.accepted for r in steps])
        responses.clock.end("commit")
        responses.add(rows, new, steps)
    return responses.generations()


def _of_decoder(processor: Processor, target: Target) -> Processor:
    """The processor, applied only to the tokens that the target's decoder reads, as in
    transformers."""

    def processed(ids_BT: Tensor, scores_BV: Tensor) -> Tensor:
        rows = [ids[len(ids) - target.placed(ids.tolist()) :] for ids in ids_BT]
        return torch.cat([processor(ids[None], z[None]) for ids, z in zip(rows, scores_BV)])

    return processed


def prefill(
    target: Target, prompts: Sequence[Sequence[int]], needs: HiddenStateSpec, cache: SlotCache
) -> tuple[Rows, Tensor]:
    """Read every distinct prompt into the cache once; returns the rows and the logits [B, V]."""
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    rows, counts = Rows(distinct, target.device), [len(p) for p in distinct]
    hidden_states, final_BTD = target.hidden_states(rows.ids(), needs, cache=cache)
    logits_BV = target.logits(last_of(final_BTD, counts))
    cache.commit(counts)
    rows.extend([[] for _ in distinct], hidden_states, counts)
    if len(distinct) < len(prompts):
        origin = [distinct.index(tuple(p)) for p in prompts]
        rows.select(origin)
        cache.select(origin)
        logits_BV = logits_BV[origin]
    return rows, logits_BV


def shortened(
    shape: Shape, length: Length | None, target: Target, drafter: Drafter, cache: SlotCache
) -> Shape | None:
    """The topology of this speculation step: a chain as long as the adaptive draft length and the
    free positions of target and draft allow; None if nothing is drafted."""
    positions = target.room(min(cache.lengths))
    taken = max(cache.lengths) + 1  # including the anchor's
    room = min(positions, drafter.limits.positions or positions) - taken
    if isinstance(shape, Chain):
        gamma = shape.depth if length is None else length.gamma(len(cache.lengths))
        stop = length.stop if length is not None and length.reads_q else shape.stop
        shape = Chain(min(gamma, room, shape.depth), stop)
    return shape if 1 <= shape.depth <= room else None


def require_room(
    target: TargetParts,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    drafter: Drafter | None = None,
) -> None:
    """Raise UserError for no prompts, an empty prompt or unknown ids, and if a response exceeds the
    positions of the target, or of a `drafter` that cannot stop before they run out."""
    require(len(prompts) > 0, "no prompts were given: there is nothing to continue")
    whole = isinstance(max_new_tokens, int) and max_new_tokens >= 1
    require(whole, f"max_new_tokens={max_new_tokens}: give a whole number of 1 or more")
    for ids in prompts:
        require(len(ids) > 0, "the prompt has no tokens: there is nothing to continue")
        target.require_embedded(ids, "the prompt")
    placed = [target.placed(ids) for ids in prompts]
    rooms = {"target": target.room(min(placed))}
    if drafter is not None and drafter.limits.positions is not None:
        rooms["draft"] = drafter.limits.positions
    for name, room in rooms.items():
        require(
            max(placed) + max_new_tokens <= room,
            f"a prompt of {max(placed)} tokens and {max_new_tokens} new ones do not fit the {room} "
            f"positions of the {name}: give fewer tokens",
        )


def capacity(tokens: int, drafter: Drafter | None, shape: Shape | None) -> int:
    """The number of slots of a fixed cache for a text of this many tokens and the drafts after it:
    a power of two, because each size is compiled separately."""
    drafted = max(shape.nodes, shape.grown) if shape else 0
    room = tokens + 2 * (drafted + 1) + (drafter.limits.slots if drafter else 0)
    return max(256, 1 << (room - 1).bit_length())


def generate(
    target: Target,
    prompt: Sequence[int],
    way: Way | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Generation:
    """Call `decode` for one prompt, with any of its `options`."""
    return decode(target, [prompt], way, seeds=[seed], **options)[0]
