"""Hostile checkpoints through every importer: one line of UserError, or a draft that is what its
files say. Never a traceback, a hang, or an object of a pickle.

Run alone: python -m pytest tests/formats/test_hostile_imports.py
"""

import json
import os
import pickle
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafters import Drafter
from specdec.errors import UserError
from specdec.formats import draft_checkpoint, draft_import
from specdec.targets.target import Target
from tests.drafters.families import make_target
from tests.public_drafts import NATIVE_MODULES, PUBLIC, write_public

LAYOUTS = {  # one draft of each importer
    name: PUBLIC[name]
    for name in (
        *("SpecForge", "speculators", "speculators, P-EAGLE", "P-EAGLE for vLLM", "EAGLE-1"),
        *("Medusa", "Medusa for vLLM", "z-lab, DFlash", "speculators, DFlash", "JetSpec"),
        *("z-lab, DFlash 2", "DeepSpec, DSpark", "speculators, DSpark"),
    )
} | NATIVE_MODULES
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
Attack = Callable[[Path], Any]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    return {name: write_public(root / str(i), files(target))
            for i, (name, files) in enumerate(LAYOUTS.items())}  # fmt: skip


@pytest.fixture(autouse=True)
def no_endless_read() -> Iterator[None]:
    """All files are tiny: what still computes after a minute never ends, and what waits for five
    neither, however busy the machine is."""

    def ended(*_: Any) -> None:
        pytest.fail("this does not end")

    signal.signal(signal.SIGALRM, ended)
    signal.signal(signal.SIGPROF, ended)
    signal.alarm(300)
    signal.setitimer(signal.ITIMER_PROF, 60)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)


def config(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Attack:
    """Another config. `change` gets it and the part of it that describes the layers."""

    def attack(folder: Path) -> None:
        keys = json.loads((folder / CONFIG).read_text())
        change(keys, keys.get("transformer_layer_config", keys))
        (folder / CONFIG).write_text(json.dumps(keys))

    return attack


def layers(**keys: Any) -> Attack:
    return config(lambda _, of_layers: of_layers.update(keys))


def top(**keys: Any) -> Attack:
    return config(lambda all_keys, _: all_keys.update(keys))


def raw_config(text: str | bytes) -> Attack:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / CONFIG).write_bytes(data)


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Attack:
    def attack(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        changed = change(held)
        held = changed if isinstance(changed, dict) else held
        save_file({n: x.contiguous() for n, x in held.items()}, folder / WEIGHTS)

    return attack


def first(held: dict[str, Tensor]) -> str:
    """A matrix of the draft's own: embedding and head may be missing, where the target's serve."""
    own = (n for n, x in held.items() if x.is_floating_point() and x.dim() == 2)
    return next(n for n in own if not n.startswith(("embed_tokens", "lm_head")))


def header(change: Callable[[dict[str, Any]], Any], length: int | None = None) -> Attack:
    """Another header before the numbers of the file."""

    def attack(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        listed = json.loads(data[8 : 8 + size])
        new = json.dumps(changed if (changed := change(listed)) is not None else listed).encode()
        told = len(new) if length is None else length
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", told) + new + data[8 + size :])

    return attack


def doubled(folder: Path) -> None:
    """The header names a tensor twice, the second time with other numbers of the file."""
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    listed = json.loads(data[8 : 8 + size])
    names = [n for n in listed if n != "__metadata__"]
    again = json.dumps({names[0]: listed[names[1]]}).encode()
    new = data[8 : 8 + size].rstrip()[:-1] + b"," + again[1:]
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])


def first_of(listed: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(x for n, x in listed.items() if n != "__metadata__")
    return entry


def cut(share: float) -> Attack:
    def attack(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: int(len(data) * share)])

    return attack


