"""Faults that are nobody's mail: the provider, the database or the clock is away. Nobody is marked, nothing is lost, and
when the fault ends the queue drains by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from flask.testing import FlaskClient
from pydantic import SecretStr

from tests.factories import FakeClock, FakeSender, make_list
from tests.faults.workers import (
    PATIENCE_SECONDS,
    assert_newest_links_are_live,
    changed,
    copies,
    drain_here,
    drain_outbox,
    run,
    token_of,
    wait_until,
)
from tests.scenes import (
    EMAIL,
    a_worker,
    assert_sound,
    deliveries,
    join,
    outbox_rows,
    set_setting,
    statuses,
    subscriber,
)
from tests.smtp_server import Hang, Session, SmtpServer
from tests.test_addresses import CORPUS
from waitlist import ledger, outbox
from waitlist.mail.registry import make_sender
from waitlist.model import DeliveryStatus, Outcome, OutcomeKind
from waitlist.services import Services
from waitlist.store import Store

DAY = 86_400
HOUR = 3600


@pytest.fixture
def smtp(services: Services, mailbox: SmtpServer) -> Services:
    """On the fake clock, with mail over SMTP."""
    make_list(services)
    return over_smtp(services, mailbox)


def over_smtp(services: Services, mailbox: SmtpServer) -> Services:
    reached = set_setting(services, mail_url=SecretStr(mailbox.url))
    return replace(reached, make_sender=lambda: make_sender(reached.settings))


def test_connection_refused_for_an_hour_marks_nobody_and_the_queue_drains_when_it_ends(
    smtp: Services, clock: FakeClock, client: FlaskClient
) -> None:
    with SmtpServer() as gone:
        refused = over_smtp(smtp, gone)
    people = [f"p{number}@example.com" for number in range(6)]
    for minute in range(60):
        if minute % 10 == 0:
            join(refused, people[minute // 10])
        counts = drain_here(refused)
        assert counts.fault is not None
        assert counts.fault.startswith("connect_refused")
        clock.advance(60)

    assert {(row.status, row.attempts, row.claims, row.in_doubt) for row in outbox_rows(refused)} == {
        ("queued", 0, 0, False)
    }
    for person in people:
        (delivery,) = deliveries(refused, person)
        assert (delivery.status, delivery.attempts) == (DeliveryStatus.QUEUED, 0)
        assert delivery.first_dispatch_at is None
    report = ledger.outbox_report(refused)
    assert any("connect_refused" in why for why in report.needs_person)
    probe = client.get("/readyz").get_json()
    assert probe["systemic_fault"].startswith("connect_refused")
    assert any("held up" in problem for problem in probe["problems"])

    with SmtpServer(port=gone.port) as back:
        assert drain_here(refused).fault is None
        assert copies(back) == {person: [1] for person in sorted(people)}
        assert ledger.outbox_report(refused).systemic_fault is None
        assert ledger.outbox_report(refused).needs_person == ()
        assert_sound(refused)
        assert_newest_links_are_live(refused, back)


def test_follow_drains_by_itself_when_the_fault_ends(site: Services) -> None:
    with SmtpServer() as gone:
        settings = changed(site, mail_url=SecretStr(gone.url))
    join(site)
    with drain_outbox(settings, "--follow") as worker:
        wait_until(lambda: outbox_rows(site)[0].last_error)
        with SmtpServer(port=gone.port) as back:
            back.wait_for(1, timeout_seconds=PATIENCE_SECONDS)
            worker.kill()
            assert copies(back) == {EMAIL: [1]}


def test_one_shot_drain_exits_1_with_the_reason_and_outbox_status_says_it_too(site: Services) -> None:
    with SmtpServer() as gone:
        settings = changed(site, mail_url=SecretStr(gone.url))
    join(site)

    drained = run(settings, "drain-outbox")
    status = run(settings, "outbox-status")

    assert (drained.code, status.code) == (1, 1)
    assert "stopped: connect_refused" in drained.output
    assert "LOOK: the provider refuses all mail: connect_refused" in status.output
    assert "Traceback" not in drained.errors + status.errors
    assert EMAIL not in drained.errors + drained.output + status.errors + status.output


def test_new_visitors_mail_is_not_starved_by_old_rows_that_fail(
    smtp: Services, mailbox: SmtpServer, clock: FakeClock
) -> None:
    """Each old mail makes the provider say "log in first", whatever is tried; the new one would get through."""
    old = [f"old{number}@example.com" for number in range(3)]
    for person in old:
        join(smtp, person)

    def refuse_old(session: Session) -> str | None:
        return "530 5.7.0 log in first" if "<old" in session.lines[-1] else None

    mailbox.script["rcpt"] = refuse_old
    for _ in range(20):
        drain_here(smtp)
        clock.advance(5)
    join(smtp, "new@example.com")

    for _ in range(len(old) + 1):
        drain_here(smtp)
        clock.advance(5)

    assert copies(mailbox) == {"new@example.com": [1]}
    assert [statuses(smtp, person) for person in old] == [[DeliveryStatus.QUEUED]] * 3


def test_success_between_two_faults_begins_the_pauses_anew(
    services: Services, sender: FakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_list(services)
    worker = a_worker(services)
    pauses: list[float] = []
    batches = iter([fault(), fault(), fault(1), fault(), None])

    def pause(seconds: float) -> None:
        pauses.append(seconds)

    stop: Any = SimpleNamespace(is_set=lambda: len(pauses) == 4, wait=pause)
    monkeypatch.setattr(outbox, "drain", lambda _worker: next(batches))

    outbox.follow(replace(worker, stop=stop))

    assert pauses == [5, 10, 5, 10]


def fault(accepted: int = 0) -> outbox.Counts:
    counts = outbox.Counts(fault="auth_failed")
    counts.outcomes[OutcomeKind.ACCEPTED] = accepted
    return counts


def test_hanging_provider_slows_no_submission_and_holds_no_transaction(site: Services, mailbox: SmtpServer) -> None:
    join(site)
    release = threading.Event()
    mailbox.script["dot"] = [Hang(release)]
    with drain_outbox(site.settings) as worker:
        mailbox.wait_for_phase("dot", timeout_seconds=PATIENCE_SECONDS)

        start = time.monotonic()
        for number in range(10):
            join(site, f"p{number}@example.com")
        seconds = time.monotonic() - start
        in_transaction = open_transactions(site)

        release.set()
        assert worker.wait().code == 0

    assert in_transaction == []
    # Ten of them. One that waited for the provider would take its deadline, 30 s; for a lock, 5 s and then fail.
    assert seconds < 5
    assert len(mailbox.messages) == 11


def open_transactions(site: Services) -> list[Any]:
    """Those of other processes. On SQLite the submissions beside it have shown that the one write turn is free."""
    with site.store.read() as tx:
        if not tx.is_postgresql:
            return []
        statement = sa.text(
            "SELECT query FROM pg_stat_activity"
            " WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"
        )
        return list(tx.execute(statement).all())


def test_worker_that_was_down_for_25_hours_sends_no_expired_link(
    smtp: Services, mailbox: SmtpServer, clock: FakeClock
) -> None:
    join(smtp)
    join(smtp, "gone@example.com")
    clock.advance(25 * HOUR)
    join(smtp)

    drain_here(smtp)

    assert copies(mailbox) == {EMAIL: [1]}
    assert statuses(smtp) == [DeliveryStatus.SUPERSEDED, DeliveryStatus.SENT]
    assert statuses(smtp, "gone@example.com") == [DeliveryStatus.QUEUED]
    assert_newest_links_are_live(smtp, mailbox)


def test_worker_clock_one_day_ahead_sends_nothing_and_marks_nobody(
    smtp: Services, mailbox: SmtpServer, clock: FakeClock
) -> None:
    for person in (EMAIL, "other@example.com"):
        join(smtp, person)

    clock.advance(DAY)
    assert drain_here(smtp).attempts == 0
    assert statuses(smtp) == statuses(smtp, "other@example.com") == [DeliveryStatus.QUEUED]

    clock.advance(-DAY)
    drain_here(smtp)
    assert copies(mailbox) == {EMAIL: [1], "other@example.com": [1]}
    assert_newest_links_are_live(smtp, mailbox)


def test_acceptance_is_kept_though_the_database_was_away_when_it_came(
    smtp: Services, mailbox: SmtpServer, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(smtp)
    join(smtp, "other@example.com")
    impatient = replace(smtp, store=Store(smtp.settings.store_url, clock=clock, lock_wait=0.2))
    away = database_away(smtp)
    waits: list[float] = []

    def take_away(_outcome: Outcome) -> None:
        if len(mailbox.messages) == 1:
            away.__enter__()

    def bring_back(seconds: float) -> None:
        """What the worker does between two tries."""
        waits.append(seconds)
        if len(waits) == 2:
            away.__exit__(None, None, None)

    clockwork = SimpleNamespace(sleep=bring_back, monotonic=time.monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(outbox, "time", clockwork)
    sender = impatient.make_sender()
    try:
        outbox.drain(replace(a_worker(impatient, sender), on_mail=take_away))
    finally:
        sender.close()
        impatient.store.close()

    assert waits == [outbox.STORAGE_PAUSE_SECONDS] * 2
    assert copies(mailbox) == {EMAIL: [1], "other@example.com": [1]}
    assert statuses(smtp) == statuses(smtp, "other@example.com") == [DeliveryStatus.SENT]
    clock.advance(HOUR)
    assert drain_here(smtp).attempts == 0
    assert_newest_links_are_live(smtp, mailbox)


@contextmanager
def database_away(services: Services) -> Iterator[None]:
    """PostgreSQL: every session ends and no new one begins. SQLite: somebody else has the one write turn."""
    database: Any = services.store.database
    if services.store.is_embedded:
        with database.queue.turn():
            yield
        return
    name = services.store.url.database
    server = services.store.url.set(drivername="postgresql", database="postgres")
    with psycopg.connect(server.render_as_string(hide_password=False), autocommit=True) as admin:
        admin.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS false')
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        yield
        admin.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS true')


def test_every_good_address_of_the_corpus_is_envelope_and_to_as_it_is_stored(
    site: Services, mailbox: SmtpServer
) -> None:
    settings = changed(site, mails_per_address_per_day=1000, mails_per_address_per_30_days=1000)
    roomy = replace(site, settings=settings)
    addresses = sorted({case["canonical"] for case in CORPUS if case["answer"] == "accept"})
    for address in addresses:
        join(roomy, address)

    assert run(settings, "drain-outbox").code == 0

    assert sorted(mail.recipients for mail in mailbox.messages) == [(address,) for address in addresses]
    for mail in mailbox.messages:
        (recipient,) = mail.recipients
        assert f"\r\nTo: {recipient}\r\n".encode() in mail.raw
        assert mail.raw.lower().count(b"\r\nto:") == 1
        assert subscriber(site, recipient).email == recipient
        assert token_of(mail)
    assert sorted(mailbox.counts.values()) == [1] * len(addresses)
    assert len(addresses) > 20
