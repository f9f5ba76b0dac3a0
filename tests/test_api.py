"""The API: what a key promises, what is refused and how, and that an answer gives nothing away."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import psycopg
import pytest
from flask import Flask
from flask.testing import FlaskClient
from structlog.testing import capture_logs

from tests.factories import START, FakeClock, FakeSender, make_list
from tests.processes import run_at_once
from tests.programs import SIGNUPS, Program, new_key, problem
from tests.scenes import (
    EMAIL,
    assert_sound,
    count,
    deliveries,
    drain,
    erase,
    everything,
    join,
    ledger,
    set_setting,
    subscriber,
    token_in,
)
from waitlist import clients, confirmation, create_app, idempotency, signup, waitlists
from waitlist.api.models import AcceptedSignup
from waitlist.api.problems import KINDS
from waitlist.errors import Restart, StorageBusy
from waitlist.model import Channel, KeyClaim, ListState, Submission, Suppression
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Store, Transaction, run_transaction
from waitlist.store.schema import email_deliveries, email_outbox, signup_requests, subscribers
from waitlist.store.signup_requests import insert_request
from waitlist.tokens import address_hmac, cap_hmac, new_id

PROCESSES = 8
DAY = 86_400
RETENTION = 3 * DAY
# What the corpus allows for an answer to nonsense; counted in CPU time, since the machine may be busy with others.
PATIENCE_SECONDS = 0.25
SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
POSTGRESQL = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


@pytest.fixture
def shop(app: Flask) -> Program:
    return Program.registered(app)


def rows(services: Services) -> dict[str, int]:
    tables = (subscribers, email_deliveries, email_outbox, signup_requests)
    return {table.name: count(services, table) for table in tables}


NOTHING = {"subscribers": 0, "email_deliveries": 0, "email_outbox": 0, "signup_requests": 0}
ONE_OF_EACH = dict.fromkeys(NOTHING, 1)


class TestKey:
    def test_one_api_request_that_succeeds_on_the_first_try(
        self, services: Services, shop: Program, sender: FakeSender
    ) -> None:
        response = shop.sign_up("Person@Example.com")
        drain(services)

        body = response.get_json()
        assert response.status_code == 202
        assert response.content_type == "application/json"
        AcceptedSignup.model_validate(body)
        assert body["replay_until"] == "2027-01-18T08:00:00Z"
        assert body["status_url"] == f"http://127.0.0.1:8000/api/v1/signups/{body['operation_id']}"
        assert body["email_job"]["id"] == deliveries(services)[0].id
        assert response.headers["Operation-Id"] == body["operation_id"]
        assert response.headers["Operation-State"] == "new"
        assert response.headers["Idempotency-Key"] == "key-1"
        assert "Idempotent-Replayed" not in response.headers
        assert [mail.recipient for mail in sender.mails] == [EMAIL]
        assert rows(services) == ONE_OF_EACH

    def test_same_key_twice_sequentially_returns_the_same_response(self, services: Services, shop: Program) -> None:
        first = shop.sign_up()

        second = shop.sign_up()

        assert (second.status_code, second.data) == (202, first.data)
        assert [row.response_body for row in stored_requests(services)] == [second.text]
        assert second.headers["Idempotent-Replayed"] == "true"
        assert second.headers["Operation-State"] == "replayed"
        assert second.headers["Operation-Id"] == first.headers["Operation-Id"]
        assert rows(services) == ONE_OF_EACH

    def test_same_key_concurrently_gives_one_user_and_one_outbox_event(
        self, services: Services, settings: Settings, clock: FakeClock, shop: Program
    ) -> None:
        answers = run_at_once(PROCESSES, sign_up_at_once, settings, clock.now, shop.token)

        states = Counter(state for _, state, _ in answers)
        assert states["new"] == 1
        assert states["replayed"] + states["in_progress"] == PROCESSES - 1
        assert len({body for status, _, body in answers if status == 202}) == 1
        assert rows(services) == {name: number + PROCESSES for name, number in ONE_OF_EACH.items()}
        assert len(deliveries(services)) == 1
        assert_sound(services)

    def test_key_reused_with_a_changed_email_is_a_fingerprint_mismatch(self, services: Services, shop: Program) -> None:
        first = shop.sign_up()
        before = everything(services)

        response = shop.sign_up("other@example.com")

        assert problem(response) == (409, "idempotency_key_reused")
        assert response.get_json()["retryable"] is False
        assert response.headers["Operation-State"] == "conflict"
        assert response.headers["Operation-Id"] == first.headers["Operation-Id"]
        assert everything(services) == before

    def test_retry_with_a_new_key_is_still_protected_by_the_unique_email(
        self, services: Services, shop: Program, sender: FakeSender
    ) -> None:
        shop.sign_up(key="key-1")

        response = shop.sign_up(key="key-2")
        drain(services)

        assert response.status_code == 202
        assert ledger(services) == ["queued", "cooldown"]
        assert count(services, subscribers) == 1
        assert len(sender.mails) == 1

    @pytest.mark.parametrize(
        ("age", "state"), [(RETENTION - 1, "replayed"), (RETENTION, "new"), (RETENTION + 1, "new")]
    )
    def test_expired_key_follows_the_documented_retention(
        self, services: Services, shop: Program, clock: FakeClock, age: int, state: str
    ) -> None:
        first = shop.sign_up()
        clock.advance(age)

        second = shop.sign_up()

        assert second.status_code == 202
        assert second.headers["Operation-State"] == state
        assert (second.data == first.data) == (state == "replayed")
        assert count(services, subscribers) == 1
        assert count(services, signup_requests) == (1 if state == "replayed" else 2)

    @pytest.mark.parametrize(
        "again",
        [
            {"body": b'\n{ "email" :\t"person@example.com" ,"source":"web"}  '},
            {"body": b'{"source":"web","email":"person@example.com"}'},
            {"body": b'{"source":"web","email":" PERSON@Example.COM "}'},
            {"body": rb'{"source":"web","em\u0061il":"person\u0040example.com"}'},
            {"key": '"key-1"'},
            {"headers": {"Content-Type": "application/json; charset=UTF-8"}},
            {"headers": {"User-Agent": "other", "X-Request-Id": "2"}},
        ],
        ids=["white space", "member order", "address case", "escapes", "quoted key", "charset", "other headers"],
    )
    def test_same_request_in_other_words_replays(self, shop: Program, again: dict[str, Any]) -> None:
        first = shop.sign_up(source="web")

        second = shop.sign_up(**({"source": "web"} | again))

        assert second.headers["Operation-State"] == "replayed"
        assert second.data == first.data

    @pytest.mark.parametrize(
        "changed", [{"consent_version": 1}, {"source": "web"}, {"email": "person+tag@example.com"}, {"source": None}]
    )
    def test_other_members_under_one_key_conflict(self, shop: Program, changed: dict[str, Any]) -> None:
        shop.sign_up()

        assert problem(shop.sign_up(**changed)) == (409, "idempotency_key_reused")

    def test_another_list_or_client_has_keys_of_its_own(self, app: Flask, services: Services, shop: Program) -> None:
        make_list(services, "beta")
        desk = Program.registered(app, "desk")
        first = shop.sign_up()

        others = [shop.sign_up(list_id="beta"), desk.sign_up()]

        assert {response.headers["Operation-State"] for response in others} == {"new"}
        assert len({response.data for response in [first, *others]}) == 3

    def test_new_consent_text_does_not_turn_a_retry_into_a_conflict(self, services: Services, shop: Program) -> None:
        first = shop.sign_up()
        waitlists.publish_consent(services, "launch", "Something else.")

        second = shop.sign_up()

        assert second.data == first.data
        assert subscriber(services).consent_version == 1
        assert shop.sign_up("late@example.com", key="key-2").status_code == 202
        assert subscriber(services, "late@example.com").consent_version == 2

    def test_replay_changes_no_row_but_the_counter(self, services: Services, shop: Program) -> None:
        shop.sign_up()
        before = everything(services)

        shop.sign_up()

        after = everything(services)
        assert {name for name in before if before[name] != after[name]} == {"signup_requests"}
        assert replays(services) == [1]

    def test_replay_after_erasure_brings_nobody_back(self, services: Services, shop: Program) -> None:
        first = shop.sign_up()
        erase(services)

        second = shop.sign_up()

        assert second.data == first.data
        assert rows(services) == NOTHING | {"signup_requests": 1}

    def test_closed_list_is_refused_once_and_for_all(self, services: Services, shop: Program) -> None:
        waitlists.set_state(services, "launch", ListState.CLOSED)
        first = shop.sign_up()
        waitlists.set_state(services, "launch", ListState.OPEN)

        second = shop.sign_up()

        assert problem(first) == problem(second) == (409, "list_closed")
        assert second.data == first.data
        assert second.headers["Idempotent-Replayed"] == "true"
        assert first.headers["Operation-State"] == "new"
        assert ledger(services) == ["list_closed"]
        assert shop.sign_up(key="key-2").status_code == 202

    @pytest.mark.parametrize("refused", [{"email": "nonsense"}, {"body": b"["}, {"list_id": "none"}])
    def test_refused_request_stores_nothing_and_leaves_the_key_free(
        self, services: Services, shop: Program, refused: dict[str, Any]
    ) -> None:
        for _ in range(2):
            assert 400 <= shop.sign_up(**refused).status_code < 500
        assert rows(services) == NOTHING

        assert shop.sign_up().headers["Operation-State"] == "new"

    @pytest.mark.parametrize(
        ("key", "code"),
        [
            (None, "idempotency_key_missing"),
            *((key, "idempotency_key_malformed") for key in ("", " ", '""', '"a', 'a"', '"a"; p=1', "a b", "a,b", "ä")),
            *(
                (key, "idempotency_key_malformed")
                for key in ('"a", "b"', "a/b", "a\\b", "a\tb", "a" * 256, "a" * 100_000)
            ),
        ],
    )
    def test_key_is_required_and_has_a_grammar(
        self, services: Services, shop: Program, key: str | None, code: str
    ) -> None:
        response = shop.sign_up(key=key)

        assert problem(response) == (400, code)
        assert "Idempotency-Key" not in response.headers
        assert rows(services) == NOTHING

    @pytest.mark.parametrize("key", ["a", "a" * 255, "AZaz09._:-"])
    def test_well_formed_key_is_echoed(self, shop: Program, key: str) -> None:
        assert shop.sign_up(key=key).headers["Idempotency-Key"] == key
        assert shop.sign_up("nonsense", key=f'"{key}"').headers["Idempotency-Key"] == f'"{key}"'

    def test_two_key_headers_are_refused(self, app: Flask, services: Services, shop: Program) -> None:
        headers = [
            ("Authorization", f"Bearer {shop.token}"),
            ("Idempotency-Key", "key-1"),
            ("Idempotency-Key", "key-1"),
        ]

        response = shop.client.post(SIGNUPS.format(list_id="launch"), json={"email": EMAIL}, headers=headers)

        assert problem(response) == (400, "idempotency_key_malformed")
        assert rows(services) == NOTHING


def sign_up_at_once(wait: Any, number: int, settings: Settings, now: float, token: str) -> tuple[int, str, bytes]:
    program = Program(create_app(settings, clock=FakeClock(now)).test_client(), token)
    program.sign_up(f"warm-up-{number}@example.com", key=f"warm-up-{number}")
    wait()
    response = program.sign_up()
    return response.status_code, response.headers["Operation-State"], response.data


def replays(services: Services) -> list[int]:
    statement = signup_requests.select().with_only_columns(signup_requests.c.replays)
    return list(run_transaction(services.store, lambda tx: tx.execute(statement).scalars().all()))


class TestReviewQuestions:
    """The five that every design with idempotency keys and an outbox is asked."""

    def test_idempotency_key_is_required(self, services: Services, shop: Program) -> None:
        assert problem(shop.sign_up(key=None)) == (400, "idempotency_key_missing")
        assert rows(services) == NOTHING

    def test_request_hash_is_stored_and_a_mismatch_fails_each_time(self, services: Services, shop: Program) -> None:
        shop.sign_up()
        (stored,) = stored_requests(services)

        again = [shop.sign_up("other@example.com") for _ in range(3)]

        assert stored.request_hash.startswith("1:")
        assert EMAIL not in repr(stored)
        assert {problem(response) for response in again} == {(409, "idempotency_key_reused")}
        assert len({response.data for response in again}) == 1

    @pytest.mark.parametrize("last_step", ["enqueue", "close_request"])
    def test_outbox_insert_is_in_the_same_transaction(
        self, services: Services, shop: Program, monkeypatch: pytest.MonkeyPatch, last_step: str
    ) -> None:
        done = getattr(signup, last_step)

        def fail_after(*args: Any, **kwargs: Any) -> None:
            done(*args, **kwargs)
            raise ZeroDivisionError

        monkeypatch.setattr(signup, last_step, fail_after)
        with pytest.raises(ZeroDivisionError):
            shop.sign_up()
        assert rows(services) == NOTHING

        monkeypatch.undo()
        assert shop.sign_up().headers["Operation-State"] == "new"
        assert rows(services) == ONE_OF_EACH

    def test_worker_replay_cannot_send_the_same_logical_mail_twice(
        self, services: Services, shop: Program, sender: FakeSender
    ) -> None:
        job = shop.sign_up().get_json()["email_job"]["id"]
        drain(services)

        shop.sign_up()
        drain(services)

        assert sender.keys == [job], "the provider's idempotency key is the job that the client was told"

    def test_already_sent_and_never_queued_are_told_apart(self, services: Services, shop: Program) -> None:
        queued = shop.sign_up().headers["Operation-Id"]
        refused = shop.sign_up(key="key-2").headers["Operation-Id"]
        drain(services)

        sent, never = shop.status(queued).get_json(), shop.status(refused).get_json()

        assert (sent["decision"], sent["delivery"]["status"]) == ("queued", "sent")
        assert (never["decision"], never["delivery"]) == ("cooldown", None)
        assert never["words"].startswith("no mail:")


def stored_requests(services: Services) -> list[Any]:
    return list(run_transaction(services.store, lambda tx: tx.execute(signup_requests.select()).all()))


class TestStatus:
    def test_status_tells_the_truth(self, services: Services, shop: Program) -> None:
        accepted = shop.sign_up().get_json()
        before = shop.status(accepted["operation_id"]).get_json()
        drain(services)

        response = shop.status(accepted["operation_id"])

        assert before["delivery"]["status"] == "queued"
        assert response.status_code == 200
        assert response.headers["Operation-Id"] == accepted["operation_id"]
        assert response.get_json() == {
            "operation_id": accepted["operation_id"],
            "state": "succeeded",
            "decision": "queued",
            "words": "a confirmation mail was queued",
            "delivery": {
                "id": accepted["email_job"]["id"],
                "status": "sent",
                "reason": "signup",
                "attempts": 1,
                "provider_message_id": "fake-1",
            },
        }

    def test_status_is_for_the_owning_client_alone(self, app: Flask, services: Services, shop: Program) -> None:
        ours = shop.sign_up().headers["Operation-Id"]
        form = join(services, "form@example.com").operation_id
        stranger = Program.registered(app, "sho")

        assert problem(stranger.status(ours)) == (404, "operation_unknown")
        assert problem(shop.status(form)) == (404, "operation_unknown")

    @pytest.mark.parametrize("operation_id", ["01a22d9d-be38-7327-9580-e364e8a18165", "x", "%00", "%ff", "A" * 5000])
    def test_what_is_no_operation_is_not_found(self, shop: Program, operation_id: str) -> None:
        assert problem(shop.status(operation_id)) == (404, "operation_unknown")


class TestAnswer:
    def test_answer_has_one_shape_and_length_for_every_address(
        self, app: Flask, services: Services, shop: Program, sender: FakeSender
    ) -> None:
        for name in ("confirmed", "left", "suppressed", "pending", "capped"):
            join(services, f"{name}@example.com")
        drain(services)
        for mail in sender.mails:
            if mail.recipient.startswith(("confirmed", "left")):
                confirmation.confirm(services, token_in(mail))
        leave(services, "left@example.com")
        suppress(services, "suppressed@example.com")

        answers = {name: shop.sign_up(f"{name}@example.com", key=f"k-{name}") for name in ADDRESSES}
        app.extensions["waitlist"] = set_setting(services, mails_per_address_per_day=1)
        answers["capped"] = shop.sign_up("capped@example.com", key="k-capped")

        decisions = [row.decision for row in stored_requests(services) if row.channel == "api"]
        assert sorted(decisions) == ["already_confirmed", "capped", "cooldown", "queued", "queued", "suppressed"]
        shapes = {(answer.status_code, len(answer.data), shape(answer.get_json())) for answer in answers.values()}
        assert len(shapes) == 1
        names = {tuple(answer.headers.keys()) for answer in answers.values()}
        assert len(names) == 1

    def test_answer_costs_one_durable_commit_whatever_is_decided(self, services: Services, shop: Program) -> None:
        suppress(services, "suppressed@example.com")

        shop.sign_up("suppressed@example.com", key="key-1")
        shop.sign_up("new@example.com", key="key-2")

        assert [row.response_code for row in stored_requests(services)] == [202, 202]


ADDRESSES = ("new", "pending", "confirmed", "left", "suppressed")


def shape(value: Any) -> Any:
    return tuple((name, shape(inner)) for name, inner in value.items()) if isinstance(value, dict) else len(str(value))


def leave(services: Services, email: str) -> None:
    person = subscriber(services, email)
    statement = (
        subscribers.update()
        .where(subscribers.c.id == person.id)
        .values(status="unsubscribed", unsubscribed_at=START, confirmation_rotated_at=None)
    )
    run_transaction(services.store, lambda tx: tx.execute(statement).rowcount)


def suppress(services: Services, email: str) -> None:
    key = services.settings.data_key_text
    run_transaction(services.store, lambda tx: confirmation.suppress_address(tx, key, email, Suppression.OPERATOR))


NESTED = b'{"email":' + b"[" * 300 + b"]" * 300 + b"}"


class TestBody:
    @pytest.mark.parametrize(
        ("body", "status"),
        [
            pytest.param(b"[" * 200_000, 400, id="200,000 brackets"),
            pytest.param(b'{"a":' * 40_000, 400, id="40,000 objects"),
            pytest.param(b"[" * 16_000, 400, id="brackets within the limit"),
            pytest.param(NESTED, 400, id="nested and closed"),
            pytest.param(b'{"email":"' + b"a" * 1_000_000 + b'"}', 413, id="1 MB"),
            pytest.param(b'{"email":"person@example.com"' + b" " * 16_384 + b"}", 413, id="white space over the limit"),
            pytest.param(b"", 400, id="empty"),
            pytest.param(b"[]", 422, id="array"),
            pytest.param(b"null", 422, id="null"),
            pytest.param(b'"person@example.com"', 422, id="string"),
            pytest.param(b"{}", 422, id="no member"),
            pytest.param(b'{"email":1}', 422, id="number"),
            pytest.param(b'{"email":null}', 422, id="null email"),
            pytest.param(b'{"email":["a@b.co"]}', 422, id="list"),
            pytest.param(b'{"email":{"$ne":null}}', 422, id="operator"),
            pytest.param(b'{"email":NaN}', 400, id="NaN"),
            pytest.param(b'{"email":-Infinity}', 400, id="Infinity"),
            pytest.param(b'{"email":1e999}', 422, id="float too large"),
            pytest.param(b'{"email":' + b"9" * 5000 + b"}", 400, id="integer too long"),
            pytest.param(b'{"email":"a@b.co"} trailing garbage', 400, id="trailing garbage"),
            pytest.param(b'{"email":"a@b.co","email":"c@d.co"}', 400, id="a member twice"),
            pytest.param(rb'{"email":"a@b.co","em\u0061il":"c@d.co"}', 400, id="a member twice, escaped"),
            pytest.param(b'{"email":"a@b.co","source":"x","source":"x"}', 400, id="a member twice, alike"),
            pytest.param(b'{"email":"\xff@b.co"}', 400, id="invalid UTF-8"),
            pytest.param(b'{"email":"\xed\xa0\x80@b.co"}', 400, id="surrogate in UTF-8"),
            pytest.param(rb'{"email":"\ud800@b.co"}', 400, id="lone surrogate"),
            pytest.param(rb'{"email":"a@b.co","\udc00":1}', 400, id="lone surrogate in a name"),
            pytest.param(rb'{"email":"a@b.co","source":"\u0000"}', 422, id="NUL"),
            pytest.param(rb'{"email":"a\u0000@b.co"}', 422, id="NUL in the address"),
            pytest.param('{"email":"a@b.co"}'.encode("utf-16"), 400, id="UTF-16"),
            pytest.param('{"email":"a@b.co"}'.encode("utf-16-le"), 400, id="UTF-16 without a mark"),
            pytest.param('{"email":"a@b.co"}'.encode("utf-32"), 400, id="UTF-32"),
            pytest.param(b'\xef\xbb\xbf{"email":"a@b.co"}', 400, id="byte order mark"),
            pytest.param(b"{'email':'a@b.co'}", 400, id="single quotes"),
            pytest.param(b'{"email":"a@b.co",}', 400, id="trailing comma"),
            pytest.param(b'{"email":"a@b.co"}//', 400, id="comment"),
            pytest.param(b'{"email":"a@b.co","__proto__":{}}', 422, id="__proto__"),
            pytest.param(b'{"email":"a@b.co","constructor":1}', 422, id="constructor"),
            pytest.param(b'{"email":"a@b.co","__class__":"x"}', 422, id="__class__"),
            pytest.param(b'{"email":"a@b.co","Email":"c@d.co"}', 422, id="other case"),
            pytest.param(b'{"email":"a@b.co","consent_version":"1"}', 422, id="version as text"),
            pytest.param(b'{"email":"a@b.co","consent_version":true}', 422, id="version as truth"),
            pytest.param(b'{"email":"a@b.co","consent_version":1.0}', 422, id="version as float"),
            pytest.param(b'{"email":"a@b.co","consent_version":0}', 422, id="version 0"),
            pytest.param(b'{"email":"a@b.co","consent_version":99999999999999999999}', 422, id="version too large"),
            pytest.param(b'{"email":"a@b.co","consent_version":2}', 422, id="version not published"),
            pytest.param(b'{"email":"a@b.co","source":""}', 422, id="empty source"),
            pytest.param(b'{"email":"a@b.co","source":"a\\nb"}', 422, id="source of two lines"),
            pytest.param(b'{"email":"a@b.co","source":"' + b"s" * 101 + b'"}', 422, id="long source"),
            pytest.param(b'{"email":"a@b.co; c@d.co"}', 422, id="two addresses"),
            pytest.param(b'{"email":"' + b"a" * 9000 + b'@b.co"}', 422, id="long address"),
            pytest.param(b"email=a%40b.co", 400, id="form"),
            pytest.param(b"\x1f\x8b\x08\x00\x00", 400, id="gzip without saying so"),
        ],
    )
    @SQLITE
    def test_unsound_body_is_a_problem_and_stores_nothing(
        self, services: Services, shop: Program, body: bytes, status: int
    ) -> None:
        began = time.process_time()

        response = shop.sign_up(body=body)

        assert time.process_time() - began < PATIENCE_SECONDS
        assert problem(response)[0] == status
        assert rows(services) == NOTHING

    @pytest.mark.parametrize(
        "headers",
        [
            {"Content-Type": None},
            {"Content-Type": ""},
            {"Content-Type": "text/plain"},
            {"Content-Type": "text/json"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Content-Type": "application/vnd.api+json"},
            {"Content-Type": "application/json; charset=utf-16"},
            {"Content-Type": "application/json; charset=latin1"},
            {"Content-Type": "application/json; version=2"},
            {"Content-Type": "application/json, text/plain"},
            {"Content-Encoding": "gzip"},
            {"Content-Encoding": "identity"},
            {"Content-Encoding": ""},
        ],
        ids=str,
    )
    @SQLITE
    def test_other_media_type_or_coding_is_refused(
        self, services: Services, shop: Program, headers: dict[str, str | None]
    ) -> None:
        assert problem(shop.sign_up(headers=headers)) == (415, "unsupported_media_type")
        assert rows(services) == NOTHING

    @pytest.mark.parametrize("charset", ["", "; charset=utf-8", ';charset="UTF-8"'])
    @SQLITE
    def test_json_in_utf8_is_taken(self, shop: Program, charset: str) -> None:
        assert shop.sign_up(headers={"Content-Type": "application/json" + charset}).status_code == 202

    @SQLITE
    def test_body_of_16_kib_is_taken(self, shop: Program) -> None:
        body = b'{"email":"person@example.com"}'

        assert shop.sign_up(body=body.ljust(16 * 1024)).status_code == 202
        assert problem(shop.sign_up(body=body.ljust(16 * 1024 + 1))) == (413, "body_too_large")

    @SQLITE
    def test_faults_name_their_place_and_repeat_nothing(self, shop: Program) -> None:
        faulty = {"email": "secret person", "consent_version": "x", "source": "\n", "person@example.com": 1}

        response = shop.sign_up(body=json.dumps(faulty))

        assert problem(response) == (422, "invalid_members")
        pointers = [fault["pointer"] for fault in response.get_json()["errors"]]
        assert pointers == ["#/email", "#/consent_version", "#/source", "#"]
        assert "secret" not in response.text
        assert EMAIL not in response.text

    @pytest.mark.parametrize("version", [None, 1])
    @SQLITE
    def test_optional_member_may_be_null(self, services: Services, shop: Program, version: int | None) -> None:
        assert shop.sign_up(consent_version=version, source=None).status_code == 202
        assert subscriber(services).consent_version == 1

    def test_source_is_kept_in_the_ledger(self, services: Services, shop: Program) -> None:
        shop.sign_up(source="landing page/2")

        assert [row.source for row in stored_requests(services)] == ["landing page/2"]

    @pytest.mark.parametrize("email", ['"@example.com', "person@example..com", "=?utf-8?q?a?=@example.com"])
    @SQLITE
    def test_problem_never_holds_the_address(self, shop: Program, email: str) -> None:
        response = shop.sign_up(email)

        assert problem(response) == (422, "invalid_members")
        assert "@" not in response.text


class TestOrder:
    """The first thing that is wrong is what is answered: nothing is read for who may not call."""

    # Each row repairs the first fault of the row before.
    STEPS: ClassVar[tuple[tuple[dict[str, str | None], bytes, str, int], ...]] = (
        ({"Authorization": None, "Idempotency-Key": None, "Content-Type": None}, b"[" * 20_000, "none", 401),
        ({"Idempotency-Key": None, "Content-Type": "text/plain"}, b"x" * 20_000, "none", 400),
        ({"Content-Type": "text/plain"}, b"x" * 20_000, "none", 415),
        ({}, b"x" * 20_000, "none", 413),
        ({}, b"x", "none", 400),
        ({}, b"{}", "none", 404),
        ({}, b"{}", "launch", 422),
        ({}, b'{"email":"person@example.com"}', "launch", 202),
    )

    @pytest.mark.parametrize(("headers", "body", "list_id", "status"), STEPS, ids=[str(step[3]) for step in STEPS])
    @SQLITE
    def test_refusals_come_in_order(
        self, shop: Program, headers: dict[str, str | None], body: bytes, list_id: str, status: int
    ) -> None:
        assert shop.sign_up(list_id=list_id, body=body, headers=headers).status_code == status

    @pytest.mark.parametrize("list_id", ["none", "LAUNCH", "a" * 41, "a%00b", "%ff", "launch%20", "..", "%E2%80%AE"])
    def test_what_is_no_list_is_not_found(self, services: Services, shop: Program, list_id: str) -> None:
        assert problem(shop.sign_up(list_id=list_id)) == (404, "list_unknown")
        assert shop.client.get(f"/join/{list_id}").status_code == 404
        assert rows(services) == NOTHING


class TestAccess:
    @pytest.mark.parametrize(
        "sent",
        [None, "", "Bearer", "Bearer ", "Bearer x", "Basic {token}", "{token}", "Bearer {token}x", "Bearer a, b"],
    )
    def test_without_a_token_of_ours_nothing_is_read(self, services: Services, shop: Program, sent: str | None) -> None:
        authorization = sent.format(token=shop.token) if sent is not None else None

        response = shop.sign_up(headers={"Authorization": authorization})

        assert problem(response) == (401, "unauthorized")
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert rows(services) == NOTHING
        status = shop.call("GET", f"/api/v1/signups/{new_id()}", headers={"Authorization": authorization})
        assert problem(status) == (401, "unauthorized")

    @pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
    def test_scheme_has_no_case(self, shop: Program, scheme: str) -> None:
        assert shop.sign_up(headers={"Authorization": f"{scheme} {shop.token}"}).status_code == 202

    def test_revoked_client_is_refused(self, services: Services, shop: Program) -> None:
        clients.revoke(services, "shop")

        assert problem(shop.sign_up()) == (401, "unauthorized")

    def test_token_is_stored_hashed_and_its_last_use_shown(
        self, services: Services, shop: Program, clock: FakeClock
    ) -> None:
        clock.advance(100)
        shop.sign_up()

        (client,) = clients.find_all(services)
        assert client.last_used_at == START + 100
        assert shop.token not in repr(everything(services))

    def test_machine_with_a_clock_ahead_writes_no_last_use_at_every_request(
        self, services: Services, shop: Program, clock: FakeClock
    ) -> None:
        ahead = replace(services, clock=lambda: clock.now + 3600)
        clients.authenticate(ahead, shop.token)
        clock.advance(clients.LAST_USE_SECONDS - 1)
        clients.authenticate(ahead, shop.token)
        assert clients.find_all(services)[0].last_used_at == START

        clock.advance(1)
        clients.authenticate(ahead, shop.token)
        assert clients.find_all(services)[0].last_used_at == START + clients.LAST_USE_SECONDS


class TestLimits:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"api_rate_limit": "3/hour", "rate_limit": "2/hour"})

    @SQLITE
    def test_each_client_has_its_own_limit_in_place_of_the_address(self, app: Flask, shop: Program) -> None:
        desk = Program.registered(app, "desk")

        answers = [shop.sign_up(key=new_key()) for _ in range(4)]

        assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
        assert problem(answers[-1]) == (429, "rate_limited")
        assert answers[-1].get_json()["retryable"] is True
        assert 1 <= int(answers[-1].headers["Retry-After"]) <= 3600
        assert desk.sign_up(key=new_key()).status_code == 202

    @SQLITE
    def test_limited_request_leaves_the_key_free(self, services: Services, shop: Program) -> None:
        for _ in range(3):
            shop.sign_up("nonsense")

        assert shop.sign_up().status_code == 429
        assert rows(services) == NOTHING

    @SQLITE
    def test_wrong_tokens_use_up_the_allowance_of_the_address(
        self, app: Flask, client: FlaskClient, shop: Program
    ) -> None:
        guesser = Program(app.test_client(), "guess")

        answers = [guesser.sign_up().status_code for _ in range(3)]

        assert answers == [401, 401, 429]
        assert client.post("/join/launch").status_code == 429
        assert shop.sign_up().status_code == 202


class TestEveryAnswer:
    """Whatever is asked under /api/, and whoever refuses it."""

    @pytest.mark.parametrize(
        ("method", "path", "expected"),
        [
            ("GET", "/api/", (404, "not_found")),
            ("POST", "/api/v1", (404, "not_found")),
            ("GET", "/api/v1/", (404, "not_found")),
            ("POST", "/api/v2/lists/launch/signups", (404, "not_found")),
            ("POST", "/api/v1/lists/launch/signups/", (404, "not_found")),
            ("POST", "/api/v1//lists/launch/signups", (404, "not_found")),
            ("GET", "/api/v1/lists/launch/signups", (405, "method_not_allowed")),
            ("PUT", "/api/v1/lists/launch/signups", (405, "method_not_allowed")),
            ("DELETE", "/api/v1/signups/x", (405, "method_not_allowed")),
            ("POST", "/api/v1/openapi.json", (405, "method_not_allowed")),
        ],
    )
    @SQLITE
    def test_wrong_path_or_method_is_a_problem(
        self, shop: Program, method: str, path: str, expected: tuple[int, str]
    ) -> None:
        response = shop.call(method, path)

        assert problem(response) == expected
        assert ("Allow" in response.headers) == (expected[0] == 405)
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Content-Type-Options"] == "nosniff"

    @SQLITE
    def test_surprise_is_a_problem_and_keeps_its_words_to_itself(
        self, app: Flask, shop: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app.config["PROPAGATE_EXCEPTIONS"] = False

        def fail(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError(f"about {EMAIL}")

        monkeypatch.setattr(signup, "sign_up_with_key", fail)
        with capture_logs() as logs:
            response = shop.sign_up()

        assert problem(response) == (500, "internal_error")
        assert response.get_json()["retryable"] is True
        assert response.headers["Idempotency-Key"] == "key-1"
        assert EMAIL not in response.text + repr(logs)
        assert "unexpected error" in [line["event"] for line in logs]

    @SQLITE
    def test_pages_keep_their_own_errors(self, client: FlaskClient) -> None:
        for path in ("/nothing", "/join/none", "/api"):
            assert client.get(path).content_type.startswith("text/html"), path

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8000"])
    @SQLITE
    def test_foreign_host_is_refused(self, services: Services, shop: Program, host: str) -> None:
        assert problem(shop.sign_up(headers={"Host": host})) == (400, "host_unknown")
        assert rows(services) == NOTHING

    @SQLITE
    def test_links_come_from_the_base_url_alone(self, shop: Program) -> None:
        headers: dict[str, str | None] = {
            "Host": "localhost:1337",
            "Forwarded": "host=evil.example;for=1.2.3.4",
            "X-Forwarded-Host": "evil.example",
        }

        response = shop.sign_up(headers=headers)

        assert response.get_json()["status_url"].startswith("http://127.0.0.1:8000/")

    @SQLITE
    def test_method_override_is_ignored(self, shop: Program) -> None:
        assert shop.sign_up(headers={"X-HTTP-Method-Override": "DELETE"}).status_code == 202

    @SQLITE
    def test_head_is_get_without_a_body(self, shop: Program) -> None:
        operation_id = shop.sign_up().headers["Operation-Id"]
        get = shop.status(operation_id)

        head = shop.call("HEAD", f"/api/v1/signups/{operation_id}")

        assert (head.status_code, head.data) == (200, b"")
        assert dict(head.headers) == dict(get.headers)
        assert shop.call("HEAD", SIGNUPS.format(list_id="launch")).status_code == 405

    @SQLITE
    def test_options_says_what_is_allowed_to_anybody(self, services: Services, client: FlaskClient) -> None:
        response = client.options(SIGNUPS.format(list_id="launch"))

        assert (response.status_code, response.data) == (200, b"")
        assert set(response.headers["Allow"].split(", ")) == {"OPTIONS", "POST"}
        assert rows(services) == NOTHING

    @SQLITE
    def test_answers_are_never_stored_by_a_cache_and_set_no_cookie(self, shop: Program) -> None:
        for response in (shop.sign_up(), shop.sign_up("x"), shop.call("GET", "/api/v1/openapi.json")):
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "Set-Cookie" not in response.headers


class TestBusy:
    @pytest.fixture
    def impatient(self, app: Flask, services: Services, clock: FakeClock) -> Iterator[None]:
        """A lock wait that runs out at once; the test itself holds the locks through `services`."""
        store = Store(services.settings.store_url, clock=clock, lock_wait=0.1)
        app.extensions["waitlist"] = replace(services, store=store)
        yield
        store.close()
        app.extensions["waitlist"] = services

    @POSTGRESQL
    def test_lock_wait_on_the_key_is_in_progress(self, services: Services, shop: Program, impatient: None) -> None:
        with services.store.begin() as tx:
            insert_request(tx, a_submission(services), new_id())
            response = shop.sign_up()
            tx.connection.rollback()

        assert problem(response) == (409, "idempotency_in_progress")
        assert response.get_json()["retryable"] is True
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["Operation-State"] == "in_progress"
        assert "Operation-Id" not in response.headers
        assert shop.sign_up().headers["Operation-State"] == "new"

    @POSTGRESQL
    def test_any_other_lock_wait_is_busy(self, services: Services, shop: Program, impatient: None) -> None:
        with services.store.begin() as tx:
            tx.lock(cap_hmac(services.settings.data_key_text, EMAIL))
            response = shop.sign_up()

        assert_busy(response)
        assert rows(services) == NOTHING
        assert shop.sign_up().headers["Operation-State"] == "new"

    @SQLITE
    def test_waiting_too_long_for_a_turn_is_busy(self, services: Services, shop: Program, impatient: None) -> None:
        with services.store.begin():
            response = shop.sign_up()

        assert_busy(response)
        assert shop.sign_up().headers["Operation-State"] == "new"

    @pytest.mark.parametrize("use_case", ["sign_up_with_key", "authenticate"])
    def test_database_away_is_busy(self, shop: Program, monkeypatch: pytest.MonkeyPatch, use_case: str) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise StorageBusy

        monkeypatch.setattr(signup if use_case == "sign_up_with_key" else clients, use_case, fail)

        assert_busy(shop.sign_up())

    @POSTGRESQL
    def test_repeatable_read_would_turn_a_replay_into_a_failure(self, services: Services, shop: Program) -> None:
        """Why write transactions run READ COMMITTED: the twin that waited could not read the row that it met."""
        url = services.settings.database_url.get_secret_value()
        with psycopg.connect(url) as twin:
            twin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            twin.execute("SELECT 1 FROM signup_requests")
            shop.sign_up()

            with pytest.raises(psycopg.errors.SerializationFailure):
                twin.execute(
                    "INSERT INTO signup_requests SELECT * FROM jsonb_populate_record(NULL::signup_requests, %s)"
                    " ON CONFLICT (scope, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING",
                    [json.dumps(twin_row(services))],
                )

        assert shop.sign_up().headers["Operation-State"] == "replayed"


def assert_busy(response: Any) -> None:
    assert problem(response) == (503, "storage_busy")
    assert response.get_json()["retryable"] is True
    assert int(response.headers["Retry-After"]) >= 1
    assert "Operation-State" not in response.headers


def a_submission(services: Services) -> Submission:
    key = services.settings.data_key_text
    return Submission(
        operation_id=new_id(),
        channel=Channel.API,
        list_id="launch",
        email=EMAIL,
        email_hmac=address_hmac(key, EMAIL),
        cap_hmac=cap_hmac(key, EMAIL),
        consent_version=1,
        claim=a_claim(services),
    )


def a_claim(services: Services) -> KeyClaim:
    return idempotency.claim_key(
        data_key=services.settings.data_key_text,
        base_url=services.settings.base_url,
        retention_seconds=RETENTION,
        client="shop",
        key="key-1",
        list_id="launch",
        email=EMAIL,
        members={"email": EMAIL},
    )


def twin_row(services: Services) -> dict[str, Any]:
    (row,) = stored_requests(services)
    return dict(row._mapping) | {"operation_id": new_id()}


class TestLog:
    @SQLITE
    def test_each_request_leaves_one_line_without_address_key_or_body(self, shop: Program) -> None:
        with capture_logs() as logs:
            accepted = shop.sign_up(key="secret-key", source="secret-source")
            shop.sign_up(key="secret-key", source="secret-source")
            shop.sign_up("other@example.com", key="secret-key")
            shop.sign_up("nonsense", key="other-key")

        lines = [line for line in logs if line["event"] == "api request"]
        assert [line["operation_state"] for line in lines] == ["new", "replayed", "conflict", None]
        assert [line["problem"] for line in lines] == [None, None, "idempotency_key_reused", "invalid_members"]
        assert lines[0]["operation_id"] == accepted.headers["Operation-Id"]
        assert (lines[0]["state"], lines[0]["decision"]) == ("succeeded", "queued")
        assert lines[0]["client"] == "shop"
        assert lines[0]["duration_ms"] >= 0
        assert len(lines[0]["key_prefix"]) == 12
        assert lines[0]["key_prefix"] == lines[2]["key_prefix"] != lines[3]["key_prefix"]
        told = repr(logs)
        for secret in (EMAIL, "other@example.com", "secret", "nonsense", shop.token):
            assert secret not in told

    @SQLITE
    def test_what_a_stranger_sends_is_not_repeated_in_the_log(self, client: FlaskClient) -> None:
        with capture_logs() as logs:
            client.get("/api/v1/person@example.com", headers={"User-Agent": "${jndi:ldap://x} FAKE LOG LINE"})

        assert len(logs) == 1
        assert EMAIL not in repr(logs)
        assert "jndi" not in repr(logs)


class TestDocument:
    @SQLITE
    def test_every_problem_is_described(self, client: FlaskClient) -> None:
        document = client.get("/api/v1/openapi.json").get_json()

        described = json.dumps(document)
        routing = {"not_found", "method_not_allowed"}
        assert document["openapi"] == "3.1.0"
        assert {code for code in KINDS if f'"{code}"' not in described} == routing

    @SQLITE
    def test_schemas_are_those_that_validate(self, client: FlaskClient) -> None:
        schemas = client.get("/api/v1/openapi.json").get_json()["components"]["schemas"]

        assert schemas["NewSignup"]["additionalProperties"] is False
        assert schemas["NewSignup"]["required"] == ["email"]
        assert set(schemas["NewSignup"]["properties"]) == {"email", "consent_version", "source"}
        assert schemas["AcceptedSignup"]["required"] == list(AcceptedSignup.model_fields)


def test_a_body_function_can_be_rerun(services: Services, shop: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock after the key was claimed: the rerun claims it again, as if nothing had been."""
    runs = []
    enqueue = signup.enqueue

    def deadlock_once(tx: Transaction, *args: Any, **kwargs: Any) -> bool:
        done = enqueue(tx, *args, **kwargs)
        runs.append(tx.now)
        if len(runs) == 1:
            raise Restart
        return done

    monkeypatch.setattr(signup, "enqueue", deadlock_once)
    response = shop.sign_up()

    assert response.headers["Operation-State"] == "new"
    assert len(runs) == 2
    assert rows(services) == ONE_OF_EACH
