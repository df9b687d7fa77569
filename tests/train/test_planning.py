"""What `plan=true` says: sizes from a config alone, the table of bytes, remedies, and what a draft
gains.

Run alone: python -m pytest tests/train/test_planning.py (about 40 s)
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import train
from specdec.context import HiddenStateSpec
from specdec.decoding.decode import prefill
from specdec.drafters import family
from specdec.errors import UserError
from specdec.targets.parts import TargetParts
from specdec.targets.target_config import TargetConfig
from specdec.theory.leviathan import walltime_factor
from tests.tiny import Tiny, architectures, compose, random_target
from train import optim
from train.budget import BudgetConfig
from train.hidden_states.filling import needs_of
from train.hidden_states.store import HiddenStateOrigin
from train.plan_remedies import as_overrides, fitting_settings, remedies, with_settings
from train.planned_stages import (
    CONTEXT,
    DataAmount,
    Facts,
    PlannedStage,
    devices_for,
    forward_seconds,
    gain,
    speculation_costs,
    stages_of,
)
from train.planning import BATCHES, RunPlan, gibibytes, hours, plan_of_run, table
from train.run_config import Config
from train.sizes import (
    DEVICES,
    GIB,
    Device,
    PlanningConfig,
    device_here,
    draft_sizes,
    sizes_of_target,
    target_sizes,
    unfilled,
)

EAGLE = ["drafter=eagle3", "target=model", "target.dtype=float32", "data=conversations"]
BIG = ["drafter=eagle3", "target=model", "data=conversations", "data.path=x"]
BIG += ["planning.device=h100", "planning.tokens=5000000"]
ROUND = Device("round", memory=1000.0, bandwidth=100.0, rate=1000.0)
DATA = DataAmount(100, 2000, 10, 10, 15.0, "made up")


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
    cfg = TargetConfig(str(config_folder(tmp_path / kind, config)))
    of, parts = sizes_of_target(cfg, "float32")
    assert of.weights == sum(p.numel() for p in target.model.parameters())
    assert of.bytes == 4 * of.weights and of.head == 64 * 32
    assert parts.embedding.weight.is_meta
    cache = target.new_cache()
    prefill(target, [list(range(1, 9))], HiddenStateSpec(), cache)
    assert of.cached == cache.nbytes / cache.capacity


def test_a_token_reads_some_experts_and_a_pass_those_that_any_of_its_tokens_chose() -> None:
    model = unfilled(experts(), torch.float32)
    of = target_sizes(TargetParts(model, None, "tiny"), torch.float32)
    of_experts = 4 * 8 * 3 * 32 * 16  # in each layer, three products of each expert
    assert of.experts == of_experts and of.share == 1 / 4
    rest = of.weights - of_experts - 64 * 32
    assert of.active == rest + of_experts / 4
    assert of.bytes_read(1) == 4 * of.active
    assert of.bytes_read(2) == pytest.approx(4 * (rest + of_experts * (1 - (3 / 4) ** 2)))
    assert of.bytes_read(10_000) == pytest.approx(4 * (rest + of_experts))


GROUPS_OF_4_BITS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}


@pytest.mark.parametrize(
    ("quantised", "itemsize"),
    [
        ({"quant_method": "fp8"}, 1.0625),
        ({"quant_method": "gptq", "bits": 4}, 0.5625),
        ({"quant_method": "mxfp4"}, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS_OF_4_BITS}, 0.5625),
        ({"quant_method": "compressed-tensors"}, 1.0625),
    ],
)
def test_quantised_weights_take_less(quantised: dict[str, Any], itemsize: float) -> None:
    config = architectures(64, layers=4)["llama"]
    model = unfilled(config, torch.bfloat16)
    model.config.quantization_config = quantised
    assert target_sizes(TargetParts(model, None, "tiny"), torch.bfloat16).itemsize == itemsize


@pytest.mark.parametrize(
    ("kind", "on_cpu", "on_a100"),
    [("fp8", 2, 2), ("mxfp4", 2, 1.0625), ("gptq", 1.0625, 1.0625)],
)
def test_a_cpu_and_an_older_gpu_hold_some_quantised_weights_as_plain_ones(
    kind: str, on_cpu: float, on_a100: float, tmp_path: Path
) -> None:
    config = architectures(64, layers=4)["llama"]
    config.quantization_config = {"quant_method": kind, "bits": 8}
    cfg = TargetConfig(str(config_folder(tmp_path, config)))
    assert sizes_of_target(cfg, "bfloat16", capability=0.0)[0].itemsize == on_cpu
    capability = DEVICES["a100"].capability
    assert sizes_of_target(cfg, "bfloat16", capability)[0].itemsize == on_a100
    assert sizes_of_target(cfg, "bfloat16")[0].itemsize < 2


# known counts: of Meta's Llama 3.1 70B, and of the model cards of Qwen3 and DeepSeek-V3
KNOWN: dict[str, tuple[Any, float, float]] = {
    "qwen3-32b": (
        Qwen3Config(
            hidden_size=5120,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=25600,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
        32.76e9,
        31.98e9,
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
        30.53e9,
        3.04e9,  # 3.35 G with the embedding
    ),
    "llama-3.1-70b": (
        LlamaConfig(
            hidden_size=8192,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            intermediate_size=28672,
            vocab_size=128256,
            tie_word_embeddings=False,
        ),
        70.554e9,
        69.50e9,
    ),
    "deepseek-v3": (DeepseekV3Config(tie_word_embeddings=False), 671.03e9, 36.63e9),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the config.json of large targets."""
    root, folders = tmp_path_factory.mktemp("large"), dict[str, Path]()
    for name, (config, _, _) in KNOWN.items():
        with torch.device("meta"):
            folders[name] = config_folder(root / name, config)
    return folders


