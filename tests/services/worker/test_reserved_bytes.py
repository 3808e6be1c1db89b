"""What a call sends is reserved to its last byte: any JSON in any place of a body, and a provider that bills it all."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from breakwater.calls.assignment import Assignment
from breakwater.calls.providers.anthropic import Messages, NativeMessages
from breakwater.calls.providers.base import Call, CallError, Streaming, Wire
from breakwater.calls.providers.bedrock import Converse
from breakwater.calls.providers.embeddings import EmbeddingsWire
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.calls.providers.responses import ResponsesWire
from breakwater.calls.targets import Target
from breakwater.config import Config
from breakwater.config.job_validation import validate_job
from breakwater.config.targets import Targets
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.chat_messages import encode_json
from breakwater.prices.rules.price import (
    BYTES_OF_SMALL_BODIES,
    LINKED_FILE_TOKENS,
    InputSize,
    estimate_input_tokens,
    worst_input_tokens,
)
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import answering
from tests.flow.kit import model
from tests.helpers import more_examples
from tests.services.worker.assignments import assignment_of, worker_without_servers
from tests.services.worker.conftest import StartWorker

PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
CONFIG = Config.model_validate(
    {
        "providers": {
            "chat": {"base_url": "https://llm.example/v1"},
            "openai": {"base_url": "https://api.openai.com/v1", "api": "responses"},
            "anthropic": {"kind": "anthropic"},
            "bedrock": {"kind": "bedrock", "region": "eu-central-1"},
        },
        "models": {f"{name}/m": {"price": PRICE} for name in ("chat", "openai", "anthropic", "bedrock")},
        "agents": {
            name: {
                "model": f"{name}/m",
                "max_tokens": 1000,
                "system_prompt": "Be brief.",
                "params": {"temperature": 0.5, "instruction": "Find it."} if name == "openai" else {"temperature": 0.5},
                "output": {"schema": "task_result", "native": True},
                "budget": {"daily_usd": 1, "enforcement": "hard"},
            }
            for name in ("chat", "openai", "anthropic", "bedrock")
        },
        "budgets": {"tenants": {"acme": {"daily_usd": 1, "enforcement": "hard"}}},
    }
)
TARGETS = Targets(CONFIG)
WORKER = worker_without_servers(CONFIG)
CHAT = ChatCompletions("https://llm.example/v1")
CHATS: Mapping[str, Wire] = {
    "anthropic": Messages("https://a.example", "1"),
    "bedrock": Converse("https://a.example", "1"),
}

FUNCTION = {"type": "object", "properties": {"city": {"type": "string", "description": "of the weather"}}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rainy"},
        ],
        "params": {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": FUNCTION}}],
            "metadata": {"a": "b"},
            "stop": ["x"],
        },
    },
    "responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "c"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rainy"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "tool_search_output", "tools": [{"type": "function", "name": "h", "parameters": FUNCTION}]},
        ],
        "instructions": "Be kind.",
        "tools": [
            {"type": "function", "name": "f", "parameters": FUNCTION, "strict": True},
            {"type": "function", "name": "f", "parameters": FUNCTION},
            {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h", "parameters": {}}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "s", "schema": FUNCTION}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "max_output_tokens": 100,
    },
    "messages": {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "user",
                "content": [
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
                    {"type": "search_result", "source": "x", "title": "t", "content": [{"type": "text", "text": "y"}]},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": "c"},
                    {"type": "text", "text": "d"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "e"}]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": FUNCTION}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "max_tokens": 100,
    },
    "embeddings": {"input": ["a", "b"], "dimensions": 8, "encoding_format": "float", "task": "search", "user": "u"},
}
TRANSLATED = {
    "responses": {
        **BODIES["responses"],
        "input": BODIES["responses"]["input"][:5],
        "tools": BODIES["responses"]["tools"][:2],
        "text": {"format": {"type": "json_schema", "name": "s", "schema": FUNCTION}},
    },
    "messages": {
        **BODIES["messages"],
        "tools": BODIES["messages"]["tools"][:1],
        "messages": [BODIES["messages"]["messages"][number] for number in (0, 2, 3)],
    },
}
"""Bodies that can be translated to a chat."""
ROUTES: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "chat", BODIES["chat"]),
    ("chat", "anthropic", BODIES["chat"]),
    ("responses", "openai", BODIES["responses"]),
    ("responses", "chat", TRANSLATED["responses"]),
    ("responses", "anthropic", TRANSLATED["responses"]),
    ("chat", "bedrock", BODIES["chat"]),
    ("responses", "bedrock", TRANSLATED["responses"]),
    ("messages", "bedrock", TRANSLATED["messages"]),
    ("messages", "anthropic", BODIES["messages"]),
    ("messages", "chat", TRANSLATED["messages"]),
    ("embeddings", "openai", BODIES["embeddings"]),
]
"""API of the request, its provider, and a body."""


def asked_for(api: str, body: Mapping[str, Any], agent: str, *, streamed: bool = False) -> Job | None:
    """The job for a body; None for one that is refused, also since it may cost more than its bytes."""
    given_body = body if api == "chat" else {"api_request": {"api": api, "body": body}}
    try:
        job = Job.model_validate({"agent": agent, "stream": streamed and api != "embeddings", **given_body})
    except ValueError:
        return None
    return job if validate_job(CONFIG, CONFIG.limit_table, job) is None else None


def assignment(job: Job) -> tuple[Assignment, Target]:
    assigned = assignment_of(WORKER, job)
    return assigned, TARGETS.of(job.agent, assigned.chain[0])


async def _take(_: Any) -> None:
    pass


def sent_bytes(assigned: Assignment, target: Target) -> bytes:
    """The body as it leaves. Raises CallError for one that does not."""
    job, guard = assigned.job, assigned.output_guard
    speaks = job.api in target.apis
    params: Mapping[str, Any] = assigned.parameters.values
    messages, chat_params = (assigned.messages, params) if speaks else assigned.chat_request(assigned.messages, params)
    if not speaks and assigned.losses:
        raise CallError(assigned.losses, maybe_billed=False)  # pyright: ignore[reportArgumentType]
    native = assigned.native_body(params) if speaks else None
    call = Call(
        "e:1",
        target.name,
        messages,
        chat_params,
        1.0,
        output_schema=None if guard is None else guard.schema,
        strict_output=True,
        streaming=Streaming(_take, 1.0, 1.0) if job.stream else None,
        api=job.api if speaks else "chat",
        native=native,
    )
    wires: dict[str, Wire] = {
        "responses": ResponsesWire(CHAT),
        "embeddings": EmbeddingsWire(CHAT),
        "messages": NativeMessages("https://a.example", "1"),
        "chat": CHATS.get(target.provider, CHAT),
    }
    return encode_json(wires["chat" if native is None else job.api].body(call))


@dataclass(frozen=True, slots=True)
class Sent:
    """A call under a cap: its body, and what is reserved for it."""

    data: bytes
    size: InputSize
    target: Target
    output_tokens: int

    @classmethod
    def of(cls, api: str, provider: str, body: Mapping[str, Any], *, streamed: bool = False) -> Sent | None:
        """None for a request that is refused, here or where it is translated."""
        if (job := asked_for(api, body, provider, streamed=streamed)) is None:
            return None
        assigned, target = assignment(job)
        try:
            data = sent_bytes(assigned, target)
        except CallError:
            return None
        size = assigned.input_size(as_written=job.api in target.unchanged_apis)
        return cls(data, size, target, assigned.parameters.max_output_tokens)

    def is_over(self, tokens: int | None = None) -> bool:
        """True if a provider bills more than is reserved.

        Args:
            tokens: that it bills; by default each byte, and its instructions where there are tools or a schema.
        """
        billed = len(self.data) + self.target.token_rules.tool_tokens * self.size.tools if tokens is None else tokens
        pricing, rules = self.target.pricing, self.target.token_rules
        estimated = estimate_input_tokens(self.size, rules)
        reserved_tokens = worst_input_tokens(estimated, self.size, rules, self.target.name)
        assert pricing is not None
        reserved = pricing.worst_case(reserved_tokens, self.output_tokens, self.size)
        cost = pricing.cost(Usage(billed, self.output_tokens))
        assert cost is not None
        assert reserved is not None
        return cost.nano > reserved


def is_over(api: str, provider: str, body: Mapping[str, Any], tokens: int | None = None) -> bool:
    """True if the provider of a request that is not refused bills more than is reserved."""
    call = Sent.of(api, provider, body)
    assert call is not None
    return call.is_over(tokens)


def holders(value: Any) -> Iterator[dict[str, Any] | list[Any]]:
    """All objects and lists of a body."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from holders(inner)


