"""Somebody else holds the database: every use case answers "busy" soon, changes nothing, and works again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests.factories import FakeClock, FakeSender, make_list
from tests.scenes import deliveries, drain, everything, join, subscriber, token_in
from waitlist import clients, confirmation, dispatch, ledger, people, purge, signup, waitlists
from waitlist.dispatch import Provider
from waitlist.errors import StorageBusy
from waitlist.model import ListState
from waitlist.services import Services
from waitlist.store import Store
from waitlist.store.schema import metadata
from waitlist.tokens import LinkPurpose, sign_link

LOCK_WAIT_SECONDS = 0.3
# Waiting for one lock, or on SQLite for the turn and then for a foreign lock, on a loaded machine.
SOON_SECONDS = 5.0


@pytest.fixture
def impatient(services: Services, database_url: str, clock: FakeClock) -> Iterator[Services]:
    store = Store(database_url, clock=clock, lock_wait=LOCK_WAIT_SECONDS)
    yield replace(services, store=store)
    store.close()


@contextmanager
def locked(services: Services) -> Iterator[None]:
    """As a foreign program or a long migration would: nobody else gets to write; on PostgreSQL, not even to read."""
    with services.store.database.write_engine.begin() as connection:
        if not services.store.is_embedded:
            names = ", ".join(table.name for table in metadata.sorted_tables)
            connection.execute(sa.text(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE"))
        yield


@pytest.fixture
def token(services: Services, sender: FakeSender, clock: FakeClock) -> str:
    make_list(services)
    clients.create(services, "shop")
    join(services)
    drain(services)
    clock.advance(600)
    join(services)
    clock.advance(86_400)  # the first link has expired, a mail waits, a lease would be old
    return token_in(sender.mails[0])


def signed(services: Services, purpose: LinkPurpose) -> str:
    return sign_link(services.settings.data_key_text, purpose, deliveries(services)[0].id)


Work = Callable[[Services, str, dict[LinkPurpose, str]], Any]
WRITES: dict[str, Work] = {
    "sign_up": lambda s, _t, _l: join(s, "other@example.com"),
    "sign_up_with_key": lambda s, _t, _l: signup.sign_up_with_key(
        s, client="shop", key="k", list_id="launch", email="o@example.com", consent_version=1, source=None, members={}
    ),
    "confirm": lambda s, t, _l: confirmation.confirm(s, t),
    "renew": lambda s, t, _l: confirmation.renew(s, t),
    "unsubscribe": lambda s, _t, links: confirmation.unsubscribe(s, links[LinkPurpose.UNSUBSCRIBE]),
    "not_me": lambda s, _t, links: confirmation.not_me(s, links[LinkPurpose.NOT_ME]),
    "claim": lambda s, _t, _l: dispatch.claim(s, "one", 10),
    "recover": lambda s, _t, _l: dispatch.recover(s, Provider("fake")),
    "purge": lambda s, _t, _l: purge.purge(s),
    "create": lambda s, _t, _l: waitlists.create(s, "b", title="B", description="", consent="Yes."),
    "create_default": lambda s, _t, _l: waitlists.create_default(s),
    "set_state": lambda s, _t, _l: waitlists.set_state(s, "launch", ListState.CLOSED),
    "publish_consent": lambda s, _t, _l: waitlists.publish_consent(s, "launch", "New."),
    "create_client": lambda s, _t, _l: clients.create(s, "two"),
    "revoke_client": lambda s, _t, _l: clients.revoke(s, "shop"),
    "resend": lambda s, _t, _l: people.resend(s, "person@example.com", reason="asked by phone"),
}
READS: dict[str, Work] = {
    "find": lambda s, _t, _l: waitlists.find(s, "launch"),
    "find_default": lambda s, _t, _l: waitlists.find_default(s),
    "find_all": lambda s, _t, _l: waitlists.find_all(s),
    "look": lambda s, t, _l: confirmation.look(s, t),
    "explain": lambda s, _t, _l: ledger.explain(s, "person@example.com"),
    "outbox_report": lambda s, _t, _l: ledger.outbox_report(s),
    "gauges": lambda s, _t, _l: ledger.gauges(s),
    "stats": lambda s, _t, _l: ledger.stats(s),
    "purgeable": lambda s, _t, _l: purge.purgeable(s),
    "find_clients": lambda s, _t, _l: clients.find_all(s),
}


@pytest.mark.parametrize("name", WRITES)
def test_locked_database_is_busy_soon_and_loses_nothing(
    services: Services, impatient: Services, token: str, name: str
) -> None:
    links = {purpose: signed(services, purpose) for purpose in LinkPurpose}
    before = everything(services)

    with locked(services):
        started = time.monotonic()
        with pytest.raises(StorageBusy):
            WRITES[name](impatient, token, links)
        assert time.monotonic() - started < SOON_SECONDS

    assert everything(services) == before
    WRITES[name](impatient, token, links)
    assert subscriber(services)


@pytest.mark.parametrize("name", READS)
def test_locked_database_is_still_read_or_says_busy(
    services: Services, impatient: Services, token: str, name: str
) -> None:
    expected = READS[name](impatient, token, {})

    with locked(services):
        started = time.monotonic()
        if services.store.is_embedded:
            assert READS[name](impatient, token, {}) == expected
        else:
            with pytest.raises(StorageBusy):
                READS[name](impatient, token, {})
        assert time.monotonic() - started < SOON_SECONDS
