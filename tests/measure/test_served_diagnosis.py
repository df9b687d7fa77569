"""An export carries its reference; scripts/check names what is wrong with a server.

Each fault is planted in the files that the server loads, or in the server. The server drafts by the
second implementation of the network (specdec/formats/exported_network.py), from those files alone.

Run alone: python -m pytest tests/measure/test_served_diagnosis.py (under 90 s)
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specdec.context import Context
from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters import Drafter
from specdec.drafters.base import Predictor
from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.layers import RMSNorm
from specdec.drafters.medusa import MedusaConfig
from specdec.drafters.ngram import NgramConfig
from specdec.engines import server_pool
from specdec.errors import UserError
from specdec.formats import draft_checkpoint, draft_export
from specdec.formats.exported_network import ExportedNetwork
from specdec.formats.layout import CONFIG, WEIGHTS
from specdec.formats.reference_networks import DFlashLayers
from specdec.measure import served
from specdec.measure.export_differences import state_of_export
from specdec.measure.hypotheses import accepted_along
from specdec.measure.reference import FILE, Reference, ReferenceResponse
from specdec.measure.reference_replay import AcceptedRange
from specdec.runtime.cpu import machine_probes
from specdec.runtime.cpu.machine_probes import DtypeChoice
from specdec.sampling.trees import Chain
from specdec.targets import loading
from specdec.targets.loading import load_target
from specdec.targets.prompt_rendering import PromptRendering
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests import engine as fake_engine
from tests.engine import FakeEngine
from tests.public_drafts import PUBLIC, write_public
from tests.tiny import (
    LAYERS,
    TEMPLATE,
    WORDS,
    architectures,
    conversations,
    make_tokenizer,
    random_drafter,
    save_target,
)
from train import export_reference
from train.export_reference import add_reference

GAMMA, NEW, BLOCK, COUNT = 3, 24, 16, 6
STEPS = 90  # of training: most tokens are then accepted, however the machine rounds
LOUD = TEMPLATE.replace("<|im_start|>assistant", "<|im_start|>{% if loud %} {% endif %}assistant")
ORIGIN = "made-up chats"
EAGLE3 = Eagle3Config(depth=GAMMA, layers=[1, 2, 3], draft_vocab=40, norm_output=True)
DFLASH = DFlashConfig(depth=GAMMA, draft_vocab=40)
GGUF = Eagle3Config(depth=GAMMA, layers=[1, 2, 3], draft_vocab=40)
MEDUSA = MedusaConfig(depth=GAMMA, draft_vocab=40)
Served = Callable[..., FakeEngine]


@dataclass
class Case:
    """A draft, its export, and its target."""

    folder: Path
    export: Path
    target: Target
    reference: Reference

    @property
    def draft(self) -> Drafter:
        return draft_checkpoint.load_draft(self.folder / "best", self.target)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The draft has learnt the target's responses to these prompts, so that it is accepted, and
    faults show."""
    folder = tmp_path_factory.mktemp("check")
    path = save_target(folder / "target", template=LOUD)
    save_target(folder / "other", seed=1, template=LOUD)
    target = load_target(TargetConfig(str(path), "float32", "cpu", packed=False))
    target.render_prompts_with(PromptRendering({"loud": True}))
    prompts = [
        target.tokenizer.apply_chat_template(
            chat["messages"][:1], add_generation_prompt=True, return_dict=False, loud=True
        )
        for chat in conversations(COUNT)
    ]
    export = exported(folder, target, prompts, EAGLE3)
    return Case(folder, export, target, Reference.load(export))


