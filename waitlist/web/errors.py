"""Errors as calm pages, one handler each; a fragment for htmx. No traceback, no token and no address in any of them."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any, Final

import structlog
from flask import Flask, make_response, request
from flask.typing import ResponseReturnValue
from flask_limiter import RateLimitExceeded
from werkzeug.exceptions import HTTPException

from waitlist import messages
from waitlist.errors import SchemaMismatch, StorageBusy, UnknownList
from waitlist.web.forms import SignupForm
from waitlist.web.htmx import render
from waitlist.web.problems import BUSY_SECONDS
from waitlist.web.security import seconds_until_allowed
from waitlist.words import duration_in_words

log: Any = structlog.get_logger()

MINUTE_SECONDS: Final = 60

OptionalExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def init_app(app: Flask) -> None:
    app.register_error_handler(UnknownList, _unknown_list)
    app.register_error_handler(StorageBusy, _unavailable)
    app.register_error_handler(SchemaMismatch, _unavailable)
    app.register_error_handler(RateLimitExceeded, _too_many)
    app.register_error_handler(HTTPException, _http_error)
    app.log_exception = _log_exception  # type: ignore[method-assign]  # Flask's own writes the path, and so the token


def _unknown_list(_error: UnknownList) -> ResponseReturnValue:
    return _page(404)


def _unavailable(error: StorageBusy | SchemaMismatch) -> ResponseReturnValue:
    log.error("not available", error=type(error).__name__, reason=str(error))
    return _page_to_try_again(503, BUSY_SECONDS)


def _too_many(_error: RateLimitExceeded) -> ResponseReturnValue:
    return _page_to_try_again(429, seconds_until_allowed())


def _http_error(error: HTTPException) -> ResponseReturnValue:
    response = make_response(_page(error.code or 500))
    if "Allow" in (headers := error.get_response().headers):
        response.headers["Allow"] = headers["Allow"]
    return response


def _page(status: int) -> tuple[str, int]:
    heading, text = _words(status)
    return render("error.html", "_fragments/error.html", heading=heading, text=text, can_repeat=False), status


def _page_to_try_again(status: int, wait_seconds: int) -> ResponseReturnValue:
    """The typed text stays, without any look-up: neither a busy database nor a busy visitor should cause one."""
    heading, text = _words(status)
    words = {"heading": heading, "text": text.format(wait=_rounded(wait_seconds))}
    if request.endpoint == "pages.submit":
        form = SignupForm.posted(None)
        body = render("again.html", "_fragments/again.html", form=form, path=request.path, **words)
    else:
        body = render("error.html", "_fragments/error.html", can_repeat=request.method == "POST", **words)
    return body, status, {"Retry-After": str(wait_seconds)}


def _words(status: int) -> tuple[str, str]:
    return messages.ERRORS.get(status) or messages.ERRORS[500 if status >= 500 else 400]


def _rounded(seconds: int) -> str:
    """Whole minutes: nobody counts seconds."""
    return duration_in_words(-(-seconds // MINUTE_SECONDS) * MINUTE_SECONDS)


def _log_exception(exc_info: OptionalExcInfo) -> None:
    """Where it happened and of what kind. Neither message nor path: both may hold an address or a token."""
    error: BaseException | None = exc_info[1]
    while error is not None:
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("unexpected error", error=type(error).__name__, rule=str(request.url_rule), frames=frames)
        error = error.__cause__ or error.__context__
