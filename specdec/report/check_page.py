"""What scripts/check prints: one verdict in a line, and the tables below it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from specdec.measure.export_differences import Difference
from specdec.measure.reference import Reference
from specdec.measure.reference_replay import PromptComparison, ReplayComparison, ServedTokens
from specdec.measure.served_diagnosis import ROUNDED, ServedDiagnosis

SHOWN = 5  # explanations
HARMLESS = {ROUNDED, "dtype"}  # culprits by which a draft is served as exported


@dataclass(frozen=True)
class Checked:
    """An export on a server: the comparison with its reference and, where that fails, the culprits
    with the reasons in words."""

    export: str
    server: str
    reference: Reference
    comparison: ReplayComparison
    tokens: ServedTokens
    culprits: list[tuple[str, str]] = field(default_factory=list)
    diagnosis: ServedDiagnosis | None = None
    differences: Sequence[Difference] = ()

    @property
    def passes(self) -> bool:
        """Whether the draft is served as it was exported, within rounding."""
        alike = (self.tokens.same_text(self.reference), self.tokens.same_chat(self.reference))
        if False in alike:
            return False
        if self.comparison.passes:
            return True
        named = {culprit for culprit, _ in self.culprits}
        return bool(named) and named <= HARMLESS

    def blaming(self, culprit: str, why: str) -> "Checked":
        """This check with one more culprit."""
        return replace(self, culprits=[*self.culprits, (culprit, why)])

    def diagnosed(self, diagnosis: ServedDiagnosis, differences: Sequence[Difference]) -> "Checked":
        """This check with the culprits of experiments, and what differs in the export's files."""
        named = [(" or ".join(diagnosis.culprits), diagnosis.why)]
        culprits = [*self.culprits, *named]
        return replace(self, culprits=culprits, diagnosis=diagnosis, differences=differences)

    def after_warming(self, comparison: ReplayComparison) -> "Checked":
        """This check with the comparison of a second replay, which the server may have answered
        with the help of what it kept of the first."""
        return replace(self, comparison=comparison)

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        prompts, dtype = self.comparison.prompts, self.comparison.dtype
        accepted = sum(prompt.response.accepted_in_all for prompt in prompts)
        if self.passes and self.comparison.equal == len(prompts):
            return (
                f"AS EXPORTED: {self.export} on {self.server}: all {len(prompts)} responses and "
                f"{accepted} accepted tokens are those of the reference ({dtype})"
            )
        if self.passes:
            why = "; ".join(f"{culprit}: {why}" for culprit, why in self.culprits)
            why = why or "the others part where two logits of the target nearly tie"
            return (
                f"AS EXPORTED, WITHIN ROUNDING: {self.export} on {self.server}: "
                f"{self.comparison.equal} of {len(prompts)} responses are equal ({dtype}); {why}"
            )
        why = "; ".join(f"{culprit}: {why}" for culprit, why in self.culprits)
        return f"NOT AS EXPORTED: {self.export} on {self.server}: {why}"


def show_check(checked: Checked, console: Console) -> None:
    """Print the verdict and the tables."""
    console.print(checked.verdict, soft_wrap=True, markup=False)
    table = Table("prompt", "ids", "accepted: reference", "accepted: server")
    for n, prompt in enumerate(checked.comparison.prompts, 1):
        table.add_row(str(n), _ids(prompt), _range(prompt), _counts(prompt))
    console.print(table)
    for name, same in (
        ("tokenizer", checked.tokens.same_text(checked.reference)),
        ("chat template", checked.tokens.same_chat(checked.reference)),
    ):
        words = {True: "as in the reference", False: "other ids", None: "not compared"}[same]
        console.print(f"{name}: {words}", markup=False)
    for difference in checked.differences:
        console.print(f"{difference.culprit}: {difference.what}", soft_wrap=True, markup=False)
    if checked.diagnosis is not None and checked.diagnosis.explanations:
        console.print(_explanations(checked.diagnosis))


def _ids(prompt: PromptComparison) -> str:
    if prompt.parted is None:
        return "same"
    gap = "" if prompt.gap is None else f" (two logits differ by {prompt.gap:.3g})"
    return f"part at token {prompt.parted + 1}{gap}"


def _range(prompt: PromptComparison) -> str:
    low, high = prompt.expected.low, prompt.expected.high
    both = zip(low, high, strict=True)
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in both) or "0"


def _counts(prompt: PromptComparison) -> str:
    response = prompt.response
    if response.accepted:
        return ", ".join(map(str, response.accepted))
    return f"{response.accepted_in_all} in all"


def _explanations(diagnosis: ServedDiagnosis) -> Table:
    table = Table("what may differ", "tokens that it leaves unexplained")
    if diagnosis.unchanged is not None:
        table.add_row("nothing: the draft as exported", str(diagnosis.unchanged))
    for one in diagnosis.explanations[:SHOWN]:
        table.add_row(f"{one.culprit}: {one.change}", str(one.misfit))
    return table
