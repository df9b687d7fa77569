"""More than one process: the commands of the README as they are, sharded ones too.

Run alone: python -m pytest tests/train/test_sharded.py

FSDP2 is torch's `fully_shard`, which `accelerate launch --use_fsdp --fsdp_version 2` applies.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from specdec.forcing.teacher import TeacherForcing
from specdec.sampling.sampler import Sampler
from tests.drafters.families import make_drafter, make_target, text
from tests.processes import process
from tests.runs import draft
from tests.tiny import Tiny, batch_of, losses
from train import checkpoint, optim
from train.optim import OptimConfig

pytestmark = pytest.mark.slow
LAUNCH = ["-m", "accelerate.commands.launch"]
SHARDED = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"]
# `train.py` that notes how many numbers of the trained parameters each process holds
WATCHED = """
import json, os, runpy, sys
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

prepare = Accelerator.prepare

def prepared(*args, **options):
    made = prepare(*args, **options)
    trained = [p for p in made[0].parameters() if p.requires_grad]
    ours = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in trained)
    with open(f"{os.environ['NOTES']}/{os.environ['RANK']}", "w") as file:
        json.dump([ours, sum(p.numel() for p in trained)], file)
    return made

Accelerator.prepare = prepared
sys.argv = sys.argv[1:]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("flags", "drafter"),
    [(["--multi_gpu", "--num_processes", "2"], "medusa"), (SHARDED, "eagle3")],
    ids=["replicated", "sharded"],
)
def test_accelerate_launch_trains_as_one_process_does(
    tiny: Tiny, tmp_path: Path, flags: list[str], drafter: str
) -> None:
    """Two processes of one micro-batch are one process of two: the losses of all 12 steps and the
    draft's weights agree to rounding. Sharded, each process holds half of the numbers; else all."""
    tiny.job(whole := tmp_path / "one", drafter, "loop.accumulate=2")
    watched = tmp_path / "watched.py"
    watched.write_text(WATCHED)
    command = tiny.command(tmp_path / "run", drafter, "loop.accumulate=1")
    (tmp_path / "notes").mkdir()
    done = process([*LAUNCH, *flags, str(watched), *command], NOTES=str(tmp_path / "notes"))
    assert done.returncode == 0, done.stderr[-3000:]
    noted = [json.loads(path.read_text()) for path in (tmp_path / "notes").iterdir()]
    assert len(noted) == 2
    ours, (total, _) = zip(*noted, strict=True)
    if flags is SHARDED:
        assert sum(ours) == total and max(ours) < 0.6 * total
    else:
        assert ours == (total, total)
    found, expected = losses(tmp_path / "run"), losses(whole)
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 13))
    for (_, a), (_, b) in zip(found, expected, strict=True):
        # sums of some hundred float32 terms in another order
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    weights = draft(whole)
    for name, tensor in draft(tmp_path / "run").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)


def test_fsdp_of_the_first_version_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    command = tiny.command(tmp_path / "run", "medusa")
    done = process([*LAUNCH, "--use_fsdp", "--num_processes", "2", *command])
    assert done.returncode != 0
    assert "error: drafters are sharded by FSDP2 only: give --fsdp_version 2" in done.stderr


def test_two_sharded_processes_equal_the_whole() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "tests.train.test_sharded"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]  # the launcher's own words come last
    assert done.stdout.count("equal") == 4


MUON = {"rtol": 1e-3, "atol": 1e-4}  # it multiplies in bfloat16; a step moves by some 1e-3


def main() -> None:
    """One of the processes: each reads a text of its own; gradients are averaged."""
    dist.init_process_group("gloo")
    target, sampler = make_target(), Sampler(1.0)
    for name in ("eagle3", "medusa", "lm", "lm with adapters"):
        whole, sharded = (
            TeacherForcing(make_drafter(name, target), target, sampler) for _ in range(2)
        )
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        ids = text(dist.get_rank(), 20)[0].tolist()
        mask = [False] * 4 + [True] * 16
        batch = batch_of(target, whole.drafter.needs, sampler, [ids], [mask])
        losses = []
        for forcing in (whole, sharded):
            loss, _ = forcing(batch)
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        parts = dict(sharded.named_parameters())
        for key, parameter in whole.named_parameters():
            if parameter.grad is None:
                continue
            dist.all_reduce(parameter.grad.div_(2))
            ours = parts[key].grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(ours, parameter.grad)
        for forcing in (whole, sharded):
            for optimizer in optim.build(forcing, OptimConfig(hidden="muon"), whole.drafter.sizes):
                optimizer.step()
        gathered = checkpoint.weights(sharded)
        for key, value in whole.state_dict().items() if dist.get_rank() == 0 else ():
            torch.testing.assert_close(gathered[key], value, **MUON)
        if dist.get_rank() == 0:  # what is written of it
            plain = {n.removeprefix("drafter."): x for n, x in gathered.items()}
            kept = whole.drafter.finished(whole.drafter.state_dict())
            for key, value in whole.drafter.finished(plain).items():
                torch.testing.assert_close(value, kept[key], **MUON)
        if dist.get_rank() == 0:
            print(name, "equal", flush=True)
    # Gloo's threads may still hold tensors of Python's (the mesh keeps the group, so that no
    # destroy_process_group joins them); freeing one while the interpreter ends aborts it.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
