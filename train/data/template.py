"""A conversation → its token ids by the target's chat template, and a mask over the assistant's
tokens; or the prompt that the target is to answer. Plain texts need no template.

Whatever is uncertain is left out: a mask is never a guess.
"""

import json
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.errors import UserError
from train.data.conversations import Conversation, DataConfig, Message, Tally, Unusable
from train.data.rendering import REFUSED, Span
from train.data.spans import CLOSES, DISAGREE, OPENED, OTHERWISE, UNWRITTEN, Answers
from train.data.writer import Writer, special_tokens

TURNS, CHARACTERS = 4, 400  # the most turns that are kept before a prompt's last, and of each
TAILS = 1000  # ends of prompts that are kept with their tokens
PATIENCE = 200  # if this many disagree before any is usable, the template is at fault
UNREAD = "which this template does not read"
SHORT = "answers with a document of their own, shorter than min_answer={}: not trained on"
LOST = "answers not trained on, since the template writes them, or what comes before, otherwise"
WEIGHTED = "answers that count by their weight in the loss"
SEVERAL = "in several texts, since the template changes earlier answers as the chat goes on"


@dataclass(eq=False)
class Document:
    """Token ids; `mask` is true where the assistant speaks, including its end-of-turn tokens (in a
    plain text, at every token but the first).

    `rounds` [T, 1 + K], if given, holds the rounds of the decoder that wrote the answer: at each
    round's anchor, the number of accepted tokens and then the drafted tokens; elsewhere -1.

    `weight` [T], if given, is how much each token counts in a loss, relative to others."""

    id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: bool = False
    rounds: NDArray[np.int32] | None = None
    notes: tuple[str, ...] = ()  # which parts of the conversation it lacks, to be counted
    chat: str = ""  # the name of its conversation, if that is in several documents
    weight: NDArray[np.float32] | None = None  # None: 1 for all
    opening: str = ""  # the opening prompt of its conversation; empty: unknown
    placed: str = ""  # the text by which the split placed it: with more, if many open alike


@dataclass(eq=False)
class Prompt:
    """Token ids that end with the generation prompt, for the target to answer."""

    id: str
    ids: NDArray[np.int32]
    words: str = ""  # what the user said last
    earlier: tuple[tuple[str, str], ...] = ()  # roles and texts of the turns before, shortened
    thinking: bool | None = None  # whether it asks for reasoning; None: as the template has it
    notes: tuple[str, ...] = ()
    weight: float = 1.0  # of its answer in a loss, relative to others
    shortened: bool = False  # whether a longer beginning of the chat exceeds data.max_prompt
    opening: str = ""  # the opening prompt of its conversation; empty: unknown
    placed: str = ""  # the text by which the split placed it: with more, if many open alike

    @property
    def kind(self) -> str:
        """What it asks for, in words, for the report."""
        if self.thinking is None:
            return "as the template has it"
        return "with reasoning" if self.thinking else "without reasoning"


