"""Measures beam search with and without a draft, on the same prompts in turn."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.progress import Progress

from specdec.drafters.base import Drafter
from specdec.files import write_json
from specdec.lab.decoding.beam import BeamResult, beam_search
from specdec.targets.target import Target
from specdec.theory.intervals import Interval, ratio_interval

FILE = "beams.json"  # in the folder of an evaluation


@dataclass
class Beams:
    """The measured figures. Seconds are means over prompts, of the forward passes after prefill;
    intervals are over prompts."""

    beams: int
    gamma: int  # steps that the draft searches ahead
    prompts: int
    max_new_tokens: int
    dtype: str
    tau: Interval  # beam steps per pass of the target
    speedup: Interval
    seconds: float
    plain_seconds: float
    identical: int  # prompts with the same hypotheses, in the same order

    def __str__(self) -> str:
        rounding = f" (a target in {self.dtype} may round to others: --dtype float32 is exact)"
        return (
            f"{self.beams} beams, {self.gamma} steps ahead, on {self.prompts} prompts: τ "
            f"{self.tau.text(2)} beam steps a pass; {self.speedup.text(2)} times as fast as plain "
            f"beam search ({self.seconds:.2f} against {self.plain_seconds:.2f} s a prompt); the "
            f"same hypotheses for {self.identical} of {self.prompts} prompts"
            f"{rounding * (self.identical < self.prompts and self.dtype != 'float32')}"
        )

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))


def measure_beams(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    beams: int,
    gamma: int,
    max_new_tokens: int,
    progress: Progress,
) -> Beams:
    """Search each prompt with and without the draft, in an alternating order. Both warm up on the
    first prompt. Raises UserError as `beam_search` does."""

    def search(prompt: Sequence[int], draft: Drafter | None) -> BeamResult:
        return beam_search(
            target,
            prompt,
            beams=beams,
            max_new_tokens=max_new_tokens,
            drafter=draft,
            gamma=gamma,
        )

    for draft in (drafter, None):
        search(prompts[0], draft)
    task = progress.add_task(f"{beams} beams", total=len(prompts))
    drafted, plain = list[BeamResult](), list[BeamResult]()
    for n, prompt in enumerate(prompts):
        for draft in (drafter, None) if n % 2 else (None, drafter):
            (plain if draft is None else drafted).append(search(prompt, draft))
        progress.advance(task)
    progress.remove_task(task)
    pairs = zip(drafted, plain, strict=True)
    texts = [[[h.ids for h in r.hypotheses] for r in pair] for pair in pairs]
    seconds, plain_seconds = ([r.seconds for r in some] for some in (drafted, plain))
    return Beams(
        beams=beams,
        gamma=gamma,
        prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        dtype=str(target.dtype).removeprefix("torch."),
        tau=ratio_interval(
            [r.steps - 1 for r in drafted], [len(r.speculation_steps) for r in drafted]
        ),
        speedup=ratio_interval(plain_seconds, seconds),
        seconds=fmean(seconds),
        plain_seconds=fmean(plain_seconds),
        identical=sum(ours == theirs for ours, theirs in texts),
    )
