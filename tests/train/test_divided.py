"""A target that two processes hold together: half of each layer each, and the same run as with one.

Run alone: python -m pytest tests/train/test_divided.py
"""

import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.ngram import NgramConfig
from specdec.errors import UserError
from specdec.ranks import Ranks
from specdec.sampling.trees import Chain, Static
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.parts import TargetParts
from specdec.targets.target_config import TargetConfig
from specdec.targets.tensor_parallel import TensorParallelTarget
from tests.lab.targets.test_seq2seq import make_target as make_seq2seq
from tests.processes import launched, together
from tests.runs import draft
from tests.tiny import Tiny, losses, make_tokenizer, random_drafter, save_target
from train.sizes import sizes_of_target

PROMPTS = [[5, 9, 20, 33, 7, 8], [40, 41, 42], [11, 12, 13, 12, 13, 12, 13]]
KINDS = {  # experts, windows, and states that cannot be rolled back
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
}


def own(tmp_path: Path, name: str) -> list[str]:
    """The settings of a run that answers by itself and shares no caches."""
    roots = [f"{kind}.root={tmp_path / name / kind}" for kind in ("responses", "hidden_states")]
    return [*roots, "data.responses=target", "decode.temperatures=[0]", "decode.fastest=false"]


def hidden_states(root: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in root.glob("*/*.safetensors"):
        tensors |= load_file(file)
    return tensors


def responses(root: Path) -> dict[str, list[int]]:
    lines = [line for file in root.glob("*/*.jsonl") for line in file.read_text().splitlines()]
    return {entry["prompt"]: entry["ids"] for entry in map(json.loads, lines)}


@pytest.fixture(scope="module")
def one(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of one process, and its caches."""
    folder = tmp_path_factory.mktemp("one")
    tiny.job(folder / "run", "eagle3", *own(folder, "caches"), "loop.accumulate=2")
    return folder


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report" / "results.json").read_text())
    return found


def test_two_processes_hold_half_each_and_their_run_is_that_of_one(
    tiny: Tiny, tmp_path: Path, one: Path
) -> None:
    """The same responses, hidden states, draft and acceptance, but for rounding in float32. Killed
    while hidden states are stored or training has begun, the run continues to the same end."""
    settings = [*own(tmp_path, "caches"), "loop.accumulate=1", "target.tensor_parallel=true"]
    command = [__file__, "run", str(tmp_path), *tiny.command(tmp_path / "run", "eagle3", *settings)]
    with launched(command, 2, tmp_path / "killed") as children:
        until = time.monotonic() + 300
        while not responses(tmp_path / "caches" / "responses"):
            assert time.monotonic() < until and not any(child.exitcode for child in children)
            time.sleep(0.01)
    assert not (tmp_path / "run" / "report").exists()
    together(command, 2, tmp_path / "ended")

    held = [json.loads((tmp_path / f"held-{rank}").read_text()) for rank in (0, 1)]
    of_target, _ = sizes_of_target(tiny.config("eagle3").target, "float32")
    for ours, all_of_them, once in held:
        # the norms of each layer are whole, and small
        assert all_of_them / 2 < ours < 0.52 * all_of_them and once
        # as plan=true counts it
        assert of_target.held(2) == of_target.bytes - all_of_them + ours
    theirs = one / "caches"
    assert responses(tmp_path / "caches" / "responses") == responses(theirs / "responses")
    kept, right = (hidden_states(root / "caches" / "hidden_states") for root in (tmp_path, one))
    assert kept.keys() == right.keys() and len(right) > 100
    for name, tensor in right.items():
        # states are sums of some hundred products, of numbers up to 100, in another order
        torch.testing.assert_close(kept[name], tensor, rtol=1e-4, atol=2e-4)
    for (step, ours_of), (same, theirs_of) in zip(
        losses(tmp_path / "run"), losses(one / "run"), strict=True
    ):
        assert step == same and ours_of["loss"] == pytest.approx(theirs_of["loss"], rel=1e-4)
    weights = draft(one / "run")
    for name, tensor in draft(tmp_path / "run").items():
        # Adam divides a gradient by its own size: where one is rounding alone, its sign is chance,
        # and each of the 12 steps moves that weight by up to the learning rate, 5e-3, either way
        if not tensor.is_floating_point():  # the draft vocabulary
            assert torch.equal(tensor, weights[name]), name
            continue
        off = (tensor - weights[name]).abs()
        assert off.max() <= 2 * 12 * 5e-3, name
        # and so few weights have such a gradient that the draft is the same as a whole
        assert off.norm() <= 1e-2 * weights[name].norm(), name
    found, expected = results(tmp_path / "run"), results(one / "run")
    assert [found["processes"], expected["processes"]] == [2, 1]
    assert found["weight_bytes"] == expected["weight_bytes"]
    assert found["target_operations"] == expected["target_operations"]
    ours_at, theirs_at = found["measured"][0], expected["measured"][0]
    for name in ("speculation_steps", "accepted_lengths", "drafted", "accepted", "identical"):
        assert ours_at[name] == theirs_at[name]
    assert ours_at["identical"] == found["prompts"]
    for alpha, other in zip(
        ours_at["forced"]["all"]["sampled"], theirs_at["forced"]["all"]["sampled"], strict=True
    ):
        assert alpha["value"] == pytest.approx(other["value"], abs=1e-4)
    said = (tmp_path / "ended" / "0.out").read_text()
    assert "each of 2 processes holds its part of every layer" in said.replace("\n", " ")


def model_of(folder: Path, kind: str, **config: Any) -> Path:
    """A random model of a kind, with a tokenizer of as many tokens."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), initializer_range=0.3, **sizes | heads | config
    )
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_divided_target_decodes_as_a_whole_one(tmp_path: Path) -> None:
    """Chains, batches of unequal rows, responses that take the rows of others and, where there are
    no states, trees: the same greedy tokens in float32, and in bfloat16 nearly the same hidden
    states."""
    folders = [model_of(tmp_path / kind, kind, **more) for kind, more in KINDS.items()]
    command = [__file__, "decode", str(tmp_path), *map(str, folders)]
    together(command, 2, tmp_path / "said")
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert [o["kind"] for o in outcomes] == [*KINDS]
    for outcome in outcomes:
        assert outcome["ours"] == outcome["theirs"], outcome["kind"]
        assert len(outcome["ours"]) == (3 if outcome["kind"] == "qwen3_5_text" else 4)
        assert outcome["off"] < 0.05, outcome["kind"]  # bfloat16 has 8 bits, four layers
    # an error of the first process ends the others as well
    said = [(tmp_path / "said" / f"{rank}.out").read_text().split("\n") for rank in (0, 1)]
    assert said[0][-3:-1] == ["worked", "UserError: the end"]
    assert said[1][-2] == "ReportedByAnotherProcess: the end"


def refused(cfg: TargetConfig, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        TargetLoader(cfg)


def test_what_cannot_be_divided_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cfg(folder: Path, **more: Any) -> TargetConfig:
        options = {"cache": str(tmp_path / "cache"), "tensor_parallel": True} | more
        return TargetConfig(str(folder), "float32", "cpu", **options)

    llama = save_target(tmp_path / "llama")
    refused(cfg(llama), "there is one: start several with accelerate launch")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(cfg(llama, device_map="auto"), "leave one of them out")
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    refused(cfg(model_of(tmp_path / "gpt2", "gpt2", **gpt2)), "has no plan in transformers")
    keys = json.loads((llama / "config.json").read_text())
    how = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    quantised = tmp_path / "quantised"
    shutil.copytree(llama, quantised)
    (quantised / "config.json").write_text(json.dumps(keys | {"quantization_config": how}))
    refused(cfg(quantised), r"stored quantised \(fp8\), which has not been tried")
    encoder = tmp_path / "t5"
    make_seq2seq("t5").model.save_pretrained(encoder)
    make_tokenizer().save_pretrained(encoder)
    refused(cfg(encoder), "needs a causal LM in safetensors")
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused(cfg(llama), r"3 processes cannot share 4 heads \(num_attention_heads\)")


@pytest.mark.parametrize(
    ("drafter", "setting", "reason"),
    [
        ("eagle3", "hidden_states.mode=online", "computes hidden states once, before training"),
        ("early_exit", "drafter.depth=2", "runs the target's layers in training"),
        ("eagle3", "decode.compile=true", "compiles the target in one piece"),
    ],
)
def test_settings_that_need_a_target_in_one_piece_are_refused(
    tiny: Tiny, drafter: str, setting: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        tiny.config(drafter, "target.tensor_parallel=true", setting)


def run(notes: Path, arguments: list[str]) -> None:
    """`train.py`, in which each process notes what it holds of the target's layers."""
    take = TensorParallelTarget.take_parts

    def taken(target: TensorParallelTarget, parts: TargetParts) -> None:
        take(target, parts)
        weights = list(target.layers.parameters())
        ours = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in weights)
        shared = [target.embedding.weight is parts.embedding.weight]
        shared.append(target.head.weight is parts.head.weight)
        held = [ours, sum(p.nbytes for p in weights), all(shared)]
        (notes / f"held-{os.environ['RANK']}").write_text(json.dumps(held))

    TensorParallelTarget.take_parts = taken  # type: ignore[method-assign]
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def compared(held: TargetLoader, cfg: TargetConfig) -> dict[str, Any]:
    """What the divided target and the whole one decode."""
    pair = held.whole(), load_target(cfg)
    ids = []
    for target in pair:
        ngram = DRAFTERS["ngram"].build(NgramConfig(depth=3), target)
        ways: list[tuple[Way, dict[str, Any]]] = [(Way(), {}), (Way(), {"at_once": 2})]
        ways.append((Way(ngram, Chain(3)), {}))
        if target.reads_trees:
            drafter = random_drafter(Eagle3Config(depth=2), target, 0.1)
            ways.append((Way(drafter, Static([[0], [1], [0, 0]])), {}))
        options: dict[str, Any] = {"max_new_tokens": 8, "eos": ()}
        ids.append(
            [[g.ids for g in decode(target, PROMPTS, way, **options, **more)] for way, more in ways]
        )
    return {"ours": ids[0], "theirs": ids[1]}


def decoded(notes: Path, folders: Sequence[str]) -> None:
    """What `compared` says of these targets, and by how much states differ in bfloat16."""
    dist.init_process_group("gloo")
    outcomes = []
    for folder in folders:
        plain = TargetConfig(folder, "float32", "cpu", cache=str(notes / "cache"))
        held = TargetLoader(replace(plain, tensor_parallel=True))
        ranks = Ranks(dist.get_rank(), 2, held.team)
        outcome = ranks.first(partial(compared, held, plain))
        half = TargetLoader(replace(held.cfg, dtype="bfloat16"))
        ids, needs = torch.arange(3, 40)[None], HiddenStateSpec()
        with ranks_of_team(half).part([0]) as mine:
            for _ in mine:
                ours = half.whole().hidden_states(ids, needs)[1].float()
                theirs = load_target(replace(plain, dtype="bfloat16")).hidden_states(ids, needs)[1]
                outcome["off"] = float((ours - theirs).norm() / theirs.float().norm())
        outcomes.append(outcome | {"kind": Path(folder).name})
    if dist.get_rank() == 0:
        (notes / "outcomes.json").write_text(json.dumps(outcomes))
    try:
        with ranks_of_team(held).part([0]) as mine:
            print("worked" if mine else "helped")
            if mine:
                raise UserError("the end")
    except UserError as error:
        print(f"{type(error).__name__}: {error}")


def ranks_of_team(held: TargetLoader) -> Ranks:
    return Ranks(dist.get_rank(), 2, held.team)


if __name__ == "__main__":
    what, where, *others = sys.argv[1:]
    if what == "run":
        run(Path(where), others)
    else:
        decoded(Path(where), others)
