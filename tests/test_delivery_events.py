"""What a provider's events do: the same end whatever their order, once whatever their number, and to nobody else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from tests.factories import FakeClock, FakeSender, make_list
from tests.processes import run_at_once
from tests.scenes import (
    EMAIL,
    assert_sound,
    begin,
    count,
    deliveries,
    drain,
    erase,
    everything,
    failed,
    join,
    outbox_rows,
    services_at,
    statuses,
    subscriber,
    token_in,
)
from waitlist import confirmation, delivery_events, dispatch, ledger, people, policy
from waitlist.confirmation import look
from waitlist.delivery_events import Fate
from waitlist.model import (
    Channel,
    ConfirmOutcome,
    Decision,
    DeliveryStatus,
    EventType,
    Outcome,
    OutcomeKind,
    ProviderEvent,
    SubscriberStatus,
    Suppression,
)
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.schema import delivery_events as event_table
from waitlist.store.schema import email_deliveries, subscribers, suppressions
from waitlist.tokens import LinkPurpose, sign_link

PROVIDER = "fake"
DAY = 86_400
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
DOUBT = Outcome(OutcomeKind.IN_DOUBT, "timeout_answer")


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


def an_event(kind: EventType, **changes: Any) -> ProviderEvent:
    values: dict[str, Any] = {
        "event_id": f"msg-{kind}",
        "type": kind,
        "recipient": EMAIL,
        "delivery_id": None,
        "provider_message_id": "fake-1",
    }
    return ProviderEvent(**(values | changes))


def report(services: Services, kind: EventType, **changes: Any) -> Fate:
    (fate,) = delivery_events.record(services, PROVIDER, [an_event(kind, **changes)])
    return fate


def send_one(services: Services, email: str = EMAIL) -> str:
    """The id of the delivery; the provider named its mail fake-<number>."""
    join(services, email)
    drain(services)
    return deliveries(services, email)[-1].id


def stored(services: Services) -> Counter[str]:
    statement = sa.select(event_table.c.type).where(event_table.c.event_id.is_not(None))
    return Counter(run_query(services.store, lambda tx: tx.execute(statement).scalars().all()))


def parked(services: Services) -> int:
    statement = sa.select(sa.func.count()).select_from(event_table).where(event_table.c.delivery_id.is_(None))
    return int(run_query(services.store, lambda tx: tx.execute(statement).scalar_one()))


# What each event does


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (EventType.SENT, DeliveryStatus.SENT),
        (EventType.DELIVERED, DeliveryStatus.DELIVERED),
        (EventType.BOUNCED, DeliveryStatus.BOUNCED),
        (EventType.COMPLAINED, DeliveryStatus.COMPLAINED),
        (EventType.SOFT_BOUNCED, DeliveryStatus.SENT),
        (EventType.DELAYED, DeliveryStatus.SENT),
    ],
)
@pytest.mark.parametrize("named_by", ["delivery", "message"])
def test_event_moves_the_delivery_it_names(
    services: Services, kind: EventType, status: DeliveryStatus, named_by: str
) -> None:
    delivery_id = send_one(services)
    names = {"delivery": {"delivery_id": delivery_id, "provider_message_id": None}, "message": {}}[named_by]

    fate = report(services, kind, **names)

    assert fate is Fate.APPLIED
    assert statuses(services) == [status]
    assert stored(services) == {kind: 1}
    assert_sound(services)


def test_bounce_opens_one_immediate_retry(services: Services, sender: FakeSender) -> None:
    first = send_one(services)
    report(services, EventType.BOUNCED)

    decisions = [join(services).decision for _ in range(3)]
    drain(services)

    assert decisions == [Decision.RETRY_QUEUED, Decision.COOLDOWN, Decision.COOLDOWN]
    assert [delivery.retry_of_delivery_id for delivery in deliveries(services)] == [None, first]
    assert len(sender.mails) == 2


@pytest.mark.parametrize("kind", [EventType.SOFT_BOUNCED, EventType.DELAYED])
def test_soft_bounce_and_delay_open_nothing(services: Services, kind: EventType) -> None:
    send_one(services)
    report(services, kind)

    assert join(services).decision is Decision.COOLDOWN
    assert count(services, suppressions) == 0


def test_complaint_suppresses_the_address_on_every_list(services: Services, sender: FakeSender) -> None:
    make_list(services, "other")
    send_one(services)
    join(services, list_id="other")  # its mail still waits

    report(services, EventType.COMPLAINED)

    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED
    assert subscriber(services, list_id="other").status is SubscriberStatus.UNSUBSCRIBED
    assert ledger.explain(services, EMAIL).suppression is Suppression.COMPLAINT
    assert [join(services, list_id=name).decision for name in ("launch", "other")] == [Decision.SUPPRESSED] * 2
    drain(services)
    assert len(sender.mails) == 1
    assert_sound(services)


def test_complaint_of_a_confirmed_person_unsubscribes_them(services: Services, sender: FakeSender) -> None:
    send_one(services)
    confirmation.confirm(services, token_in(sender.mails[0]))

    report(services, EventType.COMPLAINED)

    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED
    assert subscriber(services).confirmed_at is not None


def test_bounce_after_confirmation_changes_the_delivery_only(services: Services, sender: FakeSender) -> None:
    send_one(services)
    confirmation.confirm(services, token_in(sender.mails[0]))
    before = subscriber(services)

    report(services, EventType.BOUNCED)

    assert subscriber(services) == before
    assert statuses(services) == [DeliveryStatus.BOUNCED]
    assert join(services).decision is Decision.ALREADY_CONFIRMED


def test_bounce_after_unsubscribing_leaves_them_unsubscribed(services: Services) -> None:
    delivery_id = send_one(services)
    run_transaction(services.store, lambda tx: confirmation.leave(tx, subscriber(services).id))

    report(services, EventType.BOUNCED, delivery_id=delivery_id)

    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED


def test_bounce_of_an_older_delivery_opens_nothing(services: Services, clock: FakeClock) -> None:
    first = send_one(services)
    clock.advance(600)
    second = send_one(services)

    report(services, EventType.BOUNCED, delivery_id=first)

    assert first != second
    assert statuses(services) == [DeliveryStatus.BOUNCED, DeliveryStatus.SENT]
    assert join(services).decision is Decision.COOLDOWN


@pytest.mark.parametrize(
    "recipient", ["other@example.com", None, "not an address", "person@example.com, b@example.com"]
)
@pytest.mark.parametrize("kind", [EventType.BOUNCED, EventType.COMPLAINED, EventType.DELIVERED])
def test_event_about_another_recipient_is_kept_and_changes_nothing(
    services: Services, kind: EventType, recipient: str | None
) -> None:
    delivery_id = send_one(services)
    before = {name: rows for name, rows in everything(services).items() if name != "delivery_events"}

    fate = report(services, kind, delivery_id=delivery_id, recipient=recipient)

    assert fate is Fate.FOREIGN
    assert {name: rows for name, rows in everything(services).items() if name != "delivery_events"} == before
    assert stored(services) == {EventType.FOREIGN: 1}


def test_recipient_is_compared_in_canonical_form(services: Services) -> None:
    send_one(services)

    assert report(services, EventType.BOUNCED, recipient="Person@EXAMPLE.com") is Fate.APPLIED


def test_event_of_another_provider_with_the_same_message_id_is_not_ours(services: Services) -> None:
    send_one(services)

    assert delivery_events.record(services, "resend", [an_event(EventType.BOUNCED)]) == {Fate.PARKED: 1}
    assert statuses(services) == [DeliveryStatus.SENT]


# Once


def test_same_event_a_hundred_times_is_one_event_and_one_change(services: Services, clock: FakeClock) -> None:
    send_one(services)
    fates: Counter[Fate] = Counter()

    for _ in range(100):
        fates += delivery_events.record(services, PROVIDER, [an_event(EventType.BOUNCED)])
        clock.advance(1)

    assert fates == {Fate.APPLIED: 1, Fate.DUPLICATE: 99}
    assert stored(services) == {EventType.BOUNCED: 1}
    assert statuses(services) == [DeliveryStatus.BOUNCED]


def report_at_once(wait: Callable[[], Any], number: int, settings: Settings, now: float, times: int) -> Counter[Fate]:
    services = services_at(settings, FakeClock(now))
    wait()
    events = [an_event(EventType.COMPLAINED)] * times
    return delivery_events.record(services, PROVIDER, events)


def test_hundred_copies_at_once_are_one_event_and_one_change(
    services: Services, settings: Settings, clock: FakeClock
) -> None:
    send_one(services)

    fates: Counter[Fate] = sum(run_at_once(4, report_at_once, settings, clock.now, 25), Counter())

    assert fates == {Fate.APPLIED: 1, Fate.DUPLICATE: 99}
    assert stored(services) == {EventType.COMPLAINED: 1}
    assert count(services, suppressions) == 1
    assert_sound(services)


def resubmit_at_once(wait: Callable[[], Any], number: int, settings: Settings, now: float) -> list[str]:
    services = services_at(settings, FakeClock(now))
    wait()
    return [join(services).decision for _ in range(3)]


def test_concurrent_resubmissions_after_a_bounce_event_send_one_new_mail(
    services: Services, settings: Settings, sender: FakeSender, clock: FakeClock
) -> None:
    send_one(services)
    report(services, EventType.BOUNCED)

    answers = run_at_once(4, resubmit_at_once, settings, clock.now)
    decisions = Counter(decision for of_process in answers for decision in of_process)
    drain(services)

    assert decisions[Decision.RETRY_QUEUED] == 1
    assert len(sender.mails) == 2
    assert_sound(services)


def test_address_that_always_bounces_gets_no_more_than_the_caps_in_thirty_days(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    per_day: Counter[int] = Counter()
    for hour in range(30 * 24):
        before = len(sender.mails)
        join(services)
        drain(services)
        if len(sender.mails) > before:
            per_day[hour // 24] += 1
            latest = deliveries(services)[-1]
            report(services, EventType.BOUNCED, event_id=f"b{hour}", delivery_id=latest.id)
        clock.advance(3600)

    assert len(sender.mails) == services.settings.mails_per_address_per_30_days
    assert max(per_day.values()) <= services.settings.mails_per_address_per_day


# Before, after and instead of our own record


def test_event_before_the_send_is_recorded_waits_and_is_applied_by_the_worker(
    services: Services, sender: FakeSender
) -> None:
    assert report(services, EventType.BOUNCED) is Fate.PARKED
    assert parked(services) == 1

    send_one(services)

    assert statuses(services) == [DeliveryStatus.BOUNCED]
    assert (parked(services), stored(services)) == (0, {EventType.BOUNCED: 1})
    assert join(services).decision is Decision.RETRY_QUEUED
    assert_sound(services)


def test_parked_event_is_applied_as_soon_as_its_send_is_recorded(services: Services) -> None:
    """Not only by the next drain."""
    report(services, EventType.DELIVERED)
    join(services)

    drain(services)

    assert statuses(services) == [DeliveryStatus.DELIVERED]


def test_drain_applies_what_a_busy_database_held_up(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    report(services, EventType.DELIVERED)
    with monkeypatch.context() as patch:
        patch.setattr(delivery_events, "apply_parked", lambda _services: 0)
        send_one(services)
    assert statuses(services) == [DeliveryStatus.SENT]

    drain(services)

    assert statuses(services) == [DeliveryStatus.DELIVERED]


def test_send_recorded_between_look_and_commit_of_an_event_loses_nothing(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker saw no parked event, and the event saw no delivery: whoever commits last must look again."""
    record_one = delivery_events._record_one

    def park_then_send(*arguments: Any) -> Fate:
        fate = record_one(*arguments)
        assert fate is Fate.PARKED
        with monkeypatch.context() as patch:
            patch.setattr(delivery_events, "apply_parked", lambda _services: 0)
            patch.setattr(delivery_events, "drop_stale", lambda _services: 0)
            send_one(services)
        return fate

    monkeypatch.setattr(delivery_events, "_record_one", park_then_send)
    report(services, EventType.DELIVERED)

    assert statuses(services) == [DeliveryStatus.DELIVERED]


