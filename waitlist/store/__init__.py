"""The database: the only package that imports SQLAlchemy. Knows tables and engines, not rules, mail or the web."""

from waitlist.store.engine import Store, Transaction, run_query, run_transaction

__all__ = ["Store", "Transaction", "run_query", "run_transaction"]
