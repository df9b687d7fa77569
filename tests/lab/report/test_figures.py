"""Figures that the lab adds to the report.

Run alone: python -m pytest tests/lab/report/test_figures.py (under 15 s; nothing is computed)
"""

from specdec.report import report_page
from specdec.report.report_page import FIGURES
from tests.measure.test_results import results


def test_the_report_has_the_figures_of_the_core_then_those_of_the_lab() -> None:
    assert list(FIGURES) == ["theory", "beam_search"]
    page = report_page.page(results(), {})
    # 4 beams of the target and 4 of the draft at each of γ = 2 steps: 4 + 4 * 2 positions
    assert "would judge 12 positions per pass at γ = 2 (Appendix A.4)" in page
    assert page.index("Closed forms of Leviathan") < page.index("would judge 12 positions")
