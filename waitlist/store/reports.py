"""Reads for the owner: the ledger of one address, and how the queue stands. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import bindparam, func, select

from waitlist.model import Channel, Decision, DeliveryStatus, EventType, OutboxStatus, RequestState, Suppression
from waitlist.store.engine import Transaction
from waitlist.store.outbox import IS_LINK_FRESH
from waitlist.store.schema import (
    delivery_events,
    email_deliveries,
    email_outbox,
    is_literally,
    signup_requests,
    subscribers,
    suppressions,
)


@dataclass(frozen=True)
class LedgerRow:
    operation_id: str
    channel: Channel
    # NULL: a form. Else it begins with the API client's name.
    scope: str | None
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


@dataclass(frozen=True)
class SuppressionRow:
    reason: Suppression
    created_at: int


@dataclass(frozen=True)
class DecisionCount:
    channel: Channel
    decision: Decision
    submissions: int
    replays: int


_r = signup_requests.c
_request = select(
    _r.operation_id,
    _r.channel,
    _r.scope,
    _r.state,
    _r.decision,
    _r.list_id,
    _r.job_id,
    _r.source,
    _r.created_at,
    _r.replays,
)
_REQUEST = _request.where(_r.operation_id == bindparam("operation"))
_REQUESTS = _request.where(_r.email_hmac == bindparam("email_hmac")).order_by(_r.created_at, _r.operation_id)
_e = delivery_events.c
_event = select(_e.id, _e.delivery_id, _e.type, _e.at, _e.provider, _e.duration_ms, _e.detail)
_EVENTS_OF_SUBSCRIBER = (
    _event.join(email_deliveries, email_deliveries.c.id == _e.delivery_id)
    .where(email_deliveries.c.subscriber_id == bindparam("subscriber_id"))
    .order_by(_e.at, _e.id)
)
_SUPPRESSION = select(suppressions.c.reason, suppressions.c.created_at).where(
    suppressions.c.email_hmac == bindparam("email_hmac")
)
_NEWEST_ATTEMPT_END = (
    _event.where(_e.duration_ms.is_not(None), _e.at <= bindparam("until")).order_by(_e.at.desc(), _e.id.desc()).limit(1)
)
_NEWEST_RECIPIENT = (
    select(subscribers.c.email, email_deliveries.c.recipient_hmac)
    .join(email_deliveries, email_deliveries.c.subscriber_id == subscribers.c.id)
    .order_by(email_deliveries.c.sequence.desc())
    .limit(1)
)
# Those that a worker would claim: a row whose link is too old waits for nobody.
_due = (
    select(email_outbox.c.available_at)
    .join(email_deliveries, email_deliveries.c.id == email_outbox.c.delivery_id)
    .where(
        is_literally(email_outbox.c.status, OutboxStatus.QUEUED),
        email_outbox.c.available_at <= bindparam("now"),
        IS_LINK_FRESH,
    )
)
_OLDEST_DUE = _due.order_by(email_outbox.c.available_at).limit(1)
_DUE_ROWS = select(func.count()).select_from(_due.subquery())


_ATTEMPT_ENDS = _event.where(
    _e.duration_ms.is_not(None), _e.at > bindparam("after"), _e.at <= bindparam("until")
).order_by(_e.at, _e.id)
# Each status that can grow long is counted on an index of its own, the ended ones not at all.
_LIVE_ROWS: Final = {
    status: select(func.count()).select_from(email_outbox).where(is_literally(email_outbox.c.status, status))
    for status in (OutboxStatus.QUEUED, OutboxStatus.DEAD)
}
_HELD_ROWS = (
    select(email_outbox.c.status, func.count().label("rows"))
    .where(is_literally(email_outbox.c.status, OutboxStatus.LEASED, OutboxStatus.DISPATCHING))
    .group_by(email_outbox.c.status)
)
_FAILED = (
    select(func.count())
    .select_from(email_deliveries)
    .where(
        email_deliveries.c.status == DeliveryStatus.FAILED,
        email_deliveries.c.settled_at > bindparam("since"),
        email_deliveries.c.settled_at <= bindparam("until"),
    )
)
_ROWS_IN_DOUBT = (
    select(func.count())
    .select_from(email_outbox)
    .where(is_literally(email_outbox.c.status, OutboxStatus.QUEUED), email_outbox.c.in_doubt)
)
_DELIVERIES = select(email_deliveries.c.status, func.count().label("rows")).group_by(email_deliveries.c.status)
_SUBSCRIBERS = select(subscribers.c.list_id, subscribers.c.status, func.count().label("rows")).group_by(
    subscribers.c.list_id, subscribers.c.status
)
_DECISIONS = select(
    _r.channel, _r.decision, func.count().label("rows"), func.sum(_r.replays).label("replays")
).group_by(_r.channel, _r.decision)


def get_request_of_scope(tx: Transaction, operation_id: str, scope_prefix: str) -> LedgerRow | None:
    """The request if its scope begins with `scope_prefix`: nobody asks for another client's."""
    row = tx.execute(_REQUEST, {"operation": operation_id}).one_or_none()
    if row is None or not (row.scope or "").startswith(scope_prefix):
        return None
    return _read_request(row)


