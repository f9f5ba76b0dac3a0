"""The webhook edge: nothing unsigned gets in, everything signed gets in once, and no provider is asked anything."""

from __future__ import annotations

import base64
import hmac
import json
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from werkzeug.test import TestResponse

from tests.factories import FakeClock, FakeSender, make_list
from tests.resend_emulator import SECRET, an_event, signed
from tests.scenes import EMAIL, assert_sound, count, deliveries, drain, everything, join, statuses, subscriber
from waitlist import create_app, ledger, webhooks
from waitlist.errors import StorageBusy
from waitlist.mail import resend
from waitlist.mail.resend import parse_events
from waitlist.model import MOST_DETAIL_CHARACTERS, DeliveryStatus, EventType, SubscriberStatus
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import run_query
from waitlist.store.schema import delivery_events, suppressions

OTHER_SECRET = "whsec_" + base64.b64encode(b"the-secret-of-last-month-32-byte").decode()
ROUTE = "/webhooks/resend"
HARD: dict[str, Any] = {"bounce": {"type": "Permanent", "subType": "General", "message": "mailbox unknown"}}
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(
        update={
            "resend_webhook_secret": Settings(resend_webhook_secret=f"{OTHER_SECRET}, {SECRET}").resend_webhook_secret
        }
    )


@pytest.fixture
def sender() -> FakeSender:
    return FakeSender(provider="resend")


@pytest.fixture(autouse=True)
def delivery_id(services: Services) -> str:
    """Of a mail that was sent; the provider named it fake-1."""
    make_list(services)
    join(services)
    drain(services)
    return deliveries(services)[-1].id


def body_of(name: str, delivery_id: str | None = None, **changes: Any) -> bytes:
    values: dict[str, Any] = {"delivery_id": delivery_id, "message_id": "fake-1", "to": EMAIL} | changes
    return json.dumps(an_event(name, **values)).encode()


def post(client: FlaskClient, clock: FakeClock, body: bytes, headers: dict[str, str] | None = None) -> TestResponse:
    sent = signed(body, at=clock.now) if headers is None else headers
    return client.post(ROUTE, data=body, headers=sent, content_type="application/json")


def counts(**changes: int) -> dict[str, int]:
    return {"applied": 0, "duplicate": 0, "parked": 0, "foreign": 0, "ignored": 0, "bad": 0} | changes


def stored(services: Services) -> list[Any]:
    statement = sa.select(delivery_events).where(delivery_events.c.event_id.is_not(None))
    return list(run_query(services.store, lambda tx: tx.execute(statement).all()))


# What gets in


def test_signed_bounce_is_applied(client: FlaskClient, services: Services, clock: FakeClock, delivery_id: str) -> None:
    answer = post(client, clock, body_of("bounced", delivery_id, **HARD))

    (event,) = stored(services)
    assert (answer.status_code, answer.json) == (200, counts(applied=1))
    assert statuses(services) == [DeliveryStatus.BOUNCED]
    assert (event.event_id, event.provider, event.provider_message_id) == ("msg_1", "resend", "fake-1")
    assert event.detail == "email.bounced Permanent General mailbox unknown"


@pytest.mark.parametrize("secret", [SECRET, OTHER_SECRET])
def test_old_and_new_secret_count_while_they_rotate(
    client: FlaskClient, services: Services, clock: FakeClock, secret: str
) -> None:
    body = body_of("delivered")

    assert post(client, clock, body, signed(body, at=clock.now, secret=secret)).status_code == 200
    assert statuses(services) == [DeliveryStatus.DELIVERED]


def test_one_good_signature_among_several_is_enough(client: FlaskClient, clock: FakeClock) -> None:
    body = body_of("delivered")
    headers = signed(body, at=clock.now)
    headers["svix-signature"] = f"v1,{'A' * 43}= v2,xyz nonsense {headers['svix-signature']} v1a,abc"

    assert post(client, clock, body, headers).status_code == 200


