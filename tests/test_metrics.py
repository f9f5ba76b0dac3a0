"""What /metrics shows, to whom, and that the example alerts ask for what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # ships no types; schemathesis brings it
from flask import Flask
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from tests.factories import FakeClock, FakeSender, make_list
from tests.pages import Visitor
from tests.programs import Program
from tests.scenes import drain, failed, join, refused, token_in
from waitlist import confirmation, create_app, ledger, signup, waitlists
from waitlist import metrics as metrics_module
from waitlist.errors import OperationInProgress, StorageBusy
from waitlist.model import Decision, ListState, Outcome, OutcomeKind
from waitlist.purge import purge
from waitlist.services import Services
from waitlist.settings import Settings

ALERTS = Path(__file__).parent.parent / "docs" / "alerts.yml"
REQUESTS = "waitlist_signup_requests_total"
DECISIONS = "waitlist_signup_decisions_total"
ATTEMPTS = "waitlist_send_attempts_total"
# By these names dashboards and alerts know them.
NAMES = {
    REQUESTS,
    DECISIONS,
    ATTEMPTS,
    "waitlist_outbox_rows",
    "waitlist_outbox_oldest_due_seconds",
    "waitlist_deliveries",
    "waitlist_subscribers",
    "waitlist_purgeable_rows",
    "waitlist_send_attempt_duration_seconds_bucket",
    "waitlist_send_attempt_duration_seconds_count",
    "waitlist_send_attempt_duration_seconds_sum",
}
SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
OUTCOMES = {"new", "replayed", "conflict", "in_progress", "busy", "invalid", "limited"}


@pytest.fixture(autouse=True)
def _launch(services: Services) -> None:
    make_list(services)


@pytest.fixture
def shop(app: Flask) -> Program:
    return Program.registered(app)


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(client: FlaskClient) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.content_type.startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def counted(samples: Samples, name: str, label: str, **labels: str) -> dict[str, float]:
    """What is not zero, by `label`."""
    wanted = labels.items()
    return {
        dict(found)[label]: number
        for (each, found), number in samples.items()
        if each == name and wanted <= found and number
    }


class TestRequests:
    def test_metrics_tell_new_replayed_conflict_and_in_progress_apart(
        self, client: FlaskClient, shop: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("a", "b"):
            shop.sign_up(f"{key}@example.com", key=key)
        for _ in range(3):
            shop.sign_up("a@example.com", key="a")
        shop.sign_up("other@example.com", key="a")
        shop.sign_up("nonsense", key="c")
        shop.sign_up(key=None)
        shop.sign_up(headers={"Authorization": None})
        with raising(monkeypatch, OperationInProgress):
            shop.sign_up(key="d")
        with raising(monkeypatch, StorageBusy):
            shop.sign_up(key="d")
            shop.sign_up(key="d")

        samples = scrape(client)

        assert counted(samples, REQUESTS, "outcome", channel="api") == {
            "new": 2,
            "replayed": 3,
            "conflict": 1,
            "in_progress": 1,
            "busy": 2,
            "invalid": 3,
        }
        assert counted(samples, REQUESTS, "outcome", channel="form") == {}
        assert counted(samples, DECISIONS, "decision") == {"queued": 2}

    @SQLITE
    def test_form_is_counted_beside_the_api(
        self, client: FlaskClient, services: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        visitor = Visitor(client)
        visitor.sign_up()
        visitor.sign_up()
        visitor.sign_up("nonsense")
        client.post("/join/launch")
        with raising(monkeypatch, StorageBusy, "sign_up"):
            visitor.sign_up()
        waitlists.set_state(services, "launch", ListState.CLOSED)
        client.post("/join/launch")

        samples = scrape(client)

        assert counted(samples, REQUESTS, "outcome", channel="form") == {"new": 2, "invalid": 3, "busy": 1}
        assert counted(samples, DECISIONS, "decision") == {"queued": 1, "cooldown": 1}

    @SQLITE
    def test_renewing_is_a_submission_of_the_form(
        self, client: FlaskClient, services: Services, sender: FakeSender, clock: FakeClock
    ) -> None:
        join(services)
        drain(services)
        clock.advance(services.settings.token_ttl_seconds)
        token = token_in(sender.mails[0])
        client.post(f"/confirm/{token}/renew")
        drain(services)
        confirmation.confirm(services, token_in(sender.mails[1]))
        client.post(f"/confirm/{token}/renew")

        samples = scrape(client)

        assert counted(samples, REQUESTS, "outcome") == {"new": 1}
        assert counted(samples, DECISIONS, "decision") == {"queued": 1}

    @SQLITE
    def test_looking_is_no_submission(self, client: FlaskClient, shop: Program) -> None:
        for path in ("/", "/join/launch", "/join/launch/check-inbox", "/healthz"):
            client.get(path)
        client.options("/join/launch")
        client.options("/api/v1/lists/launch/signups")
        shop.status("x")

        assert counted(scrape(client), REQUESTS, "outcome") == {}

    @SQLITE
    def test_closed_list_is_an_answer_and_a_decision(
        self, services: Services, client: FlaskClient, shop: Program
    ) -> None:
        waitlists.set_state(services, "launch", ListState.CLOSED)
        shop.sign_up()
        shop.sign_up()

        samples = scrape(client)

        assert counted(samples, REQUESTS, "outcome") == {"new": 1, "replayed": 1}
        assert counted(samples, DECISIONS, "decision") == {"list_closed": 1}

    @SQLITE
    def test_every_series_begins_at_zero(self, client: FlaskClient) -> None:
        """One that first appears with a 1 has, to Prometheus, not increased."""
        samples = scrape(client)

        assert {value(samples, REQUESTS, channel="api", outcome=outcome) for outcome in OUTCOMES} == {0}
        for outcome in ("new", "busy", "invalid", "limited"):
            assert value(samples, REQUESTS, channel="form", outcome=outcome) == 0
        assert {value(samples, DECISIONS, decision=decision) for decision in Decision} == {0}


class raising:  # noqa: N801 - reads as a verb
    """The use case fails while it lasts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, error: type[Exception], use_case: str = "sign_up_with_key"
    ) -> None:
        self._monkeypatch, self._error, self._use_case = monkeypatch, error, use_case
        self._real = getattr(signup, use_case)

    def __enter__(self) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise self._error

        self._monkeypatch.setattr(signup, self._use_case, fail)

    def __exit__(self, *_: object) -> None:
        self._monkeypatch.setattr(signup, self._use_case, self._real)


