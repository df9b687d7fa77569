"""What `plan=true` says: sizes from a config alone, memory, disk, and what a draft gains.

Run alone: python -m pytest tests/train/test_planning.py (about 20 s)
"""

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import train
from specdec.context import FeatureSpec
from specdec.decoding.decode import prefill
from specdec.errors import UserError
from specdec.targets.parts import TargetParts
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, architectures, compose, random_target
from train.hidden_states.filling import needs_of
from train.hidden_states.store import HiddenStateOrigin
from train.planning import demand
from train.planning.demand import devices_for, disk_bytes, pass_seconds, stages, training_bytes
from train.planning.devices import DEVICES, Device, PlanningConfig, measured
from train.planning.gain import RoundCosts, break_even, gain
from train.planning.outline import draft_outline, outline, outline_of, unfilled
from train.planning.outlook import Outlook, outlook

EAGLE = ["drafter=eagle3", "target=model", "target.dtype=float32", "data=conversations"]
ROUND = Device("round", memory=1000.0, bandwidth=100.0, rate=1000.0, achieved=1.0, streamed=1.0)


def config_folder(folder: Path, config: Any) -> Path:
    """A folder with a config.json and nothing else."""
    folder.mkdir(exist_ok=True)
    config.architectures = [AutoModelForCausalLM.from_config(config).__class__.__name__]
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def experts() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2"])
def test_sizes_from_a_config_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    config = architectures(64, layers=4)[kind]
    target = random_target(config)
    of, parts = outline(TargetConfig(str(config_folder(tmp_path / kind, config))), "float32")
    assert of.weights == sum(p.numel() for p in target.model.parameters())
    assert of.bytes == 4 * of.weights and of.head == 64 * 32
    assert parts.embedding.weight.is_meta
    cache = target.new_cache()
    prefill(target, [list(range(1, 9))], FeatureSpec(), cache)
    if kind != "gemma2":  # whose sliding layers keep less
        assert of.cached == cache.nbytes / cache.capacity


def test_a_token_reads_some_experts_and_a_pass_those_that_any_of_its_tokens_chose() -> None:
    model = unfilled(experts(), torch.float32)
    of = outline_of(TargetParts(model, None, "tiny"), torch.float32)
    of_experts = 4 * 8 * 3 * 32 * 16  # in each layer, three products of each expert
    assert of.experts == of_experts and of.share == 1 / 4
    rest = of.weights - of_experts - 64 * 32
    assert of.active == rest + of_experts / 4
    assert of.bytes_read(1) == 4 * of.active
    assert of.bytes_read(2) == pytest.approx(4 * (rest + of_experts * (1 - (3 / 4) ** 2)))
    assert of.bytes_read(10_000) == pytest.approx(4 * (rest + of_experts))