@pytest.mark.parametrize("seconds", [-300, 0, 300])
def test_clocks_may_differ_by_five_minutes(client: FlaskClient, clock: FakeClock, seconds: int) -> None:
    body = body_of("delivered")

    assert post(client, clock, body, signed(body, at=clock.now + seconds)).status_code == 200


def test_event_a_hundred_times_is_stored_once(client: FlaskClient, services: Services, clock: FakeClock) -> None:
    body = body_of("bounced", **HARD)

    answers = [post(client, clock, body) for _ in range(100)]

    assert {answer.status_code for answer in answers} == {200}
    assert sum((Counter(answer.json) for answer in answers), Counter()) == {"applied": 1, "duplicate": 99}
    assert len(stored(services)) == 1


def test_hundred_copies_at_once_are_stored_once(app: Flask, services: Services, clock: FakeClock) -> None:
    body = body_of("complained")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(app.test_client(), clock, body), range(100)))

    assert {answer.status_code for answer in answers} == {200}
    assert sum((Counter(answer.json) for answer in answers), Counter()) == {"applied": 1, "duplicate": 99}
    assert (len(stored(services)), count(services, suppressions)) == (1, 1)
    assert subscriber(services).status is SubscriberStatus.UNSUBSCRIBED
    assert_sound(services)


def test_event_delivered_again_with_a_new_timestamp_is_the_same_event(
    client: FlaskClient, services: Services, clock: FakeClock
) -> None:
    """As after a crash between our commit and our answer."""
    body = body_of("bounced", **HARD)
    post(client, clock, body)
    clock.advance(3600)

    assert post(client, clock, body).json == counts(duplicate=1)
    assert len(stored(services)) == 1


def test_batch_with_one_bad_event_applies_the_others(client: FlaskClient, services: Services, clock: FakeClock) -> None:
    events: list[Any] = [an_event("delivered", delivery_id=None, message_id=f"m{n}", to=EMAIL) for n in range(999)]
    events.insert(500, {"type": "email.bounced", "data": "not an object"})

    with structlog.testing.capture_logs() as lines:
        answer = post(client, clock, json.dumps(events).encode())

    assert (answer.status_code, answer.json) == (200, counts(parked=999, bad=1))
    assert [line["count"] for line in lines if line["event"] == "events_unreadable"] == [1]
    assert len({event.event_id for event in stored(services)}) == 999


@pytest.mark.parametrize(
    "item",
    [None, 7, "x", [], {}, {"type": 7}, {"type": "email.sent"}, {"type": "email.sent", "data": []}]
    + [{"type": "email.sent", "data": {"to": to}} for to in (7, [7], {"email": "a@example.com"})]
    + [{"type": "email.sent", "data": {"to": [], "tags": tags}} for tags in (7, ["x"], [{"name": "delivery_id"}])]
    + [{"type": "email.bounced", "data": {"to": [], "bounce": "x"}}],
)
def test_event_that_cannot_be_read_is_counted_and_not_repeated(
    client: FlaskClient, services: Services, clock: FakeClock, item: Any
) -> None:
    answer = post(client, clock, json.dumps([item]).encode())

    assert (answer.status_code, answer.json) == (200, counts(bad=1))
    assert stored(services) == []


@pytest.mark.parametrize("name", ["contact.created", "domain.updated", "email.received", "email.scheduled", "x"])
def test_event_about_nothing_we_sent_is_ignored(
    client: FlaskClient, services: Services, clock: FakeClock, name: str
) -> None:
    answer = post(client, clock, json.dumps({"type": name, "data": {"id": "x"}}).encode())

    assert (answer.status_code, answer.json) == (200, counts(ignored=1))
    assert stored(services) == []


