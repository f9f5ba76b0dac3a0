"""Which sender a `WAITLIST_MAIL_URL` names, and whose events are read. A new provider is one file beside this one,
one line here, and what its URL must hold in `waitlist/settings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from waitlist.mail.base import Sender, Webhook
from waitlist.mail.console import ConsoleSender
from waitlist.mail.file import FileSender
from waitlist.mail.resend import ResendSender, ResendWebhook
from waitlist.mail.smtp import SmtpSender
from waitlist.settings import Settings


@dataclass(frozen=True)
class Provider:
    make_sender: Callable[[Settings], Sender]
    # None: it reports nothing, or not to us.
    webhook: Webhook | None = None


PROVIDERS: Final = {
    "file": Provider(FileSender.from_settings),
    "console": Provider(ConsoleSender.from_settings),
    "smtp": Provider(SmtpSender.from_settings),
    "smtps": Provider(SmtpSender.from_settings),
    "resend": Provider(ResendSender.from_settings, ResendWebhook()),
}


def make_sender(settings: Settings) -> Sender:
    """A new sender; not thread-safe, so each worker thread makes its own. It opens nothing yet."""
    return PROVIDERS[urlsplit(settings.mail_url.get_secret_value()).scheme].make_sender(settings)


def find_webhook(provider: str) -> Webhook | None:
    return PROVIDERS[provider].webhook if provider in PROVIDERS else None
