"""Rounds: a run whose later text is written by its own draft and the target together.

Run alone: python -m pytest tests/train/test_training_rounds.py
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import UserError
from specdec.files import read_lines
from specdec.formats import draft_checkpoint
from specdec.targets.loading import load_target
from specdec.targets.target_config import TargetConfig
from tests.runs import require_same_run
from tests.tiny import Tiny, losses, make_tokenizer, records, write_jsonl
from train import loop, optim, training_checkpoint
from train.data.response_files import name_of
from train.data.split import split_prompts
from train.training_rounds import RoundsConfig

# 24 prompts with responses of 12 tokens fill 8 rows: 4 steps of 2 rows a round
ROUNDS = ["data.responses=target", "rounds.count=3", "loop.epochs=1", "loop.save_every=3"]
pytestmark = pytest.mark.usefixtures("one_thread")


def written(run: Path, number: int) -> dict[str, list[int]]:
    """The responses of a round, by prompt."""
    files = sorted((run / "rounds" / str(number) / "responses").glob("*.jsonl"))
    return {r["prompt"]: r["ids"] for path in files for r in read_lines(path, ("prompt", "ids"))}


def of_target(tiny: Tiny) -> dict[str, list[int]]:
    files = sorted((tiny.root / "responses").rglob("*.jsonl"))
    return {r["prompt"]: r["ids"] for path in files for r in read_lines(path, ("prompt", "ids"))}


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds, the later two of which draft and target write together."""
    run = tmp_path_factory.mktemp("rounds") / "whole"
    tiny.job(run, "medusa", *ROUNDS, "rounds.data=draft")
    return run


def test_a_round_reads_what_its_draft_wrote(tiny: Tiny, whole: Path) -> None:
    steps = [step for step, _ in losses(whole)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) % 3 == 0
    alone = of_target(tiny)
    first, second = written(whole, 1), written(whole, 2)
    assert len(first) == len(second) == 24 and first.keys() <= alone.keys()
    assert first != second  # another draft wrote it
    assert any(first[name] != alone[name] for name in first)
    drafts = [load_file(whole / "rounds" / n / "draft" / "draft.safetensors") for n in "12"]
    assert any(not torch.equal(drafts[0][name], drafts[1][name]) for name in drafts[0])


