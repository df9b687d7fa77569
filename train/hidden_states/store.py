"""The target's hidden states on disk, by document: a `HiddenStateStore` is filled from any source,
and `StoredBatches` is a source that reads it. A document is found by its tokens, independent of the
run's other documents and of packing. The header of a file has a checksum of each document in it,
which is checked at each reading; damaged documents are computed again."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from specdec.context import Context, HiddenStateSpec
from specdec.decoding.generation import Record
from specdec.engines.client import Server
from specdec.errors import (
    Unreadable,
    UserError,
    first_line,
    require,
    require_known,
    require_within,
)
from specdec.files import (
    make_folder,
    new_file,
    read_record,
    reading,
    remove_abandoned,
    require_file,
    write_json,
)
from specdec.forcing.batch import summarise
from specdec.integrity import Damaged, of_tensors
from specdec.progress import console, tell
from specdec.sampling.sampler import Sampler, Summary
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target
from train.data.sequences import Row
from train.shards import shard_of

# the names of tensors, see `parts_of`; the last but one is stored if the sampler has cutoffs, the
# last if the drafter reads layers
PARTS = ("final", "log_z", "threshold", "argmax", "whole_log_z", "layers")
AFTER = "after_"  # begins the names of the same parts after drafted tokens [N, K, …]
# for the tokens of one document [T, …], or of rows [B, T, …]
HiddenStateTensors = dict[str, Tensor]
# Block-wise 8-bit quantisation: whole numbers from -127 to 127, and a scale for each block of
# neighbouring numbers of a state. A few numbers of a state may be a thousand times as large as the
# others; with a scale for each block, only their neighbours are rounded coarsely.
LARGEST = 127
BLOCK = 64  # numbers that share a scale, at most
SCALE = torch.bfloat16  # in which scales are kept

SCALES = "scales"  # the name of a tensor beside `layers`, where these are stored in 8 bits
SHARD = 64  # rows whose documents go into one file
OPEN = 64  # files kept open at a time
RECORDED = 1 << 30  # bytes of hidden states that are kept while a target answers
SUMS = "checksums"  # key in a file's metadata: checksums of its documents as JSON by name


@dataclass
class HiddenStatesConfig:
    """The target's hidden states, which the draft reads in training."""

    # offline: compute each document's hidden states once, store them, and read them in every epoch;
    # online: run the target at every step and store nothing; none: pretrain on text without running
    # the target in training: each hidden state that the draft reads is a stand-in, the target's
    # embedding of the token, and the loss reads the text's own tokens (ce, d_pace, spec_auf)
    mode: str = "offline"
    # folder of the stored hidden states; null: one under root, named after their inputs
    path: str | None = None
    root: str = "cache/hidden_states"  # parent folder of the stored hidden states
    # addresses of servers of the target that compute the hidden states, so that its layers are
    # never loaded here; they generate the responses too unless responses.engines names others; set
    # by hidden_states.from=http://host:8000/v1, with commas between several; empty: this process
    # computes them
    engines: list[str] = field(default_factory=list)
    prefetch: int = 2  # batches that a thread reads ahead of training; 0: none
    # such as 2/8: store this shard of the hidden states and end; once all are done, the same
    # command without it trains; null: all in one run
    shard: str | None = None
    # 8: the layers read by the draft are stored with block-wise 8-bit quantisation, the final
    # states in full; null: no quantisation
    bits: int | None = None

    def __post_init__(self) -> None:
        require_known("hidden_states", self, mode=("offline", "online", "none"))
        for url in self.engines:
            Server.at_address("hidden_states.from", url)
        require(
            not self.engines or self.mode == "offline",
            "hidden_states.from fills a store of the training texts, and training with "
            f"hidden_states.mode={self.mode} reads no store of its texts: leave one of them out",
        )
        require_within("hidden_states", self, prefetch=0)
        shard_of("hidden_states.shard", self.shard)
        require(
            self.bits in (None, 8),
            f"hidden_states.bits={self.bits}: give 8, or null for the target's own type",
        )
        require(bool(self.root.strip()), "hidden_states.root is empty: give a folder")
        require(
            self.path is None or bool(self.path.strip()),
            "hidden_states.path is empty: give a folder, or null for one under hidden_states.root",
        )


