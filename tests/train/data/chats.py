"""Conversations and tokenizers for the tests of data."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.train.data.test_conversations import sharegpt, write_lines
from train.data.conversations import Conversation, DataConfig, Message, Unusable
from train.data.sequences import Document, Prompt
from train.data.template import Chat

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
    """The document, the last of them if there are several, or the reason why there is none."""
    try:
        return Chat(tokenizer).documents(conversation, cfg)[-1]
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


def random_talks(n: int, seed: int = 0) -> list[Conversation]:
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(500)]
    return [talk(" ".join(rng.choices(words, k=12)), "an answer", id=f"c{i}") for i in range(n)]


def as_records(conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    return [sharegpt(*((m.role, m.content) for m in c.messages), id=c.id) for c in conversations]


def asked(c: Conversation, tokenizer: Any, most: int = 512) -> Prompt:
    return Chat(tokenizer).prompt(c, most)
