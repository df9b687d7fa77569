"""Conversations → what a run reads of them: documents to train on, and prompts to answer; one by
one, or many by several processes."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from train.data.conversations import TEXTS, Conversation, DataConfig, Tokens, Unusable
from train.data.template import (
    Chat,
    Document,
    Plain,
    Prompt,
    document_of,
    require_short,
    too_long_prompt,
)

T = TypeVar("T")
Task = tuple[str, Conversation]  # the name of a `Reader`'s method, and what it is to read
Share = Callable[[Sequence[Task]], list[Any]]  # has `Task`s done, as `Work` does them
AT_ONCE = 1024  # conversations that several processes read together


class Reader:
    """Turns conversations into token ids: by the tokenizer's chat template or, for plain texts, by
    the tokenizer alone. Rows that are token ids already need neither. Raises UserError as `Chat`
    does; Unusable for conversations that are to be left out."""

    def __init__(self, cfg: DataConfig, tokenizer: Any) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        self.by_text: Chat | Plain | None = None
        if cfg.format in TEXTS:
            self.by_text = Plain(tokenizer)
        elif cfg.format != "tokens":
            self.by_text = Chat(tokenizer, cfg.clock, cfg.thinking)

    def documents(self, conversation: Conversation) -> list[Document]:
        """A conversation up to its last answer: one document, or several where the chat template
        changes earlier answers as a chat goes on."""
        if self.by_text is not None and conversation.tokens is None:
            return self.by_text.documents(conversation, self.cfg)
        tokens = _given(conversation)
        if True not in tokens.mask:
            raise Unusable("no assistant turn")
        end = len(tokens.mask) - tokens.mask[::-1].index(True)
        require_short(tokens.ids[:end], self.cfg)
        mask = np.array(tokens.mask[:end], np.bool_)
        return [document_of(conversation.id, tokens.ids[:end], mask, self.cfg)]

    def prompt(self, conversation: Conversation, whole: bool = False) -> Prompt:
        """The longest beginning of a conversation that the target may be asked to go on from:
        within `data.max_prompt`, or of any length."""
        most = None if whole else self.cfg.max_prompt
        if self.by_text is not None and conversation.tokens is None:
            return self.by_text.prompt(conversation, most)
        tokens = _given(conversation)
        every = _prompt_ends(tokens)
        ends = [end for end in every if most is None or end <= most]
        if not ends:
            raise Unusable(too_long_prompt(most))
        ids = np.array(tokens.ids[: ends[-1]], np.int32)
        words = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Prompt(conversation.id, ids, words, shortened=len(ends) < len(every))


def tried(use: Callable[[Conversation], T], conversation: Conversation) -> T | Unusable:
    """What `use` makes of a conversation, or the reason why it is unusable."""
    try:
        return use(conversation)
    except Unusable as reason:
        return reason


class Work:
    """Does the tasks that a process is given by the first one, with a reader of its own."""

    def __init__(self, cfg: DataConfig, tokenizer: Any) -> None:
        self._made_from = cfg, tokenizer

    @cached_property
    def _reader(self) -> Reader:
        return Reader(*self._made_from)

    def __call__(self, task: Task) -> Any:
        name, conversation = task
        return tried(getattr(self._reader, name), conversation)


def used(
    use: Callable[[Conversation], T], conversations: Sequence[Conversation], share: Share | None
) -> list[T | Unusable]:
    """What `use`, a method of a `Reader` if there are several processes to `share` the
    conversations, makes of each of them, or the reason why it is unusable."""
    if share is None:
        return [tried(use, conversation) for conversation in conversations]
    return share([(use.__name__, conversation) for conversation in conversations])


def _given(conversation: Conversation) -> Tokens:
    assert conversation.tokens is not None
    return conversation.tokens


def _prompt_ends(tokens: Tokens) -> list[int]:
    """Where answers begin, or the end of a prompt alone."""
    if True not in tokens.mask:
        return [len(tokens.ids)]
    before = (False, *tokens.mask)
    return [i for i, said in enumerate(tokens.mask) if said and not before[i] and i > 0]
