"""Reads the body of a request before the application sees it, so that visitors who never finish leave threads to others.

granian reads the body inside its thread and knows no time-out for it: as many half-sent forms as there are threads
stop every page. Here few may be read at once, in all and of one client, and one that trickles in is given up.

No helper thread with a time-out: granian 2.8, answering while another thread still reads, keeps the interpreter
locked until that visitor leaves. So the clock is looked at between reads only, and a client that falls silent keeps
its place, one of its few, until it leaves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Final

from werkzeug.wrappers import Response
from werkzeug.wsgi import get_content_length

from waitlist import messages
from waitlist.web.security import key_of

if TYPE_CHECKING:
    from _typeshed.wsgi import InputStream, StartResponse, WSGIApplication, WSGIEnvironment

# As much as the largest that any route takes; each route refuses what is too much for it.
MOST_BYTES: Final = 2 * 1024 * 1024
LIMIT_SECONDS: Final = 10.0
MOST_PER_CLIENT: Final = 4
# Threads that no body may take: they serve pages and probes whatever happens.
SPARE_THREADS: Final = 4
# A read waits for all it asks for. What took longer than this had to wait for the network.
AT_ONCE_SECONDS: Final = 0.01
LARGEST_STEP: Final = 64 * 1024
RETRY_SECONDS: Final = 10


class TooSlowError(Exception):
    pass


class BodyReader:
    """WSGI middleware; inside ProxyFix, which knows the client's address."""

    def __init__(
        self,
        app: WSGIApplication,
        *,
        threads: int,
        limit_seconds: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._most = max(1, threads - SPARE_THREADS)
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._lock = Lock()
        self._reading: Counter[str] = Counter()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        declared = get_content_length(environ)
        is_chunked = environ.get("HTTP_TRANSFER_ENCODING", "") == "chunked" and environ.get("wsgi.input_terminated")
        if not declared and not is_chunked:
            return self._app(environ, start_response)
        with self._place(key_of(environ.get("REMOTE_ADDR"))) as has_place:
            if not has_place:
                return _refusal(503, messages.BODIES_BUSY)(environ, start_response)
            try:
                # One byte more than anybody takes shows the application that it is too much.
                body = self._read(environ["wsgi.input"], min(declared or MOST_BYTES + 1, MOST_BYTES + 1))
            except TooSlowError:
                return _refusal(408, messages.BODY_TOO_SLOW)(environ, start_response)
        if declared and len(body) < min(declared, MOST_BYTES):
            return _refusal(400, messages.BODY_CUT_OFF)(environ, start_response)
        environ["wsgi.input"] = BytesIO(body)
        environ["CONTENT_LENGTH"] = str(declared or len(body))
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        return self._app(environ, start_response)

    @contextmanager
    def _place(self, client: str) -> Iterator[bool]:
        with self._lock:
            has_place = self._reading.total() < self._most and self._reading[client] < MOST_PER_CLIENT
            self._reading[client] += has_place
        try:
            yield has_place
        finally:
            with self._lock:
                self._reading[client] -= has_place
                if not self._reading[client]:
                    del self._reading[client]

    def _read(self, stream: InputStream, size: int) -> bytes:
        """Larger steps as long as bytes are there at once, single ones for who is slow: each step blocks."""
        parts: list[bytes] = []
        started = before = self._clock()
        step = 1
        while size and (part := stream.read(min(step, size))):
            parts.append(part)
            size -= len(part)
            now = self._clock()
            if size and now - started > self._limit_seconds:
                raise TooSlowError
            step = 1 if now - before > AT_ONCE_SECONDS else min(step * 2, LARGEST_STEP)
            before = now
        return b"".join(parts)


def _refusal(status: int, text: str) -> Response:
    """Plain, without any template or look-up. The rest of the body is never read, so the connection cannot go on."""
    headers = {"Connection": "close", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    if status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return Response(f"{text}\n", status, headers, mimetype="text/plain")
