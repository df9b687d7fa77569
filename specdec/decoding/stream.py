"""The text of an answer while it grows: shown as it comes, and searched for stop strings."""

from collections.abc import Sequence
from typing import Any

AGO = 64  # tokens that are decoded again with those that follow them
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a part of a character


class Stream:
    """Turns committed tokens into the text that they complete: a character that is split over
    several tokens comes with the last of them."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._start = 0  # the token that what is decoded begins at: not all, each time
        self._shown = 0  # characters from there

    def add(self, ids: Sequence[int]) -> str:
        """The text that is complete with these tokens and was not given before."""
        self.ids += ids
        text = self._decoded(self._start)
        new = self._from(text.rstrip(BROKEN))
        if len(self.ids) - self._start > 2 * AGO and not text.endswith(BROKEN):
            self._start = len(self.ids) - AGO
            self._shown = len(self._decoded(self._start))
        return new

    def rest(self) -> str:
        """At the end of the answer, what was held back."""
        return self._from(self._decoded(self._start))

    def text(self) -> str:
        """All of it, without special tokens."""
        return self._decoded(0)

    def _decoded(self, start: int) -> str:
        return self._tokenizer.decode(
            self.ids[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _from(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


class Stops:
    """Finds stop strings where transformers does: in the prompt's end and the answer together,
    where they end in the token that was added last."""

    def __init__(self, stop: Sequence[str], tokenizer: Any) -> None:
        self.stop = list(stop)
        self._tokenizer = tokenizer
        self._window = 4 * max(map(len, stop)) + 8  # a token is at least a byte of a character

    def ends(self, prompt: Sequence[int], ids: Sequence[int]) -> bool:
        """Whether the last of `ids`, which follow `prompt`, completes a stop string."""
        tail = [*prompt[-self._window :], *ids[-self._window :]][-self._window :]
        known, text = self._decoded(tail[:-1]).rstrip(BROKEN), self._decoded(tail)
        return any(s in text[max(0, len(known) - len(s) + 1) :] for s in self.stop)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
