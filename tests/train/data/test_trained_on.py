"""What a draft was trained on, which travels with it, and who asks.

Run alone: python -m pytest tests/train/data/test_trained_on.py
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.errors import UserError
from specdec.formats.draft_checkpoint import TRAINED_ON
from specdec.integrity import Damaged
from specdec.measure.results import Results
from specdec.targets.loading import TargetLoader
from tests.tiny import Tiny, conversations, make_tokenizer, write_jsonl
from train.data.conversations import DataConfig
from train.data.near_duplicates import NEAR, shingles_of, within_conversations
from train.data.prompts_trained_on import (
    TrainedOn,
    leave_out,
    origin_of,
    overlap_in_words,
    trained_on,
)
from train.data.run_data import measured_prompts
from train.data.sequences import Document, Prompt
from train.data.split import DataSplit, split_documents, split_prompts
from train.diagnosis import diagnose_data
from train.folder import data_of_run, noted_prompts
from train.initialisation import earlier_drafts
from train.planning import plan_of_run
from train.run_config import Config


def prompt(opening: str) -> Prompt:
    return Prompt("x", np.zeros(1, np.int32), opening, opening=opening)


def edited(words: list[str], share: float, draw: random.Random) -> list[str]:
    """Words of which some are replaced."""
    return [f"new{draw.random()}" if draw.random() < share else word for word in words]


def test_near_duplicates_are_estimated_as_the_split_judges_them() -> None:
    """Prompts of 40 words with some words replaced: of those whose shingles overlap by 80 % or
    more, nine in ten are found; of those below 50 %, fewer than one in ten."""
    draw, above, below = random.Random(0), list[bool](), list[bool]()
    for n in range(800):
        words = [f"w{draw.randrange(10**6)}" for _ in range(40)]
        known = TrainedOn.of_texts([prompt(" ".join(words))])
        other = " ".join(edited(words, n % 8 / 40, draw))
        ours, theirs = shingles_of(" ".join(words)), shingles_of(other)
        overlap = len(ours & theirs) / len(ours | theirs)
        # beside another, so that it is not all that was asked
        (found, _) = known.nearly([origin_of(other), origin_of(f"something else {n}")])
        if overlap >= 0.8:
            above.append(found)
        elif overlap < 0.5:
            below.append(found)
    assert NEAR == 70 and min(len(above), len(below)) > 100
    assert np.mean(above) > 0.9 and np.mean(below) < 0.1


def test_words_decide_and_a_shared_instruction_does_not() -> None:
    instruction = " ".join(f"do{n}" for n in range(60))
    asked = [f"{instruction} item {n}" for n in range(40)]
    known = TrainedOn.of_texts([prompt(x) for x in asked[:20]])
    assert known.exactly([origin_of(x) for x in asked]) == [True] * 20 + [False] * 20
    assert known.nearly([origin_of(x) for x in asked[20:]]) == [False] * 20
    assert TrainedOn.of_texts([prompt("What IS it?")]).exactly([origin_of("what is it")]) == [True]
    assert TrainedOn().nearly([origin_of("a")]) == [False] and TrainedOn().nearly([]) == []


def test_it_takes_32_bytes_a_conversation_and_reads_back(tmp_path: Path) -> None:
    texts = [prompt(f"question {n} about {n * n}") for n in range(3000)]
    known = TrainedOn.of_texts([*texts, *texts])
    assert len(known.keys_N) == 3000 and known.complete
    known.write(tmp_path)
    assert (tmp_path / TRAINED_ON).stat().st_size < 3000 * 32 + 2000
    (tmp_path / "best").mkdir()
    for folder in (tmp_path, tmp_path / "best"):  # a draft's own, or that of its run
        again = trained_on(folder)
        assert again is not None and again.complete
        assert np.array_equal(again.keys_N, known.keys_N)
        assert np.array_equal(again.sketches_NC, known.sketches_NC)
    more = known.joined(TrainedOn.of_texts([prompt("question 1 about 1"), prompt("another")]))
    assert len(more.keys_N) == 3001 and more.sketches_NC.shape == (3001, 24)
    log = Document("x", np.zeros(1, np.int32), np.zeros(1, np.bool_))
    assert not known.joined(TrainedOn.of_texts([log])).complete
    (tmp_path / TRAINED_ON).write_bytes((tmp_path / TRAINED_ON).read_bytes()[:-500])
    with pytest.raises(Damaged, match="is damaged"):
        trained_on(tmp_path)
    assert overlap_in_words(tmp_path, ["question 1 about 1"]) is None
    assert trained_on(tmp_path / "nowhere" / "best") is None


def test_a_stage_measures_nothing_that_an_earlier_one_was_trained_on(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first stage holds out a fifth, the second a half. What travels with the draft and its
    export is what both were trained on."""
    chats = conversations(120)
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    more = [f"data.path={path}", "loop.epochs=1", "decode.prompts=60"]
    tiny.job(tmp_path / "one", "medusa", *more, "data.held_out=0.2", "data.limit=80")
    first = trained_on(tmp_path / "one" / "best")
    assert first is not None and 50 < len(first.keys_N) <= 70 and first.complete
    capsys.readouterr()
    stage = f"initialisation.draft={tmp_path / 'one' / 'best'}"
    tiny.job(tmp_path / "two", "medusa", *more, "data.held_out=0.5", stage)
    said = " ".join(capsys.readouterr().out.split())
    assert "held-out texts were trained on by" in said
    noted = noted_prompts(tmp_path / "two", 60)
    assert noted is not None and len(noted[0]) > 5
    words = [p.words for part in noted for p in part]
    assert not any(first.exactly([origin_of(x) for x in words]))
    assert Results.load(tmp_path / "two" / "report").prompts == len(noted[0])
    cfg = tiny.config("medusa", *more, "data.held_out=0.5", stage)
    read_alike(cfg, tmp_path / "two", noted)
    both, exported = trained_on(tmp_path / "two" / "best"), trained_on(tmp_path / "two" / "export")
    assert both is not None and exported is not None and len(both.keys_N) > len(first.keys_N)
    assert {*first.keys_N.tolist()} < {*both.keys_N.tolist()} == {*exported.keys_N.tolist()}
    openings = [chat["messages"][0]["content"] for chat in chats]
    known = [x for x in openings if any(both.exactly([origin_of(x)]))]
    assert overlap_in_words(tmp_path / "two" / "best", known[:10]) == (
        "prompts of your own, of which the draft was trained on 10"
    )
    assert overlap_in_words(tmp_path / "two" / "export", words[:3]) == (
        "prompts of your own, of which the draft was trained on none"
    )
    with pytest.raises(UserError, match="all held-out prompts were trained on by"):
        one = [f"data.path={write_jsonl(tmp_path / 'known.jsonl', chats_of(chats, known))}"]
        tiny.job(
            tmp_path / "three", "medusa", *one, "data.held_out=0.3", stage.replace("one", "two")
        )


