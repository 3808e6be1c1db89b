"""What ClickHouse has of the conversations with a model of each kind of provider: each must have the same."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

ARRIVAL_S = 60
"""The longest time until a record is stored."""
WITHOUT_REASONING_TOKENS = frozenset({"bedrock", "bedrock-claude"})
"""Kinds whose API does not say how many tokens a model thought."""
WITH_CACHE_WRITES = frozenset({"anthropic", "bedrock", "bedrock-claude", "vertex-claude"})
"""Kinds whose API reports what was written to the prompt cache."""
TASK = "SELECT * FROM {table} FINAL WHERE startsWith(task_id, {{client:String}}) ORDER BY {time} FORMAT JSONEachRow"


def problems(
    clickhouse_url: str, client: str, doors: Collection[str], kinds: Mapping[str, str], price: Mapping[str, Any]
) -> Iterator[str]:
    """Yields what is wrong with the records of a client's tasks, whose names `checks.task_of` has made.

    Args:
        clickhouse_url: with user and password.
        client: the name of the SDK.
        doors: the APIs that it entered through.
        kinds: the deployment of each kind of provider.
        price: of all of them.
    """
    client = client.replace("/", "-")
    conversations = _conversations(clickhouse_url, f"{client}/", 2 * len(kinds) * len(doors))
    for door in doors:
        for kind, deployment in kinds.items():
            whole, streamed = (
                conversations.get((client, door, f"ship-{kind}", mode), []) for mode in ("whole", "streamed")
            )
            if whole != streamed:
                yield f"{door}, {kind}: {whole} whole, but {streamed} streamed"
            elif whole != (expected := _expected(kind, deployment, price)):
                yield f"{door}, {kind}: {whole}, not {expected}"


def _expected(kind: str, deployment: str, price: Mapping[str, Any]) -> list[dict[str, Any]]:
    written = 200 if kind in WITH_CACHE_WRITES else 0
    usd = {name: Decimal(str(amount)) for name, amount in price.items()}
    cost = (
        (220 - written) * usd["input_usd_per_mtok"]
        + 1000 * usd["cached_input_usd_per_mtok"]
        + written * usd["cache_write_usd_per_mtok"]
        + 9 * usd["output_usd_per_mtok"]
    ) / 1_000_000
    tokens = {"input_tokens": 1220, "output_tokens": 9, "cached_tokens": 1000}
    call = {
        **tokens,
        "reasoning_tokens": None if kind in WITHOUT_REASONING_TOKENS else 5,
        "outcome": "success",
        "cause": "first",
        "deployment": deployment,
        "dropped_params": [],
        "usage_problem": None,
        "cost": f"{cost:.9f}",
    }
    ended = {**tokens, "status": "succeeded", "chosen_model": f"ship-{kind}", "total_cost": f"{cost:.9f}"}
    first = {"finish_reason": "tool_calls", "said": None, "called": [["find_ship", {"name": "ferry"}]]}
    second = {"finish_reason": "stop", "said": "The ferry is at sea.", "called": []}
    return [{**ended, **turn, "calls": [{**call, "finish_reason": turn["finish_reason"]}]} for turn in (first, second)]


def _conversations(clickhouse_url: str, start: str, count: int) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Returns the executions of each task, in their order, with what all kinds of providers have in common.

    Waits for so many tasks, of two executions each, with their attempts.
    """
    deadline = time.monotonic() + ARRIVAL_S
    while True:
        executions = _rows(clickhouse_url, "executions", "queued_at", start)
        attempts = _rows(clickhouse_url, "attempts", "started_at", start)
        tasks: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in executions:
            calls = [_call(one) for one in attempts if one["execution_id"] == row["execution_id"]]
            tasks.setdefault(tuple(row["task_id"].split("/")), []).append({**_end(row), "calls": calls})
        arrived = sum(len(each) >= 2 and all(one["calls"] for one in each) for each in tasks.values())
        if arrived >= count or time.monotonic() > deadline:
            return tasks
        time.sleep(1)


def _call(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "outcome", "finish_reason", "cause")
    return {name: row[name] for name in (*names, "deployment", "dropped_params", "usage_problem", "cost")}


def _end(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("input_tokens", "output_tokens", "cached_tokens", "status", "finish_reason", "chosen_model", "total_cost")
    return {**{name: row[name] for name in names}, **_content(json.loads(row["output"] or "null"))}


def _content(output: Any) -> dict[str, Any]:
    """Returns the text of an answer, and the calls of tools with their arguments."""
    if isinstance(output, str) or output is None:
        return {"said": output, "called": []}
    functions = [call["function"] for call in output["tool_calls"]]
    called = [[function["name"], json.loads(function["arguments"])] for function in functions]
    return {"said": output["content"], "called": called}


def _rows(clickhouse_url: str, table: str, time_column: str, start: str) -> list[dict[str, Any]]:
    parts = urlsplit(clickhouse_url)
    credential = base64.b64encode(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()).decode()
    query = {"database": "breakwater", "param_client": start, "output_format_json_quote_decimals": 1}
    query |= {"output_format_decimal_trailing_zeros": 1, "output_format_json_quote_64bit_integers": 0}
    request = urllib.request.Request(
        f"{parts.scheme}://{parts.hostname}:{parts.port}/?{urlencode(query)}",
        TASK.format(table=table, time=time_column).encode(),
        {"Authorization": f"Basic {credential}"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [json.loads(line) for line in answer.read().splitlines()]
