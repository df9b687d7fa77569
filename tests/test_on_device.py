"""Whole jobs on a device that is not the CPU, and how often the host waits for it.

Run alone: DRAFTSMITH_TEST_DEVICE=pretend python -m pytest tests/test_on_device.py
"""

import pytest
import torch

from specdec.formats.export import layout_names
from tests.device import DEVICE
from tests.pretend import NAME
from tests.tiny import Tiny
from train.processes import accelerator_of

pytestmark = pytest.mark.skipif(DEVICE.type != NAME, reason=f"DRAFTSMITH_TEST_DEVICE={NAME} only")

JOBS = {  # one family of each kind
    "recurrent": ["eagle3"],
    "parallel, with a loss that autocast forbids": ["dspark", "loop.precision=bf16"],
    "model": ["lm"],
    "copying": ["suffix"],
}


@pytest.mark.parametrize("kind", list(JOBS))
def test_a_job_trains_measures_and_exports_on_a_device(tiny: Tiny, tmp_path, kind: str) -> None:
    tiny.job(tmp_path / "run", *JOBS[kind], f"target.device={NAME}")
    assert (tmp_path / "run" / "report" / "report.md").exists()
    exported = bool(layout_names(JOBS[kind][0]))
    assert (tmp_path / "run" / "export").exists() == exported


def test_a_job_keeps_to_the_device_that_it_is_given(
    tiny: Tiny, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself, accelerate takes the first device of the machine for the draft."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", NAME)
    tiny.job(tmp_path / "run", "medusa", "target.device=cpu")


@pytest.mark.parametrize("device", ["cpu", f"{NAME}:0", f"{NAME}:1"])
def test_the_processes_are_where_the_target_is(tiny: Tiny, device: str) -> None:
    """Whatever device an earlier run in this process had."""
    accelerator = accelerator_of(tiny.config("medusa", f"target.device={device}"))
    assert accelerator.device == torch.device(device)
    moved = accelerator.prepare(torch.nn.Linear(2, 2))
    assert moved.weight.device == torch.device(device)
    if device != "cpu":
        assert torch.get_device_module(device).current_device() == torch.device(device).index
        torch.get_device_module(device).set_device(0)
