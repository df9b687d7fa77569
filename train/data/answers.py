"""Answers to the prompts, written in batches by the target, a draft or both together, or by engines
that serve the target, and kept in files from which a run resumes; on-policy training also keeps the
rounds of the decoder that wrote them. Logs of rounds are read here too."""

import hashlib
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray
from rich.progress import Progress

from specdec.decoding.decode import decode
from specdec.decoding.draft_answers import draft_answers
from specdec.decoding.fitting import rows_that_fit
from specdec.decoding.logs import Logged, Rounds, rounds_of
from specdec.decoding.way import Way
from specdec.drafters.proposer import Drafter
from specdec.engines.client import Failed, Server
from specdec.errors import UserError, first_line, is_out_of_memory, require, require_within
from specdec.files import make_folder, record, sealed_lines, write_whole
from specdec.integrity import Damaged, sealed
from specdec.progress import console, tell
from specdec.ranks import Ranks
from specdec.runtime.memory import release
from specdec.sampling.sampler import Sampler, require_cutoffs, require_temperature
from specdec.sampling.trees import Chain
from specdec.targets.base import Target
from specdec.targets.loading import TargetOnDemand
from specdec.targets.parts import Parts
from train.data import engines
from train.data.template import Document, Prompt
from train.features.store import Store
from train.processes import ranks_of
from train.shares import Share

# features of answers are written after so many seconds or bytes
SECONDS, AT_ONCE = 2.0, 32 * 2**20
UNANSWERED = ".failed"  # ends the names of files that note which prompts have no answer


