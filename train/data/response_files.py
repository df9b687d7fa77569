"""The settings for generating responses, and the files that hold the responses."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.logs import LoggedSteps
from specdec.engines.client import Server
from specdec.errors import require, require_within
from specdec.files import read_json, sealed_lines, write_json
from specdec.integrity import Damaged
from specdec.measure.results import CutResponses
from specdec.sampling.sampler import Sampler, require_temperature, require_top_k, require_top_p
from specdec.targets.parts import UNBOUNDED, TargetParts
from train.data.conversations import settled_number
from train.data.sequences import Document, Prompt, uniform_token_weights
from train.shards import shard_of

MANY, MANY_ON_GPU = 128, 512  # prompts that are answered at once by default
WITHOUT_RESPONSE = ".failed"  # ends the names of files that note which prompts have no response
RESPONSES_READ = "responses.json"  # in a run's folder: which file each of its responses is from


@dataclass
class ResponsesConfig:
    """The settings for generating responses with `data.responses=target`."""

    # temperature; 0: greedy; null: that of the target's generation_config.json, which servers use,
    # or 0 without one
    temperature: float | None = None
    # nucleus of this probability mass; 1: all tokens; null: by generation_config.json, or 1
    top_p: float | None = None
    # the most likely tokens sampled from; 0: all; null: by generation_config.json, or 0
    top_k: int | None = None
    # most tokens of a response; longer responses are cut; null: data.max_length - data.max_prompt
    max_new_tokens: int | None = None
    # prompts generated at once, or fewer if the free memory fits fewer; null: 128, or 512 on a GPU
    batch: int | None = None
    seed: int = 0  # seed of the sampling
    root: str = "cache/responses"  # folder of the cached responses
    # addresses of servers of the target that generate the responses, set by
    # responses.from=http://host:8000/v1 on the command line, with commas between several; empty:
    # this process generates them
    engines: list[str] = field(default_factory=list)
    # such as 2/8: generate this shard of the responses and end; once all are done, the same command
    # without it trains; null: all in one run
    shard: str | None = None

    def __post_init__(self) -> None:
        seeds = (0, 2**32 - 1)
        for url in self.engines:
            Server.at_address("responses.from", url)
        shard_of("responses.shard", self.shard)
        require_within("responses", self, max_new_tokens=1, batch=1, seed=seeds)
        if self.temperature is not None:
            require_temperature("responses.temperature", self.temperature)
        require_top_k("responses", self.top_k)
        require_top_p("responses", self.top_p)
        require(bool(self.root.strip()), "responses.root is empty: give a folder")

    @property
    def longest_response(self) -> int:
        """`max_new_tokens`. Raises UserError while it is null (see `train.target_defaults`)."""
        return settled_number("responses.max_new_tokens", self.max_new_tokens)

    @property
    def sampler(self) -> Sampler:
        """The sampler of responses. Raises UserError while one of the settings is null."""
        return Sampler(
            temperature=settled_number("responses.temperature", self.temperature),
            top_k=settled_number("responses.top_k", self.top_k),
            top_p=settled_number("responses.top_p", self.top_p),
        )

    @property
    def sampling(self) -> str:
        """A description of the sampling."""
        sampler = self.sampler
        if sampler.greedy:
            return "greedy"
        cutoffs = f", top-k {sampler.top_k}" if sampler.top_k else ""
        cutoffs += f", top-p {sampler.top_p:g}" if sampler.top_p < 1 else ""
        return f"sampled at temperature {sampler.temperature:g}{cutoffs}"

    def at_once(self, gpu: bool = False) -> int:
        """The number of prompts to answer at once, if memory allows."""
        return self.batch or (MANY_ON_GPU if gpu else MANY)


def responses_key(target: TargetParts, cfg: ResponsesConfig, served: bool = False) -> str:
    """The name of the folder for responses of this target with these settings, by engines if
    `served`. It includes the ids that end a response: responses generated with other ids may run
    past their end, or stop early."""
    sampler = cfg.sampler
    how = (
        asdict(cfg) | asdict(sampler) | {"target": target.fingerprint(), "dtype": str(target.dtype)}
    )
    how["eos"] = sorted(target.eos)
    for name in ("batch", "root", "engines", "shard"):  # these do not change the responses
        del how[name]
    if served:  # an engine may round otherwise, or compute in another precision
        how["engine"] = True
        how["response_end"] = target.response_end  # added where an engine strips it
    if sampler.top_k == 0:  # older responses were all drawn without it
        del how["top_k"]
    return hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=8).hexdigest()


def seed_of(name: str, cfg: ResponsesConfig) -> int:
    """The seed of the prompt with this name."""
    return int(name, 16) % (1 << 62) + cfg.seed


def name_of(prompt: Prompt) -> str:
    return hashlib.blake2b(json.dumps(prompt.ids.tolist()).encode(), digest_size=12).hexdigest()


class ResponsesRead:
    """The file in a folder of responses from which a run has read each response. The run keeps this
    record and always reads a prompt's response from that file: other runs that share the folder may
    write other responses to the same prompts, as rounding differs. Raises UserError for a damaged
    record."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESPONSES_READ

    def files(self, key: str) -> dict[str, str]:
        """File names in the folder `key`, by the name of the prompt."""
        prompts_by_file = self._all().get(key, {})
        return {prompt: file for file, prompts in prompts_by_file.items() for prompt in prompts}

    def record(self, key: str, files: Mapping[str, str]) -> None:
        """Record the files from which responses were read, by the name of the prompt."""
        before = self.files(key)
        if (after := {**before, **files}) == before:
            return
        prompts_by_file: dict[str, list[str]] = {}
        for prompt, file in after.items():
            prompts_by_file.setdefault(file, []).append(prompt)
        write_json(self.path, self._all() | {key: prompts_by_file})

    def _all(self) -> dict[str, dict[str, list[str]]]:
        return dict(read_json(self.path)) if self.path.exists() else {}


