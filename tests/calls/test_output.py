from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from breakwater.calls.rules.output import Invalid, OutputGuard, Valid, correction_message
from breakwater.calls.settings import OutputRules, built_in_schemas
from breakwater.config import parse_config
from breakwater.kernel.errors import ConfigError
from tests.tables import each_row

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["x"],
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "anyOf": [
                {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}, "a": {"const": 1}}},
                {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}, "b": {"const": 1}}},
            ]
        }
    },
    "$ref": "#/$defs/node",
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


def guard(schema: Any, **rules: Any) -> OutputGuard:
    return OutputGuard.compile(OutputRules(schema=schema, **rules))


def problems(found: Valid | Invalid) -> tuple[str, ...]:
    assert isinstance(found, Invalid)
    return found.problems


LOOSE, STRICT = guard(POINT), guard(POINT, strict=True)


@each_row("checked", [LOOSE, STRICT], ids=["loose", "strict"])
@each_row(
    "said",
    [
        '{"x": 1}',
        '  {"x": 1}\n',
        '\ufeff{"x": 1}',
        '```json\n{"x": 1}\n```',
        '```\n{"x": 1}\n```\n',
        '```JSON\n  {"x":\n1}\n  ```',
        '```json {"x": 1} ```',
        '```{"x": 1}```',
    ],
)
def test_json_alone_or_in_a_fenced_block_is_an_answer(checked: OutputGuard, said: str) -> None:
    assert checked.check(said) == Valid({"x": 1})


@each_row(
    "said",
    [
        'Here you are: {"x": 1}',
        'Sure!\n```json\n{"x": 1}\n```\nAnything else?',
        '```python\nprint({"y": 2})\n```\nand so\n```json\n{"x": 1}\n```',
        '{"x": 1}\nHope this helps! {"x": 2}',
        'In {braces} and [1] and `{ … }`: the answer is {"x": 1}.',
        'First {"oops}": }, then {"x": 1}',
        'The set {"a", "b"} has {"x": 1}',
        '```\nno end {"x": 1}',
    ],
)
def test_text_around_it_is_taken_only_where_the_agent_is_not_strict(said: str) -> None:
    assert LOOSE.check(said) == Valid({"x": 1})
    assert isinstance(STRICT.check(said), Invalid)


def test_braces_and_fences_within_strings_are_text() -> None:
    value = {"x": 1, "code": '```json\n{"y": 2}\n``` } ] \\" {'}
    for said in (json.dumps(value), f"So: {json.dumps(value)} .", f"```json\n{json.dumps(value, indent=2)}\n```"):
        assert LOOSE.check(said) == Valid(value)


@each_row(
    ("said", "words"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("I don't know.", "has no JSON in it"),
        ('{"x": 1', "is not JSON: expecting ',' delimiter (line 1, column 8)"),
        ('{"x": {"x": 1}, "tags": ["cut o', "is not JSON: unterminated string"),
        ('Here: {"tags": [{"x": 1}, {"x": 2}', "has no JSON in it"),
        ("{'x': 1}", "is not JSON: expecting property name"),
        ('{"x": 1, "x": 2}', "has the property 'x' twice in one object"),
        ('{"x": NaN}', "has a number that JSON does not know"),
        ('{"x": -Infinity}', "has a number that JSON does not know"),
        ('{"x": 1e999}', "has a number that JSON does not know"),
        ('{"x": ' + "9" * 5000 + "}", "has a number with too many digits"),
        ("[" * 100_000, "is nested deeper than 100 levels"),
        ('{"x":' * 100_000, "is nested deeper than 100 levels"),
        ("[" * 102 + "]" * 102, "is nested deeper than 100 levels"),
    ],
)
def test_what_is_no_json_is_reported(said: str, words: str) -> None:
    [problem] = problems(LOOSE.check(said))
    assert problem.startswith(f"$: {words}")


def test_a_list_within_prose_is_no_answer_where_an_object_is_asked_for() -> None:
    assert LOOSE.check('As [1] says: {"x": 1}') == Valid({"x": 1})
    assert guard({"type": "array"}).check('{"x": 1}') == Invalid(("$: should be array, is object",))
    assert guard({"type": "array"}).check('of {"x": 1} there are [1, 2]') == Valid([1, 2])
    assert guard({}).check("of these, [1] is the first") == Valid([1])


