"""`breakwater submit --via nats`: a job straight to NATS, and its result from there."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from nats.aio.msg import Msg
from pydantic import ValidationError

from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import scoped_execution
from breakwater.kernel.commands import connect
from breakwater.kernel.commands.errors import CliError, ExitCode, unreachable
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusUnavailableError, PublishRefusedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.security.encryption import OFF
from breakwater.kernel.validation import explain
from breakwater.local.plane import PlaneLocation

FIRST_LOOK_S, LONGEST_LOOK_S = 0.1, 2.0
"""Between two looks for a result; each pause is twice the last one."""


async def send(plane: PlaneLocation, job: dict[str, Any], *, wait_s: float) -> dict[str, Any] | None:
    """Publishes a job, and waits for its result.

    Returns:
        The result; None while it is accepted and not decided.

    Raises:
        CliError: it was not accepted, or whether it was can't be known.
    """
    try:
        checked = Job.model_validate(job)
    except ValidationError as error:
        # The worker would dead-letter it; here it can still be corrected.
        raise CliError("invalid_job", explain(error, Job), exit_code=ExitCode.USAGE) from None
    called = scoped_execution(job["job_id"], None)
    result = subjects.result(called)
    try:
        cipher = plane.cipher()
    except ConfigError:
        cipher = OFF  # a submitter need not have the config, nor its keys
    async with connect.bus(plane.nats_url) as client:
        received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def receive(message: Msg) -> None:
            if not received.done():
                received.set_result(message.data)

        # Received where the user may subscribe to results; the look-ups below find it in any case.
        # A dry run takes no id, so no look-up finds its result.
        inbox = client.new_inbox() if checked.dry_run else None
        await client.subscribe(inbox or result, cb=receive)
        await _publish(Publisher(lambda: client, "cli", cipher), checked.agent, called, job, inbox)
        lookup, deadline, pause_s = Lookup(lambda: client, cipher), time.monotonic() + wait_s, FIRST_LOOK_S
        while (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait([received], timeout=min(pause_s, left_s))
            if received.done():
                return json.loads(cipher.decrypt_document(received.result()))
            # An id that was used before has its result already: none will be received.
            if (found := await lookup.last(Stream.RESULTS, result)) is not None:
                return json.loads(found.data)
            pause_s = min(pause_s * 2, LONGEST_LOOK_S)
    return None


async def _publish(publisher: Publisher, agent: str, called: str, job: dict[str, Any], inbox: str | None) -> None:
    subject = subjects.job(agent)
    payload = json.dumps(job if inbox is None else {**job, "reply_to": inbox}, ensure_ascii=False).encode()
    try:
        await publisher.job(subject, payload, {Header.MSG_ID.value: subjects.message_id(agent, called)})
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
