"""Who may send what, and the headers on every answer: hosts, origins, sizes, rates, cookies, CSP.

Knows no list and no subscriber; everything here happens before any look-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Response, abort, current_app, request
from flask_limiter import Limiter
from werkzeug.exceptions import Forbidden
from werkzeug.middleware.proxy_fix import ProxyFix

from waitlist.settings import Settings, is_loopback
from waitlist.web.current import services

P = ParamSpec("P")
R = TypeVar("R")

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# An address, a tick and three signed values need less than one of them.
MOST_BODY_BYTES: Final = 64 * 1024
MOST_FORM_PARTS: Final = 32
# A page left open over night still works; the token is bound to the session besides.
CSRF_LIFE_SECONDS: Final = 86_400
YEAR_SECONDS: Final = 31_536_000
# A client address that is none (a proxy's nickname) is a rate-limit key all the same, but not a long one.
MOST_KEY_CHARACTERS: Final = 64
_LIMITER: Final = "waitlist.limiter"
# What counts against a client address: its forms, and what the API refuses it.
ADDRESS_SCOPE: Final = "forms"


def init_app(app: Flask, settings: Settings) -> None:
    is_https = settings.base_url.startswith("https:")
    app.config.update(
        SECRET_KEY=settings.secret_keys[0],
        SECRET_KEY_FALLBACKS=settings.secret_keys[1:],
        # itsdangerous signs with the last key of a list and accepts all; Flask-WTF alone would know no fallbacks.
        WTF_CSRF_SECRET_KEY=settings.secret_keys[::-1],
        WTF_CSRF_TIME_LIMIT=CSRF_LIFE_SECONDS,
        MAX_CONTENT_LENGTH=MOST_BODY_BYTES,
        MAX_FORM_MEMORY_SIZE=MOST_BODY_BYTES,
        MAX_FORM_PARTS=MOST_FORM_PARTS,
        SESSION_COOKIE_NAME="__Host-waitlist" if is_https else "waitlist",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=is_https,
    )
    # No x_host: links come from the base URL alone, and what a visitor says about hosts is checked below.
    if hops := settings.trusted_proxies:
        app.wsgi_app = ProxyFix(app.wsgi_app, x_for=hops, x_proto=hops)  # type: ignore[method-assign]  # WSGI's way
    app.after_request(_add_headers)


def limit_rate(app: Flask, settings: Settings, endpoints: tuple[str, ...]) -> None:
    """One allowance per client over all `endpoints`; raises RateLimitExceeded. Without its storage it counts here."""
    limiter = Limiter(
        client_key,
        app=app,
        storage_uri=settings.rate_limit_storage.get_secret_value(),
        in_memory_fallback_enabled=True,
    )
    app.extensions[_LIMITER] = limiter
    # Any: by its types a limited view may have become asynchronous.
    limited: Any = limiter.shared_limit(settings.rate_limit, scope=ADDRESS_SCOPE)
    for endpoint in endpoints:
        app.view_functions[endpoint] = limited(app.view_functions[endpoint])


def limiter_of(app: Flask) -> Limiter:
    limiter: Limiter = app.extensions[_LIMITER]
    return limiter


def seconds_until_allowed() -> int:
    """For a request that was just refused, by the limiter's own clock."""
    current = limiter_of(current_app).current_limit
    return max(1, int(current.reset_at - time.time())) if current else 1


def client_key() -> str:
    return key_of(request.remote_addr)


def key_of(remote_address: str | None) -> str:
    """The client's address; of IPv6 the /64, since one customer holds that many addresses. Behind a socket that has
    no addresses all count as one, since an empty key would not be limited at all.
    """
    typed = remote_address or "unknown"
    try:
        address = ip_address(typed)
    except ValueError:
        return typed[:MOST_KEY_CHARACTERS]
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), 64), strict=False))


def refuse_foreign_host() -> None:
    """A page under a name that is not ours is a proxy's mistake or a rebinding attack. Loopback is always ours."""
    try:
        host = urlsplit(f"//{request.host}").hostname
    except ValueError:
        abort(400)
    if not is_loopback(host) and host != urlsplit(services().settings.base_url).hostname:
        abort(400)


def same_origin(view: Callable[P, R]) -> Callable[P, R]:
    """Refuse a form that another site sent, and one with files. Absent headers are no refusal: old browsers send none."""

    @wraps(view)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        ours = (services().settings.base_url, request.host_url.rstrip("/"))
        if request.headers.get("Origin", ours[0]) not in ours:
            raise Forbidden
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            raise Forbidden
        if request.files:
            abort(413)
        return view(*args, **kwargs)

    return guarded


def _add_headers(response: Response) -> Response:
    headers = response.headers
    headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "same-origin"
    headers["Cross-Origin-Opener-Policy"] = "same-origin"
    if services().settings.base_url.startswith("https:"):
        headers["Strict-Transport-Security"] = f"max-age={YEAR_SECONDS}"
    if request.endpoint != "static":
        headers.setdefault("Cache-Control", "no-store")
    elif "v" in request.args and response.status_code in (200, 304):
        headers["Cache-Control"] = f"public, max-age={YEAR_SECONDS}, immutable"
    return response
