"""Forms that arrive slowly or never. Real servers and sockets: granian as `flask up` starts it, where threads are few;
werkzeug's own, where the time-out has to be short.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import pytest
from bs4 import BeautifulSoup
from werkzeug.serving import make_server
from werkzeug.test import Client, EnvironBuilder, run_wsgi_app
from werkzeug.wrappers import Request, Response

from tests.databases import SQLiteFiles
from tests.factories import make_list
from waitlist import create_app, messages
from waitlist.cli.system import _web_command
from waitlist.settings import ROOT, Settings
from waitlist.web.bodies import MOST_BYTES, MOST_PER_CLIENT, BodyReader

STALLED = 40
SOON_SECONDS = 2
FORM = "Content-Type: application/x-www-form-urlencoded\r\n"
# Only a hang takes so long.
START_SECONDS = 60


@pytest.fixture
def port(sqlite_files: SQLiteFiles, tmp_path: Path) -> Iterator[int]:
    """Of a real granian with the 16 threads it has by default."""
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
    process = subprocess.Popen(_web_command(settings), shell=True, cwd=ROOT, env=environment)
    try:
        _wait_until_open(process, port)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class TestGranian:
    def test_forty_stalled_forms_of_one_client_stop_nobody_else(self, port: int) -> None:
        with ExitStack() as stack:
            stalled = [stack.enter_context(_stall(port)) for _ in range(STALLED)]
            # All but the few that may wait are answered, so those now hold their threads.
            waiting = set(stalled)
            while len(waiting) > MOST_PER_CLIENT and (answered := select.select(waiting, [], [], 10)[0]):
                assert all(one.recv(10_000).startswith(b"HTTP/1.1 503 ") for one in answered)
                waiting -= set(answered)

            assert len(waiting) == MOST_PER_CLIENT
            for path in ("/healthz", "/"):
                started = time.monotonic()
                assert _open(port, path) == 200
                assert time.monotonic() - started < SOON_SECONDS
            assert _sign_up(port, "127.0.0.2")[0] == 303
            status, retry_after, text = _sign_up(port, "127.0.0.1")
            assert (status, retry_after, text.strip()) == (503, "10", messages.BODIES_BUSY)

        # They have left: their client may send forms again.
        assert any(_sign_up(port, "127.0.0.1")[0] == 303 for _ in range(20))

    def test_many_clients_leave_threads_for_pages(self, port: int) -> None:
        with ExitStack() as stack:
            for number, _ in itertools.product(range(2, 8), range(MOST_PER_CLIENT)):
                stack.enter_context(_stall(port, f"127.0.0.{number}"))

            started = time.monotonic()
            assert _open(port, "/healthz") == 200
            assert _sign_up(port, "127.0.0.1")[0] == 503
            assert time.monotonic() - started < SOON_SECONDS


class TestTime:
    def test_form_that_trickles_in_is_given_up_at_the_limit(self) -> None:
        with _served(limit_seconds=0.3) as port, _stall(port) as one:
            started = time.monotonic()
            answer = _trickle(one, b"a")

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"Connection: close" in answer
        assert time.monotonic() - started < SOON_SECONDS

    def test_endless_chunks_of_one_byte_are_given_up_at_the_limit(self) -> None:
        with _served(limit_seconds=0.3) as port, _stall(port, framing="Transfer-Encoding: chunked", sent=b"") as one:
            answer = _trickle(one, b"1\r\na\r\n")

        assert answer.startswith(b"HTTP/1.1 408 ")


class TestWhatTheApplicationSees:
    @pytest.mark.parametrize("size", [1, 500, 64 * 1024 + 1, MOST_BYTES])
    def test_whole_body_arrives(self, size: int) -> None:
        body = bytes(size - 1) + b"x"

        assert Client(_reader()).post(data=body).data == body

    def test_chunked_body_arrives_with_its_length(self) -> None:
        assert _answer(_chunked(b"abc")) == (200, b"abc")

    def test_endless_body_is_too_much(self) -> None:
        assert _answer(_chunked(bytes(MOST_BYTES * 2)))[0] == 413

    def test_body_that_was_cut_off_never_arrives(self) -> None:
        environ = _chunked(b"half") | {"HTTP_TRANSFER_ENCODING": "", "CONTENT_LENGTH": "9"}

        assert _answer(environ) == (400, f"{messages.BODY_CUT_OFF}\n".encode())


def _echo(environ: Any, start_response: Any) -> Any:
    request = Request(environ)
    request.max_content_length = MOST_BYTES
    if request.content_length is not None and request.content_length > MOST_BYTES:
        return Response("", 413)(environ, start_response)
    return Response(request.get_data())(environ, start_response)


def _reader(**changes: Any) -> BodyReader:
    return BodyReader(_echo, threads=16, **changes)


def _answer(environ: dict[str, Any]) -> tuple[int, bytes]:
    body, status, _headers = run_wsgi_app(_reader(), environ)
    return int(status[:3]), b"".join(body)


def _chunked(body: bytes) -> dict[str, Any]:
    environ = EnvironBuilder(method="POST", input_stream=BytesIO(body)).get_environ()
    environ.pop("CONTENT_LENGTH", None)
    return environ | {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}


@contextmanager
def _served(limit_seconds: float) -> Iterator[int]:
    server = make_server("127.0.0.1", 0, _reader(limit_seconds=limit_seconds), threaded=True)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _stall(
    port: int, address: str = "127.0.0.1", framing: str = "Content-Length: 100", sent: bytes = b"a"
) -> socket.socket:
    """A form of which one byte has been sent."""
    one = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(address, 0))
    one.sendall(f"POST /join/launch HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{FORM}{framing}\r\n\r\n".encode() + sent)
    return one


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


def _sign_up(port: int, address: str) -> tuple[int, str | None, str]:
    """Status, Retry-After and text of the answer."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=10, source_address=(address, 0))) as connection:
        connection.request("GET", "/join/launch")
        page = connection.getresponse()
        cookie = page.headers["Set-Cookie"].partition(";")[0]
        soup = BeautifulSoup(page.read(), "html.parser")
        values = {str(tag["name"]): str(tag.get("value", "")) for tag in soup.select("#signup input")}
        values |= {"email": "person@example.com", "consent": "yes"}
        headers = {"Cookie": cookie, "Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/join/launch", urlencode(values), headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Retry-After"], answer.read().decode()


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