@SQLITE
class TestLimited:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"api_rate_limit": "1/hour", "rate_limit": "1/hour"})

    def test_limited_requests_are_counted(self, client: FlaskClient, shop: Program) -> None:
        for _ in range(3):
            shop.sign_up()
            client.post("/join/launch")

        samples = scrape(client)

        assert counted(samples, REQUESTS, "outcome", channel="api") == {"new": 1, "limited": 2}
        assert counted(samples, REQUESTS, "outcome", channel="form") == {"invalid": 1, "limited": 2}


class TestDatabase:
    def test_purgeable_rows_fall_to_zero_with_a_purge(
        self, client: FlaskClient, services: Services, clock: FakeClock
    ) -> None:
        join(services)
        drain(services)
        clock.advance(100 * 86_400)

        before = counted(scrape(client), "waitlist_purgeable_rows", "what")
        purge(services)

        assert before["people_who_never_confirmed"] == 1
        assert before["submissions"] == 1
        assert counted(scrape(client), "waitlist_purgeable_rows", "what") == {}

    def test_gauges_show_how_the_database_stands(
        self, client: FlaskClient, services: Services, sender: FakeSender, clock: FakeClock
    ) -> None:
        make_list(services, "beta")
        sender.answer_with(Outcome(OutcomeKind.ACCEPTED), refused(), failed())
        for name in ("sent", "rejected", "failed"):
            join(services, f"{name}@example.com")
        drain(services)
        confirmation.confirm(services, token_in(sender.mails[0]))
        join(services, "waiting@example.com", "beta")
        clock.advance(42)

        samples = scrape(client)

        assert counted(samples, "waitlist_outbox_rows", "status") == {"queued": 1, "dead": 2}
        assert value(samples, "waitlist_outbox_rows", status="dispatching") == 0
        assert value(samples, "waitlist_outbox_oldest_due_seconds") == 42
        assert counted(samples, "waitlist_deliveries", "status") == {
            "queued": 1,
            "sent": 1,
            "rejected": 1,
            "failed": 1,
        }
        assert value(samples, "waitlist_deliveries", status="bounced") == 0
        assert value(samples, "waitlist_subscribers", list="launch", status="confirmed") == 1
        assert value(samples, "waitlist_subscribers", list="launch", status="pending") == 2
        assert value(samples, "waitlist_subscribers", list="beta", status="pending") == 1

    def test_attempts_of_every_worker_are_counted_once(
        self, client: FlaskClient, services: Services, sender: FakeSender, clock: FakeClock
    ) -> None:
        scrape(client)
        sender.answer_with(Outcome(OutcomeKind.SYSTEMIC))
        join(services)
        clock.advance(1)
        drain(services)
        clock.advance(60)
        drain(services)
        clock.advance(metrics_module.SETTLE_SECONDS)

        first, second = scrape(client), scrape(client)

        assert counted(first, ATTEMPTS, "outcome", provider="fake") == {"systemic": 1, "accepted": 1}
        assert value(first, "waitlist_send_attempt_duration_seconds_count", provider="fake") == 2
        assert first == second

    @SQLITE
    def test_attempt_is_counted_only_when_its_second_is_over(
        self, client: FlaskClient, services: Services, clock: FakeClock
    ) -> None:
        """A transaction that began in this second may still be about to commit."""
        join(services)
        clock.advance(1)
        drain(services)
        clock.advance(metrics_module.SETTLE_SECONDS - 1)
        assert counted(scrape(client), ATTEMPTS, "outcome") == {}

        clock.advance(1)
        assert counted(scrape(client), ATTEMPTS, "outcome") == {"accepted": 1}

    @SQLITE
    def test_without_the_database_the_process_still_tells_what_it_knows(
        self, client: FlaskClient, shop: Program, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
    ) -> None:
        shop.sign_up()
        clock.advance(60)

        def away(*_: Any) -> None:
            raise StorageBusy

        monkeypatch.setattr(ledger, "gauges", away)
        monkeypatch.setattr(ledger, "attempts_since", away)
        samples = scrape(client)

        assert counted(samples, REQUESTS, "outcome") == {"new": 1}
        assert value(samples, "waitlist_outbox_oldest_due_seconds") is None, "absent, not a reassuring 0"

    @SQLITE
    def test_two_applications_in_one_process_count_apart(
        self, client: FlaskClient, shop: Program, settings: Settings
    ) -> None:
        other = create_app(settings).test_client()
        shop.sign_up()

        assert counted(scrape(client), REQUESTS, "outcome") == {"new": 1}
        assert counted(scrape(other), REQUESTS, "outcome") == {}


