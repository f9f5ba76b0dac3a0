"""SIGKILL of the server in the middle of an API call: the client's retry with the same key ends in one 202 and one mail."""

from __future__ import annotations

import signal

import pytest
from flask import Flask

from tests.factories import FakeClock, FakeSender, make_list
from tests.processes import after, kill_myself, start
from tests.programs import Program
from tests.scenes import assert_sound, count, drain, ledger
from waitlist import create_app, signup
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import run_transaction
from waitlist.store.schema import email_deliveries, email_outbox, signup_requests, subscribers

# Where the server dies, and whether the signup stands afterwards.
POINTS = {
    "before the transaction": ("run_transaction", kill_myself, False),
    "after the key claim": ("open_request", after(signup.open_request), False),
    "after the upsert": ("upsert_pending", after(signup.upsert_pending), False),
    "after the outbox insert": ("enqueue", after(signup.enqueue), False),
    "before the commit": ("close_request", after(signup.close_request), False),
    "after the commit": ("run_transaction", after(run_transaction), True),
}


def serve_one_call(settings: Settings, now: float, token: str, point: str) -> None:
    name, deadly, _ = POINTS[point]
    program = Program(create_app(settings, clock=FakeClock(now)).test_client(), token)
    setattr(signup, name, deadly)
    program.sign_up()


@pytest.mark.parametrize("point", POINTS)
def test_retry_after_a_killed_server_ends_in_one_202_and_one_mail(
    app: Flask, services: Services, settings: Settings, sender: FakeSender, clock: FakeClock, point: str
) -> None:
    make_list(services)
    shop = Program.registered(app)
    process = start(serve_one_call, settings, clock.now, shop.token, point)
    process.join(60)

    stands = POINTS[point][2]
    assert process.exitcode == -signal.SIGKILL
    for table in (subscribers, email_deliveries, email_outbox, signup_requests):
        assert count(services, table) == int(stands), table.name
    assert_sound(services)

    retry = shop.sign_up()
    drain(services)
    again = shop.sign_up()
    drain(services)

    assert retry.status_code == again.status_code == 202
    assert retry.headers["Operation-State"] == ("replayed" if stands else "new")
    assert again.data == retry.data
    assert len(sender.mails) == 1
    assert count(services, subscribers) == 1
    assert ledger(services) == ["queued"]
    assert shop.status(retry.headers["Operation-Id"]).get_json()["delivery"]["status"] == "sent"
