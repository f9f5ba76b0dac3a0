"""The migrated schema is the declared one, on both engines, whatever happened on the way; and it keeps its promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import alembic.op
import pytest
import sqlalchemy as sa

from tests.factories import START, a_delivery, a_subscriber
from tests.processes import CONTEXT, end, run_at_once, start
from waitlist.errors import SchemaMismatch, StorageUnavailable
from waitlist.store import Store, Transaction, run_query, run_transaction
from waitlist.store.migrate import check_schema, current_revision, newest_revision, upgrade, upgrade_embedded
from waitlist.store.schema import (
    consent_texts,
    delivery_events,
    email_deliveries,
    email_outbox,
    metadata,
    signup_requests,
    subscribers,
    suppressions,
    waitlists,
)

LONGEST_SECONDS = 60
both_engines = pytest.mark.parametrize(
    ("database_url", "empty_database_url"), [("sqlite", "sqlite"), ("postgresql", "postgresql")], indirect=True
)

# Everything PostgreSQL knows about our tables, in its own words.
POSTGRESQL_COLUMNS = """
    SELECT table_name, column_name, data_type, is_nullable, column_default, collation_name, identity_generation
    FROM information_schema.columns
    WHERE table_schema = 'public' AND table_name <> 'alembic_version'
"""
POSTGRESQL_CONSTRAINTS = """
    SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
    FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'alembic_version'
"""
POSTGRESQL_INDEXES = """
    SELECT tablename, indexname, indexdef
    FROM pg_indexes
    WHERE schemaname = 'public' AND tablename <> 'alembic_version'
"""
SQLITE_OBJECTS = """
    SELECT type, name, sql
    FROM sqlite_master
    WHERE sql IS NOT NULL AND tbl_name NOT IN ('alembic_version', 'sqlite_sequence')
