"""A target's own MTP module: read from a checkpoint built by hand with its native names, compared
with transformers' decoder layer run over the same pairs, trained, and written back.

Run alone: python -m pytest tests/formats/test_native_mtp.py
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.errors import UserError
from specdec.formats import draft_checkpoint, draft_export, export_check, native_layout
from specdec.formats.check_text import FINAL, CheckText
from specdec.formats.layout import CONFIG, MARK
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.processes import process
from tests.tiny import Tiny, make_tokenizer

INDEX, FIRST, LAST = (
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
D, LAYERS = 24, 2
COMMON = dict(
    hidden_size=D,
    intermediate_size=40,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    max_position_embeddings=256,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
ROUTED = dict(
    **EXPERTS,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.7,
    first_k_dense_replace=1,
)
LATENT = dict(
    q_lora_rank=10,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=8,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
)
GATED = dict(
    num_key_value_heads=2,
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
)
SHARED = dict(**EXPERTS, num_experts=4, shared_expert_intermediate_size=12)


@dataclass(frozen=True)
class Native:
    """One checkpoint by hand: the config of its target, and how the names of its module are made
    from those of transformers' layer."""

    model_type: str
    sizes: dict[str, Any]
    module: str  # of transformers
    classes: str
    prefix: str  # of the layer's names
    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    hidden_first: bool = False
    zero_first: bool = True
    recycles_normed: bool = True
    fused: bool = False  # all experts of a layer in one tensor
    extra: tuple[str, ...] = ()  # repeated tensors of the target

    def part(self, name: str) -> Any:
        path = f"transformers.models.{self.module}.modeling_{self.module}"
        return getattr(import_module(path), self.classes + name)


AFTER = f"model.layers.{LAYERS}."
BESIDE = dict(
    prefix=AFTER,
    enorm=f"{AFTER}enorm",
    hnorm=f"{AFTER}hnorm",
    eh_proj=f"{AFTER}eh_proj",
    norm=f"{AFTER}shared_head.norm",
    extra=(f"{AFTER}embed_tokens.weight", f"{AFTER}shared_head.head.weight"),
)
APART = dict(
    prefix="mtp.layers.0.",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    eh_proj="mtp.fc",
    norm="mtp.norm",
    zero_first=False,
)
GLM = dict(
    num_key_value_heads=2,
    head_dim=8,
    use_qk_norm=True,
    attention_bias=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)
NATIVES = {
    "DeepSeek-V3": Native(
        "deepseek_v3",
        ROUTED | LATENT | {"num_key_value_heads": 4},
        "deepseek_v3",
        "DeepseekV3",
        **BESIDE,
    ),
    "GLM-4.5": Native(
        "glm4_moe", ROUTED | GLM, "glm4_moe", "Glm4Moe", recycles_normed=False, **BESIDE
    ),
    "Qwen3-Next": Native("qwen3_next", GATED | SHARED, "qwen3_next", "Qwen3Next", **APART),
    "Qwen3.5": Native("qwen3_5_text", GATED, "qwen3_5", "Qwen3_5", **APART),
    "Qwen3.5, experts": Native(
        "qwen3_5_moe_text", GATED | SHARED, "qwen3_5_moe", "Qwen3_5Moe", fused=True, **APART
    ),
    "MiMo": Native(
        "qwen2",
        {"num_key_value_heads": 2},
        "qwen2",
        "Qwen2",
        prefix="model.mtp_layers.0.",
        enorm="model.mtp_layers.0.token_layernorm",
        hnorm="model.mtp_layers.0.hidden_layernorm",
        eh_proj="model.mtp_layers.0.input_proj",
        norm="model.mtp_layers.0.final_layernorm",
        hidden_first=True,
    ),
}


