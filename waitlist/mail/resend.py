"""Resend: send over its HTTP API, verify its webhooks, read its events. All of it is in this file.

Facts are from resend.com/docs: api-reference/emails/send-email, api-reference/errors, dashboard/emails/idempotency-keys
and webhooks/event-types. Each attempt is one request on a connection of its own: nothing is repeated behind our back,
and a connection that the other side has forgotten cannot put a mail in doubt.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parseaddr
from enum import IntEnum
from typing import Any, Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import structlog
from standardwebhooks.webhooks import Webhook

from waitlist.mail.base import Mail, ParsedEvents, scrub
from waitlist.mail.deadline import Deadline, Wire, dial
from waitlist.mail.message import message_bytes
from waitlist.model import EventType, Outcome, OutcomeKind, ProviderEvent
from waitlist.settings import Settings
from waitlist.version import __version__

log: Any = structlog.get_logger("waitlist.mail")

ENDPOINT: Final = "https://api.resend.com"
# Keys are kept for 24 hours.
KEY_WINDOW_SECONDS: Final = 86_400
# Our delivery's id goes along under this name and comes back with each event.
DELIVERY_TAG: Final = "delivery_id"
# Resend writes these itself; a second From or Date would contradict it.
_OWN_HEADERS: Final = frozenset({"from", "date"})
# An answer is an id or an error of some words; more is not from Resend.
_MOST_ANSWER_BYTES: Final = 65_536
_FAULTS: Final = (OSError, ValueError, http.client.HTTPException)
# These are about our account, key or sender address, whatever status they come with: every mail would fare alike.
_SYSTEMIC_NAMES: Final = frozenset(
    {
        *("missing_api_key", "invalid_api_key", "restricted_api_key", "suspended_api_key", "invalid_permission"),
        *("invalid_from_address", "invalid_access", "invalid_region"),
        *("rate_limit_exceeded", "daily_quota_exceeded", "monthly_quota_exceeded"),
    }
)
# 400 also for an Authorization header that holds no key; told from a fault in the mail by the words alone.
_ABOUT_THE_KEY: Final = re.compile(r"\bAPI key\b", re.IGNORECASE)
_ABOUT_THE_RECIPIENT: Final = re.compile(r"[`'\"]to[`'\"]")
_WORD: Final = re.compile(r"[a-z0-9_]{1,60}")
_CONCURRENT: Final = "concurrent_idempotent_requests"
_KEY_TAKEN: Final = "invalid_idempotent_request"

# Both ways, for a replayed event and for a wrong clock; what Svix itself recommends.
TOLERANCE_SECONDS: Final = 300
_TIMESTAMP: Final = re.compile(r"[0-9]{1,12}")
_TYPES: Final = {
    "email.sent": EventType.SENT,
    "email.delivered": EventType.DELIVERED,
    # Nobody opens what did not arrive.
    "email.opened": EventType.DELIVERED,
    "email.clicked": EventType.DELIVERED,
    "email.bounced": EventType.BOUNCED,
    "email.complained": EventType.COMPLAINED,
    "email.delivery_delayed": EventType.DELAYED,
    # Resend took the mail and then did not deliver it.
    "email.failed": EventType.BOUNCED,
    "email.suppressed": EventType.BOUNCED,
}
_HARD_BOUNCES: Final = frozenset({"", "permanent"})


class Phase(IntEnum):
    """How far an attempt came."""

    CONNECT = 1
    TLS = 2
    REQUEST = 3
    # The whole request has left: the mail may be accepted.
    ANSWER = 4


@dataclass(frozen=True)
class Account:
    api_key: str = field(repr=False)
    endpoint: SplitResult

    @classmethod
    def from_settings(cls, settings: Settings) -> Account:
        parts = urlsplit(settings.mail_url.get_secret_value())
        endpoint = parse_qs(parts.query).get("endpoint", [ENDPOINT])[-1]
        return cls(unquote(parts.netloc), urlsplit(endpoint))


@dataclass(frozen=True)
class _Reply:
    status: int
    headers: http.client.HTTPMessage
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """Resend's word for an error; empty where it is none."""
        word = str(self.body.get("name") or "")
        return word.lower() if _WORD.fullmatch(word.lower()) else ""

    @property
    def words(self) -> str:
        return str(self.body.get("message") or "")


