"""Context overflows: figures in providers' words, and the same refusal in the words of each API."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.calls.rules.classify import HttpFailure, classify, without_text
from breakwater.dialects.rules.context_overflow import (
    keep_ratio_from,
    most_output_in,
    output_limit_from,
    overflow_message,
    overflow_summary,
)
from breakwater.jobs.contract.job import CallApi
from tests.calls.test_classify import NOW
from tests.tables import each_row

APIS: tuple[CallApi, ...] = ("chat", "responses", "messages", "embeddings")
TOO_LONG = {
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9011 tokens. Please "
    "reduce the length of the messages.": (9011, 8192),
    "prompt is too long: 213462 tokens > 200000 maximum": (213462, 200000),
    "Provider returned error: prompt is too long: 213462 tokens > 200000 maximum": (213462, 200000),
    "The input (9011 tokens) exceeds the maximum allowed input length of 8192 tokens.": (9011, 8192),
    "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens).": (160062, 59862),
    "Input length (265330) exceeds model's maximum context length (262144).": (265330, 262144),
    "The input (345,516 tokens) is longer than the model's context length (262,144 tokens).": (345516, 262144),
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.": (537812, 131072),
    "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).": (1200000, 1048576),
    "The total number of tokens in the prompt (9011) exceeds the limit of 8192.": (9011, 8192),
    "Conversation too long: 9011 tokens, the model supports at most 8192 tokens.": (9011, 8192),
    "Prompt tokens (9011) exceed the maximum sequence length of 8192.": (9011, 8192),
    "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 4100.": (4100, 4081),
    "Prompt length 9000 exceeds the limit of 8192": (9000, 8192),
    "prompt token count of 74490 exceeds the limit of 72000": (74490, 72000),
    "request (66202 tokens) exceeds the available context size (65536 tokens), try increasing it": (66202, 65536),
    "input (9000 tokens) is too large to process. increase the physical batch size (current batch size: 512)": (
        9000,
        512,
    ),
    "Your request exceeded model token limit: 262144 (requested: 300000)": (300000, 262144),
    "the number of tokens to keep from the initial prompt is greater than the context length (n_keep: 9011>= n_ctx: "
    "8192)": (9011, 8192),
    "The total token count of your request exceeds the limit: 9011 > 8192": (9011, 8192),
    "输入token数量9011超过限制8192": (9011, 8192),
    "The prompt is too long: 200000, model maximum context length: 100000": (200000, 100000),
}
"""Tokens of the conversation and the limit, by providers' words."""
OUTPUT_TOO_LONG = {
    "This model's maximum context length is 8192 tokens. However, you requested 11000 tokens (7000 in the messages, "
    "4000 in the completion). Please reduce the length of the messages or completion.",
    "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context length is 8192 tokens "
    "and your request has 7000 input tokens (4000 > 8192 - 7000).",
    "input length and `max_tokens` exceed context limit: 7000 + 4000 > 8192, decrease input length or `max_tokens` "
    "and try again",
}
"""7000 tokens and 4000 of output in a context of 8192."""
WITHOUT_FIGURES = (
    "Input is too long for requested model.",
    "Range of input length should be [1, 30720]",
    "invalid params, context window exceeds limit 204800 (2013)",
    "the request exceeds the available context size, try increasing it",
    "Error code: 400 - context length of 8192 exceeded",
    "prompt too long; exceeded max context length by 812 tokens",
    "model-2024-08-06 at 10.0.1000.2000: context length exceeded, see doc/1234/56789",
    "输入长度超过模型最大上下文长度",
    "total tokens exceeds the model's max of 4096",
    "total message size 4194304 bytes exceeds limit 2097152 of the prompt",
)


def test_the_tokens_of_a_conversation_and_the_limit_are_in_the_words_of_each_api(subtests: pytest.Subtests) -> None:
    for said, (used, limit) in TOO_LONG.items():
        with subtests.test(said):
            as_message = f"prompt is too long: {used} tokens > {limit} maximum"
            assert overflow_message(said, "messages") == as_message
            for api in ("chat", "embeddings", "responses"):
                text = overflow_message(said, api)
                assert f"This model's maximum context length is {limit} tokens. However, your " in text
                assert f"resulted in {used} tokens" in text
            assert "Your input exceeds the context window of this model." in overflow_message(said, "responses")


def test_an_output_limit_that_does_not_fit_is_in_the_words_of_each_api(subtests: pytest.Subtests) -> None:
    for said in OUTPUT_TOO_LONG:
        with subtests.test(said):
            wanted = "input length and `max_tokens` exceed context limit: 7000 + 4000 > 8192, decrease input length"
            assert overflow_message(said, "messages").startswith(wanted)
            for api in ("chat", "responses"):
                assert "maximum context length is 8192 tokens" in overflow_message(said, api)
                assert "7000" in overflow_message(said, api)


