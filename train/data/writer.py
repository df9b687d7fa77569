"""A tokenizer's chat template: what it writes of a chat, and which of its words are the template's
own."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from typing import Any

from specdec.errors import UserError
from train.data.conversations import Message, Unusable
from train.data.rendering import Span, Template

PROBE = "Quokka"  # a word that no template writes of itself


class Writer:
    """Renders chats with a tokenizer's chat template, at a time (None: the present). Raises
    UserError if there is no template, if it is broken, or if the tokenizer cannot report the
    positions of its tokens in a text; Unusable for a chat that the template refuses.

    `control` are the tokens that would forge a turn; `marks` are further tokens of the template
    that people may write, such as <think>, which a server reads as if the template had. `reasons`
    says whether the template writes reasoning that a message has beside its text; else reasoning
    that the data have within the text stays there."""

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
        self.source = source
        self.arguments: Mapping[str, Any] = {}
        self.template = Template(source, tokenizer, clock)
        self.with_tools = self.template
        if with_tools != source:  # some tokenizers have a template of its own for tools
            self.with_tools = Template(with_tools, tokenizer, clock)
        for template in (self.template, self.with_tools):
            template.parts = _reads_parts(template)
        # some tokenizers also have words, signs and spaces among the added tokens
        added = [
            t
            for t in tokenizer.added_tokens_decoder.values()
            if t.special or not (len(t.content) == 1 or t.content.isalnum() or t.content.isspace())
        ]
        self.added_ids = {*tokenizer.added_tokens_decoder}
        self.added = sorted((t.content for t in added), key=len, reverse=True)
        both = source + with_tools
        special = {t.content for t in added if t.special and t.content in both}
        self.reasons = True
        self.reasons = self._writes_reasoning()
        turns = self._turns()
        self.control = special | {*tokenizer.all_special_tokens}
        self.control |= {token for token in self.added if token in turns}
        self.marks = {t for t in self.added if t in both} - self.control

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        prompt: bool = False,
        thinking: bool | None = None,
    ) -> tuple[str, list[Span]]:
        """The text, and the places of its `{% generation %}` blocks. `thinking` asks for reasoning
        or for none; None leaves it to the template."""
        if not self.reasons:
            messages = [_in_text(message) for message in messages]
        template = self.with_tools if tools else self.template
        return template.render(messages, tools, prompt, thinking, self.arguments)

    def with_arguments(self, arguments: Mapping[str, Any]) -> "Writer":
        """A writer that sets these variables of the template, too."""
        if arguments == self.arguments:
            return self
        writer = copy(self)
        writer.arguments = arguments
        return writer

    def unread(self, tools: Sequence[Any]) -> list[str]:
        """The names of arguments that the template does not read."""
        template = self.with_tools if tools else self.template
        return sorted(self.arguments.keys() - template.variables)

    def has_blocks(self, tools: Sequence[Any]) -> bool:
        """Whether the template marks the assistant's tokens itself."""
        return (self.with_tools if tools else self.template).has_blocks

    def _writes_reasoning(self) -> bool:
        beside = {"reasoning_content": PROBE}
        chat = [Message("user", "0"), Message("assistant", "0", beside)]
        return PROBE in self.without(chat, ())

    def _turns(self) -> str:
        """What the template writes around turns: renderings of short chats."""
        chat = [Message("user", "0"), Message("assistant", "0"), Message("user", "0")]
        written = ""
        for messages in (chat, [Message("system", "0"), *chat]):
            try:
                written += self.render(messages)[0]
            except Unusable:  # some templates refuse a system turn
                continue
        return written

    def without(
        self, messages: Sequence[Message], tools: Sequence[Any], thinking: bool | None = None
    ) -> str:
        """The text of a chat that lacks something; nothing if the template refuses it."""
        try:
            return self.render(messages, tools, thinking=thinking)[0]
        except Unusable:
            return ""

    def ending(self, text: str) -> str:
        """The control token with which a text begins, and the white space before it; nothing if it
        begins with something else."""
        rest = text.lstrip()
        token = next((token for token in self.added if rest.startswith(token)), "")
        return text[: len(text) - len(rest)] + token if token else ""


def _reads_parts(template: Template) -> bool:
    """Whether a template writes texts only as parts, as those of models that see images do."""
    chat = [Message("user", PROBE)]
    for template.parts in (False, True):
        try:
            if PROBE in template.render(chat)[0]:
                return template.parts
        except Unusable:
            continue
    return False


def _in_text(message: Message) -> Message:
    """A message whose reasoning is in its text again, if the data had it there."""
    if message.as_written is None:
        return message
    beside = {k: x for k, x in message.beside.items() if k != "reasoning_content"}
    return replace(message, content=message.as_written, beside=beside)
