"""More than one process: the commands of docs/gpus.md as they are, sharded ones too.

Run alone: python -m pytest tests/train/test_sharded.py

FSDP2 is torch's `fully_shard`, which `accelerate launch --use_fsdp --fsdp_version 2` applies.
"""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from specdec.errors import UserError
from specdec.forcing.teacher import TeacherForcing
from specdec.sampling.sampler import Sampler
from specdec.targets.target_config import TargetConfig
from tests.drafters.families import make_drafter, make_target, text
from tests.processes import process, together
from tests.runs import draft
from tests.tiny import Tiny, batch_of, losses
from train import accelerated, optim, training_checkpoint
from train.launcher import exiting_at_once
from train.optim import OptimConfig

pytestmark = pytest.mark.slow
LAUNCH = ["-m", "accelerate.commands.launch", "--main_process_port", "0"]  # tests run beside others
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
    # one process reads for both, and both measure: the same texts, and the same counts at T = 0
    texts, results = (
        [json.loads((folder / name).read_text()) for folder in (tmp_path / "run", whole)]
        for name in ("config.json", "report/results.json")
    )
    assert texts[0]["of"] == texts[1]["of"] and texts[0]["records"] == texts[1]["records"]
    assert [found["processes"] for found in results] == [2, 1]
    ours, theirs = (found["measured"][0] for found in results)
    for name in ("speculation_steps", "accepted_lengths", "drafted", "accepted", "identical"):
        assert ours[name] == theirs[name]
    for ours_of, theirs_of in zip(ours["prompts"], theirs["prompts"], strict=True):
        for name in ("emitted", "speculation_steps", "positions", "greedy"):
            assert ours_of[name] == theirs_of[name]
    assert [s["prompt"] for s in ours["samples"]] == [s["prompt"] for s in theirs["samples"]]


def test_fsdp_of_the_first_version_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    command = tiny.command(tmp_path / "run", "medusa")
    done = process([*LAUNCH, "--use_fsdp", "--num_processes", "2", *command])
    assert done.returncode != 0
    told = "error: drafters are sharded by FSDP2 only: give --fsdp_version 2"
    assert done.stderr.count(told) == done.stderr.count("error: ") == 1  # not once by each process


@pytest.mark.parametrize("kind", accelerated.OTHERS)
def test_other_kinds_of_processes_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(UserError, match=r"is not supported: .* sharded by FSDP2"):
        accelerated.accelerator_of(TargetConfig())


def test_two_sharded_processes_equal_the_whole(tmp_path: Path) -> None:
    together([__file__], 2, tmp_path / "said")
    said = [(tmp_path / "said" / f"{rank}.out").read_text() for rank in range(2)]
    assert [text.count("equal") for text in said] == [4 + len(PRECISIONS), 0]


# dtype of the target, precision of the draft
PRECISIONS = [("bfloat16", "auto"), ("float32", "bf16"), ("bfloat16", "no"), ("float32", "no")]
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
        gathered = training_checkpoint.weights(sharded)
        for key, value in whole.state_dict().items() if dist.get_rank() == 0 else ():
            torch.testing.assert_close(gathered[key], value, **MUON)
        if dist.get_rank() == 0:  # what is written of it
            plain = {n.removeprefix("drafter."): x for n, x in gathered.items()}
            kept = whole.drafter.weights_to_save(whole.drafter.state_dict())
            for key, value in whole.drafter.weights_to_save(plain).items():
                torch.testing.assert_close(value, kept[key], **MUON)
        if dist.get_rank() == 0:
            print(name, "equal", flush=True)
    for dtype, precision in PRECISIONS:
        require_equal_precision(dtype, precision)
    dist.barrier()


# what `accelerate config` may have left: units of sharding that families do not keep to, and a
# number of micro-batches that is not the loop's
OF_A_LAUNCHER = {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "1"}
OF_A_LAUNCHER |= {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
OF_A_LAUNCHER |= {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}


def require_equal_precision(dtype: str, precision: str) -> None:
    """A sharded draft, prepared as on a GPU, computes what a replicated one does: with the same
    weights the same loss, α and held-out α, bit for bit, and the same gradient up to the order of
    sums; after a step, the loss within bfloat16's rounding (a float32 weight that differs in its
    last bit may round to a neighbour, 2^-8 away). accelerate's own policy rounds log Z, some 30
    here, to a multiple of 1/8, which moves p by up to 6 %: α is then off by more than 3 %."""
    sampler, rank = Sampler(1.0), dist.get_rank()
    ids, mask = text(rank, 20)[0].tolist(), [False] * 4 + [True] * 16

    def computed(sharded: bool) -> list[torch.Tensor]:
        """The loss, the statistics, held-out α, the gradient's norm, and the loss after a step."""
        os.environ |= {"ACCELERATE_USE_FSDP": str(sharded).lower(), "FSDP_VERSION": "2"}
        os.environ |= OF_A_LAUNCHER
        accelerator = accelerated.accelerator_of(TargetConfig(dtype=dtype), precision)
        assert accelerator.gradient_accumulation_steps == 1
        target = make_target()
        target.head.weight.mul_(10)  # log Z is about 30, so rounding it to bfloat16 moves p by 6 %
        target.model.to(getattr(torch, dtype))
        forcing = TeacherForcing(make_drafter("eagle3", target), target, sampler)
        optimizer = torch.optim.AdamW(forcing.parameters(), 1e-3)
        model, optimizer = accelerator.prepare(forcing, optimizer)
        batch = batch_of(target, forcing.drafter.needs, sampler, [ids], [mask])
        assert isinstance(model, FSDPModule) == sharded
        with torch.no_grad(), accelerator.autocast():
            alpha = model(batch, measure=True).alpha.sampled
        with accelerator.autocast():
            loss, seen = model(batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with accelerator.autocast():
            after, _ = model(batch)
        return [loss, seen, alpha, torch.tensor(float(norm)), after]

    replicated, sharded = computed(False), computed(True)
    for ours, theirs in zip(sharded[:3], replicated[:3], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(sharded[3], replicated[3], rtol=1e-5, atol=0)
    torch.testing.assert_close(sharded[4], replicated[4], rtol=2**-8, atol=0)
    assert {x.dtype for x in sharded} == {torch.float32}
    if (dtype, precision) == ("bfloat16", "auto"):
        bf16, exact = torch.bfloat16, accelerated.EXACT
        accelerated.EXACT = MixedPrecisionPolicy(bf16, reduce_dtype=bf16, output_dtype=bf16)
        theirs = computed(True)
        accelerated.EXACT = exact
        some = replicated[2] > 1e-6
        assert (theirs[2] / replicated[2] - 1).abs()[some].max() > 0.03
    if rank == 0:
        print(dtype, precision, "equal", flush=True)


if __name__ == "__main__":
    with exiting_at_once():
        main()
