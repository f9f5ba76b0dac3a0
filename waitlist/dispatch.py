"""What becomes of an outbox row: claim, begin dispatch, settle, release, recover. Each is one transaction or a part of one.

Knows the rows and the rules, but no thread, no wait and no provider beyond its name and how long it remembers keys; the
loop around this is `outbox.py`.

Acceptance is a fact, failure is a claim: an acceptance is recorded whatever became of the lease, a failure only by
the holder of the lease token. So a worker that wakes up late can neither undo a success nor cause a second send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from waitlist import policy
from waitlist.model import DeliveryStatus, EventType, OutboxStatus, Outcome, OutcomeKind
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_transaction
from waitlist.store.deliveries import (
    mark_accepted,
    mark_queued_again,
    mark_sending,
    mark_settled,
    undo_sending,
)
from waitlist.store.events import count_handed_over, insert_event
from waitlist.store.outbox import (
    OutboxRow,
    claim_due,
    count_in_hand,
    end_held,
    end_queued,
    expire_claims,
    lock_expired,
    lock_row,
    lock_row_if_free,
    lock_stale,
    mark_dispatching,
    mark_row_sent,
    release,
    requeue,
    undo_dispatching,
)
from waitlist.tokens import new_id

HOUR_SECONDS: Final = 3600
# Rows recovered in one transaction: small enough not to keep a visitor waiting.
RECOVER_BATCH: Final = 200


@dataclass(frozen=True)
class Provider:
    """What must be known here of the one that is asked: its name in deliveries, and how long it remembers a key."""

    name: str
    # None: it keeps no keys.
    key_window_seconds: int | None = None


@dataclass(frozen=True)
class Dispatch:
    """A mail on the wire: the row as it stood before, and the attempt's number from 1."""

    row: OutboxRow
    attempt: int
    # On the clock of mail.deadline. Later the lease may be over, and the mail another worker's to send.
    send_until: float


@dataclass(frozen=True)
class Finished:
    """An attempt that has come back and is not recorded yet."""

    dispatch: Dispatch
    outcome: Outcome
    duration_ms: int


def claim(services: Services, owner: str, most: int) -> list[OutboxRow]:
    """Lease up to `most` due rows, no more than the hourly budget leaves, in order of their due time."""
    lease = new_id()

    def body(tx: Transaction) -> list[OutboxRow]:
        tx.lock("waitlist.claim")  # two claims at once would both spend the same budget
        # What a clock that was further ahead has recorded must not use up the budget until that time comes.
        until = tx.now + policy.CLOCK_TOLERANCE_SECONDS
        spent = count_handed_over(tx, since=tx.now - HOUR_SECONDS, until=until) + count_in_hand(tx)
        allowed = min(most, services.settings.mail_budget_per_hour - spent)
        if allowed <= 0:
            return []
        return claim_due(
            tx,
            lease=lease,
            owner=owner,
            until=tx.now + services.settings.lease_seconds,
            most=allowed,
            horizon=tx.now + policy.LONGEST_BACKOFF_SECONDS + policy.CLOCK_TOLERANCE_SECONDS,
            margin=policy.LINK_MARGIN_SECONDS,
            fraction=policy.LINK_MARGIN_FRACTION,
        )

    return run_transaction(services.store, body)


def begin_dispatch(
    tx: Transaction, settings: Settings, provider: Provider, claimed: OutboxRow, *, send_until: float
) -> Dispatch | None:
    """Put a claimed row on the wire; None if it is not ours any more or must not be sent."""
    row = lock_row(tx, claimed.id)
    if row is None or row.lease_token != claimed.lease_token:
        return None
    if not row.subscriber_is_pending:
        _supersede(tx, row)
        return None
    if not policy.is_link_fresh(row.token_expires_at, row.delivery_created_at, tx.now):
        release(tx, row)
        return None
    if row.in_doubt and _key_window_open(tx, row, provider) is False:
        # It was asked again in time, but the worker or the provider was away until the key was forgotten.
        _bury(tx, row, "in_doubt")
        return None
    if not mark_dispatching(tx, row, tx.now + settings.lease_seconds):
        return None
    mark_sending(tx, row.delivery_id, provider.name)
    insert_event(tx, row.delivery_id, EventType.ATTEMPT, provider=provider.name)
    return Dispatch(row, row.attempts + 1, send_until)


def settle(tx: Transaction, provider: Provider, finished: Finished, randomness: float) -> None:
    """Record how an attempt ended: an acceptance always, a failure only while the lease is ours."""
    row, outcome = finished.dispatch.row, finished.outcome
    if lock_row(tx, row.id) is None:
        return  # erased while the mail was on the wire
    if outcome.kind is OutcomeKind.ACCEPTED:
        mark_row_sent(tx, row.delivery_id)
        mark_accepted(tx, row.delivery_id, outcome.provider_message_id)
    elif not _settle_failure(tx, provider, finished, randomness):
        return
    insert_event(
        tx,
        row.delivery_id,
        EventType(outcome.kind),
        provider=provider.name,
        provider_message_id=outcome.provider_message_id,
        duration_ms=finished.duration_ms,
        detail=outcome.words,
    )


