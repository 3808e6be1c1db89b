from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.calls.rules.classify import (
    BrokenAnswer,
    CallFailure,
    EmptyAnswer,
    HttpFailure,
    ProgramFailure,
    TransportFailure,
    classify,
    follows_request,
)
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
EMPTY_ACCOUNT = "You exceeded your current quota, please check your plan and billing details."

Row = tuple[CallFailure, str, str, bool, bool]
"""A failure; its kind and class; whether it is tried again; whether the breaker counts it."""

ROWS: list[Row] = [
    (HttpFailure(301, "moved"), "client", "ClientError", False, False),
    (HttpFailure(400, "Invalid value for 'temperature'."), "client", "BadRequestError", False, False),
    (HttpFailure(401, "Incorrect API key provided."), "client", "UnauthorizedError", False, False),
    (HttpFailure(402, "Insufficient Balance"), "quota", "QuotaExceededError", False, False),
    (HttpFailure(403, "Country not supported"), "client", "ForbiddenError", False, False),
    (HttpFailure(404, "model: no-such-model"), "client", "NotFoundError", False, False),
    (HttpFailure(408, "Request Timeout"), "transient", "RequestTimeoutError", True, True),
    (HttpFailure(409, "conflict"), "transient", "ConflictError", True, True),
    (HttpFailure(413, "Request exceeds the maximum size"), "client", "RequestTooLargeError", False, False),
    (HttpFailure(418, "I'm a teapot"), "client", "ClientError", False, False),
    (HttpFailure(425, "too early"), "transient", "TooEarlyError", True, True),
    (HttpFailure(499, "client closed the request"), "transient", "ClientClosedRequestError", True, True),
    (HttpFailure(422, "max_tokens: not an integer"), "client", "UnprocessableEntityError", False, False),
    (HttpFailure(429, "Rate limit reached"), "rate_limit", "RateLimitError", True, False),
    (HttpFailure(429, EMPTY_ACCOUNT, "insufficient_quota"), "quota", "QuotaExceededError", False, False),
    (HttpFailure(429, EMPTY_ACCOUNT, type="insufficient_quota"), "quota", "QuotaExceededError", False, False),
    (HttpFailure(429, "not active", "billing_not_active"), "quota", "QuotaExceededError", False, False),
    (HttpFailure(451, "unavailable for legal reasons"), "client", "ClientError", False, False),
    (HttpFailure(500, "oops"), "server", "ServerError", True, True),
    (HttpFailure(501, "not implemented"), "client", "UnsupportedRequestError", False, False),
    (HttpFailure(502, "bad gateway"), "server", "ServiceUnavailableError", True, True),
    (HttpFailure(503, "unavailable"), "server", "ServiceUnavailableError", True, True),
    (HttpFailure(504, "gateway timeout"), "server", "GatewayTimeoutError", True, True),
    (HttpFailure(529, "Overloaded"), "server", "OverloadedError", True, True),
    (HttpFailure(599, "no"), "server", "ServerError", True, True),
    (HttpFailure(600, "no such status"), "client", "ClientError", False, False),
    (TransportFailure("network", "ConnectionRefusedError", "refused"), "network", "ConnectionRefusedError", True, True),
    (TransportFailure("network", "ConnectionResetError", "reset"), "network", "ConnectionResetError", True, True),
    (TransportFailure("network", "DnsError", "unknown host"), "network", "DnsError", True, True),
    (TransportFailure("network", "TlsError", "bad certificate"), "network", "TlsError", True, True),
    (TransportFailure("timeout", "TimeoutError", "no answer in 30 s"), "timeout", "TimeoutError", True, True),
    (BrokenAnswer("the answer's body is empty"), "server", "BrokenAnswerError", True, True),
    (BrokenAnswer("the answer is not JSON"), "server", "BrokenAnswerError", True, True),
    (BrokenAnswer("a 200 with an error in its body"), "server", "BrokenAnswerError", True, True),
    (BrokenAnswer("the answer has no choices"), "server", "BrokenAnswerError", True, True),
    (BrokenAnswer("the answer was truncated"), "server", "BrokenAnswerError", True, True),
    (BrokenAnswer("the answer has no choices", 202), "server", "BrokenAnswerError", True, True),
    (BrokenAnswer("the answer has no embeddings", flaw="other_kind"), "client", "WrongAnswerKindError", False, False),
    (BrokenAnswer("no numbers", flaw="embeddings"), "server", "BrokenEmbeddingsError", True, False),
    (BrokenAnswer("the answer is over 9 bytes", storable=False), "client", "AnswerTooLargeError", False, False),
    (EmptyAnswer("content_filter", "no text"), "client", "ContentFilteredError", False, False),
    (EmptyAnswer("length", "no text"), "client", "OutputLimitError", False, False),
    (EmptyAnswer("stop", "no text"), "server", "EmptyAnswerError", True, True),
    (EmptyAnswer(None, "no text"), "server", "EmptyAnswerError", True, True),
    (ProgramFailure("BadInputError", "no", 400, "client"), "client", "BadInputError", False, False),
    (ProgramFailure("BackendFailureError", "no", None, "server"), "server", "BackendFailureError", True, True),
]


