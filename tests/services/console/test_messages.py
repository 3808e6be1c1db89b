"""A conversation as the page shows it: what is paired, folded and named, and that nothing is left out."""

from collections.abc import Iterable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from breakwater.records.pages.messages import (
    MAX_ENTRIES,
    MAX_MARKDOWN,
    MAX_NODES,
    CallPart,
    JsonPart,
    MediaPart,
    MessagePart,
    ResultPart,
    TextPart,
    bare_json,
    conversation,
)
from tests.records.samples import execution, full_execution
from tests.tables import each_row


def parts_of(*said: "dict[str, Any]") -> "list[tuple[str, tuple[MessagePart, ...]]]":
    return [(view.role, view.parts) for view in conversation(execution(messages=list(said))).messages or ()]


def words(parts: "Iterable[MessagePart]") -> str:
    """All that parts show."""
    found: list[str] = []
    for one in parts:
        match one:
            case TextPart():
                found += [one.label, one.plain]
            case JsonPart():
                found += [one.label, one.text, words(one.children)]
            case MediaPart():
                found += [one.media_kind, *one.details]
            case CallPart():
                found += [one.name, one.call_id, words(one.arguments), words(one.result or ())]
            case ResultPart():
                found += [one.call_id, words(one.parts)]
    return " ".join(found)


def call(call_id: str, name: str = "look", arguments: Any = '{"a":1}') -> "dict[str, Any]":
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_call_stands_with_its_result_and_its_message_is_not_shown_twice() -> None:
    [(role, parts), (last, _)] = parts_of(
        {"role": "assistant", "content": "Looking.", "tool_calls": [call("c1"), call("c2")]},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": '{"found": true}'},
        {"role": "user", "content": "thanks"},
    )
    assert (role, last) == ("assistant", "user")
    text, *calls = parts
    assert isinstance(text, TextPart)
    assert [
        (one.call_id, one.result_in, words(one.result or ()).split()) for one in calls if isinstance(one, CallPart)
    ] == [
        ("c1", 3, ["{", '"found":', "true", "}"]),
        ("c2", 2, ["two"]),
    ]


def test_a_call_without_a_result_and_a_result_without_a_call_are_seen_to_be_so() -> None:
    [(_, [alone]), (role, [lost])] = parts_of(
        {"role": "assistant", "content": None, "tool_calls": [call("c1")]},
        {"role": "tool", "tool_call_id": "c9", "content": "late"},
    )
    assert isinstance(alone, CallPart)
    assert alone.result is None
    assert not alone.awaited
    assert role == "tool"
    assert lost == ResultPart("c9", (TextPart("late"),))


def test_the_calls_of_a_response_await_their_results() -> None:
    response = conversation(execution(output={"content": None, "tool_calls": [call("c1")]})).response
    assert response is not None
    [one] = response.parts
    assert isinstance(one, CallPart)
    assert one.awaited


def test_blocks_of_anthropic_and_functions_of_old_are_paired_too() -> None:
    [(_, [text, used]), (_, [old])] = parts_of(
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "hm"},
                {"type": "tool_use", "id": "u1", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "u1", "content": [{"type": "text", "text": "x"}]}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "no JSON"}},
        {"role": "function", "name": "old", "content": "y"},
    )
    assert isinstance(text, TextPart)
    assert isinstance(used, CallPart)
    assert (used.name, used.result, used.result_in) == ("look", (TextPart("x"),), 2)
    assert isinstance(old, CallPart)
    assert (old.name, old.arguments, old.result) == ("old", (TextPart("no JSON"),), (TextPart("y"),))


@each_row(
    ("part", "media"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}},
            MediaPart("image", ("image/png", "30 KB")),
        ),
        (
            {"type": "image_url", "image_url": "https://a.example/b.png"},
            MediaPart("image", ("by URL: https://a.example/b.png",)),
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            MediaPart("audio", ("wav", "3 bytes")),
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "A" * 4_000_000}},
            MediaPart("image", ("image/gif", "3.0 MB")),
        ),
        ({"type": "file", "file": {"file_id": "f-1"}}, MediaPart("file", ("f-1",))),
        (
            {"type": "document", "title": "Terms", "source": {"type": "url", "url": "https://a.example/t.pdf"}},
            MediaPart("file", ("by URL: https://a.example/t.pdf", "Terms")),
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="}},
            MediaPart("image", ("image/svg+xml", "5 bytes")),
        ),
    ],
)
def test_a_file_is_named_with_its_type_and_size(part: "dict[str, Any]", media: MediaPart) -> None:
    [(_, shown)] = parts_of({"role": "user", "content": [part]})
    assert shown == (media,)


