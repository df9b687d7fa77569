"""Every configuration composes; every mistake is told in one line, with exit code 2.

Run alone: python -m pytest tests/train/test_configs.py         (-m "not slow": under half a minute)
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import wandb
from hydra.core.override_parser.overrides_parser import OverridesParser

from specdec.drafters import DRAFTERS
from specdec.errors import UserError
from specdec.losses.loss_terms import LOSS_TERMS
from tests.tiny import REPOSITORY, Tiny, compose
from tests.told import require_one_line, told
from train import pipeline
from train.overrides import require_texts_in
from train.run_config import Arguments, Config, _kinds_of, composed, in_full, quoted, register

CONF = REPOSITORY / "conf"
GROUPS = ["target", "data", "drafter", "loss", "optim", "sampler", "decode", "track"]
NEEDED = {  # what must be given beside an option
    "target=model": "target.path=x",
    "data=conversations": "data.path=x",
    **{f"recipe={path.stem}": "data.path=x" for path in (CONF / "recipe").glob("*.yaml")},
    "data=pairs": "data.path=x",
    "data=text": "data.path=x",
    "loss=adaspec": "loss.reference=x",
    "loss=expected_tree": "loss.paths=[[0]]",
}


def options(group: str) -> list[str]:
    found = {p.stem for p in (CONF / group).glob("*.yaml")}
    found |= set(DRAFTERS) if group == "drafter" else set(LOSS_TERMS) if group == "loss" else set()
    return sorted(found)


# What composes


@pytest.mark.parametrize(
    "chosen", [f"{g}={o}" for g in (*GROUPS, "recipe", "experiment", "debug") for o in options(g)]
)
def test_every_option_composes(chosen: str) -> None:
    more = [f"drafter={d}" for d in DRAFTERS] if chosen.startswith("debug") else []
    for extra in more or [None]:
        given = [chosen, NEEDED.get(chosen), extra]
        config = compose([x for x in given if x])
        assert isinstance(config, Config)
        assert "${" not in repr(config) and "???" not in repr(config)
    group, option = chosen.split("=")
    if group == "drafter" and option in DRAFTERS:
        assert config.drafter.name == option
    if group == "loss" and option in LOSS_TERMS:
        assert config.loss.terms == {option: 1.0}


def test_the_quickstart_composes_with_any_family() -> None:
    """Its own head has a smaller draft vocabulary, a setting that some families lack."""
    assert compose(["experiment=quickstart"]).drafter.draft_vocab == 4096
    for name in DRAFTERS:
        more = ["combine_with=null", "decode.fastest=false"] if DRAFTERS[name].copies else []
        chosen = compose(["experiment=quickstart", f"drafter={name}", *more]).drafter
        assert getattr(chosen, "draft_vocab", None) != 4096


def test_a_copying_draft_has_no_fastest_tree() -> None:
    with pytest.raises(UserError, match=r"drafter=suffix, which copies tokens: give decode\.fast"):
        compose(["experiment=quickstart", "drafter=suffix", "combine_with=null"])


def test_options_are_there() -> None:
    """So that a group that lost its files does not pass by having none to try."""
    assert all(options(g) for g in (*GROUPS, "recipe", "experiment", "debug", "search"))


@pytest.mark.parametrize("option", options("search"))
def test_every_search_composes(option: str) -> None:
    """With the sweeper's own configuration; each key that it searches exists."""
    cfg = compose([f"search={option}"], hydra=True)
    assert "Optuna" in cfg.hydra.sweeper._target_
    config = compose([f"search={option}"])
    for key in cfg.hydra.sweeper.params:
        node: Any = config
        for part in key.split("."):
            node = getattr(node, part)


def test_defaults_are_those_of_the_classes() -> None:
    assert compose([]).drafter == DRAFTERS["eagle3"].Config()
    assert compose(["drafter=medusa", "drafter.depth=5"]).drafter.depth == 5
    assert compose(["drafter=lm"]).name == "lm"


def test_a_loss_is_for_the_tree_that_will_be_drafted() -> None:
    drafted = ["decode.tree=static", "decode.paths=[[0],[0,0]]"]
    assert compose(drafted).loss.paths is None
    assert compose([*drafted, "loss=expected_tree"]).loss.paths == [[0], [0, 0]]
    other = compose([*drafted, "loss=expected_tree", "loss.paths=[[0]]"])
    assert other.loss.paths == [[0]]


