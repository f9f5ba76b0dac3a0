"""The senders without a network, and which sender a setting names."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

import pytest

from tests.test_message import make_mail
from waitlist.mail.console import ConsoleSender
from waitlist.mail.file import FileSender
from waitlist.mail.message import message_bytes
from waitlist.mail.registry import make_sender
from waitlist.model import OutcomeKind
from waitlist.settings import ROOT, Settings


def settings_with(mail_url: str) -> Settings:
    return Settings(mail_url=mail_url)


def test_mail_becomes_one_private_file_named_by_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "mail"

    outcome = FileSender(folder).send(make_mail(), key="0193-a", deadline_seconds=1)

    assert outcome.kind is OutcomeKind.ACCEPTED
    assert [file.name for file in folder.iterdir()] == ["0193-a.eml"]
    assert (folder / "0193-a.eml").read_bytes() == message_bytes(make_mail())
    assert stat.S_IMODE((folder / "0193-a.eml").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_mail_written_twice_is_one_mail(tmp_path: Path) -> None:
    sender = FileSender(tmp_path)

    sender.send(make_mail(), key="a", deadline_seconds=1)
    sender.send(make_mail(), key="a", deadline_seconds=1)

    assert [file.name for file in tmp_path.iterdir()] == ["a.eml"]


def test_mail_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        steps.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def record_rename(source: str, target: Path) -> None:
        assert Path(source).parent == target.parent
        steps.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)

    FileSender(tmp_path).send(make_mail(), key="a", deadline_seconds=1)

    assert steps == ["sync file", "rename", "sync folder"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_disk_fault_is_systemic_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(os, call, fail)

    outcome = FileSender(tmp_path).send(make_mail(), key="a", deadline_seconds=1)

    assert outcome.kind is OutcomeKind.SYSTEMIC
    assert outcome.code == f"file_{errno.errorcode[number].lower()}"
    assert outcome.detail == os.strerror(number)
    assert list(tmp_path.iterdir()) == []


def test_file_system_that_takes_no_files_is_systemic() -> None:
    """A real one: procfs refuses root too."""
    sender = FileSender(Path("/proc/mail"))

    assert sender.send(make_mail(), key="a", deadline_seconds=1).kind is OutcomeKind.SYSTEMIC
    assert sender.check(deadline_seconds=1).kind is OutcomeKind.SYSTEMIC


def test_folder_that_is_a_file_is_systemic(tmp_path: Path) -> None:
    (tmp_path / "mail").write_text("")

    outcome = FileSender(tmp_path / "mail").send(make_mail(), key="a", deadline_seconds=1)

    assert (outcome.kind, outcome.code) == (OutcomeKind.SYSTEMIC, "file_eexist")


def test_check_of_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    assert FileSender(tmp_path).check(deadline_seconds=1).kind is OutcomeKind.ACCEPTED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["../a", "a/b", "", "a.eml", "a\0"])
def test_key_that_names_another_place_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        FileSender(tmp_path).send(make_mail(), key=key, deadline_seconds=1)


def test_console_shows_headers_and_text_whatever_the_terminal_speaks() -> None:
    stream = io.BytesIO()
    mail = make_mail(subject="Zürich", text="Grüße\nhttps://waitlist.example.com/confirm/abc\n")

    outcome = ConsoleSender(stream).send(mail, key="a", deadline_seconds=1)

    shown = stream.getvalue().decode().splitlines()
    assert outcome.kind is OutcomeKind.ACCEPTED
    assert {"To: person@example.com", "Subject: Zürich", "https://waitlist.example.com/confirm/abc"} <= set(shown)
    assert "<p>Hello</p>" not in shown


def test_console_prints_on_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ConsoleSender().send(make_mail(subject="Zürich"), key="a", deadline_seconds=1)

    assert "Subject: Zürich\n".encode() in capfdbinary.readouterr().out


def test_closed_output_is_systemic() -> None:
    stream = io.BytesIO()
    stream.close()

    outcome = ConsoleSender(stream).send(make_mail(), key="a", deadline_seconds=1)

    assert (outcome.kind, outcome.code) == (OutcomeKind.SYSTEMIC, "console_closed")


def test_missing_or_broken_standard_output_is_systemic(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with open(writer, "wb", buffering=0) as broken:
        assert ConsoleSender(broken).send(make_mail(), key="a", deadline_seconds=1).kind is OutcomeKind.SYSTEMIC
    monkeypatch.setattr("sys.stdout", None)
    assert ConsoleSender().send(make_mail(), key="a", deadline_seconds=1).kind is OutcomeKind.SYSTEMIC


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("file:instance/mail", ROOT / "instance/mail"),
        ("file:/var/mail%20box", Path("/var/mail box")),
        ("file:///var/mail", Path("/var/mail")),
    ],
)
def test_file_setting_names_a_folder_below_the_project(url: str, folder: Path) -> None:
    sender = make_sender(settings_with(url))

    assert isinstance(sender, FileSender)
    assert sender.folder == folder


def test_console_setting_names_the_console() -> None:
    assert make_sender(settings_with("console:")).provider == "console"


def test_only_a_provider_that_knows_a_mail_again_claims_a_key_window(tmp_path: Path) -> None:
    assert ConsoleSender().key_window_seconds is None
    assert (FileSender(tmp_path).key_window_seconds or 0) > 90 * 86_400
