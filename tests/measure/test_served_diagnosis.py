"""An export carries its reference; scripts/check names what is wrong with a server.

Each fault is planted in the files that the server loads, or in the server. The server drafts by the
second implementation of the network (specdec/formats/exported_network.py), from those files alone.

Run alone: python -m pytest tests/measure/test_served_diagnosis.py (under 90 s)
"""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.context import Context
from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.engines import server_pool
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.formats.exported_network import ExportedNetwork
from specdec.formats.layout import CONFIG, WEIGHTS
from specdec.measure import served
from specdec.measure.reference import FILE, Reference
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine
from tests.tiny import (
    REPOSITORY,
    TEMPLATE,
    WORDS,
    make_tiny,
    make_tokenizer,
    save_target,
)

GAMMA, NEW, BLOCK = 3, 24, 16
LOUD = TEMPLATE.replace("<|im_start|>assistant", "<|im_start|>{% if loud %} {% endif %}assistant")
SETTINGS = [
    *("drafter.depth=3", "drafter.layers=[1,2,3]", "drafter.draft_vocab=40"),
    *("drafter.initialisation=target", "drafter.norm_output=true"),
    *("data.responses=target", "responses.max_new_tokens=24", "data.template_args={loud: true}"),
    *("loop.epochs=30", "loop.eval_every=0", "loop.save_every=0", f"decode.max_new_tokens={NEW}"),
    "decode.prompts=1",
]
Served = Callable[..., FakeEngine]


@dataclass
class Case:
    """A run's export, the target, and other models for the server to load by mistake."""

    folder: Path
    export: Path
    target: Target
    reference: Reference

    @property
    def draft(self) -> Drafter:
        return draft_checkpoint.load_draft(self.folder / "run" / "best", self.target)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Trained on the target's own responses, so that drafts are accepted and faults show."""
    folder = tmp_path_factory.mktemp("check")
    tiny = make_tiny(folder, count=90)
    save_target(tiny.target, template=LOUD)
    save_target(folder / "other", seed=1, template=LOUD)
    tiny.job(folder / "run", "eagle3", *SETTINGS)
    export = folder / "run" / "export"
    target = load_target(TargetConfig(str(tiny.target), "float32", "cpu", packed=False))
    return Case(folder, export, target, Reference.load(export))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "WAITS", (0.01,))
    monkeypatch.setattr(served, "SETTLING", 0.1)


@pytest.fixture
def serve(case: Case) -> Iterator[Served]:
    """Serves what an engine makes of a folder, or a drafter."""
    running = []

    def start(
        draft: Path | Drafter, target: Target = case.target, kind: Any = FakeEngine, **more: Any
    ) -> FakeEngine:
        if isinstance(draft, Path):
            draft = ExportedNetwork(draft, case.reference.draft.empty(), target).eval()
        way = Way(draft, Chain(more.pop("gamma", GAMMA)))
        engine = kind(target, drafts=way, per_request=True, **more)
        engine.template_args = {"loud": True}
        running.append(engine.serving())
        running[-1].__enter__()
        return engine

    yield start
    for engine in running:
        engine.__exit__(None, None, None)


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What scripts/check prints, in this process, and its exit code."""

    def run(export: Path, engine: FakeEngine, *more: str) -> tuple[str, int]:
        script = str(REPOSITORY / "scripts" / "check")
        monkeypatch.setattr(sys, "argv", [script, str(export), "--engine", engine.url, *more])
        monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        out, err = capsys.readouterr()
        assert not err, err
        return out, code

    return run


# The reference


def test_the_reference_is_what_our_decoder_answers_and_accepts(case: Case) -> None:
    reference = case.reference
    assert len(reference.prompts) == 12 and reference.gamma == GAMMA
    assert reference.origin.startswith("the first held-out test prompts")
    assert reference.rendering.arguments == {"loud": True}
    way = Way(case.draft, Chain(GAMMA))
    expected = decode(case.target, reference.prompts, way, max_new_tokens=NEW)
    for response, wanted in zip(expected, reference.responses["float32"], strict=True):
        assert wanted.ids == response.ids and wanted.steps == len(response.steps)
        both = [a + b for a, b in zip(wanted.accepted, wanted.beyond, strict=True)]
        assert both == [sum(s.accepted > k for s in response.steps) for k in range(GAMMA)]
        committed = 1 + wanted.steps + sum(wanted.accepted)
        assert committed >= len(response.ids)  # without what is beyond the end
    assert sum(sum(r.accepted) for r in reference.responses["float32"]) > 60


def test_a_near_tie_is_noted_with_its_gap(case: Case) -> None:
    """By the target's own pass over the text."""
    noted = 0
    for prompt, wanted in zip(
        case.reference.prompts, case.reference.responses["float32"], strict=True
    ):
        logits_TV = case.target.own_logits(torch.tensor([[*prompt, *wanted.ids]]))[0]
        best_T2 = logits_TV.topk(2, -1).values
        gaps = (best_T2[:, 0] - best_T2[:, 1])[len(prompt) - 1 : -1].tolist()
        near = {t: gap for t, gap in enumerate(gaps) if gap < 1}
        assert dict(wanted.near) == pytest.approx(near, abs=2e-3)
        noted += len(near)
    assert noted > 0