class Chat:
    """Turns conversations into token ids by a tokenizer's chat template, at a time (None: the
    present), with or without reasoning as `thinking` says (see `DataConfig`). Raises UserError as
    `Writer` does; Unusable for a conversation that the template refuses or does not write whole, or
    whose text contains one of the template's control tokens: that would forge a turn."""

    def __init__(
        self, tokenizer: Any, clock: datetime | None = None, thinking: str = "template"
    ) -> None:
        self.tokenizer, self.writer = tokenizer, Writer(tokenizer, clock)
        self.thinking = thinking
        self.tails: dict[str, list[int]] = {}  # ends of prompts, and their tokens

    def documents(self, conversation: Conversation, cfg: DataConfig) -> list[Document]:
        """The answers of a conversation, each after what a server would read that is to give it,
        in as few documents as there can be: one, if the template writes a chat's earlier answers as
        it wrote them when they were last. The assistant's spans come from the template's
        `{% generation %}` blocks or, if it has none, from comparing what it renders before each
        answer with what it renders up to the end of that answer. Unusable if all spans are
        uncertain, or if a token crosses the edge of one."""
        messages, tools = conversation.messages, conversation.tools
        while messages and messages[-1].role != "assistant":
            messages = messages[:-1]
        if not messages:
            raise Unusable("no assistant turn")
        writer = self.writer.with_arguments(conversation.arguments)
        _require_no_control(_texts(messages, tools, conversation.arguments), writer.control)
        wanted = {i for i, m in enumerate(messages) if m.role == "assistant" and m.trained}
        if not wanted:
            raise Unusable("weight 0 for all answers")
        reasons, documents, tokens = list[str](), list[Document](), 0
        notes = dict.fromkeys(_unread(writer, tools))
        if any(m.role == "assistant" and not m.trained for m in messages):
            notes["answers of weight 0 not trained on"] = None
        if any(messages[i].weight != 1 for i in wanted):
            notes[WEIGHTED] = None

        def thinking(i: int) -> bool | None:
            return self._asked(conversation, messages[i])

        for last in sorted({*wanted, len(messages) - 1}, reverse=True):
            if last not in wanted and last < len(messages) - 1:
                continue
            answers = Answers(writer, messages[: last + 1], tools, wanted, thinking)
            if last == len(messages) - 1:
                whole = self._unwritten(writer, messages, tools, answers.text, answers=True)
                notes |= dict.fromkeys(whole)
            if last in wanted - {*answers.spans}:
                reasons.append(answers.why)
            wanted -= {*answers.spans, last}
            if not answers.spans:
                continue
            try:
                rows = self._encoded(conversation, answers, cfg)
            except Unusable as reason:
                reasons.append(str(reason))
                tokens = max(tokens, reason.tokens)
                continue
            for turn, document in rows.items():
                if turn < len(messages) - 1:
                    document.id = f"{conversation.id}, up to turn {turn + 1}"
            notes |= answers.notes
            documents = [*rows.values(), *documents]
        if not documents:
            told = next(filter(None, reasons), "")
            if not told and any(_reasons(m) for m in messages if m.role == "assistant"):
                told = OTHERWISE
            raise Unusable(told or DISAGREE, tokens)
        if reasons:
            notes[LOST] = None
        if documents[1:]:
            notes[SEVERAL] = None
            for document in documents:
                document.chat = conversation.id
        documents[-1].notes = tuple(notes)
        return documents

    def _encoded(
        self, conversation: Conversation, answers: Answers, cfg: DataConfig
    ) -> dict[int, Document]:
        """The answers of one text, by the turn with which a document ends: all in one document,
        but for answers whose prompt has other tokens by itself, as a server reads it, than before
        an answer (by the rules of GPT-2's tokenizer, where it ends with a blank line). Each of
        those has its own."""
        encoding = self.tokenizer(
            answers.text, add_special_tokens=False, return_offsets_mapping=True
        )
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        require_short(ids, cfg)
        mask, together, rows = np.zeros(len(ids), np.bool_), -1, dict[int, Document]()
        weight, short = np.ones(len(ids), np.float32), None
        for turn, span in answers.spans.items():
            try:
                first, last = _places(offsets, span)
            except Unusable as reason:
                closes = answers.text[span[0] :].lstrip().startswith(CLOSES)
                raise Unusable(OPENED if closes else str(reason)) from reason
            prompt = self._alone(answers.text[: span[0]], ids[:first], offsets)
            counts = conversation.messages[turn].weight
            if prompt == ids[:first]:
                mask[first:last], weight[first:last], together = True, counts, turn
                continue
            said = np.arange(len(prompt) + last - first) >= len(prompt)
            text, weights = prompt + ids[first:last], evenly(len(prompt) + last - first, counts)
            try:
                rows[turn] = document_of(conversation.id, text, said, cfg, weights)
            except Unusable as reason:
                short = reason
                answers.notes[SHORT.format(cfg.min_answer)] = None
        if together < 0 and not rows:
            raise short or Unusable(DISAGREE)
        if together >= 0:
            end = len(ids) if not rows else len(mask) - int(mask[::-1].argmax())
            try:
                rows[together] = document_of(
                    conversation.id, ids[:end], mask[:end], cfg, weight[:end]
                )
            except Unusable as reason:
                if not rows:
                    raise short or reason from reason
                answers.notes[SHORT.format(cfg.min_answer)] = None
        return dict(sorted(rows.items()))

    def _alone(self, prompt: str, ids: list[int], offsets: Sequence[Span]) -> list[int]:
        """The tokens of a prompt by itself; `ids` are those that it has before an answer. Up to its
        last special token they are the same."""
        added = self.writer.added_ids
        kept = next((n for n in range(len(ids), 0, -1) if ids[n - 1] in added), 1) - 1
        tail = prompt[offsets[kept][0] :] if ids else prompt
        if tail not in self.tails:  # mostly the generation prompt
            alone = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
            if len(self.tails) < TAILS:
                self.tails[tail] = alone
            return [*ids[:kept], *alone]
        return [*ids[:kept], *self.tails[tail]]

    def _asked(self, conversation: Conversation, answer: Message | None) -> bool | None:
        """Whether an answer is asked for with reasoning; None leaves it to the template."""
        if self.thinking in ("on", "off"):
            return self.thinking == "on"
        if self.thinking == "mixed":
            return zlib.crc32(conversation.opening.encode()) % 2 == 0
        if self.thinking == "data" and conversation.thinking is None and answer is not None:
            return _reasons(answer)
        return conversation.thinking

    def prompt(self, conversation: Conversation, most: int | None = None) -> Prompt:
        """The longest beginning of a conversation that a server would be asked to answer, and that
        has at most `most` tokens (None: any number), including the generation prompt: it ends with
        a user turn, or with the results of all tools that were called together, and includes any
        system turns that follow directly. Unusable if there is none."""
        messages, tools = conversation.messages, conversation.tools
        writer = self.writer.with_arguments(conversation.arguments)
        _require_no_control(_texts(messages, tools, conversation.arguments), writer.control)
        best, last, text, question, asks, longer = None, 0, "", 0, False, False
        for i, message in enumerate(messages, 1):
            answer = next(iter(messages[i:]), None)
            if message.role == "user":
                question = i - 1
            if message.role != "system":
                asks = message.role != "assistant"
            if not (asks if answer is None else answer.role == "assistant"):
                continue
            thinking = self._asked(conversation, answer)
            written, _ = writer.render(messages[:i], tools, True, thinking)
            ids = np.array(self.tokenizer(written, add_special_tokens=False)["input_ids"], np.int32)
            if most is not None and len(ids) > most:
                longer = True
                break
            said, turns = messages[question].content, _earlier(messages[:question])
            best = Prompt(conversation.id, ids, said, turns, thinking)
            if answer is not None and answer.trained:
                best.weight = answer.weight
            last, text = i, written
        if best is None:
            raise Unusable(too_long_prompt(most))
        notes = _unread(writer, tools)
        if tools or any(m.beside or m.role == "tool" for m in messages[:last]) or writer.marks:
            notes += self._unwritten(writer, messages[:last], tools, text, answers=False)
        best.notes, best.shortened = tuple(notes), longer
        return best

    def _unwritten(
        self,
        writer: Writer,
        messages: Sequence[Message],
        tools: Sequence[Any],
        text: str,
        answers: bool,
    ) -> list[str]:
        """Notes on what the chat has besides texts but the template does not write, where the chat
        means the same without it. Raises Unusable where it does not: if tools, a call or the result
        of one is missing, or the reasoning in `answers` that are trained on."""
        notes = []
        if calls := [call for m in messages for call in m.beside.get("tool_calls", ())]:
            silent = [_less(m, "tool_calls") for m in messages]
            bare = writer.without(silent, tools)
            for call in calls:
                if not all(_written(x, text, bare) for x in _leaves(call["function"])):
                    raise Unusable(f"tool calls, {UNWRITTEN}")
        if tools:
            bare = writer.without(messages, ())
            if any(bare.count(x) >= text.count(x) for x in _names(tools)):
                raise Unusable(f"tools, {UNWRITTEN}")
        if not all(_written(m.content.strip(), text, "") for m in messages if m.role == "tool"):
            raise Unusable(f"results of tools, {UNWRITTEN}")
        thoughts = [m for m in messages if "reasoning_content" in m.beside]
        if thoughts:
            bare = writer.without([_less(m, "reasoning_content") for m in messages], tools)
            lost = [m for m in thoughts if not _written(m.beside["reasoning_content"], text, bare)]
            if lost and not answers:
                notes.append("reasoning of earlier answers, which this template leaves out")
            # whether an answer is written with its reasoning is checked where it is the last one
        if any("name" in m.beside and m.beside["name"] not in text for m in messages):
            notes.append(f"names, {UNWRITTEN}")
        if any(m.role == "system" and m.content not in text for m in messages):
            notes.append(f"a system prompt, {UNWRITTEN}")
        others = [m.content for m in messages if m.role != "assistant"]
        if any(mark in content for content in others for mark in writer.marks):
            notes.append("words of the template in its text, read as a server reads them")
        return notes


