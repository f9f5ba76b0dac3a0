"""THE transaction: one submission, one subscriber, at most one mail. Everything the waitlist promises begins here.

`_submit` may run several times, so it touches nothing but `tx`; ids, token and mail are made before it.
"""

from __future__ import annotations

import hashlib
from functools import partial

from waitlist import policy
from waitlist.errors import Restart, UnknownConsent, UnknownList
from waitlist.mail.compose import CONFIRMATION
from waitlist.model import (
    OPEN_DELIVERY,
    Answer,
    Channel,
    Decision,
    Delivery,
    DeliveryStatus,
    EventType,
    ListState,
    PreparedMail,
    Reason,
    RequestState,
    Submission,
    Subscriber,
    SubscriberStatus,
    Waitlist,
)
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.deliveries import (
    count_mails_since,
    get_latest_delivery,
    insert_delivery,
    insert_event,
    mark_settled,
)
from waitlist.store.outbox import cancel_outbox_row, insert_outbox_row
from waitlist.store.signup_requests import complete_request, insert_request
from waitlist.store.subscribers import (
    get_subscriber,
    get_suppression,
    insert_or_revive,
    lock_subscriber,
    revive_in_flight,
    rotate_token,
    upsert_pending,
)
from waitlist.store.waitlists import get_consent, get_waitlist
from waitlist.tokens import address_hmac, cap_hmac, new_id, new_token, token_digest


def sign_up(
    services: Services,
    *,
    list_id: str,
    email: str,
    consent_version: int,
    channel: Channel = Channel.FORM,
    source: str | None = None,
    trapped: bool = False,
) -> Answer:
    """Submit the canonical address `email`. Every path ends in one durable commit and the same neutral message.

    Raises UnknownList, UnknownConsent; StorageBusy when nothing was stored and the visitor should try again.
    """
    data_key = services.settings.data_key_text
    submission = Submission(
        operation_id=new_id(),
        channel=channel,
        list_id=list_id,
        email=email,
        email_hmac=address_hmac(data_key, email),
        cap_hmac=cap_hmac(data_key, email),
        consent_version=consent_version,
        source=source,
        trapped=trapped,
    )
    return submit(services, submission)


def submit(services: Services, submission: Submission) -> Answer:
    waitlist = run_query(services.store, partial(_find_list, submission=submission))
    prepared = prepare_mail(services, waitlist, submission.email)
    return run_transaction(
        services.store, partial(_submit, settings=services.settings, submission=submission, prepared=prepared)
    )


def prepare_mail(services: Services, waitlist: Waitlist, email: str) -> PreparedMail:
    """Make ids and token and render the mail: all that is slow or random, so that the transaction is neither."""
    delivery_id, token = new_id(), new_token()
    mail = services.composer.confirmation(waitlist, email, delivery_id=delivery_id, token=token, now=services.clock())
    message = mail.to_json()
    return PreparedMail(
        subscriber_id=new_id(),
        delivery_id=delivery_id,
        outbox_id=new_id(),
        template=CONFIRMATION,
        token_hash=token_digest(token),
        confirmation_url=services.composer.confirmation_url(token),
        message=message,
        payload_hash=hashlib.sha256(message.encode()).hexdigest(),
    )


def _submit(tx: Transaction, settings: Settings, submission: Submission, prepared: PreparedMail) -> Answer:
    insert_request(tx, submission, prepared.delivery_id)
    if not _is_open(tx, submission):
        return _close(tx, submission, prepared, Decision.LIST_CLOSED)
    if submission.trapped:
        return _close(tx, submission, prepared, Decision.TRAPPED)
    tx.lock(submission.cap_hmac)
    if get_suppression(tx, submission.email_hmac):
        return _close(tx, submission, prepared, Decision.SUPPRESSED)
    if _is_capped(tx, settings, submission):
        insert_or_revive(tx, submission, prepared)
        return _close(tx, submission, prepared, Decision.CAPPED)
    before = get_subscriber(tx, submission.list_id, submission.email)
    expires_at = tx.now + settings.token_ttl_seconds
    cooldown = policy.cooldown_bounds(tx.now, settings.cooldown_seconds)
    if subscriber_id := upsert_pending(tx, submission, prepared, expires_at, cooldown):  # new, cooled down, or back
        latest = get_latest_delivery(tx, subscriber_id)
        supersede_open(tx, latest)
        reason = policy.decide_reason(before, latest)
        if not enqueue(tx, submission, prepared, subscriber_id, latest, reason, expires_at):
            raise Restart  # another open mail appeared since we looked
        return _close(tx, submission, prepared, Decision.QUEUED)
    return _close(tx, submission, prepared, _retry_or_refuse(tx, submission, prepared, expires_at))


