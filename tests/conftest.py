"""Fixtures of every test: a fresh migrated database on both engines, a clock, settings, the wired application.

No test sees the developer's `.env` or WAITLIST_* variables.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

# First, before anything of ours is imported: what is set here is inherited by the processes that tests start.
TEST_DATABASE_URL = os.environ.get("WAITLIST_TEST_DATABASE_URL")
for _name in [name for name in os.environ if name.startswith(("WAITLIST_", "FLASK_"))]:
    del os.environ[_name]
os.environ["FLASK_SKIP_DOTENV"] = "1"

import pytest  # noqa: E402 - after the environment is clean
from flask import Flask  # noqa: E402
from flask.testing import FlaskClient  # noqa: E402

from tests.databases import PostgreSQLDatabases, SQLiteFiles, postgresql_server  # noqa: E402
from tests.factories import FakeClock, FakeSender  # noqa: E402
from waitlist.services import Services  # noqa: E402
from waitlist.settings import Settings  # noqa: E402
from waitlist.store import Store  # noqa: E402


@pytest.fixture(scope="session")
def sqlite_files(tmp_path_factory: pytest.TempPathFactory) -> SQLiteFiles:
    return SQLiteFiles(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def postgresql_databases() -> Iterator[PostgreSQLDatabases]:
    if TEST_DATABASE_URL:
        databases = PostgreSQLDatabases(TEST_DATABASE_URL)
        yield databases
        databases.close()
        return
    with postgresql_server(os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex) as url:
        databases = PostgreSQLDatabases(url)
        yield databases
        databases.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database at the newest schema. One engine only: parametrize it with `indirect=True`."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_files").fresh(tmp_path)
    else:
        with request.getfixturevalue("postgresql_databases").fresh() as url:
            yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without any table; on SQLite, no file yet."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.sqlite3"
    else:
        with request.getfixturevalue("postgresql_databases").fresh(empty=True) as url:
            yield url


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sender() -> FakeSender:
    return FakeSender()


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    """Nothing gets in a test's way: no form is too fast, no visitor too frequent."""
    return Settings(
        database_url=database_url,
        secret_key="test-secret-key-of-32-characters",
        data_key="test-data-key--of-32-characters-",
        mail_url=f"file:{tmp_path}/mail",
        min_form_seconds=0,
        rate_limit="1000000/minute",
        api_rate_limit="1000000/minute",
        mail_budget_per_hour=1_000_000,
    )


@pytest.fixture
def store(database_url: str, clock: FakeClock) -> Iterator[Store]:
    store = Store(database_url, clock=clock)
    yield store
    store.close()


@pytest.fixture
def app(settings: Settings, sender: FakeSender, clock: FakeClock) -> Iterator[Flask]:
    from waitlist import create_app

    app = create_app(settings, sender=sender, clock=clock)
    app.testing = True
    yield app
    app.extensions["waitlist"].store.close()


@pytest.fixture
def services(app: Flask) -> Services:
    """What the use cases get; mail goes to `sender`."""
    services: Services = app.extensions["waitlist"]
    return services


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()
