"""The README of an export: its target, how to serve it, and how its prompts were rendered."""

import json

from specdec.drafters.base import Drafter
from specdec.engines.known_engines import ENGINES
from specdec.formats.layout import OVERRIDES
from specdec.targets.parts import TargetParts
from specdec.targets.prompt_rendering import CHAT_TEMPLATE

README = "README.md"
DRAFT, TARGET = "THIS_FOLDER", "TARGET"


def export_readme(drafter: Drafter, layout: str, target: TargetParts, overrides: bool) -> str:
    """The text of the README. `overrides`: the export has keys for the target's config."""
    name, rendering = drafter.config.name, target.rendering
    revision = f", revision {target.revision}" if target.revision else ""
    blocks = [
        f"# A draft for {target.name}",
        f"Method `{name}`, layout `{layout}`, written by Draftsmith. It drafts up to "
        f"{drafter.depth} tokens for `{target.name}`{revision} and for no other weights.",
    ]
    template = f"{DRAFT}/{CHAT_TEMPLATE}" if rendering.chat_template is not None else None
    for engine in ENGINES.values():
        if engine.layouts.get(name) != layout:
            continue
        options = engine.chat_options(rendering.arguments, template)
        keys = f"{DRAFT}/{OVERRIDES}" if overrides else None
        lines = engine.shown_commands(name, DRAFT, TARGET, drafter.depth, keys, options)
        if lines:
            blocks += [f"## Serve with {engine.title}", "\n".join(["```", *lines, "```"])]
    blocks += ["## Prompts", _prompts(target)]
    if rendering.arguments:
        asked = json.dumps({"chat_template_kwargs": rendering.arguments})
        blocks.append(
            "A server without an option for them takes the arguments with each request to "
            f"`/v1/chat/completions`:\n\n```\n{asked}\n```"
        )
    return "\n\n".join(blocks) + "\n"


def _prompts(target: TargetParts) -> str:
    rendering = target.rendering
    if rendering.is_default:
        return (
            "The draft was trained on prompts as the target's own chat template renders them, "
            "without further arguments. Serve it in the same way."
        )
    said = []
    if rendering.arguments:
        names = ", ".join(f"`{k}={json.dumps(x)}`" for k, x in sorted(rendering.arguments.items()))
        said.append(f"the chat template's arguments {names}")
    if rendering.chat_template is not None:
        said.append(f"the chat template in `{CHAT_TEMPLATE}`, in place of the target's own")
    return (
        f"The draft was trained on prompts rendered with {' and '.join(said)}. Serve it in the "
        "same way: other prompts lower the acceptance rate."
    )