def learnt(target: Target, prompts: list[list[int]], config: Any = EAGLE3) -> Predictor:
    """A draft after some training on the target's responses."""
    responses = decode(target, prompts, Way(), max_new_tokens=NEW)
    counts = torch.bincount(torch.tensor([i for r in responses for i in r.ids]))
    vocab_S = counts.topk(40).indices.sort().values
    draft = random_drafter(config, target, 0.02, vocab_S).train()
    assert isinstance(draft, Predictor)
    norms = [(name, m) for name, m in draft.named_modules() if isinstance(m, RMSNorm)]
    keys = [name for name, _ in norms if name.endswith("k_norm")]
    with torch.no_grad():  # weights of norms that differ from 1, so that their absence shows
        for name, norm in norms:
            shift = keys.index(name) if name in keys else 0  # those of two layers differ
            norm.weight *= 1 + (torch.arange(len(norm.weight)) + shift) % 3
    places = torch.arange(target.vocab_size)
    if draft.vocab_S is not None:
        places = torch.full_like(places, -100).index_copy(0, draft.vocab_S, torch.arange(40))
    batches = []
    for response in responses:
        ids_1T = torch.tensor([[*response.prompt, *response.ids]])
        ctx, _ = target.hidden_states(ids_1T, draft.needs)
        anchors_A = torch.arange(len(response.prompt), ids_1T.shape[1] - GAMMA)
        batches.append((ctx, anchors_A[None], places[ids_1T[0]]))
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(STEPS):
        loss = torch.zeros(())
        for ctx, anchors_1A, place_T in batches:
            hidden_AKD = draft.hidden(ctx, anchors_1A, None)[0]
            for k in range(GAMMA):
                logits_AS = draft.unembed(hidden_AKD[:, k], k)
                loss = loss + cross_entropy(logits_AS, place_T[anchors_1A[0] + 1 + k])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


def exported(folder: Path, target: Target, prompts: list[list[int]], config: Any) -> Path:
    """The export of a draft that has learnt the responses to these prompts."""
    draft_checkpoint.write_draft(folder / "best", learnt(target, prompts, config), target)
    draft = draft_checkpoint.load_draft(folder / "best", target)
    draft_export.write_export(folder / "export", draft, target)
    add_reference(folder / "export", draft, target, "hf", prompts, ORIGIN, NEW)
    return folder / "export"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "WAITS", (0.01,))
    monkeypatch.setattr(served, "SETTLING", 0.1)


@pytest.fixture(autouse=True)
def repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server decodes each prompt once, and repeats the response when it is asked again."""
    known = dict[Any, Any]()

    def decoded(target: Target, prompts: Any, way: Way, **more: Any) -> Any:
        assert way.shape is not None
        blind = getattr(way.drafter, "blind", 0)
        key = target, way.drafter, way.shape.depth, blind, str(prompts)
        if key not in known:
            known[key] = decode(target, prompts, way, **more)
        return known[key]

    monkeypatch.setattr(fake_engine, "decode", decoded)


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


# The reference


def test_the_reference_is_what_our_decoder_answers_and_accepts(case: Case) -> None:
    reference = case.reference
    assert len(reference.prompts) == COUNT and reference.gamma == GAMMA
    assert reference.origin == ORIGIN
    assert reference.rendering.arguments == {"loud": True}
    way = Way(case.draft, Chain(GAMMA))
    expected = decode(case.target, reference.prompts, way, max_new_tokens=NEW)
    for response, wanted in zip(expected, reference.responses["float32"], strict=True):
        assert wanted.ids == response.ids and wanted.steps == len(response.steps)
        both = [a + b for a, b in zip(wanted.accepted, wanted.beyond, strict=True)]
        assert both == [sum(s.accepted > k for s in response.steps) for k in range(GAMMA)]
        committed = 1 + wanted.steps + sum(wanted.accepted)
        assert committed >= len(response.ids)  # without what is beyond the end
    assert sum(sum(r.accepted) for r in reference.responses["float32"]) > 50


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
    with pytest.raises(UserError, match="is a draft: give its export"):
        Reference.load(case.folder / "best")
    with pytest.raises(UserError, match="does not exist: give an export"):
        Reference.load(tmp_path / "nowhere")
    path.with_name("a.gguf").write_text("no such file")
    with pytest.raises(UserError, match=r"a\.gguf.*GGUF"):
        Reference.load(path.with_name("a.gguf"))


def test_a_reference_has_as_many_prompts_as_time_allows(case: Case, tmp_path: Path) -> None:
    copied = shutil.copytree(case.export, tmp_path / "head")
    (copied / FILE).unlink()
    how = copied, case.draft, case.target, "hf", case.reference.prompts, ORIGIN, NEW
    assert "no time is left" in add_reference(*how, left=lambda: 0.0)
    assert not (copied / FILE).exists()
    assert f"({COUNT} prompts: {ORIGIN})" in add_reference(*how, left=lambda: 1e9)
    assert Reference.load(copied).prompts == case.reference.prompts


def test_an_export_whose_reference_fails_is_written(
    case: Case, script: Any, tmp_path: Path
) -> None:
    """The chat template refuses a question alone. The target is written first."""
    path = save_target(tmp_path / "target", template="{{ raise_exception('no system message') }}")
    target = load_target(TargetConfig(str(path), "float32", "cpu", packed=False))
    draft = random_drafter(EAGLE3, target, 0.02, torch.arange(40))
    draft_checkpoint.write_draft(tmp_path / "best", draft, target)
    more = "--with-target", str(tmp_path / "copy")
    out, code = script("export", str(tmp_path / "best"), "--to", str(tmp_path / "head"), *more)
    assert code == 0, out
    assert re.search(r"head: without a reference \(.*no system message", out), out
    assert (tmp_path / "head" / WEIGHTS).is_file() and (tmp_path / "copy" / WEIGHTS).is_file()
    assert not (tmp_path / "head" / FILE).exists()


def test_nothing_is_decoded_for_an_export_that_is_refused(
    case: Case, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that computes in bfloat16, its responses are decoded before the export."""
    decoded = list[str]()

    def noting(drafter: Any, target: Target, prompts: Any) -> Any:
        decoded.append(str(target.dtype))
        return []

    monkeypatch.setattr(machine_probes, "native_dtype", lambda device: DtypeChoice("bfloat16", ""))
    monkeypatch.setattr(export_reference, "responses_in_dtype", noting)
    config = replace(EAGLE3, window=8, sink_tokens=2)
    draft = random_drafter(config, case.target, 0.02, torch.arange(40))
    draft_checkpoint.write_draft(tmp_path / "best", draft, case.target)
    with pytest.raises(AssertionError, match="sink_tokens=2: this format has no key"):
        script("export", str(tmp_path / "best"), "--to", str(tmp_path / "head"))
    assert not decoded and not (tmp_path / "head").exists()


