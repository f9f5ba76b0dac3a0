"""What visitors and workers do, as functions over the use cases; and what the tables then hold."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from waitlist import dispatch, erasure, integrity, outbox, signup
from waitlist.dispatch import Dispatch, Provider
from waitlist.mail.base import Mail
from waitlist.model import Answer, Delivery, DeliveryStatus, Outcome, OutcomeKind, Subscriber
from waitlist.outbox import Counts, Worker
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.deliveries import get_deliveries
from waitlist.store.outbox import OutboxRow
from waitlist.store.schema import email_deliveries, email_outbox, metadata, signup_requests, subscribers
from waitlist.store.subscribers import get_subscriber

EMAIL = "person@example.com"
_LINK = re.compile(r"/confirm/([A-Za-z0-9_-]{43})$", re.MULTILINE)


def join(services: Services, email: str = EMAIL, list_id: str = "launch", **changes: Any) -> Answer:
    values: dict[str, Any] = {"list_id": list_id, "email": email, "consent_version": 1} | changes
    return signup.sign_up(services, **values)


def a_worker(services: Services, sender: Any = None, **changes: Any) -> Worker:
    values: dict[str, Any] = {"owner": "test", "batch": 50, "stop": threading.Event()} | changes
    return Worker(services, sender or services.make_sender(), **values)


def drain(services: Services, sender: Any = None, limit: int | None = None) -> Counts:
    return outbox.drain(a_worker(services, sender), limit)


def begin(services: Services, row: OutboxRow, provider: str = "fake") -> Dispatch | None:
    """Put a claimed row on the wire, as far as a worker gets before the provider answers."""

    def body(tx: Transaction) -> Dispatch | None:
        return dispatch.begin_dispatch(tx, services.settings, Provider(provider), row, send_until=math.inf)

    return run_transaction(services.store, body)


def token_in(mail: Mail) -> str:
    found = _LINK.search(mail.text)
    assert found, mail.text
    return found[1]


def subscriber(services: Services, email: str = EMAIL, list_id: str = "launch") -> Subscriber:
    found = run_query(services.store, lambda tx: get_subscriber(tx, list_id, email))
    assert found is not None
    return found


def deliveries(services: Services, email: str = EMAIL, list_id: str = "launch") -> list[Delivery]:
    """The oldest first."""
    person = subscriber(services, email, list_id)
    return run_query(services.store, lambda tx: get_deliveries(tx, person.id))[::-1]


def statuses(services: Services, email: str = EMAIL) -> list[DeliveryStatus]:
    return [delivery.status for delivery in deliveries(services, email)]


def set_delivery_status(services: Services, status: DeliveryStatus, email: str = EMAIL) -> None:
    """As a provider's event would: the newest delivery, already sent, moves on."""
    latest = deliveries(services, email)[-1]
    statement = sa.update(email_deliveries).where(email_deliveries.c.id == latest.id).values(status=status)
    run_transaction(services.store, lambda tx: tx.execute(statement).rowcount)


def count(services: Services, table: sa.Table) -> int:
    statement = sa.select(sa.func.count()).select_from(table)
    return int(run_query(services.store, lambda tx: tx.execute(statement).scalar_one()))


def outbox_rows(services: Services) -> list[Any]:
    """The oldest first."""
    statement = sa.select(email_outbox).order_by(email_outbox.c.created_at, email_outbox.c.id)
    return list(run_query(services.store, lambda tx: tx.execute(statement).all()))


def queue_mails(services: Services, how_many: int) -> None:
    """So many pending people with one queued mail each, straight into the tables: copies of one real submission."""
    join(services, "p0@example.com")

    def body(tx: Transaction) -> None:
        person = dict(tx.execute(sa.select(subscribers)).mappings().one())
        delivery = dict(tx.execute(sa.select(email_deliveries)).mappings().one())
        row = dict(tx.execute(sa.select(email_outbox)).mappings().one())
        del delivery["sequence"]
        people, mails, rows = [], [], []
        for number in range(1, how_many):
            ids = {"id": f"s{number}", "email": f"p{number}@example.com"}
            people.append(person | ids | {"confirmation_token_hash": f"t{number}"})
            mails.append(
                delivery
                | {"id": f"d{number}", "subscriber_id": f"s{number}", "operation_key": f"k{number}"}
                | {"token_hash": f"t{number}", "signup_request_id": None}
            )
            rows.append(row | {"id": f"o{number}", "delivery_id": f"d{number}", "recipient": ids["email"]})
        for table, values in ((subscribers, people), (email_deliveries, mails), (email_outbox, rows)):
            if values:
                tx.execute(sa.insert(table), values)

    run_transaction(services.store, body)


def set_setting(services: Services, **changes: Any) -> Services:
    return replace(services, settings=services.settings.model_copy(update=changes))


def everything(services: Services) -> dict[str, list[Any]]:
    """All rows of all tables, to show that something changed nothing."""

    def body(tx: Transaction) -> dict[str, list[Any]]:
        return {table.name: sorted(map(repr, tx.execute(sa.select(table)).all())) for table in metadata.sorted_tables}

    return run_query(services.store, body)


def ledger(services: Services) -> list[str]:
    """The decisions, in order."""
    statement = sa.select(signup_requests.c.decision).order_by(
        signup_requests.c.created_at, signup_requests.c.operation_id
    )
    return list(run_query(services.store, lambda tx: tx.execute(statement).scalars().all()))


def erase(services: Services, email: str = EMAIL) -> int:
    return erasure.erase(services, email)


def assert_sound(services: Services) -> None:
    """Every law of the data that no constraint says: outbox and deliveries agree, what has ended is blank, …"""
    faults = integrity.count_faults(services)
    assert not any(faults.values()), faults


def refused(code: str = "smtp_550") -> Outcome:
    return Outcome(OutcomeKind.REJECTED, code)


def failed(code: str = "smtp_554") -> Outcome:
    return Outcome(OutcomeKind.FAILED, code)


def services_at(settings: Settings, clock: Any = None, sender: Any = None) -> Services:
    """What one more process of the same installation has."""
    from waitlist import create_app

    services: Services = create_app(settings, sender=sender, clock=clock).extensions["waitlist"]
    return services
