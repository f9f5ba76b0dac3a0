"""A program that uses the API, by verbs; the counterpart of pages.Visitor."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from waitlist import clients
from waitlist.services import Services

SIGNUPS = "/api/v1/lists/{list_id}/signups"


@dataclass
class Program:
    """An API client with its token. A header of value None is left out; a `body` is sent as it is."""

    client: FlaskClient
    token: str

    @classmethod
    def registered(cls, app: Flask, name: str = "shop") -> Program:
        services: Services = app.extensions["waitlist"]
        return cls(app.test_client(), clients.create(services, name))

    def sign_up(
        self,
        email: Any = "person@example.com",
        *,
        key: str | None = "key-1",
        list_id: str = "launch",
        body: bytes | str | None = None,
        headers: Mapping[str, str | None] | None = None,
        **members: Any,
    ) -> TestResponse:
        sent: dict[str, str | None] = {"Idempotency-Key": key, "Content-Type": "application/json"}
        data = body if body is not None else json.dumps({"email": email, **members})
        return self.call("POST", SIGNUPS.format(list_id=list_id), data=data, headers={**sent, **(headers or {})})

    def status(self, operation_id: str) -> TestResponse:
        return self.call("GET", f"/api/v1/signups/{operation_id}")

    def call(
        self, method: str, path: str, *, headers: Mapping[str, str | None] | None = None, **kwargs: Any
    ) -> TestResponse:
        sent = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        present = {name: value for name, value in sent.items() if value is not None}
        return self.client.open(path, method=method, headers=present, **kwargs)


def new_key() -> str:
    return uuid.uuid4().hex


def problem(response: TestResponse) -> tuple[int, str]:
    """Its status and code, after checking that it is a problem document."""
    assert response.content_type == "application/problem+json", response.text
    document = json.loads(response.text)
    assert document["status"] == response.status_code
    assert {"type", "title", "detail", "retryable"} <= document.keys()
    return response.status_code, document["code"]
