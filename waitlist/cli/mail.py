"""Commands about mail: the worker, the state of its queue, and single mails."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from waitlist import doctor, ledger, outbox, people
from waitlist.addresses import canonical_address
from waitlist.cli.base import EXIT_FAULT, as_json_option, command, echo_json
from waitlist.model import Outcome, OutcomeKind
from waitlist.store.migrate import check_schema
from waitlist.web.current import services
from waitlist.words import about_in_words

EXIT_INTERRUPTED: Final = 130


@command("drain-outbox")
@click.option("--follow", is_flag=True, help="Stay, and send each mail as it is queued.")
@click.option("--limit", type=click.IntRange(1, 10_000_000), help="Make at most so many attempts.")
@click.option("--batch", type=click.IntRange(1, 1000), default=50, show_default=True, help="Rows claimed at once.")
@click.option(
    "--connections", type=click.IntRange(1, 32), default=1, show_default=True, help="Connections to the provider."
)
@as_json_option
def drain_outbox(follow: bool, limit: int | None, batch: int, connections: int, as_json: bool) -> None:
    """Send the mails that are due. Exit code 1 when a systemic fault stopped it."""
    if follow and limit is not None:
        raise click.UsageError("--limit ends a drain, --follow never ends: use one of them.")
    check_schema(services().store)
    doctor.check_data_key(services())
    stop = _stop_on_signals()
    if follow:
        outbox.follow_all(_workers(connections, batch, stop, lambda _outcome: None))
        return
    with _progress(enabled=sys.stdout.isatty() and not as_json) as on_mail:
        counts = outbox.drain_all(_workers(connections, batch, stop, on_mail), limit)
    if as_json:
        echo_json(_summary(counts))
    else:
        click.echo(_summary_line(counts))
    if counts.fault:
        sys.exit(EXIT_FAULT)


@command("outbox-status")
@as_json_option
def outbox_status(as_json: bool) -> None:
    """Show how the queue stands. Exit code 1 when something needs a person."""
    report = ledger.outbox_report(services())
    if as_json:
        echo_json(report)
    for line in [] if as_json else _report_lines(report):
        click.echo(line)
    if report.needs_person:
        sys.exit(EXIT_FAULT)


@command("test-mail")
@click.argument("address")
def test_mail(address: str) -> None:
    """Send one mail to ADDRESS to see that mail leaves. It confirms nothing and is not in the outbox."""
    outcome = doctor.send_test_mail(services(), canonical_address(address))
    words = f"{outcome.kind.replace('_', ' ')} {outcome.words}".strip()
    if outcome.kind is not OutcomeKind.ACCEPTED:
        raise click.ClickException(f"The mail did not leave: {words}")
    click.echo(f"The provider took the mail: {words}")


@command("resend")
@click.argument("address")
@click.option("--reason", required=True, help="Why; it goes into the ledger.")
@click.option("--list", "list_id", metavar="NAME", help="Which list, for somebody pending on several.")
def resend(address: str, reason: str, list_id: str | None) -> None:
    """Queue a new confirmation mail for somebody pending, past cooldown and caps."""
    answer = people.resend(services(), canonical_address(address), reason=reason, list_id=list_id)
    click.echo(f"Queued the mail {answer.job_id}; `flask drain-outbox` sends it.")


def _workers(
    connections: int, batch: int, stop: threading.Event, on_mail: Callable[[Outcome], None]
) -> list[outbox.Worker]:
    owner = f"{platform.node()}:{os.getpid()}"
    return [
        outbox.Worker(services(), services().make_sender(), f"{owner}:{number}", batch, stop, on_mail)
        for number in range(connections)
    ]


def _stop_on_signals() -> threading.Event:
    """SIGTERM or SIGINT: finish what is on the wire, release the rest. Once more: at once; the leases recover it."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return stop


@contextmanager
def _progress(*, enabled: bool) -> Iterator[Callable[[Outcome], None]]:
    if not enabled:
        yield lambda _outcome: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # only a terminal pays for it

    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        task = progress.add_task("sending", total=None)
        counts = outbox.Counts()

        def on_mail(outcome: Outcome) -> None:
            counts.outcomes[outcome.kind] += 1
            progress.update(task, description=_summary_line(counts))

        yield on_mail


def _summary(counts: outbox.Counts) -> dict[str, Any]:
    by_kind = {kind.value: counts.outcomes[kind] for kind in OutcomeKind}
    return {"attempts": counts.attempts, **by_kind, "fault": counts.fault}


def _summary_line(counts: outbox.Counts) -> str:
    parts = [f"{counts.outcomes[kind]} {kind.replace('_', ' ')}" for kind in OutcomeKind if counts.outcomes[kind]]
    line = ", ".join(parts) if parts else "nothing to send"
    return f"{line}; stopped: {counts.fault}" if counts.fault else line


def _report_lines(report: ledger.OutboxReport) -> Iterator[str]:
    oldest = f", the oldest for {about_in_words(report.oldest_due_seconds)}" if report.oldest_due_seconds else ""
    yield f"{report.due} due{oldest}; {report.waiting} wait for their time"
    yield f"{report.leased} leased, {report.dispatching} on the wire, {report.in_doubt} in doubt, {report.dead} dead"
    yield from (f"LOOK: {why}" for why in report.needs_person)
