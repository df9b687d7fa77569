"""Uniform random numbers for the rows of a batch, drawn for all rows at once.

Each row has its own counter-based stream: a number depends only on the row's seed and the position
in the stream. A row therefore draws the same numbers in any batch, at any place in it and on any
device, and a batch needs one call instead of one generator for each row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15  # SplitMix64's distance between the states of two numbers
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
BITS = 52  # bits of a number, few enough that its product with any float64 stays below that float64


class RowDraws:
    """One stream of random numbers for each seed: SplitMix64 (Steele et al. 2014, Fast Splittable
    Pseudorandom Number Generators), starting from a hash of the seed."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        states = [_signed(seed) for seed in seeds]
        self.state_B = _hashed(torch.tensor(states, dtype=torch.long, device=device))
        self.counter_B = torch.zeros_like(self.state_B)  # numbers that each row has used

    def uniform(self, count: int, used_B: Tensor | None = None) -> Tensor:
        """The next numbers of each row [B, count], float64 from [0, 1). `used_B` is how many of
        them each row uses, from the first (None: all); the next call returns the unused ones
        again."""
        ahead_C = torch.arange(count, device=self.state_B.device)
        place_BC = self.counter_B[:, None] + ahead_C
        self.counter_B = self.counter_B + (count if used_B is None else used_B)
        bits_BC = _hashed(self.state_B[:, None] + place_BC * _signed(STEP))
        return _right(bits_BC, 64 - BITS).double() * 2.0**-BITS

    def groups(self, rows: Sequence[slice]) -> list["RowDraws"]:
        """Separate objects for these groups of rows; `regroup` takes over their positions."""
        parts = [RowDraws([]) for _ in rows]
        for part, of in zip(parts, rows, strict=True):
            part.state_B, part.counter_B = self.state_B[of], self.counter_B[of]
        return parts

    def regroup(self, parts: Sequence["RowDraws"]) -> None:
        self.counter_B = torch.cat([part.counter_B for part in parts])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        index_B = torch.tensor(rows, dtype=torch.long, device=self.state_B.device)
        self.state_B, self.counter_B = self.state_B[index_B], self.counter_B[index_B]

    def replace(self, rows: Sequence[int], other: "RowDraws") -> None:
        """Give these rows the streams of the rows of `other`, in order."""
        index_B = torch.tensor(rows, dtype=torch.long, device=self.state_B.device)
        self.state_B = self.state_B.index_copy(0, index_B, other.state_B)
        self.counter_B = self.counter_B.index_copy(0, index_B, other.counter_B)


def _hashed(state: Tensor) -> Tensor:
    """SplitMix64's output [...] for these states; int64 stands for unsigned 64 bits."""
    bits = state + _signed(STEP)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        bits = (bits ^ _right(bits, shift)) * _signed(multiplier)
    return bits ^ _right(bits, SHIFTS[-1])


def _right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift: zeros come in from the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same last 64 bits as this number."""
    return (int(number) + (1 << 63)) % (1 << 64) - (1 << 63)
