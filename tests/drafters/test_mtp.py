"""Multi-token prediction: DeepSeek's modules by a plain twin of the paper's formulas, where they
start, and the checkpoint that vLLM reads.

Run alone: python -m pytest tests/drafters/test_mtp.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from specdec.context import Context
from specdec.drafters.base import Drafter
from specdec.drafters.mtp import MTP, MTPConfig
from specdec.errors import UserError
from specdec.forcing.teacher import logits_of
from specdec.formats import draft_export
from specdec.lab.drafters.mtp_heads import MTPHeads, MTPHeadsConfig
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.drafters.plain import EPS, attended, key_value, mlp, rms
from tests.tiny import architectures, compose, random_drafter, random_target, save_target

V, D, Dh = 61, 32, 8
IDS = torch.randint(2, V, (1, 12), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(architectures(V, 6)["llama"])
    target.model.double()
    with torch.no_grad():  # all are 1 in a fresh model
        for i, norm in enumerate([target.norm, target.layers[-1].input_layernorm]):
            drawn = torch.rand(D, generator=torch.Generator().manual_seed(i))
            norm.weight.copy_(0.5 + drawn)
    return target


def mtp_of(target: TargetParts, noise: float = 0.2, **config: Any) -> Drafter:
    drafter = random_drafter(MTPConfig(**config), target, noise).double()  # type: ignore[arg-type]
    drafter.attach(target)
    return drafter


class Twin:
    """One module, an entry at a time: `w` has the names of MiMo-V2's checkpoint."""

    def __init__(self, w: dict[str, Tensor]) -> None:
        self.w = {name: x.double() for name, x in w.items()}
        self.cache: list[tuple[Tensor, Tensor]] = []

    def __call__(self, e: Tensor, h: Tensor, position: int) -> Tensor:
        """The normed state after the pair (e, h), which also becomes a key."""
        w = self.w
        both = torch.cat([rms(e, w["enorm.weight"]), rms(h, w["hnorm.weight"])])
        x = w["eh_proj.weight"] @ both
        read = rms(x, w["input_layernorm.weight"])
        self.cache.append(key_value(w, read, position, Dh))
        x = x + attended(w, read, position, self.cache)
        x = x + mlp(w, rms(x, w["pre_mlp_layernorm.weight"]))
        return rms(x, w["final_layernorm.weight"])


def module(drafter: Drafter, k: int) -> dict[str, Tensor]:
    mine = {
        n.removeprefix(f"layers.{k}."): x for n, x in drafter.state_dict().items() if f"s.{k}." in n
    }
    return {n.replace("post_attention", "pre_mlp"): x for n, x in mine.items()}


def test_a_module_a_depth_is_the_papers_recursion(target: Target) -> None:
    """h_i^k = TRM_k(M_k [RMSNorm(e(t_{i+k})); RMSNorm(h_i^{k-1})]) over positions 1 … i (equations
    21 to 23; the halves in the order of the checkpoints), and depth k at anchor a is i = a - 1."""
    drafter, a, K = mtp_of(target, modules=3), 7, 3
    ctx, _ = target.hidden_states(IDS, drafter.needs)
    assert ctx.final_BTD is not None
    e, states = target.embedding.weight[IDS[0]], list(ctx.final_BTD[0])
    wanted = []
    for k in range(K):
        twin = Twin(module(drafter, k))
        states = [twin(e[i + 1 + k], states[i], i) for i in range(a)]
        wanted.append(states[a - 1])
    found = drafter.hidden(ctx, torch.tensor([[a]]), None)[0, 0]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-5)  # float32 angles
    given = drafter.hidden(ctx, torch.tensor([[a]]), IDS[None, :, a + 1 : a + K])[0, 0]
    torch.testing.assert_close(given, found, atol=1e-9, rtol=1e-9)


