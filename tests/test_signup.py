"""The submission: what each state of a subscriber makes of one more post of the address. Both engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from tests.factories import FakeClock, FakeSender, make_list
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
    ledger,
    refused,
    set_delivery_status,
    statuses,
    subscriber,
    token_in,
)
from waitlist import confirmation, dispatch, people, signup, waitlists
from waitlist.addresses import canonical_address
from waitlist.errors import UnknownConsent, UnknownList
from waitlist.model import (
    ConfirmOutcome,
    Decision,
    DeliveryStatus,
    ListState,
    Reason,
    RequestState,
    SubscriberStatus,
)
from waitlist.services import Services
from waitlist.store import run_transaction
from waitlist.store.outbox import claim_due
from waitlist.store.schema import email_deliveries, email_outbox, signup_requests, subscribers
from waitlist.tokens import LinkPurpose, sign_link

COOLDOWN = 600
DAY = 86_400


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


def confirm(services: Services, sender: FakeSender, index: int = -1) -> ConfirmOutcome:
    return confirmation.confirm(services, token_in(sender.mails[index])).outcome


def leave(services: Services, index: int = -1) -> None:
    token = sign_link(services.settings.data_key_text, LinkPurpose.UNSUBSCRIBE, deliveries(services)[index].id)
    confirmation.unsubscribe(services, token)


def say_not_me(services: Services) -> None:
    token = sign_link(services.settings.data_key_text, LinkPurpose.NOT_ME, deliveries(services)[-1].id)
    confirmation.not_me(services, token)


def put_on_the_wire(services: Services) -> None:
    """As far as a worker gets before the provider answers."""
    (row,) = dispatch.claim(services, "one", 1)
    assert begin(services, row) is not None


def test_first_submission_creates_a_pending_subscriber_and_sends(services: Services, sender: FakeSender) -> None:
    answer = join(services)
    drain(services)

    person = subscriber(services)
    (delivery,) = deliveries(services)
    assert answer.decision is Decision.QUEUED
    assert (person.status, person.email) == (SubscriberStatus.PENDING, EMAIL)
    assert (delivery.status, delivery.reason) == (DeliveryStatus.SENT, Reason.SIGNUP)
    assert delivery.id == answer.job_id == sender.keys[0]
    assert delivery.signup_request_id == answer.operation_id
    assert delivery.operation_key == f"confirmation:{person.id}:1"
    assert [mail.recipient for mail in sender.mails] == [EMAIL]
    assert confirm(services, sender) is ConfirmOutcome.CONFIRMED_NOW


@pytest.mark.parametrize("typed", [EMAIL, "Person@Example.COM", " PERSON@EXAMPLE.COM\r\n", "person@ｅxample.com"])
def test_immediate_duplicate_does_not_send(services: Services, sender: FakeSender, typed: str) -> None:
    join(services)
    drain(services)
    before = subscriber(services)

    answer = join(services, canonical_address(typed))
    drain(services)

    assert answer.decision is Decision.COOLDOWN
    assert len(sender.mails) == 1
    assert subscriber(services) == before
    assert (count(services, subscribers), count(services, email_deliveries)) == (1, 1)
    assert count(services, signup_requests) == 2


@pytest.mark.parametrize(("seconds", "mails"), [(COOLDOWN - 1, 1), (COOLDOWN, 2), (COOLDOWN + 1, 2)])
def test_submission_after_cooldown_rotates_the_token_and_sends(
    services: Services, sender: FakeSender, clock: FakeClock, seconds: int, mails: int
) -> None:
    join(services)
    drain(services)
    first = subscriber(services)

    clock.advance(seconds)
    join(services)
    drain(services)

    second = subscriber(services)
    assert len(sender.mails) == mails
    assert (second.confirmation_token_hash != first.confirmation_token_hash) is (mails == 2)
    assert deliveries(services)[-1].reason is (Reason.COOLDOWN_RESEND if mails == 2 else Reason.SIGNUP)
    assert confirm(services, sender) is ConfirmOutcome.CONFIRMED_NOW


def test_submission_after_cooldown_replaces_a_mail_that_is_still_queued(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)

    clock.advance(COOLDOWN)
    join(services)
    drain(services)

    assert statuses(services) == [DeliveryStatus.SUPERSEDED, DeliveryStatus.SENT]
    assert len(sender.mails) == 1
    assert_sound(services)
    assert confirm(services, sender) is ConfirmOutcome.CONFIRMED_NOW


def test_submission_after_cooldown_replaces_a_mail_that_a_worker_has_leased(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    run_transaction(
        services.store,
        lambda tx: claim_due(
            tx, lease="x", owner="x", until=tx.now + 9999, most=9, horizon=tx.now + 999, margin=0, fraction=4
        ),
    )

    clock.advance(COOLDOWN)
    join(services)
    drain(services)

    assert statuses(services) == [DeliveryStatus.SUPERSEDED, DeliveryStatus.SENT]
    assert len(sender.mails) == 1
    assert_sound(services)


@pytest.mark.parametrize("seconds", [0, 5 * COOLDOWN, 40 * DAY])
def test_confirmed_subscriber_stays_confirmed_and_does_not_send(
    services: Services, sender: FakeSender, clock: FakeClock, seconds: int
) -> None:
    join(services)
    drain(services)
    confirm(services, sender)
    before = subscriber(services)

    clock.advance(seconds)
    answer = join(services)
    drain(services)

    assert answer.decision is Decision.ALREADY_CONFIRMED
    assert subscriber(services) == before
    assert len(sender.mails) == 1


@pytest.mark.parametrize("status", [DeliveryStatus.BOUNCED, DeliveryStatus.FAILED, DeliveryStatus.REJECTED])
def test_failed_delivery_permits_immediate_retry(
    services: Services, sender: FakeSender, clock: FakeClock, status: DeliveryStatus
) -> None:
    if status is not DeliveryStatus.BOUNCED:
        sender.answer_with(refused() if status is DeliveryStatus.REJECTED else failed())
    join(services)
    drain(services)
    if status is DeliveryStatus.BOUNCED:
        set_delivery_status(services, status)
    clock.advance(1)

    answer = join(services)
    drain(services)

    first, second = deliveries(services)
    assert answer.decision is Decision.RETRY_QUEUED
    assert (first.status, second.status) == (status, DeliveryStatus.SENT)
    assert (second.reason, second.retry_of_delivery_id) == (Reason.FAILURE_RETRY, first.id)
    assert subscriber(services).confirmation_token_hash == second.token_hash != first.token_hash
    assert join(services).decision is Decision.COOLDOWN
    assert confirm(services, sender) is ConfirmOutcome.CONFIRMED_NOW


def test_failed_delivery_is_claimed_when_the_cooldown_is_over_too(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.answer_with(refused())
    join(services)
    drain(services)

    clock.advance(COOLDOWN)
    join(services)

    first, second = deliveries(services)
    assert (second.reason, second.retry_of_delivery_id) == (Reason.FAILURE_RETRY, first.id)


def test_complained_delivery_is_never_retried(services: Services, sender: FakeSender) -> None:
    join(services)
    drain(services)
    set_delivery_status(services, DeliveryStatus.COMPLAINED)

    answer = join(services)

    assert answer.decision is Decision.COOLDOWN
    assert len(deliveries(services)) == 1


def test_unsubscribed_person_who_resubmits_gets_a_fresh_mail_at_once(services: Services, sender: FakeSender) -> None:
    join(services)
    drain(services)
    confirm(services, sender)
    first_confirmed_at = subscriber(services).confirmed_at
    leave(services)

    answer = join(services)
    drain(services)

    person = subscriber(services)
    assert answer.decision is Decision.QUEUED
    assert (person.status, person.unsubscribed_at) == (SubscriberStatus.PENDING, None)
    assert person.confirmed_at == first_confirmed_at
    assert deliveries(services)[-1].reason is Reason.SIGNUP
    assert len(sender.mails) == 2


def test_unsubscribed_person_whose_old_mail_is_on_the_wire_gets_no_second_mail(
    services: Services, sender: FakeSender
) -> None:
    join(services)
    put_on_the_wire(services)
    leave_through_list = subscriber(services)
    run_transaction(
        services.store,
        lambda tx: (
            tx.execute(
                sa.update(subscribers)
                .where(subscribers.c.id == leave_through_list.id)
                .values(status="unsubscribed", unsubscribed_at=tx.now, confirmation_rotated_at=None)
            ).rowcount
        ),
    )

    answer = join(services)

    person = subscriber(services)
    assert answer.decision is Decision.IN_FLIGHT
    assert (person.status, person.unsubscribed_at) == (SubscriberStatus.PENDING, None)
    assert person.confirmation_token_hash == deliveries(services)[0].token_hash
    assert len(deliveries(services)) == 1
    assert_sound(services)


def test_mail_on_the_wire_is_never_joined_by_a_second(services: Services, clock: FakeClock) -> None:
    join(services)
    put_on_the_wire(services)
    before = subscriber(services)

    clock.advance(COOLDOWN)
    answer = join(services)

    assert answer.decision is Decision.IN_FLIGHT
    assert subscriber(services) == before
    assert statuses(services) == [DeliveryStatus.SENDING]


def test_not_me_stops_all_mail_for_ever_with_the_same_answer(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    make_list(services, "other")
    join(services, list_id="other")
    join(services)
    drain(services)
    say_not_me(services)

    answers = [join(services)]
    clock.advance(40 * DAY)
    answers.append(join(services))
    answers.append(join(services, list_id="other"))
    drain(services)

    assert [answer.decision for answer in answers] == [Decision.SUPPRESSED] * 3
    assert {answer.state for answer in answers} == {RequestState.SUCCEEDED}
    assert len(sender.mails) == 2
    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED
    assert subscriber(services, list_id="other").status is SubscriberStatus.UNSUBSCRIBED


def test_not_me_cancels_the_queued_mail_of_every_list(services: Services, sender: FakeSender) -> None:
    make_list(services, "other")
    join(services)
    drain(services)
    join(services, list_id="other")

    say_not_me(services)
    drain(services)

    assert len(sender.mails) == 1
    assert [delivery.status for delivery in deliveries(services, list_id="other")] == [DeliveryStatus.SUPERSEDED]


def test_mail_cap_holds_over_lists_tags_and_days(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    for name in ("b", "c", "d", "e", "f"):
        make_list(services, name)
    join(services, "person+a@example.com")
    join(services, list_id="b")
    join(services, "person+x@example.com", list_id="c")
    drain(services)

    fourth = join(services, list_id="d")
    drain(services)

    assert fourth.decision is Decision.CAPPED
    assert len(sender.mails) == 3
    person = subscriber(services, list_id="d")
    assert person.status is SubscriberStatus.PENDING
    assert (person.confirmation_token_hash, person.confirmation_rotated_at) == (None, None)

    clock.advance(DAY - 1)
    assert join(services, list_id="d").decision is Decision.CAPPED
    clock.advance(1)
    assert join(services, list_id="d").decision is Decision.QUEUED
    assert deliveries(services, list_id="d")[-1].reason is Reason.SIGNUP
    assert join(services, list_id="e").decision is Decision.QUEUED
    assert join(services, list_id="f").decision is Decision.CAPPED, "five in 30 days"
    clock.advance(29 * DAY - 1)
    assert join(services, list_id="f").decision is Decision.CAPPED
    clock.advance(1)
    assert join(services, list_id="f").decision is Decision.QUEUED
    assert_sound(services)


@pytest.mark.parametrize(("ahead", "decision"), [(300, Decision.CAPPED), (301, Decision.QUEUED)])
def test_mails_of_a_clock_that_was_ahead_do_not_count_against_the_cap(
    services: Services, clock: FakeClock, ahead: int, decision: Decision
) -> None:
    clock.advance(ahead)
    for name in ("b", "c", "d"):
        make_list(services, name)
        join(services, list_id=name)
    clock.advance(-ahead)

    assert join(services).decision is decision


def test_superseded_mail_that_never_left_does_not_count_against_the_cap(services: Services, clock: FakeClock) -> None:
    for _ in range(6):
        assert join(services).decision is Decision.QUEUED
        clock.advance(COOLDOWN)


def test_capped_person_who_had_left_is_pending_again(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    for _ in range(3):
        join(services)
        drain(services)
        clock.advance(COOLDOWN)
    leave(services)

    answer = join(services)

    person = subscriber(services)
    assert answer.decision is Decision.CAPPED
    assert (person.status, person.confirmation_token_hash) == (SubscriberStatus.PENDING, None)
    assert confirm(services, sender) is ConfirmOutcome.CONFIRMED_NOW, "the old links still work"


def test_capped_confirmed_person_stays_confirmed(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    for name in ("b", "c"):
        make_list(services, name)
        join(services, list_id=name)
    join(services)
    drain(services)
    confirm(services, sender)
    before = subscriber(services)

    assert join(services).decision is Decision.CAPPED
    assert subscriber(services) == before


def test_trapped_post_leaves_a_ledger_row_only(services: Services) -> None:
    answer = join(services, trapped=True)

    assert (answer.decision, answer.state) == (Decision.TRAPPED, RequestState.SUCCEEDED)
    assert (count(services, subscribers), count(services, email_deliveries)) == (0, 0)
    assert ledger(services) == ["trapped"]


def test_closed_list_refuses_and_writes_only_the_ledger(services: Services) -> None:
    waitlists.set_state(services, "launch", ListState.CLOSED)

    answer = join(services)

    assert (answer.decision, answer.state) == (Decision.LIST_CLOSED, RequestState.FAILED)
    assert count(services, subscribers) == 0
    assert ledger(services) == ["list_closed"]


def test_unknown_list_and_unknown_consent_store_nothing(services: Services) -> None:
    before = everything(services)

    with pytest.raises(UnknownList):
        join(services, list_id="nowhere")
    with pytest.raises(UnknownConsent):
        join(services, consent_version=2)

    assert everything(services) == before


@pytest.mark.parametrize(
    "change",
    [
        {"token_ttl_seconds": 1200},
        {"token_ttl_seconds": 30 * DAY},
        {"cooldown_seconds": 60},
        {"cooldown_seconds": 43_200},
    ],
)
def test_changed_setting_locks_nobody_out(
    services: Services, sender: FakeSender, clock: FakeClock, change: dict[str, int]
) -> None:
    join(services)
    drain(services)
    changed = replace(services, settings=services.settings.model_copy(update=change))

    clock.advance(changed.settings.cooldown_seconds)
    answer = join(changed)
    drain(changed)

    assert answer.decision is Decision.QUEUED
    assert confirm(changed, sender) is ConfirmOutcome.CONFIRMED_NOW


def test_expired_token_ends_the_cooldown_whatever_the_setting(services: Services, clock: FakeClock) -> None:
    join(services)
    drain(services)
    long = replace(services, settings=services.settings.model_copy(update={"cooldown_seconds": 10 * DAY}))

    clock.advance(DAY)

    assert join(long).decision is Decision.QUEUED


def test_clock_one_day_ahead_for_one_submission_costs_at_most_one_mail(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    clock.advance(DAY)
    join(services)
    clock.advance(-DAY)
    drain(services)

    answers = [join(services) for _ in range(3)]
    drain(services)

    assert [answer.decision for answer in answers] == [Decision.QUEUED, Decision.COOLDOWN, Decision.COOLDOWN]
    assert len(sender.mails) <= 2
    assert confirm(services, sender) is ConfirmOutcome.CONFIRMED_NOW


@pytest.mark.parametrize("back", [60, 300, 301, 7200, 400 * DAY])
def test_clock_that_steps_back_locks_nobody_out_and_costs_at_most_one_mail(
    services: Services, sender: FakeSender, clock: FakeClock, back: int
) -> None:
    join(services)
    drain(services)
    clock.advance(-back)

    for _ in range(3):
        join(services)
        drain(services)
    assert len(sender.mails) <= 2

    clock.advance(COOLDOWN + 300)
    join(services)
    drain(services)
    assert 2 <= len(sender.mails) <= 3
    assert confirm(services, sender) is ConfirmOutcome.CONFIRMED_NOW


def test_every_path_writes_one_ledger_row_and_none_an_address(services: Services, sender: FakeSender) -> None:
    join(services)
    join(services)
    drain(services)
    confirm(services, sender)
    join(services)

    rows = everything(services)["signup_requests"]
    assert len(rows) == 3
    assert not any("person" in row for row in rows)
    assert ledger(services) == ["queued", "cooldown", "already_confirmed"]


def test_erased_person_is_forgotten_and_may_begin_anew(services: Services, sender: FakeSender) -> None:
    join(services)
    drain(services)
    token = token_in(sender.mails[0])

    erase(services)

    assert confirmation.look(services, token).outcome is ConfirmOutcome.NOT_OURS
    assert (count(services, email_deliveries), count(services, email_outbox)) == (0, 0)
    assert join(services).decision is Decision.QUEUED


@pytest.mark.parametrize("decision", [Decision.SUPPRESSED, Decision.CAPPED, Decision.IN_FLIGHT])
def test_refusal_completes_its_ledger_row(services: Services, clock: FakeClock, decision: Decision) -> None:
    if decision is Decision.SUPPRESSED:
        people.suppress(services, EMAIL)
    elif decision is Decision.CAPPED:
        for _ in range(services.settings.mails_per_address_per_day):
            join(services)
            drain(services)
            clock.advance(600)
    else:
        join(services)
        (row,) = dispatch.claim(services, "one", 1)
        begin(services, row)
        clock.advance(600)

    assert join(services).decision is decision
    assert_sound(services)


def test_failure_that_somebody_else_has_claimed_is_left_to_them(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(services)
    drain(services)
    set_delivery_status(services, DeliveryStatus.BOUNCED)
    (bounced,) = deliveries(services)
    assert join(services).decision is Decision.RETRY_QUEUED
    # As it stood before the other's commit.
    monkeypatch.setattr(signup, "get_latest_delivery", lambda _tx, _subscriber_id: bounced)

    assert join(services).decision is Decision.RETRY_CLAIMED
    assert len(deliveries(services)) == 2
    assert_sound(services)
