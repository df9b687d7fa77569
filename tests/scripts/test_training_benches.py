"""The benches that train runs and compare them: recipes, losses, families, the paper's.

Run alone: python -m pytest tests/scripts/test_training_benches.py
"""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train
from specdec.drafters.medusa import Medusa
from specdec.errors import UserError
from specdec.measure.results import PromptCounts, Results
from specdec.theory.intervals import Interval
from specdec.theory.leviathan import walltime_by_gamma, walltime_factor
from tests.measure.test_results import results
from tests.processes import process
from tests.tiny import (
    REPOSITORY,
    architectures,
    compose,
    conversations,
    make_tiny,
    make_tokenizer,
    random_target,
    write_jsonl,
)
from train.data.conversations import DataConfig
from train.data.run_data import held_out_prompts
from train.folder import data_of_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of training runs. Results with known acceptance stand in for them: of 10
    positions per prompt, starting from the target accepts .2 more, nla .1 more, and the second rate
    .05 more for random starts alone. A walk takes 10 speculation steps for 10 tokens and the
    accepted ones."""
    from benches import recipe

    commands: list[list[str]] = []

    def trained(command: list[str], **_: Any) -> Any:
        commands.append(command)
        given = {"drafter.initialisation": "target"} | dict(x.split("=", 1) for x in command[2:])
        share = 0.3 + 0.2 * (given["drafter.initialisation"] == "target")
        share += 0.1 * (given["loss"] == "nla")
        share += (
            0.05 * (given["drafter.initialisation"] == "random") * (given["optim.lr"] == "2e-3")
        )
        made = results()
        assert made.training is not None
        made.training.tokens += int(given["loop.seed"])  # a seed orders rows of unlike lengths
        accepted = [10 * share, 0.0]
        for at in made.asked:
            found = PromptCounts(12, 10, [10, 10], accepted, [0.0, 9.0], (10 + 10 * share, 10.0))
            at.prompts = [found] * 4
        folder = tmp_path / "runs" / given["name"] / "report"
        folder.mkdir(parents=True)
        made.write(folder)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    monkeypatch.setattr(recipe.subprocess, "run", trained)
    return commands


def tables(said: str) -> list[list[str]]:
    return [[x.strip() for x in line.split("|")[1:-1]] for line in said.splitlines()]


def test_recipe_arms_are_trained_once_and_judged_at_their_best_rate(
    runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    from benches import recipe

    for _ in range(2):
        recipe.recipe(["data.limit=9"], folder=Path("arms"))
    assert len(runs) == 6 * 3 * 3 and all("data.limit=9" in c for c in runs)
    rows = tables(capsys.readouterr().out)
    best = {(r[0], r[1]): (r[2], r[3], r[7]) for r in rows if len(r) == 8 and "best" in r[2]}
    assert best["target", "nla"] == ("3e-4 (best)", "0.600", "0.250")
    assert best["random", "kl"] == ("2e-3 (best)", "0.350", "")
    parts = {(r[0], r[1]): r[2] for r in rows if len(r) == 4}
    assert parts["random → target", "loss kl"] == "0.150"  # .5 less .35
    assert parts["kl → nla", "start target"] == "0.100"
    assert parts["random → target, kl → nla", ""] == "0.250"
    assert parts["random → closed_form", "loss kl"] == "-0.050"


def test_losses_are_compared_with_the_first(
    runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    from benches import recipe

    for _ in range(2):
        recipe.losses(arms=["kl", "nla loss.per=sequence"], seeds=2, folder=Path("o"))
    assert [c[-4:] for c in runs[:2]] == [
        ["name=o/kl-lrnull-seed0", "loss=kl", "optim.lr=null", "loop.seed=0"],
        ["loss=nla", "loss.per=sequence", "optim.lr=null", "loop.seed=0"],
    ]
    assert len(runs) == 2 * 2
    rows = tables(capsys.readouterr().out)
    figures = ["0.600", "0.000", "0.000", "0.900", "1.600", "1.600"]  # α by depth, τ
    assert ["nla", "null", *figures, "0.600 0.600"] in rows
    assert ["nla", "null", "0.100", "0.000", "0.000", "0.000", "0.100", "0.100"] in rows


@pytest.fixture
def tiny_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The families of the training runs, which happen in this process and in `tmp_path`."""
    from benches import recipe

    trained: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        cfg = compose(command[2:])
        trained.append(cfg.drafter.name)
        try:
            train.run(cfg, tmp_path / "runs" / cfg.name)
        except UserError as error:
            return subprocess.CompletedProcess(command, 2, stderr=f"a warning\nerror: {error}\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    monkeypatch.setattr(recipe.subprocess, "run", run)
    return trained


def test_families_are_trained_once_and_stand_in_one_table(
    tmp_path: Path, tiny_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with the results of each run; the predicted speedup is τ / (3c + v). Bigrams are
    counts, lookup drafts no trees, and an encoder-decoder cannot draft for this target."""
    from benches.families import families

    tiny = make_tiny(tmp_path)
    mine = [x for x in tiny.overrides() if not x.startswith(("drafter", "track"))]
    names, said, runs = ["medusa", "bigram", "ngram", "seq2seq_lm"], [], tmp_path / "runs" / "all"
    given, written = ["medusa drafter.depth=4", *names[1:]], []
    for _ in range(2):
        families(mine, folder=Path("all"), tokens=600, families=given)
        said.append(capsys.readouterr().out)
        written.append((runs / "medusa" / "tree" / "results.json").stat().st_mtime_ns)
    assert written[0] == written[1]
    assert tiny_runs == [*names, "seq2seq_lm"]  # only what was refused is tried again
    rows = {row[0]: row[1:] for row in tables(said[1]) if row}
    assert rows == {row[0]: row[1:] for row in tables(said[0]) if row}
    assert "600 training tokens a family" in said[1]
    assert rows["seq2seq_lm"][0].startswith("not measured") and "such as T5" in said[1]
    for name in ("medusa", "bigram"):
        chain, tree = (Results.load(runs / name / of) for of in ("report", "tree"))
        (zero, one), trees = chain.asked, tree.asked
        alphas = [*one.alpha.all.sampled[:3], *zero.alpha.all.greedy[:3]]
        taus = [at.tau for at in (*chain.asked, *trees)]
        assert rows[name][3:14] == [str(x) for x in (*alphas, *taus, zero.costs.c)]
        for cell, at in zip(rows[name][14:16], chain.asked, strict=True):
            expected = at.tau.value / (3 * at.costs.c.value + at.costs.v.value)
            assert float(cell.split()[0]) == pytest.approx(expected, abs=0.0051)
        assert rows[name][16:] == [at.speedup.text(2) for at in chain.asked]
        assert all(not at.way.chain and at.way.nodes == 12 and at.way.gamma == 3 for at in trees)
        assert [s.prompt for s in trees[0].samples] == [s.prompt for s in zero.samples]
    head = Medusa.build(Medusa.Config(depth=4), random_target(architectures(90, 4)["llama"]))
    assert rows["medusa"][0] == f"{sum(p.numel() for p in head.parameters()):,}"
    assert float(rows["medusa"][1].split()[0]) > 0
    assert rows["bigram"][:2] == ["0", "—"] and rows["ngram"][11:13] == ["—", "—"]

    shutil.copytree(runs / "medusa", runs / "hydra")
    longer = Results.load(runs / "hydra" / "report")
    assert longer.training
    longer.training.tokens += 1
    longer.write(runs / "hydra" / "report")
    with pytest.raises(UserError, match="different lengths"):
        families(mine, folder=Path("all"), families=["medusa", "hydra"])


@pytest.mark.slow
def test_the_papers_experiments_stand_on_one_page(tmp_path: Path, tiny_runs: list[str]) -> None:
    """The runs are made once, and then read. The page's figures are compared with the runs'
    results, and some of the closed forms with values by hand."""
    from benches import paper as bench

    tiny, runs = make_tiny(tmp_path), tmp_path / "runs" / "p"
    mine = [x for x in tiny.overrides() if not x.startswith(("drafter", "track"))]
    with pytest.raises(UserError, match="does not exist"):
        bench.paper(mine, folder=Path("p"), runs=["nothing"], parts=["causal"])
    assert not tiny_runs  # what is wrong is told before anything is trained
    given: dict[str, Any] = dict(tokens=600, prompts=2, layers=[2])
    given |= dict(heads=["medusa drafter.depth=4"], parts=["causal"])
    pages, written = [], []
    for more in ({}, {}, {"runs": ["p/unigram"]}):
        bench.paper([*mine, "data.limit=null"], folder=Path("p"), **given, **more)
        pages.append((runs / "report" / "paper.md").read_text())
        kept = [*runs.glob("*/*/results.json"), *runs.glob("*/beams.json")]
        written.append({path: path.stat().st_mtime_ns for path in kept})
    assert pages[0] == pages[1] != pages[2] and written[0] == written[2]
    assert tiny_runs == ["unigram", "bigram", "ngram", "lm", "medusa"]
    found = {
        name: Results.load(runs / name.removeprefix("p/") / "report")
        for name in ("unigram", "bigram", "ngram", "2-layer-LM", "medusa", "p/unigram")
    }

    rows: dict[str, list[list[str]]] = {}
    for row in tables(pages[2]):
        if len(row) > 1:
            rows.setdefault(row[0], []).append(row[1:])
    for name, made in found.items():
        zero, one = made.asked
        alphas = [zero.alpha.all.greedy[0], one.alpha.all.sampled[0]]
        assert [*map(str, alphas), f"{alphas[1].n:,}"] in rows[name]
        for at, alpha in zip(made.asked, alphas):
            ((gamma, a, c, _, tau, expected, _, speedup, _), *_) = rows[
                f"{name}, T = {at.way.temperature:g}"
            ]
            assert (gamma, a, c) == ("3", f"{alpha.value:.3f}", f"{at.costs.c.value:.3f}")
            assert (tau, speedup) == (str(at.tau), at.speedup.text(2))
            tokens = sum(alpha.value**n for n in range(4))
            by_hand = tokens / (3 * at.costs.c.value + 1)
            assert float(expected.split()[0]) == pytest.approx(by_hand, abs=0.0051)
    best = max("2-layer-LM", "medusa", key=lambda name: found[name].asked[0].speedup.value)
    run, base = runs / best, found[best]
    for gamma in (1, 2):
        (at,) = Results.load(run / f"gamma-{gamma}").asked
        assert at.way.gamma == gamma and base.asked[0].operations
        (after, in_a_pass) = (rows[f"γ = {gamma}"][i] for i in (0, 1))
        assert after[1] == str(at.tau) and after[3] == at.speedup.text(2)
        grown = (gamma * base.asked[0].operations + gamma + 1) / at.tau.value
        assert float(after[4].split()[0]) == pytest.approx(grown, abs=0.0051)
        assert in_a_pass[0] == str(gamma + 1)
    (lenient,) = Results.load(run / "lenience-factor=0.1").asked
    assert lenient.way.verification == "lenience:factor=0.1" and not lenient.way.lossless
    assert lenient.foreseen
    (row,) = rows["`lenience:factor=0.1`"]
    assert row[0] == str(lenient.foreseen.lenience[-1].visited) and row[2] == str(lenient.tau)
    (plain,) = Results.load(run / "non_iterative").asked
    (row,) = rows["`non_iterative`"]
    assert row[:3] == ["—", str(plain.conditional_acceptance[0]), str(plain.tau)]
    steps, passes = (int(rows[how][0][0]) for how in ("plain", "with the draft"))
    assert passes <= steps and rows["with the draft"][0][1] == f"{steps / passes:.2f}"
    shown = (runs / "report" / "paper.html").read_text()
    for name in ("gamma", "tokens"):
        assert f'<img src="{name}.png"' in shown and (runs / "report" / f"{name}.png").exists()
    with pytest.raises(UserError, match="--layers 5: the target has 4"):
        bench.paper(["data.limit=null", *mine], folder=Path("p"), layers=[5])


def small_t5(patch: pytest.MonkeyPatch) -> Any:
    """The bench of translation with a tiny T5, saved after every second step."""
    from benches import translation

    tiny = dict(d_model=16, d_kv=8, num_heads=2, d_ff=16, num_layers=2, num_decoder_layers=2)
    changed = dict(TARGET=tiny, LAYERS=(1,), VOCABULARY=300, ROWS=4, SAVE=2)
    for name, value in changed.items():
        patch.setattr(translation, name, value)
    return translation


def write_pairs(folder: Path) -> Path:
    said = ([m["content"] for m in c["messages"]] for c in conversations(60))
    return write_jsonl(folder / "pairs.jsonl", [{"source": a, "target": b} for a, b in said])


def test_the_papers_translation_stands_on_the_page(
    tmp_path: Path, tiny_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T5 is trained once, on the training side, and the page has the figures of the runs."""
    from benches import paper as bench

    translation, pairs = small_t5(monkeypatch), write_pairs(tmp_path)
    keys = ("responses.", "loop.", "decode.", "target.d")
    mine = [x for x in make_tiny(tmp_path).overrides() if x.startswith(keys)]
    given: dict[str, Any] = dict(folder=Path("p"), parts=["translation"], steps=4)
    with pytest.raises(UserError, match=r"package:absent .* or give --pairs FILE"):
        monkeypatch.setattr(translation, "PACKAGE", "absent")
        bench.paper(mine, **given)
    with pytest.raises(UserError, match="--parts both: give causal or translation"):
        bench.paper(mine, parts=["both"])
    runs, pages = tmp_path / "runs" / "p", []
    for _ in range(2):
        bench.paper(mine, pairs=pairs, **given)
        pages.append((runs / "report" / "paper.md").read_text())
    assert pages[0] == pages[1] and tiny_runs == ["unigram", "bigram", "seq2seq_lm"]
    found = [row for row in tables(pages[0]) if row[:1] == ["T5, 1 of 2 layers"]]
    made = Results.load(runs / "translation-seq2seq_lm-3" / "report")
    assert made.target == str(runs / "t5") and made.training
    zero, one = made.asked
    alphas = [zero.alpha.all.greedy[0], one.alpha.all.sampled[0]]
    assert found == [["T5, 1 of 2 layers", *map(str, alphas), f"{alphas[1].n:,}"]]
    assert zero.identical == made.prompts == 2
    (row,) = (r for r in tables(pages[0]) if r[:1] == ["T5, 1 of 2 layers, T = 1"])
    assert row[5] == str(one.tau) and row[8] == one.speedup.text(2)
    data = data_of_run(runs / "translation-seq2seq_lm-3")
    held = {p.words for p in held_out_prompts(data, make_tokenizer())}
    assert {s.prompt for s in zero.samples} <= held


def test_the_t5_that_translates_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted training continues from its checkpoint and ends with the same weights."""
    translation, data = small_t5(monkeypatch), DataConfig(str(write_pairs(tmp_path)), "pairs")
    step, steps = translation.Trainer.training_step, list[int]()

    def interrupted(*args: Any, **more: Any) -> Any:
        steps.append(1)
        if len(steps) == 6 + 4:  # after the whole one, in the second half of the other
            raise KeyboardInterrupt
        return step(*args, **more)

    monkeypatch.setattr(translation.Trainer, "training_step", interrupted)
    translation.train_t5(tmp_path / "whole", data, 6)
    with pytest.raises(KeyboardInterrupt):
        translation.train_t5(tmp_path / "again", data, 6)
    translation.train_t5(tmp_path / "again", data, 6)
    assert len(steps) == 6 + 4 + 4  # of the last, steps 3 to 6
    whole, again = (load_file(tmp_path / x / "model.safetensors") for x in ("whole", "again"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[n], again[n]) for n in whole)


def test_the_papers_own_figures_are_those_of_its_formulas() -> None:
    """Table 4 by Theorem 3.8. The speedups that Appendix A.5 gives for c = .015 are above the best
    of that theorem, as the page says."""
    from benches.paper import LENIENT, SPEED

    for gamma, alpha, c, expected, _ in SPEED.values():
        found = walltime_factor(float(alpha), int(gamma), float(c))
        assert found == pytest.approx(float(expected), abs=0.0501)
    alphas = [float(said.split(",")[0]) for said in LENIENT.values() if "," in said]
    best = [max(walltime_by_gamma(alpha, 0.015, 30)) for alpha in alphas]
    assert [f"{x:.1f}" for x in best] == ["2.3", "2.9", "3.4", "4.8"]


def test_heads_of_several_sizes_and_their_frontier(
    runs: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """τ and c by hand: (1.4, .1), (1.5, .2) and (1.45, .3), which the second beats. All accept .6,
    then .4, so 1.6 tokens at γ = 1 and 1.84 at γ = 2. v is 1, 1.2 and 1.4 at γ = 2, so 1.2 for all
    and 1.1 at γ = 1: 1.6 / (.1 + 1.1) = 1.33 is more than 1.84 / (.2 + 1.2); 1.6 / 1.3 = 1.23."""
    from benches import capacity, recipe

    figures = {"default": (1.4, 0.1, 1.0), "wide": (1.5, 0.2, 1.2), "worse": (1.45, 0.3, 1.4)}

    def report_of(name: str, overrides: list[str], own: list[str], said: str) -> Results:
        tau, c, v = figures[name.removeprefix("sizes/").replace("layers-2_a-1", "wide")]
        made, one = results(), Interval(0.5, 0.5, 0.5, 9)
        for at in made.asked:
            at.way, at.tau = replace(at.way, gamma=2), replace(one, value=tau)
            at.conditional_acceptance = [replace(one, value=x) for x in (0.6, 0.4)]
            at.costs = replace(at.costs, c=replace(one, value=c), v=replace(one, value=v))
        asked.append(own)
        return made

    asked: list[list[str]] = []
    monkeypatch.setattr(recipe, "report_of", report_of)
    monkeypatch.setattr(capacity, "parameters", lambda draft: 7)
    arms = ["default", "layers=2 a=1", "worse"]
    capacity.capacity(folder=Path("sizes"), tokens=600, arms=arms)
    assert asked[:2] == [
        ["loop.max_tokens=600"],
        ["loop.max_tokens=600", "drafter.layers=2", "drafter.a=1"],
    ]
    rows = {row[0]: row[1:] for row in tables(capsys.readouterr().out) if row}
    assert [rows[arm][3] for arm in arms] == ["yes", "yes", ""]
    assert [rows[arm][4] for arm in arms[:2]] == ["1.33 (γ = 1)", "1.23 (γ = 1)"]


@pytest.mark.parametrize("way", ["plain", "chunks", "fused"])
def test_a_loss_is_computed_in_each_way(way: str) -> None:
    from benches.training import loss_cost

    in_megabytes, seconds = loss_cost(way, positions=8, vocab=16)
    assert in_megabytes >= 0 and seconds > 0


def test_training_steps_of_two_checkouts_take_turns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """This checkout is compared with itself: both need as many operations, both shares lie between
    0 and 1, and the second has a ratio. A process that ends raises an error."""
    from benches.training import training

    tiny = [x for x in make_tiny(tmp_path).overrides() if not x.startswith("track")]
    mine = [*tiny, "loop.precision=no", "drafter.initialisation=target"]
    other = tmp_path / "other"
    other.symlink_to(REPOSITORY, target_is_directory=True)
    training(mine, against=other, turns=3)
    rows = {row[0]: row[1:] for row in tables(capfd.readouterr().out) if row}
    ours, theirs = rows["this checkout"], rows[str(other)]
    assert ours[3] == theirs[3]  # GFLOP per step
    assert all(0 < float(row[2]) < 1 for row in (ours, theirs))
    assert ours[5] == "" and re.fullmatch(r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", theirs[5])
    with pytest.raises(UserError, match="is no checkout of Draftsmith"):
        training(mine, against=tmp_path)
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "__init__.py").write_text("raise SystemExit('cannot be imported')")
    with pytest.raises(UserError, match="cannot be measured: its process ended"):
        training(mine, against=tmp_path, turns=1)


def test_the_memory_of_a_step_is_measured(tmp_path: Path) -> None:
    """In a process of its own, which the command starts. A word with = is an override."""
    target = [x for x in make_tiny(tmp_path).overrides() if x.startswith("target")]
    ended = process(["scripts/bench", "memory", "medusa", "--tokens", "640", *target])
    assert ended.returncode == 0, ended.stderr
    before, added = re.findall(r"medusa +\| +(\S+) +\| +(\S+)", ended.stdout)[0]
    assert float(before) > 0.1 and float(added) >= 0
    ended = process(["scripts/bench", "memory", *target])
    assert ended.returncode == 2 and "name the families" in ended.stderr


def test_several_processes_beside_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs take turns, after one that stores the hidden states; two processes are 1.5 times as
    fast."""
    from benches import processes

    sizes = list[int]()

    def trained(command: list[str], size: int, pinned: bool) -> Any:
        assert pinned and "drafter=medusa" in command
        sizes.append(size)
        folder = Path(command[-1].removeprefix("hydra.run.dir="))
        folder.mkdir()
        train = {"tokens_per_second": 1000 * (1 + size) / 2, "waiting": 0.01}
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 9, "train": train}) + "\n")
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(processes, "launched", trained)
    processes.processes(["drafter=medusa"], turns=2)
    assert sizes == [1, 2, 1, 1, 2]
    out = capfd.readouterr().out
    assert ["1", "1,000 (waiting 1.00%)", "1,500 (waiting 1.00%)", "1.50"] in tables(out)
    assert "2 processes train 1.50 times as fast (1.50 to 1.50)" in out
    with pytest.raises(UserError, match="--count 1: give 2 or more"):
        processes.processes(count=1)


