"""What renders a target's prompts beyond its own tokenizer files: arguments for the chat template,
and a chat template in place of the tokenizer's. A draft keeps it on its card, and a server must be
given the same."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT_TEMPLATE = "chat_template.jinja"  # the file of an own template, in a run and in an export


@dataclass(frozen=True)
class PromptRendering:
    """`arguments` are what a server passes to the chat template by default, by name, as in
    `chat_template_kwargs`. `chat_template` is the text of a template that replaces the tokenizer's;
    None: the tokenizer's own."""

    arguments: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @property
    def is_default(self) -> bool:
        """Whether a server that is given nothing renders the same prompts."""
        return not self.arguments and self.chat_template is None

    def __str__(self) -> str:
        """In words, for the opening line of a program and for a report; empty if it is the
        default."""
        words = ["an own chat template (data.chat_template)"] * (self.chat_template is not None)
        if self.arguments:
            words.append(f"the template arguments {arguments_in_words(self.arguments)}")
        return " and ".join(words)


DEFAULT_RENDERING = PromptRendering()


def arguments_in_words(arguments: Mapping[str, Any]) -> str:
    """Arguments as NAME=VALUE, with values as in JSON but for plain texts."""
    values = (
        (name, x if isinstance(x, str) else json.dumps(x, ensure_ascii=False))
        for name, x in sorted(arguments.items())
    )
    return ", ".join(f"{name}={value}" for name, value in values)
