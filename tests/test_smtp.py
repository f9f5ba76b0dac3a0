"""One attempt over SMTP, against a real server on loopback: what each answer, silence and trick comes to."""

from __future__ import annotations

import datetime
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.policy import default
from pathlib import Path

import pytest
import trustme

from tests.smtp_server import Action, Answers, Drop, Hang, LastReply, Packets, SmtpServer, one_byte_at_a_time
from tests.test_message import make_mail
from waitlist.mail import deadline, smtp
from waitlist.mail.base import Mail, scrub
from waitlist.mail.message import message_bytes
from waitlist.mail.registry import make_sender
from waitlist.mail.smtp import Security, Server, SmtpSender
from waitlist.model import MOST_DETAIL_CHARACTERS, Outcome, OutcomeKind
from waitlist.settings import Settings

ACCEPTED, TEMPORARY, REJECTED, FAILED, SYSTEMIC, IN_DOUBT = (
    OutcomeKind.ACCEPTED,
    OutcomeKind.TEMPORARY,
    OutcomeKind.REJECTED,
    OutcomeKind.FAILED,
    OutcomeKind.SYSTEMIC,
    OutcomeKind.IN_DOUBT,
)
# Far more than loopback needs; only an attempt that is meant to run out of time gets less.
PATIENT_SECONDS = 20.0
# Long enough to get to the phase that hangs, on a loaded machine too.
IMPATIENT_SECONDS = 0.4


@pytest.fixture(autouse=True)
def _close_senders() -> Iterator[None]:
    yield
    while _SENDERS:
        _SENDERS.pop().close()


# Made by a test, closed after it.
_SENDERS: list[SmtpSender] = []


def sender_to(
    server: SmtpServer, *, security: Security = Security.PLAIN, tls: ssl.SSLContext | None = None
) -> SmtpSender:
    user, password = server.login or (None, "")
    return sender_at(Server("127.0.0.1", server.port, security, "client.example.com", user, password), tls=tls)


def sender_at(server: Server, *, tls: ssl.SSLContext | None = None) -> SmtpSender:
    _SENDERS.append(SmtpSender(server, tls=tls))
    return _SENDERS[-1]


def send(sender: SmtpSender, mail: Mail | None = None, *, deadline_seconds: float = PATIENT_SECONDS) -> Outcome:
    return sender.send(mail or make_mail(), key="0193-a", deadline_seconds=deadline_seconds)


def send_one(script: Mapping[str, Answers], *, deadline_seconds: float = PATIENT_SECONDS) -> Outcome:
    with SmtpServer(script) as server:
        return send(sender_to(server), deadline_seconds=deadline_seconds)


def verdict(outcome: Outcome) -> tuple[OutcomeKind, str]:
    return outcome.kind, outcome.code


# What goes over the wire


def test_mail_arrives_byte_for_byte() -> None:
    text = "Hello\n.\n..two\n.x\n\nhttps://waitlist.example.com/confirm/abc\n"
    mail = make_mail(subject="Zürich", text=text, html="<p>Grüße</p>\n.\n")
    with SmtpServer() as server:
        sender = sender_to(server)

        outcome = send(sender, mail)
        sender.close()
        [received] = server.wait_for(1)
    assert outcome == Outcome(ACCEPTED, detail="2.0.0 queued as 0")
    assert received.raw == message_bytes(mail)
    assert (received.sender, received.recipients) == ("waitlist@example.com", ("person@example.com",))
    assert server.commands == [["EHLO", "MAIL", "RCPT", "DATA", "QUIT"]]


def test_each_try_sends_the_same_bytes() -> None:
    with SmtpServer({"dot": ["451 4.3.0 later", Drop(), Drop(stores=True)]}) as server:
        sender = sender_to(server)

        outcomes = [send(sender).kind for _ in range(4)]
    assert outcomes == [TEMPORARY, IN_DOUBT, IN_DOUBT, ACCEPTED]
    assert [mail.was_accepted for mail in server.received] == [False, False, True, True]
    assert {mail.raw for mail in server.received} == {message_bytes(make_mail())}
    assert server.counts == {"<0193-a@example.com>": 2}


