"""Stored hidden states in 8 bits.

Run alone: python -m pytest tests/train/test_eight_bits.py (about 15 s)
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import UserError
from tests.runs import require_same_run
from tests.tiny import Tiny, losses
from train.hidden_states.store import (
    HiddenStatesConfig,
    block_size,
    restored_from_8_bits,
    rounded_to_8_bits,
)


def test_blocks_divide_a_state() -> None:
    assert [block_size(n) for n in (576, 4096, 100, 7, 97)] == [64, 64, 50, 7, 1]


def test_numbers_are_off_by_half_a_scale_of_their_own_block() -> None:
    """A scale is itself rounded, by up to 1/256, so the largest may be off by half a scale more."""
    states = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    states[:, 3] *= 1000  # as some numbers of real states are
    codes, scale = rounded_to_8_bits(states, 32)
    assert codes.dtype is torch.int8 and scale.shape == (50, 4)
    off = (restored_from_8_bits(codes, scale, torch.float32) - states).unflatten(-1, (-1, 32)).abs()
    assert (off <= 1.001 * scale.float()[..., None]).all()
    others = states.unflatten(-1, (-1, 32)).abs() < 100 * scale.float()[..., None]
    assert (off <= 0.501 * scale.float()[..., None])[others].all()
    assert scale[:, 1:].max() < 0.1 < scale[:, 0].mean(), "the large number only spoils its block"


def test_nothing_is_lost_of_zeros_and_of_what_was_rounded_before() -> None:
    zeros = torch.zeros(3, 64)
    assert torch.equal(restored_from_8_bits(*rounded_to_8_bits(zeros, 64), torch.float32), zeros)
    once = restored_from_8_bits(*rounded_to_8_bits(torch.randn(9, 64), 64), torch.float32)
    torch.testing.assert_close(
        restored_from_8_bits(*rounded_to_8_bits(once, 64), torch.float32), once, rtol=0.02, atol=0
    )


@pytest.mark.parametrize("responses", ["data", "target"])
def test_a_run_learns_from_hidden_states_in_8_bits(
    tiny: Tiny, tmp_path: Path, responses: str
) -> None:
    more = [f"data.responses={responses}", f"responses.root={tmp_path / 'responses'}"]
    eight = ["hidden_states.bits=8", f"hidden_states.root={tmp_path / 'eight'}"]
    tiny.job(tmp_path / "plain", "eagle3", f"hidden_states.root={tmp_path / 'plain-store'}", *more)
    tiny.job(tmp_path / "run", "eagle3", *eight, *more)
    tensors: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "eight").rglob("*.safetensors"):
        tensors |= load_file(path)
    kinds = {name.split(".")[1]: x.dtype for name, x in tensors.items()}
    assert kinds["layers"] is torch.int8 and kinds["scales"] is torch.bfloat16
    assert kinds["final"] is torch.float32, "p is made of these"
    for (_, ours), (_, theirs) in zip(
        losses(tmp_path / "run")[:2], losses(tmp_path / "plain")[:2], strict=True
    ):
        assert ours != theirs and ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)
    tiny.job(tmp_path / "again", "eagle3", *eight, *more)
    require_same_run(tmp_path / "again", tmp_path / "run")


def test_families_that_read_no_layers_store_the_same(tiny: Tiny, tmp_path: Path) -> None:
    for name, more in (("plain", []), ("eight", ["hidden_states.bits=8"])):
        tiny.job(tmp_path / name, "medusa", f"hidden_states.root={tmp_path / 'store'}", *more)
    require_same_run(tmp_path / "plain", tmp_path / "eight")
    assert len([*(tmp_path / "store").iterdir()]) == 1


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(UserError, match=r"hidden_states\.bits=4"):
        HiddenStatesConfig(bits=4)
