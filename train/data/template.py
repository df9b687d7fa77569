"""Turns a conversation into token ids with the target's chat template: documents with a mask over
the assistant's tokens, or the prompt that the target is to answer.

rendering.py renders the template, `ResponseSpans` finds the responses in the rendered text, and
`Chat` turns both into ids. Uncertain responses are skipped: a mask is never a guess.
"""

import json
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from train.data.conversations import (
    THINKING_ARGUMENTS,
    Conversation,
    DataConfig,
    Message,
    Unusable,
)
from train.data.rendering import PROBE, ChatTemplate, Span, common_length, first_end
from train.data.sequences import (
    Document,
    Prompt,
    document_of,
    reason_prompt_too_long,
    require_short,
    uniform_token_weights,
)

DISAGREE = "template and mask disagree"
UNWRITTEN = "which this template does not write"
OTHERWISE = "reasoning, which this template writes in another way"
OPENED = "a response without reasoning, where the prompt opens a thought"
AFTERWARDS = "words of the template after the end of a response, not trained on"
OPENS, CLOSES = "<think>", "</think>"
TURNS, CHARACTERS = 4, 400  # the most turns that are kept before a prompt's last, and of each
TAILS = 1000  # ends of prompts that are kept with their tokens
UNREAD = "which this template does not read"
SHORT = "responses with a document of their own, shorter than min_response={}: not trained on"
LOST = "responses not trained on, since the template writes them, or what comes before, otherwise"
WEIGHTED = "responses that count by their weight in the loss"
SEVERAL = "in several texts, since the template changes earlier responses as the chat goes on"


