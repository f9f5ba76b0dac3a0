"""The worker's state machine on both engines: claim, begin dispatch, send, settle, and whatever can go wrong between."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import SecretStr
from structlog.testing import capture_logs

from tests.factories import FakeClock, FakeSender, make_list
from tests.scenes import (
    EMAIL,
    a_worker,
    assert_sound,
    begin,
    deliveries,
    drain,
    erase,
    everything,
    failed,
    join,
    outbox_rows,
    queue_mails,
    refused,
    set_setting,
    statuses,
    subscriber,
    token_in,
)
from tests.smtp_server import SmtpServer
from waitlist import confirmation, dispatch, ledger, outbox, policy
from waitlist.dispatch import Dispatch, Finished, Provider
from waitlist.errors import StorageBusy
from waitlist.mail import deadline
from waitlist.mail.base import Mail
from waitlist.mail.registry import make_sender
from waitlist.model import DeliveryStatus, OutboxStatus, Outcome, OutcomeKind, SubscriberStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Store, run_query, run_transaction
from waitlist.store.outbox import OutboxRow, lock_row
from waitlist.store.schema import delivery_events, email_outbox

LEASE = 60
DAY = 86_400
ACCEPTED = Outcome(OutcomeKind.ACCEPTED, "250")
TEMPORARY = Outcome(OutcomeKind.TEMPORARY, "smtp_451", "greylisted")
SYSTEMIC = Outcome(OutcomeKind.SYSTEMIC, "auth_failed", "535")
DOUBT = Outcome(OutcomeKind.IN_DOUBT, "lost_after_dot")


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


def claim_one(services: Services, owner: str = "one") -> OutboxRow:
    (row,) = dispatch.claim(services, owner, 1)
    return row


def settle(services: Services, begun: Dispatch, outcome: Outcome) -> None:
    finished = Finished(begun, outcome, duration_ms=7)
    run_transaction(services.store, lambda tx: dispatch.settle(tx, Provider("fake"), finished, 0.5))


def recover(services: Services) -> int:
    return dispatch.recover(services, Provider("fake"))


def row_of(services: Services, row: OutboxRow) -> OutboxRow:
    found = run_transaction(services.store, lambda tx: lock_row(tx, row.id))
    assert found is not None
    return found


def test_accepted_mail_is_sent_once_and_blanked(services: Services, sender: FakeSender) -> None:
    sender.answer_with(Outcome(OutcomeKind.ACCEPTED, "250", provider_message_id="abc"))
    join(services)

    counts = drain(services)
    drain(services)

    (delivery,) = deliveries(services)
    assert counts.outcomes == {OutcomeKind.ACCEPTED: 1}
    assert (delivery.status, delivery.attempts, delivery.provider) == (DeliveryStatus.SENT, 1, "fake")
    assert delivery.provider_message_id == "abc"
    assert len(sender.mails) == 1
    assert_sound(services)


def test_temporary_failure_waits_longer_each_time(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    sender.answer_with(*[TEMPORARY] * 3)
    join(services)

    for attempt in (1, 2, 3):
        drain(services)
        (row,) = outbox_rows(services)
        whole = 15 * 2 ** (attempt - 1)
        assert whole / 2 - 1 <= row.available_at - clock.now <= whole
        assert (row.status, row.attempts) == (OutboxStatus.QUEUED, attempt)
        clock.now = row.available_at - 1
        assert drain(services).attempts == 0
        clock.now = row.available_at
    drain(services)

    assert statuses(services) == [DeliveryStatus.SENT]
    assert len({mail.to_json() for mail in sender.mails}) == 1, "the same bytes on every try"


def test_temporary_failures_end_when_the_link_is_too_old(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.answer_with(*[TEMPORARY] * 10_000)
    join(services)
    (delivery,) = deliveries(services)

    while clock.now < delivery.token_expires_at + 2 * DAY:
        drain(services)
        clock.advance(900)
    assert all_sent_before(services, delivery.token_expires_at - policy.LINK_MARGIN_SECONDS)

    drain(services)
    assert statuses(services) == [DeliveryStatus.FAILED]
    assert deliveries(services)[0].error_code == "link_expired"
    assert_sound(services)


def all_sent_before(services: Services, moment: int) -> bool:
    newest = sa.select(sa.func.max(delivery_events.c.at)).where(delivery_events.c.type == "attempt")
    return bool(run_query(services.store, lambda tx: tx.execute(newest).scalar_one()) <= moment)


@pytest.mark.parametrize(
    ("outcome", "status"), [(refused(), DeliveryStatus.REJECTED), (failed(), DeliveryStatus.FAILED)]
)
def test_refused_mail_ends_dead_and_stops_no_other(
    services: Services, sender: FakeSender, outcome: Outcome, status: DeliveryStatus
) -> None:
    sender.answer_with(outcome)
    join(services)
    join(services, "other@example.com")

    drain(services)

    assert statuses(services) == [status]
    assert statuses(services, "other@example.com") == [DeliveryStatus.SENT]
    assert_sound(services)


def test_systemic_fault_stops_the_drain_and_marks_nobody(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.answer_with(SYSTEMIC)
    for name in "abc":
        join(services, f"{name}@example.com")

    counts = drain(services)

    assert counts.fault == "auth_failed 535"
    assert len(sender.mails) == 1
    for name in "abc":
        (delivery,) = deliveries(services, f"{name}@example.com")
        assert (delivery.status, delivery.attempts) == (DeliveryStatus.QUEUED, 0)
        assert delivery.first_dispatch_at is None
    assert [(row.status, row.attempts, row.claims) for row in outbox_rows(services)] == [("queued", 0, 0)] * 3
    assert ledger.readiness(services).systemic_fault == "auth_failed 535"

    clock.advance(5)
    drain(services)
    assert len(sender.mails) == 4
    assert ledger.readiness(services).systemic_fault is None


def test_what_a_worker_with_a_clock_ahead_recorded_is_no_fault_of_today(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    clock.advance(DAY)
    sender.answer_with(failed(), Outcome(OutcomeKind.SYSTEMIC, "auth_failed", detail="535"))
    join(services, "failed@example.com")
    drain(services)
    join(services)
    drain(services)
    assert len(ledger.outbox_report(services).needs_person) == 2
    clock.advance(-DAY)

    drain(services)

    assert statuses(services) == [DeliveryStatus.SENT]
    assert ledger.readiness(services).systemic_fault is None
    assert ledger.outbox_report(services).needs_person == ()


def test_mail_that_makes_the_provider_say_systemic_does_not_block_the_others(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services, "poison@example.com")
    clock.advance(1)
    join(services, "fine@example.com")
    sender.answer_with(SYSTEMIC)

    drain(services)
    drain(services)

    assert statuses(services, "fine@example.com") == [DeliveryStatus.SENT]


def test_long_retry_after_is_not_taken_for_a_wrong_clock(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.answer_with(Outcome(OutcomeKind.SYSTEMIC, "http_429", retry_after_seconds=3600))
    join(services)
    drain(services)

    clock.advance(60)
    assert drain(services).attempts == 0
    clock.advance(840)
    assert drain(services).attempts == 1


def test_systemic_fault_does_not_use_up_the_mail_cap(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    for _ in range(4):
        sender.answer_with(SYSTEMIC)
        assert join(services).decision == "queued"
        drain(services)
        clock.advance(600)


@pytest.mark.parametrize("attempts_before_doubt", [0, 1])
def test_doubt_without_a_provider_key_sends_one_more_copy_and_then_fails(
    services: Services, sender: FakeSender, clock: FakeClock, attempts_before_doubt: int
) -> None:
    sender.answer_with(*[TEMPORARY] * attempts_before_doubt, DOUBT, DOUBT, DOUBT)
    join(services)

    for _ in range(6):
        drain(services)
        clock.advance(900)

    (delivery,) = deliveries(services)
    assert (delivery.status, delivery.error_code) == (DeliveryStatus.FAILED, "in_doubt")
    assert len(sender.mails) == attempts_before_doubt + 2
    assert len({mail.to_json() for mail in sender.mails}) == 1
    assert_sound(services)


def test_doubt_with_a_provider_key_asks_again_inside_the_window_and_never_after(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.key_window_seconds = 2 * 3600
    sender.answer_with(*[DOUBT] * 100)
    join(services)
    begun = clock.now

    while statuses(services) != [DeliveryStatus.FAILED]:
        drain(services)
        clock.advance(900)

    assert len(sender.mails) > 3
    assert all_sent_before(services, int(begun) + 3600 + 900)
    assert set(sender.keys) == {deliveries(services)[0].id}


def test_expired_lease_on_the_wire_is_in_doubt_and_sent_once_more_at_once(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    assert begin(services, claim_one(services)) is not None

    clock.advance(LEASE - 1)
    assert drain(services).attempts == 0
    clock.advance(1)
    drain(services)

    assert statuses(services) == [DeliveryStatus.SENT]
    assert len(sender.mails) == 1


def test_expired_lease_on_the_wire_twice_is_failed_in_doubt(services: Services, clock: FakeClock) -> None:
    join(services)
    for _ in range(2):
        assert begin(services, claim_one(services)) is not None
        clock.advance(LEASE)
        recover(services)

    (delivery,) = deliveries(services)
    assert (delivery.status, delivery.error_code) == (DeliveryStatus.FAILED, "in_doubt")
    assert_sound(services)


def test_stale_lease_cannot_settle_a_failure(services: Services, clock: FakeClock) -> None:
    join(services)
    late = begin(services, claim_one(services, "late"))
    assert late is not None
    clock.advance(LEASE)
    recover(services)
    heir = begin(services, claim_one(services, "heir"))
    before = everything(services)

    for outcome in (refused(), failed(), TEMPORARY, SYSTEMIC, DOUBT):
        settle(services, late, outcome)

    assert everything(services) == before
    assert heir is not None
    settle(services, heir, ACCEPTED)
    settle(services, late, refused())
    assert statuses(services) == [DeliveryStatus.SENT]
    assert_sound(services)


@pytest.mark.parametrize("heir_outcome", [refused(), TEMPORARY, None])
def test_late_acceptance_is_kept_whatever_became_of_the_lease(
    services: Services, clock: FakeClock, heir_outcome: Outcome | None
) -> None:
    join(services)
    late = begin(services, claim_one(services, "late"))
    assert late is not None
    clock.advance(LEASE)
    recover(services)
    heir = begin(services, claim_one(services, "heir"))
    assert heir is not None
    if heir_outcome:
        settle(services, heir, heir_outcome)

    settle(services, late, ACCEPTED)

    assert statuses(services) == [DeliveryStatus.SENT]
    settle(services, heir, refused())
    assert statuses(services) == [DeliveryStatus.SENT]
    assert row_of(services, late.row).lease_token is None
    clock.advance(DAY // 2)
    assert drain(services).attempts == 0
    assert_sound(services)


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The one of deadlines, which nobody sets."""
    steady = FakeClock()
    monkeypatch.setattr(deadline, "now", steady)
    return steady