@pytest.mark.parametrize("name", KNOWN)
def test_large_targets_have_the_known_number_of_weights(name: str, large: dict[str, Path]) -> None:
    _, weights, active = KNOWN[name]
    sizes, _ = sizes_of_target(TargetConfig(str(large[name])), "bfloat16")
    assert sizes.weights == pytest.approx(weights, rel=2e-4)
    assert sizes.active == pytest.approx(active, rel=5e-3)


def facts_of(cfg: Config, device: Device = ROUND) -> Facts:
    target, parts = sizes_of_target(cfg.target, "float32")
    draft = draft_sizes(cfg.drafter, parts, cfg.optim)
    return Facts(target, draft, device, DATA, {})


def stage_named(name: str, stages: Sequence[PlannedStage]) -> PlannedStage:
    return next(stage for stage in stages if stage.name == name)


def test_a_draft_is_counted_without_weights(tiny: Tiny) -> None:
    cfg = tiny.config("eagle3")
    _, parts = sizes_of_target(cfg.target, "float32")
    draft = draft_sizes(cfg.drafter, parts, cfg.optim)
    assert draft is not None and not draft.parallel and draft.depth == 2 and draft.head == 48
    D, wide = 32, 48
    attention = 2 * D * (32 + 16 + 16) + 32 * D  # q, k and v read an embedding and a hidden state
    layer = attention + 3 * D * wide
    norms = 3 * D + D  # of embedding, hidden state and MLP, and the last one
    assert draft.weights == draft.trained == layer + norms + 3 * D * D + 48 * D
    assert draft.stored == 3
    for bits in (None, 8):
        kind = HiddenStateOrigin(
            "",
            "torch.float32",
            needs_of(cfg.drafter, parts).layers,
            cfg.sampler,
            parts.width,
            bits=bits,
        )
        stored = with_settings(cfg, {"hidden_states.bits": bits})
        tokens = 110 * 20  # of `DATA`, 100 conversations and 10 to validate on
        disk = stage_named("disk", stages_of(stored, facts_of(stored)))
        assert disk.filled["hidden states"] == kind.bytes(tokens)


