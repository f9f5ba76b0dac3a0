"""The signup form: what comes back for each kind of input, with htmx and without, and what stays typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask
from flask.testing import FlaskClient
from pydantic import SecretStr

from tests.factories import FakeClock, make_list
from tests.pages import HTMX, Visitor
from tests.scenes import count, ledger, subscriber
from waitlist import create_app, messages, waitlists
from waitlist.model import ListState, SubscriberStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store.schema import email_deliveries, subscribers
from waitlist.web.security import MOST_BODY_BYTES

ADDRESSES = [json.loads(line) for line in (Path(__file__).parent / "addresses.jsonl").read_text().splitlines() if line]


@pytest.fixture(autouse=True)
def launch(services: Services) -> str:
    return make_list(services)


@pytest.fixture
def visitor(client: FlaskClient) -> Visitor:
    visitor = Visitor(client)
    visitor.open("/join/launch")
    return visitor


def send(visitor: Visitor, way: str, **kwargs):
    return visitor.submit_with_htmx(**kwargs) if way == "htmx" else visitor.submit(**kwargs)


both_ways = pytest.mark.parametrize("way", ["plain", "htmx"])


def test_form_shows_list_consent_and_one_heading(visitor: Visitor) -> None:
    page = visitor.page

    assert page.heading == "Launch"
    assert len(page.soup.find_all("h1")) == 1
    assert "Hear from us when it starts." in page.message
    assert "Send me one mail when it starts." in page.message
    assert page.value("consent_version") == "1"
    assert not page.is_ticked()


def test_valid_form_redirects_to_the_inbox_page(visitor: Visitor) -> None:
    visitor.fill_in()

    page = visitor.submit(follow_redirects=False)

    assert page.status == 303
    assert page.response.headers["Location"] == "/join/launch/check-inbox"


def test_valid_form_ends_with_the_neutral_message(visitor: Visitor, services: Services) -> None:
    visitor.fill_in(" Person@Example.com ")

    page = visitor.submit()

    assert page.status == 200
    assert messages.CHECK_INBOX in page.message
    assert subscriber(services, "person@example.com").status is SubscriberStatus.PENDING


def test_valid_htmx_form_gets_the_neutral_fragment(visitor: Visitor, services: Services) -> None:
    visitor.fill_in()

    page = visitor.submit_with_htmx()

    assert page.status == 200
    assert page.heading == messages.CHECK_INBOX_HEADING
    assert messages.CHECK_INBOX in page.message
    assert "10 minutes" in page.message
    assert page.focused == ["answer"]
    assert not page.soup.find(["html", "form", "input", "script"])
    assert ledger(services) == ["queued"]


def test_double_click_makes_one_mail(visitor: Visitor, services: Services) -> None:
    for _ in range(2):
        visitor.open("/join/launch")
        visitor.fill_in()
        visitor.submit()

    assert count(services, email_deliveries) == 1


@both_ways
def test_bad_address_comes_back_with_message_focus_text_and_tick(
    visitor: Visitor, services: Services, way: str
) -> None:
    visitor.fill_in('nonsense"><b>')

    page = send(visitor, way)

    assert page.status == 422
    assert page.problem("email").startswith("Enter an email address like name@example.com.")
    assert page.value("email") == 'nonsense"><b>'
    assert page.focused == ["email"]
    assert page.is_ticked()
    assert bool(page.soup.find("html")) == (way == "plain")
    assert count(services, subscribers) == 0


@both_ways
def test_unticked_box_comes_back_with_message_and_focus(visitor: Visitor, services: Services, way: str) -> None:
    visitor.fill_in(consent=None)

    page = send(visitor, way)

    assert page.status == 422
    assert page.problem("consent") == messages.CONSENT_MISSING
    assert page.problem("email") == ""
    assert page.value("email") == "person@example.com"
    assert page.focused == ["consent"]
    assert ledger(services) == []


def test_only_the_first_bad_field_takes_the_focus(visitor: Visitor) -> None:
    visitor.fill_in("", consent=None)

    page = visitor.submit()

    assert page.problem("email")
    assert page.problem("consent")
    assert page.focused == ["email"]


def test_corrected_form_goes_through(visitor: Visitor, services: Services) -> None:
    visitor.fill_in("nonsense")
    visitor.submit_with_htmx()

    visitor.fill_in()
    page = visitor.submit_with_htmx()

    assert messages.CHECK_INBOX in page.message
    assert ledger(services) == ["queued"]


@both_ways
@pytest.mark.parametrize("version", ["99", "0", "-1", "x", "", None, "1.0", "9" * 5000, "1'--"])
def test_unknown_consent_version_is_asked_anew(
    visitor: Visitor, services: Services, way: str, version: str | None
) -> None:
    visitor.fill_in(consent_version=version)

    page = send(visitor, way)

    assert page.status == 422
    assert page.problem("consent") == messages.CONSENT_CHANGED
    assert not page.is_ticked()
    assert page.value("consent_version") == "1"
    assert page.value("email") == "person@example.com"
    assert ledger(services) == []


def test_older_consent_version_is_taken_as_given(visitor: Visitor, services: Services) -> None:
    waitlists.publish_consent(services, "launch", "Send me two mails.")
    visitor.fill_in()

    page = visitor.submit()

    assert messages.CHECK_INBOX in page.message
    assert subscriber(services).consent_version == 1


def test_tick_under_an_older_text_does_not_move_to_the_newer(visitor: Visitor, services: Services) -> None:
    waitlists.publish_consent(services, "launch", "Send me two mails.")
    visitor.fill_in("nonsense")

    page = visitor.submit()

    assert "Send me two mails." in page.message
    assert page.value("consent_version") == "2"
    assert not page.is_ticked()
    assert page.problem("consent") == messages.CONSENT_CHANGED


@both_ways
@pytest.mark.parametrize("token", [None, "", "forged", "ImFiYyI.aAAAAA.x"])
def test_missing_or_forged_csrf_token_keeps_the_text(
    visitor: Visitor, services: Services, way: str, token: str | None
) -> None:
    visitor.fill_in(csrf_token=token)

    page = send(visitor, way)

    assert page.status == 400
    assert "cookie" in page.notice
    assert page.value("email") == "person@example.com"
    assert page.is_ticked()
    assert page.focused == ["notice"]
    assert ledger(services) == []
    assert messages.CHECK_INBOX in send(visitor, way).message


def test_expired_csrf_token_keeps_the_text(app: Flask, visitor: Visitor) -> None:
    app.config["WTF_CSRF_TIME_LIMIT"] = -1
    visitor.fill_in()

    page = visitor.submit()

    assert (page.status, page.value("email")) == (400, "person@example.com")
    assert "open for too long" in page.notice


def test_csrf_token_of_another_visitor_is_refused(app: Flask, visitor: Visitor, services: Services) -> None:
    stranger = Visitor(app.test_client())
    stranger.open("/join/launch")
    visitor.fill_in(csrf_token=stranger.page.value("csrf_token"))

    page = visitor.submit()

    assert page.status == 400
    assert ledger(services) == []


def test_form_without_session_cookie_comes_back_and_then_works(app: Flask, visitor: Visitor) -> None:
    visitor.client.delete_cookie("waitlist")
    visitor.fill_in()

    page = visitor.submit()

    assert (page.status, page.value("email")) == (400, "person@example.com")
    assert messages.CHECK_INBOX in visitor.submit().message


@both_ways
@pytest.mark.parametrize("value", ["no", "off", "0", "None", "null", "Yes", "yes ", "y", "on", "true", "1", "\x00"])
def test_other_value_than_the_boxes_own_is_an_unticked_box(
    visitor: Visitor, services: Services, way: str, value: str
) -> None:
    visitor.fill_in(consent=value)

    page = send(visitor, way)

    assert (page.status, page.problem("consent")) == (422, messages.CONSENT_MISSING)
    assert not page.is_ticked()
    assert count(services, subscribers) == 0


@pytest.mark.parametrize("values", [["yes", "no"], ["no", "yes"]])
def test_consent_that_contradicts_itself_is_an_unticked_box(
    visitor: Visitor, services: Services, values: list[str]
) -> None:
    known = {"csrf_token": visitor.page.value("csrf_token"), "consent_version": "1", "email": "a@example.com"}

    response = visitor.client.post("/join/launch", data=known | {"consent": values})

    assert response.status_code == 422
    assert count(services, subscribers) == 0


def test_second_csrf_token_is_no_bypass(visitor: Visitor) -> None:
    good = visitor.page.value("csrf_token")
    values = [("csrf_token", "bad"), ("csrf_token", good), ("email", "a@example.com"), ("consent", "yes")]

    response = visitor.client.post(
        "/join/launch",
        data="&".join("=".join(pair) for pair in values),
        content_type="application/x-www-form-urlencoded",
    )

    assert response.status_code == 400


def test_htmx_header_alone_replaces_no_csrf_token(client: FlaskClient) -> None:
    response = client.post("/join/launch", data={"email": "a@example.com", "consent": "yes"}, headers=HTMX)

    assert response.status_code == 400


@pytest.fixture
def rotated_app(settings: Settings, services: Services, clock: FakeClock) -> Iterator[Flask]:
    """The same waitlist, started again after its secret key was changed."""
    app = create_app(
        settings.model_copy(
            update={
                "secret_key": SecretStr("another-secret-key-of-32-letters"),
                "secret_key_fallbacks": settings.secret_key,
            }
        ),
        clock=clock,
    )
    yield app
    app.extensions["waitlist"].store.close()


def test_rotated_secret_key_still_takes_open_forms(visitor: Visitor, rotated_app: Flask) -> None:
    cookie = visitor.client.get_cookie("waitlist")
    assert cookie
    visitor.client = rotated_app.test_client()
    visitor.client.set_cookie("waitlist", cookie.value)
    visitor.fill_in()

    page = visitor.submit()

    assert messages.CHECK_INBOX in page.message


@both_ways
def test_filled_honeypot_gets_the_same_answer_and_no_mail(visitor: Visitor, services: Services, way: str) -> None:
    visitor.fill_in(referral="https://spam.example")

    page = send(visitor, way)

    assert page.status == 200
    assert messages.CHECK_INBOX in page.message
    assert ledger(services) == ["trapped"]
    assert count(services, subscribers) == 0


def test_bad_address_with_filled_honeypot_is_an_ordinary_422(visitor: Visitor, services: Services) -> None:
    visitor.fill_in("nonsense", referral="x")

    assert visitor.submit().status == 422
    assert ledger(services) == []


def test_honeypot_is_a_text_input_that_people_and_browsers_leave_alone(visitor: Visitor) -> None:
    trap = visitor.page.input("referral")

    assert (trap["type"], trap["tabindex"], trap["autocomplete"]) == ("text", "-1", "off")
    assert trap.find_parent(attrs={"aria-hidden": "true"})


class TestMinimumTime:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"min_form_seconds": 2})

    @pytest.mark.parametrize(("after_seconds", "status"), [(0, 422), (1, 422), (2, 200), (86_000, 200), (-5, 200)])
    def test_form_sooner_than_the_minimum_comes_back(
        self, visitor: Visitor, clock: FakeClock, after_seconds: int, status: int
    ) -> None:
        clock.advance(after_seconds)
        visitor.fill_in()

        assert visitor.submit_with_htmx().status == status

    @both_ways
    def test_too_soon_keeps_text_and_start(self, visitor: Visitor, clock: FakeClock, way: str) -> None:
        visitor.fill_in()
        page = send(visitor, way)

        assert (page.notice, page.value("email"), page.is_ticked()) == (messages.TOO_SOON, "person@example.com", True)
        clock.advance(2)
        assert messages.CHECK_INBOX in send(visitor, way).message

    def test_quick_correction_is_not_punished(self, visitor: Visitor, clock: FakeClock) -> None:
        clock.advance(30)
        visitor.fill_in("nonsense")
        visitor.submit()

        visitor.fill_in()
        page = visitor.submit()

        assert messages.CHECK_INBOX in page.message

    @pytest.mark.parametrize("started", [None, "", "form", "form.AAAA.forged"])
    def test_missing_or_forged_start_counts_as_now(
        self, visitor: Visitor, clock: FakeClock, started: str | None
    ) -> None:
        clock.advance(30)
        visitor.fill_in(started=started)

        assert visitor.submit().notice == messages.TOO_SOON
        clock.advance(2)
        assert messages.CHECK_INBOX in visitor.submit().message


@both_ways
def test_unknown_list_is_a_404(visitor: Visitor, services: Services, way: str) -> None:
    visitor.fill_in()

    page = send(visitor, way, path="/join/nothing-here")

    assert (page.status, page.heading) == (404, messages.ERRORS[404][0])
    assert ledger(services) == []


@both_ways
def test_closed_list_is_a_410(visitor: Visitor, services: Services, way: str) -> None:
    waitlists.set_state(services, "launch", ListState.CLOSED)
    visitor.fill_in()

    page = send(visitor, way)

    assert (page.status, page.heading) == (410, "This waitlist is closed")
    assert visitor.open("/join/launch").status == 410


def test_list_that_closes_during_the_submission_is_a_410(
    visitor: Visitor, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = waitlists.find(services, "launch")
    waitlists.set_state(services, "launch", ListState.CLOSED)
    monkeypatch.setattr(waitlists, "find", lambda *_: found)
    visitor.fill_in()

    assert visitor.submit().status == 410
    assert ledger(services) == ["list_closed"]


def test_query_string_is_no_body(visitor: Visitor, services: Services) -> None:
    visitor.fill_in(email=None, consent=None)

    page = visitor.submit("/join/launch?email=a@example.com&consent=yes")

    assert page.status == 422
    assert ledger(services) == []


def test_extra_fields_change_nothing(visitor: Visitor, services: Services) -> None:
    visitor.fill_in(status="confirmed", confirmed_at="1", is_admin="1")

    visitor.submit()

    assert subscriber(services).status is SubscriberStatus.PENDING


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example", "/\\evil.example", "\t//evil.example"])
def test_redirect_leads_nowhere_else(visitor: Visitor, target: str) -> None:
    visitor.fill_in(next=target)

    response = visitor.submit("/join/launch?next=https://evil.example/", follow_redirects=False).response

    assert response.headers["Location"] == "/join/launch/check-inbox"


@pytest.mark.parametrize("body", ["[]", "null", "5", '{"email": "a@example.com", "consent": "yes"}', "{"])
def test_json_to_the_form_is_an_empty_form(client: FlaskClient, services: Services, body: str) -> None:
    response = client.post("/join/launch", data=body, content_type="application/json")

    assert response.status_code == 400
    assert ledger(services) == []


def test_bytes_that_are_no_text_come_back_as_invalid(visitor: Visitor) -> None:
    token = visitor.page.value("csrf_token").encode()

    response = visitor.client.post(
        "/join/launch",
        data=b"csrf_token=" + token + b"&consent=yes&consent_version=1&email=%ff%fe@example.com",
        content_type="application/x-www-form-urlencoded",
    )

    assert response.status_code == 422


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("case", ADDRESSES, ids=[case["id"] for case in ADDRESSES])
def test_every_address_of_the_corpus_gets_its_answer(visitor: Visitor, services: Services, case: dict) -> None:
    typed = _typed(case)
    visitor.fill_in(typed)

    page = visitor.submit_with_htmx()

    if case["answer"] == "accept":
        assert page.status == 200
        subscriber(services, case["canonical"])
    elif len(typed) < MOST_BODY_BYTES:
        assert page.status == 422
        assert page.problem("email")
        assert page.value("email") == typed
    else:
        assert page.status == 413


def _typed(case: dict) -> str:
    """`generate` spells out what would be too long to write: texts, and [text, how often]."""
    parts = case.get("generate", [case.get("input", "")])
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)
