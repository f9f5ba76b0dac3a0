"""What the links in a mail do, and what they must never do. Both engines."""

from __future__ import annotations

import pytest

from tests.factories import FakeClock, FakeSender, make_list
from tests.processes import run_at_once
from tests.scenes import (
    assert_sound,
    deliveries,
    drain,
    erase,
    everything,
    join,
    ledger,
    services_at,
    statuses,
    subscriber,
    token_in,
)
from waitlist import confirmation, waitlists
from waitlist.model import Answer, ConfirmOutcome, Decision, DeliveryStatus, ListState, SubscriberStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import run_query
from waitlist.store.subscribers import get_suppression
from waitlist.tokens import LinkPurpose, address_hmac, sign_link, token_digest

DAY = 86_400


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


@pytest.fixture
def token(services: Services, sender: FakeSender) -> str:
    """The link of a pending subscriber's first mail."""
    join(services)
    drain(services)
    return token_in(sender.mails[0])


def signed(services: Services, purpose: LinkPurpose, index: int = -1) -> str:
    return sign_link(services.settings.data_key_text, purpose, deliveries(services)[index].id)


def leave(services: Services) -> None:
    confirmation.unsubscribe(services, signed(services, LinkPurpose.UNSUBSCRIBE))


def test_confirming_is_for_good_and_records_link_and_consent(services: Services, token: str, clock: FakeClock) -> None:
    waitlists.publish_consent(services, "launch", "Another text")
    clock.advance(60)

    found = confirmation.confirm(services, token)

    person, (delivery,) = subscriber(services), deliveries(services)
    assert found.outcome is ConfirmOutcome.CONFIRMED_NOW
    assert found.waitlist is not None
    assert found.waitlist.id == "launch"
    assert (person.status, person.confirmed_at) == (SubscriberStatus.CONFIRMED, int(clock.now))
    assert person.confirmed_delivery_id == delivery.id
    assert (person.consent_at, person.consent_version) == (delivery.consent_at, 1)


def test_looking_changes_nothing_and_says_what_confirming_would(services: Services, token: str) -> None:
    before = everything(services)

    outcomes = {confirmation.look(services, token).outcome for _ in range(50)}

    assert outcomes == {ConfirmOutcome.CONFIRMED_NOW}
    assert everything(services) == before


def test_confirming_again_says_already_and_keeps_the_first_time(
    services: Services, token: str, clock: FakeClock
) -> None:
    confirmation.confirm(services, token)
    first = subscriber(services)

    clock.advance(400 * DAY)

    assert confirmation.look(services, token).outcome is ConfirmOutcome.ALREADY_CONFIRMED
    assert confirmation.confirm(services, token).outcome is ConfirmOutcome.ALREADY_CONFIRMED
    assert subscriber(services) == first


def test_older_unexpired_link_confirms_as_well_as_the_newest(
    services: Services, sender: FakeSender, token: str, clock: FakeClock
) -> None:
    clock.advance(600)
    join(services)
    drain(services)
    assert len(sender.mails) == 2

    assert confirmation.confirm(services, token).outcome is ConfirmOutcome.CONFIRMED_NOW
    assert subscriber(services).confirmed_delivery_id == deliveries(services)[0].id


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [(DAY - 1, ConfirmOutcome.CONFIRMED_NOW), (DAY, ConfirmOutcome.EXPIRED), (DAY + 1, ConfirmOutcome.EXPIRED)],
)
def test_link_expires_after_its_life(
    services: Services, token: str, clock: FakeClock, seconds: int, outcome: ConfirmOutcome
) -> None:
    clock.advance(seconds)

    assert confirmation.look(services, token).outcome is outcome
    assert confirmation.confirm(services, token).outcome is outcome
    expected = SubscriberStatus.PENDING if outcome is ConfirmOutcome.EXPIRED else SubscriberStatus.CONFIRMED
    assert subscriber(services).status is expected


def test_erased_or_foreign_token_is_not_ours(services: Services, token: str) -> None:
    digest = token_digest(token)
    foreign = [token[:-1] + ("A" if token[-1] != "A" else "B"), token.upper(), token + "=", digest, "", "x", "x" * 43]
    foreign += ["' OR 1=1 --", "x" * 1_000_000, "\0" * 43, signed(services, LinkPurpose.UNSUBSCRIBE)]
    before = everything(services)

    assert {confirmation.confirm(services, text).outcome for text in foreign} == {ConfirmOutcome.NOT_OURS}
    assert everything(services) == before
    erase(services)
    assert confirmation.confirm(services, token).outcome is ConfirmOutcome.NOT_OURS


@pytest.mark.parametrize("glued", [".", ")", ">", ",", ").", '"'])
def test_punctuation_that_a_mail_client_glued_on_is_forgiven(services: Services, token: str, glued: str) -> None:
    assert confirmation.confirm(services, token + glued).outcome is ConfirmOutcome.CONFIRMED_NOW


