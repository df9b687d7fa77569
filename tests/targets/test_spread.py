"""A target whose layers are on several devices, or on disk, is the same target.

Run alone: python -m pytest tests/targets/test_spread.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.targets.loading import TargetLoader, load_target
from specdec.targets.spread import device_map
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.targets.test_recurrent_states import model_of
from tests.tiny import make_tokenizer, random_drafter, save_target


def config_of(folder: Path, tmp_path: Path, **more: object) -> TargetConfig:
    cfg = TargetConfig(str(folder), "float32", "cpu", cache=str(tmp_path / "cache"))
    return replace(cfg, **more)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_target(tmp_path / "target", layers=6)


@pytest.fixture
def whole(folder: Path, tmp_path: Path) -> Target:
    return load_target(config_of(folder, tmp_path))


@pytest.fixture
def cfg(folder: Path, tmp_path: Path, whole: Target) -> TargetConfig:
    """Room for the parts and about half of the layers; the others stay on disk."""
    sizes = [sum(x.nbytes for x in layer.parameters()) for layer in whole.layers]
    own = sum(x.nbytes for x in whole.model.parameters()) - sum(sizes)
    room = own + 9 * max(sizes) // 2
    return config_of(folder, tmp_path, device_map="auto", max_memory={"cpu": str(room)})


def test_a_target_on_disk_is_the_whole_one(cfg: TargetConfig, whole: Target) -> None:
    target = load_target(cfg)
    places = [target.model.hf_device_map[f"{target.prefix}.{k}"] for k in range(6)]
    assert places == ["cpu"] * 3 + ["disk"] * 3  # room for one more passes through memory
    offloaded = [any(x.is_meta for x in layer.parameters()) for layer in target.layers]
    assert offloaded == [place == "disk" for place in places]
    assert target.device.type == "cpu" and not target.embedding.weight.is_meta
    assert target.fingerprint() == whole.fingerprint() and target.checksum() == whole.checksum()
    needs, ids = HiddenStateSpec(layers=(2, 5), final_hidden=True), torch.arange(1, 20)[None]
    for found, right in zip(
        target.hidden_states(ids, needs), whole.hidden_states(ids, needs), strict=True
    ):
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, right)
        else:
            torch.testing.assert_close(found.layers_BTF, right.layers_BTF)
    for k in (0, -1):
        theirs = whole.layer(k)
        assert theirs.keys() == target.layer(k).keys()
        assert all(torch.equal(x, theirs[name]) for name, x in target.layer(k).items())
    cut, right_cut = target.cut([0, 5]), whole.cut([0, 5])
    assert cut.keys() == right_cut.keys()
    assert all(torch.equal(x, right_cut[name]) for name, x in cut.items())


@pytest.mark.parametrize("family", ["eagle3", "dflash", "lm"])
def test_a_draft_decodes_with_it(
    family: str, cfg: TargetConfig, whole: Target, tmp_path: Path
) -> None:
    """A draft starts from it, is kept, and drafts with either; batches of unequal rows too."""
    target = load_target(cfg)
    drafter = random_drafter(DRAFTERS[family].Config(), target, 0.1)
    draft_checkpoint.write_draft(tmp_path / "draft", drafter, target)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
    right = [generate(whole, p, max_new_tokens=16, eos=()).ids for p in prompts]
    for each in (target, whole):
        again = draft_checkpoint.load_draft(tmp_path / "draft", each)
        made = decode(each, prompts, Way(again), max_new_tokens=16, eos=())
        assert [g.ids for g in made] == right and all(g.steps for g in made)


def test_a_job_loads_it_in_parts_and_in_whole(cfg: TargetConfig, whole: Target) -> None:
    job = TargetLoader(cfg)
    assert job.whole().fingerprint() == whole.fingerprint()
    job.release()
    assert not len(job.parts.layers) and job.parts.fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_its_fingerprint_does_not_depend_on_its_numbers(
    dtype: str, cfg: TargetConfig, whole: Target
) -> None:
    assert load_target(replace(cfg, dtype=dtype)).fingerprint() == whole.fingerprint()


def test_layers_are_shared_by_gpus_evenly_and_then_go_to_memory_and_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By arithmetic alone: no GPU is asked for."""
    shape = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=12)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    layer = sum(2 * x.numel() for x in model.model.layers[0].parameters())
    parts = sum(2 * x.numel() for x in model.parameters()) - 12 * layer
    first, dtype = torch.device("cuda", 0), torch.bfloat16

    def places(**memory: int) -> list[int | str]:
        given = {name.lstrip("_"): str(size) for name, size in memory.items()}
        found = device_map(model, 12, first, dtype, given)
        around = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
        assert {found[name] for name in around} == {0}
        return [found[f"model.layers.{k}"] for k in range(12)]

    large = 100 * layer + parts
    assert places(_0=large) == [0] * 12
    spread = places(_0=large, _1=large, _2=large)
    assert spread == sorted(spread, key=str) and {spread.count(k) for k in (0, 1, 2)} <= {3, 4, 5}
    kept = 7 * layer // 2 + parts
    assert places(_0=kept, cpu=4 * layer) == [0] * 2 + ["cpu"] * 4 + ["disk"] * 6
    with pytest.raises(UserError, match="do not fit on 0"):
        places(_0=parts)
    small = device_map(model, 12, first, dtype, {0: str(kept), "cpu": str(4 * layer)}, itemsize=0.5)
    assert [small[f"model.layers.{k}"] for k in range(12)].count(0) > 9, "as for weights of 16 bits"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"device_map": "balanced"}, "target.device_map"),
        ({"max_memory": {"cpu": "1GB"}}, "only with target.device_map=auto"),
        ({"device_map": "auto", "max_memory": {"cpu": "plenty"}}, "target.max_memory"),
        ({"device_map": "auto", "max_memory": {"0": "1GB"}}, "leaves out 'cpu'"),
        ({"device_map": "auto", "max_memory": {"cpu": "1KB"}}, "do not fit"),
    ],
)
def test_what_cannot_be_is_refused(
    more: dict[str, object], said: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        load_target(config_of(folder, tmp_path, **more))


def test_one_process_only(cfg: TargetConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start one process"):
        load_target(cfg)


def test_layers_with_states_are_not_spread(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "states", make_tokenizer()
    model = model_of("lfm2", vocab_size=len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    room = {"cpu": str(sum(x.nbytes for x in model.parameters()) * 9 // 10)}
    with pytest.raises(UserError, match=r"target.device_map is not supported for such layers"):
        load_target(config_of(folder, tmp_path, device_map="auto", max_memory=room))
