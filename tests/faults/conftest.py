"""One installation that worker processes share: a real clock, a real database, and one mailbox of its own per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from tests.factories import make_list
from tests.scenes import services_at
from tests.smtp_server import SmtpServer
from waitlist.services import Services
from waitlist.settings import Settings


@pytest.fixture
def mailbox() -> Iterator[SmtpServer]:
    with SmtpServer() as server:
        yield server


@pytest.fixture
def site(settings: Settings, mailbox: SmtpServer) -> Iterator[Services]:
    """With the list "launch", and the default lease of a minute."""
    services = services_at(settings.model_copy(update={"mail_url": SecretStr(mailbox.url)}))
    make_list(services)
    yield services
    services.store.close()
