"""The prompts of the reference that an export carries (specdec/measure/reference.py), and what its
target's tokenizer and chat template should make of a given text."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from specdec.drafters.base import Drafter
from specdec.errors import UserError
from specdec.formats import draft_export
from specdec.formats.draft_import import keeps_layout
from specdec.formats.layout import AS_TRAINED, FileChoices
from specdec.measure.reference import (
    FILE,
    NEW_TOKENS,
    PROBE,
    PROMPTS,
    ReferenceRendering,
    ReferenceResponse,
    expected_responses,
    reference_of,
    shortened,
)
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.data.conversations import Conversation, Message, Unusable
from train.data.run_data import whole_prompts
from train.data.sequences import Prompt
from train.data.template import Chat
from train.folder import config_of, known_data_of_run, noted_prompts, require_run_of

OF_RUN = "the first held-out test prompts of the draft's run"
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How do I sort a list of dictionaries by a key in Python?",
    "What is the difference between a virus and a bacterium?",
    "Give me three ideas for a quick dinner without meat.",
    "Translate into French: The meeting has been moved to Thursday.",
    "Explain compound interest to a child.",
    "What were the main causes of the First World War?",
    "Summarise the rules of chess in one paragraph.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Write an email that asks a landlord to repair the heating.",
    "List five common mistakes in job interviews.",
)
OF_OURS = "a dozen questions that come with Draftsmith"
FEWEST = 4  # prompts below which a reference is not worth its name
DATES = ("2000-01-01", "2001-02-03T04:05")  # a template that writes the date tells them apart


def prompts_for_reference(draft: Path, target: TargetParts) -> tuple[list[list[int]], str]:
    """The ids of at most `PROMPTS` prompts for the reference of a draft in its folder, and what
    they are: held-out test prompts that its run noted or, without any, `QUESTIONS`."""
    run = draft.parent
    noted = noted_prompts(run, 0) if is_run_of(draft, run) else None
    if noted is not None and noted[0]:
        return ids_of_prompts(noted[0]), OF_RUN
    asked = [_asking(f"question {n}", words) for n, words in enumerate(QUESTIONS, 1)]
    data = known_data_of_run(run, draft)
    return ids_of_prompts(whole_prompts(asked, target.tokenizer, None, data)), OF_OURS


def is_run_of(draft: Path, folder: Path) -> bool:
    """Whether a folder holds the run that trained a draft."""
    try:
        described = config_of(folder)
        require_run_of(draft, described)
    except UserError:
        return False
    return bool(described)


def ids_of_prompts(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The ids of the first `PROMPTS` prompts."""
    return [prompt.ids.tolist() for prompt in prompts[:PROMPTS]]


def _asking(name: str, words: str) -> Conversation:
    return Conversation(name, (Message("user", words),), words, ("user",))


def rendering_of(target: TargetParts) -> ReferenceRendering:
    """What a server should make of `PROBE`, as a user's message and as plain text."""
    rendering, chat, text, reason = target.rendering, None, None, ""
    if target.tokenizer is None:
        reason = "the target has no tokenizer"
    else:
        text = target.tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        chat, reason = chat_ids(target.tokenizer, rendering.arguments)
    own = rendering.chat_template is not None
    return ReferenceRendering(dict(rendering.arguments), own, PROBE, chat, text, reason)


def chat_ids(
    tokenizer: Any, arguments: Mapping[str, Any], words: str = PROBE
) -> tuple[list[int] | None, str]:
    """The ids of a chat that holds these words of a user, with the generation prompt; None, and the
    reason, if there is no template or if what it writes depends on the date."""
    both = []
    for date in DATES:
        try:
            writer = Chat(tokenizer, clock=datetime.fromisoformat(date), arguments=arguments)
            both.append(writer.prompt(_asking("probe", words), None).ids.tolist())
        except (UserError, Unusable) as error:
            return None, str(error)
    if both[0] != both[1]:
        return None, "the chat template writes the date"
    return both[0], ""


def add_reference(
    export: Path,
    drafter: Drafter,
    target: Target,
    layout: str,
    prompts: Sequence[Sequence[int]],
    origin: str,
    max_new_tokens: int = NEW_TOKENS,
    others: Mapping[str, list[ReferenceResponse]] | None = None,
    choices: FileChoices = AS_TRAINED,
    left: Callable[[], float] | None = None,
) -> str:
    """Add the reference of a draft on these prompts to its export: a file in the folder or, since
    all of a GGUF file is written at once, the same file again with one more key. The reference of
    such a file, and that of an imported draft, is of the weights as they were rounded. With `left`,
    the remaining seconds, the reference has as many prompts as fit by the time of the first, and
    there is none below `FEWEST`. Returns a line that describes it."""
    if not prompts:
        return "without a reference: the run has no test prompts"
    limit, in_file = response_limit(target, max_new_tokens), export.is_file()
    imported = keeps_layout(drafter, layout)
    if in_file or imported:
        written = draft_export.read_export(export, drafter, target, layout, imported)
        written.origin, drafter = drafter.origin, written
    asked = [shortened(prompt, target, limit) for prompt in prompts]
    if left is not None:
        asked = asked[: _prompts_in_time(drafter, target, asked[0], limit, left)]
        if len(asked) < min(FEWEST, len(prompts)):
            return "without a reference: no time is left; scripts/export adds one"
    reference = reference_of(
        drafter,
        target,
        asked,
        layout=layout,
        origin=origin,
        rendering=rendering_of(target),
        max_new_tokens=limit,
        others=others,
    )
    if in_file:
        choices = replace(choices, reference=reference.json)
        draft_export.write_export(export, drafter, target, layout, choices=choices)
    else:
        draft_export.add_to_export(export, {FILE: reference.json})
    return f"with a reference ({len(asked)} prompts: {origin})"


def _prompts_in_time(
    drafter: Drafter, target: Target, prompt: list[int], limit: int, left: Callable[[], float]
) -> int:
    """How many prompts a reference has if each takes the time of this one; responses that are
    decoded together take no longer."""
    if left() <= 0:
        return 0
    started = time.monotonic()
    expected_responses(drafter, target, [prompt], limit)
    return int(max(0.0, left()) / (time.monotonic() - started))


def responses_in_dtype(
    drafter: Drafter, target: Target, prompts: Sequence[Sequence[int]]
) -> list[ReferenceResponse]:
    """The responses of a reference in the dtype of a target, for `others` of `add_reference`."""
    limit = response_limit(target, NEW_TOKENS)
    cut = [shortened(prompt, target, limit) for prompt in prompts]
    return expected_responses(drafter, target, cut, limit)


def response_limit(target: TargetParts, max_new_tokens: int) -> int:
    """The most tokens of a response in a reference: at most half of the target's positions."""
    return min(max_new_tokens, NEW_TOKENS, max(1, target.room(1) // 2))
