from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.local.provider import ScriptError, build_script
from breakwater.local.provider.behaviour import AnswerUsage, ChatRequest, Decision, ScriptedAnswer, decide, make_plans
from breakwater.local.provider.openai import OpenAI, RequestRefusedError
from breakwater.local.provider.prompt_cache import PromptCaches
from breakwater.local.provider.script import ErrorText, PromptCache, ProviderScript, ScriptedPrice
from tests.tables import each_row

from .provider_kit import COST_NANO, MODEL, PRICE, chat, script


def asked(prompt: str = "hello", **more: Any) -> ChatRequest:
    return ChatRequest.model_validate(chat(prompt) | more)


ASKED = asked()
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}


def said(*given: Any, **more: Any) -> ScriptedAnswer:
    """What a model says, where it comes to that."""
    decision = answer(*given, **more)
    assert decision.answer is not None
    return decision.answer


def cost_nano(price: dict[str, str], input_tokens: int, output_tokens: int, cached_tokens: int) -> int:
    return AnswerUsage(input_tokens, output_tokens, cached_tokens).cost_nano(ScriptedPrice.model_validate(price))


def answer(content: dict[str, Any], number: int = 1, elapsed_s: float = 0.0, request: ChatRequest = ASKED) -> Decision:
    return decide(make_plans(build_script(content))[MODEL], number, elapsed_s, request)


@each_row(
    ("fault", "hit", "missed"),
    [
        ({"from_s": 5, "to_s": 12}, [(1, 5.0), (9, 11.999)], [(1, 4.999), (1, 12.0)]),
        ({"to_s": 2}, [(1, 0.0)], [(1, 2.0)]),
        ({"from_s": 2}, [(1, 2.0), (1, 1e6)], [(1, 1.9)]),
        ({"requests": [2, 4]}, [(2, 0.0), (4, 9.0)], [(1, 0.0), (5, 0.0)]),
        ({"requests": [3, None]}, [(3, 0.0), (10**6, 0.0)], [(2, 0.0)]),
        ({"requests": [2, 4], "from_s": 1}, [(3, 1.0)], [(3, 0.5), (5, 1.0)]),
        ({"rate": 1}, [(1, 0.0), (77, 3.0)], []),
        ({"rate": 0}, [], [(number, 0.0) for number in range(1, 50)]),
        ({}, [(1, 0.0), (2, 99.0)], []),
    ],
)
def test_a_fault_applies_where_all_its_conditions_hold(
    fault: dict[str, Any], hit: list[tuple[int, float]], missed: list[tuple[int, float]]
) -> None:
    content = script({**fault, "status": 503})
    assert [answer(content, *point).status for point in hit] == [503] * len(hit)
    assert [answer(content, *point).status for point in missed] == [200] * len(missed)


def test_the_first_fault_that_applies_wins() -> None:
    content = script({"requests": [1, 1], "status": 429}, {"requests": [1, 2], "status": 401})
    assert [answer(content, number).status for number in (1, 2, 3)] == [429, 401, 200]


def test_a_rate_hits_about_its_share_and_each_fault_draws_for_itself() -> None:
    content = script({"rate": 0.1, "status": 429}, {"rate": 0.1, "status": 503})
    statuses = [answer(content, number).status for number in range(1, 4001)]
    assert 320 < statuses.count(429) < 480
    assert 280 < statuses.count(503) < 440


def test_another_seed_gives_other_faults() -> None:
    hits = [
        [n for n in range(1, 200) if answer(script({"rate": 0.2, "status": 429}, seed=seed), n).status == 429]
        for seed in (1, 2)
    ]
    assert hits[0] != hits[1]


def test_models_with_the_same_rules_do_not_fail_on_the_same_numbers() -> None:
    rules = {"price": PRICE, "faults": [{"rate": 0.2, "status": 429}]}
    plans = make_plans(build_script({"models": {"a": rules, "b": rules}}))
    hits = [[n for n in range(1, 200) if decide(plan, n, 0.0, ASKED).status == 429] for plan in plans.values()]
    assert hits[0] != hits[1]


def test_latency_is_a_log_normal_with_the_given_median_and_95th_percentile() -> None:
    content = script(latency_ms={"p50": 20, "p95": 60})
    delays = sorted(answer(content, number).delay_s * 1000 for number in range(1, 4001))
    assert delays[2000] == pytest.approx(20, rel=0.1)
    assert delays[3800] == pytest.approx(60, rel=0.15)