@dataclass
class AnswersConfig:
    """How the target answers with `data.answers=target`; temperature 0 is greedy. `engines` are
    servers of the target that write the answers, `batch` of them at once; on the command line,
    answers.from=http://host:8000/v1 sets them, several with commas between them. Empty: the target
    answers in this process. With `shard`, such as 2/8, the run answers that share of the prompts
    and ends; when all shares are done, the same command without it trains."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 192
    batch: int = 128
    seed: int = 0
    root: str = "cache/answers"
    engines: list[str] = field(default_factory=list)
    shard: str | None = None

    def __post_init__(self) -> None:
        seeds = (0, 2**32 - 1)
        for url in self.engines:
            Server.of("answers.from", url)
        Share.of("answers.shard", self.shard)
        require_within("answers", self, max_new_tokens=1, batch=1, seed=seeds)
        require_temperature("answers.temperature", self.temperature)
        require_cutoffs("answers", self)
        require(bool(self.root.strip()), "answers.root is empty: give a folder")


@dataclass
class Author:
    """A draft that writes answers together with the target: it proposes `gamma` tokens at a time,
    and those that `rule` accepts are kept. With `rule` None the draft writes alone. `folder` keeps
    these answers; `key` names the draft's weights. With `rounds`, documents also hold the decoder's
    rounds, each cut to that many drafted tokens, and documents without a round are left out."""

    drafter: Drafter
    gamma: int
    rule: str | None
    folder: Path
    key: str = ""
    rounds: int | None = None


def answered(
    target: TargetOnDemand,
    prompts: Sequence[Prompt],
    cfg: AnswersConfig,
    accelerator: Accelerator,
    progress: Progress,
    keep: Store | None = None,
    author: Author | None = None,
) -> list[Document]:
    """Documents of prompt and answer, in the order of the prompts; their masks mark the answers.

    As each batch ends, its answers are written to a file, each with the name of its prompt: an
    interrupted run continues there, and a run with more prompts answers only the new ones. The file
    appears whole or not at all, so that the batches, and with them rounding, stay the same. Each
    prompt has its own seed, so apart from rounding its answer does not depend on the batch, on
    interruptions, or on how many processes share the work. `keep` stores the features that the
    target computes as it answers.

    With `cfg.engines` and no author, engines write the answers, as `_served` says.
    """
    if cfg.engines and author is None:
        return _served(target, prompts, cfg, accelerator, progress, keep)
    key = _key(target.parts, cfg)
    folder = make_folder(author.folder if author else Path(cfg.root) / key)
    key = f"{key} {author.key}" if author else key
    asked = {_name(prompt): prompt.ids.tolist() for prompt in prompts}
    ranks = ranks_of(accelerator)

    def read() -> dict[str, dict[str, Any]]:
        known, damage = _read(folder, key, target.parts.vocab_size, asked)
        if damage and not known.keys() >= asked.keys():
            tell(f"{damage}: their prompts are answered again where this run needs them")
        return known

    known = ranks.first(lambda: set(read()))
    by_draft = author is not None and author.rule is None
    size = cfg.batch
    if not by_draft and not known >= asked.keys():
        size = _fitting(target.whole(), asked, cfg, ranks)
    share = None if author else Share.of("answers.shard", cfg.shard)
    batches = _batches(asked, known, size)
    if share is not None:
        batches = _batches_of(share, asked, known, cfg.batch, size)
    batches = batches[ranks.rank :: ranks.world]
    total = sum(map(len, batches)) * cfg.max_new_tokens
    whose = "draft's" if by_draft else "draft's and target's" if author else "target's"
    task = progress.add_task(f"{whose} answers", total=total)
    sampler = Sampler(cfg.temperature, cfg.top_k, cfg.top_p)
    way = Way(sampler=sampler)
    if author and author.rule is not None:
        way = Way(author.drafter, Chain(author.gamma), sampler, author.rule)

    def write(batch: Sequence[str]) -> list[dict[str, Any]]:
        """The answers to prompts that are given by name."""
        asking = [asked[name] for name in batch]
        seeds = [_seed(name, cfg) for name in batch]
        if author and author.rule is None:
            most, eos = cfg.max_new_tokens, target.parts.eos
            texts = draft_answers(author.drafter, asking, sampler, seeds, most, eos)
            progress.advance(task, sum(map(len, texts)))
            return [{"ids": ids} for ids in texts]
        answers = decode(
            target.whole(),
            asking,
            way,
            max_new_tokens=cfg.max_new_tokens,
            seeds=seeds,
            on_tokens=lambda _row, ids, _round: progress.advance(task, len(ids)),
            record=keep.record(target.whole()) if keep else None,
        )
        entries: list[dict[str, Any]] = [{"ids": answer.ids} for answer in answers]
        if author and author.rounds:
            for entry, answer in zip(entries, answers, strict=True):
                entry["rounds"] = rounds_of(answer)
        return entries

    written = 0  # tokens in files
    while batches:
        batch = batches.pop(0)
        try:
            records, reason = write(batch), ""
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            records, reason = [], first_line(error)[:120]
        if reason:  # out here, where the error no longer holds the memory of the failed batch
            if len(batch) == 1:
                raise UserError(
                    f"memory ran out while answering a single prompt ({reason}): lower "
                    "answers.max_new_tokens or data.max_prompt, or give target.dtype=bfloat16; "
                    "answers written so far are kept"
                )
            half = len(batch) // 2
            left = [batch, *batches]
            batches = [b[i : i + half] for b in left for i in range(0, len(b), half)]
            release()
            progress.update(task, completed=written)
            console.print(
                f"memory ran out for {len(batch)} answers at once: from now on {half} are tried"
            )
            continue
        written += sum(len(entry["ids"]) for entry in records)
        if keep:
            keep.write()
        lines = [
            json.dumps(sealed({"prompt": name} | entry, key))
            for name, entry in zip(batch, records, strict=True)
        ]
        write_whole(folder / f"{uuid4().hex}.jsonl", "".join(f"{line}\n" for line in lines))
    progress.remove_task(task)
    accelerator.wait_for_everyone()
    if share is not None:  # the other shares may not be written yet
        return []
    depth = author.rounds if author else None
    return ranks.handed(lambda: _documents(prompts, read(), depth, folder))


def _served(
    target: TargetOnDemand,
    prompts: Sequence[Prompt],
    cfg: AnswersConfig,
    accelerator: Accelerator,
    progress: Progress,
    keep: Store | None,
) -> list[Document]:
    """`answered` by engines that serve the target. With `keep`, they also give the features of the
    answers that they write now. Prompts that they do not answer are left out. Raises UserError if
    an answer is not what the target would say."""
    key, ranks = _key(target.parts, cfg, served=True), ranks_of(accelerator)
    folder = make_folder(Path(cfg.root) / key)
    share = Share.of("answers.shard", cfg.shard)
    mine = prompts if share is None else share.part(prompts)
    asked = {_name(prompt): prompt.ids.tolist() for prompt in mine}

    def documents() -> list[Document]:
        answers, _ = _read(folder, key, target.parts.vocab_size, asked)
        left_out = _unanswered(folder, key) - answers.keys()
        return _documents([p for p in prompts if _name(p) not in left_out], answers, None, folder)

    def known() -> set[str]:
        answers, damage = _read(folder, key, target.parts.vocab_size, asked)
        names = {*answers, *_unanswered(folder, key)}
        if damage and not names >= asked.keys():
            tell(f"{damage}: their prompts are answered again where this run needs them")
        return names

    if not (before := ranks.first(known)) >= asked.keys():
        _ask(target, asked, before, cfg, folder, key, keep, ranks, progress)
        accelerator.wait_for_everyone()
    return ranks.handed(documents) if share is None else []


def _ask(
    target: TargetOnDemand,
    asked: Mapping[str, Sequence[int]],
    known: Collection[str],
    cfg: AnswersConfig,
    folder: Path,
    key: str,
    keep: Store | None,
    ranks: Ranks,
    progress: Progress,
) -> None:
    """Let engines answer this process's share of the prompts that are not `known`. The first
    answers are compared with what the target would say. From then on, each is written as it comes,
    so that only requests under way are lost if the process is killed; with features, which are
    written before their answers, also those of the last two seconds. Prompts without an answer are
    noted at the end and not asked again, unless no engine answers any more; so are those that were
    refused before another mistake, if others had been answered in an earlier run."""
    mine = [name for name in asked if name not in known][ranks.rank :: ranks.world]
    parts = target.parts
    client = engines.engines_of("answers.from", cfg.engines, parts)
    engines.require_room_in(client, max(map(len, asked.values())) + cfg.max_new_tokens)
    sampler = Sampler(cfg.temperature, cfg.top_k, cfg.top_p)
    console.print(f"answers{' and features' if keep else ''} from {client.title}")
    task = progress.add_task("engine's answers", total=len(mine))
    path, failed = folder / f"{uuid4().hex}.jsonl", dict[str, Failed]()
    first, accepted = dict[str, engines.Answer](), dict[str, list[int]]()
    compared, written = False, time.monotonic()

    def write() -> None:
        nonlocal written
        if keep:
            keep.write()
        lines = [json.dumps(sealed({"prompt": n, "ids": x}, key)) for n, x in accepted.items()]
        if lines:
            with path.open("ab", buffering=0) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
        accepted.clear()
        written = time.monotonic()

    def accept(name: str, answer: engines.Answer) -> None:
        if keep:
            keep.keep(
                [*asked[name], *answer.ids], *engines.features_of(answer.states, parts), parts
            )
        accepted[name] = answer.ids
        late = time.monotonic() - written > SECONDS or (keep and keep.unwritten > AT_ONCE)
        if not keep or late:
            write()

    def compare() -> None:
        """Accept the first answers if they are the target's."""
        whole = None if keep or not first else target.whole()
        read = [
            (engines.final_of(whole, parts, asked[name], answer), answer.ids)
            for name, answer in first.items()
        ]
        engines.require_same_model(parts, read, sampler)
        for name, answer in first.items():
            accept(name, answer)
        first.clear()
        write()

    def note(failed: Mapping[str, Failed]) -> None:
        """Note which prompts have no answer, so that they are not asked again."""
        if not failed:
            return
        lines = [
            json.dumps(sealed({"prompt": name, "reason": x.reason}, key))
            for name, x in failed.items()
        ]
        write_whole(path.with_suffix(UNANSWERED), "".join(f"{line}\n" for line in lines))
        tell(
            f"{len(failed)} of {len(mine)} prompts were not answered and are left out, the first "
            f"because of {next(iter(failed.values())).reason}; to ask them again, delete "
            f"{path.with_suffix(UNANSWERED)}"
        )

    layers = None if keep is None else [*keep.kind.layers, parts.config.num_hidden_layers]
    prompts, seeds = {name: asked[name] for name in mine}, {name: _seed(name, cfg) for name in mine}
    how = sampler, cfg.max_new_tokens, max(1, cfg.batch // ranks.world)
    try:
        for name, answer in engines.answers_of(client, parts, prompts, seeds, *how, layers):
            progress.advance(task, 1)
            if isinstance(answer, Failed):
                failed[name] = answer
            elif compared:
                accept(name, answer)
            else:
                first[name] = answer
                if compared := len(first) == engines.COMPARED:
                    compare()
    except UserError:
        compare()  # what was received before the mistake
        if known:  # this engine has answered others, so these are at fault
            note({name: x for name, x in failed.items() if x.refused})
        raise
    compare()
    progress.remove_task(task)
    if failed:
        client.require_one()  # else it is the engine that failed, not these prompts
        reason = next(iter(failed.values())).reason
        require(len(failed) < len(asked), f"no prompt was answered, the first because of {reason}")
        note(failed)


def _unanswered(folder: Path, key: str) -> set[str]:
    """The prompts in a folder that engines did not answer."""
    files = [sealed_lines(path, ("prompt",), key) for path in folder.glob(f"*{UNANSWERED}")]
    return {str(entry["prompt"]) for entries, _ in files for entry in entries}


def _fitting(
    target: Target, asked: Mapping[str, Sequence[int]], cfg: AnswersConfig, ranks: Ranks
) -> int:
    """How many prompts to answer at once: `cfg.batch`, or as many as fit into the memory that is
    free in every process. Says so if these are fewer."""
    longest = max(asked.values(), key=len)
    fitting = ranks.shared(
        range(ranks.world), lambda _: rows_that_fit(target, longest, cfg.max_new_tokens)
    )
    size = min(cfg.batch, *(n for n in fitting if n is not None), cfg.batch)
    if size < cfg.batch:
        console.print(
            f"answers.batch={cfg.batch} does not fit into the memory that is free: {size} prompts "
            "are answered at once"
        )
    return size


def _documents(
    prompts: Sequence[Prompt],
    known: Mapping[str, Mapping[str, Any]],
    depth: int | None,
    folder: Path,
) -> list[Document]:
    """The documents of prompts whose answers are known; `of_answer` gives none for some of them.
    Raises Damaged if a prompt in the folder has lost its answer."""
    documents = []
    for prompt in prompts:
        if (kept := known.get(_name(prompt))) is None:
            raise Damaged(f"{folder} was damaged while this run answered: start it again")
        document = of_answer(prompt.id, prompt.ids, kept["ids"], kept.get("rounds"), depth)
        if document is not None:
            documents.append(document)
    return documents


def of_answer(
    name: str,
    prompt: Sequence[int] | NDArray[np.int32],
    answer: Sequence[int],
    rounds: Rounds | None = None,
    depth: int | None = None,
) -> Document | None:
    """The document of a prompt and its answer. With a `depth`, it also holds the rounds that
    drafted anything, cut to that depth; if there is no such round, the result is None."""
    ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(answer, np.int32)])
    document = Document(name, ids, np.arange(len(ids)) >= len(prompt))
    if depth is not None:
        document.rounds = np.full((len(ids), 1 + depth), -1, np.int32)
        drafts = [r for r in rounds or () if r[2]]
        for anchor, accepted, tokens in drafts:
            row = [min(accepted, depth), *tokens[:depth]]
            document.rounds[anchor, : len(row)] = row
        if not drafts:
            return None
    return document


