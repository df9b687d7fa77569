"""scripts/check on llama.cpp and vLLM themselves: a draft that is served as exported passes, and
faults in what the server loads are named. The target and its drafts are small and random.

Each fault is planted in the files that the server loads or in its command. All of them, with the
table of docs/notebook/serving.md, for the engines that are installed:

    DRAFTSMITH_ALL_FAULTS=1 python -m pytest -m serving tests/measure/test_check_in_engines.py -s

Without this variable, two faults in llama.cpp (30 s). Skipped where an engine is not installed.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from specdec.drafters import Drafter
from specdec.drafters.dflash import DFlashConfig
from specdec.drafters.dspark import DSparkConfig
from specdec.drafters.eagle3 import Eagle3Config
from specdec.drafters.medusa import MedusaConfig
from specdec.engines.engine_interface import DraftToServe, TargetToServe
from specdec.engines.known_engines import ENGINES
from specdec.engines.local_server import local_server
from specdec.formats import draft_checkpoint, draft_export
from specdec.formats.gguf_file import ARCHITECTURE, FILE_TYPE, read_tensors, typed_keys, write_gguf
from specdec.formats.gguf_target import write_target_gguf
from specdec.formats.layout import AS_TRAINED, FileChoices
from specdec.measure.reference import Reference
from specdec.targets.loading import load_target
from specdec.targets.prompt_rendering import PromptRendering
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.measure.test_served_diagnosis import (
    GAMMA,
    edited,
    learnt,
    named_in,
    quantised,
    tensors,
)
from tests.tiny import OF_ENGINES, REPOSITORY, random_target
from train.export_reference import add_reference

pytestmark = pytest.mark.serving

EVERY = bool(os.environ.get("DRAFTSMITH_ALL_FAULTS"))
STARTS = 600.0  # seconds that an engine may take to start
NEW, COUNT = 24, 6
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{% if loud %}!{% endif %}>{% endif %}"
)
LOUD = {"loud": True}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
DRAFTS: dict[str, Any] = {
    "eagle3": Eagle3Config(depth=GAMMA, draft_vocab=40, layers=[1, 3, 4]),
    "dflash": DFlashConfig(depth=GAMMA, draft_vocab=40),
    "dspark": DSparkConfig(depth=GAMMA, draft_vocab=40),
    "medusa": MedusaConfig(depth=GAMMA, draft_vocab=40),
}


def widen_norms(draft: Any) -> None:
    """Scale every second weight of EAGLE-3's final and hidden norm, and scale what reads them back.
    The draft computes the same, but not without these norms or with weights rounded in blocks."""
    scale_D, layer = 1 + 15.0 * (torch.arange(draft.llama.hidden_size) % 2), draft.midlayer
    with torch.no_grad():
        draft.norm.weight *= scale_D
        draft.lm_head.weight /= scale_D
        layer.hidden_norm.weight *= scale_D
        for read in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            read.weight[:, len(scale_D) :] /= scale_D


def tokenizer_of(letters: list[str]) -> PreTrainedTokenizerFast:
    """Of single bytes, in this order, and a merge, without which it would not be BPE."""
    vocab = {text: i for i, text in enumerate([*letters, "ab", "<|end|>"])}
    inner = Tokenizer(BPE(vocab, [("a", "b")]))
    digits = pre_tokenizers.Digits(True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", chat_template=TEMPLATE
    )


def saved_target(folder: Path, seed: int = 0, letters: list[str] = BYTES) -> Target:
    """A target whose likeliest token is never the one that ends a response."""
    target = random_target(LlamaConfig(vocab_size=len(BYTES) + 2, **OF_ENGINES), seed)
    with torch.no_grad():
        target.model.get_input_embeddings().weight[-1] = 0
    target.model.save_pretrained(folder)
    tokenizer_of(letters).save_pretrained(folder)
    target = load_target(TargetConfig(str(folder), "float32", "cpu", packed=False))
    target.render_prompts_with(PromptRendering(LOUD))
    return target


@dataclass
class Planted:
    """What a server loads, and more arguments of scripts/check."""

    draft: Drafter
    target: Target
    gamma: int = GAMMA
    dtype: str = "float32"
    stored: str = "f32"  # weights of a GGUF draft
    template_args: dict[str, Any] = field(default_factory=lambda: LOUD)
    options: list[str] = field(default_factory=list)
    in_files: Callable[[Path], None] = lambda export: None
    more: list[str] = field(default_factory=list)


@dataclass
class EngineCase:
    """A target, and its drafts with their exports for an engine."""

    folder: Path
    engine: Any

    def __post_init__(self) -> None:
        self.target = saved_target(self.folder / "target")
        drawn = torch.Generator().manual_seed(5)
        lengths = torch.randint(20, 60, (COUNT,), generator=drawn).tolist()
        self.prompts = [
            torch.randint(0, len(BYTES), (n,), generator=drawn).tolist() for n in lengths
        ]
        self.exports: dict[str, tuple[Drafter, Path]] = {}

    def other_target(self, name: str, **how: Any) -> Target:
        return saved_target(self.folder / name, **how)

    def exported(self, method: str) -> tuple[Drafter, Path]:
        """A draft that has learnt the responses to the prompts, and its export."""
        if method not in self.exports:
            folder = self.folder / method
            draft = learnt(self.target, self.prompts, DRAFTS[method])
            if method == "eagle3":
                widen_norms(draft)
            draft_checkpoint.write_draft(folder / "best", draft, self.target)
            draft = draft_checkpoint.load_draft(folder / "best", self.target)
            export = self.written(folder / "head", draft)
            layout = self.engine.layouts[method]
            add_reference(export, draft, self.target, layout, self.prompts, "made up", NEW)
            self.exports[method] = draft, export
        return self.exports[method]

    def written(self, path: Path, draft: Drafter, choices: FileChoices = AS_TRAINED) -> Path:
        """An export of a draft without a reference."""
        layout = self.engine.layouts[draft.config.name]
        suffix = draft_export.layout_of(draft.config.name, layout).suffix
        path = path.with_name(path.name + suffix)
        draft_export.write_export(path, draft, self.target, layout, choices=choices)
        return path

    @contextmanager
    def serving(self, planted: Planted, folder: Path) -> Iterator[str]:
        """The address of the engine with what was planted."""
        name, engine = planted.draft.config.name, self.engine
        in_one = FileChoices(planted.stored) if engine.reads_gguf else AS_TRAINED
        draft = self.written(folder / "theirs", planted.draft, in_one)
        planted.in_files(draft)
        model = Path(planted.target.name)
        if engine.reads_gguf:
            model = folder / "target.gguf"
            stored = "f32" if planted.dtype == "float32" else "f16"
            write_target_gguf(model, planted.target, FileChoices(stored))
        served = TargetToServe(
            str(model),
            self.target.name,
            planted.dtype,
            template_args=planted.template_args,
        )
        options = engine.draft_options(
            DraftToServe(draft, name, engine.layouts[name], planted.gamma)
        )
        log = folder / "engine.log"
        with local_server(engine, served, [*options, *planted.options], log, STARTS) as server:
            yield server.url


@cache
def case_of(engine: str, folder: Path) -> EngineCase:
    return EngineCase(folder / engine, ENGINES[engine])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineCase]:
    folder = tmp_path_factory.mktemp("cases")
    return lambda engine: case_of(engine, folder)


def changed(draft: Drafter, name: str, change: Callable[[Tensor], Tensor]) -> Drafter:
    """A copy with one tensor changed."""
    other = copy.deepcopy(draft)
    tensors = other.state_dict()
    tensors[name].copy_(change(tensors[name]))
    return other


def edited_keys(path: Path, hf: dict[str, Any], gguf: dict[str, Any]) -> None:
    """Edit the keys of an export, those of its layout."""
    if path.is_dir():
        edited(path, **hf)
        return
    keys = typed_keys(path)
    for key in (ARCHITECTURE, FILE_TYPE, *gguf):
        keys[key] = keys[key].value if key not in gguf else gguf[key]
    write_gguf(path, read_tensors(path), keys)


def norm_named(draft: Drafter, *words: str) -> str:
    return next(
        name
        for name in draft.state_dict()
        if "norm" in name and any(word in name for word in words)
    )


# Each fault: what is planted in a served draft (EAGLE-3), from its case and a folder

Plant = Callable[[EngineCase, Drafter, Path], Planted]


def of_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda case, draft, folder: Planted(changed(draft, name, change), case.target)


def of_keys(hf: dict[str, Any], gguf: dict[str, Any]) -> Plant:
    return lambda case, draft, folder: Planted(
        draft, case.target, in_files=lambda export: edited_keys(export, hf, gguf)
    )


def other_ids(case: EngineCase, draft: Drafter, folder: Path) -> Planted:
    """The offsets of the draft vocabulary as ids."""
    assert isinstance(draft.vocab_S, Tensor)
    places_S = torch.arange(len(draft.vocab_S))
    if case.engine.reads_gguf:
        wrong = copy.deepcopy(draft)
        wrong.vocab_S = draft.vocab_S - places_S
        return Planted(wrong, case.target)

    def in_files(export: Path) -> None:  # an export is not written where d2t and t2d differ
        tensors(export, lambda x: {"d2t": x["d2t"] - places_S})

    return Planted(draft, case.target, in_files=in_files)


def rounded(case: EngineCase, draft: Drafter, folder: Path) -> Planted:
    if case.engine.reads_gguf:
        return Planted(draft, case.target, stored="q4_0")
    other = copy.deepcopy(draft)
    own = dict(other.named_parameters())
    with torch.no_grad():
        for name, x in quantised(own).items():
            own[name].copy_(x)
    return Planted(other, case.target)


def earlier_head(case: EngineCase, draft: Drafter, folder: Path) -> Planted:
    def moved(x: Tensor) -> Tensor:
        return x + 0.5 * x.std() * torch.randn(x.shape, generator=torch.manual_seed(3))

    earlier = changed(draft, "lm_head.weight", moved)
    draft_checkpoint.write_draft(folder / "earlier", earlier, case.target)
    return Planted(earlier, case.target, more=["--suspect", str(folder / "earlier")])


def other_draft(case: EngineCase, draft: Drafter, folder: Path) -> Planted:
    """Trained on other responses."""
    backwards = [prompt[::-1] for prompt in case.prompts]
    other = learnt(case.target, backwards, DRAFTS["eagle3"])
    draft_checkpoint.write_draft(folder / "other", other, case.target)
    return Planted(other, case.target, more=["--suspect", str(folder / "other")])


def other_embedding(case: EngineCase, draft: Drafter, folder: Path) -> Planted:
    """In a draft's files: of another target, as if this one had been trained further since."""
    other = case.other_target("embedding", seed=1)

    def plant(export: Path) -> None:
        tensors(export, lambda x: {"embed_tokens.weight": other.embedding.weight.detach().clone()})

    return Planted(draft, case.target, in_files=plant, more=["--suspect", other.name])


