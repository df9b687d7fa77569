"""DISCO's stop classifier: its features, its fit, its records, and its file.

Run alone: python -m pytest tests/lab/decoding/test_disco.py

The synthetic records are drawn under a fixed seed.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.decoding.draft_length import length
from specdec.errors import UserError
from specdec.lab.decoding.disco import (
    FEATURES,
    Recorder,
    StopClassifier,
    TokenFeatures,
    fit,
)
from tests.lengths import likely, rows, stops


def test_hidden_states_by_hand() -> None:
    read = TokenFeatures()
    first = read(0, rows([0.5, 0.25, 0.25], [0, 1, 0]), torch.tensor([1, 0]))
    names = dict(zip(FEATURES, first[0].tolist()))
    assert names == pytest.approx(
        {
            "log_q": math.log(0.25),
            "entropy": 1.5 * math.log(2),
            "margin": 0.25,
            "depth": 0,
            "cumulative_log_q": math.log(0.25),
        }
    )
    floor = math.log(1e-9)  # a token that q says cannot be, and still finite
    assert first[1].tolist() == pytest.approx([floor, 0, 1, 0, floor])
    second = read(1, rows([0.5, 0.25, 0.25], [0, 1, 0]), torch.tensor([0, 1]))
    total = math.log(0.25) + math.log(0.5)
    assert second[0].tolist() == pytest.approx([math.log(0.5), 1.5 * math.log(2), 0.25, 1, total])
    again = read(0, rows([0.5, 0.5, 0]), torch.tensor([0]))
    assert again[0, 4].item() == pytest.approx(math.log(0.5))


def synthetic(n: int = 400) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(n, len(FEATURES), generator=generator, dtype=torch.float64)
    return x_NF * rows([1, 2, 0.1, 3, 5]) + rows([-1, 2, 0.5, 3, -6])


def test_fit_recovers_a_separating_line() -> None:
    x_NF = synthetic()
    side_N = (x_NF[:, 0] + 1) - 4 * (x_NF[:, 2] - 0.5)
    x_NF, accepted_N = x_NF[side_N.abs() > 0.1], (side_N > 0)[side_N.abs() > 0.1]
    found = fit(x_NF, accepted_N, ridge=1e-3)
    assert ((found.probability(x_NF) > 0.5) == accepted_N).all()
    # the direction, in units of the features as they came: 1 to -4, the rest near nothing
    raw = [w / s for w, s in zip(found.weight, found.scale)]
    assert raw[2] / raw[0] == pytest.approx(-4, rel=0.1)
    assert max(abs(raw[i] / raw[0]) for i in (1, 3, 4)) < 0.05


def test_fit_is_the_minimum_of_what_it_says() -> None:
    """At the response the gradient vanishes: Σ (σ - y) = 0 and Σ (σ - y) x + ridge · w = 0."""
    x_NF = synthetic().float()
    generator = torch.Generator().manual_seed(1)
    accepted_N = torch.rand(len(x_NF), generator=generator) < (x_NF[:, 0] + 1).sigmoid()
    found = fit(x_NF, accepted_N, ridge=2.0)
    x_NF = x_NF.double()
    residual_N = found.probability(x_NF) - accepted_N.double()
    normal_NF = (x_NF - rows(found.mean)) / rows(found.scale)
    gradient_F = residual_N @ normal_NF + 2.0 * rows(found.weight)[0]
    assert abs(residual_N.sum().item()) < 1e-5
    assert gradient_F.abs().max().item() < 1e-5
    assert found.records == len(x_NF)


def test_fit_bears_a_hidden_state_that_never_changes_and_inference_mode() -> None:
    x_NF = synthetic()
    x_NF[:, 3] = 2.0
    with torch.inference_mode():
        inside = x_NF * 1.0
        found = fit(inside, inside[:, 0] > -1)
    assert all(math.isfinite(w) for w in found.weight)
    assert found.weight[3] == pytest.approx(0)
    with pytest.raises(UserError, match="400 of 400 recorded tokens were accepted"):
        fit(x_NF, torch.ones(400, dtype=torch.bool))


def test_recorder_keeps_the_tokens_whose_fate_is_known() -> None:
    recorder = Recorder(limit=3)
    assert (recorder.gamma(2), recorder.reads_q) == (3, True)
    q = rows([0.7, 0.3], [0.7, 0.3])
    for depth, tokens in enumerate([[0, 1], [1, 0], [0, 0]]):
        drafted = torch.tensor(tokens)
        assert recorder.stop(depth, q, drafted, q[0, drafted]).tolist() == [False, False]
    recorder.observe([3, 3], [1, 3])
    features, accepted = recorder.records()
    # depth 0: both rows; depth 1: both; depth 2: the second row alone
    assert accepted.tolist() == [True, True, False, True, True]
    assert features[:, 3].tolist() == [0, 0, 1, 1, 2]
    assert features[:, 0].exp().tolist() == pytest.approx([0.7, 0.3, 0.3, 0.7, 0.7])
    recorder.gamma(2)
    recorder.observe([0, 0], [0, 0])  # a speculation step without a draft
    assert len(recorder.records()[1]) == 5
    with pytest.raises(UserError, match="nothing was recorded"):
        Recorder(limit=3).records()


def test_disco_stops_below_its_threshold() -> None:
    disco = length("disco", {"limit": 7, "threshold": 0.5}, likely(0.3))
    assert (disco.gamma(1), disco.reads_q) == (7, True)
    assert stops(disco, [[0.9, 0.2, 0.9], [0.29, 0.31, 0.5]]) == [
        [False, True],
        [True, False],
        [False, False],
    ]
    # σ(log .45 - log .3) = .6: a stricter threshold stops there too
    strict = length("disco", {"threshold": 0.61}, likely(0.3))
    assert stops(strict, [[0.45]]) == [[True]]


def test_disco_from_records_to_disk_and_back(tmp_path: Path) -> None:
    """Tokens of q > 1/2 are accepted, others are not: learnt from speculation steps, kept on disk,
    used."""
    recorder = Recorder(limit=1)
    shares = [0.05 + 0.1 * i for i in range(10)]
    for share in shares:
        recorder.gamma(1)
        recorder.stop(0, rows([share, 1 - share]), torch.tensor([0]), torch.tensor([share]))
        recorder.observe([1], [int(share > 0.5)])
    path = tmp_path / "stop.json"
    fitted = fit(*recorder.records(), ridge=0.01)
    fitted.save(path)
    assert StopClassifier.load(path) == fitted
    disco = length("disco", {"path": str(path)})
    assert stops(disco, [[share] for share in shares]) == [[share < 0.5 for share in shares]]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "[]", "expected an object, found a list of 0; fit a stop classifier"),
        (lambda text: "", "cannot be read"),
        (lambda text: "\0\ud800".encode("utf-8", "surrogatepass"), "cannot be read"),
        (lambda text: edited(text, weight=[1.0]), "weight must be 5 numbers"),
        (lambda text: edited(text, weight="abcde"), "weight: expected a list, found 'abcde'"),
        (lambda text: edited(text, bias=math.nan), "nan is not a finite number"),
        (lambda text: edited(text, mean=[None] * 5), "expected a number, found null"),
        (lambda text: edited(text, scale=[0.0] * 5), "a scale is not above 0"),
        (lambda text: edited(text, features=["a"] * 5), "its features"),
        (lambda text: edited(text, other=1), "unknown key 'other'"),
        (lambda text: edited(text, drop="bias"), "the key 'bias' is missing"),
        (lambda text: text.replace("0.", "1."), "its checksum differs"),
    ],
)
def test_a_damaged_classifier_is_told(
    tmp_path: Path, damage: Callable[[str], str | bytes], words: str
) -> None:
    path = tmp_path / "stop.json"
    likely(0.3).save(path)
    damaged = damage(path.read_text())
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(UserError, match=words) as caught:
        length("disco", {"path": str(path)})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def edited(text: str, drop: str = "", **changes: object) -> str:
    found = json.loads(text) | changes
    for name in (drop, "checksum"):  # with a checksum, any edit is told as such
        found.pop(name, None)
    return json.dumps(found)
