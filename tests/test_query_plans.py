"""No statement of a submission, a link or the worker reads a whole table, however many rows have gone before.

SQLite only: its plans do not depend on how full the tables are. A partial index covers live rows, so it may be scanned.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from tests.factories import FakeClock, FakeSender, make_list
from tests.scenes import drain, join, refused, token_in
from waitlist import confirmation, delivery_events, ledger
from waitlist.purge import purge
from waitlist.services import Services
from waitlist.store.schema import metadata

PARTIAL = {
    index.name
    for table in metadata.sorted_tables
    for index in table.indexes
    if index.dialect_options["sqlite"]["where"] is not None
}
# One row each, or a handful.
SMALL = ("alembic_version", "waitlists", "consent_texts")


@pytest.fixture
def whole_table_reads(services: Services) -> list[str]:
    make_list(services)
    found: list[str] = []

    def explain(_connection: Any, cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if many or not statement.lstrip().startswith(("SELECT", "WITH", "UPDATE", "DELETE", "INSERT")):
            return
        plan = cursor.connection.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
        found.extend(f"{line}: {statement}" for *_, line in plan if is_whole_table(line))

    database = services.store.database
    for engine in (database.write_engine, database.read_engine):
        event.listen(engine, "before_cursor_execute", explain)
    return found


def is_whole_table(line: str) -> bool:
    words = line.split()
    if words[0] != "SCAN" or words[1] in SMALL or words[1] not in metadata.tables:
        return False
    return not PARTIAL & set(words)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_no_statement_of_visitors_or_worker_reads_a_whole_table(
    services: Services, sender: FakeSender, clock: FakeClock, whole_table_reads: list[str]
) -> None:
    sender.answer_with(refused())
    join(services)
    drain(services)
    join(services)
    drain(services)
    clock.advance(600)
    join(services)
    confirmation.confirm(services, token_in(sender.mails[-1]))
    join(services)
    delivery_events.apply_parked(services)
    ledger.readiness(services)
    ledger.explain(services, "person@example.com")
    join(services, "never@example.com")
    drain(services)
    clock.advance(31 * 86_400)
    assert purge(services)["people who never confirmed"] == 1

    assert whole_table_reads == []