def test_megabyte_of_diagnostics_is_cut(client: FlaskClient, services: Services, clock: FakeClock) -> None:
    long: dict[str, Any] = {"bounce": {"type": "Permanent", "message": "550 " + "x" * 1_048_576}}

    assert post(client, clock, body_of("bounced", **long)).status_code == 200
    (event,) = stored(services)
    assert len(event.detail) <= MOST_DETAIL_CHARACTERS
    assert statuses(services) == [DeliveryStatus.BOUNCED]


def test_addresses_and_links_in_an_event_are_not_stored(
    client: FlaskClient, services: Services, clock: FakeClock
) -> None:
    words: dict[str, Any] = {
        "bounce": {"type": "Permanent", "message": f"550 <{EMAIL}> unknown, see https://x.example.com/?u=1"}
    }

    post(client, clock, body_of("bounced", **words))

    (event,) = stored(services)
    assert event.detail == "email.bounced Permanent 550 <[address]> unknown, see [link]"
    assert "person" not in repr(event)


def test_opening_tells_that_it_arrived_and_nothing_else(
    client: FlaskClient, services: Services, clock: FakeClock
) -> None:
    click: dict[str, Any] = {
        "click": {"ipAddress": "192.0.2.7", "link": "https://waitlist.example.com/x", "userAgent": "Firefox"}
    }

    post(client, clock, body_of("clicked", **click))

    (event,) = stored(services)
    assert statuses(services) == [DeliveryStatus.DELIVERED]
    assert "192.0.2.7" not in repr(event)
    assert "Firefox" not in repr(event)


# type of the event, what it says, what it is to us
READINGS = [
    ("sent", {}, EventType.SENT),
    ("delivered", {}, EventType.DELIVERED),
    ("opened", {}, EventType.DELIVERED),
    ("delivery_delayed", {}, EventType.DELAYED),
    ("complained", {}, EventType.COMPLAINED),
    ("bounced", HARD, EventType.BOUNCED),
    ("bounced", {}, EventType.BOUNCED),
    ("bounced", {"bounce": {"type": "Permanent", "subType": "Suppressed"}}, EventType.BOUNCED),
    ("bounced", {"bounce": {"type": "Transient", "subType": "MailboxFull"}}, EventType.SOFT_BOUNCED),
    ("bounced", {"bounce": {"type": "Temporary"}}, EventType.SOFT_BOUNCED),
    ("bounced", {"bounce": {"type": "Undetermined"}}, EventType.SOFT_BOUNCED),
    ("failed", {"failed": {"reason": "reached_daily_quota"}}, EventType.BOUNCED),
    ("suppressed", {"suppressed": {"type": "OnAccountSuppressionList"}}, EventType.BOUNCED),
]


@ON_SQLITE
@pytest.mark.parametrize(("name", "says", "kind"), READINGS)
def test_each_type_has_its_meaning(name: str, says: dict[str, Any], kind: EventType) -> None:
    (event,) = parse_events(body_of(name, "0193-a", **says), "msg_1").events

    assert (event.type, event.recipient, event.delivery_id) == (kind, EMAIL, "0193-a")


@ON_SQLITE
def test_tags_are_read_as_object_and_as_list() -> None:
    as_list: dict[str, Any] = {"tags": [{"name": "other", "value": "x"}, {"name": "delivery_id", "value": "0193-a"}]}

    assert [parse_events(body_of("sent", **as_list), "msg_1").events[0].delivery_id] == ["0193-a"]


# What stays out


