"""Chat templates, rendered as a server would, but within bounds and at a given time.

transformers compiles a template and knows what it may call. This module adds what transformers
lacks: a template that loops without end, or whose text grows without end, is stopped after a number
of steps, on any machine and in any thread; and the time that a template writes can be that of a
run's beginning.
"""

import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.compat import template_environment
from specdec.errors import UserError, first_line
from train.data.conversations import Message, Unusable

STEPS = 500_000  # iterations of loops and calls of macros while one chat is rendered
STEPS_PER_PAIR = 20  # more of them for each pair of turns
MACRO = 20  # steps that a call of a macro takes, by its time
LARGEST = 1 << 23  # characters of any text that a template makes, or elements of a list
MORE = 8  # more of them for each character of the chat
BITS = 1 << 16  # of a number
REFUSED = "refused by the chat template"
THINKING = ("enable_thinking", "thinking")  # names of the variable that asks for reasoning
# arguments that a server sets itself, with the value that changes nothing
RENDERED: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}
RENDERED |= dict.fromkeys(("messages", "conversation", "tools", "chat_template", "tokenize"))
Span = tuple[int, int]  # start and end (exclusive) in the characters of a text


class Endless(Exception):
    """A template took more steps, or made a longer text, than any chat needs."""


class Bounded(ImmutableSandboxedEnvironment):
    """An environment that limits the steps of a rendering (each iteration of a loop is one, each
    call of a macro is several) and the sizes of texts, lists and numbers."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.left = threading.local()

    def bound(self) -> None:
        """Bound what the filters return; called once all of them are known."""
        for name, filter in self.filters.items():
            self.filters[name] = self._bounded(filter)

    def begin(self, messages: Sequence[Message] = ()) -> None:
        """Begin to render a chat in this thread."""
        self.left.steps = STEPS + STEPS_PER_PAIR * len(messages) ** 2
        self.left.size = LARGEST + MORE * sum(len(str(message)) for message in messages)

    @property
    def step(self) -> None:
        """Takes one of the steps left. A property, since jinja2 makes every call expensive."""
        self.take(1)

    @property
    def macro(self) -> None:
        self.take(MACRO)

    def take(self, steps: int) -> None:
        self.left.steps -= steps
        if self.left.steps < 0:
            raise Endless("does not end (stopped after too many steps)")

    def concat(self, pieces: Iterable[str]) -> str:
        """What jinja2 joins the output of a macro or a block with."""
        pieces = list(pieces)
        self.small(sum(map(len, pieces)))
        return "".join(pieces)

    def joined(self, *parts: Any) -> str:
        """The texts that a template joins by `~`."""
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
        """The value, unless it is too large."""
        if isinstance(value, str | list | tuple):
            self.small(len(value))
        elif isinstance(value, int):
            self.small(value.bit_length(), BITS)
        return value

    def small(self, value: Any, most: float | None = None) -> None:
        """Raise Endless for a number that is too large, before anything of that size is made."""
        if isinstance(value, int | float) and value > (self.left.size if most is None else most):
            raise Endless("does not end (stopped at a text or a number that grows too large)")

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


class Template:
    """A chat template of a tokenizer, at a time (None: the present). Raises UserError if it cannot
    be compiled."""

    def __init__(self, source: str, tokenizer: Any, clock: datetime | None) -> None:
        self.name = tokenizer.name_or_path or "the tokenizer"
        self.source = source
        self.has_blocks = bool(re.search(r"{%-?\s*generation\s*-?%}", source))
        self.parts = False  # whether texts are given as lists of parts
        self.tokens: Mapping[str, Any] = tokenizer.special_tokens_map
        # all that transformers' templates may use; taken from an empty template, since compiling
        # this one there would compute its constants without bounds
        theirs = template_environment()
        extensions: list[Any] = [type(extension) for extension in theirs.extensions.values()]
        self.environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.environment.filters |= theirs.filters
        self.environment.globals |= theirs.globals
        self.environment.globals["strftime_now"] = lambda format: (
            clock or datetime.now()
        ).strftime(format)
        self.environment.bound()
        self.variables: Set[str] = frozenset()  # that it reads, and does not set
        try:
            self.environment.begin()
            self.compiled = self.environment.from_string(source)
            self.variables = meta.find_undeclared_variables(self.environment.parse(source))
        except TemplateSyntaxError as error:
            raise UserError(
                f"{self.name}: the chat template is broken in line {error.lineno}: "
                f"{first_line(error)[:80]}"
            ) from error
        except Exception as error:
            raise UserError(
                f"{self.name}: the chat template cannot be compiled: {first_line(error)[:80]}"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        prompt: bool = False,
        thinking: bool | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The text of a chat, with the generation prompt if asked for, and the places of its
        `{% generation %}` blocks. `thinking` is given to the template under both names that
        templates know; None leaves it to the template. `arguments` are further variables. Raises
        Unusable if the template refuses the chat; UserError if it does not end."""
        chosen = {"documents": None, **self.tokens, **(arguments or {})}
        chosen |= {} if thinking is None else dict.fromkeys(THINKING, thinking)
        written: list[str] = []
        blocks: list[Span] = []
        size = 0
        self.environment.begin(messages)
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
        except Endless as error:
            raise UserError(f"{self.name}: the chat template {error}: mend it") from error
        except Exception as error:  # a template may do anything that an expression can
            raise Unusable(f"{REFUSED}: {first_line(error)[:80]}") from error
        return "".join(written), blocks


def _plain(message: Message, parts: bool) -> dict[str, Any]:
    """A message as transformers and vLLM give it to a template, with all names of its reasoning."""
    content = [{"type": "text", "text": message.content}] if parts else message.content
    thought = message.beside.get("reasoning_content")
    others = {} if thought is None else {"thinking": thought, "reasoning": thought}
    return others | {"role": message.role, "content": content} | dict(message.beside)
