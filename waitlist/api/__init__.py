"""The API for programs: the same submission as the form's, with a key that makes a retry harmless.

Knows HTTP, JSON and OpenAPI. What a key promises is kept by the database: see `waitlist.idempotency`.
"""

from __future__ import annotations

from flask import Flask

from waitlist.api import access, problems, trace, views
from waitlist.services import Services


def init_app(app: Flask, services: Services) -> None:
    """After the pages: the clients' limit shares the limiter with theirs."""
    trace.init_app(app)
    problems.init_app(app)
    app.register_blueprint(views.api)
    access.limit_rate(app, services.settings)
