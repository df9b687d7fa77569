"""What an export refuses, and the target that is written beside a draft.

Run alone: pytest tests/formats/test_export.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu
from transformers import AutoModelForCausalLM

from specdec.drafters.medusa import Medusa, MedusaConfig
from specdec.drafters.mlp import MlpConfig
from specdec.drafters.mtp import MTPConfig
from specdec.drafters.ngram import NgramConfig
from specdec.errors import UserError
from specdec.formats import draft_export, export_check
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.tiny import Tiny, random_drafter


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(path=str(tiny.target), dtype="float32", device="cpu"))


def test_a_layout_or_a_family_that_engines_do_not_load(target: Target, tmp_path: Path) -> None:
    medusa = random_drafter(MedusaConfig(depth=2, draft_vocab=None), target, 0.1)
    with pytest.raises(UserError, match="layout 'speculators' of 'medusa' is unknown; known: hf"):
        draft_export.write_export(tmp_path / "out", medusa, target, "speculators")
    with pytest.raises(UserError, match="'ngram' cannot be exported"):
        draft_export.write_export(
            tmp_path / "out", random_drafter(NgramConfig(), target, 0), target
        )
    assert not (tmp_path / "out").exists()


def test_medusa_whose_best_logit_an_engine_would_not_take(target: Target, tmp_path: Path) -> None:
    """Tokens outside a pruned vocabulary have logit 0 in vLLM. With every other logit of a
    hidden state below 0, vLLM would draft one of them."""
    drafter = random_drafter(MedusaConfig(depth=2, draft_vocab=48), target, 0.0, torch.arange(48))
    assert isinstance(drafter, Medusa)
    with torch.no_grad():  # all rows of the head are alike, so at each position all logits are
        head: torch.Tensor = drafter.lm_heads[0].weight  # type: ignore[assignment]
        head.copy_(head[5].expand_as(head))
        head *= -draft_export.short_text_logits(drafter, target)[0, 0].sign()
    assert draft_export.short_text_logits(drafter, target)[0].max() < 0
    with pytest.raises(UserError, match=r"best logit at one place is -.*draft_vocab=null"):
        draft_export.write_export(tmp_path / "out", drafter, target)
    assert not (tmp_path / "out").exists()


def test_a_target_is_written_whole_and_again_but_over_nothing_else(
    target: Target, tmp_path: Path
) -> None:
    for _ in range(2):
        draft_export.write_target(tmp_path / "target", target)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(saved.get_input_embeddings().weight, target.embedding.weight)
    mark = json.loads((tmp_path / "target" / draft_export.MARK).read_text())
    assert mark["drafter"] == "target" and mark["target"] == target.name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not an earlier export"):
        draft_export.write_target(tmp_path / "mine", target)


def test_what_a_user_put_into_an_export_stays(target: Target, tmp_path: Path) -> None:
    """A file that the new export no longer has goes."""
    out, mlp = tmp_path / "out", random_drafter(MlpConfig(depth=2, draft_vocab=48), target, 0.1)
    draft_export.write_export(out, random_drafter(MTPConfig(depth=2), target, 0.1), target)
    (out / "notes.md").write_text("mine")
    assert (out / draft_export.OVERRIDES).exists()
    draft_export.write_export(out, mlp, target)
    assert {path.name for path in out.iterdir()} == {
        *("notes.md", draft_export.WEIGHTS, draft_export.CONFIG, draft_export.MARK),
        draft_export.README,
    }
    mark = json.loads((out / draft_export.MARK).read_text())
    mark["files"].remove(draft_export.README)  # an export of a version that wrote none
    (out / draft_export.MARK).write_text(json.dumps(mark))
    (out / draft_export.README).write_text("my model card")
    draft_export.write_export(out, mlp, target)
    assert (out / draft_export.README).read_text() == "my model card"
    (out / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match="not written by us"):
        draft_export.write_target(out, target)
    assert (out / "tokenizer.json").read_text() == "mine"
    assert (out / "notes.md").read_text() == "mine"
    assert json.loads((out / draft_export.MARK).read_text())["drafter"] == "mlp"


@pytest.mark.parametrize("text", ["[]", '{"drafter": "mt', "null", '{"drafter": "mtp"}'])
def test_a_damaged_mark_is_told_with_its_remedy(target: Target, tmp_path: Path, text: str) -> None:
    out, drafter = tmp_path / "out", random_drafter(MTPConfig(depth=2), target, 0.1)
    draft_export.write_export(out, drafter, target)
    (out / draft_export.MARK).write_text(text)
    with pytest.raises(UserError, match=f"damaged.*; delete {out}, and the same command"):
        draft_export.write_export(out, drafter, target)


@pytest.mark.parametrize(
    ("to", "with_target"), [("s2", "{}/s2"), ("tt/draft", "tt"), ("tt", "tt/x"), ("a/../b", "b")]
)
def test_two_folders_must_be_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, with_target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    folders = [Path(to), Path(with_target.format(tmp_path))]
    with pytest.raises(UserError, match="are the same folder, or one is inside the other"):
        draft_export.require_apart(folders)
    draft_export.require_apart([Path("s2"), Path("s21")])


# What vLLM's loaders look for, by the description alone


def medusa_of(c: dict[str, Any]) -> dict[str, list[int]]:
    """The parameters of vLLM 0.32's medusa.py, `Medusa` and `ResidualBlock`."""
    D, parts = c["hidden_size"], ["weight"] + ["bias"] * c.get("medusa_fc_bias", False)
    layers = [(h, i) for h in range(c["num_heads"]) for i in range(c["num_hidden_layers"])]
    wanted = {
        f"blocks.{h}.layers.{i}.{part}": [D, D][: 2 if part == "weight" else 1]
        for h, i in layers
        for part in parts
    }
    one = c.get("original_lm_head", False)
    heads = ["lm_head"] if one else [f"lm_heads.{h}" for h in range(c["num_heads"])]
    return wanted | {f"{head}.weight": [c["vocab_size"], D] for head in heads}


