"""Taking data out, erasing a person, copying and checking: what the owner types and what is left then."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import Result
from flask import Flask
from pydantic import SecretStr

from tests.factories import FakeClock, FakeSender, make_list
from tests.scenes import (
    EMAIL,
    count,
    deliveries,
    drain,
    everything,
    join,
    ledger,
    outbox_rows,
    refused,
    set_delivery_status,
    token_in,
)
from waitlist import confirmation, create_app, exports, people
from waitlist.errors import StorageUnavailable
from waitlist.model import ConfirmOutcome, DeliveryStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import run_query, run_transaction
from waitlist.store.integrity import COUPLING
from waitlist.store.schema import (
    delivery_events,
    email_deliveries,
    email_outbox,
    signup_requests,
    subscribers,
    suppressions,
)

ONLY_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
ONLY_POSTGRESQL = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
# Holds a few pages of a database, but no whole one, and no long export.
FULL_AT_BYTES = 8192


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)
    make_list(services, "other")


def flask(app: Flask, *arguments: str) -> Result:
    return app.test_cli_runner().invoke(args=arguments)


def confirmed(services: Services, sender: FakeSender, email: str = EMAIL, list_id: str = "launch") -> None:
    join(services, email, list_id)
    drain(services)
    confirmation.confirm(services, token_in(sender.mails[-1]))


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows past a few kilobytes, which is an error as that of a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class TestExport:
    def test_confirmed_subscribers_of_every_list_with_their_consent(
        self, app: Flask, services: Services, sender: FakeSender, clock: FakeClock
    ) -> None:
        join(services, "pending@example.com")
        confirmed(services, sender, "b@example.com")
        confirmed(services, sender, "a@example.com", "other")

        result = flask(app, "export-subscribers")

        assert result.exit_code == 0
        assert list(csv.DictReader(StringIO(result.stdout))) == [
            {
                "list_id": list_id,
                "email": email,
                "status": "confirmed",
                "consent_version": "1",
                "consent_at": "2027-01-15T08:00:00Z",
                "confirmed_at": "2027-01-15T08:00:00Z",
                "unsubscribed_at": "",
            }
            for list_id, email in (("launch", "b@example.com"), ("other", "a@example.com"))
        ]

    def test_one_list_any_status_as_json_lines(self, app: Flask, services: Services, sender: FakeSender) -> None:
        join(services, "pending@example.com")
        confirmed(services, sender, "a@example.com")
        confirmed(services, sender, "elsewhere@example.com", "other")

        result = flask(app, "export-subscribers", "--list", "launch", "--status", "any", "--json")

        found = [json.loads(line) for line in result.stdout.splitlines()]
        assert [(row["email"], row["status"]) for row in found] == [
            ("a@example.com", "confirmed"),
            ("pending@example.com", "pending"),
        ]

    @pytest.mark.parametrize("many", [1, 2, 3, 4])
    def test_pages_join_without_a_gap_or_a_double(
        self, services: Services, monkeypatch: pytest.MonkeyPatch, many: int
    ) -> None:
        monkeypatch.setattr(exports, "PAGE_ROWS", 2)
        emails = [f"p{number}@example.com" for number in range(many)]
        for email in emails:
            join(services, email)

        assert [row.email for row in exports.export(services, status=None)] == emails

    @pytest.mark.parametrize("email", ["=1+1@example.com", "+a@example.com", "-a@example.com"])
    def test_address_that_looks_like_a_formula_is_text_in_csv_and_itself_in_json(
        self, app: Flask, services: Services, email: str
    ) -> None:
        join(services, email)

        rows = list(csv.DictReader(StringIO(flask(app, "export-subscribers", "--status", "pending").stdout)))
        line = flask(app, "export-subscribers", "--status", "pending", "--json").stdout

        assert rows[0]["email"] == f"'{email}"
        assert json.loads(line)["email"] == email

    def test_file_is_readable_by_the_owner_alone(
        self, app: Flask, services: Services, sender: FakeSender, tmp_path: Path
    ) -> None:
        confirmed(services, sender)
        before = os.umask(0)
        try:
            result = flask(app, "export-subscribers", "--output", str(tmp_path / "out.csv"))
        finally:
            os.umask(before)

        assert result.output == f"1 subscribers in {tmp_path}/out.csv\n"
        assert (tmp_path / "out.csv").read_text().splitlines()[1].startswith(f"launch,{EMAIL},confirmed,1,")
        assert stat.S_IMODE((tmp_path / "out.csv").stat().st_mode) == 0o600

    def test_existing_file_or_folder_stays_as_it_is(self, app: Flask, tmp_path: Path) -> None:
        folder, file = tmp_path / "folder", tmp_path / "file.csv"
        folder.mkdir()
        file.write_text("mine")

        for path in (folder, file, tmp_path / "nowhere" / "file.csv"):
            result = flask(app, "export-subscribers", "--output", str(path))
            assert result.exit_code == 1
            assert "was not written" in result.output
        assert file.read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith((".csv", ".tmp", "folder"))) == [
            "file.csv",
            "folder",
        ]

    def test_full_disk_leaves_no_half_file(self, app: Flask, services: Services, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        folder.mkdir()
        for number in range(FULL_AT_BYTES // 50):
            join(services, f"somebody-{number}@example.com")

        with full_disk():
            result = flask(app, "export-subscribers", "--status", "any", "--output", str(folder / "out.csv"))

        assert (result.exit_code, list(folder.iterdir())) == (1, [])
        assert "was not written: File too large" in result.output

    def test_unknown_list_is_bad_use(self, app: Flask) -> None:
        assert flask(app, "export-subscribers", "--list", "nope").exit_code == 2

    @ONLY_SQLITE
    def test_reader_that_leaves_early_sees_no_traceback(
        self, services: Services, settings: Settings, database_url: str
    ) -> None:
        for number in range(30):
            join(services, f"somebody-{number}@example.com")
        environment = os.environ | {
            "WAITLIST_DATABASE_URL": database_url,
            "WAITLIST_SECRET_KEY": "s" * 32,
            "WAITLIST_DATA_KEY": settings.data_key_text,
        }
        reading, writing = os.pipe()
        os.close(reading)

        done = subprocess.run(
            [sys.executable, "-m", "flask", "export-subscribers", "--status", "any"],
            check=False,
            stdout=writing,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=120,
        )

        os.close(writing)
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr


@ONLY_SQLITE
@pytest.mark.parametrize(
    ("command", "name"), [(("backup",), "waitlist.sqlite3"), (("export-subscribers", "--output"), ".copy.")]
)
def test_what_is_told_to_be_written_is_on_the_disk(
    app: Flask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)

    assert flask(app, *command, str(tmp_path / "copy")).exit_code == 0
    assert any(file.startswith(name) for file in synced)


class TestErase:
    def test_person_is_gone_from_every_list_and_the_ledger_forgets(
        self, app: Flask, services: Services, sender: FakeSender
    ) -> None:
        confirmed(services, sender)
        join(services, list_id="other")
        join(services, "somebody.else@example.com")
        token = token_in(sender.mails[0])

        result = flask(app, "erase-subscriber", " Person@Example.com ")

        assert (result.exit_code, result.output) == (0, "Erased 2 subscribers.\n")
        assert [count(services, table) for table in (subscribers, email_deliveries, email_outbox)] == [1, 1, 1]
        assert count(services, delivery_events) == 0
        known = sa.select(signup_requests.c.decision).where(signup_requests.c.email_hmac.is_not(None))
        assert len(run_query(services.store, lambda tx: tx.execute(known).all())) == 1
        assert len(ledger(services)) == 3, "its rows stay"
        assert "is on no list" in flask(app, "explain", EMAIL).output
        assert confirmation.confirm(services, token).outcome is ConfirmOutcome.NOT_OURS

    def test_unknown_address_is_no_fault(self, app: Flask) -> None:
        assert flask(app, "erase-subscriber", "nobody@example.com").output == "Erased 0 subscribers.\n"
        assert json.loads(flask(app, "erase-subscriber", "nobody@example.com", "--json").output) == {"erased": 0}

    @pytest.mark.parametrize("typed", ["--all", "", "nonsense", "*@example.com x"])
    def test_bad_use_erases_nobody(self, app: Flask, services: Services, typed: str) -> None:
        join(services)
        before = everything(services)

        assert flask(app, "erase-subscriber", typed).exit_code == 2
        assert everything(services) == before

    def test_trapped_and_capped_posts_are_forgotten_too(self, app: Flask, services: Services) -> None:
        people.suppress(services, EMAIL)
        join(services)
        join(services, trapped=True)

        flask(app, "erase-subscriber", EMAIL)

        known = sa.select(sa.func.count(signup_requests.c.email_hmac))
        assert run_query(services.store, lambda tx: tx.execute(known).scalar_one()) == 0
        assert count(services, suppressions) == 1, "the wish not to be written to stays"

    def test_erased_person_may_begin_anew(self, app: Flask, services: Services, sender: FakeSender) -> None:
        confirmed(services, sender)
        flask(app, "erase-subscriber", EMAIL)

        confirmed(services, sender)

        assert [delivery.status for delivery in deliveries(services)] == [DeliveryStatus.SENT]

    @ONLY_SQLITE
    def test_token_of_an_erased_person_lives_on_in_no_file(
        self, app: Flask, services: Services, settings: Settings
    ) -> None:
        join(services)
        token = outbox_rows(services)[0].confirmation_url.rpartition("/")[2].encode()

        flask(app, "erase-subscriber", EMAIL)

        files = settings.database_path.parent.glob(f"{settings.database_path.name}*")
        assert not any(token in file.read_bytes() for file in files)


@ONLY_SQLITE
class TestBackup:
    def test_copy_holds_all_rows_and_the_keys_and_is_private(
        self, app: Flask, services: Services, settings: Settings, tmp_path: Path
    ) -> None:
        join(services)
        (settings.database_path.parent / "data_key").write_text("k" * 64)
        before = os.umask(0)
        try:
            result = flask(app, "backup", str(tmp_path / "copy"))
        finally:
            os.umask(before)

        copy = tmp_path / "copy" / settings.database_path.name
        assert result.output.startswith(f"{tmp_path}/copy holds data_key, {copy.name}. ")
        assert {stat.S_IMODE(path.stat().st_mode) for path in copy.parent.iterdir()} == {0o600}
        assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
        with closing(sqlite3.connect(copy)) as connection:
            assert connection.execute("SELECT email FROM subscribers").fetchall() == [(EMAIL,)]
        restored = create_app(settings.model_copy(update={"database_url": SecretStr(f"sqlite:///{copy}")})).extensions[
            "waitlist"
        ]
        assert everything(restored) == everything(services)

    def test_writers_go_on_while_it_is_made(self, services: Services, tmp_path: Path, app: Flask) -> None:
        join(services)

        def body(tx: Any) -> int:
            tx.execute(sa.delete(email_outbox))
            return flask(app, "backup", str(tmp_path / "copy")).exit_code

        assert run_transaction(services.store, body) == 0
        with closing(sqlite3.connect(next((tmp_path / "copy").glob("*.sqlite3")))) as connection:
            assert connection.execute("SELECT count(*) FROM email_outbox").fetchone() == (1,), "as it stood before"

    def test_queries_still_cannot_write_afterwards(self, app: Flask, services: Services, tmp_path: Path) -> None:
        flask(app, "backup", str(tmp_path / "copy"))

        with pytest.raises(StorageUnavailable):
            run_query(services.store, lambda tx: tx.execute(sa.delete(subscribers)))

    def test_existing_folder_stays_as_it_is(self, app: Flask, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()

        assert flask(app, "backup", str(tmp_path / "mine")).exit_code == 2
        assert list((tmp_path / "mine").iterdir()) == []
        assert flask(app, "backup", str(tmp_path / "nowhere" / "copy")).exit_code == 1

    def test_full_disk_leaves_nothing(self, app: Flask, tmp_path: Path) -> None:
        folder = tmp_path / "disk"
        folder.mkdir()

        with full_disk():
            result = flask(app, "backup", str(folder / "copy"))

        assert (result.exit_code, list(folder.iterdir())) == (1, [])
        assert "was not made" in result.output


@ONLY_POSTGRESQL
def test_backup_of_postgresql_says_what_to_use(app: Flask, tmp_path: Path) -> None:
    result = flask(app, "backup", str(tmp_path / "copy"))

    assert (result.exit_code, (tmp_path / "copy").exists()) == (2, False)
    assert "pg_dump" in result.output


class TestCheckIntegrity:
    def test_sound_data_passes_through_a_whole_life(
        self, app: Flask, services: Services, sender: FakeSender, clock: FakeClock
    ) -> None:
        join(services)
        sender.answer_with(refused())
        drain(services)
        confirmed(services, sender)
        set_delivery_status(services, DeliveryStatus.BOUNCED)
        join(services, "waiting@example.com")

        result = flask(app, "check-integrity")

        assert result.exit_code == 0
        assert "WRONG" not in result.output

    @pytest.mark.parametrize(
        ("law", "damage"),
        [
            (
                "outbox row and mail say different things",
                sa.update(email_deliveries).values(status=DeliveryStatus.SENT, settled_at=1),
            ),
            ("mail to be sent without its outbox row", sa.delete(email_outbox)),
            ("outbox row to be sent without its mail", sa.update(email_outbox).values(message="")),
            (
                "submission that was never decided",
                sa.update(signup_requests).values(state="processing", decision=None),
            ),
            (
                "confirmed subscriber without the mail whose link was used",
                sa.update(subscribers).values(status="confirmed", confirmed_at=1),
            ),
            ("pending token whose mail was never made", sa.update(subscribers).values(confirmation_token_hash="x")),
        ],
    )
    def test_each_broken_law_is_counted_and_exits_1(
        self, app: Flask, services: Services, law: str, damage: sa.Executable
    ) -> None:
        join(services)
        run_transaction(services.store, lambda tx: tx.execute(damage).rowcount)

        result = flask(app, "check-integrity", "--json")

        assert result.exit_code == 1
        assert json.loads(result.output)[law] == 1
        assert f"WRONG         1  {law}" in flask(app, "check-integrity").output

    def test_open_mail_that_is_not_the_newest_is_counted(
        self, app: Flask, services: Services, clock: FakeClock
    ) -> None:
        join(services)
        clock.advance(600)
        join(services)
        older, newer = deliveries(services)

        def body(tx: Any) -> None:
            for delivery, status, at in ((newer, DeliveryStatus.SUPERSEDED, 1), (older, DeliveryStatus.QUEUED, None)):
                this = sa.update(email_deliveries).where(email_deliveries.c.id == delivery.id)
                tx.execute(this.values(status=status, settled_at=at))

        run_transaction(services.store, body)

        counts = json.loads(flask(app, "check-integrity", "--json").output)
        assert counts["mail to be sent that is not the newest"] == 1

    @ONLY_SQLITE
    def test_row_whose_parent_is_gone_is_found(self, app: Flask, services: Services, settings: Settings) -> None:
        join(services)
        with closing(sqlite3.connect(settings.database_path)) as connection:
            connection.execute("DELETE FROM subscribers")  # this program leaves foreign keys off
            connection.commit()

        assert flask(app, "check-integrity").exit_code == 1
        assert services.store.find_damage()

    def test_coupling_is_that_of_the_contract(self) -> None:
        assert {str(row): set(map(str, mails)) for row, mails in COUPLING.items()} == {
            "queued": {"queued"},
            "leased": {"queued"},
            "dispatching": {"sending"},
            "sent": {"sent", "delivered", "bounced", "complained"},
            "dead": {"failed", "rejected"},
            "cancelled": {"superseded"},
        }

    @ONLY_SQLITE
    def test_damage_of_the_file_itself_is_found(self, app: Flask, services: Services, settings: Settings) -> None:
        join(services)
        with closing(sqlite3.connect(settings.database_path)) as connection:
            connection.execute("PRAGMA ignore_check_constraints=ON")
            connection.execute("UPDATE subscribers SET status = 'nonsense'")
            connection.commit()

        result = flask(app, "check-integrity")

        assert result.exit_code == 1
        assert "WRONG         1  damage that the database finds in its own file" in result.output
