"""Verbs on email_deliveries. A delivery is one intended mail."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, or_, select
from sqlalchemy.dialects.postgresql import insert

from waitlist.model import (
    OPEN_DELIVERY,
    Delivery,
    DeliveryStatus,
    PreparedMail,
    Reason,
    Submission,
)
from waitlist.store.engine import Transaction
from waitlist.store.schema import email_deliveries

_d = email_deliveries.c
_OF_SUBSCRIBER = (
    select(email_deliveries).where(_d.subscriber_id == bindparam("subscriber_id")).order_by(_d.sequence.desc())
)
_LATEST = _OF_SUBSCRIBER.limit(1)
_BY_ID = select(email_deliveries).where(_d.id == bindparam("delivery_id"))
_BY_TOKEN = select(email_deliveries).where(_d.token_hash == bindparam("token_hash"))
# The mails that count against a mailbox: open ones and those that were ever given to a provider.
_SENT = (
    select(func.count())
    .select_from(email_deliveries)
    .where(
        _d.recipient_hmac == bindparam("recipient_hmac"),
        _d.created_at > bindparam("since"),
        _d.created_at <= bindparam("until"),
        or_(_d.status.in_(OPEN_DELIVERY), _d.first_dispatch_at.is_not(None)),
    )
)
# No conflict target: one open delivery per subscriber and one retry per failure are both races lost here.
_INSERT = insert(email_deliveries).on_conflict_do_nothing().returning(_d.id)
_MARK = sa.update(email_deliveries).where(
    _d.id == bindparam("delivery_id"), _d.status.in_(bindparam("expected", expanding=True))
)
_BEGIN = _MARK.values(
    status=DeliveryStatus.SENDING,
    provider=bindparam("new_provider"),
    attempts=_d.attempts + 1,
    first_dispatch_at=func.coalesce(_d.first_dispatch_at, bindparam("now")),
)
_REQUEUE = _MARK.values(status=DeliveryStatus.QUEUED, error_code=bindparam("new_error_code"))
_UNDO_BEGIN = _REQUEUE.values(attempts=_d.attempts - 1, first_dispatch_at=bindparam("new_first_dispatch_at"))
_SETTLE = _MARK.values(
    status=bindparam("new_status"),
    error_code=bindparam("new_error_code"),
    settled_at=bindparam("now"),
)
_ACCEPT = _MARK.values(
    status=DeliveryStatus.SENT,
    error_code=None,
    settled_at=bindparam("now"),
    first_dispatch_at=func.coalesce(_d.first_dispatch_at, bindparam("now")),
    provider_message_id=func.coalesce(_d.provider_message_id, bindparam("new_message_id")),
)
_MOVE = _MARK.values(status=bindparam("new_status"), error_code=bindparam("new_error_code"))
_BY_MESSAGE = (
    select(email_deliveries)
    .where(_d.provider == bindparam("of_provider"), _d.provider_message_id == bindparam("message_id"))
    .order_by(_d.sequence.desc())
    .limit(1)
)
_NAME_MESSAGE = (
    sa.update(email_deliveries)
    .where(_d.id == bindparam("delivery_id"), _d.provider_message_id.is_(None))
    .values(provider_message_id=bindparam("new_message_id"))
)


def get_delivery(tx: Transaction, delivery_id: str) -> Delivery | None:
    return _one(tx, _BY_ID, delivery_id=delivery_id)


def get_delivery_by_token(tx: Transaction, token_hash: str) -> Delivery | None:
    return _one(tx, _BY_TOKEN, token_hash=token_hash)


def get_delivery_by_message(tx: Transaction, provider: str, message_id: str) -> Delivery | None:
    return _one(tx, _BY_MESSAGE, of_provider=provider, message_id=message_id)


def get_latest_delivery(tx: Transaction, subscriber_id: str) -> Delivery | None:
    """The newest by sequence, not by time: clocks step back, sequences do not."""
    return _one(tx, _LATEST, subscriber_id=subscriber_id)


def get_deliveries(tx: Transaction, subscriber_id: str) -> list[Delivery]:
    """All of one subscriber, the newest first."""
    return [_delivery(row) for row in tx.execute(_OF_SUBSCRIBER, {"subscriber_id": subscriber_id})]


def count_mails(tx: Transaction, recipient_hmac: str, *, since: int, until: int) -> int:
    """Those made at since < created_at <= until."""
    values = {"recipient_hmac": recipient_hmac, "since": since, "until": until}
    return int(tx.execute(_SENT, values).scalar_one())


def insert_delivery(
    tx: Transaction,
    submission: Submission,
    prepared: PreparedMail,
    *,
    subscriber_id: str,
    previous: Delivery | None,
    retry_of: Delivery | None,
    reason: Reason,
) -> bool:
    """False if another transaction was first: it has the subscriber's one open delivery, or has claimed this failure."""
    generation = previous.generation + 1 if previous else 1
    values = {
        "id": prepared.delivery_id,
        "subscriber_id": subscriber_id,
        "operation_key": f"{prepared.template}:{subscriber_id}:{generation}",
        "generation": generation,
        "retry_of_delivery_id": retry_of.id if retry_of else None,
        "signup_request_id": submission.operation_id,
        "reason": reason,
        "status": DeliveryStatus.QUEUED,
        "token_hash": prepared.token_hash,
        "token_expires_at": tx.now + prepared.token_ttl_seconds,
        "consent_at": tx.now if submission.consent_at is None else submission.consent_at,
        "consent_version": submission.consent_version,
        "recipient_hmac": submission.cap_hmac,
        "created_at": tx.now,
    }
    return tx.execute(_INSERT, values).scalar_one_or_none() is not None


