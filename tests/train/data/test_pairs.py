"""Pairs of a source and its response, and plain texts: what is read, dropped, and trained on.

Run alone: python -m pytest tests/train/data/test_pairs.py
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UserError
from specdec.measure.results import Results
from tests.lab.targets.test_seq2seq import save_t5
from tests.processes import process
from tests.tiny import conversations, make_tiny, make_tokenizer, save_target
from tests.train.data.chats import CHATML, said, tokenizer_of
from tests.train.data.test_conversations import write_lines
from train.data import sources
from train.data.conversations import Conversation, DataConfig, Tally
from train.data.reader import read_conversations
from train.data.run_data import held_out_prompts
from train.data.split import is_held_out, split_documents, split_prompts
from train.folder import data_of_run


def of_file(path: Path | str, format: str, **options: Any) -> tuple[list[Conversation], Tally]:
    """The conversations read from a file, and their tally."""
    tally = Tally()
    cfg = DataConfig(path=str(path), format=format, **options)
    return [c for c, _ in read_conversations(cfg, tally, lambda c: None)], tally


def contents(found: list[Conversation]) -> list[list[str]]:
    return [[m.content for m in c.messages] for c in found]


# Pairs


@pytest.mark.parametrize(
    ("name", "text", "pair"),
    [
        ("x.jsonl", '{"source": "a b", "target": " c "}\n{"source": "d", "target": "e"}', None),
        ("x.json", '[{"en": "a b", "de": "c"}, {"en": "d", "de": "e"}]', ["en", "de"]),
        (
            "x.jsonl",
            '{"t": {"en": "a b", "de": "c"}}\n{"t": {"en": "d", "de": "e"}}',
            ["t.en", "t.de"],
        ),
        ("x.jsonl", '{"a.b": "a b", "c": "c"}\n{"a.b": "d", "c": "e"}', ["a.b", "c"]),
        ("x.tsv", "n\ttarget\tsource\r\n1\tc\ta b\r\n\r\n2\te\td\tmore", None),
        ("x.tsv", "\ufeffsource\ttarget\na b\tc\nd\te\n", None),
        ("x.tsv", "c\t1\ta b\ne\t2\td", ["3", "1"]),
    ],
)
def test_pairs_of_any_file(tmp_path: Path, name: str, text: str, pair: list[str] | None) -> None:
    (tmp_path / name).write_bytes(text.encode())
    given = {} if pair is None else {"pair": pair}
    for path in (tmp_path / name, tmp_path):
        found, tally = of_file(path, "pairs", prefix="to German: ", **given)
        assert contents(found) == [["to German: a b", "c"], ["to German: d", "e"]]
        assert [c.opening for c in found] == ["a b", "d"]  # so the prefix does not move a pair
        assert tally.read == tally.kept == 2 and len({c.id for c in found}) == 2


BAD = [
    ({"target": "b"}, "no 'source' in it"),
    ({"source": None, "target": "b"}, "no 'source' in it"),
    ({"source": " ", "target": "b"}, "a blank source"),
    ({"source": "a", "target": "\n"}, "no response, or a blank one"),
    ({"source": "a"}, "no response, or a blank one"),
    ({"source": ["a"], "target": "b"}, "content that is not text"),
    ({"source": "a", "target": {"b": "c"}}, "content that is not text"),
    ({"source": "a", "target": "\ud83d"}, "text that is not Unicode"),
    ("3", "not a pair"),
    ("[]", "not a pair"),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_a_bad_pair_is_dropped_for_its_reason(tmp_path: Path, record: Any, reason: str) -> None:
    good = {"source": "a", "target": "b"}
    found, tally = of_file(write_lines(tmp_path / "x.jsonl", [good, record, good]), "pairs")
    assert len(found) == 2 and tally.dropped == {reason: 1}


def test_a_source_alone_is_a_prompt_where_the_target_answers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"source": "a"}, {"source": "b", "target": " "}])
    assert contents(of_file(path, "pairs", responses="target")[0]) == [["a"], ["b"]]


def test_what_cannot_be_parsed_is_counted(tmp_path: Path) -> None:
    good = '{"source": "a", "target": "b"}'
    deep = '{"source": "a", "target": ' + "[" * 200_000
    path = write_lines(tmp_path / "x.jsonl", [good, deep, '{"source": ', good])
    found, tally = of_file(path, "pairs")
    assert len(found) == 2
    assert tally.unread == {"records nested too deeply": 1, "broken JSON line": 1}
    (tmp_path / "x.tsv").write_bytes(b"source\ttarget\na\tb\n\xff\tb\na\nc\td")
    found, tally = of_file(tmp_path / "x.tsv", "pairs")
    assert contents(found) == [["a", "b"], ["c", "d"]]
    assert tally.dropped == {"text that is not Unicode": 1, "no response, or a blank one": 1}


@pytest.mark.parametrize(
    ("text", "options", "part"),
    [
        ("a\tb\nc\td", {}, r"line 1: no columns source and target .* data.pair=\[1,2\]"),
        ("a\tb", {"pair": ["1", "3"]}, "no pair in it .* 1 and 3, as keys"),
        ("", {}, "it is empty"),
        ("a\tb", {"pair": ["a", "a"]}, "give two keys"),
        ("a\tb", {"pair": ["a"]}, "give two keys"),
        ("a\tb", {"pair": ["a", ""]}, "give two keys"),
        ("a\tb", {"format": "pair"}, "did you mean 'pairs'"),
    ],
)
def test_mistakes_with_pairs(tmp_path: Path, text: str, options: dict[str, Any], part: str) -> None:
    (tmp_path / "x.tsv").write_text(text)
    with pytest.raises(UserError, match=part) as error:
        of_file(tmp_path / "x.tsv", **({"format": "pairs", "responses": "data"} | options))
    assert "\n" not in str(error.value)


def test_a_pair_by_a_chat_template_and_too_long_ones(tmp_path: Path) -> None:
    records = [{"source": "abc", "target": "defgh"}, {"source": "abc", "target": "d" * 200}]
    path, tokenizer = write_lines(tmp_path / "x.jsonl", records), tokenizer_of(CHATML)
    cfg = DataConfig(path=path, format="pairs", prefix="to: ", held_out=0, max_length=100)
    (document,), tally = (split := split_documents(cfg, tokenizer)).train, split.tally
    assert said(document, tokenizer) == "defgh<|im_end|>"
    assert "to: abc<|im_end|>" in tokenizer.decode(document.ids)
    assert tally.dropped == {"longer than max_length=100": 1}
    with pytest.raises(UserError, match="no prompt of at most max_prompt=3"):
        split_prompts(replace(cfg, max_prompt=3), tokenizer)


# Plain texts


def test_texts_end_with_their_line_or_at_a_blank_one(tmp_path: Path) -> None:
    data = "\ufeffone \r\n two\r\n\r\n \t\r\n\nthree\nfour".encode() + b"\n\nbad \xff\n\nfive\n"
    (tmp_path / "x.txt").write_bytes(data)
    (tmp_path / "notes.jsonl.old").write_text("no data")
    for path in (tmp_path / "x.txt", tmp_path):
        found, tally = of_file(path, "paragraphs")
        assert ["".join(x) for x in contents(found)] == ["one \n two", "three\nfour", "five"]
        assert tally.dropped == {"text that is not Unicode": 1}
        found, tally = of_file(path, "lines")
        assert ["".join(x) for x in contents(found)] == ["one", "two", "three", "four", "five"]
    assert found[2].id.endswith("x.txt, line 6")


def test_texts_of_records(tmp_path: Path) -> None:
    records = [{"text": "a"}, '"b"', {"text": ["c"]}, {"text": " "}, {"texts": "d"}, "3"]
    for format in ("lines", "paragraphs"):
        found, tally = of_file(write_lines(tmp_path / "x.jsonl", records), format)
        assert contents(found) == [["a", ""], ["b", ""]]
        assert tally.dropped == {"content that is not text": 3, "a blank text": 1}
    with pytest.raises(UserError, match=r"no text in it .*accepted: plain text") as error:
        of_file(write_lines(tmp_path / "y.jsonl", [{"messages": []}]), "lines")
    assert "keys messages" in str(error.value)


def test_a_text_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST", 20)
    (tmp_path / "x.txt").write_text("a b c d e\n" * 5)
    found, _ = of_file(tmp_path / "x.txt", "paragraphs")
    assert ["".join(x).count("\n") + 1 for x in contents(found)] == [3, 2]  # > 20 after three


def test_the_prompt_of_a_text_is_its_beginning_in_whole_words(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one two three\nonetwothree\none two")
    found, _ = of_file(tmp_path / "x.txt", "lines", prompt_characters=9)
    assert contents(found) == [["one two", " three"], ["onetwothr", "ee"], ["one two", ""]]
    assert [c.opening for c in found] == ["one two", "onetwothr", "one two"]
    assert is_held_out(found[0].opening, 0.5) == is_held_out(found[2].opening, 0.5)


def test_a_text_is_trained_on_whole(tmp_path: Path) -> None:
    texts = ["one two three", "x" * 30, "a<|im_end|>b", "abcd"]
    (tmp_path / "x.txt").write_text("\n".join(texts))
    cfg = DataConfig(path=str(tmp_path / "x.txt"), format="lines", prompt_characters=9, held_out=0)
    for bos in (False, True):
        tokenizer, dropped = tokenizer_of(None, bos=bos), {"a control token in its text": 1}
        if not bos:  # of 4 tokens, all but the first follow another
            dropped["responses shorter than min_response=4"] = 1
        split = split_documents(replace(cfg, max_length=20, too_long="truncate"), tokenizer)
        assert split.tally.dropped == dropped
        assert split.tally.changed == {"cut at max_length=20": 1}
        whole = next(d for d in split.train if d.id.endswith("line 1"))
        assert tokenizer.decode(whole.ids) == "<s>" * bos + "one two three"
        assert whole.mask.tolist() == [False] + [True] * (len(whole.ids) - 1)
        with pytest.raises(UserError, match=r"no chat template.*data=text"):
            split_documents(replace(cfg, format="pairs", path=__file__), tokenizer)
    (prompt, *_) = split_prompts(replace(cfg, limit=1), tokenizer).train
    assert tokenizer.decode(prompt.ids) == "<s>one two" and prompt.words == "one two"
    tally = split_documents(replace(cfg, max_length=20), tokenizer).tally
    assert tally.dropped["longer than max_length=20"] == 1


# Whole jobs


def pairs(count: int) -> list[dict[str, str]]:
    said = ([m["content"] for m in c["messages"]] for c in conversations(count))
    return [{"source": a, "target": b} for a, b in said]


@pytest.mark.parametrize("responses", ["data", "target"])
def test_a_job_on_pairs_with_an_encoder_decoder(tmp_path: Path, responses: str) -> None:
    """α is reported, and greedy responses are the target's, token for token."""
    job, t5 = make_tiny(tmp_path), save_t5(tmp_path / "t5")
    data = write_lines(tmp_path / "pairs.jsonl", pairs(29))
    given = [f"target.path={t5}", "data=pairs", f"data.path={data}", f"data.responses={responses}"]
    given += ["data.prefix='we go '", "drafter.source=random", "drafter.depth=2"]
    given += ["drafter.overrides={num_layers: 1, num_decoder_layers: 1}"]
    job.job(tmp_path / "run", "seq2seq_lm", *given)
    results = Results.load(tmp_path / "run" / "report")
    zero, one = results.asked
    assert zero.identical == results.prompts == 2
    assert 0 < one.alpha.all.sampled[0].value < 1 and one.alpha.all.sampled[0].n > 8
    sources = {"we go " + pair["source"] for pair in pairs(29)}
    assert {s.prompt for s in zero.samples} <= sources
    (tmp_path / "x.txt").write_text("we go home\n\n" * 9)
    text = [*given, "data=text", f"data.path={tmp_path / 'x.txt'}"]
    with pytest.raises(UserError, match="encoder-decoder, which does not read plain text"):
        job.job(tmp_path / "other", "seq2seq_lm", *text)