def test_a_string_may_stand_without_quotes_where_a_string_is_asked_for() -> None:
    words = guard({"type": "string", "enum": ["yes", "no"]})
    assert words.check('"yes"') == words.check("yes") == Valid("yes")
    assert problems(words.check("maybe")) == ('$: should be one of ["yes", "no"]',)
    assert guard({"type": "string"}).check("42") == Valid("42")


@settings(deadline=None)
@given(JSON)
def test_every_json_value_comes_back_as_it_was(value: Any) -> None:
    anything = guard({})
    text = json.dumps(value)
    assert anything.check(text) == Valid(value)
    assert anything.check(f"```json\n{text}\n```") == Valid(value)
    if not isinstance(value, str):
        assert anything.check(value) == Valid(value)
    if isinstance(value, dict | list):
        assert anything.check(f"I say: {text} and no more.") == Valid(value)


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from('{}[]",:`\\n\n a1-tf'), max_size=80))
def test_no_text_makes_the_check_fail(said: str) -> None:
    found = LOOSE.check(said)
    if isinstance(found, Valid):
        assert json.loads(json.dumps(found.value)) == found.value
    strict = STRICT.check(said)
    if isinstance(strict, Valid):
        assert found == strict


SIZE = 100_000


@each_row(
    "unit",
    [
        "{",
        "[",
        '{"',
        '{"a',
        '["',
        '{"a":',
        '{"a"}',
        "{} ",
        "```",
        "```\n",
        "a```x\n",
        '```["',
        '{"\\"',
        '"',
        "\\",
        '\\"',
        "[1]",
        "[[",
        "{\n",
    ],
)
def test_a_long_text_of_anything_is_searched_in_time(unit: str) -> None:
    said = unit * (SIZE // len(unit)) + "\\"
    started = time.process_time()
    for checked in (LOOSE, guard({})):
        checked.check(f"x {said}")
        checked.check(f'x {{"{said}')
    assert time.process_time() - started < 10, "a quadratic search takes minutes"


@each_row(
    ("schema", "value", "problem"),
    [
        (POINT, {"x": "1"}, "$.x: should be number, is string"),
        (POINT, {}, "$: is missing 'x'"),
        (POINT, {"x": 1, "tags": ["a", 5]}, "$.tags[1]: should be string, is number"),
        ({"type": ["string", "null"]}, True, "$: should be string or null, is boolean"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 5, "$: should be string or null, is number"),
        ({"type": "integer", "minimum": 0}, -1, "$: should be at least 0"),
        ({"type": "number", "exclusiveMaximum": 1}, 1, "$: should be less than 1"),
        ({"type": "array", "maxItems": 1}, [1, 2], "$: should have at most 1 items"),
        ({"type": "array", "uniqueItems": True}, [1, True, "1"], None),
        ({"type": "array", "uniqueItems": True}, [{"a": [1]}, {"a": [1.0]}], "$: has an item twice"),
        ({"items": {"pattern": "^[a-z]+$"}}, ["ok", "No"], '$[1]: should match the regular expression "^[a-z]+$"'),
        ({"enum": ["a", None]}, "c", '$: should be one of ["a", null]'),
        ({"const": {"a": 1}}, "c", '$: should be {"a": 1}'),
        ({"properties": {"a": True}, "additionalProperties": False}, {"a": 1, "b": 2}, "$: may not have 'b'"),
        ({"properties": {"a": False}}, {"a": 1}, ": is not allowed"),
        ({"not": {"type": "null"}}, None, '$: does not satisfy `not`: {"type": "null"}'),
        ({"oneOf": [{"type": "number"}, {"minimum": 0}]}, 1, "$: matches more than one of the allowed forms"),
        (
            {
                "oneOf": [
                    {"properties": {"k": {"const": 1}, "v": {"type": "string"}}, "required": ["v"]},
                    {"type": "null"},
                ]
            },
            {"k": 1, "v": 5},
            "$.v: should be string, is number",
        ),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, "$: is missing 'b'"),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, '$: does not satisfy `dependentRequired`: {"a": ["b"]}'),
        (
            {"unevaluatedProperties": False, "properties": {"a": True}},
            {"b": 1},
            "$: has properties that the schema does not define",
        ),
        ({"properties": {"it's": {"type": "null"}}}, {"it's": 1}, "should be null, is number"),
        ({"multipleOf": 0.01}, 10**400, "$: is too deep or too complex to check"),
    ],
)
def test_a_problem_names_the_place_and_what_would_be_right(schema: Any, value: Any, problem: str | None) -> None:
    found = guard(schema).check(json.dumps(value) if isinstance(value, str) else value)
    assert found == Valid(value) if problem is None else problem in problems(found)[0]


