"""The subscribers of a list, page by page: a million of them must fit into no memory and no single transaction."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import bindparam, or_, select

from waitlist.store.engine import Transaction
from waitlist.store.schema import subscribers

_s = subscribers.c


@dataclass(frozen=True)
class ExportedSubscriber:
    """One line of an export; the times are Unix seconds. NULLs as in the table."""

    list_id: str
    email: str
    status: str
    consent_version: int
    consent_at: int
    confirmed_at: int | None
    unsubscribed_at: int | None


_any_status = bindparam("any_status", type_=sa.Boolean)
_PAGE = (
    select(_s.list_id, _s.email, _s.status, _s.consent_version, _s.consent_at, _s.confirmed_at, _s.unsubscribed_at)
    .where(
        _s.list_id == bindparam("of_list"),
        _s.email > bindparam("after"),
        or_(_s.status == bindparam("with_status"), _any_status),
    )
    .order_by(_s.email)
    .limit(bindparam("most"))
)


def get_page(tx: Transaction, list_id: str, status: str | None, *, after: str, most: int) -> list[ExportedSubscriber]:
    """The next `most` subscribers after the address `after`, in order of addresses; with any status if it is None."""
    values = {"of_list": list_id, "after": after, "with_status": status, "any_status": status is None, "most": most}
    return [ExportedSubscriber(**row._mapping) for row in tx.execute(_PAGE, values)]
