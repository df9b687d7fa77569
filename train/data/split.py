"""Splits conversations into training and held-out ones, and turns both into what a run reads."""

import hashlib
import math
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, TypeVar

import torch

from specdec.errors import UserError
from train.data.conversations import TEXTS, Conversation, DataConfig, Tally, Unusable
from train.data.mixture import Ahead, Mixture, shuffled
from train.data.reader import AT_ONCE, Reader, Share, used
from train.data.records import normal
from train.data.sources import files_of, records
from train.data.template import PATIENCE, Document, Prompt, require_spans

SHARE = 0.05  # of the conversations of large data that are held out
ENOUGH = 120  # conversations to hold out of small data: to measure, to calibrate, to choose a shape
MOST = 0.2  # of the conversations of small data that are held out
NEAR = 70  # percent: the least Jaccard similarity (word 3-shingles) of nearly equal prompts
ACCEPTED = (
    'ShareGPT {"conversations": [{"from": "human", "value": "…"}, …]} or '
    '{"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}, '
    "as a JSON array or one per line; "
    "data=pairs and data=text read other data"
)
T = TypeVar("T")


@dataclass
class Split(Generic[T]):
    """The items of both sides, the held-out prompts for the decoder, and the fraction of all
    conversations that is held out."""

    train: list[T] = field(default_factory=list)
    held_out: list[T] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list, repr=False)
    tally: Tally = field(default_factory=Tally, repr=False)
    share: float = SHARE


def read(
    cfg: DataConfig,
    tally: Tally,
    use: Callable[[Conversation], T],
    share: Share | None = None,
) -> Iterator[tuple[Conversation, T]]:
    """The conversations of `cfg` in order, each with a unique id, and what `use` makes of it, a
    method of a `Reader` if several processes `share` the work. They change nothing but the time:
    conversations are read ahead, but no more than may be needed, and are counted in turn. Unusable
    ones are counted and left out. Raises UserError if there is no conversation, and as
    `require_spans` does if the first ones have no certain mask."""
    usable, wrong, seen = 0, list[str](), Counter[str]()
    weights = [weight for _, weight in cfg.parts]

    def room(weight: float | None) -> int:
        """How many conversations of a source with this weight to read at once."""
        if share is None or (weight is not None and cfg.records is not None):
            return 1  # of mixed sources, which records are read depends on what is usable
        left = AT_ONCE if cfg.limit is None else min(AT_ONCE, cfg.limit - usable)
        return math.ceil(left if weight is None else left * weight / sum(filter(None, weights)))

    def source(one: DataConfig, weight: float | None) -> Ahead[T]:
        return Ahead(
            lambda journal: shuffled(_normalised(one, journal, wrong), one.shuffle, one.seed),
            tally,
            lambda conversations: used(use, conversations, share),
            lambda: room(weight),
        )

    mixture = Mixture([source(*part) for part in cfg.parts], weights)
    for n, (conversation, item) in mixture:
        seen[conversation.id] += 1
        if (number := seen[conversation.id]) > 1:
            conversation, item = _renamed(conversation, item, number)
        if isinstance(item, Unusable):
            tally.count(tally.dropped, str(item))
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
    """The conversation whose id is the `number`-th of its kind, and what was made of it."""
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
            conversation = normal(record, name, cfg, tally)
        except Unusable as reason:
            tally.count(tally.dropped, str(reason))
            if last is None and not wrong:
                keys = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else ""
                wrong.append(f"; the first record: {(keys or repr(record))[:100]}")
            continue
        if last is not None and _goes_on(last, conversation):
            conversation = replace(conversation, opening=last.opening)
        last = conversation
        yield conversation


def require_readable(cfg: DataConfig) -> None:
    """Raise UserError if a local source is missing or holds no conversation. Reads up to the first
    conversation of each; does not check hub datasets."""
    for one, _ in cfg.parts:
        if files_of(one) is not None:
            next(read(one, Tally(), lambda conversation: conversation))


def _goes_on(last: Conversation, following: Conversation) -> bool:
    """Whether a record continues the chat of the one before. ShareGPT splits a long chat into
    pieces xyz_0, xyz_11, …: the number counts turns, and a piece that begins with an answer
    repeats the last answer of the piece before."""
    name = re.fullmatch(r"(.+)_([0-9]{1,9})", last.id, re.DOTALL)
    if name is None or last.roles[-1] != "assistant":
        return False
    turns = len(last.roles) - (following.roles[0] == "assistant")
    return following.id == f"{name[1]}_{int(name[2]) + turns}"


