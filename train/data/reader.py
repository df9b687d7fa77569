"""Reads the conversations of a configuration, in order, and turns each into documents to train on
or prompts to answer: one by one, or many by several processes; from one source, or from several by
their weights."""

import math
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from specdec.errors import UserError
from train.data.conversations import (
    TEXTS,
    Conversation,
    DataConfig,
    Journal,
    Message,
    Noted,
    Tally,
    Tokens,
    Unusable,
    texts_that_tell_apart,
)
from train.data.records import conversation_of_record
from train.data.rendering import REFUSED, special_tokens
from train.data.sequences import (
    Document,
    Prompt,
    document_of,
    reason_prompt_too_long,
    require_short,
)
from train.data.sources import files_of, records
from train.data.template import DISAGREE, OPENED, Chat, require_no_control

T = TypeVar("T")
ReaderTask = tuple[str, Conversation]  # the name of a `Reader`'s method, and what it is to read
SharedWork = Callable[[Sequence[ReaderTask]], list[Any]]  # has the tasks done, as `ReaderWork`
AT_ONCE = 1024  # conversations that several processes read together
PATIENCE = 200  # if this many disagree before any is usable, the template is at fault
ACCEPTED = (
    'ShareGPT {"conversations": [{"from": "human", "value": "…"}, …]} or '
    '{"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}, '
    "as a JSON array or one per line; "
    "data=pairs and data=text read other data"
)


def read_conversations(
    cfg: DataConfig,
    tally: Tally,
    use: Callable[[Conversation], T],
    share: SharedWork | None = None,
) -> Iterator[tuple[Conversation, T]]:
    """The conversations of `cfg` in order, each with a unique id, and the result of `use` for it, a
    method of a `Reader` if several processes `share` the work. Sharing changes only the time:
    conversations are read ahead, but no more than may be needed, and are counted in turn. Unusable
    ones are counted and skipped. Raises UserError if there is no conversation, and as
    `require_spans` does if the first ones have no certain mask."""
    usable, wrong, seen = 0, list[str](), Counter[str]()
    weights = [weight for _, weight in cfg.parts]

    def room(weight: float | None) -> int:
        """The number of conversations of a source with this weight to read at once."""
        if share is None or (weight is not None and cfg.records is not None):
            return 1  # with mixed sources, usable records decide what is read
        left = AT_ONCE if cfg.limit is None else min(AT_ONCE, cfg.limit - usable)
        return math.ceil(left if weight is None else left * weight / sum(filter(None, weights)))

    def source(one: DataConfig, weight: float | None) -> ReadAhead[T]:
        return ReadAhead(
            lambda journal: shuffled(_normalised(one, journal, wrong), one.shuffle, one.seed),
            tally,
            lambda conversations: read_together(use, conversations, share),
            lambda: room(weight),
        )

    mixture = Mixture([source(*part) for part in cfg.parts], weights)
    for n, (conversation, item) in mixture:
        seen[conversation.id] += 1
        if (number := seen[conversation.id]) > 1:
            conversation, item = _renamed(conversation, item, number)
        if isinstance(item, Unusable):
            tally.count(tally.dropped, str(item), conversation.place)
            tally.too_long += [item.tokens] * (item.tokens > 0)
            if not usable:
                require_spans(tally, PATIENCE)
            continue
        usable += 1
        mixture.taken[n] += 1
        for one in item if isinstance(item, list) else [item]:
            for note in getattr(one, "notes", ()):
                tally.count(tally.changed, note)
        yield conversation, item
        if usable == cfg.limit:
            tally.count(tally.unread, f"the rest, after data.limit={cfg.limit}")
            return
    if mixture.ended is not None:
        ended = cfg.parts[mixture.ended][0].path
        tally.count(tally.unread, f"the rest of the other sources, after the end of {ended}")
    if not seen:
        why = (tally.reasons() or "it is empty") + "".join(wrong[:1])
        what, accepted = "conversation", ACCEPTED
        if cfg.format == "pairs":
            names = " and ".join(cfg.pair)
            what, accepted = "pair", f"{names}, as keys of JSON records or columns of a table"
        elif cfg.format == "tokens":
            what, accepted = "row of token ids", '{"input_ids": […], "labels": […]}, one per line'
        elif cfg.format in TEXTS:
            what, accepted = "text", 'plain text in .txt files, or JSON records {"text": "…"}'
        raise UserError(f"{cfg.name}: no {what} in it ({why}); accepted: {accepted}")