def release_all(tx: Transaction, rows: Sequence[OutboxRow]) -> None:
    """Give back what was claimed and not begun."""
    for row in rows:
        # Who waits for one with others in hand meets, some day, who wants them in another order. What somebody else has
        # comes back by its lease.
        if lock_row_if_free(tx, row.id):
            release(tx, row)


def recover(services: Services, provider: Provider) -> int:
    """Bring back rows whose worker died, and end those whose link is long dead; returns how many."""
    total = 0
    while True:
        count = run_transaction(services.store, partial(_recover, settings=services.settings, provider=provider))
        total += count
        if count < RECOVER_BATCH:
            return total


def _settle_failure(tx: Transaction, provider: Provider, finished: Finished, randomness: float) -> bool:
    """False if the lease is not ours any more."""
    row, outcome = finished.dispatch.row, finished.outcome
    error = outcome.words
    backoff = policy.backoff_seconds(finished.dispatch.attempt, randomness)
    if outcome.kind is OutcomeKind.SYSTEMIC:
        # Behind the others: if it is this one mail that makes the provider say so, it must not block the rest.
        pause = min(policy.pause_seconds(1, outcome.retry_after_seconds), policy.LONGEST_BACKOFF_SECONDS)
        held = undo_dispatching(tx, row, due_at=tx.now + pause, error=error)
        return held and undo_sending(tx, row.delivery_id, outcome.code, row.first_dispatch_at)
    if outcome.kind is OutcomeKind.TEMPORARY:
        due_at = tx.now + max(backoff, min(outcome.retry_after_seconds or 0, policy.LONGEST_BACKOFF_SECONDS))
        held = requeue(tx, row, due_at=due_at, in_doubt=row.in_doubt, error=error)
        return held and mark_queued_again(tx, row.delivery_id, outcome.code)
    if outcome.kind is OutcomeKind.IN_DOUBT:
        return _settle_doubt(tx, provider, row, due_at=tx.now + backoff, error=error)
    held = end_held(tx, row, OutboxStatus.DEAD, error)
    return held and mark_settled(tx, row.delivery_id, policy.FAILURE_STATUS[outcome.kind], outcome.code)


def _settle_doubt(tx: Transaction, provider: Provider, row: OutboxRow, *, due_at: int, error: str) -> bool:
    """The provider may have the mail. With its key memory we ask again; without, one more copy and then no more."""
    key_window_open = _key_window_open(tx, row, provider)
    if policy.is_repeatable(was_in_doubt=row.in_doubt, key_window_open=key_window_open):
        held = requeue(tx, row, due_at=due_at, in_doubt=True, error=error)
        return held and mark_queued_again(tx, row.delivery_id, "in_doubt")
    return _bury(tx, row, "in_doubt")


def _key_window_open(tx: Transaction, row: OutboxRow, provider: Provider) -> bool | None:
    """Whether `provider` still knows the row's key; None if it keeps no keys, or another one was asked before."""
    if provider.key_window_seconds is None or row.provider not in (None, provider.name):
        return None
    return policy.is_key_window_open(row.first_dispatch_at, tx.now, provider.key_window_seconds)


def _supersede(tx: Transaction, row: OutboxRow) -> None:
    if end_held(tx, row, OutboxStatus.CANCELLED, None):
        mark_settled(tx, row.delivery_id, DeliveryStatus.SUPERSEDED, None)
        insert_event(tx, row.delivery_id, EventType.SUPERSEDED)


def _recover(tx: Transaction, settings: Settings, provider: Provider) -> int:
    expiry = {
        "horizon": tx.now + settings.lease_seconds + policy.CLOCK_TOLERANCE_SECONDS,
        "most_claims": policy.MOST_CLAIMS,
        "most": RECOVER_BATCH,
    }
    freed = expire_claims(tx, **expiry)
    expired = lock_expired(tx, **expiry)
    for row in expired:
        if row.status is OutboxStatus.DISPATCHING:
            # Its worker died with the mail on the wire.
            _settle_doubt(tx, provider, row, due_at=tx.now, error="the lease ran out on the wire")
            insert_event(tx, row.delivery_id, EventType.IN_DOUBT, provider=row.provider, detail="lease expired")
        else:
            _bury(tx, row, "crash_loop")
    stale = lock_stale(
        tx,
        expired_before=tx.now - policy.EXPIRED_LINK_GRACE_SECONDS,
        longest_backoff=policy.LONGEST_BACKOFF_SECONDS,
        most=RECOVER_BATCH,
    )
    for row in stale:
        if end_queued(tx, row, OutboxStatus.DEAD, "link_expired"):
            mark_settled(tx, row.delivery_id, DeliveryStatus.FAILED, "link_expired")
            insert_event(tx, row.delivery_id, EventType.FAILED, detail="link_expired")
    return max(freed, len(expired), len(stale))


def _bury(tx: Transaction, row: OutboxRow, code: str) -> bool:
    held = end_held(tx, row, OutboxStatus.DEAD, code)
    if held:
        mark_settled(tx, row.delivery_id, DeliveryStatus.FAILED, code)
        insert_event(tx, row.delivery_id, EventType.FAILED, detail=code)
    return held
