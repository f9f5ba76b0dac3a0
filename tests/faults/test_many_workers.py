"""Two and eight workers over one queue, one of them killed every second: each mail leaves once, and nothing gets stuck."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests.factories import FakeClock, FakeSender, make_list
from tests.faults.workers import (
    PATIENCE_SECONDS,
    assert_copies_are_identical,
    changed,
    fork_drain,
    run,
)
from tests.scenes import a_worker, assert_sound, join, outbox_rows
from tests.smtp_server import Session, SmtpServer
from waitlist import dispatch, outbox
from waitlist.services import Services
from waitlist.store import Transaction, run_query
from waitlist.store.schema import delivery_events, email_outbox

ROWS = 300
# Long enough for a mail to be sent in half of it on a loaded machine.
LEASE = 4
# The one by default.
LONG_LEASE = 60
# A provider takes this long for a mail, so that the queue lasts for several kills.
SECONDS_PER_MAIL = {2: 0.04, 8: 0.15}


@pytest.mark.parametrize("workers", [2, 8])
def test_each_mail_leaves_once_though_a_worker_is_killed_every_second(
    site: Services, mailbox: SmtpServer, workers: int
) -> None:
    for number in range(ROWS):
        join(site, f"p{number}@example.com")
    settings = changed(site, lease_seconds=LEASE)
    pause = threading.Event()

    def take_time(_session: Session) -> None:
        pause.wait(SECONDS_PER_MAIL[workers])

    mailbox.script["dot"] = take_time
    running = [fork_drain(settings, "--follow", "--batch", "20") for _ in range(workers)]
    kills = longest_overdue = 0
    while unsent(site):
        # Not faster than they work: else none would live to send anything.
        mailbox.wait_for(min(ROWS, len(mailbox.messages) + 1), timeout_seconds=PATIENCE_SECONDS)
        pause.wait(1)
        longest_overdue = max(longest_overdue, overdue(site))
        victim = next((process for process in running if not holds_a_doubt(site, process.pid)), None)
        if victim is not None and unsent(site):
            victim.kill()
            victim.join(PATIENCE_SECONDS)
            running.remove(victim)
            running.append(fork_drain(settings, "--follow", "--batch", "20"))
            kills += 1
    pause.set()
    # The youngest may be told to stop before it listens to signals; it has claimed nothing then.
    assert {end(process) for process in running} <= {0, -signal.SIGTERM}

    doubted = in_doubt(site)
    assert kills >= 2
    assert len(doubted) <= kills
    assert {row.status for row in outbox_rows(site)} == {"sent"}
    assert len(mailbox.counts) == ROWS
    for message_id, count in mailbox.counts.items():
        assert count == 1 or (count == 2 and message_id in doubted), message_id
    assert_copies_are_identical(mailbox)
    assert longest_overdue <= 10
    assert_sound(site)


def end(process: Any) -> int | None:
    """SIGTERM; the exit code."""
    process.terminate()
    process.join(PATIENCE_SECONDS)
    code: int | None = process.exitcode
    process.close()
    return code


def unsent(site: Services) -> int:
    statement = sa.select(sa.func.count()).where(email_outbox.c.status != "sent")
    return int(run_query(site.store, lambda tx: tx.execute(statement).scalar_one()))


def holds_a_doubt(site: Services, pid: int | None) -> bool:
    """Whether this worker is sending a second copy. Killed now, nobody could say what became of that one either, and
    the row would rightly end as failed."""
    statement = sa.select(email_outbox.c.lease_owner).where(
        email_outbox.c.in_doubt, email_outbox.c.status.in_(("leased", "dispatching"))
    )
    owners = run_query(site.store, lambda tx: tx.execute(statement).scalars().all())
    return any(f":{pid}:" in owner for owner in owners)


def in_doubt(site: Services) -> set[str]:
    """The Message-IDs of the mails that were on the wire at a kill."""
    statement = sa.select(delivery_events.c.delivery_id).where(delivery_events.c.type == "in_doubt")
    return {f"<{id_}@example.com>" for id_ in run_query(site.store, lambda tx: tx.execute(statement).scalars().all())}


def overdue(site: Services) -> int:
    """For how many seconds, at most, a lease has been over without anybody having taken its row back."""
    statement = sa.select(sa.func.min(email_outbox.c.lease_expires_at))

    def body(tx: Transaction) -> int:
        oldest = tx.execute(statement).scalar_one()
        return 0 if oldest is None else tx.now - int(oldest)

    return run_query(site.store, body)


def test_rows_of_a_dead_worker_come_back_while_the_others_still_work(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    make_list(services)
    for number in range(4):
        join(services, f"p{number}@example.com")
    dispatch.claim(services, "dead", 1)
    worker = replace(a_worker(services, batch=1), on_mail=lambda _outcome: clock.advance(LONG_LEASE))

    outbox.drain(worker)

    assert len(sender.mails) == 4


def test_two_drains_at_once_hand_each_row_over_once_and_both_end(site: Services, mailbox: SmtpServer) -> None:
    for number in range(60):
        join(site, f"p{number}@example.com")

    processes = [fork_drain(site.settings, "--batch", "5") for _ in range(2)]
    for process in processes:
        process.join(PATIENCE_SECONDS)

    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(mailbox.counts.values()) == [1] * 60
    assert {row.attempts for row in outbox_rows(site)} == {1}
    assert_sound(site)


def test_connections_of_one_worker_share_the_queue(site: Services, mailbox: SmtpServer) -> None:
    for number in range(20):
        join(site, f"p{number}@example.com")
    both = threading.Barrier(2)

    def meet(_session: Session) -> None:
        """The first two mails wait for one another: they come over two connections, or not at all."""
        if not mailbox.received:
            both.wait(PATIENCE_SECONDS)

    mailbox.script["dot"] = meet

    ended = run(site.settings, "drain-outbox", "--connections", "2", "--batch", "5", "--json")

    assert ended.code == 0, ended.errors
    assert len({mail.connection for mail in mailbox.messages}) == 2
    assert sorted(mailbox.counts.values()) == [1] * 20
    assert_sound(site)
