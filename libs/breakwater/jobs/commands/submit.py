"""`breakwater submit`: builds a job, submits it over HTTP or NATS, and prints its result."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote

import typer

from breakwater.client import ApiClient
from breakwater.client.commands import Api, api_command, api_errors
from breakwater.jobs.contract.execution import FailureStatistics
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import ExitCode, usage_error
from breakwater.kernel.commands.output import Column
from breakwater.kernel.commands.text_input import check_no_spaces, check_sendable, read_file, read_stdin
from breakwater.kernel.formats import join_figures
from breakwater.kernel.ids import new_id
from breakwater.local.plane import PlaneLocation

DEFAULT_WAIT_S = 30.0
LONGEST_WAIT_S = 300.0
"""Limit of the API for one request."""

LEAST_WAIT_S = 0.1
"""The least remaining wait in seconds for which another request is sent."""

UNDECIDED = 202

MAX_CLOCK_LAG = timedelta(seconds=1)
"""A job that is older than its submission by no more than this counts as new, because clocks may differ."""


@api_command
def submit(
    api: Api,
    agent: Annotated[str | None, typer.Argument(help="Agent to run, unless --job names it.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="User message; `-` reads it from stdin.")] = None,
    message_file: Annotated[
        Path | None, typer.Option("--message-file", metavar="FILE", help="File with the user message.")
    ] = None,
    job_file: Annotated[
        str | None, typer.Option("--job", metavar="FILE.json", help="A whole job as JSON; `-` reads it from stdin.")
    ] = None,
    job_id: Annotated[
        str | None, typer.Option("--job-id", help="Idempotency key: the same id means the same execution.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Overrides the agent's model, if allowed.")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param", metavar="KEY=JSON", help="Parameter for the provider, such as max_tokens=60. Repeatable."
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Tenant of the job.")] = None,
    task_id: Annotated[str | None, typer.Option("--task-id", help="Task of which this job is an iteration.")] = None,
    plan_id: Annotated[str | None, typer.Option("--plan", help="Plan that this job is part of.")] = None,
    depends_on: Annotated[
        list[str] | None,
        typer.Option("--depends-on", metavar="JOB_ID", help="Job that must succeed first. Repeatable."),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="KEY=JSON", help="Your own data, stored with the execution. Repeatable."),
    ] = None,
    total_timeout: Annotated[
        float | None, typer.Option("--total-timeout", metavar="SECONDS", help="Time limit over all attempts and waits.")
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option("--priority", metavar="high|normal|low", help="At most what its agent and the API key allow."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="Preset of the task's breaker, such as refactor.")
    ] = None,
    breaker_consecutive: Annotated[
        int | None,
        typer.Option("--breaker-consecutive", metavar="N", help="Open the breaker at this many consecutive failures."),
    ] = None,
    breaker_same_error: Annotated[
        int | None,
        typer.Option(
            "--breaker-same-error", metavar="N", help="Open the breaker when the same error occurs this often."
        ),
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE=JSON", help="Set any rule, such as guard.max_iterations=5. Repeatable."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the models that would be called and the worst-case cost, and call none."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the answer.")] = True,
    wait_s: Annotated[float, typer.Option("--wait-s", metavar="SECONDS", help="Seconds to wait.")] = DEFAULT_WAIT_S,
    via: Annotated[
        Literal["http", "nats"], typer.Option("--via", help="Submit over the HTTP API or over NATS.")
    ] = "http",
) -> None:
    """Submit a job, and wait for its answer.

    The answer goes to stdout, everything else to stderr. An accepted job runs even if no client waits: `breakwater
    executions JOB_ID` shows its end.

    For example:

        breakwater submit content-writer "Write a haiku about harbours."

        git diff | breakwater submit reviewer - --param max_tokens=400

        breakwater submit content-writer "Same again." --job-id order-4711 --json

        breakwater submit content-writer "How much?" --dry-run

        breakwater submit content-writer "Once." --breaker-consecutive 1 --set retry.max_attempts=2

        breakwater submit --job job.json --via nats --no-wait
    """
    identifiers = {"--job-id": job_id, "--tenant": tenant, "--task-id": task_id, "--plan": plan_id}
    check_no_spaces({"AGENT": agent, **identifiers, "--depends-on": depends_on})
    fields = {
        "agent": agent,
        "prompt": _prompt(prompt, message_file),
        "job_id": job_id,
        "model": model,
        "params": _pairs("--param", param),
        "tenant": tenant,
        "task_id": task_id,
        "plan_id": plan_id,
        "depends_on": depends_on or None,
        "metadata": _pairs("--metadata", metadata),
        "total_timeout_s": total_timeout,
        "priority": priority,
        "dry_run": True if dry_run else None,
    }
    job = _job(job_file, {name: value for name, value in fields.items() if value is not None})
    breaker = {"preset": preset, "consecutive_failures": breaker_consecutive, "same_error": breaker_same_error}
    _add_rules(job, breaker, _pairs("--set", rules) or {})
    has_own_id = "job_id" in job
    # Chooses the id here, so that the job can be looked up even if the server's acknowledgement gets lost.
    job.setdefault("job_id", new_id())
    for name, value in job.items():
        check_sendable(name, value)
    submitted_at = datetime.now(UTC)
    effective_wait_s = wait_s if wait else 0.0
    if via == "nats":
        from breakwater.jobs.commands.submit_over_nats import send

        submission = send(PlaneLocation(api.data), job, wait_s=effective_wait_s)
    else:
        submission = _send(api.client(), job, wait_s=effective_wait_s)
    try:
        result = connect.run(submission, waiting=f"waiting for {job['agent']}" if wait and not api.as_json else "")
    except KeyboardInterrupt:
        output.note(f"no longer waiting; if the job was accepted, `breakwater executions {job['job_id']}` shows it")
        raise
    if result is None:
        _show_accepted(job["job_id"], waited_s=effective_wait_s, as_json=api.as_json)
        return
    if has_own_id:
        note_if_recorded(result, submitted_at)
    _show(result, as_json=api.as_json)


async def _send(client: ApiClient, job: dict[str, Any], *, wait_s: float) -> dict[str, Any] | None:
    """Submits a job over HTTP, and waits for its result.

    Returns:
        The result; None if the job was accepted and has not ended in time.

    Raises:
        CliError: if the job was not accepted, or it is unknown whether it was.
    """
    job_id = job["job_id"]
    unanswered = f"Whether the job was accepted is not known; submit it again with the same --job-id ({job_id})."
    deadline = time.monotonic() + wait_s
    with api_errors(unanswered=unanswered, again="Try again with the same --job-id."):
        async with client:
            response = await client.await_decision("POST", "jobs", job, wait_s=min(wait_s, LONGEST_WAIT_S))
            path = f"jobs/{quote(job_id, safe='')}"
            while response.status == UNDECIDED and (remaining_s := deadline - time.monotonic()) > LEAST_WAIT_S:
                response = await client.await_decision("GET", path, wait_s=min(remaining_s, LONGEST_WAIT_S))
    return None if response.status == UNDECIDED else response.document


def _job(file: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Builds the job from the file and the options, which override it."""
    job = (_job_in(file) if file is not None else {}) | options
    if "agent" not in job:
        raise usage_error("the agent is missing", "Write `breakwater submit AGENT PROMPT`, or name it in --job.")
    if not isinstance(job["agent"], str):
        raise usage_error("agent: should be a name")
    if job.get("job_id", "") is None:
        del job["job_id"]
    if not any(job.get(name) is not None for name in ("prompt", "messages", "input")):
        raise usage_error("the job has no input", "Add a prompt, `-` to read one from stdin, --message-file or --job.")
    return job


