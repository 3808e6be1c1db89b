"""What a stream holds since a time, read by direct get: it takes no consumer, which programs may not create."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from typing import cast

import nats.errors
from nats.aio.client import Client

from breakwater.bus.errors import BusUnavailable
from breakwater.cli.tail_lines import Told
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import format_time

BATCH = 500
PATIENCE_S = 5.0
NOTHING_THERE = "404"


async def stored(client: Client, stream: Stream, subject: str, since: datetime) -> AsyncGenerator[Told]:
    """The messages of a stream since a time, in order, up to what is there now.

    Args:
        client: any user that may read the stream.
        stream: which.
        subject: a subject, wildcards allowed.
        since: when the stream took the first one.

    Raises:
        BusUnavailable: no answer.
    """
    start: dict[str, object] = {"start_time": format_time(since)}
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    try:
        while True:
            request = {"batch": BATCH, "next_by_subj": subject, **start}
            await client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=inbox)
            while True:
                try:
                    message = await answers.next_msg(timeout=PATIENCE_S)
                except (TimeoutError, nats.errors.Error) as error:
                    raise BusUnavailable(f"NATS did not hand out what {stream} holds") from error
                headers = cast(Mapping[str, str], message.headers or {})
                if (status := headers.get("Status")) is not None:
                    break
                yield Told(headers.get("Nats-Subject", ""), message.data, headers)
                start = {"seq": int(headers["Nats-Sequence"]) + 1}
            if status == NOTHING_THERE or headers.get("Nats-Num-Pending", "0") == "0":
                return
    finally:
        await answers.unsubscribe()
