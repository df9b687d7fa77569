"""Rows that are already token ids: what they hold, without a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from train.data.calls import absent
from train.data.conversations import Tokens, Unusable

IDS = ("input_ids", "token_ids", "ids", "tokens")
PROMPT = ("prompt_ids", "prompt_token_ids", "prompt_input_ids")
ANSWER = (
    "completion_ids",
    "completion_token_ids",
    "completion_input_ids",
    "response_ids",
    "response_token_ids",
    "output_ids",
    "answer_ids",
)
ANSWER_MASK = "completion_mask"
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", ANSWER_MASK, "answer_mask")
LABELS, PADDING, IGNORED = "labels", "attention_mask", -100
LARGEST = 2**31 - 1


def is_tokenised(record: Any) -> bool:
    """Whether a record has token ids, by its keys."""
    return isinstance(record, dict) and any(_numbers(record.get(k)) for k in (*IDS, *PROMPT))


def tokens_of(record: Mapping[str, Any], prompts: bool, texts: bool) -> tuple[Tokens, set[str]]:
    """The tokens of a record, and the keys that were read. Ids without a mask are a prompt if
    `prompts` are asked for, or a text if `texts` are. Raises Unusable."""
    ids_key = next((k for k in IDS if _numbers(record.get(k))), None)
    if ids_key is None:
        prompt_key = next(k for k in PROMPT if _numbers(record.get(k)))
        answer_key = next((k for k in (*ANSWER, LABELS) if _numbers(record.get(k))), None)
        prompt, answer = _ids(record, prompt_key), _ids(record, answer_key)
        said, read = (True,) * len(answer), {prompt_key, answer_key or prompt_key}
        if answer and not absent(record.get(ANSWER_MASK)):
            said = _flags(record, ANSWER_MASK, len(answer))
            read.add(ANSWER_MASK)
        return Tokens(prompt + answer, (False,) * len(prompt) + said), read
    ids, read = _ids(record, ids_key), {ids_key}
    kept = range(len(ids))
    if not absent(record.get(PADDING)):
        read.add(PADDING)
        padding = _flags(record, PADDING, len(ids))
        kept = range(*_edges(padding))
    key = next((k for k in (*MASKS, LABELS) if not absent(record.get(k))), None)
    mask = (False,) * len(ids)
    if key is None and texts:
        mask = (False,) + (True,) * (len(ids) - 1)
    elif key is None and not prompts:
        raise Unusable("token ids without labels or a mask of the assistant's tokens")
    elif key == LABELS:
        labels = record[LABELS]
        if not _numbers(labels) or len(labels) != len(ids):
            raise Unusable("labels of another number than its token ids")
        if any(label not in (IGNORED, id) for label, id in zip(labels, ids, strict=True)):
            raise Unusable(f"labels that are neither its token ids nor {IGNORED}")
        mask = tuple(label != IGNORED for label in labels)
    elif key is not None:
        mask = _flags(record, key, len(ids))
    read |= {key} if key else set()
    return Tokens(tuple(ids[i] for i in kept), tuple(mask[i] for i in kept)), read


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _ids(record: Mapping[str, Any], key: str | None) -> tuple[int, ...]:
    ids: Sequence[int] = record[key] if key is not None else ()
    if any(not 0 <= x <= LARGEST for x in ids):
        raise Unusable("token ids that are negative or too large")
    return tuple(ids)


def _flags(record: Mapping[str, Any], key: str, count: int) -> tuple[bool, ...]:
    flags = record[key]
    if not isinstance(flags, list) or len(flags) != count or any(x not in (0, 1) for x in flags):
        raise Unusable(f"{key} that is not a 0 or a 1 for each token")
    return tuple(map(bool, flags))


def _edges(real: Sequence[bool]) -> tuple[int, int]:
    """Where the tokens that are no padding begin and end. Raises Unusable if they are in parts."""
    if True not in real:
        raise Unusable("no tokens but padding")
    first, last = real.index(True), len(real) - real[::-1].index(True)
    if not all(real[first:last]):
        raise Unusable("padding between its tokens")
    return first, last
