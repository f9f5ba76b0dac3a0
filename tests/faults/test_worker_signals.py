"""SIGTERM and SIGINT: what is on the wire is finished, the rest released; a second signal ends it at once. And how fast a
worker that waits wakes up.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.faults.workers import (
    PATIENCE_SECONDS,
    assert_newest_links_are_live,
    copies,
    drain_here,
    drain_outbox,
    later,
    wait_until,
)
from tests.scenes import assert_sound, join, outbox_rows
from tests.smtp_server import Hang, SmtpServer
from waitlist.cli.mail import EXIT_INTERRUPTED
from waitlist.services import Services

LEASE = 60
PEOPLE = ["first@example.com", "second@example.com", "third@example.com"]
# "At once" on a machine that has other things to do: 0.5 to 2 s were measured at a load of 7.
AT_ONCE_SECONDS = 5.0
# The promise is 0.3 s. At a load of 7, 19 of 20 were under it and one took 0.33; a loaded machine must not fail here.
WAKE_SECONDS = 2.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("arguments", [(), ("--follow",)], ids=["one-shot", "follow"])
def test_signal_in_a_slow_send_finishes_that_mail_and_releases_the_rest(
    site: Services, mailbox: SmtpServer, number: signal.Signals, arguments: tuple[str, ...]
) -> None:
    for person in PEOPLE:
        join(site, person)
    release = threading.Event()
    mailbox.script["dot"] = [Hang(release)]

    with drain_outbox(site.settings, *arguments) as worker:
        mailbox.wait_for_phase("dot", timeout_seconds=PATIENCE_SECONDS)
        worker.signal(number)
        release.set()
        ended = worker.wait()

    assert ended.code == 0, ended.errors
    assert copies(mailbox) == {PEOPLE[0]: [1]}
    assert [(row.status, row.claims, row.attempts) for row in outbox_rows(site)] == [
        ("sent", 0, 1),
        ("queued", 0, 0),
        ("queued", 0, 0),
    ]
    drain_here(site)
    assert copies(mailbox) == {person: [1] for person in PEOPLE}
    assert_sound(site)
    assert_newest_links_are_live(site, mailbox)


def test_second_signal_ends_the_worker_at_once_and_the_lease_recovers_its_rows(
    site: Services, mailbox: SmtpServer
) -> None:
    for person in PEOPLE:
        join(site, person)
    mailbox.script["data"] = [Hang(threading.Event())]

    with drain_outbox(site.settings) as worker:
        mailbox.wait_for_phase("data", timeout_seconds=PATIENCE_SECONDS)
        # Two different ones: the same signal twice, before Python has looked, is one.
        seconds = seconds_of(lambda: (worker.signal(signal.SIGTERM), worker.signal(signal.SIGINT), worker.wait()))
        assert worker.wait().code == EXIT_INTERRUPTED

    assert seconds < AT_ONCE_SECONDS
    assert [row.status for row in outbox_rows(site)] == ["dispatching", "leased", "leased"]
    with later(site, LEASE + 1) as heir:
        drain_here(heir)
        assert copies(mailbox) == {person: [1] for person in [*PEOPLE[1:], PEOPLE[0]]}
        assert_newest_links_are_live(heir, mailbox)


@pytest.mark.parametrize("arguments", [(), ("--connections", "2")], ids=["one connection", "two"])
def test_worker_that_waits_starts_a_new_mail_and_ends_at_once(
    site: Services, mailbox: SmtpServer, arguments: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    with drain_outbox(site.settings, "--follow", *arguments) as worker:
        join(site, "warm-up@example.com")
        mailbox.wait_for(1, timeout_seconds=PATIENCE_SECONDS)
        waits = [seconds_until_begun(site, mailbox, number) for number in range(1, 6)]
        ending = seconds_of(lambda: (worker.signal(signal.SIGTERM), worker.wait()))
        assert worker.wait().code == 0

    record_property("seconds_to_wake", [round(wait, 3) for wait in waits])
    record_property("seconds_to_end", round(ending, 3))
    assert max(waits) < WAKE_SECONDS
    assert ending < AT_ONCE_SECONDS
    assert {row.status for row in outbox_rows(site)} == {"sent"}
    assert sorted(mailbox.counts.values()) == [1] * 6


def seconds_until_begun(site: Services, mailbox: SmtpServer, number: int) -> float:
    """From the commit of a submission to the MAIL command of its mail."""
    join(site, f"p{number}@example.com")
    seconds = seconds_of(lambda: mailbox.wait_for_phase("mail", count=number + 1))
    mailbox.wait_for(number + 1)
    return seconds


def seconds_of(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def test_signal_ends_the_pause_after_a_systemic_fault(site: Services, mailbox: SmtpServer) -> None:
    join(site)
    mailbox.script["greeting"] = "421 4.3.2 down"
    with drain_outbox(site.settings, "--follow") as worker:
        # The fault is recorded, and then it pauses.
        wait_until(lambda: outbox_rows(site)[0].last_error)
        seconds = seconds_of(lambda: (worker.signal(signal.SIGTERM), worker.wait()))
        assert worker.wait().code == 0

    assert seconds < AT_ONCE_SECONDS
    (row,) = outbox_rows(site)
    assert (row.status, row.attempts, row.claims) == ("queued", 0, 0)