def test_on_text_alone_the_target_reads_held_out_texts_only(tiny: Tiny) -> None:
    """By hand: 10 of the 110 texts of `DATA`; a training step holds no p of the target."""
    data = ("data.responses=data", "loss=ce")
    alone = tiny.config("lm", *data, "hidden_states.mode=none")
    offline = tiny.config("lm", *data, "hidden_states.mode=offline")
    filled = {}
    for cfg in (alone, offline):
        stages = stages_of(cfg, facts_of(cfg))
        assert [stage.name for stage in stages][:2] == ["hidden states", "training"]
        disk, training = (stage_named(name, stages) for name in ("disk", "training"))
        filled[cfg.hidden_states.mode] = disk.filled["hidden states"], training.filled["logits"]
    (held_out, q), (every, p_and_q) = filled["none"], filled["offline"]
    assert held_out == pytest.approx(every * 10 / 110)
    target, _ = sizes_of_target(alone.target, "float32")
    assert p_and_q - q == 128 * 4 * 3 * target.vocab  # a row of 128 anchors, in float32
    for cfg, online in ((alone, False), (offline, True)):  # another mode trains another draft
        facts = facts_of(cfg, replace(ROUND, memory=1e9))
        needed = stage_named("disk", stages_of(cfg, facts))
        full = replace(facts, free=needed.bytes - needed.filled["hidden states"] / 2)
        assert ({"hidden_states.mode": "online"} in remedies(cfg, full, "disk")) == online


def test_a_window_bounds_what_a_draft_keeps_and_reads(tiny: Tiny) -> None:
    """Keys and values of 2 heads of 8 numbers for a token, of at most 16 tokens; after 1,024 tokens
    a step reads those beside its weights."""
    long = ["data.max_length=400", "data.max_prompt=300", "decode.max_new_tokens=64"]
    every = tiny.config("eagle3", *long)
    few = tiny.config("eagle3", *long, "drafter.window=12", "drafter.sink_tokens=4")
    facts, bounded = facts_of(every), facts_of(few)
    assert facts.draft is not None and bounded.draft is not None
    assert facts.draft.cached == 2 * 2 * 8 and bounded.draft.held(10_000) == 32 * 16
    kept, less = (
        stage_named("measuring", stages_of(cfg, of)).filled["KV cache of the draft"]
        for cfg, of in ((every, facts), (few, bounded))
    )
    assert kept / less == pytest.approx(364 / 16)
    (whole, _), (part, _) = (
        speculation_costs(of.target, of.draft, ROUND, 1)
        for of in (facts, bounded)
        if of.draft is not None
    )
    step = forward_seconds(facts.target, ROUND, 1, 1, CONTEXT)
    expected = 4 * 32 * (CONTEXT - 16) / 100 / step
    assert whole - part == pytest.approx(expected, rel=1e-5)  # `step` is without kernel launches


@pytest.mark.parametrize("hidden", ["adamw", "muon"])
def test_gradients_and_moments_are_those_of_a_real_step(tiny: Tiny, hidden: str) -> None:
    cfg = tiny.config("eagle3", f"optim.hidden={hidden}")
    _, parts = sizes_of_target(cfg.target, "float32")
    kind = family(cfg.drafter.name)
    drafter = kind(cfg.drafter, kind.plan(cfg.drafter, parts)).float()
    optimizers = optim.build(drafter, cfg.optim, drafter.sizes)
    for p in drafter.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    gradients = sum(p.grad.nbytes for p in drafter.parameters() if p.grad is not None)
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    moments = sum(x.nbytes for state in states for x in state.values() if x.dim())
    draft = draft_sizes(cfg.drafter, parts, cfg.optim)
    assert draft is not None and 4 * draft.moments == moments
    facts = replace(facts_of(cfg), draft=draft)
    filled = stage_named("training", stages_of(cfg, facts)).filled
    assert filled["gradients and optimizer"] == gradients + moments
    assert filled["draft weights"] == sum(p.nbytes for p in drafter.parameters())
    # FSDP2 divides what lasts; in a step, it holds all weights and gradients as well
    four = with_settings(cfg, {"planning.devices": 4, "planning.fsdp": True})
    filled = stage_named("training", stages_of(four, facts)).filled
    assert filled["gradients and optimizer"] == gradients * 1.25 + moments / 4
    assert filled["draft weights"] == 4 * draft.weights * 1.25


def test_families_that_run_the_target_have_no_weights_to_count(tiny: Tiny) -> None:
    cfg = tiny.config("early_exit")
    _, parts = sizes_of_target(cfg.target, "float32")
    assert draft_sizes(cfg.drafter, parts, cfg.optim) is None


