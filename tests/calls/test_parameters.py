"""Parameters that providers refuse, by their words, and which of them the next call may go without."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.calls.rules.classify import HttpFailure, NotSent, classify
from breakwater.calls.rules.parameters import RefusedParams, refused_params, without_fields
from breakwater.prices.rules.price import OUTPUT_LIMITS
from tests.calls.test_classify import NOW

BOTH = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
DEFAULT = (
    "Unsupported value: 'temperature' does not support 0.2 with this model. Only the default (1) value is supported."
)
ALL = {"temperature", "top_p", "thinking", "reasoning_effort", "stream_options", "max_tokens", "user", "stop", "store"}


def refusal(message: str, *, status: int = 400, **more: Any) -> Any:
    return classify(HttpFailure(status, message, **more), NOW)


WORDS: list[tuple[str, dict[str, Any], set[str], set[str], tuple[str, ...], bool]] = [
    # What is said, more of it, what was added, what the client sent: what is left out, and whether it is for good.
    (BOTH, {}, {"temperature"}, {"top_p"}, ("temperature",), False),
    (BOTH, {}, {"top_p"}, {"temperature"}, ("top_p",), False),
    (BOTH, {}, {"temperature", "top_p"}, set(), ("temperature",), False),
    (DEFAULT, {"param": "temperature", "code": "unsupported_value"}, ALL, set(), ("temperature",), True),
    (DEFAULT, {}, ALL, set(), ("temperature",), True),
    ("`temperature` is deprecated for this model.", {}, ALL, set(), ("temperature",), True),
    ("temperature: range: 0..1", {}, ALL, set(), ("temperature",), False),
    ("`temperature` may only be set to 1 when thinking is enabled.", {}, {"temperature"}, {"thinking"},
     ("temperature",), False),
    ("`temperature` may only be set to 1 when thinking is enabled.", {}, {"thinking"}, {"temperature"},
     ("thinking",), False),
    ("`max_tokens` must be greater than `thinking.budget_tokens`.", {}, {"thinking", "max_tokens"}, set(),
     ("thinking",), False),
    ("Thinking may not be enabled when tool_choice forces tool use.", {}, {"thinking"}, {"tool_choice"},
     ("thinking",), False),
    ("This model does not support the effort parameter.", {}, ALL, set(), ("reasoning_effort",), True),
    ("output_config.effort: Extra inputs are not permitted", {}, ALL, set(), ("reasoning_effort",), True),
    ("output_config: Extra inputs are not permitted", {"param": "output_config"},
     {"reasoning_effort", "response_format"}, set(), ("reasoning_effort", "response_format"), True),
    ("Unsupported parameter: 'reasoning.effort' is not supported with this model.", {"param": "reasoning.effort"},
     ALL, set(), ("reasoning_effort",), True),
    ("Unsupported parameter", {"param": "text.verbosity"}, {"verbosity"}, set(), ("verbosity",), True),
    ("Model grok-4 does not support parameter presencePenalty.", {}, {"presence_penalty"}, set(),
     ("presence_penalty",), True),
    ("Argument not supported on this model: stop", {}, ALL, set(), ("stop",), True),
    ("property 'store' is unsupported", {}, ALL, set(), ("store",), True),
    ('Invalid JSON payload received. Unknown name "user": Cannot find field.', {}, ALL, set(), ("user",), True),
    ("Unrecognized request argument supplied: stream_options", {}, ALL, set(), ("stream_options",), True),
    ("Extra inputs are not permitted", {"param": "seed", "status": 422}, {"seed"}, set(), ("seed",), True),
    ("extraneous key [top_k] is not permitted", {}, {"top_k"}, set(), ("top_k",), True),
    ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", {"param": "max_tokens"},
     set(OUTPUT_LIMITS), set(), ("max_tokens",), True),
    ("Unsupported parameter: max_output_tokens", {}, {"max_tokens"}, set(), ("max_tokens",), True),
]  # fmt: skip
NOT_ABOUT_ONE: list[tuple[str, dict[str, Any]]] = [
    ("The user must stop and store this first.", {}),
    ("messages: first message must use the user role", {}),
    ("max_tokens: 10000 > 8192, which is the maximum allowed number of output tokens", {}),
    ("temperature", {"status": 500}),
    ("temperature", {"status": 401}),
    ("Invalid value", {"param": "messages[0].content"}),
    ("", {}),
]


def test_what_was_added_and_is_refused_is_left_out(subtests: pytest.Subtests) -> None:
    for said, more, added, own, names, lasting in WORDS:
        with subtests.test(said, more=more, added=added):
            found = refused_params(refusal(said, **more), added, (), own)
            assert found == RefusedParams(names, lasting)


def test_what_is_not_named_is_not_left_out(subtests: pytest.Subtests) -> None:
    for said, more in NOT_ABOUT_ONE:
        with subtests.test(said, more=more):
            assert refused_params(refusal(said, **more), ALL, ALL, ()) is None


def test_what_the_client_sent_is_left_out_where_it_may_be_and_the_model_does_not_know_it() -> None:
    own = {"temperature", "top_k", "tools", "max_tokens", "messages"}
    unknown = refusal("Unsupported parameter: 'top_k'", param="top_k")
    assert refused_params(unknown, (), (), own) is None
    assert refused_params(unknown, (), own, own) == RefusedParams(("top_k",), lasting=False)
    assert refused_params(refusal(DEFAULT), (), own, own) == RefusedParams(("temperature",), lasting=False)
    for said, param in (
        ("top_k: must be positive", "top_k"),
        ("Unsupported parameter: 'max_tokens'", "max_tokens"),
        ("Unsupported value in tools", "tools[0].type"),
        ("Unsupported value", "messages"),
    ):
        found = refused_params(refusal(said, param=param), (), own - {"tools"} if "tools" in said else own, own)
        assert found is None, said


def test_what_no_call_was_made_for_is_refused_too() -> None:
    failure = classify(NotSent("the param 'seed' is not supported by Anthropic", "seed"), NOW)
    assert refused_params(failure, {"seed"}, (), ()) == RefusedParams(("seed",), lasting=True)


def test_fields_are_left_out_of_a_body_with_what_they_leave_empty() -> None:
    body = {"a": 1, "reasoning": {"effort": "low"}, "text": {"verbosity": "low", "format": 1}, "b": 2}
    assert without_fields(body, ["a", "reasoning.effort", "text.verbosity", "c", "b.c"]) == {
        "text": {"format": 1},
        "b": 2,
    }


@settings(deadline=None)
@given(st.text(max_size=100) | st.lists(st.sampled_from([*ALL, "not supported", "'", "parameter"])).map(" ".join),
       st.none() | st.sampled_from([*ALL, "messages[0]", "x"]), st.sets(st.sampled_from(sorted(ALL))))  # fmt: skip
def test_whatever_is_said_only_what_may_be_is_left_out(said: str, param: str | None, added: set[str]) -> None:
    found = refused_params(refusal(said, param=param), added, (), ALL - added)
    assert found is None or set(found.names) <= added
