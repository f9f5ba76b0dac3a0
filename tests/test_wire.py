"""The mail as it leaves: what a subscriber's program and a mailbox provider see. Through the real composer and bytes."""

from __future__ import annotations

import email
import email.policy
import re
from dataclasses import replace
from email.message import EmailMessage

import pytest
from flask.testing import FlaskClient

from tests.factories import FakeClock, FakeSender, make_list
from tests.pages import Visitor
from tests.scenes import deliveries, drain, join, outbox_rows, set_setting, token_in
from waitlist import confirmation, waitlists
from waitlist.errors import InvalidInput
from waitlist.mail.compose import Composer
from waitlist.mail.message import message_bytes
from waitlist.model import ConfirmOutcome, Outcome, OutcomeKind
from waitlist.services import Services

BASE_URL = "http://127.0.0.1:8000"
LONGEST_LINE = 998


def send_one(services: Services, sender: FakeSender) -> tuple[bytes, EmailMessage]:
    join(services)
    drain(services, sender)
    raw = message_bytes(sender.mails[-1])
    return raw, email.message_from_bytes(raw, policy=email.policy.default)


def test_mail_has_exactly_the_headers_of_the_contract(services: Services, sender: FakeSender, clock: FakeClock) -> None:
    make_list(services)

    raw, message = send_one(services, sender)

    (delivery,) = deliveries(services)
    assert sorted(message.keys()) == sorted(
        [
            "From",
            "To",
            "Subject",
            "Date",
            "Message-ID",
            "Auto-Submitted",
            "List-Unsubscribe",
            "List-Unsubscribe-Post",
            "MIME-Version",
            "Content-Type",
        ]
    )
    assert message["To"] == "person@example.com"
    assert message["Message-ID"] == f"<{delivery.id}@example.com>"
    assert message["Auto-Submitted"] == "auto-generated"
    assert message["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
    assert message["Date"].datetime.timestamp() == clock.now
    assert b"=?" not in raw
    assert re.search(rb"^List-Unsubscribe: <http://127\.0\.0\.1:8000/unsubscribe/[\w.-]+>\r$", raw, re.MULTILINE)


def test_both_parts_hold_the_link_on_a_line_of_its_own_text_first(services: Services, sender: FakeSender) -> None:
    make_list(services, title="Cheese & “friends” <b>")

    _, message = send_one(services, sender)

    link = f"{BASE_URL}/confirm/{token_in(sender.mails[0])}"
    parts = list(message.iter_parts())
    assert message.get_content_type() == "multipart/alternative"
    assert [part.get_content_type() for part in parts] == ["text/plain", "text/html"]
    for part in parts:
        assert link in part.get_content().splitlines()
    assert "Cheese & “friends” <b>" in parts[0].get_content()
    assert "Cheese &amp; “friends” &lt;b&gt;" in parts[1].get_content()


def test_mail_says_who_why_how_long_and_how_to_refuse(services: Services, sender: FakeSender) -> None:
    make_list(services)
    changed = set_setting(
        services, token_ttl_seconds=7200, contact="post@example.com", privacy_url="https://example.com/privacy"
    )
    changed = replace(changed, composer=Composer(changed.settings))

    send_one(changed, sender)

    for body in (sender.mails[0].text, sender.mails[0].html):
        assert "Launch" in body
        assert BASE_URL in body
        assert "2 hours" in body
        assert "/not-me/" in body
        assert "/unsubscribe/" in body
        assert "post@example.com" in body
        assert "https://example.com/privacy" in body


def test_no_body_line_is_too_long_and_every_line_ends_in_crlf(services: Services, sender: FakeSender) -> None:
    make_list(services, title="é" * 200)

    raw, message = send_one(services, sender)

    assert message["Subject"] == "Please confirm: " + "é" * 200
    assert raw.replace(b"\r\n", b"").count(b"\n") == raw.replace(b"\r\n", b"").count(b"\r") == 0
    assert max(map(len, raw.split(b"\r\n"))) <= LONGEST_LINE


def test_retry_sends_the_frozen_bytes_whatever_changed_meanwhile(
    services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    make_list(services)
    sender.answer_with(Outcome(OutcomeKind.TEMPORARY, "smtp_451"))
    join(services)
    drain(services)
    changed = set_setting(services, mail_from="Another <another@example.com>")

    clock.advance(60)
    drain(changed)

    first, second = map(message_bytes, sender.mails)
    assert first == second


def test_links_in_the_mail_come_from_the_setting_whatever_the_host_header_says(
    services: Services, sender: FakeSender, client: FlaskClient
) -> None:
    make_list(services)
    visitor = Visitor(client)
    visitor.open("/join/launch")
    visitor.fill_in()
    evil = {"Host": "evil.example", "X-Forwarded-Host": "evil.example", "Forwarded": "host=evil.example"}

    visitor.submit(headers=evil)
    visitor.open("/join/launch")
    visitor.fill_in()
    visitor.submit(headers={name: value for name, value in evil.items() if name != "Host"})
    drain(services)

    (mail,) = sender.mails
    assert "evil" not in mail.to_json()
    origins = {re.sub(r"(https?://[^/]+).*", r"\1", url) for url in re.findall(r"https?://\S+", mail.text)}
    assert origins == {BASE_URL}


@pytest.mark.parametrize(
    "title", ["a\nBcc: x@example.com", "a\n", "\ra", "=?UTF-8?Q?=0ABcc:_x@y.zz?=", "", " ", "x" * 201, "a\0", "tab\t"]
)
def test_title_that_could_become_a_header_is_refused(services: Services, title: str) -> None:
    with pytest.raises(InvalidInput):
        waitlists.create(services, "odd", title=title, description="", consent="Yes.")


def test_outbox_holds_the_token_only_until_the_mail_has_left(services: Services, sender: FakeSender) -> None:
    make_list(services)
    join(services)
    (queued,) = outbox_rows(services)
    assert "/confirm/" in queued.confirmation_url
    drain(services)

    (sent,) = outbox_rows(services)

    assert (sent.message, sent.confirmation_url) == ("", "")
    token = token_in(sender.mails[0])
    assert confirmation.confirm(services, token).outcome is ConfirmOutcome.CONFIRMED_NOW