@pytest.mark.parametrize("steps", [2, 5, 7, 10])
def test_interrupted_rounds_equal_whole_ones(
    tiny: Tiny, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Before, at and after the steps at which a round begins; checkpoints lie elsewhere."""
    rate, calls = optim.learning_rate, 0

    def interrupted(*given: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == steps:
            raise KeyboardInterrupt
        return rate(*given)

    monkeypatch.setattr(optim, "learning_rate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.data=draft")
    tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.data=draft")
    require_same_run(tmp_path / "run", whole)
    for number in (1, 2):
        assert written(tmp_path / "run", number) == written(whole, number)


def test_a_run_that_continues_keeps_its_rounds(tiny: Tiny, tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for change in ("rounds.count=4", "rounds.verification=rejection", "rounds.data=mixed"):
        with pytest.raises(UserError, match=change.split("=")[0]):
            tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.data=draft", change)


def test_no_text_is_written_for_rounds_without_a_step(tiny: Tiny, tmp_path: Path) -> None:
    """The first round, of 4 steps, uses up the tokens that one step reads."""
    tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.data=draft", "loop.max_tokens=1")
    assert [step for step, _ in losses(tmp_path / "run")] == [1]
    assert not written(tmp_path / "run", 1) and not written(tmp_path / "run", 2)


def test_a_later_round_of_longer_rows_ends_a_run_with_its_last_draft(
    tiny: Tiny, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """loop.max_tokens are the tokens of 5 steps as long as those of the first round, which takes 4.
    In the second, rows are twice as long, so that no step is left: the draft after step 4, which
    was not planned to be the last, is evaluated and saved all the same."""
    planned = loop.steps_of

    def longer(cfg: Any, lengths: Any, epoch: int, *more: Any) -> Any:
        return planned(cfg, [n * (1 + epoch) for n in lengths], epoch, *more)

    monkeypatch.setattr(loop, "steps_of", longer)
    of_step = max(r["tokens"] / r["step"] for r in records(whole) if "tokens" in r)
    more = [*ROUNDS, "rounds.count=2", "rounds.data=draft", f"loop.max_tokens={5 * of_step:.0f}"]
    tiny.job(tmp_path / "run", "medusa", *more)
    assert [r["step"] for r in records(tmp_path / "run") if "held_out" in r] == [4]
    newest = training_checkpoint.steps(tmp_path / "run" / "checkpoints")[-1]
    assert int(newest.name.partition("-")[2]) == 4
    assert draft_checkpoint.require_undamaged_draft(tmp_path / "run" / "best").notes["step"] == 4
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    tiny.job(tmp_path / "run", "medusa", *more)  # it stays ended
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_by_a_lossless_method_the_text_is_the_target_s(tiny: Tiny, tmp_path: Path) -> None:
    """At temperature 0 that is the very same text, token for token."""
    more = [*ROUNDS, "rounds.count=2", "rounds.data=draft", "rounds.verification=rejection"]
    tiny.job(tmp_path / "run", "medusa", *more)
    alone = of_target(tiny)
    found = written(tmp_path / "run", 1)
    assert len(found) == 24 and all(ids == alone[name] for name, ids in found.items())


def test_mixed_rounds_ask_both_for_every_second_prompt(
    tiny: Tiny, tmp_path: Path, whole: Path
) -> None:
    """What was written is what is trained on: the first round, of 4 steps, is that of any run, and
    the second is neither the target's alone nor the draft's."""
    curves = [losses(whole)]
    for data in ("mixed", "target"):
        tiny.job(tmp_path / data, "medusa", *ROUNDS, f"rounds.data={data}")
        curves.append(losses(tmp_path / data))
    assert len(written(tmp_path / "mixed", 1)) == 12
    for ours, theirs in itertools.combinations(curves, 2):
        assert ours[:4] == theirs[:4] and ours[4] != theirs[4]


@pytest.mark.parametrize(("temperature", "texts"), [(0.0, 1), (1.0, 2)])
def test_rounds_of_the_target_s_own_text(
    tiny: Tiny, tmp_path: Path, temperature: float, texts: int
) -> None:
    """Drawn anew in every round, unless they are greedy and so the same."""
    root = tmp_path / "responses"
    more = [f"responses.root={root}", f"responses.temperature={temperature}"]
    tiny.job(tmp_path / "run", "medusa", *ROUNDS, "rounds.count=2", *more)
    assert len(list(root.iterdir())) == texts
    assert not (tmp_path / "run" / "rounds").exists()


def test_a_round_s_draft_that_was_deleted_is_told(tiny: Tiny, tmp_path: Path, whole: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "rounds" / "1")
    with pytest.raises(UserError, match="rounds/1/draft is missing"):
        tiny.job(run, "medusa", *ROUNDS, "rounds.data=draft")


ON_POLICY = ["data.responses=target", "rounds.count=2", "rounds.data=on_policy", "loop.epochs=1"]


@pytest.mark.parametrize("drafter", ["eagle3", "eagle", "medusa", "lm"])
@pytest.mark.usefixtures("training_alone")
def test_on_policy_rounds_begin_with_the_first_and_resume(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """The text stays the target's own, since decoding is lossless; the steps are the draft's. An
    interruption in either round changes nothing, nor does where the hidden states are kept."""
    whole, rate = tmp_path / "whole", optim.learning_rate
    tiny.job(whole, drafter, *ON_POLICY, "loss=on_policy", "loop.save_every=1")
    alone, records = of_target(tiny), []
    for number in (0, 1):
        folder = whole / "rounds" / str(number) / "responses"
        keys = ("prompt", "ids", "speculation_steps")
        found = [r for path in sorted(folder.glob("*.jsonl")) for r in read_lines(path, keys)]
        assert len(found) == 24 and all(r["ids"] == alone[r["prompt"]] for r in found)
        records.append({r["prompt"]: r["speculation_steps"] for r in found})
    assert records[0] != records[1]  # another draft
    of_first_draft = records[0].values()
    depth = tiny.config(drafter).drafter.depth
    anchors = sum(len(steps) for steps in of_first_draft)
    assert all(len(tokens) == depth for steps in of_first_draft for *_, tokens in steps)
    assert 24 * 12 / (depth + 1) <= anchors <= 24 * 12

    steps = len(losses(whole))
    for stop in (2, steps // 2 + 2) if drafter == "eagle3" else (steps // 2 + 2,):
        calls = iter(range(1, stop + 1))

        def interrupted(*given: Any, calls: Iterator[int] = calls, stop: int = stop) -> float:
            if next(calls) == stop:
                raise KeyboardInterrupt
            return rate(*given)

        run, more = tmp_path / str(stop), [*ON_POLICY, "loss=on_policy", "loop.save_every=1"]
        monkeypatch.setattr(optim, "learning_rate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny.job(run, drafter, *more)
        monkeypatch.setattr(optim, "learning_rate", rate)
        tiny.job(run, drafter, *more)
        require_same_run(run, whole)
    if drafter != "eagle3":
        return
    tiny.job(tmp_path / "online", drafter, *more, "hidden_states.mode=online")
    for ours, theirs in zip(losses(tmp_path / "online"), losses(whole), strict=True):
        assert ours[1]["loss"] == pytest.approx(theirs[1]["loss"], rel=1e-3)


@pytest.mark.usefixtures("training_alone")
def test_on_policy_training_of_a_draft_needs_no_plain_responses(tiny: Tiny, tmp_path: Path) -> None:
    """Plain responses change nothing, and are written only for what reads them: here, a copying
    drafter that is fitted to them."""
    tiny.job(tmp_path / "draft", "eagle3", "data.responses=target", "loop.epochs=1")
    start = f"drafter.from={tmp_path / 'draft' / 'best'}"
    for name, more, plain in (("alone", (), 0), ("fitted", ("combine_with=suffix",), 24)):
        root = tmp_path / f"responses of {name}"
        tiny.job(tmp_path / name, "eagle3", *ON_POLICY, start, f"responses.root={root}", *more)
        found = [r for path in root.rglob("*.jsonl") for r in read_lines(path, ("prompt",))]
        held_out = len(split_prompts(tiny.config().data, make_tokenizer()).held_out)
        assert len(found) == held_out + plain
    for ours, theirs in zip(losses(tmp_path / "alone"), losses(tmp_path / "fitted"), strict=True):
        assert ours[1]["loss"] == pytest.approx(theirs[1]["loss"], rel=1e-4)


@pytest.mark.usefixtures("training_alone")
def test_a_log_trains_as_the_round_that_it_holds(tiny: Tiny, tmp_path: Path) -> None:
    """The first round of an on-policy run, from its own file of responses."""
    more = ["data.responses=target", "loop.epochs=1"]
    tiny.job(tmp_path / "run", "eagle3", *more, "rounds.data=on_policy")
    responses = tmp_path / "run" / "rounds" / "0" / "responses"
    asked = {}
    for prompt in split_prompts(tiny.config().data, make_tokenizer()).train:
        asked[name_of(prompt)] = prompt.ids.tolist()
    keys = ("prompt", "ids", "speculation_steps")
    lines = [r for path in responses.glob("*.jsonl") for r in read_lines(path, keys)]
    found = {r["prompt"]: {key: r[key] for key in keys} for r in lines}  # without their checksums
    log = write_jsonl(
        tmp_path / "log.jsonl", [found[name] | {"prompt": ids} for name, ids in asked.items()]
    )
    tiny.job(tmp_path / "log", "eagle3", *more, f"data.decoding_log={log}")
    assert losses(tmp_path / "log") == losses(tmp_path / "run")
    tiny.job(tmp_path / "plain", "eagle3", *more)
    assert losses(tmp_path / "plain") != losses(tmp_path / "run")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(UserError, match="training data changed"):
        tiny.job(tmp_path / "log", "eagle3", *more, f"data.decoding_log={log}")


@pytest.mark.usefixtures("training_alone")
def test_a_draft_model_writes_alone(tiny: Tiny, tmp_path: Path) -> None:
    """At temperature 0 its text is its own greedy continuation, in batches as one by one; every
    second prompt keeps the target's response in mixed rounds."""
    more = ["data.responses=target", "rounds.count=2", "loop.epochs=1", "drafter.source=random"]
    tiny.job(tmp_path / "alone", "lm", *more, "rounds.data=draft_alone")
    tiny.job(tmp_path / "mixed", "lm", *more, "rounds.data=mixed_alone")
    assert len(written(tmp_path / "mixed", 1)) == 12
    found, prompts = written(tmp_path / "alone", 1), {}
    for prompt in split_prompts(tiny.config().data, make_tokenizer()).train:
        prompts[name_of(prompt)] = prompt.ids.tolist()
    assert found.keys() == prompts.keys() and found != of_target(tiny)
    target = load_target(TargetConfig(str(tiny.target), "float32"))
    model = draft_checkpoint.load_draft(tmp_path / "alone" / "rounds" / "1" / "draft", target).model
    for name, prompt in prompts.items():
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and (len(ids) == len(prompt) or ids[-1] != target.eos[0]):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert found[name] == ids[len(prompt) :]


def test_only_a_model_of_its_own_can_write_alone(tiny: Tiny, tmp_path: Path) -> None:
    more = ["data.responses=target", "rounds.count=2", "rounds.data=draft_alone"]
    with pytest.raises(UserError, match="eagle3 cannot write text without the target"):
        tiny.job(tmp_path / "run", "eagle3", *more)


def test_a_log_is_not_answered_again(tiny: Tiny, tmp_path: Path) -> None:
    more = ("data.responses=target", "data.decoding_log=x.jsonl", "rounds.count=2")
    with pytest.raises(UserError, match=r"data\.decoding_log"):
        tiny.job(tmp_path, "eagle3", *more)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RoundsConfig(count=0), r"rounds\.count=0"),
        (lambda: RoundsConfig(data="drafts"), "did you mean 'draft'"),
        (lambda: RoundsConfig(gamma=0), r"rounds\.gamma=0"),
        (lambda: RoundsConfig(verification="leniense"), "leniense"),
    ],
)
def test_mistakes(make: Callable[[], RoundsConfig], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_the_draft_needs_prompts_to_answer(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give data\.responses=target"):
        tiny.job(tmp_path / "run", "medusa", "rounds.count=2", "rounds.data=draft")