def _add_rules(job: dict[str, Any], breaker: dict[str, Any], rules: dict[str, Any]) -> None:
    """Adds rules of the breaker, the guard and retries to the job; they override those of its file."""
    rule_values = {f"breaker.{name}": value for name, value in breaker.items() if value is not None} | rules
    for path, value in rule_values.items():
        part, dot, name = path.partition(".")
        if part not in {"breaker", "guard", "retry"} or not dot:
            raise usage_error(f"--set {path}: is not a rule", "Write it like --set guard.max_iterations=5.")
        current = job.get(part)
        job[part] = {**(cast(dict[str, Any], current) if isinstance(current, dict) else {}), name: value}


def _job_in(file: str) -> dict[str, Any]:
    text = read_stdin() if file == "-" else read_file(Path(file), option="--job")
    try:
        job = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise usage_error(f"--job {file}: is not JSON: {error}") from error
    if not isinstance(job, dict):
        raise usage_error(f"--job {file}: is not a JSON object", 'The minimum is {"agent": "…", "prompt": "…"}.')
    return cast(dict[str, Any], job)


def _prompt(prompt: str | None, file: Path | None) -> str | None:
    if file is not None:
        if prompt is not None:
            raise usage_error("a prompt and --message-file exclude each other", "Use one of them.")
        return read_file(file, option="--message-file")
    return read_stdin() if prompt == "-" else prompt


def _pairs(option: str, texts: Iterable[str] | None) -> dict[str, Any] | None:
    """Parses `KEY=JSON` pairs. A value that is not JSON is used as text, so that quotes are optional."""
    pairs: dict[str, Any] = {}
    for text in texts or ():
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise usage_error(f"{option} {text!r}: is not KEY=JSON", f"Write it like {option} max_tokens=60.")
        try:
            pairs[key] = json.loads(value)
        except json.JSONDecodeError:
            if value[:1] in ("{", "[", '"'):
                raise usage_error(f"{option} {key}: {value!r} is not JSON") from None
            # Prints a note, because mistakes such as `tru` or `0,5` would otherwise go unnoticed.
            output.note(f"{option} {key}: {value!r} is not JSON; it is used as text")
            pairs[key] = value
    return pairs or None


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    """Prints a result: the answer, then a summary. Ends the command with an error if the job did not succeed."""
    succeeded = result["status"] == "succeeded"
    if as_json:
        output.json_document(result)
    elif succeeded:
        _show_answer(result)
        output.note(_summary(result))
    else:
        _show_failure(result)
    if not succeeded:
        raise typer.Exit(ExitCode.JOB_FAILED)