def test_an_engine_that_drafts_within_the_limit_emits_the_last_token_itself() -> None:
    """Chains of 3 along 8 tokens, of which all drafts but that of token 3 are right: the steps at
    tokens 0 and 3 accept 2 and 3 tokens, and that at token 7 is never taken. The second one
    reaches the limit with its third token, so that a capped one accepts 2."""
    right = torch.tensor([[a + 1 + k not in (3,) for k in range(3)] for a in range(7)])
    assert accepted_along(right, 8, 3) == AcceptedRange([2, 2, 1], [2, 2, 1])
    assert accepted_along(right, 7, 3) == AcceptedRange([2, 2, 1], [2, 2, 1])
    assert accepted_along(right, 7, 3, capped=True) == AcceptedRange([2, 2, 0], [2, 2, 0])
    assert accepted_along(right, 6, 3) == AcceptedRange([2, 2, 0], [2, 2, 1])
    response = ReferenceResponse([0] * 7, 2, [2, 2, 2], [2, 2, 1], [0, 0, 0], closing=2)
    assert AcceptedRange.of_reference(response, None) == AcceptedRange([2, 2, 1], [2, 2, 1])
    assert AcceptedRange.of_reference(response, 7) == AcceptedRange([2, 2, 0], [2, 2, 0])
    assert AcceptedRange.of_reference(response, 8) == AcceptedRange([2, 2, 1], [2, 2, 1])


def test_a_draft_that_is_served_as_exported_passes(case: Case, serve: Served, check: Any) -> None:
    out, code = check(case.export, serve(case.export))
    assert code == 0, out
    assert "\nAS EXPORTED: " in f"\n{out}"
    assert f"all {COUNT} responses" in out and "chat template: as in the reference" in out


