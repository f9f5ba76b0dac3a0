"""`smtp://` and `smtps://`: one connection to one server, kept across mails, and an honest word about each attempt.

What an error means depends on how far the attempt came, and smtplib raises the same errors everywhere, so the phase is
tracked here. Everything before the final dot can be tried again safely; after it, silence is a doubt no protocol can
close. Of smtplib this uses EHLO, AUTH and the commands; TLS, sending and reading are here,
because its time-outs start anew with each packet.
"""

from __future__ import annotations

import re
import smtplib
import socket
import ssl
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from waitlist.mail import deadline
from waitlist.mail.base import Mail, scrub
from waitlist.mail.deadline import Deadline, dial, reader_of
from waitlist.mail.message import message_bytes
from waitlist.model import Outcome, OutcomeKind
from waitlist.settings import Settings, is_loopback

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DEFAULT_PORTS: Final = {"smtp": 587, "smtps": 465}
# Resend's relay knows a mail again by this header, for 24 hours: resend.com/docs/send-with-smtp.
RESEND_HOST: Final = "smtp.resend.com"
RESEND_KEY_HEADER: Final = "Resend-Idempotency-Key"
RESEND_KEY_WINDOW_SECONDS: Final = 86_400
# After a longer rest the server, or a router between, may have forgotten the connection without a word, and a mail
# would spend its whole deadline finding out. Servers hang up after 5 minutes or more (RFC 5321, 4.5.3.2).
LONGEST_REST_SECONDS: Final = 60.0
# For RSET and QUIT, whose answers change nothing.
COURTESY_SECONDS: Final = 1.0
# A reply line is 512 octets (RFC 5321, 4.5.3.1.5), and some servers write more; endless ones are no SMTP.
_LONGEST_REPLY_LINE: Final = 8192
_MOST_REPLY_LINES: Final = 200
_REPLY: Final = re.compile(rb"([2-5]\d\d)(?:([ -])(.*?))?\r?\n")
_ENHANCED: Final = re.compile(r"[245]\.\d{1,3}\.\d{1,3}(?=\s|$)")
# ValueError: a login challenge that is no base64, a host that is no host name. SMTPException is an OSError.
_FAULTS: Final = (OSError, ValueError)


class Phase(IntEnum):
    """How far an attempt came. Up to MAIL nothing is about this one recipient; after DOT the mail may be theirs."""

    CONNECT = 1
    TLS = 2
    GREETING = 3
    EHLO = 4
    AUTH = 5
    MAIL = 6
    RCPT = 7
    DATA = 8
    BODY = 9
    DOT = 10


class Security(StrEnum):
    # Nobody listens between a program and its own machine, and the certificate of a relay there is rarely valid for
    # "localhost": on loopback STARTTLS is neither required nor used.
    PLAIN = "plain"
    STARTTLS = "starttls"
    TLS = "tls"


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    security: Security
    # What we call ourselves in EHLO. Given, because smtplib would ask DNS, without any time limit.
    client_name: str
    user: str | None = None
    password: str = field(default="", repr=False)

    @classmethod
    def from_settings(cls, settings: Settings) -> Server:
        parts = urlsplit(settings.mail_url.get_secret_value())
        host = parts.hostname or ""
        return cls(
            host=host,
            port=parts.port or DEFAULT_PORTS[parts.scheme],
            security=_security(parts.scheme, host),
            client_name=settings.mail_address.rpartition("@")[2],
            user=unquote(parts.username or "") or None,
            password=unquote(parts.password or ""),
        )


