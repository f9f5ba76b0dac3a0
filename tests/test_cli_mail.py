"""The commands about mail, as an operator types them: exit codes, words, JSON. What the worker does is told elsewhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import Result
from flask import Flask
from pydantic import SecretStr

from tests.factories import FakeClock, FakeSender, make_list
from tests.faults.workers import changed, run
from tests.scenes import EMAIL, begin, deliveries, drain, everything, join, outbox_rows, refused, statuses, token_in
from tests.smtp_server import SmtpServer
from waitlist import confirmation, dispatch, people
from waitlist.errors import StorageUnavailable
from waitlist.model import ConfirmOutcome, DeliveryStatus, Outcome, OutcomeKind, Reason
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Store, run_transaction
from waitlist.store.migrate import newest_revision

SYSTEMIC = Outcome(OutcomeKind.SYSTEMIC, "auth_failed", "wrong password")
TEMPORARY = Outcome(OutcomeKind.TEMPORARY, "smtp_451", "greylisted")


@pytest.fixture(autouse=True)
def _launch(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a list; and the signals of pytest are given back, which the command takes."""
    if "services" in request.fixturenames:
        make_list(request.getfixturevalue("services"))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def flask(app: Flask, *arguments: str) -> Result:
    return app.test_cli_runner().invoke(args=arguments)


def test_drain_sends_what_is_due_and_says_so_in_one_line(app: Flask, services: Services, sender: FakeSender) -> None:
    sender.answer_with(refused(), TEMPORARY)
    for number in range(4):
        join(services, f"p{number}@example.com")

    first, second = flask(app, "drain-outbox"), flask(app, "drain-outbox")

    assert (first.exit_code, first.output) == (0, "2 accepted, 1 temporary, 1 rejected\n")
    assert (second.exit_code, second.output) == (0, "nothing to send\n")


def test_drain_answers_a_machine_in_json(app: Flask, services: Services) -> None:
    join(services)

    result = flask(app, "drain-outbox", "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "attempts": 1,
        "accepted": 1,
        "systemic": 0,
        "temporary": 0,
        "rejected": 0,
        "failed": 0,
        "in_doubt": 0,
        "fault": None,
    }


