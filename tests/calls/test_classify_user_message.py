from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.calls.rules.classify import HttpFailure, ProgramFailure, classify
from breakwater.calls.rules.user_message import user_message, user_message_for
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import ErrorInfo
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
KINDS = get_args(ErrorKind)


@each_row(
    ("status", "type_", "advice"),
    [
        (400, "BadRequest", "request format may be invalid"),
        (401, "Unauthorized", "check your API credentials"),
        (402, "QuotaExceeded", "check your account billing status"),
        (403, "Forbidden", "may not have permission"),
        (404, "NotFound", "does not exist or is not available"),
        (418, "Client", "review the error"),
        (409, "Transient", "try again later"),
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
    assert ("cannot be recovered automatically" in message) == (status < 429 and status != 409)


@each_row("kind", KINDS)
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


TOO_LONG = f"The request {'is not valid and ' * 20}ends."


@each_row(
    ("said", "told"),
    [
        ("Messages must not be empty.", "Messages must not be empty."),
        ("max_tokens: Field required", "max_tokens: Field required"),
        ("messages.0.content: text content blocks must be non-empty", ...),
        ("The model `gpt-5-mini` does not exist or you do not have access to it.", ...),
        ("Your credit balance is too low to access the API. Please go to Plans and Billing.", ...),
        (
            "You exceeded your current quota, please check your plan and billing details. For more, see https://a.example/x.",
            "You exceeded your current quota, please check your plan and billing details.",
        ),
        ("You must be a member of an organization to use the API.", None),
        ("Your organization must be verified to stream this model.", ...),
        ("Incorrect API key provided.", ...),
        # Keys, whole, masked, redacted and in prose.
        ("Incorrect API key provided: sk-proj-abcdefghijklmnop. Try again later.", "Try again later."),
        ("Incorrect API key provided: hunter. Try again later.", "Try again later."),
        ("Incorrect API key provided: [REDACTED].", None),
        ("invalid x-api-key", None),
        ("Your password is hunter and wrong.", None),
        ("The token abcdefghij has expired.", None),
        ("Bearer AbCdEfGhIjKl is not known.", None),
        # Paths, files and traces.
        ("cannot read /etc/breakwater/keys.json", None),
        ("The file config is missing", None),
        ("C:\\models\\prod is gone", None),
        ("failed in handlers.py of the app", None),
        ("Traceback (most recent call last): it failed", None),
        ("it failed\n  at run (app.js:1:2)\nTry again later.", None),
        # Hosts and addresses.
        ("upstream vllm.internal.corp refused the call", None),
        ("The upstream worker refused the call", None),
        ("no answer from 10.0.3.7 in time", None),
        ("vllm-prod-eu did not answer", None),
        ("write to ops@example.com please", None),
        # Accounts.
        ("Project `proj_abc` does not have access", None),
        ("organization org-AbC123 is suspended", None),
        ('The organization "acme" is suspended', None),
        ("Access of account and organization acme is over", None),
        ("The user bob may not do this", None),
        # Limits.
        ("Request too large for gpt-5-mini: Limit 30,000 TPM, requested 45000. Please send less.", "Please send less."),
        ("This model's maximum context length is 8192 tokens.", None),
        ("Expected a value <= 2, but got 5 instead.", None),
        ("You may spend $5 a day.", None),
        # Bodies and pages.
        ('{"messages": [{"role": "user", "content": "hello"}]}', None),
        ("[{'loc': ['body', 'messages'], 'msg': 'field required'}]", None),
        ("<html><title>Forbidden by policy</title></html>", None),
        ("Attention Required! | Cloudflare", "Attention Required!"),
        ("see [this](https://evil.example) now", None),
        ("**do** as _told_", None),
        ("\u0440\u0430\u0443 the bill", None),
        (TOO_LONG, None),
        ("", None),
    ],
)
def test_of_what_a_provider_said_only_sentences_that_are_clean_are_shown(said: str, told: Any) -> None:
    message = user_message("client", "BadRequestError", 400, said, ("gpt-5-mini",))
    expected = said if told is ... else told
    assert message == (
        "I could not complete this request.\n\n**Error Type:** BadRequest\n**Status Code:** 400\n"
        + ("" if expected is None else f"**Message:** {expected}\n")
        + "\nIt cannot be recovered automatically. The request format may be invalid."
    )


# Lower-case letters only would be found in our own words.
SECRETS = st.from_regex(r"(sk-|/etc/|\$|AKIA)[A-Z0-9]{8,20}", fullmatch=True)


@settings(deadline=None)
@given(SECRETS, st.sampled_from([400, 401, 413, 418, 422, 429, 500]))
def test_no_secret_of_the_providers_text_is_in_it(secret: str, status: int) -> None:
    headers = {"x-request-id": secret, "retry-after": secret}
    verdict = classify(HttpFailure(status, f"bad key {secret}", secret, secret, headers), NOW)
    assert secret not in user_message_for(verdict.error_info())
    assert secret not in user_message_for(verdict.error_info(verdict.message))
    named_itself = classify(ProgramFailure(secret, secret, status, "client"), NOW)
    assert secret not in user_message_for(named_itself.error_info(named_itself.message))
