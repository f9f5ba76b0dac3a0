"""The tables. SQLAlchemy Core only; both engines are made from this one description.

Every CHECK, foreign key and index has a name. A nullable column says what NULL means. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy import CheckConstraint, Column, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint

from waitlist import model

metadata = sa.MetaData(naming_convention={"pk": "%(table_name)s_pkey"})

# PostgreSQL compares text byte by byte anyway; SQLite's index then answers any case of an address.
_Email = sa.Text().with_variant(sa.Text(collation="NOCASE"), "sqlite")
# SQLite gives AUTOINCREMENT (no number is used twice) to INTEGER PRIMARY KEY alone.
_Sequence = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Time = sa.BigInteger


def _one_of(name: str, column: str, values: Iterable[str]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=name)


def is_literally(column: sa.ColumnElement[str], *values: str) -> sa.ColumnElement[bool]:
    """`column = 'value'` or `column IN ('a', 'b')` with the values in the SQL itself: SQLite takes a partial index
    only where it can read that its condition holds, and a bound parameter hides it.
    """
    literals = [sa.literal_column(f"'{value}'", sa.Text) for value in values]
    return column == literals[0] if len(literals) == 1 else column.in_(literals)


waitlists = sa.Table(
    "waitlists",
    metadata,
    Column("id", sa.Text, primary_key=True),
    Column("title", sa.Text, nullable=False),
    Column("description", sa.Text, nullable=False),
    Column("state", sa.Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    _one_of("waitlists_state_check", "state", model.ListState),
    CheckConstraint("length(id) BETWEEN 1 AND 40", name="waitlists_id_check"),
    CheckConstraint("length(title) BETWEEN 1 AND 200", name="waitlists_title_check"),
)

consent_texts = sa.Table(
    "consent_texts",
    metadata,
    Column("list_id", sa.Text, ForeignKey("waitlists.id", name="consent_texts_list_id_fkey"), primary_key=True),
    Column("version", sa.Integer, primary_key=True, autoincrement=False),
    Column("text", sa.Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    CheckConstraint("version >= 1", name="consent_texts_version_check"),
    CheckConstraint("length(text) BETWEEN 1 AND 2000", name="consent_texts_text_check"),
)

subscribers = sa.Table(
    "subscribers",
    metadata,
    Column("id", sa.Text, primary_key=True),
    Column("list_id", sa.Text, ForeignKey("waitlists.id", name="subscribers_list_id_fkey"), nullable=False),
    Column("email", _Email, nullable=False),
    Column("status", sa.Text, nullable=False),
    Column("consent_at", _Time, nullable=False),
    Column("consent_version", sa.Integer, nullable=False),
    # Both NULL: no mail was made for this subscriber in this life.
    Column("confirmation_token_hash", sa.Text),
    Column("confirmation_expires_at", _Time),
    # NULL: no mail asked for in this life, the cooldown is over.
    Column("confirmation_rotated_at", _Time),
    # NULL: never confirmed. Kept for ever after the first time, also when the person leaves and comes back.
    Column("confirmed_at", _Time),
    # NULL: never confirmed. No foreign key: the delivery lives as long as its subscriber.
    Column("confirmed_delivery_id", sa.Text),
    # NULL: on the list (pending or confirmed).
    Column("unsubscribed_at", _Time),
    ForeignKeyConstraint(
        ["list_id", "consent_version"],
        ["consent_texts.list_id", "consent_texts.version"],
        name="subscribers_consent_fkey",
    ),
    _one_of("subscribers_status_check", "status", model.SubscriberStatus),
    # || '': a bare column would bring its NOCASE into the comparison, and the CHECK would hold for any case.
    CheckConstraint("email || '' = lower(email)", name="subscribers_email_check"),
    CheckConstraint(
        "(confirmation_token_hash IS NULL) = (confirmation_expires_at IS NULL)", name="subscribers_token_check"
    ),
    CheckConstraint("status <> 'confirmed' OR confirmed_at IS NOT NULL", name="subscribers_confirmed_check"),
    CheckConstraint("(status = 'unsubscribed') = (unsubscribed_at IS NOT NULL)", name="subscribers_unsubscribed_check"),
    Index("subscribers_list_email_idx", "list_id", "email", unique=True),
    Index("subscribers_email_idx", "email"),
    # For /metrics: counting by status must not read the rows.
    Index("subscribers_status_idx", "list_id", "status"),
)
# For retention: people who never confirmed.
_never_confirmed = subscribers.c.confirmed_at.is_(None)
Index(
    "subscribers_never_confirmed_idx",
    subscribers.c.consent_at,
    sqlite_where=_never_confirmed,
    postgresql_where=_never_confirmed,
)

email_deliveries = sa.Table(
    "email_deliveries",
    metadata,
    Column("sequence", _Sequence, sa.Identity(always=True), primary_key=True),
    Column("id", sa.Text, nullable=False),
    Column(
        "subscriber_id",
        sa.Text,
        ForeignKey("subscribers.id", name="email_deliveries_subscriber_id_fkey", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("operation_key", sa.Text, nullable=False),
    Column("generation", sa.Integer, nullable=False),
    # NULL: not a retry of a failed delivery.
    Column(
        "retry_of_delivery_id",
        sa.Text,
        ForeignKey("email_deliveries.id", name="email_deliveries_retry_of_delivery_id_fkey", ondelete="SET NULL"),
    ),
    # NULL: the ledger row has been purged.
    Column(
        "signup_request_id",
        sa.Text,
        ForeignKey("signup_requests.operation_id", name="email_deliveries_signup_request_id_fkey", ondelete="SET NULL"),
    ),
    Column("reason", sa.Text, nullable=False),
    Column("status", sa.Text, nullable=False),
    Column("token_hash", sa.Text, nullable=False),
    Column("token_expires_at", _Time, nullable=False),
    Column("consent_at", _Time, nullable=False),
    Column("consent_version", sa.Integer, nullable=False),
    Column("recipient_hmac", sa.Text, nullable=False),
    # NULL: no attempt yet.
    Column("provider", sa.Text),
    # NULL: not accepted yet, or the provider names none.
    Column("provider_message_id", sa.Text),
    Column("attempts", sa.Integer, nullable=False, server_default="0"),
    # NULL: nothing has gone wrong.
    Column("error_code", sa.Text),
    Column("created_at", _Time, nullable=False),
    # NULL: never given to a provider.
    Column("first_dispatch_at", _Time),
    # NULL: still open.
    Column("settled_at", _Time),
    _one_of("email_deliveries_status_check", "status", model.DeliveryStatus),
    _one_of("email_deliveries_reason_check", "reason", model.Reason),
    CheckConstraint("(status IN ('queued', 'sending')) = (settled_at IS NULL)", name="email_deliveries_settled_check"),
    CheckConstraint("status <> 'sending' OR first_dispatch_at IS NOT NULL", name="email_deliveries_dispatch_check"),
    UniqueConstraint("id", name="email_deliveries_id_key"),
    UniqueConstraint("operation_key", name="email_deliveries_operation_key_key"),
    UniqueConstraint("subscriber_id", "generation", name="email_deliveries_generation_key"),
    UniqueConstraint("token_hash", name="email_deliveries_token_hash_key"),
    Index("email_deliveries_cap_idx", "recipient_hmac", "created_at"),
    Index("email_deliveries_status_idx", "status"),
    sqlite_autoincrement=True,
)
Index(
    "email_deliveries_subscriber_sequence_idx",
    email_deliveries.c.subscriber_id,
    email_deliveries.c.sequence.desc(),
)
# One submission, at most one mail; one failure, at most one retry; one open delivery per subscriber.
_request_is_set = email_deliveries.c.signup_request_id.is_not(None)
Index(
    "email_deliveries_request_idx",
    email_deliveries.c.signup_request_id,
    unique=True,
    sqlite_where=_request_is_set,
    postgresql_where=_request_is_set,
)
_retry_is_set = email_deliveries.c.retry_of_delivery_id.is_not(None)
Index(
    "email_deliveries_retry_idx",
    email_deliveries.c.retry_of_delivery_id,
    unique=True,
    sqlite_where=_retry_is_set,
    postgresql_where=_retry_is_set,
)
_is_open = sa.text("status IN ('queued', 'sending')")
Index(
    "email_deliveries_open_idx",
    email_deliveries.c.subscriber_id,
    unique=True,
    sqlite_where=_is_open,
    postgresql_where=_is_open,
)
# For retention: mails that never left.
_never_left = sa.text("status = 'superseded' AND first_dispatch_at IS NULL")
Index(
    "email_deliveries_never_left_idx",
    email_deliveries.c.created_at,
    sqlite_where=_never_left,
    postgresql_where=_never_left,
)
# A provider's events name the mail by the id that the provider gave it.
_message_is_set = email_deliveries.c.provider_message_id.is_not(None)
Index(
    "email_deliveries_message_idx",
    email_deliveries.c.provider_message_id,
    sqlite_where=_message_is_set,
    postgresql_where=_message_is_set,
)

email_outbox = sa.Table(
    "email_outbox",
    metadata,
    Column("id", sa.Text, primary_key=True),
    Column(
        "delivery_id",
        sa.Text,
        ForeignKey("email_deliveries.id", name="email_outbox_delivery_id_fkey", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("template", sa.Text, nullable=False),
    Column("recipient", sa.Text, nullable=False),
    # Both blanked ('') when the row ends: they hold the raw token.
    Column("confirmation_url", sa.Text, nullable=False),
    Column("message", sa.Text, nullable=False),
    Column("payload_hash", sa.Text, nullable=False),
    Column("status", sa.Text, nullable=False),
    Column("available_at", _Time, nullable=False),
    Column("attempts", sa.Integer, nullable=False, server_default="0"),
    Column("claims", sa.Integer, nullable=False, server_default="0"),
    Column("in_doubt", sa.Boolean(create_constraint=True, name="email_outbox_in_doubt_check"), nullable=False),
    # All three NULL: not leased.
    Column("lease_token", sa.Text),
    Column("lease_owner", sa.Text),
    Column("lease_expires_at", _Time),
    # NULL: nothing has gone wrong.
    Column("last_error", sa.Text),
    Column("created_at", _Time, nullable=False),
    # NULL: the row has not ended.
    Column("finished_at", _Time),
    _one_of("email_outbox_status_check", "status", model.OutboxStatus),
    CheckConstraint(
        "(status IN ('leased', 'dispatching')) = (lease_token IS NOT NULL)"
        " AND (lease_token IS NULL) = (lease_owner IS NULL)"
        " AND (lease_token IS NULL) = (lease_expires_at IS NULL)",
        name="email_outbox_lease_check",
    ),
    CheckConstraint(
        "(status IN ('sent', 'dead', 'cancelled')) = (finished_at IS NOT NULL)", name="email_outbox_finished_check"
    ),
    CheckConstraint("finished_at IS NULL OR (confirmation_url = '' AND message = '')", name="email_outbox_blank_check"),
    UniqueConstraint("delivery_id", name="email_outbox_delivery_id_key"),
)
_is_queued = sa.text("status = 'queued'")
Index(
    "email_outbox_due_idx",
    email_outbox.c.available_at,
    email_outbox.c.id,
    sqlite_where=_is_queued,
    postgresql_where=_is_queued,
)
_is_leased = sa.text("status IN ('leased', 'dispatching')")
Index(
    "email_outbox_lease_idx",
    email_outbox.c.lease_expires_at,
    sqlite_where=_is_leased,
    postgresql_where=_is_leased,
)
# For retention and for what needs a person.
_is_ended = sa.text("finished_at IS NOT NULL")
Index(
    "email_outbox_finished_idx",
    email_outbox.c.finished_at,
    sqlite_where=_is_ended,
    postgresql_where=_is_ended,
)
_is_dead = sa.text("status = 'dead'")
Index(
    "email_outbox_dead_idx",
    email_outbox.c.finished_at,
    sqlite_where=_is_dead,
    postgresql_where=_is_dead,
)

delivery_events = sa.Table(
    "delivery_events",
    metadata,
    Column("id", sa.Text, primary_key=True),
    # NULL: the event waits for its delivery (the provider was faster than our own record).
    Column(
        "delivery_id",
        sa.Text,
        ForeignKey("email_deliveries.id", name="delivery_events_delivery_id_fkey", ondelete="CASCADE"),
    ),
    Column("type", sa.Text, nullable=False),
    Column("at", _Time, nullable=False),
    # NULL: nothing to do with a provider.
    Column("provider", sa.Text),
    # NULL: our own event, not a provider's.
    Column("event_id", sa.Text),
    Column("provider_message_id", sa.Text),
    # Keyed digest of whom a provider's event is about. NULL: our own event, or it names nobody.
    Column("recipient_hmac", sa.Text),
    Column("app_version", sa.Text, nullable=False),
    # NULL: not the end of an attempt.
    Column("duration_ms", sa.Integer),
    Column("detail", sa.Text, nullable=False),
    _one_of("delivery_events_type_check", "type", model.EventType),
    Index("delivery_events_delivery_idx", "delivery_id", "at"),
    Index("delivery_events_type_idx", "type", "at"),
    Index("delivery_events_at_idx", "at"),
)
_event_is_set = delivery_events.c.event_id.is_not(None)
Index(
    "delivery_events_provider_event_idx",
    delivery_events.c.provider,
    delivery_events.c.event_id,
    unique=True,
    sqlite_where=_event_is_set,
    postgresql_where=_event_is_set,
)
# "Is a systemic fault open?" asks for the newest end of an attempt.
_is_attempt_end = delivery_events.c.duration_ms.is_not(None)
Index(
    "delivery_events_attempt_end_idx",
    delivery_events.c.at,
    delivery_events.c.id,
    sqlite_where=_is_attempt_end,
    postgresql_where=_is_attempt_end,
)
_is_parked = delivery_events.c.delivery_id.is_(None)
Index(
    "delivery_events_parked_idx",
    delivery_events.c.provider_message_id,
    delivery_events.c.at,
    sqlite_where=_is_parked,
    postgresql_where=_is_parked,
)

signup_requests = sa.Table(
    "signup_requests",
    metadata,
    Column("operation_id", sa.Text, primary_key=True),
    Column("channel", sa.Text, nullable=False),
    # Both NULL: a form has no key; key NULL: released after its retention.
    Column("scope", sa.Text),
    Column("idempotency_key", sa.Text),
    # "<version>:<keyed HMAC>"; NULL: a form, or the key was released.
    Column("request_hash", sa.Text),
    Column("state", sa.Text, nullable=False),
    # NULL only inside the transaction that writes the row.
    Column("decision", sa.Text),
    # Both NULL: the form's answer is one constant text; body NULL too when the key was released.
    Column("response_code", sa.Integer),
    Column("response_body", sa.Text),
    Column("list_id", sa.Text, ForeignKey("waitlists.id", name="signup_requests_list_id_fkey"), nullable=False),
    # Both NULL: the person was erased. Subscriber NULL: nobody stood under the address.
    Column("email_hmac", sa.Text),
    Column("subscriber_id", sa.Text),
    # The delivery's id if one was queued; no foreign key: the answer that named it must not change.
    Column("job_id", sa.Text, nullable=False),
    # NULL: the client named none.
    Column("source", sa.Text),
    Column("created_at", _Time, nullable=False),
    # NULL: no key.
    Column("key_expires_at", _Time),
    Column("replays", sa.Integer, nullable=False, server_default="0"),
    _one_of("signup_requests_channel_check", "channel", model.Channel),
    _one_of("signup_requests_state_check", "state", model.RequestState),
    _one_of("signup_requests_decision_check", "decision", model.Decision),
    CheckConstraint("(state = 'processing') = (decision IS NULL)", name="signup_requests_decided_check"),
    CheckConstraint(
        "idempotency_key IS NULL OR (scope IS NOT NULL AND request_hash IS NOT NULL AND key_expires_at IS NOT NULL)",
        name="signup_requests_key_check",
    ),
    Index("signup_requests_email_idx", "email_hmac", "created_at"),
    Index("signup_requests_created_idx", "created_at"),
    Index("signup_requests_subscriber_idx", "subscriber_id"),
)
_key_is_set = signup_requests.c.idempotency_key.is_not(None)
# For retention: the keys whose time is over.
Index(
    "signup_requests_key_expiry_idx",
    signup_requests.c.key_expires_at,
    sqlite_where=_key_is_set,
    postgresql_where=_key_is_set,
)
Index(
    "signup_requests_key_idx",
    signup_requests.c.scope,
    signup_requests.c.idempotency_key,
    unique=True,
    sqlite_where=_key_is_set,
    postgresql_where=_key_is_set,
)

suppressions = sa.Table(
    "suppressions",
    metadata,
    Column("email_hmac", sa.Text, primary_key=True),
    Column("reason", sa.Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    _one_of("suppressions_reason_check", "reason", model.Suppression),
)

api_clients = sa.Table(
    "api_clients",
    metadata,
    Column("name", sa.Text, primary_key=True),
    # SHA-256 of the token; the token itself is shown once and kept nowhere.
    Column("token_hash", sa.Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    # NULL: never used.
    Column("last_used_at", _Time),
    # NULL: the token works.
    Column("revoked_at", _Time),
    UniqueConstraint("token_hash", name="api_clients_token_hash_key"),
)