def _batches(
    asked: Mapping[str, Sequence[int]], known: Collection[str], size: int
) -> list[list[str]]:
    """The prompts that have no answer yet, in batches. A continued run keeps the same batches,
    since rounding depends on a row's neighbours. Prompts of similar length go together, for less
    padding, but are sorted only within windows, so that an interrupted run has answers of all
    lengths."""
    names, window = list(asked), 8 * size
    windows = (names[start : start + window] for start in range(0, len(names), window))
    order = [name for some in windows for name in sorted(some, key=lambda name: len(asked[name]))]
    batches: list[list[str]] = []
    for start in range(0, len(order), size):
        left = [name for name in order[start : start + size] if name not in known]
        # batches of which another run has answered a part are joined
        if batches and len(batches[-1]) + len(left) <= size:
            batches[-1] += left
        elif left:
            batches.append(left)
    return batches


def _batches_of(
    share: Share,
    asked: Mapping[str, Sequence[int]],
    known: Collection[str],
    batch: int,
    size: int,
) -> list[list[str]]:
    """The batches of a share that have no answer yet. Which batches it has does not depend on what
    the others have answered by now, nor on how many prompts, `size`, fit here at once."""
    whole = share.part(_batches(asked, (), batch))
    left = ([name for name in names if name not in known] for names in whole)
    return [names[i : i + size] for names in left for i in range(0, len(names), size)]