def tampered(headers: dict[str, str], **changes: str | None) -> dict[str, str]:
    named = {f"svix-{name}": value for name, value in changes.items()}
    return {name: value for name, value in (headers | named).items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "msg_2"},
        {"id": None},
        {"id": ""},
        {"signature": None},
        {"signature": ""},
        {"signature": "v1,"},
        {"signature": "v1"},
        {"signature": ",,,"},
        {"signature": "v1,é"},
        {"signature": "v1,=== v1,\x00"},
        {"signature": "v1," + "A" * 43 + "="},
        {"timestamp": None},
        {"timestamp": ""},
        {"timestamp": "soon"},
        {"timestamp": "-1"},
        {"timestamp": "1" + "0" * 30},
        {"timestamp": "1e9"},
        {"timestamp": "nan"},
        {"timestamp": "１８００００００００"},
    ],
    ids=str,
)
def test_forged_headers_are_refused_and_nothing_is_written(
    client: FlaskClient, services: Services, clock: FakeClock, changes: dict[str, str | None]
) -> None:
    body = body_of("bounced", **HARD)
    before = everything(services)
    headers = {
        name: value.encode().decode("latin-1")
        for name, value in tampered(signed(body, at=clock.now), **changes).items()
    }

    answer = post(client, clock, body, headers)

    assert (answer.status_code, answer.mimetype) == (401, "application/problem+json")
    assert everything(services) == before


@pytest.mark.parametrize("seconds", [-301, 301, -600, 10**9])
def test_signature_too_old_or_from_the_future_is_refused(
    client: FlaskClient, services: Services, clock: FakeClock, seconds: int
) -> None:
    body = body_of("bounced", **HARD)

    assert post(client, clock, body, signed(body, at=clock.now + seconds)).status_code == 401
    assert statuses(services) == [DeliveryStatus.SENT]


def test_body_changed_by_one_space_is_refused(client: FlaskClient, clock: FakeClock) -> None:
    body = body_of("bounced", **HARD)

    assert post(client, clock, body + b" ", signed(body, at=clock.now)).status_code == 401


def test_unknown_key_is_refused(client: FlaskClient, clock: FakeClock) -> None:
    body = body_of("bounced", **HARD)
    stranger = "whsec_" + base64.b64encode(b"x" * 32).decode()

    assert post(client, clock, body, signed(body, at=clock.now, secret=stranger)).status_code == 401


def test_octets_that_are_no_text_are_refused(client: FlaskClient, clock: FakeClock) -> None:
    assert post(client, clock, b"\xff\xfe\x00").status_code == 401


