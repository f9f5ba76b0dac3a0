"""Webhook, worker, submission, confirmation and erasure at the same moment on one subscriber, in random order.

PostgreSQL alone: on SQLite one write transaction runs at a time. A deadlock that is resolved by a rerun reaches nobody,
but costs a second of everybody's time, so PostgreSQL's own count of deadlocks must stay 0, too.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from tests.factories import FakeSender, make_list
from tests.processes import run_at_once
from tests.scenes import (
    EMAIL,
    assert_sound,
    count,
    deliveries,
    drain,
    join,
    services_at,
    set_setting,
    subscriber,
)
from waitlist import confirmation, delivery_events, erasure, people, signup
from waitlist.mail.base import Mail
from waitlist.model import Decision, EventType, Outcome, OutcomeKind, ProviderEvent, SubscriberStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.schema import email_deliveries, email_outbox, signup_requests, subscribers
from waitlist.tokens import LinkPurpose, cap_hmac, sign_link

PROCESSES = 5
# Ten thousand in all, a minute on two idle cores; in rounds, since on a busy machine one answer must not take too long.
ROUND = 2_000
ROUNDS = 5
EVENTS = [
    EventType.SENT,
    EventType.DELIVERED,
    EventType.SOFT_BOUNCED,
    EventType.DELAYED,
    *[EventType.BOUNCED] * 4,
    EventType.COMPLAINED,
]
OUTCOMES = [OutcomeKind.ACCEPTED] * 6 + [OutcomeKind.TEMPORARY, OutcomeKind.REJECTED, OutcomeKind.IN_DOUBT]

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


class FastClock:
    """The same time in all processes, five minutes a second: cooldowns and leases end, and events are dropped."""

    def __init__(self, begun: float) -> None:
        self._begun = begun

    def __call__(self) -> float:
        return self._begun + (time.time() - self._begun) * 300


class RandomSender(FakeSender):
    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
        return Outcome(self._dice.choice(OUTCOMES), "random", provider_message_id=f"m-{key}")


class Actor:
    """One process: whoever acts next is drawn by lot, and acts on whatever stands in the database then."""

    def __init__(self, services: Services, dice: random.Random, number: int) -> None:
        self.services = services
        self.dice = dice
        self.number = number
        self.serial = 0
        self.actions: list[tuple[int, Callable[[], object]]] = [
            (30, self.submit),
            (30, lambda: drain(services)),
            (30, self.report),
            (8, self.confirm),
            (4, self.unsubscribe),
            (2, self.not_me),
            (2, lambda: people.unsuppress(services, EMAIL)),
            (4, lambda: erasure.erase(services, EMAIL)),
        ]

    def act(self) -> str:
        weights = [weight for weight, _ in self.actions]
        (chosen,) = self.dice.choices(range(len(self.actions)), weights)
        self.actions[chosen][1]()
        return str(chosen)

    def submit(self) -> None:
        join(self.services, list_id=self.dice.choice(["launch", "launch", "other"]))

    def report(self) -> None:
        known = self.a_delivery()
        self.serial += 1
        event = ProviderEvent(
            event_id=f"e{self.number}-{self.dice.randrange(self.serial)}",
            type=self.dice.choice(EVENTS),
            recipient=self.dice.choice([EMAIL, EMAIL, EMAIL, "other@example.com"]),
            delivery_id=known if self.dice.random() < 0.5 else None,
            provider_message_id=f"m-{known}",
        )
        delivery_events.record(self.services, "fake", [event])

    def confirm(self) -> None:
        statement = sa.select(email_outbox.c.confirmation_url).where(email_outbox.c.confirmation_url != "")
        urls = run_query(self.services.store, lambda tx: tx.execute(statement).scalars().all())
        if urls:
            confirmation.confirm(self.services, self.dice.choice(list(urls)).rpartition("/")[2])

    def unsubscribe(self) -> None:
        confirmation.unsubscribe(self.services, self.link(LinkPurpose.UNSUBSCRIBE))

    def not_me(self) -> None:
        confirmation.not_me(self.services, self.link(LinkPurpose.NOT_ME))

    def link(self, purpose: LinkPurpose) -> str:
        return sign_link(self.services.settings.data_key_text, purpose, self.a_delivery() or "none")

    def a_delivery(self) -> str | None:
        """Mostly the newest."""
        statement = sa.select(email_deliveries.c.id).order_by(email_deliveries.c.sequence.desc()).limit(4)
        ids = list(run_query(self.services.store, lambda tx: tx.execute(statement).scalars().all()))
        return self.dice.choice([ids[0], *ids]) if ids else None


def act_at_random(
    wait: Callable[[], Any], number: int, settings: Settings, seed: int, begun: float, times: int
) -> Counter[str]:
    dice = random.Random(f"{seed}-{number}")
    services = services_at(settings, FastClock(begun), RandomSender(dice))
    actor = Actor(services, dice, number)
    wait()
    try:
        return Counter(actor.act() for _ in range(times))
    finally:
        services.store.close()


def deadlocks(database_url: str) -> int:
    with psycopg.connect(database_url) as connection:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def test_no_deadlock_reaches_anybody_in_ten_thousand_random_interleavings(
    services: Services, settings: Settings, database_url: str, record_property: Callable[[str, Any], None]
) -> None:
    make_list(services)
    make_list(services, "other")
    generous = settings.model_copy(
        update={"mails_per_address_per_day": 1000, "mails_per_address_per_30_days": 10_000, "lease_seconds": 60}
    )
    seed = random.SystemRandom().randrange(2**32)
    record_property("seed", seed)
    begun = time.time()
    done: Counter[str] = Counter()

    for number in range(ROUNDS):
        times = ROUND // PROCESSES
        done += sum(run_at_once(PROCESSES, act_at_random, generous, seed + number, begun, times), Counter())

    record_property("seconds", time.time() - begun)
    assert done.total() == ROUND * ROUNDS, f"seed {seed}"
    assert len(done) == 8, f"each actor had a turn; seed {seed}"
    assert deadlocks(database_url) == 0, f"seed {seed}"
    assert_sound(services)


def test_worker_settles_while_an_event_holds_the_subscriber(services: Services) -> None:
    """The one order that random runs may miss: the event has the subscriber, the worker the outbox row."""
    make_list(services)
    join(services)
    (delivery,) = deliveries(services)
    holds, may_go = threading.Event(), threading.Event()

    def hold(tx: Transaction) -> None:
        tx.execute(sa.select(subscribers.c.id).with_for_update())
        holds.set()
        assert may_go.wait(20)

    holder = threading.Thread(target=run_transaction, args=(services.store, hold))
    holder.start()
    assert holds.wait(20)
    counts = drain(services, RandomSender(random.Random(0)))
    may_go.set()
    holder.join()

    assert counts.attempts == 1
    assert deliveries(services)[0].id == delivery.id


class TestWhoWaitsForWhom:
    def test_submission_that_an_erasure_waited_for_is_forgotten_too(
        self, services: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_list(services)
        people.suppress(services, EMAIL)
        join(services)
        erasing = threading.Thread(target=erasure.erase, args=(services, EMAIL))
        close = signup.close_request

        def close_while_erasing(tx: Transaction, *rest: Any) -> Any:  # it holds the cap key
            erasing.start()
            wait_for_a_lock_wait(services, erasing)
            return close(tx, *rest)

        monkeypatch.setattr(signup, "close_request", close_while_erasing)
        join(services)
        erasing.join()

        known = sa.select(sa.func.count(signup_requests.c.email_hmac))
        assert run_query(services.store, lambda tx: tx.execute(known).scalar_one()) == 0

    def test_erasure_waits_for_a_ledger_row_before_it_holds_the_cap_key(
        self, services: Services, settings: Settings, database_url: str
    ) -> None:
        make_list(services)
        join(services)
        erasing = threading.Thread(target=erasure.erase, args=(services, EMAIL))

        with services.store.begin() as tx:
            tx.execute(sa.select(signup_requests.c.operation_id).with_for_update())
            erasing.start()
            wait_for_a_lock_wait(services, erasing)
            tx.lock(cap_hmac(settings.data_key_text, EMAIL))  # as a submission under an expired key goes on
        erasing.join()

        assert deadlocks(database_url) == 0
        assert count(services, subscribers) == 0

    def test_suppression_waits_for_the_submission_that_has_looked_already(
        self, services: Services, sender: FakeSender, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_list(services)
        suppressing = threading.Thread(target=people.suppress, args=(services, EMAIL))
        is_capped = signup._is_capped

        def look_while_suppressing(*rest: Any) -> bool:
            suppressing.start()
            wait_for_a_lock_wait(services, suppressing)
            return is_capped(*rest)

        monkeypatch.setattr(signup, "_is_capped", look_while_suppressing)
        join(services)
        suppressing.join()
        drain(services)

        assert sender.mails == []
        assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED

    def test_submissions_at_once_under_many_tags_do_not_overrun_the_cap(self, services: Services) -> None:
        make_list(services)
        thrifty = set_setting(services, mails_per_address_per_day=1)
        barrier = threading.Barrier(PROCESSES)

        def submit(number: int) -> Decision | None:
            barrier.wait(20)
            return join(thrifty, f"person+{number}@example.com").decision

        with ThreadPoolExecutor(PROCESSES) as pool:
            decisions = list(pool.map(submit, range(PROCESSES)))

        assert decisions.count(Decision.QUEUED) == 1


def wait_for_a_lock_wait(services: Services, thread: threading.Thread) -> None:
    """Until somebody in this database waits for a lock, or `thread` has ended without."""
    query = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    end = time.monotonic() + 20
    while thread.is_alive() and not run_query(services.store, lambda tx: tx.execute(query).scalar_one()):
        assert time.monotonic() < end
        time.sleep(0.01)