@pytest.mark.parametrize("config", [DFLASH, MEDUSA], ids=lambda config: config.name)
def test_drafts_of_other_methods_are_checked(
    case: Case, serve: Served, check: Any, tmp_path: Path, config: Any
) -> None:
    """Served by our own decoder; the second server drafts fewer tokens than it should."""
    export = exported(tmp_path, case.target, case.reference.prompts, config)
    draft = draft_checkpoint.load_draft(tmp_path / "best", case.target)
    wanted = Reference.load(export).responses["float32"]
    assert sum(sum(response.accepted) for response in wanted) > 30
    out, code = check(export, serve(draft))
    assert code == 0 and "\nAS EXPORTED: " in f"\n{out}", out
    out, code = check(export, serve(draft, gamma=2))
    assert (named_in(out), code) == ("γ", 1), out


class NormOfText(nn.Module):
    """A norm of keys [1, P + M, H, d] that gives the first P, those of the text, another norm."""

    def __init__(self, of_text: nn.Module, own: nn.Module, P: int) -> None:
        super().__init__()
        self.of_text, self.own, self.P = of_text, own, P

    def forward(self, keys: Tensor) -> Tensor:
        return torch.cat([self.of_text(keys[:, : self.P]), self.own(keys[:, self.P :])], 1)


