"""Maps tokens and texts between two tokenizers."""

import re
from itertools import groupby
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

TAIL = 8  # enough tokens before a piece of text to see how the piece joins them
REPLACED = "\ufffd"  # stands for bytes that are not a whole character


class Bridge:
    """Compares tokens by the text that they stand for after another token. Special tokens match if
    they have the same name, or if both are the eos or both the bos."""

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = target, draft
        self.specials = _same_specials(target, draft)  # target id -> draft id
        self._back = {own: theirs for theirs, own in self.specials.items()}
        roles = ("bos", "eos", "pad", "unk", "cls", "sep")
        self._roles = {getattr(target, f"{role}_token_id", None) for role in roles}
        self._special, self._own_special = set(target.all_special_ids), set(draft.all_special_ids)
        first = draft.bos_token_id
        self.prefix = [first] if first is not None and first in draft("").input_ids else []
        # the draft's input for an empty text
        self._spare = next((i for i in (first, draft.eos_token_id) if i is not None), 0)

    def common(self, target_size: int, draft_size: int) -> tuple[list[int], list[int]]:
        """The target ids, ascending, and the draft ids of the tokens in both vocabularies."""
        theirs = _by_text(self.target, target_size)
        ours = _by_text(self.draft, draft_size)
        ordinary = {theirs[text]: own for text, own in ours.items() if text in theirs}
        specials = {a: b for a, b in self.specials.items() if a < target_size and b < draft_size}
        pairs = sorted((ordinary | specials).items())
        return [a for a, _ in pairs], [b for _, b in pairs]

    def to_draft(self, ids: list[int]) -> list[int]:
        """A text in target tokens as draft tokens, at least one. Special tokens become the draft's
        matching ones. Without a match, bos, eos and the like are dropped; others become text."""
        own = list(self.prefix)
        for special, run in groupby(ids, lambda i: i in self.specials or i in self._roles):
            if not special:
                text = _text(self.target, list(run)).rstrip(REPLACED)
                own += self.draft.encode(text, add_special_tokens=False)
                continue
            for i in run:
                if i in self.specials and [self.specials[i]] != own:
                    own.append(self.specials[i])
        return own or [self._spare]

    def to_target(self, ids: list[int], own: list[int], new: list[int]) -> list[int]:
        """The draft's tokens `new`, written after its tokens `own`, as target tokens that follow
        `ids`; fewer, or none, if complete target tokens cannot spell that text."""
        end = next((n for n, i in enumerate(new) if i in self._own_special), len(new))
        before = _after_last(own, self._own_special)[-TAIL:]
        was, text = _text(self.draft, before), _text(self.draft, before + new[:end])
        if not text.startswith(was):
            return []
        text = text[len(was) :].rstrip(REPLACED)
        special = [self._back[i] for i in new[end : end + 1] if i in self._back]
        if not text:
            return special
        tail = _after_last(ids, self._special)[-TAIL:]
        was = _text(self.target, tail)
        known = self.target.encode(was, add_special_tokens=False)
        whole = self.target.encode(was + text, add_special_tokens=False)
        candidates: list[list[int]] = [self.target.encode(text, add_special_tokens=False)]
        if whole[: len(known)] == known:
            candidates.insert(0, whole[len(known) :])
        for spelled in candidates:
            if _text(self.target, tail + spelled) == was + text:
                return spelled + special
        return []


def _same_specials(target: Any, draft: Any) -> dict[int, int]:
    """The special tokens of both tokenizers, target id -> draft id."""
    skipped = {target.unk_token_id, target.pad_token_id} - {target.eos_token_id}
    named = {draft.convert_ids_to_tokens(i): i for i in draft.all_special_ids}
    pairs = {i: named.get(target.convert_ids_to_tokens(i)) for i in target.all_special_ids}
    same = {i: own for i, own in pairs.items() if own is not None and i not in skipped}
    for role in ("eos_token_id", "bos_token_id"):
        a, b = getattr(target, role), getattr(draft, role)
        if None not in (a, b) and a not in same and b not in same.values():
            same[a] = b
    return same


def _by_text(tokenizer: Any, size: int) -> dict[bytes, int]:
    """The ids of ordinary tokens by the bytes that they stand for after another token. Of several
    tokens with the same bytes, the lowest id wins; a byte-fallback token loses to all others."""
    count, special = min(size, len(tokenizer)), set(tokenizer.all_special_ids)
    ids = [i for i in range(count) if i not in special]
    names = tokenizer.convert_ids_to_tokens(ids)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    by_text: dict[bytes, int] = {}
    if "ByteLevel" in decoder:
        table = {c: b for b, c in bytes_to_unicode().items()}
        for i, name in zip(ids, names):
            if i in added:
                by_text.setdefault(name.encode(), i)
            elif name is not None and all(c in table for c in name):
                by_text.setdefault(bytes(table[c] for c in name), i)
        return by_text
    single_bytes: dict[bytes, int] = {}
    plain = (i for i in ids if _text(tokenizer, [i]).strip().isalnum())
    before = next(plain, ids[0] if ids else 0)
    was = _text(tokenizer, [before])
    texts = tokenizer.batch_decode(
        [[before, i] for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    for i, name, text in zip(ids, names, texts):
        if name is None:
            continue
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            single_bytes.setdefault(bytes([int(name[3:5], 16)]), i)
        elif text.startswith(was) and len(text) > len(was) and REPLACED not in text:
            by_text.setdefault(text[len(was) :].encode(), i)
    return single_bytes | by_text


def _text(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _after_last(ids: list[int], special: set[int]) -> list[int]:
    """The ids after the last special token."""
    start = next((n for n in range(len(ids), 0, -1) if ids[n - 1] in special), 0)
    return ids[start:]
