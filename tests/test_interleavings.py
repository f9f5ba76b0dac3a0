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
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from tests.factories import FakeSender, make_list
from tests.processes import run_at_once
from tests.scenes import EMAIL, assert_sound, deliveries, drain, join, services_at
from waitlist import confirmation, delivery_events, erasure, people
from waitlist.mail.base import Mail
from waitlist.model import EventType, Outcome, OutcomeKind, ProviderEvent
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.schema import email_deliveries, email_outbox, subscribers
from waitlist.tokens import LinkPurpose, sign_link

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