@pytest.mark.parametrize("responses", ["data", "target"])
def test_a_job_on_text_with_a_target_without_a_template(tmp_path: Path, responses: str) -> None:
    """The whole text is trained on; the prompts of the evaluation are beginnings of texts."""
    tiny = make_tiny(tmp_path)
    target = save_target(tmp_path / "base", template=None)
    texts = [f"{c['source']} {c['target']}" for c in pairs(29)]
    (tmp_path / "x.txt").write_text("\n\n".join(texts))
    more = [f"target.path={target}", "data=text", f"data.path={tmp_path / 'x.txt'}"]
    more += ["data.prompt_characters=20", f"data.responses={responses}"]
    for _ in range(2):  # the second time, it is finished
        tiny.job(tmp_path / "run", "eagle3", *more)
    results = Results.load(tmp_path / "run" / "report")
    assert results.asked[0].identical == results.prompts == 2 and results.training
    asked = list(held_out_prompts(data_of_run(tmp_path / "run"), make_tokenizer(None)))
    assert len(asked) > 2
    assert all(
        any(text.startswith(p.words) and len(p.words) <= 20 for text in texts) for p in asked
    )
    assert {s.prompt for s in results.asked[0].samples} <= {p.words for p in asked}
    if responses == "data":
        done = process(["scripts/generate", str(tmp_path / "run" / "best"), "we go"])
        assert done.returncode == 0, done.stderr
        assert "τ" in done.stdout
