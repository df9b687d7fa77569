"""Responses to the prompts, by the target, a draft or both together, or by engines that serve the
target (engine_responses.py). They are kept in files from which a run resumes (response_files.py).
On-policy training also keeps the speculation steps of the decoder that wrote them. Logs of such
steps are read here too."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.progress import Progress

from specdec.context import HiddenStateSpec
from specdec.decoding.decode import decode
from specdec.decoding.draft_responses import draft_responses
from specdec.decoding.fitting import rows_that_fit
from specdec.decoding.logs import Logged, logged_steps
from specdec.decoding.way import Way
from specdec.drafters.base import Drafter
from specdec.errors import UserError, first_line, is_out_of_memory, require
from specdec.files import make_folder, record, sealed_lines, write_whole
from specdec.integrity import sealed
from specdec.progress import TOKENS, console, tell
from specdec.ranks import Ranks
from specdec.runtime.device import release
from specdec.sampling.trees import Chain
from specdec.targets.loading import TargetLoader
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.accelerated import ranks_of
from train.budget import StageTime
from train.data.engine_responses import responses_of_engines
from train.data.near_duplicates import within_conversations
from train.data.response_files import (
    ResponsesConfig,
    ResponsesRead,
    StoredResponses,
    name_of,
    read_stored_responses,
    response_document,
    response_documents,
    responses_key,
    seed_of,
)
from train.data.sequences import Document, Prompt
from train.hidden_states.store import HiddenStateStore
from train.shards import Shard, shard_of

LEAST_OF_SHARE = 32  # prompts; smaller shares are not worth other groups than those of one process
UNEVEN = 1.25  # times the mean that the largest share may have
GROUP = 4  # responses in one file, as a multiple of the prompts that are answered at once
# With a clock, the first prompts are answered few at a time, to time a response. Then as many are
# answered at once as one response, of those before, takes no more than a part of the time: when the
# time is up, so much of it is lost.
FIRST, PART = 16, 1 / 6


@dataclass
class Author:
    """A draft that writes responses together with the target: it proposes `gamma` tokens at a time,
    and those that `verification` accepts are kept. With `verification` None the draft writes alone.
    `folder` keeps these responses; `key` names the draft's weights. With `logged_depth`, documents
    also hold the decoder's speculation steps, each cut to that many drafted tokens, and documents
    without a step are skipped."""

    drafter: Drafter
    gamma: int
    verification: str | None
    folder: Path
    key: str = ""
    logged_depth: int | None = None


def documents_with_responses(
    target: TargetLoader,
    prompts: Sequence[Prompt],
    cfg: ResponsesConfig,
    accelerator: Accelerator,
    progress: Progress,
    keep: HiddenStateStore | None = None,
    author: Author | None = None,
    responses_read: ResponsesRead | None = None,
    time: StageTime | None = None,
) -> list[Document]:
    """Documents of prompt and response, in the order of the prompts; their masks mark the
    responses.

    The target answers some prompts at a time; when a response ends, the next prompt takes its row.
    After each group of prompts, the responses are written to a file by the names of their prompts,
    from which an interrupted run resumes; a run with more prompts generates only the new responses.
    The file is complete or absent, so that the groups, and thus rounding, stay the same. Each
    prompt has its own seed. Apart from rounding, its response does not depend on its neighbours, on
    interruptions, or on the number of processes. `keep` stores the hidden states that the target
    computes meanwhile. `responses_read` records the files that the run reads, so that it never
    reads those of another run.

    With a `time`, prompts are answered in a random but fixed order (by a hash) until the time is
    up, at least as many as its floor; only prompts with a response have a document. Responses of
    earlier runs count for the floor. Each process uses its own clock.

    With `cfg.engines` and no author, engines write the responses (`responses_of_engines`).
    """
    if cfg.engines and author is None:
        return responses_of_engines(
            target, prompts, cfg, accelerator, progress, keep, responses_read, time
        )
    key = responses_key(target.parts, cfg)
    folder = make_folder(author.folder if author else Path(cfg.root) / key)
    key = f"{key} {author.key}" if author else key
    asked = {name_of(prompt): prompt.ids.tolist() for prompt in prompts}
    ranks = ranks_of(accelerator, target)

    def recorded() -> dict[str, str]:
        return {} if responses_read is None else responses_read.files(folder.name)

    def stored_as(recorded: Mapping[str, str], own: Collection[str] = ()) -> StoredResponses:
        return read_stored_responses(folder, key, target.parts.vocab_size, asked, recorded, own)

    def known_now() -> set[str]:
        stored = stored_as(recorded())
        if stored.damage and not stored.by_prompt.keys() >= asked.keys():
            tell(f"{stored.damage}: their prompts are answered again where this run needs them")
        return set(stored.by_prompt)

    known = ranks.first(known_now)
    by_draft = author is not None and author.verification is None
    size, refills = cfg.at_once(), False
    if not by_draft and not known >= asked.keys():
        needs = (
            HiddenStateSpec()
            if keep is None
            else HiddenStateSpec(keep.kind.layers, final_hidden=True)
        )
        size = _fitting(target.whole(), asked, cfg, ranks, needs)
        refills = author is None and target.whole().refills
    share = None if author else shard_of("responses.shard", cfg.shard)
    whole = cfg.at_once() if share else size
    if refills:
        whole = min(GROUP * whole, max(whole, math.ceil(len(asked) / (GROUP * ranks.world))))
    groups = _groups_of(share, asked, known, whole) if share else _groups(asked, known, whole)
    if not refills:
        groups = _cut(groups, size)
    if time is not None:  # a group for each prompt: `next_group` joins them
        groups = [[name] for name in sorted(asked.keys() - known)]
        time.floor = max(0, time.floor - len(known & asked.keys()))
        time.floor = math.ceil(time.floor / ranks.workers)
    elif keep is not None and (unwritten := [asked[name] for group in groups for name in group]):
        keep.prepare_for_responses(unwritten, cfg.longest_response)
    whose = "draft's" if by_draft else "draft's and target's" if author else "target's"
    task = progress.add_task(f"{whose} responses", total=None, unit=TOKENS)
    sampler = cfg.sampler
    way = Way(sampler=sampler)
    if author and author.verification is not None:
        way = Way(author.drafter, Chain(author.gamma), sampler, author.verification)

    def write(group: Sequence[str]) -> list[dict[str, Any]]:
        """The responses to these prompts, given by name."""
        asking = [asked[name] for name in group]
        seeds = [seed_of(name, cfg) for name in group]
        if author and author.verification is None:
            most, eos = cfg.longest_response, target.parts.eos
            texts = draft_responses(author.drafter, asking, sampler, seeds, most, eos)
            for n, ids in enumerate(texts):
                count(n, ids, None)
            return [{"ids": ids} for ids in texts]
        responses = decode(
            target.whole(),
            asking,
            way,
            max_new_tokens=cfg.longest_response,
            seeds=seeds,
            on_tokens=count,
            record=keep.record(target.whole()) if keep else None,
            at_once=min(at_once, size) if refills else None,
            goes_on=None if time is None else goes_on,
        )
        entries: list[dict[str, Any]] = [{"ids": response.ids} for response in responses]
        if author and author.logged_depth:
            for entry, response in zip(entries, responses, strict=True):
                entry["speculation_steps"] = logged_steps(response)
        return entries

    files: list[str] = []  # files that this process writes
    at_once = size if time is None else min(size, FIRST)
    tokens = generating = 0  # tokens so far; responses that were begun and are not in a file

    def count(_row: int, ids: Sequence[int], step: Any) -> None:
        """Count the new tokens of a response; the first ones come without a step."""
        nonlocal tokens, generating
        tokens, generating = tokens + len(ids), generating + (step is None)
        progress.advance(task, len(ids))

    def ahead(rows: int) -> float:
        """The estimated seconds until the responses being written end, from the speed so far, if
        they get as long as possible."""
        return time.used * rows * cfg.longest_response / tokens if time and tokens else 0.0

    def goes_on() -> bool:
        """Whether waiting prompts of a group are still started."""
        return time is None or time.goes_on(ahead(at_once), time.floor - generating)

    def next_group(groups: list[list[str]]) -> list[str]:
        """Remove and return the prompts to answer next; empty if the time is up."""
        nonlocal at_once
        if time is None or not groups:
            return groups.pop(0) if groups else []
        if not time.goes_on(ahead(at_once) / 2):
            return []
        while 2 * at_once <= size and 0 < ahead(at_once) <= PART * time.seconds:
            at_once *= 2
        count = at_once * (GROUP if refills and tokens else 1)
        taken, groups[:] = groups[:count], groups[count:]
        return [name for group in taken for name in group]

    def write_all(groups: list[list[str]]) -> None:
        """Write the responses to these groups of prompts."""
        nonlocal size, at_once, generating
        written = 0  # tokens in files
        progress.update(task, total=sum(map(len, groups)) * cfg.longest_response)
        while group := next_group(groups):
            if keep is not None and time is not None:
                keep.prepare(sum(len(asked[name]) + cfg.longest_response for name in group))
            generating = 0
            try:
                records, reason = write(group), ""
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                records, reason = [], first_line(error)[:120]
            if reason:  # out here, where the error no longer holds the memory of the failed batch
                size = min(size, len(group))
                if size == 1:
                    raise UserError(
                        f"memory ran out while answering a single prompt ({reason}): lower "
                        "responses.max_new_tokens or data.max_prompt, or give "
                        "target.dtype=bfloat16; responses written so far are kept"
                    )
                release()
                progress.update(task, completed=written)
                console.print(
                    f"memory ran out for {size} responses at once: from now on {size // 2} are "
                    "tried"
                )
                size //= 2
                at_once = min(at_once, size)
                groups[:0] = [group] if time is None else [[name] for name in group]
                groups[:] = groups if refills else _cut(groups, size)
                continue
            group = group[: len(records)]
            if time is not None:
                time.finish(len(records))
            written += sum(len(entry["ids"]) for entry in records)
            if keep:
                keep.write()
            lines = [
                json.dumps(sealed({"prompt": name} | entry, key))
                for name, entry in zip(group, records, strict=True)
            ]
            files.append(f"{uuid4().hex}.jsonl")
            write_whole(folder / files[-1], "".join(f"{line}\n" for line in lines))

    with ranks.part(groups) as mine:
        write_all([*mine])
    progress.remove_task(task)
    accelerator.wait_for_everyone()
    if share is not None:  # the other shares may not be written yet
        return []
    depth, own = author.logged_depth if author else None, gather_object(files)

    def documents() -> list[Document]:
        stored = stored_as({name: file for name, file in recorded().items() if name in known}, own)
        answered = [p for p in prompts if time is None or name_of(p) in stored.by_prompt]
        read_now = response_documents(answered, stored.by_prompt, depth, folder)
        if responses_read is not None:
            names = [name for name in asked if time is None or name in stored.files]
            responses_read.record(folder.name, {name: stored.files[name] for name in names})
        return read_now

    return ranks.handed(documents)


def _fitting(
    target: Target,
    asked: Mapping[str, Sequence[int]],
    cfg: ResponsesConfig,
    ranks: Ranks,
    needs: HiddenStateSpec,
) -> int:
    """The number of prompts to answer at once: that in `cfg`, or as many as fit into the free
    memory of every process. Prints a line if these are fewer."""
    longest = max(asked.values(), key=len)
    fitting = ranks.map(
        range(ranks.world), lambda _: rows_that_fit(target, longest, cfg.longest_response, needs)
    )
    usual = cfg.at_once(target.device.type != "cpu")
    size = min(usual, *(n for n in fitting if n is not None), usual)
    if size < usual:
        console.print(
            f"{usual} responses at once do not fit into the memory that is free: {size} prompts "
            "are answered at once"
        )
    return size


def _groups(
    asked: Mapping[str, Sequence[int]], known: Collection[str], size: int
) -> list[list[str]]:
    """The prompts without a response, in groups. A continued run keeps the same groups, since
    rounding depends on a row's neighbours. Prompts of similar length go together, for less padding,
    but are sorted only within windows, so that an interrupted run has responses of all lengths."""
    names, window = list(asked), 8 * size
    windows = (names[start : start + window] for start in range(0, len(names), window))
    order = [name for some in windows for name in sorted(some, key=lambda name: len(asked[name]))]
    groups: list[list[str]] = []
    for start in range(0, len(order), size):
        left = [name for name in order[start : start + size] if name not in known]
        # groups of which another run has answered a part are joined
        if groups and len(groups[-1]) + len(left) <= size:
            groups[-1] += left
        elif left:
            groups.append(left)
    return groups


def _groups_of(
    share: Shard, asked: Mapping[str, Sequence[int]], known: Collection[str], size: int
) -> list[list[str]]:
    """The groups of a shard, without the prompts that have a response. The groups of a shard depend
    neither on the progress of the others nor on the machine. They are those of one process, with
    the same rounding, unless a shard would get far more prompts than another: then groups are
    smaller, and all shards have equally many."""
    every = _groups(asked, (), size)
    most = max(sum(map(len, every[n :: share.count])) for n in range(share.count))
    even = len(asked) / share.count
    if even >= LEAST_OF_SHARE and most > UNEVEN * even:
        groups_each = math.ceil(even / size)
        every = _groups(asked, (), math.ceil(even / groups_each))
    groups = ([name for name in names if name not in known] for names in share.part(every))
    return [group for group in groups if group]


def _cut(groups: Sequence[Sequence[str]], size: int) -> list[list[str]]:
    """The groups, cut into parts of at most this size."""
    return [[*g[i : i + size]] for g in groups for i in range(0, len(g), size)]


def documents_of_log(
    path: Path, depth: int, target: TargetParts, leave_out: Sequence[Prompt | Document]
) -> list[Document]:
    """The responses in a log of speculation steps (see `specdec.decoding.logs`), which is a file or
    a folder of files, except those in the conversations of `leave_out`, at any turn. Raises
    UserError if there is no file, if no response remains, or if one cannot be from this target."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    require(
        bool(files) and all(file.is_file() for file in files),
        f"data.decoding_log={path}: no such file, or no .jsonl in that folder: write one with "
        "scripts/generate --log-steps",
    )
    others = {prompt.ids.tobytes() for prompt in leave_out if isinstance(prompt, Prompt)}
    documents, texts, left_out = list[Document](), list[str](), 0
    for file in files:
        lines, damaged = sealed_lines(file, ("prompt", "ids", "speculation_steps"))
        if damaged:
            tell(f"{file}: {damaged} damaged lines are left out")
        for n, line in enumerate(lines, 1):
            where = f"{file}, record {n}"
            r = record(Logged, line, where)
            require(
                r.fits(target.vocab_size),
                f"{where}: its ids or anchors cannot be those of a response of this target: give a "
                "log that was written with this target",
            )
            document = response_document(
                f"{file.name}#{n}", r.prompt, r.ids, r.speculation_steps, depth
            )
            if document is None:
                continue
            if np.array(r.prompt, np.int32).tobytes() in others:
                left_out += 1
                continue
            documents.append(document)
            texts.append(target.tokenizer.decode(r.prompt) if target.tokenizer else "")
    within = within_conversations(texts, [text.opening for text in leave_out])
    documents = [document for n, document in enumerate(documents) if n not in within]
    if left_out := left_out + len(within):
        console.print(
            f"data.decoding_log: {left_out:,} responses belong to held-out conversations: they are "
            "not trained on"
        )
    require(
        bool(documents),
        f"data.decoding_log={path}: no speculation step in it to train on (responses to held-out "
        "prompts are left out): log more responses",
    )
    return documents
