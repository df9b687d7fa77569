"""What the scripts compute on their own: text while it streams, a two-sample test, warm-ups.

Run alone: python -m pytest tests/scripts/test_scripts.py
"""

import json
import shlex
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specdec.decoding.config import DecodeConfig
from specdec.decoding.decode import decode, generate
from specdec.decoding.way import Way
from specdec.drafters import with_copying
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.lm import LMConfig
from specdec.drafters.medusa import Medusa
from specdec.errors import UserError
from specdec.formats import draft_checkpoint
from specdec.measure.results import Measured
from specdec.report import verdict
from specdec.sampling.trees import Chain, Dynamic, Shape
from specdec.targets.target import Target
from specdec.targets.target_config import TargetConfig
from tests.processes import process, script_module
from tests.report.test_verdict import GAIN, at, of, tree
from tests.tiny import architectures, make_tokenizer, random_drafter, random_target
from tests.told import require_one_line


def test_homogeneity_of_two_samples() -> None:
    """Two cells of 30, 20 and 20, 30: each of the four is 5 off its 25, χ² = 4 · 25 / 25. Rare
    cells are pooled, here 2 and 1 of one side with 1 and 2 of the other: 3 and 3, no deviation."""
    from benches.lossless import homogeneity

    one, two = Counter(a=30, b=20), Counter(a=20, b=30)
    assert homogeneity(one, two) == (pytest.approx(4.0), 1)
    assert homogeneity(one, one) == (0.0, 1)
    chi, freedom = homogeneity(one + Counter(c=2, d=1), two + Counter(c=1, d=2))
    assert (chi, freedom) == (pytest.approx(4.0), 2)


def test_every_prompt_warms_up_what_is_compiled() -> None:
    from benches.turns import ResponseWriter, TimedGeneration, in_turn, ratio

    calls: dict[str, list[int]] = {"eager": [], "compiled": []}

    def answer(name: str, prompt: list[int]) -> TimedGeneration:
        calls[name].append(len(prompt))
        return TimedGeneration([1], 1.0)

    each = {
        name: ResponseWriter(partial(answer, name), compiled=name == "compiled") for name in calls
    }
    in_turn(each, [[1] * n for n in (2, 5, 3)])
    assert calls == {"eager": [2, 5, 2, 5, 3], "compiled": [2, 5, 3, 2, 5, 3]}
    assert ratio([3.0], [2.0]) == "1.50 (one prompt)"
    assert ratio([1.0, 2.0, 3.0, 4.0], [1.0] * 4) == "2.50 (1.25 to 3.75)"


