from __future__ import annotations

import hashlib
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waitlist.tokens import (
    LinkPurpose,
    address_hmac,
    cap_hmac,
    clean_token,
    new_id,
    new_token,
    read_link,
    sign_link,
    token_digest,
)

KEY = "k" * 32
OTHER_KEY = "o" * 32


def test_ids_are_lower_case_uuids_of_version_7_in_order_of_time() -> None:
    ids = [new_id() for _ in range(1000)]

    assert ids == sorted(set(ids))
    assert {uuid.UUID(one).version for one in ids} == {7}
    assert all(one == str(uuid.UUID(one)) for one in ids)


def test_tokens_differ_and_survive_a_url() -> None:
    tokens = {new_token() for _ in range(1000)}

    assert len(tokens) == 1000
    assert {len(token) for token in tokens} == {43}
    assert {clean_token(token) for token in tokens} == tokens


@pytest.mark.parametrize("glued", [".", ")", ">", "!", "?", "'", '">', ").", ",", "]}"])
def test_punctuation_glued_to_a_token_is_forgiven(glued: str) -> None:
    token = new_token()

    assert clean_token(token + glued) == token


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "short",
        "a" * 42,
        "a" * 44,
        "a" * 100_000,
        "a" * 43 + "." * 100,
        "é" * 43,
        "a" * 42 + "\0",
        "a" * 42 + " ",
    ],
)
def test_what_cannot_be_a_token_is_none(text: str) -> None:
    assert clean_token(text) is None


def test_digest_is_the_sha256_of_the_token() -> None:
    assert token_digest("abc") == hashlib.sha256(b"abc").hexdigest()
    assert token_digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("person@example.com", "person+tag@example.com"),
        ("person+a@example.com", "person+b+c@example.com"),
    ],
)
def test_tagged_addresses_share_a_mail_cap_but_not_an_identity(one: str, other: str) -> None:
    assert cap_hmac(KEY, one) == cap_hmac(KEY, other)
    assert address_hmac(KEY, one) != address_hmac(KEY, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("person@example.com", "person@example.org"),
        ("person@example.com", "per.son@example.com"),
        # Nothing but a tag: there is no mailbox to fold into.
        ("+a@example.com", "+b@example.com"),
    ],
)
def test_different_mailboxes_have_their_own_caps(one: str, other: str) -> None:
    assert cap_hmac(KEY, one) != cap_hmac(KEY, other)


def test_hmacs_depend_on_key_and_purpose() -> None:
    digests = {make(key, "person@example.com") for make in (address_hmac, cap_hmac) for key in (KEY, OTHER_KEY)}

    assert len(digests) == 4
    assert not any("person" in digest for digest in digests)


@pytest.mark.parametrize("purpose", LinkPurpose)
def test_signed_link_gives_its_delivery_back(purpose: LinkPurpose) -> None:
    delivery_id = new_id()

    assert read_link(KEY, purpose, sign_link(KEY, purpose, delivery_id)) == delivery_id
    assert read_link(KEY, purpose, sign_link(KEY, purpose, delivery_id) + ").") == delivery_id


def test_signed_link_is_good_for_its_purpose_and_key_only() -> None:
    link = sign_link(KEY, LinkPurpose.UNSUBSCRIBE, "delivery-1")

    assert read_link(KEY, LinkPurpose.NOT_ME, link) is None
    assert read_link(OTHER_KEY, LinkPurpose.UNSUBSCRIBE, link) is None


@pytest.mark.parametrize("position", range(0, 60, 7))
def test_changed_link_is_not_ours(position: int) -> None:
    link = sign_link(KEY, LinkPurpose.UNSUBSCRIBE, new_id())
    changed = link[:position] + ("a" if link[position] != "a" else "b") + link[position + 1 :]

    assert read_link(KEY, LinkPurpose.UNSUBSCRIBE, changed) is None


@given(st.text())
def test_garbage_is_no_link_and_no_error(text: str) -> None:
    assert read_link(KEY, LinkPurpose.NOT_ME, text) is None
