"""What is mended instead of repeated: orphaned tool calls, long conversations, wrong answers, stale keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from breakwater.calls.providers.base import Answer, CallError
from breakwater.calls.rules.classify import HttpFailure, classification_of, classify
from breakwater.calls.rules.parameters import refused_params
from breakwater.calls.rules.repairs import Repairs
from breakwater.kernel.nats import subjects
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import answering
from tests.flow.kit import COST, Plane, model
from tests.records.samples import NOON, attempt
from tests.services.worker.conftest import StartWorker
from tests.services.worker.error_table import CONTEXT_OVERFLOW
from tests.services.worker.harness import ScriptedProvider
from tests.tables import each_row

AGENT = {"retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0.01}, "breaker": "off", "max_tokens": 100}

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


async def _heard(plane: Plane, agent: str, job: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Publishes a job; its result, and the progress that was heard of it."""
    heard: list[dict[str, Any]] = []

    async def listen(message: Any) -> None:
        heard.append(json.loads(message.data))

    subscription = await plane.client.subscribe(subjects.progress(agent, job["job_id"]), cb=listen)
    await plane.client.flush()
    await plane.publish(job, agent)
    result = await plane.result(job["job_id"])
    async with asyncio.timeout(60):
        while not heard or heard[-1]["state"] not in {"succeeded", "dead_lettered"}:
            await asyncio.sleep(0.02)
    await subscription.unsubscribe()
    return result, heard


def _events(heard: list[dict[str, Any]]) -> list[str]:
    return [step["event"] for step in heard if step["event"] is not None]


async def test_orphaned_tool_calls_are_pruned_once_and_the_second_call_is_no_retry(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "model": "sim/m", "retry": {"max_attempts": 1}}}
    fault = {"when": "orphan_tool_calls", "status": 400}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "user", "content": "and?"},
    ]
    async with start_worker({"sim/m": model(fault)}, agents) as plane:
        job = {"agent": "writer", "job_id": "j1", "messages": messages}
        result, heard = await _heard(plane, "writer", job)
        assert plane.sim.ledger.totals.calls == 2
    assert result["status"] == "succeeded"
    assert [(a["outcome"], a["cause"], a["backoff_ms"]) for a in result["attempts"]] == [
        ("error", "first", 0),
        ("success", "orphan_recovery", 0),
    ]
    [pruned] = [step for step in heard if step["event"] == "orphan_tool_calls_pruned"]
    assert pruned["count"] == 1
    assert "llm_request_failed" not in _events(heard)


async def test_an_unfamiliar_400_is_tried_once_with_orphans_pruned_where_there_are_any(
    start_worker: StartWorker,
) -> None:
    strange = {"status": 400, "error": {"message": "Something is not right."}}
    models = {
        "sim/a": model({"when": "orphan_tool_calls", **strange}),
        "sim/b": model(strange),
        "sim/c": model(strange),
    }
    retry = {"max_attempts": 2, "backoff": "constant", "base_s": 0.01, "on": [400]}
    agents = {
        "mended": {**AGENT, "model": "sim/a"},
        "not-mended": {**AGENT, "model": "sim/b", "retry": retry},
        "whole": {**AGENT, "model": "sim/c"},
    }
    torn: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "user", "content": "and?"},
    ]
    async with start_worker(models, agents) as plane:
        mended = await plane.run({"agent": "mended", "job_id": "j1", "messages": torn})
        not_mended = await plane.run({"agent": "not-mended", "job_id": "j2", "messages": torn})
        whole = await plane.run({"agent": "whole", "job_id": "j3", "prompt": "hello"})
    assert (mended["status"], [(one["cause"], one["backoff_ms"]) for one in mended["attempts"]]) == (
        "succeeded",
        [("first", 0), ("orphan_recovery", 0)],
    )
    # The recovery is no try: the agent's own two are made besides.
    assert [one["cause"] for one in not_mended["attempts"]] == ["first", "orphan_recovery", "retry"]
    assert [one["cause"] for one in whole["attempts"]] == ["first"]
    assert {one["error"]["class"] for one in (not_mended, whole)} == {"BadRequestError"}