def mlp_of(c: dict[str, Any]) -> dict[str, list[int]]:
    """The parameters of vLLM 0.32's mlp_speculator.py, whose tied modules have one name,
    except that every depth has a head."""
    assert len(c["top_k_tokens_per_head"]) == c["n_predict"]  # of its config's own
    V, emb_dim, D, n = (
        c["vocab_size"],
        c["emb_dim"],
        c["inner_dim"] or c["emb_dim"],
        c["n_predict"],
    )
    assert n > 1 or not c["tie_weights"]
    count, projections = (1, 2) if c["tie_weights"] else (n, n)
    wanted = {f"proj.{i}.weight": [D, emb_dim if i == 0 else D] for i in range(projections)}
    wanted |= {f"head.{i}.weight": [V, D] for i in range(n)}
    for i in range(count):
        wanted |= {f"emb.{i}.weight": [V, D]}
        wanted |= {f"ln.{i}.weight": [D], f"ln.{i}.bias": [D]}
    return wanted


@pytest.mark.parametrize(
    "config",
    [
        MedusaConfig(depth=2, draft_vocab=48),
        MedusaConfig(depth=3, draft_vocab=None, bias=True, shared_head=False, num_layers=2),
        MlpConfig(depth=3, draft_vocab=48, inner_dim=20),
        MlpConfig(depth=3, draft_vocab=None, tie_weights=True, scale_input=True),
    ],
    ids=str,
)
def test_an_engine_finds_what_it_looks_for_and_nothing_else(
    target: Target, tmp_path: Path, config: Any
) -> None:
    """These loaders drop a tensor of another name and leave a missing one uninitialised, both in
    silence."""
    drafter = random_drafter(config, target, 0.1, torch.arange(2, 50))
    draft_export.write_export(tmp_path / "out", drafter, target)
    described = json.loads((tmp_path / "out" / draft_export.CONFIG).read_text())
    found = {
        n: list(x.shape) for n, x in load_file(tmp_path / "out" / draft_export.WEIGHTS).items()
    }
    if config.name == "mlp":
        assert all(name.startswith("speculator.") for name in found)
        assert described["architectures"] == ["MLPSpeculatorPreTrainedModel"]
        found = {name.replace("speculator.", ""): shape for name, shape in found.items()}
        assert found == mlp_of(described)
    else:
        if described["original_lm_head"]:
            found["lm_head.weight"] = found.pop("lm_heads.0.weight")
        assert found == medusa_of(described)