def test_every_stored_address_is_envelope_and_header_literally() -> None:
    lines = (Path(__file__).parent / "addresses.jsonl").read_text().splitlines()
    addresses = [row["canonical"] for row in map(json.loads, lines) if row["answer"] == "accept"]
    with SmtpServer() as server:
        sender = sender_to(server)

        for address in addresses:
            assert send(sender, make_mail(recipient=address)).kind is ACCEPTED
    assert len(addresses) > 20
    assert [mail.recipients for mail in server.messages] == [(address,) for address in addresses]
    for mail, address in zip(server.messages, addresses, strict=True):
        assert f"\r\nTo: {address}\r\n".encode() in mail.raw
        assert [one.addr_spec for one in message_from_bytes(mail.raw, policy=default)["To"].addresses] == [address]
        assert len(re.findall(rb"^(?:To|Cc|Bcc):", mail.raw, re.MULTILINE | re.IGNORECASE)) == 1


def test_two_mails_share_a_connection_and_nothing_else() -> None:
    first, second = make_mail(recipient="a@example.com", text="for a"), make_mail(recipient="b@example.com", text="b's")
    with SmtpServer() as server:
        sender = sender_to(server)

        send(sender, first)
        send(sender, second)
    assert [(mail.recipients, mail.raw) for mail in server.messages] == [
        (("a@example.com",), message_bytes(first)),
        (("b@example.com",), message_bytes(second)),
    ]
    assert len(server.sessions) == 1


def test_international_addresses_are_never_announced() -> None:
    with SmtpServer() as server:
        sender = sender_to(server)
        send(sender)

    assert server.sessions[0].lines[:3] == [
        "ehlo client.example.com",
        "MAIL FROM:<waitlist@example.com>",
        "RCPT TO:<person@example.com>",
    ]


@pytest.mark.parametrize(
    "recipient", ["a@example.com>\r\nRCPT TO:<b@example.com", "a@example.com\n", "a b@example.com"]
)
def test_smuggled_command_is_refused_before_anything_is_sent(recipient: str) -> None:
    with SmtpServer() as server:
        with pytest.raises(ValueError, match="bare address"):
            send(sender_to(server), make_mail(recipient=recipient))

        assert server.sessions == []


# What a refusal comes to


@pytest.mark.parametrize(
    ("phase", "reply", "kind", "code"),
    [
        ("greeting", LastReply("421 4.3.2 too busy"), SYSTEMIC, "smtp_421_4.3.2"),
        ("greeting", "554 5.7.1 you are on a list", SYSTEMIC, "smtp_554_5.7.1"),
        ("ehlo", LastReply("421 too busy"), SYSTEMIC, "smtp_421"),
        ("ehlo", "550 5.7.1 who?", SYSTEMIC, "smtp_550_5.7.1"),
        ("mail", "451 4.7.1 slow down", SYSTEMIC, "smtp_451_4.7.1"),
        ("mail", "530 5.7.0 log in first", SYSTEMIC, "smtp_530_5.7.0"),
        ("mail", "550 5.1.8 sender not allowed", SYSTEMIC, "smtp_550_5.1.8"),
        ("mail", LastReply("421 too busy"), SYSTEMIC, "smtp_421"),
        ("rcpt", LastReply("421 4.7.0 too many"), TEMPORARY, "smtp_421_4.7.0"),
        ("rcpt", "450 4.2.0 greylisted", TEMPORARY, "smtp_450_4.2.0"),
        ("rcpt", "451 4.3.0 error", TEMPORARY, "smtp_451_4.3.0"),
        ("rcpt", "452 4.2.2 mailbox full", TEMPORARY, "smtp_452_4.2.2"),
        ("rcpt", "552 5.2.2 mailbox full", REJECTED, "smtp_552_5.2.2"),
        ("rcpt", "550 5.1.1 no such user", REJECTED, "smtp_550_5.1.1"),
        ("rcpt", "550 5.7.1 not wanted", REJECTED, "smtp_550_5.7.1"),
        ("rcpt", "550 no such user", REJECTED, "smtp_550"),
        ("rcpt", "530 5.7.0 log in first", SYSTEMIC, "smtp_530_5.7.0"),
        ("rcpt", "535 5.7.8 log in first", SYSTEMIC, "smtp_535_5.7.8"),
        ("data", "451 4.3.0 error", TEMPORARY, "smtp_451_4.3.0"),
        ("data", LastReply("421 too busy"), TEMPORARY, "smtp_421"),
        ("data", "554 5.5.1 no valid recipients", FAILED, "smtp_554_5.5.1"),
        ("data", "550 5.1.1 no such user", REJECTED, "smtp_550_5.1.1"),
        ("dot", "452 4.3.1 disk full", TEMPORARY, "smtp_452_4.3.1"),
        ("dot", LastReply("421 4.3.2 going down"), TEMPORARY, "smtp_421_4.3.2"),
        ("dot", "552 5.3.4 too big", FAILED, "smtp_552_5.3.4"),
        ("dot", "554 5.7.1 looks like spam", FAILED, "smtp_554_5.7.1"),
        ("dot", "550 5.1.1 no such user", REJECTED, "smtp_550_5.1.1"),
        ("dot", "550-5.1.10 no\r\n550 5.1.10 such user", REJECTED, "smtp_550_5.1.10"),
        ("dot", "535 5.7.8 quota of the account", SYSTEMIC, "smtp_535_5.7.8"),
        ("dot", "530 5.7.0 log in again", SYSTEMIC, "smtp_530_5.7.0"),
    ],
)
def test_refusal_means_what_its_phase_makes_of_it(phase: str, reply: Action, kind: OutcomeKind, code: str) -> None:
    assert verdict(send_one({phase: reply})) == (kind, code)


