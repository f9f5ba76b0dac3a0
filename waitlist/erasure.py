"""Erases a person: subscriber, mails and events go, and the ledger forgets whom its rows were about.

A suppression stays: it is the wish not to be written to, kept as a digest. So do the fingerprint and the answer of an
API key until it expires, or a late replay would bring the person back.
"""

from __future__ import annotations

from functools import partial

from waitlist.errors import Restart
from waitlist.services import Services
from waitlist.store import Transaction, run_transaction
from waitlist.store.erasure import erase_subscribers, forget_address, is_in_ledger
from waitlist.store.subscribers import lock_subscribers_everywhere
from waitlist.tokens import address_hmac, cap_hmac


def erase(services: Services, email: str) -> int:
    """Take the canonical address off every list without a trace; returns how many subscribers went."""
    count = run_transaction(services.store, partial(_erase, data_key=services.settings.data_key_text, email=email))
    services.store.forget_old_pages()
    return count


def _erase(tx: Transaction, data_key: str, email: str) -> int:
    email_hmac = address_hmac(data_key, email)
    forget_address(tx, email_hmac)
    tx.lock(cap_hmac(data_key, email))
    if is_in_ledger(tx, email_hmac):
        raise Restart  # a submission ended since; its row comes before the cap key in the order of locks
    people = lock_subscribers_everywhere(tx, email)
    erase_subscribers(tx, [person.id for person in people])
    return len(people)
