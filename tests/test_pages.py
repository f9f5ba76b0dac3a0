"""The pages behind the links, the neutral answer and the errors: each state, its status, its words, its next step."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from flask import Flask
from flask.testing import FlaskClient
from structlog.testing import capture_logs

from tests.factories import FakeClock, FakeSender, make_list
from tests.pages import HTMX, Page, Visitor
from tests.scenes import count, deliveries, drain, erase, everything, join, ledger, subscriber, token_in
from waitlist import confirmation, messages, signup, waitlists
from waitlist.errors import SchemaMismatch, StorageBusy, StorageUnavailable
from waitlist.model import ListState, SubscriberStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import migrate
from waitlist.store.migrate import newest_revision
from waitlist.store.schema import delivery_events
from waitlist.tokens import LinkPurpose, sign_link

DAY_SECONDS = 86_400


@pytest.fixture(autouse=True)
def launch(services: Services) -> str:
    return make_list(services)


@pytest.fixture
def visitor(client: FlaskClient) -> Visitor:
    return Visitor(client)


@pytest.fixture
def token(services: Services, sender: FakeSender) -> str:
    """The token of a mail that a pending subscriber has just received."""
    join(services)
    drain(services)
    return token_in(sender.mails[-1])


def link(services: Services, purpose: LinkPurpose, index: int = -1) -> str:
    return f"/{purpose}/{sign_link(services.settings.data_key_text, purpose, deliveries(services)[index].id)}"


def confirm_by_hand(services: Services, token: str) -> None:
    confirmation.confirm(services, token)


class TestFrontPage:
    def test_front_page_is_the_form_of_the_oldest_open_list(
        self, visitor: Visitor, services: Services, clock: FakeClock
    ) -> None:
        clock.advance(1)
        make_list(services, "later", title="Later")
        assert visitor.open("/").heading == "Launch"

        waitlists.set_state(services, "launch", ListState.CLOSED)

        assert visitor.open("/").heading == "Later"

    def test_front_page_without_an_open_list_says_so(self, visitor: Visitor, services: Services) -> None:
        waitlists.set_state(services, "launch", ListState.CLOSED)

        page = visitor.open("/")

        assert (page.status, page.heading) == (200, messages.NO_LIST_HEADING)

    def test_form_of_the_front_page_signs_up(self, visitor: Visitor, services: Services) -> None:
        visitor.open("/")
        visitor.fill_in()

        page = visitor.submit()

        assert page.path == "/join/launch/check-inbox"
        assert ledger(services) == ["queued"]

    def test_inbox_page_leads_back_to_the_form(self, visitor: Visitor) -> None:
        page = visitor.open("/join/launch/check-inbox")

        assert (page.status, page.heading) == (200, "Launch")
        assert page.links[messages.CHECK_INBOX_START_AGAIN] == "/join/launch"
        assert not page.soup.find("form")

    @pytest.mark.parametrize("path", ["/join/nothing", "/join/nothing/check-inbox", "/nothing", "/join/", "/confirm/"])
    def test_unknown_page_is_a_calm_404(self, visitor: Visitor, path: str) -> None:
        page = visitor.open(path)

        assert (page.status, page.heading) == (404, messages.ERRORS[404][0])
        assert page.links[messages.FRONT_PAGE] == "/"

    def test_contact_and_privacy_stand_by_the_form_and_in_the_footer(self, visitor: Visitor, app: Flask) -> None:
        app.jinja_env.globals.update(contact="help@example.com", privacy_url="https://example.com/privacy")

        page = visitor.open("/")

        assert len(page.soup.find_all("a", href="mailto:help@example.com")) == 2
        assert len(page.soup.find_all("a", href="https://example.com/privacy")) == 2

    def test_texts_of_the_owner_are_no_markup(self, visitor: Visitor, services: Services) -> None:
        make_list(services, "bold", title="<b>B</b>", description="<script>x</script>", consent="<i>c</i> & co")

        page = visitor.open("/join/bold")

        assert page.heading == "<b>B</b>"
        assert "<i>c</i> & co" in page.message
        assert not page.soup.find(["b", "i"])


class TestNeutralAnswer:
    """New, pending, cooling, capped, suppressed, unsubscribed, confirmed: one answer, byte for byte."""

    def _people(self, services: Services, sender: FakeSender, clock: FakeClock) -> list[str]:
        for name in ("pending", "confirmed", "unsubscribed", "suppressed", "capped"):
            join(services, f"{name}@example.com")
            drain(services)
            delivery = deliveries(services, f"{name}@example.com")[-1]
            key = services.settings.data_key_text
            if name == "confirmed":
                confirm_by_hand(services, token_in(sender.mails[-1]))
            if name == "unsubscribed":
                confirmation.unsubscribe(services, sign_link(key, LinkPurpose.UNSUBSCRIBE, delivery.id))
            if name == "suppressed":
                confirmation.not_me(services, sign_link(key, LinkPurpose.NOT_ME, delivery.id))
        for _ in range(3):
            clock.advance(601)
            join(services, "capped@example.com")
            drain(services)
        join(services, "cooling@example.com")
        return ["new", "pending", "cooling", "capped", "suppressed", "unsubscribed", "confirmed"]

    @pytest.mark.parametrize("way", ["plain", "htmx"])
    def test_answer_is_the_same_for_every_address(
        self, visitor: Visitor, services: Services, sender: FakeSender, clock: FakeClock, way: str
    ) -> None:
        names = self._people(services, sender, clock)
        answers = set()

        for name in names:
            visitor.open("/join/launch")
            visitor.fill_in(f"{name}@example.com")
            page = visitor.submit_with_htmx() if way == "htmx" else visitor.submit(follow_redirects=False)
            answers.add((page.status, tuple(page.response.headers), page.response.data))

        assert len(answers) == 1
        decisions = ["queued", "queued", "cooldown", "capped", "suppressed", "queued", "already_confirmed"]
        assert ledger(services)[-len(names) :] == decisions

    def test_renewal_gets_the_same_answer(self, visitor: Visitor, clock: FakeClock, token: str) -> None:
        clock.advance(DAY_SECONDS + 1)
        visitor.open(f"/confirm/{token}")

        page = visitor.press(messages.EXPIRED_BUTTON)

        assert page.path == "/join/launch/check-inbox"
        assert messages.CHECK_INBOX in page.message


class TestConfirmPages:
    def test_get_shows_one_button_and_changes_nothing(self, visitor: Visitor, services: Services, token: str) -> None:
        before = everything(services)

        for agent in ("Slackbot", "curl/8", "${jndi:ldap://x}"):
            visitor.open(f"/confirm/{token}", headers={"User-Agent": agent})
            assert visitor.client.head(f"/confirm/{token}").status_code == 200
        page = visitor.open(f"/confirm/{token}")

        assert (page.status, page.heading) == (200, messages.CONFIRM_HEADING)
        assert page.buttons == [messages.CONFIRM_BUTTON]
        assert not page.soup.find("script")
        assert everything(services) == before

    def test_button_confirms_however_often_it_is_pressed(
        self, visitor: Visitor, services: Services, token: str
    ) -> None:
        visitor.open(f"/confirm/{token}")
        page = visitor.press(messages.CONFIRM_BUTTON)
        assert (page.status, page.heading) == (200, messages.CONFIRMED_HEADING)
        assert messages.CONFIRMED_NOW in page.message
        events = count(services, delivery_events)

        visitor.open(f"/confirm/{token}")
        again = Page(visitor.client.post(f"/confirm/{token}"), "")

        assert subscriber(services).status is SubscriberStatus.CONFIRMED
        assert (again.status, again.heading) == (200, messages.CONFIRMED_HEADING)
        assert messages.ALREADY_CONFIRMED in again.message
        assert count(services, delivery_events) == events

    def test_expired_link_offers_a_fresh_one(
        self, visitor: Visitor, services: Services, sender: FakeSender, clock: FakeClock, token: str
    ) -> None:
        clock.advance(DAY_SECONDS)
        for method in (visitor.client.get, visitor.client.post):
            page = Page(method(f"/confirm/{token}"), "")
            assert (page.status, page.heading) == (410, messages.EXPIRED_HEADING)
            assert page.buttons == [messages.EXPIRED_BUTTON]
        assert subscriber(services).status is SubscriberStatus.PENDING

        visitor.open(f"/confirm/{token}")
        visitor.press(messages.EXPIRED_BUTTON)
        drain(services)

        visitor.open(f"/confirm/{token_in(sender.mails[-1])}")
        assert visitor.press(messages.CONFIRM_BUTTON).heading == messages.CONFIRMED_HEADING

    def test_renewal_of_a_live_link_shows_the_button_instead(
        self, visitor: Visitor, services: Services, token: str
    ) -> None:
        page = Page(visitor.client.post(f"/confirm/{token}/renew"), "")

        assert (page.status, page.buttons) == (200, [messages.CONFIRM_BUTTON])
        assert len(deliveries(services)) == 1

    def test_renewal_on_a_closed_list_is_a_410(
        self, visitor: Visitor, services: Services, clock: FakeClock, token: str
    ) -> None:
        clock.advance(DAY_SECONDS)
        waitlists.set_state(services, "launch", ListState.CLOSED)

        page = Page(visitor.client.post(f"/confirm/{token}/renew"), "")

        assert (page.status, page.heading) == (410, messages.ERRORS[410][0])

    @pytest.mark.parametrize("method", ["get", "post"])
    def test_link_of_somebody_who_left_leads_to_the_form(
        self, visitor: Visitor, services: Services, token: str, method: str
    ) -> None:
        visitor.client.post(link(services, LinkPurpose.UNSUBSCRIBE))

        page = Page(getattr(visitor.client, method)(f"/confirm/{token}"), "")

        assert (page.status, page.heading) == (410, messages.LEFT_HEADING)
        assert page.links[messages.LEFT_LINK] == "/join/launch"
        assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED

    @pytest.mark.parametrize("method", ["get", "post"])
    def test_link_of_an_erased_person_is_not_ours(
        self, visitor: Visitor, services: Services, token: str, method: str
    ) -> None:
        erase(services)

        page = Page(getattr(visitor.client, method)(f"/confirm/{token}"), "")

        assert (page.status, page.heading) == (404, messages.NOT_OURS_HEADING)

    def test_every_mangled_token_is_one_and_the_same_404(
        self, visitor: Visitor, services: Services, token: str
    ) -> None:
        unsubscribe = link(services, LinkPurpose.UNSUBSCRIBE).rpartition("/")[2]
        last = "A" if token[-1] != "A" else "B"
        mangled = [
            *(token[:-1] + last, token.upper(), token + "=", token + "==", token + "=3D", "x", "A" * 43, "A" * 9000),
            *(subscriber(services).confirmation_token_hash or "", "' OR 1=1 --", "%00", "%ff", "<script>", unsubscribe),
        ]

        answers = [
            getattr(visitor.client, method)(f"/confirm/{text}") for text in mangled for method in ("get", "post")
        ]

        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.data for answer in answers}) == 1
        assert subscriber(services).status is SubscriberStatus.PENDING

    @pytest.mark.parametrize("glued", [".", ")", ">", ",", ").", "%22"])
    def test_glued_punctuation_is_forgiven_and_gone_from_the_page(
        self, visitor: Visitor, services: Services, token: str, glued: str
    ) -> None:
        page = visitor.open(f"/confirm/{token}{glued}")

        form = page.soup.find("form")
        assert form
        assert form["action"] == f"/confirm/{token}"
        assert visitor.press(messages.CONFIRM_BUTTON).heading == messages.CONFIRMED_HEADING

    def test_token_is_the_authority(self, app: Flask, services: Services, token: str) -> None:
        stranger = app.test_client()

        foreign = {"Origin": "https://mail.example", "Sec-Fetch-Site": "cross-site"}
        response = stranger.post(f"/confirm/{token}", headers=foreign)

        assert response.status_code == 200
        assert "Set-Cookie" not in response.headers
        assert subscriber(services).status is SubscriberStatus.CONFIRMED


class TestLeaving:
    @pytest.mark.parametrize(
        ("purpose", "button"),
        [(LinkPurpose.UNSUBSCRIBE, messages.UNSUBSCRIBE_BUTTON), (LinkPurpose.NOT_ME, messages.NOT_ME_BUTTON)],
    )
    def test_page_has_a_button_and_get_changes_nothing(
        self, visitor: Visitor, services: Services, token: str, purpose: LinkPurpose, button: str
    ) -> None:
        before = everything(services)

        page = visitor.open(link(services, purpose))
        assert page.buttons == [button]
        assert everything(services) == before
        visitor.press(button)

        assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED

    def test_one_click_needs_no_cookie_and_no_redirect(self, app: Flask, services: Services, token: str) -> None:
        response = app.test_client().post(
            link(services, LinkPurpose.UNSUBSCRIBE),
            data="List-Unsubscribe=One-Click",
            content_type="application/x-www-form-urlencoded",
        )

        assert response.status_code == 200
        assert "Set-Cookie" not in response.headers
        assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED

    @pytest.mark.parametrize("purpose", list(LinkPurpose))
    def test_answer_is_the_same_for_any_token(
        self, visitor: Visitor, services: Services, token: str, purpose: LinkPurpose
    ) -> None:
        live = link(services, purpose)
        other = next(each for each in LinkPurpose if each is not purpose)
        wrong_purpose = f"/{purpose}/{link(services, other).rpartition('/')[2]}"
        paths = [wrong_purpose, f"/{purpose}/{token}", f"/{purpose}/unknown", live, live, f"{live})."]

        answers = [visitor.client.post(path) for path in paths]

        assert {(a.status_code, tuple(a.headers), a.data) for a in answers} == {
            (200, tuple(answers[0].headers), answers[0].data)
        }

    def test_unsubscribe_link_is_no_not_me_link(self, visitor: Visitor, services: Services, token: str) -> None:
        wrong = link(services, LinkPurpose.UNSUBSCRIBE).replace("/unsubscribe/", "/not-me/")

        visitor.client.post(wrong)

        assert subscriber(services).status is SubscriberStatus.PENDING


class TestErrors:
    @pytest.mark.parametrize("error", [StorageBusy, StorageUnavailable])
    @pytest.mark.parametrize("way", ["plain", "htmx"])
    def test_busy_database_keeps_the_text_and_the_next_press_works(
        self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch, error: type[Exception], way: str
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise error

        visitor.open("/join/launch")
        visitor.fill_in()
        with monkeypatch.context() as patch:
            patch.setattr(signup, "sign_up", refuse)
            page = visitor.submit_with_htmx() if way == "htmx" else visitor.submit()

        assert page.status == 503
        assert int(page.response.headers["Retry-After"]) > 0
        assert page.value("email") == "person@example.com"
        assert page.focused == ["notice"]
        assert bool(page.soup.find("html")) == (way == "plain")
        assert messages.CHECK_INBOX in visitor.submit().message

    def test_unreadable_database_keeps_the_text_too(self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise StorageUnavailable

        visitor.open("/join/launch")
        visitor.fill_in(consent=None)
        with monkeypatch.context() as patch:
            patch.setattr(waitlists, "find", refuse)
            page = visitor.submit()
            assert visitor.client.get("/join/launch").status_code == 503

        assert (page.status, page.value("email")) == (503, "person@example.com")
        assert visitor.submit().problem("consent") == messages.CONSENT_MISSING

    def test_busy_confirmation_can_be_pressed_again(
        self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch, token: str
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise StorageBusy

        visitor.open(f"/confirm/{token}")
        with monkeypatch.context() as patch:
            patch.setattr(confirmation, "confirm", refuse)
            page = visitor.press(messages.CONFIRM_BUTTON)
        assert (page.status, page.buttons) == (503, [messages.TRY_AGAIN_BUTTON])
        assert token not in page.response.text

        assert visitor.press(messages.TRY_AGAIN_BUTTON).heading == messages.CONFIRMED_HEADING

    def test_foreign_schema_is_a_503(self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise SchemaMismatch

        monkeypatch.setattr(waitlists, "find_default", refuse)

        page = visitor.open("/")

        assert (page.status, page.heading) == (503, messages.ERRORS[503][0])
        assert "upgrade" not in page.message

    def test_surprise_is_a_calm_500_that_tells_nobody_anything(
        self, app: Flask, visitor: Visitor, monkeypatch: pytest.MonkeyPatch, token: str
    ) -> None:
        def fail(*_: Any) -> None:
            try:
                raise ValueError(token)
            except ValueError as error:
                raise RuntimeError(f"{token} person@example.com") from error

        app.config["PROPAGATE_EXCEPTIONS"] = False
        monkeypatch.setattr(confirmation, "look", fail)

        with capture_logs() as logs:
            page = visitor.open(f"/confirm/{token}")

        assert (page.status, page.heading) == (500, messages.ERRORS[500][0])
        assert [(line["error"], line["rule"]) for line in logs] == [
            ("RuntimeError", "/confirm/<token>"),
            ("ValueError", "/confirm/<token>"),
        ]
        assert "in fail" in str(logs)
        for secret in (token, "person@example.com"):
            assert secret not in page.response.text
            assert secret not in str(logs).replace("{token} person@example.com", "")

    def test_wrong_method_is_a_405_with_allow(self, visitor: Visitor) -> None:
        page = Page(visitor.client.delete("/join/launch", headers={"X-HTTP-Method-Override": "GET"}), "")

        assert (page.status, page.heading) == (405, messages.ERRORS[405][0])
        assert "POST" in page.response.headers["Allow"]

    def test_error_is_a_fragment_for_htmx(self, visitor: Visitor) -> None:
        page = Page(visitor.client.get("/nothing", headers=HTMX), "")

        assert (page.status, page.heading) == (404, messages.ERRORS[404][0])
        assert not page.soup.find("html")

    def test_history_restore_is_no_htmx(self, visitor: Visitor) -> None:
        page = Page(visitor.client.get("/nothing", headers=HTMX | {"HX-History-Restore-Request": "true"}), "")

        assert page.soup.find("html")

    def test_every_page_has_language_title_landmarks_and_one_heading(
        self, visitor: Visitor, services: Services, token: str
    ) -> None:
        paths = [
            "/",
            "/join/launch/check-inbox",
            f"/confirm/{token}",
            "/confirm/x",
            "/unsubscribe/x",
            "/not-me/x",
            "/no",
        ]

        for path in paths:
            soup = visitor.open(path).soup
            assert soup.html
            assert soup.html["lang"] == "en"
            assert soup.title
            assert re.match(r".+ · Waitlist$", soup.title.get_text())
            assert [len(soup.find_all(tag)) for tag in ("h1", "header", "main", "footer")] == [1, 1, 1, 1]
            assert not soup.find(style=True)
            assert not soup.find("style")
            assert all(script.get("src") for script in soup.find_all("script"))


class TestProbes:
    def test_process_is_alive_under_any_host_name(self, client: FlaskClient) -> None:
        assert client.get("/healthz", headers={"Host": "10.0.0.7"}).status_code == 200

    def test_ready_when_the_database_is(self, client: FlaskClient) -> None:
        response = client.get("/readyz")

        assert response.status_code == 200
        assert response.get_json() == {
            "is_ready": True,
            "problems": [],
            "schema_version": newest_revision(),
            "oldest_due_seconds": None,
            "systemic_fault": None,
        }

    def test_asking_again_and_again_imports_no_migration_anew(
        self, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Anybody may ask, as often as they like."""
        client.get("/readyz")
        monkeypatch.setattr(migrate, "_scripts", lambda: pytest.fail("the migrations were imported"))

        assert client.get("/readyz").status_code == 200

    def test_not_ready_when_it_is_not(self, client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
        from waitlist import ledger as reading

        monkeypatch.setattr(reading, "readiness", lambda _: reading.Readiness(False, ("gone",)))

        response = client.get("/readyz")

        assert (response.status_code, response.get_json()["problems"]) == (503, ["gone"])


def test_link_in_the_mail_opens_the_confirm_page(
    visitor: Visitor, services: Services, sender: FakeSender, settings: Settings
) -> None:
    visitor.sign_up()
    drain(services)
    found = re.search(rf"{re.escape(settings.base_url)}/confirm/\S+", sender.mails[-1].text)
    assert found

    visitor.open(urlsplit(found[0]).path)

    assert visitor.press(messages.CONFIRM_BUTTON).heading == messages.CONFIRMED_HEADING
