"""API clients: programs that may sign people up, each with a token of its own that is shown once."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from typing import Final

from waitlist.errors import InvalidInput, StorageBusy, UnknownClient
from waitlist.model import SLUG_PATTERN, ApiClient
from waitlist.services import Services
from waitlist.store import run_query, run_transaction
from waitlist.store.clients import (
    get_client_by_token,
    get_clients,
    insert_client,
    mark_client_revoked,
    mark_client_used,
)
from waitlist.tokens import token_digest

# So that a leaked token is recognised for what it is by people and by secret scanners.
TOKEN_PREFIX: Final = "wl_"
# The longest thing that is looked up; ours have 46 characters.
MOST_TOKEN_CHARACTERS: Final = 200
# The last use is for the owner's eye; a write for every request would cost as much as the request.
LAST_USE_SECONDS: Final = 60


def create(services: Services, name: str) -> str:
    """Make a client; returns its token, which is kept nowhere. Raises InvalidInput for a taken or malformed name."""
    if not re.fullmatch(SLUG_PATTERN, name):
        raise InvalidInput("The client's name must be 1 to 40 of the characters a-z, 0-9 and -.")
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    if not run_transaction(services.store, lambda tx: insert_client(tx, name, token_digest(token))):
        raise InvalidInput(f"There is a client {name} already; a revoked name is not used again.")
    return token


def revoke(services: Services, name: str) -> None:
    """Its token works no more. Raises UnknownClient; revoking twice is harmless."""
    if not run_transaction(services.store, lambda tx: mark_client_revoked(tx, name)):
        raise UnknownClient()


def find_all(services: Services) -> list[ApiClient]:
    return run_query(services.store, get_clients)


def authenticate(services: Services, token: str) -> ApiClient | None:
    """The client whose token this is; None for a token that is not ours or revoked."""
    if len(token) > MOST_TOKEN_CHARACTERS:
        return None
    digest = token_digest(token)
    # The time of the database, which wrote the last use: a machine whose clock is ahead would write at every request.
    client, now = run_query(services.store, lambda tx: (get_client_by_token(tx, digest), tx.now))
    if client is None or client.revoked_at is not None:
        return None
    if client.last_used_at is None or now - client.last_used_at >= LAST_USE_SECONDS:
        _record_use(services, client)
    return client


def _record_use(services: Services, client: ApiClient) -> None:
    with suppress(StorageBusy):  # the request itself will meet the same fault and answer for it
        run_transaction(services.store, lambda tx: mark_client_used(tx, client.name))
