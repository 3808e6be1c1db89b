"""`breakwater submit --via nats`: publishes a job straight to NATS, and receives its result from there."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from nats.aio.msg import Msg
from pydantic import ValidationError

from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ids import execution_of
from breakwater.kernel.commands import connect
from breakwater.kernel.commands.errors import CliError, ExitCode, unreachable
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusUnavailableError, MessageTooLargeError, PublishRefusedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.security.encryption import OFF
from breakwater.kernel.validation import explain
from breakwater.local.plane import PlaneLocation

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Limits of the pause between two look-ups of a result; each pause is twice the last one."""


async def send(plane: PlaneLocation, job: dict[str, Any], *, wait_s: float) -> dict[str, Any] | None:
    """Publishes a job, and waits for its result.

    Returns:
        The result; None if the job was accepted and has not ended in time.

    Raises:
        CliError: if the job was not accepted, or it is unknown whether it was.
    """
    try:
        checked_job = Job.model_validate(job)
    except ValidationError as error:
        # Fails here, where the job can still be corrected; the worker would dead-letter it.
        raise CliError("invalid_job", explain(error, Job), exit_code=ExitCode.USAGE) from None
    execution_id = execution_of(None, job["job_id"])
    result_subject = subjects.result(execution_id)
    try:
        cipher = plane.cipher()
    except ConfigError:
        cipher = OFF  # a submitter may lack the config and its keys
    async with connect.bus(plane.nats_url) as client:
        response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def receive(message: Msg) -> None:
            if not response.done():
                response.set_result(message.data)

        # Not every user may subscribe to results; the look-ups below find a result in any case, except that of a dry
        # run, which is not stored and comes to an inbox.
        inbox = client.new_inbox() if checked_job.dry_run else None
        await client.subscribe(inbox or result_subject, cb=receive)
        await _publish(Publisher(lambda: client, "cli", cipher), checked_job.agent, execution_id, job, inbox)
        lookup = Lookup(lambda: client, cipher)
        deadline = time.monotonic() + wait_s
        pause_s = FIRST_PAUSE_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            await asyncio.wait([response], timeout=min(pause_s, remaining_s))
            if response.done():
                return json.loads(cipher.decrypt_document(response.result()))
            # The result of an id that was used before is stored, and will not be sent again.
            stored = await lookup.last(Stream.RESULTS, result_subject)
            if stored is not None:
                return json.loads(stored.data)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
    return None


async def _publish(publisher: Publisher, agent: str, execution_id: str, job: dict[str, Any], inbox: str | None) -> None:
    subject = subjects.job(agent)
    payload = json.dumps(job if inbox is None else {**job, "reply_to": inbox}, ensure_ascii=False).encode()
    try:
        await publisher.job(subject, payload, {Header.MSG_ID.value: subjects.message_id(agent, execution_id)})
    except MessageTooLargeError as error:
        remedy = "Submit it over HTTP (--via http), which takes up to limits.max_body_bytes."
        raise CliError("refused", f"the job was not accepted: {error}", remedy) from error
    except PublishRefusedError as error:
        if "no stream takes this subject" not in str(error):
            raise CliError("refused", f"the job was not accepted: {error}") from error
        raise CliError(
            "unknown_agent",
            f"agent {agent!r} is not configured: no stream takes {subject}",
            "`breakwater agents` lists the configured ones; after a change of the config run `breakwater setup`.",
        ) from error
    except BusUnavailableError as error:
        raise unreachable(
            str(error),
            f"Whether the job was accepted is not known; submit it again with the same --job-id ({job['job_id']}). "
            "A NATS user without the right to publish jobs gets no response either.",
        ) from error
