"""What every sender must keep, whichever provider it talks to. A new provider adds one Bench here and passes as it is."""

from __future__ import annotations

import os
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.resend_emulator import Answer, Fault, Raw, ResendEmulator, Reset, Silence
from tests.smtp_server import Drop, Hang, SmtpServer, one_byte_at_a_time
from tests.test_message import make_mail
from waitlist.mail.base import Sender
from waitlist.mail.console import ConsoleSender
from waitlist.mail.file import FileSender
from waitlist.mail.registry import PROVIDERS, make_sender
from waitlist.mail.resend import Account, ResendSender
from waitlist.mail.smtp import Server, SmtpSender
from waitlist.model import MOST_DETAIL_CHARACTERS, Outcome, OutcomeKind
from waitlist.settings import Settings

KEY = "01936f3e-0000-7000-8000-00000000000a"
# Far more than loopback needs; only an attempt that is meant to run out of time gets less.
PATIENT_SECONDS = 20.0
IMPATIENT_SECONDS = 0.4
CRUEL = (
    "550 5.7.1 person@example.com PERSON%40example.com <person@example.com> https://w.example.com/confirm/" + "t" * 43
)


class Bench(ABC):
    """One provider as a test sees it."""

    # What it can do to a client: each is a name for `misbehave`.
    tricks: tuple[str, ...] = ()

    def __init__(self, stack: ExitStack, folder: Path, tls: trustme.CA) -> None:
        self.stack = stack
        self.folder = folder
        self.tls = tls

    @abstractmethod
    def sender(self) -> Sender: ...

    @abstractmethod
    def attempts(self) -> list[bytes]:
        """What reached the provider, request by request, octet by octet."""

    def misbehave(self, trick: str) -> None:
        raise NotImplementedError(trick)


class FileBench(Bench):
    tricks = ("refuse",)

    def sender(self) -> Sender:
        return FileSender(self.folder / "mail")

    def attempts(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((self.folder / "mail").glob("*.eml"))]

    def misbehave(self, trick: str) -> None:
        (self.folder / "mail").write_text("a file, where a folder should be")


