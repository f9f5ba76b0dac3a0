"""What the owner does about one person by hand: send the confirmation mail again, suppress the address or lift that."""

from __future__ import annotations

from functools import partial

from waitlist.confirmation import suppress_address
from waitlist.deliveries import enqueue, supersede_open
from waitlist.errors import InvalidInput, Restart
from waitlist.idempotency import close_request, open_request
from waitlist.model import (
    Answer,
    Channel,
    Decision,
    DeliveryStatus,
    PreparedMail,
    Reason,
    Submission,
    Subscriber,
    SubscriberStatus,
    Suppression,
)
from waitlist.services import Services
from waitlist.signup import prepare_mail
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.deliveries import get_latest_delivery
from waitlist.store.subscribers import (
    delete_suppression,
    get_subscribers_everywhere,
    get_suppression,
    lock_subscriber,
    rotate_token,
)
from waitlist.store.waitlists import get_waitlist
from waitlist.tokens import address_hmac, cap_hmac, new_id


def resend(services: Services, email: str, *, reason: str, list_id: str | None = None) -> Answer:
    """Make a new confirmation mail for a pending subscriber, past cooldown and caps; `reason` goes into the ledger.

    Raises InvalidInput, saying why, for a blank reason and for whoever is not pending, is suppressed, or has a mail on
    the wire.
    """
    if not reason.strip():
        raise InvalidInput("The reason is empty: say why, for the ledger.")
    subscriber = run_query(services.store, partial(_find_pending, email=email, list_id=list_id))
    waitlist = run_query(services.store, partial(get_waitlist, list_id=subscriber.list_id))
    assert waitlist is not None, "a subscriber's list is there"
    data_key = services.settings.data_key_text
    submission = Submission(
        operation_id=new_id(),
        channel=Channel.CLI,
        list_id=subscriber.list_id,
        email=email,
        email_hmac=address_hmac(data_key, email),
        cap_hmac=cap_hmac(data_key, email),
        consent_version=subscriber.consent_version,
        consent_at=subscriber.consent_at,
        source=reason.strip(),
    )
    prepared = prepare_mail(services, waitlist, email)
    return run_transaction(services.store, partial(_resend, submission=submission, prepared=prepared))


def suppress(services: Services, email: str) -> bool:
    """No mail to this address any more, from any list, and off all of them; False if it was suppressed before."""
    body = partial(suppress_address, data_key=services.settings.data_key_text, email=email, reason=Suppression.OPERATOR)
    return run_transaction(services.store, body)


def unsuppress(services: Services, email: str) -> bool:
    """Let the address be written to again, which puts it back on no list; False if it was not suppressed."""
    body = partial(_unsuppress, data_key=services.settings.data_key_text, email=email)
    return run_transaction(services.store, body)


def _unsuppress(tx: Transaction, data_key: str, email: str) -> bool:
    tx.lock(cap_hmac(data_key, email))  # as a submission does, so that it sees one or the other
    return delete_suppression(tx, address_hmac(data_key, email))


def _find_pending(tx: Transaction, email: str, list_id: str | None) -> Subscriber:
    found = [person for person in get_subscribers_everywhere(tx, email) if list_id in (None, person.list_id)]
    pending = [person for person in found if person.status is SubscriberStatus.PENDING]
    if len(pending) == 1:
        return pending[0]
    if pending:
        raise InvalidInput(f"Pending on several lists; add --list: {', '.join(person.list_id for person in pending)}.")
    stands = ", ".join(f"{person.status} on {person.list_id}" for person in found) or "on no list"
    raise InvalidInput(f"Not pending: {stands}.")


def _resend(tx: Transaction, submission: Submission, prepared: PreparedMail) -> Answer:
    open_request(tx, submission, prepared.delivery_id)
    tx.lock(submission.cap_hmac)
    if suppression := get_suppression(tx, submission.email_hmac):
        raise InvalidInput(f"The address is suppressed ({suppression}).")
    subscriber = lock_subscriber(tx, submission.list_id, submission.email)
    if subscriber is None or subscriber.status is not SubscriberStatus.PENDING:
        raise InvalidInput("Not pending any more.")
    latest = get_latest_delivery(tx, subscriber.id)
    if latest is not None and latest.status is DeliveryStatus.SENDING:
        raise InvalidInput("A mail is on its way at this moment.")
    supersede_open(tx, latest)
    reason = Reason.OPERATOR_RESEND
    if not enqueue(tx, submission, prepared, subscriber_id=subscriber.id, latest=latest, reason=reason):
        raise Restart  # another open mail appeared since we looked
    rotate_token(tx, submission, prepared, subscriber_id=subscriber.id)
    return close_request(tx, submission, prepared.delivery_id, Decision.QUEUED)
