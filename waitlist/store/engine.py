"""Engines and transactions, and every difference between SQLite and PostgreSQL with its reason.

Knows how to begin, commit, rerun and wait; knows no table. Above it nothing asks which database it is.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from waitlist.errors import Restart, SchemaMismatch, StorageBusy, StorageUnavailable
from waitlist.store.write_queue import WriteQueue

T = TypeVar("T")

# A visitor waits this long for a turn at the database before the honest answer is "busy".
LOCK_WAIT_SECONDS: Final = 5.0
# One statement of ours takes milliseconds; ten seconds means that the server is ill.
STATEMENT_WAIT_SECONDS: Final = 10
# "At most three times" more than once: a fourth conflict in a row is a storm, not a race.
MOST_RERUNS: Final = 3
# `PRAGMA data_version` costs microseconds; a new mail may wait 300 ms for its worker.
POLL_SECONDS: Final = 0.1
# WAL-reset corruption: https://www.sqlite.org/wal.html, fixed in 3.51.3.
SQLITE_CORRUPTION_RANGE: Final = ((3, 7, 0), (3, 51, 2))
# A reader is done in milliseconds; one that is not may be an export, for which the next call need not wait either.
CHECKPOINT_TRIES: Final = 5
CHECKPOINT_PAUSE_SECONDS: Final = 0.02
NOTIFY_CHANNEL: Final = "waitlist_outbox"
# https://www.postgresql.org/docs/current/errcodes-appendix.html
LOCK_NOT_AVAILABLE: Final = "55P03"


def sqlite_module() -> ModuleType:
    """pysqlite3 where it has a wheel, since it brings a current SQLite; else the interpreter's own.

    One process, and every process of one database, must use the same: their file locks do not know one another.
    """
    try:
        from pysqlite3 import dbapi2
    except ImportError:
        from sqlite3 import dbapi2
    module: ModuleType = dbapi2
    return module


def is_in_corruption_range(version: str) -> bool:
    """Whether a database of this `Store.version()` may damage its own file."""
    product, _, number = version.partition(" ")
    if product != "SQLite":
        return False
    oldest, newest = SQLITE_CORRUPTION_RANGE
    return oldest <= tuple(int(part) for part in number.split(".")[:3]) <= newest


@dataclass(frozen=True)
class Transaction:
    """An open transaction and the one moment at which all of it happens."""

    connection: sa.Connection
    now: int

    @property
    def is_postgresql(self) -> bool:
        return self.connection.dialect.name == "postgresql"

    def execute(
        self, statement: sa.Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> sa.CursorResult[Any]:
        return self.connection.execute(statement, values)

    def lock(self, name: str) -> None:
        """Queue behind every other transaction that locks `name`, until the end of this one.

        On SQLite a write transaction is alone anyway.
        """
        if self.is_postgresql:
            self.connection.execute(_ADVISORY_LOCK, {"name": name})

    @contextmanager
    def lock_wait_means(self, error: type[Exception]) -> Iterator[None]:
        """A lock wait that runs out inside raises `error`. On SQLite nothing inside a transaction waits for a lock."""
        try:
            yield
        except DBAPIError as fault:
            if _sqlstate(fault) == LOCK_NOT_AVAILABLE:
                raise error() from fault
            raise

    def notify_worker(self) -> None:
        """Wake the waiting workers at commit. On SQLite they see the commit itself."""
        if self.is_postgresql:
            self.connection.execute(_NOTIFY)


_ADVISORY_LOCK = sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
_NOTIFY = sa.text(f"NOTIFY {NOTIFY_CHANNEL}")
_DATABASE_TIME = sa.text("SELECT CAST(floor(extract(epoch FROM clock_timestamp())) AS bigint)")


class Database(Protocol):
    """What an engine must do its own way."""

    name: str
    read_engine: sa.Engine
    write_engine: sa.Engine

    def exists(self) -> bool: ...

    def begin(self) -> Any: ...

    def now(self, connection: sa.Connection) -> int: ...

    def changes(self, connection: sa.Connection) -> Callable[[float], bool]: ...

    def free_bytes(self) -> int | None: ...

    def forget_old_pages(self) -> None: ...

    def copy_to(self, path: Path) -> None: ...

    def find_damage(self) -> list[str]: ...

    def is_rerunnable(self, error: DBAPIError) -> bool: ...

    def translate(self, error: Exception) -> Exception: ...

    @contextmanager
    def upgrade_turn(self) -> Iterator[sa.Connection]: ...


class Store:
    """One database. `clock` returns Unix seconds; without it PostgreSQL's own clock counts, so that web machines
    need not agree, and this machine's on SQLite.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] | None = None, lock_wait: float = LOCK_WAIT_SECONDS):
        self.url = sa.make_url(url)
        self.clock = clock
        self.database: Database
        if self.url.get_backend_name() == "sqlite":
            self.database = SQLite(Path(str(self.url.database)), lock_wait)
        else:
            self.database = PostgreSQL(self.url, lock_wait)

    @property
    def is_embedded(self) -> bool:
        return self.database.name == "sqlite"

    @contextmanager
    def begin(self) -> Iterator[Transaction]:
        with self.database.begin() as connection:
            yield self._transaction(connection)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        with self.database.read_engine.begin() as connection:
            yield self._transaction(connection)

    def _transaction(self, connection: sa.Connection) -> Transaction:
        return Transaction(connection, int(self.clock()) if self.clock else self.database.now(connection))

    @contextmanager
    def watch(self) -> Iterator[Callable[[float, Callable[[], bool]], None]]:
        """Yields `wait(seconds, is_stopping)`: returns when something was committed since the last wait, when the
        time is over, or when `is_stopping()`. A commit between two waits is not missed.
        """
        with self._translated():
            connection = self.database.read_engine.connect()
            try:
                has_changed = self.database.changes(connection)

                def wait(seconds: float, is_stopping: Callable[[], bool]) -> None:
                    deadline = time.monotonic() + seconds
                    while not is_stopping() and (left := deadline - time.monotonic()) > 0:
                        if has_changed(min(POLL_SECONDS, left)):
                            return

                yield wait
            finally:
                connection.invalidate()  # LISTEN must not go back to the pool
                connection.close()

    def version(self) -> str:
        """The database's own version, like "SQLite 3.53.4"."""
        if self.is_embedded:
            return f"SQLite {sqlite_module().sqlite_version}"
        with self._translated(), self.read() as tx:
            return f"PostgreSQL {tx.execute(sa.text('SHOW server_version')).scalar_one()}"

    def free_bytes(self) -> int | None:
        """Room left on the disk of the embedded database; None for a server, which looks after its own."""
        return self.database.free_bytes()

    def forget_old_pages(self) -> None:
        """Let no blanked token live on in the database's log. Does what it can; a later call does the rest."""
        self.database.forget_old_pages()

    def copy_to(self, path: Path) -> None:
        """Write the embedded database, as it stands at one moment, to a new file; writers go on meanwhile."""
        with self._translated():
            self.database.copy_to(path)

    def find_damage(self) -> list[str]:
        """What the embedded database finds wrong in its own file, in its words; a server looks after its own."""
        with self._translated():
            return self.database.find_damage()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if (translated := self.database.translate(error)) is error:
                raise
            raise translated from error

    def close(self) -> None:
        self.database.read_engine.dispose()
        self.database.write_engine.dispose()


