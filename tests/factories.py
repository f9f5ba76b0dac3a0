"""Fakes for mail and clock, and makers of things whose arguments name only what matters to a test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from waitlist.mail.base import Mail
from waitlist.model import (
    Delivery,
    DeliveryStatus,
    Outcome,
    OutcomeKind,
    Reason,
    Subscriber,
    SubscriberStatus,
)

# 15 January 2027, 08:00 UTC.
START = 1_800_000_000


@dataclass
class FakeClock:
    """Unix seconds that move only when told to."""

    now: float = START

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeSender:
    """Answers with `outcomes` in order, then accepts everything. An exception among them is raised."""

    outcomes: Iterable[Outcome | Exception] = ()
    provider: str = "fake"
    key_window_seconds: int | None = None
    mails: list[Mail] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.outcomes = iter(self.outcomes)

    def answer_with(self, *outcomes: Outcome | Exception) -> None:
        self.outcomes = iter(outcomes)

    def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
        self.mails.append(mail)
        self.keys.append(key)
        outcome = next(
            iter(self.outcomes), Outcome(OutcomeKind.ACCEPTED, provider_message_id=f"fake-{len(self.mails)}")
        )
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def check(self, *, deadline_seconds: float) -> Outcome:
        return Outcome(OutcomeKind.ACCEPTED)

    def close(self) -> None:
        self.is_closed = True


def make_list(services: Any, id: str = "launch", **changes: str) -> str:  # noqa: A002 - the column's name
    from waitlist import waitlists

    texts = {
        "title": "Launch",
        "description": "Hear from us when it starts.",
        "consent": "Send me one mail when it starts.",
    } | changes
    waitlists.create(services, id, **texts)
    return id


def a_subscriber(**changes: Any) -> Subscriber:
    """A pending one who was sent a mail at START. A value only: nothing is stored."""
    values: dict[str, Any] = {
        "id": "subscriber-1",
        "list_id": "launch",
        "email": "person@example.com",
        "status": SubscriberStatus.PENDING,
        "consent_at": START,
        "consent_version": 1,
        "confirmation_token_hash": "hash-1",
        "confirmation_expires_at": START + 86_400,
        "confirmation_rotated_at": START,
        "confirmed_at": None,
        "confirmed_delivery_id": None,
        "unsubscribed_at": None,
    }
    return Subscriber(**(values | changes))


def a_delivery(**changes: Any) -> Delivery:
    """One that waits in the outbox since START. A value only: nothing is stored."""
    values: dict[str, Any] = {
        "sequence": 1,
        "id": "delivery-1",
        "subscriber_id": "subscriber-1",
        "operation_key": "confirm:subscriber-1:1",
        "generation": 1,
        "retry_of_delivery_id": None,
        "signup_request_id": "operation-1",
        "reason": Reason.SIGNUP,
        "status": DeliveryStatus.QUEUED,
        "token_hash": "hash-1",
        "token_expires_at": START + 86_400,
        "consent_at": START,
        "consent_version": 1,
        "recipient_hmac": "hmac-1",
        "provider": None,
        "provider_message_id": None,
        "attempts": 0,
        "error_code": None,
        "created_at": START,
        "first_dispatch_at": None,
        "settled_at": None,
    }
    return Delivery(**(values | changes))