def stand_still_once_begun(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """The next worker, between the commit of its begin and its call to the provider."""
    record = outbox._record

    def record_and_stand_still(*arguments: Any) -> Dispatch | None:
        monkeypatch.setattr(outbox, "_record", record)
        dispatch = record(*arguments)
        meanwhile()
        return dispatch

    monkeypatch.setattr(outbox, "_record", record_and_stand_still)


def test_worker_that_wakes_up_after_its_lease_makes_no_second_send(
    services: Services, clock: FakeClock, steady_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(services)
    sleeper, heir = FakeSender(), FakeSender()
    before: list[Any] = []

    def lose_the_lease() -> None:
        clock.advance(LEASE)
        steady_clock.advance(LEASE)
        drain(services, heir)
        before.append(everything(services))

    stand_still_once_begun(monkeypatch, lose_the_lease)
    counts = drain(services, sleeper)

    assert (len(sleeper.mails), len(heir.mails)) == (0, 1)
    assert counts.outcomes == {OutcomeKind.TEMPORARY: 1}
    assert [everything(services)] == before, "its failure counts for nothing"
    assert statuses(services) == [DeliveryStatus.SENT]


def test_mail_that_began_too_late_is_not_sent_and_tried_again(
    services: Services, sender: FakeSender, clock: FakeClock, steady_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(services)

    stand_still_once_begun(monkeypatch, lambda: steady_clock.advance(LEASE / 2))
    drain(services)

    (row,) = outbox_rows(services)
    assert (sender.mails, row.status, row.last_error) == ([], "queued", "late nothing was sent")
    assert not row.in_doubt
    clock.now = row.available_at
    drain(services)
    assert statuses(services) == [DeliveryStatus.SENT]


def test_what_passed_since_the_begin_is_taken_off_the_deadline(
    services: Services, steady_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(services)
    deadlines: list[float] = []

    class Timed(FakeSender):
        def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
            deadlines.append(deadline_seconds)
            return super().send(mail, key=key, deadline_seconds=deadline_seconds)

    stand_still_once_begun(monkeypatch, lambda: steady_clock.advance(10))
    drain(services, Timed())

    assert deadlines == [LEASE / 2 - 10]


def test_no_mail_that_has_begun_waits_for_the_events_of_others(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        join(services, f"p{number}@example.com")
    on_the_wire: list[bool] = []

    def look(_services: Services) -> int:
        on_the_wire.append("dispatching" in {row.status for row in outbox_rows(services)})
        return 0

    monkeypatch.setattr(outbox.delivery_events, "apply_parked", look)
    drain(services)

    assert on_the_wire == [False, False]


def test_settle_of_an_erased_row_writes_nothing(services: Services) -> None:
    join(services)
    dispatch = begin(services, claim_one(services))
    assert dispatch is not None
    erase(services)
    before = everything(services)

    for outcome in (ACCEPTED, refused(), DOUBT):
        settle(services, dispatch, outcome)

    assert everything(services) == before


def test_lease_that_expired_before_dispatch_returns_without_an_attempt(services: Services, clock: FakeClock) -> None:
    join(services)
    row = claim_one(services)
    clock.advance(LEASE)

    assert recover(services) == 1

    back = row_of(services, row)
    assert (back.status, back.attempts, back.claims, back.in_doubt) == (OutboxStatus.QUEUED, 0, 1, False)
    assert begin(services, row) is None, "the old claim is worth nothing now"


def test_row_that_kills_its_worker_again_and_again_ends_dead(services: Services, clock: FakeClock) -> None:
    join(services)

    for _ in range(policy.MOST_CLAIMS + 1):
        claim_one(services)
        clock.advance(LEASE)
        recover(services)

    (delivery,) = deliveries(services)
    assert (delivery.status, delivery.error_code) == (DeliveryStatus.FAILED, "crash_loop")
    assert_sound(services)


def test_poison_row_ends_dead_and_never_stops_the_others(services: Services, sender: FakeSender) -> None:
    for name in ("hash", "json", "header", "fine"):
        join(services, f"{name}@example.com")
    for name, message in {
        "hash": "anything",
        "json": "{",
        "header": '{"subject":"a\\nBcc: x@example.com","text":"","html":"","headers":[["From","a@example.com"]]}',
    }.items():
        spoil(services, f"{name}@example.com", message, keep_hash=name == "hash")

    drain(services)

    for name in ("hash", "json", "header"):
        (delivery,) = deliveries(services, f"{name}@example.com")
        assert (delivery.status, delivery.error_code) == (DeliveryStatus.FAILED, "damaged")
    assert [mail.recipient for mail in sender.mails] == ["fine@example.com"]
    assert_sound(services)


def spoil(services: Services, email: str, message: str, *, keep_hash: bool) -> None:
    import hashlib

    values = {"message": message} | (
        {} if keep_hash else {"payload_hash": hashlib.sha256(message.encode()).hexdigest()}
    )
    statement = sa.update(email_outbox).where(email_outbox.c.recipient == email).values(values)
    run_transaction(services.store, lambda tx: tx.execute(statement).rowcount)


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), ValueError("another")], ids=["RuntimeError", "ValueError"])
def test_sender_that_raises_leaves_its_mail_in_doubt_and_the_others_go_on(
    services: Services, sender: FakeSender, bug: Exception
) -> None:
    sender.answer_with(bug)
    join(services, "first@example.com")
    join(services, "second@example.com")

    drain(services)

    assert [row.in_doubt for row in outbox_rows(services)] == [True, False]
    assert statuses(services, "second@example.com") == [DeliveryStatus.SENT]


def test_mail_that_cannot_be_written_ends_dead_and_never_reaches_the_wire(services: Services) -> None:
    join(services)
    header = ["X-Title", "é"]
    frozen = {"subject": "s", "text": "t", "html": "h", "headers": [["From", "w@example.com"], header]}
    spoil(services, EMAIL, json.dumps(frozen), keep_hash=False)

    with SmtpServer() as server:
        smtp = set_setting(services, mail_url=SecretStr(server.url))
        drain(smtp, make_sender(smtp.settings))

        assert server.commands == []
    (delivery,) = deliveries(services)
    assert (delivery.status, delivery.error_code) == (DeliveryStatus.FAILED, "damaged")
    assert [row.status for row in outbox_rows(services)] == [OutboxStatus.DEAD]


def test_mail_of_somebody_no_longer_pending_is_superseded(services: Services, sender: FakeSender) -> None:
    join(services)
    row = claim_one(services)
    set_subscriber(services, SubscriberStatus.UNSUBSCRIBED)

    assert begin(services, row) is None

    assert statuses(services) == [DeliveryStatus.SUPERSEDED]
    assert sender.mails == []
    assert_sound(services)


def set_subscriber(services: Services, status: SubscriberStatus) -> None:
    from waitlist.store.schema import subscribers

    statement = sa.update(subscribers).values(status=status, unsubscribed_at=1)
    run_transaction(services.store, lambda tx: tx.execute(statement).rowcount)


@pytest.mark.parametrize(("hours", "mails"), [(22.9, 1), (23.1, 0), (25, 0)])
def test_mail_whose_link_is_nearly_over_is_never_sent(
    services: Services, sender: FakeSender, clock: FakeClock, hours: float, mails: int
) -> None:
    join(services)
    clock.advance(hours * 3600)

    drain(services)

    assert len(sender.mails) == mails


def test_mail_whose_link_is_too_old_is_not_reported_as_due(services: Services, clock: FakeClock) -> None:
    join(services)
    clock.advance(22 * 3600)
    assert ledger.outbox_report(services).due == 1
    assert ledger.readiness(services).oldest_due_seconds == 22 * 3600

    clock.advance(2 * 3600)

    report = ledger.outbox_report(services)
    assert (report.due, report.waiting, report.needs_person) == (0, 1, ())
    assert ledger.readiness(services).oldest_due_seconds is None


def waits_of_follower(services: Services, monkeypatch: pytest.MonkeyPatch, times: int = 3) -> list[float]:
    """How long a worker that follows waits each time, as if nothing happened meanwhile; until `times` waits."""
    worker = a_worker(services)
    waits: list[float] = []

    def wait(seconds: float, _is_stopping: Callable[[], bool]) -> None:
        waits.append(seconds)
        if len(waits) == times:
            worker.stop.set()

    monkeypatch.setattr(services.store, "watch", lambda: nullcontext(wait))
    outbox.follow(worker)
    return waits


def test_follower_with_a_mail_that_is_too_old_looks_no_more_often_than_any_idle_one(
    services: Services, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(services)
    clock.advance(25 * 3600)

    assert waits_of_follower(services, monkeypatch) == [outbox.IDLE_SECONDS] * 3


@pytest.mark.parametrize(("age", "wait"), [(0, outbox.SOON_SECONDS), (1, outbox.IDLE_SECONDS)])
def test_follower_whose_budget_is_used_up_looks_often_only_at_what_fell_due_in_this_second(
    services: Services, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, age: int, wait: float
) -> None:
    """Of such a row nobody can say whether it was there when the worker claimed."""
    frugal = set_setting(services, mail_budget_per_hour=1)
    for number in range(3):
        join(frugal, f"p{number}@example.com")
    clock.advance(age)

    assert waits_of_follower(frugal, monkeypatch) == [wait] * 3


def test_follower_outlives_a_bug_and_logs_it_without_its_text(
    services: Services, sender: FakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(services)
    pauses: list[float] = []
    claim = dispatch.claim

    def stumble(*_arguments: Any) -> list[OutboxRow]:
        if len(pauses) == 2:
            monkeypatch.setattr(outbox, "claim", claim)
        raise RuntimeError(f"a bug with {EMAIL}")

    monkeypatch.setattr(outbox, "claim", stumble)
    monkeypatch.setattr(threading.Event, "wait", lambda _event, seconds: pauses.append(seconds))
    with capture_logs() as logs:
        waits_of_follower(services, monkeypatch)

    assert pauses == [5, 10, 20]
    assert [mail.recipient for mail in sender.mails] == [EMAIL]
    failures = [entry for entry in logs if entry["event"] == "worker_failed"]
    assert [failure["error"] for failure in failures] == ["RuntimeError"] * 3
    assert "in stumble" in failures[0]["where"][-1]
    assert EMAIL not in repr(logs)


def test_follower_purges_a_minute_after_its_start_and_not_before(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopwatch: Any = SimpleNamespace(now=100.0, monotonic=lambda: stopwatch.now)
    monkeypatch.setattr(outbox, "time", stopwatch)
    purged_at: list[float] = []
    monkeypatch.setattr(outbox, "purge", lambda _services, longest_seconds: purged_at.append(stopwatch.now))
    worker = a_worker(services)

    def wait(_seconds: float, _is_stopping: Callable[[], bool]) -> None:
        stopwatch.now += 20
        if stopwatch.now > 240:
            worker.stop.set()

    monkeypatch.setattr(services.store, "watch", lambda: nullcontext(wait))
    outbox.follow(worker)

    assert purged_at == [160, 220]


def test_follower_wakes_when_the_lease_of_another_ends(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    join(services)
    dispatch.claim(set_setting(services, lease_seconds=2), "other", 1)

    assert waits_of_follower(services, monkeypatch, times=1) == [2]


def test_short_lived_link_is_sent_while_a_quarter_of_its_life_is_left(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    short = set_setting(services, token_ttl_seconds=1200)
    join(short)

    clock.advance(901)
    assert drain(short).attempts == 0
    clock.advance(-1)
    assert drain(short).attempts == 1


def test_too_old_mails_stop_nobody_and_a_resubmission_supersedes_one(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    for number in range(60):
        join(services, f"old{number}@example.com")
    clock.advance(25 * 3600)
    join(services, "new@example.com")
    join(services, "old1@example.com")

    drain(services)

    assert sorted(mail.recipient for mail in sender.mails) == ["new@example.com", "old1@example.com"]
    assert statuses(services, "old1@example.com") == [DeliveryStatus.SUPERSEDED, DeliveryStatus.SENT]
    assert statuses(services, "old2@example.com") == [DeliveryStatus.QUEUED]


def test_worker_clock_one_day_ahead_marks_nobody_failed(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    clock.advance(DAY)

    drain(services)
    assert statuses(services) == [DeliveryStatus.QUEUED]

    clock.advance(-DAY)
    drain(services)
    assert statuses(services) == [DeliveryStatus.SENT]


def test_due_time_and_lease_far_ahead_count_as_reached(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    clock.advance(DAY)
    join(services, "due@example.com")
    join(services, "leased@example.com")
    dispatch.claim(services, "gone", 1)
    clock.advance(-DAY)

    drain(services)

    assert len(sender.mails) == 2


def test_hourly_budget_lets_the_rest_wait(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    frugal = set_setting(services, mail_budget_per_hour=3)
    for number in range(5):
        join(frugal, f"p{number}@example.com")

    drain(frugal)
    assert len(sender.mails) == 3
    clock.advance(3599)
    drain(frugal)
    assert len(sender.mails) == 3
    clock.advance(1)
    drain(frugal)
    assert len(sender.mails) == 5


def test_mails_in_doubt_count_against_the_budget(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    sender.answer_with(*[DOUBT] * 10)
    frugal = set_setting(services, mail_budget_per_hour=3)
    for number in range(5):
        join(frugal, f"p{number}@example.com")

    for _ in range(6):
        drain(frugal)
        clock.advance(599)
    assert len(sender.mails) == 3

    clock.advance(6)
    drain(frugal)
    assert len(sender.mails) == 6


def test_mails_that_left_while_the_clock_was_ahead_do_not_use_up_the_budget(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    frugal = set_setting(services, mail_budget_per_hour=1)
    clock.advance(30 * DAY)
    join(frugal, "early@example.com")
    drain(frugal)
    clock.advance(-30 * DAY)
    join(frugal)

    drain(frugal)

    assert len(sender.mails) == 2


def test_limit_counts_attempts(services: Services, sender: FakeSender) -> None:
    for number in range(5):
        join(services, f"p{number}@example.com")

    assert drain(services, limit=3).attempts == 3
    assert len(sender.mails) == 3


def test_stop_finishes_the_mail_on_the_wire_and_releases_the_rest(services: Services) -> None:
    for number in range(3):
        join(services, f"p{number}@example.com")
    worker = a_worker(services)
    stopping = replace(worker, on_mail=lambda _outcome: worker.stop.set())

    counts = outbox.drain(stopping)

    assert counts.attempts == 1
    assert [(row.status, row.claims) for row in outbox_rows(services)] == [("sent", 0), ("queued", 0), ("queued", 0)]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_release_waits_for_no_row_that_somebody_else_has(services: Services) -> None:
    for number in range(3):
        join(services, f"p{number}@example.com")
    rows = dispatch.claim(services, "test", 3)
    worker = a_worker(services)
    worker.stop.set()

    with services.store.begin() as tx:
        lock_row(tx, rows[1].id)
        outbox.send_batch(worker, rows)

    assert [row.status for row in outbox_rows(services)] == ["queued", "leased", "queued"]


def test_mail_is_given_back_when_half_a_lease_has_passed(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        join(services, f"p{number}@example.com")
    stopwatch: Any = SimpleNamespace(now=0.0, monotonic=lambda: stopwatch.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(outbox, "time", stopwatch)
    worker = replace(a_worker(services), on_mail=lambda _outcome: setattr(stopwatch, "now", LEASE / 2))

    counts = outbox.send_batch(worker, dispatch.claim(services, "slow", 3))

    assert counts.attempts == 1
    assert [(row.status, row.claims) for row in outbox_rows(services)] == [("sent", 0), ("queued", 0), ("queued", 0)]


def test_confirming_through_the_link_proves_that_a_doubtful_mail_arrived(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.answer_with(DOUBT)
    join(services)
    drain(services)

    confirmation.confirm(services, token_in(sender.mails[0]))
    clock.advance(900)
    drain(services)

    assert statuses(services) == [DeliveryStatus.SENT]
    assert len(sender.mails) == 1
    assert_sound(services)


def test_confirming_cancels_a_newer_mail_that_is_still_queued(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    drain(services)
    clock.advance(600)
    join(services)

    confirmation.confirm(services, token_in(sender.mails[0]))

    assert statuses(services) == [DeliveryStatus.SENT, DeliveryStatus.SUPERSEDED]
    drain(services)
    assert len(sender.mails) == 1
    assert subscriber(services).status is SubscriberStatus.CONFIRMED


def test_two_messages_never_share_an_object(services: Services, sender: FakeSender) -> None:
    join(services, "a@example.com")
    join(services, "b@example.com")

    drain(services)

    first, second = sender.mails
    assert first is not second
    assert (first.recipient, second.recipient) == ("a@example.com", "b@example.com")
    assert token_in(first) != token_in(second)


def test_ten_thousand_expired_leases_all_come_back(services: Services, clock: FakeClock) -> None:
    queue_mails(services, 10_000)
    assert len(dispatch.claim(services, "gone", 10_000)) == 10_000
    clock.advance(LEASE)

    assert recover(services) == 10_000

    assert {(row.status, row.claims, row.attempts) for row in outbox_rows(services)} == {("queued", 1, 0)}


def test_every_attempt_is_an_event_with_its_outcome_and_duration(services: Services, sender: FakeSender) -> None:
    sender.answer_with(TEMPORARY)
    join(services)
    drain(services)

    found = ledger.explain(services, EMAIL)

    assert [entry.what for entry in found.entries if entry.kind == "event"] == ["attempt", "temporary"]
    statement = sa.select(delivery_events.c.type, delivery_events.c.duration_ms, delivery_events.c.detail)
    events = run_query(services.store, lambda tx: tx.execute(statement).all())
    assert [(event.type, event.duration_ms is not None) for event in events] == [
        ("attempt", False),
        ("temporary", True),
    ]
    assert EMAIL not in repr(events)


def test_mail_object_survives_the_outbox_unchanged() -> None:
    mail = Mail("a@example.com", "Sübject", "text\n", "<p>", (("From", "W <w@example.com>"), ("Date", "x")))

    assert Mail.from_json("a@example.com", mail.to_json()) == mail


def test_worker_that_wakes_up_gives_back_nothing_that_its_heir_has_claimed(
    services: Services, clock: FakeClock
) -> None:
    join(services)
    late = claim_one(services, "late")
    clock.advance(LEASE)
    dispatch.recover(services, Provider("fake"))
    heir = claim_one(services, "heir")

    run_transaction(services.store, lambda tx: dispatch.release_all(tx, [late]))

    assert row_of(services, heir).lease_token == heir.lease_token
    assert begin(services, heir) is not None


def test_link_that_grew_too_old_since_the_claim_is_not_sent(services: Services, clock: FakeClock) -> None:
    join(services)
    clock.advance(DAY - 3600)
    row = claim_one(services)
    clock.advance(1)

    assert begin(services, row) is None
    again = row_of(services, row)
    assert (again.status, again.attempts, again.lease_token) == (OutboxStatus.QUEUED, 0, None)


def test_time_that_the_begin_itself_takes_is_taken_off_the_deadline(
    services: Services, sender: FakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = FakeClock()
    run = outbox.run_transaction

    def slow(store: Store, body: Callable[[Any], Any]) -> Any:
        monkeypatch.setattr(outbox, "run_transaction", run)
        steady.advance(LEASE / 2)  # the wait for the lock, before this attempt's lease is written
        return run(store, body)

    join(services)
    monkeypatch.setattr(deadline, "now", steady)
    monkeypatch.setattr(outbox, "run_transaction", slow)

    drain(services)

    assert (sender.mails, outbox_rows(services)[0].last_error) == ([], "late nothing was sent")


def test_rows_that_another_worker_holds_count_against_the_budget(services: Services) -> None:
    for number in range(3):
        join(services, f"p{number}@example.com")
    frugal = set_setting(services, mail_budget_per_hour=2)

    assert len(dispatch.claim(frugal, "one", 2)) == 2
    assert dispatch.claim(frugal, "two", 2) == []


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
class TestClaimsOfTwoWorkers:
    @pytest.fixture
    def impatient(self, services: Services, database_url: str, clock: FakeClock) -> Iterator[Services]:
        store = Store(database_url, clock=clock, lock_wait=0.2)
        yield replace(services, store=store)
        store.close()

    def test_claims_take_turns_or_both_would_spend_one_budget(self, services: Services, impatient: Services) -> None:
        join(services)

        with services.store.begin() as tx:
            tx.lock("waitlist.claim")
            with pytest.raises(StorageBusy):
                dispatch.claim(impatient, "two", 1)

    def test_claim_waits_for_no_row_that_somebody_else_has(self, services: Services, impatient: Services) -> None:
        for number in range(3):
            join(services, f"p{number}@example.com")
        first, *others = outbox_rows(services)

        with services.store.begin() as tx:
            lock_row(tx, first.id)
            claimed = dispatch.claim(impatient, "two", 3)

        assert [row.id for row in claimed] == [row.id for row in others]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_token_lives_on_in_no_file_when_a_drain_is_done(
    services: Services, settings: Settings, sender: FakeSender
) -> None:
    join(services)
    token = outbox_rows(services)[0].confirmation_url.rpartition("/")[2].encode()

    outbox.drain_all([a_worker(services, sender)])

    files = settings.database_path.parent.glob(f"{settings.database_path.name}*")
    assert not any(token in file.read_bytes() for file in files)
