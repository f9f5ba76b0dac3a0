"""The Resend sender against an emulator with a real memory of keys: every answer, every way to lose one."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
import structlog
import trustme

from tests.factories import FakeClock, make_list
from tests.resend_emulator import API_KEY, Answer, Fault, Raw, ResendEmulator, Reset, Silence, Slow
from tests.scenes import assert_sound, deliveries, drain, join, services_at, set_setting, statuses
from tests.test_message import make_mail
from waitlist import waitlists
from waitlist.mail.base import Mail
from waitlist.mail.resend import Account, ResendSender, payload
from waitlist.model import DeliveryStatus, Outcome, OutcomeKind
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import run_transaction, schema

ACCEPTED, TEMPORARY, REJECTED, FAILED, SYSTEMIC, IN_DOUBT = (
    OutcomeKind.ACCEPTED,
    OutcomeKind.TEMPORARY,
    OutcomeKind.REJECTED,
    OutcomeKind.FAILED,
    OutcomeKind.SYSTEMIC,
    OutcomeKind.IN_DOUBT,
)
HOUR = 3600
# Far more than loopback needs; only an attempt that is meant to run out of time gets less.
PATIENT_SECONDS = 20.0
IMPATIENT_SECONDS = 0.4


@pytest.fixture
def resend() -> Iterator[ResendEmulator]:
    with ResendEmulator() as emulator:
        yield emulator


def sender_to(emulator: ResendEmulator, tls: ssl.SSLContext | None = None) -> ResendSender:
    settings = Settings(mail_url=emulator.mail_url)
    return ResendSender(Account.from_settings(settings), tls=tls)


def send(
    emulator: ResendEmulator,
    *faults: Fault,
    mail: Mail | None = None,
    key: str = "0193-a",
    deadline_seconds: float = PATIENT_SECONDS,
) -> Outcome:
    if faults:
        emulator.script(*faults)
    return sender_to(emulator).send(mail or make_mail(), key=key, deadline_seconds=deadline_seconds)


# What goes over the wire


def test_request_is_what_resend_documents(resend: ResendEmulator) -> None:
    outcome = send(resend)

    (request,) = resend.requests
    (mail,) = resend.accepted
    assert outcome.kind is ACCEPTED
    assert outcome.provider_message_id == mail.id
    assert (request.method, request.path, request.key) == ("POST", "/emails", "0193-a")
    assert request.headers["authorization"] == f"Bearer {API_KEY}"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("waitlist/")


def test_payload_is_the_frozen_mail_with_one_recipient_and_our_id() -> None:
    mail = make_mail(subject="Zürich")

    fields = json.loads(payload(mail, "0193-a"))

    assert fields.pop("headers") == {name: value for name, value in mail.headers if name not in ("From", "Date")}
    assert fields == {
        "from": dict(mail.headers)["From"],
        "to": ["person@example.com"],
        "subject": "Zürich",
        "text": mail.text,
        "html": mail.html,
        "tags": [{"name": "delivery_id", "value": "0193-a"}],
    }


@pytest.mark.parametrize("recipient", ["a@example.com, b@example.com", "a@example.com\r\nBcc: b@example.com"])
def test_second_recipient_cannot_be_smuggled_in(resend: ResendEmulator, recipient: str) -> None:
    with pytest.raises(ValueError, match="one bare address"):
        send(resend, mail=make_mail(recipient=recipient))

    assert resend.requests == []


def test_same_key_and_mail_is_accepted_once_and_answered_alike(resend: ResendEmulator) -> None:
    outcomes = {send(resend).provider_message_id for _ in range(3)}

    assert outcomes == {resend.accepted[0].id}
    assert resend.accepted_by_key == {"0193-a": 1}
    assert len(resend.bodies_by_key["0193-a"]) == 1


# What an answer means

# status, name, words, what it is
ANSWERS = [
    (400, "invalid_idempotency_key", "The key must be between 1-256 chars.", FAILED),
    (400, "validation_error", "We found an error with one or more fields in the request.", FAILED),
    (400, "validation_error", "API key is invalid", SYSTEMIC),
    (401, "missing_api_key", "Missing API Key", SYSTEMIC),
    (401, "restricted_api_key", "This API key is restricted to only send emails.", SYSTEMIC),
    (401, "validation_error", "API key is invalid", SYSTEMIC),
    (403, "invalid_api_key", "API key is invalid.", SYSTEMIC),
    (403, "validation_error", "The example.com domain is not verified.", SYSTEMIC),
    (403, "", "error code: 1010", SYSTEMIC),
    (404, "not_found", "The requested endpoint does not exist.", SYSTEMIC),
    (405, "method_not_allowed", "Method is not allowed for the requested path.", SYSTEMIC),
    (408, "", "", IN_DOUBT),
    (409, "concurrent_idempotent_requests", "still in progress", IN_DOUBT),
    (409, "invalid_idempotent_request", "used with another payload", ACCEPTED),
    (409, "", "", IN_DOUBT),
    (413, "", "", FAILED),
    (422, "validation_error", "Invalid `to` field. The email address needs to be valid.", REJECTED),
    (422, "validation_error", "Invalid `from` field.", FAILED),
    (422, "missing_required_field", "The request body is missing one or more required fields.", FAILED),
    (422, "invalid_parameter", "The parameter must be a valid UUID.", FAILED),
    (422, "invalid_from_address", "Invalid from field.", SYSTEMIC),
    (422, "invalid_access", 'Access must be "full_access" | "sending_access".', SYSTEMIC),
    (429, "rate_limit_exceeded", "Too many requests.", SYSTEMIC),
    (429, "daily_quota_exceeded", "You have reached your daily email sending quota.", SYSTEMIC),
    (429, "monthly_quota_exceeded", "You have reached your monthly email sending quota.", SYSTEMIC),
    (451, "security_error", "We may have found a security issue with the request.", FAILED),
    (500, "application_error", "An unexpected error occurred.", IN_DOUBT),
    (500, "internal_server_error", "An unexpected error occurred.", IN_DOUBT),
    (502, "", "", IN_DOUBT),
    (503, "service_unavailable", "", IN_DOUBT),
    (301, "", "", SYSTEMIC),
]


@pytest.mark.parametrize(("status", "name", "words", "kind"), ANSWERS)
def test_every_answer_has_its_meaning_after_exactly_one_request(
    resend: ResendEmulator, status: int, name: str, words: str, kind: OutcomeKind
) -> None:
    outcome = send(resend, Answer(status, name, words))

    assert outcome.kind is kind
    assert outcome.code == "_".join(filter(None, ("http", str(status), name)))
    assert (len(resend.requests), resend.connections) == (1, 1)


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7), ("0", 0), ("", None), ("-1", None), ("soon", None), ("1e9", None)]
)
def test_wait_that_a_rate_limit_names_is_passed_on(resend: ResendEmulator, value: str, seconds: int | None) -> None:
    outcome = send(resend, Answer(429, "rate_limit_exceeded", headers={"Retry-After": value}))

    assert outcome.retry_after_seconds == seconds


def test_key_that_was_used_with_another_payload_raises_an_alarm(resend: ResendEmulator) -> None:
    send(resend)
    with structlog.testing.capture_logs() as lines:
        outcome = send(resend, mail=make_mail(subject="another"))

    assert outcome.kind is ACCEPTED
    assert len(resend.accepted) == 1
    assert [(line["event"], line["log_level"], line["delivery_id"]) for line in lines] == [
        ("idempotency_key_taken", "error", "0193-a")
    ]


def test_request_that_meets_its_own_twin_is_in_doubt_and_accepted_once(resend: ResendEmulator) -> None:
    release = threading.Event()
    resend.script(Slow(release))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, resend)
        resend.wait_for_requests(1)
        second = send(resend)
        release.set()
        third = send(resend) if first.result().kind is ACCEPTED else None

    assert (second.kind, second.code) == (IN_DOUBT, "http_409_concurrent_idempotent_requests")
    assert third is not None
    assert third.provider_message_id == first.result().provider_message_id
    assert resend.accepted_by_key == {"0193-a": 1}


PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>"
HALF = b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"id": "49a3'
WITHOUT_ID = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NUMBER = b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"id": 7}'
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000
MANY_HEADERS = b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n"


@pytest.mark.parametrize("answer", [PAGE, HALF, WITHOUT_ID, NUMBER, ENDLESS, MANY_HEADERS, b"", b"220 smtp\r\n", b"\0"])
def test_answer_that_is_no_clear_yes_is_in_doubt(resend: ResendEmulator, answer: bytes) -> None:
    assert send(resend, Raw((answer,), accepts=True)).kind is IN_DOUBT

    assert send(resend).provider_message_id == resend.accepted[0].id
    assert len(resend.accepted) == 1


def test_status_counts_where_the_words_are_lost(resend: ResendEmulator) -> None:
    outcome = send(resend, Raw((b"HTTP/1.1 422 No\r\nContent-Length: 90\r\n\r\n{",)))

    assert outcome.kind is FAILED


# What is lost on the way


@pytest.mark.parametrize("accepts", [True, False])
def test_silence_after_the_request_is_in_doubt_at_the_deadline(resend: ResendEmulator, accepts: bool) -> None:
    started = time.monotonic()

    outcome = send(resend, Silence(accepts=accepts), deadline_seconds=IMPATIENT_SECONDS)

    assert (outcome.kind, outcome.code) == (IN_DOUBT, "timeout_answer")
    assert time.monotonic() - started < PATIENT_SECONDS / 2


def test_server_that_dribbles_does_not_outlive_the_deadline(resend: ResendEmulator) -> None:
    pieces = tuple(bytes([octet]) for octet in b"HTTP/1.1 200 OK\r\n" + b"X-Drop: y\r\n" * 50)
    started = time.monotonic()

    outcome = send(resend, Raw(pieces, pause_seconds=0.05), deadline_seconds=IMPATIENT_SECONDS)

    assert (outcome.kind, outcome.code) == (IN_DOUBT, "timeout_answer")
    assert time.monotonic() - started < PATIENT_SECONDS / 2


@pytest.mark.parametrize("accepts", [True, False])
def test_reset_after_the_request_is_in_doubt(resend: ResendEmulator, accepts: bool) -> None:
    outcome = send(resend, Reset(accepts=accepts))

    assert (outcome.kind, outcome.code) == (IN_DOUBT, "lost_answer")
    assert len(resend.requests) == 1


def test_reset_inside_the_request_is_only_temporary(resend: ResendEmulator) -> None:
    # More than the socket buffers of both sides hold: it cannot all have left.
    mail = make_mail(text="x" * 30_000_000)

    outcome = send(resend, Reset(after="first byte"), mail=mail)

    assert (outcome.kind, outcome.code) == (TEMPORARY, "lost_request")
    assert resend.requests == []


def test_nobody_there_is_systemic(resend: ResendEmulator) -> None:
    with ResendEmulator() as gone:
        sender = sender_to(gone)

    outcome = sender.send(make_mail(), key="0193-a", deadline_seconds=PATIENT_SECONDS)

    assert (outcome.kind, outcome.code) == (SYSTEMIC, "lost_connect")


def test_certificate_is_checked() -> None:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with ResendEmulator(tls=server) as emulator:
        known = sender_to(emulator, trusting).send(make_mail(), key="a", deadline_seconds=PATIENT_SECONDS)
        unknown = sender_to(emulator).send(make_mail(), key="b", deadline_seconds=PATIENT_SECONDS)

    assert known.kind is ACCEPTED
    assert (unknown.kind, unknown.code) == (SYSTEMIC, "lost_tls")
    assert [request.key for request in emulator.requests] == ["a"]


# Its settings


def test_key_keeps_its_case_and_is_never_shown() -> None:
    account = Account.from_settings(Settings(mail_url=f"resend://{API_KEY}"))

    assert account.api_key == API_KEY
    assert account.endpoint.geturl() == "https://api.resend.com"
    assert API_KEY not in repr(account)


def test_details_hold_neither_address_nor_link_nor_key(resend: ResendEmulator) -> None:
    mail = make_mail()
    words = f"Invalid `to` field: {mail.recipient} PERSON%40example.com {API_KEY} {mail.text}"

    outcome = send(resend, Answer(422, "validation_error", words), mail=mail)

    for secret in ("person", API_KEY, "confirm/abc"):
        assert secret not in outcome.detail
    assert "Invalid `to` field" in outcome.detail


def test_check_takes_a_key_that_may_only_send(resend: ResendEmulator) -> None:
    good = sender_to(resend).check(deadline_seconds=PATIENT_SECONDS)
    bad = ResendSender(Account("re_wrong", Account.from_settings(Settings(mail_url=resend.mail_url)).endpoint)).check(
        deadline_seconds=PATIENT_SECONDS
    )

    assert good.kind is ACCEPTED
    assert bad.kind is SYSTEMIC
    assert {request.method for request in resend.requests} == {"GET"}
    assert resend.accepted == []


# Through the worker


@pytest.fixture
def keyed(settings: Settings, clock: FakeClock, resend: ResendEmulator) -> Iterator[Services]:
    """An installation that sends through the emulator, with one list. A lease of 2 s: one attempt may take 1 s."""
    changed = settings.model_copy(update={"mail_url": Settings(mail_url=resend.mail_url).mail_url, "lease_seconds": 2})
    services = services_at(changed, clock)
    make_list(services)
    yield services
    services.store.close()


@pytest.mark.parametrize(
    "fault",
    [
        Silence(accepts=True),
        Silence(accepts=False),
        Reset(accepts=True),
        Reset(accepts=False),
        Answer(500, "application_error", accepts=True),
        Answer(503),
        Answer(409, "concurrent_idempotent_requests", accepts=True),
        Raw((PAGE,), accepts=True),
    ],
    ids=str,
)
def test_doubt_is_asked_again_with_the_same_key_and_bytes_and_accepted_once(
    keyed: Services, resend: ResendEmulator, clock: FakeClock, fault: Fault
) -> None:
    resend.script(fault, fault)
    join(keyed)
    while statuses(keyed) != [DeliveryStatus.SENT]:
        drain(keyed)
        clock.advance(900)

    (delivery,) = deliveries(keyed)
    assert delivery.provider_message_id == resend.accepted[0].id
    assert resend.accepted_by_key == {delivery.id: 1}
    assert {key: len(bodies) for key, bodies in resend.bodies_by_key.items()} == {delivery.id: 1}
    assert len(resend.requests) == delivery.attempts == 3
    assert_sound(keyed)


def test_list_renamed_between_two_tries_sends_the_frozen_bytes(
    keyed: Services, resend: ResendEmulator, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    resend.script(Silence(accepts=True))
    join(keyed)
    drain(keyed)
    clock.advance(900)

    rename(keyed, "Another title")
    monkeypatch.setattr(type(keyed.composer), "confirmation", lambda *_, **__: pytest.fail("rendered again"))
    drain(keyed)

    assert statuses(keyed) == [DeliveryStatus.SENT]
    assert len(resend.accepted) == 1
    assert len({request.body for request in resend.requests}) == 1
    assert resend.accepted[0].fields["subject"] == "Please confirm: Launch"


def rename(services: Services, title: str) -> None:
    statement = sa.update(schema.waitlists).values(title=title)
    run_transaction(services.store, lambda tx: tx.execute(statement).rowcount)
    assert waitlists.find(services, "launch").waitlist.title == title


@pytest.mark.parametrize("away", ["the provider", "the worker"])
def test_mail_is_not_sent_again_once_its_key_may_be_forgotten(
    keyed: Services, resend: ResendEmulator, clock: FakeClock, away: str
) -> None:
    services = set_setting(keyed, token_ttl_seconds=7 * 24 * HOUR)
    resend.script(Silence(accepts=True), *([Answer(503)] * 500 if away == "the provider" else []))
    join(services)
    begun = clock.now
    drain(services)

    while clock.now < begun + 30 * HOUR:
        clock.advance(HOUR / 2)
        if clock.now >= begun + 24 * HOUR:
            resend.forget_keys()
            resend.script()
        if away == "the provider" or clock.now > begun + 24 * HOUR:
            drain(services)

    (delivery,) = deliveries(services)
    assert (delivery.status, delivery.error_code) == (DeliveryStatus.FAILED, "in_doubt")
    assert len(resend.accepted) == 1
    assert_sound(services)


def test_rate_limit_pauses_everybody_and_marks_nobody(keyed: Services, resend: ResendEmulator) -> None:
    resend.script(Answer(429, "rate_limit_exceeded", headers={"Retry-After": "30"}))
    join(keyed)
    join(keyed, "other@example.com")

    counts = drain(keyed)

    assert (counts.attempts, counts.retry_after_seconds) == (1, 30)
    for email in ("person@example.com", "other@example.com"):
        (delivery,) = deliveries(keyed, email)
        assert (delivery.status, delivery.attempts) == (DeliveryStatus.QUEUED, 0)


def test_two_workers_that_share_a_mail_by_mistake_send_it_once(
    keyed: Services, resend: ResendEmulator, clock: FakeClock
) -> None:
    """The first is held up past its lease; its heir asks with the same key."""
    release = threading.Event()
    resend.script(Slow(release))
    join(keyed)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(drain, keyed)
        resend.wait_for_requests(1)
        clock.advance(keyed.settings.lease_seconds)
        drain(keyed)
        release.set()
        first.result()
    clock.advance(900)
    drain(keyed)

    (delivery,) = deliveries(keyed)
    assert delivery.status is DeliveryStatus.SENT
    assert resend.accepted_by_key == {delivery.id: 1}
    assert_sound(keyed)
