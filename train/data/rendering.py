"""Renders chats with a chat template (`ChatTemplate`) as a server does, but with limits and at a
given time (`BoundedEnvironment`, `BoundedTemplate`).

transformers compiles a template and restricts what it may call. This module adds two things: a
template that loops, or whose text grows, without end is stopped after a number of steps, on any
machine and in any thread; and the time that a template writes can be that of a run's beginning.
"""

import functools
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.compat import template_environment
from specdec.errors import UserError, first_line, require
from specdec.files import reading
from specdec.targets.prompt_rendering import PromptRendering
from train.data.conversations import (
    RENDERED,
    TEXTS,
    THINKING_ARGUMENTS,
    DataConfig,
    Message,
    Unusable,
)

PROBE = "Quokka"  # a word that no template writes of itself
STEPS = 500_000  # iterations of loops and calls of macros while one chat is rendered
STEPS_PER_PAIR = 20  # more of them for each pair of turns
MACRO = 20  # steps that a call of a macro takes, by its time
LARGEST = 1 << 23  # characters of any text that a template makes, or elements of a list
MORE = 8  # more of them for each character of the chat
BITS = 1 << 16  # maximum number of bits of a number
REFUSED = "refused by the chat template"
Span = tuple[int, int]  # start and end (exclusive) in the characters of a text


