"""Erases a person: subscriber, mails and events go, and the ledger forgets whom its rows were about.

A suppression stays: it is the wish not to be written to, kept as a digest. So do the fingerprint and the answer of an
API key until it expires, or a late replay would bring the person back.
"""

from __future__ import annotations

from functools import partial

from waitlist.services import Services
from waitlist.store import Transaction, run_transaction
from waitlist.store.erasure import erase_subscribers, forget_address
from waitlist.store.subscribers import lock_subscribers_everywhere
from waitlist.tokens import address_hmac, cap_hmac


def erase(services: Services, email: str) -> int:
    """Take the canonical address off every list without a trace; returns how many subscribers went."""
    count = run_transaction(services.store, partial(_erase, data_key=services.settings.data_key_text, email=email))
    services.store.forget_old_pages()
    return count


def _erase(tx: Transaction, data_key: str, email: str) -> int:
    email_hmac = address_hmac(data_key, email)
    tx.lock("waitlist.erase")  # two at once would hold each other's requests and cap key
    forget_address(tx, email_hmac)
    tx.lock(cap_hmac(data_key, email))
    people = lock_subscribers_everywhere(tx, email)
    erase_subscribers(tx, [person.id for person in people])
    # What was submitted while we waited for the cap key. Requests come before it in the order of locks, but rows so
    # young are nobody's who waits for it: only a key that has expired makes a submission lock an earlier row.
    forget_address(tx, email_hmac)
    return len(people)