def another_target(case: EngineCase, draft: Drafter, folder: Path) -> Planted:
    other = case.other_target("other", seed=1)
    return Planted(draft, other, more=["--suspect", other.name])


FAULTS: dict[str, tuple[Plant, str, tuple[str, ...]]] = {  # with the culprit, and without engines
    "layer ids": (
        of_keys(
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, {"eagle3.target_layers": [2, 4, 5]}
        ),
        "layer ids",
        (),
    ),
    "γ": (lambda case, draft, folder: Planted(draft, case.target, gamma=2), "γ", ()),
    "hidden norm": (
        lambda case, draft, folder: Planted(
            changed(draft, norm_named(draft, "hidden"), torch.ones_like), case.target
        ),
        "norm",
        (),
    ),
    "final norm": (of_tensor("norm.weight", torch.ones_like), "norm", ()),
    "a setting of norms": (
        of_keys({"norm_before_residual": True}, {"eagle3.norm_before_residual": True}),
        "norm",
        (),
    ),
    "RoPE": (
        of_keys(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6},
            {"eagle3.rope.freq_base": 1e6},
        ),
        "RoPE",
        (),
    ),
    "vocabulary map": (other_ids, "vocabulary map", ()),
    "quantised draft": (rounded, "quantised draft", ()),
    "stale head": (earlier_head, "stale head", ()),
    "stale embedding": (other_embedding, "stale embedding", ("llama.cpp",)),
    "another draft": (other_draft, "another draft", ()),
    "missing weights": (of_tensor("fc.weight", torch.zeros_like), "missing weights", ()),
    "dtype": (
        lambda case, draft, folder: Planted(draft, case.target, dtype="bfloat16"),
        "dtype",
        (),
    ),
    "another target": (another_target, "another target", ()),
    "tokenizer": (
        lambda case, draft, folder: Planted(
            draft, case.other_target("tokenizer", letters=BYTES[::-1])
        ),
        "another tokenizer",
        (),
    ),
    "template": (
        lambda case, draft, folder: Planted(draft, case.target, template_args={}),
        "template",
        (),
    ),
}
SERVED = {"llama.cpp": ("eagle3", "dflash", "dspark"), "vllm": ("eagle3", "dflash", "medusa")}
CHOSEN = [
    (engine, fault)
    for engine in SERVED
    for fault, (_, _, without) in FAULTS.items()
    if engine not in without and (EVERY or (engine == "llama.cpp" and fault in ("layer ids", "γ")))
]