@pytest.mark.parametrize("tied", [False, True])
def test_the_exported_mlp_drafts_as_vllms_formula(
    target: Target, tmp_path: Path, tied: bool
) -> None:
    """`generate_proposals` of mlp_speculator.py over the file's own tensors: its logits are the
    drafter's on the draft vocabulary, and 0 on the rest."""
    kept = torch.arange(2, 50)
    config = MlpConfig(depth=3, draft_vocab=48, tie_weights=tied, scale_input=tied)
    drafter = random_drafter(config, target, 0.1, kept)
    draft_export.write_export(tmp_path / "out", drafter, target)
    c = json.loads((tmp_path / "out" / draft_export.CONFIG).read_text())
    file = load_file(tmp_path / "out" / draft_export.WEIGHTS)

    def tensor(name: str, i: int, part: str = "weight") -> Tensor:
        return file[f"speculator.{name}.{min(i, 1 if name == 'proj' else 0) if tied else i}.{part}"]

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    ids = torch.arange(3, 35)[None]
    ctx, _ = target.hidden_states(ids, drafter.needs)
    assert ctx.final_BTD is not None
    a, drafted = 17, torch.tensor([[[5, 9]]])
    ours = drafter.hidden(ctx, torch.tensor([[a]]), drafted)[0, 0]
    state = ctx.final_BTD[0, a - 1]
    state = normed(state) / 2**0.5 if c["scale_input"] else state
    state_weight = 0.5 ** (0.5 / c["n_predict"])
    emb_weight = ((1 - state_weight**2) * (c["inner_dim"] / 2)) ** 0.5
    for i, token in enumerate([int(ids[0, a]), 5, 9]):
        mixed = tensor("proj", i) @ state + emb_weight / state_weight * tensor("emb", i)[token]
        state = gelu(tensor("ln", i) * normed(mixed) + tensor("ln", i, "bias"))
        theirs = tensor("head", i) @ state
        torch.testing.assert_close(theirs[kept], drafter.unembed(ours[i], i), atol=1e-4, rtol=1e-4)
        theirs[kept] = 0
        assert not theirs.any()


def test_a_layout_without_a_second_implementation_is_reported_as_not_compared(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new layout, in files of its own, is read back all the same."""

    def save(folder: Path, tensors: Any, config: Any) -> None:
        torch.save({"tensors": tensors, "config": config}, folder / "draft.bin")

    def load(folder: Path) -> Any:
        return torch.load(folder / "draft.bin")["tensors"]

    new = replace(draft_export.LAYOUTS["medusa", "hf"], save=save, load=load)
    monkeypatch.setitem(draft_export.LAYOUTS, ("medusa", "own"), new)
    drafter = random_drafter(MedusaConfig(depth=2), target, 0.1)
    said = draft_export.write_export(tmp_path / "out", drafter, target, "own")
    assert "logits identical; no second implementation of this layout" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("draft.bin", draft_export.MARK, draft_export.README)
    }
    draft_export.write_export(tmp_path / "hf", drafter, target)
    mark = json.loads((tmp_path / "hf" / draft_export.MARK).read_text())
    (tmp_path / "hf" / draft_export.MARK).write_text(json.dumps(mark | {"layout": "own"}))
    with pytest.raises(UserError, match="no second implementation of layout 'own' of 'medusa'"):
        export_check.reference_gap(tmp_path / "hf", drafter, target)
