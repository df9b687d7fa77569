"""Confidence beside acceptance: a miscalibration that is known is recovered, and counts agree.

Run alone: python -m pytest tests/measure/test_calibration.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.decoding.config import DecodeConfig
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.ngram import NgramConfig
from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.formats import draft_checkpoint
from specdec.measure.calibration import (
    ConfidenceAndAcceptance,
    believed,
    calibrate,
    fit,
    reliability,
)
from specdec.measure.evaluation import Subject, evaluate
from specdec.measure.forced import Along, ForcedText, along, whole
from specdec.measure.results import Results
from specdec.measure.setup import Setup
from specdec.report import report
from specdec.sampling.confidence import Calibrations
from specdec.sampling.sampler import Sampler
from specdec.targets.target import Target
from specdec.theory.alpha import Acceptance
from tests.tiny import lm, random_drafter

PROMPTS = [[5, 9, 7, 3], [8, 4], [6, 6, 9, 10, 11], [12, 5, 4], [7], [9, 9], [3, 8, 5]]
CFG = DecodeConfig(prompts=3, max_new_tokens=16, gamma=3)
TRUE = ((0.5, -1.0), (1.5, 0.7))  # scale and shift at two depths


def synthetic(seed: int, responses: int = 40, each: int = 100) -> list[ConfidenceAndAcceptance]:
    """Tokens that are accepted with σ(scale · logit c + shift), not with their confidence c. Every
    second token after an accepted one counts, with weight 1."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(responses):
        c = torch.rand(each, 2, generator=generator, dtype=torch.float64).clamp(0.01, 0.99)
        scale, shift = torch.tensor(TRUE, dtype=torch.float64).T
        likely = (scale * c.logit() + shift).sigmoid()
        y = (torch.rand(each, 2, generator=generator, dtype=torch.float64) < likely).double()
        weight = torch.stack([torch.ones_like(y[:, 0]), y[:, 0]], 1)
        found.append(ConfidenceAndAcceptance(c, y, weight))
    return found


def test_a_known_miscalibration_is_recovered_and_the_error_falls() -> None:
    """There are 4,000 tokens at depth 0 and, at depth 1, the 1,300 accepted ones, so the standard
    errors of scale and shift are .03 to .1. On other tokens drawn in the same way, the calibration
    error was above .1 and falls to what ten bins of so many tokens leave by chance, about .8 ·
    sqrt(.25 / 130) = .035."""
    found, other = fit(synthetic(0)), synthetic(1)
    assert found.scale == pytest.approx([s for s, _ in TRUE], abs=0.2)
    assert found.shift == pytest.approx([s for _, s in TRUE], abs=0.2)
    share = sum(float(x.accepted[:, 0].sum()) for x in synthetic(0)) / 4000
    assert found.accepted[0] == pytest.approx(share, abs=1e-3)
    raw, after = reliability(other), reliability(other, found)
    for before, now in zip(raw, after, strict=True):
        assert before.error > 0.1 and now.error < 0.05
        assert now.whole.observed == before.whole.observed  # the same tokens
        assert now.whole.predicted == pytest.approx(now.whole.observed.value, abs=0.04)
    assert [round(x.whole.weight) for x in raw] == [4000, raw[1].whole.observed.n]


def test_the_error_by_hand() -> None:
    """Bins .9 to 1 and .2 to .3: (.95 - .5) · 2/3 + (.75) · 1/3 at depth 0, where a token that was
    not tested counts for nothing."""
    c = torch.tensor([[0.95], [0.95], [0.25], [0.5]])
    y, w = torch.tensor([[1.0], [0.0], [1.0], [1.0]]), torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    (found,) = reliability([ConfidenceAndAcceptance(c, y, w)])
    assert found.error == pytest.approx(0.45 * 2 / 3 + 0.75 / 3)
    assert [(b.predicted, b.observed.value, b.weight) for b in found.bins] == [
        pytest.approx((0.25, 1.0, 1.0)),
        pytest.approx((0.95, 0.5, 2.0)),
    ]


