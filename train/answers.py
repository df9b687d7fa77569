"""On-policy data: the target answers the prompts itself, in batches, into a file that resumes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from rich.progress import Progress

from specdec.decode import decode
from specdec.sampler import Sampler
from specdec.target import Target
from train.data import Document, Prompt


@dataclass
class AnswersConfig:
    """How the target answers with `data.answers=target`; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 192
    batch: int = 128
    seed: int = 0
    root: str = "cache/answers"


def answered(
    target: Target,
    prompts: Sequence[Prompt],
    cfg: AnswersConfig,
    accelerator: Accelerator,
    progress: Progress,
) -> list[Document]:
    """Documents of prompt and answer, in the order of the prompts; loss on the answer only.

    Answers are appended to a file as each batch ends, so that an interrupted run goes on where
    it stopped. Each batch has a seed of its own: the answers do not depend on interruptions,
    nor on the number of processes that share the batches, each with a file of its own.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    folder = Path(cfg.root) / _key(target, prompts, cfg)
    folder.mkdir(parents=True, exist_ok=True)
    known = _read_all(folder)
    accelerator.wait_for_everyone()
    path = folder / f"{rank}.jsonl"
    # Prompts of like length go together: less padding. Windows keep the order roughly, so that
    # the batches of a smaller `data.limit` are among those of a larger one.
    window = 8 * cfg.batch
    order = [
        i
        for start in range(0, len(prompts), window)
        for i in sorted(
            range(start, min(start + window, len(prompts))), key=lambda i: len(prompts[i].ids)
        )
    ]
    batches = [order[i : i + cfg.batch] for i in range(0, len(order), cfg.batch)]
    todo = [(n, b) for n, b in enumerate(batches) if any(prompts[i].id not in known for i in b)]
    todo = todo[rank::world]
    task = progress.add_task(
        "target's answers", total=sum(len(b) for _, b in todo) * cfg.max_new_tokens
    )
    sampler = Sampler(cfg.temperature, top_p=cfg.top_p)
    for n, batch in todo:
        answers = decode(
            target,
            [prompts[i].ids for i in batch],
            max_new_tokens=cfg.max_new_tokens,
            sampler=sampler,
            seeds=[(cfg.seed * 1_000_003 + n) * 1_009 + b for b in range(len(batch))],
            on_tokens=lambda _row, ids, _round: progress.advance(task, len(ids)),
        )
        with path.open("a") as file:
            for i, answer in zip(batch, answers, strict=True):
                file.write(json.dumps({"id": prompts[i].id, "ids": answer.ids}) + "\n")
    progress.remove_task(task)
    accelerator.wait_for_everyone()
    known = _read_all(folder)
    return [
        Document(p.id, p.ids + known[p.id], [False] * len(p.ids) + [True] * len(known[p.id]))
        for p in prompts
    ]


def _key(target: Target, prompts: Sequence[Prompt], cfg: AnswersConfig) -> str:
    """One folder for each target, sampler and set of prompts."""
    how = [target.fingerprint(), str(target.dtype), cfg.temperature, cfg.top_p]
    how += [cfg.max_new_tokens, cfg.batch, cfg.seed]
    digest = hashlib.blake2b(json.dumps(how).encode(), digest_size=8)
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.ids]).encode())
    return digest.hexdigest()


def _read_all(folder: Path) -> dict[str, list[int]]:
    """The answers of all processes, also of an earlier run that had more of them."""
    known: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        known |= _read(path)
    return known


def _read(path: Path) -> dict[str, list[int]]:
    """The answers that are there already; a last line that was cut short is cut off the file."""
    known, whole = {}, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            known[entry["id"]] = entry["ids"]
            whole += len(line)
    if whole < path.stat().st_size:
        with path.open("rb+") as file:
            file.truncate(whole)
    return known
