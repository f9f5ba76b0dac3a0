"""The JSON that goes in and out, once: these types validate, and the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from waitlist.addresses import MAX_TYPED_CHARACTERS, canonical_address
from waitlist.errors import InvalidAddress
from waitlist.model import SLUG_PATTERN, Decision, DeliveryStatus, Reason, RequestState

ID_PATTERN: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Fits every database's integer.
MOST_CONSENT_VERSION: Final = 999_999_999


def _canonical(typed: str) -> str:
    try:
        return canonical_address(typed)
    except InvalidAddress as error:
        # The sentence for visitors may quote the address.
        raise PydanticCustomError("address", "must be an address that mail can be sent to") from error


Id = Annotated[str, Field(pattern=f"^{ID_PATTERN}$", description="Lower-case UUID.")]
Address = Annotated[
    str,
    Field(
        min_length=3,
        max_length=MAX_TYPED_CHARACTERS,
        json_schema_extra={"format": "email"},
        description="Canonicalised as by the form: outer white space and case do not count, plus tags and dots do.",
        examples=["person@example.com"],
    ),
    AfterValidator(_canonical),
]


class NewSignup(BaseModel):
    """One person for one list. They must have agreed to the consent text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    email: Address
    consent_version: Annotated[
        int | None,
        Field(
            ge=1,
            le=MOST_CONSENT_VERSION,
            description="The version of the consent text that was agreed to; the current one if left out.",
        ),
    ] = None
    source: Annotated[
        str | None,
        Field(
            pattern="^[ -~]{1,100}$",
            description="Where the person came from, in printable ASCII. Kept in the ledger; never shown to them.",
        ),
    ] = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SignupPart(_Answer):
    list: Annotated[str, Field(pattern=f"^{SLUG_PATTERN}$")]
    confirmation: Annotated[Literal["pending"], Field(description="The same for every address, known or not.")]


class EmailJob(_Answer):
    id: Id
    state: Literal["accepted"]


class AcceptedSignup(_Answer):
    """The same shape and length for every address, whatever it is to this waitlist."""

    operation_id: Id
    status: Literal["accepted"]
    signup: SignupPart
    email_job: EmailJob
    replay_until: Annotated[
        str,
        Field(
            json_schema_extra={"format": "date-time"}, description="Until then the same key brings this answer again."
        ),
    ]
    status_url: Annotated[str, Field(json_schema_extra={"format": "uri"})]


class DeliveryPart(_Answer):
    id: Id
    status: DeliveryStatus
    reason: Reason
    attempts: Annotated[int, Field(ge=0)]
    provider_message_id: str | None


class SignupStatus(_Answer):
    """What came of one signup, truthfully: this tells "already sent" from "never queued"."""

    operation_id: Id
    state: RequestState
    decision: Decision
    words: Annotated[str, Field(description="The decision in a sentence.")]
    delivery: Annotated[DeliveryPart | None, Field(description="The mail that this signup queued; null if none.")]


class MemberFault(_Answer):
    pointer: Annotated[str, Field(description="JSON pointer into the body.")]
    detail: str


class ProblemDocument(_Answer):
    """RFC 9457. Tell problems apart by `code`; never holds the address."""

    type: Literal["about:blank"]
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    code: str
    detail: str
    retryable: Annotated[bool, Field(description="Whether the same request with the same key may succeed later.")]
    errors: list[MemberFault] = []
