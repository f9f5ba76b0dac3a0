"""SIGKILL of a worker at every point of its work: no mail is lost, and the only second copy is of a mail whose fate
nobody can know, with the same bytes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.test_killed_web_process import after, kill_myself
from tests.faults.workers import (
    PATIENCE_SECONDS,
    assert_copies_are_identical,
    assert_newest_links_are_live,
    be_quiet,
    copies,
    drain_here,
    drain_outbox,
    later,
    run,
    token_of,
)
from tests.pages import Visitor
from tests.processes import start
from tests.scenes import (
    EMAIL,
    assert_sound,
    deliveries,
    join,
    outbox_rows,
    services_at,
    statuses,
    subscriber,
)
from tests.smtp_server import Drop, Hang, SmtpServer
from waitlist import confirmation, create_app, dispatch, outbox
from waitlist.mail import smtp
from waitlist.mail.smtp import Phase
from waitlist.model import ConfirmOutcome, DeliveryStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.tokens import token_digest

LEASE = 60
PEOPLE = ["first@example.com", "second@example.com", "third@example.com"]


@dataclass(frozen=True)
class Point:
    """Where a worker dies in its own code: `call` of that name in `module`, counted from 1."""

    module: Any
    name: str
    deadly: Callable[[Callable[..., Any]], Callable[..., Any]]
    # How many copies of the first mail have arrived when the queue has come right.
    copies: int
    call: int = 1


def before(_: Callable[..., Any]) -> Callable[..., Any]:
    return kill_myself


def before_the_dot(function: Callable[..., Any]) -> Callable[..., Any]:
    """When the mail is written, all but its final dot."""

    def look(connection: Any) -> Any:
        if connection.attempt.phase is Phase.BODY:
            kill_myself()
        return function(connection)

    return look


IN_CODE = {
    "after the claim": Point(outbox, "claim", after, copies=1),
    "inside begin dispatch": Point(dispatch, "mark_sending", after, copies=1),
    "after begin dispatch": Point(outbox, "_record", after, copies=1),
    "before the connection": Point(smtp._Connection, "open", before, copies=1),
    "inside DATA": Point(smtp._Connection, "_is_quiet", before_the_dot, copies=1),
    "after 250, before settle": Point(outbox, "settle", before, copies=2),
    "inside settle": Point(dispatch, "mark_accepted", after, copies=2),
    "before settle commits": Point(outbox, "settle", after, copies=2),
    "after settle": Point(outbox, "_record", after, copies=1, call=2),
}


def drain_until_killed(settings: Settings, point_name: str) -> None:
    be_quiet()
    services = services_at(settings)
    point = IN_CODE[point_name]
    function = getattr(point.module, point.name)
    deadly = point.deadly(function)
    calls = 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return (deadly if calls >= point.call else function)(*args, **kwargs)

    setattr(point.module, point.name, count)
    drain_here(services)


def assert_comes_right(site: Services, mailbox: SmtpServer, *, expected: int) -> None:
    """Nothing moves before the lease is over; then all of it does, in one drain, and for good."""
    assert_sound(site)
    only_claimed = [row.status == "leased" for row in outbox_rows(site)]
    arrived = len(mailbox.messages)
    assert drain_here(site).attempts == 0
    assert len(mailbox.messages) == arrived

    with later(site, LEASE + 1) as heir:
        drain_here(heir)
        assert drain_here(heir).attempts == 0
        assert copies(mailbox) == {PEOPLE[0]: [expected], PEOPLE[1]: [1], PEOPLE[2]: [1]}
        assert_copies_are_identical(mailbox)
        assert {row.status for row in outbox_rows(heir)} == {"sent"}
        assert [row.claims == 1 for row in outbox_rows(heir)] == only_claimed
        assert_sound(heir)
        assert_newest_links_are_live(heir, mailbox)


@pytest.mark.parametrize("point", IN_CODE)
def test_worker_killed_in_its_own_code_loses_nothing_and_doubles_only_a_doubt(
    site: Services, mailbox: SmtpServer, point: str
) -> None:
    for person in PEOPLE:
        join(site, person)

    process = start(drain_until_killed, site.settings, point)
    process.join(PATIENCE_SECONDS)

    assert process.exitcode == -signal.SIGKILL
    mailbox.wait_for_ends(len(mailbox.sessions))
    assert_comes_right(site, mailbox, expected=IN_CODE[point].copies)


# Where the dialogue stands when the worker dies, and how many copies arrive in the end.
IN_DIALOGUE = {"greeting": 1, "ehlo": 1, "mail": 1, "rcpt": 1, "data": 1, "dot": 2}


@pytest.mark.parametrize("phase", IN_DIALOGUE)
def test_worker_killed_in_the_dialogue_loses_nothing_and_doubles_only_a_doubt(
    site: Services, mailbox: SmtpServer, phase: str
) -> None:
    for person in PEOPLE:
        join(site, person)
    release = threading.Event()
    mailbox.script[phase] = [Hang(release)]

    with drain_outbox(site.settings) as worker:
        mailbox.wait_for_phase(phase, timeout_seconds=PATIENCE_SECONDS)
        worker.kill()
    release.set()
    mailbox.wait_for_ends(1)

    assert_comes_right(site, mailbox, expected=IN_DIALOGUE[phase])


def test_mail_whose_dot_the_server_never_took_arrives_once(site: Services, mailbox: SmtpServer) -> None:
    for person in PEOPLE:
        join(site, person)
    release = threading.Event()
    mailbox.script["dot"] = [Drop(stores=False)]
    mailbox.script["data"] = [Hang(release)]

    with drain_outbox(site.settings) as worker:
        mailbox.wait_for_phase("data", timeout_seconds=PATIENCE_SECONDS)
        release.set()
        mailbox.wait_for_phase("dot")
        worker.kill()

    mailbox.wait_for_ends(len(mailbox.sessions))
    assert_comes_right(site, mailbox, expected=1)


def test_one_worker_retry_after_an_injected_transport_failure(site: Services, mailbox: SmtpServer) -> None:
    join(site)
    mailbox.script["data"] = [Drop()]

    assert drain_here(site).outcomes == {"temporary": 1}
    assert drain_here(site).attempts == 0, "not before its time"
    with later(site, 15) as then:
        assert drain_here(then).outcomes == {"accepted": 1}
        assert drain_here(then).attempts == 0

        (delivery,) = deliveries(then)
        assert (delivery.status, delivery.attempts) == (DeliveryStatus.SENT, 2)
        assert mailbox.counts == {f"<{delivery.id}@example.com>": 1}
        assert_newest_links_are_live(then, mailbox)


def test_one_inbox_assertion_that_checks_message_count_and_token_freshness(site: Services, mailbox: SmtpServer) -> None:
    join(site)
    join(site)
    drain_here(site)
    with later(site, site.settings.cooldown_seconds) as then:
        join(then)
        join(then)
        drain_here(then)

        older, newest = mailbox.messages
        ids = [f"<{delivery.id}@example.com>" for delivery in deliveries(then)]
        assert [mail.message_id for mail in (older, newest)] == ids
        assert mailbox.counts == dict.fromkeys(ids, 1)
        assert token_digest(token_of(newest)) == subscriber(then).confirmation_token_hash
        assert token_of(older) != token_of(newest)
        assert confirmation.confirm(then, token_of(newest)).outcome is ConfirmOutcome.CONFIRMED_NOW
        assert confirmation.confirm(then, token_of(older)).outcome is ConfirmOutcome.ALREADY_CONFIRMED


def answer_and_die(settings: Settings) -> None:
    be_quiet()
    page = Visitor(create_app(settings).test_client()).sign_up()
    assert page.path == "/join/launch/check-inbox"
    kill_myself()


def test_crash_between_response_and_delivery_is_recovered_from_the_outbox(site: Services, mailbox: SmtpServer) -> None:
    process = start(answer_and_die, site.settings)
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL
    assert (statuses(site), mailbox.messages) == ([DeliveryStatus.QUEUED], [])

    assert run(site.settings, "drain-outbox").code == 0

    (delivery,) = deliveries(site)
    assert mailbox.counts == {f"<{delivery.id}@example.com>": 1}
    assert copies(mailbox) == {EMAIL: [1]}
    assert_newest_links_are_live(site, mailbox)
