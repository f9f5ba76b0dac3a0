"""The worker: claim, begin dispatch, send, settle. No transaction is open while a mail is on its way.

Acceptance is a fact, failure is a claim: an acceptance is recorded whatever became of the lease, a failure only by
the holder of the lease token. So a worker that wakes up late can neither undo a success nor cause a second send.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import structlog

from waitlist import delivery_events, policy
from waitlist.errors import StorageBusy
from waitlist.mail import deadline
from waitlist.mail.base import Mail, Sender, UnfitMail
from waitlist.model import DeliveryStatus, EventType, OutboxStatus, Outcome, OutcomeKind
from waitlist.purge import purge
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
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
    next_moment,
    release,
    requeue,
    undo_dispatching,
)
from waitlist.tokens import new_id
from waitlist.version import __version__

log = structlog.get_logger("waitlist.outbox")

T = TypeVar("T")
J = TypeVar("J")

HOUR_SECONDS: Final = 3600
# Rows recovered in one transaction: small enough not to keep a visitor waiting.
RECOVER_BATCH: Final = 200
# A batch is given back after this, so that a slow provider does not keep the worker from recovering others' rows.
BATCH_SECONDS: Final = 5.0
# An idle worker removes what is past its retention, a little each minute: a new mail must not wait for it.
PURGE_EVERY_SECONDS: Final = 60.0
PURGE_SECONDS: Final = 0.2
# Without any news an idle worker looks again after this: for leases of others that ran out.
IDLE_SECONDS: Final = 5.0
# A database that is away is asked again so often.
STORAGE_PAUSE_SECONDS: Final = 1.0


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


@dataclass
class Counts:
    """What a drain did, by outcome; `fault` is the systemic fault that stopped it, in words."""

    outcomes: Counter[OutcomeKind] = field(default_factory=Counter)
    fault: str | None = None
    retry_after_seconds: int | None = None

    @property
    def attempts(self) -> int:
        return self.outcomes.total()

    def add(self, other: Counts) -> None:
        self.outcomes += other.outcomes
        self.fault = other.fault
        self.retry_after_seconds = other.retry_after_seconds


@dataclass(frozen=True)
class Worker:
    """One connection to a provider and the name under which it holds leases. Lives in one thread."""

    services: Services
    sender: Sender
    owner: str
    batch: int
    stop: threading.Event
    on_mail: Callable[[Outcome], None] = lambda _outcome: None


def follow(worker: Worker) -> None:
    """Drain whenever there is something to do, until `worker.stop` is set. Faults pause it and end by themselves."""
    faults = 0
    # Not at once: a machine that has just started may not know the time yet, and would erase people before theirs.
    purge_at = time.monotonic() + PURGE_EVERY_SECONDS
    while not worker.stop.is_set():
        try:
            with worker.services.store.watch() as wait_for_change:
                while not worker.stop.is_set():
                    counts = drain(worker)
                    if not counts.fault or counts.outcomes[OutcomeKind.ACCEPTED]:
                        faults = 0  # a success in between: the provider works, and the pauses begin anew
                    if counts.fault:
                        faults += 1
                        worker.stop.wait(policy.pause_seconds(faults, counts.retry_after_seconds))
                        continue
                    if time.monotonic() >= purge_at:
                        purge(worker.services, longest_seconds=PURGE_SECONDS)
                        purge_at = time.monotonic() + PURGE_EVERY_SECONDS
                    if not worker.stop.is_set():
                        wait_for_change(_idle_seconds(worker), worker.stop.is_set)
        except StorageBusy as error:
            log.warning("storage_busy", error=str(error))
            worker.stop.wait(STORAGE_PAUSE_SECONDS)
        except Exception as error:
            # A bug of ours. It must not end this thread: nobody would notice while those of other connections go on.
            faults += 1
            log.error("worker_failed", owner=worker.owner, error=type(error).__name__, where=_frames(error))
            worker.stop.wait(policy.pause_seconds(faults, None))


def follow_all(workers: Sequence[Worker]) -> None:
    """One thread per connection; returns when all have stopped."""
    _in_threads(workers, follow)
    _close(workers)


def drain_all(workers: Sequence[Worker], limit: int | None = None) -> Counts:
    """Drain over several connections at once; `limit` holds for all of them together."""
    shares = [
        None if limit is None else limit // len(workers) + (n < limit % len(workers)) for n in range(len(workers))
    ]
    results = _in_threads(list(zip(workers, shares, strict=True)), lambda job: drain(*job))
    _close(workers)
    total = Counts()
    for counts in results:
        total.outcomes += counts.outcomes
        total.fault = total.fault or counts.fault
    if total.attempts:
        workers[0].services.store.forget_old_pages()
    return total


def drain(worker: Worker, limit: int | None = None) -> Counts:
    """Send what is due now, at most `limit` attempts, until nothing is left, a systemic fault, or `worker.stop`."""
    counts = Counts()
    delivery_events.drop_stale(worker.services)
    while not worker.stop.is_set() and not counts.fault:
        # Between batches, since no mail is on the wire then: events that came before their send was recorded.
        delivery_events.apply_parked(worker.services)
        # Before each batch: a long queue must not keep what a dead worker held.
        recover(worker.services, worker.sender)
        most = worker.batch if limit is None else min(worker.batch, limit - counts.attempts)
        rows = claim(worker.services, worker.owner, most) if most > 0 else []
        if not rows:
            break
        counts.add(send_batch(worker, rows))
    return counts


def send_batch(worker: Worker, rows: Sequence[OutboxRow]) -> Counts:
    """Send claimed rows one after the other; the end of one mail and the begin of the next share a commit."""
    counts = Counts()
    finished: Finished | None = None
    waiting = list(rows)
    # Half a lease is kept for the mail that is on the wire when the batch is given back.
    give_back_at = time.monotonic() + min(BATCH_SECONDS, worker.services.settings.lease_seconds / 2)
    while waiting and not worker.stop.is_set() and not counts.fault and time.monotonic() < give_back_at:
        dispatch = _record(worker, finished, waiting.pop(0))
        finished = None
        if dispatch is not None:
            finished = _attempt(worker, dispatch)
            _count(worker, counts, finished)
    if finished is not None:
        _record(worker, finished, None)
    if waiting:
        _persist(worker, partial(_release_all, rows=waiting))
    return counts


def _close(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.sender.close()


def _in_threads(jobs: Sequence[J], run: Callable[[J], T]) -> list[T]:
    if len(jobs) == 1:
        return [run(jobs[0])]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


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


def send_test_mail(services: Services, recipient: str) -> Outcome:
    """Hand one mail to the provider, past the outbox: to see that mail leaves. It holds no link."""
    mail = services.composer.test(recipient, delivery_id=(delivery_id := new_id()), now=services.clock())
    sender = services.make_sender()
    try:
        return sender.send(mail, key=delivery_id, deadline_seconds=services.settings.lease_seconds / 2)
    finally:
        sender.close()


def recover(services: Services, sender: Sender) -> int:
    """Bring back rows whose worker died, and end those whose link is long dead; returns how many."""
    total = 0
    while True:
        count = run_transaction(services.store, partial(_recover, settings=services.settings, sender=sender))
        total += count
        if count < RECOVER_BATCH:
            return total


def begin_dispatch(
    tx: Transaction,
    settings: Settings,
    provider: str,
    claimed: OutboxRow,
    *,
    key_window_seconds: int | None = None,
    send_until: float,
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
    if row.in_doubt and _key_window_open(tx, row, provider, key_window_seconds) is False:
        # It was asked again in time, but the worker or the provider was away until the key was forgotten.
        _bury(tx, row, "in_doubt")
        return None
    if not mark_dispatching(tx, row, tx.now + settings.lease_seconds):
        return None
    mark_sending(tx, row.delivery_id, provider)
    insert_event(tx, row.delivery_id, EventType.ATTEMPT, provider=provider)
    return Dispatch(row, row.attempts + 1, send_until)


def settle(tx: Transaction, sender: Sender, finished: Finished, randomness: float) -> None:
    """Record how an attempt ended: an acceptance always, a failure only while the lease is ours."""
    row, outcome = finished.dispatch.row, finished.outcome
    if lock_row(tx, row.id) is None:
        return  # erased while the mail was on the wire
    if outcome.kind is OutcomeKind.ACCEPTED:
        mark_row_sent(tx, row.delivery_id)
        mark_accepted(tx, row.delivery_id, outcome.provider_message_id)
    elif not _settle_failure(tx, sender, finished, randomness):
        return
    insert_event(
        tx,
        row.delivery_id,
        EventType(outcome.kind),
        provider=sender.provider,
        provider_message_id=outcome.provider_message_id,
        duration_ms=finished.duration_ms,
        detail=outcome.words,
    )


def _settle_failure(tx: Transaction, sender: Sender, finished: Finished, randomness: float) -> bool:
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
        return _settle_doubt(tx, sender, row, due_at=tx.now + backoff, error=error)
    held = end_held(tx, row, OutboxStatus.DEAD, error)
    return held and mark_settled(tx, row.delivery_id, policy.FAILURE_STATUS[outcome.kind], outcome.code)


def _settle_doubt(tx: Transaction, sender: Sender, row: OutboxRow, *, due_at: int, error: str) -> bool:
    """The provider may have the mail. With its key memory we ask again; without, one more copy and then no more."""
    key_window_open = _key_window_open(tx, row, sender.provider, sender.key_window_seconds)
    if policy.is_repeatable(was_in_doubt=row.in_doubt, key_window_open=key_window_open):
        held = requeue(tx, row, due_at=due_at, in_doubt=True, error=error)
        return held and mark_queued_again(tx, row.delivery_id, "in_doubt")
    return _bury(tx, row, "in_doubt")


def _key_window_open(tx: Transaction, row: OutboxRow, provider: str, key_window_seconds: int | None) -> bool | None:
    """Whether `provider` still knows the row's key; None if it keeps no keys, or another one was asked before."""
    if key_window_seconds is None or row.provider not in (None, provider):
        return None
    return policy.is_key_window_open(row.first_dispatch_at, tx.now, key_window_seconds)


