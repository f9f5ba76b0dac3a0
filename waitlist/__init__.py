"""The roof: the only place that wires all of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import click
from flask import Flask
from flask.helpers import get_debug_flag

from waitlist.api import init_app as init_api
from waitlist.cli import init_app as init_cli
from waitlist.errors import SettingsError, WaitlistError
from waitlist.logs import configure_logs
from waitlist.mail.base import Sender
from waitlist.mail.compose import Composer
from waitlist.mail.registry import make_sender
from waitlist.metrics import init_app as init_metrics
from waitlist.services import Services
from waitlist.settings import ROOT, Settings, load_settings
from waitlist.store import Store
from waitlist.store.migrate import upgrade_embedded
from waitlist.web import init_app as init_web
from waitlist.web.server import Server
from waitlist.webhooks import init_app as init_webhooks

# What `flask` exits with when its settings cannot be used; other faults at start are 1.
EXIT_SETTINGS = 2


def create_app(
    settings: Settings | None = None, *, sender: Sender | None = None, clock: Callable[[], float] | None = None
) -> Flask:
    """The application. Without `settings` they come from the environment, and a fault in them ends the process with
    a message; `sender` and `clock` (Unix seconds) replace the real ones in tests.
    """
    if settings is not None:
        return _wire(settings, sender, clock)
    try:
        return _wire(load_settings(), sender, clock)
    except WaitlistError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(EXIT_SETTINGS if isinstance(error, SettingsError) else 1) from None


def create_server() -> Server:
    """The application as `flask up` gives it to granian: whole requests only, see `waitlist/web/server.py`."""
    app = create_app()
    services: Services = app.extensions["waitlist"]
    return Server(app, threads=services.settings.web_threads)


def _wire(settings: Settings, sender: Sender | None, clock: Callable[[], float] | None) -> Flask:
    if settings.is_production and get_debug_flag():
        raise SettingsError(f"FLASK_DEBUG shows source code to visitors; turn it off for {settings.base_url}")
    configure_logs()
    store = Store(settings.store_url, clock=clock)
    services = Services(
        settings=settings,
        store=store,
        composer=Composer(settings),
        make_sender=(lambda: sender) if sender else (lambda: make_sender(settings)),
        clock=clock or time.time,
    )
    upgrade_embedded(store)
    app = Flask("waitlist", root_path=str(ROOT), instance_path=str(ROOT / "instance"))
    app.extensions["waitlist"] = services
    init_web(app, services)
    init_api(app, services)
    init_webhooks(app, services)
    init_metrics(app, services)
    init_cli(app)
    return app
