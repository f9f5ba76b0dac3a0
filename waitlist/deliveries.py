"""A delivery and its outbox row move together: here they are made, superseded, or proved to have been accepted.

Each function is part of somebody's transaction. What becomes of a mail on its way is in `dispatch.py`.
"""

from __future__ import annotations

from waitlist import policy
from waitlist.errors import Restart
from waitlist.model import OPEN_DELIVERY, Delivery, DeliveryStatus, EventType, PreparedMail, Reason, Submission
from waitlist.store import Transaction
from waitlist.store.deliveries import insert_delivery, mark_accepted, mark_settled
from waitlist.store.events import insert_event
from waitlist.store.outbox import cancel_outbox_row, insert_outbox_row, mark_row_sent


def enqueue(
    tx: Transaction,
    submission: Submission,
    prepared: PreparedMail,
    *,
    subscriber_id: str,
    latest: Delivery | None,
    reason: Reason,
) -> bool:
    """Write delivery and outbox row; False if another transaction was first (one open mail, one retry a failure)."""
    inserted = insert_delivery(
        tx,
        submission,
        prepared,
        subscriber_id=subscriber_id,
        previous=latest,
        retry_of=latest if policy.is_retryable(latest) else None,
        reason=reason,
    )
    if inserted:
        insert_outbox_row(tx, prepared, submission.email)
        tx.notify_worker()
    return inserted


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


def prove_acceptance(tx: Transaction, delivery: Delivery, *, by: str = "its link") -> None:
    """Somebody has the mail in hand, so a provider took it, whatever became of the attempt's answer."""
    mark_row_sent(tx, delivery.id)
    if mark_accepted(tx, delivery.id):
        insert_event(tx, delivery.id, EventType.ACCEPTED, detail=f"proved by {by}")
