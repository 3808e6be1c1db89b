"""All cases in one plane: what was expected of each, and what was seen."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.jobs.rules.chat_messages import fields
from tests.flow.kit import model
from tests.reports.case import FALLBACK, PRICE, Case, Check
from tests.reports.wire import Dialect, Provider, Reply, block, chat, events, message, providing, said
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.worker.harness import WorkerPlane, running_worker

MAX_ATTEMPTS = 2
AGENT: Mapping[str, Any] = {
    "model": "openai/none",
    "allowed_models": ["*"],
    "retry": {"max_attempts": MAX_ATTEMPTS, "backoff": "constant", "base_s": 0.01},
    "timeout_s": 10,
    "total_timeout_s": 25,
    "concurrency": 64,
}
AT_ONCE = 64
LONGEST_S = 60.0
GOOD: Mapping[tuple[Dialect, bool], Reply] = {
    ("openai", False): chat(FALLBACK),
    ("openai", True): said(FALLBACK),
    ("anthropic", False): message(FALLBACK),
    ("anthropic", True): events(*block(FALLBACK)),
}
FOREIGN = re.compile(
    r"TransferEncodingError|payload is not completed|Client[A-Z]\w*Error|Cannot connect to host|Server disconnected"
    r"|\[Errno|aiohttp|orjson|unexpected (character|end of data)|Traceback|object at 0x|<class '|Not enough data"
)
"""The words of others' exceptions."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case, and what was seen of all that it expects."""

    case: Case
    seen: Mapping[str, Any]

    @property
    def wrong(self) -> Sequence[str]:
        """The names of what was not as expected."""
        return [name for name, wanted in self.case.expected.items() if not agrees(wanted, self.seen.get(name))]


def agrees(wanted: Any, found: Any) -> bool:
    """Whether what was found is what was expected."""
    return wanted(found) if isinstance(wanted, Check) else wanted == found


async def run_all(cases: Sequence[Case], directory: Path, nats: RunningServer, redis: RunningServer) -> list[Outcome]:
    """Runs cases side by side. Each has models of its own, and so breakers and holds."""
    answers = {case.sent_as: case.answers for case in cases}
    answers |= {f"{case.name}-fallback": [GOOD[case.dialect, case.stream]] for case in cases}
    models = {f"{case.dialect}/{case.name}": case.model or {"price": PRICE} for case in cases}
    models |= {f"{case.dialect}/{case.name}-fallback": {"price": PRICE} for case in cases}
    agents = {case.agent_name: {**AGENT, **case.agent} for case in cases}
    at_once = asyncio.Semaphore(AT_ONCE)
    async with providing(answers) as provider:
        started = running_worker(
            directory,
            nats_url=nats.url,
            redis_url=redis.url,
            script={"models": {"none": model()}},
            agents=agents,
            more_models=models,
            more_providers={
                "openai": {"base_url": f"{provider.origin}/v1"},
                "anthropic": {"kind": "anthropic", "base_url": f"{provider.origin}/v1"},
            },
        )
        async with started as worker:
            settings = settings_for(nats.url, redis.url, directory)
            key = create_key(settings.api_keys_file, "tests")
            async with running(settings, load_config(directory / "breakwater.yaml"), key) as api:
                return await asyncio.gather(*(_run(case, api, worker, provider, at_once) for case in cases))


async def _run(
    case: Case, api: HttpApi, worker: WorkerPlane, provider: Provider, at_once: asyncio.Semaphore
) -> Outcome:
    body = {
        "model": f"{case.agent_name}/{case.dialect}/{case.name}",
        "messages": case.messages,
        **case.params,
        **({"stream": True, "stream_options": {"include_usage": True}} if case.stream else {}),
        "breakwater": {"fallback_models": [f"{case.dialect}/{case.name}-fallback"] if case.fallback else []},
    }
    seen: dict[str, Any] = {"status": "never answered"}
    async with at_once:
        for _ in range(case.times):
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_S):
                    seen = await _ask(body, api, worker)
    first, second = (provider.asked.get(name, []) for name in (case.sent_as, f"{case.name}-fallback"))
    return Outcome(case, seen | {"calls": len(first), "fallback": len(second), "asked": first})


