from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.dialects.rules.conversation import JsonMessage, prune_orphans, trim
from tests.tables import each_row

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


@each_row(
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


@each_row("messages", [[], [user(LONG)], [system(LONG), user("hi")], [says(LONG)]])
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