async def test_a_conversation_that_is_too_long_is_trimmed_where_the_agent_wants_it(start_worker: StartWorker) -> None:
    fault = {"requests": [1, 1], "status": 400, "error": CONTEXT_OVERFLOW}
    models = {"sim/a": model(fault), "sim/b": model(fault), "sim/c": model()}
    agents = {
        "trims": {**AGENT, "model": "sim/a", "on_context_overflow": "trim"},
        "moves": {**AGENT, "model": "sim/b", "fallback_models": ["sim/c"]},
    }
    turns = [
        {"role": role, "content": f"{role} {index} " + "x" * 400}
        for index in range(10)
        for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "be brief"}, *turns, {"role": "user", "content": "now?"}]
    async with start_worker(models, agents) as plane:
        trimmed, heard = await _heard(plane, "trims", {"agent": "trims", "job_id": "j1", "messages": messages})
        moved, _ = await _heard(plane, "moves", {"agent": "moves", "job_id": "j2", "messages": messages})
    assert (trimmed["status"], moved["status"]) == ("succeeded", "succeeded")
    first, second = trimmed["attempts"]
    assert (first["dropped_messages"], second["cause"]) == (0, "context_trim")
    assert 0 < second["dropped_messages"] < len(messages) - 2
    [reported] = [step for step in heard if step["event"] == "context_trimmed"]
    assert reported["count"] == second["dropped_messages"]
    assert [attempt["model"] for attempt in moved["attempts"]] == ["sim/b", "sim/c"]


async def test_an_answer_of_the_wrong_shape_goes_back_to_the_model_with_what_was_wrong(
    start_worker: StartWorker,
) -> None:
    good = '```json\n{"action": "refund", "reasoning": "it broke", "confidence": 0.9}\n```'
    models = {
        "sim/learns": model({"requests": [1, 1], "answer": '{"action": "refund", "confidence": 7}'}, answer=good),
        "sim/stubborn": model(answer="I would rather not."),
    }
    agents = {
        "learns": {**AGENT, "model": "sim/learns", "output": {"schema": "agent_decision"}},
        "stubborn": {**AGENT, "model": "sim/stubborn", "output": {"schema": "agent_decision", "max_corrections": 1}},
    }
    async with start_worker(models, agents) as plane:
        learnt, heard = await _heard(plane, "learns", {"agent": "learns", "job_id": "j1", "prompt": "decide"})
        failed, _ = await _heard(plane, "stubborn", {"agent": "stubborn", "job_id": "j2", "prompt": "decide"})
    assert learnt["output"] == {"action": "refund", "reasoning": "it broke", "confidence": 0.9}
    first, second = learnt["attempts"]
    assert (first["error"]["kind"], first["cost"], second["cause"]) == ("logic", COST, "self_correction")
    assert not first["counts_for_breaker"]
    assert learnt["wasted_by_cause"] == {"self_correction": COST}
    assert "agent.attempt.error" in _events(heard)
    assert [attempt["cause"] for attempt in failed["attempts"]] == ["first", "self_correction"]
    assert (failed["status"], failed["error"]["class"]) == ("dead_lettered", "InvalidOutputError")
    logged = [line for line in plane.logs if line["event"] == "output_validation_failed"]
    assert [line["attempt_id"] for line in logged] == ["j1:1", "j2:1", "j2:2"]
    assert all(text not in str(logged) for text in ("refund", "I would rather not", "confidence"))