@pytest.mark.parametrize(
    ("phase", "reply", "kind"),
    [
        ("greeting", "banana", SYSTEMIC),
        ("ehlo", "banana", SYSTEMIC),
        ("mail", "354 out of turn", SYSTEMIC),
        ("rcpt", "354 out of turn", TEMPORARY),
        ("data", "250 out of turn", TEMPORARY),
        ("dot", "354 out of turn", IN_DOUBT),
        ("dot", "banana", IN_DOUBT),
        ("dot", "999 what", IN_DOUBT),
        ("dot", "550 " + "x" * 9000, IN_DOUBT),
        ("dot", Packets((b"250 2.0.0 qu",)), IN_DOUBT),
        ("dot", Packets((b"550 5.7.1 no",)), IN_DOUBT),
    ],
)
def test_answer_that_is_no_reply_is_neither_yes_nor_no(phase: str, reply: Action, kind: OutcomeKind) -> None:
    with SmtpServer({phase: reply, "accepted": Drop()}) as server:
        outcome = send(sender_to(server))

    assert outcome.kind is kind


@pytest.mark.parametrize("phase", ["rcpt", "data"])
def test_connection_is_kept_after_a_refusal(phase: str) -> None:
    with SmtpServer({phase: ["550 5.7.1 no"]}) as server:
        sender = sender_to(server)

        kinds = [send(sender).kind, send(sender).kind]
    assert kinds[1] is ACCEPTED
    assert len(server.sessions) == 1
    assert "RSET" in server.commands[0]


@pytest.mark.parametrize("reset", ["503 what?", Drop(), LastReply("421 bye"), "banana"])
def test_failed_reset_costs_the_connection_and_not_the_outcome(reset: Action) -> None:
    with SmtpServer({"rcpt": ["550 5.1.1 no such user"], "rset": reset}) as server:
        sender = sender_to(server)

        first, second = send(sender), send(sender)
    assert verdict(first) == (REJECTED, "smtp_550_5.1.1")
    assert second.kind is ACCEPTED
    assert len(server.sessions) == 2


