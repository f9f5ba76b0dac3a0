"""Commands about the installation: run it, upgrade it, look after it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from typing import Any, Final

import click

from waitlist import doctor as checks
from waitlist import waitlists
from waitlist.cli.base import EXIT_FAULT, as_json_option, command, echo_json
from waitlist.purge import purge as run_purge
from waitlist.purge import purgeable
from waitlist.settings import ROOT, Settings
from waitlist.store.migrate import check_schema, newest_revision, upgrade
from waitlist.web.current import services

# What honcho reports when somebody told it to stop: that is a clean end.
STOPPED_BY_SIGNAL: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# A request waits for a lock for 5 s at most, a few times; a web worker that needs longer to stop hangs.
WEB_STOP_SECONDS: Final = 20


@command("up")
@click.option("--no-worker", is_flag=True, help="Only the web server; the worker runs elsewhere.")
def up(no_worker: bool) -> None:
    """Bring the embedded database up to date and run web server and worker together."""
    store, settings = services().store, services().settings
    check_schema(store)
    checks.check_data_key(services())
    _refuse_taken_port(settings)
    if waitlists.create_default(services()):
        click.echo(f"Made a first list, {waitlists.DEFAULT_LIST}; `flask lists` shows it.")
    click.echo(f"{store.version()} at {_where_data_lies(settings)}")
    click.echo(f"Mails: {_where_mail_goes(settings)}")
    click.echo(f"Open {settings.base_url}  (Ctrl-C stops)")
    manager = _make_manager(settings)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    manager.add_process("web", _web_command(settings), env=environment, cwd=str(ROOT))
    if not no_worker:
        worker = f"exec {sys.executable} -m flask drain-outbox --follow"
        manager.add_process("worker", worker, env=environment, cwd=str(ROOT))
    manager.loop()
    if manager.returncode not in (0, *STOPPED_BY_SIGNAL):
        raise click.ClickException("The web server or the worker ended by itself; what it wrote above says why.")


@command("upgrade-db")
def upgrade_db() -> None:
    """Bring the database to the schema of this version."""
    done = upgrade(services().store)
    click.echo(f"Schema {newest_revision()}: {'upgraded' if done else 'nothing to do'}.")


@command("doctor")
@as_json_option
def doctor(as_json: bool) -> None:
    """Check settings, database and mail login, without sending anything. Exit code 1 when something is wrong."""
    findings = checks.examine(services())
    if as_json:
        echo_json(findings)
    for finding in [] if as_json else findings:
        click.echo(f"{'ok    ' if finding.is_ok else 'WRONG '}{finding.what}: {finding.words}")
    if not all(finding.is_ok for finding in findings):
        sys.exit(EXIT_FAULT)


@command("purge")
@click.option("--dry-run", is_flag=True, help="Count what would go and remove nothing.")
@as_json_option
def purge(dry_run: bool, as_json: bool) -> None:
    """Remove what is past its retention."""
    counts = purgeable(services()) if dry_run else run_purge(services())
    if as_json:
        echo_json(counts)
        return
    for what, count in counts.items():
        click.echo(f"{count:>9}  {what}{' would go' if dry_run else ''}")


def _make_manager(settings: Settings) -> Any:
    """honcho's, with the patience that a mail on the wire needs, and with an end at once on a second signal."""
    from honcho import manager  # starts slowly, and only this command needs it

    # From the end of one process to the kill of the other. A lease: half of it for the mail on the wire, half to record
    # what came of it; after that the mail is another worker's.
    manager.KILL_WAIT = settings.lease_seconds + WEB_STOP_SECONDS

    class Manager(manager.Manager):  # type: ignore[misc]  # honcho has no types
        def _start(self) -> None:
            """loop() has set its handlers by now, which pass on the first signal only."""
            super()._start()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, partial(self._on_signal, signal.getsignal(number)))

        def _on_signal(self, pass_on: Any, number: int, frame: object) -> None:
            if self.returncode in STOPPED_BY_SIGNAL:
                self.kill()
            else:
                pass_on(number, frame)

    return Manager()


def _refuse_taken_port(settings: Settings) -> None:
    """The web server shares its port between its processes, so it would share it with a stranger, too."""
    host, _, port = settings.bind.rpartition(":")
    address = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        # A connection that has just ended does not hold the port; a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, int(port)))
        except OSError as error:
            raise click.ClickException(
                f"WAITLIST_BIND={settings.bind} cannot be used: {error.strerror}. Is the waitlist running already?"
            ) from error


def _web_command(settings: Settings) -> str:
    host, _, port = settings.bind.rpartition(":")
    # No access log: its lines would hold the tokens of links.
    return (
        f"exec {sys.executable} -m granian --interface asginl --host {host.strip('[]')} --port {port}"
        f" --workers {settings.web_workers} --workers-kill-timeout {WEB_STOP_SECONDS} --backpressure 1024 --http 1 --no-ws"
        " --log-level error --factory waitlist:create_server"
    )


def _where_data_lies(settings: Settings) -> str:
    return str(settings.database_path) if settings.is_embedded else "the server in WAITLIST_DATABASE_URL"


def _where_mail_goes(settings: Settings) -> str:
    scheme, _, rest = settings.mail_url.get_secret_value().partition(":")
    return f"one .eml file each in {ROOT / rest}" if scheme == "file" else f"by {scheme}"
