"""All that can happen to a streamed answer, on a whole plane: what the client sees, and what is left on record."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from breakwater.kernel.types import nano_from_usd
from tests.chaos.plane import Chaos, chaos_plane, serving
from tests.flow.kit import model
from tests.server_sources import Servers

ANSWER = "".join(f"{number:03d} " for number in range(60))
PER_S = 20.0
"""Tokens, of an answer that something happens to on its way."""
MIDDLE = 20
"""After so many of them it happens."""
IDLE_S = 2.0
AWAY_S = 5.0

Mode = Literal["fail", "continue"]
Ending = Literal["whole", "part", "cut off", "left"]
"""All of the text, and `[DONE]`; some of it, and an error event; the connection broke; the client closed it."""

HEADER = (
    "| what happens | `on_stream_break` | the client sees | text | longest pause | calls | cost | attempts |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(slots=True)
class Seen:
    """What a client has received."""

    execution_id: str = ""
    text: str = ""
    ending: Ending = "cut off"
    error: str = ""
    pause_s: float = 0.0
    """The longest, from the first content on."""


@dataclass(frozen=True, slots=True)
class Case:
    """A stream, and what happens to it.

    Attributes:
        name: of its agent and its model.
        what: happens, in words.
        ends: how the client's stream must end, by mode.
        fault: of the provider, in the first call.
        cause: what is done once some of the answer has come.
        leaves: the client closes its connection then.
        again: the client asks again with the same key, and must get all.
        keyed: its calls have an idempotency key.
    """

    name: str
    what: str
    ends: dict[Mode, Ending]
    fault: dict[str, Any] | None = None
    cause: Callable[[Chaos], Coroutine[Any, Any, None]] | None = None
    leaves: bool = False
    again: bool = False
    keyed: bool = True

    def agent(self, mode: Mode) -> str:
        """Of this case."""
        return f"{self.name}-{mode}"


async def _workers_killed(chaos: Chaos) -> None:
    for name in ("worker", "worker-2"):
        chaos.plane.kill(name)
    for name in ("worker", "worker-2"):
        chaos.plane.start("worker", name)


async def _request_killed(chaos: Chaos) -> None:
    chaos.plane.kill("request")
    chaos.plane.start("request")
    await serving(chaos.http)


async def _nats_stopped(chaos: Chaos) -> None:
    pid = chaos.servers["nats"].pid
    os.killpg(pid, signal.SIGSTOP)
    await asyncio.sleep(AWAY_S)
    os.killpg(pid, signal.SIGCONT)


async def _nats_killed(chaos: Chaos) -> None:
    chaos.servers["nats"].kill()
    await asyncio.sleep(AWAY_S)
    await chaos.servers["nats"].restart_async()


_BREAKS: dict[Mode, Ending] = {"fail": "part", "continue": "whole"}
_UNSEEN: dict[Mode, Ending] = {"fail": "whole", "continue": "whole"}
_UNSEEN_ONCE: dict[Mode, Ending] = {"fail": "whole"}
CASES = (
    Case("cut-0", "broken before the first chunk", _UNSEEN, {"stream": "cut", "after_chunks": 0}),
    Case("cut", "broken after 40 of 60 tokens", _BREAKS, {"stream": "cut", "after_chunks": 40}),
    Case("silent", "silent for 30 s after 40 tokens", _BREAKS, {"stream": "stall", "after_chunks": 40, "stall_s": 30}),
    Case("malformed", "one malformed event", _BREAKS, {"stream": "malformed", "after_chunks": 40}),
    Case("no-done", "`[DONE]` missing", _UNSEEN_ONCE, {"stream": "no_end"}),
    Case("no-end", "ends after 40 tokens, in order", _BREAKS, {"stream": "no_end", "after_chunks": 40}),
    Case(
        "error",
        "the provider's error inside a 200",
        _BREAKS,
        {"stream": "error", "after_chunks": 40, "error": {"type": "overloaded_error", "message": "overloaded"}},
    ),
    Case("worker", "the worker is killed", _BREAKS, cause=_workers_killed),
    Case("request", "`request` is killed", {"fail": "cut off"}, cause=_request_killed, again=True),
    Case("nats-stop", f"NATS stopped for {AWAY_S:g} s", _UNSEEN, cause=_nats_stopped),
    Case("nats-kill", f"NATS killed, back after {AWAY_S:g} s", _UNSEEN, cause=_nats_killed),
    Case("left", "the client is gone, with an idempotency key", {"fail": "left"}, leaves=True, again=True),
    Case("cancelled", "the client is gone, without one", {"fail": "left"}, leaves=True, keyed=False),
)


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """What is left of one case.

    Attributes:
        case: which.
        mode: of the agent.
        seen: by the client.
        again: by the client that asked again, if it did.
        calls: by the provider, the log and ClickHouse.
        costs: nano-dollars by the log, ClickHouse's executions and attempts, and the counters in Redis.
        reserved: what the budgets still hold back.
        result: the job's.
    """

    case: Case
    mode: Mode
    seen: Seen
    again: Seen | None
    calls: tuple[int, int, int]
    costs: tuple[int, int, int, int]
    reserved: int
    result: dict[str, Any]

    def faults_found(self) -> list[str]:
        """What is not as it must be."""
        seen, wanted = self.seen, self.case.ends[self.mode]
        found: list[str] = []
        if seen.ending != wanted:
            found.append(f"ended as {seen.ending}, not {wanted}")
        if not ANSWER.startswith(seen.text) or (wanted == "whole") != (seen.text == ANSWER):
            found.append(f"the text is {seen.text!r}")
        # With `fail`, what was said is known to its worker alone.
        said = None if self.case.name == "worker" else seen.text
        if not self.case.keyed and self.result["status"] != "cancelled":
            found.append(f"it is {self.result['status']}")
        if wanted == "part" and self.result["output"] != said:
            found.append(f"the record says {self.result['output']!r}")
        if self.again is not None and (self.again.ending, self.again.text) != ("whole", ANSWER):
            found.append(f"asked again, it {self.again.ending}: {self.again.text!r}")
        if len(set(self.calls)) > 1:
            found.append(f"calls by the provider, the log and ClickHouse: {self.calls}")
        if len(set(self.costs)) > 1:
            found.append(f"costs by the log, ClickHouse, ClickHouse's attempts and Redis: {self.costs}")
        if self.reserved:
            found.append(f"{self.reserved} nano-dollars stay reserved")
        return found

    def row(self) -> str:
        """A line of the table."""
        seen = self.seen
        said = {"whole": "the answer, `[DONE]`", "part": seen.error, "cut off": "the connection breaks", "left": "–"}
        sees = said[seen.ending]
        if self.again is not None:
            sees += "; with the same key again: the answer"
        tokens = len(seen.text) // 4
        text = "exact" if seen.text == ANSWER else f"{tokens} of 60 tokens, exact"
        costs, calls = (" / ".join(map(str, dict.fromkeys(of))) for of in (map(_usd, self.costs), self.calls))
        attempts = ", ".join(
            f"{(one['error'] or {}).get('class') or one['outcome']} ({one['cost_basis']})"
            for one in self.result["attempts"]
        )
        mode = self.mode if len(self.case.ends) > 1 else "either"
        return (
            f"| {self.case.what} | {mode} | {sees} | {text} | {seen.pause_s:.1f} s | {calls} | {costs} | {attempts} |"
        )


def _usd(nano: int) -> str:
    return f"${nano / 1e9:.6f}"


async def stream_outcomes(directory: Path, source: Servers) -> AsyncGenerator[StreamOutcome]:
    """Runs all cases on one plane, one after the other, so that what each has cost can be told apart."""
    made: list[tuple[Case, Mode]] = [(case, mode) for case in CASES for mode in case.ends]
    models = {f"sim/{case.agent(mode)}": _model(case) for case, mode in made}
    agents = {
        case.agent(mode): {
            "model": f"sim/{case.agent(mode)}",
            "max_tokens": 1000,
            "breaker": "off",
            "timeout_s": 10,
            "stream_idle_timeout_s": IDLE_S,
            "on_stream_break": mode,
            "retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.1},
            "budget": {"monthly_usd": 1000, "enforcement": "hard"},
        }
        for case, mode in made
    }
    async with chaos_plane(directory, source, nodes=1, disks={}, clocks={}, models=models, agents=agents) as chaos:
        for case, mode in made:
            yield await _outcome(chaos, case, mode)


def _model(case: Case) -> dict[str, Any]:
    if case.fault is not None:
        return model({**case.fault, "requests": [1, 1]}, answer=ANSWER)
    return model(answer=ANSWER, stream={"tokens_per_s": PER_S})


async def _outcome(chaos: Chaos, case: Case, mode: Mode) -> StreamOutcome:
    agent = case.agent(mode)
    key, called = f"job-{agent}", len(chaos.plane.sim.ledger.calls)
    counted, stored = (await chaos.counters())[0], await chaos.stored()
    seen = await _asked(chaos, case, agent, key if case.keyed else None)
    again = await _asked(chaos, None, agent, key) if case.again else None
    key = seen.execution_id
    result = await chaos.plane.result(key)
    [record] = await chaos.plane.messages("EVENTS", f"bw.executions.{agent}.*", at_least=1)
    attempts = await chaos.plane.attempts(agent, key)
    spent = sum(nano_from_usd(one["cost"]) for one in attempts)
    now, reserved = await chaos.last(chaos.counters, lambda found: found == (counted + spent, 0), 30)
    rows = await chaos.last(chaos.stored, lambda found: found == (stored[0] + spent, stored[1] + spent), 30)
    in_clickhouse = await chaos.analytics.query(
        "SELECT count() FROM attempts FINAL WHERE execution_id = {id:String}", {"id": key}
    )
    return StreamOutcome(
        case,
        mode,
        seen,
        again,
        (len(chaos.plane.sim.ledger.calls) - called, len(attempts), int(in_clickhouse.rows[0][0])),
        (nano_from_usd(record["total_cost"]), rows[0] - stored[0], rows[1] - stored[1], now - counted),
        reserved,
        result,
    )


async def _asked(chaos: Chaos, case: Case | None, agent: str, key: str | None) -> Seen:
    """What a client sees, while what the case is about happens."""
    seen, chunks, cause = Seen(), 0, None
    ask = {"model": agent, "messages": [{"role": "user", "content": "Count."}], "stream": True}
    timeout, last, headers = aiohttp.ClientTimeout(total=180), 0.0, {"Idempotency-Key": key} if key else {}
    try:
        async with chaos.http.post("/v1/chat/completions", json=ask, headers=headers, timeout=timeout) as response:
            assert response.status == 200, await response.text()
            seen.execution_id = response.headers["x-breakwater-execution-id"]
            async with aclosing(_events(response)) as events:
                async for event in events:
                    if not _noted(seen, event):
                        continue
                    now, chunks = time.monotonic(), chunks + 1
                    seen.pause_s, last = max(seen.pause_s, now - (last or now)), now
                    if case is not None and chunks == MIDDLE:
                        if case.leaves:
                            seen.ending = "left"
                            return seen
                        if case.cause is not None:
                            cause = asyncio.create_task(case.cause(chaos))
    except aiohttp.ClientError:
        seen.ending = "cut off"
    if cause is not None:
        await cause
    return seen


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def _noted(seen: Seen, event: str) -> bool:
    """Notes an event. Returns whether it has content."""
    if event == "[DONE]":
        seen.ending = "whole"
        return False
    data = json.loads(event)
    if "error" in data:
        seen.ending, seen.error = "part", f"an error event: `{data['error']['code']}`"
        return False
    text = "".join(choice["delta"].get("content") or "" for choice in data["choices"])
    seen.text += text
    return bool(text)
