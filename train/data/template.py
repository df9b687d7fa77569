"""A conversation → its token ids by the target's chat template, and a mask over the assistant's
tokens; or the prompt that the target is to answer. Plain texts need no template.

Whatever is uncertain is left out: a mask is never a guess.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.errors import UserError, first_line
from train.data.conversations import Conversation, DataConfig, Message, Tally, Unusable

DISAGREE = "template and mask disagree"
PATIENCE = 200  # if this many disagree before any is usable, the template is at fault
Span = tuple[int, int]  # start and end (exclusive) in the characters of a text


@dataclass(eq=False)
class Document:
    """Token ids; `mask` is true where the assistant speaks, including its end-of-turn tokens (in a
    plain text, at every token but the first).

    `rounds` [T, 1 + K], if given, holds the rounds of the decoder that wrote the answer: at each
    round's anchor, the number of accepted tokens and then the drafted tokens; elsewhere -1."""

    id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: bool = False
    rounds: NDArray[np.int32] | None = None


@dataclass(eq=False)
class Prompt:
    """Token ids that end with the generation prompt, for the target to answer."""

    id: str
    ids: NDArray[np.int32]
    words: str = ""  # what the user said last


class Chat:
    """Renders conversations with a tokenizer's chat template. Raises UserError if there is no
    template, or if the tokenizer cannot report the positions of its tokens in a text; Unusable for
    a conversation that the template refuses, or whose text contains one of the template's control
    tokens: that would forge a turn."""

    def __init__(self, tokenizer: Any) -> None:
        try:
            self.template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template: use an "
                "instruction-tuned target, save a template as chat_template in its "
                "tokenizer_config.json, or train on plain text with data=text"
            ) from error
        if not tokenizer.is_fast:
            raise UserError(
                f"{tokenizer.name_or_path}: the tokenizer cannot report the positions of its "
                "tokens in a text: use a target with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        special = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        self.control = {t for t in special if t in self.template} | {*tokenizer.all_special_tokens}
        self.has_blocks = bool(re.search(r"{%-?\s*generation\s*-?%}", self.template))

    def document(self, conversation: Conversation, cfg: DataConfig) -> Document:
        """A conversation up to its last answer, with the ids of the chat template. The assistant's
        spans come from the template's `{% generation %}` blocks or, if it has none, from comparing
        what it renders before each answer with what it renders up to the end of that answer. A
        conversation is Unusable if a span is uncertain, or if a token crosses the edge of one."""
        messages = conversation.messages
        while messages and messages[-1].role != "assistant":
            messages = messages[:-1]
        if not messages:
            raise Unusable("no assistant turn")
        _require_no_control([m.content for m in messages], self.control)
        text, blocks = self._render(messages)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoding["input_ids"]
        _require_short(ids, cfg)
        mask = _mask(encoding["offset_mapping"], self._spans(messages, text, blocks))
        return _document(conversation.id, ids, mask, cfg)

    def prompt(self, conversation: Conversation, most: int | None = None) -> Prompt:
        """The longest beginning of a conversation that ends with a user turn and has at most `most`
        tokens (None: any number), including the generation prompt. Unusable if there is none."""
        _require_no_control([m.content for m in conversation.messages], self.control)
        best = None
        for i, message in enumerate(conversation.messages, 1):
            if message.role == "user":
                text, _ = self._render(conversation.messages[:i], prompt=True)
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                if most is not None and len(ids) > most:
                    break
                best = Prompt(conversation.id, np.array(ids, np.int32), message.content)
        if best is None:
            raise Unusable(f"no prompt of at most max_prompt={most} tokens")
        return best

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and the places of its `{% generation %}` blocks."""
        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            rendered: Any = render_jinja_template(
                [chat],
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.has_blocks,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, ValueError) as error:
            raise Unusable(f"refused by the chat template: {first_line(error)[:80]}") from error
        texts, blocks = rendered
        return texts[0], blocks[0] if blocks else []

    def _spans(self, messages: Sequence[Message], text: str, blocks: list[Span]) -> list[Span]:
        """Where in `text` each answer and its end-of-turn token are."""
        answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
        if self.has_blocks:
            parts = [text[start:end] for start, end in blocks]
            pairs = zip(answers, parts, strict=False)
            if len(parts) != len(answers) or any(messages[i].content not in x for i, x in pairs):
                raise Unusable(DISAGREE)
            return [(b[0], b[0] + len(x.rstrip())) for b, x in zip(blocks, parts, strict=True)]
        spans = []
        for i in answers:
            try:
                before, _ = self._render(messages[:i], prompt=True)
                after, _ = self._render(messages[: i + 1])
            except Unusable as reason:  # the template accepts the chat, but not its beginning
                raise Unusable(DISAGREE) from reason
            if not text.startswith(before) or not after.startswith(before):
                raise Unusable(DISAGREE)
            lead, content, tail = after[len(before) :].rpartition(messages[i].content)
            # Some templates write something before the last answer alone, such as <think></think>.
            said = (lead + content + tail.rstrip(), content + tail.rstrip())
            found = [len(x) for x in said if content and text.startswith(x, len(before))]
            if not found:
                raise Unusable(DISAGREE)
            spans.append((len(before), len(before) + found[0]))
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise Unusable(DISAGREE)
        return spans


class Plain:
    """Reads plain texts, without a template. If the tokenizer begins every text with a special
    token, as Llama's does, so do these texts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self.lead: list[int] = [bos] if tokenizer("").input_ids[:1] == [bos] else []

    def document(self, conversation: Conversation, cfg: DataConfig) -> Document:
        """A whole text, with loss on every token but the first."""
        ids = self._ids(conversation.messages)
        _require_short(ids, cfg)
        return _document(conversation.id, ids, np.arange(len(ids)) > 0, cfg)

    def prompt(self, conversation: Conversation, most: int | None = None) -> Prompt:
        """The beginning of a text, Unusable if it is over `most` tokens long (None: any length)."""
        begins = conversation.messages[:1]
        if begins[0].role != "user" or len(conversation.messages) > 2:
            raise Unusable("several turns, and the target has no chat template")
        ids = self._ids(begins)
        if most is not None and len(ids) > most:
            raise Unusable(f"no prompt of at most max_prompt={most} tokens")
        return Prompt(conversation.id, np.array(ids, np.int32), begins[0].content)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(m.content for m in messages)
        _require_no_control([text], self.tokenizer.all_special_tokens)
        return self.lead + self.tokenizer(text, add_special_tokens=False).input_ids


def _require_no_control(texts: Sequence[str], control: Iterable[str]) -> None:
    if any(token in text for text in texts for token in control):
        raise Unusable("a control token in its text")


def _require_short(ids: Sequence[int], cfg: DataConfig) -> None:
    if len(ids) > cfg.max_length and cfg.too_long == "drop":
        raise Unusable(f"longer than max_length={cfg.max_length}")


def _document(name: str, ids: Sequence[int], mask: NDArray[np.bool_], cfg: DataConfig) -> Document:
    cut = cfg.max_length
    if mask[:cut].sum() < cfg.min_answer:
        raise Unusable(f"answers shorter than min_answer={cfg.min_answer}")
    return Document(name, np.array(ids[:cut], np.int32), mask[:cut], len(ids) > cut)


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens are in a span. Raises Unusable if a token crosses an edge, or might: some
    tokenizers leave a token's leading space out of its offsets."""
    starts, mask = [start for start, _ in offsets], np.zeros(len(offsets), np.bool_)
    for span in spans:
        first, last = (bisect_left(starts, edge) for edge in span)
        for i, edge in ((first, span[0]), (last, span[1])):
            if i > 0 and offsets[i - 1][1] != edge:
                raise Unusable(DISAGREE)
        mask[first:last] = True
    return mask


def whole_prompts(
    conversations: Sequence[Conversation], tokenizer: Any, room: int | None
) -> list[Prompt]:
    """The prompts of a file, each complete up to its last user turn. Without a chat template, they
    are read as plain text. Raises UserError naming the first that is unusable or has more than
    `room` tokens (None: any number)."""
    chat: Chat | Plain = (Chat if tokenizer.chat_template else Plain)(tokenizer)
    found = []
    for conversation in conversations:
        try:
            found.append(chat.prompt(conversation))
        except Unusable as reason:
            raise UserError(f"{conversation.id}: {reason}") from reason
        if room is not None and len(found[-1].ids) > room:
            raise UserError(
                f"{conversation.id}: the prompt has {len(found[-1].ids):,} tokens, and the target "
                f"has room for only {max(0, room):,} besides the answer: shorten it, or ask for "
                "shorter answers"
            )
    return found


def require_spans(tally: Tally, patience: int) -> None:
    """Raise UserError if `patience` conversations have no certain mask. It is called while none is
    usable: then the template is at fault, not the conversations."""
    if (count := tally.dropped[DISAGREE]) >= patience:
        raise UserError(
            f"chat template without assistant spans: in {count} conversations the assistant's "
            "tokens cannot be identified, and no other is usable: mark them in the target's chat "
            "template with {% generation %} … {% endgeneration %}"
        )
