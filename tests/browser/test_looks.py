"""Every page, light and dark, narrow and wide: readable for all (axe), and never wider than the window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.browser.conftest import Site, Tab
from tests.browser.test_signup_in_a_browser import fill_in, submit
from tests.factories import make_list
from tests.scenes import deliveries, join
from waitlist import confirmation, messages, waitlists
from waitlist.model import ListState
from waitlist.tokens import LinkPurpose, sign_link

DAY_SECONDS = 86_400
# The smallest target a finger hits; links within a sentence are exempt (WCAG 2.5.5).
TARGET_PIXELS = 44


def _open(path: str, _site: Site, page: Page) -> None:
    page.goto(path)


def _long_words(site: Site, page: Page) -> None:
    word = "Donaudampfschifffahrtsgesellschaftskapitän"
    make_list(site.services, "long", title=word, description=word * 3, consent=word * 3)
    page.goto("/join/long")


def _mistakes(_site: Site, page: Page) -> None:
    page.goto("/")
    submit(page)
    page.locator("#consent-problem").wait_for()


def _expired_form(_site: Site, page: Page) -> None:
    page.goto("/")
    fill_in(page)
    page.context.clear_cookies()
    submit(page)
    page.locator("#notice").wait_for()


def _answer(_site: Site, page: Page) -> None:
    page.goto("/")
    fill_in(page)
    submit(page)
    page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING).wait_for()


def _unreachable(_site: Site, page: Page) -> None:
    page.goto("/")
    fill_in(page)
    page.context.set_offline(True)
    submit(page)
    page.get_by_text(messages.UNREACHABLE).wait_for()


def _too_many(site: Site, page: Page) -> None:
    page.goto("/")
    fill_in(page)
    for _ in range(20):
        page.request.post(f"{site.url}/join/launch")
    submit(page)
    page.get_by_role("button", name=messages.TRY_AGAIN_BUTTON).wait_for()


def _no_list(site: Site, page: Page) -> None:
    waitlists.set_state(site.services, "launch", ListState.CLOSED)
    page.goto("/")


def _closed(site: Site, page: Page) -> None:
    waitlists.set_state(site.services, "launch", ListState.CLOSED)
    page.goto("/join/launch")


def _ask(site: Site, page: Page) -> None:
    join(site.services)
    page.goto(site.confirmation_path())


def _confirmed(site: Site, page: Page) -> None:
    _ask(site, page)
    page.get_by_role("button").click()


def _already(site: Site, page: Page) -> None:
    _confirmed(site, page)
    page.goto(page.url)


def _expired(site: Site, page: Page) -> None:
    join(site.services)
    path = site.confirmation_path()
    site.clock.advance(DAY_SECONDS)
    page.goto(path)


def _left(site: Site, page: Page) -> None:
    join(site.services)
    path = site.confirmation_path()
    key = site.services.settings.data_key_text
    token = sign_link(key, LinkPurpose.UNSUBSCRIBE, deliveries(site.services)[-1].id)
    confirmation.unsubscribe(site.services, token)
    page.goto(path)


def _press(path: str, _site: Site, page: Page) -> None:
    page.goto(path)
    page.get_by_role("button").click()
    page.wait_for_load_state()


SCENES: dict[str, Callable[[Site, Page], None]] = {
    "form": partial(_open, "/"),
    "long_words": _long_words,
    "mistakes": _mistakes,
    "expired_form": _expired_form,
    "answer": _answer,
    "inbox": partial(_open, "/join/launch/check-inbox"),
    "unreachable": _unreachable,
    "too_many": _too_many,
    "no_list": _no_list,
    "closed": _closed,
    "ask": _ask,
    "confirmed": _confirmed,
    "already": _already,
    "expired": _expired,
    "left": _left,
    "not_ours": partial(_open, "/confirm/x"),
    "unsubscribe": partial(_open, "/unsubscribe/x"),
    "unsubscribed": partial(_press, "/unsubscribe/x"),
    "not_me": partial(_open, "/not-me/x"),
    "not_me_done": partial(_press, "/not-me/x"),
    "not_found": partial(_open, "/nothing"),
}


@pytest.fixture
def context_options() -> dict[str, object]:
    return {"viewport": {"width": 320, "height": 640}, "reduced_motion": "reduce"}


@pytest.mark.parametrize("scene", SCENES)
def test_page_is_accessible_and_fits(site: Site, tab: Tab, scene: str) -> None:
    SCENES[scene](site, tab.page)

    for width in (320, 1280):
        tab.page.set_viewport_size({"width": width, "height": 640})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        results = Axe().run(tab.page)
        assert results.violations_count == 0, f"{scheme}: {results.generate_report()}"
    assert tab.page.locator("h1").count() == 1
    assert _small_targets(tab.page) == []
    assert tab.complaints == []


def _small_targets(page: Page) -> list[str]:
    """Buttons, fields and links that stand alone, and are too low for a finger; a tick box is as large as its label."""
    return list(
        page.eval_on_selector_all(
            "button, input[type=email], .consent label, .button, header a, footer a, .contact a, .start-again a",
            f"""(all) => all.filter((one) => one.offsetParent !== null && one.offsetHeight < {TARGET_PIXELS})
                            .map((one) => one.outerHTML)""",
        )
    )


@pytest.mark.parametrize("width", [320, 1280])
def test_form_keeps_its_distance_without_a_description(site: Site, tab: Tab, width: int) -> None:
    make_list(site.services, "bare", description="")
    tab.page.set_viewport_size({"width": width, "height": 640})

    gaps = []
    for path, above in (("/join/launch", ".lead"), ("/join/bare", "h1")):
        tab.page.goto(path)
        gaps.append(
            tab.page.evaluate(
                """(above) => document.querySelector("#signup").getBoundingClientRect().top
                              - document.querySelector(above).getBoundingClientRect().bottom""",
                above,
            )
        )

    assert gaps == [32, 32]


def test_focus_is_visible_on_everything_the_tab_key_reaches(tab: Tab) -> None:
    tab.page.goto("/")

    outlines = []
    for _ in range(6):
        tab.page.keyboard.press("Tab")
        outlines.append(tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))

    assert set(outlines) == {"solid"}
