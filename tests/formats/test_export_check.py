"""Exports read by somebody else's code: transformers' classes, built from the exported config.

Run alone: pytest tests/formats/test_export_check.py
"""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.drafters import DRAFTERS, Drafter
from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.layers import Rope, _full_attention, config_of, llama_of, share_of
from specdec.drafters.mtp import MTPConfig
from specdec.drafters.peagle import PEagleConfig
from specdec.errors import UserError
from specdec.formats import draft_export, export_check
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from tests.drafters.families import CONFIGS
from tests.tiny import random_drafter

V, KEPT = 61, torch.arange(2, 42)


def folders(family: str) -> list[str]:
    """The layouts that are folders; tests/formats/test_gguf.py has the files."""
    names = draft_export.layout_names(family)
    return [name for name in names if not draft_export.layout_of(family, name).suffix]


EXPORTED = {
    name: replace(config, sink_tokens=0) if "a window" in name else config
    for name, config in CONFIGS.items()
    if folders(config.name) and "adapters" not in name and "a module a" not in name
}
EXPORTED |= {
    f"{name} with a window": replace(EXPORTED[name], window=8)
    for name in ("eagle", "mtp", "peagle", "jetspec")
}
BASE: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1, 1.4]}
LONG |= {"long_factor": [2.0, 9.0], "partial_rotary_factor": 0.5}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**{**BASE, **more})


TARGETS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "half of each head": lambda: llama(rope_parameters=dict(HALF)),
    "yarn": lambda: llama(
        rope_parameters=YARN | {"original_max_position_embeddings": 32, "beta_fast": None}
    ),
    "yarn, half": lambda: StableLmConfig(
        **BASE, rope_parameters=YARN | {"partial_rotary_factor": 0.5}
    ),
    "llama3": lambda: llama(rope_parameters=dict(LLAMA3)),
    "linear": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 8}
    ),
    "dynamic": lambda: llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    ),
    "longrope, half": lambda: Phi3Config(
        **BASE, pad_token_id=None, rope_parameters=dict(LONG), original_max_position_embeddings=64
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{k: x for k, x in BASE.items() if k != "num_key_value_heads"}, rotary_pct=0.5
    ),
    "kinds of layers": lambda: Olmo3Config(**BASE, sliding_window=8),
    "gemma2": lambda: Gemma2Config(**BASE, head_dim=8, query_pre_attn_scalar=8, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(
        **BASE, head_dim=8, query_pre_attn_scalar=8, sliding_window=8
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **BASE,
        head_dim=8,
        sliding_window=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "cohere": lambda: CohereConfig(**BASE),
    "granite": lambda: GraniteConfig(**BASE, logits_scaling=3.0, embedding_multiplier=5.0),
}


def target_of(name: str) -> Target:
    torch.manual_seed(0)
    config = TARGETS[name]()
    eager = config.model_type in ("gemma2",)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if eager else "sdpa"
    )
    model.generation_config.eos_token_id = None
    return Target(model.float(), None, f"tiny {name}")


def draft(config: Any, target: Target) -> Drafter:
    pruned = KEPT if getattr(config, "draft_vocab", None) else None
    return random_drafter(config, target, 0.1, pruned)


@pytest.fixture(scope="module")
def targets() -> Callable[[str], Target]:
    made: dict[str, Target] = {}

    def target(name: str) -> Target:
        return made[name] if name in made else made.setdefault(name, target_of(name))

    return target


ON_LLAMA = [(name, "llama") for name in EXPORTED]
ELSEWHERE = [
    (name, kind)
    for name in ("eagle3", "eagle", "dflash", "jetspec")
    for kind in TARGETS
    if kind != "llama"
]
ELSEWHERE += [("mtp", kind) for kind in ("half of each head", "cohere", "granite")]


@pytest.mark.parametrize(("name", "kind"), ON_LLAMA + ELSEWHERE)
def test_an_export_computes_the_same_elsewhere(
    targets: Callable[[str], Target], tmp_path: Path, name: str, kind: str
) -> None:
    target, config = targets(kind), EXPORTED[name]
    before = copy.deepcopy(target.model.config.to_dict())
    drafter = draft(config, target)
    for layout in folders(config.name):
        said = draft_export.write_export(tmp_path / layout, drafter, target, layout)
        assert ("ignores the window" in said) == name.endswith("with a window")
        assert export_check.reference_gap(tmp_path / layout, drafter, target) < 1e-4
    assert target.model.config.to_dict() == before


