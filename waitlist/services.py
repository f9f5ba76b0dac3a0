"""What every use case needs, wired by create_app and handed down: settings, store, mail and the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from waitlist.mail.base import Sender
from waitlist.mail.compose import Composer
from waitlist.settings import Settings
from waitlist.store import Store


@dataclass(frozen=True)
class Services:
    settings: Settings
    store: Store
    composer: Composer
    # A sender holds a connection, so each worker thread makes its own.
    make_sender: Callable[[], Sender]
    # Unix seconds of this machine, for what happens outside a transaction.
    clock: Callable[[], float]
