"""Uniform random numbers for the rows of a batch, drawn for all rows at once.

Each row has a stream of its own, numbered by a counter: a number follows from the row's seed and
its place in the stream alone. So a row draws the same numbers in any batch, at any place of it and
on any device, and a batch needs one call where generators would need one for each row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15  # SplitMix64's distance between the states of two numbers
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
BITS = 52  # of a number: so few that it times any float64 stays below that float64


class RowDraws:
    """One stream of numbers for each of these seeds: SplitMix64 (Steele et al. 2014, Fast
    Splittable Pseudorandom Number Generators) from a state that is hashed from the seed."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        states = [_signed(seed) for seed in seeds]
        self.state_B = _hashed(torch.tensor(states, dtype=torch.long, device=device))
        self.counter_B = torch.zeros_like(self.state_B)  # numbers that each row has used

    def uniform(self, count: int, used_B: Tensor | None = None) -> Tensor:
        """The next numbers of each row [B, count], float64 from [0, 1). `used_B` says how many of
        them a row uses, from the first (None: all); the others come again in the next call."""
        ahead_C = torch.arange(count, device=self.state_B.device)
        place_BC = self.counter_B[:, None] + ahead_C
        self.counter_B = self.counter_B + (count if used_B is None else used_B)
        bits_BC = _hashed(self.state_B[:, None] + place_BC * _signed(STEP))
        return _right(bits_BC, 64 - BITS).double() * 2.0**-BITS

    def groups(self, rows: Sequence[slice]) -> list["RowDraws"]:
        """The streams of these groups of rows; `regroup` takes back how far they have come."""
        parts = [RowDraws([]) for _ in rows]
        for part, of in zip(parts, rows, strict=True):
            part.state_B, part.counter_B = self.state_B[of], self.counter_B[of]
        return parts

    def regroup(self, parts: Sequence["RowDraws"]) -> None:
        self.counter_B = torch.cat([part.counter_B for part in parts])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only."""
        index_B = torch.tensor(rows, dtype=torch.long, device=self.state_B.device)
        self.state_B, self.counter_B = self.state_B[index_B], self.counter_B[index_B]

    def replace(self, rows: Sequence[int], other: "RowDraws") -> None:
        """Give these rows of the batch the streams of another batch, in order."""
        index_B = torch.tensor(rows, dtype=torch.long, device=self.state_B.device)
        self.state_B = self.state_B.index_copy(0, index_B, other.state_B)
        self.counter_B = self.counter_B.index_copy(0, index_B, other.counter_B)


def _hashed(state: Tensor) -> Tensor:
    """SplitMix64's number [...] after these states; int64 stands for 64 bits without a sign."""
    bits = state + _signed(STEP)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        bits = (bits ^ _right(bits, shift)) * _signed(multiplier)
    return bits ^ _right(bits, SHIFTS[-1])


def _right(bits: Tensor, count: int) -> Tensor:
    """Shifted right, with zeros on the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    """The number whose 64 bits, read as int64, are the last 64 of this one."""
    return (int(number) + (1 << 63)) % (1 << 64) - (1 << 63)