def test_complaint_and_wrong_recipient_are_told_apart_when_parked_too(services: Services) -> None:
    report(services, EventType.COMPLAINED, recipient="other@example.com")

    send_one(services)

    assert statuses(services) == [DeliveryStatus.SENT]
    assert count(services, suppressions) == 0
    assert stored(services) == {EventType.FOREIGN: 1}


def test_event_that_nobody_claims_is_dropped_after_a_day_and_counted(services: Services, clock: FakeClock) -> None:
    report(services, EventType.BOUNCED, provider_message_id="of-another-installation")

    clock.advance(DAY - 1)
    drain(services)
    assert parked(services) == 1
    report(services, EventType.SENT, provider_message_id="of-another-installation")
    clock.advance(1)

    assert delivery_events.drop_stale(services) == 1
    assert parked(services) == 1, "the younger one"
    assert delivery_events.drop_stale(services) == 0


def test_attached_event_is_not_dropped(services: Services, clock: FakeClock) -> None:
    send_one(services)
    report(services, EventType.DELIVERED)

    clock.advance(10 * DAY)
    drain(services)

    assert stored(services) == {EventType.DELIVERED: 1}


def test_event_about_an_erased_person_writes_nothing_about_them(services: Services) -> None:
    delivery_id = send_one(services)
    erase(services)

    assert report(services, EventType.COMPLAINED, delivery_id=delivery_id) is Fate.PARKED
    assert count(services, suppressions) == 0


