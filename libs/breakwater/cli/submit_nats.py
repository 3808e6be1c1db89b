"""Submitting straight to NATS, as programs in any language do."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from breakwater.bus.errors import BusUnavailable, PublishRefused
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher, new_traceparent
from breakwater.cli import connect
from breakwater.cli.errors import CliError, ExitCode, unreachable
from breakwater.contracts import subjects
from breakwater.contracts.subjects import Header, Stream

FIRST_LOOK_S = 0.1
LONGEST_LOOK_S = 2.0


async def send(url: str, job: dict[str, Any], *, wait_s: float) -> dict[str, Any] | None:
    """Publishes a job, and waits for its result. Returns and raises as `submit_http.send`."""
    from pydantic import ValidationError

    from breakwater.contracts.job import Job
    from breakwater.contracts.validation import explain

    try:
        checked = Job.model_validate(job)
    except ValidationError as error:
        # The worker would dead-letter it; here it can still be mended.
        raise CliError("invalid_job", explain(error, Job), exit_code=ExitCode.USAGE) from None
    agent, job_id = checked.agent, job["job_id"]
    async with connect.bus(url) as client:
        loop = asyncio.get_running_loop()
        heard: asyncio.Future[bytes] = loop.create_future()

        async def hear(message: Any) -> None:
            if not heard.done():
                heard.set_result(message.data)

        # Heard at once where the user may subscribe to results; the look-ups below find it in any case.
        await client.subscribe(subjects.result(job_id), cb=hear)
        headers = {Header.MSG_ID.value: subjects.message_id(agent, job_id), Header.TRACEPARENT.value: new_traceparent()}
        payload = json.dumps(job, ensure_ascii=False).encode()
        try:
            await Publisher(lambda: client, "cli").raw(subjects.job(agent), payload, headers)
        except PublishRefused as error:
            raise _refused(agent, error) from error
        except BusUnavailable as error:
            raise unreachable(
                str(error),
                f"Whether the job was accepted is not known; submit it again with the same --job-id ({job_id}). "
                "A NATS user without the right to publish jobs gets no answer either.",
            ) from error
        return await _result(Lookup(lambda: client), heard, job_id, wait_s)


async def _result(lookup: Lookup, heard: asyncio.Future[bytes], job_id: str, wait_s: float) -> dict[str, Any] | None:
    deadline, pause_s = time.monotonic() + wait_s, FIRST_LOOK_S
    while (left_s := deadline - time.monotonic()) > 0:
        await asyncio.wait([heard], timeout=min(pause_s, left_s))
        if heard.done():
            return json.loads(heard.result())
        # An id that was used before has its result standing since long: nothing will be heard of it.
        found = await lookup.last(Stream.RESULTS, subjects.result(job_id))
        if found is not None:
            return json.loads(found.data)
        pause_s = min(pause_s * 2, LONGEST_LOOK_S)
    return None


def _refused(agent: str, error: PublishRefused) -> CliError:
    if "no stream takes this subject" in str(error):
        return CliError(
            "unknown_agent",
            f"agent {agent!r} is not configured: no stream takes {subjects.job(agent)}",
            "`breakwater agents` lists those that are; after a change of the config run `breakwater setup`.",
        )
    return CliError("refused", f"the job was not accepted: {error}")
