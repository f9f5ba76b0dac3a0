"""Transactions on both engines, against real processes: queueing, time-outs, reruns, broken disks."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.factories import START, FakeClock
from tests.processes import CONTEXT, end, run_at_once, start
from waitlist.errors import Restart, SchemaMismatch, StorageBusy, StorageUnavailable
from waitlist.store import Store, Transaction, run_query, run_transaction
from waitlist.store.engine import LOCK_WAIT_SECONDS, MOST_RERUNS, SQLITE_CORRUPTION_RANGE, sqlite_module
from waitlist.store.migrate import upgrade

COUNT_UP = sa.text("UPDATE counters SET value = value + 1 WHERE id = :id")
VALUE = sa.text("SELECT value FROM counters WHERE id = :id")
PROCESSES = 8
ROUNDS = 25
# Only a hang takes so long; nothing waits for it otherwise.
LONGEST_SECONDS = 60

only_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
only_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def counters(store: Store) -> Store:
    """The store, with two counters at 0."""

    def body(tx: Transaction) -> None:
        tx.execute(sa.text("CREATE TABLE counters (id INTEGER PRIMARY KEY, value INTEGER NOT NULL, note TEXT)"))
        tx.execute(sa.text("INSERT INTO counters (id, value) VALUES (1, 0), (2, 0)"))

    run_transaction(store, body)
    return store


@pytest.fixture
def impatient(counters: Store, database_url: str) -> Iterator[Store]:
    """A store of the same database that waits half a second for a lock."""
    store = Store(database_url, lock_wait=0.5)
    yield store
    store.close()


def count_up(tx: Transaction, counter: int = 1) -> None:
    tx.execute(COUNT_UP, {"id": counter})


def value_of(store: Store, counter: int = 1) -> int:
    return run_query(store, lambda tx: int(tx.execute(VALUE, {"id": counter}).scalar_one()))


class Holder:
    """Another process in the middle of a write transaction, until released or killed."""

    def __init__(self, url: str) -> None:
        is_held, self._release = CONTEXT.Event(), CONTEXT.Event()
        self.process = start(_hold, url, is_held, self._release)
        assert is_held.wait(LONGEST_SECONDS)

    def release(self) -> None:
        self._release.set()
        self.process.join(LONGEST_SECONDS)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        end(self.process)


def _hold(url: str, is_held: Any, release: Any) -> None:
    def body(tx: Transaction) -> None:
        count_up(tx)
        is_held.set()
        release.wait(LONGEST_SECONDS)

    run_transaction(Store(url), body)


def _count_up_many_times(wait: Any, number: int, url: str) -> float:
    store = Store(url)
    run_query(store, lambda tx: tx.now)
    longest = 0.0
    wait()
    for _ in range(ROUNDS):
        begin = time.monotonic()
        run_transaction(store, count_up)
        longest = max(longest, time.monotonic() - begin)
    store.close()
    return longest


def test_write_transactions_of_eight_processes_queue_and_all_finish(counters: Store, database_url: str) -> None:
    run_at_once(PROCESSES, _count_up_many_times, database_url)

    assert value_of(counters) == PROCESSES * ROUNDS


def test_write_transactions_of_many_threads_queue_and_all_finish(counters: Store) -> None:
    threads = [threading.Thread(target=run_transaction, args=(counters, count_up)) for _ in range(32)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert value_of(counters) == 32


def test_lock_held_elsewhere_is_busy_within_the_lock_wait(impatient: Store, database_url: str) -> None:
    with Holder(database_url):
        begin = time.monotonic()
        with pytest.raises(StorageBusy) as error:
            run_transaction(impatient, count_up)
        waited = time.monotonic() - begin

    assert type(error.value) is StorageBusy
    assert 0.4 < waited < 3


def test_nothing_is_left_locked_after_a_time_out(impatient: Store, database_url: str) -> None:
    with Holder(database_url) as holder:
        for _ in range(3):
            with pytest.raises(StorageBusy):
                run_transaction(impatient, count_up)
        holder.release()

    for _ in range(3):
        run_transaction(impatient, count_up)
    assert value_of(impatient) == 4
    assert not [thread for thread in threading.enumerate() if thread.name == "write-queue" and is_stuck(thread)]


def is_stuck(thread: threading.Thread) -> bool:
    thread.join(LONGEST_SECONDS)
    return thread.is_alive()


@only_sqlite
def test_time_outs_leak_no_file(impatient: Store, database_url: str) -> None:
    with Holder(database_url) as holder:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(StorageBusy):
                run_transaction(impatient, count_up)
        holder.release()
    for thread in threading.enumerate():
        if thread.name == "write-queue":
            thread.join(LONGEST_SECONDS)

    # The first transaction opens the one connection of the pool: the file and its two companions.
    run_transaction(impatient, count_up)
    assert len(os.listdir("/proc/self/fd")) - before <= 3


def test_killed_writer_leaves_neither_its_change_nor_its_lock(counters: Store, database_url: str) -> None:
    with Holder(database_url) as holder:
        holder.kill()

        run_transaction(counters, count_up)

    assert value_of(counters) == 1


@only_sqlite
def test_lock_of_a_foreign_program_is_busy_too(impatient: Store) -> None:
    """A person with the sqlite3 shell does not know our queue."""
    foreign = sqlite_module().connect(str(impatient.url.database), isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StorageBusy):
            run_transaction(impatient, count_up)
    finally:
        foreign.close()

    run_transaction(impatient, count_up)
    assert value_of(impatient) == 1


@only_sqlite
def test_writer_holds_the_lock_before_it_reads(counters: Store) -> None:
    """A transaction that began as a reader could not write after somebody else had: its state would be stale."""
    foreign = sqlite_module().connect(str(counters.url.database), isolation_level=None, timeout=0)

    def body(tx: Transaction) -> None:
        with pytest.raises(sqlite_module().OperationalError, match="locked"):
            foreign.execute("BEGIN IMMEDIATE")

    try:
        run_transaction(counters, body)
    finally:
        foreign.close()


def test_reader_waits_for_no_writer(impatient: Store, database_url: str) -> None:
    with Holder(database_url):
        assert value_of(impatient) == 0


@only_postgresql
def test_named_lock_queues_transactions(impatient: Store) -> None:
    def body(tx: Transaction) -> None:
        tx.lock("person")
        run_transaction(impatient, lambda other: other.lock("somebody else"))
        with pytest.raises(StorageBusy):
            run_transaction(impatient, lambda other: other.lock("person"))

    run_transaction(impatient, body)

    run_transaction(impatient, lambda tx: tx.lock("person"))


def test_named_lock_costs_nothing_where_writers_are_alone(store: Store) -> None:
    assert run_transaction(store, lambda tx: tx.lock("person")) is None


@pytest.mark.parametrize("conflicts", [1, MOST_RERUNS])
def test_restart_runs_the_whole_body_again(counters: Store, conflicts: int) -> None:
    runs: list[int] = []

    def body(tx: Transaction) -> int:
        count_up(tx)
        runs.append(tx.now)
        if len(runs) <= conflicts:
            raise Restart
        return len(runs)

    assert run_transaction(counters, body) == conflicts + 1
    assert value_of(counters) == 1


def test_fourth_conflict_in_a_row_is_busy(counters: Store) -> None:
    runs: list[int] = []

    def body(tx: Transaction) -> None:
        count_up(tx)
        runs.append(tx.now)
        raise Restart

    with pytest.raises(StorageBusy):
        run_transaction(counters, body)

    assert len(runs) == 1 + 3
    assert value_of(counters) == 0


def test_error_in_a_body_undoes_it_and_is_not_repeated(counters: Store) -> None:
    runs: list[int] = []

    def body(tx: Transaction) -> None:
        count_up(tx)
        runs.append(tx.now)
        raise LookupError("ours")

    with pytest.raises(LookupError, match="ours"):
        run_transaction(counters, body)

    assert len(runs) == 1
    assert value_of(counters) == 0


@only_postgresql
def test_deadlocked_bodies_run_again_and_both_finish(counters: Store) -> None:
    meet = threading.Barrier(2, timeout=LONGEST_SECONDS)
    runs = {1: 0, 2: 0}

    def work(first: int, second: int) -> None:
        def body(tx: Transaction) -> None:
            runs[first] += 1
            count_up(tx, first)
            if runs[first] == 1:
                meet.wait()
            count_up(tx, second)

        run_transaction(counters, body)

    threads = [threading.Thread(target=work, args=order) for order in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(runs.values()) > 2
    assert (value_of(counters, 1), value_of(counters, 2)) == (2, 2)


@only_postgresql
def test_serialisation_failure_runs_the_body_again(counters: Store) -> None:
    runs: list[int] = []

    def body(tx: Transaction) -> None:
        if not runs:
            tx.execute(sa.text("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"))
        tx.execute(VALUE, {"id": 1})
        runs.append(tx.now)
        if len(runs) == 1:
            run_transaction(counters, count_up)
        count_up(tx)

    run_transaction(counters, body)

    assert len(runs) == 2
    assert value_of(counters) == 2


def test_clock_is_read_once_for_a_transaction(store: Store, clock: FakeClock) -> None:
    def body(tx: Transaction) -> tuple[int, int]:
        first = tx.now
        clock.advance(10.9)
        return first, tx.now

    assert run_transaction(store, body) == (START, START)
    assert run_transaction(store, lambda tx: tx.now) == START + 10


def test_without_a_clock_the_time_is_now(database_url: str) -> None:
    store = Store(database_url)
    try:
        before = int(time.time())
        now = run_transaction(store, lambda tx: tx.now)

        assert before <= now <= time.time()
    finally:
        store.close()


def test_constraint_that_is_broken_is_not_a_busy_database(counters: Store) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        run_transaction(counters, lambda tx: tx.execute(sa.text("INSERT INTO counters (id, value) VALUES (1, 0)")))


def test_missing_table_asks_for_the_upgrade(store: Store) -> None:
    with pytest.raises(SchemaMismatch, match="flask upgrade-db"):
        run_query(store, lambda tx: tx.execute(sa.text("SELECT * FROM table_of_the_next_version")))


def test_exhausted_pool_is_busy(impatient: Store) -> None:
    engine = impatient.database.read_engine
    taken: list[sa.Connection] = []
    try:
        while len(taken) < 65:
            taken.append(engine.connect())
        with pytest.raises(StorageBusy):
            run_query(impatient, lambda tx: tx.now)
    finally:
        for connection in taken:
            connection.close()

    assert value_of(impatient) == 0


@only_sqlite
def test_full_disk_is_unavailable_and_works_again_when_there_is_room(counters: Store) -> None:
    def set_limit(pages: int) -> int:
        with counters.database.write_engine.connect() as connection:
            cursor = connection.connection.cursor()
            return int(cursor.execute(f"PRAGMA max_page_count={pages}").fetchone()[0])

    def fill(tx: Transaction) -> None:
        count_up(tx)
        tx.execute(sa.text("UPDATE counters SET note = :note WHERE id = 1"), {"note": "x" * 1_000_000})

    set_limit(1)  # never less than there are
    with pytest.raises(StorageUnavailable):
        run_transaction(counters, fill)
    assert value_of(counters) == 0

    set_limit(1_000_000)
    run_transaction(counters, fill)
    assert value_of(counters) == 1


def _write_to_a_limited_disk(wait: Any, number: int, url: str) -> list[str]:
    """The kernel refuses to let any file grow: the WAL cannot take the commit."""
    import resource

    store = Store(url)
    answers = []
    for limit in (1, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            run_transaction(store, count_up)
            answers.append("written")
        except StorageUnavailable:
            answers.append("unavailable")
    store.close()
    return answers


@only_sqlite
def test_log_that_cannot_grow_is_unavailable_and_works_again(counters: Store, database_url: str) -> None:
    assert run_at_once(1, _write_to_a_limited_disk, database_url) == [["unavailable", "written"]]
    assert value_of(counters) == 1


def _write_as_nobody(wait: Any, number: int, url: str) -> str:
    sqlite_module()
    store = Store(url)
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        run_transaction(store, count_up)
        return "written"
    except StorageUnavailable:
        return "unavailable"


@only_sqlite
@pytest.mark.parametrize("has_lock_file", [True, False])
def test_read_only_database_is_unavailable(counters: Store, has_lock_file: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "waitlist.sqlite3"
        counters.close()
        shutil.copyfile(str(counters.url.database), path)
        if has_lock_file:
            (folder / "waitlist.sqlite3.lock").touch(mode=0o444)
        path.chmod(0o444)
        folder.chmod(0o555)

        assert run_at_once(1, _write_as_nobody, f"sqlite:///{path}") == ["unavailable"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@only_postgresql
def test_read_only_server_is_unavailable(counters: Store, database_url: str) -> None:
    """A standby, or a server that an operator has put to read-only."""

    def forbid(tx: Transaction) -> None:
        tx.execute(sa.text("SET TRANSACTION READ ONLY"))
        count_up(tx)

    with pytest.raises(StorageUnavailable):
        run_transaction(counters, forbid)

    run_transaction(counters, count_up)


def test_query_cannot_write_and_a_transaction_after_it_can(counters: Store) -> None:
    with pytest.raises(StorageUnavailable):
        run_query(counters, count_up)

    run_transaction(counters, count_up)
    assert value_of(counters) == 1


def test_query_reads_one_state_whatever_is_committed_meanwhile(counters: Store) -> None:
    def body(tx: Transaction) -> list[int]:
        first = tx.execute(VALUE, {"id": 1}).scalar_one()
        run_transaction(counters, count_up)
        return [first, tx.execute(VALUE, {"id": 1}).scalar_one()]

    assert run_query(counters, body) == [0, 0]
    assert value_of(counters) == 1


@only_postgresql
def test_lost_connection_is_unavailable_and_the_next_one_works(counters: Store) -> None:
    def cut(tx: Transaction) -> None:
        count_up(tx)
        backend = tx.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        run_query(counters, lambda other: other.execute(sa.text("SELECT pg_terminate_backend(:id)"), {"id": backend}))
        count_up(tx)

    with pytest.raises(StorageUnavailable):
        run_transaction(counters, cut)

    run_transaction(counters, count_up)
    assert value_of(counters) == 1


@pytest.mark.parametrize(
    "url", ["postgresql://nobody:hunter2@127.0.0.1:1/nothing", "sqlite:////does/not/exist/waitlist.sqlite3"]
)
def test_database_that_is_not_there_is_unavailable_and_keeps_its_password(url: str) -> None:
    store = Store(url, lock_wait=0.5)
    try:
        for run in (run_query, run_transaction):
            with pytest.raises(StorageUnavailable) as error:
                run(store, lambda tx: tx.now)
            assert "hunter2" not in str(error.value)
    finally:
        store.close()


def _commit_and_notify(url: str) -> None:
    def body(tx: Transaction) -> None:
        count_up(tx)
        tx.notify_worker()

    store = Store(url)
    run_transaction(store, body)
    store.close()


def is_never_stopping() -> bool:
    return False


def test_watch_sees_the_commit_of_another_process(counters: Store, database_url: str) -> None:
    with counters.watch() as wait:
        begin = time.monotonic()
        process = start(_commit_and_notify, database_url)
        wait(LONGEST_SECONDS, is_never_stopping)
        waited = time.monotonic() - begin

        assert value_of(counters) == 1
    end(process)
    assert waited < LONGEST_SECONDS / 2


def test_watch_misses_no_commit_between_two_waits(counters: Store, database_url: str) -> None:
    with counters.watch() as wait:
        _commit_and_notify(database_url)
        begin = time.monotonic()
        wait(LONGEST_SECONDS, is_never_stopping)

        # A new mail starts within 300 ms; the rest is for a loaded machine.
        assert time.monotonic() - begin < 5


def test_watch_sees_commits_of_its_own_process(counters: Store) -> None:
    with counters.watch() as wait:
        run_transaction(counters, lambda tx: (count_up(tx), tx.notify_worker()))
        begin = time.monotonic()
        wait(LONGEST_SECONDS, is_never_stopping)

        assert time.monotonic() - begin < LONGEST_SECONDS / 2


def test_watch_returns_when_its_time_is_over(counters: Store) -> None:
    with counters.watch() as wait:
        begin = time.monotonic()
        wait(0.25, is_never_stopping)

        assert 0.2 < time.monotonic() - begin < 5


def test_watch_returns_when_told_to_stop(counters: Store) -> None:
    looks = iter([False, False, True])

    with counters.watch() as wait:
        begin = time.monotonic()
        wait(LONGEST_SECONDS, lambda: next(looks))

        assert time.monotonic() - begin < LONGEST_SECONDS / 2


@only_sqlite
def test_every_file_of_the_database_is_private_whatever_the_umask(tmp_path: Path, database_url: str) -> None:
    """B281."""
    folder = tmp_path / "instance"
    store = Store(f"sqlite:///{folder}/waitlist.sqlite3")
    umask = os.umask(0)
    try:
        upgrade(store)
        run_transaction(store, lambda tx: tx.execute(sa.text("CREATE TABLE one (id INTEGER)")))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    finally:
        os.umask(umask)
        store.close()

    assert modes == {
        "waitlist.sqlite3": 0o600,
        "waitlist.sqlite3-wal": 0o600,
        "waitlist.sqlite3-shm": 0o600,
        "waitlist.sqlite3.lock": 0o600,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_commits_are_durable(store: Store) -> None:
    """Promise 3: an acknowledged submission survives a power cut."""
    if store.is_embedded:
        wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "secure_delete": 1}
        found = run_transaction(
            store, lambda tx: {name: tx.execute(sa.text(f"PRAGMA {name}")).scalar_one() for name in wanted}
        )
    else:
        wanted = {"synchronous_commit": "on", "transaction_isolation": "read committed", "lock_timeout": "5s"}
        found = run_transaction(
            store, lambda tx: {name: tx.execute(sa.text(f"SHOW {name}")).scalar_one() for name in wanted}
        )

    assert found == wanted


@only_sqlite
def test_blanked_text_is_in_no_file_after_the_log_is_emptied(counters: Store) -> None:
    """Promise 8."""
    path = Path(str(counters.url.database))
    secret = "raw-token-that-must-not-stay"
    note = sa.text("UPDATE counters SET note = :note WHERE id = 1")

    run_transaction(counters, lambda tx: tx.execute(note, {"note": secret * 100}))
    assert any(secret.encode() in file.read_bytes() for file in path.parent.glob("waitlist.sqlite3*"))

    run_transaction(counters, lambda tx: tx.execute(note, {"note": ""}))
    counters.database.forget_old_pages()

    assert not any(secret.encode() in file.read_bytes() for file in path.parent.glob("waitlist.sqlite3*"))


@pytest.fixture
def reader(counters: Store) -> Iterator[sa.Connection]:
    """Holds the state before the last commit, as a long export would, until closed."""
    with counters.database.read_engine.connect() as connection:
        connection.execute(VALUE, {"id": 1})
        run_transaction(counters, count_up)
        yield connection


@only_sqlite
def test_emptying_the_log_keeps_no_writer_waiting_for_a_reader(counters: Store, reader: sa.Connection) -> None:
    begin = time.monotonic()

    counters.forget_old_pages()

    assert time.monotonic() - begin < LOCK_WAIT_SECONDS / 2
    assert log_size(counters) > 0, "the reader needs it"
    reader.close()
    counters.forget_old_pages()
    assert log_size(counters) == 0


@only_sqlite
def test_emptying_the_log_leaves_the_lock_wait_as_it_was(counters: Store, reader: sa.Connection) -> None:
    counters.forget_old_pages()

    found = run_transaction(counters, lambda tx: tx.execute(sa.text("PRAGMA busy_timeout")).scalar_one())

    assert found == LOCK_WAIT_SECONDS * 1000


@only_sqlite
def test_emptying_an_empty_log_takes_no_turn(counters: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counters.forget_old_pages()
    monkeypatch.setattr(counters.database, "_empty_log", lambda: pytest.fail("somebody may wait behind this"))

    counters.forget_old_pages()


def log_size(store: Store) -> int:
    return Path(f"{store.url.database}-wal").stat().st_size


def test_version_names_the_database(store: Store) -> None:
    name, version = store.version().split(" ", 1)

    assert name == ("SQLite" if store.is_embedded else "PostgreSQL")
    assert int(version.split(".")[0]) >= 3


def test_bundled_sqlite_is_outside_the_range_that_corrupts() -> None:
    pytest.importorskip("pysqlite3", reason="no wheel for this platform; doctor says so")
    first, last = SQLITE_CORRUPTION_RANGE

    assert not first <= sqlite_module().sqlite_version_info <= last
