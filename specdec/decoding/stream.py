"""The text of a growing response: streamed to the user, and searched for stop strings."""

import copy
from collections.abc import Sequence
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes part of a character to this
BYTES = 4  # the most bytes in a character; each may be a token
SHOWN = 8  # after bytes that form no character: how many shown tokens to decode again, at most


class Stream:
    """Turns committed tokens into text: a character that is split over several tokens appears with
    the last of them. Each token is decoded together with the tokens of the piece shown last, on
    which its text may depend (such as a leading space). Joined, the pieces are the text of the
    whole response, unless a tokenizer changes text that was complete (as SentencePiece does for
    bytes that form no character)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._pieces: list[str] = []
        self._ids: list[int] = []  # tokens shown last, and after them those still waiting
        self._count = 0  # number of shown ones

    def add(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self._added(token) for token in ids])

    def preview(self, ids: Sequence[int]) -> str:
        """The text that these tokens would add; they are not added."""
        twin = copy.copy(self)
        twin._pieces, twin._ids = [], list(self._ids)
        return (twin.add(ids) + twin.rest()).removesuffix(BROKEN)

    def rest(self) -> str:
        """The text that was held back, at the end of the response."""
        return self._show(len(self._ids))

    def text(self) -> str:
        """All text returned so far, without special tokens."""
        return "".join(self._pieces)

    def _added(self, token: int) -> str:
        if token in self._special:
            return ""
        self._ids.append(token)
        count = len(self._ids)
        if self._ends_within_a_character():
            if count - self._count < BYTES:
                return ""
            count = self._count + 1  # a character would be complete by now, so its start is broken
        return self._show(count)

    def _ends_within_a_character(self) -> bool:
        """Whether the last token leaves a character incomplete. A complete text may also end in a
        replacement character, if the model wrote one. SentencePiece, which shows one for each byte
        of an incomplete character, then returns a shorter text than before."""
        text = self._decoded(self._ids)
        return text.endswith(BROKEN) and len(text) >= len(self._decoded(self._ids[:-1]))

    def _show(self, count: int) -> str:
        """The text that the first `count` tokens add to the text shown so far."""
        shown, text = (self._decoded(self._ids[:n]) for n in (self._count, count))
        first = self._count if count == len(self._ids) else max(0, count - SHOWN)
        self._pieces.append(text[len(shown) :])
        self._ids, self._count = self._ids[first:], count - first
        return self._pieces[-1]

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Stops:
    """Finds stop strings that end in the most recent token; they may begin in the prompt."""

    def __init__(self, stop: Sequence[str], tokenizer: Any) -> None:
        self.stop = list(stop)
        self._tokenizer = tokenizer
        self._window = 4 * max(map(len, stop)) + 8  # tokens: each is at least one byte

    def ends(self, prompt: Sequence[int], ids: Sequence[int]) -> bool:
        """Whether the last of `ids`, which follow `prompt`, completes a stop string."""
        tail = [*prompt[-self._window :], *ids[-self._window :]][-self._window :]
        known, text = self._decoded(tail[:-1]).rstrip(BROKEN), self._decoded(tail)
        return any(s in text[max(0, len(known) - len(s) + 1) :] for s in self.stop)

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text
