"""The database goes away, or another file takes its place, under processes that are running."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.databases import SQLiteFiles
from tests.factories import FakeSender, make_list
from tests.scenes import a_worker, count, join
from waitlist import ledger, outbox
from waitlist.errors import StorageUnavailable
from waitlist.model import Outcome
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Store
from waitlist.store.schema import subscribers

SOON_SECONDS = 30


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_submission_after_the_file_was_replaced_stands_in_the_new_file(
    services: Services, settings: Settings, sqlite_files: SQLiteFiles, tmp_path: Path
) -> None:
    make_list(services)
    join(services, "before@example.com")
    (tmp_path / "backup").mkdir()
    backup = sqlite_files.fresh(tmp_path / "backup").removeprefix("sqlite:///")
    for suffix in ("", "-wal", "-shm"):
        Path(f"{settings.database_path}{suffix}").unlink(missing_ok=True)

    with pytest.raises(StorageUnavailable):
        join(services, "between@example.com")
    os.rename(backup, settings.database_path)
    make_list(services)
    join(services, "after@example.com")

    fresh = Store(settings.store_url)
    emails = sa.select(subscribers.c.email)
    with fresh.read() as tx:
        assert list(tx.execute(emails).scalars()) == ["after@example.com"]
    fresh.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_damaged_file_is_one_sentence_not_a_surprise(services: Services, settings: Settings, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"this is no database" * 1000)
    for suffix in ("-wal", "-shm"):
        Path(f"{settings.database_path}{suffix}").unlink(missing_ok=True)
    shutil.copyfile(garbage, settings.database_path)
    services.store.close()

    with pytest.raises(StorageUnavailable, match="stop everything, and put a backup in its place"):
        count(services, subscribers)
    assert not ledger.readiness(services).is_ready


def end_connections(services: Services) -> None:
    """As a restart of the server does to everybody: all connections of this database but our own."""
    statement = sa.text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with services.store.begin() as tx:
        tx.execute(statement)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_idle_worker_outlives_a_restart_of_the_database(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    make_list(services)
    sent = threading.Event()
    sender = FakeSender()

    def on_mail(_outcome: Outcome) -> None:
        sent.set()

    worker = a_worker(services, sender, on_mail=on_mail)
    idle = threading.Event()
    changes = services.store.database.changes

    def watched_changes(connection: sa.Connection) -> Callable[[float], bool]:
        has_changed = changes(connection)

        def look(seconds: float) -> bool:
            found = has_changed(seconds)
            idle.set()  # it listens, and has nothing to do
            return found

        return look

    monkeypatch.setattr(services.store.database, "changes", watched_changes)
    thread = threading.Thread(target=outbox.follow, args=(worker,))
    thread.start()
    try:
        assert idle.wait(SOON_SECONDS)
        end_connections(services)
        join(services)
        assert sent.wait(SOON_SECONDS)
        join(services, "next@example.com")
        while len(sender.mails) < 2 and thread.is_alive():
            thread.join(0.01)
        assert thread.is_alive(), "it goes on"
    finally:
        worker.stop.set()
        thread.join(SOON_SECONDS)
    assert not thread.is_alive()