def read_alike(cfg: Config, run: Path, noted: tuple[list[Prompt], list[Prompt]]) -> None:
    """An evaluation without the notes, a plan and a diagnosis see the prompts that the run saw."""
    parts = TargetLoader(cfg.target).parts
    test, validation = ([p.id for p in some] for some in noted)
    best = run / "best"
    for limit, others in ((1000, 1000), (3, 4)):
        asked, rest = measured_prompts(data_of_run(run), parts.tokenizer, limit, others, draft=best)
        assert [p.id for p in asked] == test[:limit]
        assert [p.id for p in rest] == [*validation, *test[limit:]][:others]
    earlier = earlier_drafts(cfg.initialisation, cfg.drafter)
    assert [str(draft) for draft in earlier] == [cfg.initialisation.draft]
    found = diagnose_data(
        cfg.data, parts, None, 0, cfg.response_generation, cfg.drafter.depth, earlier
    )
    assert [p.id for p in found.prompts] == [*test, *validation]
    elsewhere = replace(cfg, planning=replace(cfg.planning, device="l4"))
    planned = plan_of_run(elsewhere).facts.data.split
    assert planned is not None and [p.id for p in planned.prompts] == test


def test_all_parts_leave_out_the_same() -> None:
    """Nine of ten prompts of a part share an instruction with what is known, and few of the rest:
    the held-out side is judged as a whole, in documents and prompts alike."""
    instruction = " ".join(f"do{n}" for n in range(60))
    near = [prompt(f"{instruction} item {n}") for n in range(10)]
    others = [prompt(f"quite another question about {n}") for n in range(30)]
    earlier = TrainedOn.of_texts([prompt(f"{instruction} item {n}") for n in range(50, 70)])
    assert not any(earlier.nearly([origin_of(text.opening) for text in near]))
    test, validation = others, [*near, others[0]]
    split = DataSplit(held_out=[*near, *others], test=test, validation=validation, prompts=test)
    split.validation_prompts, split.validation_share = near, 0.25
    leave_out(split, earlier, "a draft")
    assert split.validation == [others[0]] and split.validation_prompts == []
    assert split.test == split.prompts == others


