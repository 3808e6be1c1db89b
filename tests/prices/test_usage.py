"""What providers report to have used, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.calls.providers.anthropic import Messages
from breakwater.calls.providers.base import Wire
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.prices.rules.price import Cost, InputSize, size_of_messages, size_of_params, tariff_of
from breakwater.prices.rules.usage import Usage, credible, figure, highest, of_completion, of_message, of_response
from breakwater.prices.settings import Price
from tests.prices.usage_table import BASE, PRICE, ROWS, Row
from tests.tables import each_row

MESSAGES, CHAT = Messages("http://127.0.0.1/v1", "2023-06-01"), ChatCompletions("http://127.0.0.1/v1")


@each_row("row", ROWS, ids=lambda row: row.place)
def test_each_row_of_the_table_is_counted_so(row: Row) -> None:
    wire: Wire = MESSAGES if row.dialect == "anthropic" else ChatCompletions(f"https://{row.host}/v1")
    usage = wire.usage({"usage": row.usage, **row.more})
    assert usage is not None
    cost = tariff_of(PRICE).cost(usage)
    assert (cost and cost.nano) == row.nano
    doubted = usage.problem is not None or (cost is not None and cost.doubt is not None)
    assert doubted == (row.basis == "estimated")


@each_row(
    ("given", "tokens"),
    [
        (7, 7), ("7", 7), (" 7 ", 7), (7.0, 7), ("7.0", 7), (6.2, 7), (0, 0), (2**64, 10**18),
        (True, None), (-1, None), ("-1", None), ("", None), ("seven", None), ("NaN", None), ("inf", None), ([7], None),
        ({}, None), (None, None), (float("nan"), None), (float("inf"), None), ("1e999999999", 10**18),
    ],
)  # fmt: skip
def test_a_figure_is_a_number_of_tokens_however_it_is_written(given: Any, tokens: int | None) -> None:
    assert figure(given) == tokens


NAMES = st.sampled_from(
    [
        "usage", "choices", "x_groq", "service_tier", "prompt_tokens", "completion_tokens", "total_tokens",
        "prompt_tokens_details", "completion_tokens_details", "cached_tokens", "audio_tokens", "reasoning_tokens",
        "input_tokens", "output_tokens", "cache_creation", "ephemeral_1h_input_tokens", "cache_creation_input_tokens",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(JSON, JSON)
def test_whatever_is_reported_is_read_and_costs_no_less_than_its_plain_tokens(before: Any, after: Any) -> None:
    for read in (of_completion, of_message):
        for reported in (before, highest(before, after)):
            usage = read({"usage": reported, "service_tier": after})
            cost = None if usage is None else tariff_of(PRICE).cost(credible(usage))
            if usage is not None and cost is not None:
                plain = (usage.input_tokens or 0) * 500_000_000 + (usage.output_tokens or 0) * 2_000_000_000
                assert cost.nano >= plain // 10**6 > 0


TOKENS = st.integers(1, 10**6)


@given(TOKENS, TOKENS, st.none() | TOKENS, st.none() | TOKENS, st.none() | TOKENS, st.none() | TOKENS)
def test_no_reading_counts_less_than_the_figures_say(
    prompt: int, completion: int, total: int | None, cached: int | None, reasoning: int | None, audio: int | None
) -> None:
    reported = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": audio},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    usage = of_completion({"usage": reported})
    assert usage is not None
    assert usage.input_tokens is not None
    assert usage.output_tokens is not None
    assert usage.input_tokens >= max(prompt, cached or 0, audio or 0)
    assert usage.output_tokens >= max(completion, reasoning or 0)
    assert usage.input_tokens + usage.output_tokens >= (total or 0)
    lies = (cached or 0) > prompt or (audio or 0) > prompt or (total is not None and prompt + completion > total)
    assert usage.problem is not None or not lies


def test_of_several_events_the_highest_of_each_field_counts_in_any_order() -> None:
    events = [
        {"prompt_tokens": 100, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 80}},
        {"prompt_tokens": 0, "completion_tokens": 50, "prompt_tokens_details": None},
        {"prompt_tokens": 90, "completion_tokens": "40", "prompt_tokens_details": {"cached_tokens": 0}},
    ]
    for order in permutations(events):
        answer = Assembly()
        for usage in order:
            answer.add({"choices": [], "usage": usage})
        assert of_completion(answer.completion()) == Usage(100, 50, 80)
        # Gemini, xAI and vLLM repeat it with every chunk; what came before it is kept.
        answer.add({"choices": [], "usage": None})
        assert of_completion(answer.completion()) == Usage(100, 50, 80)


def test_an_anthropic_stream_counts_the_highest_of_its_events_and_no_beginning_as_the_end() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 1500, "output_tokens": 3}}}

    def after(*deltas: dict[str, Any]) -> Usage | None:
        reader = MESSAGES.stream_reader(Assembly())
        for event in (start, *({"type": "message_delta", "delta": {}, "usage": usage} for usage in deltas)):
            list(reader.read(event))
        return MESSAGES.usage(reader.answer())

    assert after() == Usage(1500, None)
    assert after({"input_tokens": 0, "output_tokens": 12}) == Usage(1500, 12)
    assert after({"input_tokens": 1600, "output_tokens": 12}, {"output_tokens": 0}) == Usage(1600, 12)
    assert after({"output_tokens": 0}) == Usage(1500, 3)


LONG = tariff_of(
    Price.model_validate(
        {
            "input_usd_per_mtok": 1,
            "output_usd_per_mtok": 2,
            "cached_input_usd_per_mtok": "0.1",
            "tiers": [{"above_tokens": 200, "input_usd_per_mtok": 2, "output_usd_per_mtok": 3}],
            "service_tiers": {"Priority": {"input_usd_per_mtok": 4, "output_usd_per_mtok": 8}},
        }
    )
)


def test_a_long_input_has_the_prices_of_its_tier_for_all_tokens() -> None:
    costs = [LONG.cost(Usage(tokens, 10, 100)) for tokens in (200, 201)]
    assert [cost and (cost.nano, cost.doubt) for cost in costs] == [
        (100 * 1000 + 100 * 100 + 10 * 2000, None),
        (201 * 2000 + 10 * 3000, None),
    ]


def test_the_terms_of_an_answer_have_their_prices_or_are_estimated() -> None:
    words = ("priority", "flex", "fast", "us", "DEFAULT", "standard")
    usages = [of_completion({"usage": BASE, "service_tier": word}) for word in words]
    costs = [LONG.cost(usage) for usage in usages if usage is not None]
    assert [cost and (cost.nano, cost.doubt is None) for cost in costs] == [
        (800_000, True), (200_000, False), (1_200_000, False), (220_000, False), (200_000, True), (200_000, True),
    ]  # fmt: skip


def test_terms_that_are_asked_for_are_reserved_at_the_dearer_price() -> None:
    asked = [size_of_params({"service_tier": tier}) for tier in ("Priority", "default", "auto", "flex")]
    assert [LONG.worst_case(100, 10, one) for one in asked] == [480_000, 120_000, 120_000, 120_000]


def call_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": f"{kind}_call", "status": "completed", **more}


SEARCHED: dict[str, Any] = {
    "usage": {"input_tokens": 100, "output_tokens": 50, "total_tokens": 150},
    "output": [
        call_of("web_search", action={"type": "search", "query": "a"}),
        call_of("web_search", action={"type": "open_page", "url": "b"}),
        call_of("code_interpreter"),
        call_of("function"),
        call_of("custom_tool"),
        {"type": "message", "content": []},
    ],
}
COUNTED: dict[str, Any] = {"web_search": {"num_requests": 3}}


def test_calls_of_hosted_tools_are_counted_in_the_items_or_as_the_provider_says() -> None:
    counted = [of_response(answer) for answer in (SEARCHED, {**SEARCHED, "tool_usage": COUNTED})]
    assert [usage and dict(usage.tools) for usage in counted] == [
        {"web_search": 1, "code_interpreter": 1},
        {"web_search": 3, "code_interpreter": 1},
    ]
    assert of_response({"output": []}) is None


@each_row(
    ("names", "searches", "counted"),
    [
        (["code_execution", "bash_code_execution"], 0, {"code_execution": 2}),
        (["web_search", "code_execution"], 1, {"web_search": 1}),
        (["web_fetch", "code_execution"], 0, {}),
        (["tool_search_tool_regex", "web_fetch"], 0, {}),
        (["new_tool", "web_search"], 1, {"web_search": 1, "new_tool": 1}),
    ],
)
def test_tools_that_anthropic_runs_are_counted_in_the_blocks(
    names: list[str], searches: int, counted: dict[str, int]
) -> None:
    content = [{"type": "server_tool_use", "id": str(number), "name": name} for number, name in enumerate(names)]
    used = {"input_tokens": 1, "output_tokens": 1, "server_tool_use": {"web_search_requests": searches}}
    usage = of_message({"content": [*content, {"type": "tool_use", "name": "mine"}], "usage": used})
    assert usage is not None
    assert dict(usage.tools) == counted


def test_a_tool_costs_its_price_or_that_of_its_maker_and_is_otherwise_unknown() -> None:
    of_maker = of_message(
        {"usage": {"input_tokens": 100, "output_tokens": 50, "server_tool_use": {"web_search_requests": 2}}}
    )
    hosted = of_response(SEARCHED)
    assert of_maker is not None
    assert hosted is not None
    tokens = 100 * 1000 + 50 * 2000
    prices = {"web_search": 30_000_000, "code_interpreter": 1_000}
    doubt = "no price is known for the tools web_search"
    costs = [
        (LONG.cost(of_maker), Cost(tokens + 20_000_000, doubt)),
        (replace(LONG, tools=prices).cost(of_maker), Cost(tokens + 60_000_000)),
        (replace(LONG, tools=prices).cost(hosted), Cost(tokens + 30_001_000)),
        (replace(LONG, tools={"web_search": 0}).cost(hosted), "code_interpreter"),
        (LONG.cost(hosted), "web_search, code_interpreter"),
    ]
    for found, expected in costs:
        if isinstance(expected, str):
            assert found is not None
            assert found.unknown == f"no price is known for the tools {expected}"
        else:
            assert found == expected


HOUR = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
BRIEF = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "A" * 4288, "format": "wav"}}


def test_a_reservation_has_the_dearest_price_that_may_apply() -> None:
    def most(tokens: int, asked: InputSize | None = None) -> int | None:
        return LONG.worst_case(tokens, 0, asked)

    def size(*parts: dict[str, Any]) -> InputSize:
        return size_of_messages([{"role": "user", "content": list(parts)}])

    assert [most(tokens) for tokens in (200, 201)] == [200_000, 402_000]
    assert most(200, size(BRIEF)) == 250_000
    assert most(200, size(BRIEF, HOUR)) == 400_000
    assert most(200, size_of_params({"tools": [HOUR]}) + size(BRIEF)) == 400_000
    assert size(SOUND).audio_tokens == 101
    assert most(200, size(SOUND)) == 99 * 1000 + 101 * 16_000
