"""Where the answers of a chat are in the text that a chat template writes.

Whatever is uncertain is left out: a mask is never a guess.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from train.data.conversations import Message, Unusable
from train.data.rendering import Span
from train.data.writer import Writer

DISAGREE = "template and mask disagree"
UNWRITTEN = "which this template does not write"
OPENS, CLOSES = "<think>", "</think>"


class Answers:
    """The `wanted` answers of a chat that ends with an answer: `spans` of the `text` that the
    template writes, each with the token that ends it, for those that are `covered`. An answer is
    covered if a server that was to give it would read exactly what comes before it here; the
    others need a text of their own, which ends with them. `thinking` says for an answer whether it
    was asked for with reasoning.

    If the template ends an answer by the token that begins the next turn, `text` goes on up to that
    token. If it leaves the reasoning of the last answer out, the text has it as the target writes
    it. `why` is the reason, if there is one, why the last answer is not covered. Raises Unusable if
    the template and the mask disagree for the whole chat."""

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
        self.spans: list[Span] = []
        self.covered: set[int] = set()
        self.notes: dict[str, None] = {}
        answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
        has_blocks = writer.has_blocks(tools)
        if has_blocks and len(blocks) != len(answers):
            raise Unusable(DISAGREE)
        for n, i in enumerate(answers):
            if i not in wanted:
                continue
            try:
                span = self._in_block(i, blocks[n]) if has_blocks else self._compared(i)
            except Unusable as reason:
                if i == self.last:
                    self.why = str(reason)
                continue
            if span is not None:
                self.spans.append(span)
                self.covered.add(i)
        if any(a[1] > b[0] for a, b in pairwise(self.spans)):
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
        if i != self.last and before is not None and not self._begins_with(before, start):
            return None
        said = self.text[start:end].rstrip()
        self._require_whole(i, said)
        before = before or ""
        if start < len(before) < start + len(said) and self.text.startswith(before):
            start, said = len(before), self.text[len(before) : end].rstrip()
        self._require_whole(i, said)
        return start, self._ended(i, start + len(said), self._closed(i, said))

    def _begins_with(self, before: str, start: int) -> bool:
        """Whether the text up to the `start` of a block is what a server would read, as far as the
        block does not begin earlier."""
        return self.text[:start].startswith(before) or before.startswith(self.text[:start])

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
        if i == self.last and thought not in after[_alike(before, after) :]:
            return self._as_the_target_writes(i, before)
        if not self.text.startswith(before) or not after.startswith(before):
            return None
        start, said = len(before), after[len(before) :].rstrip()
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
            return start, self._ended(i, start + len(up_to), False)
        return None

    def _as_the_target_writes(self, i: int, before: str) -> Span | None:
        """The span of the last answer, whose reasoning the template leaves out: between the marks
        that it knows, as the target writes it after the generation prompt, which may open it."""
        message = self.messages[i]
        silent = {k: x for k, x in message.beside.items() if k != "reasoning_content"}
        bare = [*self.messages[:i], replace(message, beside=silent, as_written=None)]
        after, _ = self.writer.render(bare, self.tools, thinking=self.thinking(i))
        same = _alike(before, after)
        opening, rest = before[same:].strip(), after[same:].lstrip()
        known = CLOSES in self.writer.source or opening == OPENS
        if opening not in ("", OPENS) or not known or CLOSES in rest:
            raise Unusable(f"reasoning, {UNWRITTEN}")
        lead = "" if opening else f"{OPENS}\n"
        lead = lead or "\n" * (not before.endswith("\n"))
        thought = message.beside["reasoning_content"]
        said = f"{lead}{thought}\n{CLOSES}\n\n{rest}".rstrip()
        self._require_whole(i, said)
        self.text = before + said + after[len(after.rstrip()) :]
        self.notes["reasoning that the template leaves out, trained on as the target writes it"] = (
            None
        )
        return len(before), self._ended(i, len(before + said), self._closed(i, said))

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
        """The end of an answer, with the token that ends it."""
        if closed:
            return end
        rest = self.text[end:]
        if not rest.strip():  # the text ends with this answer: see how the chat would go on
            rest = self._continued(i, end) or rest
        ending = self.writer.ending(rest)
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
                longer, _ = self.writer.render(
                    [*self.messages[: i + 1], Message(role, "0")], self.tools
                )
            except Unusable:
                continue
            if longer.startswith(self.text[:end]):
                return longer[end:]
        return ""


def _alike(one: str, two: str) -> int:
    """The length of the beginning that two texts share."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
