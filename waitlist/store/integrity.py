"""Laws that no constraint of the schema can say, each as a count of the rows that break it."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import and_, exists, func, or_, select

from waitlist.model import ENDED_OUTBOX, OPEN_DELIVERY, DeliveryStatus, OutboxStatus, RequestState, SubscriberStatus
from waitlist.store.engine import Transaction
from waitlist.store.schema import email_deliveries, email_outbox, signup_requests, subscribers

_o = email_outbox.c
_d = email_deliveries.c
_s = subscribers.c

# What each status of an outbox row says about its delivery.
COUPLING: Final = {
    OutboxStatus.QUEUED: (DeliveryStatus.QUEUED,),
    OutboxStatus.LEASED: (DeliveryStatus.QUEUED,),
    OutboxStatus.DISPATCHING: (DeliveryStatus.SENDING,),
    OutboxStatus.SENT: (
        DeliveryStatus.SENT,
        DeliveryStatus.DELIVERED,
        DeliveryStatus.BOUNCED,
        DeliveryStatus.COMPLAINED,
    ),
    OutboxStatus.DEAD: (DeliveryStatus.FAILED, DeliveryStatus.REJECTED),
    OutboxStatus.CANCELLED: (DeliveryStatus.SUPERSEDED,),
}
_newer = email_deliveries.alias().c
_is_open = _d.status.in_(OPEN_DELIVERY)
_rows = email_outbox.join(email_deliveries, _d.id == _o.delivery_id)

_BROKEN: Final[dict[str, sa.Select[Any]]] = {
    "outbox row and mail say different things": select(_o.id)
    .select_from(_rows)
    .where(~or_(*(and_(_o.status == row, _d.status.in_(mail)) for row, mail in COUPLING.items()))),
    "mail to be sent without its outbox row": select(_d.id).where(_is_open, ~exists().where(_o.delivery_id == _d.id)),
    "mail to be sent that is not the newest": select(_d.id).where(
        _is_open, exists().where(_newer.subscriber_id == _d.subscriber_id, _newer.generation > _d.generation)
    ),
    "outbox row to be sent without its mail": select(_o.id).where(_o.status.not_in(ENDED_OUTBOX), _o.message == ""),
    "pending token whose mail was never made": select(_s.id).where(
        _s.status == SubscriberStatus.PENDING,
        _s.confirmation_rotated_at.is_not(None),
        ~exists().where(_d.subscriber_id == _s.id, _d.token_hash == _s.confirmation_token_hash),
    ),
    "submission that was never decided": select(signup_requests.c.operation_id).where(
        signup_requests.c.state == RequestState.PROCESSING
    ),
    "confirmed subscriber without the mail whose link was used": select(_s.id).where(
        _s.status == SubscriberStatus.CONFIRMED, _s.confirmed_delivery_id.is_(None)
    ),
}
_COUNTS: Final = {what: select(func.count()).select_from(rows.subquery()) for what, rows in _BROKEN.items()}


def count_broken(tx: Transaction) -> dict[str, int]:
    """How many rows break each law, by what is wrong with them in words."""
    return {what: int(tx.execute(statement).scalar_one()) for what, statement in _COUNTS.items()}