def get_attempt_ends(tx: Transaction, after: int, until: int) -> list[Event]:
    """The ends of attempts with after < at <= until."""
    return [_read_event(row) for row in tx.execute(_ATTEMPT_ENDS, {"after": after, "until": until})]


def count_live_rows(tx: Transaction) -> dict[OutboxStatus, int]:
    """Outbox rows that have not ended well: queued, leased, dispatching, dead."""
    counts = {status: int(tx.execute(statement).scalar_one()) for status, statement in _LIVE_ROWS.items()}
    held = {row.status: row.rows for row in tx.execute(_HELD_ROWS)}
    return counts | {status: held.get(status, 0) for status in (OutboxStatus.LEASED, OutboxStatus.DISPATCHING)}


def count_due_rows(tx: Transaction, *, margin: int, fraction: int) -> int:
    """Rows whose time has come and whose link is worth sending, as claim_due() says."""
    return int(tx.execute(_DUE_ROWS, {"now": tx.now, "margin": margin, "fraction": fraction}).scalar_one())


def count_rows_in_doubt(tx: Transaction) -> int:
    """Queued rows of which a copy may have arrived."""
    return int(tx.execute(_ROWS_IN_DOUBT).scalar_one())


def count_failed(tx: Transaction, since: int, until: int) -> int:
    """Deliveries that failed at since < settled_at <= until, for any reason but a refused address."""
    return int(tx.execute(_FAILED, {"since": since, "until": until}).scalar_one())


def count_deliveries(tx: Transaction) -> dict[str, int]:
    """By status."""
    return {row.status: row.rows for row in tx.execute(_DELIVERIES)}


def count_subscribers(tx: Transaction) -> dict[tuple[str, str], int]:
    """By list and status."""
    return {(row.list_id, row.status): row.rows for row in tx.execute(_SUBSCRIBERS)}


def count_decisions(tx: Transaction) -> list[DecisionCount]:
    """Over the whole ledger, all of which is read."""
    return [
        DecisionCount(Channel(row.channel), Decision(row.decision), row.rows, int(row.replays))
        for row in tx.execute(_DECISIONS)
    ]


def get_requests(tx: Transaction, email_hmac: str) -> list[LedgerRow]:
    return [_read_request(row) for row in tx.execute(_REQUESTS, {"email_hmac": email_hmac})]


def get_events(tx: Transaction, subscriber_id: str) -> list[Event]:
    """The events of all deliveries of one subscriber, in order."""
    return [_read_event(row) for row in tx.execute(_EVENTS_OF_SUBSCRIBER, {"subscriber_id": subscriber_id})]


def get_suppression_row(tx: Transaction, email_hmac: str) -> SuppressionRow | None:
    """None for an address that is not suppressed (any more)."""
    row = tx.execute(_SUPPRESSION, {"email_hmac": email_hmac}).one_or_none()
    return SuppressionRow(Suppression(row.reason), row.created_at) if row else None


def get_newest_attempt_end(tx: Transaction, until: int) -> Event | None:
    """The newest at `until` or earlier: a later one was written by a wrong clock, and would stay the newest for long."""
    row = tx.execute(_NEWEST_ATTEMPT_END, {"until": until}).one_or_none()
    return _read_event(row) if row else None


def get_newest_recipient(tx: Transaction) -> tuple[str, str] | None:
    """Address and cap digest of the newest mail."""
    row = tx.execute(_NEWEST_RECIPIENT).one_or_none()
    return (row.email, row.recipient_hmac) if row else None


def get_oldest_due_at(tx: Transaction, *, margin: int, fraction: int) -> int | None:
    """Since when the oldest due mail waits, of those that count_due_rows() counts; None if nothing is due."""
    values = {"now": tx.now, "margin": margin, "fraction": fraction}
    oldest: int | None = tx.execute(_OLDEST_DUE, values).scalar_one_or_none()
    return oldest


def _read_request(row: sa.Row[Any]) -> LedgerRow:
    typed = {
        "channel": Channel(row.channel),
        "state": RequestState(row.state),
        "decision": Decision(row.decision),
    }
    return LedgerRow(**{**row._mapping, **typed})


def _read_event(row: sa.Row[Any]) -> Event:
    return Event(**{**row._mapping, "type": EventType(row.type)})