def test_signatures_are_compared_in_constant_time(
    client: FlaskClient, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each candidate under each secret, also after a match, and never by `==`."""
    compared = []

    class Watched:
        @staticmethod
        def compare_digest(one: bytes, other: bytes) -> bool:
            compared.append(other)
            return hmac.compare_digest(one, other)

    monkeypatch.setattr(resend, "hmac", Watched)
    body = body_of("delivered")
    headers = signed(body, at=clock.now)
    headers["svix-signature"] += " v1,AAAA v1,BBBB"

    assert post(client, clock, body, headers).status_code == 200
    assert len(compared) == 2 * 3


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'"\\ud800"x'])
def test_signed_body_that_is_no_json_is_refused(
    client: FlaskClient, services: Services, clock: FakeClock, body: bytes
) -> None:
    answer = post(client, clock, body)

    assert (answer.status_code, answer.mimetype) == (400, "application/problem+json")
    assert stored(services) == []


def test_fifty_megabytes_are_refused(client: FlaskClient, clock: FakeClock) -> None:
    answer = post(client, clock, b"x" * 50_000_000, {})

    assert (answer.status_code, answer.mimetype) == (413, "application/problem+json")


def test_webhook_body_limit_is_the_routes_own(client: FlaskClient) -> None:
    form = {"email": EMAIL, "padding": "x" * 100_000}

    assert client.post("/join/launch", data=form).status_code == 413


@pytest.mark.parametrize("provider", ["smtp", "file", "nobody", "resend%00", "RESEND"])
def test_provider_without_webhooks_is_not_found(client: FlaskClient, provider: str) -> None:
    answer = client.post(f"/webhooks/{provider}", data=b"{}")

    assert (answer.status_code, answer.mimetype) == (404, "application/problem+json")


@pytest.mark.parametrize("secret", [None, "", " , "])
def test_endpoint_without_a_secret_is_closed(settings: Settings, clock: FakeClock, secret: str | None) -> None:
    update = {"resend_webhook_secret": Settings(resend_webhook_secret=secret).resend_webhook_secret}
    app = create_app(settings.model_copy(update=update), clock=clock)

    assert post(app.test_client(), clock, body_of("bounced")).status_code == 404
    app.extensions["waitlist"].store.close()


def test_busy_database_asks_the_provider_to_come_again(
    client: FlaskClient, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: Any) -> None:
        raise StorageBusy

    monkeypatch.setattr(webhooks.delivery_events, "record", busy)

    answer = post(client, clock, body_of("bounced"))

    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
    assert answer.mimetype == "application/problem+json"


def test_refusal_has_a_code_and_says_whether_to_come_again(
    client: FlaskClient, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: Any) -> None:
        raise StorageBusy

    answers = [
        client.post("/webhooks/nobody", data=b"{}"),
        post(client, clock, b"{}", {}),
        post(client, clock, b"{"),
        post(client, clock, b"x" * 3_000_000, {}),
    ]
    monkeypatch.setattr(webhooks.delivery_events, "record", busy)
    answers.append(post(client, clock, body_of("bounced")))

    assert [
        (each["status"], each["code"], each["retryable"]) for each in (answer.json or {} for answer in answers)
    ] == [
        (404, "not_found", False),
        (401, "signature_invalid", False),
        (400, "body_unreadable", False),
        (413, "body_too_large", False),
        (503, "storage_busy", True),
    ]


def test_no_address_in_an_event_is_ever_fetched(
    client: FlaskClient, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Amazon SNS would have us do, and as others would like us to."""
    urls = {
        "Type": "SubscriptionConfirmation",
        "SubscribeURL": "http://169.254.169.254/latest/meta-data",
        "SigningCertURL": "https://sns.eu-west-1.amazonaws.com.evil.example/x.pem",
    }
    reached: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: reached.append(names))
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: reached.append(address))

    body = json.dumps([an_event("bounced", delivery_id=None, message_id="m", to=EMAIL) | urls, urls]).encode()
    answer = client.post(ROUTE, data=body, headers=signed(body, at=clock.now))

    assert (answer.status_code, reached) == (200, [])


def test_script_in_an_event_is_only_text(client: FlaskClient, services: Services, clock: FakeClock) -> None:
    words: dict[str, Any] = {"bounce": {"type": "Permanent", "message": "<script>alert(1)</script>\x1b[2J"}}

    post(client, clock, body_of("bounced", **words))

    (entry,) = [
        entry for entry in ledger.explain(services, EMAIL).entries if entry.what == "bounced" and entry.kind == "event"
    ]
    assert "<script>alert(1)</script> [2J" in entry.words


@ON_SQLITE
@given(
    body=st.binary(max_size=200),
    names=st.dictionaries(
        st.sampled_from(["svix-id", "svix-timestamp", "svix-signature"]),
        st.text(st.characters(max_codepoint=255, exclude_categories=["Cc"]), max_size=60),
    ),
)
@budget(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_refused_without_a_surprise(
    client: FlaskClient, clock: FakeClock, body: bytes, names: dict[str, str]
) -> None:
    assert client.post(ROUTE, data=body, headers=names).status_code == 401


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "data", "to", "tags", "email_id", "bounce", "name", "value"]), inner)
    ),
    max_leaves=12,
)


@ON_SQLITE
@given(value=json_values | st.builds(lambda data: {"type": "email.bounced", "data": data}, json_values))
@budget(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_signed_json_is_answered_with_counts(client: FlaskClient, clock: FakeClock, value: Any) -> None:
    answer = post(client, clock, json.dumps(value).encode())

    assert answer.status_code == 200
    assert answer.json is not None
    assert sum(answer.json.values()) == (len(value) if isinstance(value, list) else 1)


@pytest.fixture(autouse=True)
def _no_cookie(client: FlaskClient) -> Iterator[None]:
    yield
    assert client.get_cookie("session") is None
