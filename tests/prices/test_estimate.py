"""What a call is estimated to send before it is made: never too little, and not so much that nobody may call."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.prices.rules.price import (
    ANTHROPIC,
    BASE_TOKENS,
    BYTES_PER_MEDIA_TOKEN,
    GEMINI,
    GENERIC,
    LINKED_FILE_TOKENS,
    MAX_INPUT_TOKENS,
    OPENAI,
    PAGE_TEXT_TOKENS,
    InputSize,
    TokenRules,
    estimate_input_tokens,
    rules_for,
    size_of_messages,
    size_of_params,
)
from tests.tables import each_row

ALL = (OPENAI, ANTHROPIC, GEMINI, GENERIC)
MEGABYTE = base64.b64encode(bytes(1_000_000)).decode()
DATA_URL = f"data:image/png;base64,{MEGABYTE}"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def of_text(text: str, rules: TokenRules = OPENAI) -> int:
    """The estimate of a text, without what a call has around it."""
    return estimate_input_tokens(size_of_messages([user(text)]), rules) - BASE_TOKENS - rules.message_tokens


# As OpenAI's cookbook on counting tokens has them, by the one of its tokenizers that makes the most of a text.
KNOWN = [("antidisestablishmentarianism", 6), ("2 + 2 = 4", 7), ("お誕生日おめでとう", 14)]


@each_row(("text", "tokens"), KNOWN)
@each_row("rules", ALL)
def test_a_text_is_estimated_at_no_less_than_its_known_tokens(text: str, tokens: int, rules: TokenRules) -> None:
    assert tokens <= of_text(text, rules) <= 4 * tokens


ENGLISH = "The parcel arrived two days late, and the box was open; please tell me how to send it back. "
GERMAN = "Das Paket kam zwei Tage zu spät an, und die Schachtel war schon geöffnet; wie schicke ich es zurück? "
CHINESE = "包裹晚到了两天，盒子已经打开了。请告诉我怎么退货。"
CODE = "    for index, value in enumerate(values):\n        total += value * weights[index]\n"
JSON = json.dumps({"order": {"id": 48151623, "items": [{"sku": "AB-42", "count": 3}], "paid": True}})


@each_row(
    ("text", "least", "most"),
    [
        (ENGLISH, 1 / 4, 3 / 5),  # about 4.5 bytes a token, down to 2.5 with Anthropic's newest tokenizer
        (GERMAN, 1 / 3, 2 / 3),
        (CHINESE, 1 / 3, 1),
        (CODE, 1 / 3, 3 / 4),
        (JSON, 1 / 2, 1),
        ("0123456789" * 10, 1, 1),  # several tokenizers make a token of each digit
        ("9f86d081884c7d659a2feaa0c55ad015" * 4, 0.7, 1),
        ("aGVsbG8gd29ybGQhIFRoaXMgaXMgYmFzZTY0" * 4, 0.6, 1),
        ("WHAT A DAY! ", 0.8, 1),
    ],
    ids=["english", "german", "chinese", "code", "json", "digits", "hex", "base64", "capitals"],
)
@each_row("rules", ALL)
def test_tokens_for_each_byte_of_text(text: str, least: float, most: float, rules: TokenRules) -> None:
    text *= 20
    assert least <= of_text(text, rules) / len(text.encode()) <= most


def image(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


IMAGES: dict[str, Any] = {
    "openai url": {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "high"}},
    "openai inline": {"type": "image_url", "image_url": {"url": DATA_URL}},
    "bare": {"type": "image_url", "image_url": DATA_URL},
    "input_image": {"type": "input_image", "image_url": DATA_URL},
    "input_image file": {"type": "input_image", "file_id": "file-abc123"},
    "anthropic": image(type="base64", media_type="image/jpeg", data=MEGABYTE),
    "anthropic url": image(type="url", url="https://example.com/a.png"),
    "anthropic file": image(type="file", file_id="file_abc"),
    "mcp": {"type": "image", "mimeType": "image/png", "data": MEGABYTE},
}


@each_row("part", IMAGES.values(), ids=IMAGES)
@each_row("rules", ALL)
def test_an_image_counts_as_an_image_however_it_is_sent(part: Any, rules: TokenRules) -> None:
    size = size_of_messages([user([part])])
    assert (size.images, size.documents, size.linked_files, size.media_bytes) == (1, 0, 0, 0)
    assert rules.image_tokens <= estimate_input_tokens(size, rules) <= rules.image_tokens + 100


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "c1", "content": [IMAGES["openai inline"], IMAGES["mcp"]]},
        user(
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [IMAGES["anthropic"], {"type": "text", "text": "a"}],
                },
                IMAGES["anthropic url"],
            ]
        ),
        user([{"type": "document", "source": {"type": "content", "content": [IMAGES["anthropic"], IMAGES["mcp"]]}}]),
    ],
    ids=["openai tool", "anthropic tool_result", "anthropic document of blocks"],
)
def test_images_within_a_tools_result_are_found(message: dict[str, Any]) -> None:
    size = size_of_messages([message])
    assert size.images == 2
    assert size.signs + size.lowercase < 200


@each_row(
    ("part", "expected"),
    [
        ({"type": "input_audio", "input_audio": {"data": MEGABYTE, "format": "wav"}}, InputSize(media_bytes=1_000_000)),
        (
            {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{MEGABYTE}"}},
            InputSize(media_bytes=1_000_000),
        ),
        ({"type": "video_url", "video_url": {"url": "https://example.com/v.mp4"}}, InputSize(linked_files=1)),
        (
            {"type": "image_url", "image_url": {"url": f"data:audio/ogg;base64,{MEGABYTE}"}},
            InputSize(media_bytes=1_000_000),
        ),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{MEGABYTE}"}},
            InputSize(documents=1, document_bytes=1_000_000),
        ),
        ({"type": "file", "file": {"file_id": "file-abc"}}, InputSize(linked_files=1)),
        ({"type": "input_file", "file_url": "https://example.com/a.pdf"}, InputSize(linked_files=1)),
        (
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": MEGABYTE},
            },
            InputSize(documents=1, document_bytes=1_000_000),
        ),
        (
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "as it is"}},
            InputSize(lowercase=8),
        ),
        (
            {"type": "file", "file": {"file_data": "data:text/plain;base64," + base64.b64encode(b"as it is").decode()}},
            InputSize(lowercase=8),
        ),
    ],
)
def test_a_file_counts_by_what_it_is(part: Any, expected: InputSize) -> None:
    size = size_of_messages([user([part])])
    assert abs(size.media_bytes - expected.media_bytes) <= 3
    assert abs(size.document_bytes - expected.document_bytes) <= 3
    assert (size.lowercase, size.documents, size.linked_files) == (
        expected.lowercase,
        expected.documents,
        expected.linked_files,
    )
    assert size.images == 0


def test_what_a_file_may_come_to() -> None:
    minute_of_speech = InputSize(media_bytes=60 * 8_000)  # an MP3 of 64 kbit/s
    assert estimate_input_tokens(minute_of_speech, GEMINI) >= 60 * 32
    page = InputSize(documents=1, document_bytes=3_000)
    assert estimate_input_tokens(page, ANTHROPIC) >= ANTHROPIC.image_tokens + PAGE_TEXT_TOKENS
    scan = InputSize(documents=1, document_bytes=1_000_000)
    assert 10 * 3_000 < estimate_input_tokens(scan, ANTHROPIC) < 1_000_000
    largest_pdf = InputSize(documents=1, document_bytes=24_000_000)
    assert estimate_input_tokens(largest_pdf, ANTHROPIC) - BASE_TOKENS == ANTHROPIC.document_tokens, "its context"
    assert estimate_input_tokens(InputSize(linked_files=1), OPENAI) >= LINKED_FILE_TOKENS
    assert estimate_input_tokens(InputSize(media_bytes=3_200), OPENAI) - BASE_TOKENS == 3_200 / BYTES_PER_MEDIA_TOKEN


@each_row(
    "content",
    [
        DATA_URL,
        [{"type": "text", "text": DATA_URL}],
        [{"type": "image_link", "url": DATA_URL}],
        [{"type": ["image"], "image": DATA_URL}],
        [{"type": "image", "source": {"type": "url", "url": "https://example.com/a"}, "alt": DATA_URL}],
    ],
)
def test_what_is_not_known_to_be_an_image_counts_as_text(content: Any) -> None:
    assert estimate_input_tokens(size_of_messages([user(content)]), OPENAI) > len(DATA_URL) / 2


def test_a_messages_own_type_does_not_hide_its_text() -> None:
    message = {"role": "user", "type": "image", "content": ENGLISH}
    assert size_of_messages([message]).lowercase >= size_of_messages([user(ENGLISH)]).lowercase


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
            "required": ["location"],
        },
    },
}


def test_tools_and_schemas_count_with_the_instructions_that_come_with_them() -> None:
    plain = estimate_input_tokens(size_of_messages([user("hi")]), ANTHROPIC)
    tools = estimate_input_tokens(size_of_messages([user("hi")]) + size_of_params({"tools": [TOOL]}), ANTHROPIC)
    # The definition itself is some 80 tokens, and up to 530 are documented for the instructions.
    assert 530 + 80 <= tools - plain <= 1_500
    schema = TOOL["function"]["parameters"]
    held = [
        size_of_messages([user("hi")]) + size_of_params({}, schema=schema),
        size_of_messages([user("hi")])
        + size_of_params({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
    ]
    assert all(estimate_input_tokens(size, ANTHROPIC) > plain + ANTHROPIC.tool_tokens for size in held)


def test_tool_calls_and_the_input_of_a_program_count() -> None:
    arguments = json.dumps({"location": ENGLISH})
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert size_of_messages([said]).lowercase >= size_of_messages([user(ENGLISH)]).lowercase
    assert size_of_params({}, input={"order": 2**70, "text": ENGLISH}).lowercase >= len(ENGLISH) * 0.9


@each_row(
    ("kind", "base_url", "models", "expected"),
    [
        ("anthropic", "https://api.anthropic.com", ("claude-sonnet-4-5",), ANTHROPIC),
        ("anthropic", "https://gateway.example/anthropic", ("fast",), ANTHROPIC),
        ("openai", "https://openrouter.ai/api/v1", ("anthropic/claude-sonnet-4.5",), ANTHROPIC),
        ("openai", "https://api.openai.com/v1", ("gpt-5",), OPENAI),
        ("openai", "http://127.0.0.1:1/v1", ("o3",), OPENAI),
        ("azure", "https://x.openai.azure.com", ("prod",), OPENAI),
        ("openai", "https://generativelanguage.googleapis.com/v1beta/openai", ("x",), GEMINI),
        ("openai", "https://openrouter.ai/api/v1", ("google/gemini-2.5-pro",), GEMINI),
        ("openai", "http://127.0.0.1:8000/v1", ("Qwen/Qwen2.5-VL-7B",), GENERIC),
        ("process", "", ("olmo",), GENERIC),
    ],
)
def test_a_model_is_counted_by_its_makers_rules(
    kind: str, base_url: str, models: tuple[str, ...], expected: TokenRules
) -> None:
    assert rules_for(kind, base_url, models) == expected
    assert rules_for(kind, base_url, models, 7).image_tokens == 7


@each_row(
    ("models", "tokens"),
    [
        (("gpt-4o-mini-2024-07-18",), 2_833 + 8 * 5_667),
        (("ft:gpt-4o-mini:us::x",), 2_833 + 8 * 5_667),
        (("prod", "azure/gpt-4o-mini"), 2_833 + 8 * 5_667),
        (("gpt-4o",), 85 + 8 * 170),
        (("gpt-4.1-nano",), 3_779),
        (("gpt-next",), OPENAI.image_tokens),
    ],
)
def test_openais_models_see_an_image_as_more_or_fewer_tokens(models: tuple[str, ...], tokens: int) -> None:
    assert rules_for("azure", "https://x.openai.azure.com", models).image_tokens == tokens


PARTS = st.one_of(
    st.text(max_size=200).map(lambda text: {"type": "text", "text": text}),
    st.sampled_from(["https://example.com/a.png", "data:image/png;base64,AAAA"]).map(
        lambda url: {"type": "image_url", "image_url": {"url": url}}
    ),
    st.binary(max_size=200).map(
        lambda data: {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "mp3"}}
    ),
)
MESSAGES = st.lists(st.one_of(st.text(max_size=300), st.lists(PARTS, max_size=4)).map(user), max_size=5)
RULES = st.sampled_from(ALL)


@given(MESSAGES, MESSAGES, st.booleans(), RULES)
def test_sizes_add_up_and_more_is_never_fewer_tokens(
    some: list[dict[str, Any]], more: list[dict[str, Any]], tools: bool, rules: TokenRules
) -> None:
    first, second = size_of_messages(some) + size_of_params({"tools": [TOOL]} if tools else {}), size_of_messages(more)
    whole = size_of_messages(some + more) + size_of_params({"tools": [TOOL]} if tools else {})
    assert first + second == whole
    apart = estimate_input_tokens(first, rules) + estimate_input_tokens(second, rules) - BASE_TOKENS
    assert apart - 1 <= estimate_input_tokens(whole, rules) <= apart
    assert estimate_input_tokens(first, rules) <= estimate_input_tokens(whole, rules)


@given(st.text(max_size=500), RULES)
def test_a_text_is_never_fewer_tokens_than_a_quarter_of_its_bytes_nor_more_than_all(
    text: str, rules: TokenRules
) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    assert size / 4 <= of_text(text, rules) <= size


def test_no_estimate_is_beyond_what_can_be_counted() -> None:
    assert estimate_input_tokens(InputSize(linked_files=10**9), GENERIC) == MAX_INPUT_TOKENS
