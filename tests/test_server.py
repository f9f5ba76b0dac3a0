"""Forms that arrive slowly or never, on a real granian as `flask up` starts it, but for a limit of one second; and what
of a request reaches the application, without any socket.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from bs4 import BeautifulSoup
from werkzeug.wrappers import Request, Response

from tests.databases import SQLiteFiles
from tests.factories import make_list
from waitlist import create_app, create_server, messages
from waitlist.cli.system import _web_command
from waitlist.settings import ROOT, Settings
from waitlist.web import server as module
from waitlist.web.server import MOST_BYTES, Server

STALLED = 200
SOON_SECONDS = 2
HASTY_SECONDS = 1.0
FORM = "Content-Type: application/x-www-form-urlencoded\r\n"
# Only a hang takes so long.
START_SECONDS = 60


def create_hasty_server() -> Server:
    module.LIMIT_SECONDS = HASTY_SECONDS  # type: ignore[misc]  # in a process of its own
    return create_server()


@dataclass(frozen=True)
class Site:
    """A real granian with the 16 threads it has by default; `lock` is the file on which writers queue."""

    process: subprocess.Popen[bytes]
    port: int
    lock: Path


@pytest.fixture
def site(sqlite_files: SQLiteFiles, tmp_path: Path) -> Iterator[Site]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    values = {
        "database_url": sqlite_files.fresh(tmp_path),
        "secret_key": "test-secret-key-of-32-characters",
        "data_key": "test-data-key--of-32-characters-",
        "mail_url": f"file:{tmp_path}/mail",
        "bind": f"127.0.0.1:{port}",
        "base_url": f"http://127.0.0.1:{port}",
        "min_form_seconds": "0",
    }
    settings = Settings(**values)
    services = create_app(settings).extensions["waitlist"]
    make_list(services)
    services.store.close()
    environment = os.environ | {f"WAITLIST_{name.upper()}": value for name, value in values.items()}
    command = _web_command(settings).replace("waitlist:create_server", f"{__name__}:create_hasty_server")
    process = subprocess.Popen(command, shell=True, cwd=ROOT, env=environment)
    try:
        _wait_until_open(process, port)
        yield Site(process, port, settings.database_path.with_name(f"{settings.database_path.name}.lock"))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def port(site: Site) -> int:
    return site.port


def test_stalled_forms_stop_nobody_and_are_given_up(port: int) -> None:
    with ExitStack() as stack:
        stalled = [stack.enter_context(_stall(port)) for _ in range(STALLED)]

        for path in ("/healthz", "/"):
            started = time.monotonic()
            assert _open(port, path) == 200
            assert time.monotonic() - started < SOON_SECONDS
        assert _sign_up(port) == 303
        assert {_whole_answer(one)[:13] for one in stalled} == {b"HTTP/1.1 408 "}


@pytest.mark.parametrize(
    ("framing", "piece"), [("Content-Length: 99999", b"a"), ("Transfer-Encoding: chunked", b"1\r\na\r\n")]
)
def test_form_that_trickles_in_is_given_up(port: int, framing: str, piece: bytes) -> None:
    with _stall(port, framing, piece) as one:
        started = time.monotonic()
        answer = _trickle(one, piece)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert HASTY_SECONDS / 2 < time.monotonic() - started < HASTY_SECONDS + SOON_SECONDS


@pytest.mark.parametrize("rest", [b"zz\r\n", b""], ids=["broken", "half-closed"])
def test_form_that_ends_too_soon_is_answered_and_never_handed_on(port: int, rest: bytes) -> None:
    with _stall(port, "Transfer-Encoding: chunked", rest) as one:
        one.shutdown(socket.SHUT_WR)
        answer = _whole_answer(one)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert messages.BODY_CUT_OFF.encode() in answer


def test_form_under_way_at_a_stop_is_answered_before_the_server_ends(site: Site) -> None:
    with ThreadPoolExecutor(1) as pool, site.lock.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = pool.submit(_sign_up, site.port)
        _wait_for_waiter(site.lock)
        site.process.terminate()
        fcntl.flock(lock, fcntl.LOCK_UN)

        assert answer.result(SOON_SECONDS + 10) == 303
        assert site.process.wait(10) == 0


class TestWhatReachesTheApplication:
    @pytest.mark.parametrize("size", [1, 500, 64 * 1024 + 1, MOST_BYTES])
    def test_whole_body_in_one_piece_or_many(self, size: int) -> None:
        body = bytes(size - 1) + b"x"

        assert _post(body) == (200, body)
        assert _post(body[:400], body[400:]) == (200, body)

    def test_endless_body_is_read_no_further_than_it_takes_to_refuse_it(self) -> None:
        pieces = [bytes(MOST_BYTES)] * 9

        assert _post(*pieces, left_over=7)[0] == 413

    def test_body_declared_too_large_is_not_read_at_all(self) -> None:
        length = (b"content-length", str(MOST_BYTES + 1).encode())

        assert _post(b"a", headers=[length], left_over=1)[0] == 413

    def test_half_a_body_never_arrives(self) -> None:
        assert _post(b"a", None) == (400, f"{messages.BODY_CUT_OFF}\n".encode())

    def test_bodies_of_all_together_have_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MOST_HELD_BYTES", 100)
        server = Server(_echo, threads=1)

        assert _post(bytes(101), server=server) == (503, f"{messages.BODIES_BUSY}\n".encode())
        assert _post(bytes(100), server=server)[0] == 200, "what was refused is held no longer"

    @pytest.mark.parametrize("status", [400, 408, 503])
    def test_refusal_ends_the_connection(self, status: int) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(module._refuse(send, module.RefusedBody(status, "why")))

        headers = dict(sent[0]["headers"])
        assert headers[b"connection"] == b"close"
        assert headers.get(b"retry-after") == (b"10" if status == 503 else None)

    def test_header_with_an_underscore_cannot_speak_for_the_proxy(self) -> None:
        theirs, ours = (b"x_forwarded_for", b"6.6.6.6"), (b"x-forwarded-for", b"127.0.0.9")

        for headers in ([theirs, ours], [ours, theirs]):
            assert _post(b"", headers=[*headers, (b"x-echo", b"x-forwarded-for")])[1] == b"127.0.0.9"
        assert _post(b"", headers=[theirs, (b"x-echo", b"x-forwarded-for")])[1] == b""


def _echo(environ: Any, start_response: Any) -> Any:
    request = Request(environ)
    if (request.content_length or 0) > MOST_BYTES:
        return Response("", 413)(environ, start_response)
    if name := request.headers.get("X-Echo"):
        return Response(request.headers.get(name, ""))(environ, start_response)
    return Response(request.get_data())(environ, start_response)


def _post(
    *pieces: bytes | None,
    headers: list[tuple[bytes, bytes]] | None = None,
    server: Server | None = None,
    left_over: int = 0,
) -> tuple[int, bytes]:
    """Status and body of the answer to a body that comes in `pieces`; None is a visitor who leaves."""
    scope: Any = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/",
        "query_string": b"",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 54321),
        "headers": headers or [],
    }
    waiting = list(pieces)
    sent: list[Any] = []

    async def receive() -> Any:
        piece = waiting.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run((server or Server(_echo, threads=1))(scope, receive, send))
    assert len(waiting) == left_over
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


def _stall(port: int, framing: str = "Content-Length: 100", sent: bytes = b"a") -> socket.socket:
    """The head of a form, and the beginning of its body."""
    one = socket.create_connection(("127.0.0.1", port), timeout=10)
    one.sendall(f"POST /join/launch HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{FORM}{framing}\r\n\r\n".encode() + sent)
    return one


def _whole_answer(one: socket.socket) -> bytes:
    """Until the server closes the connection."""
    answer = b""
    while part := one.recv(10_000):
        answer += part
    return answer


def _trickle(one: socket.socket, piece: bytes) -> bytes:
    """Send `piece` again and again until an answer comes."""
    one.settimeout(0.05)
    for _ in range(99):
        try:
            return one.recv(10_000)
        except TimeoutError:
            one.sendall(piece)
    raise AssertionError("never answered")


def _open(port: int, path: str) -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def _sign_up(port: int) -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/join/launch")
        page = connection.getresponse()
        cookie = page.headers["Set-Cookie"].partition(";")[0]
        soup = BeautifulSoup(page.read(), "html.parser")
        values = {str(tag["name"]): str(tag.get("value", "")) for tag in soup.select("#signup input")}
        values |= {"email": "person@example.com", "consent": "yes"}
        headers = {"Cookie": cookie, "Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/join/launch", urlencode(values), headers)
        return connection.getresponse().status


def _wait_for_waiter(lock: Path) -> None:
    """Until somebody waits for the file lock that we hold."""
    inode = f":{lock.stat().st_ino} "
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
            return
        time.sleep(0.01)
    raise AssertionError("nobody came to wait")


def _wait_until_open(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("granian did not start")
