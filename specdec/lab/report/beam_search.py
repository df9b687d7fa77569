"""The number of positions that the target would judge in a beam search, for the report's section on
theory."""

from specdec.measure.results import Results
from specdec.theory.leviathan import beam_passes

WIDTH = 4


def section(results: Results) -> list[str]:
    """One paragraph of Markdown (Leviathan et al. 2023, Appendix A.4)."""
    gamma = results.asked[0].way.gamma
    judged = beam_passes(WIDTH, WIDTH, gamma)
    return [
        f"A beam search of width {WIDTH} behind a draft beam as wide would judge {judged} "
        f"positions per pass at γ = {gamma} (Appendix A.4)."
    ]
