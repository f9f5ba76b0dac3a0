"""The queue of SQLite's writers. Knows threads and a lock file, not the database (docs/decisions/0001)."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waitlist.errors import StorageBusy, StorageUnavailable


class WriteQueue:
    """Lets one write transaction at a time onto a SQLite file: a lock between threads, then a file lock between
    processes. SQLite's own busy wait polls, which starves whole writers; here a waiter is woken when the lock is free.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._threads = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        deadline = time.monotonic() + self._seconds
        if not self._threads.acquire(timeout=self._seconds):
            raise StorageBusy()
        try:
            file = self._lock_file(deadline)
            try:
                yield
            finally:
                os.close(file)
        finally:
            self._threads.release()

    def _lock_file(self, deadline: float) -> int:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            try:
                # A read-only disk still queues, and then says so.
                file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StorageUnavailable() from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for(file, deadline)
        return file

    def _wait_for(self, file: int, deadline: float) -> None:
        """flock() knows no time-out, so a thread waits; whichever of the two gives up last closes the file."""
        handover = threading.Lock()
        locked = threading.Event()
        abandoned = False

        def wait() -> None:
            fcntl.flock(file, fcntl.LOCK_EX)
            with handover:
                locked.set()
                if abandoned:
                    os.close(file)

        threading.Thread(target=wait, daemon=True, name="write-queue").start()
        if locked.wait(max(0.0, deadline - time.monotonic())):
            return
        with handover:
            if locked.is_set():
                return
            abandoned = True
        raise StorageBusy()