def test_times_of_a_pass_by_hand(tiny: Tiny) -> None:
    """The device moves 100 bytes and computes 1,000 operations a second."""
    of, _ = sizes_of_target(tiny.config("eagle3").target, "float32")
    one = forward_seconds(of, ROUND, 1, 1, 10)
    assert one == pytest.approx((of.bytes + 10 * of.cached) / 100 + 2 * of.weights / 1000)
    many = forward_seconds(of, ROUND, 8, 50, 0)
    assert many == pytest.approx(of.bytes / 100 + 2 * 400 * of.weights / 1000)
    assert forward_seconds(of, ROUND, 8, 50, 0, together=2) == pytest.approx(many / 1.85)
    started = forward_seconds(of, ROUND, 8, 50, 0, launch=0.5)
    assert started == pytest.approx(many + 0.5 * of.layers)


def test_break_even_by_hand() -> None:
    """A longer pass costs so much that only one token is worth drafting: (1 + α) / (c + v) > 1."""

    def steep(gamma: int) -> float:
        return 1.2 if gamma == 1 else 100.0

    at = gain(1, 0.6, 0.1, steep)
    assert at.break_even == pytest.approx(0.3, abs=0.001)
    assert at.gamma == 1 and at.speedup == pytest.approx(1.6 / 1.3)
    assert gain(1, 0.6, 1.0, lambda _: 1.5).break_even is None
    low = gain(1, 0.2, 0.1, steep)
    assert low.gamma == 0 and low.speedup == 1.0


def test_an_expected_alpha_at_the_break_even_neither_gains_nor_loses() -> None:
    for c, slope in ((0.05, 0.02), (0.3, 0.1), (0.2, 0.4)):

        def v(gamma: int, slope: float = slope) -> float:
            return 1 + slope * gamma

        least = gain(8, 0.5, c, v).break_even
        assert least is not None
        assert not gain(8, least - 0.002, c, v).gamma and gain(8, least + 0.001, c, v).gamma


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-32b"])
@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
def test_gains_fall_with_the_batch_as_verification_computes(
    name: str, drafter: str, large: dict[str, Path]
) -> None:
    """At batch 256, an H100 computes longer than it reads weights. Gains are Theorem 3.8's."""
    cfg = compose([f"drafter={drafter}", *BIG[1:], f"target.path={large[name]}"])
    target, parts = sizes_of_target(cfg.target, "bfloat16")
    draft, device = draft_sizes(cfg.drafter, parts, cfg.optim), DEVICES["h100"]
    assert draft is not None
    assert 2 * target.active * 256 / device.rate > target.bytes / device.bandwidth
    gains = list[float]()
    for batch in (1, 8, 32, 128, 256):
        c, v = speculation_costs(target, draft, device, batch)
        at = gain(batch, 0.6, c, v)
        assert at.speedup == pytest.approx(walltime_factor(0.6, at.gamma, c, v(at.gamma)))
        assert v(3) > v(2) > v(1) > 1
        gains.append(at.speedup)
    assert gains == sorted(gains, reverse=True) and gains[-1] < gains[0] - 0.5
    # where γ + 1 tokens are checked for the time of γ + 1 tokens, α < 1 gains nothing
    assert gain(1, 0.9, 0.0, lambda gamma: 1.0 + gamma).gamma == 0


def test_a_batch_shrinks_to_the_memory_and_parallel_drafts_take_one_step(tiny: Tiny) -> None:
    cfg = tiny.config("eagle3", "decode.counting=64", "decode.prompts=100")
    ample, scarce = (
        stage_named("measuring", stages_of(cfg, facts_of(cfg, replace(ROUND, memory=memory))))
        for memory in (1e10, 3e6)
    )
    assert ample.fits and scarce.fits
    rows = ample.filled["KV cache"] / scarce.filled["KV cache"]
    assert 1 < rows <= 64 and scarce.seconds > ample.seconds
    cfg = tiny.config("medusa")
    facts = facts_of(cfg)
    assert facts.draft is not None and facts.draft.parallel
    c, v = speculation_costs(facts.target, facts.draft, ROUND, 1)
    base = forward_seconds(facts.target, ROUND, 1, 1, CONTEXT)
    checked = forward_seconds(facts.target, ROUND, 1, 3, CONTEXT)
    drafted = facts.draft.read * (4 / 100 + 2 * facts.draft.depth / 1000)
    assert c == 0 and v(2) == pytest.approx((checked + drafted) / base, rel=0.2)


