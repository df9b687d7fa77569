"""GGUF: keys and tensors in one file, as llama.cpp loads it, written and read with the package
`gguf`.

    write_gguf(path, tensors, keys)    keys include general.architecture and general.file_type
    read_tensors(path)                 in float32, whatever type they are stored in
    tensor_names(path)                 without their numbers
    read_keys(path)                    the keys without the tokenizer's lists
    tokenizer_keys(path)               those of the tokenizer, to be copied as they are
    typed_keys(path)                   all of them, likewise

`general.file_type` says in which type matrices are stored. Vectors and stacks of kernels are
float32, since llama.cpp adds and multiplies them in that type; ids are int64.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Stored
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, ReaderField, ReaderTensor
from gguf.gguf_writer import GGUFValue
from gguf.quants import dequantize, quantize
from torch import Tensor

from specdec.errors import UserError, first_line, nearest, require, unreadable

SUFFIX = ".gguf"
ARCHITECTURE, FILE_TYPE = "general.architecture", "general.file_type"
MARK_KEY = "draftsmith.mark"  # JSON: what draftsmith.json says in the folder of another layout
REFERENCE_KEY = "draftsmith.reference"  # JSON: what a server should accept (measure/reference.py)
TOKENIZER = "tokenizer."
# keys on the layout of a file itself, which another file does not share
OF_FILES = ("GGUF.", "general.alignment", "split.")
BLOCK = 32  # numbers that share a scale in q8_0 and q4_0
INTEGERS = (Stored.I8, Stored.I16, Stored.I32, Stored.I64)

Keys = dict[str, Any]  # texts, numbers and lists of them; or a `GGUFValue`, written as it is


@dataclass(frozen=True)
class WeightType:
    """How a file stores its matrices: the `file_type` that says so, and the type of a matrix."""

    file_type: LlamaFileType
    stored: Stored


WEIGHT_TYPES = {
    "f32": WeightType(LlamaFileType.ALL_F32, Stored.F32),
    "f16": WeightType(LlamaFileType.MOSTLY_F16, Stored.F16),
    "bf16": WeightType(LlamaFileType.MOSTLY_BF16, Stored.BF16),
    "q8_0": WeightType(LlamaFileType.MOSTLY_Q8_0, Stored.Q8_0),
    "q4_0": WeightType(LlamaFileType.MOSTLY_Q4_0, Stored.Q4_0),
}
SAME = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def weight_type_of(name: str | None, dtype: torch.dtype) -> WeightType:
    """The type of this name or, with None, the one that keeps weights of this dtype as they are.
    Raises UserError for an unknown name."""
    name = SAME.get(dtype, "f32") if name is None else name
    if name not in WEIGHT_TYPES:
        raise UserError(f"--type {name} is unknown{nearest(name, WEIGHT_TYPES)}")
    return WEIGHT_TYPES[name]


def file_type_name(file_type: Any) -> str:
    """The name of a `general.file_type`, such as Q4_1; "unknown" for one that `gguf` does not
    know."""
    try:
        return LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "unknown"


def stored_as(shape: torch.Size, kind: WeightType) -> Stored:
    """The type in which a tensor of floats of this shape is stored. A matrix whose rows do not
    consist of blocks is float16 where the others are quantised, as llama.cpp's own converter does
    it."""
    if len(shape) != 2:
        return Stored.F32
    whole = shape[-1] % BLOCK == 0 or kind.stored not in (Stored.Q8_0, Stored.Q4_0)
    return kind.stored if whole else Stored.F16


def write_gguf(path: Path, tensors: Mapping[str, Tensor], keys: Keys) -> None:
    """Write a file. A list that is empty, and a text that is, are left out, as GGUF has none."""
    kind = next(t for t in WEIGHT_TYPES.values() if t.file_type == keys[FILE_TYPE])
    writer = GGUFWriter(path, keys[ARCHITECTURE])
    for key, value in keys.items():
        if key != ARCHITECTURE and value not in ("", []):
            typed = value if isinstance(value, GGUFValue) else GGUFValue(value, _kind_of(value))
            writer.add_key_value(key, typed.value, typed.type, typed.sub_type)
    for name, x in tensors.items():
        if x.is_floating_point():
            stored = stored_as(x.shape, kind)
            data = quantize(x.detach().cpu().float().contiguous().numpy(), stored)
        else:
            stored, data = Stored.I64, x.cpu().long().numpy()
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind_of(value: Any) -> GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return GGUFValueType.UINT32
    kind: GGUFValueType = GGUFValueType.get_type(value)
    return kind


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, floats as float32 and integers as int64. Raises UserError as
    `opened_gguf` does, and for a type that the package `gguf` cannot read."""
    with opened_gguf(path) as reader:
        return {stored.name: _values(path, stored) for stored in reader.tensors}


