"""Real processes for race tests. They are forked from a server that has imported everything and done nothing, so
nothing is shared but the database; the environment is that of the first start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
# Importing all of it takes a second or two in each process: with 8 of them, most of a race test.
CONTEXT.set_forkserver_preload(
    ["pytest", "hypothesis", "psycopg", "sqlalchemy", "alembic", "waitlist", "tests.factories"]
)
# Only a hang takes so long, even on a loaded machine.
LONGEST_SECONDS = 120


def run_at_once(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `work(wait, number, *arguments)` in `count` processes at once and return what each returned, in order.

    Each makes ready, then calls `wait()`, which returns in all of them when the last has called it. `work` is a
    function of a module. Whatever one raises is raised here.
    """
    barrier = CONTEXT.Barrier(count)
    answers: Queue[tuple[int, Any, str | None]] = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_work, args=(barrier, answers, number, work, arguments), daemon=True)
        for number in range(count)
    ]
    for process in processes:
        process.start()
    try:
        received = [answers.get(timeout=LONGEST_SECONDS) for _ in processes]
    finally:
        end(*processes)
    failures = [failure for _, _, failure in received if failure]
    assert not failures, "\n".join(failures)
    return [answer for _, answer, _ in sorted(received, key=lambda one: one[0])]


def start(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start one process that the test itself kills or joins."""
    process = CONTEXT.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def kill_myself(*_: Any, **__: Any) -> None:
    """Put in the place of a function, it is where the process dies: a real SIGKILL, which nothing can catch."""
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and death when it has done its work."""

    def run(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        kill_myself()

    return run


def end(*processes: BaseProcess) -> None:
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _work(barrier: Barrier, answers: Queue[Any], number: int, work: Callable[..., Any], arguments: tuple[Any]) -> None:
    try:
        answers.put((number, work(lambda: barrier.wait(LONGEST_SECONDS), number, *arguments), None))
    except BaseException:
        barrier.abort()
        answers.put((number, None, traceback.format_exc()))
