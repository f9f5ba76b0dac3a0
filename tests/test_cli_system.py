"""`up`, `doctor` and the keys: what a person at the terminal is told when something is not as it should be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from flask import Flask
from pydantic import SecretStr

from tests.factories import FakeSender, make_list
from tests.scenes import join, outbox_rows, services_at, set_setting
from tests.smtp_server import Hang, SmtpServer
from waitlist import doctor, ledger
from waitlist.errors import SettingsError
from waitlist.ledger import LITTLE_ROOM_BYTES, NO_ROOM_BYTES
from waitlist.services import Services
from waitlist.settings import ROOT, load_settings
from waitlist.store import Store

LONGEST_SECONDS = 60
# As `flask up` does.
START = "import sys, flask.cli; sys.argv = ['flask', '--app', 'app', 'up']; flask.cli.main()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def up_environment(folder: Path, port: int, **variables: str) -> dict[str, str]:
    ours = {
        "WAITLIST_DATABASE_URL": f"sqlite:///{folder}/waitlist.sqlite3",
        "WAITLIST_MAIL_URL": f"file:{folder}/mail",
        "WAITLIST_BIND": f"127.0.0.1:{port}",
        "WAITLIST_BASE_URL": f"http://127.0.0.1:{port}",
    }
    return {**os.environ, **ours, **variables}


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=LONGEST_SECONDS) as response:
            return bool(response.status == 200)
    except OSError:
        time.sleep(0.1)
        return False


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout)


@contextmanager
def up(folder: Path, port: int, start: str = START, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Started, and answering: while its server is still starting, a signal is only obeyed after some seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        cwd=ROOT,
        env=up_environment(folder, port, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        read_until(process, "worker started")
        while not answers(port):
            assert process.poll() is None
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=LONGEST_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_that_is_told_to_stop_ends_with_zero(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path, free_port()) as process:
        process.send_signal(number)

        process.communicate(timeout=LONGEST_SECONDS)

    assert process.returncode == 0


@contextmanager
def up_with_a_mail_on_the_wire(folder: Path, mailbox: SmtpServer) -> Iterator[tuple[subprocess.Popen[str], Services]]:
    """`mailbox` does not answer the final dot."""
    port = free_port()
    with up(folder, port, WAITLIST_MAIL_URL=mailbox.url) as process:
        site = services_at(load_settings(up_environment(folder, port), dotenv=None))
        join(site)
        mailbox.wait_for_phase("dot", timeout_seconds=LONGEST_SECONDS)
        yield process, site
        site.store.close()


def test_up_that_is_told_to_stop_finishes_a_mail_that_takes_long(tmp_path: Path) -> None:
    release = threading.Event()
    with (
        SmtpServer({"dot": [Hang(release)]}) as mailbox,
        up_with_a_mail_on_the_wire(tmp_path, mailbox) as (process, site),
    ):
        process.send_signal(signal.SIGTERM)
        read_until(process, "web stopped")
        # honcho by itself waits for 5 s from here, and then kills.
        time.sleep(6)
        release.set()
        process.communicate(timeout=LONGEST_SECONDS)

        assert process.returncode == 0
        assert len(mailbox.messages) == 1
        assert [row.status for row in outbox_rows(site)] == ["sent"]


def test_second_signal_ends_up_at_once(tmp_path: Path) -> None:
    with (
        SmtpServer({"dot": [Hang(threading.Event())]}) as mailbox,
        up_with_a_mail_on_the_wire(tmp_path, mailbox) as (process, site),
    ):
        process.send_signal(signal.SIGTERM)
        read_until(process, "web stopped")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LONGEST_SECONDS)

        # An attempt may take 30 s, and would then have been recorded.
        assert [row.status for row in outbox_rows(site)] == ["dispatching"]


def descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from descendants(int(child))


def test_web_worker_that_hangs_is_killed_when_up_stops(tmp_path: Path) -> None:
    hasty = f"from waitlist.cli import system; system.WEB_STOP_SECONDS = 1; {START}"
    with up(tmp_path, free_port(), hasty) as process:
        # The last one: granian starts its workers.
        *_, web_worker = [pid for pid in descendants(process.pid) if b"granian" in cmdline(pid)]
        os.kill(web_worker, signal.SIGSTOP)

        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LONGEST_SECONDS)

    assert process.returncode == 0
    assert not Path(f"/proc/{web_worker}").exists()


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_up_on_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = up_environment(tmp_path, taken.getsockname()[1])

        done = subprocess.run(
            [sys.executable, "-m", "flask", "--app", "app", "up"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )

    assert done.returncode == 1
    assert "Is the waitlist running already?" in done.stderr
    assert "Traceback" not in done.stderr


def test_lost_data_key_is_not_replaced_beside_a_database_that_has_data(tmp_path: Path) -> None:
    environment = {"WAITLIST_DATABASE_URL": f"sqlite:///{tmp_path}/w.sqlite3"}
    key = load_settings(environment, dotenv=None).data_key_text
    (tmp_path / "w.sqlite3").write_bytes(b"x")
    (tmp_path / "data_key").unlink()

    with pytest.raises(SettingsError, match="Restore it from a backup"):
        load_settings(environment, dotenv=None)

    assert not (tmp_path / "data_key").exists()
    assert load_settings({**environment, "WAITLIST_DATA_KEY": key}, dotenv=None).data_key_text == key


def test_damaged_key_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data_key").write_bytes(b"\xff\xfe")

    with pytest.raises(SettingsError, match="is damaged"):
        load_settings({"WAITLIST_DATABASE_URL": f"sqlite:///{tmp_path}/w.sqlite3"}, dotenv=None)


def words_of(services: Services, what: str) -> tuple[bool, str]:
    (finding,) = [finding for finding in doctor.examine(services) if finding.what == what]
    return finding.is_ok, finding.words


def test_doctor_knows_a_foreign_data_key(services: Services) -> None:
    make_list(services)
    join(services)

    assert words_of(services, "data key") == (True, "the one this database was filled with")
    foreign = set_setting(services, data_key=SecretStr("x" * 32))
    assert not words_of(foreign, "data key")[0]


@pytest.mark.parametrize("command", [("up",), ("drain-outbox",)])
def test_nothing_is_sent_or_served_with_a_foreign_data_key(
    app: Flask, services: Services, sender: FakeSender, command: tuple[str, ...]
) -> None:
    make_list(services)
    join(services)
    app.extensions["waitlist"] = set_setting(services, data_key=SecretStr("x" * 32))

    result = app.test_cli_runner().invoke(args=command)

    assert result.exit_code == 2
    assert "Put the old key back" in result.output
    assert sender.mails == []


def test_doctor_sees_that_the_redis_of_the_rate_limit_does_not_answer(services: Services) -> None:
    assert words_of(services, "rate limit")[0]
    lost = set_setting(services, rate_limit_storage=SecretStr("redis://127.0.0.1:1"))
    assert words_of(lost, "rate limit") == (
        False,
        "its Redis does not answer: each web process counts for itself meanwhile",
    )


@pytest.mark.parametrize(
    ("free", "is_ready", "is_ok"),
    [
        (lambda: LITTLE_ROOM_BYTES, True, True),
        (lambda: LITTLE_ROOM_BYTES - 1, True, False),
        (lambda: NO_ROOM_BYTES, True, False),
        (lambda: NO_ROOM_BYTES - 1, False, False),
        (lambda: None, True, True),
    ],
)
def test_little_room_on_the_disk_is_told_and_none_is_not_ready(
    services: Services, monkeypatch: pytest.MonkeyPatch, free: Callable[[], int | None], is_ready: bool, is_ok: bool
) -> None:
    monkeypatch.setattr(services.store.database, "free_bytes", free)

    found = ledger.readiness(services)

    assert (found.is_ready, not found.problems) == (is_ready, is_ok)
    assert words_of(services, "disk")[0] is is_ok


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_doctor_says_in_a_sentence_that_the_database_is_gone(services: Services) -> None:
    gone = Store("postgresql://nobody@127.0.0.1:1/nothing", lock_wait=1)

    found = {finding.what: finding.is_ok for finding in doctor.examine(replace(services, store=gone))}

    assert found["schema"] is found["database"] is found["data key"] is False
    gone.close()