class EndlessTemplate(Exception):
    """A template took more steps, or made a longer text, than any chat needs."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment that limits the steps of a rendering (each iteration of a loop is one, each
    call of a macro is several) and the sizes of texts, lists and numbers."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.left = threading.local()

    def bound(self) -> None:
        """Limit the results of the filters; called once all filters are registered."""
        for name, filter in self.filters.items():
            self.filters[name] = self._bounded(filter)

    def allow_steps(self, messages: Sequence[Message] = ()) -> None:
        """Set the number of steps that this thread may take to render a chat."""
        self.left.steps = STEPS + STEPS_PER_PAIR * len(messages) ** 2
        self.left.size = LARGEST + MORE * sum(len(str(message)) for message in messages)

    @property
    def step(self) -> None:
        """Take one of the remaining steps. A property, since jinja2 makes every call expensive."""
        self.take(1)

    @property
    def macro(self) -> None:
        self.take(MACRO)

    def take(self, steps: int) -> None:
        self.left.steps -= steps
        if self.left.steps < 0:
            raise EndlessTemplate("does not end (stopped after too many steps)")

    def concat(self, pieces: Iterable[str]) -> str:
        """The function with which jinja2 joins the output of a macro or a block."""
        pieces = list(pieces)
        self.small(sum(map(len, pieces)))
        return "".join(pieces)

    def joined(self, *parts: Any) -> str:
        """The texts that a template joins with `~`."""
        return str(self.sized("".join(map(str, parts))))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int) and operator == "*":
                self.small(len(one) * other)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.small(left.bit_length() * right, BITS)
        if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{6}|\*)", left):
            self.small(math.inf)
        return self.sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            self.small(value)
        return self.sized(super().call(context, obj, *args, **kwargs))

    def sized(self, value: Any) -> Any:
        """The value; raises EndlessTemplate if it is too large."""
        if isinstance(value, str | list | tuple):
            self.small(len(value))
        elif isinstance(value, int):
            self.small(value.bit_length(), BITS)
        return value

    def small(self, value: Any, most: float | None = None) -> None:
        """Raise EndlessTemplate for a number that is too large, before anything of that size is
        made."""
        if isinstance(value, int | float) and value > (self.left.size if most is None else most):
            raise EndlessTemplate(
                "does not end (stopped at a text or a number that grows too large)"
            )

    def _bounded(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter)  # with the marks of what jinja2 passes to it
        def bounded(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                self.small(value)
            return self.sized(filter(*args, **kwargs))

        return bounded

    def _parse(self, source: str, name: Any, filename: Any) -> nodes.Template:
        """The tree that jinja2 compiles: with a step in each loop and macro, and with `~` as a call
        of `joined`."""
        template = super()._parse(source, name, filename)
        loops: Any = template.find_all((nodes.For, nodes.Macro))
        for node in loops:
            step = nodes.EnvironmentAttribute("step" if isinstance(node, nodes.For) else "macro")
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        for parent in [template, *template.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                if isinstance(value, nodes.Concat):
                    setattr(parent, field, _call("joined", value.nodes))
                if isinstance(value, list):
                    for i, inner in enumerate(value):
                        if isinstance(inner, nodes.Concat):
                            value[i] = _call("joined", inner.nodes)
        template.set_environment(self)
        return template


def _call(method: str, arguments: Sequence[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


def environment_of_templates(clock: datetime | None) -> BoundedEnvironment:
    """The environment of transformers' templates, with limits and at a time (None: the present). It
    is taken from an empty template, since compiling another one there would compute its constants
    without limits."""
    theirs = template_environment()
    extensions: list[Any] = [type(extension) for extension in theirs.extensions.values()]
    ours = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    ours.filters |= theirs.filters
    ours.globals |= theirs.globals
    ours.globals["strftime_now"] = lambda format: (clock or datetime.now()).strftime(format)
    ours.bound()
    return ours


def compiled(environment: BoundedEnvironment, source: str, name: str) -> Template:
    """A compiled chat template. Raises UserError, beginning with the `name`, if it is broken."""
    try:
        environment.allow_steps()
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UserError(
            f"{name}: the chat template is broken in line {error.lineno}: {first_line(error)[:80]}"
        ) from error
    except Exception as error:
        raise UserError(
            f"{name}: the chat template cannot be compiled: {first_line(error)[:80]}"
        ) from error


def own_chat_template(cfg: DataConfig) -> str | None:
    """The text of `data.chat_template`; None if the tokenizer's is used. Raises UserError for a
    file that is missing, empty, not text, or no template."""
    if cfg.chat_template is None:
        return None
    name, path = f"data.chat_template={cfg.chat_template}", Path(cfg.chat_template)
    require(path.is_file(), f"{name}: there is no such file: give a file with a chat template")
    try:
        with reading(path):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: the file is not UTF-8 text: save it as UTF-8") from error
    require(bool(text.strip()), f"{name}: the file is empty: give a file with a chat template")
    compiled(environment_of_templates(None), text, name)
    return text


def prompt_rendering(cfg: DataConfig, tokenizer: Any, chat_template: str | None) -> PromptRendering:
    """The settings with which a server renders prompts like these settings: the template arguments,
    this text of an own `chat_template`, and, if all prompts agree on it, whether to reason, under
    the argument names that the template reads."""
    arguments = dict(cfg.template_args)
    if cfg.format in (*TEXTS, "tokens"):
        return PromptRendering()
    if cfg.thinking in ("on", "off"):
        source = chat_template or getattr(tokenizer, "chat_template", None)
        sources = [*source.values()] if isinstance(source, dict) else [source] if source else []
        read = {name for one in sources for name in BoundedTemplate(one, tokenizer, None).variables}
        names = [name for name in THINKING_ARGUMENTS if name in read]
        arguments |= dict.fromkeys(names, cfg.thinking == "on")
    return PromptRendering(arguments, chat_template)


class BoundedTemplate:
    """A chat template of a tokenizer, at a time (None: the present). Raises UserError if it cannot
    be compiled."""

    def __init__(self, source: str, tokenizer: Any, clock: datetime | None) -> None:
        self.name = tokenizer.name_or_path or "the tokenizer"
        self.source = source
        self.has_blocks = bool(re.search(r"{%-?\s*generation\s*-?%}", source))
        self.parts = False  # whether texts are given as lists of parts
        self.tokens: Mapping[str, Any] = tokenizer.special_tokens_map
        self.environment = environment_of_templates(clock)
        self.compiled = compiled(self.environment, source, self.name)
        # that it reads, and does not set
        self.variables: Set[str] = meta.find_undeclared_variables(self.environment.parse(source))

    @property
    def arguments_read(self) -> Set[str]:
        """The names of the arguments that the template reads, apart from those that every rendering
        sets."""
        known = {*self.environment.globals, *self.tokens, *RENDERED, "documents"}
        return self.variables - known

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        prompt: bool = False,
        thinking: bool | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The text of a chat, with the generation prompt if `prompt`, and the spans of its `{%
        generation %}` blocks. `thinking` is passed to the template under both common names; None
        leaves it to the template. `arguments` are further variables. Raises Unusable if the
        template rejects the chat; UserError if it does not end."""
        chosen = {"documents": None, **self.tokens, **(arguments or {})}
        chosen |= {} if thinking is None else dict.fromkeys(THINKING_ARGUMENTS, thinking)
        written: list[str] = []
        blocks: list[Span] = []
        size = 0
        self.environment.allow_steps(messages)
        try:
            with self.environment.activate_tracker(written, blocks):  # type: ignore[attr-defined]
                for piece in self.compiled.generate(
                    messages=[_plain(message, self.parts) for message in messages],
                    tools=list(tools) or None,
                    add_generation_prompt=prompt,
                    **chosen,
                ):
                    written.append(piece)
                    self.environment.small(size := size + len(piece))
        except EndlessTemplate as error:
            raise UserError(f"{self.name}: the chat template {error}: fix it") from error
        except Exception as error:  # a template may do anything that an expression can
            raise Unusable(f"{REFUSED}: {first_line(error)[:80]}") from error
        return "".join(written), blocks