KEYS = ["content", "text", "type", "role", "tools", "cache_control", "output", "input", "name", "arguments", "title"]
TYPES = ["text", "input_text", "message", "function", "tool_result", "x_output", "document", "namespace", "web_search"]
TEXTS = st.text(max_size=20) | st.sampled_from(["", "a", "Z9", "é", "漢字", "\ud83d", '"\\\n', "x y "]).flatmap(
    lambda text: st.integers(1, 400).map(lambda count: text * count)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), inner | st.sampled_from(TYPES), max_size=4)
    ),
    max_leaves=10,
)


def put(draw: st.DrawFn, body: dict[str, Any], value: Any) -> None:
    """Puts a value in any place of a body, as another one or instead of one."""
    found = list(holders(body))
    holder = found[draw(st.integers(0, len(found) - 1))]
    if isinstance(holder, list):
        holder.insert(draw(st.integers(0, len(holder))), value)
    else:
        holder[draw(st.sampled_from([*holder, *KEYS]) | st.text(max_size=8))] = value


@st.composite
def changed_bodies(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> tuple[str, str, dict[str, Any]]:
    api, provider, given_body = draw(st.sampled_from(ROUTES))
    body = copy.deepcopy(given_body)
    for _ in range(draw(st.integers(1, 3))):
        put(draw, body, draw(values))
    return api, provider, body


@more_examples(3)
@given(changed_bodies(VALUES), st.booleans())
def test_no_json_in_any_place_costs_a_provider_that_bills_each_byte_more_than_is_reserved(
    changed: tuple[str, str, dict[str, Any]], streamed: bool
) -> None:
    call = Sent.of(*changed, streamed=streamed)
    if call is not None and len(call.data) < BYTES_OF_SMALL_BODIES:
        assert not call.is_over()


LONG = st.sampled_from(["A1", "0", "漢", "é9"]).map(lambda text: text * 30_000)


@given(changed_bodies(st.one_of(LONG, LONG.map(lambda text: [text]), LONG.map(lambda text: {"zz": text}))))
def test_no_long_text_in_any_place_costs_more_than_is_reserved(changed: tuple[str, str, dict[str, Any]]) -> None:
    if (call := Sent.of(*changed)) is not None:
        long = "".join(text for text in texts(json.loads(call.data)) if len(text) > 10_000)
        # A letter of two or three bytes, of which there is a token, is not split.
        foreign = sum(len(letter.encode()) for letter in long if not letter.isascii())
        assert not call.is_over(len(long.encode()) - foreign // 5)


MANY: list[Any] = [None, [], {}, "", 0, [[]], {"role": "user", "content": ""}, {"type": "text", "text": ""}]


def test_no_row_of_empty_values_costs_more_than_is_reserved(subtests: pytest.Subtests) -> None:
    places: list[tuple[str, str, tuple[str | int, ...]]] = [
        ("chat", "chat", ("messages",)),
        ("chat", "anthropic", ("messages",)),
        ("chat", "chat", ("messages", 1, "content")),
        ("responses", "openai", ("input",)),
        ("responses", "openai", ("input", 0, "content")),
        ("responses", "openai", ("input", 3, "output")),
        ("messages", "anthropic", ("system",)),
        ("messages", "anthropic", ("messages",)),
        ("messages", "anthropic", ("messages", 0, "content")),
        ("messages", "anthropic", ("messages", 3, "content", 0, "content")),
    ]
    for api, provider, place in places:
        for value in MANY:
            with subtests.test(msg=f"{api} for {provider}: {place} {value}"):
                changed = copy.deepcopy(BODIES[api])
                holder: Any = changed
                for key in place:
                    holder = holder[key]
                holder += [value] * 2_000
                call = Sent.of(api, provider, changed)
                assert call is None or not call.is_over(max(0, len(call.data) - 2_000))  # of the texts of the body


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


SMUGGLED = "smuggled in lower case, " * 2_500
"""Words of which a tokenizer makes half as many tokens as they have bytes; a field that no rule knows has all."""


def with_field(api: str, *path: str | int, value: Any = SMUGGLED) -> dict[str, Any]:
    """A body with one more or another field."""
    body = copy.deepcopy(BODIES[api])
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return body


UNSEEN = [
    # API, provider, and the place of a field that no rule knows.
    ("responses", "openai", ("tools", 0, "zz")),
    ("responses", "openai", ("tools", 3, "tools", 0, "zz")),
    ("responses", "openai", ("input", 0, "zz")),
    ("responses", "openai", ("input", 0, "content", 0, "zz")),
    ("responses", "openai", ("input", 0, "content", 0, "role")),
    ("responses", "openai", ("input", 2, "status")),
    ("responses", "openai", ("input", 5, "tools", 0, "zz")),
    ("responses", "openai", ("reasoning", "zz")),
    ("responses", "openai", ("text", "zz")),
    ("responses", "openai", ("text", "format", "zz")),
    ("responses", "openai", ("text", "format", "type")),
    ("responses", "openai", ("client_metadata",)),
    ("messages", "anthropic", ("messages", 0, "zz")),
    ("messages", "anthropic", ("messages", 0, "content", 0, "zz")),
    ("messages", "anthropic", ("messages", 2, "content", 0, "zz")),
    ("messages", "anthropic", ("messages", 1, "content", 0, "source", "zz")),
    ("messages", "anthropic", ("tools", 1, "zz")),
    ("messages", "anthropic", ("metadata", "zz")),
    ("messages", "anthropic", ("thinking", "zz")),
    ("messages", "anthropic", ("output_config", "zz")),
    ("messages", "anthropic", ("tool_choice", "zz")),
    ("embeddings", "openai", ("task",)),
    ("chat", "chat", ("messages", 0, "zz")),
    ("chat", "chat", ("messages", 1, "content", 0, "role")),
    ("chat", "chat", ("params", "tools", 0, "function", "zz")),
    ("chat", "chat", ("params", "metadata", "zz")),
]


def test_a_field_that_no_rule_knows_counts_each_of_its_bytes(subtests: pytest.Subtests) -> None:
    for api, provider, place in UNSEEN:
        with subtests.test(msg=f"{api}: {place}"):
            assert not is_over(api, provider, with_field(api, *place), len(SMUGGLED))
            if len(place) > 1:  # on top of a body it is refused
                named = with_field(api, *place[:-1], SMUGGLED, value=None)
                assert not is_over(api, provider, named, len(SMUGGLED))


def test_what_a_provider_adds_by_itself_is_reserved(subtests: pytest.Subtests) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "zz": SMUGGLED}}
    many = [{"type": f"{kind}_20250124", "name": kind} for kind in ("bash", "memory", "text_editor", "computer")] * 5
    described = {"tools": [{"type": "function", "name": f"f{n}", "description": "X" * 2000} for n in range(20)]}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f0"}]}
    cases: list[tuple[str, str, dict[str, Any], int]] = [
        # As documented by Anthropic for each tool of computers: its definition, and instructions for it.
        ("messages", "anthropic", with_field("messages", "tools", value=many), len(many) * (735 + 499)),
        ("responses", "openai", {"input": "Hi", **described, "tool_choice": allowed}, 20 * 2000),
        ("responses", "openai", {"input": "Hi", "tools": [{**described["tools"][0], "name": "f"}] * 20}, 20 * 2000),
        ("responses", "openai", {"input": "Hi", "tools": [{"type": "local_shell"}] * 10}, 10 * 1000),
        ("responses", "openai", {"input": [{"type": "item_reference", "id": "msg_1"}]}, LINKED_FILE_TOKENS),
        ("embeddings", "openai", {"input": ["a"] * 100, "instruction": "Find " * 200}, 100 * 1000),
        ("embeddings", "openai", {"input": ["a"] * 100}, 100 * len("Find it.")),  # the agent's own
        ("embeddings", "openai", {"input": ["a"] * 100, "input_type": "query"}, 100 * 20),
        ("chat", "chat", {"messages": [{"role": "user", "content": [image]}]}, len(SMUGGLED)),
        ("chat", "chat", with_field("chat", "params", "functions", value=[{"name": "f", "zz": SMUGGLED}]), 60_000),
    ]
    for api, provider, body, tokens in cases:
        with subtests.test(msg=json.dumps(body)[:100]):
            assert not is_over(api, provider, body, tokens)


