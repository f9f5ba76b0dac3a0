"""Resend on loopback: a real memory of keys, faults on demand, and every request kept byte for byte.

Facts as in waitlist/mail/resend.py: the same key with the same body answers the same id and accepts nothing new; with
another body 409 `invalid_idempotent_request`; while the first is still worked on 409 `concurrent_idempotent_requests`.
A fault is used up by one request, in order. Nothing waits by the clock unless a fault says so. Other processes reach it
by `mail_url`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import struct
import threading
import uuid
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

API_KEY: Final = "re_Test_123"
SECRET: Final = "whsec_" + base64.b64encode(b"a-webhook-secret-of-32-bytes-ok!").decode()
# Long enough for a loaded machine; a test that needs it all has failed.
PATIENCE_SECONDS: Final = 20.0
# SO_LINGER with no time: close() sends a reset.
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Answer:
    """Say this. `accepts`: and take the mail all the same."""

    status: int
    name: str = ""
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    accepts: bool = False


@dataclass(frozen=True)
class Raw:
    """Say these octets, with a pause before each piece but the first, then hang up."""

    pieces: tuple[bytes, ...]
    pause_seconds: float = 0.0
    accepts: bool = False


@dataclass(frozen=True)
class Silence:
    """Take the whole request, and the mail if `accepts`, and never answer."""

    accepts: bool = False


@dataclass(frozen=True)
class Reset:
    """Reset the connection; `after`: the first byte, or the whole request."""

    after: str = "request"
    accepts: bool = False


@dataclass(frozen=True)
class Slow:
    """Begin on the request, and go on when released: until then its key is taken and its mail is not."""

    until: threading.Event


Fault = Answer | Raw | Silence | Reset | Slow | None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return self.headers.get("idempotency-key", "")


@dataclass(frozen=True)
class Accepted:
    id: str
    key: str
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.body)
        return read


@dataclass
class _Key:
    digest: bytes
    # None: still being worked on.
    message_id: str | None = None


class ResendEmulator:
    def __init__(self, *faults: Fault, tls: ssl.SSLContext | None = None) -> None:
        self.faults = deque(faults)
        self.requests: list[Request] = []
        self.accepted: list[Accepted] = []
        self.connections = 0
        self._tls = tls
        self._keys: dict[str, _Key] = {}
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve, daemon=True)]

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def mail_url(self) -> str:
        return f"resend://{API_KEY}?endpoint={quote(self.url, safe='')}"

    @property
    def accepted_by_key(self) -> Counter[str]:
        return Counter(mail.key for mail in self.accepted)

    @property
    def bodies_by_key(self) -> dict[str, set[bytes]]:
        """The different bodies that came under each key."""
        bodies: dict[str, set[bytes]] = {}
        for request in self.requests:
            bodies.setdefault(request.key, set()).add(request.body)
        return bodies

    def script(self, *faults: Fault) -> None:
        self.faults = deque(faults)

    def forget_keys(self) -> None:
        """As Resend does 24 hours after a key was first used."""
        self._keys.clear()

    def wait_for_requests(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in list(self._threads):
            thread.join(PATIENCE_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        # So often it looks whether it should stop.
        self._listener.settimeout(0.05)
        while not self._stopping.is_set():
            try:
                connected, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._talk, args=(connected,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _talk(self, connected: socket.socket) -> None:
        with self._changed:
            self.connections += 1
        connected.settimeout(PATIENCE_SECONDS)
        # Whatever a client does to the connection ends this conversation and nothing else.
        with contextlib.suppress(OSError, ValueError):
            if self._tls:
                connected = self._tls.wrap_socket(connected, server_side=True)
            self._converse(connected)
        connected.close()

    def _converse(self, connected: socket.socket) -> None:
        with self._changed:
            fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, Reset) and fault.after == "first byte":
            connected.recv(1)
            _reset(connected)
            return
        request = _read_request(connected)
        if request is None:
            return
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        self._answer(connected, request, fault)

    def _answer(self, connected: socket.socket, request: Request, fault: Fault) -> None:
        if isinstance(fault, Answer | Raw | Silence | Reset) and fault.accepts:
            self._process(request, None)
        if isinstance(fault, Answer):
            words = {"statusCode": fault.status, "name": fault.name, "message": fault.message}
            _say(connected, fault.status, words, fault.headers)
        elif isinstance(fault, Raw):
            for index, piece in enumerate(fault.pieces):
                if index and self._stopping.wait(fault.pause_seconds):
                    return
                connected.sendall(piece)
        elif isinstance(fault, Silence):
            _wait_for_hang_up(connected, self._stopping)
        elif isinstance(fault, Reset):
            _reset(connected)
        else:
            status, words = self._process(request, fault.until if isinstance(fault, Slow) else None)
            _say(connected, status, words, {})

    def _process(self, request: Request, until: threading.Event | None) -> tuple[int, dict[str, Any]]:
        if request.headers.get("authorization") != f"Bearer {API_KEY}":
            return _error(401, "validation_error", "API key is invalid")
        if request.method == "GET":
            return _error(401, "restricted_api_key", "This API key is restricted to only send emails")
        if "user-agent" not in request.headers:
            return _error(403, "", "error code: 1010")
        digest = hashlib.sha256(request.body).digest()
        with self._changed:
            known = self._keys.get(request.key)
            if known and known.digest != digest:
                return _error(409, "invalid_idempotent_request", "used with another payload")
            if known:
                return (
                    (200, {"id": known.message_id})
                    if known.message_id
                    else _error(409, "concurrent_idempotent_requests", "still in progress")
                )
            claimed = self._keys[request.key] = _Key(digest)
        if until is not None:
            until.wait(PATIENCE_SECONDS)
        with self._changed:
            claimed.message_id = str(uuid.uuid4())
            self.accepted.append(Accepted(claimed.message_id, request.key, request.body))
            self._changed.notify_all()
        return 200, {"id": claimed.message_id}


def signed(
    body: bytes, *, at: float, message_id: str = "msg_1", secret: str = SECRET, timestamp: str | None = None
) -> dict[str, str]:
    """The headers of a webhook as Svix signs it. Made by hand, so that no library checks itself."""
    stamp = str(int(at)) if timestamp is None else timestamp
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.new(key, f"{message_id}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "svix-id": message_id,
        "svix-timestamp": stamp,
        "svix-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def an_event(name: str, *, delivery_id: str | None, message_id: str, to: str, **more: Any) -> dict[str, Any]:
    """A webhook's body as Resend shows it in webhooks/event-types."""
    data: dict[str, Any] = {
        "created_at": "2024-11-22T23:41:11.894719+00:00",
        "email_id": message_id,
        "from": "Acme <onboarding@resend.dev>",
        "to": [to],
        "subject": "Sending this example",
    }
    if delivery_id is not None:
        data["tags"] = {"delivery_id": delivery_id}
    return {"type": f"email.{name}", "created_at": "2024-11-22T23:41:12.126Z", "data": data | more}


def _read_request(connected: socket.socket) -> Request | None:
    """None if the client hangs up before it is whole."""
    received = b""
    while b"\r\n\r\n" not in received:
        more = connected.recv(65_536)
        if not more:
            return None
        received += more
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ")
    while len(body) < int(headers.get("content-length", "0")):
        more = connected.recv(65_536)
        if not more:
            return None
        body += more
    return Request(method, path, headers, body)


def _say(connected: socket.socket, status: int, words: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    body = json.dumps(words).encode()
    lines = [f"HTTP/1.1 {status} Words", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connected.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def _error(status: int, name: str, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"statusCode": status, "name": name, "message": message}


def _reset(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connected.close()


def _wait_for_hang_up(connected: socket.socket, stopping: threading.Event) -> None:
    connected.settimeout(0.05)
    while not stopping.is_set():
        try:
            if not connected.recv(1):
                return
        except TimeoutError:
            continue
