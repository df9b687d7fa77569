"""Splits conversations into training and held-out ones, and converts them into documents or
prompts. The held-out side has a validation part, on which drafts are selected, and a test part,
which is reported."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, Generic, TypeVar

import torch

from specdec.errors import UserError, require
from train.data.conversations import (
    Conversation,
    DataConfig,
    Tally,
    Unusable,
    texts_that_tell_apart,
)
from train.data.near_duplicates import compared_words, near_duplicates, words_of
from train.data.reader import (
    AT_ONCE,
    Reader,
    SharedWork,
    read_conversations,
    read_together,
    require_spans,
)
from train.data.sequences import Document, Prompt

SHARE = 0.05  # held-out fraction of large data
ENOUGH = 120  # conversations to hold out of small data: to measure, to calibrate, to choose a shape
MOST = 0.2  # maximum held-out fraction of small data
VALIDATION = 0.25  # fraction of held-out conversations that select drafts and are not reported
LEAST_PART = 12  # conversations of the validation part, and of the test part
FEW, PART = 4, 0.25  # conversations of one opening that stay together, or their part of those held
TRAINED = 0.9  # no share that is held out reaches the places of what is only trained on
T = TypeVar("T")


@dataclass
class DataSplit(Generic[T]):
    """The items of both sides, and the fraction of all conversations that is held out.

    The held-out side has two parts: the best draft is selected on `validation` and measured on
    `test`. `validation_share` is the fraction of held-out conversations in `validation`; `prompts`
    and `validation_prompts` are the decoder's prompts of test and validation. If too few are held
    out for two parts (`chosen_validation`), `validation_share` is 0, each part is the whole
    held-out side, and there are no `validation_prompts`.
    """

    train: list[T] = field(default_factory=list)
    held_out: list[T] = field(default_factory=list)
    validation: list[T] = field(default_factory=list, repr=False)
    test: list[T] = field(default_factory=list, repr=False)
    prompts: list[Prompt] = field(default_factory=list, repr=False)
    validation_prompts: list[Prompt] = field(default_factory=list, repr=False)
    tally: Tally = field(default_factory=Tally, repr=False)
    share: float = SHARE
    validation_share: float = 0.0


def split_conversations(
    cfg: DataConfig,
    use: Callable[[Conversation], T],
    ask: Callable[[Conversation], Prompt] | None = None,
    share: SharedWork | None = None,
) -> DataSplit[T]:
    """Read and split conversations. `use` converts each of them once; `ask` makes the prompts of
    the held-out ones. Both are methods of a `Reader` if several processes `share` the work.

    The side of a conversation, and its part of the held-out side, depend only on its opening prompt
    (`is_held_out`). They stay the same when data or a limit is added, with two exceptions: the
    held-out share of small data is chosen by its size (`chosen_share`), and conversations with a
    frequent opening are placed by more than the opening (`told_apart`).

    Training conversations that nearly duplicate a held-out one are dropped, and so are those of the
    validation part that nearly duplicate one of the test part. Raises UserError if the data is
    missing or holds no usable conversation.
    """
    split, train, opened = DataSplit[T](), list[T](), list[str]()
    distinct: list[tuple[str, ...]] = []
    kept: list[tuple[Conversation | None, T]] = []  # with those that `ask` may need
    conversation: Conversation | None
    for conversation, item in read_conversations(cfg, split.tally, use, share):
        large = len(opened) * SHARE >= ENOUGH  # then no more than SHARE is held out
        most = cfg.held_out if cfg.held_out is not None else SHARE if large else 1.0
        asks = ask is not None and may_be_held_out(conversation, most)
        kept.append((conversation if asks else None, item))
        opened.append(conversation.opening)
        distinct.append(texts_that_tell_apart(conversation))
    placed, split.share = told_apart(opened, distinct, cfg)
    openings: dict[bool, list[str]] = {True: [], False: []}  # as they were placed
    asked = list[tuple[Conversation, int]]()  # with their places on the held-out side
    for opening, (conversation, item) in zip(placed, kept, strict=True):
        held = is_held_out(opening, split.share)
        (split.held_out if held else train).append(item)
        openings[held].append(opening)
        if held and conversation is not None:
            asked.append((conversation, len(split.held_out) - 1))
    for opening, placed_by, (_, item) in zip(opened, placed, kept, strict=True):
        for text in item if isinstance(item, list) else [item]:
            if isinstance(text, Document | Prompt):
                text.opening, text.placed = opening, placed_by
    tested = _divide(split, openings[True], cfg.validation)
    for start in range(0, len(asked) if ask is not None else 0, AT_ONCE):
        assert ask is not None
        some = asked[start : start + AT_ONCE]
        prompts = read_together(ask, [conversation for conversation, _ in some], share)
        for prompt, (conversation, place) in zip(prompts, some, strict=True):
            if isinstance(prompt, Unusable):
                what = f"held out, but not decoded: {prompt}"
                split.tally.count(split.tally.changed, what)
            elif (test := tested[place]) is not None:
                prompt.opening, prompt.placed = conversation.opening, openings[True][place]
                (split.prompts if test else split.validation_prompts).append(prompt)
    if not train and not split.held_out:
        require_spans(split.tally, 1)
        raise UserError(f"{cfg.name}: no usable conversation: {split.tally.reasons()}")
    near = near_duplicates(openings[False], openings[True])
    if len(near) == len(train) > 0:  # a run needs some to train on
        reason = "prompt nearly the same as a held-out one; kept, since all are"
        split.tally.changed[reason] = len(near)
        near = set()
    if near:
        split.tally.dropped["prompt nearly the same as a held-out one"] = len(near)
    train = [item for i, item in enumerate(train) if i not in near]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cfg.seed))
    split.train = [train[i] for i in order.tolist()]
    return split


def _divide(
    split: DataSplit[Any], openings: Sequence[str], fraction: float | None
) -> list[bool | None]:
    """Divide the held-out side of a split, with these opening prompts, into validation and test.
    Returns for each whether it is in the test part; None: in neither, because it is a validation
    conversation that nearly duplicates one of the test part."""
    if fraction is None:
        fraction = chosen_validation(openings, split.share)
    tested: list[bool | None] = [not is_validation(x, split.share, fraction) for x in openings]
    if all(tested):
        split.test, split.validation = list(split.held_out), list(split.held_out)
        return tested
    require(
        True in tested,
        f"data.validation={fraction} leaves no held-out conversation to measure on: lower it",
    )
    split.validation_share = fraction
    of_test = [opening for opening, test in zip(openings, tested, strict=True) if test]
    places = [place for place, test in enumerate(tested) if not test]
    near = near_duplicates([openings[place] for place in places], of_test)
    if near and len(places) - len(near) >= LEAST_PART:
        reason = "held out, but nearly the same as a test prompt: selects no draft"
        split.tally.changed[reason] = len(near)
        for n in near:
            tested[places[n]] = None
    for item, test in zip(split.held_out, tested, strict=True):
        if test is not None:
            (split.test if test else split.validation).append(item)
    return tested


def split_documents(
    cfg: DataConfig, tokenizer: Any, share: SharedWork | None = None
) -> DataSplit[Document]:
    """The split of `split_conversations`, as documents with the data's own responses."""
    reader = Reader(cfg, tokenizer)
    rows = split_conversations(cfg, reader.documents, reader.prompt, share)
    parts = {
        name: list(chain.from_iterable(getattr(rows, name)))
        for name in ("train", "held_out", "validation", "test")
    }
    split = DataSplit(
        **parts,
        prompts=rows.prompts,
        validation_prompts=rows.validation_prompts,
        tally=rows.tally,
        share=rows.share,
        validation_share=rows.validation_share,
    )
    if cut := sum(document.truncated for document in split.train + split.held_out):
        split.tally.changed[f"cut at max_length={cfg.longest_document}"] = cut
    return split


