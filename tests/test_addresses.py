"""The corpus of addresses, and what holds for every address."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waitlist import addresses
from waitlist.addresses import canonical_address
from waitlist.errors import InvalidAddress

CORPUS = [json.loads(line) for line in Path(__file__).with_name("addresses.jsonl").read_text().splitlines()]


def typed(case: dict[str, Any]) -> str:
    """What the visitor types. Long ones are described: a list is a text and how often it is repeated."""
    if "input" in case:
        return str(case["input"])
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in case["generate"])


@pytest.mark.parametrize("case", [case for case in CORPUS if case["answer"] == "accept"], ids=lambda case: case["id"])
def test_good_address_has_its_canonical_form(case: dict[str, Any]) -> None:
    assert canonical_address(typed(case)) == case["canonical"]


@pytest.mark.parametrize("case", [case for case in CORPUS if case["answer"] == "reject"], ids=lambda case: case["id"])
def test_bad_address_is_refused_with_a_sentence_at_once(case: dict[str, Any]) -> None:
    start = time.process_time()

    with pytest.raises(InvalidAddress) as refusal:
        canonical_address(typed(case))

    assert len(str(refusal.value).split()) >= 4
    assert len(str(refusal.value)) < 300
    # Quadratic work on the half megabyte of the corpus takes minutes.
    assert time.process_time() - start < 1


def test_too_long_a_text_is_refused_before_anything_parses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2024-3651: decoding a domain name was once quadratic in its length."""
    monkeypatch.setattr(addresses, "validate_email", lambda *_, **__: pytest.fail("parsed"))

    with pytest.raises(InvalidAddress, match="too long"):
        canonical_address("a@" + "b" * addresses.MAX_TYPED_CHARACTERS)


def test_corpus_holds_both_answers() -> None:
    assert {case["answer"] for case in CORPUS} == {"accept", "reject"}
    assert len(CORPUS) == 85


@given(st.emails() | st.text(max_size=40) | st.text("ab.@+=?q-_é\u200b\0\r\n ", max_size=20))
def test_canonical_form_is_stable_lower_case_ascii_and_one_line(text: str) -> None:
    try:
        canonical = canonical_address(text)
    except InvalidAddress:
        return

    assert canonical_address(canonical) == canonical
    assert canonical == canonical.lower()
    assert canonical.isascii()
    assert canonical.isprintable()
    assert " " not in canonical
    assert canonical.count("@") == 1


@given(st.emails())
def test_case_and_outer_white_space_do_not_matter(text: str) -> None:
    try:
        canonical = canonical_address(text)
    except InvalidAddress:
        return

    assert canonical_address(f"\t {text.upper()} \n") == canonical
