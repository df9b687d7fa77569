"""A reference replayed on a server: the same ids, the same accepted tokens?

`replayed` sends the prompts of a `Reference` one at a time. `ReplayComparison` sets the responses
beside those of the reference. Some engines count the tokens that the last speculation step accepts
after the end of a response and others do not, so a range of counts fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.engines.client import RequestRejected, ServerUnavailable
from specdec.measure.reference import ROUNDING, Reference, ReferenceResponse
from specdec.measure.served import MeasuredServer, TimedResponse
from specdec.sampling.sampler import Sampler

SEED = 0  # greedy decoding draws nothing


@dataclass(frozen=True)
class AcceptedRange:
    """How many tokens a response's speculation steps accept at each position: at least `low`, and
    at most `high` where those after its end are counted, too. In an engine that drafts no further
    than the limit of a response, a step that reaches it emits the last token itself."""

    low: list[int]
    high: list[int]

    @classmethod
    def of_reference(cls, response: ReferenceResponse, limit: int | None) -> "AcceptedRange":
        """`limit` is the number of new tokens within which the engine drafts; None: it drafts
        beyond the end."""
        if len(response.ids) == limit:
            inside = list(response.accepted)
            if response.closing is not None:
                inside[response.closing] -= 1
            return cls(inside, inside)
        both = zip(response.accepted, response.beyond, strict=True)
        return cls(list(response.accepted), [inside + beyond for inside, beyond in both])

    def misfit(self, response: TimedResponse) -> int:
        """By how many accepted tokens an engine's counts lie outside the range: summed over the
        positions or, if the engine does not say them, of all together."""
        if not response.accepted:
            return _outside(response.accepted_in_all, sum(self.low), sum(self.high))
        depth = max(len(self.low), len(response.accepted))
        low, high, counts = (
            [*x, *[0] * (depth - len(x))] for x in (self.low, self.high, response.accepted)
        )
        return sum(_outside(*each) for each in zip(counts, low, high, strict=True))


def _outside(count: int, low: int, high: int) -> int:
    return max(low - count, count - high, 0)


@dataclass(frozen=True)
class PromptComparison:
    """A response of a server beside that of the reference. `parted` is the first place, from 0,
    where their ids differ (None: nowhere), and `gap` the target's gap there (None: above `NEAR`).
    `misfit` is that of the accepted tokens; None where the ids differ, since the counts then belong
    to different texts."""

    expected: AcceptedRange
    response: TimedResponse
    parted: int | None = None
    gap: float | None = None
    misfit: int | None = None

    @property
    def equal(self) -> bool:
        return self.parted is None and self.misfit == 0

    def within(self, tolerance: float) -> bool:
        """Whether the ids are equal up to a place where rounding may decide."""
        return self.parted is None or (self.gap is not None and self.gap <= tolerance)

    @classmethod
    def of_responses(
        cls, wanted: ReferenceResponse, response: TimedResponse, limit: int | None
    ) -> "PromptComparison":
        """`limit` is as in `AcceptedRange.of_reference`."""
        expected = AcceptedRange.of_reference(wanted, limit)
        pairs = zip(wanted.ids, response.ids, strict=False)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None and len(wanted.ids) != len(response.ids):
            parted = min(len(wanted.ids), len(response.ids))
        if parted is None:
            return cls(expected, response, misfit=expected.misfit(response))
        return cls(expected, response, parted, dict(wanted.near).get(parted))


@dataclass(frozen=True)
class ReplayComparison:
    """All responses of a server beside those of a reference in one dtype."""

    dtype: str
    prompts: list[PromptComparison]

    @property
    def equal(self) -> int:
        """How many responses have the same ids and accepted tokens."""
        return sum(prompt.equal for prompt in self.prompts)

    @property
    def misfit(self) -> int:
        """Of the responses with equal ids."""
        return sum(prompt.misfit or 0 for prompt in self.prompts)

    @property
    def passes(self) -> bool:
        """Whether every response is that of the reference: equal, or parted where two logits of the
        target nearly tie in this dtype."""
        tolerance = ROUNDING[self.dtype]
        return all(p.within(tolerance) and not p.misfit for p in self.prompts) and self.equal > 0


def limit_of_drafting(server: MeasuredServer, reference: Reference) -> int | None:
    """The number of new tokens within which a server drafts; None: it drafts beyond the end."""
    return reference.max_new_tokens if server.engine.drafts_within_limit else None


def compared(
    reference: Reference, responses: Sequence[TimedResponse], limit: int | None
) -> ReplayComparison:
    """The comparison with the dtype of the reference that fits best. `limit` is that of
    `limit_of_drafting`."""
    every = [
        ReplayComparison(
            dtype,
            [
                PromptComparison.of_responses(one, response, limit)
                for one, response in zip(wanted, responses, strict=True)
            ],
        )
        for dtype, wanted in reference.responses.items()
    ]
    return max(every, key=lambda one: (one.passes, one.equal, -one.misfit))


def replayed(
    server: MeasuredServer,
    reference: Reference,
    fresh: bool = False,
    tell: Callable[[], None] = lambda: None,
) -> list[TimedResponse]:
    """The server's responses to the prompts of a reference. `fresh` asks it to reuse nothing that
    it has read before. `tell` is called after each response. Raises UserError as
    `MeasuredServer.reply` does."""
    responses = []
    for prompt in reference.prompts:
        limit = reference.max_new_tokens
        responses.append(server.reply(prompt, limit, Sampler(0.0), SEED, fresh))
        tell()
    return responses


@dataclass(frozen=True)
class ServedTokens:
    """The ids that a server makes of the probe of a reference: as plain text, and as a chat. None
    where it does not tell."""

    text: list[int] | None = None
    chat: list[int] | None = None

    @classmethod
    def of_server(cls, server: MeasuredServer, probe: str) -> "ServedTokens":
        engine, model = server.engine, server.model.name
        ids: list[list[int] | None] = []
        for tokens in (engine.tokens_of_text, engine.tokens_of_chat):
            try:
                ids.append(tokens(server.server, model, probe))
            except (RequestRejected, ServerUnavailable):
                ids.append(None)
        return cls(*ids)

    def same_text(self, reference: Reference) -> bool | None:
        """Whether the server's tokenizer is the reference's; None if one of them is unknown."""
        wanted = reference.rendering.text
        return None if self.text is None or wanted is None else self.text == wanted

    def same_chat(self, reference: Reference) -> bool | None:
        """Whether the server renders chats as the reference does; None if that is unknown."""
        wanted = reference.rendering.chat
        return None if self.chat is None or wanted is None else self.chat == wanted
