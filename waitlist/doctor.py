"""Looks the installation over: settings, schema, database version, mail login.

Sends nothing but a test mail that was asked for. Writes nothing but a probe into the folder of `file:` mail, which it
takes away again; it makes the folder.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from limits.storage import storage_from_string

from waitlist.errors import SchemaMismatch, SettingsError, StorageBusy
from waitlist.ledger import LITTLE_ROOM_BYTES
from waitlist.model import Outcome, OutcomeKind
from waitlist.services import Services
from waitlist.store import run_query
from waitlist.store.engine import is_in_corruption_range
from waitlist.store.migrate import check_schema, newest_revision
from waitlist.store.reports import get_newest_recipient
from waitlist.tokens import cap_hmac, new_id


@dataclass(frozen=True)
class Finding:
    what: str
    is_ok: bool
    words: str


def examine(services: Services) -> list[Finding]:
    return [
        _settings(services),
        _data_key(services),
        _schema(services),
        _database(services),
        _room(services),
        _rate_limit(services),
        _mail(services),
    ]


def check_data_key(services: Services) -> bool:
    """Raises SettingsError for another data key than the database was filled with; False if no mail tells.

    The newest mail was counted under a digest of its address: with the right key it comes out the same.
    """
    newest = run_query(services.store, get_newest_recipient)
    if newest is None:
        return False
    email, hmac = newest
    if cap_hmac(services.settings.data_key_text, email) != hmac:
        raise SettingsError(
            "WAITLIST_DATA_KEY, or the file data_key, is not the key this database was filled with: suppressed addresses"
            " would be written to again. Put the old key back"
        )
    return True


def send_test_mail(services: Services, recipient: str) -> Outcome:
    """Hand one mail to the provider, past the outbox: to see that mail leaves. It holds no link."""
    mail = services.composer.test(recipient, delivery_id=(delivery_id := new_id()), now=services.clock())
    with closing(services.make_sender()) as sender:
        return sender.send(mail, key=delivery_id, deadline_seconds=services.settings.lease_seconds / 2)


def _settings(services: Services) -> Finding:
    settings = services.settings
    mode = "production" if settings.is_production else "this machine only"
    return Finding("settings", True, f"{settings.base_url} ({mode}), mail from {settings.mail_from}")


def _data_key(services: Services) -> Finding:
    try:
        is_proved = check_data_key(services)
    except SettingsError as error:
        return Finding("data key", False, str(error))
    except (SchemaMismatch, StorageBusy) as error:
        return Finding("data key", False, f"cannot be checked: {error}")
    return Finding("data key", True, "the one this database was filled with" if is_proved else "no mail to check it by")


def _rate_limit(services: Services) -> Finding:
    storage = services.settings.rate_limit_storage.get_secret_value()
    if storage.startswith("memory:"):
        return Finding("rate limit", True, "counted in the web server's memory")
    if storage_from_string(storage).check():
        return Finding("rate limit", True, "its Redis answers")
    return Finding("rate limit", False, "its Redis does not answer: each web process counts for itself meanwhile")


def _room(services: Services) -> Finding:
    free = services.store.free_bytes()
    if free is None:
        return Finding("disk", True, "the database server's own")
    return Finding("disk", free >= LITTLE_ROOM_BYTES, f"{free // 1_000_000} MB left for the database")


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
    with closing(services.make_sender()) as sender:
        outcome = sender.check(deadline_seconds=services.settings.lease_seconds / 2)
    return Finding("mail", outcome.kind is OutcomeKind.ACCEPTED, f"{sender.provider}: {outcome.words}".strip())