def load(
    cfg: DataConfig,
    use: Callable[[Conversation], T],
    ask: Callable[[Conversation], Prompt] | None = None,
    share: Share | None = None,
) -> Split[T]:
    """Read and split conversations. `use` converts each of them once; `ask` makes the prompts of
    the held-out ones. Both are methods of a `Reader` if several processes `share` the work. The
    side of a conversation depends only on its opening prompt
    (`is_held_out`), so it stays the same when data or a limit is added, unless the share that is
    held out is left to be chosen (`chosen_share`) and the data was small. Training conversations
    that nearly duplicate a held-out one are dropped. Raises UserError if the data is missing or
    holds no usable conversation."""
    split, train, opened = Split[T](), list[T](), list[str]()
    kept: list[tuple[Conversation | None, T]] = []  # with those that `ask` may need
    conversation: Conversation | None
    for conversation, item in read(cfg, split.tally, use, share):
        large = len(opened) * SHARE >= ENOUGH  # then no more than SHARE is held out
        most = cfg.held_out if cfg.held_out is not None else SHARE if large else 1.0
        asks = ask is not None and is_held_out(conversation.opening, most)
        kept.append((conversation if asks else None, item))
        opened.append(conversation.opening)
    split.share = chosen_share(opened) if cfg.held_out is None else cfg.held_out
    openings: dict[bool, list[str]] = {True: [], False: []}
    asked = list[Conversation]()
    for opening, (conversation, item) in zip(opened, kept, strict=True):
        held = is_held_out(opening, split.share)
        (split.held_out if held else train).append(item)
        openings[held].append(opening)
        if held and conversation is not None:
            asked.append(conversation)
    for start in range(0, len(asked) if ask is not None else 0, AT_ONCE):
        assert ask is not None
        for prompt in used(ask, asked[start : start + AT_ONCE], share):
            if isinstance(prompt, Unusable):
                what = f"held out, but not decoded: {prompt}"
                split.tally.count(split.tally.changed, what)
            else:
                split.prompts.append(prompt)
    if not train and not split.held_out:
        require_spans(split.tally, 1)
        raise UserError(f"{cfg.name}: no usable conversation: {split.tally.reasons()}")
    if near := near_duplicates(openings[False], openings[True]):
        split.tally.dropped["prompt nearly the same as a held-out one"] = len(near)
    train = [item for i, item in enumerate(train) if i not in near]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cfg.seed))
    split.train = [train[i] for i in order.tolist()]
    return split


def split_documents(cfg: DataConfig, tokenizer: Any, share: Share | None = None) -> Split[Document]:
    """The split of `load`, as documents with the data's own answers."""
    reader = Reader(cfg, tokenizer)
    rows = load(cfg, reader.documents, reader.prompt, share)
    train, held_out = (list(chain.from_iterable(side)) for side in (rows.train, rows.held_out))
    split = Split(train, held_out, rows.prompts, rows.tally, rows.share)
    if cut := sum(document.truncated for document in split.train + split.held_out):
        split.tally.changed[f"cut at max_length={cfg.max_length}"] = cut
    return split


def split_prompts(cfg: DataConfig, tokenizer: Any, share: Share | None = None) -> Split[Prompt]:
    """The split of `load`, as prompts for the target to answer."""
    reader = Reader(cfg, tokenizer)
    split = load(cfg, reader.prompt, share=share)
    split.prompts = split.held_out
    return split


def held_out_prompts(cfg: DataConfig, tokenizer: Any) -> Iterator[Prompt]:
    """The held-out prompts of a split, one by one as they are read. The training side is tokenised
    only if the usable conversations of both sides have to be counted. Raises UserError if the
    data is missing or has no conversation in it."""
    if (share := cfg.held_out) is None:
        split = split_prompts if cfg.answers == "target" else split_documents
        yield from split(cfg, tokenizer).prompts
        return
    reader = Reader(cfg, tokenizer)

    def use(conversation: Conversation) -> bool:
        held = is_held_out(conversation.opening, share)
        if held or cfg.limit is not None:
            if cfg.answers == "data":
                reader.documents(conversation)
            else:
                reader.prompt(conversation)
        return held

    for conversation, held in read(cfg, Tally(), use):
        if held:
            with suppress(Unusable):
                yield reader.prompt(conversation)


