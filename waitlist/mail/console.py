"""`console:`: the mail's text on standard output, for a developer who wants to click the link in the terminal."""

from __future__ import annotations

import sys
from typing import BinaryIO

from waitlist.mail.base import Mail
from waitlist.mail.message import message_bytes
from waitlist.model import Outcome, OutcomeKind
from waitlist.settings import Settings


class ConsoleSender:
    provider = "console"
    key_window_seconds: int | None = None

    def __init__(self, stream: BinaryIO | None = None) -> None:
        """`stream`: where to print; None: whatever standard output is when a mail is sent."""
        self.stream = stream

    @classmethod
    def from_settings(cls, settings: Settings) -> ConsoleSender:
        return cls()

    def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
        message_bytes(mail)  # refuses what every other sender would refuse
        try:
            self._print(_as_text(mail))
        # ValueError is what Python says of a closed file; AttributeError: there is no standard output at all.
        except (OSError, ValueError, AttributeError) as error:
            return Outcome(OutcomeKind.SYSTEMIC, "console_closed", f"nothing reads the output: {type(error).__name__}")
        return Outcome(OutcomeKind.ACCEPTED)

    def check(self, *, deadline_seconds: float) -> Outcome:
        return Outcome(OutcomeKind.ACCEPTED, detail="mails are printed on standard output")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        """As UTF-8 bytes: a terminal set to another encoding must not fail on a title."""
        if self.stream is None:
            sys.stdout.flush()
        stream = self.stream or sys.stdout.buffer
        stream.write(text.encode())
        stream.flush()


def _as_text(mail: Mail) -> str:
    headers = (*mail.headers, ("To", mail.recipient), ("Subject", mail.subject))
    head = "".join(f"{name}: {value}\n" for name, value in headers)
    return f"{'-' * 72}\n{head}\n{mail.text.rstrip()}\n{'-' * 72}\n"
