"""Looks the installation over: settings, schema, database version, mail login. Sends nothing, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from waitlist.errors import SchemaMismatch, StorageBusy
from waitlist.model import OutcomeKind
from waitlist.services import Services
from waitlist.store.engine import is_in_corruption_range
from waitlist.store.migrate import check_schema, newest_revision


@dataclass(frozen=True)
class Finding:
    what: str
    is_ok: bool
    words: str


def examine(services: Services) -> list[Finding]:
    return [_settings(services), _schema(services), _database(services), _mail(services)]


def _settings(services: Services) -> Finding:
    settings = services.settings
    mode = "production" if settings.is_production else "this machine only"
    return Finding("settings", True, f"{settings.base_url} ({mode}), mail from {settings.mail_from}")


def _schema(services: Services) -> Finding:
    try:
        check_schema(services.store)
    except (SchemaMismatch, StorageBusy) as error:
        return Finding("schema", False, str(error))
    return Finding("schema", True, newest_revision())


def _database(services: Services) -> Finding:
    try:
        version = services.store.version()
    except StorageBusy as error:
        return Finding("database", False, str(error))
    if is_in_corruption_range(version):
        return Finding("database", False, f"{version} can corrupt a database in WAL mode; use 3.51.3 or newer")
    return Finding("database", True, version)


def _mail(services: Services) -> Finding:
    sender = services.make_sender()
    try:
        outcome = sender.check(deadline_seconds=services.settings.lease_seconds / 2)
    finally:
        sender.close()
    words = f"{sender.provider}: {outcome.code} {outcome.detail}".strip()
    return Finding("mail", outcome.kind is OutcomeKind.ACCEPTED, words)
