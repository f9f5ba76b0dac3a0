"""What a request says: its key and its JSON, strictly. Refuses whatever two parsers could read in two ways."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from flask import request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from waitlist.api.problems import Problem

Model = TypeVar("Model", bound=BaseModel)

KEY_HEADER: Final = "Idempotency-Key"
KEY_PATTERN: Final = "[A-Za-z0-9._:-]{1,255}"
# The quotes of a structured-field string (RFC 9651, 3.3.3) are not part of the key.
_KEY: Final = re.compile(f'(?P<quote>"?)(?P<key>{KEY_PATTERN})(?P=quote)')
# An address of 320 characters, escaped, and a source of 100 need less than a fifth of it.
MOST_BODY_BYTES: Final = 16 * 1024
# How pydantic's words about the body as a whole read to the writer of a client.
_WHOLE_BODY: Final = {
    "model_type": "must be a JSON object",
    # Without its name, which may be anything, an address too.
    "extra_forbidden": "has a member that is not known; an unknown one is never ignored",
}


def well_formed_key() -> str | None:
    """The key of this request, without quotes; None if there is none or it is malformed. Two headers arrive as one,
    joined by a comma, which is in no key.
    """
    found = _KEY.fullmatch(request.headers.get(KEY_HEADER, ""))
    return found["key"] if found else None


def read_key() -> str:
    """Raises Problem."""
    if KEY_HEADER not in request.headers:
        raise Problem("idempotency_key_missing")
    key = well_formed_key()
    if key is None:
        raise Problem("idempotency_key_malformed")
    return key


def read_json() -> object:
    """Raises Problem."""
    is_json = request.mimetype == "application/json" and not request.mimetype_params.keys() - {"charset"}
    is_utf8 = request.mimetype_params.get("charset", "utf-8").lower() == "utf-8"
    if not is_json or not is_utf8 or "Content-Encoding" in request.headers:
        raise Problem("unsupported_media_type")
    raw = _read_at_most(MOST_BODY_BYTES + 1)
    if len(raw) > MOST_BODY_BYTES:
        raise Problem("json_malformed" if _nests_too_deep(raw) else "body_too_large")
    return parse_json(raw)


def parse_json(raw: bytes) -> object:
    """Raises Problem. The first parser is strict in all but one thing, a member that stands twice; the second, which
    would overflow the stack on deep nesting and take NaN, lone surrogates and UTF-16, sees only what the first passed.
    """
    try:
        from_json(raw, allow_inf_nan=False)
        return json.loads(raw.decode(), object_pairs_hook=_without_twins)
    except ValueError as error:
        raise Problem("json_malformed") from error


def validate(model: type[Model], sent: object) -> Model:
    """Raises Problem that names every fault by its place, and repeats nothing that was sent."""
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        faults = error.errors(include_input=False, include_url=False, include_context=False)
        raise Problem("invalid_members", errors=_faults(faults)) from error


def _faults(faults: Sequence[Any]) -> list[tuple[str, str]]:
    found = [
        ("#", words) if (words := _WHOLE_BODY.get(fault["type"])) else (f"#/{fault['loc'][0]}", fault["msg"])
        for fault in faults
    ]
    return list(dict.fromkeys(found))


def _read_at_most(size: int) -> bytes:
    """Whatever the rest of the body is, it is never read."""
    request.max_content_length = sys.maxsize  # the pages' limit would refuse before we see how the body begins
    raw = b""
    while len(raw) < size and (part := request.stream.read(size - len(raw))):
        raw += part
    return raw


def _nests_too_deep(beginning: bytes) -> bool:
    """A thousand brackets are malformed however many follow, and the client has a bug rather than a large body."""
    try:
        from_json(beginning, allow_partial=True)
    except ValueError as error:
        return "recursion limit" in str(error)
    return False


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a member stands twice")
    return members