def test_hanging_reset_does_not_hold_up_the_worker(released: threading.Event) -> None:
    with SmtpServer({"rcpt": ["550 5.1.1 no such user"], "rset": Hang(released)}) as server:
        started = time.monotonic()

        outcome = send(sender_to(server))

        assert outcome.kind is REJECTED
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("phase", ["rcpt", "data", "dot"])
def test_after_421_the_next_mail_goes_over_a_new_connection(phase: str) -> None:
    """Whether the server hangs up at once, as it should, or not."""
    with SmtpServer({phase: ["421 4.7.0 enough"]}) as server:
        sender = sender_to(server)

        kinds = [send(sender).kind, send(sender).kind]
    assert kinds == [TEMPORARY, ACCEPTED]
    assert len(server.sessions) == 2


def test_address_in_a_reply_is_not_kept() -> None:
    reply = (
        "550 5.1.1 <Person@Example.com>: person unknown, see http://x.example/?q=person%40example.com or a@b.example"
    )

    outcome = send_one({"rcpt": reply})

    assert not re.search("person|@|%40", outcome.detail, re.IGNORECASE)
    assert outcome.detail.startswith("5.1.1 <[address]>: [address] unknown")


def test_detail_is_one_short_line() -> None:
    assert scrub("a\r\n\x1b[31m b " + "long " * 100, recipient="")[:12] == "a [31m b lon"
    assert len(scrub("long " * 1000, recipient="")) == MOST_DETAIL_CHARACTERS


# What silence comes to


@pytest.mark.parametrize(
    ("phase", "kind", "code"),
    [
        ("greeting", SYSTEMIC, "lost_greeting"),
        ("ehlo", SYSTEMIC, "lost_ehlo"),
        ("mail", SYSTEMIC, "lost_mail"),
        ("rcpt", TEMPORARY, "lost_rcpt"),
        ("data", TEMPORARY, "lost_data"),
        ("dot", IN_DOUBT, "lost_dot"),
    ],
)
def test_lost_connection_is_in_doubt_only_after_the_dot(phase: str, kind: OutcomeKind, code: str) -> None:
    assert verdict(send_one({phase: Drop()})) == (kind, code)


def test_connection_cut_inside_the_body_is_not_in_doubt() -> None:
    """A body larger than all buffers, so that the client must notice before it comes to the dot."""
    with SmtpServer({"body": Drop()}) as server:
        outcome = send(sender_to(server), make_mail(text="x" * 70 + "\n" + ("y" * 70 + "\n") * 200_000))

        assert verdict(outcome) == (TEMPORARY, "lost_body")
        assert server.received == []


