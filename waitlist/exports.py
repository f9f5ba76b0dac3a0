"""Takes subscribers out, for the launch itself or for another program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from waitlist.errors import UnknownList
from waitlist.model import SubscriberStatus
from waitlist.services import Services
from waitlist.store import run_query
from waitlist.store.exports import ExportedSubscriber, get_page
from waitlist.store.waitlists import get_waitlists

# Read at once: some hundred kilobytes, and no writer's log grows for longer than a moment.
PAGE_ROWS: Final = 1000


def export(
    services: Services, list_id: str | None = None, status: SubscriberStatus | None = SubscriberStatus.CONFIRMED
) -> Iterator[ExportedSubscriber]:
    """Subscribers by list and address; of every list and with any status where that is None.

    Each page is as it stands when it is read, so who joins or leaves meanwhile may be in or not. Raises UnknownList.
    """
    list_ids = [waitlist.id for waitlist in run_query(services.store, get_waitlists)]
    if list_id is not None and list_id not in list_ids:
        raise UnknownList()
    return _rows(services, [list_id] if list_id else list_ids, status)


def _rows(services: Services, list_ids: Sequence[str], status: SubscriberStatus | None) -> Iterator[ExportedSubscriber]:
    for list_id in list_ids:
        after = ""
        while page := run_query(
            services.store, partial(get_page, list_id=list_id, status=status, after=after, most=PAGE_ROWS)
        ):
            yield from page
            after = page[-1].email