def _recover(tx: Transaction, settings: Settings, sender: Sender) -> int:
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
            _settle_doubt(tx, sender, row, due_at=tx.now, error="the lease ran out on the wire")
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


def _supersede(tx: Transaction, row: OutboxRow) -> None:
    if end_held(tx, row, OutboxStatus.CANCELLED, None):
        mark_settled(tx, row.delivery_id, DeliveryStatus.SUPERSEDED, None)
        insert_event(tx, row.delivery_id, EventType.SUPERSEDED)


def _attempt(worker: Worker, dispatch: Dispatch) -> Finished:
    """One call to the provider; whatever happens in it is this mail's outcome and stops no other."""
    started = time.perf_counter()
    row = dispatch.row
    try:
        outcome = _send(worker, dispatch)
    except Exception as error:
        # A bug of ours, and nobody knows how far the mail got.
        log.error("sender_failed", delivery_id=row.delivery_id, error=type(error).__name__, where=_frames(error))
        outcome = Outcome(OutcomeKind.IN_DOUBT, "sender_error", type(error).__name__)
    finished = Finished(dispatch, outcome, duration_ms=round((time.perf_counter() - started) * 1000))
    log.info(
        "attempt",
        outbox_id=row.id,
        subscriber_id=row.subscriber_id,
        template=row.template,
        delivery_id=row.delivery_id,
        operation_id=row.signup_request_id,
        attempt=dispatch.attempt,
        app_version=__version__,
        provider=worker.sender.provider,
        outcome=outcome.kind.value,
        code=outcome.code,
        duration_ms=finished.duration_ms,
    )
    return finished


