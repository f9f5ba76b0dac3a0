"""Provider events -> delivery states. They come late, twice, out of order and before our own record of the send.

A delivery only moves forward (policy.EVENT_RANK), so the same events in any order end in the same state. Whatever a
provider reports about a mail proves that it had accepted it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from typing import Any, Final

import structlog

from waitlist import policy
from waitlist.addresses import canonical_address
from waitlist.confirmation import suppress_address
from waitlist.deliveries import prove_acceptance
from waitlist.errors import InvalidAddress
from waitlist.model import DAY_SECONDS, Delivery, DeliveryStatus, EventType, ProviderEvent, Subscriber, Suppression
from waitlist.services import Services
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.deliveries import get_delivery, get_delivery_by_message, mark_moved
from waitlist.store.events import (
    ParkedEvent,
    attach_event,
    count_stale,
    drop_parked,
    get_applicable,
    lock_parked,
    park_event,
)
from waitlist.store.subscribers import get_subscriber_by_id, lock_subscriber_by_id
from waitlist.tokens import address_hmac

log: Any = structlog.get_logger("waitlist.delivery_events")

# Parked events applied in one go: a worker has mails to send.
APPLY_BATCH: Final = 100
# A send is recorded within a lease. An event that still waits after a day is about a mail of another installation, or
# of a person who was erased.
PARKED_SECONDS: Final = DAY_SECONDS
# SOFT_BOUNCED and DELAYED are not here: the provider still tries, or may the next time.
STATUS_OF: Final = {
    EventType.DELIVERED: DeliveryStatus.DELIVERED,
    EventType.BOUNCED: DeliveryStatus.BOUNCED,
    EventType.COMPLAINED: DeliveryStatus.COMPLAINED,
}


class Fate(StrEnum):
    """What became of an event that was reported to us."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    # Its delivery is not known (yet).
    PARKED = "parked"
    # About another recipient than its delivery's: kept, and nothing changed.
    FOREIGN = "foreign"


def record(services: Services, provider: str, events: Iterable[ProviderEvent]) -> Counter[Fate]:
    """Keep each event once and apply it, each in a transaction of its own; returns how many met which fate.

    Raises StorageBusy; then the provider asks again, and what was recorded before is a duplicate.
    """
    fates = Counter(_record_one(services, provider, event) for event in events)
    if fates[Fate.PARKED]:
        # The send may have been recorded between our look and our commit, when its worker saw no event to apply.
        apply_parked(services)
    return fates


def apply_parked(services: Services) -> int:
    """Apply parked events whose delivery has become known; returns how many. Costs one read if there is none."""
    parked = run_query(services.store, partial(get_applicable, most=APPLY_BATCH))
    data_key = services.settings.data_key_text
    for parked_id in parked:
        run_transaction(services.store, partial(_apply_parked, data_key=data_key, parked_id=parked_id))
    return len(parked)


def drop_stale(services: Services) -> int:
    """Forget events that have waited for their delivery for a day; returns how many. Costs one read if there is none."""
    if not run_query(services.store, _count_stale):
        return 0
    dropped = run_transaction(services.store, _drop_stale)
    log.warning("parked_events_dropped", count=dropped)
    return dropped


def _record_one(services: Services, provider: str, event: ProviderEvent) -> Fate:
    data_key = services.settings.data_key_text
    recipient_hmac = _recipient_hmac(data_key, event.recipient)
    body = partial(_record, data_key=data_key, provider=provider, event=event, recipient_hmac=recipient_hmac)
    fate = run_transaction(services.store, body)
    log.info("provider_event", provider=provider, type=event.type.value, delivery_id=event.delivery_id, fate=fate.value)
    return fate


def _record(tx: Transaction, data_key: str, provider: str, event: ProviderEvent, recipient_hmac: str | None) -> Fate:
    parked = park_event(tx, provider, event, recipient_hmac)
    return _apply(tx, data_key, parked) if parked else Fate.DUPLICATE


def _apply_parked(tx: Transaction, data_key: str, parked_id: str) -> None:
    if parked := lock_parked(tx, parked_id):
        _apply(tx, data_key, parked)


def _apply(tx: Transaction, data_key: str, event: ParkedEvent) -> Fate:
    found = _find(tx, event)
    if found is None:
        return Fate.PARKED
    delivery, subscriber = found
    is_theirs = event.recipient_hmac == address_hmac(data_key, subscriber.email)
    if is_theirs and event.type is EventType.COMPLAINED:
        # Before the subscriber's lock: it takes the cap key's, which comes first.
        suppress_address(tx, data_key, subscriber.email, Suppression.COMPLAINT)
    if lock_subscriber_by_id(tx, subscriber.id) is None:
        return Fate.PARKED  # erased since we looked
    if not is_theirs:
        attach_event(tx, event.id, delivery.id, EventType.FOREIGN)
        return Fate.FOREIGN
    attach_event(tx, event.id, delivery.id, event.type)
    prove_acceptance(tx, delivery, by=f"a {event.type} event")
    if status := STATUS_OF.get(event.type):
        mark_moved(tx, delivery.id, status, policy.statuses_before(status))
    return Fate.APPLIED


def _find(tx: Transaction, event: ParkedEvent) -> tuple[Delivery, Subscriber] | None:
    """By our own id, which went along with the mail; else by the id that the provider gave it."""
    delivery = get_delivery(tx, event.delivery_id) if event.delivery_id else None
    if delivery is None and event.provider_message_id:
        delivery = get_delivery_by_message(tx, event.provider, event.provider_message_id)
    subscriber = get_subscriber_by_id(tx, delivery.subscriber_id) if delivery else None
    return (delivery, subscriber) if delivery and subscriber else None


def _count_stale(tx: Transaction) -> int:
    return count_stale(tx, tx.now - PARKED_SECONDS)


def _drop_stale(tx: Transaction) -> int:
    return drop_parked(tx, tx.now - PARKED_SECONDS)


def _recipient_hmac(data_key: str, recipient: str | None) -> str | None:
    """Compared in canonical form: a provider may change the case of what we gave it."""
    try:
        return address_hmac(data_key, canonical_address(recipient)) if recipient else None
    except InvalidAddress:
        return None