@dataclass
class StoredResponses:
    """The responses in a folder and their file names, both by the name of the prompt, and a phrase
    that describes damaged or unreadable files."""

    by_prompt: dict[str, dict[str, Any]]
    files: dict[str, str]
    damage: str


def read_stored_responses(
    folder: Path,
    key: str,
    vocab: int,
    asked: Mapping[str, Sequence[int]],
    recorded: Mapping[str, str] | None = None,
    own: Collection[str] = (),
) -> StoredResponses:
    """The responses of all runs and processes in a folder, if their checksum fits this `key` and
    they fit the prompts in `asked`. Of several responses to a prompt, only the one in its
    `recorded` file is read; without a record, the one in a file of this run (`own`) has priority.
    Raises Unreadable for a recorded file that cannot be read."""
    recorded = recorded or {}
    named = {*recorded.values()}
    responses = StoredResponses({}, {}, "")
    damaged: dict[str, int] = {}
    refused: list[str] = []
    paths = sorted(folder.glob("*.jsonl"), reverse=True)
    for path in sorted(paths, key=lambda path: path.name not in own):
        try:
            entries, count = sealed_lines(path, ("prompt", "ids"), key)
        except PermissionError:
            if path.name in named:
                raise
            refused.append(path.name)
            continue
        sane = [entry for entry in entries if _sane(entry, vocab, asked)]
        if count := count + len(entries) - len(sane):
            damaged[path.name] = count
        for prompt, entry in {entry["prompt"]: entry for entry in sane}.items():
            if recorded.get(prompt, path.name) == path.name:
                responses.by_prompt.setdefault(prompt, entry)
                responses.files.setdefault(prompt, path.name)
    if damaged:
        lines = ", ".join(f"{count} in {name}" for name, count in damaged.items())
        responses.damage = f"{folder} has damaged lines ({lines})"
    elif refused:
        responses.damage = f"{folder} has files that this user may not read ({', '.join(refused)})"
    return responses


def _sane(entry: Mapping[str, Any], vocab: int, asked: Mapping[str, Sequence[int]]) -> bool:
    """Whether a response can be from a target with this vocabulary."""

    def tokens(ids: Any) -> bool:
        return isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab for i in ids)

    def end(entry: Mapping[str, Any]) -> float:
        prompt = asked.get(entry["prompt"])
        return math.inf if prompt is None else len(prompt) + len(entry["ids"])

    speculation_steps = entry.get("speculation_steps", [])
    return (
        isinstance(entry["prompt"], str)
        and set(entry) <= {"prompt", "ids", "speculation_steps"}
        and tokens(entry["ids"])
        and isinstance(speculation_steps, list)
        and all(isinstance(r, list) and len(r) == 3 and tokens(r[2]) for r in speculation_steps)
        and all(type(r[0]) is int and type(r[1]) is int for r in speculation_steps)
        and all(0 < r[0] < end(entry) and 0 <= r[1] <= len(r[2]) for r in speculation_steps)
    )