def _send(worker: Worker, dispatch: Dispatch) -> Outcome:
    row = dispatch.row
    if hashlib.sha256(row.message.encode()).hexdigest() != row.payload_hash:
        return Outcome(OutcomeKind.FAILED, "damaged", "the frozen message is not the one that was queued")
    try:
        mail = Mail.from_json(row.recipient, row.message)
        left_seconds = dispatch.send_until - deadline.now()
        if left_seconds <= 0:
            # This process, or the whole machine, stood still since the begin was committed.
            return Outcome(OutcomeKind.TEMPORARY, "late", "nothing was sent")
        return worker.sender.send(mail, key=row.delivery_id, deadline_seconds=left_seconds)
    except UnfitMail as error:
        return Outcome(OutcomeKind.FAILED, "damaged", str(error))


def _frames(error: Exception) -> list[str]:
    """Where it happened, without its text, which may hold an address."""
    return traceback.format_tb(error.__traceback__)


def _count(worker: Worker, counts: Counts, finished: Finished) -> None:
    outcome = finished.outcome
    counts.outcomes[outcome.kind] += 1
    if outcome.kind is OutcomeKind.SYSTEMIC:
        counts.fault = outcome.words
        counts.retry_after_seconds = outcome.retry_after_seconds
    worker.on_mail(outcome)


