"""Files: complete or absent after a crash, and JSON that is read back into dataclasses."""

import errno
import fcntl
import json
import os
import re
import shutil
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import uuid4

from safetensors import SafetensorError

from specdec.compat import exchange
from specdec.errors import (
    Unreadable,
    UserError,
    located,
    naming,
    nearest,
    of_files,
    require,
    unreadable,
)
from specdec.integrity import Damaged, sealed, unsealed

T = TypeVar("T")
LARGEST = 256 * 2**20  # bytes of a JSON file: ours are far smaller
LOCK = ".lock"  # ends the name of the file whose lock says that another one is being written
PARTIAL = re.compile(r".+\.partial-[0-9a-f]{32}(?P<lock>\.lock)?")
OLD = 24 * 3600  # seconds after which nobody writes a file that no lock tells anything about
# errors by which a file system says that it has no locks, as some of Lustre, FUSE and sshfs do
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}
TRIAL = 2**20  # bytes that are written to see whether a folder takes any
MOST_NESTED = 64  # levels of lists and objects within one another
NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}
NAMES |= {bool: "true or false", list: "a list", tuple: "a list", dict: "an object"}


def make_folder(folder: Path) -> Path:
    """Make a folder and its parents unless they exist. Raises UserError if that fails."""
    require_utf8(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the folder {folder} cannot be made ({reason}): name another") from error
    return folder


def require_writable(folder: Path) -> None:
    """Raise UserError if a file of `TRIAL` bytes cannot be written to a folder: the disk is full, a
    quota is used up, or it is read-only."""
    trial = folder / f"trial.partial-{uuid4().hex}"  # swept up if this process is killed
    try:
        with naming(folder), trial.open("wb") as file:
            file.write(bytes(TRIAL))
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
    except OSError as error:
        raise of_files(error) from error
    finally:
        with suppress(OSError):
            trial.unlink()


@contextmanager
def folder_for(folder: Path) -> Iterator[Path]:
    """Make a folder, as `make_folder` does, for the work of a block. If the block ends with a
    UserError, the new folders are removed again unless they contain something."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield folder
    except UserError:
        for path in absent:
            with suppress(OSError):
                path.rmdir()
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader always finds the complete old text or the complete new
    one."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with naming(path):
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """`with new_file(path) as partial:` writes a file under a temporary name and renames it only if
    the block succeeds. Its mode follows the user's umask: libraries create some files that only
    their owner can read. Until the block ends, a lock on a second file beside it shows
    `remove_abandoned` that it is in use."""
    partial = path.with_name(f"{path.name}.partial-{uuid4().hex}")
    lock = partial.with_name(f"{partial.name}{LOCK}")
    with naming(path), _held(lock) as file:
        try:
            yield partial
            partial.chmod(os.fstat(file).st_mode & 0o666)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink()


def take_lock(file: int, operation: int) -> bool:
    """Lock an open file, given by its descriptor, with `fcntl.flock`. Returns False if its file
    system has no locks. Raises BlockingIOError if another process holds the lock and the operation
    does not wait."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return False
        raise
    return True


@contextmanager
def _held(lock: Path) -> Iterator[int]:
    """Create a file and return its descriptor. The file is locked during the block, if the file
    system has locks, and then removed."""
    file = None
    try:
        while file is None:
            file = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
            take_lock(file, fcntl.LOCK_EX)
            if not (lock.exists() and os.path.samestat(os.fstat(file), os.stat(lock))):
                os.close(file)  # `remove_abandoned` removed it before it was locked
                file = None
        yield file
    finally:
        if file is not None:
            with suppress(OSError):
                lock.unlink()
            os.close(file)


def remove_abandoned(folder: Path) -> None:
    """Remove the files in a folder that a killed process began to write with `new_file`, which are
    those without a lock. Files of earlier versions and on file systems without locks are removed
    once they are a day old."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := PARTIAL.fullmatch(path.name)) is None:
            continue
        lock = path if match["lock"] else path.with_name(f"{path.name}{LOCK}")
        # it may be another user's, or removed by now
        with suppress(OSError), _abandoned(lock) as abandoned:
            if not abandoned:
                continue
            if match["lock"]:
                path.with_name(path.name.removesuffix(LOCK)).unlink(missing_ok=True)
                path.unlink()
            elif not lock.exists() and time.time() - path.lstat().st_mtime > OLD:
                path.unlink()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise Unreadable if the system does not let this block read a file: callers that treat other
    errors as damage must know the difference. FileNotFoundError passes unchanged."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        cause: BaseException = error
        try:  # for safetensors, any file that it cannot open does not exist
            with path.open("rb"):
                pass
        except OSError as refused:
            cause = refused
        if (no := unreadable(path, cause)) is not None:
            raise no from cause
        if isinstance(error, FileNotFoundError) and cause is error:
            raise Unreadable(f"{path} could not be opened for a moment: try again") from error
        raise


@contextmanager
def replaced(folder: Path, ours: Iterable[str] | None = None) -> Iterator[Path]:
    """`with replaced(folder) as partial:` writes a new folder under a temporary name and
    replaces the old folder only if the block succeeds. With `ours` (names or patterns), only
    these files of the old folder are deleted; all others belong to the user and are kept in the
    new folder. Without it, all old files are deleted. The mode of all files follows the user's
    umask. Raises UserError for a folder that cannot be replaced, and if a user's file has the
    name of a new one."""
    require_elsewhere(folder)
    folder = folder.resolve()
    recover(folder)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
    old, lock = partial.with_suffix(".old"), partial.with_suffix(LOCK)
    make_folder(folder.parent)
    try:
        with naming(folder), _held(lock):  # until the end, `recover` leaves both folders alone
            make_folder(partial)
            yield partial
            follow_umask(partial)
            if ours is not None and folder.exists():
                _keep(folder, partial, tuple(ours))
            if not folder.exists():
                os.rename(partial, folder)
            elif exchange(partial, folder):  # a reader finds one of the two at any moment
                os.rename(partial, old)
            else:
                os.rename(folder, old)
                os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def follow_umask(folder: Path) -> None:
    """Give all files in a new folder the mode of the user's umask, which the folder itself has.
    Libraries create some files that only their owner can read."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def require_elsewhere(folder: Path) -> None:
    """Raise UserError for a folder that cannot be replaced because this program runs in it."""
    working = Path.cwd()
    require(
        folder.resolve() not in (working, *working.parents),
        f"{folder} is the current folder or holds it: name another folder",
    )


def wait_for_replacement(path: Path) -> bool:
    """Whether a path exists now or within a second. On a file system that cannot swap two folders,
    `replaced` removes the old folder a moment before the new one has its name."""
    left = re.compile(rf"\.{re.escape(path.parent.name)}\.[0-9a-f]{{32}}\.old")
    for _ in range(20):
        if path.exists():
            return True
        place = path.parent.absolute().parent
        if not place.is_dir() or not any(left.fullmatch(x) for x in os.listdir(place)):
            break
        time.sleep(0.05)
    return path.exists()


def recover(folder: Path) -> None:
    """Clean up after a program that was killed within `replaced(folder)`: move an old folder back
    if it was moved away, and remove partial files. Files that another process is writing are kept,
    and without file locks also files that are less than a day old."""
    left = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{32}}\.(partial|old|lock)")
    paths = [*folder.parent.iterdir()] if folder.parent.is_dir() else []
    for path in sorted(paths, key=lambda path: path.suffix == LOCK):  # after what they are for
        if (match := left.fullmatch(path.name)) is None:
            continue
        with _abandoned(path.with_suffix(LOCK)) as abandoned:
            if abandoned is None and match[1] == "old" and not folder.exists():
                time.sleep(1)  # another process would have moved the new one here by then
                abandoned = not folder.exists()
            if not abandoned:
                continue
            if match[1] == "old" and not folder.exists():
                os.rename(path, folder)
            elif match[1] == "lock":
                with suppress(OSError):
                    path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _abandoned(lock: Path) -> Iterator[bool | None]:
    """Whether no process holds the lock on a file, which nobody can take during the block. True if
    there is no such file. On a file system without locks: True if the file is a day old, else None,
    since a process may be writing it."""
    file, free = None, None
    try:
        try:
            file = os.open(lock, os.O_RDWR)
            locked = take_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if locked or time.time() - os.fstat(file).st_mtime > OLD:
                free = True
        except FileNotFoundError:
            free = True
        except OSError:  # it is held, or another user's
            free = False
        yield free
    finally:
        if file is not None:
            os.close(file)


