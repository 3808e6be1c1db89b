"""Which documents are of a user or a tenant, and which texts are searched for."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.erasure.rules import DataSubject, mentions, stored_forms, texts_of
from breakwater.limits.rules.scopes import parts_of

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
    ("user:anna@example.com", True, False),
    ("agent:writer\vuser:anna@example.com", True, False),
    ("user:anna@example.com\vtenant:acme", True, True),
    ("user:anna@example.com\vtenant:acme-2", True, False),
    ("user:anna@example.com, Ltd.", False, False),
    ("user:anna@example.com/second", False, False),
    ("user:joanna@example.com", False, False),
    ("team:anna@example.com", False, False),
    ("agent:x user:anna@example.com", False, False),
]


def test_the_scope_of_a_limit_names_a_user_whole_and_of_the_one_tenant() -> None:
    for scope, is_annas, is_annas_of_acme in SCOPES:
        assert ANNA.has_scope(parts_of(scope)) is is_annas, scope
        assert ANNA_OF_ACME.has_scope(parts_of(scope)) is is_annas_of_acme, scope
    assert not ACME.has_scope(parts_of("tenant:acme"))


def test_an_alert_is_theirs_if_it_names_one_of_their_jobs() -> None:
    ids = {"x-1f", "order-1"}
    assert mentions({"title": "Job order-1 was dead-lettered."}, ids, ANNA)
    assert mentions({"payload": {"execution_ids": ["x-1f"]}}, ids, ANNA)
    assert mentions({"payload": {"scope": "user:anna@example.com"}}, ids, ANNA)
    assert mentions({"payload": {"scope": "user", "name": "anna@example.com"}}, ids, ANNA)
    assert mentions({"payload": {"scope": "agent", "agent": "writer", "within": "user:anna@example.com"}}, ids, ANNA)
    assert mentions({"execution_id": "y", "user": "anna@example.com"}, ids, ANNA)
    assert not mentions({"title": "Job order-11 was dead-lettered.", "payload": {"n": 1}}, ids, ANNA)


def test_an_alert_of_an_agent_of_the_same_name_or_of_a_user_of_all_tenants_stays() -> None:
    writer = DataSubject("writer")
    assert not mentions({"agent": "writer", "payload": {"scope": "agent", "name": "writer"}}, (), writer)
    assert not mentions({"severity": "warning"}, (), DataSubject("warning"))
    of_user = {"scope": "user", "name": "anna@example.com"}
    assert not mentions({"payload": of_user}, (), ANNA_OF_ACME)
    assert mentions({"payload": {**of_user, "within": "tenant:acme"}}, (), ANNA_OF_ACME)


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