@dataclass
class Module:
    """transformers' own layer between the parts of a module, with random weights."""

    native: Native
    layer: nn.Module
    rotary: nn.Module
    norms: dict[str, nn.Module]  # enorm, hnorm, norm
    eh_proj: nn.Linear

    def output(self, embedding_TD: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The streams [T, D] after the layer for pairs in order, before and after the norm."""
        T = len(embedding_TD)
        if self.native.zero_first:
            embedding_TD = torch.cat([torch.zeros(1, D), embedding_TD[1:]])
        pair = [self.norms["enorm"](embedding_TD), self.norms["hnorm"](state_TD)]
        x = self.eh_proj(torch.cat(pair[::-1] if self.native.hidden_first else pair, -1))[None]
        positions = torch.arange(T)[None]
        mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
        rope = self.rotary(x, positions)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rope)[
            0
        ]
        return out, self.norms["norm"](out)

    def tensors(self) -> dict[str, Tensor]:
        """Under the checkpoint's names, in bfloat16 but for the router's corrections."""
        native, named = self.native, dict[str, Tensor]()
        for name, x in self.layer.state_dict().items():
            if name.endswith("experts.gate_up_proj") and not native.fused:
                for k, both in enumerate(x):
                    before = f"{native.prefix}{name.removesuffix('gate_up_proj')}{k}."
                    named[f"{before}gate_proj.weight"] = both[: len(both) // 2]
                    named[f"{before}up_proj.weight"] = both[len(both) // 2 :]
            elif name.endswith("experts.down_proj") and not native.fused:
                before = f"{native.prefix}{name.removesuffix('down_proj')}"
                named |= {f"{before}{k}.down_proj.weight": one for k, one in enumerate(x)}
            else:
                named[native.prefix + name] = x
        named |= {f"{getattr(native, n)}.weight": m.weight for n, m in self.norms.items()}
        named[f"{native.eh_proj}.weight"] = self.eh_proj.weight
        exact = "e_score_correction_bias"
        return {
            n: x.detach().clone().to(torch.float32 if n.endswith(exact) else torch.bfloat16)
            for n, x in named.items()
        }


def module_for(native: Native, config: Any) -> Module:
    """A module with weights that bfloat16 holds exactly, none of them silent."""
    one = type(config)(**{**config.to_dict(), "num_hidden_layers": LAYERS})
    one._attn_implementation = one._experts_implementation = "eager"
    norm, generator = native.part("RMSNorm"), torch.Generator().manual_seed(5)
    norms = {name: norm(D, eps=one.rms_norm_eps) for name in ("enorm", "hnorm", "norm")}
    layer = native.part("DecoderLayer")(one, LAYERS - 1)
    text = "Text" if native.classes.startswith("Qwen3_5") else ""
    rotary = native.part(f"{text}RotaryEmbedding")(one)
    made = Module(native, layer, rotary, norms, nn.Linear(2 * D, D, bias=False))
    with torch.no_grad():
        for part in (layer, made.eh_proj, *norms.values()):
            for x in (*part.parameters(), *part.buffers()):
                drawn = torch.randn(x.shape, generator=generator) * 0.3
                ones = x.dim() == 1 and bool((x == 1).all())
                x.copy_((drawn + ones).bfloat16().float())
    return made.__class__(native, layer.eval(), rotary, norms, made.eh_proj)


def write_checkpoint(folder: Path, name: str) -> Module:
    """The target and its module in two shards, with a tokenizer."""
    native, tokenizer = NATIVES[name], make_tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        native.model_type,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        **COMMON | native.sizes,
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    module = module_for(native, model.config.get_text_config(decoder=True))
    own = module.tensors()
    shared = [whole["model.embed_tokens.weight"], whole["lm_head.weight"]]
    own |= {n: x.clone() for n, x in zip(native.extra, shared, strict=bool(native.extra))}
    first = {n: x for n, x in whole.items() if "layers.1." not in n}
    shards = {FIRST: first, LAST: {n: x for n, x in whole.items() if n not in first} | own}
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    where = {n: file for file, tensors in shards.items() for n in tensors}
    total = sum(x.nbytes for tensors in shards.values() for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))
    return module


@cache
def made(name: str, root: Path) -> tuple[Path, Path, Module, Target]:
    """The checkpoint, the folder of its target, the reference, and the target. transformers knows
    MiMo's target as a Qwen2, so that has a folder of its own."""
    folder = target = root / name.replace(" ", "-")
    module = write_checkpoint(folder, name)
    if name == "MiMo":
        target = root / "qwen2"
        write_checkpoint(target, name)
        keys = json.loads((folder / CONFIG).read_text())
        keys |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        (folder / CONFIG).write_text(json.dumps(keys | {"num_nextn_predict_layers": 1}))
    return folder, target, module, load_target(TargetConfig(str(target), "float32"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.mark.parametrize("name", NATIVES)
def test_the_module_computes_what_transformers_layer_does(name: str, root: Path) -> None:
    """Depth 0 at two anchors of a text; then each depth once more, with the output before it."""
    folder, _, module, target = made(name, root)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    trial = CheckText.drawn_for(drafter, target)
    ours = export_check.drafter_logits(drafter, target, trial)
    ours = ours.view(trial.depths, len(trial.anchors), -1)
    embedding_TD, state_TD = target.embedding.weight[trial.ids_T].float(), trial.state(FINAL)
    with torch.no_grad():
        for at, a in enumerate((*trial.anchors,)):
            read, states = embedding_TD[1 : a + 1], state_TD[:a]
            for k in range(trial.depths):
                out, normed = module.output(read, states)
                theirs = target.logits(normed[-1])
                torch.testing.assert_close(ours[k, at], theirs, atol=2e-4, rtol=2e-4)
                recycled = normed if module.native.recycles_normed else out
                read = embedding_TD[1 : a + k + 2]
                states = torch.cat([states, recycled[-1:]])


@pytest.mark.parametrize("name", NATIVES)
def test_a_module_is_written_back_into_its_shards(name: str, root: Path, tmp_path: Path) -> None:
    """Untrained, every file has its bytes again. Trained, only the tensors of the module change:
    the first shard is the same file, and the index is the same."""
    folder, _, module, target = made(name, root)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    said = draft_export.write_export(tmp_path / "back", drafter, target)
    assert "tensors read back, identical" in said
    for path in folder.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    extra = {path.name for path in (tmp_path / "back").iterdir()} - {*os.listdir(folder)}
    assert extra == {MARK}
    assert (tmp_path / "back" / FIRST).stat().st_ino == (folder / FIRST).stat().st_ino
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(0.5)
    draft_export.write_export(tmp_path / "trained", drafter, target)
    before, after = load_file(folder / LAST), load_file(tmp_path / "trained" / LAST)
    own = {n for n in module.tensors() if not n.endswith("correction_bias")}  # that is a buffer
    assert before.keys() == after.keys()
    assert {n for n in before if not torch.equal(before[n], after[n])} == own
    again = draft_checkpoint.load_draft(tmp_path / "trained", target, torch.float32)
    for one, other in zip(again.parameters(), drafter.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=2**-8)  # as bfloat16 rounds
    layout = draft_export.default_layout(drafter)
    read = draft_export.read_export(tmp_path / "trained", drafter, target, layout, as_it_came=True)
    for one, other in zip(read.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NATIVES)
def test_decoding_with_a_module_is_lossless(name: str, root: Path) -> None:
    folder, _, _, target = made(name, root)
    drafter = draft_checkpoint.load_draft(folder, target)
    prompts = [[5, 9, 30], [7, 8]]
    plain = decode(target, prompts, None, max_new_tokens=6)
    drafted = decode(target, prompts, Way(drafter, Chain(2)), max_new_tokens=6)
    assert [x.ids for x in plain] == [x.ids for x in drafted]


def copied(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with changed tensors in its last shard."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / LAST)
    change(tensors)
    save_file(tensors, to / LAST, metadata={"format": "pt"})
    index = json.loads((to / INDEX).read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f == FIRST}
    index["weight_map"] |= dict.fromkeys(tensors, LAST)
    (to / INDEX).write_text(json.dumps(index))
    return to


def quantise(tensors: dict[str, Tensor]) -> None:
    name = f"{AFTER}eh_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{AFTER}mlp.experts.3.up_proj.weight"]


def repeat(tensors: dict[str, Tensor]) -> None:
    again = {n.replace(AFTER, "model.layers.3."): x.clone() for n, x in tensors.items()}
    tensors |= {n: x for n, x in again.items() if n not in tensors}


def reshape(tensors: dict[str, Tensor]) -> None:
    name = f"{AFTER}self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name][:-1].clone()


def unshare(tensors: dict[str, Tensor]) -> None:
    tensors[f"{AFTER}shared_head.head.weight"][3, 0] += 1


@pytest.mark.parametrize(
    "change, words",
    [
        (quantise, rf"tensor '{AFTER}eh_proj.weight' is of type F8_E4M3"),
        (drop, rf"tensor '{AFTER}mlp.experts.3.up_proj.weight' is missing"),
        (repeat, r"tensor 'model.layers.3\..*' does not belong to a draft of mtp"),
        (reshape, rf"tensor '{AFTER}self_attn.kv_b_proj.weight' has shape"),
        (unshare, rf"tensor '{AFTER}shared_head.head.weight' is not that of"),
    ],
)
def test_a_module_that_cannot_be_read_is_named(
    change: Callable[[dict[str, Tensor]], None], words: str, root: Path, tmp_path: Path
) -> None:
    folder, _, _, target = made("DeepSeek-V3", root)
    broken = copied(folder, tmp_path / "broken", change)
    with pytest.raises(UserError, match=words):
        draft_checkpoint.read_draft(broken, target)


def test_a_module_of_another_architecture_is_named(root: Path, tmp_path: Path) -> None:
    folder, _, _, target = made("DeepSeek-V3", root)
    other = copied(folder, tmp_path / "other", lambda tensors: None)
    config = json.loads((other / CONFIG).read_text())
    (other / CONFIG).write_text(json.dumps(config | {"model_type": "deepseek_v32"}))
    with pytest.raises(UserError, match="model_type is 'deepseek_v32', but an MTP module"):
        draft_checkpoint.read_draft(other, target)
    (other / CONFIG).write_text(json.dumps(config | {"n_routed_experts": 10**9}))
    with pytest.raises(UserError, match="n_routed_experts is 1000000000: expected"):
        draft_checkpoint.read_draft(other, target)
    (other / CONFIG).write_text(json.dumps(config | {"num_attention_heads": "many"}))
    with pytest.raises(UserError, match="its config does not describe a model of DeepseekV3"):
        draft_checkpoint.read_draft(other, target)


def test_a_run_trains_the_module_and_writes_the_checkpoint(
    tiny: Tiny, root: Path, tmp_path: Path
) -> None:
    """The commands of docs/training.md: evaluate it as it is, train it, find it in the export."""
    folder, _, module, _ = made("Qwen3-Next", root)
    more = [f"target.path={folder}", f"drafter.from={folder}", "loop.epochs=1", "export=auto"]
    cfg = tiny.config("mtp", *more)
    assert (cfg.export, cfg.drafter.layer) == ("qwen3", "qwen3_next")
    tiny.job(tmp_path / "run", "mtp", *more)
    before = load_file(folder / LAST)
    after = load_file(tmp_path / "run" / "export" / LAST)
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert "mtp.fc.weight" in moved and moved <= {*module.tensors()}
    (tmp_path / "prompts.txt").write_text("the cat\nwhy is the sky blue\n")
    few = ["--max-new-tokens", "6", "--timed", "1", "--temperatures", "0", "--dtype", "float32"]
    out = ["--out", str(tmp_path / "report"), "--prompts", str(tmp_path / "prompts.txt")]
    ended = process(["scripts/evaluate", str(tmp_path / "run" / "export"), *few, *out])
    assert ended.returncode == 0, ended.stderr


def test_a_checkpoint_with_other_types_is_written_back(root: Path, tmp_path: Path) -> None:
    """The module may be of bfloat16 beside a target in 8 bits, which nothing reads."""
    folder, _, module, _ = made("Qwen3-Next", root)
    origin, to = tmp_path / "origin", tmp_path / "to"
    origin.mkdir()
    to.mkdir()
    (origin / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    trained = {name: x + 1 for name, x in module.tensors().items()}
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file(module.tensors() | {"model.of_the_target": weight}, origin / "model.safetensors")
    native_layout.write_checkpoint(to, str(origin), trained)
    after = load_file(to / "model.safetensors")
    assert all(torch.equal(after[name], x) for name, x in trained.items())
    assert after["model.of_the_target"].dtype == torch.float8_e4m3fn
    with pytest.raises(UserError, match="has changed since it was imported"):
        native_layout.write_checkpoint(to, str(origin), trained | {"mtp.more": weight})


def test_modules_are_in_the_order_of_their_layers() -> None:
    names = [f"model.layers.{k}.eh_proj.weight" for k in (10, 9, 100)]
    assert native_layout.modules_beside(names) == [f"model.layers.{k}." for k in (9, 10, 100)]
