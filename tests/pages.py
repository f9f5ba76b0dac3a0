"""The visitor's verbs: open a page, fill in, tick, submit, press a button, read the message. Knows HTML, not the code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bs4 import BeautifulSoup, Tag
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

HTMX = {"HX-Request": "true"}


@dataclass
class Page:
    """What came back, as a visitor reads it. A fragment is a page, too."""

    response: TestResponse
    path: str

    def __post_init__(self) -> None:
        self.soup = BeautifulSoup(self.response.text, "html.parser")

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def heading(self) -> str:
        found = self.soup.find(["h1", "h2"])
        return found.get_text(strip=True) if found else ""

    @property
    def message(self) -> str:
        """All the words of the page, in one line."""
        return " ".join((self.soup.find("main") or self.soup).get_text(" ").split())

    @property
    def notice(self) -> str:
        found = self.soup.find(id="notice")
        return found.get_text(strip=True) if found else ""

    @property
    def focused(self) -> list[str]:
        """The ids of all elements that take the focus when they appear."""
        return [str(tag.get("id", tag.name)) for tag in self.soup.find_all(autofocus=True)]

    @property
    def buttons(self) -> list[str]:
        return [button.get_text(strip=True) for button in self.soup.find_all("button")]

    @property
    def links(self) -> dict[str, str]:
        return {a.get_text(strip=True): str(a["href"]) for a in (self.soup.find("main") or self.soup).find_all("a")}

    def input(self, name: str) -> Tag:
        found = self.soup.find("input", attrs={"name": name})
        assert isinstance(found, Tag), f"no field {name}: {self.message}"
        return found

    def value(self, name: str) -> str:
        return str(self.input(name).get("value", ""))

    def is_ticked(self, name: str = "consent") -> bool:
        return self.input(name).has_attr("checked")

    def problem(self, name: str) -> str:
        """The words at the field, found as a screen reader finds them; empty if it is not marked invalid."""
        tag = self.input(name)
        if tag.get("aria-invalid") != "true":
            return ""
        found = self.soup.find(id=str(tag["aria-describedby"]))
        assert found, f"aria-describedby of {name} leads nowhere"
        return found.get_text(strip=True)


@dataclass
class Visitor:
    """One person with one browser. Not ticked: `fill_in(consent=None)`; a field is left out by the value None."""

    client: FlaskClient
    page: Page = field(init=False)
    typed: dict[str, str | None] = field(default_factory=dict)

    def open(self, path: str, **kwargs: Any) -> Page:
        return self._arrive(self.client.get(path, **kwargs), path)

    def fill_in(
        self, email: str | None = "person@example.com", consent: str | None = "yes", **others: str | None
    ) -> None:
        self.typed = {"email": email, "consent": consent, **others}

    def submit(self, path: str | None = None, **kwargs: Any) -> Page:
        """Send the signup form as a browser without scripts does, and follow where it leads."""
        action, values = self._form(self.page.soup.find(id="signup"))
        kwargs.setdefault("follow_redirects", True)
        return self._arrive(self.client.post(path or action, data=values, **kwargs), path or action)

    def submit_with_htmx(self, path: str | None = None, **kwargs: Any) -> Page:
        """Send the form by htmx; what comes back is the fragment."""
        action, values = self._form(self.page.soup.find(id="signup"))
        response = self.client.post(path or action, data=values, headers=HTMX | kwargs.pop("headers", {}), **kwargs)
        return self._arrive(response, path or action)

    def sign_up(self, email: str = "person@example.com", list_id: str = "launch") -> Page:
        self.open(f"/join/{list_id}")
        self.fill_in(email)
        return self.submit()

    def press(self, button: str, **kwargs: Any) -> Page:
        """Press a button of a page that asks for nothing else."""
        for form in self.page.soup.find_all("form"):
            if button in [tag.get_text(strip=True) for tag in form.find_all("button")]:
                action, values = self._form(form)
                return self._arrive(self.client.post(action, data=values, follow_redirects=True, **kwargs), action)
        raise AssertionError(f"no button {button!r}: {self.page.buttons}")

    def _form(self, form: Any) -> tuple[str, dict[str, str]]:
        assert isinstance(form, Tag), f"no form: {self.page.message}"
        values: dict[str, str | None] = {
            str(tag["name"]): str(tag.get("value", ""))
            for tag in form.find_all("input")
            if tag.get("type") != "checkbox" or tag.has_attr("checked")
        }
        values |= self.typed
        return str(form.get("action") or self.page.path), {
            name: text for name, text in values.items() if text is not None
        }

    def _arrive(self, response: TestResponse, path: str) -> Page:
        arrived = urlsplit(response.request.url).path if response.history else path
        self.typed = {}
        self.page = Page(response, arrived)
        return self.page
