"""What the links in a mail do: confirm, renew, unsubscribe, "not me". The token is the authority; no cookie, no session.

Only these functions, behind a POST, change anything; `look` is what a GET shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from waitlist import policy
from waitlist.deliveries import prove_acceptance, supersede_if_waiting
from waitlist.model import Answer, Channel, ConfirmOutcome, Delivery, Subscriber, Suppression, Waitlist
from waitlist.services import Services
from waitlist.signup import sign_up
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.deliveries import get_delivery, get_delivery_by_token, get_latest_delivery
from waitlist.store.subscribers import (
    get_subscriber_by_id,
    insert_suppression,
    lock_subscriber_by_id,
    lock_subscribers_everywhere,
    mark_confirmed,
    mark_unsubscribed,
)
from waitlist.store.waitlists import get_waitlist
from waitlist.tokens import LinkPurpose, address_hmac, cap_hmac, clean_token, read_link, token_digest


@dataclass(frozen=True)
class Confirmation:
    """What a confirmation link comes to; the list is None for a link that is not ours."""

    outcome: ConfirmOutcome
    waitlist: Waitlist | None = None


_NOT_OURS = Confirmation(ConfirmOutcome.NOT_OURS)


@dataclass(frozen=True)
class _Link:
    """The rows behind a token."""

    delivery: Delivery
    subscriber: Subscriber
    outcome: ConfirmOutcome
    waitlist: Waitlist | None


def look(services: Services, token: str) -> Confirmation:
    """What a POST would come to; changes nothing."""
    digest = _digest(token)
    link = run_query(services.store, partial(_find, digest=digest)) if digest else None
    return Confirmation(link.outcome, link.waitlist) if link else _NOT_OURS


def confirm(services: Services, token: str) -> Confirmation:
    """Put the subscriber on the list for good. Any unexpired link of a pending subscriber confirms, however often."""
    digest = _digest(token)
    return run_transaction(services.store, partial(_confirm, digest=digest)) if digest else _NOT_OURS


def renew(services: Services, token: str) -> Confirmation | Answer:
    """From the expired page: an ordinary submission under the consent of that mail. An Answer means it was made."""
    digest = _digest(token)
    link = run_query(services.store, partial(_find, digest=digest)) if digest else None
    if link is None:
        return _NOT_OURS
    if link.outcome is not ConfirmOutcome.EXPIRED:
        return Confirmation(link.outcome, link.waitlist)
    return sign_up(
        services,
        list_id=link.subscriber.list_id,
        email=link.subscriber.email,
        consent_version=link.delivery.consent_version,
        channel=Channel.FORM,
        source="renew",
    )


def unsubscribe(services: Services, token: str) -> None:
    """Take the subscriber off this list. Says nothing about whether the token is ours."""
    delivery_id = read_link(services.settings.data_key_text, LinkPurpose.UNSUBSCRIBE, token)
    if delivery_id:
        run_transaction(services.store, partial(_unsubscribe, delivery_id=delivery_id))


def not_me(services: Services, token: str) -> None:
    """ "I did not ask for this": no mail to this address ever again, from any list."""
    data_key = services.settings.data_key_text
    delivery_id = read_link(data_key, LinkPurpose.NOT_ME, token)
    if delivery_id:
        run_transaction(services.store, partial(_not_me, data_key=data_key, delivery_id=delivery_id))


def suppress_address(tx: Transaction, data_key: str, email: str, reason: Suppression) -> bool:
    """Suppress, unsubscribe everywhere and cancel what waits; False if the address was suppressed before.

    Takes the cap key's lock as a submission does, so that neither slips past the other.
    """
    tx.lock(cap_hmac(data_key, email))
    is_new = insert_suppression(tx, address_hmac(data_key, email), reason)
    for subscriber in lock_subscribers_everywhere(tx, email):
        leave(tx, subscriber.id)
    return is_new


def leave(tx: Transaction, subscriber_id: str) -> None:
    mark_unsubscribed(tx, subscriber_id)
    supersede_if_waiting(tx, get_latest_delivery(tx, subscriber_id))


def _confirm(tx: Transaction, digest: str) -> Confirmation:
    found = get_delivery_by_token(tx, digest)
    if found is None or lock_subscriber_by_id(tx, found.subscriber_id) is None:
        return _NOT_OURS
    link = _find(tx, digest)  # once more, now that nobody else can change it
    if link is None:
        return _NOT_OURS
    prove_acceptance(tx, link.delivery)
    if link.outcome is ConfirmOutcome.CONFIRMED_NOW:
        mark_confirmed(
            tx,
            link.subscriber.id,
            delivery_id=link.delivery.id,
            consent_at=link.delivery.consent_at,
            consent_version=link.delivery.consent_version,
        )
        supersede_if_waiting(tx, get_latest_delivery(tx, link.subscriber.id))
    return Confirmation(link.outcome, link.waitlist)


def _unsubscribe(tx: Transaction, delivery_id: str) -> None:
    delivery = get_delivery(tx, delivery_id)
    if delivery is None or lock_subscriber_by_id(tx, delivery.subscriber_id) is None:
        return
    prove_acceptance(tx, delivery)
    leave(tx, delivery.subscriber_id)


def _not_me(tx: Transaction, data_key: str, delivery_id: str) -> None:
    delivery = get_delivery(tx, delivery_id)
    subscriber = get_subscriber_by_id(tx, delivery.subscriber_id) if delivery else None
    if delivery is None or subscriber is None:
        return
    suppress_address(tx, data_key, subscriber.email, Suppression.NOT_ME)
    prove_acceptance(tx, delivery)


def _find(tx: Transaction, digest: str) -> _Link | None:
    delivery = get_delivery_by_token(tx, digest)
    subscriber = get_subscriber_by_id(tx, delivery.subscriber_id) if delivery else None
    if delivery is None or subscriber is None:
        return None
    outcome = policy.decide_confirmation(delivery, subscriber, tx.now)
    return _Link(delivery, subscriber, outcome, get_waitlist(tx, subscriber.list_id))


def _digest(token: str) -> str | None:
    """None for what cannot be one of ours, so that nobody makes the database look for garbage."""
    cleaned = clean_token(token)
    return token_digest(cleaned) if cleaned else None