@pytest.mark.parametrize("last_words", [b"", b"421 4.3.2 going down\r\n"])
def test_server_that_ends_the_dialogue_inside_data_gets_no_dot(
    last_words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server hangs up once the whole body is out and before the dot is."""
    with SmtpServer() as server:
        is_quiet = smtp._Connection._is_quiet

        def hang_up_first(connection: smtp._Connection) -> bool:
            if connection.attempt.phase is smtp.Phase.BODY:
                server.wait_for_phase("body")
                server.sessions[0].socket.sendall(last_words)
                server.sessions[0].socket.shutdown(socket.SHUT_RDWR)
                server.wait_for_ends(1)
            return is_quiet(connection)

        monkeypatch.setattr(smtp._Connection, "_is_quiet", hang_up_first)

        outcome = send(sender_to(server))

    assert verdict(outcome) == (TEMPORARY, "lost_body")
    assert server.received == []


def test_mail_taken_without_a_word_is_in_doubt() -> None:
    with SmtpServer({"dot": [Drop(stores=True)]}) as server:
        sender = sender_to(server)

        first, second = send(sender), send(sender)
    assert (first.kind, second.kind) == (IN_DOUBT, ACCEPTED)
    assert server.messages[0].raw == server.messages[1].raw


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    ("phase", "kind", "code"),
    [
        ("greeting", SYSTEMIC, "timeout_greeting"),
        ("ehlo", SYSTEMIC, "timeout_ehlo"),
        ("mail", SYSTEMIC, "timeout_mail"),
        ("rcpt", TEMPORARY, "timeout_rcpt"),
        ("data", TEMPORARY, "timeout_data"),
        ("dot", IN_DOUBT, "timeout_dot"),
    ],
)
@pytest.mark.parametrize("way", ["silent", "dribbling"])
def test_deadline_ends_the_attempt_however_the_server_dawdles(
    phase: str, kind: OutcomeKind, code: str, way: str, released: threading.Event
) -> None:
    endless = one_byte_at_a_time("250-" + "x" * 4000, pause_seconds=0.01)
    with SmtpServer({phase: Hang(released) if way == "silent" else endless}) as server:
        started = time.monotonic()

        outcome = send(sender_to(server), deadline_seconds=IMPATIENT_SECONDS)

        assert verdict(outcome) == (kind, code)
        assert IMPATIENT_SECONDS <= time.monotonic() - started < IMPATIENT_SECONDS + 5


def test_deadline_covers_all_phases_together() -> None:
    """Each reply comes in time, all of them do not."""
    slow = Packets((b"250-wait\r\n", b"250 ok\r\n"), pause_seconds=0.3)
    with SmtpServer({"ehlo": slow, "mail": slow, "rcpt": slow, "dot": slow}) as server:
        outcome = send(sender_to(server), deadline_seconds=0.75)

        assert verdict(outcome) == (TEMPORARY, "timeout_rcpt")


def test_server_that_stops_reading_is_left_at_the_deadline(released: threading.Event) -> None:
    with SmtpServer({"body": Hang(released)}) as server:
        big = make_mail(text="x" * 70 + "\n" + ("y" * 70 + "\n") * 200_000)

        outcome = send(sender_to(server), big, deadline_seconds=2)

        assert verdict(outcome) == (TEMPORARY, "timeout_body")
        assert server.received == []


def test_deadline_passed_inside_the_body_withholds_the_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the worker is stopped there and wakes up after its lease."""
    clock = deadline.now
    with SmtpServer() as server:
        is_quiet = smtp._Connection._is_quiet

        def oversleep(connection: smtp._Connection) -> bool:
            answer = is_quiet(connection)
            if connection.attempt.phase is smtp.Phase.BODY:
                monkeypatch.setattr(deadline, "now", lambda: clock() + 3600)
            return answer

        monkeypatch.setattr(smtp._Connection, "_is_quiet", oversleep)

        outcome = send(sender_to(server))

        server.wait_for_ends(1)
        assert verdict(outcome) == (TEMPORARY, "timeout_body")
        assert server.received == []


@pytest.mark.parametrize(
    "reply",
    [
        Packets((b"250 2.0.0 que", b"ued\r\n")),
        Packets((b"25", b"0-2.0.0 all\r\n250", b" 2.0.0 well\r\n")),
        "250-2.0.0 first\r\n250-2.0.0 second\r\n250 2.0.0 third",
        one_byte_at_a_time("250 2.0.0 queued"),
        "250",
        Packets((b"250 ok\n",)),
        "252 2.0.0 as good as taken",
    ],
)
def test_yes_is_a_yes_in_whatever_pieces_it_comes(reply: Action) -> None:
    assert send_one({"dot": reply}).kind is ACCEPTED


# The connection between mails


def test_server_that_takes_one_mail_a_connection_gets_them_all() -> None:
    with SmtpServer({"dot": LastReply("250 2.0.0 taken, good bye")}) as server:
        sender = sender_to(server)

        for count in range(1, 5):
            assert send(sender).kind is ACCEPTED
            server.wait_for_ends(count)

    assert len(server.messages) == len(server.sessions) == 4


def test_kept_connection_that_ends_at_mail_costs_nothing() -> None:
    """The server hangs up too late for a look at the socket to show it."""
    with SmtpServer({"mail": [None, Drop(), None, LastReply("421 idle too long")]}) as server:
        sender = sender_to(server)

        kinds = [send(sender).kind for _ in range(3)]
    assert kinds == [ACCEPTED] * 3
    assert len(server.sessions) == 3


def test_reconnect_is_tried_once_an_attempt() -> None:
    with SmtpServer({"mail": [None, Drop(), Drop()]}) as server:
        sender = sender_to(server)

        outcomes = [send(sender), send(sender)]

        assert verdict(outcomes[1]) == (SYSTEMIC, "lost_mail")
        assert len(server.sessions) == 2


def test_refusal_at_mail_on_a_kept_connection_is_not_repeated() -> None:
    with SmtpServer({"mail": [None, "451 4.7.1 slow down"]}) as server:
        sender = sender_to(server)

        outcomes = [send(sender), send(sender)]

        assert verdict(outcomes[1]) == (SYSTEMIC, "smtp_451_4.7.1")
        assert len(server.sessions) == 1


@pytest.mark.parametrize("words", ["421 4.4.2 idle too long", "451 4.4.2 time-out", "250 2.0.0 and another one"])
def test_late_words_of_the_server_are_not_taken_for_an_answer(words: str) -> None:
    with SmtpServer({"accepted": [LastReply(words)]}) as server:
        sender = sender_to(server)
        send(sender)
        server.wait_for_ends(1)

        outcome = send(sender)

    assert outcome.kind is ACCEPTED
    assert len(server.sessions) == 2


def test_connection_that_rested_long_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = deadline.now
    with SmtpServer() as server:
        sender = sender_to(server)
        send(sender)
        monkeypatch.setattr(deadline, "now", lambda: clock() + smtp.LONGEST_REST_SECONDS + 1)

        outcome = send(sender)
    assert outcome.kind is ACCEPTED
    assert len(server.sessions) == 2


def test_close_does_not_wait_for_a_server_that_hangs(released: threading.Event) -> None:
    with SmtpServer({"quit": Hang(released)}) as server:
        sender = sender_to(server)
        send(sender)
        started = time.monotonic()

        sender.close()

        assert time.monotonic() - started < 5
        assert send(sender).kind is ACCEPTED  # it can be used again
        released.set()


def test_interrupted_attempt_leaves_no_half_used_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    with SmtpServer() as server:
        sender = sender_to(server)
        with monkeypatch.context() as patch:
            patch.setattr(smtp._Connection, "deliver", interrupt)
            with pytest.raises(KeyboardInterrupt):
                send(sender)

        assert send(sender).kind is ACCEPTED
        assert len(server.sessions) == 2


# Reaching the server


def test_refused_connection_is_systemic() -> None:
    with SmtpServer() as server:
        sender = sender_to(server)

    assert verdict(send(sender)) == (SYSTEMIC, "connect_refused")


def test_name_that_leads_nowhere_is_systemic(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)

    outcome = send(sender_at(Server("mail.example.com", 25, Security.PLAIN, "client.example.com")))

    assert verdict(outcome) == (SYSTEMIC, "dns_failed")


@pytest.mark.parametrize("host", ["a" * 70 + ".example", ".", "a..b"])
def test_host_that_is_no_name_is_systemic(host: str) -> None:
    outcome = send(sender_at(Server(host, 25, Security.PLAIN, "client.example.com")))

    assert outcome.kind is SYSTEMIC


def test_hanging_name_server_is_left_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait() and [])
    started = time.monotonic()

    outcome = send(
        sender_at(Server("mail.example.com", 25, Security.PLAIN, "client.example.com")), deadline_seconds=0.2
    )

    assert verdict(outcome) == (SYSTEMIC, "timeout_connect")
    assert time.monotonic() - started < 5