def test_terms_that_change_over_a_run() -> None:
    """As the documents write them."""
    config = compose(["loss.terms={kl: [1, 0, 0.5], nla: [0, 1, 0.5]}"])
    assert config.loss.terms == {"kl": [1, 0, 0.5], "nla": [0, 1, 0.5]}


# Mistakes in the configuration


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        ("loss.pr=token", ["loss.pr", "did you mean 'per'"]),
        ("+loss.foo=1", ["loss.foo", "known: .*terms"]),
        ("+loss.pr=token", ["loss.pr", "did you mean 'per'"]),
        ("+foo=1", ["'foo'", "known: .*target"]),
        ("+dat.path=x", ["'dat'", "did you mean 'data'"]),
        ("lop.rows=3", ["'lop", "did you mean 'loop'"]),
        ("loop.row=3", ["loop.row", "did you mean 'rows'"]),
        ("drafter.dept=3", ["drafter.dept", "did you mean 'depth'"]),
        ("loop.rows=abc", ["loop.rows", "abc", "[Ii]nteger"]),
        ("loop.rows=1.5", ["loop.rows", "1.5", "[Ii]nteger"]),
        ("optim.lr=fast", ["optim.lr", "fast", "[Ff]loat"]),
        ("optim.betas=[a,b]", ["optim.betas", "[Ff]loat"]),
        ("drafter.depth=deep", ["drafter.depth", "deep", "[Ii]nteger"]),
        ("drafter=eagle4", ["drafter", "eagle4", "did you mean .eagle"]),
        ("drafter=EAGLE3", [r"drafter=EAGLE3 is unknown; did you mean 'eagle3'\?$"]),
        ("drafter=", ["drafter= is unknown; known: .*eagle3.*unigram$"]),
        ("drafter@head=eagle3", ["drafter@head is not a group .*did you mean 'drafter'"]),
        ("hydra=quiet", ["hydra is not a group of settings; known: .*track$"]),
        ("+drafter=medusa", ["drafter is chosen already: .*drafter=NAME"]),
        ("~drafter=medusa", ["~drafter=medusa takes out nothing"]),
        ("optim.lr=1e-3,1e-4", ["gives several values: give one; or add -m"]),
        ("experiment=conf/experiment/x.yaml", ["experiment=conf/experiment/x.yaml is unknown"]),
        ("hydra/sweeper=optun", ["hydra/sweeper=optun is unknown; did you mean 'optuna'"]),
        ("loss=nlaa", ["loss", "nlaa", "nla"]),
        ("loss.terms.kll=1", [r"loss\.terms\.kll", "did you mean 'kl'"]),
        ("loss.terms.nla=0", [r"loss\.terms is empty"]),
        ("loss.terms.nla=[0,1]", [r"loss\.terms\.nla=\[0, 1\]", "UNTIL"]),
        ("loss.terms.nla=[0,1,0]", [r"nla=\[0, 1, 0\]", "above 0, up to 1"]),
        ("loss.terms.nla={from: 0}", [r"loss\.terms\.nla", r"\[0, 1, 0\.5\]"]),
        ("loss.terms.nla=much", [r"terms\.nla=much", "finite"]),
        ("loss.constants.top_k.k=2.5", [r"top_k\.k=2\.5", "whole number"]),
        ("loss.constants.adaspec.keep=2", [r"adaspec\.keep=2", "0 to 1"]),
        ("loss=adaspec", [r"terms\.adaspec", r"loss\.reference=runs/NAME/best"]),
        ("loss.reference=x", [r"loss\.reference=x is read by adaspec alone"]),
        ("loss=expected_tree", [r"terms\.expected_tree", r"decode\.paths=\[\[0\]"]),
        ("loss.paths=[[0]]", [r"loss\.paths is read by expected_tree alone"]),
        ("loss.constants.jsd.bta=1", [r"constants\.jsd\.bta", "did you mean 'beta'"]),
        ("loss.per=row", [r"loss\.per", "sequence, token"]),
        ("drafter.anchors.per_row=0", [r"anchors\.per_row=0", "1 or more"]),
        ("experiment=quick", ["experiment", "quick", "quickstart"]),
        ("target=smolm2", ["target", "smolm2", "smollm2"]),
        ("target=model", ["target.path", "[Mm]issing"]),
        ("data=conversations", ["data.path", "[Mm]issing"]),
        ("sampler.temperature=-1", ["sampler.temperature", "-1", "give 0"]),
        ("sampler.top_p=1.5", ["sampler.top_p", "1.5"]),
        ("decode.top_p=1.5", [r"decode\.top_p", "1.5"]),
        ("responses.top_p=0", [r"responses\.top_p", "above 0"]),
        *((f"{g}.top_k=-1", [rf"{g}\.top_k", "-1"]) for g in ("responses", "sampler", "decode")),
        ("decode.temperatures=[-1]", [r"decode\.temperatures", "-1"]),
        ("decode.temperatures=[nan]", [r"decode\.temperatures", "nan"]),
        ("decode.temperatures=[0,0]", [r"decode\.temperatures", "only once"]),
        ("decode.nodes=5", [r"decode\.nodes=5", r"decode\.tree"]),
        ("decode.gamma=1000", [r"decode\.gamma=1000"]),
        ("drafter.depth=1000", [r"drafter\.depth=1000", "1 to 128"]),
        ("drafter.layers=[]", [r"drafter\.layers=\[\]: give"]),
        ("drafter.layers=[1,1,1]", [r"drafter\.layers=\[1, 1, 1\]: give"]),
        ("drafter.layers=[1,-1]", [r"drafter\.layers=\[1, -1\]"]),
        ("responses.root=", [r"responses\.root is empty"]),
        ("hidden_states.root=", [r"hidden_states\.root is empty"]),
        ("hidden_states.path=''", [r"hidden_states\.path is empty"]),
        ("hidden_states.mode=offlin", [r"hidden_states\.mode", "did you mean 'offline'"]),
        ("loop.precision=fp8", [r"loop\.precision", "bf16"]),
        ("data.min_response=-1", [r"data\.min_response=-1", "1 or more"]),
        ("data.max_length=0", [r"data\.max_length=0"]),
        ("optim.lr=0", [r"optim\.lr=0", "above 0"]),
        ("optim.lr=inf", [r"optim\.lr=inf"]),
        ("optim.rates={*.bias:-1}", [r"optim\.rates\.\*\.bias=-1"]),
        ("optim.hidden=sgd", [r"optim\.hidden='sgd'", "adamw, muon"]),
        ("loop.seed=4294967296", [r"loop\.seed=4294967296", "0 to 4294967295"]),
        ("loop.seed=-1", [r"loop\.seed=-1"]),
        ("data.seed=-1", [r"data\.seed=-1"]),
        ("responses.seed=4294967296", [r"responses\.seed"]),
        ("decode.seed=-1", [r"decode\.seed=-1"]),
        ("name=''", ["name=''", "inside runs/"]),
        (
            "decode.verification=lenience:facto=0.8",
            [r"decode\.verification", "'facto' is not a parameter"],
        ),
        ("loop.rows", ["loop.rows"]),
    ],
)
def test_a_mistake_in_the_configuration(
    capsys: pytest.CaptureFixture[str], mistake: str, parts: list[str]
) -> None:
    require_one_line(told(capsys, [mistake]), *parts)