async def test_a_key_that_was_renewed_is_read_again_and_the_call_repeated_at_once(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("sk-old-0123456789abcdef")
    providers = {"keyed": {"base_url": "http://127.0.0.1:{sim_port}/v1", "api_key": {"file": str(key)}}}
    agents = {"writer": {**AGENT, "model": "keyed/m"}}
    script = {"api_keys": ["sk-new-0123456789abcdef"]}
    async with start_worker({"keyed/m": model()}, agents, more_providers=providers, script=script) as plane:
        # The same key as before: one call, and nothing else.
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        stale = await plane.result("j1")
        key.write_text("sk-new-0123456789abcdef")
        await plane.publish({"agent": "writer", "job_id": "j2", "prompt": "hello"})
        renewed = await plane.result("j2")
        log = plane.log("worker")
    assert [attempt["error"]["status_code"] for attempt in stale["attempts"]] == [401]
    assert renewed["status"] == "succeeded"
    assert [(a["outcome"], a["cause"], a["backoff_ms"]) for a in renewed["attempts"]] == [
        ("error", "first", 0),
        ("success", "credential_refresh", 0),
    ]
    assert "sk-new" not in log + json.dumps(renewed)
    assert "sk-old" not in log + json.dumps(stale)


async def test_a_failed_job_can_answer_with_a_message_that_its_parent_can_read(start_worker: StartWorker) -> None:
    agents = {"child": {**AGENT, "model": "sim/m", "on_error": "message"}}
    async with start_worker({"sim/m": model({"status": 401})}, agents) as plane:
        job = {"agent": "child", "job_id": "j1", "prompt": "hello", "parent_execution_id": "p1"}
        result, heard = await _heard(plane, "child", job)
    assert (result["status"], result["parent_execution_id"]) == ("dead_lettered", "p1")
    assert result["output"] == result["error"]["user_message"]
    assert "Unauthorized" in result["output"]
    assert "401" in result["output"]
    assert {step["parent_execution_id"] for step in heard} == {"p1"}


async def test_what_happens_is_reported_while_it_happens(start_worker: StartWorker) -> None:
    models = {
        "sim/flaky": model({"requests": [1, 1], "status": 503}),
        "sim/down": model({"status": 500}),
        "sim/no": model({"status": 403}),
    }
    agents = {
        name: {**AGENT, "model": f"sim/{name}", "retry": {**AGENT["retry"], "max_attempts": 2}}
        for name in ("flaky", "down", "no")
    }
    async with start_worker(models, agents) as plane:
        heard = {
            name: (await _heard(plane, name, {"agent": name, "job_id": name, "prompt": "x"}))[1] for name in agents
        }
    start, finish, error = "agent.attempt.start", "agent.attempt.finish", "agent.attempt.error"
    assert _events(heard["flaky"]) == [start, error, "llm_retry_attempt", start, finish]
    assert _events(heard["down"]) == [start, error, "llm_retry_attempt", start, error, "llm_retry_exhausted"]
    assert _events(heard["no"]) == [start, error, "llm_request_failed"]
    [failed] = [step for step in heard["no"] if step["event"] == "llm_request_failed"]
    assert (failed["error_type"], failed["error_class"], failed["status_code"], failed["retryable"]) == (
        "Forbidden",
        "ForbiddenError",
        403,
        False,
    )


def refusing(status: int, message: str, **fields: Any) -> CallError:
    return CallError(HttpFailure(status, message, **fields), maybe_billed=False)


def causes(result: Mapping[str, Any]) -> list[str]:
    return [attempt["cause"] for attempt in result["attempts"]]


ANSWER = Answer("yes", Usage(10, 10))
NO_MAX_TOKENS = refusing(
    400,
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    param="max_tokens",
)
ONE_TRY: dict[str, Any] = {"model": "sim/m", "breaker": "off", "retry": {"max_attempts": 1}}


async def test_a_parameter_that_a_model_does_not_know_is_left_out_at_once_and_from_then_on(
    start_worker: StartWorker,
) -> None:
    asked: list[set[str]] = []

    async def picky(request: web.BaseRequest) -> web.StreamResponse:
        body: dict[str, Any] = json.loads(await request.read())
        asked.append(body.keys() - {"model", "messages", "stream"})
        if "max_tokens" in body:
            text = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
            return web.json_response({"error": {"message": text, "param": "max_tokens"}}, status=400)
        if "stream_options" in body:
            wrong = {"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}
            return web.json_response({"detail": [wrong]}, status=422)
        said = b'data: {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}\n\n'
        return web.Response(body=said + b"data: [DONE]\n\n", content_type="text/event-stream")

    async with answering(picky) as origin:
        providers = {"picky": {"base_url": f"{origin}/v1"}}
        agents = {"writer": {**ONE_TRY, "model": "picky/m"}}
        async with start_worker({"picky/m": model()}, agents, more_providers=providers) as plane:
            first = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x", "stream": True})
            second = await plane.run({"agent": "writer", "job_id": "j2", "prompt": "x", "stream": True})
    assert (first["output"], causes(first), causes(second)) == ("yes", ["first", "parameter", "parameter"], ["first"])
    options, renamed = {"stream_options"}, {"max_completion_tokens"}
    assert asked == [{"max_tokens"} | options, renamed | options, renamed, renamed]
    assert {attempt["cost"] for attempt in first["attempts"][:2]} == {"0.000000000"}


async def test_a_parameter_that_is_refused_all_the_same_is_the_requests_fault(start_worker: StartWorker) -> None:
    provider = ScriptedProvider(NO_MAX_TOKENS, NO_MAX_TOKENS)
    async with start_worker({"sim/m": model()}, {"writer": ONE_TRY}, providers={"sim": provider}) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
    assert (result["error"]["class"], causes(result)) == ("UnsupportedParameterError", ["first", "parameter"])


@pytest.mark.parametrize("param", ["response_format", "temperature"])
async def test_a_parameter_of_the_jobs_own_is_not_taken_away(start_worker: StartWorker, param: str) -> None:
    provider = ScriptedProvider(refusing(400, f"'{param}' is not supported with this model.", param=param))
    async with start_worker({"sim/m": model()}, {"writer": ONE_TRY}, providers={"sim": provider}) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x", "params": {param: {}}})
    assert (result["status"], causes(result), result["error"]["param"]) == ("dead_lettered", ["first"], param)


async def test_a_schema_that_a_model_can_not_be_held_to_is_only_checked(start_worker: StartWorker) -> None:
    decision = '{"action": "refund", "reasoning": "it broke", "confidence": 0.9}'
    provider = ScriptedProvider(
        refusing(400, "This response_format type is unavailable now"), Answer(decision, Usage(10, 10))
    )
    agents = {"writer": {**ONE_TRY, "output": {"schema": "agent_decision"}}}
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
    assert (result["output"]["action"], causes(result)) == ("refund", ["first", "parameter"])
    assert [asked.output_schema is None for asked in provider.calls] == [False, True]


async def test_a_repair_is_made_though_the_worker_died_before_it(start_worker: StartWorker) -> None:
    provider = ScriptedProvider(NO_MAX_TOKENS, ANSWER)
    async with start_worker({"sim/m": model()}, {"writer": ONE_TRY}, providers={"sim": provider}) as plane:
        await plane.run_until("breakwater.services.worker.attempts.Attempts._carry_out", "j1")
        plane.begin()
        result = await plane.result("j1")
    assert (result["status"], causes(result)) == ("succeeded", ["first", "parameter"])
    assert set(provider.calls[1].left_out) == {"max_tokens"}


@each_row(
    ("failure", "repaired"),
    [
        (NO_MAX_TOKENS, "parameter"),
        (refusing(400, "`temperature` and `top_p` cannot both be specified"), "parameter"),
        (refusing(400, "input length and `max_tokens` exceed context limit: 100 + 4096 > 1000"), "output_limit"),
        (refusing(400, "no", code="tool_use_failed"), "self_correction"),
        (refusing(400, "no", code="invalid_encrypted_content"), "provider_state"),
        (refusing(422, "messages.1.assistant.reasoning_content: Extra inputs are not permitted"), "provider_state"),
        (refusing(400, "messages.1.content.0: Invalid `signature` in `thinking` block"), "provider_state"),
    ],
)
def test_a_repair_is_derived_again_from_what_was_recorded(failure: CallError, repaired: str) -> None:
    verdict = classify(failure.failure, NOON)
    recorded = attempt("e1", outcome="error", error=verdict.error_info(), completed_at=NOON)
    assert replace(classification_of(recorded, NOON), counts_for_breaker=False) == verdict
    found = refused_params(verdict, {"max_tokens", "temperature"}, (), ())
    after = partial(
        Repairs.after, may_trim=False, max_corrections=0, refused_params=() if found is None else found.names
    )
    made = after(Repairs(), verdict, [], None)
    assert made is not None
    assert made.cause == repaired
    again = Repairs().replay(
        made.cause, [], [recorded], [name for name in made.repairs.left_out if name != "max_tokens"]
    )
    assert again == made.repairs
    assert after(again, verdict, [], None) is None, "once"


async def test_the_output_limit_is_lowered_before_turns_are_dropped(start_worker: StartWorker) -> None:
    def too_long(output: int) -> CallError:
        return refusing(400, f"input length and `max_tokens` exceed context limit: 600 + {output} > 1000")

    provider = ScriptedProvider(too_long(4096), too_long(400), ANSWER)
    agents = {"writer": {**ONE_TRY, "on_context_overflow": "trim"}}
    turns = [{"role": role, "content": "x" * 400} for _ in range(5) for role in ("user", "assistant")]
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}) as plane:
        job = {"agent": "writer", "job_id": "j1", "messages": [*turns, {"role": "user", "content": "now?"}]}
        result = await plane.run(job)
    assert (result["status"], causes(result)) == ("succeeded", ["first", "output_limit", "context_trim"])
    assert [asked.params["max_tokens"] for asked in provider.calls] == [4096, 400, 400]
    assert [attempt["dropped_messages"] > 0 for attempt in result["attempts"]] == [False, False, True]