@SQLITE
class TestReaders:
    """No address, no token and no list of lists for the public."""

    @pytest.fixture(params=[None, "metrics-token"])
    def token(self, request: pytest.FixtureRequest) -> str | None:
        token: str | None = request.param
        return token

    @pytest.fixture
    def proxies(self) -> int:
        return 0

    @pytest.fixture
    def settings(self, settings: Settings, token: str | None, proxies: int) -> Settings:
        values = settings.model_dump() | {"metrics_token": token, "trusted_proxies": proxies}
        return Settings.model_validate(values)

    @pytest.mark.parametrize("token", [None], indirect=True)
    @pytest.mark.parametrize(
        ("peer", "status"), [("127.0.0.1", 200), ("127.8.8.8", 200), ("::1", 200), ("10.0.0.1", 404), ("", 404)]
    )
    def test_without_a_token_only_this_machine_may_read(self, client: FlaskClient, peer: str, status: int) -> None:
        assert client.get("/metrics", environ_overrides={"REMOTE_ADDR": peer}).status_code == status

    @pytest.mark.parametrize("token", [None], indirect=True)
    @pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
    def test_proxy_on_this_machine_does_not_make_the_world_local(self, client: FlaskClient, header: str) -> None:
        assert client.get("/metrics", headers={header: "127.0.0.1"}).status_code == 404

    @pytest.mark.parametrize("token", [None], indirect=True)
    @pytest.mark.parametrize("proxies", [1])
    @pytest.mark.parametrize(
        ("forwarded", "status"), [(None, 200), ("127.0.0.1", 200), ("8.8.8.8", 404), ("127.0.0.1, 8.8.8.8", 404)]
    )
    def test_behind_a_trusted_proxy_the_real_peer_counts(
        self, client: FlaskClient, forwarded: str | None, status: int
    ) -> None:
        headers = {"X-Forwarded-For": forwarded} if forwarded else {}

        assert client.get("/metrics", headers=headers).status_code == status

    @pytest.mark.parametrize("token", ["metrics-token"], indirect=True)
    @pytest.mark.parametrize("peer", ["127.0.0.1", "8.8.8.8"])
    @pytest.mark.parametrize(
        ("sent", "status"),
        [
            ("Bearer metrics-token", 200),
            ("bearer metrics-token", 200),
            ("Bearer metrics-tokeN", 404),
            ("Bearer ", 404),
            ("Basic bWV0cmljcy10b2tlbg==", 404),
            ("Bearer \xe4", 404),
            (None, 404),
        ],
    )
    def test_with_a_token_everybody_needs_it(
        self, client: FlaskClient, peer: str, sent: str | None, status: int
    ) -> None:
        headers = {"Authorization": sent} if sent else {}

        response = client.get("/metrics", headers=headers, environ_overrides={"REMOTE_ADDR": peer})

        assert response.status_code == status

    def test_refusal_is_the_page_for_what_is_not_there(self, client: FlaskClient) -> None:
        peer = {"REMOTE_ADDR": "8.8.8.8"}

        refused = client.get("/metrics", environ_overrides=peer)

        assert refused.data == client.get("/nothing", environ_overrides=peer).data

    @pytest.mark.parametrize("token", [None], indirect=True)
    def test_nothing_in_it_points_to_a_person(
        self, client: FlaskClient, services: Services, sender: FakeSender
    ) -> None:
        join(services)
        drain(services)
        told = client.get("/metrics").text

        assert "@" not in told
        assert token_in(sender.mails[0]) not in told


def test_names_are_those_that_dashboards_know(client: FlaskClient, services: Services, clock: FakeClock) -> None:
    join(services)
    clock.advance(1)
    drain(services)
    clock.advance(60)

    assert {name for name, _ in scrape(client)} == NAMES


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert {"alert", "expr", "annotations"} <= rule.keys()
            yield rule["expr"]


def test_example_alerts_ask_for_metrics_that_exist() -> None:
    asked = {name for expression in expressions() for name in re.findall(r"\bwaitlist_\w+", expression)}

    assert asked
    assert asked <= NAMES


def test_example_alerts_ask_for_labels_that_exist() -> None:
    known: dict[str, set[str]] = {
        "outcome": OUTCOMES | set(OutcomeKind),
        "channel": {"api", "form"},
        "decision": set(Decision),
        "status": {"queued", "leased", "dispatching", "dead"},
        "job": {"waitlist"},
    }
    for expression in expressions():
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', expression):
            assert set(values.split("|")) <= known[label], expression