@pytest.mark.parametrize(
    ("drafter", "mistake", "right"),
    [
        ("medusa", "drafter.num_layer=2", "num_layers"),
        ("lm", "drafter.train_embedding=true", "train_embeddings"),
        ("ngram", "drafter.maxngram=2", "max_ngram"),
    ],
)
def test_the_nearest_key_is_one_of_the_drafter_that_was_chosen(
    capsys: pytest.CaptureFixture[str], drafter: str, mistake: str, right: str
) -> None:
    said = told(capsys, [f"drafter={drafter}", mistake])
    require_one_line(said, f"did you mean '{right}'")


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        ("loop.select_by=tau", ["loop.select_by", "tau_greedy"]),
        ("loop.rows=0", ["loop.rows"]),
        ("loop.accumulate=0", ["loop.accumulate"]),
        ("loop.log_every=0", ["loop.log_every"]),
        ("loop.epochs=0", ["loop.epochs"]),
        ("loop.rows=1000", ["loop.rows", "one step reads"]),
        ("optim.betas=[0.9]", ["optim.betas"]),
        ("loss.terms={k: 1}", [r"loss\.terms\.k is", "kl"]),
        ("loss.chunk=0", ["loss.chunk"]),
        ("sampler.temperature=0", ["sampler.temperature=0", "train at 1"]),
        ("data.responses=datta", ["data.responses", "data"]),
        ("data.format=sharegtp", ["data.format", "did you mean 'sharegpt'"]),
        ("data.held_out=1.5", ["data.held_out", "1.5"]),
        ("data.held_out=0", ["held.out"]),
        ("data.limit=0", ["data.limit"]),
        ("target.dtype=float31", ["target.dtype", "did you mean 'float32'"]),
        ("target.path=/no/such/model", ["target.path", "/no/such/model"]),
        ("drafter.depth=0", ["drafter.depth"]),
        ("drafter.initialisation=targett", ["drafter.initialisation", "did you mean 'target'"]),
        ("drafter.layers=[1,2,99]", ["99", "to 4"]),
        ("decode.verification=blok", ["decode.verification|blok", "did you mean 'block'"]),
        ("decode.gamma=0", ["decode.gamma"]),
        ("decode.prompts=-1", ["prompts"]),
        ("decode.repeats=0", ["decode.repeats"]),
        ("decode.temperatures=[]", ["decode.temperatures"]),
        ("decode.temperatures=[-1.0]", [r"decode\.temperatures", "-1"]),
        ("decode.temperatures=[1e-38]", [r"decode\.temperatures", "1e-38", "give 0 for greedy"]),
        ("responses.temperature=1e-38", [r"responses\.temperature", "1e-38", "give 0 for greedy"]),
        ("export=hff", ["export|layout", "did you mean 'hf'"]),
        ("debug=1", ["debug=1 does not name a group of settings; known: tiny"]),
        ("data=1", ["data=1 does not name", "conversations"]),
        ("data=null", ["data=null does not name"]),
        ("loss=[1]", ["loss=.1. does not name", "nla"]),
        ("drafter.layers=[[0]]", [r"drafter: layers\[0\]: expected a whole number"]),
        ("optim.lr=" + "9" * 400, [r"optim\.lr: int too large"]),
        ("loop.epochs=" + "9" * 400, [r"loop\.epochs=9+\.\.\.: give a number of at most"]),
        ("responses.max_new_tokens=2.5", [r"responses\.max_new_tokens", "2.5"]),
    ],
)
def test_a_value_that_cannot_be(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, mistake: str, parts: list[str]
) -> None:
    """It is told, and before hours of training: no checkpoint was written by then."""
    require_one_line(told(capsys, tiny.overrides("eagle3", mistake), tmp_path / "run"), *parts)
    assert not (tmp_path / "run" / "checkpoints").exists(), "told only after training"


