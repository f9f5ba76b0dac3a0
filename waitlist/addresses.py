"""One canonical form for each address, so that the database can own "one subscriber per address". No DNS, no I/O."""

from __future__ import annotations

import re

from email_validator import EmailNotValidError, validate_email

from waitlist import messages
from waitlist.errors import InvalidAddress

# RFC 5321 allows 254 octets; U-labels may be longer as typed than as stored. Checked before any parsing, since
# IDNA decoding was once quadratic (CVE-2024-3651).
MAX_TYPED_CHARACTERS = 320
# Python's mail package would decode this out of a local part into another mailbox or a header (RFC 2047).
_ENCODED_WORD_OPENING = re.compile(r"=\?[^?]*\?[bq]\?", re.IGNORECASE)


def canonical_address(typed: str) -> str:
    """The address as stored: ASCII local part in lower case, domain as lower-case A-label; plus tags and dots kept.

    Raises InvalidAddress with a sentence for the visitor.
    """
    trimmed = typed.strip()
    if not trimmed:
        raise InvalidAddress(messages.ADDRESS_MISSING)
    if len(trimmed) > MAX_TYPED_CHARACTERS:
        raise InvalidAddress(messages.ADDRESS_TOO_LONG)
    if not trimmed.isprintable():
        raise InvalidAddress(messages.ADDRESS_INVISIBLE)
    try:
        checked = validate_email(trimmed, strict=True, check_deliverability=False, allow_smtputf8=False)
    except EmailNotValidError as error:
        raise InvalidAddress(messages.ADDRESS_UNSOUND.format(reason=error)) from error
    if _ENCODED_WORD_OPENING.search(checked.local_part):
        raise InvalidAddress(messages.ADDRESS_UNFIT)
    return f"{checked.local_part}@{checked.ascii_domain}".lower()
