"""What goes when its time is over, and what never does. Both engines."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.factories import START, FakeClock, FakeSender, make_list
from tests.scenes import count, deliveries, drain, everything, join, refused, set_setting, subscriber, token_in
from waitlist import confirmation, ledger, people, signup
from waitlist.model import ConfirmOutcome, Decision, Outcome, OutcomeKind
from waitlist.purge import purge, purgeable
from waitlist.services import Services
from waitlist.store import retention, run_query, run_transaction
from waitlist.store.schema import delivery_events, email_deliveries, email_outbox, signup_requests, subscribers

DAY = 86_400
only_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
NOTHING = dict.fromkeys(
    (
        "idempotency keys released",
        "people who never confirmed",
        "finished outbox rows",
        "delivery events",
        "superseded mails that never left",
        "submissions",
    ),
    0,
)


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


def sign_up_with_key(services: Services, key: str = "key-1") -> Any:
    return signup.sign_up_with_key(
        services,
        client="shop",
        key=key,
        list_id="launch",
        email="person@example.com",
        consent_version=None,
        source=None,
        members={"email": "person@example.com"},
    )


def one_request(services: Services, *columns: sa.Column[Any]) -> tuple[Any, ...]:
    return tuple(run_query(services.store, lambda tx: tx.execute(sa.select(*columns)).one()))


def clear(services: Services, table: sa.Table) -> None:
    run_transaction(services.store, lambda tx: tx.execute(sa.delete(table)).rowcount)


def test_dry_run_counts_what_a_run_removes_and_removes_nothing(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services, "never@example.com")
    sign_up_with_key(services)
    drain(services)
    confirmation.confirm(services, token_in(sender.mails[1]))
    clock.advance(91 * DAY)
    before = everything(services)

    foretold = purgeable(services)

    assert everything(services) == before
    assert foretold["people who never confirmed"] == 1
    assert foretold["idempotency keys released"] == 1
    # Erasing a person takes rows with it, and a released key lets its submission go: those counts may differ.
    purged = purge(services)
    for what in ("people who never confirmed", "idempotency keys released", "superseded mails that never left"):
        assert purged[what] == foretold[what]
    assert purgeable(services) == NOTHING


@pytest.mark.parametrize(("seconds", "released"), [(3 * DAY - 1, 0), (3 * DAY, 1), (3 * DAY + 1, 1)])
def test_key_is_released_at_its_time_and_its_ledger_row_stays(
    services: Services, clock: FakeClock, seconds: int, released: int
) -> None:
    sign_up_with_key(services)
    clock.advance(seconds)

    assert purge(services)["idempotency keys released"] == released

    statement = sa.select(signup_requests.c.idempotency_key, signup_requests.c.response_body)
    key, body = run_query(services.store, lambda tx: tuple(tx.execute(statement).one()))
    assert (key is None, body is None) == (bool(released), bool(released))
    assert sign_up_with_key(services).replayed is not bool(released)


@pytest.mark.parametrize(("days", "stays"), [(29.9, True), (30, False)])
def test_never_confirmed_person_is_erased_and_forgotten_by_the_ledger(
    services: Services, clock: FakeClock, days: float, stays: bool
) -> None:
    join(services)
    drain(services)
    clock.advance(days * DAY)

    purge(services)

    assert count(services, subscribers) == int(stays)
    assert count(services, email_deliveries) == int(stays)
    hmac, subscriber_id = one_request(services, signup_requests.c.email_hmac, signup_requests.c.subscriber_id)
    assert (hmac is not None, subscriber_id is not None) == (stays, stays)


def test_ledger_forgets_what_was_posted_before_the_person_stood_there(services: Services, clock: FakeClock) -> None:
    """Contract 5: a trapped post names no subscriber, but whose address it was."""
    make_list(services, "other")
    join(services, trapped=True)
    join(services, list_id="other", trapped=True)
    join(services, "somebody@example.com", trapped=True)
    join(services)
    drain(services)
    clock.advance(30 * DAY)

    purge(services)

    statement = sa.select(signup_requests.c.list_id).where(signup_requests.c.email_hmac.is_not(None))
    remembered = run_query(services.store, lambda tx: tx.execute(statement).scalars().all())
    assert sorted(remembered) == ["launch", "other"], "somebody else, and a list on which the person never stood"
    assert count(services, signup_requests) == 4


def test_confirmed_person_stays_with_links_that_work(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    join(services)
    drain(services)
    confirmation.confirm(services, token_in(sender.mails[0]))
    clock.advance(1000 * DAY)

    purge(services)

    assert count(services, subscribers) == 1
    assert count(services, email_deliveries) == 1
    assert (count(services, email_outbox), count(services, delivery_events)) == (0, 0)
    assert confirmation.look(services, token_in(sender.mails[0])).outcome is ConfirmOutcome.ALREADY_CONFIRMED


def test_person_with_a_live_link_or_an_open_mail_is_not_erased(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    long = set_setting(services, token_ttl_seconds=40 * DAY)
    join(long, "live@example.com")
    drain(long)
    sender.answer_with(*[Outcome(OutcomeKind.SYSTEMIC, "down")] * 9)
    join(services, "open@example.com")
    drain(services)
    clock.advance(35 * DAY)

    purge(services)

    assert subscriber(services, "live@example.com")
    assert deliveries(services, "open@example.com")[0].status == "queued"


@only_postgresql
def test_person_whom_a_resend_reaches_during_the_search_is_not_erased(
    services: Services, clock: FakeClock, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search has its snapshot and not yet the row: it waits there for a lock that the test holds."""
    join(services)
    drain(services)
    clock.advance(30 * DAY)
    waits = sa.cast(sa.func.pg_advisory_xact_lock_shared(1), sa.Text).is_not(None)
    monkeypatch.setattr(retention, "_LOCK_NEVER_CONFIRMED", retention._LOCK_NEVER_CONFIRMED.where(waits))
    search = threading.Thread(target=purge, args=(services,))

    with psycopg.connect(database_url, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(1)")
        search.start()
        wait_until_somebody_waits(holder)
        people.resend(services, "person@example.com", reason="asked on the phone")
    search.join()

    assert [delivery.status for delivery in deliveries(services)] == ["sent", "queued"]


def wait_until_somebody_waits(connection: psycopg.Connection[Any]) -> None:
    give_up_at = time.monotonic() + 20
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 1 AND NOT granted"
    while connection.execute(query).fetchone() == (0,):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_ledger_row_of_an_open_mail_is_not_purged(services: Services, clock: FakeClock) -> None:
    join(services)
    clock.advance(400 * DAY)

    purge(services)

    assert count(services, signup_requests) == 1
    assert count(services, email_outbox) == 1
    assert len(ledger.explain(services, "person@example.com").entries) == 2


def test_superseded_mail_that_never_left_goes_and_one_that_did_stays(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    clock.advance(600)
    join(services)
    drain(services)
    confirmation.confirm(services, token_in(sender.mails[0]))
    clock.advance(91 * DAY)

    counts = purge(services)

    assert counts["superseded mails that never left"] == 1
    assert [delivery.generation for delivery in deliveries(services)] == [2]
    assert join(services).decision is Decision.ALREADY_CONFIRMED


def test_batches_are_bounded_and_together_remove_everything(services: Services, clock: FakeClock) -> None:
    for number in range(25):
        join(services, f"p{number}@example.com")
        drain(services)
    clock.advance(91 * DAY)

    assert purge(services, batch=10)["people who never confirmed"] == 25
    assert purge(services, longest_seconds=0) == NOTHING


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_purge_of_nothing_still_takes_blanked_tokens_out_of_the_log(services: Services, sender: FakeSender) -> None:
    """Promise 8: a worker that follows empties the log by no other way."""
    join(services)
    drain(services)
    token = token_in(sender.mails[0]).encode()
    path = Path(str(services.store.url.database))
    assert any(token in file.read_bytes() for file in path.parent.glob(f"{path.name}*"))

    assert purge(services) == NOTHING

    assert not any(token in file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


def test_late_replay_after_erasure_brings_nobody_back(services: Services, clock: FakeClock) -> None:
    first = sign_up_with_key(services)
    clear(services, subscribers)
    clock.advance(DAY)

    again = sign_up_with_key(services)

    assert (again.replayed, again.response_body) == (True, first.response_body)
    assert count(services, subscribers) == 0


AGES = st.lists(st.integers(min_value=0, max_value=120 * DAY), min_size=1, max_size=12)


@hypothesis_settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(ages=AGES)
def test_cleanup_of_random_ages_removes_exactly_what_is_past_its_time(
    services: Services, sender: FakeSender, clock: FakeClock, ages: list[int]
) -> None:
    for table in (subscribers, signup_requests, delivery_events, email_outbox):
        statement = sa.delete(table)
        run_transaction(services.store, lambda tx: tx.execute(statement).rowcount)  # noqa: B023 - called at once
    now = START + 200 * DAY
    for number, age in enumerate(ages):
        clock.now = now - age
        sender.answer_with(refused())
        join(services, f"p{number}@example.com")
        drain(services)
    clock.now = now

    purge(services)

    assert count(services, subscribers) == sum(age < 30 * DAY for age in ages)
    assert count(services, signup_requests) == sum(age < 90 * DAY for age in ages)
    assert count(services, email_outbox) == sum(age < 30 * DAY for age in ages), "gone with the person"


def test_person_whose_mail_still_counts_for_the_caps_is_not_erased(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    drain(services)
    clock.advance(20 * DAY)
    people.resend(services, "person@example.com", reason="asked by phone")  # keeps the time of consent
    drain(services)
    newest = deliveries(services)[-1]
    run_transaction(services.store, lambda tx: confirmation.leave(tx, newest.subscriber_id))  # clears the rotation
    clock.advance(15 * DAY)

    purge(services)
    assert len(deliveries(services)) == 2

    clock.advance(16 * DAY)
    assert purge(services)["people who never confirmed"] == 1


def test_events_of_an_open_mail_are_not_purged(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    patient = set_setting(services, token_ttl_seconds=200 * DAY)
    sender.answer_with(Outcome(OutcomeKind.TEMPORARY, "smtp_451"))
    join(patient)
    drain(patient)
    clock.advance(100 * DAY)
    before = count(services, delivery_events)

    purge(patient)

    assert count(services, delivery_events) == before > 0


def test_ledger_row_whose_key_still_promises_a_replay_is_not_purged(services: Services, clock: FakeClock) -> None:
    """The retention was shortened after the key was taken."""
    first = sign_up_with_key(set_setting(services, key_retention_seconds=60 * DAY))
    drain(services)
    clock.advance(40 * DAY)
    today = set_setting(services, retention_days=31)

    purge(today)

    again = sign_up_with_key(today)
    assert (again.replayed, again.response_body) == (True, first.response_body)
