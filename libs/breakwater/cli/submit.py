"""`breakwater submit`: puts a job together, sends it, and shows the answer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Coroutine, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from breakwater.cli import output
from breakwater.cli.connect import run
from breakwater.cli.errors import wrong_usage
from breakwater.cli.given import read_file, read_stdin, sendable
from breakwater.cli.plane import ApiKeyOption, DataOption, JsonOption, Plane, UrlOption
from breakwater.cli.submit_answer import accepted, show, tell_if_recorded

DEFAULT_WAIT_S = 30.0


class Via(StrEnum):
    """How a job is sent."""

    HTTP = "http"
    NATS = "nats"


def submit(
    agent: Annotated[str | None, typer.Argument(help="The agent to run; --job may name it instead.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="One user message; `-` reads it from stdin.")] = None,
    message_file: Annotated[
        Path | None, typer.Option("--message-file", metavar="FILE", help="The user message is in this file.")
    ] = None,
    job_file: Annotated[
        str | None, typer.Option("--job", metavar="FILE.json", help="A whole job as JSON; `-` reads it from stdin.")
    ] = None,
    job_id: Annotated[
        str | None, typer.Option("--job-id", help="Idempotency key: the same id again is the same execution.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Instead of the agent's model, where allowed.")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="KEY=JSON", help="For the provider, such as max_tokens=60. Repeatable."),
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="On whose behalf.")] = None,
    task_id: Annotated[str | None, typer.Option("--task-id", help="The run this call is one iteration of.")] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="KEY=JSON", help="Yours; stored with the execution. Repeatable."),
    ] = None,
    total_timeout: Annotated[
        float | None, typer.Option("--total-timeout", metavar="SECONDS", help="Over all attempts and waits.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell which models would be called, at which worst cost; call none.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the answer.")] = True,
    wait_s: Annotated[float, typer.Option("--wait-s", metavar="SECONDS", help="How long to wait.")] = DEFAULT_WAIT_S,
    via: Annotated[Via, typer.Option("--via", help="Through the HTTP interface, or straight to NATS.")] = Via.HTTP,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job, and wait for its answer.

    The answer goes to stdout, everything else to stderr. A job that was accepted is decided even if nobody waits:
    `breakwater executions JOB_ID` tells how it ended.

    For example:

        breakwater submit content-writer "Write a haiku about harbours."

        git diff | breakwater submit reviewer - --param max_tokens=400

        breakwater submit content-writer "Same again." --job-id order-4711 --json

        breakwater submit content-writer "How much?" --dry-run

        breakwater submit --job job.json --via nats --no-wait
    """
    job = _job(
        job_file,
        {
            "agent": agent,
            "prompt": _prompt(prompt, message_file),
            "job_id": job_id,
            "model": model,
            "params": _pairs("--param", param),
            "tenant": tenant,
            "task_id": task_id,
            "metadata": _pairs("--metadata", metadata),
            "total_timeout_s": total_timeout,
            "dry_run": True if dry_run else None,
        },
    )
    given_id = "job_id" in job
    # Made here, and not by the server: a job whose acknowledgement gets lost can then be asked for.
    job.setdefault("job_id", _new_id())
    for name, value in job.items():
        sendable(name, value)
    submitted_at = datetime.now(UTC)
    plane = Plane(data)
    patience_s = wait_s if wait else 0.0
    sending: Coroutine[Any, Any, dict[str, Any] | None]
    if via is Via.NATS:
        from breakwater.cli import submit_nats

        sending = submit_nats.send(plane.nats_url, job, wait_s=patience_s)
    else:
        from breakwater.cli import submit_http

        sending = submit_http.send(plane.door(url, api_key), job, wait_s=patience_s)
    try:
        with _spinner(f"waiting for {job['agent']}", shown=wait and not as_json):
            result = run(sending)
    except KeyboardInterrupt:
        output.note(f"not waiting any longer; if the job was accepted, `breakwater executions {job['job_id']}` has it")
        raise
    if result is None:
        accepted(job["job_id"], waited_s=patience_s, as_json=as_json)
    else:
        if given_id:
            tell_if_recorded(result, submitted_at)
        show(result, as_json=as_json)


def _job(file: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The job that is sent: the file's, with what the options say over it."""
    job = _job_in(file) if file is not None else {}
    job |= {name: value for name, value in options.items() if value is not None}
    if "agent" not in job:
        raise wrong_usage("the agent is missing", "Write `breakwater submit AGENT PROMPT`, or name it in --job.")
    if not isinstance(job["agent"], str):
        raise wrong_usage("agent: should be a name")
    if "job_id" in job and job["job_id"] is None:
        del job["job_id"]
    if not any(job.get(name) is not None for name in ("prompt", "messages", "input")):
        raise wrong_usage(
            "there is nothing to say to the agent", "Add a prompt, `-` to read one from stdin, --message-file or --job."
        )
    return job


def _job_in(file: str) -> dict[str, Any]:
    text = read_stdin() if file == "-" else read_file(Path(file), option="--job")
    try:
        job = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise wrong_usage(f"--job {file}: is not JSON: {error}") from error
    if not isinstance(job, dict):
        raise wrong_usage(f"--job {file}: is not a JSON object", 'The least is {"agent": "…", "prompt": "…"}.')
    return cast(dict[str, Any], job)


def _prompt(prompt: str | None, file: Path | None) -> str | None:
    if file is not None:
        if prompt is not None:
            raise wrong_usage("both a prompt and --message-file are given", "Give one of them.")
        return read_file(file, option="--message-file")
    return read_stdin() if prompt == "-" else prompt


def _pairs(option: str, given: Iterable[str] | None) -> dict[str, Any] | None:
    """`key=value` pairs: values are JSON, and what is no JSON is text, so that quotes can be left out."""
    pairs: dict[str, Any] = {}
    for text in given or ():
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise wrong_usage(f"{option} {text!r}: is not KEY=JSON", f"Write it like {option} max_tokens=60.")
        try:
            pairs[key] = json.loads(value)
        except json.JSONDecodeError:
            if value[:1] in ("{", "[", '"'):
                raise wrong_usage(f"{option} {key}: {value!r} is not JSON") from None
            # Said, as `tru` for `true` or `0,5` for `0.5` would else go unnoticed.
            output.note(f"{option} {key}: {value!r} is not JSON, and is taken as text")
            pairs[key] = value
    return pairs or None


def _new_id() -> str:
    from services.request.job_ids import ENTROPY_BYTES, uuid7

    return uuid7(time.time_ns() // 1_000_000, os.urandom(ENTROPY_BYTES))


@contextmanager
def _spinner(text: str, *, shown: bool) -> Generator[None]:
    if not shown or not output.is_terminal(sys.stderr):
        yield
        return
    with output.console(stderr=True).status(text, spinner="line"):
        yield
