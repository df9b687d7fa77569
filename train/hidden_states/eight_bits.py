"""States of the target in 8 bits: whole numbers from -127 to 127, and a scale for each block of
neighbouring numbers of a state. A few numbers of a state may be a thousand times as large as the
others; with a scale for each block, only their neighbours are rounded coarsely."""

import torch
from torch import Tensor

LARGEST = 127
BLOCK = 64  # numbers that share a scale, at most
SCALE = torch.bfloat16  # in which scales are kept


def block_of(width: int) -> int:
    """The largest number of neighbours, up to `BLOCK`, that divides a state of this width."""
    return next(size for size in range(min(BLOCK, width), 0, -1) if width % size == 0)


def rounded(states: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The numbers [..., F] in 8 bits and the scales [..., F / block] of states [..., F]. A number
    is off by at most half a scale, and by a little more if it is the largest of its block."""
    blocks = states.float().unflatten(-1, (-1, block))
    scale = (blocks.abs().amax(-1) / LARGEST).to(SCALE)
    whole = scale.float()[..., None]
    codes = torch.where(whole > 0, blocks / whole, 0.0).round().clamp(-LARGEST, LARGEST)
    return codes.to(torch.int8).flatten(-2), scale


def restored(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [..., F] of which `rounded` made these."""
    blocks = codes.unflatten(-1, (scale.shape[-1], -1)).float() * scale.float()[..., None]
    whole: Tensor = blocks.flatten(-2).to(dtype)
    return whole