def test_one_module_is_unrolled_as_vllm_runs_its_export(target: Target, tmp_path: Path) -> None:
    """The file's tensors through vLLM's MiMoV2MTPLayer by hand, in the order of its proposer: the
    text's pairs, then its own states at the positions after them, all in one cache."""
    drafter, a = mtp_of(target), 7
    draft_export.write_export(tmp_path / "out", drafter, target)
    file = load_file(tmp_path / "out" / "model.safetensors")
    prefix = "model.mtp.layers.0."
    assert all(name.startswith(prefix) for name in file)
    block = [f"self_attn.{n}_proj" for n in "qkvo"] + [
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    ]
    norms = ["enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"]
    assert {n.removeprefix(prefix) for n in file} == {
        f"{n}.weight" for n in ["eh_proj", *norms, *block]
    }
    twin = Twin({n.removeprefix(prefix): x for n, x in file.items()})
    ctx, _ = target.hidden_states(IDS, drafter.needs)
    assert ctx.final_BTD is not None
    e, h = target.embedding.weight[IDS[0]], ctx.final_BTD[0]
    state = [twin(e[i + 1], h[i], i) for i in range(a)][-1]
    wanted = [state]
    for k in (1, 2):
        wanted.append(twin(e[a + k], wanted[-1], a - 1 + k))
    hidden = drafter.hidden(ctx, torch.tensor([[a]]), None)
    torch.testing.assert_close(hidden[0, 0], torch.stack(wanted), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        drafter.unembed(hidden, 0)[0, 0],
        torch.stack(wanted) @ target.head.weight.T,
        atol=1e-5,
        rtol=0,
    )


def test_the_export_says_what_vllms_loader_reads(target: Target, tmp_path: Path) -> None:
    """Of mimo_v2_mtp.py and hf_config_override in vLLM 0.32: the type must be one that transformers
    knows, the architecture chooses the loader, and the sizes are read in the target's config."""
    drafter = mtp_of(target)
    draft_export.write_export(tmp_path / "out", drafter, target)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["MiMoV2FlashForCausalLM"])
    overrides = json.loads((tmp_path / "out" / "target-overrides.json").read_text())
    served = LlamaConfig(**target.config.to_dict() | overrides)
    wanted = {
        "hidden_size": D,
        "intermediate_size": 48,
        "hidden_act": "silu",
        "vocab_size": V,
        "layernorm_epsilon": EPS,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": Dh,
        "swa_rope_theta": 10000.0,
        "attention_bias": False,
    }
    assert {key: getattr(served, key) for key in wanted} == wanted
    absent = "swa_v_head_dim", "partial_rotary_factor", "sliding_window_size"
    assert not any(hasattr(served, key) for key in (*absent, "attention_value_scale"))


def test_an_export_that_vllm_would_read_otherwise_is_refused(
    target: Target, tmp_path: Path
) -> None:
    scaled = mtp_of(target)
    scaled.llama.rope_parameters = {"rope_type": "llama3"}  # type: ignore[union-attr]
    for drafter, said in (
        (mtp_of(target, modules=3), r"drafter\.modules=1"),
        (mtp_of(target, intermediate_size=40), r"drafter\.intermediate_size=null"),
        (scaled, "llama3"),
    ):
        with pytest.raises(UserError, match=said):
            draft_export.write_export(tmp_path / "out", drafter, target)
    assert not (tmp_path / "out").exists()


