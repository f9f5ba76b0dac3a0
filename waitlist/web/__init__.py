"""The pages, joined into one application: blueprints, security, htmx, error pages and what templates may use."""

from __future__ import annotations

import base64
import hashlib
from email.utils import parseaddr
from functools import cache
from pathlib import Path
from typing import Final

from flask import Flask, url_for

from waitlist import messages
from waitlist.services import Services
from waitlist.web import errors, htmx, security, views
from waitlist.words import duration_in_words

HTMX: Final = "vendor/htmx-2.0.11.min.js"
# Enough of a digest to tell two versions of one file apart.
VERSION_CHARACTERS: Final = 12


def init_app(app: Flask, services: Services) -> None:
    settings = services.settings
    security.init_app(app, settings)
    htmx.init_app(app)
    errors.init_app(app)
    app.register_blueprint(views.pages)
    app.register_blueprint(views.probes)
    security.limit_rate(app, settings, views.LIMITED)
    static = Path(app.static_folder or "")
    app.jinja_env.globals.update(
        messages=messages,
        contact=settings.contact,
        privacy_url=settings.privacy_url,
        site_name=parseaddr(settings.mail_from)[0] or "Waitlist",
        cooldown=duration_in_words(settings.cooldown_seconds),
        lifetime=duration_in_words(settings.token_ttl_seconds),
        htmx=HTMX,
        htmx_config=htmx.HTMX_CONFIG,
        htmx_integrity=_integrity(static, HTMX),
        static_url=lambda name: url_for("static", filename=name, v=_version(static / name)),
    )


@cache
def _version(path: Path) -> str:
    """Changes with the file, so that a browser may keep each version for ever."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:VERSION_CHARACTERS]


def _integrity(static: Path, name: str) -> str:
    """From SHA256SUMS, not from the file: a file that is not what was vendored does not run."""
    folder, _, file = name.rpartition("/")
    for line in (static / folder / "SHA256SUMS").read_text().splitlines():
        digest, _, listed = line.partition("  ")
        if listed == file:
            return "sha256-" + base64.b64encode(bytes.fromhex(digest)).decode()
    raise LookupError(f"{name} is not in SHA256SUMS")
