"""Removes what is past its retention, in bounded batches with a pause between, so that no visitor waits long.

Never evidence of open work: a mail still to be sent, a link that still confirms, a key that still promises a replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from waitlist.model import DAY_SECONDS
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.retention import (
    count_removable,
    erase_never_confirmed,
    purge_deliveries_that_never_left,
    purge_events,
    purge_outbox_rows,
    purge_requests,
    release_keys,
)

log = structlog.get_logger("waitlist.purge")

# A batch of this size holds a signup up by tens of milliseconds, one DELETE of everything by seconds.
BATCH_ROWS: Final = 1000
# Leaves the database to others for a while after each batch.
PAUSE_SECONDS: Final = 0.05
# One run ends after this, and the next goes on: a purge must not keep a worker from its mails.
LONGEST_SECONDS: Final = 30.0

# More than any table holds, and the most that a LIMIT of both databases takes without doubt.
EVERY_ROW: Final = 2**31 - 1

Verb = Callable[[Transaction, int, int], int]


def purge(services: Services, *, batch: int = BATCH_ROWS, longest_seconds: float = LONGEST_SECONDS) -> dict[str, int]:
    """Remove what may go; returns how many, by what they are in words. Ends early after `longest_seconds`."""
    give_up_at = time.monotonic() + longest_seconds
    counts: dict[str, int] = {}
    for what, verb, age in _steps(services.settings):
        counts[what] = 0
        while time.monotonic() < give_up_at:
            removed = run_transaction(services.store, partial(_remove, verb=verb, age=age, most=batch))
            counts[what] += removed
            if removed < batch:
                break
            time.sleep(PAUSE_SECONDS)
    # Also when nothing went: what a worker blanked since still lies in the log (promise 8), and a worker that follows
    # comes by no other way. An empty log costs nothing.
    services.store.forget_old_pages()
    if any(counts.values()):
        log.info("purged", counts=counts)
    return counts


def purgeable(services: Services, *, most: int = EVERY_ROW) -> dict[str, int]:
    """How many of each would go now, counted up to `most`; removes nothing."""

    def body(tx: Transaction) -> dict[str, int]:
        return {what: count_removable(tx, verb, tx.now - age, most) for what, verb, age in _steps(services.settings)}

    return run_query(services.store, body)


def _steps(settings: Settings) -> tuple[tuple[str, Verb, int], ...]:
    """What goes, how, and at what age in seconds; the order frees the ledger of keys before it is purged."""
    retention = settings.retention_days * DAY_SECONDS
    return (
        ("idempotency keys released", release_keys, 0),
        ("people who never confirmed", erase_never_confirmed, settings.pending_days * DAY_SECONDS),
        ("finished outbox rows", purge_outbox_rows, retention),
        ("delivery events", purge_events, retention),
        ("superseded mails that never left", purge_deliveries_that_never_left, retention),
        ("submissions", purge_requests, retention),
    )


def _remove(tx: Transaction, verb: Verb, age: int, most: int) -> int:
    return verb(tx, tx.now - age, most)
