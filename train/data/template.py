"""One conversation → token ids by the target's chat template, and a mask over what the assistant
says; or the prompt that the target answers itself.

Whatever cannot be told for certain is left out: a mask is never a guess.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.errors import UserError
from train.data.conversations import Conversation, DataConfig, Message, Tally

DISAGREE = "template and mask disagree"
PATIENCE = 200  # conversations that all disagree, after which the template is at fault
CONTROL = "a control token in its text"


@dataclass(eq=False)
class Document:
    """Token ids; `mask` is true where the assistant speaks, its end-of-turn token included."""

    id: str
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: bool = False


@dataclass(eq=False)
class Prompt:
    """Token ids that end with the generation prompt, for the target to answer."""

    id: str
    ids: NDArray[np.int32]
    words: str = ""  # what the user said last


def encode(conversation: Conversation, tokenizer: Any, cfg: DataConfig) -> Document | str:
    """One document, or the reason why there is none. Turns after the last answer are left out.

    The ids are those of the chat template. What the assistant says comes from the template's
    `{% generation %}` blocks or, without them, from comparing what it renders up to a turn and
    past it. Where a span cannot be told for certain, or a token lies across its edge, there is
    no document: a mask is never a guess. Raises UserError without a chat template.
    """
    messages = list(conversation.messages)
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages:
        return "no assistant turn"
    template = _template(tokenizer)
    if _has_control_token(messages, tokenizer, template):
        return CONTROL
    try:
        text, blocks = _render(messages, tokenizer, template)
    except (TemplateError, ValueError) as error:
        return _refused(error)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, cut = np.array(encoding["input_ids"], np.int32), cfg.max_length
    if len(ids) > cut and cfg.too_long == "drop":
        return f"longer than max_length={cut}"
    spans = _spans(messages, text, blocks, tokenizer)
    mask = None if spans is None else _mask(encoding["offset_mapping"], spans)
    if mask is None:
        return DISAGREE
    if mask[:cut].sum() < cfg.min_answer:
        return f"answers shorter than min_answer={cfg.min_answer}"
    return Document(conversation.id, ids[:cut], mask[:cut], len(ids) > cut)


def prompt_of(conversation: Conversation, tokenizer: Any, most: int) -> Prompt | str:
    """The longest beginning of a conversation that ends with the user and has, with the generation
    prompt, at most `most` tokens; or the reason why there is none."""
    template, best = _template(tokenizer), None
    if _has_control_token(conversation.messages, tokenizer, template):
        return CONTROL
    for i, message in enumerate(conversation.messages, 1):
        if message.role != "user":
            continue
        made = _prompt(conversation.messages[:i], conversation.id, tokenizer)
        if isinstance(made, str):
            return made
        if len(made.ids) > most:
            break
        best = made
    return best or f"no prompt of at most max_prompt={most} tokens"


def whole_prompts(
    conversations: Sequence[Conversation], tokenizer: Any, room: int | None, path: Path
) -> list[Prompt]:
    """The prompts of a file, each whole up to its last user turn. Raises UserError that names the
    one which cannot be asked, or which has more than `room` tokens (None: any number)."""
    template, found = _template(tokenizer), []
    for conversation in conversations:
        messages = conversation.messages
        last = max(i for i, m in enumerate(messages, 1) if m.role == "user")
        made = _prompt(messages[:last], conversation.id, tokenizer)
        if _has_control_token(messages, tokenizer, template):
            made = CONTROL
        where = f"{path}, prompt {conversation.id.rpartition(':')[2]}"
        if isinstance(made, str):
            raise UserError(f"{where}: {made}")
        if room is not None and len(made.ids) > room:
            raise UserError(
                f"{where}: it has {len(made.ids):,} tokens, and the target has room for "
                f"{max(0, room):,} beside the answer: shorten it, or ask for shorter answers"
            )
        found.append(made)
    return found


def require_spans(tally: Tally, patience: int) -> None:
    """Raise UserError once the mask of so many conversations could not be told: the template is
    then at fault, not they."""
    if (count := tally.dropped[DISAGREE]) >= patience:
        raise UserError(
            f"chat template without assistant spans: in all of {count} conversations it cannot be "
            "told which tokens the assistant says; mark them in the target's chat template with "
            "{% generation %} … {% endgeneration %}"
        )


def _prompt(messages: Sequence[Message], id: str, tokenizer: Any) -> Prompt | str:
    try:
        text = _text(messages, tokenizer, prompt=True)
    except (TemplateError, ValueError) as error:
        return _refused(error)
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    return Prompt(id, ids, messages[-1].content)


def _template(tokenizer: Any) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template: use an "
            "instruction-tuned target, or save one to its tokenizer_config.json as chat_template"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer tells no token's place in the text: "
            "use a target with a tokenizer.json"
        )
    return template


def _has_control_token(messages: Iterable[Message], tokenizer: Any, template: str) -> bool:
    """Whether a text holds a token that the template speaks with: it would forge a turn."""
    special = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    control = {t for t in special if t in template} | set(tokenizer.all_special_tokens)
    return any(token in m.content for m in messages for token in control)


def _refused(error: Exception) -> str:
    return f"refused by the chat template: {(str(error).splitlines() or ['?'])[0][:80]}"


def _text(messages: Sequence[Message], tokenizer: Any, *, prompt: bool = False) -> str:
    chat = [{"role": m.role, "content": m.content} for m in messages]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt))


def _render(
    messages: Sequence[Message], tokenizer: Any, template: str
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text, and the places of its `{% generation %}` blocks where the template has those."""
    if not re.search(r"{%-?\s*generation\s*-?%}", template):
        return _text(messages, tokenizer), None
    chat = [{"role": m.role, "content": m.content} for m in messages]
    rendered: Any = render_jinja_template(
        [chat],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    texts, blocks = rendered
    return texts[0], blocks[0]


def _spans(
    messages: Sequence[Message],
    text: str,
    blocks: list[tuple[int, int]] | None,
    tokenizer: Any,
) -> list[tuple[int, int]] | None:
    """Where in `text` each answer and its end-of-turn token are; None if it cannot be told."""
    answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
    spans = []
    if blocks is not None:
        if len(blocks) != len(answers):
            return None
        for i, (start, end) in zip(answers, blocks, strict=True):
            if messages[i].content not in text[start:end]:
                return None
            spans.append((start, start + len(text[start:end].rstrip())))
        return spans
    for i in answers:
        try:
            before = _text(messages[:i], tokenizer, prompt=True)
            after = _text(messages[: i + 1], tokenizer)
        except (TemplateError, ValueError):
            return None
        if not text.startswith(before) or not after.startswith(before):
            return None
        lead, content, tail = after[len(before) :].rpartition(messages[i].content)
        # A template may write something before its last answer only, as "<think></think>".
        for said in (lead + content + tail.rstrip(), content + tail.rstrip()):
            if content and text.startswith(said, len(before)):
                spans.append((len(before), len(before) + len(said)))
                break
        else:
            return None
    return spans if all(a[1] <= b[0] for a, b in pairwise(spans)) else None


def _mask(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> NDArray[np.bool_] | None:
    """Which tokens are in a span; None if one lies across an edge, or might: some tokenizers
    leave a token's leading space out of its place."""
    starts, mask = [start for start, _ in offsets], np.zeros(len(offsets), np.bool_)
    for span in spans:
        first, last = (bisect_left(starts, edge) for edge in span)
        for i, edge in ((first, span[0]), (last, span[1])):
            if i > 0 and offsets[i - 1][1] != edge:
                return None
        mask[first:last] = True
    return mask