@dataclass(frozen=True)
class HiddenStateOrigin:
    """The origin of the hidden states in a store. Hidden states of another origin are never
    read."""

    fingerprint: str  # fingerprint of the target
    dtype: str
    layers: tuple[int, ...]
    sampler: Sampler
    width: int
    engine: bool = False  # whether an engine computed them: it may round otherwise
    bits: int | None = None  # bits of a value in the layers; None: the dtype's
    uncut: bool = False  # whether they say what p is before cutoffs, if the sampler has any

    @property
    def stored_as(self) -> torch.dtype:
        """The type of the states."""
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return dtype

    @property
    def block(self) -> int:
        """The number of values of a layer that share a scale."""
        return block_size(self.width)

    def bytes(self, tokens: int) -> int:
        """Size on disk of the hidden states of `tokens` tokens."""
        itemsize, of_layers = self.stored_as.itemsize, self.width * len(self.layers)
        layers = of_layers * itemsize
        if self.bits is not None:
            layers = of_layers + of_layers // self.block * SCALE.itemsize
        return tokens * (self.width * itemsize + layers + 12 + 4 * self.uncut)


class HiddenStateStore:
    """Hidden states of documents in a folder, in files of a few hundred documents each. A damaged
    file is renamed, and one that another user does not let this process read is skipped. Raises
    UserError if the folder holds hidden states of another kind, and Unreadable if a file cannot be
    read for another reason, such as too many open files."""

    def __init__(
        self, cfg: HiddenStatesConfig, target: TargetParts, needs: HiddenStateSpec, sampler: Sampler
    ) -> None:
        self.kind = HiddenStateOrigin(
            fingerprint=target.fingerprint(),
            dtype=str(target.dtype),
            layers=needs.layers,
            sampler=sampler,
            width=target.width,
            engine=bool(cfg.engines),
            bits=cfg.bits if needs.layers else None,
            uncut=sampler.truncates,
        )
        may_be_online = cfg.mode == "offline" and not cfg.engines and cfg.shard is None
        ways = ["hidden_states.bits=8"] if needs.layers and not cfg.bits else []
        ways += ["hidden_states.mode=online"] if may_be_online else []
        ways += [f"another hidden_states.{'path' if cfg.path else 'root'}"]
        self._remedies = " or ".join(ways)
        origin = json.dumps(asdict(self.kind)).encode()
        self.key = hashlib.blake2b(origin, digest_size=8).hexdigest()
        self.folder = Path(cfg.path) if cfg.path else Path(cfg.root) / self.key
        self._files: dict[str, Path] = {}  # by the name of a document
        self._parts: dict[str, list[str]] = {}  # likewise, the names of its tensors
        self._sums: dict[str, str] = {}  # likewise, the checksums
        self._open = lru_cache(OPEN)(partial(safe_open, framework="pt"))
        self._decoded: dict[str, HiddenStateTensors] = {}  # not written yet
        self._own: set[Path] = set()  # the files that this process has written
        self.lock = RLock()  # held while files are read or mended, as a thread reads ahead
        self._require_kind()
        remove_abandoned(self.folder)
        self.refresh()

    def refresh(self) -> None:
        """Find the documents that other processes have stored."""
        with self.lock:
            self._refresh()

    def _refresh(self) -> None:
        self._open.cache_clear()
        for known in (self._files, self._parts, self._sums):
            known.clear()
        # of the files with the same document the oldest counts: what a run has read stays as it was
        for path in sorted(self.folder.glob("*.safetensors"), key=_age):
            try:
                with reading(path):
                    require_file(path)
                    with safe_open(path, framework="pt") as file:
                        parts: dict[str, list[str]] = {}
                        for tensor in file.keys():  # noqa: SIM118
                            name, _, part = tensor.partition(".")
                            parts.setdefault(name, []).append(part)
                        sums = _sums_of(file)
            except FileNotFoundError:  # another run has put it aside by now
                continue
            except Unreadable as error:
                if not isinstance(error.__cause__, PermissionError):
                    raise
                tell(f"{path} is another user's, who does not let you read it: it is skipped")
                continue
            except (UserError, SafetensorError, ValueError) as error:
                aside = put_aside(path)
                tell(
                    f"{path} is damaged ({first_line(error)}): it is now {aside}, and its "
                    "documents are computed again where they are needed"
                )
                continue
            for name in parts.keys() - self._files.keys():
                self._files[name], self._parts[name] = path, parts[name]
                self._sums[name] = sums.get(name, "none")

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with documents that are not stored yet, reduced to those documents."""
        left = []
        for row in rows:
            unknown = [np.r_[x] for x in documents(row) if not self._has(row, x)]
            if unknown:
                left.append(part_of(row, np.concatenate(unknown)))
        return left

    def has(self, ids: NDArray[np.int32]) -> bool:
        """Whether the hidden states of a document's text are stored."""
        return name_of(ids) in self._files

    def _has(self, row: Row, x: slice) -> bool:
        after = row.speculation_steps is None or name_of_steps(row, x) in self._files
        return after and self.has(row.ids[x])

    def record(self, target: Target) -> Record:
        """A record that makes `decode` keep the hidden states that the target computes while it
        answers, so that it need not read its responses again. Everything beyond `RECORDED` bytes is
        stored at once, and `write` stores the rest. The target never reads the last token of a
        response, so that token's hidden states are stored as 0. They are not used: its p is at the
        position before it, and anchors read only positions before themselves."""

        def keep(text: list[int], ctx: Context) -> None:
            assert ctx.final_BTD is not None
            self.hold_document(text, ctx.final_BTD, ctx.layers_BTF, target)
            if self.unwritten > RECORDED:
                self.write()

        return Record(HiddenStateSpec(self.kind.layers), keep)

    def hold_document(
        self, text: Sequence[int], final_1TD: Tensor, layers_1TF: Tensor | None, target: TargetParts
    ) -> None:
        """Keep the hidden states of a text, or of all its tokens but the last, for `write`."""
        summary = summarise(target, final_1TD, self.kind.sampler)
        lacking = len(text) - final_1TD.shape[1]
        kept = {
            n: pad(x[0], (0, 0) * (x.dim() - 2) + (0, lacking)).cpu().contiguous()
            for n, x in parts_of(self.kind.sampler, final_1TD, summary, layers_1TF).items()
        }
        self._decoded[name_of(np.array(text, np.int32))] = self.in_bits(kept)

    def in_bits(self, hidden_states: HiddenStateTensors) -> HiddenStateTensors:
        """The hidden states of a document in the format of the store."""
        if self.kind.bits is None:
            return hidden_states
        codes, scale = rounded_to_8_bits(hidden_states["layers"], self.kind.block)
        return hidden_states | {"layers": codes, SCALES: scale}

    @property
    def unwritten(self) -> int:
        """The bytes of hidden states that are held and not yet written."""
        return sum(x.nbytes for kept in self._decoded.values() for x in kept.values())

    def write(self) -> None:
        """Store everything recorded since the last call."""
        if self._decoded:
            self.add_documents(self._decoded)
            self._decoded = {}

    def prepare(self, tokens: int) -> None:
        """Make the folder. Raises UserError if its disk has no room for `tokens` more tokens."""
        make_folder(self.folder)
        short = self.kind.bytes(tokens) - shutil.disk_usage(self.folder).free
        require(
            short <= 0,
            f"the hidden-state cache needs {in_megabytes(self.kind.bytes(tokens))} more, and the "
            f"disk of {self.folder} is {in_megabytes(short)} short of that: give "
            f"{self._remedies}",
        )
        if not (described := self.folder / "meta.json").exists():
            write_json(described, asdict(self.kind))

    def announced(self, tokens: int) -> str:
        """A sentence with the size of the hidden states of `tokens` tokens, and the free disk
        space."""
        folder = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        free, size = shutil.disk_usage(folder).free, self.kind.bytes(tokens)
        added = f"{in_megabytes(size)} to be added, {in_megabytes(free)} are free"
        return f"hidden-state cache {self.folder}: {added}"

    def prepare_for_responses(self, prompts: Sequence[Sequence[int]], new: int) -> None:
        """`prepare` for prompts with responses of up to `new` tokens each: print the maximum size
        of their hidden states and the free disk space. Raises UserError if the disk has no room
        even for the prompts."""
        least = sum(map(len, prompts)) + len(prompts)
        most = least + len(prompts) * (new - 1)
        console.print(f"{self.announced(most)} (if every response has {new} tokens)")
        self.prepare(least)
        short = self.kind.bytes(most) - shutil.disk_usage(self.folder).free
        if short > 0:
            tell(
                f"the disk of {self.folder} may become full: it is {in_megabytes(short)} short if "
                f"every response is as long as responses.max_new_tokens; give {self._remedies}"
            )

    def add_documents(self, by_name: Mapping[str, HiddenStateTensors]) -> None:
        """Write the hidden states of documents, given by name, as one file, except those that are
        stored already. Computed beside other texts they would be rounded differently, and a run
        that has read the stored ones must find the same ones again."""
        by_name = {n: hidden_states for n, hidden_states in by_name.items() if n not in self._files}
        if not by_name:
            return
        tensors = {f"{n}.{part}": x for n, f in by_name.items() for part, x in f.items()}
        sums = {n: of_tensors(f, self._context(n)) for n, f in by_name.items()}
        checksums = json.dumps(sums, sort_keys=True)
        # named by its content: another run's file of the same documents is never replaced
        name = hashlib.blake2b(checksums.encode(), digest_size=12).hexdigest()
        path = self.folder / f"{name}.safetensors"
        with new_file(path) as partial:
            save_file(tensors, partial, metadata={SUMS: checksums})
        self._own.add(path)
        with self.lock:
            self._open.cache_clear()  # it may hold the file that was replaced
            self._files |= dict.fromkeys(by_name, path)
            self._parts |= {n: list(f) for n, f in by_name.items()}
            self._sums |= sums

    def read_document(self, row: Row, x: slice) -> HiddenStateTensors:
        """The hidden states of the document at `x` in a row. Raises Damaged if they are not stored,
        or if they were changed."""
        of_text = names_of_parts(self.kind.sampler, bool(self.kind.layers))
        with self.lock:
            hidden_states = self._document(name_of(row.ids[x]), of_text, (x.stop - x.start,))
            if row.speculation_steps is not None:
                size = (
                    int((row.speculation_steps[x, 0] >= 0).sum()),
                    row.speculation_steps.shape[1] - 1,
                )
                parts = [AFTER + n for n in names_of_parts(self.kind.sampler, False)]
                hidden_states |= self._document(name_of_steps(row, x), parts, size)
        return hidden_states

    def discard(self, row: Row, x: slice) -> None:
        """Rename the file with the damaged document, at `x` of this row. The intact documents in it
        are written again."""
        names = [name_of(row.ids[x])]
        names += [name_of_steps(row, x)] if row.speculation_steps is not None else []
        for path in {self._files.pop(name) for name in names if name in self._files}:
            beside = [name for name, other in self._files.items() if other == path]
            sound: dict[str, HiddenStateTensors] = {}
            for name in beside:
                del self._files[name]
                try:
                    sound[name] = self._sound(path, name)
                except Damaged:
                    continue
            self._open.cache_clear()
            put_aside(path)
            if sound:
                self.add_documents(sound)

    def remove(self, texts: Iterable[Sequence[int]]) -> None:
        """Remove wrong hidden states of texts that this process has stored. Files of other
        processes are kept."""
        names = {name_of(np.array(text, np.int32)) for text in texts}
        for name in names:
            self._decoded.pop(name, None)
        with self.lock:
            for path in {self._files[n] for n in names if n in self._files} & self._own:
                beside = [name for name, other in self._files.items() if other == path]
                right = {name: self._sound(path, name) for name in beside if name not in names}
                for name in beside:
                    del self._files[name]
                self._open.cache_clear()
                if right:
                    self.add_documents(right)
                path.unlink(missing_ok=True)

    def _document(
        self, name: str, parts: Sequence[str], size: tuple[int, ...]
    ) -> HiddenStateTensors:
        """The parts of a document. Raises Damaged unless their first sizes are `size`."""
        if name not in self._files:
            raise Damaged(f"{self.folder} lacks a document's hidden states")
        path = self._files[name]
        hidden_states = self._sound(path, name)
        states = {"final": self.kind.width, "layers": self.kind.width * len(self.kind.layers)}
        kinds = dict.fromkeys(states, self.kind.stored_as)
        if self.kind.bits is not None:
            states[SCALES] = states["layers"] // self.kind.block
            kinds |= {"layers": torch.int8, SCALES: SCALE}
            parts = [*parts, *[SCALES] * ("layers" in parts)]
        for part in parts:
            plain = part.removeprefix(AFTER)
            width = [states[plain]] if plain in states else []
            wanted = [*size, *width]
            fits = part in hidden_states and list(hidden_states[part].shape) == wanted
            if not fits or (width and hidden_states[part].dtype != kinds[plain]):
                raise Damaged(f"{path} is damaged: {name}.{part} is not as it was written")
        known = {part: hidden_states[part] for part in parts}
        if SCALES in known:
            scale = known.pop(SCALES)
            known["layers"] = restored_from_8_bits(known["layers"], scale, self.kind.stored_as)
        return known

    def _sound(self, path: Path, name: str) -> HiddenStateTensors:
        """All parts of a document in a file. Raises Damaged for a wrong checksum, and Unreadable if
        the file cannot be read."""
        try:
            with reading(path):
                file, begins = self._open(path), f"{name}."
                hidden_states = {n: file.get_tensor(begins + n) for n in self._parts[name]}
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{path} cannot be read ({first_line(error)})") from error
        sound = self._sums[name] == of_tensors(hidden_states, self._context(name))
        if not sound:
            raise Damaged(f"{path} is damaged (the checksum of a document differs)")
        return hidden_states

    def _context(self, name: str) -> str:
        """The context of a document's checksum: what its hidden states belong to."""
        return f"{self.key} {name}"

    def _require_kind(self) -> None:
        path = self.folder / "meta.json"
        theirs = (
            read_record(HiddenStateOrigin, path, "delete that folder")
            if path.exists()
            else self.kind
        )
        for name, ours in asdict(self.kind).items():
            was = asdict(theirs)[name]
            require(
                was == ours,
                f"the hidden-state cache {self.folder} was made with {name}={was!r}, but this run "
                f"has {ours!r}: give another hidden_states.path, or delete that folder",
            )