class ResponseSpans:
    """Finds the `wanted` responses of a chat that ends with one in the `text` that the template
    writes.

    `spans` [turn → start, end] has the covered responses, each with the token that ends it. A
    response is covered if the text before it is exactly the prompt that a server would render. Any
    other response needs its own text that ends with it; `why` is the reason if the last response is
    not covered. `thinking` is whether the prompt of a response requests reasoning.

    The text differs from what the template writes of this chat in three cases:
    - The token that begins the next turn ends a response: the text goes on up to that token.
    - The template leaves out the reasoning of the last response: the text has it as the target
      writes it.
    - The template writes the turns before the last response otherwise than in the prompt for it
      (gpt-oss leaves out the reasoning of calls, Gemma 4 the empty thought of a prompt that asks
      for none): the text is that prompt, followed by the response.

    Raises Unusable if the template and the mask disagree for the whole chat.
    """

    def __init__(
        self,
        writer: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Any],
        wanted: Collection[int],
        thinking: Callable[[int], bool | None],
    ) -> None:
        self.writer, self.messages, self.tools, self.thinking = writer, messages, tools, thinking
        self.last = len(messages) - 1
        self.written, blocks = writer.render(messages, tools, thinking=thinking(self.last))
        self.text, self.why = self.written, ""
        self.spans: dict[int, Span] = {}
        self.notes: dict[str, None] = {}
        responses = [i for i, m in enumerate(messages) if m.role == "assistant"]
        has_blocks = writer.has_blocks(tools)
        if has_blocks and len(blocks) != len(responses):
            raise Unusable(DISAGREE)
        block_of = dict(zip(responses, blocks, strict=True)) if has_blocks else {}
        for i in responses[::-1]:  # the last one first, since it decides upon the text
            if i not in wanted:
                continue
            try:
                span = self._in_block(i, block_of[i]) if block_of else self._compared(i)
            except Unusable as reason:
                if i == self.last:
                    self.why = str(reason)
                continue
            if span is not None:
                self.spans[i] = span
            if not self.text.startswith(self.written.rstrip()):
                block_of = {}  # they say where responses are in what the template writes
        self.spans = dict(sorted(self.spans.items()))
        if any(a[1] > b[0] for a, b in pairwise(self.spans.values())):
            raise Unusable(DISAGREE)

    def _before(self, i: int) -> str | None:
        """The prompt that a server renders for a response; None if the template rejects it."""
        try:
            thinking = self.thinking(i)
            return self.writer.render(self.messages[:i], self.tools, True, thinking)[0]
        except Unusable:
            return None

    def _in_block(self, i: int, block: Span) -> Span | None:
        """The span of a `{% generation %}` block, extended to the token that ends the response. It
        does not begin before the generation prompt ends."""
        start, end = block
        before = self._before(i)
        if before is not None and not self.text.startswith(before):
            return self._after_its_prompt(i, before) if i == self.last else None
        said = self._up_to_its_end(i, self.text[start:end].rstrip())
        self._require_whole(i, said)
        before = before or ""
        if start < len(before) < start + len(said) and self.text.startswith(before):
            end = start + len(said)
            start, said = len(before), self.text[len(before) : end].rstrip()
        self._require_whole(i, said)
        return start, self._ended(i, start + len(said), self._closed(i, said))

    def _compared(self, i: int) -> Span | None:
        """The span of a response, found by rendering the chat up to its beginning and up to its
        end; None if these renderings are no prefixes of the whole text."""
        message = self.messages[i]
        if (before := self._before(i)) is None:
            return None
        try:
            thinking = self.thinking(i)
            after, _ = self.writer.render(self.messages[: i + 1], self.tools, thinking=thinking)
        except Unusable:  # the template accepts the chat, but not its beginning
            return None
        thought = message.beside.get("reasoning_content", "")
        if i == self.last and thought not in after[common_length(before, after) :]:
            return self._as_the_target_writes(i, before)
        if i == self.last and not after.startswith(before):
            return self._after_its_prompt(i, before)
        if not self.text.startswith(before) or not after.startswith(before):
            return None
        start, said = len(before), self._up_to_its_end(i, after[len(before) :].rstrip())
        if message.content not in said:
            return None
        self._require_whole(i, said)
        if self.text.startswith(said, start):
            return start, self._ended(i, start + len(said), self._closed(i, said))
        # some templates write something after the last response alone, such as the end of the text
        if not message.content or "tool_calls" in message.beside:
            return None
        up_to = said[: said.rindex(message.content) + len(message.content)]
        if self.text.startswith(up_to, start):
            rest = self.text[start + len(up_to) :]
            mark = self.writer.ending(rest)
            closed = any(said.endswith(token) for token in self.writer.control)
            closes = bool(mark and self.writer.ending(rest[len(mark) :]))  # before a turn begins
            if closed and closes and not said.endswith(mark.strip()):
                return None  # harmony closes earlier responses by another token than the target
            return start, self._ended(i, start + len(up_to), False)
        return None

    def _after_its_prompt(self, i: int, before: str) -> Span | None:
        """The span of the last response in a text that consists of its prompt and the response.

        The response's rendering begins after the generation prompt, which the template also writes
        before the response. A prompt that closes an empty thought may have more than that: then the
        response follows the closed thought. Raises Unusable for any other difference.
        """
        message, thinking = self.messages[i], self.thinking(i)
        history = self.writer.without(self.messages[:i], self.tools, thinking)
        other = self.writer.without([*self.messages[:i], _probe(message)], self.tools, thinking)
        edge = common_length(self.written, other)  # from here on is what the response says
        earlier = [x for x in _forms(self.messages[i - 1].content.strip()) if x]
        header = before[common_length(before, history) :]
        prompts = bool(header.strip())
        if not prompts:  # as Mistral's template, which writes responses after [/INST]
            header = before[max([before.rfind(x) for x in earlier], default=0) :]

        def after(part: str) -> int | None:
            if self.written.startswith(history + part):
                return len(history + part)
            end = self.written.rfind(part, 0, edge) + len(part)
            said = any(x in self.written[:end] for x in earlier)
            rest = self.written[end:edge]
            between = any(x in rest for x in earlier) or (not prompts and rest.strip())
            return end if part.strip() and end >= len(part) and said and not between else None

        start = after(header) if header.strip() else None
        said = self._after_a_thought(i, header, after) if start is None else self.written[start:]
        body = self._up_to_its_end(i, said.rstrip())
        self._require_whole(i, body)
        self.text = before + said
        return len(before), self._ended(i, len(before + body), self._closed(i, body))

    def _after_a_thought(self, i: int, header: str, after: Callable[[str], int | None]) -> str:
        """The rendering of the last response, if the generation prompt has a thought of which the
        template writes the end, or nothing. `after` returns where a part of the generation prompt
        ends in the rendering. Raises Unusable if the thought is open, or if it is none."""
        message = self.messages[i]
        known = {OPENS, CLOSES, *self.writer.added}
        cuts = [n for n in range(len(header)) if any(header.startswith(t, n) for t in known)]
        places = ((after(header[:n]), header[n:].strip()) for n in reversed(cuts))
        start, thought = next(((at, x) for at, x in places if at is not None), (None, ""))
        if "reasoning_content" in message.beside or CLOSES in message.content:
            raise Unusable(OTHERWISE)
        if start is None:
            raise Unusable(DISAGREE)
        probe = replace(message, content="0", beside={"reasoning_content": PROBE}, as_written=None)
        thinks = self.writer.without([*self.messages[:i], probe], self.tools, True)
        opens = PROBE in thinks and thinks.partition(PROBE)[0].rstrip().endswith(thought)
        marks = {token for token in known if token in thought}
        closes = thought.endswith(CLOSES) or (
            len(marks) > 1 and any(thought.endswith(token) for token in marks)
        )
        if opens or not closes:
            raise Unusable(OPENED if opens or thought.startswith(OPENS) else DISAGREE)
        said = self.written[start:]
        ends = (n for n in range(len(thought), 0, -1) if said.startswith(thought[-n:]))
        return said[next(ends, 0) :]

    def _as_the_target_writes(self, i: int, before: str) -> Span | None:
        """The span of the last response, whose reasoning the template drops: it is inserted between
        the template's marks, as the target writes it after the generation prompt, which may open
        the thought."""
        message = self.messages[i]
        silent = {k: x for k, x in message.beside.items() if k != "reasoning_content"}
        bare = [*self.messages[:i], replace(message, beside=silent, as_written=None)]
        after, _ = self.writer.render(bare, self.tools, thinking=self.thinking(i))
        same = common_length(before, after)
        opening, rest = before[same:].strip(), after[same:].lstrip()
        known = CLOSES in self.writer.source or opening == OPENS
        if opening not in ("", OPENS) or not known or CLOSES in rest:
            raise Unusable(f"reasoning, {UNWRITTEN}")
        lead = "" if opening else f"{OPENS}\n"
        lead = lead or "\n" * (not before.endswith("\n"))
        thought = message.beside["reasoning_content"]
        rest = self._up_to_its_end(i, rest.rstrip())
        said = f"{lead}{thought}\n{CLOSES}\n\n{rest}".rstrip()
        self._require_whole(i, said)
        self.text = before + said + after[len(after.rstrip()) :]
        self.notes["reasoning that the template leaves out, trained on as the target writes it"] = (
            None
        )
        return len(before), self._ended(i, len(before + said), self._closed(i, said))

    def _up_to_its_end(self, i: int, said: str) -> str:
        """The rendering of a response up to the first token that ends it, where the target stops.
        If the template ends a response with no token but adds words to the last one, these are
        removed, too."""
        message = self.messages[i]
        calls = "tool_calls" in message.beside
        rest = self.writer.after_end(calls, self.tools, self.thinking(i)).strip()
        end = len(said) - len(rest) if rest and said.endswith(rest) else len(said)
        if message.content and not calls:  # the words may depend on the chat
            after = said.rfind(message.content) + len(message.content)
            first = (
                first_end(said[after:], self.writer.control) if message.content in said else None
            )
            end = end if first is None else min(end, after + first)
        if said[end:].strip():
            self.notes[AFTERWARDS] = None
        return said[:end].rstrip()

    def _require_whole(self, i: int, said: str) -> None:
        """Raise Unusable if a response lacks its text or its reasoning."""
        message = self.messages[i]
        if message.content not in said:
            raise Unusable(DISAGREE)
        without = said.replace(message.content, "", 1)
        if message.beside.get("reasoning_content", "") not in without:
            raise Unusable(f"reasoning, {UNWRITTEN}")

    def _closed(self, i: int, said: str) -> bool:
        """Whether the template writes an end token after a response."""
        if any(said.endswith(token) for token in self.writer.control):
            return True
        content = self.messages[i].content
        after = said.rpartition(content)[2] if content else ""
        return bool(after.strip()) and "tool_calls" not in self.messages[i].beside

    def _ended(self, i: int, end: int, closed: bool) -> int:
        """The end of a response, including the token that ends it. A token that begins a system
        turn does not count: a target never writes it in a response."""
        if closed:
            return end
        if i == self.last and AFTERWARDS in self.notes:
            self.text = self.text[:end]
        rest = self.text[end:]
        if not rest.strip():  # the text ends with this response: see how the chat would go on
            rest = self._continued(i, end) or rest
        ending = self.writer.ending(rest)
        if i < self.last and self.messages[i + 1].role == "system":
            usual = self.writer.ending(self._continued(i, end))  # before a turn of the user
            ending = ending if ending == usual else ""
        if not ending:
            self.notes["responses that this template ends without a token"] = None
        elif not self.text[end:].strip():
            self.text = self.text[:end] + ending
        return end + len(ending)

    def _continued(self, i: int, end: int) -> str:
        """The text that the template writes after the text's last response if the chat continues;
        it may drop that response's reasoning."""
        results = ["tool"] if "tool_calls" in self.messages[i].beside else []
        last_line = self.text[:end].rpartition("\n")[2]
        for role in (*results, "user"):
            longer = self.writer.without(
                [*self.messages[: i + 1], Message(role, PROBE)], self.tools, self.thinking(i)
            )
            if longer.startswith(self.text[:end]):
                return longer[end:]
            earlier = longer.rpartition(PROBE)[0]
            for line in (last_line, self.messages[i].content.rpartition("\n")[2]):
                if line and (at := earlier.rfind(line)) >= 0:
                    return earlier[at + len(line) :]
        return ""