def _plain(message: Message, parts: bool) -> dict[str, Any]:
    """A message in the form that transformers and vLLM pass to a template, with all names of its
    reasoning."""
    content = [{"type": "text", "text": message.content}] if parts else message.content
    thought = message.beside.get("reasoning_content")
    others = {} if thought is None else {"thinking": thought, "reasoning": thought}
    return others | {"role": message.role, "content": content} | dict(message.beside)


class ChatTemplate:
    """Renders chats with a tokenizer's chat template, at a time (None: the present). Raises
    UserError if there is no template, if it is broken, or if the tokenizer cannot report the
    positions of its tokens in a text; Unusable for a chat that the template rejects.

    `control` are the tokens that would forge a turn; `marks` are further tokens of the template
    that people may write, such as <think>, and that a server would read as the template's own.
    `reasons` is whether the template writes reasoning that a message has beside its text; otherwise
    reasoning within the text stays there. `arguments` are passed to the template in each rendering;
    one that it does not read raises UserError.
    """

    def __init__(
        self,
        tokenizer: Any,
        clock: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            source: str = tokenizer.get_chat_template()
            with_tools: str = tokenizer.get_chat_template(tools=[{}])
        except ValueError as error:
            raise UserError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template: use an "
                "instruction-tuned target, give a template with data.chat_template=FILE, or train "
                "on plain text with data=text"
            ) from error
        if not tokenizer.is_fast:
            raise UserError(
                f"{tokenizer.name_or_path}: the tokenizer cannot report the positions of its "
                "tokens in a text: use a target with a tokenizer.json"
            )
        self._after_ends: dict[tuple[Any, ...], str] = {}
        self.source = source
        self.arguments: Mapping[str, Any] = arguments or {}
        self.template = BoundedTemplate(source, tokenizer, clock)
        self.with_tools = self.template
        if with_tools != source:  # some tokenizers have a template of its own for tools
            self.with_tools = BoundedTemplate(with_tools, tokenizer, clock)
        self._require_read_arguments()
        for template in (self.template, self.with_tools):
            template.parts = _reads_parts(template, self.arguments)
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
        """The text, and the spans of its `{% generation %}` blocks. `thinking` requests reasoning
        or none; None leaves it to the template."""
        if not self.reasons:
            messages = [_in_text(message) for message in messages]
        template = self.with_tools if tools else self.template
        return template.render(messages, tools, prompt, thinking, self.arguments)

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """A copy with these template arguments, which replace its own."""
        merged = {**self.arguments, **arguments}
        if merged == self.arguments:
            return self
        writer = copy(self)
        writer.arguments = merged
        return writer

    def arguments_read(self, tools: Sequence[Any]) -> dict[str, Any]:
        """The arguments that the template reads, with their values."""
        read = (self.with_tools if tools else self.template).variables
        return {name: value for name, value in self.arguments.items() if name in read}

    def _require_read_arguments(self) -> None:
        """Raise UserError for an argument that the template does not read."""
        read = self.template.arguments_read | self.with_tools.arguments_read
        known = self.template.variables | self.with_tools.variables
        unread = sorted(name for name in self.arguments if name not in known)
        if unread:
            others = f"it reads {', '.join(sorted(read))}" if read else "it reads no argument"
            raise UserError(
                f"data.template_args.{unread[0]}: the chat template of {self.template.name} does "
                f"not read it ({others}): give one that it reads, or leave it out"
            )

    def unread(self, tools: Sequence[Any]) -> list[str]:
        """The names of arguments that the template does not read."""
        template = self.with_tools if tools else self.template
        return sorted(self.arguments.keys() - template.variables)

    def after_end(self, calls: bool, tools: Sequence[Any], thinking: bool | None) -> str:
        """The text that the template writes after the end of the last response of a chat (one with
        tool calls, if `calls`): after the first token that ends the response or, without such a
        token, the words that follow only a last response."""
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
        calling = [
            Message("assistant", "", {"tool_calls": [_example_call(PROBE + x)]}) for x in "a0"
        ]
        tail = self._tail(calling, tools, thinking)
        end = first_end(tail, ends)
        return "" if end is None else tail[end:]

    def _tail(self, ends: Sequence[Message], tools: Sequence[Any], thinking: bool | None) -> str:
        """The text that the template writes after the words of a response: the common suffix of
        chats that end with these responses."""
        chats = ([Message("user", "0"), response] for response in ends)
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
        """The text that the template writes around turns, from renderings of short chats."""
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
        """The rendering of a chat without some part; empty if the template rejects it."""
        try:
            return self.render(messages, tools, thinking=thinking)[0]
        except Unusable:
            return ""

    def ending(self, text: str) -> str:
        """The control token with which a text begins, with the white space before it; empty if it
        begins with something else."""
        rest = text.lstrip()
        token = next((token for token in self.added if rest.startswith(token)), "")
        return text[: len(text) - len(rest)] + token if token else ""


