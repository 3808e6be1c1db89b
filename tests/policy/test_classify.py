from __future__ import annotations

from datetime import UTC, datetime

import pytest

from breakwater.policy.classify import BrokenAnswer, HttpFailure, TransportFailure, classify, error_hash, retry_after_s

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "kind", "class_name", "retryable", "counted"),
    [
        (301, "client", "ClientError", False, False),
        (400, "client", "BadRequestError", False, False),
        (401, "client", "UnauthorizedError", False, False),
        (402, "client", "PaymentRequiredError", False, False),
        (403, "client", "ForbiddenError", False, False),
        (404, "client", "NotFoundError", False, False),
        (409, "client", "ClientError", False, False),
        (418, "client", "ClientError", False, False),
        (422, "client", "UnprocessableEntityError", False, False),
        (429, "rate_limit", "RateLimitError", True, True),
        (500, "server", "ServerError", True, True),
        (502, "server", "ServiceUnavailableError", True, True),
        (503, "server", "ServiceUnavailableError", True, True),
        (504, "server", "GatewayTimeoutError", True, True),
        (529, "server", "OverloadedError", True, True),
        (599, "server", "ServerError", True, True),
    ],
)
def test_a_status_has_its_kind(status: int, kind: str, class_name: str, retryable: bool, counted: bool) -> None:
    verdict = classify(HttpFailure(status, "no"), NOW)
    assert (verdict.kind, verdict.class_name) == (kind, class_name)
    assert (verdict.retryable, verdict.counts_for_breaker) == (retryable, counted)
    assert verdict.status_code == status
    info = verdict.error_info()
    assert (info.user_message is None) == retryable


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("context_length_exceeded", "too much"),
        (None, "This model's maximum context length is 8192 tokens"),
        (None, "prompt is too long: 210000 tokens > 200000 maximum"),
        (None, "The input token count exceeds the maximum number of tokens allowed"),
    ],
)
def test_a_400_that_tells_of_the_context_window_is_an_overflow(code: str | None, message: str) -> None:
    verdict = classify(HttpFailure(400, message, code), NOW)
    assert (verdict.kind, verdict.retryable, verdict.counts_for_breaker) == ("context_overflow", False, False)


def test_no_answer_and_a_broken_answer_are_tried_again_and_counted() -> None:
    for failure in (
        TransportFailure("timeout", "TimeoutError", "no answer within 30 s"),
        TransportFailure("network", "ClientConnectorError", "refused"),
        BrokenAnswer("not JSON"),
    ):
        verdict = classify(failure, NOW)
        assert verdict.retryable
        assert verdict.counts_for_breaker


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.25", 0.25),
        (" 3 ", 3.0),
        ("Sat, 21 Nov 2026 10:00:30 GMT", 30.0),
        ("Sat, 21 Nov 2026 09:00:00 GMT", 0.0),
        ("", None),
        ("soon", None),
        ("-5", None),
    ],
)
def test_retry_after_is_read_in_both_its_forms(value: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": value}, NOW) == seconds
    assert classify(HttpFailure(429, "slow", headers={"retry-after": value}), NOW).retry_after_s == seconds


def test_a_user_message_names_type_status_and_advice_and_nothing_of_the_providers_text() -> None:
    message = classify(HttpFailure(401, "bad key sk-123 in /etc/app.conf"), NOW).error_info().user_message
    assert message is not None
    assert "Unauthorized" in message
    assert "401" in message
    assert "credentials" in message
    assert "sk-123" not in message
    assert "/etc" not in message


def test_errors_that_differ_in_numbers_addresses_and_frames_only_are_one() -> None:
    text = "TypeError: Cannot read property 'id' of undefined at UserController (/src/controllers/user.ts:{}:{})"
    assert error_hash(text.format(42, 15)) == error_hash(text.format(87, 22))
    assert error_hash("fault at 0x7f3a line 4") == error_hash("fault at 0xBEEF line 17")
    assert error_hash("Timeout") == error_hash("  timeout ")
    assert error_hash("no such model") != error_hash("no such key")
    assert len(error_hash("x")) == 8