def test_drain_stopped_by_a_systemic_fault_exits_1_with_the_reason(
    app: Flask, services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    join(services)
    sender.answer_with(SYSTEMIC, SYSTEMIC)

    words = flask(app, "drain-outbox")
    clock.advance(5)
    machine = flask(app, "drain-outbox", "--json")

    assert (words.exit_code, words.output) == (1, "1 systemic; stopped: auth_failed wrong password\n")
    assert machine.exit_code == 1
    assert json.loads(machine.stdout)["fault"] == "auth_failed wrong password"


@pytest.mark.parametrize("limit", ["0", "-1", "abc", str(10**12), "1.5", ""])
def test_drain_with_a_limit_that_is_none_is_bad_use_and_sends_nothing(
    app: Flask, services: Services, sender: FakeSender, limit: str
) -> None:
    join(services)
    before = everything(services)

    result = flask(app, "drain-outbox", "--limit", limit)

    assert result.exit_code == 2
    assert "--limit" in result.output
    assert everything(services) == before
    assert sender.mails == []


@pytest.mark.parametrize(
    "arguments", [("--batch", "0"), ("--connections", "33"), ("--follow", "--limit", "1"), ("--all",), ("now",)]
)
def test_drain_typed_wrongly_is_bad_use_and_sends_nothing(
    app: Flask, services: Services, sender: FakeSender, arguments: tuple[str, ...]
) -> None:
    join(services)

    assert flask(app, "drain-outbox", *arguments).exit_code == 2
    assert sender.mails == []


def test_limit_holds_for_all_connections_together(app: Flask, services: Services, sender: FakeSender) -> None:
    for number in range(6):
        join(services, f"p{number}@example.com")

    result = flask(app, "drain-outbox", "--limit", "4", "--connections", "3", "--batch", "1")

    assert (result.exit_code, result.output) == (0, "4 accepted\n")
    assert len(sender.mails) == 4


def test_drain_says_goodbye_to_the_provider(app: Flask, services: Services, sender: FakeSender) -> None:
    flask(app, "drain-outbox")

    assert sender.is_closed


def test_drain_without_its_database_says_so_and_exits_1(
    app: Flask, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise StorageUnavailable

    monkeypatch.setattr(dispatch, "run_transaction", away)

    result = flask(app, "drain-outbox")

    assert result.exit_code == 1
    assert "cannot write to its database" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("empty_database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("command", ["drain-outbox", "outbox-status"])
def test_command_without_a_schema_names_upgrade_db_and_exits_1(empty_database_url: str, command: str) -> None:
    settings = Settings(database_url=empty_database_url, secret_key="s" * 32, data_key="d" * 32)

    ended = run(settings, command)

    assert ended.code == 1
    assert "run `flask upgrade-db`" in ended.errors
    assert "Traceback" not in ended.errors


def test_drain_on_an_older_schema_names_it_and_claims_nothing(
    app: Flask, services: Services, sender: FakeSender
) -> None:
    join(services)
    set_revision(services, "0000")
    before = everything(services)

    result = flask(app, "drain-outbox")

    assert result.exit_code == 1
    assert "0000" in result.output
    assert everything(services) == before
    assert sender.mails == []


def set_revision(services: Services, revision: str) -> None:
    statement = sa.text("UPDATE alembic_version SET version_num = :revision")
    run_transaction(services.store, lambda tx: tx.execute(statement, {"revision": revision}).rowcount)


@pytest.mark.parametrize(
    ("mail_url", "word"),
    [
        ("smtp://", "needs a host"),
        ("smtp://:587", "needs a host"),
        ("smtp://user:pässword@127.0.0.1", "plain ASCII"),
        ("resend://", "needs the API key"),
        ("carrier-pigeon://roof", "must be file:DIR"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_drain_without_usable_mail_settings_exits_2_before_claiming(
    services: Services, mail_url: str, word: str
) -> None:
    join(services)
    before = everything(services)

    ended = run(changed(services, mail_url=SecretStr(mail_url)), "drain-outbox")

    assert ended.code == 2, ended.errors
    assert "WAITLIST_MAIL_URL" in ended.errors
    assert word in ended.errors
    assert "pässword" not in ended.errors
    assert "Traceback" not in ended.errors
    assert everything(services) == before


def test_outbox_status_shows_an_empty_queue_and_exits_0(app: Flask, services: Services) -> None:
    result = flask(app, "outbox-status")

    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "0 due; 0 wait for their time",
        "0 leased, 0 on the wire, 0 in doubt, 0 dead",
    ]


def test_outbox_status_counts_every_state(app: Flask, services: Services, sender: FakeSender, clock: FakeClock) -> None:
    doubt = Outcome(OutcomeKind.IN_DOUBT, "lost_dot")
    sender.answer_with(refused(), TEMPORARY, doubt)
    for number in range(3):
        join(services, f"early{number}@example.com")
    flask(app, "drain-outbox")
    for number in range(3):
        join(services, f"late{number}@example.com")
    rows = dispatch.claim(services, "other", 2)
    begin(services, rows[0])
    clock.advance(2)

    result = flask(app, "outbox-status", "--json")

    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report == {
        "due": 1,
        "waiting": 2,
        "leased": 1,
        "dispatching": 1,
        "in_doubt": 1,
        "dead": 1,
        "oldest_due_seconds": 2,
        "systemic_fault": None,
        "needs_person": [],
    }


def test_outbox_status_exits_1_while_the_provider_refuses_all(
    app: Flask, services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    sender.answer_with(SYSTEMIC)
    join(services)
    flask(app, "drain-outbox")

    broken = flask(app, "outbox-status")
    clock.advance(5)
    flask(app, "drain-outbox")
    mended = flask(app, "outbox-status")

    assert broken.exit_code == 1
    assert "LOOK: the provider refuses all mail: auth_failed wrong password" in broken.output
    assert (mended.exit_code, "LOOK" in mended.output) == (0, False)


def test_outbox_status_exits_1_while_nobody_sends(app: Flask, services: Services, clock: FakeClock) -> None:
    join(services)
    clock.advance(601)

    result = flask(app, "outbox-status")

    assert result.exit_code == 1
    assert "is a worker running?" in result.output


def test_outbox_status_exits_1_after_a_mail_failed_but_not_after_a_refused_address(
    app: Flask, services: Services, sender: FakeSender
) -> None:
    sender.answer_with(refused())
    join(services)
    flask(app, "drain-outbox")
    assert flask(app, "outbox-status").exit_code == 0

    sender.answer_with(Outcome(OutcomeKind.FAILED, "smtp_554"))
    join(services, "other@example.com")
    flask(app, "drain-outbox")
    assert flask(app, "outbox-status").exit_code == 1


def test_test_mail_leaves_past_the_outbox(app: Flask, services: Services, sender: FakeSender) -> None:
    before = everything(services)

    result = flask(app, "test-mail", " Somebody@Example.com ")

    assert result.exit_code == 0
    assert "The provider took the mail" in result.output
    assert [mail.recipient for mail in sender.mails] == ["somebody@example.com"]
    assert "/confirm/" not in sender.mails[0].text + sender.mails[0].html
    assert sender.is_closed
    assert everything(services) == before


def test_test_mail_that_does_not_leave_exits_1_and_says_why(app: Flask, sender: FakeSender, services: Services) -> None:
    sender.answer_with(SYSTEMIC)

    result = flask(app, "test-mail", EMAIL)

    assert result.exit_code == 1
    assert "The mail did not leave: systemic auth_failed wrong password" in result.output


@pytest.mark.parametrize("command", [("test-mail",), ("resend", "--reason", "asked")])
@pytest.mark.parametrize("address", ["nobody", "a@b@example.com", "a@example.com,b@example.com", ""])
def test_address_that_is_none_is_bad_use(
    app: Flask, services: Services, sender: FakeSender, command: tuple[str, ...], address: str
) -> None:
    result = flask(app, *command, "--", address)

    assert result.exit_code == 2
    assert sender.mails == []


def test_resend_queues_a_new_mail_past_cooldown_and_caps(
    app: Flask, services: Services, sender: FakeSender, clock: FakeClock
) -> None:
    for _ in range(4):
        join(services)
        flask(app, "drain-outbox")
        clock.advance(services.settings.cooldown_seconds)
    assert len(sender.mails) == 3, "capped"

    result = flask(app, "resend", EMAIL, "--reason", "asked by telephone")
    flask(app, "drain-outbox")

    newest = deliveries(services)[-1]
    assert result.exit_code == 0
    assert newest.id in result.output
    assert (newest.reason, newest.status) == (Reason.OPERATOR_RESEND, DeliveryStatus.SENT)
    assert len(sender.mails) == 4
    assert confirmation.confirm(services, token_in(sender.mails[-1])).outcome is ConfirmOutcome.CONFIRMED_NOW


def test_resend_supersedes_a_mail_that_still_waits(app: Flask, services: Services, sender: FakeSender) -> None:
    join(services)

    assert flask(app, "resend", EMAIL, "--reason", "asked").exit_code == 0
    flask(app, "drain-outbox")

    assert statuses(services) == [DeliveryStatus.SUPERSEDED, DeliveryStatus.SENT]
    assert len(sender.mails) == 1


def on_no_list(services: Services) -> None:
    pass


def confirmed(services: Services) -> None:
    sender = FakeSender()
    join(services)
    drain(services, sender)
    confirmation.confirm(services, token_in(sender.mails[0]))


def suppressed(services: Services) -> None:
    join(services)
    people.suppress(services, EMAIL)


def on_the_wire(services: Services) -> None:
    join(services)
    (row,) = dispatch.claim(services, "one", 1)
    begin(services, row)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (on_no_list, "on no list"),
        (confirmed, "confirmed on launch"),
        (suppressed, "Not pending"),
        (on_the_wire, "on its way at this moment"),
    ],
)
def test_resend_refuses_and_says_why(app: Flask, services: Services, prepare: Any, words: str) -> None:
    prepare(services)
    before = everything(services)

    result = flask(app, "resend", EMAIL, "--reason", "asked")

    assert result.exit_code == 2
    assert words in result.output
    assert everything(services) == before


def test_resend_without_a_reason_is_bad_use(app: Flask, services: Services) -> None:
    join(services)

    assert flask(app, "resend", EMAIL).exit_code == 2


@pytest.mark.parametrize("reason", ["", "  ", "\t\n"])
def test_resend_with_a_blank_reason_is_bad_use_and_queues_nothing(app: Flask, services: Services, reason: str) -> None:
    join(services)
    before = everything(services)

    result = flask(app, "resend", EMAIL, "--reason", reason)

    assert result.exit_code == 2
    assert "say why" in result.output
    assert everything(services) == before


def test_explain_says_who_asked_for_a_resend(app: Flask, services: Services) -> None:
    join(services)
    flask(app, "resend", EMAIL, "--reason", "asked by telephone")

    result = flask(app, "explain", EMAIL)

    assert "  form submission: a confirmation mail was queued" in result.output
    assert "submission at the terminal, asked by the owner: asked by telephone: a confirmation mail" in result.output
    assert "mail 2 (operator resend), now queued" in result.output
    assert "_resend" not in result.output


def test_doctor_finds_nothing_wrong_and_changes_nothing(app: Flask, services: Services, sender: FakeSender) -> None:
    before = everything(services)

    words, machine = flask(app, "doctor"), flask(app, "doctor", "--json")

    assert (words.exit_code, machine.exit_code) == (0, 0)
    examined = ["settings", "data key", "schema", "database", "disk", "rate limit", "mail"]
    assert [line.split(":")[0] for line in words.output.splitlines()] == [f"ok    {what}" for what in examined]
    assert [finding["what"] for finding in json.loads(machine.stdout)] == examined
    assert newest_revision() in words.output
    assert sender.mails == []
    assert everything(services) == before


def test_doctor_logs_in_without_sending(app: Flask, services: Services) -> None:
    with SmtpServer(login=("user", "right")) as server:
        good = with_mail_url(app, services, server.url)
        assert flask(good, "doctor").exit_code == 0
        result = flask(with_mail_url(app, services, server.url.replace("right", "wrong")), "doctor")

        assert result.exit_code == 1
        assert "WRONG mail: smtp: auth_failed" in result.output
        assert "wrong@" not in result.output
        assert not any("MAIL" in commands for commands in server.commands)


def with_mail_url(app: Flask, services: Services, url: str) -> Flask:
    from waitlist.mail.registry import make_sender

    settings = services.settings.model_copy(update={"mail_url": SecretStr(url)})
    app.extensions["waitlist"] = replace(services, settings=settings, make_sender=lambda: make_sender(settings))
    return app


def test_doctor_names_an_older_schema(app: Flask, services: Services) -> None:
    set_revision(services, "0000")

    result = flask(app, "doctor")

    assert result.exit_code == 1
    assert "WRONG schema: The database is at schema 0000" in result.output


def test_doctor_warns_of_a_database_that_can_damage_its_own_file(
    app: Flask, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "version", lambda _store: "SQLite 3.45.1")

    result = flask(app, "doctor")

    assert result.exit_code == 1
    assert "WRONG database: SQLite 3.45.1" in result.output


def test_no_command_says_an_address_it_was_not_given(app: Flask, services: Services, sender: FakeSender) -> None:
    sender.answer_with(SYSTEMIC)
    join(services)

    said = [flask(app, *command).output for command in (["drain-outbox"], ["outbox-status"], ["doctor"])]

    assert all(EMAIL not in output and "/confirm/" not in output for output in said)
    assert all(token_in(sender.mails[0]) not in output for output in said)
    assert [row.recipient for row in outbox_rows(services)] == [EMAIL]
