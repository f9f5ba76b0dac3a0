"""Verbs on signup_requests: the ledger, one row per submission, whatever came of it; and the keys in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.dialects.postgresql import insert

from waitlist.errors import OperationInProgress
from waitlist.model import Answer, Decision, KeyClaim, RequestState, Submission
from waitlist.store.engine import Transaction
from waitlist.store.schema import signup_requests, subscribers

_r = signup_requests.c
_INSERT = (
    insert(signup_requests)
    .on_conflict_do_nothing(index_elements=["scope", "idempotency_key"], index_where=_r.idempotency_key.is_not(None))
    .returning(_r.operation_id)
)
_BY_KEY = sa.select(signup_requests).where(_r.scope == bindparam("scope"), _r.idempotency_key == bindparam("key"))
_one = sa.update(signup_requests).where(_r.operation_id == bindparam("operation"))
_COUNT_REPLAY = _one.values(replays=_r.replays + 1)
_RELEASE_KEY = _one.values(idempotency_key=None, request_hash=None, response_body=None)
_COMPLETE = _one.where(_r.state == RequestState.PROCESSING).values(
    state=bindparam("new_state"),
    decision=bindparam("new_decision"),
    # Whoever stands under this address now; NULL where nobody does.
    subscriber_id=sa.select(subscribers.c.id)
    .where(subscribers.c.list_id == _r.list_id, subscribers.c.email == bindparam("email"))
    .scalar_subquery(),
    response_code=bindparam("new_response_code"),
    response_body=bindparam("new_response_body"),
)


@dataclass(frozen=True)
class Twin:
    """The finished request that holds a key."""

    operation_id: str
    request_hash: str
    key_expires_at: int
    answer: Answer


def insert_request(tx: Transaction, submission: Submission, job_id: str) -> bool:
    """False if another request has the same key in the same scope; on PostgreSQL that one may still be running, and
    then this waits for it. Raises OperationInProgress when it waits too long.
    """
    claim = submission.claim
    values: dict[str, Any] = {
        "operation_id": submission.operation_id,
        "channel": submission.channel,
        "scope": claim.scope if claim else None,
        "idempotency_key": claim.key if claim else None,
        "request_hash": claim.request_hash if claim else None,
        "key_expires_at": tx.now + claim.retention_seconds if claim else None,
        "state": RequestState.PROCESSING,
        "list_id": submission.list_id,
        "email_hmac": submission.email_hmac,
        "job_id": job_id,
        "source": submission.source,
        "created_at": tx.now,
    }
    with tx.lock_wait_means(OperationInProgress):
        return tx.execute(_INSERT, values).scalar_one_or_none() is not None


def get_request_by_key(tx: Transaction, claim: KeyClaim) -> Twin | None:
    row = tx.execute(_BY_KEY, {"scope": claim.scope, "key": claim.key}).one_or_none()
    if row is None:
        return None
    answer = Answer(
        row.operation_id,
        row.list_id,
        RequestState(row.state),
        Decision(row.decision),
        job_id=row.job_id,
        replayed=True,
        response_code=row.response_code,
        response_body=row.response_body,
    )
    return Twin(row.operation_id, row.request_hash, row.key_expires_at, answer)


def count_replay(tx: Transaction, operation_id: str) -> None:
    tx.execute(_COUNT_REPLAY, {"operation": operation_id})


def release_key(tx: Transaction, operation_id: str) -> None:
    """The key is free again; the ledger row stays, without the answer that it had promised to replay."""
    tx.execute(_RELEASE_KEY, {"operation": operation_id})


def complete_request(
    tx: Transaction,
    submission: Submission,
    state: RequestState,
    decision: Decision,
    *,
    response_code: int | None,
    response_body: str | None,
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