def test_at_most_ten_problems_are_reported_and_each_once() -> None:
    found = guard({"items": {"type": "string"}}).check(list(range(50)))
    assert problems(found) == tuple(f"$[{index}]: should be string, is number" for index in range(10))
    both = guard({"type": "object", "required": ["a", "b"]}).check({})
    assert problems(both) == ("$: is missing 'a', 'b'",)


CLOSED = guard({"additionalProperties": False})


@settings(deadline=None)
@given(
    st.text(min_size=1, max_size=300),
    st.sampled_from([guard(POINT), CLOSED, guard({"additionalProperties": {"maxLength": 0}})]),
)
@example("\U00107d8c" * 30, CLOSED)
def test_hardly_anything_of_the_answer_is_repeated(words: str, rules: OutputGuard) -> None:
    value = {f"<{words}>": f"<{words}>", "x": f"<{words}>"}
    for problem in problems(rules.check(value)):
        assert len(problem) < 200 + 60
    for problem in problems(LOOSE.check(f'{{"{"k" * 300}": 1, "{"k" * 300}": 2}}')):
        assert problem.count("k") <= 40


def test_a_deep_answer_to_a_recursive_schema_is_checked_or_refused() -> None:
    schema = {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["name"]}
    value: dict[str, Any] = {"name": "leaf"}
    for _ in range(20):
        value = {"name": "n", "child": value}
    assert guard(schema).check(value) == Valid(value)
    for _ in range(75):
        value = {"name": "n", "child": value}
    assert isinstance(guard(schema).check(value), Valid | Invalid)
    for _ in range(5000):
        value = {"child": value}
    assert problems(guard(schema).check(value)) == ("$: is nested deeper than 100 levels",)


def test_alternatives_within_alternatives_do_not_take_for_ever() -> None:
    value: dict[str, Any] = {"a": 2, "b": 2}
    for _ in range(25):
        value = {"child": value, "a": 1, "b": 1}
    started = time.process_time()
    assert problems(guard(TREE).check(value)) == ("$: is too deep or too complex to check",)
    assert guard(TREE).check({"child": {"a": 1}}) == Valid({"child": {"a": 1}}), "the next one has its own steps"
    assert time.process_time() - started < 30


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_a_mistake_deep_in_a_tree_of_alternatives_is_found(keyword: str) -> None:
    child = {"$ref": "#/$defs/node"}
    kinds = [{"type": "object", "properties": {"kind": {"const": name}, "child": child}} for name in ("a", "b", "c")]
    tree = guard({"$defs": {"node": {keyword: [*kinds, {"type": "string"}]}}, "$ref": "#/$defs/node"})
    value: dict[str, Any] = {"kind": "c", "child": "leaf"}
    for _ in range(12):
        value = {"kind": "c", "child": value}
    assert tree.check(value) == Valid(value)
    wrong: dict[str, Any] = {"kind": "c", "child": 5}
    for _ in range(3):
        wrong = {"kind": "c", "child": wrong}
    assert problems(tree.check(wrong)) == ("$.child.child.child.child: should be object or string, is number",)


def test_a_regular_expression_cannot_be_made_to_take_for_ever() -> None:
    assert isinstance(guard({"pattern": "^(a+)+$"}).check('"' + "a" * 5000 + '!"'), Invalid)


def test_many_objects_are_compared_in_time() -> None:
    many = [{"n": number, "of": ["a", {"b": number}]} for number in range(5_000)]
    started = time.process_time()
    assert guard({"uniqueItems": True}).check([*many, {"of": ["a", {"b": 7.0}], "n": 7}]) == Invalid(
        ("$: has an item twice",)
    )
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "content": [{"type": "text", "text": "no JSON"}, {"type": "tool_use", "id": "a"}]},
    ],
)
def test_a_message_that_calls_tools_passes_as_it_is(message: dict[str, Any]) -> None:
    assert STRICT.check(message) == Valid(message)


def test_the_text_of_a_message_is_its_answer() -> None:
    assert LOOSE.check({"role": "assistant", "content": '{"x": 1}'}) == Valid({"x": 1})
    parts = [{"type": "text", "text": '{"x":'}, {"type": "text", "text": " 1}"}]
    assert LOOSE.check({"role": "assistant", "content": parts}) == Valid({"x": 1})
    refusal = {"role": "assistant", "content": None, "refusal": "I'd rather not"}
    assert LOOSE.check(refusal) == Invalid(("$: is empty",))
    assert guard({"type": "object"}).check({"role": "assistant"}) == Valid({"role": "assistant"})
    calls = {"tool_calls": [1], "x": 1}
    assert LOOSE.check(calls) == Valid(calls), "the JSON of a program, not a message"


