"""Input schemas of tools as OpenAI's and Anthropic's APIs accept them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.dialects.rules.native_requests import conversation_of, for_chat, params_of
from breakwater.dialects.rules.tool_schemas import anthropic_tool, portable_function, portable_params
from breakwater.jobs.contract.job import Job

EMPTY = {"type": "object", "properties": {}}
TEXT = {"type": "string"}
PATH = {"type": "object", "properties": {"path": TEXT}}
COMPLETED: list[tuple[Any, dict[str, Any]]] = [
    (None, EMPTY),
    ({}, EMPTY),
    (True, EMPTY),
    ("object", EMPTY),
    ({"type": "object"}, EMPTY),
    ({"type": None}, EMPTY),
    ({"type": ["object", "null"]}, EMPTY),
    ({"type": "object", "properties": None}, EMPTY),
    ({"type": "object", "properties": []}, EMPTY),
    ({"type": "object", "properties": {}, "required": None}, EMPTY),
    ({"properties": {"path": TEXT}}, PATH),
    ({"type": "object", "additionalProperties": True}, {**EMPTY, "additionalProperties": True}),
    ({"type": "object", "properties": {"all": {"type": "array"}}},
     {"type": "object", "properties": {"all": {"type": "array", "items": {}}}}),
    ({"type": "object", "properties": {"all": {"type": ["array", "null"]}}},
     {"type": "object", "properties": {"all": {"type": ["array", "null"], "items": {}}}}),
    ({"type": "object", "properties": {"rows": {"type": "array", "items": {"type": "array"}}}},
     {"type": "object", "properties": {"rows": {"type": "array", "items": {"type": "array", "items": {}}}}}),
    ({"type": "object", "properties": {"two": {"type": "array", "items": [TEXT, TEXT]}}},
     {"type": "object", "properties": {"two": {"type": "array", "prefixItems": [TEXT, TEXT], "items": {}}}}),
    ({"type": "object", "properties": {"age": {"type": "number", "minimum": 0, "exclusiveMinimum": True}}},
     {"type": "object", "properties": {"age": {"type": "number", "exclusiveMinimum": 0}}}),
    ({"type": "object", "properties": {"age": {"type": "number", "minimum": 0, "exclusiveMinimum": False}}},
     {"type": "object", "properties": {"age": {"type": "number", "minimum": 0}}}),
    ({"type": "object", "properties": {"path": {"type": "string", "required": True}}}, PATH),
    ({"$ref": "#/$defs/Path", "$defs": {"Path": PATH}}, {**PATH, "$defs": {"Path": PATH}}),
    ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"properties": {"path": TEXT}}}},
     {**PATH, "definitions": {"a/b": {"properties": {"path": TEXT}}}}),
]  # fmt: skip
UNCHANGED: list[dict[str, Any]] = [
    PATH,
    {"$schema": "https://json-schema.org/draft-07/schema#", **PATH},
    {**PATH, "required": ["path"], "additionalProperties": False},
    {"type": "object", "properties": {"one": {"anyOf": [TEXT, {"type": "null"}]}, "free": {"type": "object"}}},
    {"type": "object", "properties": {"type": TEXT, "items": TEXT, "required": {"type": "boolean"}}},
]


def test_what_a_schema_leaves_out_is_completed_and_means_the_same(subtests: pytest.Subtests) -> None:
    for schema, completed in COMPLETED:
        with subtests.test(json.dumps(schema)):
            assert portable_function({"name": "f", "parameters": schema}) == {"name": "f", "parameters": completed}
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            assert anthropic_tool(tool) == {"name": "f", "input_schema": completed}
    for schema in UNCHANGED:
        with subtests.test(json.dumps(schema)):
            assert portable_function({"name": "f", "parameters": schema})["parameters"] == schema
    assert portable_function({"name": "f"})["parameters"] == EMPTY


def test_what_is_composed_at_the_top_is_merged_and_described(subtests: pytest.Subtests) -> None:
    one, two = (
        {"properties": {"path": TEXT}, "required": ["path"]},
        {"properties": {"url": TEXT, "path": {"type": "null"}}},
    )
    for name, required in (("anyOf", []), ("oneOf", []), ("allOf", ["path"])):
        schema = {"type": "object", "properties": {"mode": TEXT}, "required": ["mode"], name: [one, two]}
        with subtests.test(name):
            function = portable_function({"name": "f", "description": "Reads.", "parameters": schema})
            assert function["parameters"] == {
                "type": "object",
                "properties": {"path": {"anyOf": [TEXT, {"type": "null"}]}, "url": TEXT, "mode": TEXT},
                "required": ["mode", *required],
            }
            words = "Reads.\n\nThe arguments must also satisfy this JSON schema: "
            assert json.loads(function["description"].removeprefix(words)) == {name: [one, two]}
    alternatives = {"anyOf": [{"required": ["route"]}, {"required": ["file"]}]}
    function = portable_function({"name": "f", "parameters": {**PATH, **alternatives}})
    assert function["parameters"] == PATH
    assert json.dumps(alternatives["anyOf"], separators=(",", ":")) in function["description"]
    referring = {"oneOf": [{"$ref": "#/$defs/Path"}, {"$ref": "#/$defs/None"}], "$defs": {"Path": PATH}}
    assert portable_function({"name": "f", "parameters": referring})["parameters"]["properties"] == {"path": TEXT}


def test_a_strict_schema_is_enforced_and_stays_as_it_is_written() -> None:
    schema = {"type": "object", "properties": {}, "anyOf": [PATH]}
    assert portable_function({"name": "f", "strict": True, "parameters": schema})["parameters"] == schema


def test_without_tools_nothing_is_said_of_their_choice() -> None:
    none: list[Any] = [[], None]
    for tools in none:
        params: dict[str, Any] = {"tools": tools, "tool_choice": "none", "parallel_tool_calls": False, "temperature": 1}
        assert portable_params(params) == {"temperature": 1}
    custom = {"type": "custom", "custom": {"name": "f"}}
    assert portable_params({"tools": [custom], "tool_choice": "auto"}) == {"tools": [custom], "tool_choice": "auto"}


def test_a_tool_without_arguments_is_translated_for_every_api() -> None:
    asked: dict[str, dict[str, Any]] = {
        "messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
        "responses": {"input": "a"},
    }
    for schema in ({"type": "object"}, {}, None):
        tools: dict[str, dict[str, Any]] = {
            "messages": {"name": "f", "input_schema": schema},
            "responses": {"type": "function", "name": "f", "parameters": schema},
        }
        for api, body in asked.items():
            job = Job.model_validate(
                {"agent": "a", "api_request": {"api": api, "body": {**body, "tools": [tools[api]]}}}
            )
            _, params = for_chat(job, conversation_of(job), params_of(job))
            assert params["tools"] == [{"type": "function", "function": {"name": "f", "parameters": EMPTY}}]
            native = job.api_request.body["tools"] if job.api_request else None
            assert native == [tools[api]], "a provider of the same API gets it as it is"
    choice = {"tools": [], "tool_choice": {"type": "auto"}}
    job = Job.model_validate(
        {"agent": "a", "api_request": {"api": "messages", "body": {**asked["messages"], **choice}}}
    )
    _, params = for_chat(job, conversation_of(job), params_of(job))
    assert "tool_choice" not in params


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["object", "array", "#/$defs/a", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([
                "type", "properties", "items", "required", "anyOf", "allOf", "$ref", "$defs", "a", "enum", "minimum",
                "exclusiveMinimum", "additionalProperties", "not",
            ]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None)
@given(JSON)
def test_any_schema_is_taken_and_taken_again_as_it_is(schema: Any) -> None:
    function = portable_function({"name": "f", "parameters": schema})
    parameters = function["parameters"]
    if parameters["type"] == "object":
        assert isinstance(parameters["properties"], dict)
        assert not {"anyOf", "allOf", "oneOf", "not", "enum"}.intersection(parameters)
    assert portable_function(function) == function