def _renamed(conversation: Conversation, item: T, number: int) -> tuple[Conversation, T]:
    """The conversation with a unique id, given that this is the `number`-th use of its id, and its
    item."""
    before, after = conversation.id, f"{conversation.id}#{number}"
    renamed = replace(conversation, id=after)
    if item is conversation:
        return renamed, renamed  # type: ignore[return-value]
    for one in item if isinstance(item, list) else [item]:
        if isinstance(one, Document | Prompt):
            one.id = after + one.id.removeprefix(before)
        if isinstance(one, Document) and one.chat:
            one.chat = after
    return renamed, item


def _normalised(cfg: DataConfig, tally: Tally, wrong: list[str]) -> Iterator[Conversation]:
    """The conversations of one source. Unusable records are counted; if the first record is one,
    its description is added to `wrong`."""
    last = None
    for name, record in records(cfg, tally):
        if tally.read == cfg.records:
            tally.count(tally.unread, f"the rest, after data.records={cfg.records}")
            return
        tally.read += 1
        try:
            conversation = replace(conversation_of_record(record, name, cfg, tally), place=name)
        except Unusable as reason:
            tally.count(tally.dropped, str(reason), name)
            if last is None and not wrong:
                keys = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else ""
                wrong.append(f"; the first record: {(keys or repr(record))[:100]}")
            if last is not None and (skipped := _skipped_piece(last, record)):
                last = skipped
            continue
        if last is not None and _goes_on(last, conversation):
            conversation = replace(
                conversation, opening=last.opening, distinct=texts_that_tell_apart(last)
            )
        last = conversation
        yield conversation


def _goes_on(last: Conversation, following: Conversation) -> bool:
    """Whether a record continues the chat of the one before. ShareGPT splits a long chat into
    pieces xyz_0, xyz_11, …: the number counts turns, and a piece that begins with a response
    repeats the last response of the piece before. After a skipped piece, whose turns are not known
    (`_skipped_piece`), the next higher number continues the chat."""
    piece, next_piece = _piece(last.id), _piece(following.id)
    if piece is None or next_piece is None or next_piece[0] != piece[0]:
        return False
    if not last.roles:
        return next_piece[1] > piece[1]
    turns = len(last.roles) - (following.roles[0] == "assistant")
    return last.roles[-1] == "assistant" and next_piece[1] == piece[1] + turns


def _piece(id: str) -> tuple[str, int] | None:
    """The name of a chat and the number of one of its pieces, parsed from an id."""
    name = re.fullmatch(r"(.+)_([0-9]{1,9})", id, re.DOTALL)
    return None if name is None else (name[1], int(name[2]))


def _skipped_piece(last: Conversation, record: Any) -> Conversation | None:
    """A placeholder for a skipped record that continues the chat of the one before: that
    conversation, with the id of the record and without roles. None for any other record."""
    id = record.get("id") if isinstance(record, dict) else None
    if not isinstance(id, str):
        return None
    skipped = replace(last, id=id, roles=(), distinct=texts_that_tell_apart(last))
    begins = (replace(skipped, roles=(role,)) for role in ("user", "assistant"))
    return skipped if any(_goes_on(last, piece) for piece in begins) else None


def require_readable(cfg: DataConfig) -> None:
    """Raise UserError if a local source is missing or holds no conversation. Reads up to the first
    conversation of each source; does not check hub data sets."""
    for one, _ in cfg.parts:
        if files_of(one) is not None:
            next(read_conversations(one, Tally(), lambda conversation: conversation))


