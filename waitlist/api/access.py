"""Who may call: a bearer token per API client, and a rate limit per client in place of the one per address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from flask import Flask, current_app, g, request

from waitlist import clients
from waitlist.api.problems import Problem
from waitlist.model import ApiClient
from waitlist.settings import Settings
from waitlist.web.current import services
from waitlist.web.security import ADDRESS_SCOPE, limiter_of

_LIMITS: Final = "waitlist.api_limits"


@dataclass(frozen=True)
class Limits:
    """Each raises RateLimitExceeded."""

    count_call: Callable[[], None]
    count_failure: Callable[[], None]


def limit_rate(app: Flask, settings: Settings) -> None:
    limiter = limiter_of(app)
    # Any: by its types a limited function may have become asynchronous.
    by_client: Any = limiter.shared_limit(settings.api_rate_limit, scope="api", key_func=lambda: g.api_client.name)
    # Guessing tokens uses up the allowance that the address has for forms.
    by_address: Any = limiter.shared_limit(settings.rate_limit, scope=ADDRESS_SCOPE)
    app.extensions[_LIMITS] = Limits(by_client(_count_call), by_address(_count_failure))


def authenticate() -> ApiClient:
    """The client that calls. Raises Problem (401) and RateLimitExceeded."""
    limits: Limits = current_app.extensions[_LIMITS]
    client = clients.authenticate(services(), token) if (token := bearer_token()) else None
    if client is None:
        limits.count_failure()
        raise Problem("unauthorized", WWW_Authenticate="Bearer")
    g.api_client = client
    limits.count_call()
    return client


def bearer_token() -> str | None:
    sent = request.authorization
    return sent.token if sent is not None and sent.type == "bearer" else None


# The limiter knows what to count by the name of a function; there is nothing else for these to do.
def _count_call() -> None: ...


def _count_failure() -> None: ...