def part_of(row: Row, at: NDArray[np.int_]) -> Row:
    """A row of the tokens at these places of another row."""
    return Row(**{n: x[at] for n, x in vars(row).items() if x is not None})


def put_aside(path: Path) -> str:
    """Rename a damaged file so that it is not read, and return the new name. It is not deleted:
    another run may have written it."""
    aside = path.with_name(f"{path.name}.damaged")
    with suppress(OSError):  # another process was faster, or the folder is another user's
        path.rename(aside)
    return aside.name


def _age(path: Path) -> tuple[int, str]:
    """A key that sorts files from the oldest to the newest."""
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:  # it was removed by now, or cannot be reached: whoever opens it says so
        return 0, path.name


def _sums_of(file: Any) -> dict[str, str]:
    """The checksums in a file's header. Raises ValueError if there are none, or damaged ones."""
    sums = json.loads((file.metadata() or {}).get(SUMS, ""))
    if not isinstance(sums, dict):
        raise ValueError("its header holds no checksums")
    return sums


def in_megabytes(count: int) -> str:
    """A number of bytes in megabytes, rounded up to a tenth."""
    return f"{-(-count // 10**5) / 10:,.1f} MB"


def parts_of(
    sampler: Sampler, final: Tensor, summary: Summary, layers: Tensor | None
) -> HiddenStateTensors:
    """The tensors to store: the final hidden state [..., D] and the layers that the drafter reads
    [..., F], if any, in the target's dtype, and the numbers of p's summary, each [...]. Without
    cutoffs, two of these are the same, and one is stored."""
    numbers = summary.log_z_N, summary.threshold_N, summary.argmax_N.int()
    whole_log_z = summary.whole_log_z_N if sampler.truncates else None
    parts = (final, *numbers, whole_log_z, layers)
    return {name: x for name, x in zip(PARTS, parts, strict=True) if x is not None}


