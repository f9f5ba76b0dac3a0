"""The read side: what happened to one address and why, and how the queue stands, in words for the owner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from waitlist import policy
from waitlist.errors import SchemaMismatch, StorageBusy
from waitlist.model import (
    DAY_SECONDS,
    Channel,
    Decision,
    Delivery,
    DeliveryStatus,
    EventType,
    OutboxStatus,
    Reason,
    RequestState,
    Subscriber,
    SubscriberStatus,
    Suppression,
)
from waitlist.services import Services
from waitlist.settings import Settings
from waitlist.store import Transaction, run_query
from waitlist.store.deliveries import get_deliveries, get_delivery
from waitlist.store.migrate import check_schema, newest_revision
from waitlist.store.reports import (
    DecisionCount,
    Event,
    LedgerRow,
    SuppressionRow,
    count_decisions,
    count_deliveries,
    count_due_rows,
    count_failed,
    count_live_rows,
    count_rows_in_doubt,
    count_subscribers,
    get_attempt_ends,
    get_events,
    get_newest_attempt_end,
    get_oldest_due_at,
    get_request_of_scope,
    get_requests,
    get_suppression_row,
)
from waitlist.store.subscribers import get_subscribers_everywhere
from waitlist.tokens import address_hmac
from waitlist.words import about_in_words, moment_in_words

DECISION_WORDS: Final = {
    Decision.QUEUED: "a confirmation mail was queued",
    Decision.RETRY_QUEUED: "the last mail had failed, so a new one was queued at once",
    Decision.RETRY_CLAIMED: "no mail: another submission had just queued the retry",
    Decision.ALREADY_CONFIRMED: "no mail: already confirmed",
    Decision.IN_FLIGHT: "no mail: one was on its way at that moment",
    Decision.COOLDOWN: "no mail: the last one was too recent",
    Decision.CAPPED: "no mail: this mailbox has had its share for a day or for 30 days",
    Decision.SUPPRESSED: "no mail: the address is suppressed",
    Decision.TRAPPED: "no mail: the hidden field was filled in, as robots do",
    Decision.LIST_CLOSED: "refused: the list was closed",
}


_LINK_MARGIN: Final = {"margin": policy.LINK_MARGIN_SECONDS, "fraction": policy.LINK_MARGIN_FRACTION}
# A due mail that waits longer than this has no worker, or a sick one: attempts and leases take a minute.
LATE_SECONDS: Final = 600

SUPPRESSION_WORDS: Final = {
    Suppression.COMPLAINT: "a mail to it was reported as spam (complaint)",
    Suppression.NOT_ME: "its owner said: I did not ask for this",
    Suppression.OPERATOR: "by hand (operator)",
}
CHANNEL_WORDS: Final = {
    Channel.FORM: "form submission",
    Channel.API: "API submission",
    Channel.CLI: "submission at the terminal",
}
REASON_WORDS: Final = {
    Reason.SIGNUP: "signup",
    Reason.COOLDOWN_RESEND: "resend after the cooldown",
    Reason.FAILURE_RETRY: "retry after a failure",
    Reason.OPERATOR_RESEND: "operator resend",
}
# What a provider reported; our own events are named by their type.
EVENT_WORDS: Final = {
    EventType.SENT: "sent: the provider has it",
    EventType.DELIVERED: "delivered: the recipient's server has it",
    EventType.BOUNCED: "bounced: it did not arrive, so the next submission may send a new one at once",
    EventType.COMPLAINED: "complained: the recipient reported it as spam, so the address is suppressed",
    EventType.SOFT_BOUNCED: "soft bounced: the recipient's server refused it for now; only noted",
    EventType.DELAYED: "delayed: the provider still tries; only noted",
    EventType.FOREIGN: "foreign: the provider reported something about another recipient; nothing changed",
}


# A submission writes some kilobytes, and SQLite's log grows to a few megabytes: below the first somebody should look,
# below the second a submission may be refused at any moment.
LITTLE_ROOM_BYTES: Final = 100_000_000
NO_ROOM_BYTES: Final = 1_000_000


@dataclass(frozen=True)
class Readiness:
    """Whether this process can do its work; `problems` say what a person should look at."""

    is_ready: bool
    problems: tuple[str, ...]
    # None: it cannot be read, or is not the one that this version needs.
    schema_version: str | None = None
    oldest_due_seconds: int | None = None
    systemic_fault: str | None = None


@dataclass(frozen=True)
class OutboxReport:
    """How the queue stands; `needs_person` says why somebody should look, empty when nobody need."""

    due: int
    waiting: int
    leased: int
    dispatching: int
    in_doubt: int
    dead: int
    oldest_due_seconds: int | None
    systemic_fault: str | None
    needs_person: tuple[str, ...]


@dataclass(frozen=True)
class Gauges:
    """What /metrics shows of the database; cheap at a million rows: every count runs on an index of its own."""

    outbox_rows: dict[OutboxStatus, int]
    oldest_due_seconds: int | None
    deliveries: dict[str, int]
    # By (list, status).
    subscribers: dict[tuple[str, str], int]


@dataclass(frozen=True)
class Attempt:
    """The end of one send attempt."""

    provider: str
    outcome: str
    duration_ms: int


@dataclass(frozen=True)
class DeliveryView:
    id: str
    status: DeliveryStatus
    reason: Reason
    attempts: int
    provider_message_id: str | None


@dataclass(frozen=True)
class OperationStatus:
    """What became of one API operation: "already sent" and "never queued" are told apart by `delivery`."""

    operation_id: str
    state: RequestState
    decision: Decision
    words: str
    delivery: DeliveryView | None


@dataclass(frozen=True)
class Stats:
    """Figures for the owner, over everything the ledger still holds."""

    # By (list, status).
    subscribers: dict[tuple[str, str], int]
    deliveries: dict[str, int]
    decisions: list[DecisionCount]


@dataclass(frozen=True)
class Entry:
    """One thing that happened. `kind` is submission, delivery, event or subscriber; `what` its status word; `words`
    says it.
    """

    at: int
    kind: str
    # Empty: it holds for every list, as a suppression does.
    list_id: str
    what: str
    # Of the operation, delivery or subscriber; empty: it has none.
    id: str
    words: str


@dataclass(frozen=True)
class Standing:
    """How a person stands on one list, and what the next submission would do."""

    list_id: str
    status: SubscriberStatus
    confirmed_at: int | None
    next_mail: str


@dataclass(frozen=True)
class Explanation:
    email: str
    suppression: Suppression | None
    standings: tuple[Standing, ...]
    entries: tuple[Entry, ...]


def readiness(services: Services) -> Readiness:
    """Never raises: what is wrong is the answer."""
    try:
        check_schema(services.store)
        found = run_query(services.store, _readiness)
        free = services.store.free_bytes()
    except (SchemaMismatch, StorageBusy, OSError) as error:
        return Readiness(False, (str(error),))
    if free is None or free >= LITTLE_ROOM_BYTES:
        return found
    problems = (*found.problems, f"the disk of the database has {free // 1_000_000} MB left")
    return replace(found, is_ready=free >= NO_ROOM_BYTES, problems=problems)


def outbox_report(services: Services) -> OutboxReport:
    return run_query(services.store, _outbox_report)


def gauges(services: Services) -> Gauges:
    return run_query(
        services.store,
        lambda tx: Gauges(count_live_rows(tx), _oldest_due_seconds(tx), count_deliveries(tx), count_subscribers(tx)),
    )


def attempts_since(services: Services, after: int, until: int) -> list[Attempt]:
    """The attempts of all workers that ended in the seconds after < at <= until."""
    ends = run_query(services.store, partial(get_attempt_ends, after=after, until=until))
    return [Attempt(end.provider or "", end.type, end.duration_ms or 0) for end in ends]


def stats(services: Services) -> Stats:
    return run_query(services.store, lambda tx: Stats(count_subscribers(tx), count_deliveries(tx), count_decisions(tx)))


def operation(services: Services, client: str, operation_id: str) -> OperationStatus | None:
    """The truth about an operation of `client`; None for one that is unknown or somebody else's."""
    return run_query(services.store, partial(_operation, client=client, operation_id=operation_id))


