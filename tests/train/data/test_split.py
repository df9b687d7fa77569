"""Conversations → training and held-out sides.

Run alone: python -m pytest tests/train/data/test_split.py (about 10 s, most of it the real data)
"""

import itertools
import random
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from specdec.files import write_json
from tests.tiny import conversations, make_tokenizer, write_jsonl
from tests.train.data.chats import (
    CHATML,
    as_records,
    random_talks,
    talk,
    tokenizer_of,
)
from tests.train.data.test_conversations import real, sharegpt, split_of, write_lines
from train.budget import BUDGET, BudgetRecord
from train.data.conversations import Conversation, DataConfig, Message
from train.data.near_duplicates import near_duplicates
from train.data.run_data import held_out_prompts, measured_prompts
from train.data.split import (
    DataSplit,
    chosen_share,
    chosen_validation,
    is_held_out,
    is_validation,
    may_be_held_out,
    split_documents,
    split_prompts,
    trained_openings,
)
from train.folder import origin_of_prompts


def test_held_out_does_not_depend_on_other_data_nor_order(tmp_path: Path) -> None:
    talks = random_talks(400)
    few = split_of(path=write_lines(tmp_path / "a.jsonl", as_records(talks[:200])), held_out=0.05)
    random.Random(1).shuffle(talks)
    many = split_of(path=write_lines(tmp_path / "b.jsonl", as_records(talks)), held_out=0.05)
    first = {f"c{i}" for i in range(200)}
    assert {c.id for c in few.held_out} == {c.id for c in many.held_out} & first
    assert 2 < len(few.held_out) < 25  # 200 · .05 = 10 ± 5 σ
    seeded = split_of(path=str(tmp_path / "b.jsonl"), held_out=0.05, seed=1)
    assert seeded.held_out == many.held_out
    assert seeded.train != many.train
    assert sorted(c.id for c in seeded.train) == sorted(c.id for c in many.train)


def test_held_out_fraction_grows_by_adding() -> None:
    talks = random_talks(4000)
    small = {c.id for c in talks if is_held_out(c.opening, 0.05)}
    large = {c.id for c in talks if is_held_out(c.opening, 0.2)}
    assert small < large
    assert abs(len(large) - 800) < 5 * (4000 * 0.2 * 0.8) ** 0.5
    assert not any(is_held_out(c.opening, 0) for c in talks)


def test_side_ignores_case_punctuation_space_responses_and_system() -> None:
    for c in random_talks(100):
        text = c.messages[0].content
        odd = "  " + text.upper().replace(" ", ",\n ") + "?!"
        for other in (talk(odd, "else"), talk(text), talk(text, "b", "more", system="s")):
            assert is_held_out(c.opening, 0.5) == is_held_out(other.opening, 0.5)
    # no letters at all: still told apart
    sides = {is_held_out("?" * n, 0.5) for n in range(1, 20)}
    assert sides == {True, False}


def jaccard(a: str, b: str) -> float:
    def shingles(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}

    x, y = shingles(a), shingles(b)
    return len(x & y) / len(x | y)


def test_near_duplicates_are_those_of_brute_force() -> None:
    rng = random.Random(3)
    base = [c.messages[0].content.split() for c in random_talks(40, seed=4)]
    texts = []
    for words in base * 6:
        words = words[: rng.randint(8, 12)]
        for _ in range(rng.randint(0, 2)):
            words[rng.randrange(len(words))] = rng.choice(["x", "y"])
        texts.append(" ".join(words + ["z"] * rng.randint(0, 1)))
    train, held_out = texts[:160], texts[160:]
    values = [[jaccard(a, b) for b in held_out] for a in train]
    expected = {i for i, row in enumerate(values) if max(row) >= 0.7}
    assert 20 < len(expected) < 140
    assert near_duplicates(train, held_out) == expected


def test_near_duplicate_at_the_edge() -> None:
    words = list("abcdefghi")  # 7 shingles
    longer = [" ".join([*words, *"jkl"[:n]]) for n in range(4)]  # 7/7, 7/8, 7/9, 7/10
    different = " ".join([*words, *"jklm"])  # 7/11
    ours = [*longer, different]
    assert near_duplicates(ours, [" ".join(words)]) == {0, 1, 2, 3}
    assert near_duplicates(["東京の天気は?"], ["東京の天気は"]) == {0}
    assert near_duplicates(["hi"], ["ho"]) == set()
    assert near_duplicates(ours, []) == set()