def test_a_path_of_ones_own_may_stand_for_a_group(tmp_path: Path) -> None:
    given = ["target=Qwen/Qwen3-4B", "data=chats.jsonl", "data=sharegpt", "name=a.b", "-m"]
    assert in_full(given) == [
        *("target=model", "target.path=Qwen/Qwen3-4B"),
        *("data=conversations", "data.path=chats.jsonl"),
        *("data=sharegpt", "name=a.b", "-m"),
    ]
    assert in_full(["data=mine", "data=a.yaml,b.yaml"]) == ["data=mine", "data=a.yaml,b.yaml"]
    assert in_full([f"data={tmp_path}"]) == ["data=conversations", f"data.path={tmp_path}"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "v1.5.yaml").touch()
    for folder in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"]):
        assert in_full([*folder, "data=v1.5"]) == [*folder, "data=v1.5"]


@pytest.mark.parametrize("verification", ["lenience:factor=0.8", "typical:epsilon=0.2,delta=0.05"])
def test_a_method_is_written_as_the_readme_writes_it(verification: str) -> None:
    assert compose([f"decode.verification={verification}"]).decode.verification == verification
    assert (
        compose([f"decode.verification='{verification}'"]).decode.verification == verification
    )  # quoted for Hydra by the user


UNTOUCHED = ["-m", "--help", "--config-dir=a=b", "drafter=lm", "data.path='a=b'", "a={b: c=d}"]


