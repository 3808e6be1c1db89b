"""Which documents are of a user or a tenant, and which texts are searched for."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.erasure.rules import DataSubject, mentions, stored_forms, texts_of

ANNA = DataSubject("anna@example.com")
ANNA_OF_ACME = DataSubject("anna@example.com", "acme")
ACME = DataSubject(tenant="acme")

JOBS: list[tuple[DataSubject, dict[str, Any], str | None, bool]] = [
    (ANNA, {"agent": "a", "prompt": "x", "metadata": {"user": "anna@example.com"}}, None, True),
    (ANNA, {"agent": "a", "prompt": "x", "params": {"safety_identifier": "anna@example.com"}}, None, True),
    (ANNA, {"agent": "a", "prompt": "x", "params": {"user": "anna@example.com"}}, None, True),
    # The user that `request` has resolved counts, whatever the job says.
    (ANNA, {"agent": "a", "prompt": "x", "metadata": {"user": "anna@example.com"}}, "ben", False),
    (ANNA, {"agent": "a", "prompt": "x"}, "anna@example.com", True),
    (ANNA, {"agent": "a", "prompt": "x", "metadata": {"user": "anna@example.comx"}}, None, False),
    # Invalid, or encrypted: its names are read all the same.
    (ANNA, {"agent": 7, "metadata": {"user": "anna@example.com"}}, None, True),
    (ANNA, {"encrypted": "…", "api_request": {"body": {"metadata": {"user_id": "anna@example.com"}}}}, None, True),
    (ANNA, {"agent": "a", "prompt": "anna@example.com"}, None, False),
    (ANNA_OF_ACME, {"agent": "a", "prompt": "x", "tenant": "acme"}, "anna@example.com", True),
    (ANNA_OF_ACME, {"agent": "a", "prompt": "x", "tenant": "other"}, "anna@example.com", False),
    (ACME, {"agent": "a", "prompt": "x", "tenant": "acme"}, None, True),
    (ACME, {"agent": "a", "prompt": "x"}, None, False),
]


def test_a_job_is_of_the_user_that_its_record_will_name() -> None:
    for subject, document, header, expected in JOBS:
        assert subject.has_job(document, header) is expected, document
    assert not ANNA.has_job(None, None)
    assert ANNA.has_job(None, "anna@example.com")


def test_a_data_subject_has_a_name_and_a_digest_of_it() -> None:
    with pytest.raises(ValueError, match="needed"):
        DataSubject()
    assert len({ANNA.digest, ANNA_OF_ACME.digest, ACME.digest, DataSubject("anna@example.com").digest}) == 3


SCOPES = [
    ("user:anna@example.com", True),
    ("spent:agent:writer;user:anna@example.com", True),
    ("announced:user:anna@example.com@100@50", False),
    ("user:anna@example.community", False),
    ("user:joanna@example.com", False),
    ("team:anna@example.com", False),
]


def test_the_scope_of_a_limit_names_a_user_whole() -> None:
    for scope, expected in SCOPES:
        assert ANNA.is_in_scope(scope) is expected, scope
    assert not ACME.is_in_scope("tenant:acme")


def test_an_alert_is_theirs_if_it_names_one_of_their_jobs() -> None:
    ids = {"x-1f", "order-1"}
    assert mentions({"title": "Job order-1 was dead-lettered."}, ids, ANNA)
    assert mentions({"payload": {"execution_ids": ["x-1f"]}}, ids, ANNA)
    assert mentions({"payload": {"scope": "user:anna@example.com"}}, ids, ANNA)
    assert not mentions({"title": "Job order-11 was dead-lettered.", "payload": {"n": 1}}, ids, ANNA)


def test_system_prompts_and_short_texts_are_not_searched_for() -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant of all."},
        {"role": "user", "content": 'Short.\nA long enough line of the user with "quotes" in it'},
    ]
    assert texts_of(messages) == {"A long enough line of the user with"}


@given(st.text(min_size=16, max_size=40), st.binary(max_size=20), st.binary(max_size=20))
def test_a_text_is_found_in_each_form_that_it_is_stored_in(text: str, before: bytes, after: bytes) -> None:
    try:
        plain = text.encode()
    except UnicodeEncodeError:
        return
    forms = stored_forms(text)
    assert any(form in before + plain + after for form in forms)
    assert any(form in json.dumps({"prompt": text}).encode() for form in forms)
    encoded = b64encode(before + plain + after)
    assert any(form and form in encoded for form in forms[-3:])
