"""FSDP2: a sharded drafter has the loss, the gradients and the weights of a whole one.

Run alone: python -m pytest tests/train/test_sharded.py
The sharding is torch's own `fully_shard`, which accelerate applies with --fsdp_version 2; on
CPU processes accelerate itself falls back to DDP, so that it is applied here by hand.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from specdec.forcing.teacher import TeacherForcing, batch_of
from specdec.sampling.sampler import Sampler
from tests.drafters.test_contract import make_drafter, make_target, text
from train import checkpoint


@pytest.mark.slow
def test_two_sharded_processes_equal_the_whole() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "tests.test_sharded"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]  # the launcher's own words come last
    assert done.stdout.count("equal") == 3


def main() -> None:
    """One of the processes: each reads a text of its own; gradients are averaged."""
    dist.init_process_group("gloo")
    target, sampler = make_target(), Sampler(1.0)
    for name in ("eagle3", "medusa", "lm"):
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
            dist.all_reduce(parameter.grad)
            ours = parts[key].grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(ours, parameter.grad / 2)
        gathered = checkpoint.weights(sharded)
        for key, value in whole.state_dict().items() if dist.get_rank() == 0 else ():
            torch.testing.assert_close(gathered[key], value)
        if dist.get_rank() == 0:
            print(name, "equal", flush=True)
    # Gloo's threads may still hold tensors of Python's (the mesh keeps the group, so that no
    # destroy_process_group joins them); freeing one while the interpreter ends aborts it.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
