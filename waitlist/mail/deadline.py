"""One deadline over a whole dialogue. The time-outs of `socket` start anew with each packet, and name look-ups have none.

Knows sockets, and neither mail nor protocol.
"""

from __future__ import annotations

import io
import queue
import socket
import threading
import time
from typing import Any, Final, Protocol


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._ends_at = now() + seconds

    @property
    def is_over(self) -> bool:
        return now() >= self._ends_at

    def remaining(self) -> float:
        """Seconds, more than 0; raises TimeoutError once there are none."""
        seconds = self._ends_at - now()
        if seconds <= 0:
            raise TimeoutError("the time for this attempt is over")
        return seconds


class Wire:
    """A connected socket with as much of its interface as `http.client` uses, and a deadline over all of it."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket = connected
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        """If it raises, the other side has not got all of `data`."""
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(self._deadline.remaining())
            rest = rest[self._socket.send(rest) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        return reader_of(self)

    def receive_into(self, buffer: Any) -> int:
        self._socket.settimeout(self._deadline.remaining())
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        self._socket.close()


class Source(Protocol):
    def receive_into(self, buffer: Any) -> int: ...


def reader_of(source: Source) -> io.BufferedReader:
    """Reads lines from `source`, each packet awaited for the rest of its deadline only."""
    return io.BufferedReader(_Reader(source))


class _Reader(io.RawIOBase):
    def __init__(self, source: Source) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.receive_into(buffer)


def dial(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Raises OSError or ValueError (a host that is no host name)."""
    addresses = _resolve(host, port, deadline)
    fault: OSError = OSError("the host has no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        connected = socket.socket(family, kind, protocol)
        try:
            # A dead first address (IPv6 that leads nowhere) leaves time for the others.
            connected.settimeout(deadline.remaining() / (len(addresses) - index))
            connected.connect(address)
        except OSError as error:
            connected.close()
            fault = error
            continue
        # A small write behind another would wait for a delayed acknowledgement.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected
    raise fault


def _resolve(host: str, port: int, deadline: Deadline) -> list[tuple[Any, ...]]:
    """getaddrinfo() takes no time-out, so it runs in a thread that is left behind; the resolver ends it by itself, and
    pauses after a systemic fault keep such threads few."""
    answers: queue.SimpleQueue[list[tuple[Any, ...]] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except (OSError, ValueError) as error:
            answers.put(error)

    threading.Thread(target=look_up, name="waitlist-dns", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline.remaining())
    except queue.Empty as error:
        raise TimeoutError("the name look-up takes too long") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def now() -> float:
    """Seconds of a clock that nobody sets. It also counts while the machine is suspended, where there is such a one:
    a laptop that wakes up must not believe that its lease still runs."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