def test_a_command_is_launched_on_one_process_and_on_two() -> None:
    from benches.launching import launched, require_done

    cores = "import psutil; print(len(psutil.Process().cpu_affinity()))"
    assert launched(["-c", cores], 1, pinned=True).stdout.strip() == "1"
    assert launched(["-m", "this"], 2).stdout.count("Beautiful is better than ugly.") == 2
    with pytest.raises(UserError, match="it ended with code 3"):
        require_done(launched(["-c", "raise SystemExit(3)"], 1), "it")


def test_pretraining_is_compared_at_equal_minutes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 400 tokens/s without the target for 30 of 120 seconds, and 100 with it: 12,000
    tokens, then 9,000, against 12,000. Of 10 tokens a prompt, the default takes 8 speculation
    steps and the continued run 5: τ 1.25 and 2. Every configuration is one that train.py takes."""
    from benches import recipe
    from benches.pretraining import pretraining

    asked: dict[str, list[str]] = {}
    modes: dict[str, tuple[str, int]] = {}
    settings = set[str]()

    def report_of(name: str, overrides: list[str], own: list[str], said: str) -> Results:
        cfg = compose([*recipe.SIZE, *recipe.FIXED, *overrides, f"name={name}", *own])
        settings.add(name.split("/")[1])
        name = name.split("/")[2]
        asked[name] = own
        assert cfg.loop.max_tokens is not None
        modes[name.rpartition("-")[0]] = cfg.hidden_states.mode, cfg.drafter.depth
        made, alone = results(), cfg.trains_on_text_alone
        assert made.training is not None
        made.training.tokens = cfg.loop.max_tokens
        made.training.seconds = cfg.loop.max_tokens / (400 if alone else 100)
        steps = 5 if cfg.initialisation.draft else 8
        for at in made.asked:
            found = PromptCounts(10, steps, [10, 10], [6.0, 3.0], [6.0, 3.0], (10.0, 5.0))
            at.prompts = [found] * (3 if name in other else 4)
        return made

    other: list[str] = []
    monkeypatch.setattr(recipe, "report_of", report_of)
    start = ["drafter.initialisation=random"]
    text = ["loss=d_pace", "drafter.depth=2"]
    pretraining(["drafter=eagle3"], folder=Path("o"), percent=25, seeds=2, text=text, start=start)
    lengths = {name: next(x for x in own if "max_tokens" in x)[16:] for name, own in asked.items()}
    assert lengths == {
        **{"speed-text": "6000", "speed-target": "6000"},
        **{f"default-120s-seed{seed}": "12000" for seed in range(2)},
        **{f"text-25of120s-seed{seed}": "12000" for seed in range(2)},
        **{f"after-text-25of120s-seed{seed}": "9000" for seed in range(2)},
    }
    stored, alone = ("offline", 3), ("none", 2)
    assert modes == {
        **{"speed": ("online", 3), "default-120s": stored},
        **{"text-25of120s": alone, "after-text-25of120s": stored},
    }
    (of_settings,) = settings
    after = asked["after-text-25of120s-seed1"]
    best = f"runs/o/{of_settings}/text-25of120s-seed1/best"
    assert after == [*start, f"drafter.from={recipe.ROOT / best}", *after[2:]]
    assert after[2:] == ["loop.max_tokens=9000", "loop.seed=1"]
    rows = {row[0]: row[1:] for row in tables(capsys.readouterr().out) if row}
    assert rows["default"][:2] == ["12,000", "1.250"]
    assert rows["pretrained"][:2] == ["12,000 + 9,000", "2.000"]
    assert rows["pretrained above default"][0] == "0.750"
    other.append("after-text-25of120s-seed1")
    with pytest.raises(UserError, match="did not all measure the same prompts"):
        pretraining(
            ["drafter=eagle3"], folder=Path("o"), percent=25, seeds=2, text=text, start=start
        )
    assert len(settings) == 1
    with pytest.raises(UserError, match="did not all measure the same prompts"):
        pretraining(["drafter=eagle3"], folder=Path("o"), percent=25, seeds=2, start=start)
    assert len(settings) == 2, "another loss takes the runs of the first"
    for percent in (0, 100):
        with pytest.raises(UserError, match=f"--percent {percent}: give 1 to 99"):
            pretraining(percent=percent)
