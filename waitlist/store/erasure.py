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

_FORGET = (
    sa.update(signup_requests)
    .where(_r.email_hmac == bindparam("of_email_hmac"))
    .values(email_hmac=None, subscriber_id=None)
)


def erase_subscribers(tx: Transaction, ids: Sequence[str]) -> None:
    """Delete these subscribers, whom the caller has locked; deliveries, outbox rows and events go with them."""
    tx.execute(_LOCK_ROWS, {"ids": ids})
    tx.execute(_LOCK_DELIVERIES, {"ids": ids})
    tx.execute(_ERASE, {"ids": ids})


def forget_address(tx: Transaction, email_hmac: str) -> None:
    """Clear from the ledger whom its rows were about; the rows stay, and so do their keys' promises."""
    tx.execute(_FORGET, {"of_email_hmac": email_hmac})