def test_a_depth_without_tokens_is_calibrated_like_the_one_before() -> None:
    first = torch.tensor([1.0, 0.0])
    responses = [
        ConfidenceAndAcceptance(x.confidence, x.accepted, x.weight * first) for x in synthetic(0)
    ]
    found = fit(responses)
    assert found.scale[1] == pytest.approx(found.scale[0], abs=1e-6)
    assert found.shift[1] == pytest.approx(found.shift[0], abs=1e-6)
    assert found.accepted[1] == pytest.approx(found.accepted[0])
    sure = [
        ConfidenceAndAcceptance(x.confidence, torch.ones_like(x.accepted), x.weight)
        for x in synthetic(0)
    ]
    assert max(map(abs, fit(sure).shift)) < 20  # all were accepted, and yet it ends
    with torch.inference_mode():
        assert fit(synthetic(0)).scale == fit(synthetic(0)).scale


@pytest.mark.parametrize("variant", ["greedy", "greedy_draft", "sampled"])
def test_what_counts_at_each_depth_by_hand(variant: str) -> None:
    """Two anchors of a response of 4 tokens, the second of which is too near its end for depth
    2."""
    columns = torch.arange(1, 13, dtype=torch.float64).view(4, 3) / 20
    ones = torch.ones_like(columns)
    beyond = torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]])
    ratio = torch.tensor([[0.5, 3.0, 1.0]]).expand(4, 3)
    written = torch.tensor([[1.0, 0.0, 1.0]]).expand(4, 3)
    alpha = Acceptance(ones * 0.1, columns / 2, columns / 3)
    along = Along(alpha, [], ratio, ones, ones, columns * beyond, written, columns * beyond, ones)
    found = believed(ForcedText(along, [0, 2], [3, 3]), variant, 3)
    torch.testing.assert_close(found.confidence, (columns * beyond)[[0, 2]])
    kept = {"greedy": columns / 3, "greedy_draft": columns / 2, "sampled": ones}[variant]
    torch.testing.assert_close(found.accepted, kept[[0, 2]])
    row = [1.0, 0.5, 0.5] if variant == "sampled" else [1.0, 1.0, 0.0]
    assert found.weight.tolist() == [row, [*row[:2], 0.0]]


def test_at_zero_acceptance_is_the_decoders_own(target: Target) -> None:
    """In float32, the share accepted of the tokens that the decoder tested is equal, not just
    close."""
    cfg = replace(CFG, prompts=5, max_new_tokens=24, temperatures=[0.0])
    (at,) = evaluate(Subject("run", target, lm(target), "prompts"), PROMPTS, cfg).asked
    assert 0 < sum(at.accepted) < sum(at.drafted) and not at.calibrated
    for x, tested_k in zip(at.confidence, at.conditional_acceptance, strict=True):
        assert x.whole.observed == tested_k
        assert sum(b.weight for b in x.bins) == x.whole.weight


def test_a_drawn_token_is_accepted_with_beta_on_average(target: Target) -> None:
    """Over 3 depths at 200 anchors: the spread of min(1, p/q) is below .5, so its mean is within
    .1 of that of β at nearly 5 standard errors. The draws are the same again."""
    drafter = lm(target)
    (made,) = Setup(target, 200).responses(PROMPTS[:1], Way(sampler=Sampler(1.0)), seeds=[0])
    forcing = TeacherForcing(drafter, target, Sampler(1.0))
    found, again = (along(forcing, target, made.prompt, made.ids) for _ in range(2))
    text = whole(found, len(made.ids), 3)
    at = believed(text, "sampled", 3)
    beta = found.alpha.sampled[text.anchors]
    assert at.accepted.std() > 0.2 and (beta - at.accepted).abs().max() > 0.2
    assert float(at.accepted.mean()) == pytest.approx(float(beta.mean()), abs=0.1)
    assert torch.equal(found.drawn, again.drawn)


