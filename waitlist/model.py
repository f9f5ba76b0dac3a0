"""The words of the waitlist as types: statuses, decisions and the frozen values passed between storeys.

Knows no table, no request and no clock. Times (`*_at`) are integer Unix seconds, UTC; ids are lower-case UUID text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DAY_SECONDS: Final = 86_400
# The whole of a list's id and of an API client's name.
SLUG_PATTERN: Final = "[a-z0-9-]{1,40}"
# Of a provider's words, which are for a person's eye: a diagnostic can be a megabyte.
MOST_DETAIL_CHARACTERS: Final = 500
# Opens what a mail reader decodes (RFC 2047), whatever stands around it: never in a name or a title that we send.
ENCODED_WORD: Final = "=?"


class ListState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class SubscriberStatus(StrEnum):
    PENDING = "pending"
    CONFIRMED = "confirmed"
    UNSUBSCRIBED = "unsubscribed"


class DeliveryStatus(StrEnum):
    QUEUED = "queued"
    SENDING = "sending"
    SENT = "sent"
    DELIVERED = "delivered"
    BOUNCED = "bounced"
    COMPLAINED = "complained"
    REJECTED = "rejected"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class OutboxStatus(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    DISPATCHING = "dispatching"
    SENT = "sent"
    DEAD = "dead"
    CANCELLED = "cancelled"


class Reason(StrEnum):
    """Why a delivery was made."""

    SIGNUP = "signup"
    COOLDOWN_RESEND = "cooldown_resend"
    FAILURE_RETRY = "failure_retry"
    OPERATOR_RESEND = "operator_resend"


class Channel(StrEnum):
    FORM = "form"
    API = "api"
    CLI = "cli"


class RequestState(StrEnum):
    PROCESSING = "processing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Decision(StrEnum):
    """What a submission came to. For the owner (ledger, explain, metrics), never for the visitor."""

    QUEUED = "queued"
    RETRY_QUEUED = "retry_queued"
    RETRY_CLAIMED = "retry_claimed"
    ALREADY_CONFIRMED = "already_confirmed"
    IN_FLIGHT = "in_flight"
    COOLDOWN = "cooldown"
    CAPPED = "capped"
    SUPPRESSED = "suppressed"
    TRAPPED = "trapped"
    LIST_CLOSED = "list_closed"


class Suppression(StrEnum):
    """Why an address gets no mail."""

    COMPLAINT = "complaint"
    NOT_ME = "not_me"
    OPERATOR = "operator"


class OutcomeKind(StrEnum):
    """What one send attempt came to. Everything but ACCEPTED is a claim, not a fact."""

    ACCEPTED = "accepted"
    TEMPORARY = "temporary"
    REJECTED = "rejected"
    FAILED = "failed"
    SYSTEMIC = "systemic"
    IN_DOUBT = "in_doubt"


class EventType(StrEnum):
    """What can stand in delivery_events. The OutcomeKind values are event types too, written when an attempt ends."""

    ATTEMPT = "attempt"
    ACCEPTED = "accepted"
    TEMPORARY = "temporary"
    REJECTED = "rejected"
    FAILED = "failed"
    SYSTEMIC = "systemic"
    IN_DOUBT = "in_doubt"
    SUPERSEDED = "superseded"
    # The provider says that it has the mail; ACCEPTED is our own record of that.
    SENT = "sent"
    DELIVERED = "delivered"
    BOUNCED = "bounced"
    COMPLAINED = "complained"
    SOFT_BOUNCED = "soft_bounced"
    DELAYED = "delayed"
    # It names another recipient than the delivery's: kept, and changes nothing.
    FOREIGN = "foreign"


class ConfirmOutcome(StrEnum):
    """What a confirmation link comes to, in order of precedence from the first."""

    NOT_OURS = "not_ours"
    LEFT = "left"
    ALREADY_CONFIRMED = "already_confirmed"
    EXPIRED = "expired"
    CONFIRMED_NOW = "confirmed_now"


OPEN_DELIVERY = (DeliveryStatus.QUEUED, DeliveryStatus.SENDING)
RETRYABLE_DELIVERY = (DeliveryStatus.BOUNCED, DeliveryStatus.FAILED, DeliveryStatus.REJECTED)
WAITING_OUTBOX = (OutboxStatus.QUEUED, OutboxStatus.LEASED)
ENDED_OUTBOX = (OutboxStatus.SENT, OutboxStatus.DEAD, OutboxStatus.CANCELLED)


@dataclass(frozen=True)
class Waitlist:
    id: str
    title: str
    description: str
    state: ListState
    created_at: int


@dataclass(frozen=True)
class Consent:
    list_id: str
    version: int
    text: str
    created_at: int


@dataclass(frozen=True)
class Subscriber:
    id: str
    list_id: str
    email: str
    status: SubscriberStatus
    consent_at: int
    consent_version: int
    confirmation_token_hash: str | None
    confirmation_expires_at: int | None
    confirmation_rotated_at: int | None
    confirmed_at: int | None
    confirmed_delivery_id: str | None
    unsubscribed_at: int | None


@dataclass(frozen=True)
class Delivery:
    sequence: int
    id: str
    subscriber_id: str
    operation_key: str
    generation: int
    retry_of_delivery_id: str | None
    signup_request_id: str | None
    reason: Reason
    status: DeliveryStatus
    token_hash: str
    token_expires_at: int
    consent_at: int
    consent_version: int
    recipient_hmac: str
    provider: str | None
    provider_message_id: str | None
    attempts: int
    error_code: str | None
    created_at: int
    first_dispatch_at: int | None
    settled_at: int | None


@dataclass(frozen=True)
class CooldownBounds:
    """`rotated_at` in (oldest, newest] means that the cooldown is running; outside it is over."""

    oldest: int
    newest: int


@dataclass(frozen=True)
class KeyClaim:
    """A client's claim on an idempotency key: the same key with the same request gets the same answer for so long."""

    scope: str
    key: str
    # Version and keyed HMAC of the request, with a colon between.
    request_hash: str
    retention_seconds: int
    # Where the status of operations is asked for; the operation's id follows.
    status_url: str