def explain(services: Services, email: str) -> Explanation:
    """Every submission, mail, event and change of standing of the canonical address, over all lists, in order of time."""
    return run_query(services.store, partial(_explain, settings=services.settings, email=email))


def _readiness(tx: Transaction) -> Readiness:
    fault = systemic_fault(tx)
    problems = (f"mail is held up: {fault}",) if fault else ()
    return Readiness(True, problems, newest_revision(), _oldest_due_seconds(tx), fault)


def _oldest_due_seconds(tx: Transaction) -> int | None:
    oldest = get_oldest_due_at(tx, **_LINK_MARGIN)
    return tx.now - oldest if oldest is not None else None


def _outbox_report(tx: Transaction) -> OutboxReport:
    rows = count_live_rows(tx)
    due, oldest, fault = count_due_rows(tx, **_LINK_MARGIN), _oldest_due_seconds(tx), systemic_fault(tx)
    in_doubt, dead = count_rows_in_doubt(tx), rows[OutboxStatus.DEAD]
    needs_person = []
    if fault:
        needs_person.append(f"the provider refuses all mail: {fault}")
    if oldest is not None and oldest > LATE_SECONDS:
        needs_person.append(f"a mail waits for {about_in_words(oldest)}: is a worker running?")
    if failed := count_failed(tx, tx.now - DAY_SECONDS, tx.now + policy.CLOCK_TOLERANCE_SECONDS):
        needs_person.append(f"{failed} mails failed in the last 24 hours, and not because their address was refused")
    return OutboxReport(
        due=due,
        waiting=rows[OutboxStatus.QUEUED] - due,
        leased=rows[OutboxStatus.LEASED],
        dispatching=rows[OutboxStatus.DISPATCHING],
        in_doubt=in_doubt,
        dead=dead,
        oldest_due_seconds=oldest,
        systemic_fault=fault,
        needs_person=tuple(needs_person),
    )


