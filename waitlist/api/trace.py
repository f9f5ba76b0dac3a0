"""What every answer of the API carries and leaves behind: its headers and one log line, without address, key or body."""

from __future__ import annotations

import time
from typing import Any, Final

import structlog
from flask import Flask, Response, g, request

from waitlist.api.problems import PREFIX
from waitlist.api.reading import KEY_HEADER, well_formed_key
from waitlist.model import Answer
from waitlist.tokens import key_hmac
from waitlist.web.current import services

log: Any = structlog.get_logger("waitlist.api")

# Enough to find the requests of one key in a log; far too little to find the key.
KEY_PREFIX_DIGITS: Final = 12


def init_app(app: Flask) -> None:
    app.before_request(_begin)
    app.after_request(_finish)


def _begin() -> None:
    g.began_at = time.perf_counter()


def _finish(response: Response) -> Response:
    if not request.path.startswith(PREFIX):
        return response
    key = well_formed_key()
    if key is not None:
        response.headers[KEY_HEADER] = request.headers[KEY_HEADER]
    _log(response, key)
    return response


def _log(response: Response, key: str | None) -> None:
    answer: Answer | None = g.get("answer")
    client = g.get("api_client")
    log.info(
        "api request",
        method=request.method,
        rule=str(request.url_rule),
        status=response.status_code,
        problem=g.get("problem_code"),
        client=client.name if client else None,
        key_prefix=key_hmac(services().settings.data_key_text, key)[:KEY_PREFIX_DIGITS] if key else None,
        operation_id=response.headers.get("Operation-Id"),
        operation_state=response.headers.get("Operation-State"),
        state=answer.state if answer else None,
        decision=answer.decision if answer else None,
        duration_ms=round((time.perf_counter() - g.began_at) * 1000, 1),
    )
