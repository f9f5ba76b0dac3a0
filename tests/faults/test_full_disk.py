"""A disk that is full: the visitor is told to try again, keeps the typed text, and can when there is room."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from flask.testing import FlaskClient

from tests.factories import make_list
from tests.pages import Visitor
from tests.scenes import count, ledger
from waitlist.services import Services
from waitlist.store.schema import signup_requests

MOST_SUBMISSIONS = 2000


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_full_disk_answers_503_with_the_text_kept_and_works_again(services: Services, client: FlaskClient) -> None:
    make_list(services)
    visitor = Visitor(client)
    with services.store.database.write_engine.connect() as connection:
        pages = connection.execute(sa.text("PRAGMA page_count")).scalar_one()
        connection.execute(sa.text(f"PRAGMA max_page_count = {pages}"))

    # A page may have room left for some; then SQLite says that the disk is full.
    for number in range(MOST_SUBMISSIONS):
        visitor.open("/join/launch")
        visitor.fill_in(email := f"p{number}@example.com")
        page = visitor.submit()
        if page.status != 200:
            break
    else:
        pytest.fail("the disk never filled up")
    before = count(services, signup_requests)
    assert (page.status, page.value("email")) == (503, email)
    assert before == number, "what was acknowledged stands, and the refused one left nothing"

    with services.store.database.write_engine.connect() as connection:
        connection.execute(sa.text("PRAGMA max_page_count = 1000000"))
    assert visitor.submit().path == "/join/launch/check-inbox"
    assert count(services, signup_requests) == before + 1
    assert ledger(services)[-1] == "queued"
