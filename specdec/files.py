"""Files that appear whole or not at all: what a kill interrupts leaves what was there before."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader always finds either the old text or the new one, whole."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    partial.write_text(text)
    partial.replace(path)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """`with replaced(folder) as partial:` writes a folder anew under a temporary name.

    The folder takes the place of the old one only if the block succeeds; after an error the old
    one is untouched. Libraries create some files readable by their owner alone: all files get
    the mode that the user's umask gives.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    mode = partial.stat().st_mode & 0o666  # a new folder shows the umask without setting it
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(mode)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
