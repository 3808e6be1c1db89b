"""What is wrong with a body, in words."""

import json

import pytest

from breakwater.dialects.api.errors import openai_param
from breakwater.jobs.api.submission import submission
from breakwater.jobs.contract.job import Job
from breakwater.kernel.http import parsing
from breakwater.kernel.http.parsing import MAX_DETAILS
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.json_values import with_field
from breakwater.redaction.settings import RedactionRules
from tests.tables import each_row

NEW_ID = "019aa8f2-0000-7000-8000-000000000000"


def read_job(body: bytes) -> Job:
    return parsing.read_job(body, Job, "job")


def problem_of(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_job(body)
    return caught.value


def payload_of(body: bytes, key: str | None = None) -> dict[str, object]:
    return json.loads(submission(read_job(body), body, idempotency_key=key, generated_id=NEW_ID).payload)


@each_row(
    ("body", "said"),
    [
        (b"", "it is empty"),
        (b"agent=writer", "line 1 column 1"),
        (b'{"agent": "writer",\n "prompt": }', "line 2 column 12"),
        (b'{"agent": "writer", "prompt": "x"} x', "trailing characters"),
        (b'\xef\xbb\xbf{"agent": "writer", "prompt": "x"}', "byte order mark"),
        (b'{"agent": "writer", "prompt": "x", "params": {"t": NaN}}', "NaN"),
        (b'{"agent": "writer", "prompt": "x", "params": {"t": 1e999}}', "the number 1e999 is too large"),
        (b'{"agent": "writer", "prompt": "x", "params": {"t": -1E400}}', "the number -1E400 is too large"),
        (b'{"agent": "writer", "prompt": "x", "agent": "other"}', "the key 'agent' occurs twice in one object"),
        (b'{"agent": "writer", "prompt": "x", "params": {"a": [{"b": 1, "b": 1}]}}', "the key 'b'"),
        (b'{"agent": "writer", "prompt": "x", "params": {"t": -Infinity}}', "-Infinity"),
        (b'{"agent": "writer", "input": ' + b"[" * 5000 + b"]" * 5000 + b"}", "recursion"),
        (b'{"agent": "writer", "input": ' + b"1" * 5000 + b"}", "line 1"),
    ],
)
def test_what_is_not_json_is_reported_with_its_place(body: bytes, said: str) -> None:
    problem = problem_of(body)
    assert (problem.status, problem.code) == (400, "not_json")
    assert said in problem.message


def test_the_words_nan_and_infinity_may_be_written_in_a_prompt() -> None:
    assert read_job(b'{"agent": "writer", "prompt": "NaN and -Infinity"}').prompt == "NaN and -Infinity"


def test_half_of_a_surrogate_pair_is_read_as_a_replacement_character() -> None:
    assert read_job(rb'{"agent": "writer", "prompt": "ok \ud83d"}').prompt == "ok \ufffd"
    assert read_job(rb'{"agent": "writer", "input": {"\ude00": "\\ud83d"}}').input == {"\ufffd": "\\ud83d"}
    assert problem_of(rb'{"agent": "writer", "prompt": "\ud83d" x}').code == "not_json"
    assert problem_of(rb'{"agent": "writer", "prompts": "\ud83d"}').details[0].path == "prompts"


def test_what_is_not_utf8_is_reported_with_the_byte() -> None:
    problem = problem_of(b'{"agent": "writer", "prompt": "caf\xe9"}')
    assert (problem.status, problem.code) == (400, "not_utf8")
    assert "byte 34 is 0xe9" in problem.message


@each_row(
    ("body", "path", "said"),
    [
        ([], "", "object"),
        ({"prompt": "x"}, "agent", "is missing"),
        ({"agent": 5, "prompt": "x"}, "agent", "string"),
        ({"agent": "a\n", "prompt": "x"}, "agent", "must not contain control characters"),
        ({"agent": "w", "promt": "x"}, "promt", "did you mean 'prompt'"),
        ({"agent": "w"}, "", "exactly one of prompt, messages, input and api_request"),
        ({"agent": "w", "prompt": "x", "input": 1}, "", "found prompt and input"),
        ({"agent": "w", "prompt": " \n"}, "prompt", "is empty"),
        ({"agent": "w", "prompt": ""}, "prompt", "is empty"),
        ({"agent": "w", "messages": []}, "messages", "is empty"),
        (
            {"agent": "w", "messages": [{"role": "user", "content": " "}] * 2},
            "messages",
            "all of them are empty",
        ),
        ({"agent": "w", "messages": [{"role": "user", "content": []}]}, "messages", "all of them are empty"),
        ({"agent": "w", "messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"agent": "w", "messages": [{"content": "x"}]}, "messages.0.role", "is missing"),
        ({"agent": "w", "messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string, or should be"),
        ({"agent": "w", "messages": [{"role": "user", "content": {}}]}, "messages.0.content", "string, or should be"),
        ({"agent": "w", "prompt": "x", "total_timeout_s": -1}, "total_timeout_s", "greater than 0"),
        ({"agent": "w", "prompt": "x", "reply_to": "a b"}, "reply_to", "pattern"),
        ({"agent": "w", "prompt": "x", "job_id": "j" * 129}, "job_id", "at most 128"),
    ],
)
def test_what_is_not_a_job_is_reported_with_its_path(body: object, path: str, said: str) -> None:
    problem = problem_of(json.dumps(body).encode())
    assert (problem.status, problem.code) == (422, "invalid_job")
    assert [detail.path for detail in problem.details if said in detail.message] == [path]
    assert said in problem.message


def test_many_mistakes_are_counted_and_the_first_of_them_listed() -> None:
    body = {"agent": "w", "messages": [{"role": "robot"}] * 50}
    problem = problem_of(json.dumps(body).encode())
    assert problem.message.startswith("50 errors; the first: messages.0.role")
    assert len(problem.details) == MAX_DETAILS


def test_a_flood_of_mistakes_is_only_counted() -> None:
    problem = problem_of(b'{"agent": "w", "messages": [' + b"{}," * 100_000 + b"{}]}")
    assert "100,001 errors" in problem.message


def test_a_job_without_an_id_is_sent_on_byte_for_byte() -> None:
    body = b' {"agent":"w","prompt":"x","params":{"big":123456789012345678901234567890,"one":1.0,"e":"\\u00e9"}}'
    sent = submission(read_job(body), body, idempotency_key=None, generated_id=NEW_ID)
    assert (sent.payload, sent.job_id, sent.execution_id, sent.id_generated) == (body, NEW_ID, NEW_ID, True)


def test_a_job_with_an_id_is_sent_on_as_it_is() -> None:
    body = b'{"agent":"w","prompt":"x","job_id":"mine"}'
    sent = submission(read_job(body), body, idempotency_key="other", generated_id=NEW_ID)
    assert (sent.job_id, sent.payload, sent.id_generated) == ("mine", body, False)


def test_an_idempotency_key_becomes_the_id() -> None:
    body = b'{"agent":"w","prompt":"x","job_id":null}'
    sent = submission(read_job(body), body, idempotency_key='a "quoted" key', generated_id=NEW_ID)
    assert (sent.payload, sent.job_id, sent.execution_id) == (body, *['a "quoted" key'] * 2)


@each_row("key", ["", "k" * 129, "tab\t", "caf\u00e9", "end\n"])
def test_an_idempotency_key_that_can_be_no_id_is_refused(key: str) -> None:
    body = b'{"agent":"w","prompt":"x"}'
    with pytest.raises(RequestError, match="printable ASCII") as caught:
        submission(read_job(body), body, idempotency_key=key, generated_id=NEW_ID)
    assert caught.value.status == 422


def test_an_idempotency_key_that_a_pattern_of_the_config_matches_is_refused() -> None:
    body = b'{"agent":"w","prompt":"x"}'
    rules = RedactionRules(patterns=(r"CUST-\d{6}",))
    with pytest.raises(RequestError, match="matches one of redaction") as caught:
        submission(read_job(body), body, idempotency_key="of CUST-123456", generated_id=NEW_ID, redaction=rules)
    assert caught.value.status == 422


def test_a_field_is_put_in_front_of_the_others() -> None:
    assert with_field(b'{"a":1}', "job_id", "é") == b'{"job_id":"\\u00e9","a":1}'


@each_row(
    ("path", "shown"),
    [
        ("job_id", "Idempotency-Key"),
        ("messages.0.role", "messages[0].role"),
        ("params.tools.1.type", "tools[1].type"),
        ("metadata.order", "breakwater.metadata.order"),
        ("api_request.body.metadata.order", "metadata.order"),
        ("api_request.body.input.0.content.1", "input[0].content[1]"),
    ],
)
def test_a_place_is_named_as_it_is_in_the_clients_request(path: str, shown: str) -> None:
    assert openai_param(path) == shown