def test_what_a_program_gives_must_be_json_too() -> None:
    assert LOOSE.check({"x": 1}) == Valid({"x": 1})
    assert problems(LOOSE.check({"x": float("nan")})) == (
        "$: has a number that JSON does not know, such as NaN or Infinity",
    )
    assert problems(LOOSE.check(None)) == ("$: should be object, is null",)


def test_strict_closes_every_object_that_does_not_say_whether_it_is() -> None:
    schema = {
        "type": "object",
        "properties": {
            "open": {"type": "object", "additionalProperties": True},
            "map": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
            "list": {"type": "array", "items": {"properties": {"a": {"type": "string"}}}},
            "ref": {"$ref": "#/$defs/thing"},
            "other": {"not": {"type": "object", "properties": {"no": True}}, "enum": [{"type": "object"}]},
        },
        "$defs": {"thing": {"anyOf": [{"type": "object"}, {"type": "null"}]}},
    }
    before = json.dumps(schema)
    closed: Any = guard(schema, strict=True).schema
    assert json.dumps(schema) == before
    assert closed["additionalProperties"] is False
    properties = closed["properties"]
    assert properties["open"] == schema["properties"]["open"]
    assert properties["map"] == schema["properties"]["map"]
    assert properties["list"]["items"]["additionalProperties"] is False
    assert properties["other"] == schema["properties"]["other"]
    assert closed["$defs"]["thing"]["anyOf"][0]["additionalProperties"] is False
    assert problems(STRICT.check({"x": 1, "y": 2})) == ("$: may not have 'y'",)
    assert LOOSE.check({"x": 1, "y": 2}) == Valid({"x": 1, "y": 2})
    assert guard(schema).schema == schema


@each_row(
    ("schema", "strict", "fits"),
    [
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, True, True),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, False, False),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, True, False),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, True, False),
        ({"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}, "required": ["a"]}, True, False),
        ({"type": "array", "items": {"type": "string"}}, True, False),
        ({"type": "object", "additionalProperties": True}, True, False),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "required": ["a"],
                "$defs": {"a": {"enum": [1]}},
            },
            True,
            True,
        ),
        ("task_result", True, False),
        ("task_report", True, False),
    ],
)
def test_it_is_known_whether_openais_strict_mode_takes_a_schema(schema: Any, strict: bool, fits: bool) -> None:
    assert guard(schema, strict=strict).fits_strict_mode is fits


