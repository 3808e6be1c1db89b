"""What a job's calls send, as far as it is known before they are made."""

from __future__ import annotations

from typing import Any

from breakwater.calls.assignment import Assignment
from breakwater.calls.rules.repairs import Correction, Repairs
from breakwater.config import Config
from breakwater.dialects.rules.provider_state import token_of
from breakwater.prices.rules.price import GENERIC, estimate_input_tokens
from tests.services.worker.assignments import assignment_of, worker_without_servers


def assignment(agent: dict[str, Any] | None = None, **job: Any) -> Assignment:
    config = Config.model_validate(
        {
            "providers": {
                "sim": {"base_url": "http://127.0.0.1:1/v1"},
                "program": {"kind": "process", "command": ["x"]},
            },
            "agents": {"a": {"model": "sim/m", **(agent or {})}},
        }
    )
    return assignment_of(worker_without_servers(config), {"agent": "a", **(job or {"prompt": "hello"})})


def tokens(of: Assignment) -> int:
    return estimate_input_tokens(of.input_size(), GENERIC)


def test_the_system_prompt_the_params_and_the_schema_count_beside_the_conversation() -> None:
    plain = tokens(assignment())
    tool = {"type": "function", "function": {"name": "look_up", "description": "find an order " * 10}}
    assert tokens(assignment({"system_prompt": "be kind " * 50})) > plain + 100
    assert tokens(assignment({"params": {"tools": [tool]}})) > plain + GENERIC.tool_tokens + 100
    assert tokens(assignment(prompt="hello", params={"tools": [tool]})) > plain + GENERIC.tool_tokens + 100
    assert tokens(assignment({"output": {"schema": "task_result"}})) > plain + GENERIC.tool_tokens + 100
    assert tokens(assignment({"output": {"schema": "task_result", "native": False}})) == plain


def test_the_input_of_a_program_counts() -> None:
    program = {"model": "program/m"}
    assert (
        tokens(assignment(program, input={"order": "x" * 1000}))
        > tokens(assignment(program, input={"order": "x"})) + 500
    )


def test_what_is_around_a_job_does_not_count() -> None:
    assert tokens(assignment(prompt="hello", metadata={"note": "x" * 10_000})) == tokens(assignment())


def test_corrections_count_with_the_answer_that_they_correct() -> None:
    job = assignment()
    repairs = Repairs(corrections=(Correction(answer="not json at all " * 50, problems=("is no JSON",)),))
    whole = job.input_size() + repairs.correction_size
    assert whole.messages == 3
    assert estimate_input_tokens(whole, GENERIC) > tokens(job) + 400
    assert Repairs(corrections=(Correction(answer=None),)).correction_size.messages == 0


def test_the_most_that_a_call_may_answer_is_what_is_sent_as_its_limit() -> None:
    assert assignment().parameters.max_output_tokens == assignment().parameters.values["max_tokens"] == 4096
    own = assignment(prompt="x", params={"max_completion_tokens": 9, "n": 2})
    assert own.parameters.max_output_tokens == 18
    assert "max_tokens" not in own.parameters.values
    thinking = {"type": "enabled", "budget_tokens": 9000}
    assert (
        assignment(prompt="x", params={"max_tokens": 5000, "thinking": thinking}).parameters.max_output_tokens == 9000
    )


def test_what_a_client_carries_for_a_model_counts() -> None:
    def sized(text: str) -> int:
        thinking = {"type": "thinking", "thinking": text, "signature": token_of("a", thought_in="reasoning_content")}
        used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [thinking, used]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "7"}]},
        ]
        body = {"max_tokens": 10, "messages": messages}
        job = assignment(api_request={"api": "messages", "body": body})
        return estimate_input_tokens(job.input_size(as_written=False), GENERIC)

    assert sized("word " * 1000) > sized("word") + 1000
