"""Verbs on subscribers and suppressions. Each takes the open transaction first and never commits."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import and_, bindparam, or_, select
from sqlalchemy.dialects.postgresql import insert

from waitlist.model import (
    CooldownBounds,
    DeliveryStatus,
    PreparedMail,
    Submission,
    Subscriber,
    SubscriberStatus,
    Suppression,
)
from waitlist.store.engine import Transaction
from waitlist.store.schema import email_deliveries, subscribers, suppressions

_s = subscribers.c
_KEY: Final = ["list_id", "email"]

_BY_EMAIL = select(subscribers).where(_s.list_id == bindparam("list_id"), _s.email == bindparam("email"))
_LOCK_BY_EMAIL = _BY_EMAIL.with_for_update()
_BY_ID = select(subscribers).where(_s.id == bindparam("subscriber_id"))
_LOCK_BY_ID = _BY_ID.with_for_update()
_EVERYWHERE = select(subscribers).where(_s.email == bindparam("email")).order_by(_s.id)
_LOCK_EVERYWHERE = _EVERYWHERE.with_for_update()

# A mail of this subscriber is with the provider right now. NOT IN, not EXISTS: inside ON CONFLICT ... WHERE a
# correlated EXISTS loses its correlation. The inner SELECT keeps it to one subscriber, not to all open deliveries.
_HAS_MAIL_ON_THE_WIRE = _s.id.in_(
    select(email_deliveries.c.subscriber_id).where(
        email_deliveries.c.status == DeliveryStatus.SENDING,
        email_deliveries.c.subscriber_id
        == select(_s.id).where(_s.list_id == bindparam("list_id"), _s.email == bindparam("email")).scalar_subquery(),
    )
)
_IS_COOLED_DOWN = or_(
    _s.confirmation_rotated_at.is_(None),
    _s.confirmation_rotated_at <= bindparam("oldest"),
    _s.confirmation_rotated_at > bindparam("newest"),
    _s.confirmation_expires_at <= bindparam("now"),
)

_insert_pending = insert(subscribers).values(
    id=bindparam("id"),
    list_id=bindparam("list_id"),
    email=bindparam("email"),
    status=SubscriberStatus.PENDING,
    consent_at=bindparam("now"),
    consent_version=bindparam("consent_version"),
    confirmation_token_hash=bindparam("token_hash"),
    confirmation_expires_at=bindparam("expires_at"),
    confirmation_rotated_at=bindparam("rotated_at"),
)
_FROM_EXCLUDED: Final[dict[str, Any]] = {
    "status": SubscriberStatus.PENDING,
    "unsubscribed_at": None,
    **{
        name: _insert_pending.excluded[name]
        for name in (
            "consent_at",
            "consent_version",
            "confirmation_token_hash",
            "confirmation_expires_at",
            "confirmation_rotated_at",
        )
    },
}
# The heart of the waitlist: one statement decides whether this submission may send. Never for a confirmed row.
_UPSERT_PENDING = _insert_pending.on_conflict_do_update(
    index_elements=_KEY,
    set_=_FROM_EXCLUDED,
    where=and_(
        ~_HAS_MAIL_ON_THE_WIRE,
        or_(
            _s.status == SubscriberStatus.UNSUBSCRIBED,
            and_(_s.status == SubscriberStatus.PENDING, _IS_COOLED_DOWN),
        ),
    ),
).returning(_s.id)
_INSERT_OR_REVIVE = _insert_pending.on_conflict_do_update(
    index_elements=_KEY, set_=_FROM_EXCLUDED, where=_s.status == SubscriberStatus.UNSUBSCRIBED
)

_update = sa.update(subscribers).where(_s.id == bindparam("subscriber_id"))
_ROTATE = _update.where(_s.status == SubscriberStatus.PENDING).values(
    consent_at=bindparam("consented_at"),
    consent_version=bindparam("version"),
    confirmation_token_hash=bindparam("token_hash"),
    confirmation_expires_at=bindparam("expires_at"),
    confirmation_rotated_at=bindparam("now"),
)
_REVIVE_IN_FLIGHT = _update.where(_s.status == SubscriberStatus.UNSUBSCRIBED).values(
    status=SubscriberStatus.PENDING,
    consent_at=bindparam("now"),
    consent_version=bindparam("version"),
    confirmation_rotated_at=bindparam("now"),
    unsubscribed_at=None,
)
_CONFIRM = _update.where(_s.status == SubscriberStatus.PENDING).values(
    status=SubscriberStatus.CONFIRMED,
    confirmed_at=sa.func.coalesce(_s.confirmed_at, bindparam("now")),
    confirmed_delivery_id=bindparam("delivery_id"),
    consent_at=bindparam("consented_at"),
    consent_version=bindparam("version"),
)
_UNSUBSCRIBE = _update.where(_s.status != SubscriberStatus.UNSUBSCRIBED).values(
    status=SubscriberStatus.UNSUBSCRIBED,
    unsubscribed_at=bindparam("now"),
    confirmation_rotated_at=None,
)

_IS_SUPPRESSED = select(suppressions.c.reason).where(suppressions.c.email_hmac == bindparam("email_hmac"))
_SUPPRESS = (
    insert(suppressions).on_conflict_do_nothing(index_elements=["email_hmac"]).returning(suppressions.c.email_hmac)
)
_UNSUPPRESS = sa.delete(suppressions).where(suppressions.c.email_hmac == bindparam("email_hmac"))


def get_subscriber(tx: Transaction, list_id: str, email: str) -> Subscriber | None:
    return _one(tx, _BY_EMAIL, list_id=list_id, email=email)


def lock_subscriber(tx: Transaction, list_id: str, email: str) -> Subscriber | None:
    return _one(tx, _LOCK_BY_EMAIL, list_id=list_id, email=email)


def get_subscriber_by_id(tx: Transaction, subscriber_id: str) -> Subscriber | None:
    return _one(tx, _BY_ID, subscriber_id=subscriber_id)


def lock_subscriber_by_id(tx: Transaction, subscriber_id: str) -> Subscriber | None:
    return _one(tx, _LOCK_BY_ID, subscriber_id=subscriber_id)


def get_subscribers_everywhere(tx: Transaction, email: str) -> list[Subscriber]:
    """The subscribers with this address on every list."""
    return [_subscriber(row) for row in tx.execute(_EVERYWHERE, {"email": email})]


def lock_subscribers_everywhere(tx: Transaction, email: str) -> list[Subscriber]:
    return [_subscriber(row) for row in tx.execute(_LOCK_EVERYWHERE, {"email": email})]


def upsert_pending(
    tx: Transaction, submission: Submission, prepared: PreparedMail, *, cooldown: CooldownBounds
) -> str | None:
    """Insert a pending subscriber, rotate the token of one whose cooldown is over, or revive one who had left.

    The subscriber's id, or None when the row is left as it was: confirmed, cooling down, or with a mail on the wire.
    """
    values = _pending(tx, submission, prepared) | {
        "token_hash": prepared.token_hash,
        "expires_at": tx.now + prepared.token_ttl_seconds,
        "rotated_at": tx.now,
        "oldest": cooldown.oldest,
        "newest": cooldown.newest,
    }
    acted: str | None = tx.execute(_UPSERT_PENDING, values).scalar_one_or_none()
    return acted


def insert_or_revive(tx: Transaction, submission: Submission, prepared: PreparedMail) -> None:
    """Make a missing or departed subscriber pending without a mail; leave pending and confirmed ones alone."""
    no_mail = {"token_hash": None, "expires_at": None, "rotated_at": None}
    tx.execute(_INSERT_OR_REVIVE, _pending(tx, submission, prepared) | no_mail)


def rotate_token(tx: Transaction, submission: Submission, prepared: PreparedMail, *, subscriber_id: str) -> bool:
    """False if the subscriber is not pending any more."""
    values = {
        "consented_at": tx.now if submission.consent_at is None else submission.consent_at,
        "version": submission.consent_version,
        "token_hash": prepared.token_hash,
        "expires_at": tx.now + prepared.token_ttl_seconds,
    }
    return _acted(tx, _ROTATE, subscriber_id, now=tx.now, **values)


def revive_in_flight(tx: Transaction, subscriber_id: str, *, consent_version: int) -> bool:
    """Take somebody who left back as pending; the mail on the wire serves them, so the token stays."""
    return _acted(tx, _REVIVE_IN_FLIGHT, subscriber_id, now=tx.now, version=consent_version)


def mark_confirmed(
    tx: Transaction, subscriber_id: str, *, delivery_id: str, consent_at: int, consent_version: int
) -> bool:
    """False if the subscriber is not pending (any more). The first confirmation time stays."""
    values = {"delivery_id": delivery_id, "consented_at": consent_at, "version": consent_version}
    return _acted(tx, _CONFIRM, subscriber_id, now=tx.now, **values)


def mark_unsubscribed(tx: Transaction, subscriber_id: str) -> bool:
    """False if the subscriber had left before."""
    return _acted(tx, _UNSUBSCRIBE, subscriber_id, now=tx.now)


def get_suppression(tx: Transaction, email_hmac: str) -> Suppression | None:
    reason = tx.execute(_IS_SUPPRESSED, {"email_hmac": email_hmac}).scalar_one_or_none()
    return Suppression(reason) if reason else None


def insert_suppression(tx: Transaction, email_hmac: str, reason: Suppression) -> bool:
    """False if the address was suppressed before; the first reason stays."""
    values = {"email_hmac": email_hmac, "reason": reason, "created_at": tx.now}
    return tx.execute(_SUPPRESS, values).scalar_one_or_none() is not None


def delete_suppression(tx: Transaction, email_hmac: str) -> bool:
    return tx.execute(_UNSUPPRESS, {"email_hmac": email_hmac}).rowcount == 1


def _pending(tx: Transaction, submission: Submission, prepared: PreparedMail) -> dict[str, Any]:
    return {
        "id": prepared.subscriber_id,
        "list_id": submission.list_id,
        "email": submission.email,
        "consent_version": submission.consent_version,
        "now": tx.now,
    }


def _acted(tx: Transaction, statement: sa.Update, subscriber_id: str, **values: object) -> bool:
    return tx.execute(statement, {"subscriber_id": subscriber_id, **values}).rowcount == 1


def _one(tx: Transaction, statement: sa.Select[Any], **values: str) -> Subscriber | None:
    row = tx.execute(statement, values).one_or_none()
    return _subscriber(row) if row else None


def _subscriber(row: sa.Row[Any]) -> Subscriber:
    return Subscriber(**{**row._mapping, "status": SubscriberStatus(row._mapping["status"])})
