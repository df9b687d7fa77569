"""Other people's drafts: read, measured by a second implementation of their network, trained, and
written back as they came.

Run alone: python -m pytest tests/formats/test_import.py
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from torch.nn.functional import linear

from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.formats import (
    draft_checkpoint,
    draft_export,
    draft_import,
    export_check,
    foreign_files,
)
from specdec.formats.layout import CONFIG, MARK
from specdec.formats.reference_networks import REFERENCE_NETWORKS, CheckText
from specdec.measure.export_differences import state_of_export
from specdec.measure.reference import FILE, Reference, expected_responses
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.drafters.families import make_target
from tests.processes import process, script_module
from tests.public_drafts import PUBLIC, Files, write_public
from tests.tiny import Tiny, compose, train
from train.export_reference import add_reference

PICKLED = {"EAGLE-3": "pytorch_model.bin", "EAGLE-1": "pytorch_model.bin"}
PICKLED |= {"EAGLE-1 with a bias": "pytorch_model.bin", "Medusa": "medusa_lm_head.pt"}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def written(folder: Path, name: str, target: Target) -> tuple[Path, Files]:
    files = PUBLIC[name](target)
    return write_public(folder, files, PICKLED.get(name, "model.safetensors")), files


@pytest.mark.parametrize("name", PUBLIC)
def test_a_draft_is_read_and_written_back_as_it_came(
    target: Target, tmp_path: Path, name: str
) -> None:
    """Every tensor has its name, its type and its bits again, and the config its keys."""
    folder, (config, tensors) = written(tmp_path / "theirs", name, target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    said = draft_export.write_export(tmp_path / "back", drafter, target)
    assert f"{len(tensors)} tensors read back, identical" in said
    (path,) = (tmp_path / "back").glob("*.safetensors")
    back = load_file(path)
    assert back.keys() == tensors.keys()
    for key, x in tensors.items():
        assert back[key].dtype == x.dtype and torch.equal(back[key], x), key
    assert json.loads((tmp_path / "back" / CONFIG).read_text()) == config


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_of_a_trained_import_is_that_of_its_files(
    target: Target, tmp_path: Path, name: str
) -> None:
    """Whose weights are rounded to the types in which they came."""
    folder, _ = written(tmp_path / "theirs", name, target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    trained = [x for x in drafter.parameters() if x.requires_grad]
    with torch.no_grad():
        for x in trained:
            x.mul_(1.1)
    export, layout = tmp_path / "back", draft_export.default_layout(drafter)
    draft_export.write_export(export, drafter, target)
    prompts = [[5, 7, 9, 11]] * 4
    assert "with a reference" in add_reference(export, drafter, target, layout, prompts, "made up")
    reference = Reference.load(export)
    state = state_of_export(export, reference, target)
    assert state.intact and not state.differences, state.differences
    assert isinstance(state.draft, Drafter)
    again = expected_responses(state.draft, target, reference.prompts, reference.max_new_tokens)
    assert again == reference.responses["float32"]
    draft_export.write_export(export, draft_checkpoint.load_draft(folder, target), target)
    draft_export.add_to_export(export, {FILE: reference.json})
    changed = state_of_export(export, Reference.load(export), target)
    assert not changed.intact and changed.differences


# no engine's network is built for these: Medusa and dspark are compared below, speculators' DFlash
# is the network of z-lab's, and tests/drafters/test_block.py compares the parts of DFlash 2
WITHOUT_NETWORK = {"Medusa", "speculators, DFlash", "z-lab, DFlash 2"}
WITHOUT_NETWORK |= {"DeepSpec, DSpark", "SpecForge, DSpark", "speculators, DSpark"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_draft_is_the_network_that_its_config_describes(
    target: Target, tmp_path: Path, name: str
) -> None:
    """`reference_networks.py` builds it from their files alone, as engines do."""
    folder, _ = written(tmp_path / "theirs", name, target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    known = drafter.config.name, drafter.origin.layout
    assert (known not in REFERENCE_NETWORKS) == (name in WITHOUT_NETWORK)
    if name in WITHOUT_NETWORK:
        return
    draft_export.write_export(tmp_path / "back", drafter, target)
    trial = CheckText.drawn_for(drafter, target)
    assert export_check.reference_gap(tmp_path / "back", drafter, target, trial) < 1e-4
    mark = json.loads((tmp_path / "back" / MARK).read_text())
    assert (mark["drafter"], mark["layout"]) == known


def test_the_authors_medusa_computes_their_formula(target: Target, tmp_path: Path) -> None:
    """x + SiLU(W x + b) twice, then the head's own LM head (medusa_model.py)."""
    folder, (_, tensors) = written(tmp_path / "theirs", "Medusa", target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    trial = CheckText.drawn_for(drafter, target)
    ours = export_check.drafter_logits(drafter, target, trial).view(2, len(trial.anchors), -1)
    for h in range(2):
        for at, anchor in enumerate(trial.anchors):
            x = trial.state(-1)[anchor - 1]
            for i in range(2):
                of_layer = (
                    tensors[f"{h}.{i}.linear.{part}"].float() for part in ("weight", "bias")
                )
                x = x + torch.nn.functional.silu(linear(x, *of_layer))
            theirs = linear(x, tensors[f"{h}.2.weight"].float())
            torch.testing.assert_close(ours[h, at], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["DeepSpec, DSpark", "SpecForge, DSpark", "speculators, DSpark"])
def test_dspark_is_a_block_whose_first_slot_predicts_with_a_markov_head(
    target: Target, tmp_path: Path, name: str
) -> None:
    """The block alone is DFlash's with one slot more, read by the reference network of `dflash`;
    depth k adds W2 W1[token before] (DeepSpec: markov_head.py)."""
    folder, (_, tensors) = written(tmp_path / "theirs", name, target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    trial = CheckText.drawn_for(drafter, target)
    ours = export_check.drafter_logits(drafter, target, trial)
    ours = ours.view(trial.depths, len(trial.anchors), -1)
    with torch.no_grad():
        drafter.markov_w2.weight.zero_()  # type: ignore[union-attr]
    bare = export_check.drafter_logits(drafter, target, trial).view_as(ours)
    kept = draft_checkpoint.read_draft(folder, target).vocab_S  # type: ignore[attr-defined]
    kept = torch.arange(target.vocab_size) if kept is None else kept
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"].float() for i in (1, 2))
    for k in range(trial.depths):
        for at, anchor in enumerate(trial.anchors):
            bias = w2 @ w1[int(trial.ids_T[anchor + k])]
            torch.testing.assert_close(
                ours[k, at, kept], bare[k, at, kept] + bias, atol=1e-4, rtol=1e-4
            )


def test_dflash2_drafts_among_its_candidates(target: Target, tmp_path: Path) -> None:
    """Of each slot, the 16 likeliest tokens before the selector."""
    folder, _ = written(tmp_path / "theirs", "z-lab, DFlash 2", target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    trial = CheckText.drawn_for(drafter, target)
    assert export_check.drafter_logits(drafter, target, trial).isfinite().sum(-1).eq(16).all()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_draft_decodes_losslessly(target: Target, tmp_path: Path, name: str) -> None:
    folder, _ = written(tmp_path / "theirs", name, target)
    drafter = draft_checkpoint.load_draft(folder, target)
    prompts = [[5, 9, 30], [7, 8]]
    plain = decode(target, prompts, None, max_new_tokens=6)
    drafted = decode(target, prompts, Way(drafter, Chain(2)), max_new_tokens=6)
    assert [x.ids for x in plain] == [x.ids for x in drafted]


def changed(target: Target, name: str, **keys: Any) -> Files:
    config, tensors = PUBLIC[name](target)
    return config | keys, tensors


@pytest.mark.parametrize(
    "name, keys, words",
    [
        ("SpecForge", {"attention_bias": True}, "attention_bias is true: expected false"),
        ("SpecForge", {"hidden_act": "gelu"}, 'hidden_act is "gelu": expected "silu"'),
        ("SpecForge", {"vocab_size": 64}, "vocab_size is 64, but"),
        ("SpecForge", {"moe_layers": 3}, "moe_layers is 3: expected no such key"),
        ("SpecForge", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.type is"),
        ("SpecForge", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is null"),
        ("SpecForge", {"sliding_window": 512}, "sliding_window is 512"),
        ("SpecForge", {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ("SpecForge", {"draft_vocab_size": 41}, "draft_vocab_size is 41: expected the length"),
        ("SpecForge", {"intermediate_size": 24}, "tensor 'midlayer.mlp."),
        ("SpecForge", {"norm_before_fc": True}, "tensor 'input_norm.weight' is missing"),
        ("SpecForge", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "'fc.weight' has shape"),
        (
            "SpecForge",
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 99]},
            "drafter.layers=[1, 2, 99]",
        ),
        ("SpecForge", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ("SpecForge", {"num_hidden_layers": 2}, "tensor 'layers.1."),
        ("speculators", {"norm_before_fc": False}, "'input_norm.weight' does not belong"),
        ("Model-Optimizer", {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm"),
        ("z-lab, DFlash", {"layer_types": ["sliding_attention"] * 2}, "layer_types is"),
        ("z-lab, DFlash", {"block_size": 1}, "block_size is 1: expected more than 1"),
        ("z-lab, DFlash", {"logit_scale": 3.0}, "logit_scale is 3.0: expected that of"),
        ("speculators, DFlash", {"logit_scale": 3.0}, "logit_scale is 3.0: expected that of"),
        ("z-lab, DFlash 2", {"is_causal": True}, "is_causal is true"),
        ("DeepSpec, DSpark", {"markov_head_type": "gated"}, 'markov_head_type is "gated"'),
        ("DeepSpec, DSpark", {"mask_token_id": 10**6}, "mask_token_id is 1000000"),
        ("Medusa", {"medusa_num_heads": 3}, "2.weight' is missing"),
        ("EAGLE-1", {"num_hidden_layers": 2}, "num_hidden_layers is 2: expected 1"),
        (
            "speculators",
            {"speculators_model_type": "hydra"},
            "holds no draft in a layout that is read",
        ),
    ],
)
def test_what_is_not_our_network_is_named(
    target: Target, tmp_path: Path, name: str, keys: dict[str, Any], words: str
) -> None:
    folder = write_public(tmp_path / "theirs", changed(target, name, **keys))
    with pytest.raises(UserError) as caught:
        draft_checkpoint.read_draft(folder, target)
    assert words in str(caught.value) and str(folder) in str(caught.value)


def test_a_head_that_is_not_the_targets_is_rejected(target: Target, tmp_path: Path) -> None:
    config, tensors = PUBLIC["DeepSpec, DSpark"](target)
    tensors["lm_head.weight"][3, 0] += 1
    folder = write_public(tmp_path / "theirs", (config, tensors))
    with pytest.raises(UserError, match=r"tensor 'lm_head.weight' is not that of"):
        draft_checkpoint.read_draft(folder, target)


def test_another_layout_is_written_on_request(target: Target, tmp_path: Path) -> None:
    """An EAGLE-3 draft of SpecForge for vLLM's self-describing format."""
    folder, (_, tensors) = written(tmp_path / "theirs", "SpecForge", target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    draft_export.write_export(tmp_path / "out", drafter, target, "speculators")
    back = load_file(tmp_path / "out" / "model.safetensors")
    kept = back["layers.0.hidden_norm.weight"].bfloat16()
    assert torch.equal(kept, tensors["midlayer.hidden_norm.weight"])
    again = draft_checkpoint.load_draft(tmp_path / "out", target, torch.float32)
    trial = CheckText.drawn_for(drafter, target)
    logits = [export_check.drafter_logits(d, target, trial) for d in (drafter, again)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    "name, setting",
    [("z-lab, DFlash 2", "candidates=null"), ("speculators", "own_embedding=false")],
)
def test_a_draft_that_llama_cpp_runs_otherwise_is_rejected(
    target: Target, tmp_path: Path, name: str, setting: str
) -> None:
    folder, _ = written(tmp_path / "theirs", name, target)
    drafter = draft_checkpoint.load_draft(folder, target, torch.float32)
    with pytest.raises(UserError, match=f"train with drafter.{setting}"):
        draft_export.write_export(tmp_path / "out.gguf", drafter, target, "gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.fixture
def on_hub(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Files]]:
    """Two revisions of a draft in the hub's cache, without a connection."""
    foreign_files._downloaded.cache_clear()
    repository, commits = tmp_path / "models--them--draft", {"main": "a" * 40, "v2": "b" * 40}
    made = {}
    for (name, commit), seed in zip(commits.items(), (0, 1), strict=True):
        config, tensors = PUBLIC["Model-Optimizer"](target)
        made[name] = config, {n: x + seed for n, x in tensors.items()}
        write_public(repository / "snapshots" / commit, made[name])
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    yield made
    foreign_files._downloaded.cache_clear()


def test_a_draft_of_the_hub_is_read_at_its_revision(target: Target, on_hub: Any) -> None:
    for named, revision in (("them/draft", "main"), ("them/draft@v2", "v2")):
        drafter = draft_checkpoint.load_draft(Path(named), target, torch.float32)
        _, tensors = on_hub[revision]
        assert torch.equal(drafter.state_dict()["fc.weight"], tensors["fc.weight"].float())
    with pytest.raises(UserError, match="them/draft@v3: there is no such folder, and"):
        draft_checkpoint.load_draft(Path("them/draft@v3"), target)


def test_the_own_module_of_a_target_is_read_at_the_revision_of_the_target(on_hub: Any) -> None:
    over = ["drafter=eagle3", "target=model", "target.path=them/draft", "drafter.from=them/draft"]
    cfg = compose([*over, "data.path=x", "target.revision=v2"])
    assert cfg.initialisation.draft == "them/draft@v2"
    assert compose([*over, "data.path=x"]).initialisation.draft == "them/draft"


def test_a_module_of_a_checkpoint_on_a_hub_names_its_target_at_that_revision() -> None:
    files: Any = SimpleNamespace(config={})
    for named, expected in (
        ("them/model@refs/pr/1", ("them/model", "refs/pr/1")),
        ("them/model", ("them/model", None)),
        ("/models/them", ("/models/them", None)),
    ):
        module = draft_import.ForeignDraft(named, files, "mtp", "deepseek", {}, {})
        assert module.of_target == expected


def test_a_local_file_is_never_asked_for_on_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign_files, "_downloaded", lambda on_hub: pytest.fail(str(on_hub)))
    assert not draft_import.is_draft_alone(Path("models/base.gguf"))
    assert not draft_import.is_foreign(Path("models/typo"))
    with pytest.raises(UserError, match="models/typo@x/best: there is no such folder"):
        foreign_files.local_folder("models/typo@x/best")


def test_reports_on_drafts_of_a_hub_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluate = script_module("evaluate", monkeypatch)
    for named, folder in (("them/a", "a"), ("them/a@v2", "a-v2"), ("them/a@refs/1", "a-refs-1")):
        assert evaluate.out_of_foreign(Path(named)) == Path(f"runs/imported-{folder}")


# through the commands


@pytest.fixture(scope="module")
def tiny_target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(path=str(tiny.target), dtype="float32", device="cpu"))


@pytest.mark.parametrize("name, family", [("Model-Optimizer", "eagle3"), ("Medusa", "medusa")])
def test_training_goes_on_from_a_draft_and_writes_it_as_it_came(
    tiny: Tiny, tiny_target: Target, tmp_path: Path, name: str, family: str
) -> None:
    """The run takes the shape of the network from the files; its export has their names."""
    config, tensors = PUBLIC[name](tiny_target)
    if "eagle_config" in config:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    weights = PICKLED.get(name, "model.safetensors")
    folder = write_public(tmp_path / "theirs", (config, tensors), weights)
    over = [x for x in tiny.overrides(family) if not x.startswith("drafter.")]
    cfg = compose([*over, f"drafter.from={folder}", "loop.epochs=1"])
    assert cfg.export == ("hf" if family == "eagle3" else "authors")
    train.run(cfg, tmp_path / "run")
    (path,) = (tmp_path / "run" / "export").glob("*.safetensors")
    back = load_file(path)
    assert back.keys() == tensors.keys()
    moved = [n for n, x in back.items() if x.is_floating_point() and not torch.equal(x, tensors[n])]
    assert len(moved) > len(back) // 2
    assert all(back[n].dtype == x.dtype and back[n].shape == x.shape for n, x in tensors.items())
    assert json.loads((tmp_path / "run" / "export" / CONFIG).read_text()) == config
    card = draft_checkpoint.read_card(tmp_path / "run" / "best")
    assert card.origin is not None and card.origin.source == str(folder)
    # and from that draft again, without any settings of the network
    again = compose([*over, f"drafter.from={tmp_path / 'run' / 'best'}", "loop.epochs=1"])
    assert replace(again.drafter, depth=1) == replace(cfg.drafter, depth=1)


def test_a_setting_that_the_draft_decides_otherwise_is_named(
    tiny: Tiny, tiny_target: Target, tmp_path: Path
) -> None:
    folder = write_public(tmp_path / "theirs", PUBLIC["Medusa"](tiny_target))
    with pytest.raises(
        UserError, match=r"drafter.num_layers=4: the draft of drafter.from=.* has 2"
    ):
        tiny.config("medusa", "drafter.num_layers=4", "drafter.depth=2", f"drafter.from={folder}")


def test_the_layout_of_the_export_is_the_asked_one(
    tiny: Tiny, tiny_target: Target, tmp_path: Path
) -> None:
    """It is that of the draft only where none is asked for."""
    folder = write_public(tmp_path / "theirs", PUBLIC["Medusa"](tiny_target))
    over = [x for x in tiny.overrides("medusa") if not x.startswith("drafter.")]
    for asked, found in (
        ([], "authors"),
        (["export=authors"], "authors"),
        (["export=hf"], "hf"),
        (["export=null"], None),
    ):
        assert compose([*over, f"drafter.from={folder}", *asked]).export == found
    with pytest.raises(UserError, match=r"^export=gguf: no medusa draft .*\(authors\)"):
        compose([*over, f"drafter.from={folder}", "export=gguf"])
    assert compose(over).export == "hf"


def test_another_family_is_named(tiny: Tiny, tiny_target: Target, tmp_path: Path) -> None:
    folder = write_public(tmp_path / "theirs", PUBLIC["Medusa"](tiny_target))
    with pytest.raises(UserError, match="is a draft of the family medusa: give drafter=medusa"):
        tiny.job(tmp_path / "run", "eagle3", f"drafter.from={folder}")
    assert not (tmp_path / "run").exists()


def test_scripts_measure_and_export_a_draft_as_it_is(
    tiny: Tiny, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_public(tmp_path / "theirs", PUBLIC["SpecForge"](tiny_target))
    (tmp_path / "prompts.txt").write_text("the cat\nwhy is the sky blue\n")
    how = [str(folder), "--target", str(tiny.target)]
    asked = ["--prompts", str(tmp_path / "prompts.txt"), "--dtype", "float32"]
    few = ["--max-new-tokens", "6", "--timed", "1", "--temperatures", "0"]
    out = ["--out", str(tmp_path / "report")]
    ended = process(["scripts/evaluate", *how, *asked, *few, *out])
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "report" / "report.md").exists()
    ended = process(["scripts/export", *how, "--to", str(tmp_path / "back")])
    assert ended.returncode == 0 and "in the layout that they came in" in ended.stdout
    ended = process(["scripts/evaluate", str(folder), *asked])
    assert ended.returncode == 2 and "does not say which target it is for" in ended.stderr
    ended = process(
        ["scripts/evaluate", *how, *asked, *few, *out, "--calibrate", "1", "--limit", "1"]
    )
    assert ended.returncode == 2 and "its folder is not changed" in ended.stderr
    assert "measures on" not in ended.stdout  # it is rejected before anything is generated


def test_every_layout_of_the_documents_is_read() -> None:
    """docs/serving.md has a row for each family and layout."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = page.split("## Other people's drafts")[1].split("\n## ")[0]
    for family, layout in draft_import.IMPORTS:
        rows = [x for x in table.splitlines() if f"| `{family}` " in x and f"`{layout}`" in x]
        assert rows, (family, layout)
