"""Requests whose caller loses its access while they are answered."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request

from breakwater.identity.auth import CallerWatch, on_leaving, why_refused
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.http.server import CLIENT, ClientPresence
from tests.helpers import until


async def test_a_caller_that_loses_its_access_before_it_waits_is_not_waited_for() -> None:
    async def revoked() -> str:
        return "this API key was revoked"

    caller = Caller("key", "id", "laptop", ("submit",), datetime.now(UTC))
    watch = CallerWatch(caller, revoked)
    request = Request({"type": "http", CLIENT: ClientPresence(list), "breakwater.caller.watch": watch})
    watch.look()
    await until(lambda: why_refused(request) is not None)
    left: list[bool] = []
    stop = on_leaving(request, lambda: left.append(True))
    assert left == [True]
    assert watch.ended_wait
    stop()
    assert not watch.leaving
