"""A rerun body does what one that ran once does, on both engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories import FakeClock, FakeSender, make_list
from tests.scenes import assert_sound, count, deliveries, drain, everything, join, refused, subscriber
from waitlist import signup
from waitlist.errors import Restart, StorageBusy
from waitlist.model import Decision
from waitlist.services import Services
from waitlist.store.schema import email_deliveries, signup_requests, subscribers


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


def interrupt(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Restart the body `times` times at its very end, when all is written."""
    close, runs = signup.close_request, [0]

    def close_or_restart(*args: Any) -> Any:
        answer = close(*args)
        runs[0] += 1
        if runs[0] <= times:
            raise Restart
        return answer

    monkeypatch.setattr(signup, "close_request", close_or_restart)
    return runs


@pytest.mark.parametrize("times", [0, 1, 3])
def test_rerun_body_does_the_same_as_one_that_ran_once(
    services: Services, sender: FakeSender, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    runs = interrupt(monkeypatch, times)

    answer = join(services)
    drain(services)

    (delivery,) = deliveries(services)
    assert runs == [times + 1]
    assert answer.decision is Decision.QUEUED
    assert answer.job_id == delivery.id
    assert (delivery.generation, delivery.sequence > 0) == (1, True)
    assert subscriber(services).confirmation_token_hash == delivery.token_hash
    assert (count(services, subscribers), count(services, email_deliveries)) == (1, 1)
    assert count(services, signup_requests) == 1
    assert len(sender.mails) == 1
    assert_sound(services)


@pytest.mark.parametrize("times", [1, 3])
def test_rerun_retry_claims_the_failure_once(
    services: Services, sender: FakeSender, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    sender.answer_with(refused())
    join(services)
    drain(services)
    interrupt(monkeypatch, times)

    answer = join(services)

    first, second = deliveries(services)
    assert answer.decision is Decision.RETRY_QUEUED
    assert second.retry_of_delivery_id == first.id
    assert_sound(services)


def test_body_that_never_gets_through_leaves_nothing_and_says_busy(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(services)
    interrupt(monkeypatch, 99)

    with pytest.raises(StorageBusy):
        join(services)

    assert everything(services) == before
