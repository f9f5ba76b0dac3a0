"""The signup form: what was typed, whether it is sound, and what to say at which field. Decides nothing about people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flask import request
from flask_wtf import FlaskForm
from itsdangerous import BadData, TimestampSigner
from werkzeug.datastructures import ImmutableMultiDict
from werkzeug.exceptions import HTTPException
from wtforms import BooleanField, EmailField, HiddenField, StringField
from wtforms.fields import Field
from wtforms.validators import ValidationError

from waitlist import messages, waitlists
from waitlist.addresses import canonical_address
from waitlist.errors import InvalidAddress
from waitlist.waitlists import ListPage
from waitlist.web.current import services

# Fits every database's integer, and int() never sees more than nine digits.
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")
# A byte that is no UTF-8 stays as it was spelled, in percents, and must not become somebody's address.
_NO_TEXT: Final = re.compile(r"%[89A-Fa-f][0-9A-Fa-f]")
_STAMPED: Final = "form"
# The one value of the box in the templates. A browser sends it for a tick, and nothing at all without one.
_TICKED: Final = "yes"


class TickBox(BooleanField):
    """Consent is what our own box says: WTForms would take `no`, `0` or `off` for a tick as well."""

    def process_formdata(self, valuelist: list[str]) -> None:
        self.data = valuelist == [_TICKED]


class SignupForm(FlaskForm):  # type: ignore[misc]  # FlaskForm is untyped
    """`page` is None where there may be no look-up; such a form can show what was typed, and no more.

    The order is `is_ours()`, then `validate()`; then `address` is canonical and `version` a known consent version.
    """

    email = EmailField()
    consent = TickBox()
    consent_version = HiddenField()
    # The honeypot: no browser fills it in by itself, and people do not see it.
    referral = StringField()
    started = HiddenField()

    def __init__(self, page: ListPage | None, typed: ImmutableMultiDict[str, str] | None) -> None:
        super().__init__(formdata=typed)
        self.page = page
        self.notice = ""
        self.address = ""

    @classmethod
    def blank(cls, page: ListPage) -> SignupForm:
        return cls(page, None)

    @classmethod
    def posted(cls, page: ListPage | None) -> SignupForm:
        """Reads the body only: not the query, not JSON. A body that is too large counts as empty here."""
        try:
            return cls(page, request.form)
        except HTTPException:
            return cls(page, ImmutableMultiDict())

    def is_ours(self) -> bool:
        """Whether the CSRF token is this visitor's and fresh; says so in `notice` if not."""
        if self.csrf_token.validate(self):
            return True
        self.notice = messages.FORM_EXPIRED
        return False

    def validate(self, extra_validators: Mapping[str, Sequence[Any]] | None = None) -> bool:
        if self._is_too_soon():
            self.notice = messages.TOO_SOON
            return False
        return bool(super().validate(extra_validators))

    def validate_email(self, field: Field) -> None:
        if _NO_TEXT.search(field.data or ""):
            raise ValidationError(str(InvalidAddress()))
        try:
            self.address = canonical_address(field.data or "")
        except InvalidAddress as error:
            raise ValidationError(str(error)) from error

    def validate_consent(self, field: Field) -> None:
        if not field.data:
            raise ValidationError(messages.CONSENT_MISSING)
        if not self._is_version_known():
            raise ValidationError(messages.CONSENT_CHANGED)

    @property
    def version(self) -> int:
        """0 if it is no version at all."""
        typed = self.consent_version.data or ""
        return int(typed) if _VERSION.fullmatch(typed) else 0

    @property
    def is_trapped(self) -> bool:
        return bool(self.referral.data)

    @property
    def is_ticked(self) -> bool:
        """A tick is for the text it was set under: it does not move to a newer one."""
        return bool(self.consent.data) and self.page is not None and self.version == self.page.consent.version

    @property
    def email_problem(self) -> str:
        return str(self.email.errors[0]) if self.email.errors else ""

    @property
    def consent_problem(self) -> str:
        if self.consent.errors:
            return str(self.consent.errors[0])
        return messages.CONSENT_CHANGED if self.consent.data and not self.is_ticked else ""

    def marks(self, name: str) -> dict[str, str]:
        """The attributes that tell browser and screen reader what is wrong with a field; the first bad one is focused."""
        problems = {"email": self.email_problem, "consent": self.consent_problem}
        if not problems[name]:
            return {}
        first = next(each for each, problem in problems.items() if problem)
        focus = {"autofocus": ""} if name == first and not self.notice else {}
        return {"aria-invalid": "true", "aria-describedby": f"{name}-problem"} | focus

    @property
    def stamp(self) -> str:
        """When the form was first shown. It survives a correction, so that a quick one is not punished."""
        if self._started_at() is not None:
            return str(self.started.data)
        return _signer().sign(_STAMPED).decode()

    def _started_at(self) -> int | None:
        try:
            _, at = _signer().unsign(self.started.data or "", return_timestamp=True)
        except BadData:
            return None
        return int(at.timestamp())

    def _is_too_soon(self) -> bool:
        """A clock that stepped back makes a negative age, which is not the visitor's fault."""
        minimum = services().settings.min_form_seconds
        started_at = self._started_at()
        return minimum > 0 and (started_at is None or 0 <= int(services().clock()) - started_at < minimum)

    def _is_version_known(self) -> bool:
        assert self.page is not None
        return self.version == self.page.consent.version or (
            self.version > 0 and waitlists.is_known_consent(services(), self.page.waitlist.id, self.version)
        )


class _Signer(TimestampSigner):
    """Stamps with the clock that everything else reads."""

    def get_timestamp(self) -> int:
        return int(services().clock())


def _signer() -> _Signer:
    # itsdangerous signs with the last key of a list and accepts all of them.
    return _Signer(services().settings.secret_keys[::-1], salt="waitlist.started")
