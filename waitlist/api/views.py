"""The routes. A view parses, calls one use case and answers; the order of its lines is the order of the refusals."""

from __future__ import annotations

import re
from typing import Final

from flask import Blueprint, Response, g
from werkzeug.exceptions import BadRequest

from waitlist import ledger, signup, waitlists
from waitlist.api.access import authenticate
from waitlist.api.models import ID_PATTERN, NewSignup, SignupStatus
from waitlist.api.openapi import document
from waitlist.api.problems import Problem, answer_errors_of
from waitlist.api.reading import read_json, read_key, validate
from waitlist.idempotency import canonical_json
from waitlist.model import Answer
from waitlist.web.current import services
from waitlist.web.problems import MEDIA_TYPE
from waitlist.web.security import refuse_foreign_host

api: Final = Blueprint("api", __name__, url_prefix="/api/v1")
answer_errors_of(api)

_ID: Final = re.compile(ID_PATTERN)


@api.before_request
def _refuse_foreign_host() -> None:
    try:
        refuse_foreign_host()
    except BadRequest as error:
        raise Problem("host_unknown") from error


@api.post("/lists/<list_id>/signups")
def create_signup(list_id: str) -> Response:
    client = authenticate()
    key = read_key()
    sent = read_json()
    waitlists.find(services(), list_id)
    new = validate(NewSignup, sent)
    answer = signup.sign_up_with_key(
        services(),
        client=client.name,
        key=key,
        list_id=list_id,
        email=new.email,
        consent_version=new.consent_version,
        source=new.source,
        members=new.model_dump(exclude_unset=True),
    )
    return _answer(answer)


@api.get("/signups/<operation_id>")
def show_signup(operation_id: str) -> Response:
    client = authenticate()
    found = ledger.operation(services(), client.name, operation_id) if _ID.fullmatch(operation_id) else None
    if found is None:
        raise Problem("operation_unknown")
    status = SignupStatus.model_validate(found, from_attributes=True)
    return Response(status.model_dump_json(), headers={"Operation-Id": operation_id}, mimetype="application/json")


@api.get("/openapi.json")
def describe() -> Response:
    return Response(canonical_json(document(services().settings.base_url)), mimetype="application/json")


def _answer(answer: Answer) -> Response:
    """Exactly the stored text, so that a replay is the same to the byte."""
    g.answer = answer
    is_accepted = answer.response_code == 202
    response = Response(
        answer.response_body, answer.response_code, mimetype="application/json" if is_accepted else MEDIA_TYPE
    )
    response.headers["Operation-Id"] = answer.operation_id
    response.headers["Operation-State"] = "replayed" if answer.replayed else "new"
    if answer.replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return response
