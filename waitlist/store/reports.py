"""Reads for the owner: the ledger of one address, and how the queue stands. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, select

from waitlist.model import Channel, Decision, EventType, OutboxStatus, RequestState
from waitlist.store.engine import Transaction
from waitlist.store.schema import delivery_events, email_deliveries, email_outbox, is_literally, signup_requests


@dataclass(frozen=True)
class LedgerRow:
    operation_id: str
    channel: Channel
    state: RequestState
    decision: Decision
    list_id: str
    job_id: str
    source: str | None
    created_at: int
    replays: int


@dataclass(frozen=True)
class Event:
    id: str
    delivery_id: str | None
    type: EventType
    at: int
    provider: str | None
    duration_ms: int | None
    detail: str


_r = signup_requests.c
_REQUESTS = (
    select(
        _r.operation_id,
        _r.channel,
        _r.state,
        _r.decision,
        _r.list_id,
        _r.job_id,
        _r.source,
        _r.created_at,
        _r.replays,
    )
    .where(_r.email_hmac == bindparam("email_hmac"))
    .order_by(_r.created_at, _r.operation_id)
)
_e = delivery_events.c
_event = select(_e.id, _e.delivery_id, _e.type, _e.at, _e.provider, _e.duration_ms, _e.detail)
_EVENTS_OF_SUBSCRIBER = (
    _event.join(email_deliveries, email_deliveries.c.id == _e.delivery_id)
    .where(email_deliveries.c.subscriber_id == bindparam("subscriber_id"))
    .order_by(_e.at, _e.id)
)
_NEWEST_ATTEMPT_END = _event.where(_e.duration_ms.is_not(None)).order_by(_e.at.desc(), _e.id.desc()).limit(1)
_OLDEST_DUE = select(func.min(email_outbox.c.available_at)).where(
    is_literally(email_outbox.c.status, OutboxStatus.QUEUED), email_outbox.c.available_at <= bindparam("now")
)


def get_requests(tx: Transaction, email_hmac: str) -> list[LedgerRow]:
    return [
        LedgerRow(
            **{
                **row._mapping,
                "channel": Channel(row.channel),
                "state": RequestState(row.state),
                "decision": Decision(row.decision),
            }
        )
        for row in tx.execute(_REQUESTS, {"email_hmac": email_hmac})
    ]


def get_events(tx: Transaction, subscriber_id: str) -> list[Event]:
    """The events of all deliveries of one subscriber, in order."""
    return [_read_event(row) for row in tx.execute(_EVENTS_OF_SUBSCRIBER, {"subscriber_id": subscriber_id})]


def get_newest_attempt_end(tx: Transaction) -> Event | None:
    row = tx.execute(_NEWEST_ATTEMPT_END).one_or_none()
    return _read_event(row) if row else None


def get_oldest_due_at(tx: Transaction) -> int | None:
    """Since when the oldest due mail waits; None if nothing is due."""
    oldest: int | None = tx.execute(_OLDEST_DUE, {"now": tx.now}).scalar_one()
    return oldest


def _read_event(row: sa.Row[Any]) -> Event:
    return Event(**{**row._mapping, "type": EventType(row.type)})