def split_prompts(
    cfg: DataConfig, tokenizer: Any, share: SharedWork | None = None
) -> DataSplit[Prompt]:
    """The split of `split_conversations`, as prompts for the target to answer."""
    reader = Reader(cfg, tokenizer)
    split = split_conversations(cfg, reader.prompt, share=share)
    split.prompts = split.test
    split.validation_prompts = split.validation if split.validation_share else []
    return split


def trained_openings(
    cfg: DataConfig, tokenizer: Any, openings: Collection[str], places: Sequence[int] | None
) -> set[str]:
    """Those of the opening prompts that are on the training side of a run, compared word by word as
    in `is_held_out`. The run reads the conversations at indices `places` (None: all). The data are
    tokenised only if they contain such a conversation."""
    asked = {compared_words(opening): opening for opening in openings}

    def known(conversation: Conversation) -> bool:
        return compared_words(conversation.opening) in asked

    # which conversations a limit or weights let a run read depends on what is usable
    sources = [replace(source, weight=None) for source in cfg.sources]
    every = replace(cfg, limit=None, sources=sources)
    if not any(there for _, there in read_conversations(every, Tally(), known)):
        return set()
    reader = Reader(cfg, tokenizer)

    def use(conversation: Conversation) -> list[str]:
        texts: list[Any] = []
        if cfg.responses == "data":
            texts += reader.documents(conversation)
        else:
            texts.append(reader.prompt(conversation))
        return [compared_words(conversation.opening)] * len(texts)

    texts_read = list(chain.from_iterable(split_conversations(cfg, use).train))
    trained = {*texts_read} if places is None else {texts_read[place] for place in places}
    return {opening for opening in openings if compared_words(opening) in trained}