def _keep(folder: Path, partial: Path, ours: Sequence[str]) -> None:
    """Hard-link files that are not `ours` into a new folder, so that both folders hold them."""
    for path in folder.iterdir():
        if any(fnmatch(path.name, pattern) for pattern in ours):
            continue
        new = partial / path.name
        require(
            not os.path.lexists(new),
            f"{path} was not written by us, and a new file has its name: move it elsewhere",
        )
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new, symlinks=True, copy_function=_linked)
        else:
            _linked(path, new)


def _linked(old: Any, new: Any) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def require_file(path: Path) -> None:
    """Raise UserError unless the path is a regular file: opening a named pipe would block
    forever."""
    require(path.is_file(), f"{path} cannot be read: it does not exist, or is not a file")


def require_utf8(path: Path) -> None:
    """Raise UserError for a path that is not valid UTF-8, such as a name in Latin-1: JSON and
    safetensors cannot store or open it."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{path} has bytes that are not UTF-8 in its name: rename it, or name another"
        ) from error


def read_lines(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The records with these keys in a run's JSON lines; damaged lines are skipped. Raises
    UserError unless the path is a regular file."""
    require_file(path)
    records = []
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and all(key in value for key in keys):
            records.append(value)
    return records


def sealed_lines(
    path: Path, keys: Sequence[str], context: str = ""
) -> tuple[list[dict[str, Any]], int]:
    """The records with these keys in JSON lines that each have a checksum, and the number of
    damaged lines: no JSON, a missing key, or a wrong checksum. Raises UserError unless the path is
    a regular file."""
    require_file(path)
    records, damaged = [], 0
    for line in path.read_bytes().splitlines():
        try:
            value = unsealed(json.loads(line), context)
        except (ValueError, RecursionError, Damaged):
            value = None
        whole = isinstance(value, dict) and all(key in value for key in keys)
        if whole:
            records.append(value)
        damaged += not whole
    return records, damaged