def printed(plan: RunPlan) -> dict[str, list[str]]:
    """The settings that a plan prints, some with a comment, by the line above them."""
    found: dict[str, list[str]] = {}
    above = ""
    for line in plan.advice():
        if line.startswith("  "):
            found[above].append(line.strip())
        else:
            above = line
            found[above] = []
    return found


LONG = ["data.max_prompt=2048", "responses.max_new_tokens=2048", "data.max_length=4096"]
CASES: dict[str, tuple[str, list[str]]] = {
    "one device": ("qwen3-32b", ["planning.device=l40s"]),
    "eight devices": ("qwen3-32b", ["planning.device=a100-40", "planning.devices=8"]),
    "long training": ("qwen3-30b-a3b", [*LONG, "loop.rows=64", "planning.devices=2"]),
    "online": (
        "qwen3-30b-a3b",
        [*LONG, "loop.rows=16", "hidden_states.mode=online", "planning.device=a100-40"],
    ),
    "online beside its target": (
        "qwen3-30b-a3b",
        [*LONG, "loop.rows=8", "hidden_states.mode=online"],
    ),
    "engines": (
        "llama-3.1-70b",
        ["responses.from=http://a:8000/v1", "planning.devices=2", "decode.batch=8"],
    ),
    "two devices hold most": (
        "llama-3.1-70b",
        ["target.tensor_parallel=true", "planning.devices=2", *LONG],
    ),
    "a batch that is timed": (
        "qwen3-30b-a3b",
        ["decode.batch=2048", "decode.prompts=4096", *LONG, "planning.devices=1"],
    ),
    "experts": ("deepseek-v3", ["planning.devices=16", "loop.rows=8", *LONG]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_printed_remedy_is_pasted_and_fits(case: str, large: dict[str, Path]) -> None:
    name, settings = CASES[case]
    command = [*BIG, f"target.path={large[name]}", "data.responses=target", *settings]
    plan = plan_of_run(compose(command))
    fitted = {stage.name for stage in plan.stages if stage.fits}
    advice = printed(plan)
    assert not plan.fits and len(advice) > 1
    for above, overrides in advice.items():
        assert overrides, above
        for override in overrides:
            again = plan_of_run(compose([*command, *shlex.split(override, comments=True)]))
            fits = {stage.name: stage.fits for stage in again.stages}
            if above.startswith("all stages fit"):
                assert again.fits and f": {hours(again.seconds)} on " in above
                continue
            if "data.max_prompt" not in override:  # with planning.tokens, shorter texts are more
                assert override.endswith(f"# {again.cost}"), override
            stage = above.split(":")[0]
            assert fits.get(stage, True), override  # or an engine does its work
            assert all(fits.get(name, True) for name in fitted), override
    assert any(above.startswith("all stages fit") for above in advice)
    if case == "online beside its target":
        assert any("hidden_states.mode=offline" in x for some in advice.values() for x in some)


def test_qwen3_32b_fits_eight_h100s(large: dict[str, Path]) -> None:
    """The documented case, with short texts and with long ones."""
    for more in ([], LONG):
        command = [*BIG, f"target.path={large['qwen3-32b']}", "planning.devices=8"]
        plan = plan_of_run(compose([*command, "data.responses=target", *more]))
        assert plan.fits
        faster = printed(plan)
        assert list(faster.values()) == [["target.tensor_parallel=true"]]
        together = plan_of_run(compose([*command, "target.tensor_parallel=true", *more]))
        assert together.fits and together.seconds < plan.seconds / 1.5
        assert f": {hours(together.seconds)} on 8 × h100" in next(iter(faster))
        assert "an estimate from the data sheet: nobody has measured it" in str(plan)
        cost = f"= {8 * plan.seconds / 3600:,.1f} device-hours"
        assert cost in str(plan) and "on 8 devices" in str(plan)
        weights = 2 * KNOWN["qwen3-32b"][1] / GIB
        for name in ("responses", "hidden states", "measuring"):
            held = stage_named(name, plan.stages).filled["target weights"] / GIB
            assert held == pytest.approx(weights, rel=1e-3)


def test_fewer_devices_hold_a_target_together_if_all_cannot(large: dict[str, Path]) -> None:
    """Four KV heads cannot be divided over eight processes, but over four of them."""
    command = [*BIG, f"target.path={large['qwen3-30b-a3b']}", "planning.devices=8"]
    plan = plan_of_run(compose([*command, "data.responses=target", *LONG]))
    assert plan.fits
    ((above, settings),) = printed(plan).items()
    assert settings == ["planning.devices=4 target.tensor_parallel=true"]
    together = plan_of_run(
        compose([*command, "data.responses=target", *LONG, *settings[0].split()])
    )
    assert together.fits and together.cost in above
    assert together.seconds <= plan.seconds and 4 * together.seconds < 8 * plan.seconds / 1.5


def test_shorter_documents_have_room_for_prompts_and_responses(large: dict[str, Path]) -> None:
    command = [*BIG, f"target.path={large['llama-3.1-70b']}", "data.responses=target", *LONG]
    command += ["planning.devices=2", "target.tensor_parallel=true", "planning.tokens=20000000"]
    plan = plan_of_run(compose(command))
    ours = [x for x in remedies(plan.cfg, plan.facts, "hidden states") if "data.max_length" in x]
    assert ours, "the case has no such remedy"
    for settings in ours:
        shorter = with_settings(plan.cfg, settings)
        most = shorter.data.longest_prompt + shorter.responses.longest_response
        assert most <= shorter.data.longest_document
        before, after = (stage_named("disk", stages_of(c, plan.facts)) for c in (plan.cfg, shorter))
        assert after.bytes < before.bytes, "shorter texts take less disk"


def test_no_devices_are_proposed_where_there_is_no_gpu(large: dict[str, Path]) -> None:
    command = [*BIG, f"target.path={large['qwen3-32b']}", "data.responses=target"]
    plan = plan_of_run(compose([*command, "planning.device=l40s"]))
    for capability, proposed in ((8.9, True), (0.0, False)):
        facts = replace(plan.facts, device=replace(plan.facts.device, capability=capability))
        found = remedies(plan.cfg, facts, "responses")
        assert found and any("planning.devices" in x for x in found) is proposed


def test_where_nothing_fits_it_says_so(tiny: Tiny) -> None:
    cfg = tiny.config("eagle3")
    facts = facts_of(cfg, replace(ROUND, memory=1.0))
    plan = RunPlan(cfg, facts)
    assert list(plan.advice())[-1] == "no settings were found with which all stages fit"
    assert fitting_settings(cfg, facts, more=True) is None and not plan.fits
    assert "does not fit" in plan.verdict


def test_a_full_disk_is_a_stage_with_remedies_of_its_own(tiny: Tiny) -> None:
    cfg, facts = tiny.config("eagle3"), facts_of(tiny.config("eagle3"), replace(ROUND, memory=1e9))
    needed = stage_named("disk", stages_of(cfg, facts)).bytes
    full = replace(facts, free=needed * 0.9)
    found = remedies(cfg, full, "disk")
    assert {"hidden_states.bits": 8} in found
    assert as_overrides({"hidden_states.mode": "online"}) == "hidden_states.mode=online"
    for settings in found:
        disk = stage_named("disk", stages_of(with_settings(cfg, settings), full))
        assert disk.fits and disk.bytes < needed


def test_the_table_adds_up() -> None:
    stages = [
        PlannedStage("training", {"a": 1.5 * GIB, "b": 0.25 * GIB}, 2 * GIB, 30.0),
        PlannedStage("disk", {"b": 3.0 * GIB}, math.inf),
    ]
    lines = [line.split() for line in table(stages).splitlines()]
    assert lines == [
        ["training", "disk"],
        ["a", "1.50"],
        ["b", "0.25", "3.00"],
        ["all", "1.75", "3.00"],
        ["planned", "for", "2.00"],
        ["fits", "not", "checked"],
        ["time", "30", "s"],
    ]
    assert gibibytes(GIB) == "1.0 GiB" and hours(7200) == "2.0 h" and hours(600) == "10.0 min"


def test_what_this_machine_does_is_measured() -> None:
    device = device_here(torch.device("cpu"), torch.float32)
    assert not device.gpu and device.memory > 2**28
    assert device.bandwidth > 1e8 and device.rate > 1e8  # any machine moves and computes more


@pytest.mark.usefixtures("pictures")
def test_plan_says_everything_and_writes_a_picture(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train.run(tiny.config("eagle3", "plan=true"), folder) == 0.0
    said = " ".join(capsys.readouterr().out.split())
    assert [file.name for file in folder.iterdir()] == ["plan.png"]
    for words in ("GiB on each of 1 × this machine", "disk", "from steps measured here"):
        assert words in said, words
    assert "batch 1:" in said and "batch 32:" in said and "device-hours" in said
    assert "24 conversations to train on" in said and "this run fits on 1 × this machine" in said
    tiny.job(folder, "eagle3")  # the folder is still a new run's
    assert (folder / "report" / "report.md").exists()


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "target", architectures(64, layers=6)["llama"])
    more = ["planning.device=h100", "planning.devices=2", "planning.tokens=100000", "data.path=x"]
    plan = plan_of_run(compose([*EAGLE, f"target.path={folder}", *more]))
    assert not plan.facts.measured and plan.facts.data.tokens == 100_000
    assert len(plan.gains) == len(BATCHES)
    assert plan.facts.device is DEVICES["h100"] and math.isinf(plan.facts.free)
    assert "as planning.tokens says" in str(plan)


def test_a_limit_is_planned_without_a_tokenizer(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "target", architectures(64, layers=6)["llama"])
    more = ["planning.device=h100", "data.limit=500", "data.max_prompt=200"]
    command = [*EAGLE, f"target.path={folder}", *more]
    plan = plan_of_run(compose([*command, "data.path=x"]))
    assert plan.facts.data.conversations == 500 and plan.facts.data.tokens == 500 * 100
    assert "data.limit, of 100 tokens each, half of data.max_prompt" in str(plan)
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        plan_of_run(compose([*command, f"data.path={tmp_path}/none.jsonl"]))


def test_the_copy_with_an_adapter_is_counted_and_its_kind_checked(tmp_path: Path) -> None:
    config = architectures(64, layers=6)["llama"]
    folder, lora = config_folder(tmp_path / "target", config), tmp_path / "lora"
    command = [*EAGLE, f"target.path={folder}", f"target.adapter={lora}", "data.path=x"]
    command += ["planning.device=h100", "planning.tokens=100000"]
    with pytest.raises(UserError, match=r"has no adapter_config\.json"):
        plan_of_run(compose(command))
    lora.mkdir()
    (lora / "adapter_model.safetensors").touch()
    settings = lora / "adapter_config.json"
    settings.write_text('{"peft_type": "P_TUNING"}')
    with pytest.raises(UserError, match=r"cannot be merged into weights \(P_TUNING\)"):
        plan_of_run(compose(command))
    settings.write_text('{"peft_type": "LORA"}')
    plan = plan_of_run(compose(command))
    disk = stage_named("disk", plan.stages)
    assert disk.filled["merged target"] == plan.facts.target.bytes
    config.quantization_config = {"quant_method": "fp8"}
    config_folder(folder, config)
    with pytest.raises(UserError, match="is quantised, and an adapter"):
        plan_of_run(compose(command))


def test_a_plan_for_this_cpu_counts_what_it_dequantises(tmp_path: Path) -> None:
    config = architectures(64, layers=4)["llama"]
    config.quantization_config = {"quant_method": "fp8"}
    folder = config_folder(tmp_path, config)
    more = ["data=conversations", "planning.tokens=1000", "data.path=x", "target.device=cpu"]
    here, there = (
        plan_of_run(compose([*EAGLE, f"target.path={folder}", *more, f"planning.device={device}"]))
        for device in ("here", "l4")
    )
    assert here.facts.target.itemsize in (2, 4) and there.facts.target.itemsize < 2


def test_more_devices_take_less_time(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "target", architectures(64, layers=6)["llama"])

    def of(*more: str) -> RunPlan:
        fixed = ["planning.device=h100", "planning.tokens=9000000", "data.path=x"]
        return plan_of_run(compose([*EAGLE, f"target.path={folder}", *fixed, *more]))

    one, two = of(), of("planning.devices=2")
    training = [stage_named("training", plan.stages).seconds for plan in (one, two)]
    assert training[1] <= training[0] / 2  # half as many steps, so half as many evaluations too
    within = of("budget.minutes=0.2")
    assert within.facts.data.conversations < one.facts.data.conversations
    measuring = stage_named("measuring", within.stages).seconds
    assert within.seconds - measuring <= 12
    disks = [stage_named("disk", plan.stages).bytes for plan in (within, one)]
    assert disks[0] < disks[1]
    assert "as many as fit budget.minutes" in str(within)
    assert "is too short here" not in str(of("budget.minutes=60"))
    least = of("budget.minutes=0.0001")
    assert least.facts.data.conversations == BudgetConfig.floor
    assert "budget.minutes=0.0001 is too short here: 150 conversations and 6 meas" in str(least)


def test_devices_that_hold_a_target_together_each_need_a_part_of_its_layers(
    tmp_path: Path,
) -> None:
    """Experts too; embedding, head, norms and routers are whole."""
    folder = config_folder(tmp_path / "target", experts())
    fixed = ["planning.device=h100", "planning.tokens=9000", "data.path=x"]

    def of(*more: str) -> RunPlan:
        return plan_of_run(compose([*EAGLE, f"target.path={folder}", *fixed, *more]))

    together = "target.tensor_parallel=true"
    alone, two = of("planning.devices=2"), of("planning.devices=2", together)
    layers = 4 * (32 * 8 * (4 + 2 + 2 + 4) + 8 * 3 * 32 * 16)
    assert two.facts.target.divided == layers
    for name, whole in ((stage.name, stage.filled) for stage in alone.stages):
        part = stage_named(name, two.stages).filled
        held = 0 if name in ("training", "disk") else layers * 4 / 2
        assert whole.get("target weights", 0) - part.get("target weights", 0) == held
        if name in ("responses", "measuring"):
            assert part["KV cache"] == whole["KV cache"] / 2
            assert part["activations"] == whole["activations"]
        elif name != "disk":
            rest = [{k: x for k, x in y.items() if k != "target weights"} for y in (whole, part)]
            assert rest[0] == rest[1]
    spread = of("planning.devices=2", "target.device_map=auto")
    size = two.facts.target
    layer = (size.bytes - size.parts_bytes) / size.layers
    held = stage_named("measuring", spread.stages).filled["target weights"]
    assert held == size.bytes / 2 + layer
    assert devices_for(size, replace(ROUND, memory=size.bytes / 3)) == math.ceil(1.1 * 3 / 0.9)
    with pytest.raises(UserError, match=r"planning\.devices=1: .* give their number"):
        of(together)
    with pytest.raises(UserError, match="3 processes cannot share 4 heads"):
        of(together, "planning.devices=3")


def test_engines_that_answer_take_no_memory_here(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "target", architectures(64, layers=6)["llama"])
    fixed = ["planning.device=h100", "planning.tokens=9000", "data.path=x", "data.responses=target"]
    ours, theirs = (
        plan_of_run(compose([*EAGLE, f"target.path={folder}", *fixed, *more]))
        for more in ([], ["responses.from=http://a:8000/v1"])
    )
    names = [[stage.name for stage in plan.stages] for plan in (ours, theirs)]
    assert names[0] == ["responses", *names[1]]
    read = [stage_named("hidden states", plan.stages).seconds for plan in (ours, theirs)]
    assert read[1] > read[0] == 0, "no hidden states are kept while engines answer"
    assert "responses of engines are not counted" in str(theirs)


def test_what_plan_cannot_know_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        plan_of_run(
            compose([*EAGLE, f"target.path={tmp_path}", "data.path=x", "planning.device=l4"])
        )
    with pytest.raises(UserError, match=r"planning\.device.*h100"):
        PlanningConfig(device="h1000")
