"""What stands between granian and the application: a thread is spent on a request only when all of it is here.

granian knows no time-out for a body, and a WSGI thread that reads one waits as long as the visitor likes: as many
half-sent forms as there are threads would stop every page. Here bodies arrive on the event loop, where a silent
visitor costs a socket and a few bytes, and are given up at a limit. So this is ASGI outside and WSGI inside.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from werkzeug.test import run_wsgi_app

from waitlist import messages

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment

# The dictionaries of asgi.readthedocs.io/en/latest/specs/www.html
Message: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

# As much as the largest that any route takes; each route refuses what is too much for it.
MOST_BYTES: Final = 2 * 1024 * 1024
# A form is a few hundred bytes; whoever needs longer has lost the line.
LIMIT_SECONDS: Final = 10.0
# Of all requests together, so that many large bodies cannot take the machine's memory.
MOST_HELD_BYTES: Final = 64 * 1024 * 1024
RETRY_SECONDS: Final = 10


class RefusedBody(Exception):
    """The body never came, or there is no room for it: an HTTP status and a sentence for the visitor."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


class Server:
    """The WSGI application as an ASGI one, with `threads` threads. HTTP scopes only; lives in one event loop."""

    def __init__(self, app: WSGIApplication, *, threads: int) -> None:
        self._app = app
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="web")
        self._held_bytes = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            await self._read(scope, receive, body)
            # The whole answer at once: a thread that waited for the loop would wait for ever when the loop has ended.
            in_thread = asyncio.get_running_loop().run_in_executor
            status, headers, content = await in_thread(self._threads, self._respond, _environ(scope, bytes(body)))
            await _answer(send, status, headers, content)
        except RefusedBody as refusal:
            await _refuse(send, refusal)
        finally:
            self._held_bytes -= len(body)

    async def _read(self, scope: Message, receive: Receive, body: bytearray) -> None:
        """Fill `body`; of one that is too large only so much that the application sees it and refuses it."""
        if _declared_length(scope) > MOST_BYTES:
            return
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                has_more = True
                while has_more and len(body) <= MOST_BYTES:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RefusedBody(400, messages.BODY_CUT_OFF)
                    body += message["body"]
                    self._held_bytes += len(message["body"])
                    if self._held_bytes > MOST_HELD_BYTES:
                        raise RefusedBody(503, messages.BODIES_BUSY)
                    has_more = message["more_body"]
        except TimeoutError:
            raise RefusedBody(408, messages.BODY_TOO_SLOW) from None

    def _respond(self, environ: WSGIEnvironment) -> tuple[int, Iterable[tuple[str, str]], bytes]:
        content, status, headers = run_wsgi_app(self._app, environ, buffered=True)
        return int(status.partition(" ")[0]), headers, b"".join(content)


def _declared_length(scope: Message) -> int:
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)


def _environ(scope: Message, body: bytes) -> WSGIEnvironment:
    """By PEP 3333. The length is the one that was declared, or else counted."""
    environ: WSGIEnvironment = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": scope["path"].encode().decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "SERVER_NAME": scope["server"][0],
        "SERVER_PORT": str(scope["server"][1]),
        "REMOTE_ADDR": scope["client"][0],
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.input": BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    for name, value in scope["headers"]:
        # To WSGI X_Forwarded_For and X-Forwarded-For are one header, so a visitor could speak in the proxy's name.
        if b"_" not in name:
            key = "HTTP_" + name.decode("latin-1").upper().replace("-", "_")
            text = value.decode("latin-1")
            environ[key] = f"{environ[key]},{text}" if key in environ else text
    environ["CONTENT_TYPE"] = environ.pop("HTTP_CONTENT_TYPE", "")
    environ["CONTENT_LENGTH"] = environ.pop("HTTP_CONTENT_LENGTH", str(len(body)))
    environ.pop("HTTP_TRANSFER_ENCODING", None)
    return environ


async def _refuse(send: Send, refusal: RefusedBody) -> None:
    """Plain, without any template or look-up. The rest of the body is never read, so the connection cannot go on."""
    content = f"{refusal.text}\n".encode()
    headers = {
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(content)),
        "connection": "close",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }
    if refusal.status == 503:
        headers["retry-after"] = str(RETRY_SECONDS)
    await _answer(send, refusal.status, headers.items(), content)


async def _answer(send: Send, status: int, headers: Iterable[tuple[str, str]], content: bytes) -> None:
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": content, "more_body": False})
