"""Streamed text: the pieces join to the decoded response, whatever the tokens and the speculation
steps.

Run alone: python -m pytest tests/decoding/test_stream.py
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from specdec.decoding.stream import BROKEN, Stream


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, as byte-level BPE has for what its merges do not cover, and two
    special ones."""
    vocab = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    return fast


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: words that carry the space before them, which is left out at the beginning of a
    text, a token for each byte, and two special ones."""
    words = ["▁the", "▁", "▁a", "s", "ing", "▁sky", ".", "▁\N{REPLACEMENT CHARACTER}", "é", "🙂"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="."))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    return fast


BYTES, WORDS = byte_tokenizer(), sentencepiece_tokenizer()
SPECIAL = {"<|a|>", "<|b|>"}


def whole(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer: PreTrainedTokenizerFast, ids: list[int], cuts: list[int]) -> str:
    """The pieces of a response whose speculation steps commit as many tokens as `cuts` say, in
    turn."""
    stream, pieces, at = Stream(tokenizer), [], 0
    while at < len(ids):
        count = cuts[len(pieces) % len(cuts)]
        pieces.append(stream.add(ids[at : at + count]))
        at += count
    pieces.append(stream.rest())
    assert stream.text() == "".join(pieces) and stream.rest() == ""
    return "".join(pieces)


CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=4), st.sampled_from(sorted(SPECIAL)))), CUTS)
def test_any_text_of_byte_tokens_comes_whole(parts: list[str], cuts: list[int]) -> None:
    ids = [
        i
        for part in parts
        for i in (
            [BYTES.convert_tokens_to_ids(part)]
            if part in SPECIAL
            else BYTES.encode(part, add_special_tokens=False)
        )
    ]
    assert streamed(BYTES, ids, cuts) == whole(BYTES, ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=60), CUTS)
def test_bytes_that_are_no_characters_come_as_they_are_decoded(
    ids: list[int], cuts: list[int]
) -> None:
    assert streamed(BYTES, ids, cuts) == whole(BYTES, ids)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 9), st.characters(codec="utf-8"), st.sampled_from([266, 267]))
    ),
    CUTS,
)
@example([BROKEN, "\u0800"], [1])
@example(["é", BROKEN, 3, BROKEN], [2, 5])
def test_words_and_byte_tokens_mix(parts: list[int | str], cuts: list[int]) -> None:
    """Numbers are words and special tokens; characters become the tokens of their bytes."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [10 + b for b in part.encode()]
    assert streamed(WORDS, ids, cuts) == whole(WORDS, ids)


def test_a_character_comes_with_the_token_that_completes_it() -> None:
    """é takes 2 bytes, 🙂 4: "aé🙂b" is 8 tokens."""
    ids = BYTES.encode("aé🙂b")
    stream = Stream(BYTES)
    assert [stream.add([i]) for i in ids] == ["a", "", "é", "", "", "", "🙂", "b"]
    assert stream.rest() == "" and stream.text() == "aé🙂b"
    stream = Stream(BYTES)
    assert stream.add(ids[:2]) == "a" and stream.rest() == BROKEN


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (BYTES, BYTES.encode("aé🙂b " * 200)),
        (BYTES, [200] * 600),  # never a character
        (BYTES, [256] * 600),  # special tokens, which have no text
        (WORDS, [10 + b for b in ("é🙂" * 150).encode()]),
    ],
)
def test_what_a_step_costs_does_not_grow_with_the_response(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, lengths, decode = whole(tokenizer, ids), [], tokenizer.decode

    def counted(ids: list[int], **options: bool) -> str:
        lengths.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert streamed(tokenizer, ids, [1]) == expected
    assert max(lengths) <= 12  # the tokens shown last, 8 at most, and the bytes of a character
