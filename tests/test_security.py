"""What is refused before any look-up, and the headers on every answer."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Request
from flask.testing import FlaskClient

from tests.factories import make_list
from tests.pages import HTMX, Page, Visitor
from tests.scenes import count, ledger
from waitlist import messages, waitlists
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store.schema import signup_requests
from waitlist.web import htmx, security

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def launch(services: Services) -> str:
    return make_list(services)


@pytest.fixture
def visitor(client: FlaskClient) -> Visitor:
    visitor = Visitor(client)
    visitor.open("/join/launch")
    visitor.fill_in()
    return visitor


class TestHeaders:
    @pytest.mark.parametrize("path", ["/", "/join/launch", "/confirm/x", "/nothing", "/healthz", "/static/style.css"])
    def test_every_answer_carries_the_strict_headers(self, client: FlaskClient, path: str) -> None:
        with client.get(path) as response:
            headers = response.headers

        assert headers["Content-Security-Policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert "Strict-Transport-Security" not in headers

    @pytest.mark.parametrize("path", ["/", "/join/launch", "/join/launch/check-inbox", "/confirm/x", "/unsubscribe/x"])
    def test_pages_are_never_stored(self, client: FlaskClient, path: str) -> None:
        assert client.get(path).headers["Cache-Control"] == "no-store"

    def test_answers_to_forms_are_never_stored_and_vary_by_htmx(self, visitor: Visitor) -> None:
        headers = visitor.submit_with_htmx().response.headers

        assert headers["Cache-Control"] == "no-store"
        assert "HX-Request" in headers["Vary"]

    @pytest.mark.parametrize("headers", [{}, HTMX])
    def test_errors_vary_by_htmx(self, client: FlaskClient, headers: dict[str, str]) -> None:
        assert "HX-Request" in client.get("/nothing", headers=headers).headers["Vary"]

    def test_versioned_static_files_stay_for_a_year(self, visitor: Visitor) -> None:
        sheet = visitor.page.soup.find("link", rel="stylesheet")
        assert sheet

        versioned = visitor.client.get(str(sheet["href"]))
        plain = visitor.client.get("/static/style.css")

        assert versioned.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert "31536000" not in plain.headers["Cache-Control"]
        versioned.close()
        plain.close()

    def test_cookie_is_for_us_alone(self, client: FlaskClient) -> None:
        cookie = client.get("/join/launch").headers["Set-Cookie"]

        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie

    @pytest.mark.parametrize("path", ["/confirm/x", "/unsubscribe/x", "/not-me/x", "/join/launch/check-inbox"])
    def test_pages_without_a_form_of_ours_set_no_cookie(self, client: FlaskClient, path: str) -> None:
        assert "Set-Cookie" not in client.get(path).headers
        assert "Set-Cookie" not in client.post(path).headers


class TestHttps:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"base_url": "https://waitlist.example.com", "trusted_proxies": 1})

    def test_https_adds_hsts_and_a_secure_host_cookie(self, client: FlaskClient) -> None:
        headers = client.get("/join/launch", base_url="https://waitlist.example.com").headers

        assert headers["Strict-Transport-Security"] == "max-age=31536000"
        assert headers["Set-Cookie"].startswith("__Host-waitlist=")
        assert "Secure" in headers["Set-Cookie"]

    def test_form_works_behind_a_proxy_that_ends_tls(self, client: FlaskClient) -> None:
        visitor = Visitor(client)
        proxied: dict[str, Any] = {
            "base_url": "http://waitlist.example.com",
            "headers": {"X-Forwarded-Proto": "https", "Origin": "https://waitlist.example.com"},
        }
        visitor.open("/join/launch", **proxied)
        visitor.fill_in()

        page = visitor.submit_with_htmx(**proxied)

        assert messages.CHECK_INBOX in page.message


class TestHostAndOrigin:
    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "[::1", "127.0.0.1.evil.example", "a b"])
    def test_foreign_host_is_refused(self, visitor: Visitor, services: Services, host: str) -> None:
        page = visitor.submit(headers={"Host": host})

        assert (page.status, page.heading) == (400, messages.ERRORS[400][0])
        assert ledger(services) == []

    @pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:1337", "[::1]:8000"])
    def test_loopback_is_no_foreign_host(self, client: FlaskClient, host: str) -> None:
        assert client.get("/", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": ""},
            {"Origin": "http://127.0.0.1:8000.evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ],
    )
    @pytest.mark.parametrize("way", ["plain", "htmx"])
    def test_form_from_another_site_is_refused(
        self, visitor: Visitor, services: Services, headers: dict[str, str], way: str
    ) -> None:
        page = visitor.submit_with_htmx(headers=headers) if way == "htmx" else visitor.submit(headers=headers)

        assert (page.status, page.heading) == (403, messages.ERRORS[403][0])
        assert ledger(services) == []

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"},
            {"Origin": "http://localhost"},
            {"Sec-Fetch-Site": "none"},
            {"Referer": "https://elsewhere.example/"},
            {"Accept": "application/json"},
            {"Accept-Language": "x" * 50_000},
            {"Forwarded": "host=evil.example;for=1.2.3.4", "X-Forwarded-Host": "evil.example"},
            {"Range": "bytes=0-1", "If-None-Match": '"x"', "Expect": "100-continue"},
            {"User-Agent": "${jndi:ldap://x}"},
        ],
    )
    def test_form_from_our_page_is_taken(self, visitor: Visitor, headers: dict[str, str]) -> None:
        assert messages.CHECK_INBOX in visitor.submit_with_htmx(headers=headers).message


class TestSizes:
    def test_many_parts_are_too_much(self, visitor: Visitor, services: Services) -> None:
        parts = {f"part{number}": "x" for number in range(1500)}

        response = visitor.client.post("/join/launch", data=parts, content_type="multipart/form-data")

        assert response.status_code == 413
        assert Page(response, "").heading == messages.ERRORS[413][0]
        assert ledger(services) == []

    @pytest.mark.parametrize("headers", [{}, HTMX])
    @pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
    def test_huge_body_is_too_much(self, visitor: Visitor, headers: dict[str, str], kind: str) -> None:
        start = b'--x\r\nContent-Disposition: form-data; name="email"\r\n\r\n'

        response = visitor.client.post(
            "/join/launch", data=start + b"\r" * 5_000_000, content_type=kind, headers=headers
        )

        assert response.status_code == 413

    def test_file_is_refused(self, visitor: Visitor, services: Services) -> None:
        import io

        _, values = visitor._form(visitor.page.soup.find(id="signup"))
        data = values | {"picture": (io.BytesIO(b"x"), "x.png")}

        response = visitor.client.post("/join/launch", data=data, content_type="multipart/form-data")

        assert response.status_code == 413
        assert ledger(services) == []


class TestRateLimit:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"rate_limit": "2/minute;100/day"})

    def _posts(self, client: FlaskClient, address: str, how_many: int = 3, **kwargs: Any) -> list[int]:
        return [
            client.post("/join/launch", environ_base={"REMOTE_ADDR": address}, **kwargs).status_code
            for _ in range(how_many)
        ]

    @pytest.mark.parametrize("way", ["plain", "htmx"])
    def test_refused_form_keeps_text_and_tick_without_any_look_up(
        self, visitor: Visitor, services: Services, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._posts(visitor.client, "127.0.0.1", 2)
        monkeypatch.setattr(waitlists, "find", lambda *_: pytest.fail("looked up"))

        page = visitor.submit_with_htmx() if way == "htmx" else visitor.submit()

        assert page.status == 429
        assert 1 <= int(page.response.headers["Retry-After"]) <= 60
        assert "1 minute" in page.notice
        assert (page.value("email"), page.value("consent")) == ("person@example.com", "yes")
        assert page.focused == ["notice"]
        assert ledger(services) == []

    def test_kept_form_goes_through_later(self, app: Flask, visitor: Visitor) -> None:
        self._posts(visitor.client, "127.0.0.1", 2)
        visitor.submit()

        page = visitor.submit(environ_base={"REMOTE_ADDR": "192.0.2.9"})

        assert messages.CHECK_INBOX in page.message

    def test_each_address_has_its_own_allowance(self, client: FlaskClient) -> None:
        assert self._posts(client, "192.0.2.1") == [400, 400, 429]
        assert self._posts(client, "192.0.2.2", 1) == [400]

    def test_ipv6_counts_by_its_64(self, client: FlaskClient) -> None:
        assert self._posts(client, "2001:db8::1", 2) == [400, 400]
        assert self._posts(client, "2001:db8::ffff:1", 1) == [429]
        assert self._posts(client, "2001:db8:0:1::1", 1) == [400]

    def test_forwarded_address_of_a_stranger_does_not_count(self, client: FlaskClient) -> None:
        forwarded = [self._posts(client, "192.0.2.1", 1, headers={"X-Forwarded-For": f"1.2.3.{n}"}) for n in range(3)]

        assert forwarded == [[400], [400], [429]]

    def test_join_and_renew_share_one_allowance(self, client: FlaskClient) -> None:
        assert client.post("/confirm/x/renew").status_code == 404
        assert client.post("/join/launch").status_code == 400
        response = client.post("/confirm/x/renew")
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1

    @pytest.mark.parametrize("path", ["/unsubscribe/x", "/not-me/x", "/confirm/x"])
    def test_leaving_and_confirming_are_never_limited(self, client: FlaskClient, path: str) -> None:
        assert 429 not in [client.post(path).status_code for _ in range(5)]

    def test_reading_is_never_limited(self, client: FlaskClient) -> None:
        assert {client.get("/join/launch").status_code for _ in range(5)} == {200}

    def test_huge_body_over_the_limit_is_still_a_429(self, client: FlaskClient) -> None:
        self._posts(client, "127.0.0.1", 2)

        assert client.post("/join/launch", data={"email": "x" * 100_000}).status_code == 429


class TestOneProxy(TestRateLimit):
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"rate_limit": "2/minute", "trusted_proxies": 1})

    def test_forwarded_address_of_a_stranger_does_not_count(self, client: FlaskClient) -> None:
        """Only the right-most hop was written by the proxy we trust."""
        spoofed = [
            self._posts(client, "10.0.0.1", 1, headers={"X-Forwarded-For": f"1.2.3.{n}, 192.0.2.7"}) for n in range(3)
        ]
        other = self._posts(client, "10.0.0.1", 1, headers={"X-Forwarded-For": "1.2.3.0, 192.0.2.8"})

        assert spoofed == [[400], [400], [429]]
        assert other == [400]


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix:", "unix:"),
        ("x" * 500, "x" * 64),
        (None, "unknown"),
    ],
)
def test_client_key(app: Flask, address: str | None, key: str) -> None:
    with app.test_request_context(environ_overrides={"REMOTE_ADDR": address}):
        assert security.client_key() == key


class TestHtmx:
    def test_vendored_file_is_what_its_checksum_and_the_page_say(self, visitor: Visitor) -> None:
        file = ROOT / "static" / htmx_path(visitor)
        digest = hashlib.sha256(file.read_bytes())
        script = visitor.page.soup.find("script", integrity=True)
        assert script

        assert f"{digest.hexdigest()}  {file.name}" in (file.parent / "SHA256SUMS").read_text().splitlines()
        assert script["integrity"] == "sha256-" + base64.b64encode(digest.digest()).decode()
        assert (file.parent / "htmx-LICENSE").is_file()

    def test_form_says_how_it_is_sent(self, visitor: Visitor) -> None:
        form = visitor.page.soup.find(id="signup")
        assert form

        assert (form["action"], form["hx-post"]) == ("/join/launch", "/join/launch")
        assert (form["hx-swap"], form["hx-disabled-elt"], form["hx-target"]) == ("outerHTML", "find button", "this")

    def test_custom_request_class_survives(self) -> None:
        class Custom(Request):
            is_custom = True

        app = Flask("custom")
        app.request_class = Custom

        htmx.init_app(app)

        with app.test_request_context(headers=HTMX) as context:
            request: Any = context.request
            assert request.is_custom
            assert bool(request.htmx)


def htmx_path(visitor: Visitor) -> str:
    found = re.search(r"vendor/htmx-[\d.]+min\.js", visitor.page.response.text)
    assert found
    return found[0]


def test_refused_forms_write_nothing(client: FlaskClient, services: Services) -> None:
    for data in ({}, {"email": "a@example.com"}, {"email": "a@example.com", "consent": "yes", "consent_version": "1"}):
        client.post("/join/launch", data=data)

    assert count(services, signup_requests) == 0