def write_json(path: Path, value: Mapping[str, Any], context: str = "") -> None:
    """Write an object with its checksum (`sealed`) as a JSON file, atomically."""
    write_whole(path, json.dumps(sealed(value, context), indent=1))


def read_record(
    kind: type[T],
    path: Path,
    remedy: str = "",
    context: str = "",
    upgraded: Callable[[Any], Any] | None = None,
) -> T:
    """Read a JSON file into a dataclass. `upgraded` turns a value that an earlier version may have
    written into one of this version. Raises UserError as `read_json` and `record` do, with `remedy`
    at the end of the message."""
    try:
        value = read_json(path, context)
        return record(kind, value if upgraded is None else upgraded(value), str(path))
    except Unreadable:
        raise  # the remedy is for a file that is missing or damaged
    except UserError as error:
        raise type(error)(f"{error}; {remedy}" if remedy else str(error)) from error


def read_json(path: Path, context: str = "") -> Any:
    """The value in a JSON file, without its checksum. Raises UserError for a file that is missing,
    too large, not JSON, nested more than `MOST_NESTED` levels deep, or has a wrong checksum;
    Unreadable for one that this process cannot read."""
    try:
        require_file(path)
        size = path.stat().st_size
        require(size <= LARGEST, f"{path} is too large ({size / 1e6:,.0f} MB): name another file")
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise UserError(f"{path} is damaged: it nests thousands of brackets") from None
    except (OSError, ValueError) as error:
        refused = unreadable(path, error)
        raise refused or UserError(f"{path} is damaged or cannot be read: {error}") from error
    level = [value]
    for _ in range(MOST_NESTED):
        level = [list(x.values()) if isinstance(x, dict) else x for x in level]
        level = [inner for x in level if isinstance(x, list) for inner in x]
    require(not level, f"{path} is damaged: it nests more than {MOST_NESTED} brackets")
    return unsealed(value, context, path)


def record(kind: type[T], value: Any, where: str) -> T:
    """Build a dataclass from JSON or user input and check every field against its type. If the type
    requires it, a list becomes a tuple, a whole number a float, and a dict's key a number. Raises
    UserError, beginning with `where`, for a missing or unknown key or a value of the wrong type."""
    require(isinstance(value, dict), f"{where}: expected an object, found {_shown(value)}")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in value:
        require(key in known, f"{where}: unknown key {key!r}{nearest(str(key), known)}")
    for name, f in known.items():
        required = f.default is MISSING and f.default_factory is MISSING
        require(name in value or not required, f"{where}: the key {name!r} is missing")
    checked = {key: _as(hints[key], x, f"{where}: {key}") for key, x in value.items()}
    with located(where):  # checks of the dataclass itself
        return kind(**checked)


def _as(kind: Any, value: Any, where: str) -> Any:
    """A value converted to and checked against its type, as `record` describes."""
    plain, args = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return record(kind, value, where)  # type: ignore[arg-type]
    if plain in (Union, types.UnionType):
        errors = []
        for one in args:
            try:
                return _as(one, value, where)
            except UserError as error:
                errors.append(error)
        raise errors[0]
    if plain is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    converted = tuple(value) if plain is tuple and isinstance(value, list) else value
    if type(converted) is not plain:
        name = NAMES.get(plain, getattr(plain, "__name__", str(plain)))
        raise UserError(f"{where}: expected {name}, found {_shown(value)}")
    if plain is str:
        whole = "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
        require(whole, f"{where}: {_shown(value)} is not text")
    if plain is dict and args:
        keys = [int(k) if args[0] is int and str(k).isdecimal() else k for k in value]  # JSON: text
        named = zip(keys, value.values(), strict=True)
        return {_as(args[0], k, where): _as(args[1], x, f"{where}.{k}") for k, x in named}
    if plain in (list, tuple) and args:
        of = [args[0]] * len(converted) if plain is list or args[-1] is ... else args
        require(
            len(of) == len(converted), f"{where}: expected {len(of)} values, found {len(converted)}"
        )
        return plain(_as(a, converted[i], f"{where}[{i}]") for i, a in enumerate(of))
    return converted


def _shown(value: Any) -> str:
    """A value as text for a message, shortened if it is long."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = ascii(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