def without_response(folder: Path, key: str) -> set[str]:
    """The prompts in a folder for which engines gave no response."""
    files = [sealed_lines(path, ("prompt",), key) for path in folder.glob(f"*{WITHOUT_RESPONSE}")]
    return {str(entry["prompt"]) for entries, _ in files for entry in entries}


def response_documents(
    prompts: Sequence[Prompt],
    known: Mapping[str, Mapping[str, Any]],
    depth: int | None,
    folder: Path,
) -> list[Document]:
    """The documents of prompts with known responses; for some of them `response_document` returns
    None. Raises Damaged if a prompt in the folder has lost its response."""
    documents = []
    for prompt in prompts:
        if (kept := known.get(name_of(prompt))) is None:
            raise Damaged(f"{folder} was damaged while this run answered: start it again")
        document = response_document(
            prompt.id, prompt.ids, kept["ids"], kept.get("speculation_steps"), depth
        )
        if document is not None:
            document.weight = uniform_token_weights(len(document.ids), prompt.weight)
            document.opening, document.placed = prompt.opening, prompt.placed
            documents.append(document)
    return documents


def response_document(
    name: str,
    prompt: Sequence[int] | NDArray[np.int32],
    response: Sequence[int],
    speculation_steps: LoggedSteps | None = None,
    depth: int | None = None,
) -> Document | None:
    """The document of a prompt and its response. With a `depth`, it also holds the speculation
    steps with drafts, cut to that depth; None if there is no such step."""
    ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(response, np.int32)])
    document = Document(name, ids, np.arange(len(ids)) >= len(prompt))
    if depth is not None:
        document.speculation_steps = np.full((len(ids), 1 + depth), -1, np.int32)
        drafts = [r for r in speculation_steps or () if r[2]]
        for anchor, accepted, tokens in drafts:
            row = [min(accepted, depth), *tokens[:depth]]
            document.speculation_steps[anchor, : len(row)] = row
        if not drafts:
            return None
    return document


def cut_responses(
    documents: Sequence[Document],
    eos: Collection[int],
    cfg: ResponsesConfig,
    positions: int | None = None,
) -> CutResponses:
    """Count the cut responses among documents that end in the target's response. A response was cut
    if it has the maximum number of tokens and does not end with a stop token (`eos`). `positions`
    is the target's limit for a document."""
    responses = [(int((~d.mask).sum()), d.ids[d.mask].tolist()) for d in documents if d.mask.any()]
    return _count_cut(responses, eos, cfg, positions)


def cut_responses_in_cache(
    target: TargetParts, prompts: Sequence[Prompt], cfg: ResponsesConfig
) -> CutResponses | None:
    """The counts of `cut_responses` for stored responses to these prompts; None if there are
    none."""
    responses = _responses_in_cache(target, prompts, cfg)
    return _count_cut(responses, target.eos, cfg, target.positions) if responses else None


def response_lengths_in_cache(
    target: TargetParts, prompts: Sequence[Prompt], cfg: ResponsesConfig
) -> list[tuple[int, int]]:
    """The numbers of tokens of prompt and response, for each of these prompts with a stored
    response."""
    return [(asked, len(ids)) for asked, ids in _responses_in_cache(target, prompts, cfg)]


def _responses_in_cache(
    target: TargetParts, prompts: Sequence[Prompt], cfg: ResponsesConfig
) -> list[tuple[int, list[int]]]:
    """The number of tokens of each prompt that has a stored response, and that response."""
    asked = {name_of(prompt): prompt.ids.tolist() for prompt in prompts}
    key = responses_key(target, cfg, bool(cfg.engines))
    folder = Path(cfg.root) / key
    if not folder.is_dir():
        return []
    stored = read_stored_responses(folder, key, target.vocab_size, asked).by_prompt
    return [(len(asked[name]), stored[name]["ids"]) for name in asked if name in stored]


def _count_cut(
    responses: Sequence[tuple[int, Sequence[int]]],
    eos: Collection[int],
    cfg: ResponsesConfig,
    positions: int | None,
) -> CutResponses:
    most = cfg.longest_response
    cut = sum(len(ids) >= most and ids[-1] not in eos for _, ids in responses)
    longest = max((prompt for prompt, _ in responses), default=0)
    return CutResponses(
        responses=len(responses),
        cut=cut,
        max_new_tokens=most,
        room=None if positions in (None, UNBOUNDED) else positions - longest,
        sampling=cfg.sampling,
    )