def test_a_translation_that_is_longer_than_what_was_sent_is_reserved(subtests: pytest.Subtests) -> None:
    variants = [{"properties": {f"P{n}_{m}": {"enum": ["A1" * 200]} for m in range(10)}} for n in range(10)]
    parameters = {"type": "object", "anyOf": variants}
    function = {"name": "f", "parameters": parameters}
    bodies = [
        (
            "chat",
            "anthropic",
            with_field("chat", "params", "tools", value=[{"type": "function", "function": function}]),
        ),
        ("responses", "chat", {"input": "Hi", "tools": [{"type": "function", **function}]}),
        ("messages", "chat", {**TRANSLATED["messages"], "tools": [{"name": "f", "input_schema": parameters}]}),
    ]
    for api, provider, body in bodies:
        with subtests.test(msg=f"{api} for {provider}"):
            call = Sent.of(api, provider, body)
            assert call is not None
            assert len(call.data) > 1.5 * len(encode_json(body))
            assert not call.is_over(2 * call.data.count(b"A1"))


HIDDEN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A1" * 50_000}}


def test_a_file_counts_as_one_only_where_a_provider_reads_it(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, str, tuple[str | int, ...], bool]] = [
        ("messages", "anthropic", ("messages", 0, "content", 0), True),
        ("messages", "anthropic", ("messages", 3, "content", 0, "content", 0), True),
        ("messages", "anthropic", ("messages", 0, "content", 0, "content"), False),
        ("messages", "anthropic", ("messages", 2, "content", 2, "input"), False),
        ("messages", "anthropic", ("metadata", "user_id"), False),
        ("messages", "anthropic", ("messages", 1, "content", 0, "source", "data"), False),
        ("responses", "openai", ("input", 0, "output"), False),
        ("responses", "openai", ("input", 2, "content"), False),
        ("responses", "openai", ("tools", 0, "parameters"), False),
        ("chat", "chat", ("params", "metadata", "a"), False),
    ]
    for api, provider, place, is_read in cases:
        with subtests.test(msg=f"{api}: {place}"):
            value = HIDDEN if isinstance(place[-1], int) else [HIDDEN]
            assert is_over(api, provider, with_field(api, *place, value=value), 100_000) == is_read