def names_of_parts(sampler: Sampler, layers: bool) -> list[str]:
    """The names of what `parts_of` gives, with or without layers."""
    left_out = {"whole_log_z": not sampler.truncates, "layers": not layers}
    return [name for name in PARTS if not left_out.get(name, False)]


def documents(row: Row) -> Iterator[slice]:
    """The place of each document in a row."""
    starts = np.flatnonzero(row.position == 0).tolist()
    yield from map(slice, starts, [*starts[1:], len(row.ids)])


def name_of(ids: NDArray[np.int32]) -> str:
    """The name under which a document is stored: a hash of its tokens."""
    return hashlib.blake2b(ids.astype(np.int32).tobytes(), digest_size=12).hexdigest()


def name_of_steps(row: Row, x: slice) -> str:
    """The name under which the target's hidden states after a document's drafted tokens are
    stored."""
    assert row.speculation_steps is not None
    return name_of(np.column_stack([row.ids[x], row.speculation_steps[x]]))


def block_size(width: int) -> int:
    """The largest divisor of `width` that is at most `BLOCK`."""
    return next(size for size in range(min(BLOCK, width), 0, -1) if width % size == 0)


def rounded_to_8_bits(states: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The numbers [..., F] in 8 bits and the scales [..., F / block] of states [..., F]. A number
    is off by at most half a scale, and by a little more if it is the largest of its block."""
    blocks = states.float().unflatten(-1, (-1, block))
    scale = (blocks.abs().amax(-1) / LARGEST).to(SCALE)
    whole = scale.float()[..., None]
    codes = torch.where(whole > 0, blocks / whole, 0.0).round().clamp(-LARGEST, LARGEST)
    return codes.to(torch.int8).flatten(-2), scale


def restored_from_8_bits(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [..., F] that `rounded_to_8_bits` encoded."""
    blocks = codes.unflatten(-1, (scale.shape[-1], -1)).float() * scale.float()[..., None]
    whole: Tensor = blocks.flatten(-2).to(dtype)
    return whole
