"""SIGKILL of a worker before and after each step of one mail, and of the web process around a webhook's commit.

With a provider that remembers keys there is one accepted message per delivery, whatever died where.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.factories import FakeClock, make_list
from tests.processes import CONTEXT, after, kill_myself
from tests.resend_emulator import SECRET, ResendEmulator, signed
from tests.scenes import assert_sound, count, deliveries, drain, join, services_at, statuses
from tests.test_webhooks import HARD, body_of, post
from waitlist import create_app, delivery_events, dispatch, outbox
from waitlist.mail import resend as resend_module
from waitlist.mail.resend import ResendSender
from waitlist.model import DeliveryStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import run_transaction
from waitlist.store.schema import delivery_events as event_table

LEASE = 60
DAY = 86_400


# Where the worker dies, whether Resend has the mail by then, and whether our own record says so.
POINTS: dict[str, tuple[Any, str, Callable[..., Any], bool, bool]] = {
    "before the claim": (outbox, "claim", kill_myself, False, False),
    "after the claim": (outbox, "claim", after(dispatch.claim), False, False),
    "inside the begin": (outbox, "begin_dispatch", after(dispatch.begin_dispatch), False, False),
    "after the begin": (outbox, "_attempt", kill_myself, False, False),
    "before the request": (ResendSender, "_connect", kill_myself, False, False),
    "after the request": (resend_module, "_read", kill_myself, True, False),
    "after the answer": (outbox, "_attempt", after(outbox._attempt), True, False),
    "inside the settle": (outbox, "settle", after(dispatch.settle), True, False),
    "after the settle": (outbox, "send_batch", after(outbox.send_batch), True, True),
}


@pytest.fixture
def resend() -> Iterator[ResendEmulator]:
    with ResendEmulator() as emulator:
        yield emulator


@pytest.fixture
def settings(settings: Settings, resend: ResendEmulator) -> Settings:
    named = Settings(mail_url=resend.mail_url, resend_webhook_secret=SECRET)
    update = {"mail_url": named.mail_url, "resend_webhook_secret": named.resend_webhook_secret}
    return settings.model_copy(update=update)


@pytest.fixture
def keyed(settings: Settings, clock: FakeClock) -> Iterator[Services]:
    services = services_at(settings, clock)
    make_list(services)
    yield services
    services.store.close()


def run_to_its_death(work: Callable[..., None], *arguments: Any) -> None:
    process = CONTEXT.Process(target=work, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def drain_until(settings: Settings, now: float, point: str) -> None:
    home, name, deadly, _, _ = POINTS[point]
    services = services_at(settings, FakeClock(now))
    setattr(home, name, deadly)
    drain(services)


@pytest.mark.parametrize("point", POINTS)
def test_killed_worker_leaves_one_accepted_message(
    keyed: Services, settings: Settings, resend: ResendEmulator, clock: FakeClock, point: str
) -> None:
    _, _, _, has_left, is_recorded = POINTS[point]
    join(keyed)
    run_to_its_death(drain_until, settings, clock.now, point)
    assert len(resend.accepted) == int(has_left)
    assert (statuses(keyed) == [DeliveryStatus.SENT]) is is_recorded

    for _ in range(3):
        clock.advance(LEASE)
        drain(keyed)

    (delivery,) = deliveries(keyed)
    assert (delivery.status, delivery.provider_message_id) == (DeliveryStatus.SENT, resend.accepted[0].id)
    assert resend.accepted_by_key == {delivery.id: 1}
    assert {key: len(bodies) for key, bodies in resend.bodies_by_key.items()} == {delivery.id: 1}
    assert_sound(keyed)


@pytest.mark.parametrize("point", ["after the request", "inside the settle"])
def test_heir_that_comes_after_the_key_is_forgotten_sends_nothing(
    keyed: Services, settings: Settings, resend: ResendEmulator, clock: FakeClock, point: str
) -> None:
    join(keyed)
    run_to_its_death(drain_until, settings, clock.now, point)
    resend.forget_keys()

    clock.advance(DAY)
    drain(keyed)

    (delivery,) = deliveries(keyed)
    assert (delivery.status, delivery.error_code) == (DeliveryStatus.FAILED, "in_doubt")
    assert len(resend.accepted) == 1
    assert_sound(keyed)


def test_event_settles_what_a_killed_worker_left_in_doubt(
    keyed: Services, settings: Settings, resend: ResendEmulator, clock: FakeClock
) -> None:
    join(keyed)
    run_to_its_death(drain_until, settings, clock.now, "after the request")
    (delivery,) = deliveries(keyed)
    client = create_app(settings, clock=clock).test_client()

    answer = post(client, clock, body_of("delivered", delivery.id, message_id=resend.accepted[0].id))
    clock.advance(LEASE)
    drain(keyed)

    assert answer.status_code == 200
    assert statuses(keyed) == [DeliveryStatus.DELIVERED]
    assert len(resend.requests) == 1
    assert_sound(keyed)
    client.application.extensions["waitlist"].store.close()


# Where the web process dies in a webhook, and whether the event stands afterwards.
WEBHOOK_POINTS: dict[str, tuple[str, Callable[..., Any], bool]] = {
    "before the transaction": ("run_transaction", kill_myself, False),
    "after the insert": ("_apply", kill_myself, False),
    "before the commit": ("_apply", after(delivery_events._apply), False),
    "between commit and 2xx": ("run_transaction", after(run_transaction), True),
}


def take_one_webhook(settings: Settings, now: float, point: str, body: bytes) -> None:
    name, deadly, _ = WEBHOOK_POINTS[point]
    client = create_app(settings, clock=FakeClock(now)).test_client()
    setattr(delivery_events, name, deadly)
    client.post("/webhooks/resend", data=body, headers=signed(body, at=now))


@pytest.mark.parametrize("point", WEBHOOK_POINTS)
def test_webhook_killed_anywhere_ends_as_if_it_had_come_once(
    keyed: Services, settings: Settings, resend: ResendEmulator, clock: FakeClock, point: str
) -> None:
    stands = WEBHOOK_POINTS[point][2]
    join(keyed)
    drain(keyed)
    body = body_of("bounced", deliveries(keyed)[0].id, message_id=resend.accepted[0].id, **HARD)
    before = count(keyed, event_table)
    run_to_its_death(take_one_webhook, settings, clock.now, point, body)
    assert (statuses(keyed) == [DeliveryStatus.BOUNCED]) is stands

    client = create_app(settings, clock=clock).test_client()
    answer = post(client, clock, body)

    assert answer.json is not None
    assert answer.json["duplicate" if stands else "applied"] == 1
    assert statuses(keyed) == [DeliveryStatus.BOUNCED]
    assert count(keyed, event_table) == before + 1
    client.application.extensions["waitlist"].store.close()