Change = Callable[[dict[str, Any]], Any]
SPOILED: list[tuple[str, str, Change]] = [
    ("eagle3", "half of each head", lambda c: c["rope_parameters"].pop("partial_rotary_factor")),
    ("eagle", "half of each head", lambda c: c["rope_parameters"].pop("partial_rotary_factor")),
    ("eagle", "llama3", lambda c: c["rope_parameters"].update(factor=4.0)),
    ("eagle3", "yarn", lambda c: c["rope_parameters"].update(attention_factor=1.0)),
    ("eagle3", "yarn", lambda c: c["rope_parameters"].update(factor=2.0)),
    ("eagle3", "linear", lambda c: c["rope_parameters"].update(rope_type="default")),
    ("eagle3", "longrope, half", lambda c: c["rope_parameters"].update(attention_factor=1.0)),
    ("eagle3", "gemma4", lambda c: c["rope_parameters"].update(partial_rotary_factor=1.0)),
    ("eagle3", "kinds of layers", lambda c: c["rope_parameters"].update(rope_theta=1e3)),
    ("eagle3", "llama", lambda c: c.update(norm_before_residual=True)),
    ("eagle3", "llama", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3])),
    ("eagle3", "llama", lambda c: c.update(rms_norm_eps=0.1)),
    ("eagle3 of two layers", "llama", lambda c: c.update(norm_output=False)),
    ("eagle", "cohere", lambda c: c.pop("logit_scale")),
    ("dflash", "granite", lambda c: c.update(logit_scale=1.0)),
    ("eagle", "gemma2", lambda c: c.pop("final_logit_softcapping")),
    ("peagle", "llama", lambda c: c.update(mask_token_id=3)),
    ("dflash", "llama", lambda c: c["dflash_config"].update(causal=True)),
    ("jetspec", "llama", lambda c: c["dflash_config"].update(causal=False)),
    ("dflash", "llama", lambda c: c["dflash_config"].update(mask_token_id=3)),
    ("medusa", "llama", lambda c: c.update(logit_scale=2.0)),
    ("mlp", "llama", lambda c: c.update(scale_input=True)),
    ("eagle3 with a window", "llama", lambda c: c.update(sliding_window=5)),
    ("eagle3 with a window", "llama", lambda c: c["layer_types"].__setitem__(1, "full_attention")),
    ("eagle with a window", "llama", lambda c: c.pop("layer_types")),
    ("peagle with a window", "llama", lambda c: c.update(sliding_window=5)),
    ("dflash with a window", "llama", lambda c: c["dflash_config"].update(swa_window_size=6)),
]
UNREADABLE: list[tuple[str, Change]] = [
    ("is dynamic", lambda c: c["rope_parameters"].update(rope_type="dynamic", factor=2.0)),
    ("by kind", lambda c: c.update(rope_parameters={"full_attention": c["rope_parameters"]})),
    ("hidden_act", lambda c: c.update(hidden_act="gelu")),
    ("biases", lambda c: c.update(attention_bias=True)),
    ("a norm too many", lambda c: c.update(norm_before_fc=True)),
    ("images", lambda c: c["rope_parameters"].update(mrope_section=[1, 1, 2])),
]


def exported(target: Target, name: str, folder: Path, change: Change) -> Drafter:
    """A draft whose export has a changed config; the change must not be seen by our own reader."""
    drafter = draft(EXPORTED[name], target)
    draft_export.write_export(folder, drafter, target)
    config = json.loads((folder / draft_export.CONFIG).read_text())
    change(config)
    (folder / draft_export.CONFIG).write_text(json.dumps(config))
    assert torch.equal(
        draft_export.short_text_logits(draft_export.read_export(folder, drafter, target), target),
        draft_export.short_text_logits(drafter, target),
    )
    return drafter


@pytest.mark.parametrize(("name", "kind", "change"), SPOILED)
def test_a_wrong_description_is_another_network(
    targets: Callable[[str], Target], tmp_path: Path, name: str, kind: str, change: Change
) -> None:
    """The check can fail: by at least ten times what it allows, although our own reader, which
    ignores the config, sees nothing."""
    target = targets(kind)
    drafter = exported(target, name, tmp_path / "out", change)
    assert export_check.reference_gap(
        tmp_path / "out", drafter, target
    ) > 10 * export_check.largest_gap(target)


