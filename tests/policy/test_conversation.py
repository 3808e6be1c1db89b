from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.policy.conversation import (
    JsonMessage,
    keep_ratio_from,
    most_output_in,
    output_limit_from,
    prune_orphans,
    trim,
)

IDS = st.sampled_from(["a", "b", "c"])


def system(text: str = "be brief") -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str = "well") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*ids: str, content: str | None = None) -> dict[str, Any]:
    made = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(name: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def function_call(name: str = "f") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": "{}"}}


def function_result(name: str = "f") -> dict[str, Any]:
    return {"role": "function", "name": name, "content": "done"}


def text(words: str = "well") -> dict[str, Any]:
    return {"type": "text", "text": words}


def uses(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "f", "input": {}}


def gives(name: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": "done"}


def blocks(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


THINKS = {"type": "thinking", "thinking": "hm", "signature": "s"}


@pytest.mark.parametrize(
    ("torn", "mended", "count"),
    [
        pytest.param([user(), calls("a")], [user()], 1, id="a call at the end"),
        pytest.param([user(), calls("a"), user()], [user(), user()], 1, id="a call without its result"),
        pytest.param([user(), calls("a", content="ok"), user()], [user(), says("ok"), user()], 1, id="text stays"),
        pytest.param([user(), result("a"), user()], [user(), user()], 1, id="a result without its call"),
        pytest.param(
            [user(), calls("a", "b"), result("b"), user()],
            [user(), calls("b"), result("b"), user()],
            1,
            id="one of two calls",
        ),
        pytest.param(
            [user(), calls("a"), result("a"), result("a", "again"), user()],
            [user(), calls("a"), result("a"), user()],
            1,
            id="two results for one call",
        ),
        pytest.param([calls("a"), user(), result("a")], [user()], 2, id="a result too late"),
        pytest.param([calls("a"), system(), result("a")], [system()], 2, id="a result after something else"),
        pytest.param([result("a"), calls("a"), user()], [user()], 2, id="a result before its call"),
        pytest.param([calls("a"), says(), result("a")], [says()], 2, id="a result in the next answer's place"),
        pytest.param(
            [calls("a"), result("x"), result("a")],
            [calls("a"), result("a")],
            1,
            id="a stranger between call and result",
        ),
        pytest.param(
            [calls("a"), result("a"), user(), calls("a"), user()],
            [calls("a"), result("a"), user(), user()],
            1,
            id="an id used again",
        ),
        pytest.param([calls("", ""), result("")], [calls(""), result("")], 1, id="ids that are all empty"),
        pytest.param([function_call(), user()], [user()], 1, id="a function call"),
        pytest.param([user(), function_result()], [user()], 1, id="a function's result"),
        pytest.param([function_call("f"), function_result("g")], [], 2, id="another function's result"),
        pytest.param(
            [blocks("assistant", text(), uses("a")), user()],
            [blocks("assistant", text()), user()],
            1,
            id="a block's call",
        ),
        pytest.param([blocks("assistant", THINKS, uses("a")), user()], [user()], 1, id="thoughts alone"),
        pytest.param(
            [blocks("user", gives("a"), text("and?"))], [blocks("user", text("and?"))], 1, id="a block's result"
        ),
        pytest.param(
            [blocks("assistant", uses("a")), blocks("user", gives("x")), blocks("user", gives("a"))],
            [blocks("assistant", uses("a")), blocks("user", gives("a"))],
            1,
            id="a message of nothing but orphans is as if it were not there",
        ),
        pytest.param(
            [blocks("assistant", uses("a")), blocks("user", gives("x"), text()), blocks("user", gives("a"))],
            [blocks("user", text())],
            3,
            id="a message with something else in it parts call and result",
        ),
    ],
)
def test_what_is_torn_is_taken_out(torn: list[JsonMessage], mended: list[JsonMessage], count: int) -> None:
    before = copy.deepcopy(torn)
    assert prune_orphans(torn) == (mended, count)
    assert torn == before


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A turn that providers accept."""
    turn = [user(draw(st.text(max_size=30)))]
    for _ in range(draw(st.integers(0, 4))):
        names = draw(st.lists(IDS, unique=True, min_size=1))
        match draw(st.sampled_from(["tools", "blocks", "function", "text"])):
            case "tools":
                turn += [
                    calls(*names, content=draw(st.none() | st.just("so"))),
                    *map(result, draw(st.permutations(names))),
                ]
            case "blocks":
                more = draw(st.lists(st.just(text("and this?")), max_size=1))
                turn += [blocks("assistant", text(), *map(uses, names)), blocks("user", *map(gives, names), *more)]
            case "function":
                turn += [function_call(), function_result()]
            case _:
                turn.append(says(draw(st.text(max_size=30))))
    return turn


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    opening = draw(st.lists(st.just(system()) | st.just(says("welcome")), max_size=2))
    return opening + [message for turn in draw(st.lists(turns(), max_size=5)) for message in turn]


ANY_MESSAGE = st.one_of(
    st.builds(system),
    st.builds(user, st.text(max_size=5)),
    st.builds(says),
    st.lists(IDS, max_size=3).map(lambda ids: calls(*ids, content=None)),
    st.lists(IDS, max_size=3).map(lambda ids: calls(*ids, content="so")),
    st.builds(result, IDS),
    st.builds(function_call, IDS),
    st.builds(function_result, IDS),
    st.lists(st.builds(uses, IDS) | st.just(text()) | st.just(THINKS), max_size=3).map(
        lambda content: blocks("assistant", *content)
    ),
    st.lists(st.builds(gives, IDS) | st.just(text()), max_size=3).map(lambda content: blocks("user", *content)),
    st.sampled_from(
        [
            {"role": "assistant", "tool_calls": [{"function": {}}, None, 5]},
            {"role": "tool", "content": "of nothing"},
            {"role": "user", "content": [None, {"type": "tool_result"}]},
            {"role": "assistant", "content": None, "refusal": "no", "tool_calls": [{"id": "a"}]},
            {},
        ]
    ),
)
ANYTHING = st.lists(ANY_MESSAGE, max_size=12)


def bare(message: JsonMessage) -> str | None:
    """A message without its calls and results; None where nothing else is in it."""
    content = message.get("content")
    if message.get("role") in {"tool", "function"}:
        return None
    rest = {name: value for name, value in message.items() if name not in {"tool_calls", "function_call"}}
    if isinstance(content, list):
        rest["content"] = [
            block
            for block in content
            if not isinstance(block, dict) or block["type"] not in {"tool_use", "tool_result"}
        ]
    return json.dumps(rest)


@settings(deadline=None)
@given(conversations())
def test_a_valid_conversation_stays_as_it_is(messages: list[JsonMessage]) -> None:
    assert prune_orphans(messages) == (messages, 0)


@settings(deadline=None)
@given(ANYTHING)
def test_pruning_once_is_enough_and_changes_nothing_that_was_given(messages: list[JsonMessage]) -> None:
    before = copy.deepcopy(messages)
    pruned, count = prune_orphans(messages)
    assert messages == before
    assert prune_orphans(pruned) == (pruned, 0)
    assert (count == 0) == (pruned == messages)


@settings(deadline=None)
@given(ANYTHING)
def test_after_pruning_every_call_is_followed_by_its_result(messages: list[JsonMessage]) -> None:
    pruned, _ = prune_orphans(messages)
    waiting: list[str] = []
    for message in pruned:
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else []
        given_here = [block["tool_use_id"] for block in parts if block and block["type"] == "tool_result"]
        given_here += [message["tool_call_id"]] if message.get("role") == "tool" else []
        given_here += ["f:" + str(message["name"])] if message.get("role") == "function" else []
        for name in given_here:
            waiting.remove(name)  # raises where there is no such call
        if not given_here:
            assert not waiting
        if message.get("role") == "assistant":
            made: Any = message.get("tool_calls", [])
            waiting += [call["id"] for call in made]
            waiting += [block["id"] for block in parts if block and block["type"] == "tool_use"]
            call: Any = message.get("function_call")
            waiting += ["f:" + call["name"]] if call else []
    assert not waiting


@settings(deadline=None)
@given(ANYTHING)
def test_pruning_keeps_the_order_and_all_that_is_said_beside_tools(messages: list[JsonMessage]) -> None:
    pruned, _ = prune_orphans(messages)
    rest = iter([bare(message) for message in messages])
    assert all(any(bare(message) == other for other in rest) for message in pruned), "in order"
    for message in messages:
        plain = (
            not message.get("tool_calls")
            and not message.get("function_call")
            and isinstance(message.get("content"), str)
        )
        if message.get("role") in {"system", "user", "assistant"} and plain:
            assert message in pruned


def size(messages: list[JsonMessage]) -> int:
    return sum(
        len(json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()) for message in others(messages)
    )


def others(messages: list[JsonMessage]) -> list[JsonMessage]:
    return [message for message in messages if message["role"] not in {"system", "developer"}]


LONG = "x" * 400


def test_the_oldest_turns_go_first_and_system_messages_stay() -> None:
    messages = [system(), user(LONG), says(LONG), system("more"), user(LONG), says(LONG), user("last"), says("so")]
    assert trim(messages, 0.9) == ([system(), system("more"), *messages[4:]], 2)
    assert trim(messages, 0.1) == ([system(), system("more"), *messages[6:]], 4)


def test_a_greeting_before_the_first_question_goes_first() -> None:
    messages = [says(LONG), user("one"), says("two")]
    assert trim(messages, 0.5) == (messages[1:], 1)


def test_within_the_last_turn_older_tool_calls_go_with_their_results() -> None:
    old = [calls("a", "b"), result("a", LONG), result("b", LONG)]
    latest = [calls("c"), result("c", LONG)]
    messages = [system(), user("do it"), *old, says("next"), *latest]
    assert trim(messages, 0.5) == ([system(), user("do it"), says("next"), *latest], 3)
    assert trim([system(), user("do it"), *latest], 0.1) == ([system(), user("do it"), *latest], 0)


def test_what_a_user_says_beside_a_result_in_the_last_turn_stays() -> None:
    messages = [
        user("do it"),
        blocks("assistant", uses("a")),
        blocks("user", gives("a"), text(LONG)),
        calls("b"),
        result("b", LONG),
    ]
    assert trim(messages, 0.2) == (messages, 0)


def test_results_in_a_users_message_begin_no_turn() -> None:
    messages = [user(LONG), says(LONG), user("do it"), blocks("assistant", uses("a")), blocks("user", gives("a"))]
    assert trim(messages, 0.1) == (messages[2:], 2)


@pytest.mark.parametrize("messages", [[], [user(LONG)], [system(LONG), user("hi")], [says(LONG)]])
def test_where_nothing_may_go_nothing_goes(messages: list[JsonMessage]) -> None:
    assert trim(messages, 0.1) == (messages, 0)


@settings(deadline=None)
@given(conversations(), st.floats(0.05, 1.2))
def test_trimming_drops_no_more_than_it_must_and_tears_nothing(messages: list[JsonMessage], ratio: float) -> None:
    before = copy.deepcopy(messages)
    kept, dropped = trim(messages, ratio)
    assert messages == before
    assert dropped == len(messages) - len(kept)
    rest = iter(messages)
    assert all(any(message is other for other in rest) for message in kept), "the same messages, in order"
    assert [message for message in kept if message["role"] == "system"] == [
        message for message in messages if message["role"] == "system"
    ]
    assert prune_orphans(kept) == (kept, 0)
    questions = [message for message in messages if message["role"] == "user" and isinstance(message["content"], str)]
    if questions:
        assert any(message is questions[-1] for message in kept)
    if size(messages) <= ratio * size(messages):
        assert dropped == 0
    if size(kept) > ratio * size(messages):
        assert trim(kept, 0.0) == (kept, 0), "too long still, as nothing more may go"


@settings(deadline=None)
@given(conversations(), st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_who_keeps_less_keeps_nothing_else(messages: list[JsonMessage], one: float, other: float) -> None:
    fewer, more = trim(messages, min(one, other))[0], trim(messages, max(one, other))[0]
    left = iter(more)
    assert all(any(message is candidate for candidate in left) for message in fewer)


@settings(deadline=None)
@given(ANYTHING, st.floats(0, 1))
def test_trimming_takes_any_list_of_messages(messages: list[JsonMessage], ratio: float) -> None:
    mended, _ = prune_orphans(messages)
    kept, _ = trim(mended, ratio)
    assert prune_orphans(kept) == (kept, 0)
    trim(messages, ratio)


def test_text_that_is_no_unicode_has_a_size_too() -> None:
    assert trim([user("\ud800" * 50), says(), user("last")], 0.5)[1] == 2


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