def installed(engine: str) -> None:
    if not ENGINES[engine].python(REPOSITORY).exists():
        pytest.skip(f"{engine} is not installed")


def report(engine: str, method: str, fault: str, out: str, code: int) -> None:
    """A row of the table."""
    line = next(x for x in out.splitlines() if x.startswith(("NOT AS", "AS EXPORTED")))
    print(f"\n| {engine} | {method} | {fault} | {named_in(out)} | {code} | {line[-220:]} |")


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        (engine, method)
        for engine, methods in SERVED.items()
        for method in methods
        if (EVERY and (engine, method) != ("vllm", "dflash"))  # it has a fault of its own, below
        or (engine, method) == ("llama.cpp", "eagle3")
    ],
)
def test_a_draft_that_is_served_as_exported_passes(
    cases: Callable[[str], EngineCase], check: Any, tmp_path: Path, engine: str, method: str
) -> None:
    installed(engine)
    case = cases(engine)
    draft, export = case.exported(method)
    wanted = Reference.load(export).responses["float32"]
    assert sum(sum(response.accepted) for response in wanted) > 20
    with case.serving(Planted(draft, case.target), tmp_path) as url:
        out, code = check(export, SimpleNamespace(url=url))
    report(engine, method, "none", out, code)
    assert code == 0 and "\nAS EXPORTED" in f"\n{out}", out
    assert "tokenizer: as in the reference" in out, out
    assert "chat template: as in the reference" in out, out


