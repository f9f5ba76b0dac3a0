"""Real workers: `flask drain-outbox` as an operator starts it, and the same command forked where a test needs many or
kills it at a line of its own code. Nothing here waits by the clock: for a process to end, or for the mailbox to change.
"""

from __future__ import annotations

import contextlib
import email
import email.policy
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Final, Self

from pydantic import SecretStr

from tests.factories import FakeClock
from tests.processes import start
from tests.scenes import drain, services_at
from tests.smtp_server import Received, SmtpServer
from waitlist import confirmation, create_app
from waitlist.model import ConfirmOutcome
from waitlist.outbox import Counts
from waitlist.services import Services
from waitlist.settings import PREFIX, ROOT, Settings

# Only a hang takes so long, even on a loaded machine.
PATIENCE_SECONDS: Final = 60.0
_LINK: Final = re.compile(r"/confirm/([A-Za-z0-9_-]{43})$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """What a process left. `code` is negative where a signal ended it."""

    code: int
    output: str
    errors: str


class Command:
    """A running `flask` command: a process of its own, with these settings as its environment and nothing else of ours.

    Leaving the `with` block kills what still runs.
    """

    def __init__(self, settings: Settings, *arguments: str) -> None:
        # Files, not pipes: a worker that logs more than a pipe holds would stop.
        self._output, self._errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - until __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flask", "--app", "app", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment(settings)},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> Ended:
        """Until it ends by itself."""
        code = self._process.wait(PATIENCE_SECONDS)
        return Ended(code, *(self._read(file) for file in (self._output, self._errors)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._output.close()
        self._errors.close()

    @staticmethod
    def _read(file: Any) -> str:
        file.seek(0)
        return str(file.read())


def drain_outbox(settings: Settings, *arguments: str) -> Command:
    return Command(settings, "drain-outbox", *arguments)


def run(settings: Settings, *arguments: str) -> Ended:
    """Run one `flask` command to its end."""
    with Command(settings, *arguments) as command:
        return command.wait()


def fork_drain(settings: Settings, *arguments: str) -> BaseProcess:
    """As drain_outbox(), without the second that a new interpreter takes to import everything."""
    return start(_run_forked, settings, ("drain-outbox", *arguments))


def _run_forked(settings: Settings, arguments: tuple[str, ...]) -> None:
    be_quiet()
    sys.exit(create_app(settings).test_cli_runner().invoke(args=arguments).exit_code)


def be_quiet() -> None:
    """The log of a forked process would end up between the dots of pytest."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process


def environment(settings: Settings) -> dict[str, str]:
    """The variables that make these settings."""
    values = settings.model_dump(exclude_defaults=True).items()
    return {
        PREFIX + name.upper(): value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        for name, value in values
    }


def changed(services: Services, **changes: Any) -> Settings:
    return services.settings.model_copy(update=changes)


@contextlib.contextmanager
def later(services: Services, seconds: float) -> Iterator[Services]:
    """The same installation, with a clock that is so far ahead and stands still."""
    ahead = services_at(services.settings, clock=FakeClock(time.time() + seconds))
    try:
        yield ahead
    finally:
        ahead.store.close()


def drain_here(services: Services) -> Counts:
    """One drain in this process, over SMTP."""
    sender = services.make_sender()
    try:
        return drain(services, sender)
    finally:
        sender.close()


def wait_until(is_so: Callable[[], object]) -> None:
    """For what only the database knows. It is asked again and again, for PATIENCE_SECONDS at most."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.02)


def token_of(mail: Received) -> str:
    """The token in the link of a mail as it came over the wire."""
    message = email.message_from_bytes(mail.raw, policy=email.policy.default)
    part = message.get_body(("plain",))
    assert part is not None
    found = _LINK.search("\n".join(part.get_content().splitlines()))
    assert found, mail.raw
    return found[1]


def copies(mailbox: SmtpServer) -> dict[str, list[int]]:
    """For each address, in the order of the first mail: how many copies of each of its mails arrived."""
    counted: dict[str, dict[str, int]] = {}
    for mail in mailbox.messages:
        (recipient,) = mail.recipients
        mails = counted.setdefault(recipient, {})
        mails[mail.message_id] = mails.get(mail.message_id, 0) + 1
    return {recipient: list(mails.values()) for recipient, mails in counted.items()}


def assert_copies_are_identical(mailbox: SmtpServer) -> None:
    """Byte for byte, envelope included."""
    first: dict[str, Received] = {}
    for mail in mailbox.messages:
        same = first.setdefault(mail.message_id, mail)
        assert (mail.raw, mail.sender, mail.recipients) == (same.raw, same.sender, same.recipients)


def assert_newest_links_are_live(services: Services, mailbox: SmtpServer) -> None:
    """The newest mail of everybody confirms, by its link."""
    newest = {mail.recipients[0]: mail for mail in mailbox.messages}
    for mail in newest.values():
        assert confirmation.confirm(services, token_of(mail)).outcome is ConfirmOutcome.CONFIRMED_NOW, mail.recipients
