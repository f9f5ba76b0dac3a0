"""Verbs on waitlists and their consent texts."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import bindparam, select
from sqlalchemy.dialects.postgresql import insert

from waitlist.model import Consent, ListState, Waitlist
from waitlist.store.engine import Transaction
from waitlist.store.schema import consent_texts, waitlists

# The dialect-neutral insert() has no ON CONFLICT; PostgreSQL's renders the same words on SQLite. (The reverse fails.)

_ALL = select(waitlists).order_by(waitlists.c.created_at, waitlists.c.id)
_ONE = select(waitlists).where(waitlists.c.id == bindparam("list_id"))
_OLDEST_OPEN = _ALL.where(waitlists.c.state == ListState.OPEN).limit(1)
_INSERT = insert(waitlists).on_conflict_do_nothing(index_elements=["id"]).returning(waitlists.c.id)
_SET_STATE = sa.update(waitlists).where(waitlists.c.id == bindparam("list_id")).values(state=bindparam("new_state"))
_CURRENT_CONSENT = (
    select(consent_texts)
    .where(consent_texts.c.list_id == bindparam("list_id"))
    .order_by(consent_texts.c.version.desc())
    .limit(1)
)
_CONSENT = select(consent_texts).where(
    consent_texts.c.list_id == bindparam("list_id"), consent_texts.c.version == bindparam("version")
)
_INSERT_CONSENT = sa.insert(consent_texts)


def get_waitlists(tx: Transaction) -> list[Waitlist]:
    return [_waitlist(row) for row in tx.execute(_ALL)]


def get_waitlist(tx: Transaction, list_id: str) -> Waitlist | None:
    row = tx.execute(_ONE, {"list_id": list_id}).one_or_none()
    return _waitlist(row) if row else None


def get_oldest_open_waitlist(tx: Transaction) -> Waitlist | None:
    row = tx.execute(_OLDEST_OPEN).one_or_none()
    return _waitlist(row) if row else None


def insert_waitlist(tx: Transaction, waitlist: Waitlist) -> bool:
    """False if the id is taken."""
    values = {
        "id": waitlist.id,
        "title": waitlist.title,
        "description": waitlist.description,
        "state": waitlist.state,
        "created_at": waitlist.created_at,
    }
    return tx.execute(_INSERT, values).scalar_one_or_none() is not None


def set_waitlist_state(tx: Transaction, list_id: str, state: ListState) -> bool:
    """False if there is no such list."""
    return tx.execute(_SET_STATE, {"list_id": list_id, "new_state": state}).rowcount == 1


def get_current_consent(tx: Transaction, list_id: str) -> Consent | None:
    row = tx.execute(_CURRENT_CONSENT, {"list_id": list_id}).one_or_none()
    return Consent(**row._mapping) if row else None


def get_consent(tx: Transaction, list_id: str, version: int) -> Consent | None:
    row = tx.execute(_CONSENT, {"list_id": list_id, "version": version}).one_or_none()
    return Consent(**row._mapping) if row else None


def insert_consent(tx: Transaction, list_id: str, version: int, text: str) -> None:
    tx.execute(_INSERT_CONSENT, {"list_id": list_id, "version": version, "text": text, "created_at": tx.now})


def _waitlist(row: sa.Row[tuple[object, ...]]) -> Waitlist:
    return Waitlist(**{**row._mapping, "state": ListState(row._mapping["state"])})
