"""Errors as `errors.yaml` has them: by their status, in a 200, and as the first event of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from tests.reports.case import Case, among, bad
from tests.reports.wire import Body, Reply, stream

_RULES = (
    "agent",
    "dialect",
    "in_200",
    "by_status",
    "in_list",
    "stream_events",
    "status",
    "headers",
    "body",
    "expected",
)
"""What says how an error is sent. All else are its fields; `status_name` is `status` there."""


def cases() -> Iterator[Case]:
    """Of all groups, each error sent in one of its ways, in turn: how it is sent says nothing of its words."""
    turns = count()
    for group in yaml.safe_load((Path(__file__).parent / "errors.yaml").read_text()):
        worded = {str(number): {"message": text} for number, text in enumerate(group.get("messages", ()))}
        rules = {name: group[name] for name in _RULES if name in group}
        for name, error in (worded | group.get("errors", {})).items():
            expected = {**rules["expected"], **error.get("expected", {})}
            ways = list(_sent(group["row"], f"{group['name']}-{name}", {**rules, **error, "expected": expected}))
            yield ways[next(turns) % len(ways)]


def _sent(row: str, name: str, rules: Body) -> Iterator[Case]:
    error = {key: value for key, value in rules.items() if key not in _RULES}
    if "status_name" in error:
        error["status"] = error.pop("status_name")
    is_anthropic = rules.get("dialect") == "anthropic"
    body: Any = rules.get("body", {**({"type": "error"} if is_anthropic else {}), "error": error})
    data: Any = [body] if rules.get("in_list") else body.encode() if isinstance(body, str) else body
    how: dict[str, Any] = {"dialect": rules.get("dialect", "openai"), "agent": rules.get("agent", {})}
    expected = _expected(**rules["expected"])
    if rules.get("by_status", True):
        reply = Reply(data, rules.get("status", 429), rules.get("headers", {}))
        yield Case(row, name, [reply], expected, **how)
        yield Case(row, f"{name}-streamed", [reply], expected, stream=True, **how)
        if not isinstance(data, str | bytes | list):
            event = Reply((data,), reply.status, reply.headers)
            yield Case(row, f"{name}-as-event", [event], expected, stream=True, **how)
    if rules.get("in_200", not rules.get("by_status", True)):
        yield Case(row, f"{name}-in-200", [Reply(body)], expected, **how)
        yield Case(row, f"{name}-in-200-whole", [Reply(body)], expected, stream=True, **how)
        if rules.get("stream_events", True):
            first = Reply((body,)) if is_anthropic else stream(body)
            yield Case(row, f"{name}-event", [first], expected, stream=True, **how)


def _expected(calls: Any, **more: Any) -> Body:
    named: Body = {"calls": calls, **more}
    return bad(**{name: among(*value) if isinstance(value, list) else value for name, value in named.items()})
