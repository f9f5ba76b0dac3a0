"""The API against whatever a machine can think of: schemathesis on its OpenAPI document, hypothesis on keys and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import schemathesis
from flask import Flask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig

from tests.factories import make_list
from tests.programs import Program
from waitlist.api.openapi import document
from waitlist.api.problems import Problem
from waitlist.api.reading import parse_json, read_key
from waitlist.services import Services

# The same examples in every run: what fails here fails for everybody.
FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=200)
KEY = re.compile(r'[A-Za-z0-9._:-]{1,255}|"[A-Za-z0-9._:-]{1,255}"')


def lossy(text: str) -> bytes:
    """Lone surrogates too."""
    return text.encode("utf-8", "surrogatepass")


# JSON Schema's "email" holds more than anybody can send mail to, so the addresses that are to be accepted are ours.
schemathesis.openapi.format(
    "email", st.from_regex(r"[a-z0-9]{1,20}(\+[a-z]{1,5})?@[a-z]{1,10}\.example\.com", fullmatch=True)
)


class Target:
    """Stands for the application of the running test: schemathesis makes its tests before there is any."""

    app: Any = None

    def __call__(self, environ: Any, start_response: Any) -> Any:
        return self.app(environ, start_response)


def described() -> dict[str, Any]:
    """The document, for a list that has published one consent text: no schema can say which versions exist."""
    described = document("http://localhost")
    (number, _null) = described["components"]["schemas"]["NewSignup"]["properties"]["consent_version"]["anyOf"]
    number["maximum"] = 1
    return described


TARGET = Target()
schema = schemathesis.openapi.from_dict(
    described(),
    config=SchemathesisConfig.from_dict(
        {
            "parameters": {"path.list": "launch"},
            "generation": {"deterministic": True, "max-examples": 25, "database": "none"},
        }
    ),
)
schema.app = TARGET


@pytest.fixture
def program(app: Flask, services: Services) -> Iterator[Program]:
    make_list(services)
    TARGET.app = app
    yield Program.registered(app)
    TARGET.app = None


@schema.parametrize()
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_schemathesis_finds_nothing(case: Any, program: Program) -> None:
    case.call_and_validate(headers={"Authorization": f"Bearer {program.token}"})


@FIXED
@given(st.one_of(st.text(max_size=300), st.from_regex(KEY), st.from_regex(KEY, fullmatch=True)))
def test_key_is_taken_exactly_if_it_fits_the_grammar(sent: str) -> None:
    with BARE.test_request_context(environ_overrides={"HTTP_IDEMPOTENCY_KEY": sent}):
        if KEY.fullmatch(sent):
            assert read_key() == sent.strip('"')
        else:
            assert refusal(read_key) == "idempotency_key_malformed"


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@FIXED
@given(JSON_VALUES, st.sampled_from([None, 1]), st.booleans())
def test_sound_json_is_read_as_it_was_meant(value: Any, indent: int | None, ensure_ascii: bool) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii).encode("utf-8", "surrogatepass")

    assert parse_json(raw) == value


@FIXED
@given(st.one_of(st.binary(max_size=200), st.text("[]{}\":,\\'aeE019.+-ntfu \n\ud83d\x00", max_size=40).map(lossy)))
def test_any_bytes_are_read_strictly_or_refused(raw: bytes) -> None:
    """What we take, a strict reader takes too, and reads the same."""
    if code := refusal(partial(parse_json, raw)):
        assert code == "json_malformed"
    else:
        assert parse_json(raw) == json.loads(raw.decode("utf-8", "strict"), parse_constant=refuse)


@FIXED
@given(st.integers(1, 3000), st.sampled_from(["[", '{"a":', '[{"a":']), st.booleans())
def test_deep_nesting_is_never_a_surprise(depth: int, opening: str, is_closed: bool) -> None:
    closing = "".join({"[": "]", "{": "}"}[each] for each in reversed(opening) if each in "[{") * depth
    raw = opening * depth + ("1" + closing if is_closed else "")

    code = refusal(partial(parse_json, raw.encode()))

    assert code in ("json_malformed", None)
    assert code is None or not is_closed or depth > 50, "honest nesting is taken"


BARE = Flask(__name__)


def refusal(read: Callable[[], object]) -> str | None:
    try:
        read()
    except Problem as problem:
        return problem.code
    return None


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} was taken")