def test_second_address_is_tried_where_the_first_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with SmtpServer() as server, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening: refuses
        targets = [unused.getsockname(), ("127.0.0.1", server.port)]
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", target) for target in targets]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
        sender = sender_to(server)

        assert send(sender).kind is ACCEPTED


def test_small_writes_do_not_wait_for_acknowledgements() -> None:
    """Else the final dot, a small write behind another, costs a drain up to 40 ms a mail."""
    with SmtpServer() as server:
        sender = sender_to(server)
        send(sender)

        assert sender._connection is not None
        assert sender._connection.sock is not None
        assert sender._connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# TLS and login


class Certificates:
    """An authority made for the test; `trusting` is the client that knows it."""

    def __init__(self) -> None:
        self.authority = trustme.CA()
        self.trusting = ssl.create_default_context()
        self.authority.configure_trust(self.trusting)

    def server(self, name: str = "127.0.0.1", *, expired: bool = False) -> ssl.SSLContext:
        now = datetime.datetime.now(datetime.UTC)
        ends = now + datetime.timedelta(days=-1 if expired else 1)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        starts = now - datetime.timedelta(days=2)
        self.authority.issue_cert(name, not_before=starts, not_after=ends).configure_cert(context)
        return context


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    return Certificates()


@pytest.mark.parametrize("security", [Security.STARTTLS, Security.TLS])
def test_mail_goes_over_a_verified_connection(security: Security, certificates: Certificates) -> None:
    with SmtpServer(
        tls=certificates.server(), implicit_tls=security is Security.TLS, login=("me@x.example", "p w:/")
    ) as server:
        sender = sender_to(server, security=security, tls=certificates.trusting)

        outcomes = [send(sender), send(sender)]
    assert [outcome.kind for outcome in outcomes] == [ACCEPTED, ACCEPTED]
    assert len(server.sessions) == 1
    assert isinstance(server.sessions[0].socket, ssl.SSLSocket)
    before = ["EHLO", "STARTTLS"] if security is Security.STARTTLS else []
    assert server.commands[0][: len(before) + 2] == [*before, "EHLO", "AUTH"]


