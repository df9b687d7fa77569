"""All turns of a conversation as prompts, each after the target's own responses to those before, as
MT-Bench and Spec-Bench ask them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from specdec.errors import UserError
from train.data.conversations import Conversation, DataConfig, Message, Unusable
from train.data.records import messages_of
from train.data.run_data import whole_prompts
from train.data.sequences import Prompt

TOO_LONG = "the target has no room for it"
Respond = Callable[[Sequence[Sequence[int]]], Sequence[str]]  # the target's response to each prompt


@dataclass
class AskedConversation:
    """A conversation while its turns are asked: what was said so far, and the turns to come."""

    conversation: Conversation
    said: list[Message]
    coming: list[list[Message]]  # each ends with a turn of the user; system turns come before it
    prompts: list[Prompt] = field(default_factory=list)


def prompts_of_all_turns(
    conversations: Sequence[Conversation],
    respond: Respond,
    tokenizer: Any,
    room: int | None,
    cfg: DataConfig | None = None,
    thinking: str | None = None,
) -> tuple[list[Prompt], Counter[str]]:
    """A prompt for each turn of the user, in the order of the conversations. `respond` gives the
    target's responses, which take the place of those that the conversations have; the other
    arguments are as in `whole_prompts`. The turns of a conversation with results of tools end
    there, since they belong to other calls. Also returns the reasons for skipped later turns,
    counted.
    Raises UserError as `whole_prompts` does for a first turn."""
    asked = [_begun(conversation) for conversation in conversations]
    skipped, going = Counter[str](), list(asked)
    firsts = whole_prompts(first_turns(conversations), tokenizer, room, cfg, thinking)
    for one, prompt in zip(asked, firsts, strict=True):
        one.prompts.append(prompt)
    while going := [one for one in going if one.coming]:
        responses = respond([one.prompts[-1].ids.tolist() for one in going])
        for one, response in zip(going, responses, strict=True):
            turn = one.coming.pop(0)
            try:
                one.said += [*messages_of({"role": "assistant", "content": response}, set())]
                if one.said[-1].blank:
                    raise Unusable("an empty response before it")
                one.said += turn
                conversation = replace(one.conversation, messages=tuple(one.said))
                (prompt,) = whole_prompts([conversation], tokenizer, None, cfg, thinking)
                if room is not None and len(prompt.ids) > room:
                    raise Unusable(TOO_LONG)
            except (Unusable, UserError) as reason:
                skipped[str(reason)] += 1 + len(one.coming)
                one.coming.clear()
            else:
                one.prompts.append(prompt)
    for number, one in enumerate(asked):
        for n, prompt in enumerate(one.prompts, 1):
            prompt.chat, prompt.turn = f"{number}: {one.conversation.id}", n
    return [prompt for one in asked for prompt in one.prompts], skipped


def first_turns(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The conversations up to their first turn of the user."""
    return [replace(c, messages=tuple(_begun(c).said), later=()) for c in conversations]


def _begun(conversation: Conversation) -> AskedConversation:
    """A conversation up to its first turn of the user, and its later ones up to a tool's result.
    One without a turn of the user, such as one of token ids, stays as it is."""
    parts, part = list[list[Message]](), list[Message]()
    for message in (*conversation.messages, *conversation.later):
        if message.role == "tool":
            break
        if message.role != "assistant":
            part.append(message)
        if message.role == "user":
            parts.append(part)
            part = []
    first, *later = parts or [[*conversation.messages]]
    return AskedConversation(conversation, first, later)


def spread_over_categories(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Conversations of all categories in turn, since suites have one category after another and the
    first prompts are timed, or measured alone."""
    of: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        of.setdefault(conversation.category, []).append(conversation)
    return [one for row in zip_longest(*of.values()) for one in row if one is not None]
