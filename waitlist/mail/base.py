"""What a mail is and what a provider must do. A provider is one file beside this one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from email.utils import parseaddr
from typing import Final, Protocol

from waitlist.model import MOST_DETAIL_CHARACTERS, Outcome, ProviderEvent
from waitlist.settings import Settings

# Smuggled-in headers end here, whatever let them through before.
_LINE_ENDS: Final = ("\r", "\n", "\0")
# Characters of a provider's answer that are looked at.
_LONGEST_REPLY: Final = 2000
# Also as it stands in a URL. Greedy on purpose: better too much hidden than too little.
_LINK: Final = re.compile(r"https?:\S+", re.IGNORECASE)
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43,}")
_ADDRESS: Final = re.compile(r"""[^\s<>()\[\],;:"/?&]+(?:@|%40)[^\s<>()\[\],;:"/?&]+""", re.IGNORECASE)


class UnfitMail(ValueError):
    """The mail cannot be written as it stands. Raised before a byte of it has left: nothing was sent."""


@dataclass(frozen=True)
class Mail:
    """One rendered mail, ready for the wire. `headers` are ASCII and hold From, Date and Message-ID among others;
    To and Subject come from `recipient` and `subject`. Texts have `\\n` line ends.
    """

    recipient: str
    subject: str
    text: str
    html: str
    headers: tuple[tuple[str, str], ...]

    @property
    def envelope_sender(self) -> str:
        return parseaddr(dict(self.headers)["From"])[1]

    def to_json(self) -> str:
        """Canonical: the same mail gives the same text. The recipient stands in its own column."""
        frozen = asdict(self) | {"headers": [list(header) for header in self.headers]}
        del frozen["recipient"]
        return json.dumps(frozen, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, recipient: str, message: str) -> Mail:
        """Raises UnfitMail for anything that to_json() did not make."""
        try:
            frozen = json.loads(message)
            headers = tuple((str(name), str(value)) for name, value in frozen["headers"])
            mail = cls(recipient, str(frozen["subject"]), str(frozen["text"]), str(frozen["html"]), headers)
            _ = mail.envelope_sender
        except (KeyError, TypeError, ValueError) as error:
            raise UnfitMail("the frozen message is damaged") from error
        if any(end in value for pair in (*headers, (recipient, mail.subject)) for value in pair for end in _LINE_ENDS):
            raise UnfitMail("a header of the frozen message holds a line end")
        return mail


def scrub(text: str, *, recipient: str) -> str:
    """A provider's words as one line without any address, link or token, cut. Providers like to repeat the address they
    refuse, and some the mail.
    """
    printable = "".join(character if character.isprintable() else " " for character in text[:_LONGEST_REPLY])
    line = _LINK.sub("[link]", " ".join(printable.split()))
    line = _ADDRESS.sub("[address]", _TOKEN.sub("[token]", line))
    if local_part := recipient.rpartition("@")[0]:
        line = re.sub(rf"(?<![\w.]){re.escape(local_part)}(?!\w)", "[address]", line, flags=re.IGNORECASE)
    return line[:MOST_DETAIL_CHARACTERS]


class Sender(Protocol):
    """Hands mails to one provider. Not thread-safe: it may keep a connection."""

    # The word for it in deliveries and metrics.
    provider: str
    # How long the provider remembers an idempotency key, in seconds; None: it keeps none.
    key_window_seconds: int | None

    def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
        """Make exactly one attempt, over within `deadline_seconds`. `key` is the delivery's id.

        Returns an Outcome whatever the provider does. Raises UnfitMail, and anything else only on a bug of ours.
        """

    def check(self, *, deadline_seconds: float) -> Outcome:
        """Whether a mail could be handed over now (folder writable, login accepted), without sending one."""

    def close(self) -> None: ...


@dataclass
class ParsedEvents:
    """What stood in one webhook. `bad` could not be read; `ignored` is about nothing that we sent."""

    events: list[ProviderEvent] = field(default_factory=list)
    ignored: int = 0
    bad: int = 0


class Webhook(Protocol):
    """How one provider reports what became of the mails."""

    def secrets(self, settings: Settings) -> tuple[str, ...]:
        """None set: the endpoint is closed."""

    def verify(self, headers: Mapping[str, str], body: bytes, secrets: tuple[str, ...], now: float) -> str | None:
        """The id of a message that one of `secrets` signed at about `now` (Unix seconds); None for any other.

        The names of `headers` are in lower case.
        Compares in constant time and never raises, whatever was sent.
        """

    def parse(self, body: bytes, message_id: str) -> ParsedEvents:
        """The events in a verified body; opens no connection. Raises ValueError if it cannot be read at all."""