def told_apart(
    openings: Sequence[str], distinct: Sequence[tuple[str, ...]], cfg: DataConfig
) -> tuple[list[str], float]:
    """The texts by which conversations are split, and the fraction of them to hold out
    (`chosen_share`, if none is given). The texts are the openings. If many conversations have the
    same opening (more than FEW, and PART of as many as are held out), their texts also include what
    is `distinct` in each: the system prompt and, as long as many have the same text, the later
    turns. The data's responses come last, and not at all if the target answers. Many conversations
    that nothing distinguishes are trained on, and do not count in the fraction. If no others can be
    held out, some openings are, with all of their conversations. Raises UserError if even the
    fewest of them are too many."""
    whole, texts = len(openings), list(openings)
    if cfg.held_out == 0:
        return texts, 0.0
    held_out = max(SHARE * whole, min(ENOUGH, MOST * whole))
    most = max(FEW, PART * (held_out if cfg.held_out is None else cfg.held_out * whole))
    for level in range(2 if cfg.responses == "target" else 3):
        members = defaultdict[str, list[int]](list)
        for i, text in enumerate(texts):
            members[compared_words(text)].append(i)
        for group in members.values():
            more = [distinct[i][level] if level < len(distinct[i]) else "" for i in group]
            if len(group) > most and len({*more}) > 1:
                for i, text in zip(group, more, strict=True):
                    texts[i] = f"{texts[i]}\n{text}"
    counts = Counter(map(compared_words, texts))
    common = {key for key, n in counts.items() if n > most}
    if len(counts) == len(common) == 1:
        raise UserError(
            f"{cfg.name}: all {len(texts):,} conversations ask the same, so none can be held out "
            "to measure on: add conversations with other prompts"
        )
    half = sum(n for key, n in counts.items() if key not in common) // 2
    told, renamed = list(texts), set[str]()
    while True:
        share = cfg.held_out
        if share is None:
            share = chosen_share([x for x in texts if x not in renamed], whole, half)
        blocking = {x for x in texts if compared_words(x) in common and is_held_out(x, share)}
        held = sum(is_held_out(x, share) for x in texts)
        small = cfg.held_out is None and SHARE * whole < ENOUGH
        if not blocking and small and held < (1 - PART) * int(held_out):
            # the next of them would exceed what is to be held out, so nothing beyond it is
            blocking = {
                min((x for x in texts if compared_words(x) in common), key=place_of, default="")
            }
        if not any(blocking):
            break
        trained = {text: _trained(text, max(TRAINED, share)) for text in blocking}
        texts = [trained.get(text, text) for text in texts]
        renamed.update(trained.values())
    chosen = cfg.held_out is None
    if not renamed or (held and not (chosen and share >= TRAINED)):
        return texts, share
    if not chosen:
        return told, share
    share = chosen_share(told)
    held = sum(is_held_out(x, share) for x in told)
    # a run that goes on with this share must find the same split
    again, _ = told_apart(openings, distinct, replace(cfg, held_out=share))
    if share > 2 * MOST or not 0 < held <= (1 + PART) * held_out or again != told:
        different = len({*map(compared_words, told)})
        raise UserError(
            f"{cfg.name}: its {whole:,} conversations ask only {different:,} different "
            "things, nearly all of them too often, so a fitting part of them cannot be "
            "held out to measure on: add conversations with other prompts, or set data.held_out"
        )
    return told, share


