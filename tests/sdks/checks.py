"""What the programs of this folder share. Each runs in an environment of its own, with nothing of Breakwater in it."""

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

QUESTION = "Where is the ferry?"
WRITER, SMALL = "gpt-4o", "gpt-4o-mini"
"""Models of the agent that the API key is bound to: these programs do not know that there is one.

The simulated WRITER calls `find_ship` wherever that tool is offered; SMALL calls no tool that is not demanded.
"""

_CHECKS: list[tuple[str, Callable[[], Any]]] = []


def check(what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Names a function, async or not, that raises where a client does not get what it should."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _CHECKS.append((what, function))
        return function

    return add


def run() -> None:
    """Runs all checks, and prints of each a line of JSON."""
    for what, function in _CHECKS:
        try:
            if inspect.isawaitable(made := function()):
                asyncio.run(_awaited(made))
            error = None
        except Exception as failed:  # noqa: BLE001  whatever is raised is the result
            error = f"{type(failed).__name__}: {failed}"
        print(json.dumps({"what": what, "error": error}), flush=True)


async def _awaited(made: Any) -> None:
    await made