def test_what_is_short_is_open_and_what_is_long_is_folded() -> None:
    short, long = bare_json({"a": 1}), bare_json({f"key {number}": {"of": [number]} for number in range(20)})
    assert (short.summary, short.text) == ("", '{\n  "a": 1\n}')
    assert long.summary == "20 keys: key 0, key 1, key 2, key 3, key 4, key 5, …"
    assert [child.label for child in long.children][:2] == ["key 0", "key 1"]
    assert bare_json(list(range(50))).summary == "50 items, 52 lines"
    [(_, [text])] = parts_of({"role": "user", "content": "long " * 2_000})
    assert isinstance(text, TextPart)
    assert text.summary.endswith("… 10,000 characters")


def test_json_and_data_of_tools_are_no_markdown_and_controls_are_escapes() -> None:
    [(_, [answer]), (_, [made])] = parts_of(
        {"role": "assistant", "content": '{"a": "*b*"}'},
        {"role": "user", "content": "*x*\x1b[2J\u202e\x00"},
    )
    assert answer == JsonPart('{\n  "a": "*b*"\n}')
    assert isinstance(made, TextPart)
    assert made.html == "<p><em>x</em>\\u001b[2J\\u202e\\u0000</p>\n"
    [(_, [lost])] = parts_of({"role": "tool", "tool_call_id": "c", "content": "*x*"})
    assert lost == ResultPart("c", (TextPart("*x*"),))


def test_a_page_has_a_limit_of_markdown_and_of_folded_json() -> None:
    said = [{"role": "user", "content": "*a*\n" + "a" * (MAX_MARKDOWN // 3 - 4)} for _ in range(4)]
    assert [bool(text.html) for _, [text] in parts_of(*said) if isinstance(text, TextPart)] == [True, True, True, False]
    wide = bare_json([[[{"x": "y" * 100}] * 20] * 20] * 20)
    assert _nodes(wide) <= MAX_NODES + MAX_ENTRIES


def _nodes(part: JsonPart) -> int:
    return 1 + sum(_nodes(child) for child in part.children)


def test_every_field_of_a_record_can_be_shown() -> None:
    shown = conversation(full_execution())
    assert shown.response is not None
    assert str(10**30) in words(shown.response.parts), "a number beyond 64 bits"
    assert [view.role for view in shown.messages or ()] == ["user", "assistant"]
    nothing = conversation(execution(output=None))
    assert (nothing.messages, nothing.input, nothing.response) == (None, None, None)


_WORDS = st.text(alphabet="abcdefghij", min_size=4, max_size=8)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=8,
)
_BLOCKS = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "refusal", "unheard_of"]).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"type": st.just(kind)},
        optional={
            "text": _JSON,
            "thinking": _JSON,
            "id": _WORDS,
            "tool_use_id": _WORDS,
            "content": _JSON,
            "name": _WORDS,
            "input": _JSON,
        },
    )
)
_CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": _WORDS,
        "function": _JSON | st.fixed_dictionaries({"name": _WORDS, "arguments": _JSON}),
        "custom": st.fixed_dictionaries({"name": _WORDS, "input": _JSON}),
        "more": _JSON,
    },
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "function", "narrator"])},
        optional={
            "content": _JSON | st.lists(_BLOCKS | _JSON, max_size=3),
            "tool_calls": st.lists(_CALLS, max_size=3) | _JSON,
            "tool_call_id": _WORDS | st.integers(),
            "name": _WORDS,
            "refusal": _JSON,
            "reasoning_content": _JSON,
            "thinking_blocks": _JSON | st.lists(_BLOCKS, max_size=2),
            "function_call": _JSON | st.fixed_dictionaries({"name": _WORDS, "arguments": _JSON}),
            "unheard_of": _JSON,
        },
    ),
    max_size=5,
)


def _leaves(value: Any) -> "list[str]":
    if isinstance(value, dict):
        return [leaf for name, one in value.items() if name not in ("role", "type") for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value] if isinstance(value, str) else []


@given(_MESSAGES)
@example([{"role": "tool", "content": [{"type": "text", "text": None, "input": "left"}]}])
def test_nothing_that_was_said_is_left_out(said: "list[dict[str, Any]]") -> None:
    shown = " ".join(f"{role} {words(parts)}" for role, parts in parts_of(*said))
    assert [leaf for leaf in _leaves(said) if leaf not in shown] == []
