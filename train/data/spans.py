"""Where the answers of a chat are in the text that a chat template writes.

Whatever is uncertain is left out: a mask is never a guess.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from train.data.conversations import Message, Unusable
from train.data.rendering import Span
from train.data.writer import PROBE, Writer, common_length, first_end

DISAGREE = "template and mask disagree"
UNWRITTEN = "which this template does not write"
OTHERWISE = "reasoning, which this template writes in another way"
OPENED = "an answer without reasoning, where the prompt opens a thought"
AFTERWARDS = "words of the template after the end of a response, not trained on"
OPENS, CLOSES = "<think>", "</think>"


class Answers:
    """The `wanted` answers of a chat that ends with an answer: `spans` [turn → start, end] of the
    `text` that the template writes, each with the token that ends it, for those that it covers. An
    answer is covered if a server that was to give it would read exactly what comes before it here;
    the others need a text of their own, which ends with them. `thinking` says for an answer whether
    it was asked for with reasoning.

    If the template ends an answer by the token that begins the next turn, `text` goes on up to that
    token. If it leaves the reasoning of the last answer out, the text has it as the target writes
    it. If it writes what comes before the last answer otherwise than in the prompt for that answer
    (gpt-oss leaves out the reasoning of calls, Gemma 4 the empty thought of a prompt that asks for
    none), the text is that prompt, and then the answer. `why` is the reason, if there is one, why
    the last answer is not covered. Raises Unusable if the template and the mask disagree for the
    whole chat."""

    def __init__(
        self,
        writer: Writer,
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
        answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
        has_blocks = writer.has_blocks(tools)
        if has_blocks and len(blocks) != len(answers):
            raise Unusable(DISAGREE)
        block_of = dict(zip(answers, blocks, strict=True)) if has_blocks else {}
        for i in answers[::-1]:  # the last one first, since it decides upon the text
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
                block_of = {}  # they say where answers are in what the template writes
        self.spans = dict(sorted(self.spans.items()))
        if any(a[1] > b[0] for a, b in pairwise(self.spans.values())):
            raise Unusable(DISAGREE)

    def _before(self, i: int) -> str | None:
        """What a server would read that is to give an answer; None if the template refuses it."""
        try:
            thinking = self.thinking(i)
            return self.writer.render(self.messages[:i], self.tools, True, thinking)[0]
        except Unusable:
            return None

    def _in_block(self, i: int, block: Span) -> Span | None:
        """The span of a `{% generation %}` block, which goes on up to the token that ends the
        answer. It begins no earlier than the generation prompt ends."""
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
        """The span of an answer by what the template writes up to its beginning and to its end;
        None if that is not what it writes in the whole text."""
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
        # some templates write something after the last answer alone, such as the end of the text
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
        """The span of the last answer in a text that is the prompt for it, and then the answer.

        What the template writes of the answer begins after the generation prompt, which it writes
        before the answer, too. A prompt that closes an empty thought may have more than that: then
        the answer follows the closed thought. Raises Unusable for any other difference."""
        message, thinking = self.messages[i], self.thinking(i)
        history = self.writer.without(self.messages[:i], self.tools, thinking)
        other = self.writer.without([*self.messages[:i], _probe(message)], self.tools, thinking)
        edge = common_length(self.written, other)  # from here on is what the answer says
        earlier = [x for x in _forms(self.messages[i - 1].content.strip()) if x]
        header = before[common_length(before, history) :]
        prompts = bool(header.strip())
        if not prompts:  # as Mistral's template, which writes answers after [/INST]
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
        """What the template writes of the last answer, where the generation prompt has a thought
        of which the template writes the end, or nothing. `after` says where a part of the
        generation prompt ends in what the template writes. Raises Unusable if the thought is open,
        or if this is no thought."""
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
        """The span of the last answer, whose reasoning the template leaves out: between the marks
        that it knows, as the target writes it after the generation prompt, which may open it."""
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
        """What the template writes of an answer without what follows the first token that ends it:
        the target stops there. If the template ends a response by no token, but has words after the
        last one, these are not the target's either."""
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
        """Raise Unusable if an answer lacks its text or its reasoning."""
        message = self.messages[i]
        if message.content not in said:
            raise Unusable(DISAGREE)
        without = said.replace(message.content, "", 1)
        if message.beside.get("reasoning_content", "") not in without:
            raise Unusable(f"reasoning, {UNWRITTEN}")

    def _closed(self, i: int, said: str) -> bool:
        """Whether the template writes an end after an answer."""
        if any(said.endswith(token) for token in self.writer.control):
            return True
        content = self.messages[i].content
        after = said.rpartition(content)[2] if content else ""
        return bool(after.strip()) and "tool_calls" not in self.messages[i].beside

    def _ended(self, i: int, end: int, closed: bool) -> int:
        """The end of an answer, including the token that ends it. A token that begins a system turn
        does not count as that token: a target never writes it when it is asked for an answer."""
        if closed:
            return end
        if i == self.last and AFTERWARDS in self.notes:
            self.text = self.text[:end]
        rest = self.text[end:]
        if not rest.strip():  # the text ends with this answer: see how the chat would go on
            rest = self._continued(i, end) or rest
        ending = self.writer.ending(rest)
        if i < self.last and self.messages[i + 1].role == "system":
            usual = self.writer.ending(self._continued(i, end))  # before a turn of the user
            ending = ending if ending == usual else ""
        if not ending:
            self.notes["answers that this template ends without a token"] = None
        elif not self.text[end:].strip():
            self.text = self.text[:end] + ending
        return end + len(ending)

    def _continued(self, i: int, end: int) -> str:
        """What the template writes after the text's last answer if the chat goes on, where it may
        leave the reasoning of that answer out."""
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


def _probe(answer: Message) -> Message:
    """An answer that says something else, with reasoning if this one has it."""
    thought = {"reasoning_content": PROBE} if "reasoning_content" in answer.beside else {}
    return replace(answer, content=PROBE, beside=thought, as_written=None)


def _forms(text: str) -> tuple[str, ...]:
    """A text as it is, and as JSON has it."""
    return text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
