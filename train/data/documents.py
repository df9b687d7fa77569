"""Conversations → a split, documents with a mask over what the assistant says, packed rows.

`load` splits conversations, `encode_all` makes documents of them (or `prompts` makes prompts
that the target answers itself), `pack` fills rows with documents. Whatever is left out or
changed on the way is counted in a `Tally`, which the caller prints.
"""

import hashlib
import re
import unicodedata
import zlib
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.errors import UserError
from train.data.conversations import (
    Conversation,
    DataConfig,
    Message,
    Tally,
    check,
    opening_of,
    read,
    reasons,
)

DISAGREE = "template and mask disagree"
PATIENCE = 200  # conversations that all disagree, after which the template is at fault
NEAR = 70  # percent: Jaccard similarity of word 3-shingles from which two prompts are the same


# The split


@dataclass
class Split:
    train: list[Conversation]
    held_out: list[Conversation]
    tally: Tally = field(repr=False)


def load(cfg: DataConfig, tokenizer: Any) -> Split:
    """Read and split conversations. With `cfg.limit`, reading stops once that many are found
    that `encode` (or, with answers=target, `prompts`) can use, so that little is read.

    The side of a conversation depends on its opening prompt alone (`is_held_out`): it stays the
    same when data, or a limit, are added. Near-duplicates that fall on both sides are dropped
    from train, never from the held-out side.

    Raises UserError where the data is missing, has no conversation in it, or none is usable.
    """
    check(cfg)
    tally = Tally()
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    seen: Counter[str] = Counter()
    use = encode if cfg.answers == "data" else _prompt
    for conversation in read(cfg, tally):
        if cfg.limit is not None and isinstance(reason := use(conversation, tokenizer, cfg), str):
            tally.count(tally.dropped, reason)
            if not train and not held_out:
                _check_template(tally, PATIENCE)
            continue
        seen[conversation.id] += 1
        if (n := seen[conversation.id]) > 1:  # later on, answers are filed under the id
            conversation = replace(conversation, id=f"{conversation.id}#{n}")
        (held_out if is_held_out(conversation, cfg.held_out) else train).append(conversation)
        if len(train) + len(held_out) == cfg.limit:
            tally.count(tally.unread, f"whatever follows, after data.limit={cfg.limit}")
            break
    if not train and not held_out:
        raise UserError(f"{cfg.path}: no usable conversation: {reasons(tally)}")
    near = near_duplicates(train, held_out)
    if near:
        tally.dropped["prompt nearly the same as a held-out one"] = len(near)
    train = [c for i, c in enumerate(train) if i not in near]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cfg.seed))
    return Split([train[i] for i in order.tolist()], held_out, tally)


def is_held_out(conversation: Conversation, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of its first user prompt's words, without
    regard to case, punctuation and spaces; so it does not depend on any other data.

    Not by a locality-sensitive hash: where most prompts share a long instruction, that would
    put nearly all of them on one side. `near_duplicates` finds those that straddle.
    """
    prompt = opening_of(conversation)
    key = " ".join(_words(prompt)) or prompt
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def near_duplicates(train: Sequence[Conversation], held_out: Sequence[Conversation]) -> set[int]:
    """Indices into `train` whose first user prompt is nearly that of a held-out conversation:
    the Jaccard similarity of their word 3-shingles is at least NEAR percent.

    Exact, where MinHash would miss some: with the shingles of both in one order, rarest first,
    two sets of such a similarity share one of the first n − ⌈n·NEAR/100⌉ + 1 (Chaudhuri et al.
    2006, prefix filtering), so only those are looked up, and each hit is verified.
    """
    theirs = list({_shingles(c) for c in held_out})
    frequency = Counter(s for shingles in theirs for s in shingles)

    def prefix(shingles: frozenset[int]) -> list[int]:
        ordered = sorted(shingles, key=lambda s: (frequency[s], s))
        return ordered[: len(ordered) - -(-len(ordered) * NEAR // 100) + 1]

    index: defaultdict[int, list[int]] = defaultdict(list)
    for j, shingles in enumerate(theirs):
        for s in prefix(shingles):
            index[s].append(j)
    found = set()
    for i, conversation in enumerate(train):
        ours = _shingles(conversation)
        candidates = {j for s in prefix(ours) if s in frequency for j in index.get(s, ())}
        for j in candidates:
            shared = len(ours & theirs[j])
            if shared * 100 >= NEAR * (len(ours) + len(theirs[j]) - shared):
                found.add(i)
                break
    return found


def _words(text: str) -> list[str]:
    """Words in lower case; in scripts without spaces, characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text)


