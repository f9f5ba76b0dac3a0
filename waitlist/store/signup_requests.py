"""Verbs on signup_requests: the ledger, one row per submission, whatever came of it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from waitlist.model import Decision, RequestState, Submission
from waitlist.store.engine import Transaction
from waitlist.store.schema import signup_requests, subscribers

_r = signup_requests.c
_INSERT = sa.insert(signup_requests)
_COMPLETE = (
    sa.update(signup_requests)
    .where(_r.operation_id == bindparam("operation"), _r.state == RequestState.PROCESSING)
    .values(
        state=bindparam("new_state"),
        decision=bindparam("new_decision"),
        # Whoever stands under this address now; NULL where nobody was touched.
        subscriber_id=sa.select(subscribers.c.id)
        .where(subscribers.c.list_id == _r.list_id, subscribers.c.email == bindparam("email"))
        .scalar_subquery(),
        response_code=bindparam("new_response_code"),
        response_body=bindparam("new_response_body"),
    )
)


def insert_request(tx: Transaction, submission: Submission, job_id: str) -> None:
    values: dict[str, Any] = {
        "operation_id": submission.operation_id,
        "channel": submission.channel,
        "state": RequestState.PROCESSING,
        "list_id": submission.list_id,
        "email_hmac": submission.email_hmac,
        "job_id": job_id,
        "source": submission.source,
        "created_at": tx.now,
    }
    tx.execute(_INSERT, values)


def complete_request(
    tx: Transaction,
    submission: Submission,
    state: RequestState,
    decision: Decision,
    *,
    response_code: int | None = None,
    response_body: str | None = None,
) -> None:
    values = {
        "operation": submission.operation_id,
        "new_state": state,
        "new_decision": decision,
        "email": submission.email,
        "new_response_code": response_code,
        "new_response_body": response_body,
    }
    tx.execute(_COMPLETE, values)