@pytest.mark.parametrize(
    ("quantised", "itemsize"),
    [
        ({"quant_method": "fp8"}, 1.0625),
        ({"quant_method": "gptq", "bits": 4}, 0.5625),
        ({"quant_method": "mxfp4"}, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
    ],
)
def test_quantised_weights_take_less(quantised: dict[str, Any], itemsize: float) -> None:
    config = architectures(64, layers=4)["llama"]
    model = unfilled(config, torch.bfloat16)
    model.config.quantization_config = quantised
    assert outline_of(TargetParts(model, None, "tiny"), torch.bfloat16).itemsize == itemsize


@pytest.mark.parametrize(("kind", "on_cpu"), [("fp8", 2), ("mxfp4", 2), ("gptq", 1.0625)])
def test_a_cpu_holds_some_quantised_weights_as_plain_ones(
    kind: str, on_cpu: float, tmp_path: Path
) -> None:
    config = architectures(64, layers=4)["llama"]
    config.quantization_config = {"quant_method": kind, "bits": 8}
    cfg = TargetConfig(str(config_folder(tmp_path, config)))
    assert outline(cfg, "bfloat16", on_cpu=True)[0].itemsize == on_cpu
    assert outline(cfg, "bfloat16")[0].itemsize < 2


def test_a_draft_is_counted_without_weights(tiny: Tiny) -> None:
    cfg = tiny.config("eagle3")
    of, parts = outline(cfg.target, "float32")
    draft = draft_outline(cfg.drafter, parts)
    assert draft is not None and not draft.parallel and draft.depth == 2 and draft.head == 48
    D, wide = 32, 48
    attention = 2 * D * (32 + 16 + 16) + 32 * D  # q, k and v read an embedding and a feature
    layer = attention + 3 * D * wide
    norms = 3 * D + D  # of embedding, feature and MLP, and the last one
    assert draft.weights == draft.trained == layer + norms + 3 * D * D + 48 * D
    assert draft.stored == 3
    bytes_on_disk = disk_bytes(cfg, of, draft, 1000)["features"]
    eight = dataclasses.replace(cfg, features=dataclasses.replace(cfg.features, bits=8))
    in_bits = HiddenStateOrigin(
        *("", "torch.float32", needs_of(cfg.drafter, parts).layers, cfg.sampler, parts.width),
        bits=8,
    )
    assert disk_bytes(eight, of, draft, 1000)["features"] == in_bits.bytes(1000)
    kind = HiddenStateOrigin(
        "", "torch.float32", needs_of(cfg.drafter, parts).layers, cfg.sampler, parts.width
    )
    assert bytes_on_disk == kind.bytes(1000)


def test_families_that_run_the_target_have_no_weights_to_count(tiny: Tiny) -> None:
    cfg = tiny.config("early_exit")
    _, parts = outline(cfg.target, "float32")
    assert draft_outline(cfg.drafter, parts) is None


def test_times_of_a_pass_by_hand(tiny: Tiny) -> None:
    """The device moves 100 bytes and computes 1,000 operations a second."""
    of, _ = outline(tiny.config("eagle3").target, "float32")
    one = pass_seconds(of, ROUND, 1, 1, 10)
    assert one == pytest.approx((of.bytes + 10 * of.cached) / 100)
    many = pass_seconds(of, ROUND, 8, 50, 0)
    assert many == pytest.approx(2 * 400 * of.weights / 1000)
    assert pass_seconds(of, ROUND, 8, 50, 0, together=2) == pytest.approx(many / 1.85)


def test_initialisation_that_do_not_fit_say_what_would(tiny: Tiny) -> None:
    cfg = tiny.config("eagle3", "loop.rows=8", "objective.chunk=4096", "data.answers=target")
    of, parts = outline(cfg.target, "float32")
    draft = draft_outline(cfg.drafter, parts)
    assert draft is not None
    large = replace(ROUND, memory=1e9)
    assert all(stage.fits for stage in stages(cfg, of, draft, large, 1))
    small = replace(ROUND, memory=training_bytes(cfg, of, draft) / 2 / demand.ROOM)
    by_name = {stage.name: stage for stage in stages(cfg, of, draft, small, 1)}
    assert not by_name["training"].fits
    rows, chunk = (int(x.split("=")[1]) for x in by_name["training"].remedy.split()[1:3])
    loop, objective = replace(cfg.loop, rows=rows), replace(cfg.objective, chunk=chunk)
    fitting = replace(cfg, loop=loop, objective=objective)
    assert training_bytes(fitting, of, draft) <= by_name["training"].room
    tiny_device = replace(ROUND, memory=of.bytes / 3)
    assert devices_for(of, tiny_device) == math.ceil(1.1 * 3 / demand.ROOM)
    for stage in stages(cfg, of, draft, tiny_device, 8):
        assert stage.name == "training" or "spreads the target over 4 devices" in stage.remedy


def test_break_even_by_hand() -> None:
    """A longer pass costs so much that only one token is worth drafting: (1 + α) / (c + v) > 1."""
    steep = RoundCosts(1, 0.1, lambda gamma: 1.2 if gamma == 1 else 100.0)
    assert break_even(steep) == pytest.approx(0.3, abs=0.001)
    assert break_even(RoundCosts(1, 1.0, lambda _: 1.5)) is None
    at = gain(steep, 0.6)
    assert at.pays and at.gamma == 1 and at.speedup == pytest.approx(1.6 / 1.3)
    assert not gain(steep, 0.2).pays and gain(steep, 0.2).speedup == 1.0
    # a parallel draft pays its step once, however many tokens it drafts
    parallel = RoundCosts(1, 0.5, lambda _: 1.0, parallel=True)
    assert gain(parallel, 1.0).speedup == pytest.approx(9 / 1.5)


def test_an_expected_alpha_at_the_break_even_neither_gains_nor_loses() -> None:
    for c, slope in ((0.05, 0.02), (0.3, 0.1), (0.2, 0.4)):
        costs = RoundCosts(8, c, lambda gamma, slope=slope: 1 + slope * gamma)
        least = break_even(costs)
        assert least is not None
        assert not gain(costs, least - 0.002).pays and gain(costs, least + 0.001).pays


def test_what_this_machine_does_is_measured() -> None:
    device = measured(torch.device("cpu"), torch.float32)
    assert not device.gpu and device.memory > 2**28
    assert device.bandwidth > 1e8 and device.rate > 1e8  # any machine moves and computes more


def test_plan_says_everything_and_writes_nothing(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train.run(tiny.config("eagle3", "plan=true"), folder) == 0.0
    said = " ".join(capsys.readouterr().out.split())
    assert not folder.exists()
    for words in ("memory on each device", "disk:", "time (measured):", "batch 1:", "batch 32:"):
        assert words in said, words
    assert "24 conversations to train on" in said and "this run fits here" in said


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "target", architectures(64, layers=6)["llama"])
    more = ["planning.device=h100", "planning.devices=2", "planning.tokens=100000", "data.path=x"]
    said = outlook(compose([*EAGLE, f"target.path={folder}", *more]))
    assert not said.measured and said.amount.tokens == 100_000 and len(said.gains) == 3
    assert said.device is DEVICES["h100"] and said.free is None
    assert "by arithmetic" in str(said) and "as planning.tokens says" in str(said)


def test_a_plan_for_this_cpu_counts_what_it_dequantises(tmp_path: Path) -> None:
    config = architectures(64, layers=4)["llama"]
    config.quantization_config = {"quant_method": "fp8"}
    folder = config_folder(tmp_path, config)
    more = ["data=conversations", "planning.tokens=1000", "data.path=x", "target.device=cpu"]
    here, there = (
        outlook(compose([*EAGLE, f"target.path={folder}", *more, f"planning.device={device}"]))
        for device in ("here", "l4")
    )
    assert here.target.itemsize in (2, 4) and there.target.itemsize < 2


def test_more_devices_take_less_time(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "target", architectures(64, layers=6)["llama"])

    def of(*more: str) -> Outlook:
        fixed = ["planning.device=h100", "planning.tokens=9000000", "data.path=x"]
        return outlook(compose([*EAGLE, f"target.path={folder}", *fixed, *more]))

    one, two = of(), of("planning.devices=2")
    assert two.time.training < one.time.training
    within = of("budget.minutes=1", "budget.floor=5")
    assert within.time.conversations < one.time.conversations
    assert sum(within.disk.values()) < sum(one.disk.values())


def test_devices_that_hold_a_target_together_each_need_a_part_of_its_layers(
    tmp_path: Path,
) -> None:
    """Experts too; embedding, head, norms and routers are whole."""
    folder = config_folder(tmp_path / "target", experts())
    fixed = ["planning.device=h100", "planning.tokens=9000", "data.path=x"]

    def of(*more: str) -> Outlook:
        return outlook(compose([*EAGLE, f"target.path={folder}", *fixed, *more]))

    together = "target.tensor_parallel=true"
    alone, two = of("planning.devices=2"), of("planning.devices=2", together)
    layers = 4 * (32 * 8 * (4 + 2 + 2 + 4) + 8 * 3 * 32 * 16)
    assert two.target.divided == layers
    less = {a.name: a.bytes - b.bytes for a, b in zip(alone.stages, two.stages, strict=True)}
    assert less["features"] == layers * 4 / 2 and less["training"] == 0
    cfg = compose([*EAGLE, f"target.path={folder}", "data.path=x"])
    rows = max(cfg.decode.batch, min(cfg.decode.counting, cfg.decode.prompts))
    tokens = cfg.data.max_prompt + cfg.decode.max_new_tokens
    of_cache = demand.GROWTH * two.target.cached * tokens * rows / 2
    assert less["measuring"] == pytest.approx(layers * 4 / 2 + of_cache)
    assert "which hold the target together" in str(two)
    small = replace(two.device, memory=two.target.bytes * 0.9)
    assert all(
        "target.tensor_parallel=true lets 2 processes" in stage.remedy
        for stage in stages(cfg, two.target, two.draft, small, 2)
        if stage.name != "training"
    )
    with pytest.raises(UserError, match=r"planning\.devices=1: .* give their number"):
        of(together)
    with pytest.raises(UserError, match="3 processes cannot share 4 heads"):
        of(together, "planning.devices=3")


def test_engines_that_answer_take_no_memory_here(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "target", architectures(64, layers=6)["llama"])
    fixed = ["planning.device=h100", "planning.tokens=9000", "data.path=x", "data.answers=target"]
    ours, theirs = (
        outlook(compose([*EAGLE, f"target.path={folder}", *fixed, *more]))
        for more in ([], ["answers.from=http://a:8000/v1"])
    )
    assert ours.time.answering > 0 and theirs.time.answering == 0
    assert [s.name for s in ours.stages if s not in theirs.stages] == ["answers"]
    assert theirs.time.reading > ours.time.reading == 0, "no features are kept while engines answer"
    assert "the engines' answers are not counted" in str(theirs)


def test_what_plan_cannot_know_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        outlook(compose([*EAGLE, f"target.path={tmp_path}", "data.path=x", "planning.device=l4"]))
    with pytest.raises(UserError, match=r"planning\.device.*h100"):
        PlanningConfig(device="h1000")