def test_figures_that_a_provider_does_not_name_are_not_invented(subtests: pytest.Subtests) -> None:
    begins = {"messages": "prompt is too long", "chat": "Your input exceeds the context window of this model"}
    for said in WITHOUT_FIGURES:
        for api in APIS:
            with subtests.test(said, api=api):
                text = overflow_message(said, api)
                assert text.startswith(begins.get(api, begins["chat"]))
                assert text.endswith(said), "its words are all that is known"
                assert overflow_summary(said) is None


WORDS = st.sampled_from(
    ["tokens", "maximum context length is", "exceeds", "(", ")", "limit", "too long:", ">", "per min"]
)
WORDED = st.lists(WORDS | st.integers(0, 10**9).map(str) | st.text(max_size=5), max_size=12).map(" ".join)


@given(WORDED, st.sampled_from(APIS))
@settings(deadline=None)
def test_the_words_of_an_api_hold_no_figure_that_the_provider_did_not_name(said: str, api: CallApi) -> None:
    text = overflow_message(said, api)
    figures = {number.replace(",", "") for number in re.findall(r"\d[\d,]*", said)}
    sums = {str(int(one) + int(two)) for one in figures for two in figures}
    assert set(re.findall(r"[0-9]+", text)) <= {*figures, *sums, *re.findall(r"[0-9]+", said)}
    assert overflow_message(text, api) == text, "what is worded so stays so"


def test_the_words_of_an_api_are_passed_on_to_its_clients() -> None:
    openai = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9011 tokens."
    window = "Your input exceeds the context window of this model. Please adjust your input and try again."
    anthropic = "prompt is too long: 213462 tokens > 200000 maximum"
    words = {"chat": (openai, window), "responses": (window,), "messages": (anthropic,)}
    for api, said in words.items():
        assert [overflow_message(one, api) for one in said] == list(said)  # type: ignore[arg-type]


def test_each_of_these_words_is_an_overflow(subtests: pytest.Subtests) -> None:
    for said in (*TOO_LONG, *OUTPUT_TOO_LONG, *WITHOUT_FIGURES[:-1]):
        with subtests.test(said):
            assert classify(HttpFailure(400, said), NOW).kind == "context_overflow"
    for status, type_ in ((400, "invalid_request_error"), (403, "billing_error"), (429, "rate_limit_error")):
        said = "Extra usage is required for long context requests."
        assert classify(HttpFailure(status, said, None, type_), NOW).kind == "context_overflow"


def test_figures_are_kept_where_texts_are_not() -> None:
    for said in (*TOO_LONG, *OUTPUT_TOO_LONG):
        failure = HttpFailure(400, f"secret words: {said}", "context_length_exceeded")
        kept = without_text(classify(failure, NOW), failure)
        assert "secret" not in kept.message
        assert overflow_message(kept.message, "messages") == overflow_message(failure.message, "messages")
    failure = HttpFailure(400, "prompt is too long: 4111111111111111 tokens > 8192 maximum")
    assert "4111" not in without_text(classify(failure, NOW), failure).message, "no number of tokens is so high"