def test_no_near_duplicate_straddles(tmp_path: Path) -> None:
    talks = random_talks(200)
    suffixed = [replace(c, id=f"{c.id}s") for c in talks]
    suffixed = [
        replace(c, messages=(Message("user", c.messages[0].content + " please"), c.messages[1]))
        for c in suffixed
    ]
    path = write_lines(tmp_path / "x.jsonl", as_records(talks + suffixed))
    split = split_of(path=path, held_out=0.2)
    held = {c.id.removesuffix("s") for c in split.held_out}
    assert not held & {c.id.removesuffix("s") for c in split.train}
    dropped = split.tally.dropped["prompt nearly the same as a held-out one"]
    assert dropped > 0
    assert len(split.train) + len(split.held_out) == 400 - dropped == split.tally.kept


CASES = Path(__file__).parent / "cases"
INSTRUCTION = " ".join(f"word{i}" for i in range(56))


def test_requests_that_share_a_long_instruction_are_no_duplicates() -> None:
    """320 requests whose first 56 words are the same; then 30 of them, where the shared words of
    all are those of a small file, and 400 beside 8,000 others."""
    split = split_of(path=str(CASES / "one_long_instruction.jsonl"))
    assert not split.tally.dropped
    assert len(split.held_out) == 64 and len(split.train) == 256  # a fifth of 320
    names = random.Random(2)
    requests = [" ".join(f"n{names.randrange(10**6)}" for _ in range(10)) for _ in range(30)]
    few = [f"{INSTRUCTION} {request}" for request in requests]
    for count in (4, 12, 30):
        assert not near_duplicates(few[: count - 2], few[count - 2 : count])
    # what differs still tells: the same request but for one word of 10 (8 of 12 triples)
    again = few[0].rsplit(" ", 1)[0] + " other"
    assert near_duplicates([*few[2:], again], few[:2]) == {28}


def test_one_question_under_many_system_prompts_is_held_out_by_them() -> None:
    split = split_of(path=str(CASES / "one_question_many_system_prompts.jsonl"))
    assert len(split.held_out) == 80 and len(split.train) == 320  # a fifth of 400
    sides = [{c.messages[0].content for c in side} for side in (split.train, split.held_out)]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("responses", ["data", "target"])
@pytest.mark.parametrize("opening", ["hi", "please", "translate", "q", "how are you", "go on"])
def test_a_popular_opening_does_not_decide_how_much_is_held_out(
    tmp_path: Path, opening: str, responses: str
) -> None:
    """Chats that begin alike are told apart by what follows; the same chats over and over are not,
    and are trained on. 300 conversations, of which 60 are to be held out."""
    rng = random.Random(0)
    other = [c.messages for c in random_talks(150)]
    for copies in (False, True):
        popular = [
            (Message("user", opening), Message("assistant", "yes?"), *c.messages)
            for c in random_talks(1 if copies else 150, seed=1) * (150 if copies else 1)
        ]
        chats = [*other, *popular]
        rng.shuffle(chats)
        talks = [talk(*(m.content for m in chat), id=f"c{i}") for i, chat in enumerate(chats)]
        path = write_lines(tmp_path / "x.jsonl", as_records(talks))
        cfg = DataConfig(path=path, responses=responses)
        read = split_prompts if responses == "target" else split_documents
        split: DataSplit[Any] = read(cfg, tokenizer_of(CHATML))
        assert len(split.held_out) == 60 and len(split.train) == 240
        fixed = replace(cfg, held_out=0.1)
        split = read(fixed, tokenizer_of(CHATML))
        assert 10 <= len(split.held_out) <= 50  # 300 · .1 = 30 ± 4 σ
        found = [p.id for p in held_out_prompts(fixed, tokenizer_of(CHATML))]
        assert found == [p.id for p in split.prompts]


