"""Errors as their makers were seen to word them: what each means, by its status line and inside a 200."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from breakwater.calls.providers.failures import carries_error, error_in_answer, http_failure
from breakwater.calls.rules.classify import Classification, HttpFailure, classify
from tests.tables import each_row

NOW = datetime(2026, 11, 25, 10, 0, tzinfo=UTC)
DAY_S = 86_400.0


def of_status(status: int, body: Any, headers: dict[str, str] | None = None) -> Classification:
    return classify(http_failure(status, orjson.dumps(body), headers or {}), NOW)


def google(*violations: str, delay: str | None = "36s", message: str = "You exceeded your current quota.") -> Any:
    details: list[dict[str, Any]] = [
        {"@type": "google.rpc.QuotaFailure", "violations": [{"quotaId": name} for name in violations]}
    ]
    if delay is not None:
        details.append({"@type": "google.rpc.RetryInfo", "retryDelay": delay})
    return {"error": {"code": 429, "message": message, "status": "RESOURCE_EXHAUSTED", "details": details}}


def says(message: str, code: str | int | None = None, type_: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "code": code, "type": type_}}


EMPTY = "Insufficient balance or no resource package. Please recharge."
QUOTA = "You exceeded your current quota, please check your plan and billing details."
TEAM = (
    "Your team 16f2 has either used all available credits or reached its monthly spending limit. To continue making "
    "API requests, please purchase more credits or raise your spending limit."
)
FREE = "Rate limit exceeded: free-models-per-day. Add 10 credits to unlock 1000 free model requests per day"
GROQ = (
    "Rate limit reached for model `llama-3.3-70b-versatile` in organization `org_1` service tier `on_demand` on {} "
    "Limit 100000, Used 97050, Requested 3619. Please try again in {}. Need more tokens? Upgrade to Dev Tier today"
)

SPENT: list[tuple[str, int, Any]] = [
    ("OpenAI", 429, says(QUOTA, "insufficient_quota", "insufficient_quota")),
    ("OpenAI", 429, says(QUOTA)),
    ("OpenAI", 429, says("Your account is not active.", "billing_not_active")),
    ("OpenAI, by the day", 429, says(
        "Rate limit reached for gpt-4o in organization org-1 on requests per day (RPD): Limit 200, Used 200, "
        "Requested 1. Please try again in 7m12s.", "rate_limit_exceeded", "requests")),
    ("Codex", 429, {"error": {"type": "usage_limit_reached", "message": "The usage limit has been reached",
                              "resets_at": int(NOW.timestamp()) + 529_498, "resets_in_seconds": 529_498}}),
    ("Anthropic", 400, {"type": "error", "error": {"type": "invalid_request_error", "message":
        "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade."}}),
    ("Anthropic", 400, {"type": "error", "error": {"type": "invalid_request_error", "message":
        "You have reached your specified API usage limits. You will regain access on 2026-12-01 at 00:00 UTC."}}),
    ("Anthropic", 403, {"type": "error", "error": {"type": "billing_error", "message": "no"}}),
    ("Anthropic", 429, {"type": "error", "error": {"type": "rate_limit_error", "message":
        "You're out of extra usage. Add more at claude.ai/settings/usage."}}),
    ("Gemini", 429, google("GenerateRequestsPerDayPerProjectPerModel-FreeTier")),
    ("Gemini", 429, google("GenerateRequestsPerMinutePerProjectPerModel", "GenerateRequestsPerDayPerProjectPerModel")),
    ("Gemini, compatible", 429, [google("GenerateRequestsPerDayPerProjectPerModel-FreeTier")]),
    ("Google", 429, {"error": {"code": 429, "message": "Quota exceeded for quota metric 'Gemini 2.5 Pro Requests'",
        "status": "RESOURCE_EXHAUSTED", "details": [{"reason": "RATE_LIMIT_EXCEEDED", "metadata": {
            "quota_limit": "Gemini25ProRequestsPerDayPerUser"}}]}}),
    ("Groq", 429, says(GROQ.format("tokens per day (TPD):", "9m38.016s"), "rate_limit_exceeded", "tokens")),
    ("Zhipu", 429, says(EMPTY, "1113")),
    ("Zhipu", 429, {"error": {"code": "1113", "message": "您的账户已欠费，请充值后重试。"}}),
    ("Zhipu's Anthropic", 429, {"type": "error", "error": {"type": "1113", "message": EMPTY}}),
    ("Zhipu", 429, says("Usage limit reached for 5 hour. Your limit will reset at 2026-11-25 20:00:00", "1308")),
    ("Zhipu", 429, says("Weekly/Monthly Limit Exhausted. Your limit will reset at 2026-12-01 00:00:00", "1310")),
    ("DeepSeek", 402, says("Insufficient Balance", "invalid_request_error", "unknown_error")),
    ("Moonshot", 429, says("Your account org-1 <ak-1> is suspended due to insufficient balance, please recharge your "
                           "account or check your plan and billing details", None, "exceeded_current_quota_error")),
    ("Moonshot", 403, says("Your account is not active, organization <org-1> exceeded current quota, please check "
                           "your plan and billing details", None, "exceeded_current_quota_error")),
    ("xAI", 429, TEAM),
    ("xAI", 403, {"code": "permission-denied", "error": TEAM}),
    ("xAI", 403, {"code": "no", "error": "You have run out of credits or need a Grok subscription."}),
    ("OpenRouter", 402, says("This request requires more credits, or fewer max_tokens. You requested up to 65536 "
                             "tokens, but can only afford 3395.", 402)),
    ("OpenRouter", 429, says(FREE, 429)),
    ("OpenRouter", 429, {"error": {"code": 429, "message": "Provider returned error", "metadata": {
        "limit_source": "openrouter_free_tier_daily"}}}),
    ("OpenRouter, passed on", 429, {"error": {"code": 429, "message": "Provider returned error", "metadata": {
        "raw": orjson.dumps(says(EMPTY, "1113")).decode()}}}),
    ("OpenRouter, passed on", 403, {"error": {"code": 403, "message": "Provider returned error", "metadata": {
        "raw": "Your account has insufficient funds"}}}),
    ("MiniMax", 500, {"type": "error", "error": {"type": "api_error", "message": "insufficient balance (1008)"}}),
    ("MiniMax", 429, {"error": {"message": "insufficient balance (1008)", "type": "insufficient_balance_error"}}),
    ("SiliconFlow", 403, {"code": 30001, "message": "Sorry, your account balance is insufficient", "data": None}),
    ("SiliconFlow", 403, {"code": 30011, "message": "Your paid balance is insufficient. Please top up and try again."}),
    ("Alibaba", 400, says("Access denied, please make sure your account is in good standing.", "Arrearage")),
    ("Alibaba", 403, says("The free tier of the model has been exhausted.", "AllocationQuota.FreeTierOnly")),
    ("ByteDance", 403, says("The request failed because your account has an overdue balance", "AccountOverdueError")),
    ("Bedrock", 429, {"message": "Too many tokens per day, please wait before trying again."}),
    ("GitHub", 429, says("Rate limit of 150 per 86400s exceeded for UserByModelByDay. Please wait 35213 seconds "
                         "before retrying.", "RateLimitReached")),
    ("Copilot", 402, says("You have exceeded your monthly quota")),
    ("Cohere", 429, {"message": "You are using a Trial key, which is limited to 1000 API calls / month."}),
    ("Mistral", 429, {"object": "error", "message": "Monthly quota exceeded", "type": "rate_limited"}),
    ("Fireworks", 412, says("Account x is suspended, possibly due to reaching the monthly spending limit.")),
    ("Cerebras", 429, says("Tokens per day limit exceeded - too many tokens processed.", "token_quota_exceeded")),
    ("ByteDance", 429, says("Your account 2 has exhausted its free trial quota for the model.", "QuotaExceeded")),
    ("Vertex", 429, says("Quota exceeded for aiplatform.googleapis.com/requests_per_day_per_project", 429)),
    ("Cloudflare", 429, says("you have used up your daily free allocation of 10,000 neurons")),
    ("Anthropic", 429, says("Number of request tokens has exceeded your daily rate limit", None, "rate_limit_error")),
    ("Azure", 429, says("Requests have exceeded token rate limit of your current pricing tier. Please retry after "
                        "86400 seconds.", "429")),
    ("Baidu", 429, says("Open api daily request limit reached", 17)),
    ("one-api", 403, says("user quota is not enough", "insufficient_user_quota", "new_api_error")),
    ("sub2api", 403, {"code": "INSUFFICIENT_BALANCE", "message": "Insufficient account balance"}),
]  # fmt: skip


@each_row(("maker", "status", "body"), SPENT)
def test_a_spent_account_or_quota_is_never_tried_again(maker: str, status: int, body: Any) -> None:
    verdict = of_status(status, body)
    assert (verdict.kind, verdict.class_name, verdict.status_code) == ("quota", "QuotaExceededError", status), maker
    assert not verdict.retryable
    assert not verdict.counts_for_breaker


LIMITED: list[tuple[str, int, Any]] = [
    ("OpenAI", 429, says("Rate limit reached for gpt-4o on requests per min (RPM): Limit 500, Used 500, Requested 1. "
                         "Please try again in 120ms.", "rate_limit_exceeded", "requests")),
    ("Anthropic", 429, {"type": "error", "error": {"type": "rate_limit_error", "message":
        "This request would exceed your organization's rate limit of 30,000 input tokens per minute."}}),
    ("Anthropic", 429, {"type": "error", "error": {"type": "rate_limit_error", "message":
        "This request would exceed your account's rate limit. Please try again later."}}),
    ("Gemini", 429, google("GenerateContentInputTokensPerModelPerMinute-FreeTier", message=QUOTA)),
    ("Gemini, its words alone", 429, says(f"{QUOTA}\nPlease retry in 36.1s.", 429)),
    ("Groq", 429, says(GROQ.format("tokens per minute (TPM):", "4.77s"), "rate_limit_exceeded", "tokens")),
    ("Zhipu", 429, says("High concurrency usage of this API, please reduce concurrency", "1302")),
    ("Moonshot", 429, says("Your account reached organization max RPM: 3, please try again after 1 seconds", None,
                           "rate_limit_reached_error")),
    ("OpenRouter", 429, says("Rate limit exceeded: free-models-per-min. ", 429)),
    ("GitHub", 429, says("Rate limit of 15 per 60s exceeded for UserByModelByMinute. Please wait 42 seconds before "
                         "retrying.", "RateLimitReached")),
    ("Cohere", 429, {"message": "You are using a Trial key, which is limited to 10 API calls / minute."}),
    ("Mistral", 429, {"object": "error", "message": "Requests rate limit exceeded", "code": "1300"}),
    ("Alibaba", 429, says("Requests rate limit exceeded, please try again later.", "limit_requests")),
    ("Bedrock", 429, {"message": "Too many tokens, please wait before trying again."}),
    ("Azure", 429, says("Requests have exceeded call rate limit of your current OpenAI S0 pricing tier. Please retry "
                        "after 6 seconds.", "429")),
    ("Cerebras", 429, says("Requests per minute limit exceeded - too many requests sent.", "request_quota_exceeded")),
    ("Vertex", 429, says("Quota exceeded for aiplatform.googleapis.com/requests_per_minute_per_project", 429)),
    ("Mistral", 429, says("Service tier capacity exceeded for this model.", "3505")),
    ("Together", 429, says("You have reached the rate limit specific to this model.")),
    ("AWS", 400, {"__type": "ThrottlingException", "message": "Rate exceeded", "code": "ThrottlingException"}),
    ("a gateway", 400, says("Too many requests, please slow down.", None, "invalid_request_error")),
]  # fmt: skip


@each_row(("maker", "status", "body"), LIMITED)
def test_a_limit_that_is_reset_soon_is_a_rate_limit(maker: str, status: int, body: Any) -> None:
    verdict = of_status(status, body)
    assert (verdict.kind, verdict.class_name, verdict.retryable) == ("rate_limit", "RateLimitError", True), maker


@each_row(
    ("body", "kind", "class_name"),
    [
        (says("Too many requests. Please wait before trying again.", None, "invalid_request_error"), "rate_limit",
         "RateLimitError"),
        (says("Request was throttled. Expected available in 3 seconds.", None, "invalid_request_error"), "rate_limit",
         "RateLimitError"),
        (says("Too many tokens, please wait before trying again.", "invalid_request_error"), "rate_limit",
         "RateLimitError"),
        (says("no", "Throttling.RateQuota", "invalid_request_error"), "rate_limit", "RateLimitError"),
        (says("Rate limit exceeded"), "rate_limit", "RateLimitError"),
        ({"code": "Throttling", "message": "Requests throttling triggered."}, "rate_limit", "RateLimitError"),
        (says(EMPTY, 1113), "quota", "QuotaExceededError"),
        ({"code": 1113, "msg": EMPTY, "success": False}, "quota", "QuotaExceededError"),
        ({"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}, "choices": None}, "quota",
         "QuotaExceededError"),
        (google("GenerateRequestsPerDayPerProjectPerModel"), "quota", "QuotaExceededError"),
        ({"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum"}}, "context_overflow",
         "ContextOverflowError"),
        (says("Failed to call a function. See 'failed_generation' for more details.", "tool_use_failed",
              "invalid_request_error"), "logic", "InvalidOutputError"),
        ({"error": {"message": "Provider returned error", "code": 502}}, "server", "ServiceUnavailableError"),
        ({"message": "no", "code": "ServiceUnavailableException"}, "server", "ServiceUnavailableError"),
    ],
)  # fmt: skip
def test_inside_a_200_it_is_the_error_that_its_words_name(body: dict[str, Any], kind: str, class_name: str) -> None:
    assert carries_error(body)
    verdict = classify(error_in_answer(body), NOW)
    assert (verdict.kind, verdict.class_name) == (kind, class_name)


@each_row(
    "body",
    [
        {"choices": [{"message": {"content": "yes"}}], "code": 1, "message": "ok"},
        {"type": "message_start", "message": {"content": []}},
        {"type": "ping"},
        {"code": 200, "message": "success", "data": {}},
        {"object": "chat.completion.chunk", "choices": []},
        {"choices": [], "base_resp": {"status_code": 0, "status_msg": ""}},
        {"content": [{"type": "text", "text": "yes"}], "type": "message"},
    ],
)
def test_what_is_no_error_is_taken_for_none(body: dict[str, Any]) -> None:
    assert not carries_error(body)


@each_row(
    ("body", "headers", "after_s"),
    [
        ({"error": {"type": "usage_limit_reached", "resets_in_seconds": 529_498}}, {}, 529_498),
        ({"error": {"type": "usage_limit_reached", "resets_at": int(NOW.timestamp()) + 100}}, {}, 100),
        ({"error": {"message": "no", "resets_at": "2026-11-26T10:00:00Z"}}, {}, DAY_S),
        (says("You will regain access on 2026-11-26 at 10:00 UTC."), {}, DAY_S),
        (says("Your limit will reset at 2026-11-26 18:00:00", "1308"), {}, DAY_S),  # in Beijing
        (says("已达到 5 小时的使用上限。您的限额将在 2026-11-26 18:00:00 重置。", "1308"), {}, DAY_S),
        (says("Your quota will reset after 24h0m0s."), {}, DAY_S),
        (says("Please wait 86400 seconds before retrying."), {}, DAY_S),
        (says("no"), {"Retry-After": "86400"}, DAY_S),
        (says("no"), {"Retry-After": "Thu, 26 Nov 2026 10:00:00 GMT"}, DAY_S),
        (says("no"), {"retry-after": "30", "anthropic-ratelimit-unified-reset": str(int(NOW.timestamp()) + 86_400)},
         DAY_S),
        (says("no"), {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "24h0m0s"}, DAY_S),
        ({"error": {"message": "no", "code": 429, "metadata": {"headers": {
            "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOW.timestamp() * 1000) + 86_400_000)}}}}, {},
         DAY_S),
        (google("GenerateRequestsPerDayPerProjectPerModel"), {}, None),  # 36 s are not when the day is over
    ],
)  # fmt: skip
def test_a_quota_is_one_that_is_reset_far_away_and_says_when(
    body: Any, headers: dict[str, str], after_s: float | None
) -> None:
    verdict = of_status(429, body, headers)
    assert (verdict.kind, verdict.retry_after_s) == ("quota", after_s)


@each_row(
    ("headers", "after_s"),
    [
        ({"Retry-After": "600"}, 600),
        ({"x-ratelimit-reset": "60"}, 60),
        ({"x-ratelimit-reset": str(int(NOW.timestamp()) + 60)}, 60),
        ({"x-ratelimit-remaining": "5", "x-ratelimit-reset": "86400"}, None),
        ({"x-ratelimit-reset": "never"}, None),
    ],
)
def test_a_wait_that_is_near_is_waited_for(headers: dict[str, str], after_s: float | None) -> None:
    verdict = of_status(429, says("no"), headers)
    assert (verdict.kind, verdict.retry_after_s) == ("rate_limit", after_s)


def test_a_moment_that_is_near_is_waited_for_though_no_header_says_so() -> None:
    verdict = of_status(429, says("Limit reached, it resets at 2026-11-25T10:00:40Z."))
    assert (verdict.kind, verdict.retry_after_s) == ("rate_limit", 40)


@pytest.mark.parametrize(
    "message",
    [
        "Extra usage is required for long context requests.",
        "The long context beta is not yet available for this subscription.",
    ],
)
def test_a_conversation_that_the_plan_does_not_allow_is_the_requests_fault(message: str) -> None:
    verdict = of_status(429, {"type": "error", "error": {"type": "rate_limit_error", "message": message}})
    assert (verdict.kind, verdict.retryable, verdict.counts_for_breaker) == ("context_overflow", False, False)


@each_row(
    ("status", "message"),
    [
        (400, "Invalid value: 'rate_limit'. Supported values are: 'auto'."),
        (400, "Unknown parameter: 'usage_limits'."),
        (400, "max_tokens must be at least 1"),
        (401, "Incorrect API key provided. Check your plan's keys."),
        (403, "Your organization must be verified to stream this model."),
        (403, "This key may not use this model."),
        (404, "The model does not exist or you do not have access to it."),
    ],
)
def test_what_only_sounds_like_a_limit_is_the_callers_mistake(status: int, message: str) -> None:
    assert of_status(status, says(message, type_="invalid_request_error")).kind == "client"


@each_row(
    ("status", "body", "param"),
    [
        (400, {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                                    "'max_completion_tokens' instead.", "param": "max_tokens",
                         "code": "unsupported_parameter"}}, "max_tokens"),
        (400, says("Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
                   "instead.", "invalid_request_body"), "max_tokens"),
        (400, says("Please use `max_completion_tokens`: `max_tokens` is deprecated"), "max_tokens"),
        (422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"],
                           "msg": "Extra inputs are not permitted", "input": {}}]}, "stream_options"),
        (422, {"object": "error", "message": {"detail": [{"loc": ["body", "max_completion_tokens"],
                                                          "msg": "Extra inputs are not permitted"}]}},
         "max_completion_tokens"),
        (400, says("Extra inputs are not permitted, field: 'stream_options'"), "stream_options"),
        (400, says("Validation error at #/stream_options: Extra inputs are not permitted"), "stream_options"),
        (400, says("Unrecognized request argument supplied: stream_options"), "stream_options"),
        (400, says("This model does not support response format `json_schema`."), "response_format"),
        (400, says("This model requires max_completion_tokens instead of max_tokens."), "max_tokens"),
        (400, says("max_tokens is deprecated in favor of max_completion_tokens"), "max_tokens"),
        (400, {"error": {"message": "Bad request.", "param": "max_tokens", "code": "unsupported_parameter"}},
         "max_tokens"),
        (400, {"error": 'json: unknown field "stream_options"'}, "stream_options"),
        (422, {"detail": [{"loc": ["body", "stream_options", "include_usage"], "msg": "Field required"}]},
         "stream_options"),
        (400, says("This response_format type is unavailable now"), "response_format"),
        (400, {"error": {"message": "Unsupported parameter: 'temperature' is not supported with this model.",
                         "param": "temperature", "code": "unsupported_parameter"}}, "temperature"),
        (400, {"error": {"message": "'logit_bias' is not supported together with max_tokens.", "param": "logit_bias"}},
         "logit_bias"),
    ],
)  # fmt: skip
def test_a_parameter_that_a_model_does_not_know_is_named(status: int, body: Any, param: str) -> None:
    verdict = of_status(status, body)
    assert (verdict.kind, verdict.class_name, verdict.param) == ("client", "UnsupportedParameterError", param)
    assert not verdict.retryable


@pytest.mark.parametrize(
    "body",
    [
        says("Invalid 'max_tokens': integer above maximum value."),
        says("max_tokens: 100000 > 8192, which is the maximum allowed number of output tokens"),
    ],
)  # fmt: skip
def test_a_value_that_is_too_large_is_the_callers(body: Any) -> None:
    assert of_status(400, body).class_name == "BadRequestError"


def test_the_provider_itself_says_whether_to_try_again() -> None:
    def verdict(status: int, word: str, body: Any = None) -> tuple[str, bool, bool]:
        found = of_status(status, body or says("no"), {"X-Should-Retry": word})
        return found.kind, found.retryable, found.counts_for_breaker

    assert verdict(500, "false") == ("server", False, True)
    assert verdict(429, "false")[:2] == ("rate_limit", False)
    assert verdict(409, "false") == ("transient", False, True)
    assert verdict(409, "true") == ("transient", True, True)
    assert verdict(422, "true") == ("transient", True, True)
    assert verdict(500, "true") == ("server", True, True)
    # What is sure to fail again is not repeated, whoever asks for it.
    assert verdict(429, "true", says(EMPTY, "1113")) == ("quota", False, False)
    assert verdict(400, "true", says("prompt is too long")) == ("context_overflow", False, False)


def test_an_error_that_was_passed_on_is_told_in_its_own_words() -> None:
    raw = orjson.dumps({"message": "input length and `max_tokens` exceed context limit: 149674 + 64000 > 204658"})
    body = {"error": {"message": "Provider returned error", "code": 400, "metadata": {"raw": raw.decode()}}}
    failure = http_failure(400, orjson.dumps(body), {})
    assert isinstance(failure, HttpFailure)
    assert failure.message.startswith("Provider returned error: input length")
    assert classify(failure, NOW).kind == "context_overflow"
