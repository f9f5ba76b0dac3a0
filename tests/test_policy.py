"""Rules as tables: a row shows the arithmetic."""

from __future__ import annotations

import pytest

from tests.factories import START, a_delivery, a_subscriber
from waitlist.model import (
    ConfirmOutcome,
    CooldownBounds,
    Decision,
    DeliveryStatus,
    OutboxStatus,
    OutcomeKind,
    Reason,
    SubscriberStatus,
)
from waitlist.policy import (
    EVENT_RANK,
    FAILURE_STATUS,
    backoff_seconds,
    cooldown_bounds,
    decide_confirmation,
    decide_reason,
    decide_refusal,
    is_key_window_open,
    is_link_fresh,
    is_repeatable,
    is_retryable,
    next_mail_at,
    pause_seconds,
)

PENDING, CONFIRMED, UNSUBSCRIBED = SubscriberStatus
ALL_BUT_RETRYABLE = [
    DeliveryStatus.QUEUED,
    DeliveryStatus.SENDING,
    DeliveryStatus.SENT,
    DeliveryStatus.DELIVERED,
    DeliveryStatus.COMPLAINED,
    DeliveryStatus.SUPERSEDED,
]


def test_cooldown_reaches_back_its_length_and_forward_the_tolerance_of_clocks() -> None:
    assert cooldown_bounds(START, 600) == CooldownBounds(oldest=START - 600, newest=START + 300)


@pytest.mark.parametrize(
    ("rotated_at", "now", "expected"),
    [
        # rotated        now            the next mail may leave
        (None, START, START),
        (START, START, START + 600),
        (START, START + 599, START + 600),
        (START, START + 600, START + 600),
        (START, START + 601, START + 601),
        # This machine's clock is behind the one that rotated: up to 300 s are believed, more is a wrong clock.
        (START + 1, START, START + 1 + 600),
        (START + 300, START, START + 300 + 600),
        (START + 301, START, START),
        (START + 86_400, START, START),
    ],
)
def test_next_mail_waits_for_the_cooldown(rotated_at: int | None, now: int, expected: int) -> None:
    assert next_mail_at(rotated_at, now, 600) == expected


@pytest.mark.parametrize("status", [DeliveryStatus.BOUNCED, DeliveryStatus.FAILED, DeliveryStatus.REJECTED])
def test_mail_known_not_to_have_arrived_is_retryable(status: DeliveryStatus) -> None:
    assert is_retryable(a_delivery(status=status))


@pytest.mark.parametrize("status", ALL_BUT_RETRYABLE)
def test_no_other_mail_is_retryable(status: DeliveryStatus) -> None:
    assert not is_retryable(a_delivery(status=status))


def test_without_a_mail_there_is_nothing_to_retry() -> None:
    assert not is_retryable(None)


@pytest.mark.parametrize(
    ("before", "latest", "expected"),
    [
        # who stood there before                             their newest mail                       why a new one
        (None, None, Reason.SIGNUP),
        (a_subscriber(), a_delivery(status="sent"), Reason.COOLDOWN_RESEND),
        (a_subscriber(), a_delivery(status="superseded"), Reason.COOLDOWN_RESEND),
        (a_subscriber(), a_delivery(status="bounced"), Reason.FAILURE_RETRY),
        (a_subscriber(), a_delivery(status="failed"), Reason.FAILURE_RETRY),
        (a_subscriber(), a_delivery(status="rejected"), Reason.FAILURE_RETRY),
        (a_subscriber(), a_delivery(status="complained"), Reason.COOLDOWN_RESEND),
        (a_subscriber(confirmation_rotated_at=None), None, Reason.SIGNUP),
        (a_subscriber(status=UNSUBSCRIBED, confirmation_rotated_at=None), a_delivery(status="sent"), Reason.SIGNUP),
        (
            a_subscriber(status=UNSUBSCRIBED, confirmation_rotated_at=None),
            a_delivery(status="bounced"),
            Reason.FAILURE_RETRY,
        ),
    ],
)
def test_reason_of_a_new_mail(before, latest, expected) -> None:
    assert decide_reason(before, latest) is expected


@pytest.mark.parametrize(
    ("status", "latest", "expected"),
    [
        (CONFIRMED, DeliveryStatus.SENT, Decision.ALREADY_CONFIRMED),
        # Precedence: confirmed goes first, whatever became of the mail.
        (CONFIRMED, DeliveryStatus.SENDING, Decision.ALREADY_CONFIRMED),
        (CONFIRMED, DeliveryStatus.BOUNCED, Decision.ALREADY_CONFIRMED),
        (PENDING, DeliveryStatus.SENDING, Decision.IN_FLIGHT),
        (PENDING, DeliveryStatus.QUEUED, Decision.COOLDOWN),
        (PENDING, DeliveryStatus.SENT, Decision.COOLDOWN),
        (PENDING, DeliveryStatus.COMPLAINED, Decision.COOLDOWN),
        (PENDING, None, Decision.COOLDOWN),
    ],
)
def test_reason_of_no_mail(status: SubscriberStatus, latest: DeliveryStatus | None, expected: Decision) -> None:
    delivery = a_delivery(status=latest) if latest else None

    assert decide_refusal(a_subscriber(status=status), delivery) is expected