@each_row(
    ("said", "ratio"),
    [
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9011 tokens.",
            8192 / 9011 * 0.9,
        ),
        ("prompt is too long: 210000 tokens > 200000 maximum", 200 / 210 * 0.9),
        (
            "The input token count (2845475) exceeds the maximum number of tokens allowed (1048576).",
            1048576 / 2845475 * 0.9,
        ),
        (
            "This model's maximum context length is 8000 tokens. However, you requested 12000 tokens "
            "(10000 in the messages, 2000 in the completion). Please reduce the length.",
            6000 / 10000 * 0.9,
        ),
        (
            "This model's maximum context length is 4097 tokens, however you requested 5116 tokens "
            "(4860 in your prompt; 256 for the completion).",
            (4097 - 256) / 4860 * 0.9,
        ),
        (
            "This endpoint's maximum context length is 128000 tokens. However, you requested about 300000 tokens "
            "(200000 of text input, 28000 of tool input, 72000 in the output).",
            128 / 300 * 0.9,
        ),
        (
            "'max_tokens' is too large: 96. This model's maximum context length is 4096 tokens and your request has "
            "5000 input tokens (96 > 4096 - 5000).",
            4000 / 5000 * 0.9,
        ),
        (
            "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, decrease input length",
            136000 / 178959 * 0.9,
        ),
        (
            "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
            131072 / 537812 * 0.9,
        ),
        (
            "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
            32768 / 40000 * 0.9,
        ),
        ("request (5,000 tokens) exceeds the available context size (4,096 tokens), try", 4096 / 5000 * 0.9),
        (
            "`inputs` tokens + `max_new_tokens` must be <= 8193. Given: 9000 `inputs` tokens and 2193 `max_new_tokens`",
            6000 / 9000 * 0.9,
        ),
        (
            "Request too large for model `m` in organization `o` service tier `s` on tokens per minute: Limit 6,000, "
            "Requested 12000, please reduce your message size and try again.",
            0.45,
        ),
        ("Please reduce the length of the messages. Current length is 50000 while limit is 40000", 0.72),
        ("Input tokens exceed the configured limit of 1000 tokens. Your messages resulted in 2000 tokens.", 0.45),
        ("The prompt is too long: 200000, model maximum context length: 100000", 0.45),
        ("The engine prompt length 8000 exceeds the max_model_len 4000. Please reduce prompt.", 0.45),
        ("The decoder prompt (length 8000) is longer than the maximum model length of 4000.", 0.45),
        (
            "You passed 8000 input tokens and requested 100 output tokens. However, the model's context length is only "
            "4000 tokens, resulting in a maximum input length of 3900 tokens.",
            3900 / 8000 * 0.9,
        ),
        ("prompt token count of 8000 exceeds the limit of 4000", 0.45),
        ("prompt is too long: 200001 tokens > 200000 maximum", 200000 / 200001 * 0.9),
        ("prompt is too long: 1 tokens > 200000 maximum", 0.9),
        ("prompt is too long: 99999999 tokens > 10 maximum", 0.1),
        ("input length and `max_tokens` exceed context limit: 100 + 300000 > 200000", 0.1),
        ("prompt is too long: 0 tokens > 0 maximum", None),
        ("The input token count exceeds the maximum number of tokens allowed 1048576.", None),
        ("Input is too long for requested model.", None),
        ("", None),
    ],
)
def test_what_fits_is_read_from_the_providers_text(said: str, ratio: float | None) -> None:
    assert keep_ratio_from(said) == (None if ratio is None else pytest.approx(ratio))


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_ratio_is_within_bounds_whatever_the_text(before: str, limit: int, used: int) -> None:
    ratio = keep_ratio_from(f"{before} prompt is too long: {used} tokens > {limit} maximum")
    assert ratio is None or 0.1 <= ratio <= 0.9


@each_row(
    ("said", "limit"),
    [
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (5000 in the "
            "messages, 4000 in the completion). Please reduce the length of the messages or completion.",
            3192,
        ),
        (
            "This endpoint's maximum context length is 131072 tokens. However, you requested about 140000 tokens "
            "(9000 of text input, 131000 in the output). Please reduce the length of either one.",
            122072,
        ),
        ("input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length", 11760),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is 16384 "
            "tokens and your request has 2000 input tokens (32000 > 16384 - 2000).",
            14384,
        ),
        (
            "You passed 3000 input tokens and requested 2000 output tokens. However, the model's context length is "
            "only 4096 tokens, resulting in a maximum input length of 2096 tokens.",
            1096,
        ),
        (
            "Requested token count exceeds the model's maximum context length of 131072 tokens. You requested a total "
            "of 135224 tokens: 127032 tokens from the input messages and 8192 tokens for the completion.",
            4040,
        ),
        (
            "`inputs` tokens + `max_new_tokens` must be <= 8193. Given: 6000 `inputs` tokens and 2194 `max_new_tokens`",
            2193,
        ),
        (
            # It has counted no further than it had to.
            "This model's maximum context length is 131072 tokens. However, you requested 128000 output tokens and "
            "your prompt contains at least 3073 input tokens, for a total of at least 131073 tokens.",
            64000,
        ),
        # The conversation does not fit even alone, or beside nothing worth saying.
        ("input length and `max_tokens` exceed context limit: 200001 + 20 > 200000", None),
        ("input length and `max_tokens` exceed context limit: 199990 + 20000 > 200000", None),
        ("prompt is too long: 210000 tokens > 200000 maximum", None),
        ("This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.", None),
        ("", None),
    ],
)
def test_the_room_that_is_left_for_an_answer_is_read_from_the_providers_text(said: str, limit: int | None) -> None:
    assert output_limit_from(said) == limit


@each_row(
    ("said", "most"),
    [
        (
            "max_tokens is too large: 32000. This model supports at most 16384 completion tokens, whereas you provided "
            "32000.",
            16_384,
        ),
        ("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]", 8_192),
        ("`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens`", 8_192),
        ("max_tokens: 128000 > 64000, which is the maximum allowed number of output tokens for claude-x", 64_000),
        ("max_tokens must be at least 1", None),
    ],
)
def test_the_most_output_of_a_model_is_read_from_its_refusal(said: str, most: int | None) -> None:
    assert most_output_in(said) == most
