"""Verbs on email_outbox: the work that still has to reach a provider, and the leases under which it is done.

The row's end blanks URL and message, since they hold the raw token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import and_, bindparam, func, or_, select

from waitlist.model import (
    ENDED_OUTBOX,
    MOST_DETAIL_CHARACTERS,
    WAITING_OUTBOX,
    OutboxStatus,
    PreparedMail,
    SubscriberStatus,
)
from waitlist.store.engine import Transaction
from waitlist.store.schema import email_deliveries, email_outbox, is_literally, subscribers

_o = email_outbox.c
_d = email_deliveries.c
_BLANK: Final[dict[str, Any]] = {"confirmation_url": "", "message": ""}
_NO_LEASE: Final[dict[str, Any]] = {"lease_token": None, "lease_owner": None, "lease_expires_at": None}
_ENDED: Final[dict[str, Any]] = {**_BLANK, **_NO_LEASE, "finished_at": bindparam("now")}


@dataclass(frozen=True)
class OutboxRow:
    """One mail to send, with what a worker must know of its delivery and subscriber."""

    id: str
    delivery_id: str
    subscriber_id: str
    signup_request_id: str | None
    template: str
    recipient: str
    message: str
    payload_hash: str
    status: OutboxStatus
    attempts: int
    claims: int
    in_doubt: bool
    lease_token: str | None
    first_dispatch_at: int | None
    token_expires_at: int
    delivery_created_at: int
    provider: str | None
    subscriber_is_pending: bool


_ROW = (
    select(
        _o.id,
        _o.delivery_id,
        _d.subscriber_id,
        _d.signup_request_id,
        _o.template,
        _o.recipient,
        _o.message,
        _o.payload_hash,
        _o.status,
        _o.attempts,
        _o.claims,
        _o.in_doubt,
        _o.lease_token,
        _d.first_dispatch_at,
        _d.token_expires_at,
        _d.created_at.label("delivery_created_at"),
        _d.provider,
        (subscribers.c.status == SubscriberStatus.PENDING).label("subscriber_is_pending"),
    )
    .join(email_deliveries, _d.id == _o.delivery_id)
    .join(subscribers, subscribers.c.id == _d.subscriber_id)
)
_LOCK_BY_ID = _ROW.where(_o.id == bindparam("outbox_id")).with_for_update(of=email_outbox)
_LOCK_IF_FREE = select(_o.id).where(_o.id == bindparam("outbox_id")).with_for_update(skip_locked=True)
_BY_IDS = _ROW.where(_o.id.in_(bindparam("ids", expanding=True))).order_by(_o.available_at, _o.id)

# A link worth sending: `margin` seconds left, or the given fraction of its life (policy.LINK_MARGIN_*).
_left = _d.token_expires_at - bindparam("now")
IS_LINK_FRESH = and_(
    _left > 0,
    or_(_left >= bindparam("margin"), _left * bindparam("fraction") >= _d.token_expires_at - _d.created_at),
)
_IS_QUEUED = is_literally(_o.status, OutboxStatus.QUEUED)
_IS_HELD = is_literally(_o.status, OutboxStatus.LEASED, OutboxStatus.DISPATCHING)
_IS_DUE = and_(
    _IS_QUEUED,
    # A due time beyond the horizon was written by a wrong clock.
    or_(_o.available_at <= bindparam("now"), _o.available_at > bindparam("horizon")),
)
_DUE = (
    select(_o.id)
    .join(email_deliveries, _d.id == _o.delivery_id)
    .where(_IS_DUE, IS_LINK_FRESH)
    .order_by(_o.available_at, _o.id)
    .limit(bindparam("most"))
    .with_for_update(of=email_outbox, skip_locked=True)
    # A CTE, not a subquery: PostgreSQL may run a subquery once per row, and then LIMIT limits nothing.
    .cte("due")
)
_CLAIM = (
    sa.update(email_outbox)
    .where(_o.id.in_(select(_DUE.c.id)), _o.status == OutboxStatus.QUEUED)
    .values(
        status=OutboxStatus.LEASED,
        lease_token=bindparam("lease"),
        lease_owner=bindparam("owner"),
        lease_expires_at=bindparam("until"),
    )
    .returning(_o.id)
)
_IS_EXPIRED = and_(
    _IS_HELD,
    # A lease that ends further ahead than any may was written by a wrong clock.
    or_(_o.lease_expires_at <= bindparam("now"), _o.lease_expires_at > bindparam("horizon")),
)
_IS_ONLY_CLAIMED = and_(_o.status == OutboxStatus.LEASED, _o.claims < bindparam("most_claims"))
_EXPIRED_CLAIMS = (
    select(_o.id)
    .where(_IS_EXPIRED, _IS_ONLY_CLAIMED)
    .limit(bindparam("most"))
    .with_for_update(skip_locked=True)
    .cte("expired")
)
_EXPIRED = (
    _ROW.where(_IS_EXPIRED, ~_IS_ONLY_CLAIMED)
    .order_by(_o.lease_expires_at)
    .limit(bindparam("most"))
    .with_for_update(of=email_outbox, skip_locked=True)
)
_STALE = (
    # `due_before` follows from `before` and lets the index of due rows find these few among many.
    _ROW.where(_IS_QUEUED, _o.available_at <= bindparam("due_before"), _d.token_expires_at <= bindparam("before"))
    .limit(bindparam("most"))
    .with_for_update(of=email_outbox, skip_locked=True)
)
_IN_HAND = select(func.count()).select_from(email_outbox).where(_IS_HELD)
_NEXT_DUE = select(func.min(_o.available_at)).where(_IS_QUEUED, _o.available_at >= bindparam("now"))
_NEXT_EXPIRY = select(func.min(_o.lease_expires_at)).where(_IS_HELD, _o.lease_expires_at >= bindparam("now"))

_update = sa.update(email_outbox).where(_o.id == bindparam("outbox_id"))
_held = _update.where(_o.lease_token == bindparam("lease"))
_BEGIN = _held.where(_o.status == OutboxStatus.LEASED).values(
    status=OutboxStatus.DISPATCHING, attempts=_o.attempts + 1, lease_expires_at=bindparam("until")
)
_AGAIN: Final[dict[str, Any]] = {"status": OutboxStatus.QUEUED, **_NO_LEASE}
_RELEASE = _held.where(_o.status == OutboxStatus.LEASED).values(_AGAIN)
_REQUEUE = _held.where(_o.status == OutboxStatus.DISPATCHING).values(
    {
        **_AGAIN,
        "available_at": bindparam("due_at"),
        "in_doubt": bindparam("doubt"),
        "last_error": bindparam("error"),
    }
)
_UNDO_BEGIN = _held.where(_o.status == OutboxStatus.DISPATCHING).values(
    {**_AGAIN, "attempts": _o.attempts - 1, "available_at": bindparam("due_at"), "last_error": bindparam("error")}
)
_EXPIRE_CLAIMS = (
    sa.update(email_outbox)
    .where(_o.id.in_(select(_EXPIRED_CLAIMS.c.id)), _o.status == OutboxStatus.LEASED)
    .values({**_AGAIN, "claims": _o.claims + 1})
)
_END_HELD = _held.values({**_ENDED, "status": bindparam("new_status"), "last_error": bindparam("error")})
_END_QUEUED = _update.where(_o.status == OutboxStatus.QUEUED).values(
    {**_ENDED, "status": bindparam("new_status"), "last_error": bindparam("error")}
)
_CANCEL = (
    sa.update(email_outbox)
    .where(_o.delivery_id == bindparam("of_delivery"), _o.status.in_(WAITING_OUTBOX))
    .values({**_ENDED, "status": OutboxStatus.CANCELLED})
)
_ACCEPT = (
    sa.update(email_outbox)
    .where(_o.delivery_id == bindparam("of_delivery"), _o.status != OutboxStatus.SENT)
    .values({**_ENDED, "status": OutboxStatus.SENT, "finished_at": func.coalesce(_o.finished_at, bindparam("now"))})
)
_INSERT = sa.insert(email_outbox)


def insert_outbox_row(tx: Transaction, prepared: PreparedMail, recipient: str) -> None:
    values: dict[str, Any] = {
        "id": prepared.outbox_id,
        "delivery_id": prepared.delivery_id,
        "template": prepared.template,
        "recipient": recipient,
        "confirmation_url": prepared.confirmation_url,
        "message": prepared.message,
        "payload_hash": prepared.payload_hash,
        "status": OutboxStatus.QUEUED,
        "available_at": tx.now,
        "in_doubt": False,
        "created_at": tx.now,
    }
    tx.execute(_INSERT, values)


def claim_due(
    tx: Transaction, *, lease: str, owner: str, until: int, most: int, horizon: int, margin: int, fraction: int
) -> list[OutboxRow]:
    """Lease the oldest due rows whose link is still worth sending; a row another transaction holds is passed over."""
    values = {"lease": lease, "owner": owner, "until": until, "most": most, "now": tx.now}
    ids = tx.execute(_CLAIM, values | {"horizon": horizon, "margin": margin, "fraction": fraction}).scalars().all()
    return [_row(row) for row in tx.execute(_BY_IDS, {"ids": ids})] if ids else []


def lock_row(tx: Transaction, outbox_id: str) -> OutboxRow | None:
    row = tx.execute(_LOCK_BY_ID, {"outbox_id": outbox_id}).one_or_none()
    return _row(row) if row else None


def lock_row_if_free(tx: Transaction, outbox_id: str) -> bool:
    """False, without waiting, if another transaction has the row, or it is gone."""
    return tx.execute(_LOCK_IF_FREE, {"outbox_id": outbox_id}).scalar_one_or_none() is not None


def expire_claims(tx: Transaction, *, horizon: int, most_claims: int, most: int) -> int:
    """Give back rows whose lease ran out before their dispatch; returns how many. It counts as one claim each."""
    values = {"now": tx.now, "horizon": horizon, "most_claims": most_claims, "most": most}
    return tx.execute(_EXPIRE_CLAIMS, values).rowcount


def lock_expired(tx: Transaction, *, horizon: int, most_claims: int, most: int) -> list[OutboxRow]:
    """The expired rows that need a decision: on the wire, or claimed `most_claims` times for nothing."""
    values = {"now": tx.now, "horizon": horizon, "most_claims": most_claims, "most": most}
    return [_row(row) for row in tx.execute(_EXPIRED, values)]


def lock_stale(tx: Transaction, *, expired_before: int, longest_backoff: int, most: int) -> list[OutboxRow]:
    """Queued rows whose link expired at `expired_before` or earlier. No row is due later than `longest_backoff`
    seconds after its link expired.
    """
    values = {"before": expired_before, "due_before": expired_before + longest_backoff, "most": most}
    return [_row(row) for row in tx.execute(_STALE, values)]


def count_in_hand(tx: Transaction) -> int:
    """Rows that some worker holds right now."""
    return int(tx.execute(_IN_HAND).scalar_one())


def next_moment(tx: Transaction) -> int | None:
    """When the next row falls due or the next lease ends, now or later; None with nothing to wait for."""
    moments = [tx.execute(statement, {"now": tx.now}).scalar_one() for statement in (_NEXT_DUE, _NEXT_EXPIRY)]
    return min((int(moment) for moment in moments if moment is not None), default=None)


def mark_dispatching(tx: Transaction, row: OutboxRow, until: int) -> bool:
    """False if the lease is not ours any more."""
    return _acted(tx, _BEGIN, row, until=until)


def release(tx: Transaction, row: OutboxRow) -> bool:
    """Give back a row that was claimed and not begun, as if it had not been claimed."""
    return _acted(tx, _RELEASE, row)


def requeue(tx: Transaction, row: OutboxRow, *, due_at: int, in_doubt: bool, error: str) -> bool:
    """False if the lease is not ours any more: then our failure counts for nothing."""
    return _acted(tx, _REQUEUE, row, due_at=due_at, doubt=in_doubt, error=_cut(error))


def undo_dispatching(tx: Transaction, row: OutboxRow, *, due_at: int, error: str) -> bool:
    return _acted(tx, _UNDO_BEGIN, row, due_at=due_at, error=_cut(error))


def end_held(tx: Transaction, row: OutboxRow, status: OutboxStatus, error: str | None) -> bool:
    assert status in ENDED_OUTBOX
    return _acted(tx, _END_HELD, row, new_status=status, error=_cut(error), now=tx.now)


def end_queued(tx: Transaction, row: OutboxRow, status: OutboxStatus, error: str) -> bool:
    values = {"outbox_id": row.id, "new_status": status, "error": _cut(error), "now": tx.now}
    return tx.execute(_END_QUEUED, values).rowcount == 1


def cancel_outbox_row(tx: Transaction, delivery_id: str) -> bool:
    """Stop a mail that waits; False if it is on the wire or has ended."""
    return tx.execute(_CANCEL, {"of_delivery": delivery_id, "now": tx.now}).rowcount == 1


def mark_row_sent(tx: Transaction, delivery_id: str) -> bool:
    """Acceptance is a fact: it ends the row whatever became of lease and status. False if it was known."""
    return tx.execute(_ACCEPT, {"of_delivery": delivery_id, "now": tx.now}).rowcount == 1


def _acted(tx: Transaction, statement: sa.Update, row: OutboxRow, **values: object) -> bool:
    return tx.execute(statement, {"outbox_id": row.id, "lease": row.lease_token, **values}).rowcount == 1


def _cut(error: str | None) -> str | None:
    return error[:MOST_DETAIL_CHARACTERS] if error else None


def _row(row: sa.Row[Any]) -> OutboxRow:
    values = row._mapping
    return OutboxRow(**{**values, "status": OutboxStatus(values["status"]), "in_doubt": bool(values["in_doubt"])})
