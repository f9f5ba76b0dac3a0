"""`POST /webhooks/<provider>`: what providers report. Verifies, reads, hands over; decides nothing about a delivery.

The signature over the raw body is the authority, so there is no cookie, no CSRF token and no look-up before it holds.
"""

from __future__ import annotations

from typing import Any, Final

import structlog
from flask import Blueprint, Flask, Response, abort, jsonify, request
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException

from waitlist import delivery_events
from waitlist.delivery_events import Fate
from waitlist.errors import SchemaMismatch, StorageBusy
from waitlist.mail.base import ParsedEvents
from waitlist.mail.registry import find_webhook
from waitlist.services import Services
from waitlist.web.current import services
from waitlist.web.problems import BUSY_SECONDS, problem_response

log: Any = structlog.get_logger("waitlist.webhooks")

# A diagnostic may hold a mail server's whole dialogue, about a megabyte; a batch of 1,000 events is about as large.
MOST_BODY_BYTES: Final = 2 * 1024 * 1024

# As the API names them (docs/api.md), where it has the same.
_CODES: Final = {400: "body_unreadable", 401: "signature_invalid", 404: "not_found", 413: "body_too_large"}

webhooks: Final = Blueprint("webhooks", __name__)


def init_app(app: Flask, _services: Services) -> None:
    app.register_blueprint(webhooks)


@webhooks.post("/webhooks/<provider>")
def receive(provider: str) -> ResponseReturnValue:
    webhook = find_webhook(provider)
    secrets = webhook.secrets(services().settings) if webhook else ()
    if webhook is None or not secrets:
        abort(404)
    request.max_content_length = MOST_BODY_BYTES
    body = request.get_data(cache=False)
    headers = {name.lower(): value for name, value in request.headers}
    message_id = webhook.verify(headers, body, secrets, services().clock())
    if message_id is None:
        log.warning("webhook_refused", provider=provider)
        abort(401)
    try:
        parsed = webhook.parse(body, message_id)
    except ValueError:
        log.error("webhook_unreadable", provider=provider, message_id=message_id)
        abort(400)
    return jsonify(_record(provider, parsed, message_id))


def _record(provider: str, parsed: ParsedEvents, message_id: str) -> dict[str, int]:
    """What cannot be read holds up nothing: it would be as unreadable the next time."""
    if parsed.bad:
        log.error("events_unreadable", provider=provider, message_id=message_id, count=parsed.bad)
    fates = delivery_events.record(services(), provider, parsed.events)
    return {**{fate.value: fates[fate] for fate in Fate}, "ignored": parsed.ignored, "bad": parsed.bad}


@webhooks.errorhandler(HTTPException)
def _refuse(error: HTTPException) -> Response:
    """No detail: a stranger who tries signatures learns nothing from it."""
    status = error.code or 500
    return problem_response(status, _CODES.get(status, "bad_request" if status < 500 else "internal_error"))


@webhooks.errorhandler(StorageBusy)
@webhooks.errorhandler(SchemaMismatch)
def _ask_again(error: StorageBusy | SchemaMismatch) -> Response:
    """The provider delivers what was not answered with 2xx again."""
    log.error("not available", error=type(error).__name__, reason=str(error))
    return problem_response(503, "storage_busy", retryable=True, headers={"Retry-After": str(BUSY_SECONDS)})