@pytest.mark.parametrize("argument", UNTOUCHED)
def test_what_hydra_reads_by_itself_is_not_quoted(argument: str) -> None:
    assert quoted([argument]) == [argument]


TEXTS = [
    "chats (1)",
    "[a]x",
    "{a}",
    "it's",
    'a "b"',
    "é中",
    "C:\\x(1)\\",
    "a'\\",
    "a\\'b\"{",
    "a=[b]",
    "#;&",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "key", ["data.path", "data.prefix", "responses.root", "drafter.from", "name"]
)
def test_a_text_may_have_brackets_quotes_and_any_letter(key: str, text: str) -> None:
    config = compose(["target=smollm2", "data.path=x", "drafter=medusa", f"{key}={text}"])
    value = config.initialisation.draft if key == "drafter.from" else config
    for name in key.split(".") if value is config else ():
        value = getattr(value, name)
    assert value == text


# what is typed → what Hydra would make of it, were it not quoted
NUMBERS = ["1.10", "1e5", "2024_01", "1e10", "2025_11_26", "1_0", "true", "False", "+1", "1.0e3"]


@pytest.mark.parametrize("text", [*NUMBERS, "chats ", " chats", "a b ", "007", "0x10", "10", "1.1"])
@pytest.mark.parametrize(
    "key", ["name", "data.path", "data.subset", "target.revision", "drafter.from", "data.date_"]
)
def test_a_text_that_looks_like_a_number_stays_as_typed(key: str, text: str) -> None:
    key = key.replace("date_", "split")
    config = compose(["target=smollm2", "data.path=x", "drafter=medusa", f"{key}={text}"])
    value = config.initialisation.draft if key == "drafter.from" else config
    for name in key.split(".") if value is config else ():
        value = getattr(value, name)
    assert value == text


def test_texts_in_lists_and_sweeps_stay_as_typed() -> None:
    sources = "data.sources=[{path: 2025_11_26, subset: 1.10, weight: 3}, {path:b,weight:1.50}]"
    base = ["target=smollm2", "data.path=", "drafter=medusa"]
    data = compose([*base, sources]).data
    assert [(s.path, s.subset, s.weight) for s in data.sources] == [
        ("2025_11_26", "1.10", 3),
        ("b", None, 1.5),
    ]
    assert compose([*base[:1], "data.path=x", "data.pair=[1.10, 2]", base[2]]).data.pair == [
        "1.10",
        "2",
    ]
    (sweep,) = OverridesParser.create().parse_overrides(quoted(["name=1.10,1.1,x,1e5"]))
    assert [*sweep.sweep_string_iterator()] == ["'1.10'", "1.1", "x", "'1e5'"]
    (sweep,) = OverridesParser.create().parse_overrides(quoted(["name=choice(1.10,x)"]))
    assert [*sweep.sweep_string_iterator()] == ["'1.10'", "x"]
    # what is no text stays a number, and null stays null
    assert quoted(["optim.lr=1e-3,1e-4", "data.limit=1_000", "data.subset=null"]) == [
        "optim.lr=1e-3,1e-4",
        "data.limit=1_000",
        "data.subset=null",
    ]


YAML = """# @package _global_
name: {name}
data:
  path: {path}
  sources: []
  pair: [a, {pair}]
  limit: 1_000
"""


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"path": "2025_11_26"}, "4: data.path"),
        ({"name": "1.10"}, "2: name"),
        ({"name": "1e5"}, "2: name"),
        ({"pair": "1_0"}, "6: data.pair"),
        ({"name": "yes"}, "2: name"),
    ],
)
def test_a_number_for_a_text_in_a_file_of_settings_is_rejected(
    tmp_path: Path, wrong: dict[str, str], line: str
) -> None:
    """Since YAML loses what was typed; with quotes it is kept."""
    path, texts = tmp_path / "mine.yaml", {"name": "x", "path": "y", "pair": "b"}
    path.write_text(YAML.format(**texts))
    require_texts_in(path, "experiment", _kinds_of)
    (value,) = wrong.values()
    path.write_text(YAML.format(**texts | wrong))
    with pytest.raises(UserError, match=f"mine.yaml, line {line}: {value} is read as a number: p"):
        require_texts_in(path, "experiment", _kinds_of)
    path.write_text(YAML.format(**texts | {key: f"'{x}'" for key, x in wrong.items()}))
    require_texts_in(path, "experiment", _kinds_of)
    (tmp_path / "data.yaml").write_text("path: 2025_11_26\n")  # the package is the group
    with pytest.raises(UserError, match=r"line 1: data\.path: 2025_11_26 is read"):
        require_texts_in(tmp_path / "data.yaml", "data", _kinds_of)


