"""Idempotency keys: claim a key, replay its answer, refuse another request under it, release it when its time is over.

Key, effect and answer commit together, so a crash leaves nothing behind. The functions here run inside the
submission's transaction; the HTTP of it is in api/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from waitlist.errors import KeyReused, Restart
from waitlist.model import Answer, Decision, KeyClaim, RequestState, Submission
from waitlist.store import Transaction
from waitlist.store.signup_requests import (
    complete_request,
    count_replay,
    get_request_by_key,
    insert_request,
    release_key,
)
from waitlist.tokens import request_hmac

OPERATION: Final = "signups"
STATUS_PATH: Final = "/api/v1/signups"
# Raised with the way fingerprints are computed: a key of an older way then never matches by accident.
FINGERPRINT_VERSION: Final = 1


def claim_key(
    *,
    data_key: str,
    base_url: str,
    retention_seconds: int,
    client: str,
    key: str,
    list_id: str,
    email: str,
    members: Mapping[str, object],
) -> KeyClaim:
    """What `client` claims with `key`. The fingerprint covers method, route, list, canonical address and the members
    as sent: an absent member stays absent, so publishing a new consent text turns no retry into a conflict.
    """
    request = {**members, "email": email}
    canonical = json.dumps(["POST", OPERATION, list_id, request], sort_keys=True, separators=(",", ":"))
    return KeyClaim(
        scope=f"{client}/{OPERATION}/{list_id}",
        key=key,
        request_hash=f"{FINGERPRINT_VERSION}:{request_hmac(data_key, canonical)}",
        retention_seconds=retention_seconds,
        status_url=f"{base_url}{STATUS_PATH}",
    )


def open_request(tx: Transaction, submission: Submission, job_id: str) -> Answer | None:
    """Write the submission's ledger row; an Answer if its key has one already, which is then the answer.

    Raises KeyReused for another request under the key, OperationInProgress when the running twin took too long.
    """
    if insert_request(tx, submission, job_id):
        return None
    assert submission.claim is not None, "only a key can be in the way"
    twin = get_request_by_key(tx, submission.claim)
    if twin is None:
        raise Restart  # released since the insert met it
    if twin.key_expires_at <= tx.now:
        release_key(tx, twin.operation_id)
        if not insert_request(tx, submission, job_id):
            raise Restart
        return None
    if twin.request_hash != submission.claim.request_hash:
        raise KeyReused(twin.operation_id)
    count_replay(tx, twin.operation_id)
    return twin.answer


def close_request(tx: Transaction, submission: Submission, job_id: str, decision: Decision) -> Answer:
    """Complete the ledger row with decision and answer. Every path of a submission ends here, so every path costs one
    durable commit: that is the audit trail, and why answers take equal time.
    """
    state = RequestState.FAILED if decision is Decision.LIST_CLOSED else RequestState.SUCCEEDED
    code, body = _response(tx, submission, job_id, decision)
    complete_request(tx, submission, state, decision, response_code=code, response_body=body)
    return Answer(
        submission.operation_id,
        submission.list_id,
        state,
        decision,
        job_id=job_id,
        response_code=code,
        response_body=body,
    )


def _response(
    tx: Transaction, submission: Submission, job_id: str, decision: Decision
) -> tuple[int, str] | tuple[None, None]:
    """The stored answer: the same shape and length for every address, whatever was decided about it."""
    claim = submission.claim
    if claim is None:
        return None, None
    if decision is Decision.LIST_CLOSED:
        return 409, canonical_json(LIST_CLOSED_PROBLEM)
    body = {
        "operation_id": submission.operation_id,
        "status": "accepted",
        "signup": {"list": submission.list_id, "confirmation": "pending"},
        "email_job": {"id": job_id, "state": "accepted"},
        "replay_until": datetime.fromtimestamp(tx.now + claim.retention_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "status_url": f"{claim.status_url}/{submission.operation_id}",
    }
    return 202, canonical_json(body)


# RFC 9457; deterministic, so it is stored and replayed like a success.
LIST_CLOSED_PROBLEM: Final = {
    "type": "about:blank",
    "title": "Conflict",
    "status": 409,
    "code": "list_closed",
    "detail": "This list is closed; nobody can join it now.",
    "retryable": False,
}


def canonical_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