def _trained(text: str, fraction: float) -> str:
    """The text with a number appended so that it is not held out."""
    numbered = (f"{text} {n}" for n in count())
    return next(x for x in numbered if not is_held_out(x, fraction))


def may_be_held_out(conversation: Conversation, fraction: float) -> bool:
    """Whether a conversation may be held out by any of its texts (`told_apart`)."""
    texts = {conversation.opening: " ".join(words_of(conversation.opening))}
    for more in texts_that_tell_apart(conversation):
        words = " ".join(words_of(more))  # once: the words of joined texts are theirs in turn
        texts |= {f"{text}\n{more}": f"{key} {words}".strip() for text, key in texts.items()}
    return any(_place(key) < fraction * 2**64 for key in {k or text for text, k in texts.items()})


def is_held_out(opening: str, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of the words of its opening prompt, ignoring
    case, punctuation and spaces, so the result does not depend on other data. (A locality-sensitive
    hash would put nearly all prompts with a common long instruction on one side.)"""
    return place_of(opening) < fraction * 2**64


def chosen_share(openings: Sequence[str], whole: int | None = None, limit: int = ENOUGH) -> float:
    """The fraction of conversations with these opening prompts to hold out by default: SHARE, or
    enough of small data for ENOUGH conversations, though at most MOST of them. They may be a part
    of the `whole` data, from which no others are held out, and `limit` may bound their number."""
    whole = len(openings) if whole is None else whole
    count = max(1, min(ENOUGH, int(whole * MOST), limit))
    places = sorted(map(place_of, openings))
    # conversations with the same opening stay together: all of those at the cut, or none
    sizes = [n for n in range(1, len(places)) if places[n - 1] < places[n]]
    fitting = [n for n in sizes if n <= count] or sizes[:1]
    if whole * SHARE >= ENOUGH or not fitting:
        return SHARE
    least, most = places[fitting[-1] - 1] / 2**64, places[fitting[-1]] / 2**64
    shortest = (round((least + most) / 2, digits) for digits in range(2, 20))
    return max(SHARE, next(x for x in shortest if least < x <= most))


def is_validation(opening: str, held_out: float, fraction: float) -> bool:
    """Whether a conversation, if it is held out, is in the validation part: the `fraction` of the
    held-out side with the smallest hashes."""
    return is_held_out(opening, held_out * fraction)


def chosen_validation(openings: Sequence[str], held_out: float) -> float:
    """The default fraction of the held-out side, which has these opening prompts, for the
    validation part: VALIDATION, or for small data as much as gives both parts LEAST_PART
    conversations; 0 if they are too few for two parts."""
    count = len(openings)
    usual = sum(is_validation(opening, held_out, VALIDATION) for opening in openings)
    if count > ENOUGH and LEAST_PART <= usual <= count - LEAST_PART:
        return VALIDATION
    places = sorted(map(place_of, openings))
    # conversations with the same opening stay together
    cuts = [n for n in range(LEAST_PART, count - LEAST_PART + 1) if places[n - 1] < places[n]]
    if not cuts:
        return 0.0
    n = min(cuts, key=lambda n: abs(n - VALIDATION * count))
    for digits in range(2, 20):
        middle = (places[n - 1] + places[n]) / 2 / 2**64 / held_out
        fraction = round(middle, digits)
        if sum(is_validation(x, held_out, fraction) for x in openings) == n:
            return fraction
    return 0.0


def parts_of(held_out: int, fraction: float | None) -> tuple[int, int]:
    """The approximate numbers of held-out conversations in the validation and the test part, as
    divided by `chosen_validation` if `fraction` is None."""
    validation = round(held_out * (VALIDATION if fraction is None else fraction))
    if fraction is None:
        validation = max(validation, LEAST_PART) if held_out >= 2 * LEAST_PART else 0
    return (validation, held_out - validation) if validation else (held_out, held_out)


def place_of(opening: str) -> int:
    """A number below 2^64 for an opening prompt, from a hash of its words."""
    return _place(compared_words(opening))


def _place(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())
