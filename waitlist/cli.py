"""The owner's commands, all under `flask`. Parse, call one use case, print. Exit codes: 0 done, 1 fault, 2 bad use."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import click
from flask import Flask

from waitlist import ledger, outbox, waitlists
from waitlist.addresses import canonical_address
from waitlist.errors import InvalidAddress, InvalidInput, UnknownList, WaitlistError
from waitlist.model import ListState, Outcome, OutcomeKind
from waitlist.services import Services
from waitlist.settings import ROOT, Settings
from waitlist.store.migrate import check_schema, newest_revision, upgrade
from waitlist.words import moment_in_words

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAULT = 1
EXIT_INTERRUPTED = 130


def init_app(app: Flask, services: Services) -> None:
    for make in (
        _up,
        _upgrade_db,
        _drain_outbox,
        _create_list,
        _open_list,
        _close_list,
        _set_consent,
        _lists,
        _explain,
    ):
        app.cli.add_command(make(services))


def _plainly(command: Callable[P, R]) -> Callable[P, R]:
    """An error of ours becomes one sentence and an exit code: 2 for what was typed, 1 for everything else."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (InvalidAddress, InvalidInput, UnknownList) as error:
            raise click.UsageError(str(error)) from error
        except WaitlistError as error:
            raise click.ClickException(str(error)) from error

    return run


def _up(services: Services) -> click.Command:
    @click.command("up")
    @click.option("--no-worker", is_flag=True, help="Only the web server; the worker runs elsewhere.")
    @_plainly
    def up(no_worker: bool) -> None:
        """Bring the embedded database up to date and run web server and worker together."""
        from honcho.manager import Manager  # starts slowly, and only this command needs it

        check_schema(services.store)
        if waitlists.create_default(services):
            click.echo(f"Made a first list, {waitlists.DEFAULT_LIST}; `flask lists` shows it.")
        settings = services.settings
        click.echo(f"{services.store.version()} at {_where_data_lies(settings)}")
        click.echo(f"Mails: {_where_mail_goes(settings)}")
        click.echo(f"Open {settings.base_url}  (Ctrl-C stops)")
        manager = Manager()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        manager.add_process("web", _web_command(settings), env=environment, cwd=str(ROOT))
        if not no_worker:
            worker = f"exec {sys.executable} -m flask drain-outbox --follow"
            manager.add_process("worker", worker, env=environment, cwd=str(ROOT))
        manager.loop()
        sys.exit(manager.returncode)

    return up


def _web_command(settings: Settings) -> str:
    host, _, port = settings.bind.rpartition(":")
    return (
        f"exec {sys.executable} -m granian --interface wsgi --host {host.strip('[]')} --port {port}"
        f" --workers {settings.web_workers} --blocking-threads {settings.web_threads}"
        " --backpressure 1024 --no-ws --log-level warning app:app"
    )


def _where_data_lies(settings: Settings) -> str:
    return str(settings.database_path) if settings.is_embedded else "the server in WAITLIST_DATABASE_URL"


def _where_mail_goes(settings: Settings) -> str:
    scheme, _, rest = settings.mail_url.get_secret_value().partition(":")
    return f"one .eml file each in {ROOT / rest}" if scheme == "file" else f"by {scheme}"


def _upgrade_db(services: Services) -> click.Command:
    @click.command("upgrade-db")
    @_plainly
    def upgrade_db() -> None:
        """Bring the database to the schema of this version."""
        done = upgrade(services.store)
        click.echo(f"Schema {newest_revision()}: {'upgraded' if done else 'nothing to do'}.")

    return upgrade_db


def _drain_outbox(services: Services) -> click.Command:
    @click.command("drain-outbox")
    @click.option("--follow", is_flag=True, help="Stay, and send each mail as it is queued.")
    @click.option("--limit", type=click.IntRange(1, 10_000_000), help="Make at most so many attempts.")
    @click.option("--batch", type=click.IntRange(1, 1000), default=50, show_default=True, help="Rows claimed at once.")
    @click.option(
        "--connections", type=click.IntRange(1, 32), default=1, show_default=True, help="Connections to the provider."
    )
    @click.option("--json", "as_json", is_flag=True, help="The summary as JSON.")
    @_plainly
    def drain_outbox(follow: bool, limit: int | None, batch: int, connections: int, as_json: bool) -> None:
        """Send the mails that are due. Exit code 1 when a systemic fault stopped it."""
        if follow and limit is not None:
            raise click.UsageError("--limit ends a drain, --follow never ends: use one of them.")
        check_schema(services.store)
        stop = _stop_on_signals()
        if follow:
            outbox.follow_all(_workers(services, connections, batch, stop, lambda _outcome: None))
            return
        with _progress(enabled=sys.stdout.isatty() and not as_json) as on_mail:
            counts = outbox.drain_all(_workers(services, connections, batch, stop, on_mail), limit)
        click.echo(json.dumps(_summary(counts)) if as_json else _summary_line(counts))
        if counts.fault:
            sys.exit(EXIT_FAULT)

    return drain_outbox


