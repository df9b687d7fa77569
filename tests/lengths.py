"""What the tests of draft lengths share."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.decoding.draft_length import Length
from specdec.lab.decoding.disco import StopClassifier


def rows(*values: Sequence) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def stops(policy: Length, q_BK: list[list[float]]) -> list[list[bool]]:
    """What `stop` says at each depth of rows whose drafted token, always 0, has these q."""
    found = []
    for depth in range(len(q_BK[0])):
        q_BS = rows(*[[row[depth], 1 - row[depth]] for row in q_BK])
        token_B = torch.zeros(len(q_BK), dtype=torch.long)
        found.append(policy.stop(depth, q_BS, token_B, q_BS[:, 0]).tolist())
    return found


def likely(threshold: float) -> StopClassifier:
    """P(accepted) = σ(log q - log threshold): at 1/2 it stops where q < threshold."""
    return StopClassifier([1.0, 0, 0, 0, 0], -math.log(threshold), [0.0] * 5, [1.0] * 5, 0)