@given(
    seed=st.integers(0, 2**64),
    number=st.integers(1, 10**9),
    elapsed_s=st.floats(0, 1e6),
    prompt=st.text(max_size=50),
    max_tokens=st.none() | st.integers(1, 200),
    wants_json=st.booleans(),
)
def test_the_same_seed_number_time_and_request_give_the_same_decision(
    seed: int, number: int, elapsed_s: float, prompt: str, max_tokens: int | None, wants_json: bool
) -> None:
    content = script(
        {"rate": 0.3, "status": 429, "retry_after_s": 1},
        {"rate": 0.3, "from_s": 10, "kind": "truncated"},
        seed=seed,
        latency_ms={"p50": 3, "p95": 30},
        usage={"output_tokens": [0, 99], "cached_tokens": [0, 500]},
    )
    request = asked(prompt, max_tokens=max_tokens, **(JSON if wants_json else {}))
    first = answer(content, number, elapsed_s, request)
    # Another model beside it must not change its draws.
    content["models"] = {"a/first": {"price": PRICE}, **content["models"]}
    assert answer(content, number, elapsed_s, request) == first
    assert first.answer is not None
    assert first.answer.usage.cached_tokens <= first.answer.usage.input_tokens
    assert max_tokens is None or first.answer.usage.output_tokens <= max_tokens


@given(
    tokens=st.tuples(st.integers(0, 10**7), st.integers(0, 10**7), st.floats(0, 1)),
    prices=st.tuples(*[st.decimals(0, 1000, places=6)] * 3),
)
def test_the_price_is_the_exact_sum_rounded_half_up_once(
    tokens: tuple[int, int, float], prices: tuple[Decimal, Decimal, Decimal]
) -> None:
    fresh_and_cached, output, share = tokens
    cached = int(fresh_and_cached * share)
    usd = ((fresh_and_cached - cached) * prices[0] + cached * prices[2] + output * prices[1]) / Decimal(10**6)
    names = ("input_usd_per_mtok", "output_usd_per_mtok", "cached_input_usd_per_mtok")
    price = {name: str(one) for name, one in zip(names, prices, strict=True)}
    assert cost_nano(price, fresh_and_cached, output, cached) == int((usd * 10**9).quantize(Decimal(1), ROUND_HALF_UP))


@each_row(
    ("input_tokens", "nano"),
    [(0, 0), (1, 0), (2, 1), (3, 1), (5, 1), (6, 2)],
)
def test_half_a_nano_dollar_is_rounded_up(input_tokens: int, nano: int) -> None:
    # 0.00025 USD a million tokens is a quarter of a nano-dollar a token.
    assert cost_nano({"input_usd_per_mtok": "0.00025", "output_usd_per_mtok": "0"}, input_tokens, 0, 0) == nano


