"""Near duplicates of prompts: by the Jaccard similarity of their word 3-shingles, exactly and
without comparing all pairs."""

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

NEAR = 70  # percent: the least Jaccard similarity (word 3-shingles) of nearly equal prompts
SHARED = 0.02, 10  # maximum fraction and number of prompts that share a word which still counts
FEW = 4  # openings that may share a shingle, however few openings there are


def near_duplicates(train: Sequence[str], held_out: Sequence[str]) -> set[int]:
    """Indices into `train` of the prompts that nearly equal a held-out one: the Jaccard similarity
    of their word 3-shingles is at least NEAR percent. Shingles common to many prompts (`SHARED`),
    such as those of an instruction before every request, do not count. If nine in ten of `train`
    are still near duplicates, shingles common to a quarter of the prompts do not count either. The
    search is exact by prefix filtering (Chaudhuri et al. 2006): if every prompt's shingles are
    sorted in one order, rarest first, two prompts this similar share a shingle among the first n −
    ⌈n·NEAR/100⌉ + 1 of each, where n is its number of shingles. Only these are looked up, and each
    hit is verified."""
    together = len(train) + len(held_out)
    near = _near(train, held_out, max(SHARED[0] * together, SHARED[1]))
    if 10 * len(near) > 9 * len(train) > 9:
        near = _near(train, held_out, max(together / 4, 2))
    return near


def _near(train: Sequence[str], held_out: Sequence[str], most: float) -> set[int]:
    """`near_duplicates` without shingles that more than `most` prompts share."""
    theirs = [shingles_of(prompt) for prompt in held_out]
    shared = Counter(s for shingles in theirs for s in shingles)
    if len(train) + len(held_out) > most:
        known = {*shared}
        for prompt in train:
            shared.update(shingles_of(prompt) & known)
    common = {s for s, n in shared.items() if n > most}

    def counted(prompt: str, shingles: frozenset[int]) -> frozenset[int]:
        """The shingles that count; for a prompt without any, one for all its words."""
        if common and shingles & common:
            return shingles - common or frozenset((zlib.crc32(compared_words(prompt).encode()),))
        return shingles

    theirs = list({counted(x, s) for x, s in zip(held_out, theirs, strict=True)})
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
        ours = counted(prompt, shingles_of(prompt))
        candidates = {j for s in prefix(ours) if s in frequency for j in index.get(s, ())}
        for j in candidates:
            shared_by_both = len(ours & theirs[j])
            if shared_by_both * 100 >= NEAR * (len(ours) + len(theirs[j]) - shared_by_both):
                near.add(i)
                break
    return near


def within_conversations(texts: Sequence[str], openings: Sequence[str]) -> set[int]:
    """Indices of the texts (complete rendered prompts) that belong to a conversation with one of
    these opening prompts or a near duplicate: at least NEAR percent of the opening's shingles are
    in the text. Shingles that many openings share (an instruction) do not count. An opening of
    fewer than three words, or without shingles of its own, must be in the text as a line or between
    marks of the template."""
    distinct, asked = list(dict.fromkeys(texts)), list({*openings} - {""})
    of_texts, of_openings = [shingles_of(x) for x in distinct], [shingles_of(x) for x in asked]
    counts = Counter(s for shingles in of_openings for s in shingles)
    most = max(SHARED[0] * len(asked), FEW)
    exactly, index, sizes = set[str](), defaultdict[int, list[int]](list), dict[int, int]()
    for j, (opening, shingles) in enumerate(zip(asked, of_openings, strict=True)):
        own = {s for s in shingles if counts[s] <= most}
        if len(words_of(opening)) < 3 or not own:
            exactly.add(compared_words(opening))
            continue
        sizes[j] = len(own)
        for s in own:
            index[s].append(j)
    within = set[str]()
    for text, shingles in zip(distinct, of_texts, strict=True):
        shared = Counter(j for s in shingles for j in index.get(s, ()))
        near = any(100 * n >= NEAR * sizes[j] for j, n in shared.items())
        pieces = re.split(r"<[^<>]*>|\[[^\[\]]*\]|\n", text) if exactly else []
        if near or any(compared_words(piece) in exactly for piece in pieces if piece.strip()):
            within.add(text)
    return {i for i, text in enumerate(texts) if text in within}


def compared_words(opening: str) -> str:
    """The words by which opening prompts are compared, or all characters if there are none."""
    return " ".join(words_of(opening)) or opening


def words_of(text: str) -> list[str]:
    """Words in lower case; Chinese and Japanese characters count as words."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text)


def shingles_of(prompt: str) -> frozenset[int]:
    words = words_of(prompt) or [prompt]
    triples = zip(words, words[1:], words[2:], strict=False) if len(words) > 2 else [words]
    return frozenset(zlib.crc32(" ".join(triple).encode()) for triple in triples)