def _reads_parts(template: BoundedTemplate, arguments: Mapping[str, Any]) -> bool:
    """Whether a template supports texts only as parts, as those of vision models do."""
    chat = [Message("user", PROBE)]
    for template.parts in (False, True):
        try:
            if PROBE in template.render(chat, arguments=arguments)[0]:
                return template.parts
        except Unusable:
            continue
    return False


def _in_text(message: Message) -> Message:
    """A message with its reasoning moved back into its text, if the data had it there."""
    if message.as_written is None:
        return message
    beside = {k: x for k, x in message.beside.items() if k != "reasoning_content"}
    return replace(message, content=message.as_written, beside=beside)


def _example_call(argument: str) -> dict[str, Any]:
    """An example of a tool call; its id is valid for Mistral's templates."""
    described = {"name": PROBE, "arguments": {PROBE: argument}}
    return {"id": "quokka123", "type": "function", "function": described}


def special_tokens(tokenizer: Any) -> list[str]:
    """The special tokens of a tokenizer that a text can contain, without the empty ones that some
    files declare."""
    return [token for token in tokenizer.all_special_tokens if token.strip()]


def first_end(text: str, tokens: Collection[str]) -> int | None:
    """The end position of the first of these tokens in a text; None if there is none."""
    places = [(text.index(token), -len(token)) for token in tokens if token in text]
    return None if not places else min(places)[0] - min(places)[1]


def common_length(one: str, two: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