def require_spans(tally: Tally, patience: int) -> None:
    """Raise UserError if `patience` conversations have no certain mask, or are rejected by the
    template. It is called while none is usable: the cause is then the template, not the
    conversations."""
    refused = [reason for reason in tally.dropped if reason.startswith(REFUSED)]
    if sum(tally.dropped[reason] for reason in refused) >= patience:
        raise UserError(f"no usable conversation: {tally.reasons()}")
    if (count := tally.dropped[OPENED]) >= patience:
        raise UserError(
            f"{count} conversations have responses without reasoning, but the target's prompt "
            "opens a thought, and no other is usable: give data.thinking=data to ask for none "
            "where a response has none, if the template can, or data.responses=target for the "
            "target's own"
        )
    if (count := tally.dropped[DISAGREE]) >= patience:
        raise UserError(
            f"chat template without assistant spans: in {count} conversations the assistant's "
            "tokens cannot be identified, and no other is usable: mark them in the target's chat "
            "template with {% generation %} … {% endgeneration %}"
        )


# What a run makes of a conversation


class Reader:
    """Turns conversations into token ids: by the tokenizer's chat template or, for plain texts, by
    the tokenizer alone. Rows of token ids need neither. Raises UserError as `Chat` does; Unusable
    for conversations to skip."""

    def __init__(self, cfg: DataConfig, tokenizer: Any) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        self.by_text: Chat | PlainText | None = None
        if cfg.format in TEXTS:
            self.by_text = PlainText(tokenizer)
        elif cfg.format != "tokens":
            self.by_text = Chat(tokenizer, cfg.clock, cfg.thinking, cfg.template_args)

    def documents(self, conversation: Conversation) -> list[Document]:
        """A conversation up to its last response: one document, or several if the chat template
        renders earlier responses differently as a chat continues."""
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
        """The longest prefix of a conversation that the target may continue: within
        `data.max_prompt` or, with `whole`, of any length."""
        most = None if whole else self.cfg.longest_prompt
        if self.by_text is not None and conversation.tokens is None:
            prompt = self.by_text.prompt(conversation, most)
            prompt.category, prompt.language = conversation.category, conversation.language
            return prompt
        tokens = _given(conversation)
        every = _prompt_ends(tokens)
        ends = [end for end in every if most is None or end <= most]
        if not ends:
            raise Unusable(reason_prompt_too_long(most))
        ids = np.array(tokens.ids[: ends[-1]], np.int32)
        words = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Prompt(conversation.id, ids, words, shortened=len(ends) < len(every))