class ConsoleBench(Bench):
    tricks = ("refuse",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pages: list[bytes] = []
        self.is_closed = False

    def sender(self) -> Sender:
        bench = self

        class Stream:
            def write(self, octets: bytes) -> int:
                if bench.is_closed:
                    raise BrokenPipeError
                bench.pages.append(octets)
                return len(octets)

            def flush(self) -> None: ...

        stream: Any = Stream()
        return ConsoleSender(stream)

    def attempts(self) -> list[bytes]:
        return self.pages

    def misbehave(self, trick: str) -> None:
        self.is_closed = True


class SmtpBench(Bench):
    tricks = ("refuse", "hang", "dribble", "cut", "nonsense")
    scheme = "smtp"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        is_secret = self.scheme == "smtps"
        released = threading.Event()
        self.scripts: dict[str, dict[str, Any]] = {
            "refuse": {"dot": CRUEL},
            "hang": {"dot": Hang(released)},
            "dribble": {"dot": one_byte_at_a_time("250 " + "x" * 1000, pause_seconds=0.05)},
            "cut": {"dot": Drop()},
            "nonsense": {"rcpt": "\0\xff nonsense"},
        }
        self.server = SmtpServer(tls=server_tls(self.tls) if is_secret else None, implicit_tls=is_secret)
        self.stack.enter_context(self.server)
        self.stack.callback(released.set)

    def sender(self) -> Sender:
        sender = SmtpSender(Server.from_settings(Settings(mail_url=self.server.url)), tls=client_tls(self.tls))
        self.stack.callback(sender.close)
        return sender

    def attempts(self) -> list[bytes]:
        return [mail.raw for mail in self.server.received]

    def misbehave(self, trick: str) -> None:
        self.server.script = self.scripts[trick]


class SmtpsBench(SmtpBench):
    scheme = "smtps"


RESEND_FAULTS: dict[str, Fault] = {
    "refuse": Answer(422, "validation_error", f"Invalid `to` field. {CRUEL}"),
    "hang": Silence(accepts=True),
    "dribble": Raw(tuple(b"HTTP/1.1 200 OK\r\n" for _ in range(100)), pause_seconds=0.05, accepts=True),
    "cut": Reset(accepts=True),
    "nonsense": Raw((b"\0\xff nonsense",), accepts=True),
    "limit": Answer(429, "rate_limit_exceeded", CRUEL),
    "break": Answer(500, "application_error", CRUEL, accepts=True),
}


class ResendBench(Bench):
    tricks = ("refuse", "hang", "dribble", "cut", "nonsense", "limit", "break")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.emulator = self.stack.enter_context(ResendEmulator(tls=server_tls(self.tls)))

    def sender(self) -> Sender:
        return ResendSender(Account.from_settings(Settings(mail_url=self.emulator.mail_url)), tls=client_tls(self.tls))

    def attempts(self) -> list[bytes]:
        return [request.body for request in self.emulator.requests]

    def misbehave(self, trick: str) -> None:
        self.emulator.script(*[RESEND_FAULTS[trick]] * 10)


BENCHES: dict[str, type[Bench]] = {
    "file": FileBench,
    "console": ConsoleBench,
    "smtp": SmtpBench,
    "smtps": SmtpsBench,
    "resend": ResendBench,
}
TRICKS = [(name, trick) for name, bench in BENCHES.items() for trick in bench.tricks]


def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def client_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bench(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, authority: trustme.CA) -> Bench:
    return BENCHES[request.param](stack, tmp_path, authority)


def send(sender: Sender, deadline_seconds: float = PATIENT_SECONDS) -> Outcome:
    return sender.send(make_mail(), key=KEY, deadline_seconds=deadline_seconds)


def test_every_provider_of_the_registry_is_on_the_bench() -> None:
    assert BENCHES.keys() == PROVIDERS.keys()


@pytest.mark.parametrize("scheme", sorted(PROVIDERS))
def test_registry_makes_what_the_protocol_asks_for(scheme: str, tmp_path: Path) -> None:
    urls = {"file": f"file:{tmp_path}", "console": "console:", "resend": "resend://re_1"}
    sender = make_sender(Settings(mail_url=urls.get(scheme, f"{scheme}://mail.example.com")))

    assert sender.provider
    assert sender.key_window_seconds is None or sender.key_window_seconds > 0
    sender.close()


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_accepted_mail_reaches_the_provider_once(bench: Bench) -> None:
    outcome = send(bench.sender())

    assert outcome.kind is OutcomeKind.ACCEPTED
    assert len(bench.attempts()) == 1


@pytest.mark.parametrize("bench", ["smtp", "smtps", "console", "resend"], indirect=True)
def test_each_try_sends_the_same_bytes_whichever_sender_makes_it(bench: Bench) -> None:
    one, other = bench.sender(), bench.sender()
    for sender in (one, one, other):
        send(sender)

    attempts = bench.attempts()
    assert len(attempts) % 3 == 0
    assert len(attempts) >= 3
    assert len(set(attempts)) == len(attempts) // 3


@pytest.mark.parametrize(("bench", "trick"), TRICKS, indirect=["bench"])
def test_whatever_the_provider_does_is_an_outcome_of_one_request(bench: Bench, trick: str) -> None:
    sender = bench.sender()
    bench.misbehave(trick)

    outcome = send(sender, IMPATIENT_SECONDS if trick in ("hang", "dribble") else PATIENT_SECONDS)

    assert outcome.kind is not OutcomeKind.ACCEPTED
    assert outcome.code
    assert len(bench.attempts()) <= 1


@pytest.mark.parametrize(
    ("bench", "trick"), [one for one in TRICKS if one[1] in ("hang", "dribble")], indirect=["bench"]
)
def test_deadline_holds_over_the_whole_attempt(bench: Bench, trick: str) -> None:
    sender = bench.sender()
    bench.misbehave(trick)
    begun = time.monotonic()

    send(sender, IMPATIENT_SECONDS)

    assert time.monotonic() - begun < PATIENT_SECONDS / 4


@pytest.mark.parametrize(("bench", "trick"), TRICKS, indirect=["bench"])
def test_details_hold_no_address_no_link_and_no_token(bench: Bench, trick: str) -> None:
    sender = bench.sender()
    bench.misbehave(trick)

    detail = send(sender, IMPATIENT_SECONDS if trick in ("hang", "dribble") else PATIENT_SECONDS).detail

    for secret in ("person", "example.com", "t" * 43, os.sep + "confirm"):
        assert secret not in detail.lower()
    assert len(detail) <= MOST_DETAIL_CHARACTERS
    assert detail.isprintable()


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_check_sends_no_mail(bench: Bench) -> None:
    outcome = bench.sender().check(deadline_seconds=PATIENT_SECONDS)

    assert outcome.kind is OutcomeKind.ACCEPTED
    assert [attempt for attempt in bench.attempts() if b"person" in attempt] == []


@pytest.mark.parametrize(("bench", "trick"), [one for one in TRICKS if one[1] == "cut"], indirect=["bench"])
def test_sender_goes_on_after_a_lost_connection(bench: Bench, trick: str) -> None:
    sender = bench.sender()
    bench.misbehave(trick)
    send(sender)
    if isinstance(bench, SmtpBench):
        bench.server.script = {}
    if isinstance(bench, ResendBench):
        bench.emulator.script()

    assert send(sender).kind is OutcomeKind.ACCEPTED
    sender.close()
    sender.close()
