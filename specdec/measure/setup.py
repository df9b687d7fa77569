"""What is measured at one temperature."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.decoding.answers import Generation, Round
from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode, fitting_rule
from specdec.decoding.policy import Length
from specdec.decoding.rules import Rule
from specdec.drafters.base import Drafter
from specdec.sampling.confidence import variant_of
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape
from specdec.target.base import Target


@dataclass(frozen=True)
class Setup:
    """A drafter that decodes for a target as `cfg` says, at the temperature of `sampler`."""

    target: Target
    drafter: Drafter
    cfg: DecodeConfig
    sampler: Sampler

    def answers(
        self, prompts: Sequence[Sequence[int]], shape: Shape | None, **options: Any
    ) -> list[Generation]:
        """Continue prompts together, in rounds that draft `shape` (None: by plain decoding).
        `options` are those of `decode` and override `cfg`."""
        cfg = self.cfg
        given: dict[str, Any] = {"max_new_tokens": cfg.max_new_tokens, "compiled": cfg.compile}
        if shape is not None:
            given |= {"drafter": self.drafter, "shape": shape}
            given |= {"rule": cfg.rule, "greedy_draft": cfg.greedy_draft}
        return decode(self.target, prompts, sampler=self.sampler, **given | options)

    def rule(self, shape: Shape) -> Rule:
        """The rule that judges drafts of this shape."""
        return fitting_rule(self.cfg.rule, shape, self.sampler, self.cfg.greedy_draft)

    def variant(self, shape: Shape) -> str:
        """The variant of α by which drafts of this shape are accepted."""
        picked = self.cfg.greedy_draft or self.rule(shape).siblings == "fixed"
        return variant_of(self.sampler.greedy, picked)

    def rounds(
        self, prompts: Sequence[Sequence[int]], gamma: int, length: Length | None = None
    ) -> list[Round]:
        """The rounds when each prompt is answered alone, drafting γ tokens or as `length` says."""
        made: list[Generation] = []
        for i, prompt in enumerate(prompts, self.cfg.seed):
            made += self.answers([prompt], Chain(gamma), seeds=[i], length=length, compiled=False)
        return [r for g in made for r in g.rounds]
