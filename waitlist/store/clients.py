"""Verbs on api_clients."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam, func, select
from sqlalchemy.dialects.postgresql import insert

from waitlist.model import ApiClient
from waitlist.store.engine import Transaction
from waitlist.store.schema import api_clients

_c = api_clients.c
_client = select(_c.name, _c.created_at, _c.last_used_at, _c.revoked_at)
_ALL = _client.order_by(_c.created_at, _c.name)
_BY_TOKEN = _client.where(_c.token_hash == bindparam("token_hash"))
_INSERT = insert(api_clients).on_conflict_do_nothing(index_elements=["name"]).returning(_c.name)
_one = sa.update(api_clients).where(_c.name == bindparam("client_name"))
_REVOKE = _one.values(revoked_at=func.coalesce(_c.revoked_at, bindparam("now")))
_USE = _one.values(last_used_at=bindparam("now"))


def get_clients(tx: Transaction) -> list[ApiClient]:
    return [_read(row) for row in tx.execute(_ALL)]


def get_client_by_token(tx: Transaction, token_hash: str) -> ApiClient | None:
    row = tx.execute(_BY_TOKEN, {"token_hash": token_hash}).one_or_none()
    return _read(row) if row else None


def insert_client(tx: Transaction, name: str, token_hash: str) -> bool:
    """False if the name is taken."""
    values = {"name": name, "token_hash": token_hash, "created_at": tx.now}
    return tx.execute(_INSERT, values).scalar_one_or_none() is not None


def mark_client_revoked(tx: Transaction, name: str) -> bool:
    """False if there is no such client; the first time of revoking stays."""
    return tx.execute(_REVOKE, {"client_name": name, "now": tx.now}).rowcount == 1


def mark_client_used(tx: Transaction, name: str) -> None:
    tx.execute(_USE, {"client_name": name, "now": tx.now})


def _read(row: sa.Row[Any]) -> ApiClient:
    return ApiClient(**row._mapping)
