"""Drafts that were forged or damaged: always one clear line, never a traceback or an endless run.

Run alone: pytest tests/formats/test_forged.py
"""

import copy
import json
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specdec.decoding.decode import decode
from specdec.decoding.way import Way
from specdec.drafters import DRAFTERS, Drafter
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.sampling.trees import Chain
from specdec.targets.loading import load_target
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.processes import process
from tests.runs import as_before
from tests.tiny import REPOSITORY, Tiny, learn, random_drafter

CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3": {"layers": [1, 2, 3], "draft_vocab": 48, "depth": 2},
    "medusa": {"draft_vocab": 48, "depth": 2},
    "lm": {"layers": [0, 3], "depth": 2},
    "bigram": {},
    "suffix": {},
}
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Target:
    return load_target(TargetConfig(path=str(tiny.target), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def saved(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole draft of each family."""
    texts, found = [[5, 6, 7, 8, 5, 6, 9], [7, 8, 5, 6, 7]], {}
    for name, options in CONFIGS.items():
        drafter = random_drafter(DRAFTERS[name].Config(**options), target, 0.1, torch.arange(2, 50))
        learn(drafter, texts)
        found[name] = tmp_path_factory.mktemp("saved") / name
        draft_checkpoint.write_draft(found[name], drafter, target)
        path = found[name] / draft_checkpoint.CARD  # changes are judged by what they say
        path.write_text(json.dumps(as_before(path)))
    return found


@pytest.fixture(autouse=True)
def no_endless_run() -> Iterator[None]:
    """What is still running after two minutes never ends: the slowest test takes seconds."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("this does not end"))
    signal.alarm(120)
    yield
    signal.alarm(0)


def forge(whole: Path, folder: Path, change: Change | None = None) -> Path:
    """A copy of a draft with another card."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    if change is not None:
        card = json.loads((folder / draft_checkpoint.CARD).read_text())
        change(card)
        (folder / draft_checkpoint.CARD).write_text(json.dumps(card))
    return folder


def reweighed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / draft_checkpoint.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / draft_checkpoint.WEIGHTS)


CARDS: list[tuple[str, Change, str]] = [
    (
        "eagle3",
        lambda c: c["shape"].pop("target_vocab"),
        "shape: the key 'target_vocab' is missing",
    ),
    (
        "eagle3",
        lambda c: c["shape"].update(target_vocab="96"),
        "expected a whole number, found '96'",
    ),
    ("eagle3", lambda c: c["shape"].update(target_vocab=-96), "target_vocab is -96"),
    ("eagle3", lambda c: c["shape"].update(target_vocab=1e12), "expected a whole number"),
    ("eagle3", lambda c: c["shape"].update(target_vocab=10**12), "target_vocab is 1000000000000"),
    ("eagle3", lambda c: c["target"].update(vocab_size=10**12), "vocabulary has 1000000000000"),
    ("eagle3", lambda c: c["shape"].update(draft_vocab=0), "draft_vocab is 0: expected 1 to"),
    ("eagle3", lambda c: c["shape"].update(layers=[1, 2, 99]), "reads layers [1, 2, 99]"),
    (
        "eagle3",
        lambda c: c["shape"]["llama"].update(hidden_size=64),
        "tensor 'fc.weight' has shape",
    ),
    ("eagle3", lambda c: c["shape"]["llama"].update(hidden_size=-32), "no eagle3 can be built"),
    ("eagle3", lambda c: c["shape"]["llama"].update(head_dim=10**9), "has shape"),
    ("eagle3", lambda c: c.update(family="medusa"), "config: unknown key '"),
    ("eagle3", lambda c: c.update(family="medus"), "did you mean 'medusa'"),
    ("eagle3", lambda c: c["config"].update(name="medusa"), "'medusa', not 'eagle3'"),
    (
        "eagle3",
        lambda c: c["config"].update(depth=2.5),
        "depth: expected a whole number, found 2.5",
    ),
    ("eagle3", lambda c: c["config"].update(depth=True), "expected a whole number, found true"),
    ("eagle3", lambda c: c["config"].update(depth=10**9), "depth is 1000000000"),
    ("eagle3", lambda c: c["config"].update(depth=1000), "give 1 to 128"),
    ("eagle3", lambda c: c["config"].update(initialisation="elsewhere"), "elsewhere"),
    (
        "eagle3",
        lambda c: c["config"].update(start=c["config"].pop("initialisation")),
        "'start' of an earlier version, which is now 'initialisation': train the draft again",
    ),
    ("eagle3", lambda c: c["target"].update(name="\0"), "is not text"),
    ("eagle3", lambda c: c["target"].update(name="\ud800"), "is not text"),
    ("eagle3", lambda c: c["target"].update(fingerprint=None), "expected text, found null"),
    ("eagle3", lambda c: c["target"].update(fingerprint="0" * 24), "other weights"),
    ("medusa", lambda c: c["config"].update(depth=10**9), "depth is 1000000000"),
    ("medusa", lambda c: c["config"].update(num_layers=10**9), "num_layers is 1000000000"),
    ("medusa", lambda c: c["config"].update(num_layers=0), "give 1 to 64"),
    ("medusa", lambda c: c["shape"].update(width=10**9), "has shape"),
    (
        "lm",
        lambda c: c["shape"]["model"].update(num_hidden_layers=10**9),
        "expected at most 1024",
    ),
    ("lm", lambda c: c["shape"]["model"].update(num_hidden_layers=3), "is missing"),
    ("lm", lambda c: c["shape"]["model"].update(num_attention_heads=0), "no lm can be built"),
    ("lm", lambda c: c["shape"]["model"].update(model_type="no-such"), "no lm can be built"),
    ("lm", lambda c: c["shape"]["model"].update(vocab_size=10**9), "has shape"),
    ("lm", lambda c: c["shape"].update(model="llama"), "expected an object, found 'llama'"),
    ("bigram", lambda c: c["shape"].update(pairs=-1), "no bigram can be built"),
    ("bigram", lambda c: c["config"].update(add=float("nan")), "add is nan"),
    ("suffix", lambda c: c["shape"].update(tokens=10**9), "has shape"),
]


@pytest.mark.parametrize("family, change, words", CARDS)
def test_a_forged_card_is_told_in_one_line(
    saved: dict[str, Path], target: Target, tmp_path: Path, family: str, change: Change, words: str
) -> None:
    folder = forge(saved[family], tmp_path / "best", change)
    with pytest.raises(UserError) as caught:
        draft_checkpoint.load_draft(folder, target)
    assert words in str(caught.value) and str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[" * 100_000, "nests thousands of brackets"),
        ('{"format": 2, "notes": ' + "[" * 100_000, "nests thousands of brackets"),
        ("[" * 80 + "]" * 80, "nests more than 64 brackets"),
        ("9" * 10_000, "is damaged"),
        ("", "is damaged"),
        ("null", "expected an object, found null"),
        ('{"format": 2, "family": "lm"}', "is missing"),
    ],
)
def test_a_card_that_is_no_card(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / draft_checkpoint.CARD).write_text(text)
    with pytest.raises(UserError, match=words):
        draft_checkpoint.read_card(tmp_path)


@pytest.mark.parametrize(
    "family, change, words",
    [
        ("eagle3", lambda x: x.update({"fc.weight": x["fc.weight"].to(torch.float8_e4m3fn)}), "F8"),
        ("eagle3", lambda x: x.update(vocab_S=x["vocab_S"].int()), "'vocab_S' is of type I32"),
        ("eagle3", lambda x: x["fc.weight"].fill_(torch.inf), "not finite"),
        ("eagle3", lambda x: x["vocab_S"].fill_(3), "must rise"),
        ("bigram", lambda x: x["start_V1"].add_(1), "hold impossible counts"),
        ("bigram", lambda x: x["next_N"].add_(10**9), "'next_N' has ids outside"),
        ("bigram", lambda x: x["times_V"].sub_(10**9), "a count below 0"),
        ("suffix", lambda x: x["text_N"].add_(10**6), "'text_N' has ids outside"),
        ("suffix", lambda x: x["order_N"].sub_(10**6), "points outside"),
    ],
)
def test_forged_weights_are_told_in_one_line(
    saved: dict[str, Path], target: Target, tmp_path: Path, family: str, change: Any, words: str
) -> None:
    folder = forge(saved[family], tmp_path / "best")
    reweighed(folder, change)
    with pytest.raises(UserError, match=words):
        draft_checkpoint.load_draft(folder, target)


STRANGE = st.one_of(  # what is drawn is copied: later changes may go into it
    st.sampled_from(
        [None, True, -1, 0, 1, 2.5, 10**12, 10**400, 1e308, float("nan"), float("inf")]
    ),
    st.sampled_from(["", "x", "eagle3", "lm", "\0", "float16", [], {}, [[]], {"a": 1}]),
    st.integers(-3, 200),
    st.floats(allow_nan=True),
    st.text(max_size=5),
).map(copy.deepcopy)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of keys to every value within a value."""
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    keys = list(range(len(value))) if isinstance(value, list) else keys
    return [*([path] if path else []), *(p for k in keys for p in places(value[k], (*path, k)))]


def mutated(whole: Any, data: st.DataObject) -> Any:
    """One to three values replaced, removed or added."""
    value = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from(places(value) or [("x",)]))
        owner = value
        for key in above:
            owner = owner[key]
        what = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if what == "remove" and isinstance(owner, dict | list) and len(owner):
            del owner[last]
        elif what == "add" and isinstance(owner, dict):
            owner[data.draw(st.text(max_size=8))] = data.draw(STRANGE)
        else:
            owner[last] = data.draw(STRANGE)
    return value


def loads_whole_or_not_at_all(folder: Path, target: Target) -> None:
    """Loading gives a UserError of one line, or a draft that has the file's weights and drafts."""
    try:
        drafter: Drafter = draft_checkpoint.load_draft(folder, target)
    except UserError as error:
        assert "\n" not in str(error)
        return
    state = drafter.state_dict()
    for name, x in load_file(folder / draft_checkpoint.WEIGHTS).items():
        assert torch.equal(x.to(state[name].dtype), state[name])
    depth = min(3, drafter.depth)
    try:
        decode(target, [[5, 6, 7]], Way(drafter, Chain(depth)), max_new_tokens=4)
    except UserError as error:  # such as positions that a draft does not have
        assert "\n" not in str(error)


@pytest.mark.parametrize("family", CONFIGS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_change_of_a_card(
    saved: dict[str, Path], target: Target, tmp_path: Path, family: str, data: st.DataObject
) -> None:
    card = json.loads((saved[family] / draft_checkpoint.CARD).read_text())
    folder = forge(saved[family], tmp_path / "best")
    text = json.dumps(mutated(card, data))
    if data.draw(st.integers(0, 9)) == 0:
        text = text[: data.draw(st.integers(0, len(text)))]
    (folder / draft_checkpoint.CARD).write_text(text)
    loads_whole_or_not_at_all(folder, target)


@pytest.mark.parametrize("family", ["eagle3", "lm", "suffix"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_change_of_the_weights_header(
    saved: dict[str, Path], target: Target, tmp_path: Path, family: str, data: st.DataObject
) -> None:
    """The file is 8 bytes with the length of a JSON header, the header, and the numbers."""
    folder = forge(saved[family], tmp_path / "best")
    whole = (folder / draft_checkpoint.WEIGHTS).read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.dumps(mutated(json.loads(whole[8 : 8 + size]), data)).encode()
    length = data.draw(st.sampled_from([len(header)] * 8 + [0, 10**6, 2**63]))
    numbers = whole[8 + size :]
    if data.draw(st.integers(0, 4)) == 0:
        numbers = numbers[: data.draw(st.integers(0, len(numbers)))]
    (folder / draft_checkpoint.WEIGHTS).write_bytes(length.to_bytes(8, "little") + header + numbers)
    loads_whole_or_not_at_all(folder, target)


FORGED: list[tuple[str, Change | str, str]] = [
    ("eagle3", lambda c: c["shape"].pop("target_vocab"), "target_vocab"),
    ("eagle3", lambda c: c["config"].update(depth=2.5), "depth"),
    ("medusa", lambda c: c["config"].update(depth=10**9), "depth"),
    ("eagle3", "float8", "F8_E4M3"),
    ("eagle3", "brackets", "brackets"),
    ("eagle3", '{"greedy": {"scale": [-1], "shift": [0], "accepted": [0]}}', "more than 0"),
    ("eagle3", '{"greedy": {"scale": [1], "shift": ["x"], "accepted": [0]}}', "shift[0]: expected"),
    ("eagle3", '{"greedy": {"scale": [1], "shift": [1e999], "accepted": [0]}}', "shift holds inf"),
    ("eagle3", '{"greedly": null}', "did you mean 'greedy'"),
    ("eagle3", '{"prompts": ', "damaged"),
]


def forged(saved: dict[str, Path], folder: Path, family: str, what: Change | str) -> Path:
    forge(saved[family], folder, what if callable(what) else None)
    if what == "float8":
        reweighed(folder, lambda x: x.update({"fc.weight": x["fc.weight"].to(torch.float8_e5m2)}))
        reweighed(folder, lambda x: x.update({"fc.weight": x["fc.weight"].to(torch.float8_e4m3fn)}))
    if what == "brackets":
        (folder / draft_checkpoint.CARD).write_text("[" * 100_000)
    if isinstance(what, str) and what.startswith("{"):
        (folder / draft_checkpoint.CALIBRATION).write_text(what)
    return folder


def arguments(script: str, folder: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.txt").write_text("the cat\n")
    return [
        f"scripts/{script}",
        str(folder),
        *{
            "export": ["--to", str(tmp_path / "out")],
            "evaluate": ["--prompts", str(tmp_path / "prompts.txt"), "--dtype", "float32"],
            "generate": ["the cat", "--dtype", "float32"],
        }[script],
    ]


@pytest.mark.parametrize("script", ["export", "evaluate", "generate"])
@pytest.mark.parametrize("family, what, words", FORGED)
def test_the_command_lines_say_it_and_exit_with_2(
    saved: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    family: str,
    what: Change | str,
    words: str,
) -> None:
    folder = forged(saved, tmp_path / "best", family, what)
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    monkeypatch.setattr(sys, "argv", arguments(script, folder, tmp_path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ended.value.code == 2 and len(said) == 1 and words in said[0] and str(folder) in said[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["export", "evaluate", "generate"])
def test_a_process_says_it_and_exits_with_2(
    saved: dict[str, Path], tmp_path: Path, script: str
) -> None:
    folder = forged(saved, tmp_path / "best", "eagle3", "brackets")
    ended = process(arguments(script, folder, tmp_path))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith(f"error: {folder}")


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        ("num_hidden_layers", 1025, False),
        ("num_experts", 10**6, False),
        ("n_layer", 1024, True),
        ("shared_expert_intermediate_size", 5632, True),
        ("vocab_size_per_layer_input", 262144, True),
        ("layer_rope_theta", [1e4, 1e6], True),
        ("intermediate_size", 2**32, False),
    ],
)
def test_only_counts_of_modules_are_few(key: str, value: Any, fits: bool) -> None:
    """A width or a theta by layer or expert is no count, though its key names them."""
    with nullcontext() if fits else pytest.raises(UserError, match=f"shape: model.{key} is"):
        draft_checkpoint._require_sane({"model": {key: value}}, "shape")