def test_an_hour_in_a_cache_is_reserved_wherever_it_is_asked_for(subtests: pytest.Subtests) -> None:
    hour, minutes = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral", "ttl": "5m"}
    places: list[tuple[str | int, ...]] = [
        ("cache_control",),
        ("system", 0, "cache_control"),
        ("messages", 0, "content", 0, "cache_control"),
        ("messages", 1, "content", 0, "cache_control"),
        ("messages", 1, "content", 1, "content", 0, "cache_control"),
        ("messages", 3, "content", 0, "cache_control"),
        ("tools", 0, "cache_control"),
    ]
    odd = {"ttl": "60m", "type": "ephemeral"}
    for place in places:
        for mark, ttl_s in ((hour, 3600), (odd, 3600), (minutes, 300)):
            with subtests.test(msg=f"{place} {mark}"):
                job = asked_for("messages", with_field("messages", *place, value=mark), "anthropic")
                assert job is not None
                assert assignment(job)[0].input_size().cache_ttl_s == ttl_s
    said = with_field("messages", "messages", 0, "content", value='{"cache_control":{"ttl":"1h"}}')
    job = asked_for("messages", said, "anthropic")
    assert job is not None
    assert assignment(job)[0].input_size().cache_ttl_s == 300


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("responses", "openai", {"input": [{"type": "tool_search_output", "tools": [{"type": "web_search"}]}]}, "input[0]"),
    ("responses", "openai", {"input": [{"role": "user", "content": "a", "tools": [{"type": "mcp"}]}]}, "input[0]"),
    ("responses", "openai", {"input": [{"type": "new_thing"}]}, "input[0].type"),
    ("responses", "openai", {"input": [{"role": "user", "content": [{"type": "new"}]}]}, "input[0].content[0].type"),
    ("messages", "anthropic", with_field("messages", "tools", value=[{"type": "bash_code_execution"}]), "tools[0]"),
    ("chat", "chat", {"messages": [{"role": "user", "content": [{"type": "document_url"}]}]}, "messages.0.content.0"),
]


