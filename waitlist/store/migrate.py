"""Brings a database to the schema of this version with Alembic, driven from Python: no alembic.ini, no second engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from waitlist.errors import SchemaMismatch
from waitlist.store.engine import Store
from waitlist.store.schema import metadata

_FOLDER = Path(__file__).parent / "migrations"


@cache  # finding out imports every migration, and /readyz asks at each call
def newest_revision() -> str:
    return str(_scripts().get_current_head())


def current_revision(store: Store) -> str | None:
    """The revision the database is at; None for an empty one."""
    if not store.database.exists():
        return None
    try:
        with store.database.read_engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except Exception as error:
        raise store.database.translate(error) from error


def upgrade(store: Store) -> bool:
    """Bring the database to the newest revision, alone, in one transaction; True if there was something to do.

    Two at once queue; killed midway, nothing of it stands. Raises SchemaMismatch for a database of a newer version,
    StorageUnavailable for one that cannot be written or reached.
    """
    try:
        return _upgrade(store, _scripts())
    except DBAPIError as error:
        raise store.database.translate(error) from error


def upgrade_embedded(store: Store) -> None:
    """The embedded database looks after itself at start; several PostgreSQL machines wait for `flask upgrade-db`.

    Writes nothing where nothing is to do, so a full or read-only disk does not keep the pages from being served.
    """
    if store.is_embedded and (not store.database.exists() or current_revision(store) != newest_revision()):
        upgrade(store)


def check_schema(store: Store) -> None:
    """Raises SchemaMismatch, saying what to do, unless the database is at the newest revision."""
    current = current_revision(store)
    if current == newest_revision():
        return
    _refuse_unknown(_scripts(), current)
    raise SchemaMismatch(
        f"The database is at schema {current or 'none'}, this version needs {newest_revision()}: run `flask upgrade-db`."
    )


def _upgrade(store: Store, scripts: ScriptDirectory) -> bool:
    head = newest_revision()
    with store.database.upgrade_turn() as connection:
        environment = EnvironmentContext(_config(), scripts)
        start = MigrationContext.configure(connection).get_current_revision()
        connection.rollback()
        _refuse_unknown(scripts, start)
        environment.configure(
            connection=connection,
            target_metadata=metadata,
            fn=lambda revision, _context: scripts._upgrade_revs(head, revision),
            transactional_ddl=True,  # SQLite's DDL is transactional too, once the driver keeps its hands off
        )
        with environment.begin_transaction():
            environment.run_migrations()
        connection.commit()
    return start != head


def _refuse_unknown(scripts: ScriptDirectory, revision: str | None) -> None:
    if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise SchemaMismatch(f"The database is at schema {revision}, which a newer version made; run that version.")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