class Chat:
    """Turns conversations into token ids by a tokenizer's chat template, at a time (None: the
    present), with or without reasoning (`thinking`, see `DataConfig`), and with further
    `arguments`, which those of a conversation replace. Raises UserError as `ChatTemplate` does;
    Unusable for a conversation that the template rejects or renders only in part, or whose text
    contains one of the template's control tokens: that would forge a turn."""

    def __init__(
        self,
        tokenizer: Any,
        clock: datetime | None = None,
        thinking: str = "template",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.writer = tokenizer, ChatTemplate(tokenizer, clock, arguments)
        self.thinking = thinking
        self.tails: dict[str, list[int]] = {}  # ends of prompts, and their tokens

    def documents(self, conversation: Conversation, cfg: DataConfig) -> list[Document]:
        """The responses of a conversation, each after the prompt that a server would render, in as
        few documents as possible: one, if the template renders earlier responses as it did when
        they were the last. The assistant's spans come from the template's `{% generation %}` blocks
        or, if it has none, from comparing the rendering before each response with the rendering up
        to its end. Unusable if all spans are uncertain, or if a token crosses the edge of one."""
        messages, tools = conversation.messages, conversation.tools
        while messages and messages[-1].role != "assistant":
            messages = messages[:-1]
        if not messages:
            raise Unusable("no assistant turn")
        writer = self.writer.with_arguments(conversation.arguments)
        require_no_control(_texts_within(messages, tools, conversation.arguments), writer.control)
        wanted = {i for i, m in enumerate(messages) if m.role == "assistant" and m.trained}
        if not wanted:
            raise Unusable("weight 0 for all responses")
        reasons, documents, tokens = list[str](), list[Document](), 0
        notes = dict.fromkeys(_unread(writer, tools))
        if any(m.role == "assistant" and not m.trained for m in messages):
            notes["responses of weight 0 not trained on"] = None
        if any(messages[i].weight != 1 for i in wanted):
            notes[WEIGHTED] = None

        def thinking(i: int) -> bool | None:
            return self._asked(conversation, messages[i])

        for last in sorted({*wanted, len(messages) - 1}, reverse=True):
            if last not in wanted and last < len(messages) - 1:
                continue
            responses = ResponseSpans(writer, messages[: last + 1], tools, wanted, thinking)
            if last == len(messages) - 1:
                whole = self._unwritten(writer, messages, tools, responses.text, responses=True)
                notes |= dict.fromkeys(whole)
            if last in wanted - {*responses.spans}:
                reasons.append(responses.why)
            wanted -= {*responses.spans, last}
            if not responses.spans:
                continue
            try:
                rows = self._encoded(conversation, responses, cfg)
            except Unusable as reason:
                reasons.append(str(reason))
                tokens = max(tokens, reason.tokens)
                continue
            for turn, document in rows.items():
                if turn < len(messages) - 1:
                    document.id = f"{conversation.id}, up to turn {turn + 1}"
            notes |= responses.notes
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
        self, conversation: Conversation, responses: ResponseSpans, cfg: DataConfig
    ) -> dict[int, Document]:
        """The documents of one text, by the turn with which they end. All responses share one
        document, except those whose prompt is tokenised differently without the response (by
        GPT-2's rules, if it ends with a blank line); each of these has its own."""
        encoding = self.tokenizer(
            responses.text, add_special_tokens=False, return_offsets_mapping=True
        )
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        require_short(ids, cfg)
        mask, together, rows = np.zeros(len(ids), np.bool_), -1, dict[int, Document]()
        weight, short = np.ones(len(ids), np.float32), None
        for turn, span in responses.spans.items():
            try:
                first, last = _token_places(offsets, span)
            except Unusable as reason:
                closes = responses.text[span[0] :].lstrip().startswith(CLOSES)
                raise Unusable(OPENED if closes else str(reason)) from reason
            prompt = self._alone(responses.text[: span[0]], ids[:first], offsets)
            counts = conversation.messages[turn].weight
            if prompt == ids[:first]:
                mask[first:last], weight[first:last], together = True, counts, turn
                continue
            said = np.arange(len(prompt) + last - first) >= len(prompt)
            text, weights = (
                prompt + ids[first:last],
                uniform_token_weights(len(prompt) + last - first, counts),
            )
            try:
                rows[turn] = document_of(conversation.id, text, said, cfg, weights)
            except Unusable as reason:
                short = reason
                responses.notes[SHORT.format(cfg.min_response)] = None
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
                responses.notes[SHORT.format(cfg.min_response)] = None
        return dict(sorted(rows.items()))

    def _alone(self, prompt: str, ids: list[int], offsets: Sequence[Span]) -> list[int]:
        """The tokens of a prompt by itself; `ids` are its tokens when a response follows. They are
        the same up to its last special token."""
        added = self.writer.added_ids
        kept = next((n for n in range(len(ids), 0, -1) if ids[n - 1] in added), 1) - 1
        tail = prompt[offsets[kept][0] :] if ids else prompt
        if tail not in self.tails:  # mostly the generation prompt
            alone = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
            if len(self.tails) < TAILS:
                self.tails[tail] = alone
            return [*ids[:kept], *alone]
        return [*ids[:kept], *self.tails[tail]]

    def _asked(self, conversation: Conversation, response: Message | None) -> bool | None:
        """Whether a response's prompt requests reasoning; None leaves it to the template."""
        if self.thinking in ("on", "off"):
            return self.thinking == "on"
        if self.thinking == "mixed":
            return zlib.crc32(conversation.opening.encode()) % 2 == 0
        if self.thinking == "data" and conversation.thinking is None and response is not None:
            return _reasons(response)
        return conversation.thinking

    def prompt(self, conversation: Conversation, most: int | None = None) -> Prompt:
        """The longest prefix of a conversation that a server would be asked to answer and that has
        at most `most` tokens (None: any number), including the generation prompt: it ends with a
        user turn, or with the results of all tools that were called together, and includes system
        turns that follow directly. Unusable if there is none."""
        messages, tools = conversation.messages, conversation.tools
        writer = self.writer.with_arguments(conversation.arguments)
        require_no_control(_texts_within(messages, tools, conversation.arguments), writer.control)
        best, last, text, question, asks, longer = None, 0, "", 0, False, False
        for i, message in enumerate(messages, 1):
            response = next(iter(messages[i:]), None)
            if message.role == "user":
                question = i - 1
            if message.role != "system":
                asks = message.role != "assistant"
            if not (asks if response is None else response.role == "assistant"):
                continue
            thinking = self._asked(conversation, response)
            written, _ = writer.render(messages[:i], tools, True, thinking)
            ids = np.array(self.tokenizer(written, add_special_tokens=False)["input_ids"], np.int32)
            if most is not None and len(ids) > most:
                longer = True
                break
            said, turns = messages[question].content, _earlier(messages[:question])
            best = Prompt(conversation.id, ids, said, turns, thinking)
            best.turn, best.tools = sum(m.role == "user" for m in messages[:i]), bool(tools)
            best.arguments = writer.arguments_read(tools)
            asked = [best.arguments.pop(name, None) for name in THINKING_ARGUMENTS]
            if thinking is None:
                best.thinking = next((x for x in asked if isinstance(x, bool)), None)
            if response is not None and response.trained:
                best.weight = response.weight
            last, text = i, written
        if best is None:
            raise Unusable(reason_prompt_too_long(most))
        notes = _unread(writer, tools)
        if tools or any(m.beside or m.role == "tool" for m in messages[:last]) or writer.marks:
            notes += self._unwritten(writer, messages[:last], tools, text, responses=False)
        best.notes, best.shortened = tuple(notes), longer
        return best

    def _unwritten(
        self,
        writer: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Any],
        text: str,
        responses: bool,
    ) -> list[str]:
        """Notes on parts of the chat that the template does not write, if the chat means the same
        without them. Raises Unusable if it does not: if tools, a call or its result is missing, or
        the reasoning in `responses` that are trained on."""
        notes = []
        if calls := [call for m in messages for call in m.beside.get("tool_calls", ())]:
            silent = [_less(m, "tool_calls") for m in messages]
            bare = writer.without(silent, tools)
            for call in calls:
                if not all(_written(x, text, bare) for x in _leaves(call["function"])):
                    raise Unusable(f"tool calls, {UNWRITTEN}")
        if tools:
            bare = writer.without(messages, ())
            if any(bare.count(x) >= text.count(x) for x in _tool_names(tools)):
                raise Unusable(f"tools, {UNWRITTEN}")
        if not all(_written(m.content.strip(), text, "") for m in messages if m.role == "tool"):
            raise Unusable(f"results of tools, {UNWRITTEN}")
        thoughts = [m for m in messages if "reasoning_content" in m.beside]
        if thoughts:
            bare = writer.without([_less(m, "reasoning_content") for m in messages], tools)
            lost = [m for m in thoughts if not _written(m.beside["reasoning_content"], text, bare)]
            if lost and not responses:
                notes.append("reasoning of earlier responses, which this template leaves out")
            # whether a response is written with its reasoning is checked where it is the last one
        if any("name" in m.beside and m.beside["name"] not in text for m in messages):
            notes.append(f"names, {UNWRITTEN}")
        if any(m.role == "system" and m.content not in text for m in messages):
            notes.append(f"a system prompt, {UNWRITTEN}")
        others = [m.content for m in messages if m.role != "assistant"]
        if any(mark in content for content in others for mark in writer.marks):
            notes.append("words of the template in its text, read as a server reads them")
        return notes