@pytest.mark.parametrize("kind", [EventType.SENT, *delivery_events.STATUS_OF])
@pytest.mark.parametrize("stands", ["queued again in doubt", "on the wire", "failed", "superseded"])
def test_event_proves_acceptance_whatever_the_row_says(
    services: Services, sender: FakeSender, clock: FakeClock, stands: str, kind: EventType
) -> None:
    sender.answer_with(failed() if stands == "failed" else DOUBT)
    join(services)
    (delivery,) = deliveries(services)
    if stands == "on the wire":
        (row,) = dispatch.claim(services, "one", 1)
        begin(services, row, PROVIDER)
    else:
        drain(services)
    if stands == "superseded":
        clock.advance(600)
        join(services)

    report(services, kind, delivery_id=delivery.id)

    first = next(found for found in deliveries(services) if found.id == delivery.id)
    assert first.status is delivery_events.STATUS_OF.get(kind, DeliveryStatus.SENT)
    row = next(found for found in outbox_rows(services) if found.delivery_id == delivery.id)
    assert (row.status, row.lease_token, row.message) == ("sent", None, "")
    assert_sound(services)


def test_failure_of_a_copy_after_the_event_is_fenced(services: Services) -> None:
    join(services)
    (claimed,) = dispatch.claim(services, "one", 1)
    begun = begin(services, claimed, PROVIDER)
    assert begun is not None
    report(services, EventType.SENT, delivery_id=claimed.delivery_id)

    finished = dispatch.Finished(begun, failed(), duration_ms=7)
    run_transaction(services.store, lambda tx: dispatch.settle(tx, dispatch.Provider(PROVIDER), finished, 0.5))

    assert statuses(services) == [DeliveryStatus.SENT]
    assert_sound(services)


