"""Input copying (shallow aggressive decoding, Sun et al. 2021): for edits, corrections, rewrites.

The output is expected to follow the input. A pointer marks the next token to copy and advances
while the text agrees with it. After a mismatch, it moves to the token after the earlier occurrence
of the text's shortest suffix that occurred exactly once before (their Section 3.2.2). If no suffix
is unique, the mismatch counts as a substitution and the pointer moves past it, up to `patience`
times in a row.

The paper copies from its encoder's input. A decoder's text does not show where its prompt ends, so
here everything before the anchor is the input, in teacher forcing as in decoding.
"""

from dataclasses import dataclass
from typing import ClassVar

from specdec.drafters.base import DrafterConfig
from specdec.drafters.copying import Copying, TextMemory


@dataclass
class CopyConfig(DrafterConfig):
    """Input copying."""

    bounds: ClassVar = {"max_match": 1}
    name: str = "copy"
    depth: int = 10
    # longest suffix tried, in tokens; if even that is ambiguous, its latest occurrence is used
    max_match: int = 8
    patience: int = 3  # consecutive mismatches that count as substitutions


class CopyMemory(TextMemory):
    """The text so far, the pointer (-1: none), and the last end position of each short n-gram."""

    def __init__(self, config: CopyConfig) -> None:
        super().__init__(config)
        self.pointer = -1
        self._missed, self._agreed = 0, 1
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}  # n-gram: (times, what follows)

    def push(self, token: int) -> None:
        agrees = self.pointer >= 0 and self.ids[self.pointer] == token
        self.ids.append(token)
        tails = self.last(1, self.config.max_match)
        if agrees:
            self.pointer, self._missed = self.pointer + 1, 0
            self._agreed += 1
        else:
            self._align(tails)
        for tail in tails:
            self._after[tail] = (self._after.get(tail, (0, 0))[0] + 1, len(self.ids))

    def chain(self, count: int) -> list[int]:
        return [] if self.pointer < 0 else self.ids[self.pointer : self.pointer + count]

    def evidence(self) -> tuple[int, float]:
        return self._agreed, 1.0

    def _align(self, tails: list[tuple[int, ...]]) -> None:
        """Reset the pointer after a mismatch."""
        times, after, self._agreed = 0, -1, 1
        for tail in tails:
            times, after = self._after.get(tail, (0, -1))
            if times < 2:
                break
        if times > 0:
            self.pointer, self._missed = after, 0
            return
        self._missed += 1
        substituted = self.pointer >= 0 and self._missed <= self.config.patience
        self.pointer = self.pointer + 1 if substituted else -1


class Copy(Copying):
    Config = CopyConfig
    Memory = CopyMemory