def test_one_first_turn_in_all_chats_leaves_both_sides_some_or_says_why(tmp_path: Path) -> None:
    for n, responses in ((20, ["a", "b"]), (40, ["same"])):
        talks = [talk("hi", f"{responses[i % len(responses)]} {i}", id=f"c{i}") for i in range(n)]
        path = write_lines(tmp_path / "x.jsonl", as_records(talks))
        split = split_of(path=path)  # by their responses alone
        assert len(split.held_out) == n // 5 and len(split.train) == n - n // 5
        with pytest.raises(UserError, match=f"all {n} conversations ask the same.*other prompts"):
            split_of(path=path, responses="target")
    same = [talk("hi", "a", id=f"c{i}") for i in range(20)]
    with pytest.raises(UserError, match="all 20 conversations ask the same"):
        split_of(path=write_lines(tmp_path / "x.jsonl", as_records(same)))


def test_a_skipped_piece_does_not_break_the_chain_of_pieces(tmp_path: Path) -> None:
    """Pieces of 2, 2, 2 and 2 turns, of which one has a role that is not known. A chat with another
    name that follows a skipped record is no piece."""
    turns = [("human", f"q{n}") if n % 2 == 0 else ("gpt", f"a{n}") for n in range(8)]
    for skipped in range(1, 4):
        pieces = [sharegpt(*turns[n : n + 2], id=f"x_{n}") for n in range(0, 8, 2)]
        pieces[skipped]["conversations"][0]["from"] = "alien"
        records = [*pieces, sharegpt(("human", "q"), ("gpt", "a"), id="y_8")]
        found = split_of(path=write_lines(tmp_path / "x.jsonl", records), held_out=0)
        openings = {c.id: c.opening for c in found.train}
        assert openings.pop("y_8") == "q"
        assert len(openings) == 3 and set(openings.values()) == {"q0"}
    # a number that does not continue the chat, after a record that is no piece of it
    other = [pieces[0], sharegpt(("alien", "q"), id="x_7"), pieces[1]]
    other[2] = sharegpt(("human", "q2"), ("gpt", "a3"), id="x_9")
    found = split_of(path=write_lines(tmp_path / "x.jsonl", other), held_out=0)
    assert {c.id: c.opening for c in found.train} == {"x_0": "q0", "x_9": "q2"}


@real
def test_pieces_of_one_chat_stay_on_one_side() -> None:
    split = split_of(held_out=0.3)
    side = {c.id: name for name in ("train", "held_out") for c in getattr(split, name)}
    # as in the file: _0 has 12 turns, and _11 begins with the twelfth of them again
    assert len({side[i] for i in ("hRPPgZT_0", "hRPPgZT_11", "hRPPgZT_17")}) == 1
    both = split.train + split.held_out
    later = [c for c in both if c.opening not in [m.content for m in c.messages]]
    # 8,211 records go on with the one before; some of those before are dropped (no user turn)
    assert 7_800 < len(later) < 8_211


