"""A frozen Mail as the bytes that go over the wire (RFC 5322, MIME). Pure: no clock, no random, no I/O.

A byte template, since a drain would otherwise spend its time in `email.message.EmailMessage` (about 2 ms a mail), and
since that class encodes header values of 76 characters without a space (RFC 2047), which kills one-click unsubscribe.
"""

from __future__ import annotations

import re
from binascii import b2a_base64, b2a_qp
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from textwrap import wrap
from typing import Final

from waitlist.mail.base import Mail, UnfitMail
from waitlist.model import ENCODED_WORD

# Octets of a line without its CRLF: RFC 5322, 2.1.1.
LONGEST_LINE: Final = 998
# Characters of a line that every reader shows whole: 78 (RFC 5322, 2.1.1), less the space that continues a header.
_WANTED_LINE: Final = 77
# Of the text in one encoded word: 52 characters of base64, which fit behind "Subject: " in a line of 76 (RFC 2047, 2).
_ENCODED_OCTETS: Final = 39
# Written from the mail's other fields. A second one, or another recipient field, could only be smuggled in.
_OWN_HEADERS: Final = frozenset(
    {"to", "cc", "bcc", "subject", "mime-version", "content-type", "content-transfer-encoding"}
)
_MULTIPART: Final = "Content-Type: multipart/alternative;\r\n boundary="
_FIELD_NAME: Final = re.compile(r"[!-9;-~]+")
# A dot-atom and a domain, which every canonical address is; nothing else needs no quoting in a header or in SMTP.
_ADDR_SPEC: Final = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def message_bytes(mail: Mail) -> bytes:
    """Header order: the mail's own, To, Subject, MIME. Text part first, then HTML, so that a reader prefers HTML.

    Raises UnfitMail where a header or an address could not be written as it stands: line ends, control characters,
    anything but ASCII, another recipient field.
    """
    parts = (_part("plain", mail.text), _part("html", mail.html))
    boundary = _boundary(dict(mail.headers).get("Message-ID", ""), parts)
    delimiter = b"\r\n--" + boundary
    return b"".join((_head(mail, boundary), delimiter, parts[0], delimiter, parts[1], delimiter, b"--\r\n"))


def _head(mail: Mail, boundary: bytes) -> bytes:
    if not _ADDR_SPEC.fullmatch(mail.recipient) or not _ADDR_SPEC.fullmatch(mail.envelope_sender):
        raise UnfitMail("sender and recipient must each be one bare address")
    names = {name.lower() for name, _ in mail.headers}
    if len(names) < len(mail.headers) or names & _OWN_HEADERS:
        raise UnfitMail("a header stands twice")
    lines = [_header(name, value) for name, value in mail.headers]
    lines += [f"To: {mail.recipient}", _subject(mail.subject), "MIME-Version: 1.0", _MULTIPART]
    # The line end behind the boundary closes the head; the empty line after it begins the first delimiter.
    return b'%s"%s"\r\n' % ("\r\n".join(lines).encode("ascii"), boundary)


def _header(name: str, value: str) -> str:
    line = f"{name}: {value}"
    if not _FIELD_NAME.fullmatch(name):
        raise UnfitMail("a header name cannot be used")
    if not (line.isascii() and line.isprintable() and len(line) <= LONGEST_LINE):
        raise UnfitMail(f"the header {name} is not one line of at most {LONGEST_LINE} ASCII characters")
    return line


# Folding costs as much as the rest of the mail, and a drain sends the same few titles again and again.
@lru_cache(maxsize=64)
def _subject(subject: str) -> str:
    if any(end in subject for end in "\r\n\0"):
        raise UnfitMail("the subject holds a line end")
    if not _is_plain(subject):
        return "Subject: " + "\r\n ".join(_encoded_words(subject))
    lines = wrap(f"Subject: {subject}", _WANTED_LINE, break_long_words=False, break_on_hyphens=False)
    return "\r\n ".join(lines)


def _is_plain(subject: str) -> bool:
    """Whether it survives unencoded: what looks like an encoded word would be decoded, and outer or double spaces and
    overlong words do not outlive a fold."""
    is_ascii = subject.isascii() and subject.isprintable()
    return is_ascii and ENCODED_WORD not in subject and all(0 < len(word) < 65 for word in subject.split(" "))


def _encoded_words(subject: str) -> Iterator[str]:
    """RFC 2047 by hand: `email.header.Header` loses U+2028 and its like. A character is never cut in two (section 5)."""
    word = b""
    for octets in (character.encode() for character in subject):
        if len(word + octets) > _ENCODED_OCTETS:
            yield _encoded_word(word)
            word = b""
        word += octets
    yield _encoded_word(word)


def _encoded_word(octets: bytes) -> str:
    return f"=?utf-8?b?{b2a_base64(octets, newline=False).decode()}?="


def _part(subtype: str, text: str) -> bytes:
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    is_short = max(map(len, lines.split("\n"))) <= LONGEST_LINE
    if is_short and lines.isascii() and not _CONTROL.search(lines):
        encoding, body = "7bit", lines.encode("ascii")
    else:
        encoding, body = "quoted-printable", b2a_qp(lines.encode())
    head = f'\nContent-Type: text/{subtype}; charset="utf-8"\nContent-Transfer-Encoding: {encoding}\n\n'
    return (head.encode("ascii") + body).replace(b"\n", b"\r\n")


def _boundary(message_id: str, parts: tuple[bytes, ...]) -> bytes:
    """The same for each try. `=_` cannot occur in quoted-printable; 7bit text could quote an older mail of ours."""
    boundary = b"=_" + sha256(message_id.encode()).hexdigest()[:32].encode()
    while any(boundary in part for part in parts):
        boundary = b"=_" + sha256(boundary).hexdigest()[:32].encode()
    return boundary