def _shingles(conversation: Conversation) -> frozenset[int]:
    prompt = opening_of(conversation)
    words = _words(prompt) or [prompt]
    triples = zip(words, words[1:], words[2:], strict=False) if len(words) > 2 else [words]
    return frozenset(zlib.crc32(" ".join(triple).encode()) for triple in triples)


# Ids and masks


@dataclass
class Document:
    """Token ids; `mask` is true where the assistant speaks, its end-of-turn token included."""

    id: str
    ids: list[int]
    mask: list[bool]
    truncated: bool = False


@dataclass
class Prompt:
    id: str
    ids: list[int]


def encode_all(
    conversations: Sequence[Conversation], tokenizer: Any, cfg: DataConfig, tally: Tally
) -> list[Document]:
    """The documents of all conversations that have one. Raises UserError where none has."""
    documents: list[Document] = []
    for conversation in conversations:
        document = encode(conversation, tokenizer, cfg)
        if isinstance(document, str):
            tally.count(tally.dropped, document)
            if not documents:
                _check_template(tally, PATIENCE)
            continue
        if document.truncated:
            tally.count(tally.changed, f"cut at max_length={cfg.max_length}")
        documents.append(document)
    if conversations and not documents:
        _check_template(tally, len(conversations))
        raise UserError(f"{cfg.path}: no conversation left: {reasons(tally)}")
    return documents


def encode(conversation: Conversation, tokenizer: Any, cfg: DataConfig) -> Document | str:
    """One document, or the reason why there is none. Turns after the last answer are left out.

    The ids are those of the chat template. What the assistant says comes from the template's
    `{% generation %}` blocks or, without them, from comparing what it renders up to a turn and
    past it. Where a span cannot be told for certain, or a token lies across its edge, there is
    no document: a mask is never a guess. Raises UserError without a chat template.
    """
    messages = list(conversation.messages)
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages:
        return "no assistant turn"
    template = _template(tokenizer)
    if _has_control_token(messages, tokenizer, template):
        return "a control token in its text"
    try:
        text, blocks = _render(messages, tokenizer, template)
    except (TemplateError, ValueError) as error:
        return _refused(error)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, cut = list(encoding["input_ids"]), cfg.max_length
    if len(ids) > cut and cfg.too_long == "drop":
        return f"longer than max_length={cut}"
    spans = _spans(messages, text, blocks, tokenizer)
    mask = None if spans is None else _mask(encoding["offset_mapping"], spans)
    if mask is None:
        return DISAGREE
    if sum(mask[:cut]) < cfg.min_answer:
        return f"answers shorter than min_answer={cfg.min_answer}"
    return Document(conversation.id, ids[:cut], mask[:cut], len(ids) > cut)


def prompts(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    cfg: DataConfig,
    tally: Tally | None = None,
) -> list[Prompt]:
    """For each conversation the longest beginning that ends with the user and has, with the
    generation prompt, at most `cfg.max_prompt` tokens. Raises UserError where none has one."""
    found, tally = [], Tally() if tally is None else tally
    for conversation in conversations:
        prompt = _prompt(conversation, tokenizer, cfg)
        if isinstance(prompt, str):
            tally.count(tally.dropped, prompt)
        else:
            found.append(prompt)
    if conversations and not found:
        raise UserError(f"{cfg.path}: no prompt left: {reasons(tally)}")
    return found


def _prompt(conversation: Conversation, tokenizer: Any, cfg: DataConfig) -> Prompt | str:
    template, best = _template(tokenizer), None
    if _has_control_token(conversation.messages, tokenizer, template):
        return "a control token in its text"
    for i, message in enumerate(conversation.messages, 1):
        if message.role != "user":
            continue
        try:
            text = _text(conversation.messages[:i], tokenizer, prompt=True)
        except (TemplateError, ValueError) as error:
            return _refused(error)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > cfg.max_prompt:
            break
        best = Prompt(conversation.id, ids)
    return best or f"no prompt of at most max_prompt={cfg.max_prompt} tokens"


def _template(tokenizer: Any) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template: use an "
            "instruction-tuned target, or save one to its tokenizer_config.json as chat_template"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer tells no token's place in the text: "
            "use a target with a tokenizer.json"
        )
    return template


