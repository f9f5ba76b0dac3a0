"""The bytes of a mail, without a socket."""

from __future__ import annotations

import email
import re
from email.message import EmailMessage
from email.policy import default
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waitlist.mail.base import Mail
from waitlist.mail.message import LONGEST_LINE, message_bytes

HEADERS = (
    ("From", "Waitlist <waitlist@example.com>"),
    ("Date", "Mon, 30 Nov 2026 10:00:00 +0000"),
    ("Message-ID", "<0193-a@example.com>"),
    ("Auto-Submitted", "auto-generated"),
    ("List-Unsubscribe", "<https://waitlist.example.com/unsubscribe/" + "u" * 120 + ">"),
    ("List-Unsubscribe-Post", "List-Unsubscribe=One-Click"),
)


def make_mail(
    *,
    recipient: str = "person@example.com",
    subject: str = "Confirm your place",
    text: str = "Hello\n\nhttps://waitlist.example.com/confirm/abc\n",
    html: str = "<p>Hello</p>\n",
    headers: tuple[tuple[str, str], ...] = HEADERS,
) -> Mail:
    return Mail(recipient, subject, text, html, headers)


def parse(message: bytes) -> EmailMessage:
    parsed = email.message_from_bytes(message, policy=default)
    assert not any(part.defects for part in parsed.walk())
    return parsed


def contents(message: bytes) -> list[str]:
    return [cast(EmailMessage, part).get_content() for part in parse(message).iter_parts()]


def test_message_is_exactly_these_bytes() -> None:
    mail = make_mail(subject="Zürich", text="Plain\n.dot\n", html="<p>Grüße=</p>\n")

    message = message_bytes(mail)

    # The SHA-256 of the Message-ID.
    boundary = "=_fc57f856e9b793eaee9738cdf6939cf4"
    assert message.decode("ascii").split("\r\n") == [
        "From: Waitlist <waitlist@example.com>",
        "Date: Mon, 30 Nov 2026 10:00:00 +0000",
        "Message-ID: <0193-a@example.com>",
        "Auto-Submitted: auto-generated",
        "List-Unsubscribe: <https://waitlist.example.com/unsubscribe/" + "u" * 120 + ">",
        "List-Unsubscribe-Post: List-Unsubscribe=One-Click",
        "To: person@example.com",
        "Subject: =?utf-8?b?WsO8cmljaA==?=",
        "MIME-Version: 1.0",
        "Content-Type: multipart/alternative;",
        f' boundary="{boundary}"',
        "",
        f"--{boundary}",
        'Content-Type: text/plain; charset="utf-8"',
        "Content-Transfer-Encoding: 7bit",
        "",
        "Plain",
        ".dot",
        "",
        f"--{boundary}",
        'Content-Type: text/html; charset="utf-8"',
        "Content-Transfer-Encoding: quoted-printable",
        "",
        "<p>Gr=C3=BC=C3=9Fe=3D</p>",
        "",
        f"--{boundary}--",
        "",
    ]


# What a terminal, a mail reader and Python's line splitting treat in different ways, more often than by chance.
TRICKY = st.sampled_from(
    ["\n", "\r\n", " ", "  ", "\t", ".", "=", "=?UTF-8?Q?=41?=", "ü", "\u2028", "\x0b", "\x1f", "😀", "--", "x" * 80]
)
TEXTS = st.lists(TRICKY | st.text(st.characters(codec="utf-8"), max_size=20), max_size=30).map("".join)
SUBJECTS = TEXTS.map(lambda text: re.sub("[\r\n\0]", "", text))


@given(subject=SUBJECTS, text=TEXTS, html=TEXTS)
def test_python_parses_back_what_was_written(subject: str, text: str, html: str) -> None:
    mail = make_mail(subject=subject, text=text, html=html)

    message = message_bytes(mail)

    parsed = parse(message)
    own = [(name, str(value)) for name, value in parsed.items() if name not in ("MIME-Version", "Content-Type")]
    assert own == [*HEADERS, ("To", mail.recipient), ("Subject", subject)]
    assert contents(message) == [re.sub("\r\n|\r|\n", "\r\n", part) for part in (text, html)]
    assert all(len(line) <= LONGEST_LINE for line in message.split(b"\r\n"))
    assert re.search(rb"[^\x20-\x7e\t\r\n]|(?<!\r)\n|\r(?!\n)", message) is None
    assert message == message_bytes(mail)


