"""The rules of time and number as pure functions: cooldown, caps, back-off, links, outcomes.

Takes `now` and values, returns values. Imports the standard library and `model` only.
"""

from __future__ import annotations

from typing import Final

from waitlist.model import (
    DAY_SECONDS,
    RETRYABLE_DELIVERY,
    ConfirmOutcome,
    CooldownBounds,
    Decision,
    Delivery,
    DeliveryStatus,
    OutcomeKind,
    Reason,
    Subscriber,
    SubscriberStatus,
)

# A stored time this far ahead of the clock was written by a wrong clock; clocks of one fleet differ by less.
CLOCK_TOLERANCE_SECONDS: Final = 300
THIRTY_DAYS_SECONDS: Final = 30 * DAY_SECONDS

# Back-off after a temporary failure: 15 s, doubling, at most 15 minutes.
FIRST_BACKOFF_SECONDS: Final = 15
LONGEST_BACKOFF_SECONDS: Final = 900
# Pause after a systemic fault: the provider or our access to it is broken, so one probe at a time is enough.
FIRST_PAUSE_SECONDS: Final = 5
LONGEST_PAUSE_SECONDS: Final = 60
# A provider's Retry-After beyond an hour is a mistake or an attack; the next probe will tell.
LONGEST_RETRY_AFTER_SECONDS: Final = 3600
# Leases that expired before dispatch: so many mean that this row kills its worker.
MOST_CLAIMS: Final = 20
# A mail whose link has less than this left, or less than a quarter of its life, is not worth sending.
LINK_MARGIN_SECONDS: Final = 3600
LINK_MARGIN_FRACTION: Final = 4
# A queued mail fails for age only so long after its link expired: a worker whose clock is a day ahead marks nobody.
EXPIRED_LINK_GRACE_SECONDS: Final = 48 * 3600
# An hour of a provider's key window is kept back for clocks that differ and for the request itself.
KEY_WINDOW_MARGIN_SECONDS: Final = 3600


def cooldown_bounds(now: int, cooldown_seconds: int) -> CooldownBounds:
    return CooldownBounds(oldest=now - cooldown_seconds, newest=now + CLOCK_TOLERANCE_SECONDS)


def next_mail_at(rotated_at: int | None, now: int, cooldown_seconds: int) -> int:
    """When the next submission may send a mail, for a pending subscriber whose last mail did not fail."""
    bounds = cooldown_bounds(now, cooldown_seconds)
    if rotated_at is None or not bounds.oldest < rotated_at <= bounds.newest:
        return now
    return rotated_at + cooldown_seconds


def is_retryable(latest: Delivery | None) -> bool:
    """Whether the newest mail is known not to have arrived. `complained` is not: it arrived, and was not wanted."""
    return latest is not None and latest.status in RETRYABLE_DELIVERY


def decide_reason(before: Subscriber | None, latest: Delivery | None) -> Reason:
    """Why a new mail is made for somebody who stood in the list as `before` (None: not at all)."""
    if is_retryable(latest):
        return Reason.FAILURE_RETRY
    is_resend = before and before.status is SubscriberStatus.PENDING and before.confirmation_rotated_at is not None
    return Reason.COOLDOWN_RESEND if is_resend else Reason.SIGNUP


def decide_refusal(subscriber: Subscriber, latest: Delivery | None) -> Decision:
    """Why a submission that neither rotated nor retried sends nothing."""
    if subscriber.status is SubscriberStatus.CONFIRMED:
        return Decision.ALREADY_CONFIRMED
    if latest is not None and latest.status is DeliveryStatus.SENDING:
        return Decision.IN_FLIGHT
    return Decision.COOLDOWN


def decide_confirmation(delivery: Delivery, subscriber: Subscriber, now: int) -> ConfirmOutcome:
    """What the link of `delivery` comes to. An older link that has not expired is as good as the newest."""
    if subscriber.status is SubscriberStatus.UNSUBSCRIBED:
        return ConfirmOutcome.LEFT
    if subscriber.status is SubscriberStatus.CONFIRMED:
        return ConfirmOutcome.ALREADY_CONFIRMED
    if delivery.token_expires_at <= now:
        return ConfirmOutcome.EXPIRED
    return ConfirmOutcome.CONFIRMED_NOW


def backoff_seconds(attempts: int, randomness: float) -> int:
    """How long to wait after `attempts` >= 1 tries; half of it is fixed, half scaled by `randomness` in [0, 1]."""
    whole: int = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(attempts - 1, 10))
    return round(whole / 2 + whole / 2 * randomness)


def pause_seconds(faults: int, retry_after_seconds: int | None) -> int:
    """How long claiming pauses after `faults` >= 1 systemic faults in a row; the provider's own wish counts if longer."""
    own: int = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(faults - 1, 10))
    return max(own, min(retry_after_seconds or 0, LONGEST_RETRY_AFTER_SECONDS))


def is_key_window_open(first_dispatch_at: int | None, now: int, window_seconds: int) -> bool:
    """Whether a provider still knows the key of a mail first dispatched then."""
    return first_dispatch_at is None or now - first_dispatch_at < window_seconds - KEY_WINDOW_MARGIN_SECONDS


def is_link_fresh(expires_at: int, created_at: int, now: int) -> bool:
    """Whether a mail with this link is still worth sending. The claim asks the same in SQL, with the same constants."""
    left = expires_at - now
    return left > 0 and (left >= LINK_MARGIN_SECONDS or left * LINK_MARGIN_FRACTION >= expires_at - created_at)


def is_repeatable(*, was_in_doubt: bool, key_window_open: bool | None) -> bool:
    """Whether a mail in doubt may be sent again. `key_window_open` is None where the provider keeps no keys: then one
    more copy, and never a third.
    """
    return not was_in_doubt if key_window_open is None else key_window_open


FAILURE_STATUS: Final = {OutcomeKind.REJECTED: DeliveryStatus.REJECTED, OutcomeKind.FAILED: DeliveryStatus.FAILED}

# How far a provider's event may move a delivery: only to a greater rank.
EVENT_RANK: Final = {
    DeliveryStatus.QUEUED: 0,
    DeliveryStatus.SENDING: 0,
    DeliveryStatus.SUPERSEDED: 1,
    DeliveryStatus.FAILED: 1,
    DeliveryStatus.REJECTED: 1,
    DeliveryStatus.SENT: 2,
    DeliveryStatus.DELIVERED: 3,
    DeliveryStatus.BOUNCED: 4,
    DeliveryStatus.COMPLAINED: 5,
}


def statuses_before(status: DeliveryStatus) -> tuple[DeliveryStatus, ...]:
    """Those that an event for `status` moves on from."""
    return tuple(earlier for earlier, rank in EVENT_RANK.items() if rank < EVENT_RANK[status])