def _operation(tx: Transaction, client: str, operation_id: str) -> OperationStatus | None:
    request = get_request_of_scope(tx, operation_id, f"{client}/")
    if request is None:
        return None
    delivery = get_delivery(tx, request.job_id)
    view = None
    if delivery is not None:
        view = DeliveryView(
            delivery.id, delivery.status, delivery.reason, delivery.attempts, delivery.provider_message_id
        )
    return OperationStatus(operation_id, request.state, request.decision, DECISION_WORDS[request.decision], view)


def systemic_fault(tx: Transaction) -> str | None:
    """A systemic fault is open while the newest attempt is systemic; in the provider's words."""
    newest = get_newest_attempt_end(tx, tx.now + policy.CLOCK_TOLERANCE_SECONDS)
    return newest.detail if newest and newest.type is EventType.SYSTEMIC else None


def _explain(tx: Transaction, settings: Settings, email: str) -> Explanation:
    email_hmac = address_hmac(settings.data_key_text, email)
    suppressed = get_suppression_row(tx, email_hmac)
    suppression = suppressed.reason if suppressed else None
    entries = [_submission_entry(row) for row in get_requests(tx, email_hmac)]
    standings = []
    for subscriber in get_subscribers_everywhere(tx, email):
        deliveries = get_deliveries(tx, subscriber.id)
        entries += [_delivery_entry(subscriber, delivery) for delivery in deliveries]
        entries += [_event_entry(subscriber, event) for event in get_events(tx, subscriber.id)]
        entries += _subscriber_entries(subscriber, deliveries)
        latest = deliveries[0] if deliveries else None
        words = _next_mail_words(subscriber, latest, suppression=suppression, settings=settings, now=tx.now)
        standings.append(Standing(subscriber.list_id, subscriber.status, subscriber.confirmed_at, words))
    entries += [_suppression_entry(suppressed)] if suppressed else []
    entries.sort(key=lambda entry: (entry.at, _KIND_ORDER.index(entry.kind), entry.id))
    return Explanation(email, suppression, tuple(standings), tuple(entries))


