"""Delivery -> Mail: renders the templates in templates/mail/ once, before the transaction. Knows no table and no socket."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import escape

from waitlist.mail.base import Mail
from waitlist.model import Waitlist
from waitlist.settings import ROOT, Settings
from waitlist.tokens import LinkPurpose, sign_link
from waitlist.words import duration_in_words

CONFIRMATION: Final = "confirmation"
_TEMPLATES: Final = ROOT / "templates" / "mail"


class Composer:
    """Makes confirmation mails. Every link's origin is the setting's, never a request's (promise 9)."""

    def __init__(self, settings: Settings, templates: Path = _TEMPLATES) -> None:
        self._settings = settings
        self._environment = Environment(
            loader=FileSystemLoader(templates),
            autoescape=select_autoescape(["html"]),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )

    def confirmation_url(self, token: str) -> str:
        return f"{self._settings.base_url}/confirm/{token}"

    def confirmation(self, waitlist: Waitlist, recipient: str, *, delivery_id: str, token: str, now: float) -> Mail:
        """The complete mail that asks `recipient` to confirm. `now` (Unix seconds) becomes its Date for every try."""
        settings = self._settings
        unsubscribe_url = self._signed_url(LinkPurpose.UNSUBSCRIBE, delivery_id)
        words = {
            "waitlist": waitlist,
            "confirmation_url": self.confirmation_url(token),
            "unsubscribe_url": unsubscribe_url,
            "not_me_url": self._signed_url(LinkPurpose.NOT_ME, delivery_id),
            "lifetime": duration_in_words(settings.token_ttl_seconds),
            "site": settings.base_url,
            "contact": settings.contact,
            "privacy_url": settings.privacy_url,
        }
        return Mail(
            recipient=recipient,
            subject=f"Please confirm: {waitlist.title}",
            text=self._environment.get_template(f"{CONFIRMATION}.txt").render(words),
            html=self._environment.get_template(f"{CONFIRMATION}.html").render(words),
            headers=(
                *self._headers(delivery_id, now),
                # RFC 8058: one click, by the mailbox provider's own button.
                ("List-Unsubscribe", f"<{unsubscribe_url}>"),
                ("List-Unsubscribe-Post", "List-Unsubscribe=One-Click"),
            ),
        )

    def test(self, recipient: str, *, delivery_id: str, now: float) -> Mail:
        """The mail of `flask test-mail`: it asks for nothing."""
        text = f"This is a test mail of the waitlist at {self._settings.base_url}. Mail leaves as it should.\n"
        return Mail(
            recipient=recipient,
            subject="Test mail of the waitlist",
            text=text,
            html=f'<!DOCTYPE html>\n<html lang="en"><body><p>{escape(text)}</p></body></html>\n',
            headers=self._headers(delivery_id, now),
        )

    def _headers(self, delivery_id: str, now: float) -> tuple[tuple[str, str], ...]:
        domain = self._settings.mail_address.rpartition("@")[2]
        return (
            ("From", self._settings.mail_from),
            ("Date", format_datetime(datetime.fromtimestamp(now, UTC))),
            ("Message-ID", f"<{delivery_id}@{domain}>"),
            # RFC 3834: no vacation answer, please.
            ("Auto-Submitted", "auto-generated"),
        )

    def _signed_url(self, purpose: LinkPurpose, delivery_id: str) -> str:
        token = sign_link(self._settings.data_key_text, purpose, delivery_id)
        return f"{self._settings.base_url}/{purpose}/{token}"
