"""A conversation → its token ids by the target's chat template, and a mask over the assistant's
tokens; or the prompt that the target is to answer. Plain texts need no template.

Whatever is uncertain is left out: a mask is never a guess.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.errors import UserError
from train.data.conversations import Conversation, DataConfig, Message, Tally, Unusable
from train.data.rendering import REFUSED, Span, Template

DISAGREE = "template and mask disagree"
TURNS, CHARACTERS = 4, 400  # the most turns that are kept before a prompt's last, and of each
PATIENCE = 200  # if this many disagree before any is usable, the template is at fault
UNWRITTEN = "which this template does not write"


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
    notes: tuple[str, ...] = ()  # which parts of the conversation it lacks, to be counted


@dataclass(eq=False)
class Prompt:
    """Token ids that end with the generation prompt, for the target to answer."""

    id: str
    ids: NDArray[np.int32]
    words: str = ""  # what the user said last
    earlier: tuple[tuple[str, str], ...] = ()  # roles and texts of the turns before, shortened
    notes: tuple[str, ...] = ()


class Chat:
    """Renders conversations with a tokenizer's chat template, at a time (None: the present). Raises
    UserError if there is no template, if it is broken, or if the tokenizer cannot report the
    positions of its tokens in a text; Unusable for a conversation that the template refuses or does
    not write whole, or whose text contains one of the template's control tokens: that would forge a
    turn."""

    def __init__(self, tokenizer: Any, clock: datetime | None = None) -> None:
        try:
            source: str = tokenizer.get_chat_template()
            with_tools: str = tokenizer.get_chat_template(tools=[{}])
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
        self.template = Template(source, tokenizer, clock)
        self.with_tools = self.template
        if with_tools != source:  # some tokenizers have a template of its own for tools
            self.with_tools = Template(with_tools, tokenizer, clock)
        # some tokenizers also have words, signs and spaces among the added tokens
        added = [
            t
            for t in tokenizer.added_tokens_decoder.values()
            if t.special or not (len(t.content) == 1 or t.content.isalnum() or t.content.isspace())
        ]
        self.added = sorted((t.content for t in added), key=len, reverse=True)
        both = source + with_tools
        special = {t.content for t in added if t.special and t.content in both}
        turns = self._turns()
        self.control = special | {*tokenizer.all_special_tokens}
        self.control |= {token for token in self.added if token in turns}
        # such as <think>: people may write it, and a server reads it as if the template had
        self.marks = {t for t in self.added if t in both} - self.control

    def document(self, conversation: Conversation, cfg: DataConfig) -> Document:
        """A conversation up to its last answer, with the ids of the chat template. The assistant's
        spans come from the template's `{% generation %}` blocks or, if it has none, from comparing
        what it renders before each answer with what it renders up to the end of that answer. An
        answer that the template writes otherwise once the chat goes on is not trained on. A
        conversation is Unusable if all its spans are uncertain, or if a token crosses the edge of
        one."""
        messages = conversation.messages
        while messages and messages[-1].role != "assistant":
            messages = messages[:-1]
        if not messages:
            raise Unusable("no assistant turn")
        _require_no_control(_texts(messages, conversation.tools), self.control)
        text, blocks = self._render(messages, conversation.tools)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        require_short(encoding["input_ids"], cfg)
        notes = self._unwritten(messages, conversation.tools, text, answers=True)
        answers = Answers(self, replace(conversation, messages=messages), text, blocks)
        if answers.text != text:
            encoding = self.tokenizer(
                answers.text, add_special_tokens=False, return_offsets_mapping=True
            )
            require_short(encoding["input_ids"], cfg)
        mask = _mask(encoding["offset_mapping"], answers.spans)
        document = document_of(conversation.id, encoding["input_ids"], mask, cfg)
        document.notes = (*notes, *answers.notes)
        return document

    def prompt(self, conversation: Conversation, most: int | None = None) -> Prompt:
        """The longest beginning of a conversation that ends with a user turn, or with the result of
        a tool, and has at most `most` tokens (None: any number), including the generation prompt.
        Unusable if there is none."""
        messages, tools = conversation.messages, conversation.tools
        _require_no_control(_texts(messages, tools), self.control)
        best, last = None, 0
        for i, message in enumerate(messages, 1):
            if message.role == "user" or (message.role == "tool" and messages[i:][:1] != ()):
                text, _ = self._render(messages[:i], tools, prompt=True)
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                if most is not None and len(ids) > most:
                    break
                said, turns = message.content, _earlier(messages[: i - 1])
                if message.role == "tool" and best is not None:
                    said, turns = best.words, best.earlier
                best, last = Prompt(conversation.id, np.array(ids, np.int32), said, turns), i
        if best is None:
            raise Unusable(too_long_prompt(most))
        if tools or any(m.beside or m.role == "tool" for m in messages[:last]) or self.marks:
            text, _ = self._render(messages[:last], tools, prompt=True)
            best.notes = tuple(self._unwritten(messages[:last], tools, text, answers=False))
        return best

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and the places of its `{% generation %}` blocks."""
        return (self.with_tools if tools else self.template).render(messages, tools, prompt)

    def _turns(self) -> str:
        """What the template writes around turns: renderings of short chats."""
        chat = [Message("user", "0"), Message("assistant", "0"), Message("user", "0")]
        written = ""
        for messages in (chat, [Message("system", "0"), *chat]):
            try:
                written += self._render(messages)[0]
            except Unusable:  # some templates refuse a system turn
                continue
        return written

    def _unwritten(
        self, messages: Sequence[Message], tools: Sequence[Any], text: str, answers: bool
    ) -> list[str]:
        """Notes on what the chat has besides texts but the template does not write, where the chat
        means the same without it. Raises Unusable where it does not: if tools, a call or the result
        of one is missing, or the reasoning in `answers` that are trained on."""
        notes = []
        if calls := [call for m in messages for call in m.beside.get("tool_calls", ())]:
            silent = [_less(m, "tool_calls") for m in messages]
            bare = self._without(silent, tools)
            for call in calls:
                if not all(_written(x, text, bare) for x in _leaves(call["function"])):
                    raise Unusable(f"tool calls, {UNWRITTEN}")
        if tools:
            bare = self._without(messages, ())
            if any(bare.count(x) >= text.count(x) for x in _names(tools)):
                raise Unusable(f"tools, {UNWRITTEN}")
        if any(m.role == "tool" and m.content not in text for m in messages):
            raise Unusable(f"results of tools, {UNWRITTEN}")
        thoughts = [m for m in messages if "reasoning_content" in m.beside]
        if thoughts:
            bare = self._without([_less(m, "reasoning_content") for m in messages], tools)
            lost = [m for m in thoughts if not _written(m.beside["reasoning_content"], text, bare)]
            if lost and not answers:
                notes.append("reasoning of earlier answers, which this template leaves out")
            # whether an answer is written with its reasoning is checked where it is the last one
        if any("name" in m.beside and m.beside["name"] not in text for m in messages):
            notes.append(f"names, {UNWRITTEN}")
        if any(m.role == "system" and m.content not in text for m in messages):
            notes.append(f"a system prompt, {UNWRITTEN}")
        others = [m.content for m in messages if m.role != "assistant"]
        if any(mark in content for content in others for mark in self.marks):
            notes.append("words of the template in its text, read as a server reads them")
        return notes

    def _without(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        try:
            return self._render(messages, tools)[0]
        except Unusable:
            return ""

    def ending(self, text: str) -> str:
        """The control token with which a text begins, and the white space before it; nothing if it
        begins with something else."""
        rest = text.lstrip()
        token = next((token for token in self.added if rest.startswith(token)), "")
        return text[: len(text) - len(rest)] + token if token else ""


class Answers:
    """Where the answers of a conversation are: `spans` of the `text` that the template writes, each
    with the token that ends it. If the template ends an answer by the token that begins the next
    turn, `text` goes on up to that token. `notes` say what is not trained on. Raises Unusable if no
    answer is certain, or if the template writes one without its reasoning."""

    def __init__(
        self, chat: Chat, conversation: Conversation, text: str, blocks: Sequence[Span]
    ) -> None:
        self.chat, self.tools = chat, conversation.tools
        self.messages, self.text = conversation.messages, text
        self.spans: list[Span] = []
        self.notes: dict[str, None] = {}
        answers = [i for i, m in enumerate(self.messages) if m.role == "assistant"]
        has_blocks = (chat.with_tools if self.tools else chat.template).has_blocks
        if has_blocks and len(blocks) != len(answers):
            raise Unusable(DISAGREE)
        if not any(self.messages[i].trained for i in answers):
            raise Unusable("weight 0 for all answers")
        for n, i in enumerate(answers):
            if not self.messages[i].trained:
                self.notes["answers of weight 0 not trained on"] = None
                continue
            span = self._in_block(i, blocks[n]) if has_blocks else self._compared(i)
            if span is not None:
                self.spans.append(span)
        if not self.spans and any(_reasons(self.messages[i]) for i in answers):
            raise Unusable("reasoning, which this template writes in another way")
        if not self.spans or any(a[1] > b[0] for a, b in pairwise(self.spans)):
            raise Unusable(DISAGREE)

    def _in_block(self, i: int, block: Span) -> Span:
        """The span of a `{% generation %}` block. It begins no earlier than the generation prompt
        ends, and goes on up to the token that ends the answer."""
        start, end = block
        said = self.text[start:end].rstrip()
        self._require_whole(i, said)
        try:
            before, _ = self.chat._render(self.messages[:i], self.tools, prompt=True)
        except Unusable:
            before = ""
        if start < len(before) < start + len(said) and self.text.startswith(before):
            start, said = len(before), self.text[len(before) : end].rstrip()
        self._require_whole(i, said)
        return start, self._ended(i, start + len(said), self._closed(i, said))

    def _compared(self, i: int) -> Span | None:
        """The span of an answer by what the template writes up to its beginning and to its end;
        None if that is not what it writes in the whole text."""
        message = self.messages[i]
        try:
            before, _ = self.chat._render(self.messages[:i], self.tools, prompt=True)
            after, _ = self.chat._render(self.messages[: i + 1], self.tools)
        except Unusable:  # the template accepts the chat, but not its beginning
            self._uncertain()
            return None
        if not self.text.startswith(before) or not after.startswith(before):
            self._uncertain()
            return None
        start, said = len(before), after[len(before) :].rstrip()
        if message.content not in said:
            self._uncertain()
            return None
        self._require_whole(i, said)
        if self.text.startswith(said, start):
            return start, self._ended(i, start + len(said), self._closed(i, said))
        lead, content, tail = said.rpartition(message.content)
        # Some templates write something before the last answer alone, such as an empty thought, or
        # after it alone, such as the end of the text.
        own = message.beside.get("reasoning_content") or message.beside.get("tool_calls")
        for begin in (lead,) if own else (lead, ""):
            for end in (tail, ""):
                if content and self.text.startswith(begin + content + end, start):
                    stop = start + len(begin + content + end)
                    return start, self._ended(i, stop, bool(end.strip()))
        self._uncertain()
        return None

    def _require_whole(self, i: int, said: str) -> None:
        """Raise Unusable if an answer lacks its text or its reasoning."""
        message = self.messages[i]
        if message.content not in said:
            raise Unusable(DISAGREE)
        without = said.replace(message.content, "", 1)
        if message.beside.get("reasoning_content", "") not in without:
            raise Unusable(f"reasoning, {UNWRITTEN}")

    def _closed(self, i: int, said: str) -> bool:
        """Whether the template writes an end after an answer."""
        if any(said.endswith(token) for token in self.chat.control):
            return True
        content = self.messages[i].content
        after = said.rpartition(content)[2] if content else ""
        return bool(after.strip()) and "tool_calls" not in self.messages[i].beside

    def _ended(self, i: int, end: int, closed: bool) -> int:
        """The end of an answer, with the token that ends it."""
        if closed:
            return end
        rest = self.text[end:]
        if not rest.strip():  # the text ends with this answer: see how the chat would go on
            rest = self._continued(i, end) or rest
        ending = self.chat.ending(rest)
        if not ending:
            self.notes["answers that this template ends without a token"] = None
        elif not self.text[end:].strip():
            self.text = self.text[:end] + ending
        return end + len(ending)

    def _continued(self, i: int, end: int) -> str:
        """What the template writes after the text's last answer if the chat goes on."""
        results = ["tool"] if "tool_calls" in self.messages[i].beside else []
        for role in (*results, "user"):
            try:
                longer, _ = self.chat._render(
                    [*self.messages[: i + 1], Message(role, "0")], self.tools
                )
            except Unusable:
                continue
            if longer.startswith(self.text[:end]):
                return longer[end:]
        return ""

    def _uncertain(self) -> None:
        self.notes[
            "answers not trained on, since the template changes them as the chat goes on"
        ] = None


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
        require_short(ids, cfg)
        return document_of(conversation.id, ids, np.arange(len(ids)) > 0, cfg)

    def prompt(self, conversation: Conversation, most: int | None = None) -> Prompt:
        """The beginning of a text, Unusable if it is over `most` tokens long (None: any length)."""
        begins = conversation.messages[:1]
        if begins[0].role != "user" or len(conversation.messages) > 2:
            raise Unusable("several turns, and the target has no chat template")
        ids = self._ids(begins)
        if most is not None and len(ids) > most:
            raise Unusable(too_long_prompt(most))
        return Prompt(conversation.id, np.array(ids, np.int32), begins[0].content)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(m.content for m in messages)
        _require_no_control([text], self.tokenizer.all_special_tokens)
        ids: list[int] = self.lead + self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _texts(messages: Sequence[Message], tools: Sequence[Any]) -> list[str]:
    """All texts that a template may write of a chat."""
    beside = [leaf for m in messages if m.beside for leaf in _leaves(m.beside)]
    return [m.content for m in messages] + beside + [*_leaves(tools)]


def _earlier(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """The roles and texts of the last turns, with the middle of long ones left out."""
    half, turns = CHARACTERS // 2, []
    for message in messages[-TURNS:]:
        text = message.content
        short = text if len(text) <= CHARACTERS else f"{text[:half]} […] {text[-half:]}"
        turns.append((message.role, short))
    return tuple(turns)


def _leaves(value: Any) -> Iterator[str]:
    """The texts and numbers within a JSON value, as texts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _names(tools: Sequence[Any]) -> list[str]:
    functions = (tool.get("function") for tool in tools if isinstance(tool, dict))
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def _written(part: str, text: str, without: str) -> bool:
    """Whether a text has a part, which may be escaped as in JSON, more often than `without` has."""
    forms = {part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]}
    return any(text.count(form) > without.count(form) for form in forms if form) or not part


def _reasons(message: Message) -> bool:
    """Whether an answer has reasoning, beside its text or within it."""
    return "reasoning_content" in message.beside or "</think>" in message.content


def _less(message: Message, key: str) -> Message:
    return replace(message, beside={k: x for k, x in message.beside.items() if k != key})


def _require_no_control(texts: Sequence[str], control: Iterable[str]) -> None:
    if any(token in text for text in texts for token in control):
        raise Unusable("a control token in its text")


def too_long_prompt(most: int | None) -> str:
    """The reason why there is no prompt."""
    return f"no prompt of at most max_prompt={most} tokens"


def require_short(ids: Sequence[int], cfg: DataConfig) -> None:
    """Raise Unusable if there are too many tokens, and they are not to be cut."""
    if len(ids) > cfg.max_length and cfg.too_long == "drop":
        raise Unusable(f"longer than max_length={cfg.max_length}")


def document_of(
    name: str, ids: Sequence[int], mask: NDArray[np.bool_], cfg: DataConfig
) -> Document:
    """A document, cut at the length that is allowed. Raises Unusable if too little of it is the
    assistant's."""
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
    prompts = []
    for conversation in conversations:
        try:
            prompts.append(chat.prompt(conversation))
        except Unusable as reason:
            raise UserError(f"{conversation.id}: {reason}") from reason
        if room is not None and len(prompts[-1].ids) > room:
            raise UserError(
                f"{conversation.id}: the prompt has {len(prompts[-1].ids):,} tokens, and the "
                f"target has room for only {max(0, room):,} besides the answer: shorten it, "
                "or ask for shorter answers"
            )
    return prompts


def require_spans(tally: Tally, patience: int) -> None:
    """Raise UserError if `patience` conversations have no certain mask, or are refused by the
    template. It is called while none is usable: then the template is at fault, not the
    conversations."""
    refused = [reason for reason in tally.dropped if reason.startswith(REFUSED)]
    if sum(tally.dropped[reason] for reason in refused) >= patience:
        raise UserError(f"no usable conversation: {tally.reasons()}")
    if (count := tally.dropped[DISAGREE]) >= patience:
        raise UserError(
            f"chat template without assistant spans: in {count} conversations the assistant's "
            "tokens cannot be identified, and no other is usable: mark them in the target's chat "
            "template with {% generation %} … {% endgeneration %}"
        )
