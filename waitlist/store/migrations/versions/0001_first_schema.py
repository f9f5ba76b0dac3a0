"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_clients",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token_hash", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("api_clients_pkey")),
        sa.UniqueConstraint("token_hash", name="api_clients_token_hash_key"),
    )
    op.create_table(
        "suppressions",
        sa.Column("email_hmac", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("reason IN ('complaint', 'not_me', 'operator')", name="suppressions_reason_check"),
        sa.PrimaryKeyConstraint("email_hmac", name=op.f("suppressions_pkey")),
    )
    op.create_table(
        "waitlists",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('open', 'closed')", name="waitlists_state_check"),
        sa.CheckConstraint("length(id) BETWEEN 1 AND 40", name="waitlists_id_check"),
        sa.CheckConstraint("length(title) BETWEEN 1 AND 200", name="waitlists_title_check"),
        sa.PrimaryKeyConstraint("id", name=op.f("waitlists_pkey")),
    )
    op.create_table(
        "consent_texts",
        sa.Column("list_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("length(text) BETWEEN 1 AND 2000", name="consent_texts_text_check"),
        sa.CheckConstraint("version >= 1", name="consent_texts_version_check"),
        sa.ForeignKeyConstraint(["list_id"], ["waitlists.id"], name="consent_texts_list_id_fkey"),
        sa.PrimaryKeyConstraint("list_id", "version", name=op.f("consent_texts_pkey")),
    )
    op.create_table(
        "signup_requests",
        sa.Column("operation_id", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_hash", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=True),
        sa.Column("response_code", sa.Integer(), nullable=True),
        sa.Column("response_body", sa.Text(), nullable=True),
        sa.Column("list_id", sa.Text(), nullable=False),
        sa.Column("email_hmac", sa.Text(), nullable=True),
        sa.Column("subscriber_id", sa.Text(), nullable=True),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("key_expires_at", sa.BigInteger(), nullable=True),
        sa.Column("replays", sa.Integer(), server_default="0", nullable=False),
        sa.CheckConstraint("(state = 'processing') = (decision IS NULL)", name="signup_requests_decided_check"),
        sa.CheckConstraint("channel IN ('form', 'api', 'cli')", name="signup_requests_channel_check"),
        sa.CheckConstraint(
            "decision IN ('queued', 'retry_queued', 'retry_claimed', 'already_confirmed', 'in_flight', 'cooldown', 'capped', 'suppressed', 'trapped', 'list_closed')",
            name="signup_requests_decision_check",
        ),
        sa.CheckConstraint("state IN ('processing', 'succeeded', 'failed')", name="signup_requests_state_check"),
        sa.CheckConstraint(
            "idempotency_key IS NULL OR (scope IS NOT NULL AND request_hash IS NOT NULL AND key_expires_at IS NOT NULL)",
            name="signup_requests_key_check",
        ),
        sa.ForeignKeyConstraint(["list_id"], ["waitlists.id"], name="signup_requests_list_id_fkey"),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("signup_requests_pkey")),
    )
    op.create_index("signup_requests_created_idx", "signup_requests", ["created_at"], unique=False)
    op.create_index("signup_requests_email_idx", "signup_requests", ["email_hmac", "created_at"], unique=False)
    op.create_index(
        "signup_requests_key_expiry_idx",
        "signup_requests",
        ["key_expires_at"],
        unique=False,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index(
        "signup_requests_key_idx",
        "signup_requests",
        ["scope", "idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index("signup_requests_subscriber_idx", "signup_requests", ["subscriber_id"], unique=False)
    op.create_table(
        "subscribers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("list_id", sa.Text(), nullable=False),
        sa.Column("email", sa.Text().with_variant(sa.Text(collation="NOCASE"), "sqlite"), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("consent_at", sa.BigInteger(), nullable=False),
        sa.Column("consent_version", sa.Integer(), nullable=False),
        sa.Column("confirmation_token_hash", sa.Text(), nullable=True),
        sa.Column("confirmation_expires_at", sa.BigInteger(), nullable=True),
        sa.Column("confirmation_rotated_at", sa.BigInteger(), nullable=True),
        sa.Column("confirmed_at", sa.BigInteger(), nullable=True),
        sa.Column("confirmed_delivery_id", sa.Text(), nullable=True),
        sa.Column("unsubscribed_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(status = 'unsubscribed') = (unsubscribed_at IS NOT NULL)", name="subscribers_unsubscribed_check"
        ),
        sa.CheckConstraint("email || '' = lower(email)", name="subscribers_email_check"),
        sa.CheckConstraint("status <> 'confirmed' OR confirmed_at IS NOT NULL", name="subscribers_confirmed_check"),
        sa.CheckConstraint("status IN ('pending', 'confirmed', 'unsubscribed')", name="subscribers_status_check"),
        sa.CheckConstraint(
            "(confirmation_token_hash IS NULL) = (confirmation_expires_at IS NULL)", name="subscribers_token_check"
        ),
        sa.ForeignKeyConstraint(
            ["list_id", "consent_version"],
            ["consent_texts.list_id", "consent_texts.version"],
            name="subscribers_consent_fkey",
        ),
        sa.ForeignKeyConstraint(["list_id"], ["waitlists.id"], name="subscribers_list_id_fkey"),
        sa.PrimaryKeyConstraint("id", name=op.f("subscribers_pkey")),
    )
    op.create_index("subscribers_email_idx", "subscribers", ["email"], unique=False)
    op.create_index("subscribers_list_email_idx", "subscribers", ["list_id", "email"], unique=True)
    op.create_index(
        "subscribers_never_confirmed_idx",
        "subscribers",
        ["consent_at"],
        unique=False,
        sqlite_where=sa.text("confirmed_at IS NULL"),
        postgresql_where=sa.text("confirmed_at IS NULL"),
    )
    op.create_index("subscribers_status_idx", "subscribers", ["list_id", "status"], unique=False)
    op.create_table(
        "email_deliveries",
        sa.Column(
            "sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(always=True), nullable=False
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("subscriber_id", sa.Text(), nullable=False),
        sa.Column("operation_key", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("retry_of_delivery_id", sa.Text(), nullable=True),
        sa.Column("signup_request_id", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("token_hash", sa.Text(), nullable=False),
        sa.Column("token_expires_at", sa.BigInteger(), nullable=False),
        sa.Column("consent_at", sa.BigInteger(), nullable=False),
        sa.Column("consent_version", sa.Integer(), nullable=False),
        sa.Column("recipient_hmac", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=True),
        sa.Column("provider_message_id", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("first_dispatch_at", sa.BigInteger(), nullable=True),
        sa.Column("settled_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(status IN ('queued', 'sending')) = (settled_at IS NULL)", name="email_deliveries_settled_check"
        ),
        sa.CheckConstraint(
            "reason IN ('signup', 'cooldown_resend', 'failure_retry', 'operator_resend')",
            name="email_deliveries_reason_check",
        ),
        sa.CheckConstraint(
            "status <> 'sending' OR first_dispatch_at IS NOT NULL", name="email_deliveries_dispatch_check"
        ),
        sa.CheckConstraint(
            "status IN ('queued', 'sending', 'sent', 'delivered', 'bounced', 'complained', 'rejected', 'failed', 'superseded')",
            name="email_deliveries_status_check",
        ),
        sa.ForeignKeyConstraint(
            ["retry_of_delivery_id"],
            ["email_deliveries.id"],
            name="email_deliveries_retry_of_delivery_id_fkey",
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(
            ["signup_request_id"],
            ["signup_requests.operation_id"],
            name="email_deliveries_signup_request_id_fkey",
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(
            ["subscriber_id"], ["subscribers.id"], name="email_deliveries_subscriber_id_fkey", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sequence", name=op.f("email_deliveries_pkey")),
        sa.UniqueConstraint("id", name="email_deliveries_id_key"),
        sa.UniqueConstraint("operation_key", name="email_deliveries_operation_key_key"),
        sa.UniqueConstraint("subscriber_id", "generation", name="email_deliveries_generation_key"),
        sa.UniqueConstraint("token_hash", name="email_deliveries_token_hash_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("email_deliveries_cap_idx", "email_deliveries", ["recipient_hmac", "created_at"], unique=False)
    op.create_index(
        "email_deliveries_message_idx",
        "email_deliveries",
        ["provider_message_id"],
        unique=False,
        sqlite_where=sa.text("provider_message_id IS NOT NULL"),
        postgresql_where=sa.text("provider_message_id IS NOT NULL"),
    )
    op.create_index(
        "email_deliveries_never_left_idx",
        "email_deliveries",
        ["created_at"],
        unique=False,
        sqlite_where=sa.text("status = 'superseded' AND first_dispatch_at IS NULL"),
        postgresql_where=sa.text("status = 'superseded' AND first_dispatch_at IS NULL"),
    )
    op.create_index(
        "email_deliveries_open_idx",
        "email_deliveries",
        ["subscriber_id"],
        unique=True,
        sqlite_where=sa.text("status IN ('queued', 'sending')"),
        postgresql_where=sa.text("status IN ('queued', 'sending')"),
    )
    op.create_index(
        "email_deliveries_request_idx",
        "email_deliveries",
        ["signup_request_id"],
        unique=True,
        sqlite_where=sa.text("signup_request_id IS NOT NULL"),
        postgresql_where=sa.text("signup_request_id IS NOT NULL"),
    )
    op.create_index(
        "email_deliveries_retry_idx",
        "email_deliveries",
        ["retry_of_delivery_id"],
        unique=True,
        sqlite_where=sa.text("retry_of_delivery_id IS NOT NULL"),
        postgresql_where=sa.text("retry_of_delivery_id IS NOT NULL"),
    )
    op.create_index("email_deliveries_status_idx", "email_deliveries", ["status"], unique=False)
    op.create_index(
        "email_deliveries_subscriber_sequence_idx",
        "email_deliveries",
        ["subscriber_id", sa.literal_column("sequence DESC")],
        unique=False,
    )
    op.create_table(
        "delivery_events",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("delivery_id", sa.Text(), nullable=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=True),
        sa.Column("event_id", sa.Text(), nullable=True),
        sa.Column("provider_message_id", sa.Text(), nullable=True),
        sa.Column("recipient_hmac", sa.Text(), nullable=True),
        sa.Column("app_version", sa.Text(), nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "type IN ('attempt', 'accepted', 'temporary', 'rejected', 'failed', 'systemic', 'in_doubt', 'superseded', 'sent', 'delivered', 'bounced', 'complained', 'soft_bounced', 'delayed', 'foreign')",
            name="delivery_events_type_check",
        ),
        sa.ForeignKeyConstraint(
            ["delivery_id"], ["email_deliveries.id"], name="delivery_events_delivery_id_fkey", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("delivery_events_pkey")),
    )
    op.create_index("delivery_events_at_idx", "delivery_events", ["at"], unique=False)
    op.create_index(
        "delivery_events_attempt_end_idx",
        "delivery_events",
        ["at", "id"],
        unique=False,
        sqlite_where=sa.text("duration_ms IS NOT NULL"),
        postgresql_where=sa.text("duration_ms IS NOT NULL"),
    )
    op.create_index("delivery_events_delivery_idx", "delivery_events", ["delivery_id", "at"], unique=False)
    op.create_index(
        "delivery_events_parked_idx",
        "delivery_events",
        ["provider_message_id", "at"],
        unique=False,
        sqlite_where=sa.text("delivery_id IS NULL"),
        postgresql_where=sa.text("delivery_id IS NULL"),
    )
    op.create_index(
        "delivery_events_provider_event_idx",
        "delivery_events",
        ["provider", "event_id"],
        unique=True,
        sqlite_where=sa.text("event_id IS NOT NULL"),
        postgresql_where=sa.text("event_id IS NOT NULL"),
    )
    op.create_index("delivery_events_type_idx", "delivery_events", ["type", "at"], unique=False)
    op.create_table(
        "email_outbox",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("delivery_id", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("recipient", sa.Text(), nullable=False),
        sa.Column("confirmation_url", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("payload_hash", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("available_at", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("claims", sa.Integer(), server_default="0", nullable=False),
        sa.Column("in_doubt", sa.Boolean(create_constraint=True, name="email_outbox_in_doubt_check"), nullable=False),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.BigInteger(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(status IN ('leased', 'dispatching')) = (lease_token IS NOT NULL) AND (lease_token IS NULL) = (lease_owner IS NULL) AND (lease_token IS NULL) = (lease_expires_at IS NULL)",
            name="email_outbox_lease_check",
        ),
        sa.CheckConstraint(
            "(status IN ('sent', 'dead', 'cancelled')) = (finished_at IS NOT NULL)", name="email_outbox_finished_check"
        ),
        sa.CheckConstraint(
            "finished_at IS NULL OR (confirmation_url = '' AND message = '')", name="email_outbox_blank_check"
        ),
        sa.CheckConstraint(
            "status IN ('queued', 'leased', 'dispatching', 'sent', 'dead', 'cancelled')",
            name="email_outbox_status_check",
        ),
        sa.ForeignKeyConstraint(
            ["delivery_id"], ["email_deliveries.id"], name="email_outbox_delivery_id_fkey", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("email_outbox_pkey")),
        sa.UniqueConstraint("delivery_id", name="email_outbox_delivery_id_key"),
    )
    op.create_index(
        "email_outbox_dead_idx",
        "email_outbox",
        ["finished_at"],
        unique=False,
        sqlite_where=sa.text("status = 'dead'"),
        postgresql_where=sa.text("status = 'dead'"),
    )
    op.create_index(
        "email_outbox_due_idx",
        "email_outbox",
        ["available_at", "id"],
        unique=False,
        sqlite_where=sa.text("status = 'queued'"),
        postgresql_where=sa.text("status = 'queued'"),
    )
    op.create_index(
        "email_outbox_finished_idx",
        "email_outbox",
        ["finished_at"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
    op.create_index(
        "email_outbox_lease_idx",
        "email_outbox",
        ["lease_expires_at"],
        unique=False,
        sqlite_where=sa.text("status IN ('leased', 'dispatching')"),
        postgresql_where=sa.text("status IN ('leased', 'dispatching')"),
    )