def _key(target: Parts, cfg: AnswersConfig, served: bool = False) -> str:
    """The name of the folder for this target and way of answering, by engines if `served`."""
    how = asdict(cfg) | {"target": target.fingerprint(), "dtype": str(target.dtype)}
    if set(target.eos) != set(target.generation_eos):  # older answers ran on past the others
        how["eos"] = sorted(target.eos)
    for name in ("batch", "root", "engines", "shard"):  # these do not change the answers
        del how[name]
    if served:  # an engine may round otherwise, or compute in another precision
        how["engine"] = True
    if cfg.top_k == 0:  # older answers were all drawn without it
        del how["top_k"]
    return hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=8).hexdigest()


def _seed(name: str, cfg: AnswersConfig) -> int:
    """The seed of the prompt with this name."""
    return int(name, 16) % (1 << 62) + cfg.seed


def _name(prompt: Prompt) -> str:
    return hashlib.blake2b(json.dumps(prompt.ids.tolist()).encode(), digest_size=12).hexdigest()


def logged(path: Path, depth: int, target: Parts, leave_out: Sequence[Prompt]) -> list[Document]:
    """The answers in a log of rounds (see `specdec.decoding.logs`), which is a file or a folder of
    files, except for answers to the prompts in `leave_out`. Raises UserError if there is no file,
    if no answer remains, or if one cannot have been written by this target."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    require(
        bool(files) and all(file.is_file() for file in files),
        f"data.rounds={path}: no such file, or no .jsonl in that folder: write one with "
        "scripts/generate --log-rounds",
    )
    others, documents = {prompt.ids.tobytes() for prompt in leave_out}, []
    for file in files:
        lines, damaged = sealed_lines(file, ("prompt", "ids", "rounds"))
        if damaged:
            tell(f"{file}: {damaged} damaged lines are left out")
        for n, line in enumerate(lines, 1):
            where = f"{file}, record {n}"
            r = record(Logged, line, where)
            require(
                r.fits(target.vocab_size),
                f"{where}: its ids or anchors cannot be those of an answer of this target: give a "
                "log that was written with this target",
            )
            document = of_answer(f"{file.name}#{n}", r.prompt, r.ids, r.rounds, depth)
            if document is not None and np.array(r.prompt, np.int32).tobytes() not in others:
                documents.append(document)
    require(
        bool(documents),
        f"data.rounds={path}: no round in it to train on (answers to held-out prompts are left "
        "out): log more answers",
    )
    return documents


def _read(
    folder: Path, key: str, vocab: int, asked: Mapping[str, Sequence[int]]
) -> tuple[dict[str, dict[str, Any]], str]:
    """The answers of all runs and processes in a folder, by the name of the prompt, and a phrase
    for what is damaged there, if anything is. They were sealed with this `key`, and those that this
    run `asked` for fit their prompts."""
    by_prompt: dict[str, dict[str, Any]] = {}
    damaged: dict[str, int] = {}
    for path in sorted(folder.glob("*.jsonl")):
        entries, count = sealed_lines(path, ("prompt", "ids"), key)
        sane = [entry for entry in entries if _sane(entry, vocab, asked)]
        if count := count + len(entries) - len(sane):
            damaged[path.name] = count
        by_prompt |= {entry["prompt"]: entry for entry in sane}
    lines = ", ".join(f"{count} in {name}" for name, count in damaged.items())
    return by_prompt, f"{folder} has damaged lines ({lines})" if damaged else ""


def _sane(entry: Mapping[str, Any], vocab: int, asked: Mapping[str, Sequence[int]]) -> bool:
    """Whether an answer can have been written for a target with this vocabulary."""

    def tokens(ids: Any) -> bool:
        return isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab for i in ids)

    def end(entry: Mapping[str, Any]) -> float:
        prompt = asked.get(entry["prompt"])
        return math.inf if prompt is None else len(prompt) + len(entry["ids"])

    rounds = entry.get("rounds", [])
    return (
        isinstance(entry["prompt"], str)
        and set(entry) <= {"prompt", "ids", "rounds"}
        and tokens(entry["ids"])
        and isinstance(rounds, list)
        and all(isinstance(r, list) and len(r) == 3 and tokens(r[2]) for r in rounds)
        and all(type(r[0]) is int and type(r[1]) is int for r in rounds)
        and all(0 < r[0] < end(entry) and 0 <= r[1] <= len(r[2]) for r in rounds)
    )
