"""Shares of responses and hidden states, made by independent processes in one folder.

Run alone: python -m pytest tests/train/test_shards.py (about 30 s)
"""

import subprocess
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from safetensors import safe_open

from specdec.errors import UserError
from tests.processes import forked
from tests.runs import require_same_run
from tests.tiny import REPOSITORY, Tiny, compose
from train.continued import note_beginning
from train.data.responses import _groups_of
from train.run_config import CONF
from train.shards import Shard, shard_of


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/4/2", "-1/4", "1/0", ""])
def test_shards_that_cannot_be(text: str) -> None:
    with pytest.raises(UserError, match=r"responses\.shard="):
        shard_of("responses.shard", text)


def test_shards_are_disjoint_and_leave_nothing_out() -> None:
    parts = [Shard(i, 4).part(range(10)) for i in range(1, 5)]
    assert sorted(x for part in parts for x in part) == list(range(10))
    assert shard_of("x", None) is None and shard_of("x", " 2/8 ") == Shard(2, 8)


def test_all_shares_began_when_the_first_did(tmp_path: Path) -> None:
    note_beginning(tmp_path / "run" / "began")
    (tmp_path / "run" / "began").write_text("2020-01-01T00:00:00\n")
    note_beginning(tmp_path / "run" / "began")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["began"]
    assert (tmp_path / "run" / "began").read_text().startswith("2020")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All hidden states in a folder of stores, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("responses", ["target", "data"])
def test_a_run_after_shares_is_the_run_of_one_process(
    tiny: Tiny, tmp_path: Path, responses: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three shares of the responses, made in another order, one is interrupted. Their batches
    are those of one process, so even rounding is the same."""

    def job(place: Path, *more: str) -> None:
        roots = [
            f"responses.root={place / 'responses'}",
            f"hidden_states.root={place / 'hidden_states'}",
        ]
        fixed = [f"data.responses={responses}", "responses.batch=3"]
        tiny.job(place / "run", "eagle3", *fixed, *roots, *more)

    job(tmp_path / "whole")
    kind = "responses" if responses == "target" else "hidden_states"
    for number in (3, 1, 2, 1):
        job(tmp_path / "shares", f"{kind}.shard={number}/3")
        said = f"{kind.replace('_', ' ')}: share {number} of 3 is done"
        assert said in capsys.readouterr().out
    assert not (tmp_path / "shares" / "run" / "config.json").exists(), "nothing was trained"
    ours, theirs = (stored(tmp_path / name / "hidden_states") for name in ("shares", "whole"))
    assert ours.keys() == theirs.keys() and len(ours) > 100
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    count = len([*(tmp_path / "shares" / "hidden_states").rglob("*.safetensors")])
    job(tmp_path / "shares")
    assert len([*(tmp_path / "shares" / "hidden_states").rglob("*.safetensors")]) == count
    require_same_run(tmp_path / "shares" / "run", tmp_path / "whole" / "run")


@pytest.mark.parametrize(("count", "size"), [(8, 250), (3, 250), (7, 128), (16, 512), (2, 90)])
def test_no_share_of_1000_prompts_is_empty(count: int, size: int) -> None:
    """4 of 8 were. No share has more than the mean and a quarter; together they have each prompt
    once, whatever the others have answered by now."""
    asked = {f"p{i}": [1] * (1 + i % 40) for i in range(1000)}
    shares = [
        [name for group in _groups_of(Shard(n + 1, count), asked, (), size) for name in group]
        for n in range(count)
    ]
    assert sorted(name for share in shares for name in share) == sorted(asked)
    assert max(map(len, shares)) <= 1.25 * 1000 / count
    known = {*shares[0], *shares[1][:5]}
    left = [name for g in _groups_of(Shard(2, count), asked, known, size) for name in g]
    assert sorted(left) == sorted(shares[1][5:])


def test_two_processes_fill_one_folder_at_once(tiny: Tiny, tmp_path: Path) -> None:
    roots = [
        f"responses.root={tmp_path / 'responses'}",
        f"hidden_states.root={tmp_path / 'hidden_states'}",
    ]
    more = ["data.responses=target", "responses.batch=3", *roots]
    command = tiny.command(tmp_path / "run", "eagle3", *more)
    logs = [tmp_path / f"{i}.log" for i in (1, 2)]
    both = [
        forked([*command, f"responses.shard={i}/2"], log, log)
        for i, log in enumerate(logs, start=1)
    ]
    for child in both:
        child.join(120)
    said = [log.read_text() for log in logs]
    assert [child.exitcode for child in both] == [0, 0], said
    files = [*(tmp_path / "responses").rglob("*.jsonl")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert len(lines) == 29, "each prompt is answered once"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["responses.shard=1/2", "data.responses=data"], "data.responses=target"),
        (["responses.shard=1/2", "hidden_states.shard=1/2", "data.responses=target"], "first"),
        (["hidden_states.shard=1/2", "hidden_states.mode=online"], "stores none"),
        (["hidden_states.shard=1/2", "budget.minutes=5"], "budget.minutes"),
    ],
)
def test_shards_of_what_a_run_does_not_do(tiny: Tiny, settings: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        tiny.config("eagle3", *settings)


@pytest.mark.parametrize("name", ["one_node", "several_nodes", "fsdp2"])
def test_accelerate_reads_its_configurations(name: str) -> None:
    """accelerate refuses keys that it does not know."""
    config = load_config_from_file(str(CONF / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == 8 * config.num_machines
    assert config.mixed_precision == "no"
    sharded = {"fsdp_version": 2} if name == "fsdp2" else {}
    assert config.fsdp_config == sharded
    assert config.distributed_type is DistributedType("FSDP" if sharded else "MULTI_GPU")


def test_folders_for_launchers_are_no_settings() -> None:
    with pytest.raises(UserError, match="accelerate"):
        compose(["accelerate=one_node"])


def test_the_job_for_slurm_is_a_script_that_bash_reads() -> None:
    subprocess.run(["bash", "-n", str(REPOSITORY / "examples" / "slurm.sh")], check=True)
