"""RFC 9457 problem documents: how a refusal reads to a program. What may be refused, and in which words, is told elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from flask import Response

from waitlist.idempotency import canonical_json

MEDIA_TYPE: Final = "application/problem+json"
# A write waits five seconds for its turn before it gives up, so the next try should be a little later.
BUSY_SECONDS: Final = 10


def problem_response(
    status: int, code: str, *, retryable: bool = False, headers: Mapping[str, str] | None = None, **members: object
) -> Response:
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "code": code}
    return Response(canonical_json({**body, "retryable": retryable, **members}), status, headers, mimetype=MEDIA_TYPE)
