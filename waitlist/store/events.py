"""Verbs on delivery_events: our own and those that providers report. Appended, never changed; but a provider's event
without its delivery is parked, and given to it once.

A provider's event is inserted before any other lock and without its delivery: a foreign key would hold the delivery's
row, and an erasure, which locks the subscriber first, would meet it from the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, select
from sqlalchemy.dialects.postgresql import insert

from waitlist.model import MOST_DETAIL_CHARACTERS, EventType, ProviderEvent
from waitlist.store.engine import Transaction
from waitlist.store.schema import delivery_events, email_deliveries
from waitlist.tokens import new_id
from waitlist.version import __version__


@dataclass(frozen=True)
class ParkedEvent:
    """An event whose delivery is still to be found. `delivery_id` is the one it names, which may not exist."""

    id: str
    type: EventType
    provider: str
    delivery_id: str | None
    provider_message_id: str | None
    recipient_hmac: str | None


_e = delivery_events.c
_d = email_deliveries.c
_INSERT = sa.insert(delivery_events)
# In doubt, too: a server that takes the final dot and never answers may have every one of them.
_HANDED_OVER = (
    select(func.count())
    .select_from(delivery_events)
    .where(
        _e.type.in_((EventType.ACCEPTED, EventType.IN_DOUBT)), _e.at > bindparam("since"), _e.at <= bindparam("until")
    )
)
# No conflict target: (provider, event_id) is the only one that can be met.
_PARK = insert(delivery_events).on_conflict_do_nothing().returning(_e.id)
_is_parked = _e.delivery_id.is_(None)
_LOCK = (
    select(_e.id, _e.type, _e.provider, _e.provider_message_id, _e.recipient_hmac)
    .where(_e.id == bindparam("parked_id"), _is_parked)
    .with_for_update()
)
_APPLICABLE = (
    select(_e.id)
    .join(
        email_deliveries,
        sa.and_(_d.provider_message_id == _e.provider_message_id, _d.provider == _e.provider),
    )
    .where(_is_parked)
    .order_by(_e.id)
    .limit(bindparam("most"))
)
_ATTACH = (
    sa.update(delivery_events)
    .where(_e.id == bindparam("parked_id"), _is_parked)
    .values(delivery_id=bindparam("of_delivery"), type=bindparam("new_type"))
)
_is_stale = sa.and_(_is_parked, _e.at <= bindparam("before"))
_COUNT_STALE = select(func.count()).select_from(delivery_events).where(_is_stale)
_DROP = sa.delete(delivery_events).where(_is_stale)


def insert_event(
    tx: Transaction,
    delivery_id: str,
    event: EventType,
    *,
    provider: str | None = None,
    provider_message_id: str | None = None,
    duration_ms: int | None = None,
    detail: str = "",
) -> None:
    """Append one of our own. `detail` is cut here; the caller keeps addresses out of it."""
    values = {
        "id": new_id(),
        "delivery_id": delivery_id,
        "type": event,
        "at": tx.now,
        "provider": provider,
        "provider_message_id": provider_message_id,
        "app_version": __version__,
        "duration_ms": duration_ms,
        "detail": detail[:MOST_DETAIL_CHARACTERS],
    }
    tx.execute(_INSERT, values)


def count_handed_over(tx: Transaction, *, since: int, until: int) -> int:
    """Mails that a provider took, or may have taken, at since < at <= until. One in doubt and then proved counts twice."""
    return int(tx.execute(_HANDED_OVER, {"since": since, "until": until}).scalar_one())


def park_event(tx: Transaction, provider: str, event: ProviderEvent, recipient_hmac: str | None) -> ParkedEvent | None:
    """None if this event is known."""
    values: dict[str, Any] = {
        "id": new_id(),
        "delivery_id": None,
        "type": event.type,
        # When it reached us: the provider's clock is not ours, and the wait in the car park counts from here.
        "at": tx.now,
        "provider": provider,
        "event_id": event.event_id,
        "provider_message_id": event.provider_message_id,
        "recipient_hmac": recipient_hmac,
        "app_version": __version__,
        "detail": event.detail[:MOST_DETAIL_CHARACTERS],
    }
    parked_id = tx.execute(_PARK, values).scalar_one_or_none()
    if parked_id is None:
        return None
    return ParkedEvent(parked_id, event.type, provider, event.delivery_id, event.provider_message_id, recipient_hmac)


def lock_parked(tx: Transaction, parked_id: str) -> ParkedEvent | None:
    """None if another transaction has given it to its delivery, or dropped it."""
    row = tx.execute(_LOCK, {"parked_id": parked_id}).one_or_none()
    return ParkedEvent(**{**row._mapping, "type": EventType(row.type), "delivery_id": None}) if row else None


def get_applicable(tx: Transaction, most: int) -> list[str]:
    """The ids of parked events whose delivery has become known, the oldest first."""
    return list(tx.execute(_APPLICABLE, {"most": most}).scalars())


def attach_event(tx: Transaction, parked_id: str, delivery_id: str, event: EventType) -> bool:
    values = {"parked_id": parked_id, "of_delivery": delivery_id, "new_type": event}
    return tx.execute(_ATTACH, values).rowcount == 1


def count_stale(tx: Transaction, before: int) -> int:
    return int(tx.execute(_COUNT_STALE, {"before": before}).scalar_one())


def drop_parked(tx: Transaction, before: int) -> int:
    """Remove what was parked at `before` or earlier; returns how many."""
    return tx.execute(_DROP, {"before": before}).rowcount