def _values(path: Path, stored: ReaderTensor) -> Tensor:
    kind = stored.tensor_type
    if kind in INTEGERS:
        return torch.from_numpy(stored.data.astype("int64"))
    if kind == Stored.F64:
        return torch.from_numpy(stored.data.astype("float32"))
    try:
        return torch.from_numpy(dequantize(stored.data, kind).copy())
    except NotImplementedError as error:
        raise UserError(
            f"{path}: tensor {stored.name!r} is stored as {kind.name}, which cannot be read here: "
            "convert the file with another type, such as Q8_0"
        ) from error


def tensor_names(path: Path) -> set[str]:
    """The names of a file's tensors. Raises UserError as `opened_gguf` does."""
    with opened_gguf(path) as reader:
        return {stored.name for stored in reader.tensors}


def read_keys(path: Path) -> Keys:
    """The keys of a file without its tokenizer's lists. Raises UserError as `opened_gguf` does."""
    with opened_gguf(path) as reader:
        return {
            field.name: field.contents()
            for field in reader.fields.values()
            if field.types[0] != GGUFValueType.ARRAY or not field.name.startswith(TOKENIZER)
        }


def tokenizer_keys(path: Path) -> Keys:
    """The tokenizer's keys with their types. Raises UserError for a file without a tokenizer."""
    with opened_gguf(path) as reader:
        own = [field for field in reader.fields.values() if field.name.startswith(TOKENIZER)]
        require(bool(own), f"{path} has no tokenizer: give a GGUF file of the target")
        return {field.name: _typed(field) for field in own}


def typed_keys(path: Path) -> Keys:
    """All keys of a file with their types, without those that say how the file itself is laid out.
    Raises UserError as `opened_gguf` does."""
    with opened_gguf(path) as reader:
        own = [field for field in reader.fields.values() if not field.name.startswith(OF_FILES)]
        return {field.name: _typed(field) for field in own}


def _typed(field: ReaderField) -> GGUFValue:
    kind = field.types[0]
    return GGUFValue(
        field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None
    )


def read_json_key(path: Path, key: str) -> Any:
    """The value of the JSON that a file holds under `key`; None if it has no such key. Raises
    UserError as `opened_gguf` does, and for a text that is no JSON."""
    with opened_gguf(path) as reader:
        field = reader.get_field(key)
        text = None if field is None else field.contents()
    try:
        return None if text is None else json.loads(text)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: its key {key} is damaged ({first_line(error)})") from error


@contextmanager
def opened_gguf(path: Path) -> Iterator[GGUFReader]:
    """A file's keys, and its tensors as they are stored. Raises UserError for a file that is
    missing or damaged, or is no GGUF file."""
    require(path.is_file(), f"{path}: there is no such file")
    try:
        reader = GGUFReader(path)
    except OSError as error:
        raise unreadable(path, error) or error from error
    except Exception as error:  # the reader may raise anything on a file cut short
        raise UserError(
            f"{path} cannot be read as GGUF ({first_line(error)[:120]}): it is damaged, or of "
            "another format"
        ) from error
    yield reader


def require_rounded(
    tensors: Mapping[str, Tensor], path: Path, kind: WeightType, where: str
) -> None:
    """Raise UserError, naming the tensor, if one of those that were written to a file is missing
    there, or off by more than its type's rounding."""
    read = read_tensors(path)
    for name, x in tensors.items():
        require(name in read, f"{where}: tensor {name!r} is missing")
        off, ids = (read[name] - x.cpu()).abs(), not x.is_floating_point()
        most = torch.zeros(()) if ids else largest_rounding(x.cpu(), kind)
        fits = bool((off <= most).all())  # NaN does not
        require(fits, f"{where}: read back, tensor {name!r} is off by {float(off.max()):.2g}")


def largest_rounding(x: Tensor, kind: WeightType) -> Tensor:
    """By how much each number of `x` may differ when it is stored and read back, by the formats'
    definitions (ggml-quants.c). q8_0 rounds to 1/127 of the largest of 32 numbers, q4_0 to 1/8 of
    it, whose opposite is beyond its range and off by a whole step; both store the step in float16.
    """
    stored, size = stored_as(x.shape, kind), x.float().abs()
    if stored == Stored.F32:
        return torch.zeros_like(size)
    if stored in (Stored.F16, Stored.BF16):
        half_unit = 2**-11 if stored == Stored.F16 else 2**-8
        return size * half_unit + 2**-25
    blocks = size.unflatten(-1, (-1, BLOCK))
    steps, most = (127, 0.5) if stored == Stored.Q8_0 else (8, 1.0)
    step = blocks.amax(-1, keepdim=True) / steps
    rounded: Tensor = step * most + blocks * 2**-10 + 2**-24 * steps
    return rounded.flatten(-2)
