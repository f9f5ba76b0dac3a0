"""SIGKILL of the web process in the middle of a submission: all of it stands, or nothing."""

from __future__ import annotations

import signal

import pytest
from flask.testing import FlaskClient

from tests.factories import FakeClock, FakeSender, make_list
from tests.pages import Visitor
from tests.processes import CONTEXT, after, kill_myself
from tests.scenes import assert_sound, count, drain, ledger
from waitlist import create_app, signup
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import run_transaction
from waitlist.store.schema import email_deliveries, email_outbox, signup_requests, subscribers

# Where the process dies, and whether the submission stands afterwards.
POINTS = {
    "before the transaction": ("run_transaction", kill_myself, False),
    "after the ledger row": ("get_suppression", kill_myself, False),
    "after the upsert": ("enqueue", kill_myself, False),
    "before the commit": ("close_request", after(signup.close_request), False),
    "after the commit": ("run_transaction", after(run_transaction), True),
}


def serve_one_visitor(settings: Settings, now: float, point: str) -> None:
    name, deadly, _ = POINTS[point]
    visitor = Visitor(create_app(settings, clock=FakeClock(now)).test_client())
    visitor.open("/join/launch")
    visitor.fill_in()
    setattr(signup, name, deadly)
    visitor.submit()


@pytest.mark.parametrize("point", POINTS)
def test_killed_web_process_leaves_all_of_a_submission_or_nothing(
    services: Services, settings: Settings, sender: FakeSender, clock: FakeClock, client: FlaskClient, point: str
) -> None:
    make_list(services)
    process = CONTEXT.Process(target=serve_one_visitor, args=(settings, clock.now, point))
    process.start()
    process.join(60)

    stands = POINTS[point][2]
    assert process.exitcode == -signal.SIGKILL
    for table in (subscribers, email_deliveries, email_outbox, signup_requests):
        assert count(services, table) == int(stands), table.name
    assert_sound(services)

    again = Visitor(client).sign_up()
    drain(services)
    assert again.path == "/join/launch/check-inbox"
    assert len(sender.mails) == 1
    assert count(services, subscribers) == 1
    assert ledger(services) == (["queued", "cooldown"] if stands else ["queued"])
