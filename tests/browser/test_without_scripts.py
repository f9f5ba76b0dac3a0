"""The whole way from the form to the list, and off it, in a browser that runs no script."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Site, Tab
from tests.browser.test_signup_in_a_browser import fill_in, submit
from tests.scenes import deliveries, subscriber
from waitlist import messages
from waitlist.model import SubscriberStatus
from waitlist.tokens import LinkPurpose, sign_link


@pytest.fixture
def context_options() -> dict[str, object]:
    return {"java_script_enabled": False}


def test_from_the_form_to_the_list_and_off_it(site: Site, tab: Tab) -> None:
    page = tab.page
    page.goto("/")
    fill_in(page)
    submit(page)
    expect(page).to_have_url(f"{site.url}/join/launch/check-inbox")
    expect(page.get_by_role("heading", name=messages.CHECK_INBOX_HEADING)).to_be_visible()

    page.goto(site.confirmation_path())
    page.get_by_role("button", name=messages.CONFIRM_BUTTON).click()
    expect(page.get_by_role("heading", name=messages.CONFIRMED_HEADING)).to_be_visible()
    assert subscriber(site.services).status is SubscriberStatus.CONFIRMED

    key = site.services.settings.data_key_text
    page.goto(f"/unsubscribe/{sign_link(key, LinkPurpose.UNSUBSCRIBE, deliveries(site.services)[0].id)}")
    page.get_by_role("button", name=messages.UNSUBSCRIBE_BUTTON).click()
    expect(page.get_by_role("heading", name=messages.UNSUBSCRIBED_HEADING)).to_be_visible()
    assert subscriber(site.services).status is SubscriberStatus.UNSUBSCRIBED


def test_mistake_comes_back_with_text_and_message(tab: Tab) -> None:
    tab.page.goto("/join/launch")
    fill_in(tab.page, "nonsense")

    submit(tab.page)

    field = tab.page.get_by_label(messages.EMAIL_LABEL)
    expect(field).to_have_value("nonsense")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    expect(tab.page.get_by_role("checkbox")).to_be_checked()
