"""The one way from a request to the services that the roof wired."""

from __future__ import annotations

from flask import current_app

from waitlist.services import Services


def services() -> Services:
    wired: Services = current_app.extensions["waitlist"]
    return wired
