"""Hidden states from engines: the same as in this process, without the target's layers.

Run alone: python -m pytest tests/train/test_engine_hidden_states.py (under 40 s)
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engines import server_pool
from specdec.engines.vllm import FOLDER_MARK, MARK
from specdec.targets import loading
from specdec.targets.loading import TargetLoader, load_parts, load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.engine import FakeEngine, Fault
from tests.lives import Life, Lives
from tests.runs import draft
from tests.tiny import LAYERS, Tiny, architectures, losses, random_target, save_target
from tests.told import require_one_line, told
from train import loop

pytestmark = pytest.mark.usefixtures("training_alone")
BY_TARGET = ["data.responses=target", "decode.prompts=0", "export=null"]
Serve = Callable[..., FakeEngine]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "WAITS", (0.01, 0.01))


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(str(tiny.target), "float32", "cpu"))


@pytest.fixture
def serve(target: Target, tmp_path: Path) -> Iterator[Serve]:
    running = []

    def start(fault: Fault | None = None, of: Target | None = None, **more: Any) -> FakeEngine:
        folder = tmp_path / "states"
        folder.mkdir(exist_ok=True)
        how = {"states": folder, "layers": [1, 2, 3, LAYERS]} | more
        running.append(FakeEngine(of or target, fault, **how).serving())
        return running[-1].__enter__()

    yield start
    for engine in running:
        engine.__exit__(None, None, None)


@pytest.fixture
def layers_go_early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the target's layers were loaded. Once it trains, they must be gone."""
    loads, load, prepare = list[int](), loading.load_target, loop.prepare_learner

    def counted(cfg: TargetConfig) -> Target:
        loads.append(1)
        return load(cfg)

    def checked(parts: Any, **others: Any) -> Any:
        assert len(parts.layers) == 0, "the target's layers are still in memory"
        return prepare(parts=parts, **others)

    monkeypatch.setattr(loading, "load_target", counted)
    monkeypatch.setattr(loop, "prepare_learner", checked)
    return loads


def roots(folder: Path) -> list[str]:
    """Caches of their own, with no note of the target's fingerprint."""
    return [
        f"{name}={folder}/{name}"
        for name in ("responses.root", "hidden_states.root", "target.cache")
    ]


