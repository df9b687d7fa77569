"""Random numbers by row: the stream by a published vector, uniform, and of each row its own.

Run alone: python -m pytest tests/sampling/test_row_draws.py
"""

import torch

from specdec.sampling.row_draws import STEP, RowDraws, _signed
from tests.device import DEVICE

# SplitMix64's first numbers from the state 0 (the vector of Vigna's reference implementation)
KNOWN = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]


def test_the_published_vector() -> None:
    """A row's state is the first number of its seed; each number is 52 bits of SplitMix64's."""
    assert RowDraws([0]).state_B.tolist() == [_signed(KNOWN[0])]
    assert RowDraws([STEP, 2 * STEP]).state_B.tolist() == [_signed(x) for x in KNOWN[1:3]]
    row = RowDraws([0], DEVICE)
    row.state_B = torch.zeros_like(row.state_B)
    assert row.uniform(4)[0].tolist() == [(x >> 12) / 2**52 for x in KNOWN]


def test_numbers_are_uniform_within_rows_and_over_rows() -> None:
    """Chi-square over 64 bins, 63 degrees of freedom, fixed seeds; other seeds would exceed 112
    once in 10,000 times. The seeds are those that runs give: one after another, or 1009 apart."""
    for numbers in (
        RowDraws([3]).uniform(64_000),
        RowDraws(range(64_000)).uniform(1),
        RowDraws(range(0, 1009 * 64_000, 1009)).uniform(1),
        RowDraws(range(8_000)).uniform(8)[:, ::2],
    ):
        assert numbers.dtype == torch.float64 and numbers.min() >= 0 and numbers.max() < 1
        seen = torch.bincount((numbers.flatten() * 64).long(), minlength=64)
        expected = numbers.numel() / 64
        assert ((seen - expected) ** 2 / expected).sum() < 112


def test_rows_and_places_are_independent() -> None:
    """Pairs of neighbours in 8 x 8 bins, 63 degrees of freedom: 112 once in 10,000 times."""
    table = RowDraws(range(10_000)).uniform(7)
    along, across = (table[:, :-1], table[:, 1:]), (table[:-1], table[1:])
    for one, other in (along, across, (table[:-1, 1:], table[1:, :-1])):
        cell = (one * 8).long() * 8 + (other * 8).long()
        seen, expected = torch.bincount(cell.flatten(), minlength=64), cell.numel() / 64
        assert ((seen - expected) ** 2 / expected).sum() < 112


def test_a_row_goes_on_where_it_stopped_in_any_batch() -> None:
    """Rows use 2, 0 and 3 of 3 numbers, then the batch is permuted, cut and filled again."""
    last = 2**63 + 1
    streams = {s: RowDraws([s], DEVICE).uniform(9)[0].tolist() for s in (5, -7, last, 8)}
    rows = RowDraws([5, -7, last], DEVICE)
    used_B = torch.tensor([2, 0, 3], device=rows.counter_B.device)
    assert rows.uniform(3, used_B).tolist() == [x[:3] for x in list(streams.values())[:3]]
    rows.select([2, 0])
    assert rows.uniform(2).tolist() == [streams[last][3:5], streams[5][2:4]]
    rows.replace([0], RowDraws([8], DEVICE))
    assert rows.uniform(1).tolist() == [streams[8][:1], streams[5][4:5]]