async def test_an_answer_that_the_provider_did_not_pass_on_is_sampled_again_once(start_worker: StartWorker) -> None:
    failed = refusing(400, "Failed to call a function. See 'failed_generation' for more details.")
    first, second = ScriptedProvider(failed, failed), ScriptedProvider(ANSWER)
    agents = {"writer": {**ONE_TRY, "fallback_models": ["other/n"], "retry": {"max_attempts": 5}}}
    providers = {"other": {"base_url": "http://127.0.0.1:9/v1"}}
    async with start_worker(
        {"sim/m": model(), "other/n": model()},
        agents,
        more_providers=providers,
        providers={"sim": first, "other": second},
    ) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
    assert (result["chosen_model"], causes(result)) == ("other/n", ["first", "self_correction", "fallback"])
    assert not any(attempt["counts_for_breaker"] for attempt in result["attempts"])


async def test_a_spent_account_is_called_once_and_the_next_model_answers(start_worker: StartWorker) -> None:
    spent = {"status": 429, "retry_after_s": 36, "error": {"code": "1113", "message": "Insufficient balance."}}
    agents = {"writer": {**AGENT, "model": "sim/a", "fallback_models": ["sim/b"]}}
    async with start_worker({"sim/a": model(spent), "sim/b": model()}, agents) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
        assert plane.clock.slept == []
    assert [attempt["model"] for attempt in result["attempts"]] == ["sim/a", "sim/b"]
    assert result["attempts"][0]["error"]["kind"] == "quota"
