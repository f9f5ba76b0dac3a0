"""Verbs that erase people, in the lock order of every transaction: subscriber (the caller's), outbox, delivery."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import bindparam, select

from waitlist.store.engine import Transaction
from waitlist.store.schema import email_deliveries, email_outbox, signup_requests, subscribers

_r = signup_requests.c
_o = email_outbox.c
_d = email_deliveries.c

_ids: sa.BindParameter[Sequence[str]] = bindparam("ids", expanding=True)
_DELIVERIES = select(_d.id).where(_d.subscriber_id.in_(_ids))
_LOCK_ROWS = select(_o.id).where(_o.delivery_id.in_(_DELIVERIES)).order_by(_o.id).with_for_update()
_LOCK_DELIVERIES = _DELIVERIES.order_by(_d.sequence).with_for_update()
_ERASE = sa.delete(subscribers).where(subscribers.c.id.in_(_ids))

_forget = sa.update(signup_requests).values(email_hmac=None, subscriber_id=None)
_FORGET_ADDRESS = _forget.where(_r.email_hmac == bindparam("of_email_hmac"))
# By list and address, both found on an index, not by subscriber alone: a row that was written while nobody stood there
# (a trapped post) names none. No row of that kind outlives the person's own, since it is older than all of them.
_own = signup_requests.alias("own")
_FORGET_SUBSCRIBERS = _forget.where(
    sa.tuple_(_r.list_id, _r.email_hmac).in_(
        select(_own.c.list_id, _own.c.email_hmac).where(_own.c.subscriber_id.in_(_ids))
    )
)


def erase_subscribers(tx: Transaction, ids: Sequence[str]) -> None:
    """Delete these subscribers, whom the caller has locked; deliveries, outbox rows and events go with them."""
    tx.execute(_LOCK_ROWS, {"ids": ids})
    tx.execute(_LOCK_DELIVERIES, {"ids": ids})
    tx.execute(_ERASE, {"ids": ids})


def forget_address(tx: Transaction, email_hmac: str) -> None:
    """Clear from the ledger whom its rows were about; the rows stay, and so do their keys' promises."""
    tx.execute(_FORGET_ADDRESS, {"of_email_hmac": email_hmac})


def forget_subscribers(tx: Transaction, ids: Sequence[str]) -> None:
    """The same for these people and their lists alone: they may stay on others."""
    tx.execute(_FORGET_SUBSCRIBERS, {"ids": ids})