@each_row(("failure", "kind", "class_name", "retryable", "counted"), ROWS)
def test_every_failure_has_its_kind(
    failure: CallFailure, kind: str, class_name: str, retryable: bool, counted: bool
) -> None:
    verdict = classify(failure, NOW)
    assert (verdict.kind, verdict.class_name) == (kind, class_name)
    assert (verdict.retryable, verdict.counts_for_breaker) == (retryable, counted)
    status = getattr(failure, "status", None)
    assert verdict.status_code == status
    info = verdict.error_info()
    assert (info.kind, info.class_, info.message) == (kind, class_name, failure.message)
    assert (info.user_message is None) == retryable


@each_row(
    ("status", "code", "message"),
    [
        (400, "context_length_exceeded", "too much"),
        (
            400,
            None,
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. "
            "Please reduce the length of the messages.",
        ),
        (400, None, "Your input exceeds the context window of this model. Please adjust your input and try again."),
        (400, None, "prompt is too long: 210000 tokens > 200000 maximum"),
        (
            400,
            None,
            "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length or "
            "`max_tokens` and try again",
        ),
        (400, None, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
        (400, None, "The decoder prompt (length 5000) is longer than the maximum model length of 4096."),
        (400, None, "Input prompt (5000 tokens) is too long and exceeds limit of 4096"),
        (400, None, "prompt too long; exceeded max context length by 812 tokens"),
        (400, None, "the input length exceeds the context length"),
        (400, None, "the request exceeds the available context size. try increasing the context size"),
        (400, None, "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context"
         " length"),
        (400, None, "Input is too long for requested model."),
        (400, None, "This model's maximum prompt length is 131072 but the request contains 537812 tokens."),
        (400, None, "Please reduce the length of the messages or completion."),
        (400, None, "Please reduce the length of the messages or completion. Current length is 42328 while limit is"
         " 40000"),
        (413, "rate_limit_exceeded", "Request too large for model `llama-3.3-70b-versatile` in organization `org_1`"
         " service tier `on_demand` on tokens per minute (TPM): Limit 12000, Requested 14137, please reduce your"
         " message size and try again."),
        (429, "rate_limit_exceeded", "Request too large for gpt-4o in organization org-1 on tokens per min (TPM): Limit"
         " 30000, Requested 40121. The input or output tokens must be reduced in order to run successfully."),
        (400, None, "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 300000"
         " tokens. Please reduce the length of the messages."),
        (400, None, "Input Tokens Exceeded: Number of input tokens exceeds maximum length. Please update the input to"
         " try again."),
        (400, None, "The prompt is too long: 150000, model maximum context length: 131071"),
        (400, None, "The engine prompt length 5000 exceeds the max_model_len 4096. Please reduce prompt."),
        (400, None, "You passed 5000 input tokens and requested 100 output tokens. However, the model's context length"
         " is only 4096 tokens, resulting in a maximum input length of 3996 tokens."),
        (400, None, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193. Given: 9000 `inputs`"
         " tokens and 2193 `max_new_tokens`"),
        (400, None, "prompt token count of 70000 exceeds the limit of 64000"),
        (400, None, "Invalid request: Your request exceeded model token limit: 8192"),
        (400, None, "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 30720]"),
        (400, None, "The number of tokens to keep from the initial prompt is greater than the context length"),
        (413, "tokens_limit_reached", "Request body too large for gpt-4o model. Max size: 8000 tokens."),
        (413, None, "prompt is too long: 2100000 tokens > 200000 maximum"),
        (413, "context_length_exceeded", "Request too large"),
        (422, None, "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000"),
    ],
)  # fmt: skip
def test_a_conversation_that_is_too_long_is_an_overflow(status: int, code: str | None, message: str) -> None:
    verdict = classify(HttpFailure(status, message, code), NOW)
    assert (verdict.kind, verdict.class_name) == ("context_overflow", "ContextOverflowError")
    assert (verdict.retryable, verdict.counts_for_breaker, verdict.status_code) == (False, False, status)


@each_row(
    "message",
    [
        "The prompt exceeds the maximum allowed input length of 32768 tokens.",
        "The total length of messages and tools exceeds the model's maximum input length (request id: 20260825)",
        "Your request exceeds the maximum allowed input length of 131,072 tokens",
        "Input length 5000 exceeds maximum length 4096 tokens",
        "input (5000 tokens) is longer than the model's context length (4096 tokens)",
        "The number of tokens in the prompt exceeds the limit of 4096",
        "Prompt exceeds max length",
        "tokens in request more than max tokens allowed",
        "The total number of input tokens is greater than the model limit",
        "Total tokens of image and text exceed max message tokens",
        "Prompt is longer than the model's maximum sequence length",
        "Your input is too large for the model's token limit",
        "context window exceeds limit",
        "token limit exceeded",
        "exceeded max context length by 812 tokens",
        "The conversation is too long for the model: 9000 tokens",
        "Input text is larger than the model's input limit",
        "prompt has 40000 tokens, but the configured context size is 32768 tokens",
        "The input sequence exceeds the maximum sequence length of 2048",
        "Requested token count exceeds the model's maximum context length of 131072 tokens. You requested a "
        "total of 135224 tokens: 127032 tokens from the input messages and 8192 tokens for the completion.",
        "This model's maximum context length is 262144 tokens. However, you requested 128000 output tokens "
        "and your prompt contains at least 134145 input tokens, for a total of at least 262145 tokens.",
        "messages exceed the maximum number of tokens",
        "Request has 210000 input tokens, which is over the maximum of 200000 tokens",
        "The input is over the token limit",
        "Number of prompt tokens (9000) exceeds model maximum of 8192 tokens",
        "The text you sent is longer than the maximum number of tokens",
        "input exceeds the model's input size limit",
        "Message too long: the prompt is above the input token maximum",
    ],
)
@each_row("status", [400, 413, 422])
def test_an_overflow_in_words_that_nobody_has_seen_is_known_by_its_grammar(status: int, message: str) -> None:
    assert classify(HttpFailure(status, message), NOW).kind == "context_overflow"


@each_row(
    "message",
    [
        "max_tokens: 100000 > 8192, which is the maximum allowed number of output tokens for claude",
        "max_tokens is too large: 32000. This model supports at most 16384 completion tokens, whereas you "
        "provided 32000.",
        "The maximum tokens you requested exceeds the model limit of 4096. Try again with a maximum tokens "
        "value lower than 4096.",
        "Invalid max_tokens value, the valid range of max_tokens is [1, 8192]",
        "Invalid 'user': string too long. Expected a string with maximum length 64, but got a string with "
        "length 80 instead.",
        "messages.0.content.1.image.source.base64: image exceeds 5 MB maximum: 6000000 bytes > 5242880 bytes",
        "Too many images: the maximum is 20",
        "Invalid 'tools': array too long. Expected an array with maximum length 128, but got an array with "
        "length 130 instead.",
        "Invalid 'stop': array too long. Expected an array with maximum length 4",
        "The audio input is longer than the maximum length of 25 minutes",
        "PDF pages exceed the maximum of 100 pages",
        "Input should be less than or equal to 2",
        "temperature: Input should be less than or equal to 1",
        "`thinking.budget_tokens` must be less than `max_tokens`",
        "The number of tools exceeds the maximum of 64",
        "Unknown parameter: 'context_window'.",
        "Invalid value for 'n': must be no more than 8",
        "The text of the system prompt must not be empty",
        "messages: at least one message is required",
        "messages: roles must alternate, more than one user message in a row",
        "metadata: the value is longer than the maximum length of 512",
        "The function name exceeds the maximum length of 64 characters",
        "file input is larger than the maximum size of 50 MB",
        "top_logprobs must be less than or equal to 20",
        "logit_bias: more than 300 tokens are not allowed",
        "The input contains more than one system message",
        "Input video is too long: the maximum length is 60 s",
        "reasoning tokens exceed the maximum",
        "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` is less than "
        "the `context_window` for this model",
    ],
)
@each_row("status", [400, 422])
def test_what_else_is_too_long_or_too_many_is_no_overflow(status: int, message: str) -> None:
    assert classify(HttpFailure(status, message), NOW).kind == "client"


@each_row(
    "message",
    [
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        "The following tool_call_ids did not have response messages: call_1",
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'.",
        "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
        "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_01. Each "
        "`tool_use` block must have a corresponding `tool_result` block in the next message.",
        "tool_use ids were found without tool_result blocks immediately after: toolu_01",
        "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: toolu_01. Each `tool_result` "
        "block must have a corresponding `tool_use` block in the previous message.",
        "Please ensure that the number of function response parts is equal to the number of function call parts of "
        "the function call turn.",
        "Please ensure that function response turn comes immediately after a function call turn.",
        "Not the same number of function calls and responses",
        "No tool output found for function call call_1.",
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        "(insufficient tool messages following tool_calls message)",
        "InternalError.Algo.InvalidParameter: An assistant message with \u201ctool_calls\u201d must be followed by "
        "tool messages responding to each \u201ctool_call_id\u201d.",
        "Invalid parameter: 'tool_call_id' of 'call_1' not found in 'tool_calls' of previous message.",
        "Duplicate value for 'tool_call_id' of 'call_1' in message[3]",
        "Unexpected tool call id call_1 in tool results",
        "Unexpected role 'tool' after role 'user'",
        "The model returned the following errors: messages.2: `tool_use` ids were found without `tool_result` blocks "
        "immediately after: tooluse_1.",
        "Expected toolResult blocks at messages.2.content for the following Ids: tooluse_1",
        "The number of toolResult blocks at messages.2.content exceeds the number of toolUse blocks of previous turn.",
    ],
)
@each_row("status", [400, 422])
def test_a_tool_call_without_its_result_is_an_orphan(status: int, message: str) -> None:
    verdict = classify(HttpFailure(status, message), NOW)
    assert (verdict.kind, verdict.class_name) == ("orphan_tool_calls", "OrphanToolCallsError")
    assert (verdict.retryable, verdict.counts_for_breaker) == (False, False)


@each_row(
    "message",
    [
        "Unknown parameter: 'context_window'.",
        "Invalid 'tools[0].function.name': string does not match pattern.",
        "tool_choice is only allowed when tools are specified",
        "'messages' must contain the word 'json' in some form",
    ],
)
def test_a_400_of_another_sort_is_the_callers_mistake(message: str) -> None:
    assert classify(HttpFailure(400, message), NOW).class_name == "BadRequestError"


@pytest.mark.parametrize("code", ["content_filter", "content_policy_violation"])
def test_a_prompt_that_a_filter_refuses_is_no_unfamiliar_400(code: str) -> None:
    verdict = classify(HttpFailure(400, "The response was filtered due to the prompt.", code), NOW)
    assert (verdict.kind, verdict.class_name) == ("client", "ContentFilteredError")


@each_row("status", [401, 403, 404, 429, 502, 503])
def test_words_about_the_conversation_mean_nothing_under_another_status(status: int) -> None:
    verdict = classify(HttpFailure(status, "prompt is too long", "context_length_exceeded"), NOW)
    assert verdict.kind in {"client", "rate_limit", "server"}


@each_row("status", [429, 500, 503, 529])
def test_what_is_retried_waits_as_the_provider_says(status: int) -> None:
    headers = {"retry-after": "7"}
    assert classify(HttpFailure(status, "no", headers=headers), NOW).retry_after_s == 7
    assert classify(HttpFailure(status, "no", retry_delay_s=37.0), NOW).retry_after_s == 37
    assert classify(HttpFailure(status, "no", headers=headers, retry_delay_s=37.0), NOW).retry_after_s == 7
    date = (NOW + timedelta(seconds=30)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert classify(HttpFailure(status, "no", headers={"retry-after": date}), NOW).retry_after_s == 30


@settings(deadline=None)
@given(st.integers(), st.text(), st.text() | st.none(), st.dictionaries(st.just("retry-after"), st.text()))
def test_no_answer_is_beyond_it(status: int, message: str, code: str | None, headers: dict[str, str]) -> None:
    verdict = classify(HttpFailure(status, message, code, code, headers), NOW)
    assert verdict.message == message
    assert verdict.retryable == (verdict.kind in {"rate_limit", "transient", "server"})
    assert verdict.counts_for_breaker == (verdict.kind in {"transient", "server"})


def test_an_errors_class_and_text_are_its_identity() -> None:
    def identity(status: int, text: str) -> str | None:
        return classify(HttpFailure(status, text), NOW).error_info().hash

    assert identity(500, "line 42") == identity(500, "line 87")
    assert identity(500, "the same text") != identity(503, "the same text")
    assert identity(500, "no such model") != identity(500, "no such key")


@each_row(
    ("status", "code", "message", "class_name"),
    [
        (501, "not_supported_error", "This server does not support embeddings. Start it with `--embeddings`",
         "UnsupportedRequestError"),
        (500, None, "this model does not support embeddings", "UnsupportedRequestError"),
        (400, None, '"nomic-embed-text" does not support chat', "UnsupportedRequestError"),
        (404, None, "The model does not support Embeddings API", "UnsupportedRequestError"),
        (403, None, "You are not allowed to generate embeddings from this model", "UnsupportedRequestError"),
        (500, None, "the input length exceeds the context length", "ContextOverflowError"),
        (500, "context_length_exceeded", "too much", "ContextOverflowError"),
        (500, "server_error", "input (9000 tokens) is too large to process. increase the physical batch size (current"
         " batch size: 512)", "ContextOverflowError"),
        (500, "server_error", "input is too large to process. increase the physical batch size",
         "ContextOverflowError"),
        (500, "server_error", "image input is not supported - hint: if this is unexpected, you may need to provide the"
         " mmproj", "UnsupportedRequestError"),
        (500, "server_error", "Failed to parse tools: Unsupported tool type: {\"type\":\"custom\"}", "BadRequestError"),
        (500, "server_error", "Failed to parse messages: Missing 'role' in message: {}", "BadRequestError"),
        (500, "server_error", "Failed to parse tool call arguments as JSON: [json.exception.parse_error.101] parse"
         " error at line 1, column 6: unexpected end of input", "BadRequestError"),
    ],
)  # fmt: skip
def test_a_request_that_the_model_cannot_serve_counts_for_nobody_under_whatever_status(
    status: int, code: str | None, message: str, class_name: str
) -> None:
    verdict = classify(HttpFailure(status, message, code), NOW)
    assert (verdict.class_name, verdict.retryable, verdict.counts_for_breaker) == (class_name, False, False)
    assert follows_request(verdict.error_info())


@each_row(
    ("failure", "class_name"),
    [
        (HttpFailure(400, "API key not valid. Please pass a valid API key."), "UnauthorizedError"),
        (HttpFailure(400, "no", "invalid_api_key"), "UnauthorizedError"),
        (HttpFailure(400, "no such model", "model_not_found"), "NotFoundError"),
        (HttpFailure(404, "model: no-such-model"), "NotFoundError"),
        (HttpFailure(500, "context deadline exceeded"), "ServerError"),
        (HttpFailure(429, "slow down"), "RateLimitError"),
        (TransportFailure("timeout", "TimeoutError", "no answer in 30 s"), "TimeoutError"),
    ],
)
def test_a_failure_of_the_key_the_model_or_the_provider_does_not_follow_the_request(
    failure: CallFailure, class_name: str
) -> None:
    verdict = classify(failure, NOW)
    assert verdict.class_name == class_name
    assert not follows_request(verdict.error_info())


@each_row(("failure", "kind", "class_name", "retryable", "counted"), ROWS)
def test_no_failure_that_follows_the_request_counts_for_a_breaker(
    failure: CallFailure, kind: str, class_name: str, retryable: bool, counted: bool
) -> None:
    del kind, class_name, retryable
    assert not (counted and follows_request(classify(failure, NOW).error_info()))