def with_modules(folder: Path, count: int, latent: bool = False) -> dict[str, Tensor]:
    """Add random modules L, L + 1, … to a saved target of 4 layers, named as DeepSeek's are."""
    save_target(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    layer = {n.removeprefix("model.layers.3."): x for n, x in tensors.items() if ".layers.3." in n}
    shapes = {n: x.shape for n, x in layer.items()} | {"eh_proj.weight": (D, 2 * D)}
    shapes |= {f"{n}.weight": (D,) for n in ("enorm", "hnorm", "shared_head.norm")}
    if latent:
        shapes["self_attn.q_proj.weight"] = (D + 8, D)
    own = {
        f"model.layers.{4 + k}.{n}": torch.randn(shape, generator=generator)
        for k in range(count)
        for n, shape in shapes.items()
    }
    save_file(tensors | own, folder / "model.safetensors", metadata={"format": "pt"})
    return own


@pytest.mark.parametrize("count", [1, 2, 3])
def test_training_starts_from_the_targets_own_modules(tmp_path: Path, count: int) -> None:
    """The last of them serves the further depths, for the whole target as for its parts."""
    own = with_modules(tmp_path / "model", count)
    cfg = TargetConfig(str(tmp_path / "model"), "float32", "cpu", cache=str(tmp_path / "cache"))
    whole = TargetLoader(cfg).whole()
    parts = TargetLoader(cfg).parts
    assert parts.stored is not None
    for target in (whole, parts):
        drafter = MTP.build(MTPConfig(modules=3), target)
        assert not drafter.closed_form_initialisation
        state = drafter.state_dict()
        assert len(state) == 3 * (len(own) // count)
        for name, x in state.items():
            k, rest = name.removeprefix("layers.").split(".", 1)
            rest = rest.replace("final_layernorm", "shared_head.norm")
            assert torch.equal(x, own[f"model.layers.{4 + min(int(k), count - 1)}.{rest}"])


def test_modules_of_another_kind_are_left(tmp_path: Path) -> None:
    """DeepSeek's own have latent attention: then the start is the target's last layer."""
    with_modules(tmp_path / "model", 1, latent=True)
    target = load_target(TargetConfig(str(tmp_path / "model"), "float32", "cpu"))
    drafter = MTP.build(MTPConfig(), target)
    assert drafter.closed_form_initialisation
    query = target.layer(-1)["self_attn.q_proj.weight"]
    assert torch.equal(drafter.state_dict()["layers.0.self_attn.q_proj.weight"], query)


@pytest.mark.parametrize("modules", [1, 3])
def test_the_start_passes_the_state_through(target: Target, modules: int) -> None:
    """The layer reads what the target's last layer reads of the stream r behind h, and adds a
    quarter to it, so that the first draft predicts much what the head says of h."""
    drafter = MTP.build(MTPConfig(modules=modules), target).double()
    assert isinstance(drafter, MTP)
    r = 7 * torch.randn(200, D, generator=torch.Generator().manual_seed(3)).double()
    h = target.norm(r)
    for layer in drafter.stack:
        read, stream = layer.enter(torch.randn(200, D).double(), h)
        wanted = target.layers[-1].input_layernorm(r)
        torch.testing.assert_close(read, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.final_layernorm(stream), h, atol=1e-4, rtol=1e-4)
        ctx = Context(torch.zeros(200, 2, dtype=torch.long), None, h[:, None].expand(-1, 2, -1))
        drafter.attach(target)
        with torch.no_grad():
            after = drafter.hidden(
                ctx, torch.ones(200, 1, dtype=torch.long), torch.zeros(200, 1, 0).long()
            )
        near = torch.cosine_similarity(after[:, 0, 0], h)
        assert 0.9 < float(near.mean()) < 0.999


def test_a_number_of_modules_that_fits_no_depth_is_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.modules=2: give 1"):
        compose(["drafter=mtp", "drafter.modules=2"])


def test_the_papers_recipe_is_composed() -> None:
    """FastMTP's weights .6^k over 3 depths, which sum to 1.96, sum to 1."""
    config = compose(["experiment=fastmtp_paper"])
    assert config.drafter == MTPConfig(initialisation="target")
    assert config.loss.depth_decay == 0.6
    assert config.loss.terms["ce"] == pytest.approx(1 / 1.96, abs=1e-4)


def test_a_parallel_head_is_a_last_layer_of_its_own(target: Target) -> None:
    """f_u(f_h(f_s(x))) of the paper, by transformers: the target with head k's weights in its last
    layer and final norm has that head's state at a - 1."""
    drafter = random_drafter(MTPHeadsConfig(depth=2), target, 0.2).double()
    drafter.attach(target)
    ctx, _ = target.hidden_states(IDS, drafter.needs)
    found = drafter.hidden(ctx, torch.tensor([[3, 8]]), None)
    for k in range(2):
        other = random_target(architectures(V, 6)["llama"])
        other.model.double()
        other.model.load_state_dict(target.model.state_dict())
        mine = {n: x for n, x in drafter.state_dict().items() if n.startswith(f"heads.{k}.")}
        mine = {n.removeprefix(f"heads.{k}.").removeprefix("layers.0."): x for n, x in mine.items()}
        assert other.norm is not None
        other.norm.load_state_dict({"weight": mine.pop("norm.weight")})
        other.layers[-1].load_state_dict(mine)
        _, final = other.hidden_states(IDS, drafter.needs)
        logits = drafter.unembed(found[0, :, k], k)
        torch.testing.assert_close(logits, other.logits(final[0, [2, 7]]), atol=1e-9, rtol=1e-9)


def test_parallel_heads_start_as_the_target(target: Target) -> None:
    drafter = MTPHeads.build(MTPHeadsConfig(), target).double()
    drafter.attach(target)
    ctx, final = target.hidden_states(IDS, drafter.needs)
    logits = logits_of(drafter, drafter.hidden(ctx, torch.tensor([[8]]), None)[0])
    wanted = target.logits(final[0, 7]).expand(1, 3, -1)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
