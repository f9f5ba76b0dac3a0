"""Ids, confirmation tokens, digests and keyed HMACs. Pure but for randomness; keys are parameters.

A raw confirmation token exists in the mail and in its outbox row only; everything else keeps the SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from enum import StrEnum

import uuid_utils
from itsdangerous import BadSignature, Signer

# 32 random bytes as unpadded URL-safe base64: 43 characters.
TOKEN_BYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
# What mail clients glue to the end of a link; none of it is in the alphabet of a token.
_GLUED_PUNCTUATION = ".,;:!?)]}>'\""


class LinkPurpose(StrEnum):
    """What a signed link may be used for, and for nothing else."""

    UNSUBSCRIBE = "unsubscribe"
    NOT_ME = "not-me"


def new_id() -> str:
    """A time-ordered id: lower-case UUID version 7 text (RFC 9562)."""
    return str(uuid_utils.uuid7())


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def clean_token(text: str) -> str | None:
    """The confirmation token in `text`, forgiving glued punctuation; None if it cannot be one of ours."""
    token = text[: 2 * TOKEN_BYTES].rstrip(_GLUED_PUNCTUATION)
    return token if len(text) <= 2 * TOKEN_BYTES and _TOKEN.fullmatch(token) else None


def token_digest(token: str) -> str:
    """SHA-256 as 64 lower-case hex digits."""
    return hashlib.sha256(token.encode()).hexdigest()


def address_hmac(key: str, email: str) -> str:
    """Keyed digest of a canonical address: what the ledger and the suppressions know it by."""
    return _keyed(key, "address", email)


def cap_hmac(key: str, email: str) -> str:
    """Keyed digest under which mails are counted: the plus tag is removed, since it reaches the same mailbox."""
    local, _, domain = email.rpartition("@")
    untagged = local.split("+", 1)[0] or local
    return _keyed(key, "cap", f"{untagged}@{domain}")


def request_hmac(key: str, canonical_request: str) -> str:
    """Keyed digest of a request, so that a stored fingerprint gives no address away."""
    return _keyed(key, "request", canonical_request)


def key_hmac(key: str, idempotency_key: str) -> str:
    """Keyed digest of a client's Idempotency-Key, so that a log can name the requests of one key and not the key."""
    return _keyed(key, "idempotency-key", idempotency_key)


def sign_link(key: str, purpose: LinkPurpose, delivery_id: str) -> str:
    return _signer(key, purpose).sign(delivery_id).decode()


def read_link(key: str, purpose: LinkPurpose, text: str) -> str | None:
    """The delivery id signed in `text` for `purpose`; None if it is not a link of ours."""
    try:
        return _signer(key, purpose).unsign(text.rstrip(_GLUED_PUNCTUATION)).decode("ascii")
    except (BadSignature, UnicodeError):
        return None


def _signer(key: str, purpose: LinkPurpose) -> Signer:
    return Signer(key, salt=f"waitlist.{purpose}", key_derivation="hmac", digest_method=hashlib.sha256)


def _keyed(key: str, purpose: str, text: str) -> str:
    return hmac.new(key.encode(), f"{purpose}\0{text}".encode(), hashlib.sha256).hexdigest()