def trained_openings(
    cfg: DataConfig, tokenizer: Any, openings: Collection[str], size: int | None
) -> set[str]:
    """Which of these opening prompts, compared word by word as in `is_held_out`, are those of
    conversations on the training side, of which a run reads the first `size` (None: all). The data
    are tokenised only if they have such a conversation at all."""
    asked = {_key(opening): opening for opening in openings}

    def known(conversation: Conversation) -> bool:
        held = cfg.held_out is not None and is_held_out(conversation.opening, cfg.held_out)
        return not held and _key(conversation.opening) in asked

    if not any(there for _, there in read(cfg, Tally(), known)):
        return set()
    reader = Reader(cfg, tokenizer)

    def use(conversation: Conversation) -> list[str]:
        texts: list[Any] = []
        if cfg.answers == "data":
            texts += reader.documents(conversation)
        else:
            texts.append(reader.prompt(conversation))
        return [_key(conversation.opening)] * len(texts)

    trained = set(list(chain.from_iterable(load(cfg, use).train))[:size])
    return {opening for opening in openings if _key(opening) in trained}


def is_held_out(opening: str, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of the words of its opening prompt, ignoring
    case, punctuation and spaces, so the answer does not depend on any other data. (A
    locality-sensitive hash would put nearly all prompts that share a long instruction on one side.)
    """
    return _place(opening) < fraction * 2**64


def chosen_share(openings: Sequence[str]) -> float:
    """The fraction of conversations with these opening prompts to hold out if no other is given:
    SHARE, or enough of small data for ENOUGH conversations, though at most MOST of them."""
    count = max(1, min(ENOUGH, int(len(openings) * MOST)))
    places = sorted(map(_place, openings))
    # conversations with the same opening stay together: all of those at the cut, or none
    sizes = [n for n in range(1, len(places)) if places[n - 1] < places[n]]
    fitting = [n for n in sizes if n <= count] or sizes[:1]
    if len(openings) * SHARE >= ENOUGH or not fitting:
        return SHARE
    least, most = places[fitting[-1] - 1] / 2**64, places[fitting[-1]] / 2**64
    shortest = (round((least + most) / 2, digits) for digits in range(2, 20))
    return max(SHARE, next(x for x in shortest if least < x <= most))


def _place(opening: str) -> int:
    """The place of an opening prompt among 2^64, by a hash of its words."""
    return int.from_bytes(hashlib.blake2b(_key(opening).encode(), digest_size=8).digest())


def near_duplicates(train: Sequence[str], held_out: Sequence[str]) -> set[int]:
    """Indices into `train` of the opening prompts that nearly equal a held-out one: the Jaccard
    similarity of their word 3-shingles is at least NEAR percent. None is missed: if the shingles of
    every prompt are sorted in one order, rarest first, then two prompts this similar have a shingle
    in common among the first n − ⌈n·NEAR/100⌉ + 1 of each, where n is its number of shingles
    (prefix filtering, Chaudhuri et al. 2006). So only those are looked up, and each hit is
    verified."""
    theirs = list({_shingles(prompt) for prompt in held_out})
    frequency = Counter(s for shingles in theirs for s in shingles)

    def prefix(shingles: frozenset[int]) -> list[int]:
        ordered = sorted(shingles, key=lambda s: (frequency[s], s))
        return ordered[: len(ordered) - -(-len(ordered) * NEAR // 100) + 1]

    index: defaultdict[int, list[int]] = defaultdict(list)
    for j, shingles in enumerate(theirs):
        for s in prefix(shingles):
            index[s].append(j)
    near = set()
    for i, prompt in enumerate(train):
        ours = _shingles(prompt)
        candidates = {j for s in prefix(ours) if s in frequency for j in index.get(s, ())}
        for j in candidates:
            shared = len(ours & theirs[j])
            if shared * 100 >= NEAR * (len(ours) + len(theirs[j]) - shared):
                near.add(i)
                break
    return near


def _key(opening: str) -> str:
    """What is compared of two opening prompts: their words or, if they have none, all of them."""
    return " ".join(_words(opening)) or opening


def _words(text: str) -> list[str]:
    """Words in lower case; Chinese and Japanese characters count as words."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text)


def _shingles(prompt: str) -> frozenset[int]:
    words = _words(prompt) or [prompt]
    triples = zip(words, words[1:], words[2:], strict=False) if len(words) > 2 else [words]
    return frozenset(zlib.crc32(" ".join(triple).encode()) for triple in triples)
