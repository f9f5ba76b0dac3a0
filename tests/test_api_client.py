"""docs/api.md, run: its Python client against a proxy that loses answers, its curl lines, its table of codes."""

from __future__ import annotations

import itertools
import re
import shlex
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from werkzeug.serving import make_server

from tests.factories import FakeSender, make_list
from tests.programs import Program
from tests.scenes import count, drain, ledger
from waitlist import waitlists
from waitlist.api.models import AcceptedSignup, SignupStatus
from waitlist.api.problems import KINDS
from waitlist.model import ListState
from waitlist.services import Services
from waitlist.store.schema import email_outbox, signup_requests, subscribers

DOCUMENT = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 13\r\nConnection: close\r\n\r\n<html></html>"

# What the proxy does to an answer that the server has given: by then the signup is committed.
Fate = Callable[[bytes], bytes]


def drop(_answer: bytes) -> bytes:
    return b""


def cut(answer: bytes) -> bytes:
    return answer[:-20]


def bad_gateway(_answer: bytes) -> bytes:
    return BAD_GATEWAY


class Proxy(socketserver.ThreadingTCPServer):
    """Passes on one request a connection, and to the first answers does what `fates` say."""

    daemon_threads = True

    def __init__(self, upstream: int, fates: list[Fate]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.fates = fates
        self.requests: list[bytes] = []


class _Handler(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        request = _read_request(self.request)
        self.server.requests.append(request)
        with socket.create_connection(("127.0.0.1", self.server.upstream)) as upstream:
            upstream.sendall(request)
            answer = b"".join(iter(lambda: upstream.recv(65_536), b""))
        self.request.sendall(self.server.fates.pop(0)(answer) if self.server.fates else answer)


def _read_request(connection: socket.socket) -> bytes:
    """urllib asks for `Connection: close`, so one request is all there is."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65_536)
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    length = int(found[1]) if found else 0
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


@contextmanager
def served(server: Any) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Waits:
    """The client's `time`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def documented() -> dict[str, Any]:
    """The names that the Python of the document defines; it does not really wait."""
    (source,) = (text for language, text in BLOCKS if language == "python")
    names: dict[str, Any] = {}
    exec(compile(source, "docs/api.md", "exec"), names)
    names["time"] = Waits()
    return names


@pytest.fixture
def shop(app: Flask, services: Services) -> Program:
    make_list(services)
    return Program.registered(app)


@contextmanager
def behind_a_proxy(app: Flask, *fates: Fate) -> Iterator[tuple[str, Proxy]]:
    with served(make_server("127.0.0.1", 0, app, threaded=True)) as upstream:
        proxy = Proxy(upstream, list(fates))
        with served(proxy) as port:
            yield f"http://127.0.0.1:{port}", proxy


def test_one_simulated_retry_from_the_client_or_gateway(
    app: Flask, services: Services, shop: Program, sender: FakeSender, documented: dict[str, Any]
) -> None:
    with behind_a_proxy(app, drop) as (url, proxy):
        answer = documented["sign_up"](url, shop.token, "launch", "person@example.com", key="key-1")
    drain(services)

    assert len(proxy.requests) == 2
    assert proxy.requests[0] == proxy.requests[1]
    AcceptedSignup.model_validate(answer)
    assert shop.sign_up().get_json() == answer
    assert count(services, subscribers) == count(services, email_outbox) == count(services, signup_requests) == 1
    assert ledger(services) == ["queued"]
    assert len(sender.mails) == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
class TestClient:
    def test_client_outlives_every_kind_of_lost_answer(
        self, app: Flask, services: Services, shop: Program, documented: dict[str, Any]
    ) -> None:
        with behind_a_proxy(app, drop, cut, bad_gateway, drop) as (url, proxy):
            documented["sign_up"](url, shop.token, "launch", "person@example.com", key="key-1", source="web")

        assert len(set(proxy.requests)) == 1
        assert len(proxy.requests) == 5
        assert ledger(services) == ["queued"]
        waited = documented["time"].seconds
        assert all(2**tried / 2 <= seconds <= 2**tried for tried, seconds in enumerate(waited))

    def test_client_waits_as_long_as_it_is_told(self, app: Flask, shop: Program, documented: dict[str, Any]) -> None:
        def busy(_answer: bytes) -> bytes:
            body = b'{"retryable":true}'
            head = f"HTTP/1.1 503 Busy\r\nRetry-After: 10\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            return head.encode() + body

        with behind_a_proxy(app, busy) as (url, _):
            documented["sign_up"](url, shop.token, "launch", "person@example.com", key="key-1")

        assert documented["time"].seconds == [10]

    @pytest.mark.parametrize(
        ("email", "token", "code"),
        [("nonsense", None, "invalid_members"), ("person@example.com", "wrong", "unauthorized")],
    )
    def test_client_takes_a_final_answer_for_final(
        self, app: Flask, shop: Program, documented: dict[str, Any], email: str, token: str | None, code: str
    ) -> None:
        with (
            behind_a_proxy(app) as (url, proxy),
            pytest.raises(documented["Refused"], match=code) as refused,
        ):
            documented["sign_up"](url, token or shop.token, "launch", email, key="key-1")

        assert refused.value.problem["code"] == code
        assert len(proxy.requests) == 1
        assert documented["time"].seconds == []

    def test_client_gives_up_and_says_that_it_does_not_know(
        self, app: Flask, services: Services, shop: Program, documented: dict[str, Any]
    ) -> None:
        with behind_a_proxy(app, *[drop] * 3) as (url, proxy), pytest.raises(documented["Unanswered"], match="key-1"):
            documented["sign_up"](url, shop.token, "launch", "person@example.com", key="key-1", tries=3)

        assert len(proxy.requests) == 3
        assert len(documented["time"].seconds) == 2
        assert ledger(services) == ["queued"]

    def test_closed_list_is_final(
        self, app: Flask, services: Services, shop: Program, documented: dict[str, Any]
    ) -> None:
        waitlists.set_state(services, "launch", ListState.CLOSED)

        with behind_a_proxy(app, drop) as (url, _), pytest.raises(documented["Refused"], match="409 list_closed"):
            documented["sign_up"](url, shop.token, "launch", "person@example.com", key="key-1")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_documented_curl_lines_work(shop: Program) -> None:
    lines = [text.replace("\\\n", " ") for language, text in BLOCKS if language == "sh" and text.startswith("curl")]
    sign_up, show = (shlex.split(line)[1:] for line in lines)

    accepted = shop.call("POST", _path(sign_up), headers=_headers(sign_up, shop), data=sign_up[sign_up.index("-d") + 1])
    path = _path(show).rpartition("/")[0] + "/" + accepted.headers["Operation-Id"]
    status = shop.call("GET", path, headers=_headers(show, shop))

    assert (accepted.status_code, status.status_code) == (202, 200)


def test_documented_answers_are_of_the_real_shape() -> None:
    accepted, status = (text for language, text in BLOCKS if language == "json")

    AcceptedSignup.model_validate_json(accepted)
    SignupStatus.model_validate_json(status)


def test_every_code_is_documented_with_its_status_and_the_reverse() -> None:
    found = re.findall(r"^\| (\d{3}) \| `(\w+)` \| .* \| (yes|no)[^|]* \|$", DOCUMENT, re.MULTILINE)

    documented = {code: (int(status), again == "yes") for status, code, again in found}
    assert documented == {code: (kind.status, kind.retryable) for code, kind in KINDS.items()}


def _path(words: list[str]) -> str:
    return words[0].removeprefix("https://waitlist.example.com")


def _headers(words: list[str], shop: Program) -> dict[str, str]:
    lines = [value for name, value in itertools.pairwise(words) if name == "-H"]
    pairs = (line.replace("$TOKEN", shop.token).split(": ", 1) for line in lines)
    return dict(pairs)