def unsure(target: Target) -> Drafter:
    """A copy of the target whose logits are half as large: its argmax is always right, but q says
    otherwise."""
    drafter = lm(target, 0.0)
    whole = drafter.unembed
    drafter.unembed = lambda hidden, k: whole(hidden, k) / 4  # type: ignore[method-assign]
    return drafter


@pytest.mark.usefixtures("pictures")
def test_calibration_on_other_prompts_lowers_the_error_and_is_reported(
    target: Target, tmp_path: Path
) -> None:
    drafter = unsure(target)
    drafter.calibrations = calibrate(target, drafter, PROMPTS[3:], CFG)
    assert drafter.calibrations.prompts == 4
    results = evaluate(Subject("run", target, drafter, "prompts"), PROMPTS[:3], CFG)
    greedy, sampled = results.asked
    assert all(x.whole.observed.value == 1 for x in greedy.confidence)
    for raw, after in zip(greedy.confidence, greedy.calibrated, strict=True):
        assert after.error < raw.error / 2
    assert sampled.calibrated and results.calibrated_on == 4
    report.write(tmp_path, results)
    page = (tmp_path / "report.md").read_text()
    assert "](reliability.png)" in page and (tmp_path / "reliability.png").stat().st_size > 10_000
    assert "fitted to 4 other prompts" in page and "| calibration error, calibrated |" in page
    assert Results.load(tmp_path) == results
    assert results.headline()["T0/error_confidence/0"] == greedy.confidence[0].error
    only = replace(CFG, temperatures=[0.0])  # the others stay
    again = calibrate(target, drafter, PROMPTS[3:5], only)
    assert again.sampled == drafter.calibrations.sampled and again.prompts == 2


def test_without_a_calibration_only_what_the_draft_believes_is_shown(
    target: Target, tmp_path: Path
) -> None:
    drafter = random_drafter(MedusaConfig(depth=3, draft_vocab=None), target, 0.05)
    for cfg in (CFG, replace(CFG, tree="dynamic", nodes=6)):
        results = evaluate(Subject("run", target, drafter, "prompts"), PROMPTS, cfg)
        report.write(tmp_path, results)
        page = (tmp_path / "report.md").read_text()
        assert "| calibration error, as drafted |" in page and "](reliability.png)" in page
        assert "calibrated |" not in page and "other prompts. Lengths" not in page


def test_a_draft_that_copies_has_no_confidence(target: Target, tmp_path: Path) -> None:
    copies = random_drafter(NgramConfig(depth=3), target, 0.0)
    results = evaluate(Subject("run", target, copies, "prompts"), PROMPTS, CFG)
    report.write(tmp_path, results)
    assert "Confidence" not in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "reliability.png").exists()
    with pytest.raises(UserError, match="ngram copies tokens"):
        calibrate(target, copies, PROMPTS, CFG)


def test_a_calibration_is_kept_with_the_draft(target: Target, tmp_path: Path) -> None:
    """`save` keeps it too, as it does for a hybrid; that of another temperature is untouched."""
    drafter = lm(target)
    draft_checkpoint.write_draft(tmp_path / "best", drafter, target)
    assert draft_checkpoint.load_draft(tmp_path / "best", target).calibrations == Calibrations()
    drafter.calibrations = calibrate(target, drafter, PROMPTS[:3], CFG)
    draft_checkpoint.write_calibrations(tmp_path / "best", drafter)
    assert (
        draft_checkpoint.load_draft(tmp_path / "best", target).calibrations == drafter.calibrations
    )
    draft_checkpoint.write_draft(tmp_path / "again", drafter, target)
    assert (
        draft_checkpoint.load_draft(tmp_path / "again", target).calibrations == drafter.calibrations
    )