def _has_control_token(messages: Iterable[Message], tokenizer: Any, template: str) -> bool:
    """Whether a text holds a token that the template speaks with: it would forge a turn."""
    special = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    control = {t for t in special if t in template} | set(tokenizer.all_special_tokens)
    return any(token in m.content for m in messages for token in control)


def _refused(error: Exception) -> str:
    return f"refused by the chat template: {(str(error).splitlines() or ['?'])[0][:80]}"


def _text(messages: Sequence[Message], tokenizer: Any, *, prompt: bool = False) -> str:
    chat = [{"role": m.role, "content": m.content} for m in messages]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt))


def _render(
    messages: Sequence[Message], tokenizer: Any, template: str
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text, and the places of its `{% generation %}` blocks where the template has those."""
    if not re.search(r"{%-?\s*generation\s*-?%}", template):
        return _text(messages, tokenizer), None
    chat = [{"role": m.role, "content": m.content} for m in messages]
    rendered: Any = render_jinja_template(
        [chat],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    texts, blocks = rendered
    return texts[0], blocks[0]


def _spans(
    messages: Sequence[Message],
    text: str,
    blocks: list[tuple[int, int]] | None,
    tokenizer: Any,
) -> list[tuple[int, int]] | None:
    """Where in `text` each answer and its end-of-turn token are; None if it cannot be told."""
    answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
    spans = []
    if blocks is not None:
        if len(blocks) != len(answers):
            return None
        for i, (start, end) in zip(answers, blocks, strict=True):
            if messages[i].content not in text[start:end]:
                return None
            spans.append((start, start + len(text[start:end].rstrip())))
        return spans
    for i in answers:
        try:
            before = _text(messages[:i], tokenizer, prompt=True)
            after = _text(messages[: i + 1], tokenizer)
        except (TemplateError, ValueError):
            return None
        if not text.startswith(before) or not after.startswith(before):
            return None
        lead, content, tail = after[len(before) :].rpartition(messages[i].content)
        # A template may write something before its last answer only, as "<think></think>".
        for said in (lead + content + tail.rstrip(), content + tail.rstrip()):
            if content and text.startswith(said, len(before)):
                spans.append((len(before), len(before) + len(said)))
                break
        else:
            return None
    return spans if all(a[1] <= b[0] for a, b in pairwise(spans)) else None


def _mask(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[bool] | None:
    """Which tokens are in a span; None if one lies across an edge, or might: some tokenizers
    leave a token's leading space out of its place."""
    starts, mask = [start for start, _ in offsets], [False] * len(offsets)
    for span in spans:
        first, last = (bisect_left(starts, edge) for edge in span)
        for i, edge in ((first, span[0]), (last, span[1])):
            if i > 0 and offsets[i - 1][1] != edge:
                return None
        mask[first:last] = [True] * (last - first)
    return mask


def _check_template(tally: Tally, patience: int) -> None:
    if tally.dropped[DISAGREE] >= patience:
        raise UserError(
            f"chat template without assistant spans: in all of {tally.dropped[DISAGREE]} "
            "conversations it cannot be told which tokens the assistant says; mark them in the "
            "target's chat template with {% generation %} … {% endgeneration %}"
        )


# Rows


@dataclass
class Row:
    """Whole documents one after another; never longer than was asked for."""

    ids: list[int]
    mask: list[bool]
    document: list[int]  # index into the documents that were packed
    position: list[int]  # from 0 in each document


def pack(documents: Sequence[Document], length: int) -> list[Row]:
    """Rows of up to `length` tokens, best fit, longest documents first; none is split.

    Raises UserError where a document is longer than a row.
    """
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for i in sorted(range(len(documents)), key=lambda i: (-len(documents[i].ids), i)):
        need = len(documents[i].ids)
        if need > length:
            raise UserError(
                f"document {documents[i].id!r} has {need} tokens and a row {length}: give a larger "
                "data.max_length"
            )
        at = bisect_left(room, (need, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (left - need, row))
    return [_row(documents, indices) for indices in rows]


def _row(documents: Sequence[Document], indices: Sequence[int]) -> Row:
    row = Row([], [], [], [])
    for i in indices:
        n = len(documents[i].ids)
        row.ids += documents[i].ids
        row.mask += documents[i].mask
        row.document += [i] * n
        row.position += range(n)
    return row