"""


def describe(store: Store) -> set[tuple[Any, ...]]:
    """All columns, defaults, CHECKs, keys and indexes, in no order."""

    def body(tx: Transaction) -> set[tuple[Any, ...]]:
        if tx.is_postgresql:
            queries = (POSTGRESQL_COLUMNS, POSTGRESQL_CONSTRAINTS, POSTGRESQL_INDEXES)
            return {tuple(row) for query in queries for row in tx.execute(sa.text(query))}
        return {
            (kind, name, clause)
            for kind, name, sql in map(tuple, tx.execute(sa.text(SQLITE_OBJECTS)))
            for clause in (clauses(sql) if kind == "table" else [" ".join(sql.split())])
        }

    return run_query(store, body)


def clauses(create_table: str) -> Iterator[str]:
    """What stands between the outer brackets, split at the outer commas: columns and constraints in any order."""
    inner = " ".join(create_table.partition("(")[2].rpartition(")")[0].split())
    depth, begin = 0, 0
    for position, character in enumerate(inner + ","):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield re.sub(r"\(\s+|\s+\)", lambda match: match.group().strip(), inner[begin:position].strip())
            begin = position + 1


def opened(url: str) -> Store:
    return Store(url, clock=lambda: START)


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Store]:
    store = opened(empty_database_url)
    yield store
    store.close()


def create_declared(store: Store) -> None:
    with store.database.upgrade_turn() as connection:
        metadata.create_all(connection)
        connection.commit()


@pytest.fixture
def declared_description(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[Any]:
    """What the tables of schema.py come to, made without a migration on the same engine."""
    if store.is_embedded:
        declared = opened(f"sqlite:///{tmp_path}/declared.sqlite3")
        create_declared(declared)
        yield describe(declared)
        declared.close()
    else:
        with request.getfixturevalue("postgresql_databases").fresh(empty=True) as url:
            declared = opened(url)
            create_declared(declared)
            yield describe(declared)
            declared.close()


def test_migrated_schema_is_the_declared_one(store: Store, declared_description: set[Any]) -> None:
    migrated = describe(store)

    assert migrated - declared_description == set()
    assert declared_description - migrated == set()
    assert len(migrated) > 100


@pytest.mark.parametrize(
    "change",
    [
        "DROP INDEX subscribers_email_idx",
        "DROP INDEX email_outbox_due_idx; CREATE INDEX email_outbox_due_idx ON email_outbox (available_at, id)",
        "DROP INDEX email_deliveries_subscriber_sequence_idx;"
        "CREATE INDEX email_deliveries_subscriber_sequence_idx ON email_deliveries (subscriber_id, sequence)",
        "DROP INDEX email_deliveries_open_idx; CREATE INDEX email_deliveries_open_idx ON email_deliveries"
        " (subscriber_id) WHERE status IN ('queued', 'sending')",
        "ALTER TABLE suppressions ADD COLUMN note TEXT",
        "ALTER TABLE suppressions RENAME COLUMN reason TO why",
        "DROP TABLE suppressions",
    ],
)
def test_comparison_sees_a_difference(store: Store, declared_description: set[Any], change: str) -> None:
    for statement in change.split(";"):
        run_transaction(store, partial(execute, sql=statement))

    assert describe(store) != declared_description


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE waitlists DROP CONSTRAINT waitlists_state_check",
        "ALTER TABLE subscribers DROP CONSTRAINT subscribers_consent_fkey",
        "ALTER TABLE subscribers ALTER COLUMN consent_at DROP NOT NULL",
        "ALTER TABLE email_outbox ALTER COLUMN claims SET DEFAULT 1",
        "ALTER TABLE email_outbox ALTER COLUMN available_at TYPE integer",
        "ALTER TABLE email_deliveries ALTER COLUMN sequence DROP IDENTITY",
    ],
)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_comparison_sees_a_difference_in_a_column(store: Store, declared_description: set[Any], change: str) -> None:
    run_transaction(store, lambda tx: tx.execute(sa.text(change)))

    assert describe(store) != declared_description


def test_comparison_reads_every_clause_of_sqlite() -> None:
    sql = "CREATE TABLE t (\n\ta TEXT DEFAULT ',' NOT NULL, \n\tCONSTRAINT c CHECK (a IN ('x', 'y')), \n\tPRIMARY KEY (a, b)\n)"

    assert list(clauses(sql.replace("','", "'0'"))) == [
        "a TEXT DEFAULT '0' NOT NULL",
        "CONSTRAINT c CHECK (a IN ('x', 'y'))",
        "PRIMARY KEY (a, b)",
    ]


def test_every_constraint_and_index_has_a_name() -> None:
    unnamed = [
        (table.name, thing)
        for table in metadata.sorted_tables
        for thing in named_things(table)
        if not thing.name and not isinstance(thing, sa.PrimaryKeyConstraint)
    ]

    assert unnamed == []


def test_second_upgrade_has_nothing_to_do(empty: Store) -> None:
    assert upgrade(empty) is True
    first = describe(empty)

    assert upgrade(empty) is False
    assert describe(empty) == first
    assert current_revision(empty) == newest_revision()


def _upgrade(wait: Any, number: int, url: str) -> bool:
    store = Store(url)
    wait()
    changed = upgrade(store)
    store.close()
    return changed


@both_engines
def test_upgrades_at_once_queue_and_one_does_the_work(empty: Store, store: Store, empty_database_url: str) -> None:
    changed = run_at_once(4, _upgrade, empty_database_url)

    assert sorted(changed) == [False, False, False, True]
    assert describe(empty) == describe(store)


def _upgrade_up_to(url: str, verb: str, calls: int, is_there: Any) -> None:
    """Stand still for ever at the `calls`-th use of a verb of the migration."""
    made = getattr(alembic.op, verb)
    left = iter(range(calls - 1))

    def count(*arguments: Any, **options: Any) -> None:
        if next(left, None) is None:
            is_there.set()
            CONTEXT.Event().wait()
        made(*arguments, **options)

    setattr(alembic.op, verb, count)
    upgrade(Store(url))


@both_engines
@pytest.mark.parametrize(("verb", "calls"), [("create_table", 1), ("create_table", 5), ("create_index", 15)])
def test_killed_upgrade_leaves_nothing_and_the_next_one_finishes(
    empty: Store, store: Store, empty_database_url: str, verb: str, calls: int
) -> None:
    is_there = CONTEXT.Event()
    process = start(_upgrade_up_to, empty_database_url, verb, calls, is_there)
    assert is_there.wait(LONGEST_SECONDS)

    process.kill()
    end(process)

    assert current_revision(empty) is None
    assert describe(empty) == set()
    assert upgrade(empty) is True
    assert describe(empty) == describe(store)


def test_database_of_a_newer_version_is_refused_and_left_alone(store: Store) -> None:
    run_transaction(store, lambda tx: tx.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))

    for refuse in (check_schema, upgrade):
        with pytest.raises(SchemaMismatch, match="9999, which a newer version made"):
            refuse(store)
    assert current_revision(store) == "9999"


def test_database_without_a_schema_says_what_to_type(empty: Store) -> None:
    with pytest.raises(SchemaMismatch, match="flask upgrade-db"):
        check_schema(empty)

    with empty.database.upgrade_turn():
        pass  # on SQLite, makes the file
    with pytest.raises(SchemaMismatch, match="flask upgrade-db"):
        run_query(empty, lambda tx: tx.execute(sa.select(subscribers)))


def test_current_database_is_accepted(store: Store) -> None:
    assert check_schema(store) is None


def test_embedded_database_upgrades_itself_and_postgresql_waits(empty: Store) -> None:
    upgrade_embedded(empty)

    assert current_revision(empty) == (newest_revision() if empty.is_embedded else None)


@pytest.mark.parametrize("empty_database_url", ["sqlite"], indirect=True)
def test_looking_for_a_database_makes_no_file(empty: Store) -> None:
    """It would have the mode that the umask leaves, not 0600."""
    assert current_revision(empty) is None
    with pytest.raises(StorageUnavailable):
        run_query(empty, lambda tx: tx.now)
    with pytest.raises(StorageUnavailable):
        run_transaction(empty, lambda tx: tx.now)

    assert not Path(str(empty.url.database)).exists()


@pytest.mark.parametrize(
    "url", ["postgresql://nobody:hunter2@127.0.0.1:1/nothing", "sqlite:////proc/nowhere/waitlist.sqlite3"]
)
def test_upgrade_of_an_unreachable_database_is_unavailable(url: str) -> None:
    store = Store(url, lock_wait=0.5)
    try:
        with pytest.raises(StorageUnavailable) as error:
            upgrade(store)
        assert "hunter2" not in str(error.value)
    finally:
        store.close()


@pytest.mark.parametrize("empty_database_url", ["sqlite"], indirect=True)
def test_upgrade_on_a_full_disk_is_unavailable_and_leaves_nothing(empty: Store) -> None:
    with empty.database.upgrade_turn() as connection:
        connection.connection.cursor().execute("PRAGMA max_page_count=5")

    with pytest.raises(StorageUnavailable):
        upgrade(empty)
    assert current_revision(empty) is None


# The promises that the database itself keeps.


@pytest.fixture
def filled(store: Store) -> Store:
    """One list, one request, one pending subscriber with a queued mail."""

    def body(tx: Transaction) -> None:
        tx.execute(
            sa.insert(waitlists),
            {"id": "launch", "title": "Launch", "description": "", "state": "open", "created_at": START},
        )
        tx.execute(sa.insert(consent_texts), {"list_id": "launch", "version": 1, "text": "Yes", "created_at": START})
        tx.execute(sa.insert(signup_requests), a_request())
        tx.execute(sa.insert(subscribers), asdict(a_subscriber()))
        tx.execute(sa.insert(email_deliveries), without_sequence(a_delivery()))
        tx.execute(sa.insert(email_outbox), an_outbox_row())
        tx.execute(sa.insert(delivery_events), an_event())

    run_transaction(store, body)
    return store


def a_request(**changes: Any) -> dict[str, Any]:
    return {
        "operation_id": "operation-1",
        "channel": "form",
        "state": "succeeded",
        "decision": "queued",
        "list_id": "launch",
        "job_id": "delivery-1",
        "created_at": START,
    } | changes


def an_outbox_row(**changes: Any) -> dict[str, Any]:
    return {
        "id": "outbox-1",
        "delivery_id": "delivery-1",
        "template": "confirm",
        "recipient": "person@example.com",
        "confirmation_url": "https://x.example/confirm/token",
        "message": "{}",
        "payload_hash": "hash",
        "status": "queued",
        "available_at": START,
        "in_doubt": False,
        "created_at": START,
    } | changes


def an_event(**changes: Any) -> dict[str, Any]:
    return {
        "id": "event-1",
        "delivery_id": "delivery-1",
        "type": "attempt",
        "at": START,
        "app_version": "1",
        "detail": "",
    } | changes


def without_sequence(delivery: Any) -> dict[str, Any]:
    values = asdict(delivery)
    del values["sequence"]
    return values


def another_delivery(**changes: Any) -> dict[str, Any]:
    names = {"id": "delivery-2", "operation_key": "key-2", "generation": 2, "token_hash": "hash-2"}
    defaults = {"signup_request_id": None, "status": "superseded", "settled_at": START}
    return without_sequence(a_delivery(**(names | defaults | changes)))


LEASED = {"status": "leased", "lease_token": "t", "lease_owner": "o", "lease_expires_at": START + 60}
ENDED = {"status": "sent", "finished_at": START, "confirmation_url": "", "message": ""}


@pytest.mark.parametrize(
    ("table", "values", "constraint"),
    [
        (subscribers, asdict(a_subscriber(id="s2")), "subscribers_list_email_idx"),
        (subscribers, asdict(a_subscriber(id="s2", email="Other@example.com")), "subscribers_email_check"),
        (subscribers, asdict(a_subscriber(id="s2", email="o@x.example", status="gone")), "subscribers_status_check"),
        (
            subscribers,
            asdict(a_subscriber(id="s2", email="o@x.example", status="confirmed")),
            "subscribers_confirmed_check",
        ),
        (
            subscribers,
            asdict(a_subscriber(id="s2", email="o@x.example", status="unsubscribed")),
            "subscribers_unsubscribed_check",
        ),
        (
            subscribers,
            asdict(a_subscriber(id="s2", email="o@x.example", confirmation_expires_at=None)),
            "subscribers_token_check",
        ),
        (
            subscribers,
            asdict(a_subscriber(id="s2", email="o@x.example", consent_version=2)),
            "subscribers_consent_fkey",
        ),
        (email_deliveries, another_delivery(status="queued", settled_at=None), "email_deliveries_open_idx"),
        (
            email_deliveries,
            another_delivery(status="sending", settled_at=None, first_dispatch_at=START),
            "email_deliveries_open_idx",
        ),
        (email_deliveries, another_delivery(signup_request_id="operation-1"), "email_deliveries_request_idx"),
        (email_deliveries, another_delivery(generation=1), "email_deliveries_generation_key"),
        (
            email_deliveries,
            another_delivery(operation_key="confirm:subscriber-1:1"),
            "email_deliveries_operation_key_key",
        ),
        (email_deliveries, another_delivery(settled_at=None), "email_deliveries_settled_check"),
        (email_deliveries, another_delivery(reason="whim"), "email_deliveries_reason_check"),
        (email_outbox, an_outbox_row(id="o2"), "email_outbox_delivery_id_key"),
        (delivery_events, an_event(id="e2", type="thought"), "delivery_events_type_check"),
        (signup_requests, a_request(operation_id="op2", decision=None), "signup_requests_decided_check"),
        (
            signup_requests,
            a_request(operation_id="op2", idempotency_key="k", scope="s"),
            "signup_requests_key_check",
        ),
        (suppressions, {"email_hmac": "h", "reason": "mood", "created_at": START}, "suppressions_reason_check"),
    ],
)
def test_database_refuses(filled: Store, table: sa.Table, values: dict[str, Any], constraint: str) -> None:
    assert refusal(filled, sa.insert(table).values(values)) == name_in(filled, constraint, table)


@pytest.mark.parametrize(
    ("values", "constraint"),
    [
        ({"status": "leased"}, "email_outbox_lease_check"),
        ({"lease_token": "t", "lease_owner": "o", "lease_expires_at": START}, "email_outbox_lease_check"),
        (LEASED | {"lease_owner": None}, "email_outbox_lease_check"),
        (LEASED | {"lease_expires_at": None}, "email_outbox_lease_check"),
        (ENDED | {"finished_at": None}, "email_outbox_finished_check"),
        ({"finished_at": START, "confirmation_url": "", "message": ""}, "email_outbox_finished_check"),
        (ENDED | {"confirmation_url": "https://x.example/confirm/token"}, "email_outbox_blank_check"),
        (ENDED | {"message": "{}"}, "email_outbox_blank_check"),
        ({"status": "lost"}, "email_outbox_status_check"),
    ],
)
def test_outbox_row_cannot_become(filled: Store, values: dict[str, Any], constraint: str) -> None:
    assert refusal(filled, sa.update(email_outbox).values(values)) == constraint


@pytest.mark.parametrize("values", [LEASED, LEASED | {"status": "dispatching"}, ENDED, ENDED | {"status": "dead"}])
def test_outbox_row_can_become(filled: Store, values: dict[str, Any]) -> None:
    assert refusal(filled, sa.update(email_outbox).values(values)) is None


def test_failure_can_be_retried_once(filled: Store) -> None:
    first = another_delivery(retry_of_delivery_id="delivery-1")
    second = another_delivery(
        id="delivery-3", operation_key="key-3", generation=3, token_hash="hash-3", retry_of_delivery_id="delivery-1"
    )

    assert refusal(filled, sa.insert(email_deliveries).values(first)) is None
    assert refusal(filled, sa.insert(email_deliveries).values(second)) == name_in(
        filled, "email_deliveries_retry_idx", email_deliveries
    )


def test_event_of_a_provider_is_stored_once_and_ours_as_often_as_they_happen(filled: Store) -> None:
    theirs = {"provider": "resend", "event_id": "evt"}

    assert refusal(filled, sa.insert(delivery_events).values(an_event(id="e2"))) is None
    assert refusal(filled, sa.insert(delivery_events).values(an_event(id="e3", **theirs))) is None
    assert refusal(filled, sa.insert(delivery_events).values(an_event(id="e4", **theirs))) == name_in(
        filled, "delivery_events_provider_event_idx", delivery_events
    )


def test_erased_subscriber_takes_mails_rows_and_events_along(filled: Store) -> None:
    run_transaction(filled, lambda tx: tx.execute(sa.delete(subscribers)))

    for table in (email_deliveries, email_outbox, delivery_events):
        assert rows(filled, table) == []
    assert len(rows(filled, signup_requests)) == 1


def test_purged_request_leaves_its_mail(filled: Store) -> None:
    run_transaction(filled, lambda tx: tx.execute(sa.delete(signup_requests)))

    assert [row.signup_request_id for row in rows(filled, email_deliveries)] == [None]


def test_sequence_of_a_deleted_delivery_is_never_used_again(filled: Store) -> None:
    before = rows(filled, email_deliveries)[0].sequence

    run_transaction(filled, lambda tx: tx.execute(sa.delete(email_deliveries)))
    run_transaction(filled, lambda tx: tx.execute(sa.insert(email_deliveries), another_delivery()))

    assert rows(filled, email_deliveries)[0].sequence > before


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_any_case_of_an_address_finds_its_subscriber(filled: Store) -> None:
    query = sa.select(subscribers.c.id).where(subscribers.c.email == "PERSON@example.com")

    assert run_query(filled, lambda tx: tx.execute(query).scalars().all()) == ["subscriber-1"]


def execute(tx: Transaction, sql: str) -> None:
    tx.execute(sa.text(sql))


def rows(store: Store, table: sa.Table) -> list[Any]:
    return run_query(store, lambda tx: list(tx.execute(sa.select(table))))


def refusal(store: Store, statement: Any) -> str | None:
    """The constraint that refuses `statement`, as the database names it; None if it is taken."""
    try:
        run_transaction(store, lambda tx: tx.execute(statement))
    except sa.exc.IntegrityError as error:
        diagnostics = getattr(error.orig, "diag", None)
        return str(diagnostics.constraint_name if diagnostics else str(error.orig).rpartition(": ")[2])
    return None


def name_in(store: Store, constraint: str, table: sa.Table) -> str:
    """SQLite names CHECKs by name, unique ones by their columns, foreign keys not at all."""
    if not store.is_embedded or constraint.endswith("_check"):
        return constraint
    if constraint.endswith("_fkey"):
        return "FOREIGN KEY constraint failed"
    found: Any = {thing.name: thing for thing in named_things(table)}[constraint]
    return ", ".join(f"{table.name}.{column.name}" for column in found.columns)


def named_things(table: sa.Table) -> list[sa.Constraint | sa.Index]:
    return [*table.constraints, *table.indexes]