def test_what_may_cost_more_than_its_tokens_is_refused_under_any_cap(subtests: pytest.Subtests) -> None:
    caps: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        ({"budget": {"daily_usd": 1, "enforcement": "hard"}}, {}, True),
        ({"max_cost_usd": 1}, {}, True),
        ({"guard": {"max_cost_usd": 1}}, {}, True),
        ({}, {"guard": {"max_cost_usd": 1}}, True),
        ({}, {}, False),
        ({"budget": {"daily_usd": 1, "enforcement": "soft"}}, {}, False),
        (
            {"budget": {"daily_usd": 1, "enforcement": "hard"}, "allowed_params": ["input", "tools", "messages"]},
            {},
            False,
        ),
    ]
    for api, provider, body, path in REFUSED:
        for agent, more, refused in caps:
            with subtests.test(msg=f"{path} {agent} {more}"):
                config = CONFIG.model_dump(mode="json", include={"providers", "models"})
                config = Config.model_validate({**config, "agents": {"a": {"model": f"{provider}/m", **agent}}})
                given_body = body if api == "chat" else {"api_request": {"api": api, "body": body}}
                problem = validate_job(
                    config, config.limit_table, Job.model_validate({"agent": "a", **given_body, **more})
                )
                assert (problem is not None and path in problem.path) == refused