@pytest.mark.parametrize("security", [Security.STARTTLS, Security.TLS])
@pytest.mark.parametrize("fault", ["wrong name", "expired", "unknown authority", "dropped"])
def test_server_that_cannot_prove_its_name_gets_no_password(
    fault: str, security: Security, certificates: Certificates
) -> None:
    name = "other.example.com" if fault == "wrong name" else "127.0.0.1"
    tls = (Certificates() if fault == "unknown authority" else certificates).server(name, expired=fault == "expired")
    script = {"starttls": Drop()} if fault == "dropped" else None
    if fault == "dropped" and security is Security.TLS:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # without a certificate the handshake fails
    with SmtpServer(script, tls=tls, implicit_tls=security is Security.TLS, login=("me", "secret")) as server:
        outcome = send(sender_to(server, security=security, tls=certificates.trusting))

        assert verdict(outcome) == (SYSTEMIC, "tls_failed")
        assert not any(verb in ("AUTH", "MAIL") for verbs in server.commands for verb in verbs)


def test_server_without_starttls_gets_no_password() -> None:
    with SmtpServer(login=("me", "secret")) as server:
        outcome = send(sender_to(server, security=Security.STARTTLS))

        assert verdict(outcome) == (SYSTEMIC, "tls_missing")
        assert server.commands == [["EHLO"]]


def test_refused_starttls_is_systemic(certificates: Certificates) -> None:
    with SmtpServer({"starttls": "454 4.7.0 not now"}, tls=certificates.server()) as server:
        outcome = send(sender_to(server, security=Security.STARTTLS, tls=certificates.trusting))

        assert verdict(outcome) == (SYSTEMIC, "smtp_454_4.7.0")


def test_words_slipped_in_before_the_handshake_are_forgotten(certificates: Certificates) -> None:
    """Else a stranger on the wire could answer our first commands inside TLS."""
    slipped = Packets((b"220 go\r\n250-evil\r\n250 AUTH PLAIN\r\n",))
    with SmtpServer({"starttls": slipped}, tls=certificates.server()) as server:
        sender = sender_to(server, security=Security.STARTTLS, tls=certificates.trusting)

        outcome = send(sender)
    assert outcome.kind is ACCEPTED


@pytest.mark.parametrize("security", [Security.STARTTLS, Security.TLS])
def test_hanging_handshake_ends_at_the_deadline(
    security: Security, certificates: Certificates, released: threading.Event
) -> None:
    # The server says "go ahead" in the clear, or nothing at all, and leaves the handshake to the client.
    script: dict[str, Answers] = {
        "starttls": Packets((b"220 go\r\n", b"never"), pause_seconds=60),
        "greeting": Hang(released),
    }
    if security is Security.STARTTLS:
        del script["greeting"]
    with SmtpServer(script, tls=certificates.server()) as server:
        outcome = send(
            sender_to(server, security=security, tls=certificates.trusting), deadline_seconds=IMPATIENT_SECONDS
        )

        assert verdict(outcome) == (SYSTEMIC, "timeout_tls")


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("535 5.7.8 wrong", "auth_failed"),
        ("530 5.7.0 wrong", "auth_failed"),
        ("454 4.7.0 later", "smtp_454_4.7.0"),
        ("334 !not-base64", "auth_failed"),
        (Drop(), "auth_failed"),
    ],
)
def test_failed_login_is_systemic(reply: Action, code: str) -> None:
    with SmtpServer({"auth": reply}, login=("me", "secret")) as server:
        outcome = send(sender_to(server))

        assert verdict(outcome) == (SYSTEMIC, code)
        assert "secret" not in repr(outcome)