def test_an_answerer_stands_beside_the_fastest_of_its_rivals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two prompts, answered in 2 tokens each; τ = 1 + (3 + 1) / 4 accepted of 4 speculation
    steps."""
    from benches.turns import ResponseWriter, TimedGeneration, compare

    each = {name: ResponseWriter(None) for name in ("slow", "fast")}  # type: ignore[arg-type]
    each["ours"] = ResponseWriter(None, "2", ["slow", "fast"])  # type: ignore[arg-type]
    made = {"slow": [TimedGeneration([1, 2], 8.0)] * 2, "fast": [TimedGeneration([1, 3], 4.0)] * 2}
    made["ours"] = [TimedGeneration([1, 3], 2.0, 2, [2, 1]), TimedGeneration([1, 2], 2.0, 2, [1])]
    compare(each, made)
    last = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")[1:-1]]
    figures = ["2.000", "0.750 0.250", "4", "1.0", "2.00 (2.00 to 2.00)"]
    assert last == ["ours", "2", *figures, "fast", "1 of 2"]


def test_drafts_that_know_nothing_yet_are_not_measured() -> None:
    from benches.setting import drafters_of

    target = random_target(architectures(16, 2)["llama"])
    assert list(drafters_of([Path("ngram"), Path("suffix")], target)) == ["ngram", "suffix"]
    for name in ("bigram", "unigram", "eagle3"):
        with pytest.raises(UserError, match=f"{name} learns from texts: run `python train.py"):
            drafters_of([Path(name)], target)
    with pytest.raises(UserError, match="ngram is measured already"):
        drafters_of([Path("ngram"), Path("ngram")], target)


def stood_in(
    monkeypatch: pytest.MonkeyPatch, target: Target, prompts: list[list[int]], decoder: Any
) -> None:
    """Let `bench lossless` measure n-gram lookup of this target on these prompts through this
    decoder."""
    from benches import lossless as bench
    from benches.setting import BenchSetting, drafters_of

    drafters = drafters_of([Path("ngram")], target)
    monkeypatch.setattr(bench, "setting", lambda *_: BenchSetting(target, drafters, prompts))
    monkeypatch.setattr(bench, "decode", decoder)


def test_identity_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoded once each, whatever was interrupted; other prompts or other weights are measured
    anew, and a draft that changes one response is told."""
    from benches import lossless as bench

    target = random_target(architectures(16, 2)["llama"])
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    calls: list[int] = []
    left = [2]  # calls until it is interrupted
    last = [0]  # what is added to the last token of a drafted response

    def counted(_target, part, way=None, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        calls.append(len(part))
        made = decode(target, part, way, **options)
        if way is not None:
            made[0].ids[-1] += last[0]
        return made

    stood_in(monkeypatch, target, prompts, counted)

    def run(folder: str = "kept") -> str:
        bench.lossless([Path("ngram")], new=6, batches=[2], keep=tmp_path / folder)
        return capsys.readouterr().out

    with pytest.raises(KeyboardInterrupt):
        run()
    assert calls == [3, 2]  # all plainly, then the first batch
    left[0] = 1
    assert "3 of 3" in run() and calls == [3, 2, 1]
    assert "3 of 3" in run() and calls == [3, 2, 1]
    prompts[0] = [1, 2]
    left[0] = 3
    assert "3 of 3" in run() and calls[3:] == [3, 2, 1]
    left[0], last[0] = 3, 1
    assert "1 of 3" in run("broken")  # one of each batch


@pytest.mark.parametrize(("gamma", "chain", "tree"), [(2, 2, 2), (5, 5, 4), (None, 5, 4)])
def test_identity_drafts_as_deep_as_asked(
    monkeypatch: pytest.MonkeyPatch, gamma: int | None, chain: int, tree: int
) -> None:
    from benches import lossless as bench

    shapes: list[Shape | None] = []

    def seen(target, prompts, way=None, **options):
        shapes.append(way and way.shape)
        return decode(target, prompts, way, **options)

    target = random_target(architectures(16, 2)["llama"])
    stood_in(monkeypatch, target, [[1, 2, 3]], seen)
    bench.lossless([Path("ngram")], new=6, trees=True, gamma=gamma)
    assert shapes == [None, Chain(chain), Dynamic(tree, 12, 4)]


def test_identity_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from benches import lossless as bench
    from benches.setting import BenchSetting

    def never(*_, **__):
        raise AssertionError("decoded")

    target = random_target(architectures(16, 2)["llama"])
    stood_in(monkeypatch, target, [[1, 2, 3]], never)
    heads = {"medusa": Medusa.build(Medusa.Config(depth=2), target)}
    monkeypatch.setattr(bench, "setting", lambda *_: BenchSetting(target, heads, [[1, 2, 3]]))
    with pytest.raises(UserError, match="at most 2 tokens"):
        bench.lossless([Path("medusa")], new=6, gamma=3)


@pytest.mark.parametrize(
    "words",
    [
        "D --seed 1 hi",
        "--seed 1 D hi",
        "D hi --seed 1",
        "D --stop a --seed 1 hi",
        "D --seed 1 -- hi",
    ],
)
@pytest.mark.parametrize("command", ["", "say "])
def test_options_stand_before_between_and_after_positional_arguments(
    command: str, words: str
) -> None:
    """In a script of its own and in a subcommand, as those of scripts/bench are."""
    from command_line import Parser

    parser = whole = Parser()
    if command:
        parser = whole.add_subparsers(required=True).add_parser("say")
    parser.add_argument("draft")
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("more", nargs="*")
    parser.add_argument("--stop", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    read = whole.parse_args((command + words).split())
    assert (read.draft, read.prompt, read.seed) == ("D", "hi", 1)
    with pytest.raises(UserError, match="unrecognized arguments: --nothing"):
        whole.parse_args((command + "--nothing " + words).split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--length goodput", "--draft-length"),
        ("--length=goodput", "--draft-length"),
        ("--settings threshold=0.4", "--draft-length-settings"),
        ("--rule block", "--verification"),
        ("--log-rounds log.jsonl", "--log-steps"),
    ],
)
def test_an_option_with_another_name_now_is_told(old: str, new: str) -> None:
    """Where the parser has the new one."""
    from command_line import Parser, add_decoding

    parser = Parser()
    parser.add_argument("draft")
    with pytest.raises(UserError, match="unrecognized arguments"):
        parser.parse_args(["D", *old.split()])
    add_decoding(parser)
    name = old.replace("=", " ").split()[0]
    with pytest.raises(UserError, match=f"^{name} is now {new}: give {new}$"):
        parser.parse_args(["D", *old.split()])


@pytest.mark.parametrize(
    ("decode", "options", "words"),
    [
        ({"gamma": 2}, "", "chains of 2 tokens, as {run} says"),
        ({"gamma": 1, "fastest": True}, "", "chains of 1 token, as {run} says"),
        ({"gamma": None}, "", "chains of 3 tokens, as {run} says"),
        (
            {"gamma": 2, "draft_length": "confidence", "draft_length_settings": {"threshold": 0.4}},
            "",
            "chains of 2 tokens or fewer (draft_length=confidence), as {run} says",
        ),
        (
            {"gamma": 2, "tree": "dynamic", "nodes": 5},
            "",
            "dynamic trees of 5 nodes, at most 2 tokens deep, as {run} says",
        ),
        ({"gamma": 2}, "--gamma 1", "chains of 1 token, as the options say"),
        (
            {"gamma": 2},
            "--tree static --paths [[0],[1]]",
            "static trees of 2 nodes, at most 1 token deep, as the options say",
        ),
        (None, "", "chains of 3 tokens, the depth of the draft itself"),
        ({"gamma": 9}, "", "eagle was trained to draft 3 tokens in a row but drafts 9 here"),
    ],
)
def test_a_draft_is_decoded_as_its_run_decoded_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    decode: dict[str, Any] | None,
    options: str,
    words: str,
) -> None:
    from command_line import add_decoding, decoding, parser_of, tell_shape

    target, best = random_target(architectures(16, 2)["llama"]), tmp_path / "run" / "best"
    drafter = random_drafter(EagleConfig(depth=3), target, 0.0)
    draft_checkpoint.write_draft(best, drafter, target)
    if decode is not None:
        settings = {"decode": decode, "drafter": {"name": "eagle"}}
        (best.parent / "config.json").write_text(json.dumps(settings))
    parser = parser_of("")
    add_decoding(parser)
    cfg, origin = decoding(parser.parse_args([str(best), *options.split()]))
    tell_shape(cfg, origin, drafter, target)
    run = best.parent / "config.json"
    assert words.format(run=run) in capsys.readouterr().out