def test_a_prediction_is_reserved_at_the_price_of_the_output() -> None:
    body = copy.deepcopy(BODIES["chat"])
    body["params"]["prediction"] = {"type": "content", "content": "X" * 5_000}
    job = asked_for("chat", body, "chat")
    assert job is not None
    assert assignment(job)[0].parameters.max_output_tokens >= 1000 + 5_000


async def test_a_call_that_every_byte_is_billed_of_costs_no_more_than_is_reserved_and_no_cap_is_passed(
    start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        billed = {"input_tokens": len(await request.read()), "output_tokens": 1}
        chat = {"prompt_tokens": billed["input_tokens"], "completion_tokens": 1}
        said = [{"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}]
        answers: dict[str, dict[str, Any]] = {
            "completions": {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": chat},
            "responses": {"status": "completed", "output": said, "usage": billed},
            "messages": {"content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn", "usage": billed},
            "embeddings": {"data": [{"index": n, "embedding": [1.5] * 8} for n in range(2)], "usage": chat},
        }
        return web.json_response(answers[request.path.rpartition("/")[2]])

    caps = {"fits": {"guard": {"max_cost_usd": "0.25"}}, "tight": {"guard": {"max_cost_usd": "0.05"}}}
    agents = {
        f"{provider}-{name}": {"model": f"{provider}/m", "max_tokens": 100, **cap}
        for provider in ("chat", "openai", "anthropic")
        for name, cap in caps.items()
    }
    fields_unseen = [case for case in UNSEEN if case[2] in {("input", 0, "zz"), ("messages", 0, "zz"), ("task",)}]
    async with answering(answer) as origin:
        providers = {
            "chat": {"base_url": f"{origin}/v1"},
            "openai": {"base_url": f"{origin}/v1", "api": "responses"},
            "anthropic": {"kind": "anthropic", "base_url": f"{origin}/v1"},
        }
        prices = {f"{name}/m": {"price": PRICE} for name in providers}
        async with start_worker({"sim/m": model()}, agents, more_providers=providers, more_models=prices) as plane:
            for api, provider, place in fields_unseen:
                body = with_field(api, *place)
                job = body if api == "chat" else {"api_request": {"api": api, "body": body}}
                with subtests.test(msg=f"{api}: {place}"):
                    sent = await plane.run({"agent": f"{provider}-fits", "job_id": f"{api}-fits", **job})
                    refused = await plane.run({"agent": f"{provider}-tight", "job_id": f"{api}-tight", **job})
                    [attempt] = await plane.messages("EVENTS", f"bw.attempts.{provider}-fits.{api}-fits.*")
                    assert (sent["status"], attempt["input_tokens"] > len(SMUGGLED)) == ("succeeded", True)
                    assert float(attempt["cost"]) <= float(attempt["reserved"]) < 0.25
                    assert (refused["reason"], refused["total_cost"]) == ("guard_tripped", "0.000000000")
