"""New files that are whole or not there, readable by their owner alone, and in nobody's place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def new_text_file(path: Path) -> Iterator[TextIO]:
    """A draft (mode 0600) to write to, which becomes `path` when the block ends well, and is on the disk then.

    Raises FileExistsError when something lies at `path`, and whatever OSError the disk has; then nothing is left.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            yield file
        sync(Path(draft))
        os.link(draft, path)  # fails, unlike rename, where something lies already
    finally:
        os.unlink(draft)
    sync(path.parent)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, survive a loss of power from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
