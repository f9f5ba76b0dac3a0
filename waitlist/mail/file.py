"""`file:DIR`: each mail as one .eml file, for development and tests. The folder is the inbox; no network."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from waitlist.files import sync
from waitlist.mail.base import Mail
from waitlist.mail.message import message_bytes
from waitlist.model import Outcome, OutcomeKind
from waitlist.settings import ROOT, Settings

# A file name never expires: a mail written again replaces itself. A hundred years, in seconds.
_FOR_EVER_SECONDS: Final = 100 * 366 * 86_400
# Ids are UUIDs; a slash in one would write elsewhere.
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")

_PROBE: Final = ".check"


class FileSender:
    provider = "file"
    key_window_seconds: int | None = _FOR_EVER_SECONDS

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def from_settings(cls, settings: Settings) -> FileSender:
        """Relative folders count from the project's own, not from where the command was typed."""
        return cls(ROOT / unquote(urlsplit(settings.mail_url.get_secret_value()).path))

    def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
        """A local disk answers or fails by itself, so the deadline is not watched."""
        if not _FILE_NAME.fullmatch(key):
            raise ValueError("the key cannot be a file name")
        message = message_bytes(mail)
        try:
            _write_durably(self.folder, f"{key}.eml", message)
        except OSError as error:
            return _fault(error)
        return Outcome(OutcomeKind.ACCEPTED, detail=f"{key}.eml")

    def check(self, *, deadline_seconds: float) -> Outcome:
        try:
            _write_durably(self.folder, _PROBE, b"")
            os.unlink(self.folder / _PROBE)
        except OSError as error:
            return _fault(error)
        return Outcome(OutcomeKind.ACCEPTED, detail="the folder can be written")

    def close(self) -> None:
        pass


def _write_durably(folder: Path, name: str, content: bytes) -> None:
    """All of the file or none, whenever the power fails: `accepted` is said only of what is on the disk.

    Each writer has a draft of its own (mode 0600): a worker that woke up late must not share one with its heir.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.rename(draft, folder / name)
    except BaseException:
        os.unlink(draft)
        raise
    sync(folder)


def _fault(error: OSError) -> Outcome:
    """Full, read-only or forbidden: our own machine, never the recipient."""
    word = errno.errorcode.get(error.errno or 0, "error").lower()
    return Outcome(OutcomeKind.SYSTEMIC, f"file_{word}", error.strerror or type(error).__name__)
