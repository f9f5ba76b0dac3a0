"""The OpenAPI 3.1 document, made from the types that validate and the problems that are answered. Pure."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from waitlist.api.models import (
    ID_PATTERN,
    AcceptedSignup,
    NewSignup,
    ProblemDocument,
    SignupStatus,
)
from waitlist.api.problems import KINDS
from waitlist.api.reading import KEY_HEADER, KEY_PATTERN
from waitlist.model import SLUG_PATTERN
from waitlist.version import __version__
from waitlist.web.problems import MEDIA_TYPE

_REF: Final = "#/components/schemas/{model}"
_MODELS: Final[tuple[type[BaseModel], ...]] = (NewSignup, AcceptedSignup, SignupStatus, ProblemDocument)

# Whatever is asked for, this may be the answer.
_ANYWHERE: Final = ("bad_request", "host_unknown", "unauthorized", "rate_limited", "internal_error", "storage_busy")
_POST_PROBLEMS: Final = (
    *_ANYWHERE,
    *("idempotency_key_missing", "idempotency_key_malformed", "json_malformed", "list_unknown"),
    *("idempotency_key_reused", "idempotency_in_progress", "list_closed"),
    *("body_too_large", "unsupported_media_type", "invalid_members", "consent_unknown"),
)
_GET_PROBLEMS: Final = (*_ANYWHERE, "operation_unknown")


def document(base_url: str) -> dict[str, Any]:
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Waitlist",
            "version": __version__,
            "description": "Sign people up for a waitlist. A retry with the same Idempotency-Key is always safe.",
        },
        "servers": [{"url": base_url}],
        "security": [{"client": []}],
        "paths": {
            "/api/v1/lists/{list}/signups": {"post": _create_signup()},
            "/api/v1/signups/{operation_id}": {"get": _show_signup()},
            "/api/v1/openapi.json": {"get": _describe()},
        },
        "components": {
            "securitySchemes": {"client": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas["$defs"],
        },
    }


def _create_signup() -> dict[str, Any]:
    accepted = {
        "description": "Accepted; also every replay, with the same bytes.",
        "headers": {
            KEY_HEADER: _header("The key as it was sent.", required=True),
            "Operation-Id": _header("The operation, for the status.", required=True),
            "Operation-State": _header(
                "Whether this is the first answer or the same again.", required=True, enum=["new", "replayed"]
            ),
            "Idempotent-Replayed": _header("On a replay.", enum=["true"]),
        },
        "content": _json(AcceptedSignup),
    }
    key = {
        "name": KEY_HEADER,
        "in": "header",
        "required": True,
        "description": "One new key for each new signup; the same key for every retry of it.",
        "schema": {"type": "string", "pattern": f'^({KEY_PATTERN}|"{KEY_PATTERN}")$'},
    }
    return {
        "operationId": "create_signup",
        "summary": "Sign a person up; a confirmation mail goes out if one is due",
        "parameters": [_in_path("list", SLUG_PATTERN), key],
        "requestBody": {"required": True, "content": _json(NewSignup)},
        "responses": {
            "202": accepted | {"links": {"status": {"operationId": "show_signup", "parameters": _FROM_BODY}}},
            **_problems(_POST_PROBLEMS),
        },
    }


_FROM_BODY: Final = {"operation_id": "$response.body#/operation_id"}


def _show_signup() -> dict[str, Any]:
    found = {
        "description": "What came of the signup.",
        "headers": {"Operation-Id": _header("The operation.", required=True)},
        "content": _json(SignupStatus),
    }
    return {
        "operationId": "show_signup",
        "summary": "What came of a signup of this client",
        "parameters": [_in_path("operation_id", ID_PATTERN)],
        "responses": {"200": found, **_problems(_GET_PROBLEMS)},
    }


def _describe() -> dict[str, Any]:
    found = {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {
        "operationId": "describe",
        "summary": "This document",
        "security": [],
        "responses": {"200": found, **_problems(("bad_request", "host_unknown", "internal_error"))},
    }


def _problems(codes: tuple[str, ...]) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(KINDS[code].status, []).append(code)
    return {str(status): _problem(status, alike) for status, alike in sorted(by_status.items())}


def _problem(status: int, codes: list[str]) -> dict[str, Any]:
    code = {"properties": {"code": {"enum": codes}, "status": {"const": status}}}
    return {
        "description": " ".join(f"`{code}`: {KINDS[code].detail}" for code in codes),
        "headers": _PROBLEM_HEADERS.get(status, {}),
        "content": {MEDIA_TYPE: {"schema": {"allOf": [{"$ref": _REF.format(model="ProblemDocument")}, code]}}},
    }


def _header(description: str, *, required: bool = False, **schema: Any) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": {"type": "string"} | schema}


_RETRY_AFTER: Final = {"description": "Seconds to wait.", "required": True, "schema": {"type": "integer", "minimum": 1}}
_PROBLEM_HEADERS: Final = {
    401: {"WWW-Authenticate": _header("The scheme to use.", required=True, const="Bearer")},
    409: {
        "Operation-State": _header(
            "How this call met the operation.", required=True, enum=["new", "replayed", "conflict", "in_progress"]
        ),
        "Operation-Id": _header("The stored operation, if there is one."),
        "Idempotent-Replayed": _header("On a replay of a stored refusal.", enum=["true"]),
        "Retry-After": _RETRY_AFTER | {"required": False},
    },
    429: {"Retry-After": _RETRY_AFTER},
    503: {"Retry-After": _RETRY_AFTER},
}


def _in_path(name: str, pattern: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{pattern}$"}}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