class PlainText:
    """Reads plain texts, without a template. If the tokenizer begins every text with a special
    token, as Llama's does, these texts begin with it, too."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self.lead: list[int] = [bos] if tokenizer("").input_ids[:1] == [bos] else []

    def documents(self, conversation: Conversation, cfg: DataConfig) -> list[Document]:
        """A whole text, with loss on every token but the first."""
        ids = self._ids(conversation.messages)
        require_short(ids, cfg)
        return [document_of(conversation.id, ids, np.arange(len(ids)) > 0, cfg)]

    def prompt(self, conversation: Conversation, most: int | None = None) -> Prompt:
        """The beginning of a text. Unusable if it has more than `most` tokens (None: any
        number)."""
        begins = conversation.messages[:1]
        if begins[0].role != "user" or len(conversation.messages) > 2:
            raise Unusable("several turns, and the target has no chat template")
        ids = self._ids(begins)
        if most is not None and len(ids) > most:
            raise Unusable(reason_prompt_too_long(most))
        return Prompt(conversation.id, np.array(ids, np.int32), begins[0].content)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(m.content for m in messages)
        require_no_control([text], special_tokens(self.tokenizer))
        ids: list[int] = self.lead + self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _given(conversation: Conversation) -> Tokens:
    assert conversation.tokens is not None
    return conversation.tokens


def _prompt_ends(tokens: Tokens) -> list[int]:
    """The positions where responses begin, or the end of a prompt alone."""
    if True not in tokens.mask:
        return [len(tokens.ids)]
    before = (False, *tokens.mask)
    return [i for i, said in enumerate(tokens.mask) if said and not before[i] and i > 0]


def usable_or_error(use: Callable[[Conversation], T], conversation: Conversation) -> T | Unusable:
    """The result of `use` for a conversation, or the reason why it is unusable."""
    try:
        return use(conversation)
    except Unusable as reason:
        return reason


class ReaderWork:
    """Does the tasks that the first process assigns to a process, with its own reader."""

    def __init__(self, cfg: DataConfig, tokenizer: Any) -> None:
        self._made_from = cfg, tokenizer

    @cached_property
    def _reader(self) -> Reader:
        return Reader(*self._made_from)

    def __call__(self, task: ReaderTask) -> Any:
        name, conversation = task
        return usable_or_error(getattr(self._reader, name), conversation)


def read_together(
    use: Callable[[Conversation], T],
    conversations: Sequence[Conversation],
    share: SharedWork | None,
) -> list[T | Unusable]:
    """The result of `use` for each conversation, or the reason why it is unusable. With several
    processes that `share` the conversations, `use` must be a method of a `Reader`."""
    if share is None:
        return [usable_or_error(use, conversation) for conversation in conversations]
    return share([(use.__name__, conversation) for conversation in conversations])


# Several sources


class ReadAhead(Generic[T]):
    """The conversations of a source, each with the result of `use`, or the reason why it is
    unusable. `room` returns the number of conversations to read at once. A conversation is counted
    in `tally`, and its error raised, only when the caller reaches it, so the caller does not notice
    the reading ahead. `source` makes the stream, which counts in the tally passed to it."""

    def __init__(
        self,
        source: Callable[[Tally], Iterator[Conversation]],
        tally: Tally,
        use: Callable[[Sequence[Conversation]], list[T | Unusable]],
        room: Callable[[], int],
    ) -> None:
        self._journal = Journal()
        self._stream, self._tally = source(self._journal), tally
        self._use, self._room = use, room
        self._held: deque[tuple[Conversation, T | Unusable, Noted]] = deque()
        self._end: tuple[Exception, Noted] | None = None

    def __iter__(self) -> Iterator[tuple[Conversation, T | Unusable]]:
        return self

    def __next__(self) -> tuple[Conversation, T | Unusable]:
        if not self._held and self._end is None:
            self._fill()
        if self._held:
            conversation, item, noted = self._held.popleft()
            noted.add_to(self._tally)
            return conversation, item
        assert self._end is not None
        error, noted = self._end
        self._end = error, Noted(0, ())
        noted.add_to(self._tally)
        raise error

    def _fill(self) -> None:
        self._journal.go_on_from(self._tally.read)
        read: list[tuple[Conversation, Noted]] = []
        for _ in range(self._room()):
            try:
                conversation = next(self._stream)
            except Exception as error:  # the end of the stream, too
                self._end = error, self._journal.noted()
                break
            read.append((conversation, self._journal.noted()))
        items = self._use([conversation for conversation, _ in read]) if read else []
        self._held += [(c, item, noted) for (c, noted), item in zip(read, items, strict=True)]


class Mixture(Generic[T]):
    """Items of several sources, each with the number of its source. Without weights, one source
    follows another. With weights, the next item is from the source that is furthest behind its
    share of the items `taken`, until a source has no more (`ended`). The caller counts usable items
    in `taken`, so the shares are those of usable items."""

    def __init__(self, sources: Sequence[Iterator[T]], weights: Sequence[float | None]) -> None:
        self.sources, self.weights = sources, weights
        self.taken = [0] * len(sources)
        self.ended: int | None = None

    def __iter__(self) -> Iterator[tuple[int, T]]:
        if None in self.weights:
            for n, source in enumerate(self.sources):
                yield from ((n, item) for item in source)
            return
        while True:
            n = min(range(len(self.sources)), key=self._share)
            if (item := next(self.sources[n], None)) is None:
                self.ended = n
                return
            yield n, item

    def _share(self, n: int) -> float:
        """The number of items taken from a source, divided by its weight."""
        return self.taken[n] / (self.weights[n] or 1.0)


def shuffled(items: Iterator[T], window: int, seed: int) -> Iterator[T]:
    """The items, each drawn at random from the next `window` of them; in order if `window` is 0."""
    draw, held = random.Random(seed), list(islice(items, window))
    for item in items:
        if not held:
            yield item
            continue
        at = draw.randrange(len(held))
        yield held[at]
        held[at] = item
    draw.shuffle(held)
    yield from held
