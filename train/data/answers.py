"""The target answers the prompts, alone or with a draft, in batches, into files that resume."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray
from rich.progress import Progress

from specdec.decoding.decode import decode
from specdec.drafters import Drafter
from specdec.errors import require, require_within
from specdec.files import make_folder, read_lines
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain
from specdec.target.loading import TargetOnDemand
from specdec.target.parts import Parts
from train.data.template import Document, Prompt
from train.features.store import Store


@dataclass
class AnswersConfig:
    """How the target answers with `data.answers=target`; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 192
    batch: int = 128
    seed: int = 0
    root: str = "cache/answers"

    def __post_init__(self) -> None:
        seeds = (0, 2**32 - 1)
        require_within("answers", self, temperature=0, max_new_tokens=1, batch=1, seed=seeds)
        require(0 < self.top_p <= 1, f"answers.top_p={self.top_p}: give a number above 0, up to 1")
        require(bool(self.root.strip()), "answers.root is empty: give a folder")


@dataclass
class Author:
    """A draft that writes answers together with the target: it proposes `gamma` tokens at a time,
    and those that `rule` accepts are kept. These answers have their own `folder`."""

    drafter: Drafter
    gamma: int
    rule: str
    folder: Path


def answered(
    target: TargetOnDemand,
    prompts: Sequence[Prompt],
    cfg: AnswersConfig,
    accelerator: Accelerator,
    progress: Progress,
    keep: Store | None = None,
    author: Author | None = None,
) -> list[Document]:
    """Documents of prompt and answer, in the order of the prompts; loss on the answer only.

    As each batch ends, its answers are appended to a file, each with the name of its prompt: an
    interrupted run continues where it stopped, and a run with more conversations answers only the
    new prompts. Each prompt has its own seed, so its answer does not depend on the batch, on
    interruptions, or on how many processes share the work. `keep` stores the features that the
    target computes as it answers.
    """
    folder = make_folder(author.folder if author else Path(cfg.root) / _key(target.parts, cfg))
    asked = {_name(prompt): prompt.ids.tolist() for prompt in prompts}
    known = _read(folder)
    accelerator.wait_for_everyone()
    world, rank = accelerator.num_processes, accelerator.process_index
    batches = _batches(asked, known, cfg.batch)[rank::world]
    total = sum(map(len, batches)) * cfg.max_new_tokens
    whose = "draft's and target's" if author else "target's"
    task = progress.add_task(f"{whose} answers", total=total)
    path = folder / f"{uuid4().hex}.jsonl"  # no two processes write to the same file
    for batch in batches:
        answers = decode(
            target.whole(),
            [asked[name] for name in batch],
            max_new_tokens=cfg.max_new_tokens,
            drafter=author.drafter if author else None,
            shape=Chain(author.gamma) if author else None,
            rule=author.rule if author else "auto",
            sampler=Sampler(cfg.temperature, top_p=cfg.top_p),
            seeds=[int(name, 16) % (1 << 62) + cfg.seed for name in batch],
            on_tokens=lambda _row, ids, _round: progress.advance(task, len(ids)),
            record=keep.record(target.whole()) if keep else None,
        )
        if keep:
            keep.write()
        with path.open("a") as file:
            for name, answer in zip(batch, answers, strict=True):
                file.write(json.dumps({"prompt": name, "ids": answer.ids}) + "\n")
    progress.remove_task(task)
    accelerator.wait_for_everyone()
    known, documents = _read(folder), []
    for prompt in prompts:
        ids = np.concatenate([prompt.ids, known[_name(prompt)]])
        documents.append(Document(prompt.id, ids, np.arange(len(ids)) >= len(prompt.ids)))
    return documents


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
        if batches and len(batches[-1]) + len(left) <= size:  # another run answered the others
            batches[-1] += left
        elif left:
            batches.append(left)
    return batches


def _key(target: Parts, cfg: AnswersConfig) -> str:
    """The name of the folder for this target and way of answering."""
    how = asdict(cfg) | {"target": target.fingerprint(), "dtype": str(target.dtype)}
    for name in ("batch", "root"):  # neither changes an answer
        del how[name]
    return hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=8).hexdigest()


def _name(prompt: Prompt) -> str:
    return hashlib.blake2b(json.dumps(prompt.ids.tolist()).encode(), digest_size=12).hexdigest()


def _read(folder: Path) -> dict[str, NDArray[np.int32]]:
    """The answers of all runs and processes."""
    files = sorted(folder.glob("*.jsonl"))
    found = (r for path in files for r in read_lines(path, ("prompt", "ids")))
    return {r["prompt"]: np.array(r["ids"], np.int32) for r in found}
