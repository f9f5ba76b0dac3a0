"""A copy of an embedded installation: the database as it stands at one moment, and its key files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from waitlist.errors import InvalidInput
from waitlist.files import sync
from waitlist.services import Services

KEY_FILES: Final = ("secret_key", "data_key")


def backup(services: Services, folder: Path) -> list[str]:
    """Make `folder` with the database and what key files lie beside it; returns the names. Writers go on meanwhile.

    Raises InvalidInput for PostgreSQL and for a folder that is there; OSError and StorageUnavailable, and then nothing
    is left, when the disk does not take it.
    """
    if not services.store.is_embedded:
        raise InvalidInput("PostgreSQL is backed up with its own tools, pg_dump for one; keep both keys with it.")
    if folder.exists():
        raise InvalidInput(f"{folder} is there already; name a new folder.")
    source = services.settings.database_path
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        services.store.copy_to(draft / source.name)
        for key in KEY_FILES:
            if (source.parent / key).exists():
                (draft / key).touch(mode=0o600)
                shutil.copyfile(source.parent / key, draft / key)
        names = sorted(path.name for path in draft.iterdir())
        for name in names:
            sync(draft / name)
        sync(draft)
        os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft)
        raise
    sync(folder.parent)
    return names