class _Attempt(Deadline):
    phase = Phase.CONNECT


class ResendSender:
    provider = "resend"
    key_window_seconds: int | None = KEY_WINDOW_SECONDS

    def __init__(self, account: Account, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: whom to trust; None: the authorities this machine trusts."""
        self._account = account
        self._tls = tls

    @classmethod
    def from_settings(cls, settings: Settings) -> ResendSender:
        return cls(Account.from_settings(settings))

    def send(self, mail: Mail, *, key: str, deadline_seconds: float) -> Outcome:
        body = payload(mail, key)
        attempt = _Attempt(deadline_seconds)
        try:
            reply = self._ask("POST", "/emails", attempt, {"Idempotency-Key": key}, body)
        except _FAULTS as error:
            return self._decide_silence(attempt, error, mail.recipient)
        outcome = _decide(reply)
        if reply.status == 409 and reply.name == _KEY_TAKEN:
            log.error("idempotency_key_taken", delivery_id=key, provider=self.provider)
        return self._told(outcome, reply.words, mail.recipient)

    def check(self, *, deadline_seconds: float) -> Outcome:
        """A key that may only send is refused this question, and so known to be good."""
        attempt = _Attempt(deadline_seconds)
        try:
            reply = self._ask("GET", "/domains", attempt, {}, None)
        except _FAULTS as error:
            return self._decide_silence(attempt, error, "")
        if reply.status // 100 == 2 or reply.name == "restricted_api_key":
            return Outcome(OutcomeKind.ACCEPTED, detail=f"{self._account.endpoint.netloc}, the API key is good")
        return self._told(_decide(reply), reply.words, "")

    def close(self) -> None:
        """No connection outlives its attempt."""

    def _ask(self, method: str, path: str, attempt: _Attempt, headers: Mapping[str, str], body: bytes | None) -> _Reply:
        endpoint = self._account.endpoint
        connection = http.client.HTTPConnection(endpoint.netloc)
        # With a socket in place it dials none itself.
        connection.sock = self._connect(attempt)
        try:
            attempt.phase = Phase.REQUEST
            connection.request(method, endpoint.path.rstrip("/") + path, body, {**self._headers(), **headers})
            attempt.phase = Phase.ANSWER
            response = connection.getresponse()
            return _Reply(response.status, response.headers, _read(response))
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        # Without a User-Agent Resend answers 403.
        return {
            "Authorization": f"Bearer {self._account.api_key}",
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": f"waitlist/{__version__}",
            "Connection": "close",
        }

    def _connect(self, attempt: _Attempt) -> Any:
        endpoint = self._account.endpoint
        host = endpoint.hostname or ""
        is_secret = endpoint.scheme == "https"
        connected = dial(host, endpoint.port or (443 if is_secret else 80), attempt)
        try:
            if is_secret:
                attempt.phase = Phase.TLS
                self._tls = self._tls or ssl.create_default_context()
                # The handshake counts its time-out over all of its packets.
                connected.settimeout(attempt.remaining())
                connected = self._tls.wrap_socket(connected, server_hostname=host)
        except BaseException:
            connected.close()
            raise
        return Wire(connected, attempt)

    def _decide_silence(self, attempt: _Attempt, error: Exception, recipient: str) -> Outcome:
        phase = attempt.phase.name.lower()
        if attempt.phase <= Phase.TLS:
            kind = OutcomeKind.SYSTEMIC
        else:
            # Half a request is none: the server knows how long its body must be.
            kind = OutcomeKind.TEMPORARY if attempt.phase is Phase.REQUEST else OutcomeKind.IN_DOUBT
        word = f"timeout_{phase}" if attempt.is_over else f"lost_{phase}"
        return self._told(Outcome(kind, word), str(error) or type(error).__name__, recipient)

    def _told(self, outcome: Outcome, words: str, recipient: str) -> Outcome:
        detail = scrub(words.replace(self._account.api_key, "[key]"), recipient=recipient)
        return Outcome(outcome.kind, outcome.code, detail, outcome.provider_message_id, outcome.retry_after_seconds)


def payload(mail: Mail, delivery_id: str) -> bytes:
    """The body of `POST /emails`: the same mail gives the same bytes, which the provider's key memory compares.

    Raises ValueError for what could not be written as one mail to one recipient.
    """
    message_bytes(mail)  # refuses what every other sender would refuse
    headers = dict(mail.headers)
    fields = {
        "from": headers["From"],
        "to": [mail.recipient],
        "subject": mail.subject,
        "text": mail.text,
        "html": mail.html,
        "headers": {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS},
        "tags": [{"name": DELIVERY_TAG, "value": delivery_id}],
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _decide(reply: _Reply) -> Outcome:
    code = "_".join(filter(None, ("http", str(reply.status), reply.name)))
    message_id = _short(reply.body.get("id")) if reply.status // 100 == 2 else None
    return Outcome(_decide_kind(reply), code, provider_message_id=message_id, retry_after_seconds=_retry_after(reply))


def _decide_kind(reply: _Reply) -> OutcomeKind:
    """What is neither a clear yes nor a clear no is asked again with the same key."""
    status, name = reply.status, reply.name
    if status // 100 == 2:
        # Without an id it is a proxy's page or half an answer.
        return OutcomeKind.ACCEPTED if _is_id(reply.body.get("id")) else OutcomeKind.IN_DOUBT
    if status == 409 and name == _KEY_TAKEN:
        # The key belongs to this delivery alone, so Resend has had its mail, though with other bytes.
        return OutcomeKind.ACCEPTED
    if status in (408, 409) or status >= 500:
        # 409: our own earlier request is still being worked on. Not "temporary": that would be tried again even when
        # the key's time is over, and then it is a second mail.
        return OutcomeKind.IN_DOUBT
    if status in (400, 413, 422, 451) and name not in _SYSTEMIC_NAMES:
        return _decide_refusal(reply)
    # 401, 403, 429, and what only a wrong endpoint answers: 3xx, 404, 405.
    return OutcomeKind.SYSTEMIC


def _decide_refusal(reply: _Reply) -> OutcomeKind:
    """A fault in this one mail, unless the words say otherwise; `validation_error` alone says too little."""
    if reply.name == "validation_error" and _ABOUT_THE_KEY.search(reply.words):
        return OutcomeKind.SYSTEMIC
    if reply.name == "validation_error" and _ABOUT_THE_RECIPIENT.search(reply.words):
        return OutcomeKind.REJECTED
    return OutcomeKind.FAILED


def _read(response: http.client.HTTPResponse) -> dict[str, Any]:
    """Empty where the answer is no JSON object or does not come in full: then the status alone counts."""
    try:
        body = json.loads(response.read(_MOST_ANSWER_BYTES))
    except (*_FAULTS, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _retry_after(reply: _Reply) -> int | None:
    seconds = reply.headers.get("Retry-After", "").strip()
    return int(seconds) if re.fullmatch(r"[0-9]{1,9}", seconds) else None


class ResendWebhook:
    """Resend signs as Svix does: svix-id, svix-timestamp and svix-signature over the raw body."""

    def secrets(self, settings: Settings) -> tuple[str, ...]:
        return settings.resend_webhook_secrets

    def verify(self, headers: Mapping[str, str], body: bytes, secrets: tuple[str, ...], now: float) -> str | None:
        return verify_webhook(headers, body, secrets, now)

    def parse(self, body: bytes, message_id: str) -> ParsedEvents:
        return parse_events(body, message_id)


def verify_webhook(headers: Mapping[str, str], body: bytes, secrets: tuple[str, ...], now: float) -> str | None:
    """The message's id if one of `secrets` signed exactly this body within five minutes of `now`; else None.

    The library's own verify() asks the wall clock and stops at the first match; only its signing is used.
    """
    message_id = headers.get("svix-id", "")
    timestamp = headers.get("svix-timestamp", "")
    signatures = headers.get("svix-signature", "").encode("utf-8", "replace").split()
    if not message_id or not _TIMESTAMP.fullmatch(timestamp) or abs(int(timestamp) - now) > TOLERANCE_SECONDS:
        return None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None  # no event of theirs: JSON is UTF-8
    signed_at = datetime.fromtimestamp(int(timestamp), UTC)
    is_signed = False
    for secret in secrets:
        expected = Webhook(secret).sign(message_id, signed_at, text).encode()
        for signature in signatures:
            is_signed |= hmac.compare_digest(expected, signature)
    return message_id if is_signed else None


def parse_events(body: bytes, message_id: str) -> ParsedEvents:
    """One event, or several in an array. `message_id` is the same on each delivery of them.

    Raises ValueError if `body` is no JSON at all. No address in it is ever fetched.
    """
    try:
        read = json.loads(body)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    parsed = ParsedEvents()
    for number, item in enumerate(read if isinstance(read, list) else [read]):
        event_id = f"{message_id}/{number}" if isinstance(read, list) else message_id
        try:
            event = _event(item, event_id)
        except (TypeError, ValueError, AttributeError, KeyError):
            parsed.bad += 1
            continue
        if event is None:
            parsed.ignored += 1
        else:
            parsed.events.append(event)
    return parsed


def _event(item: dict[str, Any], event_id: str) -> ProviderEvent | None:
    """None for what is not about a mail that we sent: contacts, domains, received mail, and types to come."""
    name = item["type"]
    if not isinstance(name, str):
        raise TypeError("a type is a string")
    if name not in _TYPES:
        return None
    data = item["data"]
    recipient = _recipient(data.get("to"))
    return ProviderEvent(
        event_id=_id(event_id),
        type=_type(name, data),
        recipient=recipient,
        delivery_id=_short(_tag(data.get("tags"))),
        provider_message_id=_short(data.get("email_id")),
        detail=scrub(_detail(name, data), recipient=recipient or ""),
    )


def _type(name: str, data: dict[str, Any]) -> EventType:
    """A bounce is hard unless Resend says something else than Permanent (Transient, Temporary, Undetermined)."""
    if name == "email.bounced" and str((data.get("bounce") or {}).get("type") or "").lower() not in _HARD_BOUNCES:
        return EventType.SOFT_BOUNCED
    return _TYPES[name]


def _detail(name: str, data: dict[str, Any]) -> str:
    """Why, in the provider's words. Nothing of an open or a click: who read what, where, is none of our business."""
    about: dict[str, Any] = data.get("bounce") or data.get("failed") or data.get("suppressed") or {}
    words = [about.get(key) for key in ("type", "subType", "reason", "message")]
    return " ".join([name, *(str(word) for word in words if word)])


def _recipient(to: Any) -> str | None:
    """Each mail of ours has one; an event that names several is not about it alone."""
    listed = [to] if isinstance(to, str) else (to or [])
    if not all(isinstance(one, str) for one in listed):
        raise TypeError("a recipient is a string")
    return (parseaddr(listed[0])[1] or listed[0]) if len(listed) == 1 else (", ".join(listed) or None)


def _tag(tags: Any) -> Any:
    """Resend sends back an object; older webhooks and some SDKs show the array that was sent."""
    if isinstance(tags, list):
        return {tag["name"]: tag["value"] for tag in tags}.get(DELIVERY_TAG)
    return (tags or {}).get(DELIVERY_TAG)


def _short(value: Any) -> str | None:
    """An id as it can be stored and looked up; None for anything else, which could only be compared with nothing."""
    return value if _is_id(value) else None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def _id(event_id: str) -> str:
    return (
        event_id if len(event_id) <= 256 and event_id.isprintable() else hashlib.sha256(event_id.encode()).hexdigest()
    )
