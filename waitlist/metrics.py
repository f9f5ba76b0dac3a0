"""Prometheus metrics: what this process answered, and how the database stands.

Requests and decisions are counted in this process, from its start; with several web workers a scrape meets one of them
and sees its share. All else is read from the database when scraped, so it is the same whichever process is asked.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final

import structlog
from flask import Blueprint, Flask, Response, abort, current_app, g, request
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from waitlist import ledger
from waitlist.errors import SchemaMismatch, StorageBusy
from waitlist.model import Answer, Channel, Decision, DeliveryStatus
from waitlist.purge import purgeable
from waitlist.services import Services
from waitlist.settings import is_loopback
from waitlist.web.current import services

log: Any = structlog.get_logger()

# Whose answers are submissions.
CHANNELS: Final = {"pages.submit": Channel.FORM, "pages.renew": Channel.FORM, "api.create_signup": Channel.API}
# An attempt is stamped when its transaction begins and seen when it ends; a second is read once this much has passed.
SETTLE_SECONDS: Final = 5
# A send takes a tenth of a second to some seconds, and is cut off at half a lease, 30 s.
ATTEMPT_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# A worker removes a thousand rows in a blink; ten thousand that wait mean that none does, however many more there are.
MOST_PURGEABLE: Final = 10_000
# A proxy that nobody told us about adds one of these, and makes every visitor look like this machine.
FORWARDING_HEADERS: Final = ("X-Forwarded-For", "Forwarded", "X-Real-IP")
_EXTENSION: Final = "waitlist.metrics"


class SubmissionOutcome(StrEnum):
    """What a submission was answered with. BUSY: nothing stored, try again; LIMITED: too many; INVALID: refused."""

    NEW = "new"
    REPLAYED = "replayed"
    CONFLICT = "conflict"
    IN_PROGRESS = "in_progress"
    BUSY = "busy"
    INVALID = "invalid"
    LIMITED = "limited"


ONLY_WITH_A_KEY: Final = (SubmissionOutcome.REPLAYED, SubmissionOutcome.CONFLICT, SubmissionOutcome.IN_PROGRESS)


class Metrics:
    """One registry per application."""

    def __init__(self, services: Services) -> None:
        self.registry = CollectorRegistry()
        self._services = services
        self._requests = Counter(
            "waitlist_signup_requests",
            "Submissions answered by this process.",
            ["channel", "outcome"],
            registry=self.registry,
        )
        self._decisions = Counter(
            "waitlist_signup_decisions",
            "What first executions in this process came to.",
            ["decision"],
            registry=self.registry,
        )
        self._attempts = Counter(
            "waitlist_send_attempts",
            "Send attempts of all workers that ended since this process began.",
            ["provider", "outcome"],
            registry=self.registry,
        )
        self._durations = Histogram(
            "waitlist_send_attempt_duration_seconds",
            "How long a send attempt took, by provider.",
            ["provider"],
            buckets=ATTEMPT_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_DatabaseGauges(services))
        self._attempts_read_until = int(services.clock())
        self._reading_attempts = threading.Lock()
        self._begin_at_zero()

    def count(self, channel: Channel, outcome: SubmissionOutcome, answer: Answer | None) -> None:
        self._requests.labels(channel, outcome).inc()
        if answer is not None and not answer.replayed:
            self._decisions.labels(answer.decision).inc()

    def expose(self) -> bytes:
        _if_readable(self._read_attempts)
        return generate_latest(self.registry)

    def _read_attempts(self) -> None:
        with self._reading_attempts:
            until = int(self._services.clock()) - SETTLE_SECONDS
            if until <= self._attempts_read_until:
                return
            for attempt in ledger.attempts_since(self._services, self._attempts_read_until, until):
                self._attempts.labels(attempt.provider, attempt.outcome).inc()
                self._durations.labels(attempt.provider).observe(attempt.duration_ms / 1000)
            self._attempts_read_until = until

    def _begin_at_zero(self) -> None:
        """A series that first appears with a 1 has, to Prometheus, not increased."""
        for outcome in SubmissionOutcome:
            self._requests.labels(Channel.API, outcome)
        for outcome in SubmissionOutcome:
            if outcome not in ONLY_WITH_A_KEY:
                self._requests.labels(Channel.FORM, outcome)
        for decision in Decision:
            self._decisions.labels(decision)


class _DatabaseGauges:
    """Absent, not zero, while the database cannot be read."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        gauges = _if_readable(lambda: ledger.gauges(self._services))
        if gauges is None:
            return
        rows = GaugeMetricFamily("waitlist_outbox_rows", "Outbox rows that have not ended well.", labels=["status"])
        for status, number in gauges.outbox_rows.items():
            rows.add_metric([status], number)
        yield rows
        yield GaugeMetricFamily(
            "waitlist_outbox_oldest_due_seconds",
            "How long the oldest due mail has waited; 0 if none is due.",
            value=gauges.oldest_due_seconds or 0,
        )
        deliveries = GaugeMetricFamily("waitlist_deliveries", "Deliveries by status.", labels=["status"])
        for delivery_status in DeliveryStatus:
            deliveries.add_metric([delivery_status], gauges.deliveries.get(delivery_status, 0))
        yield deliveries
        people = GaugeMetricFamily("waitlist_subscribers", "Subscribers by list and status.", labels=["list", "status"])
        for labels, number in gauges.subscribers.items():
            people.add_metric(labels, number)
        yield people
        yield from self._purgeable()

    def _purgeable(self) -> Iterator[Metric]:
        counts = _if_readable(lambda: purgeable(self._services, most=MOST_PURGEABLE))
        if counts is None:
            return
        family = GaugeMetricFamily(
            "waitlist_purgeable_rows",
            f"Rows past their retention that no purge has removed yet, counted up to {MOST_PURGEABLE}.",
            labels=["what"],
        )
        for what, number in counts.items():
            family.add_metric([what.replace(" ", "_")], number)
        yield family