def test_the_files_of_a_run_are_read(tmp_path: Path) -> None:
    """The chosen one of a group in the folder of settings, and not another beside it."""
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    for name in ("mine", "other"):
        (conf / "experiment" / f"{name}.yaml").write_text(
            f"# @package _global_\nname: {'1.10' if name == 'mine' else 'x'}\n"
        )
    register()
    overrides = ["target=smollm2", "data.path=x", "drafter=medusa"]
    assert composed([*overrides, "experiment=other"], Arguments(folder=conf)).name == "x"
    with pytest.raises(UserError, match=r"mine\.yaml, line 2: name: 1\.10 is read as a number"):
        composed([*overrides, "experiment=mine"], Arguments(folder=conf))


@pytest.mark.parametrize(
    "mistake", ["drafter.layers=[1,2", "optim.rates={*.bias:2", "optim.lr=(1", "data.pair=[a,b'"]
)
def test_what_hydra_cannot_read_is_told_without_its_words(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    said = told(capsys, tiny.overrides("eagle3", mistake))
    require_one_line(said, re.escape(mistake), "close all brackets", "put quotes around it")
    assert not re.search("token recognition|mismatched|viable|EOF", said)
    require_one_line(told(capsys, ["data.path"]), "'data.path' has no value: give KEY=VALUE")


# What can be told before the target is loaded


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        ("data.path=/no/such/file.jsonl", ["/no/such/file.jsonl: no such file"]),
        ("data.path=package:no_such_package", ["no_such_package", "pip install"]),
        ("data.path={broken}", ["broken.jsonl: no conversation in it"]),
        ("hidden_states.root={file}/x", ["file/x cannot be made"]),
        ("hidden_states.root=/proc/x", ["/proc/x cannot be made"]),
        ("data.responses=target responses.root=/proc/x", ["/proc/x cannot be made"]),
        ("track.mode=online", ["track.mode=online", "wandb login", "track.mode=offline"]),
    ],
)
def test_a_mistake_is_told_before_the_target_is_loaded(
    tiny: Tiny,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mistake: str,
    parts: list[str],
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(pipeline, "TargetLoader", never)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()  # it reads the environment once in a process
    places = {"file": tmp_path / "file", "broken": tmp_path / "broken.jsonl"}
    for path in places.values():
        path.write_text("{")
    more = mistake.format(**places).split()
    require_one_line(told(capsys, tiny.overrides("medusa", *more), tmp_path / "run"), *parts)


def test_online_in_an_environment_that_is_offline(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")
    overrides = tiny.overrides("medusa", "track.mode=online")
    require_one_line(told(capsys, overrides, tmp_path / "run"), "WANDB_MODE=offline: unset")


def test_a_run_folder_that_cannot_be_made(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("/proc/run", "/dev/null/run", "a\0b"):
        require_one_line(told(capsys, tiny.overrides("medusa"), Path(folder)), "cannot be made")


@pytest.mark.parametrize("kind", [ValueError, TypeError, OverflowError])
def test_a_bug_in_a_check_is_not_told_as_a_mistake_of_the_user(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Hydra raises such errors, too, for what a user gave; this one is from a check of ours."""

    def broken(*_: object, **__: object) -> None:
        raise kind("a bug")

    register()
    monkeypatch.setattr("train.optim.require_between", broken)
    with pytest.raises(kind, match="a bug"):
        composed(tiny.overrides("eagle3", "optim.rates={a:0.5}"))