@pytest.mark.parametrize(
    "subject",
    [
        "Confirm your place on the list of " + "very " * 32 + "early birds",
        "Bestätige deinen Platz auf der Liste " + "für frühe Vögel " * 10,
        "W" * 200,
        "=?UTF-8?Q?=41?= literally",
        "two  spaces and an end ",
    ],
)
def test_long_or_odd_subject_is_folded_and_arrives_literally(subject: str) -> None:
    message = message_bytes(make_mail(subject=subject))

    assert parse(message)["Subject"] == subject
    lines = re.search(rb"^Subject: .*(?:\r\n .*)*", message, re.MULTILINE)
    assert lines is not None
    assert max(map(len, lines[0].split(b"\r\n"))) <= 78


def test_plain_subject_is_readable_in_the_raw_message() -> None:
    assert b"\r\nSubject: Confirm your place\r\n" in message_bytes(make_mail())


@pytest.mark.parametrize("end", ["\r", "\n", "\0", "\r\n", "\x0b", "ü"])
@pytest.mark.parametrize("header", ["Message-ID", "List-Unsubscribe", "X-New"])
def test_header_injection_is_refused(header: str, end: str) -> None:
    headers = tuple((dict(HEADERS) | {header: f"a{end}Bcc: victim@example.com"}).items())

    with pytest.raises(ValueError, match="header"):
        message_bytes(make_mail(headers=headers))


@pytest.mark.parametrize("end", ["\r", "\n", "\0"])
def test_line_end_in_a_subject_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match="subject"):
        message_bytes(make_mail(subject=f"a{end}Bcc: victim@example.com"))


@pytest.mark.parametrize(
    "recipient",
    [
        "a@example.com\nBcc: b@example.com",
        "a@example.com\n",
        "a@example.com, b@example.com",
        "A <a@example.com>",
        "ä@example.com",
        "a",
        "",
        "a@b@c",
    ],
)
def test_anything_but_one_bare_address_is_refused(recipient: str) -> None:
    with pytest.raises(ValueError, match="bare address"):
        message_bytes(make_mail(recipient=recipient))


@pytest.mark.parametrize("name", ["To", "bcc", "Cc", "SUBJECT", "Content-Type", "from", "X:Y", "", "X Y", "X\nY"])
def test_header_that_would_stand_twice_or_has_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="header"):
        message_bytes(make_mail(headers=(*HEADERS, (name, "value"))))


def test_sender_that_is_no_address_is_refused() -> None:
    """An empty envelope sender would pass as a bounce."""
    with pytest.raises(ValueError, match="bare address"):
        message_bytes(make_mail(headers=(("From", "Waitlist"), *HEADERS[1:])))


def test_overlong_line_is_encoded() -> None:
    message = message_bytes(make_mail(text="x" * (LONGEST_LINE + 1)))

    assert contents(message)[0] == "x" * (LONGEST_LINE + 1)
    assert max(map(len, message.split(b"\r\n"))) <= LONGEST_LINE


def test_boundary_quoted_in_the_text_is_not_taken_for_one() -> None:
    boundary = parse(message_bytes(make_mail())).get_boundary()
    text = f"You wrote:\n--{boundary}--\n\n--{boundary}\n"

    message = message_bytes(make_mail(text=text))

    assert contents(message) == [text.replace("\n", "\r\n"), "<p>Hello</p>\r\n"]


def test_mail_thawed_from_the_outbox_gives_the_same_bytes() -> None:
    mail = make_mail(subject="Zürich  =?x", html="<p>ß</p>")

    assert message_bytes(Mail.from_json(mail.recipient, mail.to_json())) == message_bytes(mail)