class Plain:
    """Reads plain texts, without a template. If the tokenizer begins every text with a special
    token, as Llama's does, so do these texts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self.lead: list[int] = [bos] if tokenizer("").input_ids[:1] == [bos] else []

    def documents(self, conversation: Conversation, cfg: DataConfig) -> list[Document]:
        """A whole text, with loss on every token but the first."""
        ids = self._ids(conversation.messages)
        require_short(ids, cfg)
        return [document_of(conversation.id, ids, np.arange(len(ids)) > 0, cfg)]

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
        _require_no_control([text], special_tokens(self.tokenizer))
        ids: list[int] = self.lead + self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _texts(
    messages: Sequence[Message], tools: Sequence[Any], arguments: Mapping[str, Any]
) -> list[str]:
    """All texts that a template may write of a chat."""
    beside = [leaf for m in messages if m.beside for leaf in _leaves(m.beside)]
    return [m.content for m in messages] + beside + [*_leaves(tools)] + [*_leaves(arguments)]


def _unread(writer: Writer, tools: Sequence[Any]) -> list[str]:
    """A note for each argument that the template does not read, as a server would not."""
    return [f"the template argument {name!r}, {UNREAD}" for name in writer.unread(tools)]


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
    return "reasoning_content" in message.beside or CLOSES in message.content


def _less(message: Message, key: str) -> Message:
    beside = {k: x for k, x in message.beside.items() if k != key}
    as_written = None if key == "reasoning_content" else message.as_written
    return replace(message, beside=beside, as_written=as_written)


def _require_no_control(texts: Sequence[str], control: Iterable[str]) -> None:
    if any(token in text for text in texts for token in control):
        raise Unusable("a control token in its text")


def too_long_prompt(most: int | None) -> str:
    """The reason why there is no prompt."""
    return f"no prompt of at most max_prompt={most} tokens"


def require_short(ids: Sequence[int], cfg: DataConfig) -> None:
    """Raise Unusable if there are too many tokens, and they are not to be cut."""
    if len(ids) > cfg.max_length and cfg.too_long == "drop":
        raise Unusable(f"longer than max_length={cfg.max_length}", tokens=len(ids))


def document_of(
    name: str,
    ids: Sequence[int],
    mask: NDArray[np.bool_],
    cfg: DataConfig,
    weight: NDArray[np.float32] | None = None,
) -> Document:
    """A document, cut at the length that is allowed. Raises Unusable if too little of it is the
    assistant's."""
    cut = cfg.max_length
    if mask[:cut].sum() < cfg.min_answer:
        raise Unusable(f"answers shorter than min_answer={cfg.min_answer}")
    document = Document(name, np.array(ids[:cut], np.int32), mask[:cut], len(ids) > cut)
    if weight is not None and (weight[:cut] != 1).any():
        document.weight = weight[:cut]
    return document