# What a chat holds, and what a template writes of it


def _probe(response: Message) -> Message:
    """A dummy response for comparing renderings: another text, and reasoning if `response` has
    reasoning."""
    thought = {"reasoning_content": PROBE} if "reasoning_content" in response.beside else {}
    return replace(response, content=PROBE, beside=thought, as_written=None)


def _forms(text: str) -> tuple[str, ...]:
    """A text unchanged, and escaped as in JSON."""
    return text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


def _written(part: str, text: str, without: str) -> bool:
    """Whether a text contains a part, possibly escaped as in JSON, more often than `without`
    does."""
    return any(text.count(form) > without.count(form) for form in _forms(part) if form) or not part


def _texts_within(
    messages: Sequence[Message], tools: Sequence[Any], arguments: Mapping[str, Any]
) -> list[str]:
    """All texts of a chat that a template may write."""
    beside = [leaf for m in messages if m.beside for leaf in _leaves(m.beside)]
    return [m.content for m in messages] + beside + [*_leaves(tools)] + [*_leaves(arguments)]


def _leaves(value: Any) -> Iterator[str]:
    """The texts and numbers within a JSON value, as texts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _tool_names(tools: Sequence[Any]) -> list[str]:
    functions = (tool.get("function") for tool in tools if isinstance(tool, dict))
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def _unread(writer: ChatTemplate, tools: Sequence[Any]) -> list[str]:
    """A note for each argument that the template does not read, as a server would not."""
    return [f"the template argument {name!r}, {UNREAD}" for name in writer.unread(tools)]


def _earlier(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """The roles and texts of the last turns, with the middle of long texts removed."""
    half, turns = CHARACTERS // 2, []
    for message in messages[-TURNS:]:
        text = message.content
        short = text if len(text) <= CHARACTERS else f"{text[:half]} […] {text[-half:]}"
        turns.append((message.role, short))
    return tuple(turns)


def _reasons(message: Message) -> bool:
    """Whether a response has reasoning, beside its text or within it."""
    return "reasoning_content" in message.beside or CLOSES in message.content


def _less(message: Message, key: str) -> Message:
    beside = {k: x for k, x in message.beside.items() if k != key}
    as_written = None if key == "reasoning_content" else message.as_written
    return replace(message, beside=beside, as_written=as_written)


def require_no_control(texts: Sequence[str], control: Iterable[str]) -> None:
    if any(token in text for text in texts for token in control):
        raise Unusable("a control token in its text")


def _token_places(offsets: Sequence[Span], span: Span) -> tuple[int, int]:
    """The first token of a span, and the first one after it. Raises Unusable if a token crosses an
    edge, or might: some tokenizers exclude a token's leading space from its offsets."""
    first, last = (bisect_left(offsets, edge, key=lambda x: x[0]) for edge in span)
    for i, edge in ((first, span[0]), (last, span[1])):
        if i > 0 and offsets[i - 1][1] != edge:
            raise Unusable(DISAGREE)
    return first, last
