from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.policy.redact import RedactionRules, Redactor

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
SECRETS = [
    "sk-proj-abcdefghijklmnop1234",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "xoxb-123456789012-abcdefgh",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123",
    "Bearer abcdefghijklmnopqrst",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----",
]
BUILT_IN = Redactor.compile(RedactionRules())


@pytest.mark.parametrize("secret", SECRETS)
def test_known_forms_of_secrets_are_taken_out_wherever_they_stand(secret: str) -> None:
    hidden = BUILT_IN.json({"note": [f"use {secret} please", {"deep": secret}]})
    assert secret not in str(hidden)
    assert "[REDACTED]" in str(hidden)


def test_values_of_secret_fields_are_replaced_whatever_they_are() -> None:
    value = {"API_KEY": "x", "password": 5, "nested": [{"Authorization": ["a"]}], "token": None, "tokens": 7}
    assert BUILT_IN.json(value) == {
        "API_KEY": "[REDACTED]",
        "password": "[REDACTED]",
        "nested": [{"Authorization": "[REDACTED]"}],
        "token": None,
        "tokens": 7,
    }


def test_own_rules_add_to_the_built_in_ones() -> None:
    rules = RedactionRules(fields=("Email",), patterns=(r"\b\d{3}-\d{2}-\d{4}\b",), placeholder="***")
    redactor = Redactor.compile(rules)
    assert redactor.json({"email": "a@b.c", "text": "my ssn is 123-45-6789.", "secret": "s"}) == {
        "email": "***",
        "text": "my ssn is ***.",
        "secret": "***",
    }


def test_numbers_stay_and_long_texts_are_cut() -> None:
    redactor = Redactor.compile(RedactionRules(max_value_length=16))
    assert redactor.json([1234567890123456789, "x" * 17]) == [1234567890123456789, "x" * 16 + "…"]


@given(JSON)
def test_redaction_keeps_the_shape_and_twice_is_once(value: object) -> None:
    once = BUILT_IN.json(value)  # type: ignore[arg-type]
    assert BUILT_IN.json(once) == once
    assert type(once) is type(value)


def test_switched_off_it_hides_nothing() -> None:
    redactor = Redactor.compile(RedactionRules(built_in=False))
    assert redactor.json({"password": SECRETS[0]}) == {"password": SECRETS[0]}


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        RedactionRules(patterns=("(",))


def test_fields_are_hidden_in_json_that_stands_in_a_text_too() -> None:
    call = {"function": {"name": "login", "arguments": '{"user": "ann", "password": "hunter2"}'}}
    hidden = BUILT_IN.json({"tool_calls": [call], "sk-abcdefghijklmnopqrstuv": 1})
    assert "hunter2" not in str(hidden)
    assert "ann" in str(hidden)
    assert "sk-abc" not in str(hidden)
    assert BUILT_IN.text("{not json") == "{not json"
    assert BUILT_IN.json("[1, 2") == "[1, 2"
