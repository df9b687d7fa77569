"""The settings that all compared decoding configurations share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode
from specdec.decoding.generation import Generation, SpeculationStep
from specdec.decoding.way import Way
from specdec.ranks import ALONE, Ranks
from specdec.targets.target import Target


@dataclass(frozen=True)
class Setup:
    """A target that answers `batch` prompts at a time with up to `max_new_tokens` tokens each,
    measured by `ranks` together. If time is short, measuring is `brief`: prompts for counts are
    decoded together, and costs are timed fewer times."""

    target: Target
    max_new_tokens: int = DecodeConfig.max_new_tokens
    batch: int = DecodeConfig.batch
    seed: int = DecodeConfig.seed
    ranks: Ranks = ALONE
    brief: bool = False

    @classmethod
    def from_config(cls, target: Target, cfg: DecodeConfig, ranks: Ranks = ALONE) -> "Setup":
        return cls(target, cfg.max_new_tokens, cfg.batch, cfg.seed, ranks)

    def responses(
        self, prompts: Sequence[Sequence[int]], way: Way, **options: Any
    ) -> list[Generation]:
        """Continue prompts together. `options` are those of `decode`."""
        return decode(
            self.target, prompts, way, **{"max_new_tokens": self.max_new_tokens} | options
        )

    def steps(self, prompts: Sequence[Sequence[int]], way: Way) -> list[SpeculationStep]:
        """The speculation steps when each prompt is answered alone. The prompts are distributed
        over the processes, unless an adaptive draft length may learn from one response to the next.
        `brief`: together."""
        if self.brief and way.draft_length is None:
            seeds = range(self.seed, self.seed + len(prompts))
            together = self.ranks.first(lambda: self.responses(prompts, way, seeds=seeds))
            return [r for response in together for r in response.steps]

        def steps(i: int) -> list[SpeculationStep]:
            (response,) = self.responses([prompts[i]], way, seeds=[self.seed + i])
            return response.steps

        ranks = self.ranks if way.draft_length is None else ALONE
        return [r for of_prompt in ranks.map(range(len(prompts)), steps) for r in of_prompt]