@pytest.mark.parametrize(
    ("status", "expires_at", "now", "expected"),
    [
        (PENDING, START + 1, START, ConfirmOutcome.CONFIRMED_NOW),
        (PENDING, START, START, ConfirmOutcome.EXPIRED),
        (PENDING, START - 1, START, ConfirmOutcome.EXPIRED),
        # Precedence: left, already confirmed, expired.
        (UNSUBSCRIBED, START + 1, START, ConfirmOutcome.LEFT),
        (UNSUBSCRIBED, START - 1, START, ConfirmOutcome.LEFT),
        (CONFIRMED, START + 1, START, ConfirmOutcome.ALREADY_CONFIRMED),
        (CONFIRMED, START - 1, START, ConfirmOutcome.ALREADY_CONFIRMED),
    ],
)
def test_outcome_of_a_link(status: SubscriberStatus, expires_at: int, now: int, expected: ConfirmOutcome) -> None:
    delivery = a_delivery(token_expires_at=expires_at)

    assert decide_confirmation(delivery, a_subscriber(status=status), now) is expected


def test_older_unexpired_link_confirms_as_well_as_the_newest() -> None:
    older = a_delivery(status=DeliveryStatus.SUPERSEDED, token_hash="older", token_expires_at=START + 1)
    subscriber = a_subscriber(confirmation_token_hash="newest")

    assert decide_confirmation(older, subscriber, START) is ConfirmOutcome.CONFIRMED_NOW


@pytest.mark.parametrize(
    ("life", "left", "is_fresh"),
    [
        # at least min(3600, life / 4) seconds left
        (86_400, 86_400, True),
        (86_400, 3600, True),
        (86_400, 3599, False),
        (1200, 1200 / 4, True),
        (1200, 1200 / 4 - 1, False),
        (14_400, 3600, True),  # both say the same
        (14_400, 3599, False),
        (86_400, 0, False),
        (86_400, -1, False),
    ],
)
def test_link_is_worth_sending_while_an_hour_or_a_quarter_of_its_life_is_left(life, left, is_fresh) -> None:
    assert is_link_fresh(START + life, START, START + life - int(left)) is is_fresh


@pytest.mark.parametrize(
    ("attempts", "randomness", "expected"),
    [
        # 15 * 2^(n-1), half fixed and half random, at most 900
        (1, 0, 15 / 2),
        (1, 1, 15),
        (2, 0, 30 / 2),
        (2, 0.5, 30 / 2 + 30 / 4),
        (2, 1, 15 * 2),
        (3, 1, 15 * 4),
        (6, 1, 15 * 32),
        (7, 0, 900 / 2),  # 15 * 64 = 960 > 900
        (7, 1, 900),
        (1_000_000, 1, 900),
    ],
)
def test_backoff_doubles_to_a_quarter_of_an_hour(attempts: int, randomness: float, expected: float) -> None:
    assert backoff_seconds(attempts, randomness) == round(expected)


@pytest.mark.parametrize(
    ("faults", "retry_after", "expected"),
    [
        (1, None, 5),
        (2, None, 5 * 2),
        (4, None, 5 * 8),
        (5, None, 60),  # 5 * 16 = 80 > 60
        (1_000_000, None, 60),
        (1, 0, 5),
        (1, 30, 30),
        (5, 30, 60),  # ours is longer
        (1, 3600, 3600),
        (1, 86_400, 3600),  # a day is a mistake or an attack
    ],
)
def test_pause_after_systemic_faults(faults: int, retry_after: int | None, expected: int) -> None:
    assert pause_seconds(faults, retry_after) == expected


@pytest.mark.parametrize(
    ("first_dispatch_at", "now", "is_open"),
    [
        (None, START, True),
        (START, START, True),
        (START, START + 24 * 3600 - 3600 - 1, True),
        (START, START + 24 * 3600 - 3600, False),  # the margin of an hour
        (START, START + 24 * 3600, False),
    ],
)
def test_key_window_closes_an_hour_early(first_dispatch_at: int | None, now: int, is_open: bool) -> None:
    assert is_key_window_open(first_dispatch_at, now, 24 * 3600) is is_open


@pytest.mark.parametrize(
    ("was_in_doubt", "key_window_open", "expected"),
    [
        # No key: one more copy, never a third.
        (False, None, True),
        (True, None, False),
        # A key makes a repeat harmless, as long as the provider remembers it.
        (False, True, True),
        (True, True, True),
        (False, False, False),
        (True, False, False),
    ],
)
def test_doubt_costs_at_most_one_more_copy(was_in_doubt: bool, key_window_open: bool | None, expected: bool) -> None:
    assert is_repeatable(was_in_doubt=was_in_doubt, key_window_open=key_window_open) is expected


def test_refusals_have_their_status() -> None:
    assert FAILURE_STATUS == {
        OutcomeKind.REJECTED: DeliveryStatus.REJECTED,
        OutcomeKind.FAILED: DeliveryStatus.FAILED,
    }


def test_provider_events_only_move_forward() -> None:
    in_order = [
        {DeliveryStatus.SUPERSEDED, DeliveryStatus.FAILED, DeliveryStatus.REJECTED},
        {DeliveryStatus.SENT},
        {DeliveryStatus.DELIVERED},
        {DeliveryStatus.BOUNCED},
        {DeliveryStatus.COMPLAINED},
    ]
    ranks = [{EVENT_RANK[status] for status in statuses} for statuses in in_order]

    assert all(len(rank) == 1 for rank in ranks)
    assert [rank.copy().pop() for rank in ranks] == sorted({rank.copy().pop() for rank in ranks})
    assert set(EVENT_RANK) == set(DeliveryStatus)


def test_words_of_the_outbox_are_those_of_the_contract() -> None:
    assert {str(status) for status in OutboxStatus} == {"queued", "leased", "dispatching", "sent", "dead", "cancelled"}