def evenly(length: int, weight: float) -> NDArray[np.float32] | None:
    """The weight of a document whose tokens all count alike, as `Document` has it."""
    return None if weight == 1 else np.full(length, weight, np.float32)


def _places(offsets: Sequence[Span], span: Span) -> tuple[int, int]:
    """The first token of a span, and the first one after it. Raises Unusable if a token crosses an
    edge, or might: some tokenizers leave a token's leading space out of its offsets."""
    first, last = (bisect_left(offsets, edge, key=lambda x: x[0]) for edge in span)
    for i, edge in ((first, span[0]), (last, span[1])):
        if i > 0 and offsets[i - 1][1] != edge:
            raise Unusable(DISAGREE)
    return first, last


def require_spans(tally: Tally, patience: int) -> None:
    """Raise UserError if `patience` conversations have no certain mask, or are refused by the
    template. It is called while none is usable: then the template is at fault, not the
    conversations."""
    refused = [reason for reason in tally.dropped if reason.startswith(REFUSED)]
    if sum(tally.dropped[reason] for reason in refused) >= patience:
        raise UserError(f"no usable conversation: {tally.reasons()}")
    if (count := tally.dropped[OPENED]) >= patience:
        raise UserError(
            f"{count} conversations have answers without reasoning, but the target's prompt opens "
            "a thought, and no other is usable: give data.thinking=data to ask for none where an "
            "answer has none, if the template can, or data.answers=target for the target's own"
        )
    if (count := tally.dropped[DISAGREE]) >= patience:
        raise UserError(
            f"chat template without assistant spans: in {count} conversations the assistant's "
            "tokens cannot be identified, and no other is usable: mark them in the target's chat "
            "template with {% generation %} … {% endgeneration %}"
        )