def test_the_key_norm_of_the_first_layer_in_all_is_named(
    case: Case, serve: Served, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's fault on CPUs, in the second implementation of the network."""
    export = exported(tmp_path, case.target, case.reference.prompts, DFLASH)
    right = DFlashLayers.forward

    def forward(layers: Any, hidden_states: Tensor, *more: Any) -> Tensor:
        first, *others = [layer.self_attn for layer in layers.layers]
        for attention in others:
            attention.k_norm = NormOfText(first.k_norm, attention.k_norm, len(hidden_states))
        return right(layers, hidden_states, *more)

    monkeypatch.setattr(DFlashLayers, "forward", forward)
    out, code = check(
        export,
        serve(ExportedNetwork(export, Reference.load(export).draft.empty(), case.target).eval()),
    )
    assert (named_in(out), code) == ("norm", 1) and "k_norm of layer 0" in out, out


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
    """All but the embedding, which is the target's, and rows that are no whole blocks."""
    own = {n: x for n, x in there.items() if x.dim() == 2 and "embed" not in n}
    return {n: rounded_to_4_bits(x) for n, x in own.items() if x.shape[1] % 32 == 0}


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
        for weight in (head, earlier.get_parameter("fc.weight")):
            noise = torch.randn(weight.shape, generator=torch.manual_seed(3))
            weight += 0.5 * weight.std() * noise
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
    draft = draft_checkpoint.load_draft(case.folder / "best", target)
    out, code = check(case.export, serve(draft, target))
    assert code == 0 and "; dtype: " in out, out


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


def test_suspects_of_any_kind_are_tried_or_told(
    case: Case, serve: Served, check: Any, tmp_path: Path
) -> None:
    """A draft of another method, a shallower one, one without weights; targets with another
    vocabulary or fewer layers."""
    suspects = {
        "heads": MEDUSA,
        "few_heads": replace(MEDUSA, depth=GAMMA - 1),
        "shallow": replace(EAGLE3, depth=1),
        "copies": NgramConfig(depth=GAMMA),
    }
    paths = {name: tmp_path / name for name in (*suspects, "small", "low")}
    vocab_S = torch.arange(40)
    for name, config in suspects.items():
        draft = random_drafter(config, case.target, 0.02, vocab_S)
        draft_checkpoint.write_draft(paths[name], draft, case.target)
    config = architectures(case.target.vocab_size - 8, LAYERS)["llama"]
    AutoModelForCausalLM.from_config(config).save_pretrained(paths["small"])
    case.target.tokenizer.save_pretrained(paths["small"])
    save_target(paths["low"], layers=2)
    more = ["--suspect", *map(str, paths.values())]
    out, code = check(case.export, serve(case.export, gamma=2), *more)
    assert (named_in(out), code) == ("γ", 1), out
    told = dict(re.findall(r"--suspect \S*/(\w+) is not tried: (.*)", out))
    assert told.keys() == {"few_heads", "copies", "small"}, out
    assert "at most 2 tokens a step, and the export 3" in told["few_heads"]
    assert "no engine loads a draft of ngram" in told["copies"]
    assert "its vocabulary has" in told["small"]
    other = load_target(TargetConfig(str(case.folder / "other"), "float32", "cpu"))
    out, code = check(case.export, serve(case.export, other), "--suspect", *more[-2:], other.name)
    assert (named_in(out), code) == ("another target", 1), out
    assert f"tokens are those of {other.name}" in out


def test_a_draft_in_a_public_layout_is_a_suspected_draft(
    case: Case, serve: Served, check: Any, tmp_path: Path
) -> None:
    """Not a target. Untrained, it accepts nothing, as with some other faults."""
    theirs = write_public(tmp_path / "theirs", PUBLIC["SpecForge"](case.target))
    other = draft_checkpoint.load_draft(theirs, case.target)
    out, code = check(case.export, serve(other), "--suspect", str(theirs))
    assert "another draft" in named_in(out) and code == 1, out
    assert f"the server drafts with {theirs}: this gives the server's counts exactly" in out
    assert "is not tried" not in out


def test_a_file_for_llama_cpp_is_a_suspected_draft(
    case: Case, serve: Served, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a target."""
    # no GGUF file holds a tokenizer of words
    monkeypatch.setattr(draft_export, "draft_tokenizer", lambda *asked: {})
    other, path = random_drafter(GGUF, case.target, 0.02, torch.arange(40)), tmp_path / "head.gguf"
    draft_export.write_export(path, other, case.target, "gguf")
    add_reference(path, other, case.target, "gguf", case.reference.prompts, ORIGIN, NEW)
    out, code = check(case.export, serve(other), "--suspect", str(path))
    assert (named_in(out), code) == ("another draft", 1), out
    assert f"drafts with {path}: this gives the server's counts exactly" in out


def test_a_damaged_export_never_passes(
    case: Case, serve: Served, check: Any, tmp_path: Path
) -> None:
    """All responses part from the reference's at a near tie, so that no counts can be compared with
    the reference, and the draft cannot be read."""
    export = shutil.copytree(case.export, tmp_path / "head")
    permuted(export)
    responses = [
        replace(response, ids=[response.ids[0] ^ 1, *response.ids[1:]], near=[(0, 0.2)])
        for response in case.reference.responses["float32"]
    ]
    reference = replace(case.reference, responses={"float32": responses})
    (export / FILE).write_text(reference.json)
    for served_draft in (export, case.export):  # the damaged files, and others
        out, code = check(export, serve(served_draft))
        assert (named_in(out), code) == ("vocabulary map", 1), out
        assert ("exactly" in out) == (served_draft == export)


def test_a_tensor_that_the_draft_lacks_is_a_difference(case: Case) -> None:
    draft = replace(case.reference.draft, tensors=case.reference.draft.tensors | {"lost": "1"})
    state = state_of_export(case.export, replace(case.reference, draft=draft), case.target)
    assert [one.what for one in state.differences] == ["tensor lost is not that of the reference"]


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


def test_another_target_is_read_without_the_revision_of_the_reference(
    case: Case, serve: Served, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, asked = shutil.copytree(case.export, tmp_path / "head"), list[Any]()
    theirs = replace(case.reference.target, revision="1234")
    (export / FILE).write_text(replace(case.reference, target=theirs).json)
    read = loading.TargetLoader

    def noting(cfg: TargetConfig, **how: Any) -> Any:
        asked.append(cfg.revision)
        return read(cfg, **how)

    monkeypatch.setattr(loading, "TargetLoader", noting)
    engine = serve(case.export)
    engine.template_args = {}
    for more, revision in (((), "1234"), (("--target", case.target.name), None)):
        out, code = check(export, engine, *more)
        assert (named_in(out), code) == ("template", 1), out
        assert asked.pop() == revision and not asked


def test_mistakes_are_told(case: Case, serve: Served, check: Any) -> None:
    engine = serve(case.export, gamma=2)
    with pytest.raises(AssertionError, match="error: --engine=nowhere: give an engine's address"):
        engine.url = "nowhere"
        check(case.export, engine)