CONFIG = """
providers: {p: {base_url: "http://127.0.0.1:1/v1"}}
agents: {a: {model: p/m, output: OUTPUT}}
"""


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@each_row(
    ("output", "words"),
    [
        ({"schema": "tsk_result"}, "agents.a.output.schema: 'tsk_result' is not a ready schema; name one of agent_"),
        (
            {"schema": {"type": "object", "properties": {"n": {"type": "strng"}}}},
            "agents.a.output.schema: is not a JSON schema: $.properties.n.type: ",
        ),
        ({"schema": {"required": "a"}}, "is not a JSON schema: $.required: should be array, is string"),
        ({"schema": {"items": {"$ref": "https://example.com/s.json"}}}, "only references within this schema"),
        ({"schema": {"items": {"$ref": "other.json#/$defs/a"}}}, "only references within this schema"),
        ({"schema": {"items": {"$ref": "#/$defs/none"}}}, "$.items.$ref: '#/$defs/none' refers to no schema"),
        ({"schema": {"items": {"$ref": "#/x"}, "x": {"pattern": "("}}}, "$.items.$ref: '#/x' refers to no schema"),
        ({"schema": {"$defs": {"a": {"$id": "b"}}}}, "$.$defs.a.$id: is supported only at the root"),
        ({"schema": {"$ref": "#"}}, "endless reference to itself"),
        ({"schema": {"anyOf": [{"type": "string"}, {"$ref": "#"}]}}, "endless reference to itself"),
        ({"schema": {"pattern": "("}}, "$.pattern: '(' is not a regular expression that RE2 supports"),
        ({"schema": {"pattern": "(?=a)"}}, "$.pattern: '(?=a)' is not a regular expression that RE2 supports"),
        ({"schema": {"patternProperties": {"^a": {}}}}, "$.patternProperties: is not supported; write `prop"),
        ({"schema": {"items": {"$dynamicRef": "#a"}}}, "$.items.$dynamicRef: is not supported; write `$ref`"),
        ({"schema": {"allOf": [{}]}, "strict": True}, "agents.a.output.strict: does not go with `allOf` (at $)"),
        (
            {"schema": {"items": {"properties": {}, "anyOf": [{}]}}, "strict": True},
            "agents.a.output.strict: does not go with `properties` next to `anyOf` (at $.items)",
        ),
        ({"schema": "task_result", "max_corrections": 11}, "agents.a.output.max_corrections: "),
        ({"strict": True}, "agents.a.output.schema: is missing"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_rules_is_named_by_its_path(output: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(CONFIG.replace("OUTPUT", json.dumps(output)))
    assert words in str(caught.value)
    assert "1 mistake" in str(caught.value)


def test_rules_from_the_config_are_compiled() -> None:
    rules = parse_config(CONFIG.replace("OUTPUT", "{schema: agent_decision, strict: true}")).agents["a"].output
    assert rules is not None
    assert OutputGuard.compile(rules).rules is rules
    with pytest.raises(ValidationError):
        OutputRules.model_validate({"schema": {"type": 5}})
    with pytest.raises(ValueError, match="ready schema"):
        OutputGuard.compile(OutputRules.model_construct(schema_="none"))


def test_words_in_data_are_no_keywords() -> None:
    schema = {
        "properties": {"$ref": {"type": "string"}, "pattern": {"const": {"$ref": "http://x"}}},
        "default": {"pattern": "("},
    }
    assert guard(schema).check({"$ref": "http://x"}) == Valid({"$ref": "http://x"})


def test_the_guard_is_not_changed_through_the_rules() -> None:
    schema = json.loads(json.dumps(POINT))
    rules = OutputRules(schema=schema)
    compiled = OutputGuard.compile(rules)
    schema["properties"]["x"]["type"] = "string"
    assert compiled.check({"x": 1}) == Valid({"x": 1})


def test_the_ready_schemas_are_schemas_and_explain_their_fields() -> None:
    for name, schema in built_in_schemas().items():
        Draft202012Validator.check_schema(schema)
        properties: Any = schema["properties"]
        assert schema["title"] == name
        assert all(field["description"] for field in properties.values())
    assert built_in_schemas()["task_result"] is not built_in_schemas()["task_result"]


@pytest.mark.parametrize("strict", [False, True])
def test_the_ready_schemas_take_what_they_are_for(strict: bool) -> None:
    result = guard("task_result", strict=strict)
    for value in (
        {"success": True, "message": "Done.", "data": {"order": 4711}},
        {"success": False, "message": "", "data": None},
        {"success": True, "message": "Done."},
    ):
        assert result.check(json.dumps(value)) == Valid(value)
    assert problems(result.check({"success": "yes", "message": "Done."})) == (
        "$.success: should be boolean, is string",
    )
    assert problems(result.check({"success": True})) == ("$: is missing 'message'",)
    assert isinstance(result.check({"success": True, "message": "Done.", "data": [1]}), Invalid)
    report = guard("task_report", strict=strict)
    full = {
        "status": "partial",
        "summary": "Half of it.",
        "result": {"any": ["thing"]},
        "artifacts": [{"name": "report", "uri": "s3://b/r.md"}],
        "errors": [{"message": "no access", "recoverable": True}],
    }
    for value in (full, {"status": "success", "summary": "Done."}):
        assert report.check(json.dumps(value)) == Valid(value)
    assert isinstance(report.check({"status": "done", "summary": "Done."}), Invalid)
    decision = guard("agent_decision", strict=strict)
    value = {
        "action": "stop",
        "reasoning": "all done",
        "confidence": 0.9,
        "arguments": {"now": True},
        "alternatives": [],
    }
    assert decision.check(value) == Valid(value)
    assert problems(decision.check(value | {"confidence": 1.5})) == ("$.confidence: should be at most 1",)
    assert problems(decision.check({"action": "stop", "reasoning": ""})) == ("$: is missing 'confidence'",)


def test_a_correction_says_what_was_wrong_and_what_to_do() -> None:
    message = correction_message(("$.x: should be number, is string", "$: is missing 'y'"))
    assert message["role"] == "user"
    text = str(message["content"])
    assert "- $.x: should be number, is string\n- $: is missing 'y'\n" in text
    assert "nothing but JSON" in text