def test_server_that_takes_no_logins_is_systemic() -> None:
    with SmtpServer() as server:
        sender = sender_at(Server("127.0.0.1", server.port, Security.PLAIN, "client.example.com", "me", "secret"))

        assert verdict(send(sender)) == (SYSTEMIC, "auth_missing")


# Settings, doctor, keys


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("smtp://mail.example.com", ("mail.example.com", 587, Security.STARTTLS, None, "")),
        ("smtps://mail.example.com", ("mail.example.com", 465, Security.TLS, None, "")),
        ("smtp://localhost:25", ("localhost", 25, Security.PLAIN, None, "")),
        ("smtp://[::1]:25", ("::1", 25, Security.PLAIN, None, "")),
        ("smtps://127.0.0.1", ("127.0.0.1", 465, Security.TLS, None, "")),
        (
            "smtp://me%40x.example:p%3A%2F%20w@mail.example.com:2525",
            ("mail.example.com", 2525, Security.STARTTLS, "me@x.example", "p:/ w"),
        ),
    ],
)
def test_setting_names_the_server(url: str, expected: tuple[str, int, Security, str | None, str]) -> None:
    sender = make_sender(Settings(mail_url=url, mail_from="Waitlist <hello@list.example.com>"))

    assert isinstance(sender, SmtpSender)
    server = sender.server
    assert (server.host, server.port, server.security, server.user, server.password) == expected
    assert server.client_name == "list.example.com"
    assert not server.password or server.password not in repr(server)


def test_sender_made_from_the_url_of_the_server_works() -> None:
    with SmtpServer(login=("me@x.example", "p:/ w")) as server:
        sender = make_sender(Settings(mail_url=server.url))

        outcome = sender.send(make_mail(), key="a", deadline_seconds=PATIENT_SECONDS)
        sender.close()

        assert outcome.kind is ACCEPTED


def test_check_logs_in_and_sends_nothing(certificates: Certificates) -> None:
    with SmtpServer(tls=certificates.server(), login=("me", "secret")) as server:
        sender = sender_to(server, security=Security.STARTTLS, tls=certificates.trusting)

        outcome = sender.check(deadline_seconds=PATIENT_SECONDS)
        sender.close()
    assert outcome.kind is ACCEPTED
    assert outcome.detail == f"127.0.0.1:{server.port}, TLSv1.3, logged in"
    assert server.commands == [["EHLO", "STARTTLS", "EHLO", "AUTH", "QUIT"]]


def test_check_tells_what_is_wrong() -> None:
    with SmtpServer({"auth": "535 5.7.8 wrong"}, login=("me", "secret")) as server:
        outcome = sender_to(server).check(deadline_seconds=PATIENT_SECONDS)

    assert (outcome.kind, outcome.code, outcome.detail) == (SYSTEMIC, "auth_failed", "5.7.8 wrong")


def test_only_resend_gets_a_key_and_is_trusted_to_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with SmtpServer() as server:
        resend = sender_at(Server(smtp.RESEND_HOST, server.port, Security.PLAIN, "client.example.com"))
        look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: look_up("127.0.0.1", *a, **k))

        send(resend)
        send(resend)

    assert resend.key_window_seconds == 86_400
    assert b"\r\nResend-Idempotency-Key: 0193-a\r\n" in server.messages[0].raw
    assert server.messages[0].raw == server.messages[1].raw
    assert sender_at(Server("mail.example.com", 25, Security.PLAIN, "x")).key_window_seconds is None
    assert b"Resend" not in message_bytes(make_mail())
