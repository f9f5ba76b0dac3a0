"""Everything that can go wrong, as RFC 9457 problem documents; one code for each thing a client may want to tell apart.

`detail` is a constant sentence: never the address, the key or anything else that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from flask import Blueprint, Flask, Response, g, request
from flask.typing import ResponseReturnValue
from flask_limiter import RateLimitExceeded
from werkzeug.exceptions import HTTPException

from waitlist.errors import KeyReused, OperationInProgress, SchemaMismatch, StorageBusy, UnknownConsent, UnknownList
from waitlist.idempotency import LIST_CLOSED_PROBLEM
from waitlist.web.problems import BUSY_SECONDS, problem_response
from waitlist.web.security import seconds_until_allowed

log: Any = structlog.get_logger("waitlist.api")

PREFIX: Final = "/api/"
# The twin has worked for longer than a lock wait; it ends, or is undone, soon.
IN_PROGRESS_SECONDS: Final = 2


@dataclass(frozen=True)
class Kind:
    status: int
    detail: str
    retryable: bool = False


KINDS: Final = {
    "bad_request": Kind(400, "The request is not well-formed HTTP, or its body did not arrive in full."),
    "host_unknown": Kind(400, "The Host header names another site. Use the origin of this waitlist."),
    "idempotency_key_missing": Kind(400, "Send an Idempotency-Key header: one new key for each new signup."),
    "idempotency_key_malformed": Kind(
        400, "An Idempotency-Key is one header of 1 to 255 of the characters A-Z a-z 0-9 . _ : - (quotes are allowed)."
    ),
    "json_malformed": Kind(
        400, "The body is not strict JSON: UTF-8, no member twice, no NaN, no lone surrogate, no deep nesting."
    ),
    "unauthorized": Kind(401, "Send the header Authorization: Bearer with the token of an API client."),
    "not_found": Kind(404, "There is nothing at this path."),
    "list_unknown": Kind(404, "There is no list by that name."),
    "operation_unknown": Kind(404, "This client has no such operation."),
    "method_not_allowed": Kind(405, "This path does not know that method; the Allow header names those it knows."),
    "idempotency_key_reused": Kind(
        409, "This Idempotency-Key belongs to another request. Use a new key for a new request."
    ),
    "idempotency_in_progress": Kind(
        409, "The first request with this Idempotency-Key is still running. Try again with the same key.", True
    ),
    "list_closed": Kind(409, str(LIST_CLOSED_PROBLEM["detail"])),
    "body_too_large": Kind(413, "The body is larger than 16 KiB."),
    "unsupported_media_type": Kind(415, "Send application/json in UTF-8, without any Content-Encoding."),
    "invalid_members": Kind(422, "The JSON is not a signup; `errors` says what is wrong where."),
    "consent_unknown": Kind(422, "This list has no consent text of that version."),
    "rate_limited": Kind(429, "Too many requests. Wait as long as Retry-After says; the same key is still good.", True),
    "internal_error": Kind(500, "Something went wrong here. Trying again with the same key is safe.", True),
    "storage_busy": Kind(503, "The waitlist is busy just now; nothing was stored. Try again with the same key.", True),
}

# What Flask and Werkzeug themselves refuse.
_BY_STATUS: Final = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}


class Problem(Exception):
    """An answer that is a problem document. `errors` are pairs of a JSON pointer and a sentence."""

    def __init__(self, code: str, *, errors: Sequence[tuple[str, str]] = (), **headers: str) -> None:
        super().__init__(code)
        self.code = code
        self.errors = errors
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def init_app(app: Flask) -> None:
    # A path that leads nowhere has no blueprint, so its error is answered before Flask raises it.
    app.before_request(_refuse_unrouted)


def answer_errors_of(api: Blueprint) -> None:
    """Once for all applications, as a blueprint wants it."""
    handlers: Mapping[type[Exception], Callable[[Any], ResponseReturnValue]] = {
        Problem: answer,
        HTTPException: from_http,
        RateLimitExceeded: lambda _: answer(Problem("rate_limited", Retry_After=str(seconds_until_allowed()))),
        UnknownList: lambda _: answer(Problem("list_unknown")),
        UnknownConsent: lambda _: answer(Problem("consent_unknown", errors=[("#/consent_version", "is not known")])),
        KeyReused: _key_reused,
        OperationInProgress: _in_progress,
        StorageBusy: _busy,
        SchemaMismatch: _busy,
    }
    for error, handler in handlers.items():
        api.register_error_handler(error, handler)


def answer(problem: Problem) -> Response:
    kind = KINDS[problem.code]
    g.problem_code = problem.code
    members: dict[str, object] = {"detail": kind.detail}
    if problem.errors:
        members["errors"] = [{"pointer": pointer, "detail": detail} for pointer, detail in problem.errors]
    return problem_response(kind.status, problem.code, retryable=kind.retryable, headers=problem.headers, **members)


def from_http(error: HTTPException) -> Response:
    status = error.code or 500
    code = _BY_STATUS.get(status, "bad_request" if 400 <= status < 500 else "internal_error")
    response = answer(Problem(code))
    if "Allow" in (headers := error.get_response().headers):
        response.headers["Allow"] = headers["Allow"]
    return response


def _refuse_unrouted() -> Response | None:
    error = request.routing_exception
    if error is None or not request.path.startswith(PREFIX):
        return None
    # A redirect to the same path with fewer slashes: a client that builds such paths should hear of it.
    is_redirect = error.code is not None and error.code < 400
    return answer(Problem("not_found")) if is_redirect else from_http(error)


def _key_reused(error: KeyReused) -> Response:
    stored = error.operation_id
    return answer(Problem("idempotency_key_reused", Operation_State="conflict", Operation_Id=stored))


def _in_progress(_error: OperationInProgress) -> Response:
    wait = str(IN_PROGRESS_SECONDS)
    return answer(Problem("idempotency_in_progress", Operation_State="in_progress", Retry_After=wait))


def _busy(error: StorageBusy | SchemaMismatch) -> Response:
    log.error("not available", error=type(error).__name__, reason=str(error))
    return answer(Problem("storage_busy", Retry_After=str(BUSY_SECONDS)))