def test_a_further_stage_on_chats_that_all_begin_alike_keeps_what_was_held_out(
    tmp_path: Path,
) -> None:
    """If some begin in another way, those are measured on; else what was not trained on."""
    tokenizer, chats = make_tokenizer(), popular_chats()
    for count, openings in ((160, 121), (40, 1)):
        path = write_jsonl(tmp_path / f"{count}.jsonl", chats[:count])
        split = split_documents(DataConfig(str(path), held_out=0.3), tokenizer)
        assert len({text.opening for text in (*split.train, *split.held_out)}) == openings
        before = [len(split.test), len(split.prompts)]
        leave_out(split, TrainedOn.of_texts(split.train), "a draft")
        left = [len(split.test), len(split.prompts)]
        assert left == before if openings == 1 else 0 < left[0] < before[0]
        assert openings == 1 or "Hello" not in {text.opening for text in split.prompts}


def popular_chats() -> list[dict]:  # type: ignore[type-arg]
    """160 chats, of which the first 40 begin alike."""
    chats = conversations(160)
    for n, chat in enumerate(chats[:40]):
        later = {"role": "user", "content": f"now tell me of thing{n}, which thing{n + 1} made"}
        first, response = {"role": "user", "content": "Hello"}, chat["messages"][1]
        chats[n] = {"messages": [first, response, later, response]}
    return chats


@pytest.mark.parametrize("responses", ["data", "target"])
def test_a_popular_opening_is_known_as_it_was_asked(tmp_path: Path, responses: str) -> None:
    """Of 40 chats that begin alike, some are held out; all of them are known by what was asked."""
    path = write_jsonl(tmp_path / "chats.jsonl", popular_chats())
    cfg = DataConfig(str(path), responses=responses, held_out=0.3)
    split: DataSplit[Any] = (split_documents if responses == "data" else split_prompts)(
        cfg, make_tokenizer()
    )
    for side in (split.train, split.held_out, [*split.prompts, *split.validation_prompts]):
        popular = [text for text in side if text.opening == "Hello"]
        assert 0 < len(popular) < 40
        assert len({text.placed for text in popular}) == len(popular)
        assert all(text.placed == text.opening for text in side if text not in popular)
    known = TrainedOn.of_texts(split.train)
    assert known.exactly([origin_of("hello!")]) == known.nearly([origin_of("hello!")]) == [True]
    logged = "<|u|>user\nHello<|e|>\n<|u|>assistant\nyes<|e|>\n<|u|>user\nand this<|e|>"
    held_out = [text.opening for text in split.held_out]
    assert within_conversations([logged, "<|u|>user\nHey<|e|>"], held_out) == {0}


def chats_of(chats: list[dict], openings: list[str]) -> list[dict]:  # type: ignore[type-arg]
    return [chat for chat in chats if chat["messages"][0]["content"] in openings]


def test_a_logged_prompt_belongs_to_a_held_out_chat_at_any_turn() -> None:
    """In another template, at a later turn, under a system prompt, or with a word changed; a short
    opening must be a turn of its own."""
    opening = "tell me how the river that we saw last year got its name please"
    later = f"<|u|>system\nBe brief.<|e|>\n<|u|>user\n{opening}<|e|>\n<|u|>assistant\nWhy?<|e|>"
    texts = [
        later,
        f"[INST] {opening.replace('last', 'this')} [/INST]",
        "[INST] tell me how the bridge got its colour [/INST]",
        "<|u|>user\nhi<|e|>\n<|u|>assistant\n",
        "<|u|>user\nhi there you<|e|>\n<|u|>assistant\n",
    ]
    assert within_conversations(texts, [opening, "Hi!"]) == {0, 1, 3}
    instruction = " ".join(f"do{n}" for n in range(60))
    asked = [f"{instruction} item {n}" for n in range(40)]
    logs = [f"<|u|>user\n{x}<|e|>\n<|u|>assistant\n" for x in asked]
    assert within_conversations(logs, asked[:20]) == set(range(20))