@pytest.mark.skipif(not EVERY, reason="DRAFTSMITH_ALL_FAULTS is not set")
def test_the_fault_of_vllm_0_32_on_cpus_is_named(
    cases: Callable[[str], EngineCase], check: Any, tmp_path: Path
) -> None:
    """It normalises the keys of the text by the weight of layer 0 in every layer of DFlash."""
    installed("vllm")
    case = cases("vllm")
    draft, export = case.exported("dflash")
    with case.serving(Planted(draft, case.target), tmp_path) as url:
        out, code = check(export, SimpleNamespace(url=url))
    report("vllm", "dflash", "its own", out, code)
    assert (named_in(out), code) == ("norm", 1) and "k_norm of layer 0" in out, out


@pytest.mark.parametrize(("engine", "fault"), CHOSEN)
def test_a_fault_in_an_engine_is_named(
    cases: Callable[[str], EngineCase], check: Any, tmp_path: Path, engine: str, fault: str
) -> None:
    installed(engine)
    case, (plant, culprit, _) = cases(engine), FAULTS[fault]
    draft, export = case.exported("eagle3")
    planted = plant(case, draft, tmp_path)
    with case.serving(planted, tmp_path) as url:
        out, code = check(export, SimpleNamespace(url=url), *planted.more)
    report(engine, "eagle3", fault, out, code)
    if fault == "dtype":
        assert code == 0 and f"; {culprit}: " in out, out
        return
    names = [culprit]
    if fault == "stale head":  # the suspect with this head is another draft, too
        names.append("stale head or another draft")
    assert named_in(out) in names and code == 1, out