def _retry_or_refuse(tx: Transaction, submission: Submission, prepared: PreparedMail, expires_at: int) -> Decision:
    subscriber = lock_subscriber(tx, submission.list_id, submission.email)
    if subscriber is None:
        raise Restart  # erased since the upsert looked
    latest = get_latest_delivery(tx, subscriber.id)
    if subscriber.status is SubscriberStatus.UNSUBSCRIBED:
        if latest is None or latest.status is not DeliveryStatus.SENDING:
            raise Restart  # the mail that was on the wire has landed since the upsert looked
        revive_in_flight(tx, subscriber.id, consent_version=submission.consent_version)
        return Decision.IN_FLIGHT
    if subscriber.status is SubscriberStatus.PENDING and policy.is_retryable(latest):
        return _claim_failure(tx, submission, prepared, subscriber, latest, expires_at)
    return policy.decide_refusal(subscriber, latest)


def _claim_failure(
    tx: Transaction,
    submission: Submission,
    prepared: PreparedMail,
    subscriber: Subscriber,
    latest: Delivery | None,
    expires_at: int,
) -> Decision:
    """One failure, one retry: the unique index on retry_of_delivery_id lets exactly one submission have it."""
    if not enqueue(tx, submission, prepared, subscriber.id, latest, Reason.FAILURE_RETRY, expires_at):
        return Decision.RETRY_CLAIMED
    version = submission.consent_version
    if not rotate_token(
        tx, subscriber.id, consent_version=version, token_hash=prepared.token_hash, expires_at=expires_at
    ):
        raise Restart  # confirmed or gone meanwhile: no mail for them
    return Decision.RETRY_QUEUED


def supersede_open(tx: Transaction, latest: Delivery | None) -> None:
    """Cancel the mail that a newer one replaces. Only the newest delivery of a subscriber can be open."""
    if latest is not None and latest.status in OPEN_DELIVERY and not supersede_if_waiting(tx, latest):
        raise Restart  # a worker just began to send it


def supersede_if_waiting(tx: Transaction, latest: Delivery | None) -> bool:
    """Cancel a mail that is still queued; one that is on the wire cannot be called back (False)."""
    if latest is None or not cancel_outbox_row(tx, latest.id):
        return False
    mark_settled(tx, latest.id, DeliveryStatus.SUPERSEDED, None)
    insert_event(tx, latest.id, EventType.SUPERSEDED)
    return True


def enqueue(
    tx: Transaction,
    submission: Submission,
    prepared: PreparedMail,
    subscriber_id: str,
    latest: Delivery | None,
    reason: Reason,
    expires_at: int,
) -> bool:
    """Write delivery and outbox row; False if another transaction was first (one open mail, one retry a failure)."""
    inserted = insert_delivery(
        tx,
        prepared,
        subscriber_id=subscriber_id,
        previous=latest,
        retry_of=latest if policy.is_retryable(latest) else None,
        signup_request_id=submission.operation_id,
        reason=reason,
        expires_at=expires_at,
        consent_version=submission.consent_version,
        recipient_hmac=submission.cap_hmac,
    )
    if inserted:
        insert_outbox_row(tx, prepared, submission.email)
        tx.notify_worker()
    return inserted


def _is_open(tx: Transaction, submission: Submission) -> bool:
    waitlist = get_waitlist(tx, submission.list_id)
    return waitlist is not None and waitlist.state is ListState.OPEN


def _is_capped(tx: Transaction, settings: Settings, submission: Submission) -> bool:
    """So many mails to one mailbox, over all lists, however often it is typed in and by whom."""
    caps = (
        (policy.DAY_SECONDS, settings.mails_per_address_per_day),
        (policy.THIRTY_DAYS_SECONDS, settings.mails_per_address_per_30_days),
    )
    return any(count_mails_since(tx, submission.cap_hmac, tx.now - window) >= most for window, most in caps)


def _close(tx: Transaction, submission: Submission, prepared: PreparedMail, decision: Decision) -> Answer:
    """Every path ends here, so every path costs one durable commit: the audit trail, and equal answer times."""
    state = RequestState.FAILED if decision is Decision.LIST_CLOSED else RequestState.SUCCEEDED
    complete_request(tx, submission, state, decision)
    return Answer(submission.operation_id, submission.list_id, state, decision, job_id=prepared.delivery_id)


def _find_list(tx: Transaction, submission: Submission) -> Waitlist:
    waitlist = get_waitlist(tx, submission.list_id)
    if waitlist is None:
        raise UnknownList()
    if get_consent(tx, submission.list_id, submission.consent_version) is None:
        raise UnknownConsent()
    return waitlist