def run_transaction(store: Store, body: Callable[[Transaction], T]) -> T:
    """Commit what `body` does, durably, or nothing of it.

    The whole body runs again, at most three times, where another process was in the way (deadlock, serialisation
    failure, Restart), so it may touch nothing but its transaction. Raises StorageBusy when that does not help or a
    lock wait ran out, StorageUnavailable when the database cannot be written or reached.
    """
    return _run(store, store.begin, body)


def run_query(store: Store, body: Callable[[Transaction], T]) -> T:
    """Read one consistent state, without waiting for any writer. Raises as run_transaction does."""
    return _run(store, store.read, body)


def _run(store: Store, begin: Callable[[], Any], body: Callable[[Transaction], T]) -> T:
    for run in range(MOST_RERUNS + 1):
        try:
            with begin() as tx:
                return body(tx)
        except Restart as restart:
            if run == MOST_RERUNS:
                raise StorageBusy() from restart
        except (DBAPIError, PoolTimeoutError) as error:
            rerunnable = isinstance(error, DBAPIError) and store.database.is_rerunnable(error)
            if not rerunnable or run == MOST_RERUNS:
                raise store.database.translate(error) from error
            # Two transactions that deadlocked would meet again if both came back at once.
            time.sleep(random.uniform(0, 0.02 * (run + 1)))
    raise AssertionError("unreachable")


