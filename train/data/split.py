"""The split of conversations into training and held-out ones, and what each side is made into."""

import hashlib
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from specdec.errors import UserError
from train.data.conversations import Conversation, DataConfig, Tally, opening_of
from train.data.sources import read
from train.data.template import (
    PATIENCE,
    Document,
    Prompt,
    encode,
    prompt_of,
    require_spans,
)

NEAR = 70  # percent: Jaccard similarity of word 3-shingles from which two prompts are the same
T = TypeVar("T")


@dataclass
class Split(Generic[T]):
    """What each side was made into, in one order with `conversations`, the held-out side's own."""

    train: list[T]
    held_out: list[T]
    conversations: list[Conversation] = field(repr=False)
    tally: Tally = field(repr=False)


def load(cfg: DataConfig, use: Callable[[Conversation], T | str]) -> Split[T]:
    """Read and split conversations, each made into something by `use` once, or dropped for the
    reason that it returns. With `cfg.limit`, reading stops when so many were usable.

    The side of a conversation depends on its opening prompt alone (`is_held_out`): it stays the
    same when data, or a limit, are added. Near-duplicates that fall on both sides are dropped
    from train, never from the held-out side.

    Raises UserError where the data is missing, has no conversation in it, or none is usable.
    """
    tally = Tally()
    openings: list[str] = []
    train: list[T] = []
    held_out: list[T] = []
    conversations: list[Conversation] = []
    for conversation, made in _usable(cfg, use, tally):
        if is_held_out(conversation, cfg.held_out):
            held_out.append(made)
            conversations.append(conversation)
        else:
            train.append(made)
            openings.append(opening_of(conversation))
    if not train and not held_out:
        require_spans(tally, 1)
        raise UserError(f"{cfg.path}: no usable conversation: {tally.reasons()}")
    if near := near_duplicates(openings, [opening_of(c) for c in conversations]):
        tally.dropped["prompt nearly the same as a held-out one"] = len(near)
    train = [made for i, made in enumerate(train) if i not in near]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cfg.seed))
    return Split([train[i] for i in order.tolist()], held_out, conversations, tally)


def split_documents(cfg: DataConfig, tokenizer: Any) -> Split[Document]:
    """The split of `load`, as documents with the answers that stand in the data."""
    split = load(cfg, lambda conversation: encode(conversation, tokenizer, cfg))
    if cut := sum(document.truncated for document in split.train + split.held_out):
        split.tally.changed[f"cut at max_length={cfg.max_length}"] = cut
    return split


def split_prompts(cfg: DataConfig, tokenizer: Any) -> Split[Prompt]:
    """The split of `load`, as prompts for the target to answer."""
    return load(cfg, lambda conversation: prompt_of(conversation, tokenizer, cfg.max_prompt))


def held_out_prompts(cfg: DataConfig, tokenizer: Any) -> Iterator[Prompt]:
    """The held-out prompts of a split, one by one as they are read.

    The training side is neither kept nor compared with them; it is tokenised only where `cfg.limit`
    counts what is usable of both. Raises UserError where the data is missing or has no conversation
    in it.
    """

    def use(conversation: Conversation) -> Document | Prompt | str:
        if cfg.answers == "data":
            return encode(conversation, tokenizer, cfg)
        return prompt_of(conversation, tokenizer, cfg.max_prompt)

    tally = Tally()
    found = read(cfg, tally) if cfg.limit is None else (c for c, _ in _usable(cfg, use, tally))
    for conversation in found:
        if not is_held_out(conversation, cfg.held_out) or isinstance(use(conversation), str):
            continue
        prompt = prompt_of(conversation, tokenizer, cfg.max_prompt)
        if not isinstance(prompt, str):
            yield prompt


def _usable(
    cfg: DataConfig, use: Callable[[Conversation], T | str], tally: Tally
) -> Iterator[tuple[Conversation, T]]:
    """Conversations that `use` makes something of, up to `cfg.limit` of them, under ids that differ
    from one another."""
    count, seen = 0, Counter[str]()
    for conversation in read(cfg, tally):
        seen[conversation.id] += 1
        if (n := seen[conversation.id]) > 1:
            conversation = replace(conversation, id=f"{conversation.id}#{n}")
        made = use(conversation)
        if isinstance(made, str):
            tally.count(tally.dropped, made)
            if not count:
                require_spans(tally, PATIENCE)
            continue
        count += 1
        yield conversation, made
        if count == cfg.limit:
            tally.count(tally.unread, f"whatever follows, after data.limit={cfg.limit}")
            return


def is_held_out(conversation: Conversation, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of its first user prompt's words, without
    regard to case, punctuation and spaces; so it does not depend on any other data.

    A locality-sensitive hash would not do: where most prompts share a long instruction, it would
    put nearly all of them on one side. `near_duplicates` finds those that straddle.
    """
    prompt = opening_of(conversation)
    key = " ".join(_words(prompt)) or prompt
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def near_duplicates(train: Sequence[str], held_out: Sequence[str]) -> set[int]:
    """Indices into `train` of the opening prompts that are nearly a held-out one: the Jaccard
    similarity of their word 3-shingles is at least NEAR percent.

    Exact, where MinHash would miss some: with the shingles of both in one order, rarest first,
    two sets of such a similarity share one of the first n − ⌈n·NEAR/100⌉ + 1 (Chaudhuri et al.
    2006, prefix filtering), so only those are looked up, and each hit is verified.
    """
    theirs = list({_shingles(prompt) for prompt in held_out})
    frequency = Counter(s for shingles in theirs for s in shingles)

    def prefix(shingles: frozenset[int]) -> list[int]:
        ordered = sorted(shingles, key=lambda s: (frequency[s], s))
        return ordered[: len(ordered) - -(-len(ordered) * NEAR // 100) + 1]

    index: defaultdict[int, list[int]] = defaultdict(list)
    for j, shingles in enumerate(theirs):
        for s in prefix(shingles):
            index[s].append(j)
    found = set()
    for i, prompt in enumerate(train):
        ours = _shingles(prompt)
        candidates = {j for s in prefix(ours) if s in frequency for j in index.get(s, ())}
        for j in candidates:
            shared = len(ours & theirs[j])
            if shared * 100 >= NEAR * (len(ours) + len(theirs[j]) - shared):
                found.add(i)
                break
    return found


def _words(text: str) -> list[str]:
    """Words in lower case; in scripts without spaces, characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text)


def _shingles(prompt: str) -> frozenset[int]:
    words = _words(prompt) or [prompt]
    triples = zip(words, words[1:], words[2:], strict=False) if len(words) > 2 else [words]
    return frozenset(zlib.crc32(" ".join(triple).encode()) for triple in triples)
