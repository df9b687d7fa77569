"""The tokens with which a tokenizer's chat template ends a response."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

USER, RESPONSE, THOUGHT = "Yak", "Zebra", "Quail"  # words that no template writes of itself
REASONING = ("reasoning_content", "reasoning", "thinking")  # the names that templates know


@dataclass(frozen=True)
class TurnEnds:
    """The tokens that a chat template writes after a response. `last` closes the last response of a
    chat, `earlier` one before another turn; None if there is no such token. `within` are the tokens
    between the reasoning and the text of one response: they close a message (harmony's <|end|>),
    not the response. `after` is the text after a response if neither `last` nor `earlier` is a
    token, so that no token of the template ends a response."""

    last: int | None = None
    earlier: int | None = None
    within: frozenset[int] = frozenset()
    after: str | None = None

    def beyond(self, declared: Collection[int]) -> tuple[int, ...]:
        """The tokens that end a response in addition to the declared ones: empty if a declared
        token closes a response in the template. Otherwise the generation config does not fit the
        template, and the template's tokens end responses."""
        marks = [mark for mark in (self.last, self.earlier) if mark is not None]
        if {*marks} & {*declared}:
            return ()
        return tuple(dict.fromkeys(mark for mark in marks if mark not in self.within))


def turn_ends(tokenizer: Any) -> TurnEnds:
    """The tokens that end a response in the tokenizer's chat template. Empty without a template, or
    if it cannot render a conversation of two turns."""
    if not getattr(tokenizer, "chat_template", None):
        return TurnEnds()
    tokens = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.content}
    asked, said = {"role": "user", "content": USER}, {"role": "assistant", "content": RESPONSE}
    more = _after(tokenizer, [asked, said, asked])
    last = _after(tokenizer, [asked, said])
    closes, between = (None if text is None else _first(text, tokens) for text in (last, more))
    after = None
    if closes is None and between is None:
        rest = more if more is not None else last
        after = None if rest is None else rest.split(USER)[0][:20]
    reasoned = said | dict.fromkeys(REASONING, THOUGHT)
    written = _rendered(tokenizer, [asked, reasoned]) or ""
    _, thought, rest = written.partition(THOUGHT)
    rest, response, _ = rest.partition(RESPONSE)
    inside = rest if thought and response else ""
    within = frozenset(i for token, i in tokens.items() if token in inside)
    return TurnEnds(closes, between, within, after)


def _after(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str | None:
    """The text that a template writes after the response; None if it does not write the
    response."""
    _, response, tail = (_rendered(tokenizer, messages) or "").rpartition(RESPONSE)
    return tail if response else None


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str | None:
    """A template's rendering of messages with texts or, if it does not support these, with lists of
    parts; None if it rejects the chat."""
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    for turns in (messages, parts):
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:  # a template may raise anything, and refuse what it does not know
            continue
        if RESPONSE in text:
            return text
    return None


def _first(text: str, tokens: Mapping[str, int]) -> int | None:
    """The token with which a text begins, after white space."""
    begins = [token for token in tokens if text.lstrip().startswith(token)]
    return tokens[max(begins, key=len)] if begins else None