class SQLite:
    """One engine for writes, one for reads: a SELECT on the writing engine would take the write lock."""

    name = "sqlite"

    def __init__(self, path: Path, lock_wait: float) -> None:
        self.path = path
        self.queue = WriteQueue(path.with_name(path.name + ".lock"), lock_wait)
        self._lock_wait = lock_wait
        # Only the one whose turn it is connects for writing, so one connection is enough.
        self.write_engine = self._engine("IMMEDIATE", self._prepare_writer, pool_size=1, max_overflow=0)
        self.read_engine = self._engine("DEFERRED", self._prepare_reader, pool_size=5, max_overflow=60)

    def _engine(self, mode: str, prepare: Callable[[Any], None], **pool: int) -> sa.Engine:
        engine = sa.create_engine(
            # rw: a missing file is never made by the way, with whatever mode the umask leaves; upgrade_turn() makes it.
            sa.URL.create("sqlite", database=f"file:{quote(str(self.path))}", query={"mode": "rw", "uri": "true"}),
            module=sqlite_module(),
            # None: the driver begins no transaction on its own, so that ours begins the way we say.
            connect_args={"isolation_level": None, "timeout": self._lock_wait, "check_same_thread": False},
            pool_timeout=self._lock_wait,
            hide_parameters=True,  # an error's text must not show an address or a token
            poolclass=sa.QueuePool,
            **pool,
        )

        @event.listens_for(engine, "connect")
        def _connect(connection: Any, record: Any) -> None:
            record.info["file"] = _identity(self.path)
            connection.execute("PRAGMA foreign_keys=ON")
            prepare(connection)

        @event.listens_for(engine, "checkout")
        def _checkout(_connection: Any, record: Any, _proxy: Any) -> None:
            # Deleted, or replaced by a backup: what is written into the old file is lost, so connect anew.
            if record.info["file"] != _identity(self.path):
                raise DisconnectionError

        @event.listens_for(engine, "begin")
        def _begin(connection: sa.Connection) -> None:
            connection.exec_driver_sql(f"BEGIN {mode}")

        return engine

    @staticmethod
    def _prepare_writer(connection: Any) -> None:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode=WAL")
        # FULL: an acknowledged submission survives a power cut (promise 3).
        connection.execute("PRAGMA synchronous=FULL")
        # A blanked token must not stay readable in a free page (promise 8).
        connection.execute("PRAGMA secure_delete=ON")

    @staticmethod
    def _prepare_reader(connection: Any) -> None:
        connection.execute("PRAGMA query_only=ON")

    def exists(self) -> bool:
        return self.path.exists()

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        with self.queue.turn(), self.write_engine.begin() as connection:
            yield connection

    def now(self, connection: sa.Connection) -> int:
        return int(time.time())

    def changes(self, connection: sa.Connection) -> Callable[[float], bool]:
        """`PRAGMA data_version` moves when another connection has committed."""
        cursor = connection.connection.cursor()
        file = _identity(self.path)

        def version() -> int:
            if _identity(self.path) != file:
                raise StorageUnavailable()  # whoever waits comes back with a connection to the new file
            return int(cursor.execute("PRAGMA data_version").fetchone()[0])

        seen = version()

        def has_changed(seconds: float) -> bool:
            nonlocal seen
            time.sleep(seconds)
            before, seen = seen, version()
            return seen != before

        return has_changed

    def is_rerunnable(self, error: DBAPIError) -> bool:
        return False  # BEGIN IMMEDIATE in turn: nothing of ours can be in the way

    def translate(self, error: Exception) -> Exception:
        name = getattr(getattr(error, "orig", error), "sqlite_errorname", "")
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return StorageUnavailable(
                f"{self.path} is damaged or no database: stop everything, and put a backup in its"
                " place as docs/operations.md says."
            )
        if isinstance(error, PoolTimeoutError) or name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return StorageBusy()
        if "no such table" in str(error) or "no such column" in str(error):
            return SchemaMismatch()
        is_gone = isinstance(error, OperationalError | sqlite_module().OperationalError)
        return StorageUnavailable() if is_gone else error

    @contextmanager
    def upgrade_turn(self) -> Iterator[sa.Connection]:
        create_private_file(self.path)
        with self.queue.turn(), self.write_engine.connect() as connection:
            yield connection

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.path.parent).free

    def forget_old_pages(self) -> None:
        """Write the WAL back and empty it, so that blanked tokens do not live on in old frames."""
        for _ in range(CHECKPOINT_TRIES):
            if self._is_log_empty() or self._empty_log():
                return
            time.sleep(CHECKPOINT_PAUSE_SECONDS)

    def _is_log_empty(self) -> bool:
        """Nothing was written since it was last emptied; a checkpoint would keep a visitor waiting for nothing."""
        try:
            return self.path.with_name(f"{self.path.name}-wal").stat().st_size == 0
        except OSError:
            return True

    def _empty_log(self) -> bool:
        """False if a reader or a full disk is in the way. Waits for its turn, but in it for nobody: every writer waits
        behind it.
        """
        try:
            with self.queue.turn(), self.write_engine.connect() as connection:
                cursor = connection.connection.cursor()
                cursor.execute("PRAGMA busy_timeout=0")
                try:
                    ((is_busy, *_),) = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                finally:
                    cursor.execute(f"PRAGMA busy_timeout={int(self._lock_wait * 1000)}")
        except (StorageBusy, DBAPIError, sqlite_module().Error):
            return False
        return not is_busy

    def copy_to(self, path: Path) -> None:
        create_private_file(path)
        with self.read_engine.connect() as connection:
            cursor = connection.connection.cursor()
            cursor.execute("PRAGMA query_only=OFF")  # it would refuse the other file, too
            cursor.execute("VACUUM INTO ?", (str(path),))
            connection.invalidate()

    def find_damage(self) -> list[str]:
        with self.read_engine.connect() as connection:
            cursor = connection.connection.cursor()
            found = [
                row
                for pragma in ("integrity_check", "foreign_key_check")
                for row in cursor.execute(f"PRAGMA {pragma}").fetchall()
            ]
        return [" ".join(map(str, row)) for row in found if row != ("ok",)]


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file lies at `path`; None: none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def create_private_file(path: Path) -> None:
    """Make the database file, if there is none, readable by its owner alone; SQLite's side files follow it.

    One that is there is never opened: closing it would drop the locks of every connection of this process.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise StorageUnavailable(f"The database {path} cannot be made or written: {error.strerror}.") from error


class PostgreSQL:
    """Writes READ COMMITTED: under REPEATABLE READ the twin of a key would not see the row it conflicts with, so a
    replay would end as a serialisation failure instead of an answer. A read meets no twin, and has one snapshot for
    all of its statements only under REPEATABLE READ: two counts of one report must not contradict each other.
    """

    name = "postgresql"
    # Deadlock and serialisation failure: https://www.postgresql.org/docs/current/errcodes-appendix.html
    RERUN: Final = ("40001", "40P01")
    LOCK_WAIT: Final = (LOCK_NOT_AVAILABLE, "57014")
    MISSING: Final = ("42P01", "42703")
    # A standby, or a server put to read-only: psycopg takes it for an internal error.
    READ_ONLY: Final = ("25006",)

    def __init__(self, url: sa.URL, lock_wait: float) -> None:
        self._driver_error: type[Exception] = importlib.import_module("psycopg").OperationalError
        options = (
            f"-c lock_timeout={int(lock_wait * 1000)} -c statement_timeout={STATEMENT_WAIT_SECONDS * 1000}"
            f" -c idle_in_transaction_session_timeout={STATEMENT_WAIT_SECONDS * 1000} -c synchronous_commit=on"
        )
        self.write_engine = sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            isolation_level="READ COMMITTED",
            connect_args={
                "options": options,
                "connect_timeout": max(2, int(lock_wait)),
                "application_name": "waitlist",
            },
            pool_pre_ping=True,
            hide_parameters=True,
            pool_size=5,
            max_overflow=60,
            pool_timeout=lock_wait,
        )
        # The same pool: the driver says both in the BEGIN that it sends anyway.
        self.read_engine: sa.Engine = self.write_engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )

    def exists(self) -> bool:
        return True

    def begin(self) -> Any:
        return self.write_engine.begin()

    def now(self, connection: sa.Connection) -> int:
        return int(connection.execute(_DATABASE_TIME).scalar_one())

    def changes(self, connection: sa.Connection) -> Callable[[float], bool]:
        """LISTEN: notifications queue up in this connection between two looks, so none is missed."""
        raw: Any = connection.connection.driver_connection
        raw.autocommit = True
        raw.execute(f"LISTEN {NOTIFY_CHANNEL}")

        def has_changed(seconds: float) -> bool:
            return any(True for _ in raw.notifies(timeout=seconds, stop_after=1))

        return has_changed

    def free_bytes(self) -> int | None:
        return None

    def forget_old_pages(self) -> None:
        pass  # the server overwrites its log by itself, and no other program reads it

    def copy_to(self, path: Path) -> None:
        raise NotImplementedError("PostgreSQL has its own tools for that")

    def find_damage(self) -> list[str]:
        return []

    def is_rerunnable(self, error: DBAPIError) -> bool:
        return _sqlstate(error) in self.RERUN

    def translate(self, error: Exception) -> Exception:
        state = _sqlstate(error)
        if isinstance(error, PoolTimeoutError) or state in self.RERUN + self.LOCK_WAIT:
            return StorageBusy()
        if state in self.MISSING:
            return SchemaMismatch()
        # The driver's own error comes out of the wait for notifications, which SQLAlchemy does not know.
        is_gone = isinstance(error, OperationalError | InterfaceError | self._driver_error) or state in self.READ_ONLY
        return StorageUnavailable() if is_gone else error

    @contextmanager
    def upgrade_turn(self) -> Iterator[sa.Connection]:
        with self.write_engine.connect() as connection:
            # Until the end of the session: Alembic begins and ends transactions of its own.
            connection.execute(sa.text("SET lock_timeout = 0"))
            connection.execute(sa.text("SET statement_timeout = 0"))
            connection.execute(sa.text("SELECT pg_advisory_lock(hashtextextended('waitlist.upgrade', 0))"))
            connection.commit()
            try:
                yield connection
            finally:
                connection.invalidate()  # ends the session, and with it the lock and the settings


def _sqlstate(error: Exception) -> str:
    return getattr(getattr(error, "orig", error), "sqlstate", None) or ""