class SmtpSender:
    provider = "smtp"

    def __init__(self, server: Server, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: whom to trust; None: the authorities this machine trusts (and `SSL_CERT_FILE`)."""
        self.server = server
        self.key_window_seconds: int | None = RESEND_KEY_WINDOW_SECONDS if server.host == RESEND_HOST else None
        self._tls = tls
        self._connection: _Connection | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> SmtpSender:
        return cls(Server.from_settings(settings))

    def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
        body = _dot_stuffed(message_bytes(self._with_key(mail, key)))
        attempt = Attempt(deadline_seconds)
        try:
            text = self._begin(mail.envelope_sender, attempt).deliver(mail.recipient, body)
        except _FAULTS as error:
            outcome = decide_outcome(attempt, error, recipient=mail.recipient)
            self._recover(attempt, error)
            return outcome
        except BaseException:  # a signal's, say: nobody knows where the dialogue stands
            self._drop()
            raise
        return Outcome(OutcomeKind.ACCEPTED, detail=scrub(text, recipient=mail.recipient))

    def check(self, *, deadline_seconds: float) -> Outcome:
        self.close()
        attempt = Attempt(deadline_seconds)
        try:
            connection = self._connect(attempt)
        except _FAULTS as error:
            return decide_outcome(attempt, error, recipient="")
        return Outcome(OutcomeKind.ACCEPTED, detail=connection.description)

    def close(self) -> None:
        """Say goodbye, for a second at most."""
        if self._connection is not None:
            self._connection.attempt = Attempt(COURTESY_SECONDS)
            self._is_done("QUIT")
        self._drop()

    def _with_key(self, mail: Mail, key: str) -> Mail:
        if self.key_window_seconds is None:
            return mail
        return replace(mail, headers=(*mail.headers, (RESEND_KEY_HEADER, key)))

    def _begin(self, envelope_sender: str, attempt: Attempt) -> _Connection:
        """A connection that has taken MAIL.

        A server may hang up on a kept connection at any moment, up to its reply to MAIL. That says nothing about this
        mail or the next connection, and MAIL binds nobody, so it is said again on a new one.
        """
        if self._connection is not None:
            try:
                return self._connection.begin(envelope_sender, attempt)
            except _FAULTS as error:
                self._drop()
                if attempt.is_over or _reply_code(error) not in (None, 421):
                    raise
        return self._connect(attempt).begin(envelope_sender, attempt)

    def _connect(self, attempt: Attempt) -> _Connection:
        if self._tls is None and self.server.security is not Security.PLAIN:
            self._tls = ssl.create_default_context()
        connection = _Connection(self.server, self._tls, attempt)
        try:
            connection.open()
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _recover(self, attempt: Attempt, error: Exception) -> None:
        """Keep the connection only where the server still talks to us and the last mail is off the table."""
        code = _reply_code(error)
        if self._connection is None or code in (None, 421, 530, 535) or attempt.phase <= Phase.MAIL:
            self._drop()
        elif attempt.phase < Phase.DOT:  # a reply to the dot has ended the mail already
            self._connection.attempt = Attempt(COURTESY_SECONDS)
            if not self._is_done("RSET"):
                self._drop()

    def _is_done(self, command: str) -> bool:
        assert self._connection is not None
        try:
            return self._connection.docmd(command)[0] // 100 == 2
        except _FAULTS:
            return False

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Attempt(Deadline):
    """The time left for one attempt, and how far it came."""

    phase = Phase.CONNECT


def decide_outcome(attempt: Attempt, error: Exception, *, recipient: str) -> Outcome:
    """What `error` says about the mail, by the phase it came in."""
    if isinstance(error, smtplib.SMTPResponseException):
        return _decide_refusal(attempt.phase, error.smtp_code, _as_text(error.smtp_error), recipient)
    detail = scrub(str(error) or type(error).__name__, recipient=recipient)
    return Outcome(_decide_silence(attempt.phase), _fault_word(attempt, error), detail)


def _decide_refusal(phase: Phase, code: int, text: str, recipient: str) -> Outcome:
    enhanced = match[0] if (match := _ENHANCED.match(text)) else ""
    word = (
        "auth_failed" if phase is Phase.AUTH and code >= 500 else "_".join(filter(None, ("smtp", str(code), enhanced)))
    )
    if phase <= Phase.MAIL or code in (530, 535):
        kind = OutcomeKind.SYSTEMIC
    elif code < 500:
        kind = OutcomeKind.TEMPORARY
    elif phase is Phase.RCPT or enhanced.startswith("5.1."):
        kind = OutcomeKind.REJECTED
    else:
        kind = OutcomeKind.FAILED
    return Outcome(kind, word, scrub(text, recipient=recipient))


def _decide_silence(phase: Phase) -> OutcomeKind:
    if phase <= Phase.MAIL:
        return OutcomeKind.SYSTEMIC
    return OutcomeKind.TEMPORARY if phase < Phase.DOT else OutcomeKind.IN_DOUBT


def _fault_word(attempt: Attempt, error: Exception) -> str:
    phase = attempt.phase.name.lower()
    if attempt.is_over:
        return f"timeout_{phase}"
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return f"{phase}_missing"
    if isinstance(error, socket.gaierror):
        return "dns_failed"
    if isinstance(error, ConnectionRefusedError) and attempt.phase is Phase.CONNECT:
        return "connect_refused"
    return f"{phase}_failed" if attempt.phase in (Phase.CONNECT, Phase.TLS, Phase.AUTH) else f"lost_{phase}"


class _Connection(smtplib.SMTP):
    """One dialogue with one server, in which no wait outlives the attempt."""

    def __init__(self, server: Server, tls: ssl.SSLContext | None, attempt: Attempt) -> None:
        super().__init__(local_hostname=server.client_name)
        self.server = server
        self.tls = tls
        self.attempt = attempt
        self.heard_at = 0.0

    @property
    def description(self) -> str:
        version = self.sock.version() if isinstance(self.sock, ssl.SSLSocket) else "no TLS"
        return f"{self.server.host}:{self.server.port}, {version}, {'logged in' if self.server.user else 'no login'}"

    def open(self) -> None:
        """Up to the login. Raises OSError or ValueError; the caller closes."""
        self.attempt.phase = Phase.CONNECT
        self.sock = dial(self.server.host, self.server.port, self.attempt)
        if self.server.security is Security.TLS:
            self._wrap()
        self.attempt.phase = Phase.GREETING
        self._expect(2)
        self._greet()
        if self.server.security is Security.STARTTLS:
            self._start_tls()
            self._greet()
        if self.server.user is not None:
            self.attempt.phase = Phase.AUTH
            self.login(self.server.user, self.server.password)

    def begin(self, envelope_sender: str, attempt: Attempt) -> _Connection:
        self.attempt = attempt
        attempt.phase = Phase.MAIL
        if deadline.now() - self.heard_at > LONGEST_REST_SECONDS or not self._is_quiet():
            raise smtplib.SMTPServerDisconnected("the kept connection has ended")
        self._command(f"MAIL FROM:<{envelope_sender}>", 2)
        return self

    def deliver(self, recipient: str, body: bytes) -> str:
        """The reply to the final dot. `body` is dot-stuffed and ends without its last line end."""
        self.attempt.phase = Phase.RCPT
        self._command(f"RCPT TO:<{recipient}>", 2)
        self.attempt.phase = Phase.DATA
        self._command("DATA", 3)
        self.attempt.phase = Phase.BODY
        self.send(body)
        # The last moment at which giving up is safe. A server that has hung up, or speaks out of turn, would leave us
        # in doubt; a worker that slept past its lease (SIGSTOP) must not end what its heir sends again.
        if not self._is_quiet():
            raise smtplib.SMTPServerDisconnected("the server ended the dialogue inside DATA")
        # One write of 5 bytes, not begun once the time is over. If it raises, the server has not got all of them.
        self.send(b"\r\n.\r\n")
        self.attempt.phase = Phase.DOT
        return _as_text(self._expect(2))

    def send(self, s: ReadableBuffer | str) -> None:
        """As smtplib's; but sendall() of a TLS socket starts its time-out anew with each piece."""
        rest = memoryview(s.encode("ascii") if isinstance(s, str) else s)
        while rest:
            rest = rest[self._socket_in_time().send(rest) :]

    def getreply(self) -> tuple[int, bytes]:
        """As smtplib's; but half a line, or what is no reply, counts as a lost connection and never as code 250 or 500."""
        if self.file is None:
            self.file = reader_of(self)
        texts: list[bytes] = []
        while len(texts) < _MOST_REPLY_LINES:
            reply = _REPLY.fullmatch(self.file.readline(_LONGEST_REPLY_LINE))
            if reply is None:
                break
            texts.append(reply[3] or b"")
            if reply[2] != b"-":
                self.heard_at = deadline.now()
                return int(reply[1]), b"\n".join(texts)
        raise smtplib.SMTPServerDisconnected("the server hung up or does not speak SMTP")

    def receive_into(self, buffer: Any) -> int:
        return self._socket_in_time().recv_into(buffer)

    def _socket_in_time(self) -> socket.socket:
        if self.sock is None:
            raise smtplib.SMTPServerDisconnected("the connection is closed")
        self.sock.settimeout(self.attempt.remaining())
        return self.sock

    def _greet(self) -> None:
        self.attempt.phase = Phase.EHLO
        code, text = self.ehlo()
        if code != 250:
            raise smtplib.SMTPResponseException(code, text)

    def _start_tls(self) -> None:
        self.attempt.phase = Phase.TLS
        if not self.has_extn("starttls"):
            raise smtplib.SMTPNotSupportedError("the server offers no STARTTLS")
        self._command("STARTTLS", 2)
        self._wrap()

    def _wrap(self) -> None:
        assert self.tls is not None
        self.attempt.phase = Phase.TLS
        # What came before the handshake could be anybody's; the new reader starts empty.
        self.file = None
        # The handshake counts its time-out over all of its packets.
        self.sock = self.tls.wrap_socket(self._socket_in_time(), server_hostname=self.server.host)

    def _command(self, line: str, wanted: int) -> bytes:
        self.putcmd(line)
        return self._expect(wanted)

    def _expect(self, wanted: int) -> bytes:
        """`wanted`: the reply's first digit. Another answer that is no refusal means we are out of step."""
        code, text = self.getreply()
        if code >= 400:
            raise smtplib.SMTPResponseException(code, text)
        if code // 100 != wanted:
            raise smtplib.SMTPServerDisconnected(f"the server answered {code} out of turn")
        return text

    def _is_quiet(self) -> bool:
        """Whether the server still listens: it has neither hung up nor said something unasked."""
        if self.sock is None:
            return False
        self.sock.settimeout(0)
        try:
            self.sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False


def _security(scheme: str, host: str) -> Security:
    if scheme == "smtps":
        return Security.TLS
    return Security.PLAIN if is_loopback(host) else Security.STARTTLS


def _dot_stuffed(message: bytes) -> bytes:
    """RFC 5321, 4.5.2, without the last line end: it is the first half of the final CRLF-dot-CRLF."""
    return message.replace(b"\r\n.", b"\r\n..").removesuffix(b"\r\n")


def _reply_code(error: Exception) -> int | None:
    return error.smtp_code if isinstance(error, smtplib.SMTPResponseException) else None


def _as_text(reply: bytes | str) -> str:
    return reply if isinstance(reply, str) else reply.decode("utf-8", "replace")