def test_without_options_the_settings_are_those_of_the_dataclasses(tmp_path: Path) -> None:
    """No option has a default of its own."""
    from command_line import add_decoding, add_measuring, decoding, parser_of

    target = random_target(architectures(16, 2)["llama"])
    draft_checkpoint.write_draft(
        tmp_path / "draft", random_drafter(EagleConfig(depth=3), target, 0.0), target
    )
    parser = parser_of("")
    add_measuring(parser)
    add_decoding(parser)
    args = parser.parse_args([str(tmp_path / "draft")])
    assert decoding(args, prompts=args.limit)[0] == DecodeConfig()
    assert args.dtype == TargetConfig.dtype
    said = " ".join(parser.format_help().split())
    assert f"default: {DecodeConfig.timed} " in said and "default: [0.0, 1.0]" in said


def test_a_hybrid_that_a_run_made_keeps_its_own_length(tmp_path: Path) -> None:
    """As when the run measured it; but a damaged config.json is told."""
    from command_line import add_decoding, decoding, parser_of

    target, folder = random_target(architectures(16, 2)["llama"]), tmp_path / "with-suffix"
    head = random_drafter(EagleConfig(depth=3), target, 0.0)
    draft_checkpoint.write_draft(folder, with_copying(head, "suffix", target, 2), target)
    run = tmp_path / "config.json"
    run.write_text(json.dumps({"decode": {"gamma": 2}, "drafter": {"name": "eagle"}}))
    parser = parser_of("")
    add_decoding(parser)
    assert decoding(parser.parse_args([str(folder)]))[0].gamma is None
    run.write_text(json.dumps({"decode": {"gamma": "two"}, "drafter": {"name": "hybrid"}}))
    with pytest.raises(UserError, match=r"config\.json: the shape .* give --gamma"):
        decoding(parser.parse_args([str(folder)]))