def _record(worker: Worker, finished: Finished | None, upcoming: OutboxRow | None) -> Dispatch | None:
    """End one mail and begin the next, in one commit where nobody else has the next one's row."""
    settings, sender, randomness = worker.services.settings, worker.sender, random.random()
    # Before the lease of this attempt begins, so that it ends in time whatever comes between: half the lease, since a
    # server that dribbles bytes must not outlive it.
    send_until = deadline.now() + settings.lease_seconds / 2

    def begin(tx: Transaction) -> Dispatch | None:
        if upcoming is None:
            return None
        return begin_dispatch(
            tx,
            settings,
            sender.provider,
            upcoming,
            key_window_seconds=sender.key_window_seconds,
            send_until=send_until,
        )

    def end_and_begin(tx: Transaction) -> tuple[Dispatch | None, bool]:
        if finished is not None:
            settle(tx, sender, finished, randomness)
            # Two rows of one person, on two lists, may be wanted by an erasure or a complaint in the other order. So
            # nobody waits here for a second row with the first one in hand.
            if upcoming is not None and not lock_row_if_free(tx, upcoming.id):
                return None, False
        return begin(tx), True

    dispatch, has_begun = _persist(worker, end_and_begin)
    if not has_begun:
        dispatch = _persist(worker, begin)
    return dispatch


def _release_all(tx: Transaction, rows: Sequence[OutboxRow]) -> None:
    for row in rows:
        # Waiting for one with others in hand would deadlock, as above. What somebody else has comes back by its lease.
        if lock_row_if_free(tx, row.id):
            release(tx, row)


def _persist(worker: Worker, body: Callable[[Transaction], T]) -> T:
    """Commit `body` even if the database is away for a while: what a provider answered must not be forgotten.

    Gives up after a lease; then the row comes back as in doubt, as after a crash. A stop does not shorten the wait.
    """
    give_up_at = time.monotonic() + worker.services.settings.lease_seconds
    while True:
        try:
            return run_transaction(worker.services.store, body)
        except StorageBusy:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(STORAGE_PAUSE_SECONDS)


def _idle_seconds(worker: Worker) -> float:
    """Until the next moment at which there may be work. What is due already was not for us: its link is too old, or
    the hourly budget is used up.
    """

    def body(tx: Transaction) -> float:
        moment = next_moment(tx)
        return IDLE_SECONDS if moment is None else min(IDLE_SECONDS, moment - tx.now)

    return run_query(worker.services.store, body)
