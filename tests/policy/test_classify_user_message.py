from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.contracts.execution import ErrorInfo, ErrorKind
from breakwater.policy.classify import HttpFailure, ProgramFailure, classify
from breakwater.policy.user_message import user_message, user_message_for

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
KINDS = get_args(ErrorKind)


@pytest.mark.parametrize(
    ("status", "type_", "advice"),
    [
        (400, "BadRequest", "request format may be invalid"),
        (401, "Unauthorized", "check your API credentials"),
        (402, "PaymentRequired", "check your account billing status"),
        (403, "Forbidden", "may not have permission"),
        (404, "NotFound", "does not exist or is not available"),
        (418, "Client", "review the error"),
        (422, "UnprocessableEntity", "parameter's value"),
        (429, "RateLimit", "try again later"),
        (500, "Server", "try again later"),
        (503, "ServiceUnavailable", "try again later"),
        (529, "Overloaded", "try again later"),
    ],
)
def test_it_names_type_status_and_advice(status: int, type_: str, advice: str) -> None:
    message = user_message_for(classify(HttpFailure(status, "no"), NOW).error_info())
    assert f"**Error Type:** {type_}\n" in message
    assert f"**Status Code:** {status}\n" in message
    assert advice in message
    assert ("cannot be recovered automatically" in message) == (status < 429)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_one(kind: ErrorKind) -> None:
    message = user_message_for(ErrorInfo(kind=kind, class_="SomeError", message="secret"))
    assert message.startswith("I could not complete this request.")
    assert "**Error Type:** " in message
    assert "Status Code" not in message
    assert "secret" not in message
    assert "Some" not in message


def test_what_an_error_carries_goes_first() -> None:
    info = ErrorInfo(kind="invalid", class_="InvalidJobError", message="no", user_message="Say what to do.")
    assert user_message_for(info) == "Say what to do."


def test_kinds_that_look_alike_are_distinguished() -> None:
    assert len({user_message(kind, "", None) for kind in KINDS}) == len(KINDS)


# Lower-case letters only would be found in our own words.
SECRETS = st.from_regex(r"(sk-|/etc/|\$|AKIA)[A-Z0-9]{8,20}", fullmatch=True)


@settings(deadline=None)
@given(SECRETS, st.sampled_from([400, 401, 413, 418, 422, 429, 500]))
def test_nothing_of_the_providers_text_is_in_it(secret: str, status: int) -> None:
    headers = {"x-request-id": secret, "retry-after": secret}
    verdict = classify(HttpFailure(status, f"bad key {secret}", secret, secret, headers), NOW)
    assert secret not in user_message_for(verdict.error_info())
    named_itself = classify(ProgramFailure(secret, secret, status, "client"), NOW)
    assert secret not in user_message_for(named_itself.error_info())
