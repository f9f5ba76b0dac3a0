"""THE transaction: one submission, one subscriber, at most one mail. Everything the waitlist promises begins here.

`_submit` may run several times, so it touches nothing but `tx`; ids, token and mail are made before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

from waitlist import policy
from waitlist.deliveries import enqueue, supersede_open
from waitlist.errors import Restart, UnknownConsent, UnknownList
from waitlist.idempotency import claim_key, close_request, open_request
from waitlist.mail.compose import CONFIRMATION
from waitlist.model import (
    DAY_SECONDS,
    Answer,
    Channel,
    Decision,
    Delivery,
    DeliveryStatus,
    KeyClaim,
    ListState,
    PreparedMail,
    Reason,
    Submission,
    SubscriberStatus,
    Waitlist,
)
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.deliveries import count_mails, get_latest_delivery
from waitlist.store.subscribers import (
    get_subscriber,
    get_suppression,
    insert_or_revive,
    lock_subscriber,
    revive_in_flight,
    rotate_token,
    upsert_pending,
)
from waitlist.store.waitlists import get_consent, get_current_consent, get_waitlist
from waitlist.tokens import address_hmac, cap_hmac, new_id, new_token, token_digest


def sign_up(
    services: Services,
    *,
    list_id: str,
    email: str,
    consent_version: int | None,
    channel: Channel = Channel.FORM,
    source: str | None = None,
    trapped: bool = False,
    claim: KeyClaim | None = None,
) -> Answer:
    """Submit the canonical address `email`. Every path ends in one durable commit and the same neutral message.
    `consent_version` None is the current one.

    Raises UnknownList, UnknownConsent; StorageBusy when nothing was stored and the visitor should try again.
    """
    data_key = services.settings.data_key_text
    waitlist, version = run_query(services.store, partial(_find_list, list_id=list_id, version=consent_version))
    submission = Submission(
        operation_id=new_id(),
        channel=channel,
        list_id=list_id,
        email=email,
        email_hmac=address_hmac(data_key, email),
        cap_hmac=cap_hmac(data_key, email),
        consent_version=version,
        source=source,
        trapped=trapped,
        claim=claim,
    )
    prepared = prepare_mail(services, waitlist, email)
    return run_transaction(
        services.store, partial(_submit, settings=services.settings, submission=submission, prepared=prepared)
    )


def sign_up_with_key(
    services: Services,
    *,
    client: str,
    key: str,
    list_id: str,
    email: str,
    consent_version: int | None,
    source: str | None,
    members: Mapping[str, object],
) -> Answer:
    """The same for a program: under one key there is one effect and one answer, however often it asks.

    `members` are the request's members as sent. Raises as `sign_up`, and KeyReused, OperationInProgress.
    """
    settings = services.settings
    claim = claim_key(
        data_key=settings.data_key_text,
        base_url=settings.base_url,
        retention_seconds=settings.key_retention_seconds,
        client=client,
        key=key,
        list_id=list_id,
        email=email,
        members=members,
    )
    return sign_up(
        services,
        list_id=list_id,
        email=email,
        consent_version=consent_version,
        channel=Channel.API,
        source=source,
        claim=claim,
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
        token_ttl_seconds=services.settings.token_ttl_seconds,
        confirmation_url=services.composer.confirmation_url(token),
        message=message,
        payload_hash=hashlib.sha256(message.encode()).hexdigest(),
    )


def _submit(tx: Transaction, settings: Settings, submission: Submission, prepared: PreparedMail) -> Answer:
    if (twin := open_request(tx, submission, prepared.delivery_id)) is not None:  # a replay
        return twin
    return close_request(tx, submission, prepared.delivery_id, _decide(tx, settings, submission, prepared))


def _decide(tx: Transaction, settings: Settings, submission: Submission, prepared: PreparedMail) -> Decision:
    if not _is_open(tx, submission):
        return Decision.LIST_CLOSED
    if submission.trapped:
        return Decision.TRAPPED
    tx.lock(submission.cap_hmac)
    if get_suppression(tx, submission.email_hmac):
        return Decision.SUPPRESSED
    if _is_capped(tx, settings, submission):
        insert_or_revive(tx, submission, prepared)
        return Decision.CAPPED
    before = get_subscriber(tx, submission.list_id, submission.email)
    cooldown = policy.cooldown_bounds(tx.now, settings.cooldown_seconds)
    if subscriber_id := upsert_pending(tx, submission, prepared, cooldown=cooldown):  # new, cooled down, or back
        latest = get_latest_delivery(tx, subscriber_id)
        supersede_open(tx, latest)
        reason = policy.decide_reason(before, latest)
        if not enqueue(tx, submission, prepared, subscriber_id=subscriber_id, latest=latest, reason=reason):
            raise Restart  # another open mail appeared since we looked
        return Decision.QUEUED
    return _retry_or_refuse(tx, submission, prepared)


def _retry_or_refuse(tx: Transaction, submission: Submission, prepared: PreparedMail) -> Decision:
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
        return _claim_failure(tx, submission, prepared, subscriber_id=subscriber.id, latest=latest)
    return policy.decide_refusal(subscriber, latest)


def _claim_failure(
    tx: Transaction, submission: Submission, prepared: PreparedMail, *, subscriber_id: str, latest: Delivery | None
) -> Decision:
    """One failure, one retry: the unique index on retry_of_delivery_id lets exactly one submission have it."""
    reason = Reason.FAILURE_RETRY
    if not enqueue(tx, submission, prepared, subscriber_id=subscriber_id, latest=latest, reason=reason):
        return Decision.RETRY_CLAIMED
    if not rotate_token(tx, submission, prepared, subscriber_id=subscriber_id):
        raise Restart  # confirmed or gone meanwhile: no mail for them
    return Decision.RETRY_QUEUED


def _is_open(tx: Transaction, submission: Submission) -> bool:
    waitlist = get_waitlist(tx, submission.list_id)
    return waitlist is not None and waitlist.state is ListState.OPEN


def _is_capped(tx: Transaction, settings: Settings, submission: Submission) -> bool:
    """So many mails to one mailbox, over all lists, however often it is typed in and by whom."""
    caps = (
        (DAY_SECONDS, settings.mails_per_address_per_day),
        (policy.THIRTY_DAYS_SECONDS, settings.mails_per_address_per_30_days),
    )
    until = tx.now + policy.CLOCK_TOLERANCE_SECONDS  # what a clock that was ahead made locks nobody out
    return any(
        count_mails(tx, submission.cap_hmac, since=tx.now - window, until=until) >= most for window, most in caps
    )


def _find_list(tx: Transaction, list_id: str, version: int | None) -> tuple[Waitlist, int]:
    waitlist = get_waitlist(tx, list_id)
    consent = get_current_consent(tx, list_id) if version is None else get_consent(tx, list_id, version)
    if waitlist is None:
        raise UnknownList()
    if consent is None:
        raise UnknownConsent()
    return waitlist, consent.version