def test_an_export_without_or_with_a_damaged_reference_is_told(case: Case, tmp_path: Path) -> None:
    copied = shutil.copytree(case.export, tmp_path / "head")
    path = copied / FILE
    path.write_text(path.read_text().replace('"gamma": 3', '"gamma": 2'))
    with pytest.raises(UserError, match=r"checksum differs.*; export the draft again"):
        Reference.load(copied)
    path.unlink()
    with pytest.raises(UserError, match=r"carries no reference \(reference/reference.json is"):
        Reference.load(copied)
    path.with_name("a.gguf").write_text("no such file")
    with pytest.raises(UserError, match="cannot be read as a GGUF file"):
        Reference.load(path.with_name("a.gguf"))


def test_a_draft_that_is_served_as_exported_passes(case: Case, serve: Served, check: Any) -> None:
    out, code = check(case.export, serve(case.export))
    assert code == 0, out
    assert out.splitlines()[0].startswith("AS EXPORTED: ")
    assert "all 12 responses" in out and "chat template: as in the reference" in out


# Faults in the files that the server loads


def edited(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))


def tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    there = load_file(folder / WEIGHTS)
    save_file({n: x.contiguous() for n, x in (there | change(there)).items()}, folder / WEIGHTS)


def rounded_to_4_bits(x: Tensor) -> Tensor:
    """Blocks of 32: the number of the largest size becomes -8 times the scale, which has 16
    bits."""
    blocks = x.float().reshape(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    steps = (blocks * inverse + 8.5).trunc().clamp(0, 15) - 8
    return (steps * scale.half().float()).reshape(x.shape).to(x)


def quantised(there: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: rounded_to_4_bits(x) for n, x in there.items() if x.dim() == 2}


IN_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "layer ids": (lambda f: edited(f, eagle_aux_hidden_state_layer_ids=[2, 3, 4]), "layer ids"),
    "hidden norm": (
        lambda f: tensors(
            f, lambda x: {"midlayer.hidden_norm.weight": x["midlayer.hidden_norm.weight"] * 0 + 1}
        ),
        "norm",
    ),
    "final norm": (
        lambda f: tensors(f, lambda x: {"norm.weight": torch.ones_like(x["norm.weight"])}),
        "norm",
    ),
    "a setting of norms": (lambda f: edited(f, norm_output=False), "norm"),
    "RoPE": (
        lambda f: edited(f, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "RoPE",
    ),
    "vocabulary map": (
        lambda f: tensors(f, lambda x: {"d2t": x["d2t"] - torch.arange(len(x["d2t"]))}),
        "vocabulary map",
    ),
    "quantised draft": (lambda f: tensors(f, quantised), "quantised draft"),
}


@pytest.mark.parametrize("fault", IN_FILES)
def test_a_fault_in_what_the_server_loads_is_named(
    case: Case, serve: Served, check: Any, tmp_path: Path, fault: str
) -> None:
    plant, culprit = IN_FILES[fault]
    theirs = shutil.copytree(case.export, tmp_path / "theirs")
    plant(theirs)
    out, code = check(case.export, serve(theirs))
    assert (named_in(out), code) == (culprit, 1), out


def named_in(out: str) -> str:
    """The culprit in the verdict."""
    (line,) = [line for line in out.splitlines() if line.startswith(("NOT AS", "AS EXPORTED"))]
    match = re.search(r"/v1: ([^:]+): ", line)
    return match[1] if match else line


# Faults in the export itself


def permuted(folder: Path) -> None:
    """Of the vocabulary map, which then contradicts the set of its tokens."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    place = torch.arange(40)
    tensors(folder, lambda x: {"d2t": (x["d2t"] + place)[order] - place})


def test_a_shuffled_vocabulary_map_is_named(
    case: Case, serve: Served, check: Any, tmp_path: Path
) -> None:
    export = shutil.copytree(case.export, tmp_path / "head")
    permuted(export)
    out, code = check(export, serve(export))
    assert (named_in(out), code) == ("vocabulary map", 1), out
    assert "exactly" in out


def test_the_key_of_an_edited_config_is_named(
    case: Case, serve: Served, check: Any, tmp_path: Path
) -> None:
    export = shutil.copytree(case.export, tmp_path / "head")
    edited(export, eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    out, code = check(export, serve(export))
    assert (named_in(out), code) == ("layer ids", 1), out
    assert "eagle_aux_hidden_state_layer_ids is [2, 3, 4], where the export had [1, 2, 3]" in out


# What the server loaded in place of something


def test_a_stale_head_is_named(case: Case, serve: Served, check: Any, tmp_path: Path) -> None:
    """Of an earlier draft."""
    earlier, theirs = case.draft, shutil.copytree(case.export, tmp_path / "theirs")
    head: Tensor = earlier.get_parameter("lm_head.weight")
    with torch.no_grad():
        head += 0.5 * head.std() * torch.randn(head.shape, generator=torch.manual_seed(3))
    draft_checkpoint.write_draft(tmp_path / "earlier", earlier, case.target)
    tensors(theirs, lambda x: {"lm_head.weight": head.detach()})
    engine = serve(theirs)
    out, code = check(case.export, engine, "--suspect", str(tmp_path / "earlier"))
    assert (named_in(out), code) == ("stale head", 1), out
    out, code = check(case.export, engine)  # nothing that is tried explains it
    assert (named_in(out), code) == ("none", 1), out


def test_a_stale_embedding_is_named(case: Case, serve: Served, check: Any, tmp_path: Path) -> None:
    """Of another target, as if the target had been trained further since."""
    other = load_target(TargetConfig(str(case.folder / "other"), "float32", "cpu"))
    theirs = shutil.copytree(case.export, tmp_path / "theirs")
    tensors(theirs, lambda x: {"embed_tokens.weight": other.embedding.weight.detach().clone()})
    out, code = check(case.export, serve(theirs), "--suspect", other.name)
    assert (named_in(out), code) == ("stale embedding", 1), out


# Faults of the server


def test_another_number_of_drafted_tokens_is_named(case: Case, serve: Served, check: Any) -> None:
    out, code = check(case.export, serve(case.export, gamma=2))
    assert (named_in(out), code) == ("γ", 1), out
    assert "the server drafts 2 tokens a step, not 3" in out


def test_bfloat16_is_named_and_passes(case: Case, serve: Served, check: Any) -> None:
    name = case.target.name
    target = load_target(TargetConfig(name, "bfloat16", "cpu", packed=False))
    draft = draft_checkpoint.load_draft(case.folder / "run" / "best", target)
    out, code = check(case.export, serve(draft, target))
    assert (named_in(out), code) == ("dtype", 0), out


class Forgetful(ExportedNetwork):
    """A draft that does not see the blocks of a prompt that the server had read before."""

    blind = 0

    def hidden(self, ctx: Context, anchors_BA: Tensor, drafted_BAK: Tensor | None) -> Tensor:
        cut, start = Context(ctx.ids_BT[:, self.blind :]), self.blind
        if ctx.layers_BTF is not None:
            cut.layers_BTF = ctx.layers_BTF[:, start:]
        if ctx.final_BTD is not None:
            cut.final_BTD = ctx.final_BTD[:, start:]
        return super().hidden(cut, anchors_BA - start, drafted_BAK)


class CachingEngine(FakeEngine):
    """It keeps what it has read, unless a salt says otherwise."""

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        known = [p["prompt"] for p in self.asked[:-1] if "cache_salt" not in p]
        kept = body["prompt"] in known and "cache_salt" not in body
        assert self.drafts is not None and isinstance(self.drafts.drafter, Forgetful)
        self.drafts.drafter.blind = (len(body["prompt"]) - 1) // BLOCK * BLOCK if kept else 0
        return super().completion(body)


def test_prefix_caching_is_named(case: Case, serve: Served, check: Any) -> None:
    """The first replay passes, the second does not."""
    draft = Forgetful(case.export, case.reference.draft.empty(), case.target).eval()
    engine = serve(draft, kind=CachingEngine)
    for _ in range(2):  # the second time, its cache is warm from the start
        out, code = check(case.export, engine)
        assert (named_in(out), code) == ("prefix caching", 1), out


def test_another_target_is_named(case: Case, serve: Served, check: Any) -> None:
    other = load_target(TargetConfig(str(case.folder / "other"), "float32", "cpu"))
    engine = serve(case.export, other)
    for more in ((), ("--suspect", other.name)):
        out, code = check(case.export, engine, *more)
        assert (named_in(out), code) == ("another target", 1), out
        assert (f"tokens are those of {other.name}" in out) == bool(more)


def test_another_tokenizer_and_other_template_arguments_are_named(
    case: Case, serve: Served, check: Any
) -> None:
    engine = serve(case.export)
    engine.template_args = {}
    out, code = check(case.export, engine)
    assert (named_in(out), code) == ("template", 1), out
    assert "without arguments of the template" in out
    engine.tokenizer = make_tokenizer(LOUD, words=WORDS[::-1])
    out, code = check(case.export, engine)
    assert (named_in(out), code) == ("another tokenizer", 1), out


def test_mistakes_are_told(case: Case, serve: Served, check: Any) -> None:
    engine = serve(case.export, gamma=2)
    with pytest.raises(AssertionError, match="error: --engine=nowhere: give an engine's address"):
        engine.url = "nowhere"
        check(case.export, engine)