@pytest.mark.parametrize("responses", ["target", "data"])
def test_a_job_trains_on_an_engines_hidden_states_without_the_targets_layers(
    tiny: Tiny,
    tmp_path: Path,
    serve: Serve,
    layers_go_early: list[int],
    responses: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses and hidden states come in one request each; the hidden states of texts in one that
    writes a single token. Every step then has the loss that it has with hidden states of this
    process, up to the rounding of batches. The layers are loaded once, to compare the first hidden
    states."""
    engine, options = serve(), [*BY_TARGET[1:], f"data.responses={responses}"]
    served = [*options, f"hidden_states.from={engine.url}", *roots(tmp_path / "served")]
    tiny.job(tmp_path / "run", "eagle3", *served)
    assert len(engine.asked) == 29
    assert {body["max_tokens"] for body in engine.asked} == {12 if responses == "target" else 1}
    left = [path.name for path in (tmp_path / "states").iterdir()]
    assert left == [FOLDER_MARK], "files are deleted once they were read"
    tiny.job(tmp_path / "again", "eagle3", *served)
    assert len(engine.asked) == 29, "nothing is asked twice"
    assert len(layers_go_early) == 1
    monkeypatch.undo()
    tiny.job(tmp_path / "here", "eagle3", *options, *roots(tmp_path / "own"))
    for (_, ours), (_, theirs) in zip(
        losses(tmp_path / "run"), losses(tmp_path / "here"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    ours, theirs = draft(tmp_path / "run"), draft(tmp_path / "here")
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-3) for n in theirs)


def test_two_processes_share_the_requests(tiny: Tiny, tmp_path: Path, serve: Serve) -> None:
    """Each asks for its share, once, and both train on what one process would."""
    engine, options = serve(), ["data.responses=target", *BY_TARGET[1:], "loop.epochs=1"]
    more = [*options, f"hidden_states.from={engine.url}", *roots(tmp_path / "two")]
    Lives(tiny).run(tmp_path / "two", "eagle3", [Life(processes=2)], *more)
    assert len(engine.prompts) == len({*engine.prompts}) == 29
    tiny.job(tmp_path / "one", "eagle3", *options, *roots(tmp_path / "one"))
    described = [
        json.loads((tmp_path / n / "config.json").read_text())["of"] for n in ("one", "two")
    ]
    assert described[0] == described[1]


def spoiled(change: Callable[[dict[str, torch.Tensor]], Any]) -> Fault:
    """A fault that changes the tensors of every file."""

    def fault(_: int, reply: dict[str, Any]) -> dict[str, Any]:
        path = reply["kv_transfer_params"]["hidden_states_path"]
        tensors = load_file(path)
        change(tensors)
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, MARK)
        return reply

    return fault


def shortened(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name: x[3:] for name, x in tensors.items()}


def cut_off(_: int, reply: dict[str, Any]) -> dict[str, Any]:
    path = Path(reply["kv_transfer_params"]["hidden_states_path"])
    path.write_bytes(path.read_bytes()[:-100])
    return reply


def elsewhere(_: int, reply: dict[str, Any]) -> dict[str, Any]:
    path = "/no/such/folder/x.safetensors"
    return {
        **reply,
        "kv_transfer_params": {**reply["kv_transfer_params"], "hidden_states_path": path},
    }


GARBAGE: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"fault": spoiled(lambda x: x["hidden_states"][1].fill_(torch.nan))}, "not finite"),
    "short": ({"fault": spoiled(shortened)}, "turns its prefix cache off"),
    "other ids": ({"fault": spoiled(lambda x: x["token_ids"].add_(1))}, "other tokens than"),
    "a width": (
        {"fault": spoiled(lambda x: x.update(hidden_states=x["hidden_states"][..., :5]))},
        "states of the shape .* 5.* another model",
    ),
    "cut off": ({"fault": cut_off}, "cannot be read"),
    "nowhere": ({"fault": elsewhere}, "does not exist here: both must share that folder"),
    "no choices": ({"fault": lambda _, reply: {"choices": []}}, "not of OpenAI's form"),
    "a page": ({"fault": lambda _, reply: "<html>busy"}, "not of OpenAI's form"),
    "no states": ({"states": None}, "does not write hidden states.* scripts/serve"),
    "other layers": ({"layers": [1, 2, LAYERS]}, r"\[1, 2, 4\], and this draft reads \[1, 2, 3"),
    "wrong states": (
        {"fault": spoiled(lambda x: x["hidden_states"].neg_())},
        "another model|serves another model",
    ),
}


@pytest.mark.parametrize("responses", ["target", "data"])
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_told_in_one_line(
    tiny: Tiny,
    tmp_path: Path,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    name: str,
    responses: str,
) -> None:
    """Nothing of it is stored: the run then goes on with a sound engine."""
    faults, message = GARBAGE[name]
    options = [f"data.responses={responses}", *BY_TARGET[1:], *roots(tmp_path)]
    broken = f"hidden_states.from={serve(**faults).url}"
    said = told(capsys, tiny.overrides("eagle3", *options, broken), tmp_path / "run")
    require_one_line(said, message)
    assert not list((tmp_path / "hidden_states.root").rglob("*.safetensors"))


def test_another_model_is_told(
    tiny: Tiny, tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same tokenizer and sizes: its own states give its own tokens, but not with our
    head."""
    other = load_target(
        TargetConfig(str(save_target(tmp_path / "other", seed=3)), "float32", "cpu")
    )
    options = ["data.responses=data", *BY_TARGET[1:], *roots(tmp_path)]
    engine = f"hidden_states.from={serve(of=other).url}"
    said = told(capsys, tiny.overrides("eagle3", *options, engine), tmp_path / "run")
    require_one_line(said, "the engine's next token is only . times .* another model")


def half_of_another(target: Target) -> Target:
    """A model with the embedding, the final norm and the head of this one, and other layers."""
    other = copy.deepcopy(target)
    with torch.no_grad():
        for weight in other.layers.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return other


@pytest.mark.parametrize("responses", ["target", "data"])
def test_another_model_with_the_same_head_is_told(
    tiny: Tiny,
    tmp_path: Path,
    serve: Serve,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    responses: str,
) -> None:
    """Its tokens follow from its states in our head, so only the states tell it apart."""
    options = [f"data.responses={responses}", *BY_TARGET[1:], *roots(tmp_path)]
    engine = f"hidden_states.from={serve(of=half_of_another(target)).url}"
    said = told(capsys, tiny.overrides("eagle3", *options, engine), tmp_path / "run")
    require_one_line(said, "hidden states after layer . differ from those of .* another model")
    assert not list((tmp_path / "hidden_states.root").rglob("*.safetensors"))
    assert not list((tmp_path / "responses.root").rglob("*.jsonl"))


MISTAKES = [
    (["hidden_states.mode=online"], "hidden_states.from fills a store"),
    (["drafter=ngram"], "drafter=ngram does not read"),
    (["drafter=early_exit"], "drafter=early_exit does not read"),
    (["rounds.data=on_policy", "data.responses=target"], "tokens that were drafted and rejected"),
]


@pytest.mark.parametrize(("more", "message"), MISTAKES)
def test_what_does_not_go_together(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], more: Sequence[str], message: str
) -> None:
    options = ["hidden_states.from=http://a:8000/v1", *more]
    drafter = next((x.removeprefix("drafter=") for x in more if x.startswith("drafter=")), "eagle3")
    require_one_line(told(capsys, tiny.overrides(drafter, *options)), message)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_the_fingerprint_of_files_is_that_of_the_model(tmp_path: Path, name: str) -> None:
    """Tied heads, and norms that are stored minus 1; and the final norm is found by its name."""
    config = architectures(91, 3)[name]
    whole = random_target(config)
    whole.model.save_pretrained(tmp_path / "target")
    save_target(tmp_path / "tokenizer")
    for file in (tmp_path / "tokenizer").glob("tokenizer*"):
        (tmp_path / "target" / file.name).write_bytes(file.read_bytes())
    cfg = TargetConfig(str(tmp_path / "target"), "float32", "cpu", cache=str(tmp_path / "cache"))
    assert load_parts(cfg) is None
    alone = TargetLoader(cfg, alone=True)
    assert alone.parts.fingerprint() == whole.fingerprint()
    assert len(alone.parts.layers) == 0 and alone.whole().fingerprint() == whole.fingerprint()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        read = whole.model.base_model(ids, output_hidden_states=True)
    seen: list[torch.Tensor] = []
    hook = whole.layers[-1].register_forward_hook(
        lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        whole.model.base_model(ids)
    hook.remove()
    parts = load_parts(cfg)
    assert parts is not None
    with torch.no_grad():
        assert torch.equal(parts.normed(seen[0]), read.last_hidden_state)