class Evil:
    """Makes a file `pwned` in the working folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def pickled(write: Callable[[Path, dict[str, Tensor]], Any]) -> Attack:
    """A pickle instead of safetensors."""

    def attack(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        write(folder / "pytorch_model.bin", held)

    return attack


def saved(change: Callable[[dict[str, Tensor]], Any]) -> Attack:
    return pickled(lambda path, held: torch.save(change(held), path))


def compressed(path: Path, held: dict[str, Tensor]) -> None:
    """The same archive, deflated, as bombs are."""
    torch.save(held, path)
    with zipfile.ZipFile(path) as archive:
        entries = {x.filename: archive.read(x) for x in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def slipped(path: Path, held: dict[str, Tensor]) -> None:
    torch.save(held, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../pwned", "x")


def indexed(entries: Callable[[list[str]], Any]) -> Attack:
    """An index instead of one file; the shard has another name."""

    def attack(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        (folder / INDEX).write_text(json.dumps(entries(names)))

    return attack


def shards(name: str) -> Attack:
    return indexed(lambda names: {"weight_map": dict.fromkeys(names, name)})


def moved_out(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    shutil.move(folder / WEIGHTS, outside)
    (folder / WEIGHTS).symlink_to(outside)


def linked(to: str) -> Attack:
    def attack(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(to)

    return attack


def fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def offsets(change: Callable[[Tensor], Tensor]) -> Attack:
    """Other offsets of a draft vocabulary, in layouts that have one."""

    def change_all(held: dict[str, Tensor]) -> Any:
        if "d2t" in held:
            held["d2t"] = change(held["d2t"])
        else:
            held["d2t"] = change(torch.zeros(40, dtype=torch.int64))

    return tensors(change_all)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


MUST_FAIL: dict[str, Attack] = {
    # the config's file
    "no config": lambda folder: (folder / CONFIG).write_text(""),
    "a config that is a list": raw_config("[]"),
    "a config that is null": raw_config("null"),
    "brackets without end": raw_config('{"a": ' + "[" * 200_000),
    "deep brackets": top(more=nested(80)),
    "a number of 10,000 digits": raw_config('{"hidden_size": ' + "9" * 10_000 + "}"),
    "bytes that are not UTF-8": raw_config(b'{"architectures": ["\xff\xfe"]}'),
    "an unknown architecture": raw_config('{"architectures": ["Exploit"]}'),
    "architectures that are a number": raw_config('{"architectures": 5}'),
    "an unknown key that may matter": top(secret_sauce=2),
    "another vocabulary": layers(vocab_size=10**6),
    "a vocabulary in words": layers(vocab_size="many"),
    "a negative vocabulary": layers(vocab_size=-5),
    # the tensors
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "an empty file": cut(0),
    "five bytes": lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 5),
    "half a file": cut(0.5),
    "nine tenths of a file": cut(0.9),
    "a header of 2^63 bytes": header(lambda _: None, 2**63),
    "a header longer than the file": header(lambda _: None, 10**7),
    "a header of no bytes": header(lambda _: None, 0),
    "a header of brackets": lambda folder: (folder / WEIGHTS).write_bytes(
        struct.pack("<Q", 100_000) + b"[" * 100_000
    ),
    "a huge shape": header(lambda x: first_of(x).update(shape=[2**40, 2**40])),
    "a negative shape": header(lambda x: first_of(x).update(shape=[-1, 4])),
    "a shape in words": header(lambda x: first_of(x).update(shape="wide")),
    "an unknown type": header(lambda x: first_of(x).update(dtype="EVIL")),
    "numbers beyond the file": header(lambda x: first_of(x).update(data_offsets=[0, 2**50])),
    "numbers that overlap": header(lambda x: {n: first_of(x) for n in x}),
    "a name twice": doubled,
    "a tensor that is missing": tensors(lambda x: x.pop(first(x)) is None),
    "a tensor too many": tensors(lambda x: x.update(extra=torch.zeros(3))),
    "a name of 100,000 letters": tensors(lambda x: x.update({"e" * 100_000: torch.zeros(3)})),
    "a NaN": tensors(lambda x: x[first(x)].view(-1)[:1].fill_(torch.nan)),
    "an infinity": tensors(lambda x: x[first(x)].view(-1)[-1:].fill_(torch.inf)),
    "another shape": tensors(lambda x: x.update({first(x): x[first(x)][:-1]})),
    "one dimension more": tensors(lambda x: x.update({first(x): x[first(x)][None]})),
    "a tensor of no numbers": tensors(lambda x: x.update({first(x): x[first(x)][:0]})),
    "whole numbers for weights": tensors(lambda x: x.update({first(x): x[first(x)].long()})),
    "float8": tensors(lambda x: x.update({first(x): x[first(x)].to(torch.float8_e4m3fn)})),
    "float64": tensors(lambda x: x.update({first(x): x[first(x)].double()})),
    "complex numbers": saved(lambda x: x | {first(x): x[first(x)].to(torch.complex64)}),
    # a draft vocabulary
    "ids below 0": offsets(lambda x: x - 10**6),
    "ids beyond the vocabulary": offsets(lambda x: x + 10**6),
    "one id for all": offsets(lambda x: -torch.arange(len(x)) + 3),
    "offsets with a fraction": offsets(lambda x: x.float() + 0.5),
    "offsets of another length": offsets(lambda x: x[:-3]),
    "offsets as a matrix": offsets(lambda x: x[None]),
    # pickles
    "a pickle with code": saved(lambda x: x | {"evil": Evil()}),
    "a pickle that is code": saved(lambda x: Evil()),
    "an old pickle with code": pickled(lambda path, _: path.write_bytes(pickle.dumps(Evil()))),
    "an old format of torch": pickled(
        lambda path, x: torch.save(x, path, _use_new_zipfile_serialization=False)
    ),
    "a list of tensors": saved(lambda x: list(x.values())),
    "a nested dict": saved(lambda x: {"state_dict": x}),
    "a number among tensors": saved(lambda x: x | {"epoch": 3}),
    "a key that is a number": saved(lambda x: x | {5: torch.zeros(2)}),
    "a sparse tensor": saved(lambda x: x | {first(x): x[first(x)].float().to_sparse()}),
    "a shape beyond its numbers": saved(
        lambda x: x | {first(x): torch.zeros(1).expand(*x[first(x)].shape)}
    ),
    "a compressed pickle": pickled(compressed),
    "half a pickle": pickled(
        lambda path, x: (torch.save(x, path), path.write_bytes(path.read_bytes()[:2000]))
    ),
    "text as a pickle": pickled(lambda path, _: path.write_text("hello")),
    # files elsewhere
    "an index with a path": shards("../outside/model-1.safetensors"),
    "an index with an absolute path": shards("/etc/passwd"),
    "an index with a missing file": shards("model-2.safetensors"),
    "an index without a map": indexed(lambda names: {}),
    "an index with numbers": indexed(lambda names: {"weight_map": dict.fromkeys(names, 3)}),
    "an index of a list": indexed(lambda names: [names]),
    "an index with a tensor too many": indexed(
        lambda names: {"weight_map": dict.fromkeys([*names, "more"], "model-1.safetensors")}
    ),
    "an index of nothing": indexed(lambda names: {"weight_map": {}}),
    "a link out of the folder": moved_out,
    "a link to a device": linked("/dev/zero"),
    "a link to itself": linked(WEIGHTS),
    "a pipe": fifo,
    "a folder for weights": lambda folder: (
        (folder / WEIGHTS).unlink(),
        (folder / WEIGHTS).mkdir(),
    ),
}
# what is the target's own, where the draft is a module of the target's checkpoint
OF_TARGET = {"deep brackets", "an unknown key that may matter", "a tensor too many"}
OF_TARGET |= {"a name of 100,000 letters", "a number among tensors"}
OF_TARGET |= {"ids below 0", "ids beyond the vocabulary", "one id for all"}
OF_TARGET |= {"offsets with a fraction", "offsets of another length", "offsets as a matrix"}
EITHER: dict[str, Attack] = {  # what some layouts do not read
    "no keys": raw_config("{}"),
    "a width in words": layers(hidden_size="32"),
    "no width": layers(hidden_size=0),
    "a huge width": layers(hidden_size=2**31 - 1),
    "a width beyond numbers": layers(hidden_size=10**30),
    "a width that is true": layers(hidden_size=True),
    "no heads": layers(num_attention_heads=0),
    "heads that do not fit": layers(num_attention_heads=7, num_key_value_heads=5),
    "a list of heads": layers(num_attention_heads=[4, 4]),
    "a negative depth": layers(num_hidden_layers=-1),
    "a billion layers": layers(num_hidden_layers=10**9),
    "half a layer": layers(num_hidden_layers=1.5),
    "an odd head": layers(head_dim=7),
    "an MLP of NaN": raw_config('{"intermediate_size": NaN}'),
    "a norm of infinity": layers(rms_norm_eps=float("inf")),
    "a norm of nothing": layers(rms_norm_eps=0),
    "a base of nothing": layers(rope_theta=0, rope_parameters=None),
    "rotary positions that are a list": layers(rope_scaling=[1], rope_parameters=[1]),
    "unknown rotary positions": layers(rope_scaling={"type": "x"}, rope_parameters={"type": "x"}),
    "a thousand heads": top(num_heads=10**9, medusa_num_heads=10**9),
    "no Medusa heads": top(num_heads=0, medusa_num_heads=-2),
    "a block without end": top(block_size=10**9, dflash_config={"block_size": 10**9}),
    "a block in words": top(block_size="all"),
    "a mask beyond the vocabulary": top(mask_token_id=10**9),
    "a negative mask": top(mask_token_id=-1),
    "layers that are not there": top(
        eagle_aux_hidden_state_layer_ids=[1, 2, 9000],
        target_layer_ids=[9000],
        aux_hidden_state_layer_ids=[9000],
    ),
    "layers in words": top(eagle_aux_hidden_state_layer_ids=["low"], target_layer_ids="all"),
    "a billion layers to read": top(eagle_aux_hidden_state_layer_ids=list(range(1, 5000))),
    "layers twice": top(eagle_aux_hidden_state_layer_ids=[2, 2, 2], target_layer_ids=[2, 2]),
    "a part that is a number": top(eagle_config=3, dflash_config=3, speculators_config=3),
    "layers that are a number": top(transformer_layer_config=3),
    "a draft vocabulary of nothing": top(draft_vocab_size=0),
    "a draft vocabulary beyond the target's": top(draft_vocab_size=10**6),
    "a flag in words": top(norm_before_residual="yes", medusa_fc_bias="no", is_causal=1),
    "a selector without end": top(dflash_config={"selector_top_k": 10**12}),
    "a slip out of the archive": pickled(slipped),
    "a plain pickle": pickled(lambda path, x: torch.save(x, path)),
    "parameters in a pickle": saved(
        lambda x: {
            n: torch.nn.Parameter(t, requires_grad=t.is_floating_point()) for n, t in x.items()
        }
    ),
    "offsets of 32 bits": offsets(lambda x: x.int()),
    "weights of two types": tensors(lambda x: x.update({first(x): x[first(x)].float()})),
    "a whole shard": indexed(
        lambda names: {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    ),
    "metadata that is a number": header(lambda x: x.update(__metadata__=3)),
    "a code map": top(auto_map={"AutoModel": "evil.Model"}, trust_remote_code=False),
}


def read_or_rejected(folder: Path, target: Target) -> Drafter | None:
    """The draft, with the weights of its files; None after one line that names the place."""
    try:
        drafter = draft_checkpoint.read_draft(folder, target)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1200, str(error)
        return None
    written, _, _ = draft_import.as_it_came(drafter, target)
    theirs = draft_import.foreign_draft(folder).files.read_tensors()
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], x) for name, x in theirs.items())
    return drafter


@pytest.mark.parametrize("attack", [*MUST_FAIL, *EITHER])
def test_a_hostile_draft_is_one_line_or_a_draft(
    whole: dict[str, Path],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: str,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, good in whole.items():
        shutil.copytree(good, tmp_path / "drafts" / name)
        (MUST_FAIL | EITHER)[attack](tmp_path / "drafts" / name)
        found = read_or_rejected(tmp_path / "drafts" / name, target)
        outside = name in NATIVE_MODULES and attack in OF_TARGET
        assert found is None or attack in EITHER or outside, f"{name}: this was read"
        try:  # what is asked before a target is loaded
            draft_checkpoint.read_card(tmp_path / "drafts" / name)
        except UserError as error:
            assert "\n" not in str(error)
        shutil.rmtree(tmp_path / "drafts")
    assert not list(tmp_path.rglob("pwned"))


def test_plain_drafts_are_read(whole: dict[str, Path], target: Target) -> None:
    """What is attacked above is sound by itself."""
    assert all(read_or_rejected(folder, target) for folder in whole.values())


def test_every_importer_is_attacked(whole: dict[str, Path]) -> None:
    drafts = [draft_import.foreign_draft(folder) for folder in whole.values()]
    assert {(x.family, x.layout_name) for x in drafts} == draft_import.IMPORTS.keys()
    assert len(MUST_FAIL) + len(EITHER) > 100


@pytest.mark.parametrize("name", ["no/such-draft", "no-such-draft"])
def test_a_name_that_is_nowhere(target: Target, monkeypatch: Any, name: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"there is no such folder|holds no draft"):
        draft_checkpoint.read_draft(name, target)