def note_if_recorded(result: dict[str, Any], submitted_at: datetime) -> None:
    """Prints a note on stderr if the result is that of an earlier submission with the same job id.

    Args:
        result: the received result.
        submitted_at: time of this submission, by this machine's clock.
    """
    queued_at = datetime.fromisoformat(result["queued_at"])
    if queued_at < submitted_at - MAX_CLOCK_LAG:
        output.note(f"answered from the record: {result['job_id']} was submitted at {result['queued_at']}")


def _summary(result: dict[str, Any]) -> str:
    """Summarises an execution in one line: model, attempts, tokens, cost, time."""
    count = result["attempts_count"]
    parts = [
        result["chosen_model"] or result["requested_model"] or "no model",
        "dry run" if result["dry_run"] else formats.quantity(count, "attempt"),
        f"{result['total_tokens']} tokens" if result["total_tokens"] else "",
        _cost_summary(result),
        "estimated" if result["cost_basis"] == "estimated" else "",
        formats.duration(result["duration_ms"]),
        "truncated by the output limit" if result.get("finish_reason") == "length" else "",
        result["job_id"],
    ]
    return " · ".join(part for part in parts if part)


def _cost_summary(result: dict[str, Any]) -> str:
    if result["dry_run"]:
        # The worst case is that of one call of the first model that is not refused.
        first_model = next(
            (planned for planned in result["output"]["models"] if planned["admission"] != "refused"), None
        )
        return (
            "no call would be made"
            if first_model is None
            else f"worst case {formats.money(first_model['worst_case_cost'])}"
        )
    cost = result["total_cost"]
    return "cost unknown" if cost is None else formats.money(cost)


def _show_answer(result: dict[str, Any]) -> None:
    answer: Any = result["output"]
    if result["dry_run"] and isinstance(answer, dict):
        columns: list[Column[dict[str, Any]]] = [
            Column("model", lambda model: model["model"]),
            Column("provider", lambda model: model["provider"]),
            Column("max attempts", _max_attempts, align_right=True),
            Column("worst-case cost", lambda model: formats.money(model["worst_case_cost"]), align_right=True),
            Column("admission", lambda model: model["admission"]),
            Column("refusal", _planned_refusal),
        ]
        output.table(columns, cast(list[dict[str, Any]], answer["models"]))
    elif isinstance(answer, str):
        output.write(answer)
    else:
        output.json_document(answer)


def _max_attempts(model: dict[str, Any]) -> str:
    return " + ".join(str(model[name]) for name in ("max_attempts", "max_corrections") if model[name])


def _planned_refusal(model: dict[str, Any]) -> str:
    refusal = model["refusal"]
    if refusal is None:
        return ""
    retry_after_s = refusal["retry_after_s"]
    return refusal["message"] + ("" if retry_after_s is None else f" (retry after {retry_after_s:.3g} s)")


def _show_failure(result: dict[str, Any]) -> None:
    if result["output"] is not None:
        # A failed job may have a user message (`on_error: message`), the output of a program, or a part of an answer.
        _show_answer(result)
    error: dict[str, Any] = result["error"] or {}
    reason = result["reason"] or "error"
    message = join_figures(error.get("message") or "without a reason", error.get("figures"))
    output.write(f"{result['status'].replace('_', '-')}: {reason}: {message}", stderr=True)
    for attempt in result["attempts"]:
        attempt_error = attempt["error"] or {}
        status = attempt_error.get("status_code")
        kind = f"{attempt_error.get('kind', attempt['outcome'])}{f' {status}' if status else ''}"
        duration = formats.duration(attempt["duration_ms"])
        output.write(f"  {attempt['number']}. {attempt['model']}: {kind}, {duration}", stderr=True)
    statistics = result.get("statistics")
    if statistics is not None:
        output.note(f"stopped: {FailureStatistics.model_validate(statistics).in_words()}")
    output.note(_summary(result))


def _show_accepted(job_id: str, *, waited_s: float, as_json: bool) -> None:
    """Prints the id of a job that has not ended yet. After a wait, ends the command with exit code 5."""
    if as_json:
        output.json_document({"job_id": job_id, "execution_id": job_id, "status": "accepted"})
    else:
        output.write(job_id)
    if waited_s:
        output.note(f"accepted, and not finished within {waited_s:g} s; `breakwater executions {job_id}` shows its end")
        raise typer.Exit(ExitCode.UNDECIDED)
    output.note("accepted")
