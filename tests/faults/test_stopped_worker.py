"""SIGSTOP of a worker past its lease, with a mail on the wire and a batch in hand: whatever it does when it goes on, the
others have done its work, and its failure counts for nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.faults.workers import (
    PATIENCE_SECONDS,
    assert_copies_are_identical,
    assert_newest_links_are_live,
    be_quiet,
    changed,
    copies,
    drain_here,
    drain_outbox,
    later,
    wait_until,
)
from tests.processes import start
from tests.scenes import assert_sound, deliveries, everything, join, outbox_rows, services_at, statuses
from tests.smtp_server import Drop, Hang, SmtpServer
from waitlist import dispatch, outbox
from waitlist.dispatch import Provider
from waitlist.model import DeliveryStatus
from waitlist.services import Services
from waitlist.settings import Settings

LEASE = 60
PEOPLE = [f"p{number}@example.com" for number in range(5)]
FIRST, *REST = PEOPLE


def test_worker_that_wakes_after_its_real_lease_sends_nothing_twice_but_the_mail_on_the_wire(
    site: Services, mailbox: SmtpServer
) -> None:
    for person in PEOPLE:
        join(site, person)
    settings = changed(site, lease_seconds=2)
    release = threading.Event()
    mailbox.script["dot"] = [Hang(release)]

    with drain_outbox(settings) as sleeper:
        mailbox.wait_for_phase("dot", timeout_seconds=PATIENCE_SECONDS)
        sleeper.stop()
        with drain_outbox(settings, "--follow") as heir:
            mailbox.wait_for(len(PEOPLE), timeout_seconds=PATIENCE_SECONDS)
            release.set()
            sleeper.signal(signal.SIGCONT)
            assert sleeper.wait().code == 0
            heir.signal(signal.SIGTERM)
            assert heir.wait().code == 0

    assert copies(mailbox) == {FIRST: [2]} | {person: [1] for person in REST}
    assert_copies_are_identical(mailbox)
    assert {row.status for row in outbox_rows(site)} == {"sent"}
    assert_sound(site)
    assert_newest_links_are_live(site, mailbox)


def test_failure_of_a_worker_that_was_stopped_past_its_lease_changes_nothing(
    site: Services, mailbox: SmtpServer
) -> None:
    for person in PEOPLE:
        join(site, person)
    release = threading.Event()
    refused = threading.Event()

    def refuse_late(_session: object) -> str | None:
        if refused.is_set():
            return None
        refused.set()
        release.wait(PATIENCE_SECONDS)
        return "554 5.7.1 no"

    mailbox.script["dot"] = refuse_late
    with drain_outbox(site.settings) as sleeper:
        mailbox.wait_for_phase("dot", timeout_seconds=PATIENCE_SECONDS)
        sleeper.stop()
        with later(site, LEASE + 1) as heir:
            drain_here(heir)
            assert copies(mailbox) == {person: [1] for person in [*REST, FIRST]}
            before = everything(heir)

        release.set()
        sleeper.signal(signal.SIGCONT)
        assert sleeper.wait().code == 0

    assert everything(site) == before
    assert copies(mailbox) == {person: [1] for person in [*REST, FIRST]}
    assert_newest_links_are_live(site, mailbox)


def test_success_of_a_worker_that_was_stopped_past_its_lease_is_kept(site: Services, mailbox: SmtpServer) -> None:
    for person in PEOPLE:
        join(site, person)
    release = threading.Event()
    mailbox.script["dot"] = [Hang(release)]
    # The heir's copy of the mail on the wire, which comes last, is refused.
    mailbox.script["rcpt"] = [*[None] * len(PEOPLE), "550 5.7.1 not you"]
    with drain_outbox(site.settings) as sleeper:
        mailbox.wait_for_phase("dot", timeout_seconds=PATIENCE_SECONDS)
        sleeper.stop()
        with later(site, LEASE + 1) as heir:
            drain_here(heir)
        assert statuses(site, FIRST) == [DeliveryStatus.REJECTED]

        release.set()
        sleeper.signal(signal.SIGCONT)
        assert sleeper.wait().code == 0

    assert [status for person in PEOPLE for status in statuses(site, person)] == [DeliveryStatus.SENT] * len(PEOPLE)
    assert deliveries(site, FIRST)[0].error_code is None
    assert copies(mailbox) == {person: [1] for person in [*REST, FIRST]}
    assert_sound(site)
    with later(site, 2 * LEASE) as then:
        assert drain_here(then).attempts == 0
    assert_newest_links_are_live(site, mailbox)


def test_worker_that_wakes_up_leaves_alone_what_its_heir_holds(site: Services, mailbox: SmtpServer) -> None:
    for person in PEOPLE:
        join(site, person)
    release = threading.Event()
    mailbox.script["dot"] = [Hang(release)]
    with drain_outbox(site.settings) as sleeper:
        mailbox.wait_for_phase("dot", timeout_seconds=PATIENCE_SECONDS)
        sleeper.stop()
        with later(site, LEASE + 1) as heir:
            dispatch.recover(heir, Provider("smtp"))
            assert len(dispatch.claim(heir, "heir", len(PEOPLE))) == len(PEOPLE)

        release.set()
        sleeper.signal(signal.SIGCONT)
        assert sleeper.wait().code == 0

    assert copies(mailbox) == {FIRST: [1]}
    assert [(row.status, row.attempts) for row in outbox_rows(site)] == [("sent", 1)] + [("leased", 0)] * len(REST)
    assert {row.lease_owner for row in outbox_rows(site)} == {None, "heir"}
    assert_sound(site)


def test_worker_stopped_before_its_dot_does_not_finish_what_its_heir_has_sent(
    site: Services, mailbox: SmtpServer
) -> None:
    """Up to the final dot giving up is safe, and the sender looks at its clock before each step."""
    for person in PEOPLE:
        join(site, person)
    settings = changed(site, lease_seconds=2)
    release = threading.Event()
    mailbox.script["data"] = [Hang(release)]

    with drain_outbox(settings) as sleeper:
        mailbox.wait_for_phase("data", timeout_seconds=PATIENCE_SECONDS)
        sleeper.stop()
        with drain_outbox(settings, "--follow") as heir:
            mailbox.wait_for(len(PEOPLE), timeout_seconds=PATIENCE_SECONDS)
            release.set()
            sleeper.signal(signal.SIGCONT)
            assert sleeper.wait().code == 0
            heir.signal(signal.SIGTERM)
            assert heir.wait().code == 0

    assert copies(mailbox) == {person: [1] for person in [*REST, FIRST]}
    assert {row.status for row in outbox_rows(site)} == {"sent"}
    assert_sound(site)


def drain_and_stop_once_begun(settings: Settings) -> None:
    be_quiet()
    record = outbox._record

    def record_and_stop(*arguments: Any) -> Any:
        patch.undo()
        begun = record(*arguments)
        os.kill(os.getpid(), signal.SIGSTOP)
        return begun

    patch = pytest.MonkeyPatch()
    patch.setattr(outbox, "_record", record_and_stop)
    drain_here(services_at(settings))


def stands_still(pid: int | None) -> bool:
    """As the kernel says: after the name, which ends with a bracket."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def test_worker_stopped_between_its_begin_and_the_wire_does_not_send_what_its_heir_has_sent(
    site: Services, mailbox: SmtpServer
) -> None:
    for person in PEOPLE:
        join(site, person)
    settings = changed(site, lease_seconds=2)

    sleeper = start(drain_and_stop_once_begun, settings)
    wait_until(lambda: stands_still(sleeper.pid))
    with drain_outbox(settings, "--follow") as heir:
        mailbox.wait_for(len(PEOPLE), timeout_seconds=PATIENCE_SECONDS)
        os.kill(sleeper.pid or 0, signal.SIGCONT)
        sleeper.join(PATIENCE_SECONDS)
        heir.signal(signal.SIGTERM)
        assert heir.wait().code == 0

    assert sleeper.exitcode == 0
    assert copies(mailbox) == {person: [1] for person in [*REST, FIRST]}
    assert {row.status for row in outbox_rows(site)} == {"sent"}
    assert_sound(site)


def test_connection_lost_while_the_worker_was_stopped_takes_no_mail_back(site: Services, mailbox: SmtpServer) -> None:
    for person in PEOPLE:
        join(site, person)
    release = threading.Event()
    mailbox.script["dot"] = lambda session: Drop(stores=True) if release.wait(PATIENCE_SECONDS) else None
    with drain_outbox(site.settings) as sleeper:
        mailbox.wait_for_phase("dot", timeout_seconds=PATIENCE_SECONDS)
        sleeper.stop()
        release.set()
        mailbox.wait_for_ends(1)
        mailbox.script["dot"] = None
        with later(site, LEASE + 1) as heir:
            drain_here(heir)
            before = everything(heir)
        sleeper.signal(signal.SIGCONT)
        assert sleeper.wait().code == 0

    assert everything(site) == before
    assert copies(mailbox) == {FIRST: [2]} | {person: [1] for person in REST}
    assert_copies_are_identical(mailbox)