def test_vllm_numbers_the_layer_of_eagle_after_those_of_the_target(
    targets: Callable[[str], Target], tmp_path: Path
) -> None:
    target = targets("llama")
    change: Change = lambda c: c.pop("target_layer_count")  # noqa: E731
    drafter = exported(target, "eagle with a window", tmp_path / "out", change)
    with pytest.raises(UserError, match="layer_types has 1 entries, but vLLM reads entry 7"):
        export_check.reference_gap(tmp_path / "out", drafter, target)


@pytest.mark.parametrize(("what", "change"), UNREADABLE, ids=[what for what, _ in UNREADABLE])
def test_what_engines_cannot_read_or_read_differently(
    targets: Callable[[str], Target], tmp_path: Path, what: str, change: Change
) -> None:
    target = targets("llama")
    drafter = exported(target, "eagle3", tmp_path / "out", change)
    with pytest.raises(UserError):
        export_check.reference_gap(tmp_path / "out", drafter, target)


def test_a_wrong_draft_vocabulary_is_found(
    targets: Callable[[str], Target], tmp_path: Path
) -> None:
    target = targets("llama")
    drafter = exported(target, "eagle3", tmp_path / "out", lambda c: None)
    tensors = load_file(tmp_path / "out" / draft_export.WEIGHTS)
    tensors["d2t"][-1] += 1
    save_file(tensors, tmp_path / "out" / draft_export.WEIGHTS)
    assert export_check.reference_gap(tmp_path / "out", drafter, target) == float("inf")


def test_a_trial_stays_within_what_is_read_alike(targets: Callable[[str], Target]) -> None:
    """A text of a target with LongRoPE does not cross the length at which its factors change."""
    drafter = draft(EXPORTED["eagle"], targets("longrope, half"))
    trial = export_check.CheckText.drawn_for(drafter, targets("longrope, half"))
    assert len(trial.ids_T) == 64 and trial.depths == 3
    assert trial.anchors[-1] + trial.depths < 64 and trial.anchors[0] > 10
    assert len(export_check.CheckText.drawn_for(drafter, targets("llama")).ids_T) == 192 + 3


