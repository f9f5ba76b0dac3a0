"""The owner's lists and their consent texts: find, create, open, close, publish. Opens transactions, knows no web."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Final

from waitlist.errors import InvalidInput, UnknownList
from waitlist.model import ENCODED_WORD, SLUG_PATTERN, Consent, ListState, Waitlist
from waitlist.services import Services
from waitlist.store import Transaction, run_query, run_transaction
from waitlist.store.waitlists import (
    get_consent,
    get_current_consent,
    get_oldest_open_waitlist,
    get_waitlist,
    get_waitlists,
    insert_consent,
    insert_waitlist,
    set_waitlist_state,
)

DEFAULT_LIST: Final = "launch"
DEFAULT_TITLE: Final = "Be first to know"
DEFAULT_DESCRIPTION: Final = "Something new is coming. Leave your address and we write to you when it is ready."
DEFAULT_CONSENT: Final = "Yes, send me email about the launch. I can leave the list at any time."

# A title becomes a mail's subject: with the words around it 200 characters still fold into few header lines.
MOST_TITLE_CHARACTERS: Final = 200
MOST_TEXT_CHARACTERS: Final = 2000


@dataclass(frozen=True)
class ListPage:
    """What the form shows."""

    waitlist: Waitlist
    consent: Consent


def find(services: Services, list_id: str) -> ListPage:
    """Raises UnknownList."""
    # What cannot be a list's name is not looked up: PostgreSQL refuses a NUL with an error.
    page = run_query(services.store, partial(_page, list_id=list_id)) if re.fullmatch(SLUG_PATTERN, list_id) else None
    if page is None:
        raise UnknownList()
    return page


def find_default(services: Services) -> ListPage | None:
    """The oldest open list; None without one."""

    def body(tx: Transaction) -> ListPage | None:
        waitlist = get_oldest_open_waitlist(tx)
        return _page(tx, waitlist.id) if waitlist else None

    return run_query(services.store, body)


def find_all(services: Services) -> list[ListPage]:
    def body(tx: Transaction) -> list[ListPage]:
        pages = (_page(tx, waitlist.id) for waitlist in get_waitlists(tx))
        return [page for page in pages if page]

    return run_query(services.store, body)


def is_known_consent(services: Services, list_id: str, version: int) -> bool:
    return run_query(services.store, lambda tx: get_consent(tx, list_id, version)) is not None


def create(services: Services, list_id: str, *, title: str, description: str, consent: str) -> None:
    """Raises InvalidInput for a taken or malformed id, title, description or consent text."""
    _check(list_id, title, description, consent)

    def body(tx: Transaction) -> bool:
        inserted = insert_waitlist(tx, Waitlist(list_id, title, description, ListState.OPEN, tx.now))
        if inserted:
            insert_consent(tx, list_id, 1, consent)
        return inserted

    if not run_transaction(services.store, body):
        raise InvalidInput(f"There is a list {list_id} already; `flask lists` shows it.")


def create_default(services: Services) -> bool:
    """Make the default list if there is no list at all; True if it was made. Two at once make one."""

    def body(tx: Transaction) -> bool:
        tx.lock("waitlist.default-list")
        if get_waitlists(tx):
            return False
        insert_waitlist(tx, Waitlist(DEFAULT_LIST, DEFAULT_TITLE, DEFAULT_DESCRIPTION, ListState.OPEN, tx.now))
        insert_consent(tx, DEFAULT_LIST, 1, DEFAULT_CONSENT)
        return True

    return run_transaction(services.store, body)


def set_state(services: Services, list_id: str, state: ListState) -> None:
    """Raises UnknownList."""
    if not run_transaction(services.store, partial(set_waitlist_state, list_id=list_id, state=state)):
        raise UnknownList()


def publish_consent(services: Services, list_id: str, text: str) -> int:
    """Make `text` the current consent text; returns its version. The same text again stays the version it is.

    Raises UnknownList, InvalidInput.
    """
    _check_text("consent text", text, at_least=1)

    def body(tx: Transaction) -> int | None:
        tx.lock(f"waitlist.consent.{list_id}")
        current = get_current_consent(tx, list_id)
        if current is None or current.text == text:
            return current.version if current else None
        insert_consent(tx, list_id, current.version + 1, text)
        return current.version + 1

    version = run_transaction(services.store, body)
    if version is None:
        raise UnknownList()
    return version


def _page(tx: Transaction, list_id: str) -> ListPage | None:
    waitlist = get_waitlist(tx, list_id)
    consent = get_current_consent(tx, list_id)
    return ListPage(waitlist, consent) if waitlist and consent else None


def _check(list_id: str, title: str, description: str, consent: str) -> None:
    if not re.fullmatch(SLUG_PATTERN, list_id):
        raise InvalidInput("The list's name must be 1 to 40 of the characters a-z, 0-9 and -.")
    if not 1 <= len(title) <= MOST_TITLE_CHARACTERS or title != title.strip() or not title.isprintable():
        raise InvalidInput(f"The title must be one line of 1 to {MOST_TITLE_CHARACTERS} characters.")
    if ENCODED_WORD in title:
        raise InvalidInput("The title must not hold `=?`: mail programs would decode it.")
    _check_text("description", description, at_least=0)
    _check_text("consent text", consent, at_least=1)


def _check_text(what: str, text: str, *, at_least: int) -> None:
    if not at_least <= len(text.strip()) <= len(text) <= MOST_TEXT_CHARACTERS:
        raise InvalidInput(f"The {what} must have {at_least} to {MOST_TEXT_CHARACTERS} characters.")
    if not text.replace("\n", " ").isprintable():
        raise InvalidInput(f"The {what} must not hold control characters.")
