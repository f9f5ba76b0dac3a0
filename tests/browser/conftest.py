"""A real browser against a real server. Without a browser these tests fail, with the line to type: they are no extra."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flask import Flask
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.databases import SQLiteFiles
from tests.factories import FakeClock, FakeSender, make_list
from tests.scenes import drain, token_in
from waitlist import create_app
from waitlist.services import Services
from waitlist.settings import Settings

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# A test waits for what it expects; a page of ours answers in milliseconds even on a loaded machine.
PATIENCE_MS = 10_000
# Every 4xx and every lost connection is reported to the console, by the browser and by htmx; we mean to have those.
MEANT = ("Failed to load resource", "htmx:afterRequest", "htmx:sendError", "htmx:responseError")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("The browser tests need Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002 - the name in werkzeug
        """Nothing: the paths hold tokens."""


@dataclass
class Site:
    """The waitlist, served; with what stands behind it, for a test to arrange and to look."""

    url: str
    services: Services
    sender: FakeSender
    clock: FakeClock
    refuses: threading.Event

    def confirmation_path(self) -> str:
        drain(self.services)
        return f"/confirm/{token_in(self.sender.mails[-1])}"


@pytest.fixture
def site(sqlite_files: SQLiteFiles, tmp_path: Path) -> Iterator[Site]:
    sender, clock = FakeSender(), FakeClock()
    settings = Settings(
        database_url=sqlite_files.fresh(tmp_path),
        secret_key="test-secret-key-of-32-characters",
        data_key="test-data-key--of-32-characters-",
        mail_url=f"file:{tmp_path}/mail",
        contact="help@example.com",
        privacy_url="https://example.com/privacy",
        min_form_seconds=0,
    )
    app = create_app(settings, sender=sender, clock=clock)
    make_list(app.extensions["waitlist"], title="The orchard opens in spring")
    refuses = threading.Event()
    server = make_server("127.0.0.1", 0, _breakable(app, refuses), threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Site(f"http://127.0.0.1:{server.port}", app.extensions["waitlist"], sender, clock, refuses)
    server.shutdown()
    thread.join()
    server.server_close()
    app.extensions["waitlist"].store.close()


def _breakable(app: Flask, refuses: threading.Event):
    """While `refuses` is set, a proxy in front of us answers in our place."""

    def proxy(environ, start_response):
        if not refuses.is_set():
            return app(environ, start_response)
        start_response("503 Service Unavailable", [("Content-Type", "text/html")])
        return [b"<html><body><h1>503</h1>proxy</body></html>"]

    return proxy


@dataclass
class Tab:
    """A page of the browser that remembers what the console complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(MEANT):
            self.complaints.append(message.text)


@pytest.fixture
def context_options() -> dict[str, object]:
    """Override to switch scripts off or to change the size of the window."""
    return {}


@pytest.fixture
def context(browser: Browser, site: Site, context_options: dict[str, object]) -> Iterator[BrowserContext]:
    context = browser.new_context(base_url=site.url, **context_options)  # type: ignore[arg-type]  # of any option
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def tab(context: BrowserContext) -> Tab:
    tab = Tab(context.new_page())
    tab.listen()
    return tab