async def _ask(body: Mapping[str, Any], api: HttpApi, worker: WorkerPlane) -> dict[str, Any]:
    answer = await api.ask("POST", "/v1/chat/completions", data=json.dumps(body).encode())
    result = await worker.result(answer.headers["X-Request-ID"])
    return _of_client(answer.status, answer.body) | _of_record(result)


def _of_record(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says: of the job, and of the first attempt."""
    attempts: list[dict[str, Any]] = result["attempts"]
    first = attempts[0] if attempts else {}
    error, output = first.get("error") or {}, result.get("output")
    told = output if isinstance(output, dict) else {"content": output}
    return {
        "status": result["status"],
        "reason": result["reason"],
        "kind": error.get("kind"),
        "class": error.get("class"),
        "error": error.get("message"),
        "counted": first.get("counts_for_breaker"),
        "finish": attempts[-1].get("finish_reason") if attempts else None,
        "cost": _nano(first.get("cost")),
        "total": _nano(result["total_cost"]),
        "basis": first.get("cost_basis"),
        "problem": first.get("usage_problem"),
        "tokens": tuple(first.get(f"{name}_tokens") for name in ("input", "output", "cached")),
        "output": told.get("content"),
        "kept": [fields(one).get("function") for one in items(told.get("tool_calls"))],
        "lost": any(one["outcome"] == "worker_lost" for one in attempts) or result["reason"] == "worker_lost",
        "wait_ms": max((one["backoff_ms"] for one in attempts), default=0),
    }


def _nano(usd: str | None) -> int | None:
    return None if usd is None else round(float(usd) * 1e9)


def _of_client(status: int, body: bytes) -> dict[str, Any]:
    """What a client of OpenAI's is given: an answer or an error; whole, or by chunks."""
    text = body.decode()
    seen: dict[str, Any] = {"http": status, "foreign": found[0] if (found := FOREIGN.search(text)) else None}
    if not text.startswith(("data:", ":")):
        answer = json.loads(text)
        [given] = [fields(fields(one).get("message")) for one in items(answer.get("choices"))][:1] or [{}]
        numbered = [{**fields(one), "index": index} for index, one in enumerate(items(given.get("tool_calls")))]
        return seen | {"code": _code(answer), "text": given.get("content"), **_tools(numbered)}
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and "[DONE]" not in line]
    deltas = [fields(fields(choice).get("delta")) for one in chunks for choice in items(one.get("choices"))]
    contents = [delta["content"] for delta in deltas if delta.get("content") is not None]
    joined = "".join(contents) if all(isinstance(one, str) for one in contents) else contents
    seen["code"] = next((code for one in chunks if (code := _code(one)) is not None), None)
    return seen | {"text": joined, **_tools([call for delta in deltas for call in items(delta.get("tool_calls"))])}


def _code(answer: Mapping[str, Any]) -> Any:
    return fields(answer.get("error")).get("code")


def items(value: Any) -> list[Any]:
    """A list, or nothing."""
    return value if isinstance(value, list) else []


def _tools(pieces: Sequence[Any]) -> dict[str, Any]:
    """Tool calls as a client puts them together: by index, texts appended; and what no client could do that with."""
    calls: dict[int, dict[str, str]] = {}
    wrong: list[str] = []
    for piece in pieces:
        index, function = fields(piece).get("index"), fields(fields(piece).get("function"))
        if not isinstance(index, int):
            wrong.append(f"index {index!r}")
            continue
        made = calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        for name, value in (("id", piece.get("id")), *((name, function.get(name)) for name in ("name", "arguments"))):
            if value is not None and not isinstance(value, str):
                wrong.append(f"{name} {value!r}")
            made[name] += value if isinstance(value, str) else ""
    ids = [made["id"] for made in calls.values()]
    wrong += ["a call without an id"] if "" in ids else ["ids twice"] if len(set(ids)) < len(ids) else []
    tools = [(made["name"], _plain(made["arguments"])) for _, made in sorted(calls.items())]
    return {"tools": tools, "malformed": wrong, "ids": ids}


def _plain(arguments: str) -> str:
    """JSON without what may be written in several ways."""
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:
        return arguments