# Within one second: the submission, then the delivery it made, then what happened to that and what came of it.
_KIND_ORDER: Final = ("submission", "delivery", "event", "subscriber")


def _submission_entry(row: LedgerRow) -> Entry:
    words = f"{CHANNEL_WORDS[row.channel]}{_source_words(row)}: {DECISION_WORDS[row.decision]}"
    words += f" ({row.replays} replays)" if row.replays else ""
    return Entry(row.created_at, "submission", row.list_id, row.decision, row.operation_id, words)


def _source_words(row: LedgerRow) -> str:
    if not row.source:
        return ""
    if row.channel is Channel.CLI:
        return f", asked by the owner: {row.source}"
    # A form names no source of its own; the page of an expired link does.
    return ", from an expired link" if row.channel is Channel.FORM else f', source "{row.source}"'


def _delivery_entry(subscriber: Subscriber, delivery: Delivery) -> Entry:
    words = f"mail {delivery.generation} ({REASON_WORDS[delivery.reason]}), now {delivery.status}"
    words += f", {delivery.attempts} attempts" if delivery.attempts != 1 else ", 1 attempt"
    words += f", {delivery.error_code}" if delivery.error_code else ""
    return Entry(delivery.created_at, "delivery", subscriber.list_id, delivery.status, delivery.id, words)


def _event_entry(subscriber: Subscriber, event: Event) -> Entry:
    took = f", {event.duration_ms} ms" if event.duration_ms is not None else ""
    by = f" by {event.provider}" if event.provider else ""
    words = f"{EVENT_WORDS.get(event.type) or event.type.replace('_', ' ')}{by}{took}"
    words += f": {event.detail}" if event.detail else ""
    return Entry(event.at, "event", subscriber.list_id, event.type, event.delivery_id or "", words)


def _subscriber_entries(subscriber: Subscriber, deliveries: list[Delivery]) -> list[Entry]:
    happened = (
        (subscriber.confirmed_at, SubscriberStatus.CONFIRMED, _confirmation_words(subscriber, deliveries)),
        (subscriber.unsubscribed_at, SubscriberStatus.UNSUBSCRIBED, "left the list"),
    )
    return [
        Entry(at, "subscriber", subscriber.list_id, what, subscriber.id, words)
        for at, what, words in happened
        if at is not None
    ]


def _confirmation_words(subscriber: Subscriber, deliveries: list[Delivery]) -> str:
    """The time kept is that of the first confirmation, the mail that of the last: for who came back they differ."""
    mail = next((delivery for delivery in deliveries if delivery.id == subscriber.confirmed_delivery_id), None)
    if mail is None:
        return "first confirmed"
    if subscriber.confirmed_at is not None and mail.created_at > subscriber.confirmed_at:
        return f"first confirmed; later again, through mail {mail.generation}"
    return f"first confirmed through mail {mail.generation}"


def _suppression_entry(suppressed: SuppressionRow) -> Entry:
    words = f"suppressed on every list: {SUPPRESSION_WORDS[suppressed.reason]}"
    return Entry(suppressed.created_at, "subscriber", "", "suppressed", "", words)


def _next_mail_words(
    subscriber: Subscriber, latest: Delivery | None, *, suppression: Suppression | None, settings: Settings, now: int
) -> str:
    if suppression:
        return f"no mail ever: suppressed ({suppression.replace('_', ' ')})"
    if subscriber.status is SubscriberStatus.CONFIRMED:
        return "no mail: confirmed"
    if latest and latest.status is DeliveryStatus.SENDING:
        return "a mail is on its way now"
    if subscriber.status is SubscriberStatus.UNSUBSCRIBED or policy.is_retryable(latest):
        return "the next submission may send a mail at once"
    next_at = policy.next_mail_at(subscriber.confirmation_rotated_at, now, settings.cooldown_seconds)
    if next_at <= now:
        return "the next submission may send a mail at once"
    waits = "is queued since" if latest and latest.status is DeliveryStatus.QUEUED else "left"
    ago = about_in_words(now - (subscriber.confirmation_rotated_at or now))
    return f"no mail: the last one {waits} {ago} ago, the next is possible at {moment_in_words(next_at)}"