# Any order

KINDS = [
    EventType.SENT,
    EventType.DELAYED,
    EventType.SOFT_BOUNCED,
    EventType.DELIVERED,
    EventType.BOUNCED,
    EventType.COMPLAINED,
]
STEPS = ["send", *KINDS, *KINDS]


@ON_SQLITE
@given(steps=st.permutations(STEPS), tagged=st.booleans())
@budget(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_events_end_alike_in_every_order(services: Services, steps: list[Any], tagged: bool) -> None:
    """Twice each, before, while and after the send is recorded; matched by our id or by the provider's."""
    forget_everybody(services)
    join(services)
    (delivery,) = deliveries(services)
    sender = FakeSender()

    for step in steps:
        if step == "send":
            drain(services, sender)
        else:
            report(services, step, delivery_id=delivery.id if tagged else None)
    drain(services, sender)

    assert len(sender.mails) <= 1, "a mail that the provider has told us about is not sent again"
    assert statuses(services) == [DeliveryStatus.COMPLAINED]
    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED
    assert ledger.explain(services, EMAIL).suppression is Suppression.COMPLAINT
    assert stored(services) == dict.fromkeys(KINDS, 1)
    assert parked(services) == 0
    assert_sound(services)


@ON_SQLITE
@given(kinds=st.lists(st.sampled_from(KINDS[:5]), max_size=8))
@budget(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_delivery_only_moves_forward(services: Services, kinds: list[EventType]) -> None:
    forget_everybody(services)
    join(services)
    drain(services, FakeSender())
    ranks = []

    for number, kind in enumerate(kinds):
        report(services, kind, event_id=f"e{number}")
        ranks.append(policy.EVENT_RANK[statuses(services)[0]])

    assert ranks == sorted(ranks)
    assert subscriber(services).status is SubscriberStatus.PENDING


def forget_everybody(services: Services) -> None:
    """Hypothesis runs all of its examples on one database."""
    run_transaction(services.store, _forget_everybody)


def _forget_everybody(tx: Transaction) -> None:
    for table in (event_table, suppressions, subscribers):
        tx.execute(sa.delete(table))


# What the owner sees and does


def test_explain_tells_the_events_in_words(services: Services) -> None:
    send_one(services)
    report(services, EventType.DELIVERED)
    report(services, EventType.BOUNCED, detail="email.bounced Permanent mailbox unknown")

    words = [entry.words for entry in ledger.explain(services, EMAIL).entries if entry.kind == "event"]

    assert any(line.startswith("delivered: the recipient's server has it by fake") for line in words)
    assert any("did not arrive" in line and line.endswith("Permanent mailbox unknown") for line in words)


def told(services: Services, kind: str) -> list[tuple[float, str, str]]:
    entries = ledger.explain(services, EMAIL).entries
    return [(entry.at, entry.what, entry.words) for entry in entries if entry.kind == kind]


def test_explain_tells_confirmation_leaving_and_suppression(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    send_one(services)
    clock.advance(600)
    send_one(services)
    confirmation.confirm(services, token_in(sender.mails[1]))
    confirmed_at = clock.now
    clock.advance(60)
    people.suppress(services, EMAIL)

    assert told(services, "subscriber") == [
        (confirmed_at, "confirmed", "first confirmed through mail 2"),
        (clock.now, "suppressed", "suppressed on every list: by hand (operator)"),
        (clock.now, "unsubscribed", "left the list"),
    ]


def test_explain_tells_a_suppression_of_who_is_on_no_list(services: Services, clock: FakeClock) -> None:
    people.suppress(services, EMAIL)

    assert told(services, "subscriber") == [(clock.now, "suppressed", "suppressed on every list: by hand (operator)")]


def test_explain_does_not_take_the_mail_of_a_second_confirmation_for_that_of_the_first(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    send_one(services)
    confirmation.confirm(services, token_in(sender.mails[0]))
    confirmed_at = clock.now
    key, person = services.settings.data_key_text, deliveries(services)[0]
    confirmation.unsubscribe(services, sign_link(key, LinkPurpose.UNSUBSCRIBE, person.id))
    clock.advance(600)
    send_one(services)
    confirmation.confirm(services, token_in(sender.mails[1]))

    assert told(services, "subscriber") == [(confirmed_at, "confirmed", "first confirmed; later again, through mail 2")]


def test_explain_tells_where_a_submission_came_from(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    send_one(services)
    clock.advance(services.settings.token_ttl_seconds)
    confirmation.renew(services, token_in(sender.mails[0]))
    clock.advance(1)
    join(services, channel=Channel.API, source="spring fair")

    assert [words for _, _, words in told(services, "submission")] == [
        "form submission: a confirmation mail was queued",
        "form submission, from an expired link: a confirmation mail was queued",
        'API submission, source "spring fair": no mail: the last one was too recent',
    ]


def test_explain_says_no_status_word_with_an_underscore(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.answer_with(DOUBT)
    send_one(services)
    clock.advance(services.settings.cooldown_seconds)
    send_one(services)
    report(services, EventType.SOFT_BOUNCED)
    key, mail = services.settings.data_key_text, deliveries(services)[-1]
    confirmation.not_me(services, sign_link(key, LinkPurpose.NOT_ME, mail.id))

    found = ledger.explain(services, EMAIL)

    said = " ".join([*(entry.words for entry in found.entries), *(standing.next_mail for standing in found.standings)])
    assert "in doubt" in said
    assert "suppressed (not me)" in said
    assert not set(re.findall(r"\w+_\w+", said)) - {DOUBT.code}


def test_owner_suppresses_and_lifts_it(services: Services, sender: FakeSender) -> None:
    join(services)

    assert [people.suppress(services, EMAIL) for _ in range(2)] == [True, False]
    drain(services)
    assert sender.mails == []
    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED
    assert join(services).decision is Decision.SUPPRESSED
    assert ledger.explain(services, EMAIL).suppression is Suppression.OPERATOR

    assert [people.unsuppress(services, EMAIL) for _ in range(2)] == [True, False]
    assert join(services).decision is Decision.QUEUED
    assert_sound(services)


@ON_SQLITE
def test_commands_suppress_say_the_reason_and_lift_it(app: Any, services: Services) -> None:
    runner = app.test_cli_runner()
    send_one(services)

    for words, said in (
        (["suppress", "Person@Example.com"], "person@example.com is suppressed."),
        (["suppress", EMAIL], "was suppressed before"),
        (["explain", EMAIL], "suppressed on every list: by hand (operator)"),
        (["explain", EMAIL], "  every list  subscriber  suppressed on every list: by hand (operator)"),
        (["explain", EMAIL, "--json"], '"kind": "subscriber", "list_id": "", "what": "suppressed"'),
        (["unsuppress", EMAIL], "is not suppressed any more"),
        (["unsuppress", EMAIL], "was not suppressed"),
    ):
        result = runner.invoke(args=words)
        assert result.exit_code == 0, result.output
        assert said in result.output
    assert runner.invoke(args=["suppress", "nonsense"]).exit_code == 2


def test_link_of_a_bounced_mail_still_confirms(services: Services, sender: FakeSender) -> None:
    """Bounces are claims of machines; who presses the button has the mail."""
    send_one(services)
    report(services, EventType.BOUNCED)

    assert look(services, token_in(sender.mails[0])).outcome is ConfirmOutcome.CONFIRMED_NOW
    assert count(services, email_deliveries) == 1


def test_event_that_was_applied_is_not_applied_again(services: Services) -> None:
    early = ProviderEvent(
        event_id="e", type=EventType.COMPLAINED, recipient=EMAIL, delivery_id=None, provider_message_id="fake-1"
    )
    delivery_events.record(services, "fake", [early])
    find = sa.select(event_table.c.id).where(event_table.c.event_id == "e")
    parked_id = run_query(services.store, lambda tx: tx.execute(find).scalar_one())
    join(services)
    drain(services)
    assert statuses(services) == [DeliveryStatus.COMPLAINED]
    people.unsuppress(services, EMAIL)
    before = everything(services)

    run_transaction(
        services.store, lambda tx: delivery_events._apply_parked(tx, services.settings.data_key_text, parked_id)
    )

    assert everything(services) == before


def test_event_that_was_applied_is_not_looked_for_again(services: Services) -> None:
    """Else a hundred of them would fill every batch, and a parked one would never come to its turn."""
    join(services)
    drain(services)
    known = ProviderEvent(
        event_id="e", type=EventType.DELIVERED, recipient=EMAIL, delivery_id=None, provider_message_id="fake-1"
    )
    delivery_events.record(services, "fake", [known])

    assert delivery_events.apply_parked(services) == 0
