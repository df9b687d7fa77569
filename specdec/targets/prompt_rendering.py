"""Settings for rendering a target's prompts: arguments for the chat template, and a template that
replaces the tokenizer's. A draft records them, and a server must use the same."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT_TEMPLATE = "chat_template.jinja"  # the file of an own template, in a run and in an export


@dataclass(frozen=True)
class PromptRendering:
    """`arguments` are a server's default arguments for the chat template, by name, as in
    `chat_template_kwargs`. `chat_template` is the text of a template that replaces the tokenizer's;
    None: the tokenizer's own."""

    arguments: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @property
    def is_default(self) -> bool:
        """Whether a server without any of these settings renders the same prompts."""
        return not self.arguments and self.chat_template is None

    def __str__(self) -> str:
        """A description for a program's first line and for a report; empty if it is the default."""
        words = ["an own chat template (data.chat_template)"] * (self.chat_template is not None)
        if self.arguments:
            words.append(f"the template arguments {arguments_in_words(self.arguments)}")
        return " and ".join(words)


DEFAULT_RENDERING = PromptRendering()


def arguments_in_words(arguments: Mapping[str, Any]) -> str:
    """Arguments as NAME=VALUE. Values are written as JSON, except plain strings."""
    values = (
        (name, x if isinstance(x, str) else json.dumps(x, ensure_ascii=False))
        for name, x in sorted(arguments.items())
    )
    return ", ".join(f"{name}={value}" for name, value in values)
