"""A small SMTP server on loopback that does what its script says and keeps what it got, byte for byte.

A script names, for each phase, what to answer: one Action for every time, a list for one time after the other (then the
usual answer), or a function of the session. Phases: greeting, ehlo, starttls, auth, mail, rcpt, data (the command), body
(its first bytes have come), dot, accepted (the reply to the dot is out), rset, quit. Nothing here waits by the clock
unless the script says so. Other processes reach it by `url`.
"""

from __future__ import annotations

import base64
import contextlib
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

# Long enough for a loaded machine; a test that needs it all has failed.
PATIENCE_SECONDS: Final = 20.0
_MESSAGE_ID: Final = re.compile(rb"^Message-ID:\s*(<[^>\r\n]*>)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Packets:
    """A reply in several packets, with a pause before each but the first."""

    pieces: tuple[bytes, ...]
    pause_seconds: float = 0.005


@dataclass(frozen=True)
class Drop:
    """Cut the connection without a word. `stores`: at the dot, having taken the mail."""

    stores: bool = False


@dataclass(frozen=True)
class Hang:
    """Say nothing until released (or the server stops), then the usual."""

    until: threading.Event


@dataclass(frozen=True)
class LastReply:
    """Reply, then hang up, as after 421 or by a server that takes one mail a connection."""

    reply: str


# A str is a reply without its last line end; None is the usual answer.
Action = str | Packets | Drop | Hang | LastReply | None
Answers = Action | list[Action] | Callable[["Session"], Action]


def one_byte_at_a_time(reply: str, *, pause_seconds: float = 0.005) -> Packets:
    return Packets(tuple(bytes([octet]) for octet in f"{reply}\r\n".encode()), pause_seconds)


@dataclass(frozen=True)
class Received:
    """One mail whose final dot has come. `raw`: as the client meant it, dots unstuffed."""

    raw: bytes
    sender: str
    recipients: tuple[str, ...]
    at: float
    connection: int
    was_accepted: bool

    @property
    def message_id(self) -> str:
        match = _MESSAGE_ID.search(self.raw)
        return match[1].decode() if match else ""


class SmtpServer:
    def __init__(
        self,
        script: Mapping[str, Answers] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        implicit_tls: bool = False,
        login: tuple[str, str] | None = None,
        port: int = 0,
    ) -> None:
        """`tls` without `implicit_tls` offers STARTTLS. `login`: offer AUTH, and take these words only. `port`: where
        another server was before; 0 is any free one.
        """
        self.script = dict(script or {})
        self.tls = tls
        self.implicit_tls = implicit_tls
        self.login = login
        # Every mail whose dot came, taken or not, in order; every connection, likewise.
        self.received: list[Received] = []
        self.sessions: list[Session] = []
        self.stopping = threading.Event()
        self._changed = threading.Condition()
        self._turns: Counter[str] = Counter()
        self._reached: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    @property
    def url(self) -> str:
        return f"{'smtps' if self.implicit_tls else 'smtp'}://{self._user_info()}127.0.0.1:{self.port}"

    @property
    def messages(self) -> list[Received]:
        """The mails the server has taken."""
        with self._changed:
            return [mail for mail in self.received if mail.was_accepted]

    @property
    def counts(self) -> Counter[str]:
        """Mails taken, by Message-ID."""
        return Counter(mail.message_id for mail in self.messages)

    @property
    def commands(self) -> list[list[str]]:
        """The verbs of each connection."""
        with self._changed:
            return [[line.partition(" ")[0].upper() for line in session.lines] for session in self.sessions]

    def wait_for(self, count: int, *, timeout_seconds: float = PATIENCE_SECONDS) -> list[Received]:
        """The mails taken, once there are `count` of them."""
        self._wait_until(lambda: sum(mail.was_accepted for mail in self.received) >= count, timeout_seconds)
        return self.messages

    def wait_for_phase(self, phase: str, *, count: int = 1, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Until the server has come to `phase` for the `count`-th time."""
        self._wait_until(lambda: self._reached[phase] >= count, timeout_seconds)

    def wait_for_ends(self, count: int, *, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Until `count` connections have ended."""
        self._wait_until(lambda: sum(session.has_ended for session in self.sessions) >= count, timeout_seconds)

    def answer(self, phase: str, session: Session) -> Action:
        with self._changed:
            self._reached[phase] += 1
            self._changed.notify_all()
            answers = self.script.get(phase)
            turn = self._turns[phase]
            self._turns[phase] += 1
        if isinstance(answers, list):
            return answers[turn] if turn < len(answers) else None
        return answers(session) if callable(answers) else answers

    def keep(self, mail: Received) -> None:
        with self._changed:
            self.received.append(mail)
            self._changed.notify_all()

    def end(self, session: Session) -> None:
        with self._changed:
            session.has_ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        self.stopping.set()
        self._acceptor.join()
        self._listener.close()
        for session in list(self.sessions):
            session.cut()
        for session in list(self.sessions):
            session.thread.join(PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _accept(self) -> None:
        # So often it looks whether it should stop.
        self._listener.settimeout(0.05)
        while not self.stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(None)
            with self._changed:
                session = Session(self, connection, len(self.sessions))
                self.sessions.append(session)
            session.thread.start()

    def _wait_until(self, is_so: Callable[[], bool], timeout_seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(is_so, timeout_seconds):
                raise AssertionError(f"waited in vain; the dialogues were {[s.lines for s in self.sessions]}")

    def _user_info(self) -> str:
        return "{}:{}@".format(*(quote(word, safe="") for word in self.login)) if self.login else ""


class _Ended(Exception):
    """The script or the client has ended the connection."""


@dataclass
class Session:
    """One connection. `lines`: every command as it came."""

    server: SmtpServer
    socket: socket.socket
    number: int
    lines: list[str] = field(default_factory=list)
    sender: str = ""
    recipients: list[str] = field(default_factory=list)
    has_ended: bool = False
    _rest: bytes = b""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            if self.server.tls and self.server.implicit_tls:
                self._wrap(self.server.tls)
            self._act("greeting", "220 test.example.com ESMTP")
            while True:
                self._obey(self._line())
        except (OSError, _Ended):
            pass
        finally:
            self.cut()
            self.socket.close()
            self.server.end(self)

    def _obey(self, line: str) -> None:
        self.lines.append(line)
        verb, _, rest = line.partition(" ")
        match verb.upper():
            case "EHLO" | "HELO":
                self._act("ehlo", self._features())
            case "STARTTLS":
                if self._act("starttls", "220 go ahead") and self.server.tls:
                    self._wrap(self.server.tls)
            case "AUTH":
                self._authenticate(rest)
            case "MAIL" | "RCPT" | "DATA" as step:
                self._obey_mail(step, rest)
            case "RSET":
                self._act("rset", "250 2.0.0 flushed")
            case "QUIT":
                self._act("quit", "221 2.0.0 bye")
                raise _Ended
            case _:
                self._send(b"502 5.5.1 not here\r\n")

    def _obey_mail(self, step: str, rest: str) -> None:
        if step == "MAIL" and self._act("mail", "250 2.1.0 sender ok"):
            self.sender, self.recipients = _path(rest), []
        elif step == "RCPT" and self._act("rcpt", "250 2.1.5 recipient ok"):
            self.recipients.append(_path(rest))
        elif step == "DATA" and self._act("data", "354 go ahead"):
            self._take_mail()

    def _authenticate(self, rest: str) -> None:
        words = rest.split(" ")
        if self.server.login is None or words[0].upper() != "PLAIN":
            self._act("auth", "504 5.5.4 mechanism not offered")
            return
        _, user, password = base64.b64decode(words[1]).decode().split("\0")
        is_right = (user, password) == self.server.login
        self._act("auth", "235 2.7.0 welcome" if is_right else "535 5.7.8 wrong user name or password")

    def _take_mail(self) -> None:
        wire = self._until(b"\r\n.\r\n", lambda: self._act("body", ""))
        self._act("dot", f"250 2.0.0 queued as {self.number}", keep=wire)
        self._act("accepted", "")

    def _act(self, phase: str, usual: str, *, keep: bytes | None = None) -> bool:
        """Whether the answer was a yes."""
        action = self.server.answer(phase, self)
        if isinstance(action, Hang):
            while not action.until.wait(0.02) and not self.server.stopping.is_set():
                pass
            action = None
        reply = usual if action is None else action
        is_yes = _is_yes(reply)
        if keep is not None:
            self._keep(keep, was_accepted=is_yes)
        if isinstance(reply, Drop):
            raise _Ended
        self._say(reply)
        if isinstance(reply, LastReply):
            raise _Ended
        return is_yes

    def _say(self, reply: str | Packets | LastReply | Hang) -> None:
        if isinstance(reply, Packets):
            for index, piece in enumerate(reply.pieces):
                if index and self.server.stopping.wait(reply.pause_seconds):
                    raise _Ended
                self._send(piece)
        elif text := reply.reply if isinstance(reply, LastReply) else str(reply):
            self._send(f"{text}\r\n".encode())

    def _keep(self, wire: bytes, *, was_accepted: bool) -> None:
        raw = wire.replace(b"\r\n..", b"\r\n.") + b"\r\n"
        recipients = tuple(self.recipients)
        self.server.keep(Received(raw, self.sender, recipients, time.monotonic(), self.number, was_accepted))

    def _features(self) -> str:
        features = ["test.example.com", "8BITMIME", "SMTPUTF8", "ENHANCEDSTATUSCODES"]
        if self.server.tls and not isinstance(self.socket, ssl.SSLSocket):
            features.append("STARTTLS")
        if self.server.login:
            features.append("AUTH PLAIN")
        return "\r\n".join([*(f"250-{feature}" for feature in features[:-1]), f"250 {features[-1]}"])

    def _wrap(self, tls: ssl.SSLContext) -> None:
        self.socket = tls.wrap_socket(self.socket, server_side=True)

    def _line(self) -> str:
        return self._until(b"\r\n", lambda: None).decode()

    def _until(self, end: bytes, on_first: Callable[[], object]) -> bytes:
        """What comes before `end`; `on_first` is called once some of it has come."""
        is_first = True
        while True:
            if self._rest and is_first:
                on_first()
                is_first = False
            before, found, after = self._rest.partition(end)
            if found:
                self._rest = after
                return before
            more = self.socket.recv(65_536)
            if not more:
                raise _Ended
            self._rest += more

    def _send(self, octets: bytes) -> None:
        self.socket.sendall(octets)


def _is_yes(reply: Action) -> bool:
    """As the client will see it: by the last line's first digit."""
    if isinstance(reply, Drop):
        return reply.stores
    text = b"".join(reply.pieces).decode() if isinstance(reply, Packets) else reply
    text = text.reply if isinstance(text, LastReply) else str(text)
    return text.rstrip("\r\n").rpartition("\n")[2][:1] in ("2", "3")


def _path(argument: str) -> str:
    return argument.partition("<")[2].rpartition(">")[0]