def latent(**more: Any) -> PreTrainedConfig:
    """Latent attention, whose o_proj has the shape of a draft's: heads · v_head_dim = D."""
    given = {k: x for k, x in BASE.items() if k != "num_key_value_heads"}
    sizes = dict(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return DeepseekV2Config(**given, **sizes, **experts, v_head_dim=8, **more)


@pytest.mark.parametrize("config", [EXPORTED["eagle3"], EXPORTED["dflash"]], ids=lambda c: c.name)
def test_a_start_takes_no_part_of_attention_of_another_kind(config: Any) -> None:
    """o_proj of latent attention fits by its shape alone; a Llama's q, k, v and o are all taken."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(latent()).float()
    theirs = model.model.layers[-1].self_attn.o_proj.weight
    target = parts_of(model)
    for whole, taken in ((target, False), (target_of("llama"), True)):
        drafter = DRAFTERS[config.name].build(replace(config, initialisation="target"), whole, KEPT)
        ours = next(x for n, x in drafter.named_parameters() if n.endswith("o_proj.weight"))
        last = whole.layer(-1 if config.name == "eagle3" else -config.num_layers)
        source = last["self_attn.o_proj.weight"]
        assert ours.shape == source.shape == theirs.shape
        assert torch.equal(ours, source) is taken
    q = last["self_attn.q_proj.weight"]
    mine = next(x for n, x in drafter.named_parameters() if n.endswith("q_proj.weight"))
    assert torch.equal(mine[:, -32:], q)


def parts_of(model: Any) -> TargetParts:
    """The parts of a model that is not loaded as a target, with its layers."""
    parts = TargetParts(model, None, "tiny")
    parts.layers = model.model.layers
    return parts


@pytest.mark.parametrize("kind", ["llama", "kinds of layers", "gemma4", "longrope, half"])
def test_building_a_draft_changes_nothing_of_the_target(
    targets: Callable[[str], Target], kind: str
) -> None:
    """Of any family, with any start: neither its config nor the dicts within it are shared."""
    target, built = targets(kind), 0
    whole, text = target.model.config, target.config
    before = [copy.deepcopy(c.to_dict()) for c in (whole, text)]
    sum_of_weights = target.checksum()
    for config in CONFIGS.values():
        for start in ("target", "random"):
            given = (
                replace(config, initialisation=start)
                if hasattr(config, "initialisation")
                else config
            )
            try:
                drafter = DRAFTERS[config.name].build(given, target)
            except UserError:  # a family that does not fit this target says so
                continue
            built += 1
            if (llama := getattr(drafter, "llama", None)) is not None:
                llama.rope_parameters["rope_theta"] = 1.0
            sizes = getattr(drafter.sizes, "llama", None) or {}
            (sizes.get("rope_parameters") or {})["rope_theta"] = 2.0
    assert built > 30
    assert [c.to_dict() for c in (whole, text)] == before
    assert target.checksum() == sum_of_weights


REFUSED: list[tuple[Any, Callable[[], PreTrainedConfig], str]] = [
    (MTPConfig(depth=2, modules=2), TARGETS["llama"], "drafter.modules=1"),
    (MTPConfig(depth=2, intermediate_size=8), TARGETS["llama"], "intermediate_size=null"),
    (MTPConfig(depth=2), TARGETS["gemma2"], "has None"),
    (MTPConfig(depth=2), TARGETS["gpt_neox"], "has gelu"),
    (MTPConfig(depth=2), TARGETS["llama3"], "of type llama3"),
    (MTPConfig(depth=2), TARGETS["gemma4"], "of type proportional"),
    (MTPConfig(depth=2), lambda: llama(attention_bias=True), "the attention_bias of"),
    (MTPConfig(depth=2), lambda: llama(attention_value_scale=0.5), "attention_value_scale"),
    (EagleConfig(depth=2), lambda: PhiConfig(**BASE), "has a bias"),
    (DFlashConfig(depth=2, num_layers=1), lambda: PhiConfig(**BASE), "has a bias"),
    (MTPConfig(depth=2), lambda: PhiConfig(**BASE), "has a bias"),
    *(
        (replace(config, window=8, sink_tokens=2), TARGETS["llama"], "drafter.sink_tokens=2")
        for config in (EagleConfig(), Eagle3Config(), PEagleConfig(), MTPConfig(), DFlashConfig())
    ),
]


@pytest.mark.parametrize(("config", "target", "said"), REFUSED)
def test_what_an_export_refuses_is_known_before_training(
    config: Any, target: Callable[[], PreTrainedConfig], said: str, tmp_path: Path
) -> None:
    """From the config and the target's parts alone; the export itself says the same."""
    parts = parts_of_config(target())
    with pytest.raises(UserError, match=said) as first:
        draft_export.require_exportable(config, parts, "hf")
    assert "export" in str(first.value)  # what to do about it
    drafter = DRAFTERS[config.name](config, DRAFTERS[config.name].plan(config, parts))
    with pytest.raises(UserError, match=said):
        draft_export.write_export(tmp_path / "out", drafter, parts)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def parts_of_config(config: PreTrainedConfig) -> TargetParts:
    with torch.device("meta"):
        return TargetParts(AutoModelForCausalLM.from_config(config), None, "tiny")


@pytest.mark.parametrize("name", ["medusa", "mlp"])
def test_a_kept_token_whose_row_is_zero(
    targets: Callable[[str], Target], tmp_path: Path, name: str
) -> None:
    """Nothing in the file tells it from a token outside the draft vocabulary."""
    target = targets("llama")
    drafter = draft(EXPORTED[name], target)
    with torch.no_grad():
        for n, x in drafter.named_parameters():
            if n.startswith("lm_heads."):
                x[5] = 0
    draft_export.write_export(tmp_path / "out", drafter, target)
    again = draft_export.read_export(tmp_path / "out", drafter, target)
    assert again.vocab_S is not None and torch.equal(again.vocab_S, KEPT)
    tensors = load_file(tmp_path / "out" / draft_export.WEIGHTS)
    head = next(n for n in tensors if "head" in n)
    tensors[head][0] = 1.0  # token 0 is not kept
    save_file(tensors, tmp_path / "out" / draft_export.WEIGHTS)
    with pytest.raises(UserError, match="tokens outside the draft vocabulary"):
        draft_export.read_export(tmp_path / "out", drafter, target)


def test_logits_may_differ_by_rounding_where_kernels_sum_in_any_order(
    targets: Callable[[str], Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by one unit in the last place, at random: in bfloat16 it is rounding, in float32 on a
    CPU it would be an error; a hundred units are one anywhere."""
    target, computed = targets("llama"), draft_export.short_text_logits
    drafter, generator = draft(EXPORTED["eagle3"], target), torch.Generator().manual_seed(0)
    units = 1

    def jittery(*given: Any) -> Any:
        logits = computed(*given)
        drawn = torch.randint(-1, 2, logits.shape, generator=generator)
        return logits * (1 + units * drawn * torch.finfo(logits.dtype).eps).to(logits.dtype)

    monkeypatch.setattr(draft_export, "short_text_logits", jittery)
    with pytest.raises(UserError, match="read back, its logits differ"):
        draft_export.write_export(tmp_path / "float32", drafter, target)
    drafter.bfloat16()
    assert "equal but for rounding" in draft_export.write_export(
        tmp_path / "bfloat16", drafter, target
    )
    units = 0
    again = draft_export.short_text_logits(drafter, target).abs().max()
    assert draft_export.rounding_of(again, 0.5) == pytest.approx(4 * (0.5 + 2**-7 * float(again)))
    monkeypatch.setattr(
        draft_export,
        "read_export",
        lambda *_: draft(EXPORTED["eagle3"], targets("linear")).bfloat16(),
    )
    with pytest.raises(UserError, match="read back, its logits differ"):
        draft_export.write_export(tmp_path / "other", drafter, target)


def sized(config: PreTrainedConfig) -> dict[str, Any]:
    return llama_of(parts_of_config(config))


def test_a_layer_is_shaped_like_the_last_one_with_full_attention() -> None:
    """Gemma 4's heads are wider there, Gemma 3n lists the sizes of its MLPs, and MiMo rotates a
    third of its heads: int(.334 · 24) = 8 numbers."""
    found = sized(TARGETS["gemma4"]())
    assert (found["head_dim"], found["num_key_value_heads"]) == (16, 1)
    assert found["rotary_dim"] == 4  # a quarter
    assert found["rope_parameters"]["rope_theta"] == 1e6
    theirs = {**BASE, "intermediate_size": [48, 48, 48, 48, 64, 32]}
    kinds = ["sliding_attention"] * 4 + ["full_attention", "sliding_attention"]
    more = dict(head_dim=8, layer_types=kinds, num_kv_shared_layers=0, sliding_window=8)
    config = Gemma3nTextConfig(**theirs, **more, activation_sparsity_pattern=[0.0] * 6)
    assert _full_attention(config)[0] == 4
    target = parts_of_config(llama())
    target.config = config
    assert llama_of(target)["intermediate_size"] == 64
    assert llama_of(target)["rope_parameters"]["rope_theta"] == 1e6  # of full attention
    assert sized(TARGETS["gpt_neox"]())["rotary_dim"] == 4
    target.config = MiMoV2FlashConfig(**BASE, head_dim=24, v_head_dim=16)
    found = llama_of(target)
    assert found["rotary_dim"] == 8 and found["rope_parameters"]["rope_theta"] == 5e6
    assert "rotary_dim" not in sized(llama())


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}, 5.0),
        (
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                **{"rope_type": "default", "rope_theta": 1e4},
            },
            1e4,
        ),
        ({"rope_type": "dynamic", "rope_theta": 7.0, "factor": 2.0}, 7.0),
        ({"rope_type": "dynamic", "rope_theta": 7.0, "alpha": 64.0}, 7.0 * 64.0 ** (8 / 6)),
    ],
)
def test_a_card_of_an_earlier_version_keeps_its_network(
    rope: dict[str, Any], wanted: float
) -> None:
    """Such drafts rotated whole heads, and by the parameters beside those by kind of layer."""
    keys = sized(llama()) | {"rope_parameters": rope}
    config = config_of(keys)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": pytest.approx(wanted)}
    assert Rope(config)(torch.tensor([[3]]), 4)[0].shape == (1, 1, 8)


def test_a_reader_who_rounds_down_finds_the_rotated_numbers() -> None:
    every = [(width, whole) for whole in range(2, 260, 2) for width in range(2, whole + 1, 2)]
    assert all(int(whole * share_of(width, whole)) == width for width, whole in every)
