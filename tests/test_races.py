"""Several real processes at the same moment on one real database: still one subscriber and one mail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.factories import START, FakeClock, FakeSender, make_list
from tests.processes import run_at_once
from tests.scenes import (
    assert_sound,
    count,
    deliveries,
    drain,
    join,
    ledger,
    refused,
    services_at,
    subscriber,
    token_in,
)
from waitlist import confirmation
from waitlist.model import ConfirmOutcome, Decision, Reason
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store.schema import email_deliveries, signup_requests, subscribers

PROCESSES = 8
COOLDOWN = 600


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


def submit_at_once(wait: Any, number: int, settings: Settings, now: float, times: int) -> list[str]:
    services = services_at(settings, FakeClock(now))
    join(services, f"warm-up-{number}@example.com")  # connections and statements stand ready at the barrier
    wait()
    return [join(services).decision for _ in range(times)]


def race(settings: Settings, clock: FakeClock, times: int = 3) -> Counter[str]:
    answers = run_at_once(PROCESSES, submit_at_once, settings, clock.now, times)
    return Counter(decision for decisions in answers for decision in decisions)


def test_concurrent_first_submissions_still_produce_one_subscriber(
    services: Services, settings: Settings, sender: FakeSender, clock: FakeClock
) -> None:
    decisions = race(settings, clock)
    drain(services)

    assert decisions == {Decision.QUEUED: 1, Decision.COOLDOWN: 3 * PROCESSES - 1}
    assert count(services, subscribers) == PROCESSES + 1
    assert len(deliveries(services)) == 1
    assert [mail.recipient for mail in sender.mails].count("person@example.com") == 1
    assert count(services, signup_requests) == 4 * PROCESSES, "each answer stands on its own durable row"
    assert_sound(services)


@pytest.mark.parametrize("waited", [1, COOLDOWN])
def test_concurrent_retries_after_failure_send_only_one_new_email(
    services: Services, settings: Settings, sender: FakeSender, clock: FakeClock, waited: int
) -> None:
    sender.answer_with(refused())
    join(services)
    drain(services)
    clock.advance(waited)

    decisions = race(settings, clock)
    drain(services)

    sent = decisions[Decision.QUEUED] + decisions[Decision.RETRY_QUEUED]
    first, second = deliveries(services)
    assert sent == 1
    assert sum(decisions.values()) == 3 * PROCESSES
    assert (second.reason, second.retry_of_delivery_id) == (Reason.FAILURE_RETRY, first.id)
    to_person = [mail for mail in sender.mails if mail.recipient == "person@example.com"]
    assert len(to_person) == 2
    assert confirmation.confirm(services, token_in(to_person[-1])).outcome is ConfirmOutcome.CONFIRMED_NOW
    assert_sound(services)


def test_concurrent_submissions_after_the_cooldown_send_only_one_new_email(
    services: Services, settings: Settings, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    clock.advance(COOLDOWN)

    decisions = race(settings, clock)
    drain(services)

    assert decisions[Decision.QUEUED] == 1
    to_person = [mail for mail in sender.mails if mail.recipient == "person@example.com"]
    assert len(to_person) == 1
    assert subscriber(services).confirmation_token_hash == deliveries(services)[-1].token_hash
    assert_sound(services)


def submit_while_drained(wait: Any, number: int, settings: Settings, rounds: int) -> int:
    """Half the processes resubmit with the cooldown over, half send; every round a new moment, the same for all.

    All meet before each round: with a clock that ran ahead of the others by a lease, a worker would rightly take
    over a row that another has just sent.
    """
    clock = FakeClock(START)
    sender = FakeSender()
    services = services_at(settings, clock, sender)
    for _ in range(rounds):
        clock.advance(COOLDOWN)
        wait()
        if number % 2:
            drain(services)
        else:
            join(services)
    return [mail.recipient for mail in sender.mails].count("person@example.com")


def test_submissions_against_workers_never_break_the_coupling(
    services: Services, settings: Settings, clock: FakeClock
) -> None:
    join(services)

    sent = run_at_once(4, submit_while_drained, settings, 30)
    clock.advance(100 * COOLDOWN)

    assert_sound(services)
    mails = [delivery for delivery in deliveries(services) if delivery.first_dispatch_at is not None]
    assert sum(sent) == len(mails), "each dispatched delivery was handed over exactly once"
    assert sum(sent) <= settings.mails_per_address_per_day + 1
    assert "queued" in ledger(services)
    assert count(services, email_deliveries) == len(deliveries(services))
