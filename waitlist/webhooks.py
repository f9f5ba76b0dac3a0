"""`POST /webhooks/<provider>`: what providers report. Verifies, reads, hands over; decides nothing about a delivery.

The signature over the raw body is the authority, so there is no cookie, no CSRF token and no look-up before it holds.
"""

from __future__ import annotations

from http import HTTPStatus
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

log: Any = structlog.get_logger("waitlist.webhooks")

# A diagnostic may hold a mail server's whole dialogue, about a megabyte; a batch of 1,000 events is about as large.
MOST_BODY_BYTES: Final = 2 * 1024 * 1024
# A write waits five seconds for its turn before it gives up, so the next try should be a little later.
BUSY_SECONDS: Final = 10

# As the API names them (docs/api.md), where it has the same.
_CODES: Final = {
    400: "body_unreadable",
    401: "signature_invalid",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    503: "storage_busy",
}

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
def _refuse(error: HTTPException) -> ResponseReturnValue:
    return _problem(error.code or 500)


@webhooks.errorhandler(StorageBusy)
@webhooks.errorhandler(SchemaMismatch)
def _ask_again(error: StorageBusy | SchemaMismatch) -> ResponseReturnValue:
    """The provider delivers what was not answered with 2xx again."""
    log.error("not available", error=type(error).__name__, reason=str(error))
    response = _problem(503)
    response.headers["Retry-After"] = str(BUSY_SECONDS)
    return response


def _problem(status: int) -> Response:
    """RFC 9457. No detail: a stranger who tries signatures learns nothing from it."""
    code = _CODES.get(status, "bad_request" if status < 500 else "internal_error")
    title = HTTPStatus(status).phrase
    response = jsonify(type="about:blank", title=title, status=status, code=code, retryable=status == 503)
    response.status_code = status
    response.mimetype = "application/problem+json"
    return response