def _workers(
    services: Services,
    connections: int,
    batch: int,
    stop: threading.Event,
    on_mail: Callable[[Outcome], None],
) -> list[outbox.Worker]:
    owner = f"{platform.node()}:{os.getpid()}"
    return [
        outbox.Worker(services, services.make_sender(), f"{owner}:{number}", batch, stop, on_mail)
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
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        task = progress.add_task("sending", total=None)
        counts: dict[str, int] = {}

        def on_mail(outcome: Outcome) -> None:
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
            progress.update(task, description=", ".join(f"{count} {kind}" for kind, count in counts.items()))

        yield on_mail


def _summary(counts: outbox.Counts) -> dict[str, Any]:
    by_kind = {kind.value: counts.outcomes[kind] for kind in OutcomeKind}
    return {"attempts": counts.attempts, **by_kind, "fault": counts.fault}


def _summary_line(counts: outbox.Counts) -> str:
    parts = [f"{counts.outcomes[kind]} {kind.replace('_', ' ')}" for kind in OutcomeKind if counts.outcomes[kind]]
    line = ", ".join(parts) if parts else "nothing to send"
    return f"{line}; stopped: {counts.fault}" if counts.fault else line


def _create_list(services: Services) -> click.Command:
    @click.command("create-list")
    @click.argument("list_id", metavar="NAME")
    @click.option("--title", required=True, help="One line; also the mail's subject.")
    @click.option("--description", default="", help="A few sentences under the title.")
    @click.option("--consent", default=waitlists.DEFAULT_CONSENT, show_default=True, help="What a person agrees to.")
    @_plainly
    def create_list(list_id: str, title: str, description: str, consent: str) -> None:
        """Make a new open list, shown at /join/NAME."""
        waitlists.create(services, list_id, title=title, description=description, consent=consent)
        click.echo(f"Made the list {list_id}: {services.settings.base_url}/join/{list_id}")

    return create_list


def _open_list(services: Services) -> click.Command:
    return _state_command(services, "open-list", ListState.OPEN, "Let people join the list (again).")


def _close_list(services: Services) -> click.Command:
    return _state_command(
        services, "close-list", ListState.CLOSED, "Let nobody new join; links already sent still work."
    )


def _state_command(services: Services, name: str, state: ListState, help_text: str) -> click.Command:
    @click.command(name, help=help_text)
    @click.argument("list_id", metavar="NAME")
    @_plainly
    def set_state(list_id: str) -> None:
        waitlists.set_state(services, list_id, state)
        click.echo(f"The list {list_id} is {state}.")

    return set_state


def _set_consent(services: Services) -> click.Command:
    @click.command("set-consent")
    @click.argument("list_id", metavar="NAME")
    @click.argument("text")
    @_plainly
    def set_consent(list_id: str, text: str) -> None:
        """Publish a new consent text; who agreed to an older one stays under that."""
        version = waitlists.publish_consent(services, list_id, text)
        click.echo(f"The list {list_id} asks for consent version {version} from now on.")

    return set_consent


def _lists(services: Services) -> click.Command:
    @click.command("lists")
    @click.option("--json", "as_json", is_flag=True)
    @_plainly
    def lists(as_json: bool) -> None:
        """Show every list with its state and consent version."""
        pages = waitlists.find_all(services)
        if as_json:
            click.echo(json.dumps([asdict(page) for page in pages], ensure_ascii=False))
        elif not pages:
            click.echo("There is no list yet: `flask create-list NAME --title TITLE` makes one.")
        for page in [] if as_json else pages:
            click.echo(
                f"{page.waitlist.id}  {page.waitlist.state}  consent {page.consent.version}  {page.waitlist.title}"
            )

    return lists


def _explain(services: Services) -> click.Command:
    @click.command("explain")
    @click.argument("address")
    @click.option("--json", "as_json", is_flag=True)
    @_plainly
    def explain(address: str, as_json: bool) -> None:
        """Tell everything that happened to ADDRESS, and why."""
        explanation = ledger.explain(services, canonical_address(address))
        if as_json:
            click.echo(json.dumps(asdict(explanation), ensure_ascii=False))
            return
        for line in _explanation_lines(explanation):
            click.echo(line)

    return explain


def _explanation_lines(explanation: ledger.Explanation) -> Iterator[str]:
    yield explanation.email
    if explanation.suppression:
        yield f"  suppressed on every list: {explanation.suppression}"
    if not explanation.standings:
        yield "  is on no list"
    for standing in explanation.standings:
        since = f" (first confirmed {moment_in_words(standing.confirmed_at)})" if standing.confirmed_at else ""
        yield f"  {standing.list_id}: {standing.status}{since}; {standing.next_mail}"
    if explanation.entries:
        yield ""
    for entry in explanation.entries:
        yield f"  {moment_in_words(entry.at)}  {entry.list_id}  {entry.kind} {entry.id}  {entry.words}"