def test_limit_reads_no_further(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    records: list[Any] = as_records(random_talks(30))
    records[3] = sharegpt(("human", "q"), ("gpt", "b" * 5000))
    records[20] = "broken"
    path = write_lines(tmp_path / "x.jsonl", records)
    cfg = DataConfig(path=path, limit=10, held_out=0.05)
    split = split_documents(cfg, tokenizer)
    assert len(split.train) + len(split.held_out) == 10 == split.tally.kept
    assert split.tally.read == 11  # the one that is too long does not count
    assert list(split.tally.unread) == ["the rest, after data.limit=10"]
    all_of_them = split_documents(replace(cfg, limit=100), tokenizer)
    assert all_of_them.tally.kept == 28
    assert all_of_them.tally.unread == {"broken JSON line": 1}
    held = {c.id for c in split.held_out}
    assert held == {c.id for c in all_of_them.held_out} & {f"c{i}" for i in range(11)}


def test_limit_counts_prompts_where_the_target_answers(tmp_path: Path) -> None:
    records = [sharegpt(("human", "q" * n), id=f"i{n}") for n in (5, 900, 6, 7)]
    path = write_lines(tmp_path / "x.jsonl", records)
    cfg = DataConfig(path=path, limit=3, max_prompt=100, responses="target", held_out=0)
    split = split_prompts(cfg, tokenizer_of(CHATML))
    assert sorted(c.id for c in split.train) == ["i5", "i6", "i7"]
    with pytest.raises(UserError, match="4 no assistant turn"):
        split_documents(replace(cfg, responses="data"), tokenizer_of(CHATML))


class Counting:
    """A tokenizer that remembers what it was asked to tokenise."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.texts = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self.tokenizer(text, **options)


@pytest.mark.parametrize(
    ("count", "held"), [(4, 1), (20, 4), (62, 12), (300, 60), (700, 120), (1, 0), (2500, None)]
)
def test_more_of_small_data_is_held_out(tmp_path: Path, count: int, held: int | None) -> None:
    """120 conversations, but at most a fifth; of large data 5 %, as always."""
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(count)))
    split = split_of(path=path)
    assert held is None or len(split.held_out) == held
    again = split_of(path=path, held_out=split.share, validation=split.validation_share)
    assert [c.id for c in again.validation] == [c.id for c in split.validation]
    assert [c.id for c in again.held_out] == [c.id for c in split.held_out]
    assert [c.id for c in again.train] == [c.id for c in split.train]
    assert split.share == 0.05 or held
    tokenizer = tokenizer_of(CHATML)
    cfg = DataConfig(path=path)
    asked = [p.ids.tolist() for p in split_documents(cfg, tokenizer).prompts]
    assert [p.ids.tolist() for p in held_out_prompts(cfg, tokenizer)] == asked


@pytest.mark.parametrize("opening", ["hi", "please", "translate", "q", "a", "how are you"])
def test_an_opening_of_half_the_data_does_not_take_half_of_it_away(opening: str) -> None:
    """Its copies stay together: at the cut, all of them are trained on."""
    others = [f"a question about {n} things" for n in range(150)]
    openings = [*others, *[opening] * 150]
    held = sum(is_held_out(o, chosen_share(openings)) for o in openings)
    assert 0 < held <= 60 or is_held_out(opening, 0.05)


@pytest.mark.parametrize("limit", [None, 30])
def test_every_conversation_is_tokenised_once(tmp_path: Path, limit: int | None) -> None:
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(40)))
    for split_into in (split_documents, split_prompts):
        counting = Counting(tokenizer_of(CHATML))
        split = split_into(DataConfig(path=path, limit=limit, held_out=0.2), counting)
        assert len(split.train) + len(split.held_out) == (limit or 40)
        prompts = len(split.prompts) if split_into is split_documents else 0  # for the decoder
        end = "<|im_start|>assistant\n"  # of the prompts, tokenised once by itself
        texts = [text for text in counting.texts if text != end]
        assert len(texts) == (limit or 40) + prompts and len(counting.texts) <= len(texts) + 1
        assert len(set(counting.texts)) == len(counting.texts)


@pytest.mark.parametrize("responses", ["data", "target"])
def test_held_out_prompts_are_those_of_the_split(tmp_path: Path, responses: str) -> None:
    """With a limit, without one, and as a run notes them (the records that it read and both
    shares)."""
    records = as_records(random_talks(60))
    records[7] = sharegpt(("human", "q" * 900), ("gpt", "b"))
    path = write_lines(tmp_path / "x.jsonl", records)
    tokenizer = tokenizer_of(CHATML)
    for limit in (30, None):
        cfg = DataConfig(path=path, limit=limit, max_prompt=400, held_out=0.3, responses=responses)
        split: DataSplit[Any] = (split_prompts if responses == "target" else split_documents)(
            cfg, tokenizer
        )
        expected, read = split.prompts, split.tally.read
        assert len(expected) > 5
        noted = replace(cfg, limit=None, records=read, validation=split.validation_share)
        for way in (cfg, noted):
            found = held_out_prompts(way, tokenizer)
            assert [p.ids.tolist() for p in found] == [p.ids.tolist() for p in expected]


@pytest.mark.parametrize(
    ("held", "validation"), [(5, None), (23, None), (24, 12), (40, 12), (60, 15), (120, 30)]
)
def test_a_quarter_of_the_held_out_side_selects_and_the_rest_is_reported(
    held: int, validation: int | None
) -> None:
    """At least 12 conversations each; with fewer than 24, all select and all are reported."""
    openings = [f"a question about {n} things" for n in range(1000)]
    ours = sorted(openings, key=hash_of)[:held]
    share = (hash_of(ours[-1]) + 1) / 2**64
    fraction = chosen_validation(ours, share)
    assert sum(is_validation(o, share, fraction) for o in ours) == (validation or 0)
    assert (fraction == 0) == (validation is None)


def hash_of(opening: str) -> int:
    return int.from_bytes(blake2b(opening.encode(), digest_size=8).digest())


def test_of_large_data_a_validation_conversation_stays_one_when_data_is_added() -> None:
    openings = [f"a question about {n} things" for n in range(4000)]
    held = [o for o in openings if is_held_out(o, 0.05)]
    assert len(held) > 150
    assert chosen_validation(held[:150], 0.05) == chosen_validation(held, 0.05) == 0.25


def test_a_popular_held_out_opening_leaves_something_to_measure_on() -> None:
    """150 copies with the smallest hash are 150 validation conversations or 150 test prompts."""
    openings = sorted((f"a question about {n} things" for n in range(80)), key=hash_of)
    for popular in (0, 40, 79):
        many = [*openings, *[openings[popular]] * 150]
        selecting = sum(is_validation(o, 1.0, chosen_validation(many, 1.0)) for o in many)
        assert 12 <= selecting <= len(many) - 12


@pytest.mark.parametrize("responses", ["data", "target"])
def test_the_three_parts_have_no_prompt_in_common(tmp_path: Path, responses: str) -> None:
    """The training side is what it is without a validation part, in the same order."""
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(300)))
    make: Any = split_prompts if responses == "target" else split_documents
    tokenizer = tokenizer_of(CHATML)
    cfg = DataConfig(path=path, responses=responses)
    split, two = make(cfg, tokenizer), make(replace(cfg, validation=0.0), tokenizer)
    ids = {name: [x.id for x in getattr(split, name)] for name in ("train", "validation", "test")}
    assert ids["train"] == [x.id for x in two.train]
    assert len(ids["validation"]) == 15 and len(ids["test"]) == 45
    assert sorted(ids["validation"] + ids["test"]) == sorted(x.id for x in two.held_out)
    assert not {*ids["train"]} & {x.id for x in two.held_out}
    assert [x.id for x in two.validation] == [x.id for x in two.test] == [x.id for x in two.prompts]
    assert [p.id for p in split.prompts] == ids["test"]
    assert [p.id for p in split.validation_prompts] == ids["validation"]
    assert two.validation_prompts == []


def test_a_validation_conversation_near_a_test_prompt_selects_nothing(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(4000)]
    talks = [" ".join(words[12 * n : 12 * n + 12]) for n in range(200)]
    path = write_lines(
        tmp_path / "x.jsonl", as_records([talk(t, "an answer", id=t) for t in talks])
    )
    cfg = DataConfig(path=path, held_out=0.5, validation=0.5)
    split = split_documents(cfg, tokenizer_of(CHATML))
    reported = [p.words for p in split.prompts]
    near = next(
        twin
        for prompt in reported
        for n in range(99)
        if is_validation(twin := f"{prompt} more{n}", 0.5, 0.5)
    )
    write_lines(
        tmp_path / "x.jsonl", as_records([talk(t, "an answer", id=t) for t in (*talks, near)])
    )
    again = split_documents(cfg, tokenizer_of(CHATML))
    assert len(again.held_out) == len(split.held_out) + 1
    assert [d.id for d in again.validation] == [d.id for d in split.validation]
    assert [p.words for p in again.prompts] == reported
    reason = "held out, but nearly the same as a test prompt: selects no draft"
    assert again.tally.changed[reason] == 1


def test_an_evaluation_calibrates_and_chooses_on_validation_prompts(tmp_path: Path) -> None:
    """So that what a later evaluation measures was not calibrated on. Without a validation part,
    test prompts that are not measured take their place."""
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(300)))
    tokenizer = tokenizer_of(CHATML)
    cfg = DataConfig(path=path)
    split = split_documents(cfg, tokenizer)
    noted = replace(cfg, held_out=split.share, validation=split.validation_share)
    for way in (cfg, noted):
        asked, others = measured_prompts(way, tokenizer, 40, 10)
        assert [p.id for p in asked] == [p.id for p in split.prompts[:40]]
        assert [p.id for p in others] == [p.id for p in split.validation_prompts[:10]]
    asked, others = measured_prompts(noted, tokenizer, 40, 18)
    assert [p.id for p in others[15:]] == [p.id for p in split.prompts[40:43]]
    two = replace(noted, validation=0.0)
    every = [p.id for p in split_documents(two, tokenizer).prompts]
    asked, others = measured_prompts(two, tokenizer, 40, 10)
    assert [p.id for p in (*asked, *others)] == every[:50]


def test_a_validation_part_of_everything_is_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(30)))
    with pytest.raises(UserError, match="leaves no held-out conversation to measure on"):
        split_documents(DataConfig(path=path, validation=0.9999), tokenizer_of(CHATML))
    with pytest.raises(UserError, match=r"data.validation=1: give a fraction"):
        DataConfig(path=path, validation=1)


def test_prompts_that_were_trained_on_are_known(tmp_path: Path) -> None:
    """By the words of their openings, among as many as a run read; of a folder without a run,
    nothing is known."""
    chats, tokenizer = conversations(60), make_tokenizer()
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    cfg = DataConfig(path=str(path), held_out=0.2, max_prompt=64)
    openings = {chat["id"]: chat["messages"][0]["content"] for chat in chats}
    split = split_documents(cfg, tokenizer)
    for places in ([0, 3, 4, 9], None):
        read = range(len(split.train)) if places is None else places
        trained = [openings[split.train[place].id] for place in read]
        assert trained_openings(cfg, tokenizer, openings.values(), places) == set(trained)
    assert trained_openings(cfg, tokenizer, [openings[p.id] for p in split.prompts], None) == set()

    mine = [*trained[:2], trained[2].upper(), "what is it?", openings[split.prompts[0].id]]
    write_json(tmp_path / "config.json", {"data": asdict(cfg)})
    said = "prompts of your own, of which the draft was trained on "
    assert origin_of_prompts(tmp_path, tokenizer, mine) == f"{said}3"
    assert origin_of_prompts(tmp_path, tokenizer, mine[3:]) == f"{said}none"
    record = BudgetRecord("", 1.0, 60.0, 0.0, {"responses": "0-1", "hidden states": "0"})
    write_json(tmp_path / BUDGET, asdict(record))
    assert origin_of_prompts(tmp_path, tokenizer, mine) == f"{said}1"
    unknown = origin_of_prompts(tmp_path / "elsewhere", tokenizer, mine)
    assert unknown == "prompts of your own, on which the draft may have been trained"


def test_the_share_is_chosen_by_what_can_be_held_out(tmp_path: Path) -> None:
    """A few prompts over and over: a fifth of the prompts is held out with all of their copies, or
    nothing if that is too much; beside others, half of the others at most. Whatever is held out, a
    run that goes on with its share has the same split."""

    def read(*counts: int, others: int = 0, **options: Any) -> DataSplit[Conversation]:
        asked = [f"q {n}" for n, count in enumerate(counts) for _ in range(count)]
        asked += [f"one more about thing{n}" for n in range(others)]
        talks = [talk(opening, "a", id=f"c{i}") for i, opening in enumerate(asked)]
        return split_of(path=write_lines(tmp_path / "x.jsonl", as_records(talks)), **options)

    for counts in ((100, 100), (100, 100, 100), (5, 5)):
        with pytest.raises(UserError, match=f"{sum(counts)} conversations ask only {len(counts)} "):
            read(*counts)
    for counts, others in (([60] * 5, 0), ([30] * 10, 0), ([30] * 10, 1), ([30] * 10, 30)):
        split = read(*counts, others=others)
        assert split.share <= 0.4 and 0 < len(split.held_out) <= 75
        sides = [{c.opening for c in side} for side in (split.train, split.held_out)]
        assert not sides[0] & sides[1]
        again = read(*counts, others=others, held_out=split.share)
        assert [c.id for c in again.held_out] == [c.id for c in split.held_out]
    assert len(split.held_out) == 15 and all("thing" in c.opening for c in split.held_out)
    given = {c.opening for c in read(100, 100, held_out=0.335).held_out}
    assert given == {x for x in ("q 0", "q 1") if is_held_out(x, 0.335)} == {"q 1"}


def test_whether_a_conversation_may_be_held_out_is_judged_by_all_its_texts() -> None:
    parts = ["", "?!", "e", "\u0301 x", "Straße ﬁ", "日本 go", "…\n"]
    for number, texts in enumerate(itertools.product(parts, repeat=4)):
        chat = replace(talk(texts[0], "a"), distinct=texts[1:])
        every = [texts[0]]
        for more in texts[1:]:
            every += [f"{text}\n{more}" for text in every]
        for fraction in (0.05, 0.2):
            found = may_be_held_out(chat, fraction)
            assert found == any(is_held_out(text, fraction) for text in every), number
