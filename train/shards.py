"""Shards of the work before training, for independent processes or machines that fill one folder of
responses or hidden states: `responses.shard=2/8` does the second of eight shards."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from specdec.errors import UserError

T = TypeVar("T")
AFTERWARDS = "when all shares are done, run the same command without"


@dataclass(frozen=True)
class Shard:
    """The shard with this number, from 1, of `count`."""

    number: int
    count: int

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """Every `count`-th item, beginning with this shard's first."""
        return items[self.number - 1 :: self.count]

    def __str__(self) -> str:
        return f"share {self.number} of {self.count}"


def shard_of(name: str, text: str | None) -> Shard | None:
    """The shard in a setting of this name, written as "2/8"; None without one. Raises UserError for
    anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", str(text))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"{name}={text}: give a share such as 1/4, from 1/4 to 4/4")
    return Shard(int(match[1]), int(match[2]))
