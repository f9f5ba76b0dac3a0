"""Verbs that remove what is past its retention, a bounded batch each. Never evidence of open work.

Each takes the newest moment that may go (`before`, Unix seconds, inclusive) and returns how many rows went.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import sqlalchemy as sa
from sqlalchemy import bindparam, exists, func, select

from waitlist.model import OPEN_DELIVERY, DeliveryStatus
from waitlist.store.engine import Transaction
from waitlist.store.erasure import erase_subscribers, forget_subscribers
from waitlist.store.schema import (
    delivery_events,
    email_deliveries,
    email_outbox,
    is_literally,
    signup_requests,
    subscribers,
)

_r = signup_requests.c
_o = email_outbox.c
_d = email_deliveries.c
_e = delivery_events.c
_s = subscribers.c
_most: sa.BindParameter[int] = bindparam("most", type_=sa.Integer)
_before: sa.BindParameter[int] = bindparam("before", type_=sa.BigInteger)

_OVER_KEYS = select(_r.operation_id).where(_r.idempotency_key.is_not(None), _r.key_expires_at <= _before).limit(_most)
_RELEASE_KEYS = (
    sa.update(signup_requests)
    .where(_r.operation_id.in_(_OVER_KEYS))
    .values(idempotency_key=None, request_hash=None, response_body=None)
)
# A ledger row whose key still promises a replay stays, and so does one whose mail is still to be sent.
_OLD_REQUESTS = (
    select(_r.operation_id)
    .where(
        _r.created_at <= _before,
        _r.idempotency_key.is_(None),
        ~exists().where(_d.signup_request_id == _r.operation_id, _d.status.in_(OPEN_DELIVERY)),
    )
    .limit(_most)
)
_PURGE_REQUESTS = sa.delete(signup_requests).where(_r.operation_id.in_(_OLD_REQUESTS))
_OLD_ROWS = select(_o.id).where(_o.finished_at.is_not(None), _o.finished_at <= _before).limit(_most)
_PURGE_ROWS = sa.delete(email_outbox).where(_o.id.in_(_OLD_ROWS))
_OLD_EVENTS = (
    select(_e.id)
    .where(
        _e.at <= _before,
        ~exists().where(_d.id == _e.delivery_id, _d.status.in_(OPEN_DELIVERY)),
    )
    .limit(_most)
)
_PURGE_EVENTS = sa.delete(delivery_events).where(_e.id.in_(_OLD_EVENTS))
_NEVER_LEFT = (
    select(_d.id)
    .where(is_literally(_d.status, DeliveryStatus.SUPERSEDED), _d.first_dispatch_at.is_(None), _d.created_at <= _before)
    .limit(_most)
)
_PURGE_NEVER_LEFT = sa.delete(email_deliveries).where(_d.id.in_(_NEVER_LEFT))

# Nobody with a mail still to be sent, with a link that still confirms, or with a mail that still counts for the caps.
_has_live_mail = exists().where(
    _d.subscriber_id == _s.id,
    sa.or_(
        _d.token_expires_at > bindparam("now"),
        _d.status.in_(OPEN_DELIVERY),
        _d.created_at > _before,
    ),
)
_NEVER_CONFIRMED = (
    select(_s.id)
    .where(
        _s.confirmed_at.is_(None),
        _s.consent_at <= _before,
        # A resend keeps the old consent_at. Where it commits between PostgreSQL's snapshot and the row lock, the second
        # look sees the new subscriber and the old deliveries: this column alone tells of the mail.
        sa.or_(_s.confirmation_rotated_at.is_(None), _s.confirmation_rotated_at <= _before),
        ~_has_live_mail,
    )
    .limit(_most)
)
_LOCK_NEVER_CONFIRMED = _NEVER_CONFIRMED.with_for_update(skip_locked=True)


def release_keys(tx: Transaction, before: int, most: int) -> int:
    """The keys are free again; their rows stay without the answer that they had promised to replay."""
    return tx.execute(_RELEASE_KEYS, {"before": before, "most": most}).rowcount


def purge_requests(tx: Transaction, before: int, most: int) -> int:
    return tx.execute(_PURGE_REQUESTS, {"before": before, "most": most}).rowcount


def purge_outbox_rows(tx: Transaction, before: int, most: int) -> int:
    return tx.execute(_PURGE_ROWS, {"before": before, "most": most}).rowcount


def purge_events(tx: Transaction, before: int, most: int) -> int:
    return tx.execute(_PURGE_EVENTS, {"before": before, "most": most}).rowcount


def purge_deliveries_that_never_left(tx: Transaction, before: int, most: int) -> int:
    return tx.execute(_PURGE_NEVER_LEFT, {"before": before, "most": most}).rowcount


def erase_never_confirmed(tx: Transaction, before: int, most: int) -> int:
    """Subscribers who never confirmed; whoever another transaction holds is passed over. Deliveries, rows and events
    go with them, and the ledger forgets who they were.
    """
    ids = list(tx.execute(_LOCK_NEVER_CONFIRMED, {"before": before, "most": most, "now": tx.now}).scalars())
    if ids:
        forget_subscribers(tx, ids)
        erase_subscribers(tx, ids)
    return len(ids)


_COUNTED: Final[dict[Callable[[Transaction, int, int], int], sa.Select[tuple[str]]]] = {
    release_keys: _OVER_KEYS,
    purge_requests: _OLD_REQUESTS,
    purge_outbox_rows: _OLD_ROWS,
    purge_events: _OLD_EVENTS,
    purge_deliveries_that_never_left: _NEVER_LEFT,
    erase_never_confirmed: _NEVER_CONFIRMED,
}
_COUNTS: Final = {verb: select(func.count()).select_from(found.subquery()) for verb, found in _COUNTED.items()}


def count_removable(tx: Transaction, verb: Callable[[Transaction, int, int], int], before: int, most: int) -> int:
    """How many rows `verb` would remove; no more than `most` are counted."""
    return int(tx.execute(_COUNTS[verb], {"before": before, "most": most, "now": tx.now}).scalar_one())