def test_somebody_who_left_is_not_silently_back(services: Services, token: str) -> None:
    confirmation.confirm(services, token)
    leave(services)

    assert confirmation.look(services, token).outcome is ConfirmOutcome.LEFT
    assert confirmation.confirm(services, token).outcome is ConfirmOutcome.LEFT
    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED


def test_first_confirmation_time_survives_leaving_and_coming_back(
    services: Services, sender: FakeSender, token: str, clock: FakeClock
) -> None:
    confirmation.confirm(services, token)
    first = subscriber(services).confirmed_at
    leave(services)
    clock.advance(3600)
    join(services)
    drain(services)

    confirmation.confirm(services, token_in(sender.mails[-1]))

    person = subscriber(services)
    assert (person.status, person.confirmed_at) == (SubscriberStatus.CONFIRMED, first)
    assert person.confirmed_delivery_id == deliveries(services)[-1].id


def _confirm_in_process(wait, number: int, settings: Settings, token: str) -> str:
    services = services_at(settings)
    wait()
    return confirmation.confirm(services, token).outcome


def test_twenty_simultaneous_confirmations_confirm_once_and_all_succeed(
    services: Services, settings: Settings, token: str
) -> None:
    outcomes = run_at_once(20, _confirm_in_process, settings, token)

    assert sorted(outcomes) == ["already_confirmed"] * 19 + ["confirmed_now"]
    assert subscriber(services).status is SubscriberStatus.CONFIRMED


def test_expired_link_renews_as_an_ordinary_submission_under_its_consent(
    services: Services, sender: FakeSender, token: str, clock: FakeClock
) -> None:
    waitlists.publish_consent(services, "launch", "A newer text")
    clock.advance(DAY)

    answer = confirmation.renew(services, token)
    drain(services)
    again = confirmation.renew(services, token)

    assert isinstance(answer, Answer)
    assert isinstance(again, Answer)
    assert (answer.decision, again.decision) == (Decision.QUEUED, Decision.COOLDOWN)
    assert deliveries(services)[-1].consent_version == 1
    assert len(sender.mails) == 2
    assert ledger(services) == ["queued", "queued", "cooldown"]


def test_renew_of_a_link_that_is_not_expired_sends_nothing(services: Services, token: str, sender: FakeSender) -> None:
    live = confirmation.renew(services, token)
    confirmation.confirm(services, token)
    confirmed = confirmation.renew(services, token)
    unknown = confirmation.renew(services, "x" * 43)

    outcomes = [found.outcome for found in (live, confirmed, unknown) if isinstance(found, confirmation.Confirmation)]
    assert outcomes == [ConfirmOutcome.CONFIRMED_NOW, ConfirmOutcome.ALREADY_CONFIRMED, ConfirmOutcome.NOT_OURS]
    assert len(deliveries(services)) == 1


def test_renew_on_a_closed_list_is_refused(services: Services, token: str, clock: FakeClock) -> None:
    clock.advance(DAY)
    waitlists.set_state(services, "launch", ListState.CLOSED)

    answer = confirmation.renew(services, token)

    assert isinstance(answer, Answer)
    assert answer.decision is Decision.LIST_CLOSED


def test_unsubscribing_cancels_the_queued_mail_and_ends_the_cooldown(
    services: Services, sender: FakeSender, token: str, clock: FakeClock
) -> None:
    clock.advance(600)
    join(services)

    confirmation.unsubscribe(services, signed(services, LinkPurpose.UNSUBSCRIBE, 0))
    drain(services)

    person = subscriber(services)
    assert (person.status, person.confirmation_rotated_at) == (SubscriberStatus.UNSUBSCRIBED, None)
    assert statuses(services) == [DeliveryStatus.SENT, DeliveryStatus.SUPERSEDED]
    assert len(sender.mails) == 1
    assert_sound(services)


def test_links_serve_their_own_purpose_only(services: Services, token: str) -> None:
    before = everything(services)

    confirmation.unsubscribe(services, signed(services, LinkPurpose.NOT_ME))
    confirmation.not_me(services, signed(services, LinkPurpose.UNSUBSCRIBE))
    confirmation.unsubscribe(services, token)
    confirmation.not_me(services, "")
    confirmation.unsubscribe(services, "é" * 80)

    assert everything(services) == before


def test_not_me_suppresses_and_unsubscribes_even_a_confirmed_person(services: Services, token: str) -> None:
    confirmation.confirm(services, token)

    confirmation.not_me(services, signed(services, LinkPurpose.NOT_ME))

    person = subscriber(services)
    key = address_hmac(services.settings.data_key_text, person.email)
    assert person.status is SubscriberStatus.UNSUBSCRIBED
    assert run_query(services.store, lambda tx: get_suppression(tx, key)) == "not_me"