def test_the_commands_of_a_verdict_decode_as_was_measured(tmp_path: Path) -> None:
    """Whatever the draft's own run drafted, in chains of 9."""
    from command_line import add_decoding, decoding, parser_of

    target, best = random_target(architectures(16, 2)["llama"]), tmp_path / "with space" / "best"
    draft_checkpoint.write_draft(best, random_drafter(EagleConfig(depth=3), target, 0.0), target)
    run = {"decode": {"gamma": 9}, "drafter": {"name": "eagle"}}
    (best.parent / "config.json").write_text(json.dumps(run))

    def read(one: Measured) -> DecodeConfig:
        command, *_ = verdict.commands(of(one, draft=shlex.quote(str(best))))
        parser = parser_of("")
        parser.add_argument("--chat", action="store_true")
        parser.add_argument("--temperature", type=float, default=0.0)
        add_decoding(parser)
        name, *words = shlex.split(*command.lines)
        args = parser.parse_args(words)
        assert name == "scripts/generate" and args.draft == best and args.chat
        assert args.temperature == one.way.temperature
        return decoding(args)[0]

    assert read(at(GAIN)) == DecodeConfig(gamma=2)
    paths = [[0], [1], [0, 0]]
    assert read(tree(GAIN, 1.0)) == DecodeConfig(tree="static", paths=paths)
    more: dict[str, Any] = dict(top_k=5, top_p=0.9, greedy_draft=True)
    typical = at(
        GAIN, 0.7, verification="typical", asked="typical", lossless=False, compiled=True, **more
    )
    assert read(typical) == DecodeConfig(gamma=2, verification="typical", compile=True, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["scripts/generate", "x", "--seed", "1", "hello"], "x holds no draft"),
        (["scripts/bench", "recipe", "--seeds", "0", "a=b"], "--seeds 0"),
        (["scripts/generate", "x", "hello", "--beams", "2", "--top-p", "0.9"], "--top-p"),
        (["scripts/generate", "x", "hello", "--beams", "2", "--compile"], "--compile"),
        (["scripts/evaluate", "x", "--beams", "2", "--with", "suffix"], "--with"),
        (["scripts/evaluate", "x", "--beams", "2", "--calibrate", "4"], "--calibrate"),
        (["scripts/generate", "x"], "no prompt"),
        (["scripts/bench", "samples", "x", "--gamma", "3"], "--gamma"),
        (["scripts/bench", "lossless", "x", "--dtype", "float16"], "--dtype"),
        (["scripts/bench", "trees", "x", "y"], "y"),
        (["scripts/generate", "x", "hello", "--max-new-tokens", "2.5"], "--max-new-tokens"),
        (["scripts/bench", "theory", "x", "--gamma", "0"], "--gamma 0"),
        (
            ["scripts/export", "x", "--to", "y", "--with-target", "tests"],
            "tests exists",
        ),
        (["scripts/export", "x", "--to", "."], "the current folder"),
        (
            ["scripts/export", "x", "--to", "y", "--with-target", "tests/../y"],
            "name two folders beside each other",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_options_that_would_be_ignored_are_refused(arguments: list[str], part: str) -> None:
    done = process(arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    require_one_line(done.stderr, part)


def test_an_engine_is_spoken_to_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell script stands in for vLLM's Python: it chatters, answers once, starts anew, and
    fails."""
    from benches import engine
    from benches.turns import TimedGeneration

    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    counts = '"num_drafts": [4], "num_accepted_tokens": [3], "num_accepted_tokens_per_pos": [2, 1]'
    answer = f'{{"ids": [7, 8], "seconds": 0.5, {counts}}}'
    said = ["chatter\n@{}", f"@{answer}", "@{}", "@{}"]
    hears = [f"read line; echo \"$line\" >>{tmp_path / 'heard'}; echo '{x}'\n" for x in said]
    python.write_text("#!/bin/sh\n" + "".join(hears) + "echo that is all >&2; exit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(engine, "VENV", tmp_path)
    folders = Path("target"), Path("draft")
    with engine.VllmWorker() as served:
        served.serve(*folders, "eagle3", 2, "float32")
        assert served.answer([1, 2], 2) == TimedGeneration([7, 8], 0.5, 4, [2, 1])
        served.serve(*folders, None, 2, "bfloat16")
        for _ in range(2):  # it has ended, or ends while it is written to
            with pytest.raises(UserError, match="vLLM ended with 3: that is all"):
                served.answer([1, 2], 2)
    first, asked, end, second = (tmp_path / "heard").read_text().splitlines()
    assert json.loads(asked) == {"ids": [1, 2], "limit": 2} and end == ""
    plain = {"target": "target", "draft": None, "method": None, "parallel": False}
    plain |= {"gamma": 2, "dtype": "bfloat16", "compiled": False}
    drafted = {"draft": "draft", "method": "eagle3", "dtype": "float32"}
    assert json.loads(second) == plain and json.loads(first) == plain | drafted


def test_the_parts_of_a_step_stand_beside_what_it_should_gain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft that is the target has every token accepted: γ + 1 = 3 tokens a speculation step, α =
    1 at each depth, so that the best γ is the largest or, where drafting costs more than it gains,
    0."""
    from benches import speed
    from benches.setting import BenchSetting, Timing

    tokenizer = make_tokenizer()
    target = random_target(architectures(len(tokenizer), 2)["llama"])
    target.tokenizer = tokenizer
    drafter = random_drafter(LMConfig(depth=2, layers=[0, 1]), target, 0.0)
    found = BenchSetting(target, {"twin": drafter}, [[5, 9, 7], [8, 4]])
    monkeypatch.setattr(speed, "setting", lambda *_: found)
    speed.theory([Path("twin")], Timing(2, 13, "float32"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "| twin" in line]
    bound, parts = ([x.strip() for x in line.split("|")[2:-1]] for line in lines)
    assert bound[:2] == ["2", "3.000"] and bound[-1] in "012"
    assert len(parts) == 6 and all(float(x) >= 0 for x in parts)


def test_a_pass_without_modules_is_timed_beside_one_with_them() -> None:
    from benches import speed

    target = random_target(architectures(31, 2)["llama"])
    calls = list[bool]()
    beside = speed.with_modules(target, 3, Way(), "", "ours, plain")
    keep, step = target.step, target.step
    target.step = lambda *x, **y: (calls.append(target.lean_allowed), keep(*x, **y))[1]  # type: ignore[method-assign]
    first = beside.answer([5, 9, 7])
    target.step = step  # type: ignore[method-assign]
    assert calls == [False] * len(calls) and calls and target.lean_allowed
    assert first.ids == generate(target, [5, 9, 7], max_new_tokens=3).ids
    assert beside.rivals == ["ours, plain"]


def test_every_benchmark_has_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its first line has a per cent sign, which argparse formats."""
    bench = script_module("bench", monkeypatch)
    for arguments in ([], *([run.__name__] for run in bench.BENCHES)):
        with pytest.raises(SystemExit) as ended:
            bench.parser().parse_args([*arguments, "--help"])
        assert not ended.value.code
    said = capsys.readouterr().out
    assert said.count("95 % intervals") > 1 and "%%" not in said
