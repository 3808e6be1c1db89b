"""The same admissions by the script in the real Redis, and by the rule for breakers that are values."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.breakers.rules.admission import BreakerAnswer, admit, give_back
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, caller_of
from breakwater.breakers.store import BreakerAdmitted, BreakerRefused, Breakers, Saving
from breakwater.kernel.redis.connection import Redis
from tests.servers import RunningServer

KEY = BreakerKey("writer", "gpt-4o")
LEASE_MS = 30_000
CALLERS = [caller_of("a", "t"), caller_of("a", "u"), caller_of("b", "t"), ""]
MOMENTS = st.sampled_from([-3_600_000, 3_600_000])
"""Relative to now, and far from it: the time between two readings of a clock must change nothing."""

BREAKERS = st.builds(
    Breaker,
    state=st.sampled_from(["closed", "open", "open", "open", "half_open", "half_open", "half_open", "isolated"]),
    open_until_ms=MOMENTS,
    probe=st.sampled_from([None, "job:1", "other:1"]),
    probe_until_ms=MOMENTS,
    version=st.integers(1, 9),
    counts_from=st.integers(0, 9),
    alone=st.sampled_from(["", "", *CALLERS[0].split(), CALLERS[0]]),
    probed_by=st.sampled_from(CALLERS),
    task=st.sampled_from(["", "5eed0001"]),
    waits=st.booleans(),
)


def test_the_rule_admits_as_the_script_does(redis_server: RunningServer) -> None:
    with asyncio.Runner() as runner:
        redis = Redis(redis_server.url)

        @settings(max_examples=10 * settings.default.max_examples)
        @given(BREAKERS, st.sampled_from(CALLERS), st.sampled_from(["", "5eed0001", "5eed0002"]))
        def admits_alike(breaker: Breaker, caller: str, task: str) -> None:
            runner.run(_admits_alike(redis, breaker, caller, task))

        try:
            admits_alike()
        finally:
            runner.run(redis.close())


async def _admits_alike(redis: Redis, breaker: Breaker, caller: str, task: str) -> None:
    breakers = Breakers(redis)
    await redis.client.flushall()
    [empty] = await breakers.load([KEY])
    moments = {name: empty.now_ms + getattr(breaker, name) for name in ("open_until_ms", "probe_until_ms")}
    breaker = replace(breaker, **moments)
    assert await breakers.save([Saving(KEY, empty, breaker, None)]) == [True]
    [answer] = await redis.run([Breakers.admit_command(KEY, "job:1", LEASE_MS, caller, task)])
    [after] = await breakers.load([KEY])
    asked_ms = empty.now_ms if after.breaker == breaker else after.breaker.probe_until_ms - LEASE_MS
    expected, admission = admit(breaker, "job:1", asked_ms, LEASE_MS, caller, task)
    assert after.breaker == expected
    match Breakers.read_admission(answer):
        case BreakerAdmitted(probe, version, became_half_open):
            assert admission == BreakerAnswer(True, version, is_probe=probe, became_half_open=became_half_open)
        case BreakerRefused(until_ms, _, probing):
            assert admission == BreakerAnswer(False, breaker.version, is_probe=probing, until_ms=until_ms)
    await redis.run([Breakers.return_probe_command(KEY, "job:1")])
    [given_back] = await breakers.load([KEY])
    assert given_back.breaker == give_back(expected, "job:1")
