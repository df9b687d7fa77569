"""The text of an answer while it grows."""

from collections.abc import Sequence
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a part of a character


class Stream:
    """Turns committed tokens into the text that they complete: a character that is split over
    several tokens comes with the last of them."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._shown = 0  # characters

    def add(self, ids: Sequence[int]) -> str:
        """The text that is complete with these tokens and was not given before."""
        self.ids += ids
        return self._from(self.text().rstrip(BROKEN))

    def rest(self) -> str:
        """At the end of the answer, what was held back."""
        return self._from(self.text())

    def text(self) -> str:
        """All of it, without special tokens."""
        return self._tokenizer.decode(
            self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _from(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new
