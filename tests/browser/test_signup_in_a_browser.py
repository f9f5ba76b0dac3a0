"""Signing up as a person does it, with scripts: what is swapped, where the focus goes, what the console says."""

from __future__ import annotations

import re

from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Site, Tab
from tests.scenes import ledger, subscriber
from waitlist import messages
from waitlist.model import SubscriberStatus
from waitlist.web.security import MOST_BODY_BYTES


def fill_in(page: Page, email: str = "person@example.com") -> None:
    page.get_by_label(messages.EMAIL_LABEL).fill(email)
    page.get_by_role("checkbox").check()


def submit(page: Page) -> None:
    page.get_by_role("button", name=messages.JOIN_BUTTON).click()


def test_answer_takes_the_place_of_the_form_and_the_focus(site: Site, tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page)

    submit(tab.page)

    heading = tab.page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING)
    expect(heading).to_be_focused()
    expect(tab.page.get_by_label(messages.EMAIL_LABEL)).to_have_count(0)
    expect(tab.page).to_have_url(f"{site.url}/")
    assert ledger(site.services) == ["queued"]
    assert tab.complaints == []


def test_another_address_can_be_used_from_there(tab: Tab) -> None:
    tab.page.goto("/")
    expect(tab.page.get_by_text(messages.CHECK_INBOX_START_AGAIN)).to_be_hidden()
    fill_in(tab.page)
    submit(tab.page)

    tab.page.get_by_text(messages.CHECK_INBOX_START_AGAIN).click()

    expect(tab.page.get_by_label(messages.EMAIL_LABEL)).to_have_value("")


def test_mistake_keeps_the_text_and_takes_the_focus(site: Site, tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page, "nonsense")

    submit(tab.page)

    field = tab.page.get_by_label(messages.EMAIL_LABEL)
    expect(field).to_be_focused()
    expect(field).to_have_value("nonsense")
    expect(field).to_have_accessible_description(re.compile("^Enter an email address"))
    expect(tab.page.get_by_role("checkbox")).to_be_checked()
    field.fill("person@example.com")
    submit(tab.page)
    expect(tab.page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING)).to_be_focused()
    assert ledger(site.services) == ["queued"]
    assert tab.complaints == []


def test_enter_key_twice_does_no_harm(site: Site, tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page)

    tab.page.get_by_role("button", name=messages.JOIN_BUTTON).dblclick()

    expect(tab.page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING)).to_be_focused()
    assert len(ledger(site.services)) - ledger(site.services).count("cooldown") == 1


def test_lost_cookies_are_told_and_the_next_press_works(tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page)
    tab.page.context.clear_cookies()

    submit(tab.page)

    expect(tab.page.get_by_role("alert").filter(has_text="cookie")).to_be_focused()
    expect(tab.page.get_by_label(messages.EMAIL_LABEL)).to_have_value("person@example.com")
    submit(tab.page)
    expect(tab.page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING)).to_be_focused()


def test_lost_connection_is_told_and_nothing_typed_is_lost(site: Site, tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page)
    tab.page.context.set_offline(True)

    submit(tab.page)

    alert = tab.page.get_by_role("alert")
    expect(alert).to_have_text(messages.UNREACHABLE)
    expect(tab.page.get_by_label(messages.EMAIL_LABEL)).to_have_value("person@example.com")
    expect(tab.page.get_by_role("button", name=messages.JOIN_BUTTON)).to_be_focused()
    tab.page.context.set_offline(False)
    submit(tab.page)
    expect(tab.page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING)).to_be_focused()
    expect(alert).to_be_empty()
    assert ledger(site.services) == ["queued"]


def test_answer_of_a_proxy_does_not_take_the_place_of_the_form(site: Site, tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page)
    site.refuses.set()

    submit(tab.page)

    expect(tab.page.get_by_role("alert")).to_have_text(messages.UNREACHABLE)
    expect(tab.page.get_by_label(messages.EMAIL_LABEL)).to_have_value("person@example.com")


def test_time_out_is_told(tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page)
    tab.page.evaluate("""document.getElementById("signup").setAttribute("hx-request", '{"timeout": 50}')""")
    tab.page.route("**/join/*", lambda _route: None)

    submit(tab.page)

    expect(tab.page.get_by_role("alert")).to_have_text(messages.UNREACHABLE)


def test_other_errors_of_ours_are_told_above_the_form(tab: Tab) -> None:
    endless = "x" * MOST_BODY_BYTES
    tab.page.goto("/")
    fill_in(tab.page, endless)

    submit(tab.page)

    expect(tab.page.get_by_role("alert")).to_contain_text(messages.ERRORS[413][0])
    expect(tab.page.get_by_label(messages.EMAIL_LABEL)).to_have_value(endless)


def test_loading_the_confirm_page_confirms_nothing(site: Site, tab: Tab) -> None:
    tab.page.goto("/")
    fill_in(tab.page)
    submit(tab.page)
    tab.page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING).wait_for()
    tab.page.goto(site.confirmation_path(), wait_until="networkidle")
    assert subscriber(site.services).status is SubscriberStatus.PENDING

    tab.page.get_by_role("button", name=messages.CONFIRM_BUTTON).click()

    expect(tab.page.get_by_role("heading", name=messages.CONFIRMED_HEADING)).to_be_visible()
    assert subscriber(site.services).status is SubscriberStatus.CONFIRMED
    assert tab.complaints == []


def test_link_away_from_a_token_page_carries_no_token(site: Site, tab: Tab) -> None:
    referrers: list[str | None] = []

    def answer(route: Route) -> None:
        referrers.append(route.request.headers.get("referer"))
        route.fulfill(body="elsewhere")

    tab.page.route("https://example.com/**", answer)
    tab.page.goto(f"/confirm/{'A' * 43}")

    tab.page.get_by_role("link", name=messages.PRIVACY).click()

    expect(tab.page.get_by_text("elsewhere")).to_be_visible()
    assert referrers == [None]
