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
from specdec.ranks import ALONE, Ranks
from specdec.sampling.confidence import variant_of
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape
from specdec.targets.base import Target


@dataclass(frozen=True)
class Setup:
    """A drafter that decodes for a target as `cfg` says, at the temperature of `sampler`, measured
    by `ranks` together."""

    target: Target
    drafter: Drafter
    cfg: DecodeConfig
    sampler: Sampler
    ranks: Ranks = ALONE

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
        """The rounds when each prompt is answered alone, drafting γ tokens or as `length` says. The
        prompts are shared out, unless there is a `length`, which may learn from one to the next."""

        def rounds(i: int) -> list[Round]:
            options: dict[str, Any] = {"seeds": [self.cfg.seed + i], "length": length}
            (made,) = self.answers([prompts[i]], Chain(gamma), compiled=False, **options)
            return made.rounds

        ranks = self.ranks if length is None else ALONE
        return [r for of_prompt in ranks.shared(range(len(prompts)), rounds) for r in of_prompt]