def mark_sending(tx: Transaction, delivery_id: str, provider: str) -> bool:
    return _acted(tx, _BEGIN, delivery_id, (DeliveryStatus.QUEUED,), new_provider=provider, now=tx.now)


def mark_queued_again(tx: Transaction, delivery_id: str, error_code: str | None) -> bool:
    return _acted(tx, _REQUEUE, delivery_id, (DeliveryStatus.SENDING,), new_error_code=error_code)


def undo_sending(tx: Transaction, delivery_id: str, error_code: str | None, first_dispatch_at: int | None) -> bool:
    """As if the attempt had not been made: the fault was not this mail's."""
    values = {"new_error_code": error_code, "new_first_dispatch_at": first_dispatch_at}
    return _acted(tx, _UNDO_BEGIN, delivery_id, (DeliveryStatus.SENDING,), **values)


def mark_settled(tx: Transaction, delivery_id: str, status: DeliveryStatus, error_code: str | None) -> bool:
    """End an open delivery as failed, rejected or superseded."""
    return _acted(tx, _SETTLE, delivery_id, OPEN_DELIVERY, new_status=status, new_error_code=error_code, now=tx.now)


def mark_accepted(tx: Transaction, delivery_id: str, provider_message_id: str | None = None) -> bool:
    """A provider has the mail: that is a fact, and leaves even an ended status. False if it was known.

    One update, not two: PostgreSQL looks for the subscriber again when a transaction changes a row that it has changed
    before, and a worker, which has the outbox row by then, would meet whoever has locked the subscriber first.
    """
    unproven = (*OPEN_DELIVERY, DeliveryStatus.SUPERSEDED, DeliveryStatus.FAILED, DeliveryStatus.REJECTED)
    if _acted(tx, _ACCEPT, delivery_id, unproven, now=tx.now, new_message_id=provider_message_id):
        return True
    if provider_message_id:
        tx.execute(_NAME_MESSAGE, {"delivery_id": delivery_id, "new_message_id": provider_message_id})
    return False


def mark_moved(tx: Transaction, delivery_id: str, status: DeliveryStatus, earlier: tuple[DeliveryStatus, ...]) -> bool:
    """As a provider's event says; False if the delivery stands at none of `earlier`: it is that far, or further."""
    error_code = None if status is DeliveryStatus.DELIVERED else status
    return _acted(tx, _MOVE, delivery_id, earlier, new_status=status, new_error_code=error_code)


def _acted(
    tx: Transaction, statement: sa.Update, delivery_id: str, expected: tuple[DeliveryStatus, ...], **values: object
) -> bool:
    values |= {"delivery_id": delivery_id, "expected": list(expected)}
    return tx.execute(statement, values).rowcount == 1


def _one(tx: Transaction, statement: sa.Select[Any], **values: str) -> Delivery | None:
    row = tx.execute(statement, values).one_or_none()
    return _delivery(row) if row else None


def _delivery(row: sa.Row[Any]) -> Delivery:
    values = row._mapping
    return Delivery(**{**values, "reason": Reason(values["reason"]), "status": DeliveryStatus(values["status"])})