pages: Final = Blueprint("metrics", __name__)


def init_app(app: Flask, services: Services) -> None:
    # They would be a second series for each counter, which nobody asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # its only function without types
    app.extensions[_EXTENSION] = Metrics(services)
    app.after_request(_count)
    app.register_blueprint(pages)


@pages.get("/metrics")
def show() -> Response:
    if not _may_read():
        abort(404)
    metrics: Metrics = current_app.extensions[_EXTENSION]
    return Response(metrics.expose(), content_type=CONTENT_TYPE_PLAIN_0_0_4)


def _may_read() -> bool:
    expected = services().settings.metrics_token
    if expected is None:
        is_proxied = any(name in request.headers for name in FORWARDING_HEADERS)
        is_forwarding_trusted = services().settings.trusted_proxies > 0
        return is_loopback(request.remote_addr) and (is_forwarding_trusted or not is_proxied)
    sent = request.authorization
    token = (sent.token or "") if sent is not None and sent.type == "bearer" else ""
    return hmac.compare_digest(token.encode(), expected.get_secret_value().encode())


def _count(response: Response) -> Response:
    channel = CHANNELS.get(request.endpoint or "")
    if channel is not None and (outcome := _outcome(response)) is not None:
        metrics: Metrics = current_app.extensions[_EXTENSION]
        metrics.count(channel, outcome, g.get("answer"))
    return response


def _outcome(response: Response) -> SubmissionOutcome | None:
    """None for what is no submission (an OPTIONS, a page that has nothing to renew) or failed in a way of its own."""
    answer: Answer | None = g.get("answer")
    if answer is not None:
        return SubmissionOutcome.REPLAYED if answer.replayed else SubmissionOutcome.NEW
    state = response.headers.get("Operation-State")
    if state is not None:
        return SubmissionOutcome(state)
    if response.status_code == 429:
        return SubmissionOutcome.LIMITED
    if response.status_code == 503:
        return SubmissionOutcome.BUSY
    return SubmissionOutcome.INVALID if 400 <= response.status_code < 500 else None


def _if_readable(read: Callable[[], Any]) -> Any:
    """A database that is away must not hide what this process still knows: its `busy` count above all."""
    try:
        return read()
    except (StorageBusy, SchemaMismatch) as error:
        log.warning("metrics without the database", error=type(error).__name__)
        return None
