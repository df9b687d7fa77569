"""A tokenizer's chat template: what it writes of a chat, and which of its words are the template's
own."""

from collections.abc import Collection, Mapping, Sequence
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
        self._after_ends: dict[tuple[Any, ...], str] = {}
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
            if t.content.strip() and (t.special or not (len(t.content) == 1 or t.content.isalnum()))
        ]
        self.added_ids = {*tokenizer.added_tokens_decoder}
        self.added = sorted((t.content for t in added), key=len, reverse=True)
        both = source + with_tools
        special = {t.content for t in added if t.special and t.content in both}
        self.reasons = True
        self.reasons = self._writes_reasoning()
        turns = self._turns()
        self.control = special | {*special_tokens(tokenizer)}
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

    def after_end(self, calls: bool, tools: Sequence[Any], thinking: bool | None) -> str:
        """What the template writes after the end of the last response of a chat (one with tool
        calls, if `calls`): after the first token that ends it or, if there is no such token, the
        words that only a last response has after it."""
        key = calls, bool(tools), thinking, str(dict(self.arguments))
        if key not in self._after_ends:
            self._after_ends[key] = self._after_end(calls, tools, thinking)
        return self._after_ends[key]

    def _after_end(self, calls: bool, tools: Sequence[Any], thinking: bool | None) -> str:
        plain = self._tail([Message("assistant", PROBE + x) for x in "a0"], tools, thinking)
        if not calls:
            if (end := first_end(plain, self.control)) is not None:
                return plain[end:]
            chat = [Message("user", "0"), Message("assistant", PROBE), Message("user", "0")]
            goes_on = self.without(chat, tools, thinking).rpartition(PROBE)[2]
            return plain[common_length(plain, goes_on) :]
        ends = {token for token in self.control if plain.lstrip().startswith(token)}
        calling = [Message("assistant", "", {"tool_calls": [_call(PROBE + x)]}) for x in "a0"]
        tail = self._tail(calling, tools, thinking)
        end = first_end(tail, ends)
        return "" if end is None else tail[end:]

    def _tail(self, ends: Sequence[Message], tools: Sequence[Any], thinking: bool | None) -> str:
        """What the template writes after the words of an answer: the end that is common to chats
        which end with these answers."""
        chats = ([Message("user", "0"), answer] for answer in ends)
        one, other = (self.without(chat, tools, thinking)[::-1] for chat in chats)
        return one[: common_length(one, other)][::-1]

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


def common_length(one: str, two: str) -> int:
    """The length of the beginning that two texts share."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))


def _call(argument: str) -> dict[str, Any]:
    """A call of a tool; its id is one that Mistral's templates accept."""
    described = {"name": PROBE, "arguments": {PROBE: argument}}
    return {"id": "quokka123", "type": "function", "function": described}


def special_tokens(tokenizer: Any) -> list[str]:
    """The special tokens of a tokenizer that a text can contain: files also declare empty ones,
    which every text contains."""
    return [token for token in tokenizer.all_special_tokens if token.strip()]


def first_end(text: str, tokens: Collection[str]) -> int | None:
    """Where the first of these tokens in a text ends; None if there is none in it."""
    places = [(text.index(token), -len(token)) for token in tokens if token in text]
    return None if not places else min(places)[0] - min(places)[1]


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
