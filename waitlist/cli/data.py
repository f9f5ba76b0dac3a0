"""Commands about the data as a whole: take it out, erase a person, copy it, check it."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import click

from waitlist import backups, erasure, exports, integrity
from waitlist.addresses import canonical_address
from waitlist.cli.base import EXIT_FAULT, as_json_option, command, echo_json
from waitlist.errors import StorageUnavailable
from waitlist.files import new_text_file
from waitlist.model import SubscriberStatus
from waitlist.store.exports import ExportedSubscriber
from waitlist.web.current import services

# A spreadsheet takes a cell that begins with one of these for a formula.
FORMULA_STARTS: Final = ("=", "+", "-", "@")
ANY_STATUS: Final = "any"


@command("export-subscribers")
@click.option("--list", "list_id", metavar="NAME", help="Only this list.")
@click.option(
    "--status",
    type=click.Choice([*(status.value for status in SubscriberStatus), ANY_STATUS]),
    default=SubscriberStatus.CONFIRMED.value,
    show_default=True,
)
@click.option("--output", type=click.Path(path_type=Path), help="A new file, readable by you alone.")
@as_json_option
def export_subscribers(list_id: str | None, status: str, output: Path | None, as_json: bool) -> None:
    """Print subscribers as CSV, or with --json one object a line.

    In CSV an address that a spreadsheet would take for a formula begins with an apostrophe; JSON has it as it is.
    """
    wanted = None if status == ANY_STATUS else SubscriberStatus(status)
    found = exports.export(services(), list_id, wanted)
    write: Callable[[Iterable[ExportedSubscriber], TextIO], int] = _write_json if as_json else _write_csv
    if output is None:
        write(found, sys.stdout)
        return
    try:
        with new_text_file(output) as file:
            count = write(found, file)
    except OSError as error:
        raise click.ClickException(f"{output} was not written: {error.strerror}.") from error
    click.echo(f"{count} subscribers in {output}")


@command("erase-subscriber")
@click.argument("address")
@as_json_option
def erase_subscriber(address: str, as_json: bool) -> None:
    """Erase ADDRESS from every list, with its mails and history. A suppression stays."""
    count = erasure.erase(services(), canonical_address(address))
    if as_json:
        echo_json({"erased": count})
    else:
        click.echo(f"Erased {count} subscriber{'' if count == 1 else 's'}.")


@command("backup")
@click.argument("folder", type=click.Path(path_type=Path))
def backup(folder: Path) -> None:
    """Copy the embedded database and its key files into the new folder FOLDER, while everything runs."""
    try:
        names = backups.backup(services(), folder)
    except OSError as error:
        raise click.ClickException(f"{folder} was not made: {error.strerror}.") from error
    except StorageUnavailable as error:
        # SQLite writes the copy itself, and says of a full disk no more than that.
        raise click.ClickException(f"{folder} was not made: its disk is full, or the database is damaged.") from error
    click.echo(f"{folder} holds {', '.join(names)}. Keep it as safe as the original.")


@command("check-integrity")
@as_json_option
def check_integrity(as_json: bool) -> None:
    """Check that the data keeps the laws of the waitlist. Exit code 1 where it does not."""
    counts = integrity.count_faults(services())
    if as_json:
        echo_json(counts)
    for what, count in [] if as_json else counts.items():
        click.echo(f"{'WRONG' if count else 'ok':<6}{count:>9}  {what}")
    if any(counts.values()):
        sys.exit(EXIT_FAULT)


def _write_csv(found: Iterable[ExportedSubscriber], file: TextIO) -> int:
    writer = csv.DictWriter(file, [field.name for field in fields(ExportedSubscriber)], lineterminator="\n")
    writer.writeheader()
    count = 0
    for row in found:
        values = _readable(row)
        if row.email.startswith(FORMULA_STARTS):
            values["email"] = f"'{row.email}"
        writer.writerow(values)
        count += 1
    return count


def _write_json(found: Iterable[ExportedSubscriber], file: TextIO) -> int:
    count = 0
    for row in found:
        file.write(json.dumps(_readable(row)) + "\n")
        count += 1
    return count


def _readable(row: ExportedSubscriber) -> dict[str, Any]:
    """Times by RFC 3339, in UTC."""
    values = asdict(row)
    for name in ("consent_at", "confirmed_at", "unsubscribed_at"):
        if values[name] is not None:
            values[name] = datetime.fromtimestamp(values[name], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return values