def test_cached_input_without_its_own_price_costs_what_fresh_input_costs() -> None:
    assert cost_nano({"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}, 120, 40, 20) == 120 * 1000 + 40 * 2000


@each_row("price", ["-1", "0.0000000001", "free", "nan", "inf", True, None])
def test_a_price_that_is_no_exact_amount_is_refused(price: object) -> None:
    with pytest.raises(ScriptError, match=r"price\.output_usd_per_mtok"):
        build_script(script(price={"input_usd_per_mtok": 1, "output_usd_per_mtok": price}))


@each_row(
    ("fault", "billed"),
    [
        ({"requests": [9, 9], "status": 500}, True),
        ({"status": 500}, False),
        ({"status": 500, "billed": True}, True),
        ({"status": 201}, True),
        ({"status": 201, "billed": False}, False),
        ({"kind": "no_choices"}, True),
        ({"kind": "truncated"}, False),
        ({"kind": "truncated", "billed": True}, True),
        ({"kind": "reset", "billed": True}, True),
        ({"hang_s": 60}, True),
        ({"answer": "other"}, True),
    ],
)
def test_a_call_is_billed_when_its_answer_was_produced(fault: dict[str, Any], billed: bool) -> None:
    decision = answer(script(fault))
    assert decision.answer is not None
    assert decision.price is not None
    assert (decision.billed, decision.answer.usage.cost_nano(decision.price)) == (billed, COST_NANO)


def test_max_tokens_cuts_the_text_and_says_so() -> None:
    content = script(answer="abcdefghij" * 8, usage={"output_tokens": 40})
    cut = said(content, request=asked(max_tokens=10))
    assert (cut.usage.output_tokens, cut.finish_reason, cut.content) == (10, "length", "abcdefghij" * 2)
    whole = said(content, request=asked(max_tokens=40))
    assert (whole.finish_reason, whole.content) == ("stop", "abcdefghij" * 8)


def test_tokens_follow_the_length_of_the_text_where_the_script_gives_none() -> None:
    usage = said(script(answer="a" * 41, usage={}), request=asked("x" * 101)).usage
    assert (usage.input_tokens, usage.output_tokens) == (26, 11)


def test_a_template_names_the_prompt_and_the_number_and_leaves_other_braces_alone() -> None:
    content = script(answer='{n}: {prompt} {"a": {}}')
    assert said(content, 3, request=asked("say {n}")).content == '3: say {n} {"a": {}}'


@each_row(
    ("model", "wants_json", "expected"),
    [
        ({"answer": "text", "answer_json": {"a": 1}}, False, "text"),
        ({"answer": "text", "answer_json": {"a": 1}}, True, '{"a":1}'),
        ({"answer_json": [1, None]}, False, "[1,null]"),
        ({"answer": "no json"}, True, "no json"),
        ({}, True, f'{{"answer":"Simulated answer 1 of {MODEL} to: hello"}}'),
    ],
)
def test_a_request_for_json_gets_the_scripted_json(model: dict[str, Any], wants_json: bool, expected: str) -> None:
    assert said(script(**model), request=asked(**(JSON if wants_json else {}))).content == expected


def test_a_fault_can_be_another_answer_as_for_one_that_fails_a_schema_at_first() -> None:
    content = script({"requests": [1, 1], "answer": "{}"}, answer_json={"title": "x"})
    assert [said(content, number).content for number in (1, 2)] == ["{}", '{"title":"x"}']


def test_tool_calls_are_asked_for_once_tools_are_offered() -> None:
    content = script(tool_calls=[{"name": "search", "arguments": {"q": "x"}}])
    offered = said(content, request=asked(tools=[{}]))
    assert (offered.finish_reason, offered.content, offered.tool_calls[0].name) == ("tool_calls", None, "search")
    assert said(content).tool_calls == ()
    demands = {"type": "function", "function": {"name": "find"}}
    tools = [{"type": "function", "function": {"name": name}} for name in ("search", "find")]
    assert said(content, request=asked(tools=tools, tool_choice=demands)).tool_calls[0].name == "find"


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OTHER = {**CALL, "id": "call_2"}


@each_row(
    ("messages", "orphans"),
    [
        ([{"role": "user"}], ()),
        ([{"role": "assistant", "tool_calls": [CALL]}], ("call_1",)),
        ([{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1"}], ()),
        ([{"role": "assistant", "tool_calls": [CALL, OTHER]}, {"role": "tool", "tool_call_id": "call_1"}], ("call_2",)),
        (
            [{"role": "assistant", "tool_calls": [CALL]}, {"role": "user"}, {"role": "tool", "tool_call_id": "call_1"}],
            ("call_1",),
        ),
        ([{"role": "assistant", "tool_calls": None}, {"role": "user"}], ()),
    ],
)
def test_a_tool_call_is_an_orphan_when_the_messages_right_after_it_bring_no_result(
    messages: list[dict[str, Any]], orphans: tuple[str, ...]
) -> None:
    assert asked(messages=messages).orphans == orphans


def test_orphan_tool_calls_are_refused_by_name_and_other_requests_are_answered() -> None:
    content = script({"when": "orphan_tool_calls", "status": 400})
    decision = answer(content, request=asked(messages=[{"role": "assistant", "tool_calls": [CALL]}]))
    assert decision.status == 400
    assert "call_1" in OpenAI().error(400, decision.error)["error"]["message"]
    assert answer(content).status == 200


@each_row(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"{}", "model"),
        (orjson.dumps({"model": "m"}), "messages"),
        (orjson.dumps({"model": "m", "messages": []}), "messages"),
        (orjson.dumps({"model": "m", "messages": ["hello"]}), "messages.0"),
        (orjson.dumps(chat(stream_options={"include_usage": True})), "stream_options"),
        (orjson.dumps(chat(n=0)), "n"),
        (orjson.dumps(chat(max_tokens=0)), "max_tokens"),
        (orjson.dumps(chat(max_completion_tokens="9")), "max_completion_tokens"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused_with_the_parameter(body: bytes, param: str | None) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        OpenAI().read(body)
    assert refused.value.error.param == param


def test_a_request_is_read_with_text_in_parts_and_tools() -> None:
    body = chat(max_tokens=7, tools=[{}], response_format={"type": "json_schema", "json_schema": {}})
    body["messages"] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
    ]
    read = OpenAI().read(orjson.dumps(body))
    assert (read.prompt, read.max_tokens, read.wants_json, read.offers_tools) == ("one two", 7, True, True)
    assert said(script(usage={}), request=read).usage.input_tokens == 4


def test_an_error_body_is_completed_from_what_its_status_usually_says() -> None:
    assert OpenAI().error(429)["error"]["code"] == "rate_limit_exceeded"
    custom = OpenAI().error(400, ErrorText(code="context_length_exceeded", message="Too long."))
    assert custom["error"] == {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert OpenAI().error(418)["error"]["type"] == "invalid_request_error"


@each_row(("wait_s", "header"), [(1, "1"), (1.0, "1"), (0.25, "0.25"), (0, "0"), (120, "120")])
def test_retry_after_is_sent_in_seconds(wait_s: float, header: str) -> None:
    headers = OpenAI().error_headers(429, wait_s)
    assert (headers["Retry-After"], headers["x-ratelimit-remaining-requests"]) == (header, "0")
    assert OpenAI().error_headers(503, None) == {}


@each_row(
    ("mistake", "path"),
    [
        ({"statsu": 500}, f"models.{MODEL}.faults.0.statsu"),
        ({}, "needs exactly one of"),
        ({"status": 500, "hang_s": 1}, "needs exactly one of"),
        ({"status": 199}, f"models.{MODEL}.faults.0.status"),
        ({"rate": 1.5, "status": 500}, f"models.{MODEL}.faults.0.rate"),
        ({"requests": [4, 2], "status": 500}, "is empty"),
        ({"from_s": 5, "to_s": 5, "status": 500}, "window ends"),
        ({"kind": "reset", "retry_after_s": 1}, "needs status"),
        ({"status": 201, "error": {"message": "no"}}, "needs status"),
        ({"status": 500, "billed_when_abandoned": True}, "needs hang_s"),
    ],
)
def test_a_mistake_in_a_fault_is_named(mistake: dict[str, Any], path: str) -> None:
    with pytest.raises(ScriptError) as raised:
        build_script(script(mistake))
    assert path in str(raised.value)


@pytest.mark.parametrize(
    "model", [{"latency_ms": {"p50": 9, "p95": 3}}, {"usage": {"output_tokens": [9, 3]}}, {"price": {}}]
)
def test_a_mistake_in_a_model_is_refused(model: dict[str, Any]) -> None:
    with pytest.raises(ScriptError, match=f"models.{MODEL}"):
        build_script(script(**model))


def test_a_mistake_never_repeats_a_key() -> None:
    with pytest.raises(ScriptError) as raised:
        build_script({**script(), "api_keys": {"sk-secret": 1}})
    assert "sk-secret" not in str(raised.value)


def test_json_and_a_dump_of_a_script_give_the_same_script() -> None:
    text = orjson.dumps(script({"requests": [1, 40], "status": 429, "retry_after_s": 2}))
    built = build_script(text)
    assert built == build_script(orjson.loads(text))
    assert build_script(built.model_dump_json().encode()) == built
    assert ProviderScript.model_validate(built.model_dump()) == built


def test_a_script_that_is_no_json_is_refused() -> None:
    with pytest.raises(ScriptError, match="script: Invalid JSON"):
        build_script(b"models: [")


# Prompt caches, and keys


def test_the_beginning_of_a_conversation_is_cached_for_its_model_and_key_until_it_is_cold() -> None:
    rules, caches = PromptCache(min_tokens=10, ttl_s=300), PromptCaches()

    def read(*texts: str, model: str = MODEL, key: str = "a", now: float = 0.0) -> int:
        roles = ("system", "user", "assistant")
        messages = [{"role": roles[number % 3], "content": text} for number, text in enumerate(texts)]
        request = ChatRequest.model_validate({"model": model, "messages": messages})
        return caches.read(rules, model, request.model_copy(update={"key": key}), now)

    system, question = "s" * 400, "q" * 40
    assert read(system, question) == 0
    assert read(system, "another") == 100
    assert read(system, question, "answer") == 110
    assert read(system, question, key="b") == read(system, question, model="other") == 0
    assert read("x" * 36, "y") == read("x" * 36, "z") == 0, "too short to be cached"
    assert read(system, question, now=299.0) == 110
    assert read(system, question, now=598.0) == 110, "each use keeps it warm"
    assert read(system, question, now=899.0) == 0


def test_a_fault_can_hit_one_key_alone() -> None:
    limited = script({"status": 429, "key": "sk-a"})
    by_key = {key: answer(limited, request=ASKED.model_copy(update={"key": key})).status for key in ("sk-a", "sk-b")}
    assert by_key == {"sk-a": 429, "sk-b": 200}


def test_tokens_of_a_prompt_cache_are_charged_as_cached() -> None:
    cached = said(script(usage={"output_tokens": 1}), request=ASKED.model_copy(update={"cached_tokens": 1}))
    assert cached.usage.cached_tokens == 1