@dataclass(frozen=True)
class Submission:
    """One accepted form post or API call, checked and canonical; `email_hmac` and `cap_hmac` are keyed digests of it."""

    operation_id: str
    channel: Channel
    list_id: str
    email: str
    email_hmac: str
    cap_hmac: str
    consent_version: int
    source: str | None = None
    trapped: bool = False
    # None: given with this submission.
    consent_at: int | None = None
    # None: a form, which has no key.
    claim: KeyClaim | None = None


@dataclass(frozen=True)
class PreparedMail:
    """All that a new delivery needs, made before the transaction so that a rerun body writes the same mail."""

    subscriber_id: str
    delivery_id: str
    outbox_id: str
    template: str
    token_hash: str
    # From the transaction on, as the mail says in words.
    token_ttl_seconds: int
    confirmation_url: str
    message: str
    payload_hash: str


@dataclass(frozen=True)
class Answer:
    """How a submission ended: for the ledger and the API; the form shows one neutral message whatever it says."""

    operation_id: str
    list_id: str
    state: RequestState
    decision: Decision
    job_id: str
    replayed: bool = False
    response_code: int | None = None
    response_body: str | None = None


@dataclass(frozen=True)
class ApiClient:
    name: str
    created_at: int
    # None: never used.
    last_used_at: int | None
    # None: its token works.
    revoked_at: int | None


@dataclass(frozen=True)
class Outcome:
    """What a provider answered to one attempt. `detail` holds no address, link or token, which is the sender's to see to;
    it is cut before it is stored.
    """

    kind: OutcomeKind
    code: str = ""
    detail: str = ""
    provider_message_id: str | None = None
    retry_after_seconds: int | None = None

    @property
    def words(self) -> str:
        """Code and detail, as far as there are any."""
        return f"{self.code} {self.detail}".strip()


@dataclass(frozen=True)
class ProviderEvent:
    """What a provider reports about one mail. `detail` holds no address; it is cut before it is stored."""

    # The same however often it is delivered, and no other's.
    event_id: str
    type: EventType
    # As the provider writes it; None: it names nobody.
    recipient: str | None
    # Ours, given along with the mail; None: it did not come back.
    delivery_id: str | None
    provider_message_id: str | None
    detail: str = ""
