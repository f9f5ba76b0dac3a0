"""The pages. A view parses, calls one use case and answers; what happens to people is decided below."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from flask import Blueprint, abort, g, redirect, render_template, url_for
from flask.typing import ResponseReturnValue

from waitlist import confirmation, ledger, signup, waitlists
from waitlist.confirmation import Confirmation
from waitlist.model import Answer, ConfirmOutcome, Decision, ListState
from waitlist.tokens import clean_token
from waitlist.waitlists import ListPage
from waitlist.web.current import services
from waitlist.web.forms import SignupForm
from waitlist.web.htmx import render, wants_fragment
from waitlist.web.security import refuse_foreign_host, same_origin

pages: Final = Blueprint("pages", __name__)
pages.before_request(refuse_foreign_host)
# Load balancers ask under whatever name they know the machine by.
probes: Final = Blueprint("probes", __name__)

LIMITED: Final = ("pages.submit", "pages.renew")

_OUTCOME_PAGES: Final = {
    ConfirmOutcome.NOT_OURS: ("confirm/not_ours.html", 404),
    ConfirmOutcome.LEFT: ("confirm/left.html", 410),
    ConfirmOutcome.ALREADY_CONFIRMED: ("confirm/already_confirmed.html", 200),
    ConfirmOutcome.EXPIRED: ("confirm/expired.html", 410),
    ConfirmOutcome.CONFIRMED_NOW: ("confirm/confirmed_now.html", 200),
}
# Before the button is pressed: what it would come to, so "confirmed now" is still to do.
_LOOK_PAGES: Final = _OUTCOME_PAGES | {ConfirmOutcome.CONFIRMED_NOW: ("confirm/ask.html", 200)}


@pages.get("/")
def front() -> ResponseReturnValue:
    page = waitlists.find_default(services())
    if page is None:
        return render_template("no_list.html")
    return render_template("join.html", page=page, form=SignupForm.blank(page))


@pages.get("/join/<list_id>")
def join(list_id: str) -> ResponseReturnValue:
    page = _find_open(list_id)
    return render_template("join.html", page=page, form=SignupForm.blank(page))


@pages.post("/join/<list_id>")
@same_origin
def submit(list_id: str) -> ResponseReturnValue:
    page = _find_open(list_id)
    form = SignupForm.posted(page)
    if not form.is_ours():
        return _form_again(page, form), 400
    if not form.validate():
        return _form_again(page, form), 422
    answer = signup.sign_up(
        services(), list_id=list_id, email=form.address, consent_version=form.version, trapped=form.is_trapped
    )
    return _neutral(answer)


@pages.get("/join/<list_id>/check-inbox")
def check_inbox(list_id: str) -> ResponseReturnValue:
    return render_template("check_inbox.html", page=waitlists.find(services(), list_id))


@pages.get("/confirm/<token>")
def look(token: str) -> ResponseReturnValue:
    found = confirmation.look(services(), token)
    return _outcome(found, token, _LOOK_PAGES)


@pages.post("/confirm/<token>")
def confirm(token: str) -> ResponseReturnValue:
    return _outcome(confirmation.confirm(services(), token), token, _OUTCOME_PAGES)


@pages.post("/confirm/<token>/renew")
def renew(token: str) -> ResponseReturnValue:
    result = confirmation.renew(services(), token)
    if isinstance(result, Answer):
        return _neutral(result)
    return _outcome(result, token, _LOOK_PAGES)


@pages.get("/unsubscribe/<token>")
def ask_unsubscribe(token: str) -> ResponseReturnValue:  # noqa: ARG001 - the same page for any token
    return render_template("unsubscribe.html")


@pages.post("/unsubscribe/<token>")
def unsubscribe(token: str) -> ResponseReturnValue:
    confirmation.unsubscribe(services(), token)
    return render_template("unsubscribed.html")


@pages.get("/not-me/<token>")
def ask_not_me(token: str) -> ResponseReturnValue:  # noqa: ARG001 - the same page for any token
    return render_template("not_me.html")


@pages.post("/not-me/<token>")
def not_me(token: str) -> ResponseReturnValue:
    confirmation.not_me(services(), token)
    return render_template("not_me_done.html")


@probes.get("/healthz")
def healthz() -> ResponseReturnValue:
    return {"is_alive": True}


@probes.get("/readyz")
def readyz() -> ResponseReturnValue:
    readiness = ledger.readiness(services())
    return asdict(readiness), 200 if readiness.is_ready else 503


def _find_open(list_id: str) -> ListPage:
    page = waitlists.find(services(), list_id)
    if page.waitlist.state is ListState.CLOSED:
        abort(410)
    return page


def _form_again(page: ListPage, form: SignupForm) -> str:
    return render("join.html", "_fragments/form.html", page=page, form=form)


def _neutral(answer: Answer) -> ResponseReturnValue:
    """The one answer to every submission, whatever was decided about the address."""
    g.answer = answer  # for the metrics
    if answer.decision is Decision.LIST_CLOSED:
        abort(410)
    if wants_fragment():
        return render_template("_fragments/answer.html")
    return redirect(url_for("pages.check_inbox", list_id=answer.list_id), code=303)


def _outcome(
    found: Confirmation, token: str, outcome_pages: dict[ConfirmOutcome, tuple[str, int]]
) -> ResponseReturnValue:
    template, status = outcome_pages[found.outcome]
    return render_template(template, waitlist=found.waitlist, token=clean_token(token)), status
