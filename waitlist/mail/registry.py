"""Which sender a `WAITLIST_MAIL_URL` names. A new provider is one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from waitlist.errors import SettingsError
from waitlist.mail.base import Sender
from waitlist.mail.console import ConsoleSender
from waitlist.mail.file import FileSender
from waitlist.mail.smtp import SmtpSender
from waitlist.settings import Settings

_FACTORIES: Final[dict[str, Callable[[Settings], Sender]]] = {
    "file": FileSender.from_settings,
    "console": ConsoleSender.from_settings,
    "smtp": SmtpSender.from_settings,
    "smtps": SmtpSender.from_settings,
}


def make_sender(settings: Settings) -> Sender:
    """A new sender; not thread-safe, so each worker thread makes its own. Raises SettingsError."""
    scheme = urlsplit(settings.mail_url.get_secret_value()).scheme
    if scheme not in _FACTORIES:
        raise SettingsError(f"WAITLIST_MAIL_URL: there is no sender for {scheme}: in this version")
    return _FACTORIES[scheme](settings)
