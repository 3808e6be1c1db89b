"""What the programs of this folder share. Each runs in an environment of its own, with nothing of Breakwater in it."""

import asyncio
import inspect
import json
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

QUESTION = "Where is the ferry?"
WRITER, SMALL = "gpt-4o", "gpt-4o-mini"
"""Models of the agent that the API key is bound to: these programs do not know that there is one.

The simulated WRITER calls `find_ship` wherever that tool is offered; SMALL calls no tool that is not demanded.
"""
SLOW = "gpt-slow"
"""A model that takes 20 s."""
EMBEDDER = "text-embedding-3-small"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PDF = "JVBERi0xLjQKJSVFT0YK"


class Models(NamedTuple):
    """A pair of models like WRITER and SMALL, of one provider."""

    writer: str
    small: str


CHAT, RESPONSES, MESSAGES = (
    Models(WRITER, SMALL),
    Models("gpt-5", "gpt-5-mini"),
    Models("claude-opus-4-5", "claude-haiku-4-5"),
)
"""By the API that their provider speaks. A call through another door is translated."""
KINDS = tuple(
    Models(f"ship-{kind}", f"ship-{kind}")
    for kind in (
        "openai",
        "openai-responses",
        "anthropic",
        "azure",
        "azure-v1",
        "bedrock",
        "bedrock-claude",
        "gemini",
        "vertex",
        "vertex-claude",
    )
)
"""A model of each kind of provider, all with the same answers: they think and call `find_ship`, and say where it is."""
THOUGHT, ANSWER = "A ship; look it up.", "The ferry is at sea."

_CHECKS: list[tuple[str, str, tuple[Models, ...], Callable[..., Any]]] = []


def check(what: str, door: str = "chat", models: tuple[Models, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Names a function, async or not, that raises where a client does not get what it should.

    Args:
        what: the client does.
        door: the API that it enters through.
        models: the function is called with each pair.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _CHECKS.append((what, door, models, function))
        return function

    return add


def task_of(models: Models, sdk: str, door: str, *, streamed: bool = False) -> dict[str, str]:
    """Returns the header of a task, by whose name the records of a conversation are found."""
    return {"x-breakwater-task-id": f"{sdk}/{door}/{models.writer}/{'streamed' if streamed else 'whole'}"}


def thought_of(models: Models, door: str) -> str:
    """Returns the thought that comes with the tool call: some APIs show none."""
    hides = models.writer in ("ship-azure", "ship-vertex") or (models.writer == "ship-azure-v1" and door != "Responses")
    return "" if hides else THOUGHT


def raises(error: type[BaseException], function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Returns the error that a call raises."""
    try:
        function(*args, **more)
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__}")


async def araises(error: type[BaseException], call: Awaitable[Any]) -> Any:
    """Returns the error that a call raises."""
    try:
        await call
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__}")


def limited_task(**rate_limit: int) -> dict[str, str]:
    """Returns the headers of a call of a new task with a rate limit, beyond which calls are refused."""
    rule = json.dumps({**rate_limit, "on_exceeded": "fail"})
    return {"x-breakwater-task-id": uuid.uuid4().hex, "x-breakwater-rate-limit": rule}


def backoff_of(refusal: type[Exception], create_with: Callable[[int], Any]) -> tuple[float, float]:
    """Returns the wait that a refusal asks for, and the time that the SDK takes to retry once and be refused again.

    Args:
        refusal: the SDK's error of a call that is refused.
        create_with: makes a call with so many retries. Another call is about to take the only slot for long.
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(1)  # the other call must come first
        try:
            create_with(0)
        except refusal as refused:
            error: Any = refused
            wait_s = int(error.response.headers["retry-after-ms"]) / 1000
            began = time.monotonic()
            raises(refusal, create_with, 1)
            return wait_s, time.monotonic() - began
    raise AssertionError("no call was refused")


def run() -> None:
    """Runs all checks, and prints of each a line of JSON."""
    with asyncio.Runner() as runner:  # clients keep their connections, which belong to a loop
        for what, door, models, function in _CHECKS:
            errors = [_error(runner, function, pair) for pair in models] or [_error(runner, function)]
            failed = [error for error in errors if error is not None]
            print(json.dumps({"what": what, "door": door, "error": "; ".join(failed) or None}), flush=True)


def _error(runner: asyncio.Runner, function: Callable[..., Any], *models: Models) -> str | None:
    try:
        if inspect.isawaitable(made := function(*models)):
            runner.run(_awaited(made))
    except Exception as failed:  # noqa: BLE001  whatever is raised is the result
        place = traceback.extract_tb(failed.__traceback__)[-1]
        text = str(failed) or f"line {place.lineno}: {place.line}"
        return "".join(f"{pair.writer}: " for pair in models) + f"{type(failed).__name__}: {text}"
    return None


async def _awaited(made: Any) -> None:
    await made
