"""Looks whether the data keeps the laws of the waitlist. Changes nothing; no visitor waits for it."""

from __future__ import annotations

from waitlist.services import Services
from waitlist.store import run_query
from waitlist.store.integrity import count_broken


def count_faults(services: Services) -> dict[str, int]:
    """Rows that break each law, by what is wrong in words; and what the database says of its own file."""
    counts = {"damage that the database finds in its own file": len(services.store.find_damage())}
    return counts | run_query(services.store, count_broken)
