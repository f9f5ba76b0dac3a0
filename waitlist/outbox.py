"""The worker: the loop around `dispatch.py`, and the call to the provider. No transaction is open while a mail is on its
way.
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
from waitlist.dispatch import Dispatch, Finished, Provider, begin_dispatch, claim, recover, release_all, settle
from waitlist.errors import StorageBusy
from waitlist.mail import deadline
from waitlist.mail.base import Mail, Sender, UnfitMail
from waitlist.model import Outcome, OutcomeKind
from waitlist.purge import purge
from waitlist.services import Services
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.outbox import OutboxRow, lock_row_if_free, next_moment
from waitlist.version import __version__

log = structlog.get_logger("waitlist.outbox")

T = TypeVar("T")
J = TypeVar("J")

# A batch is given back after this, so that a slow provider does not keep the worker from recovering others' rows.
BATCH_SECONDS: Final = 5.0
# An idle worker removes what is past its retention, a little each minute: a new mail must not wait for it.
PURGE_EVERY_SECONDS: Final = 60.0
PURGE_SECONDS: Final = 0.2
# Without any news an idle worker looks again after this: for leases of others that ran out.
IDLE_SECONDS: Final = 5.0
# Times are whole seconds, so what is due in this one is looked for again after this.
SOON_SECONDS: Final = 0.5
# A database that is away is asked again so often.
STORAGE_PAUSE_SECONDS: Final = 1.0


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

    @property
    def provider(self) -> Provider:
        return Provider(self.sender.provider, self.sender.key_window_seconds)


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
        recover(worker.services, worker.provider)
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
        _persist(worker, partial(release_all, rows=waiting))
    return counts


def _close(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.sender.close()


def _in_threads(jobs: Sequence[J], run: Callable[[J], T]) -> list[T]:
    if len(jobs) == 1:
        return [run(jobs[0])]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


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
    settings, provider, randomness = worker.services.settings, worker.provider, random.random()
    # Before the lease of this attempt begins, so that it ends in time whatever comes between: half the lease, since a
    # server that dribbles bytes must not outlive it.
    send_until = deadline.now() + settings.lease_seconds / 2

    def begin(tx: Transaction) -> Dispatch | None:
        if upcoming is None:
            return None
        return begin_dispatch(tx, settings, provider, upcoming, send_until=send_until)

    def end_and_begin(tx: Transaction) -> tuple[Dispatch | None, bool]:
        if finished is not None:
            settle(tx, provider, finished, randomness)
            # Two rows of one person, on two lists, may be wanted by an erasure or a complaint in the other order. So
            # nobody waits here for a second row with the first one in hand.
            if upcoming is not None and not lock_row_if_free(tx, upcoming.id):
                return None, False
        return begin(tx), True

    dispatch, has_begun = _persist(worker, end_and_begin)
    if not has_begun:
        dispatch = _persist(worker, begin)
    return dispatch


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
    """Until the next moment at which there may be work. What was due before was not for us: its link is too old, or
    the hourly budget is used up. What falls due in this second may be younger than our last claim.
    """

    def body(tx: Transaction) -> float:
        moment = next_moment(tx)
        return IDLE_SECONDS if moment is None else min(IDLE_SECONDS, max(SOON_SECONDS, moment - tx.now))

    return run_query(worker.services.store, body)
