from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue, TypeAdapter, ValidationError

from breakwater.calls.providers.base import Answer, CallError, Provider
from breakwater.calls.providers.python import NonRetryableError, PythonProvider, Reply
from breakwater.calls.providers.registry import LOCAL_KINDS, ProviderEntry, PythonSettings
from breakwater.calls.rules.classify import Classification, classify
from breakwater.kernel.errors import ConfigError
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import local_call as call
from tests.tables import each_row

ON_BOTH_LOOPS = True
Opener = Callable[..., PythonProvider]
Request = dict[str, JsonValue]


@pytest.fixture
async def opened() -> AsyncGenerator[Opener]:
    """Providers of callables, and sees to it that nothing of them goes on."""
    before = len(asyncio.all_tasks())
    providers: list[Provider] = []

    def open_(function: Any, cost_per_call: int | None = None) -> PythonProvider:
        provider = PythonProvider("a:b", function, cost_per_call=cost_per_call)
        providers.append(provider)
        return provider

    yield open_
    for provider in providers:
        await provider.close()
    assert len(asyncio.all_tasks()) == before


async def failure(provider: Provider, **more: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        await provider.perform(call(**more))
    return caught.value


def verdict(failed: CallError) -> Classification:
    return classify(failed.failure, datetime.now(UTC))


# What it is asked, and what it answers


async def echo(request: Request) -> Any:
    return request


async def test_a_callable_is_asked_with_a_dict_and_its_result_is_the_output(opened: Opener) -> None:
    answer = await opened(echo).perform(call(agent="a", tenant="t", task_id="run", traceparent="00-1-2-01"))
    assert answer == Answer(
        {
            "execution_id": "j",
            "job_id": "j",
            "attempt_id": "j:1",
            "agent": "a",
            "model": "m",
            "tenant": "t",
            "task_id": "run",
            "timeout_s": 20.0,
            "traceparent": "00-1-2-01",
            "stream": False,
            "input": {"question": "why"},
            "params": {},
        },
        Usage(None, None),
    )


async def test_a_callable_can_change_neither_the_job_nor_an_answer_that_it_gave(opened: Opener) -> None:
    kept: list[Any] = []

    async def scribble(request: Request) -> Any:
        kept.append(request)
        messages = request["messages"]
        assert isinstance(messages, list)
        messages.append("scribble")
        assert isinstance(messages[0], dict)
        messages[0]["content"] = "scribble"
        return messages

    said: list[dict[str, JsonValue]] = [{"role": "user", "content": "hello"}]
    asked = call(input=None, messages=said, params={"stop": ["x"]})
    answer = await opened(scribble).perform(asked)
    kept[0]["params"]["stop"].append("y")
    kept[0]["messages"].clear()
    assert said == [{"role": "user", "content": "hello"}]
    assert asked.params == {"stop": ["x"]}
    assert answer.output == [{"role": "user", "content": "scribble"}, "scribble"]


@each_row(
    ("reply", "per_call", "usage", "cost"),
    [
        (Reply("ok"), None, Usage(None, None), None),
        (Reply("ok"), 7, Usage(None, None), 7),
        (Reply("ok", cost_usd="0.0123"), 7, Usage(None, None), 12_300_000),
        (Reply("ok", cost_usd=Decimal("0.00000000049")), 7, Usage(None, None), 0),
        (Reply("ok", usage={"input_tokens": 7, "output_tokens": 5}), None, Usage(7, 5), None),
        (
            Reply("ok", usage={"cached_tokens": 2, "reasoning_tokens": 1}),
            None,
            Usage(None, None, cached_tokens=2, reasoning_tokens=1),
            None,
        ),
    ],
)
async def test_a_callable_may_say_what_it_took(
    opened: Opener, reply: Reply, per_call: int | None, usage: Usage, cost: int | None
) -> None:
    async def answer(request: Request) -> Reply:
        return reply

    assert await opened(answer, per_call).perform(call()) == Answer("ok", usage, cost)


async def test_tuples_and_large_numbers_are_json(opened: Opener) -> None:
    async def answer(request: Request) -> Any:
        return ("a", (1, 2.5, None), {"n": 10**30, 7: True})

    assert (await opened(answer).perform(call())).output == ["a", [1, 2.5, None], {"n": 10**30, "7": True}]


def cyclic() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def deep(levels: int) -> list[Any]:
    return [] if levels == 0 else [deep(levels - 1)]


@each_row(
    ("result", "words"),
    [
        ({1, 2}, "returned something that is not JSON: Object of type set is not JSON serializable"),
        (datetime.now(UTC), "returned something that is not JSON: Object of type datetime"),
        (float("nan"), "returned something that is not JSON: Out of range float"),
        (b"bytes", "returned something that is not JSON: Object of type bytes"),
        (cyclic(), "returned something that is not JSON: Circular reference"),
        (deep(250), "returned something that is not JSON: recursion limit"),
        (deep(900), "returned something that is not JSON: "),
        (Reply({1}), "returned something that is not JSON: Object of type set"),
        (Reply(1, usage={"input_tokens": -1}), "reported an invalid amount: usage.input_tokens: "),
        (Reply(1, usage={"input_tokens": "7"}), "reported an invalid amount: usage.input_tokens: "),  # type: ignore[dict-item]
        (Reply(1, cost_usd="much"), "reported an invalid amount: cost_usd: "),
        (Reply(1, cost_usd=Decimal("NaN")), "reported an invalid amount: cost_usd: "),
        (Reply(1, cost_usd="-0.01"), "reported an invalid amount: cost_usd: "),
    ],
    ids=range(13),
)
async def test_what_no_record_could_hold_is_a_failure_of_the_callable(opened: Opener, result: Any, words: str) -> None:
    async def answer(request: Request) -> Any:
        return result

    failed = await failure(opened(answer))
    found = verdict(failed)
    assert (found.kind, found.class_name, found.retryable) == ("server", "BackendFailureError", True)
    assert found.message.startswith(words)
    assert failed.maybe_billed


# How it fails


class NoTicketsLeftError(Exception):
    pass


class Unlike(BaseException):
    pass


@each_row(
    ("error", "name", "message"),
    [
        (NoTicketsLeftError("ask again at noon"), "NoTicketsLeftError", "ask again at noon"),
        (ValueError(), "ValueError", "ValueError"),
        (TimeoutError("its own"), "TimeoutError", "its own"),
        (ConnectionRefusedError(111, "refused"), "ConnectionRefusedError", "[Errno 111] refused"),
        (StopIteration(), "RuntimeError", "coroutine raised StopIteration"),
        (Unlike("what is this"), "Unlike", "what is this"),
        (SystemExit(3), "RuntimeError", "the callable tried to exit with 3"),
        (asyncio.CancelledError(), "CancelledError", "the callable cancelled itself"),
        (ValueError("word " * 200), "ValueError", "word word"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
async def test_any_exception_is_a_failure_that_is_tried_again(
    opened: Opener, error: BaseException, name: str, message: str
) -> None:
    async def fail(request: Request) -> Any:
        raise error

    failed = await failure(opened(fail))
    found = verdict(failed)
    assert (found.kind, found.class_name, found.status_code) == ("server", name, None)
    assert message in found.message
    assert len(found.message) <= 501
    assert found.retryable
    assert found.counts_for_breaker
    assert failed.maybe_billed


@pytest.mark.parametrize(
    ("refused", "name", "status"),
    [
        (NonRetryableError("no such ticket"), "InvalidRequestError", 422),
        (NonRetryableError("no such ticket", status=404), "InvalidRequestError", 404),
        (NonRetryableError("no such ticket", status=501), "ActionNotSupportedError", 501),
    ],
)
async def test_a_refusal_is_not_tried_again(opened: Opener, refused: NonRetryableError, name: str, status: int) -> None:
    async def refuse(request: Request) -> Any:
        raise refused

    failed = await failure(opened(refuse))
    assert verdict(failed) == Classification("client", name, "no such ticket", status, False, False)


def test_a_refusal_can_only_have_a_status_that_is_not_tried_again() -> None:
    for status in (200, 399, 500, 504):
        with pytest.raises(ValueError, match=f"not {status}"):
            NonRetryableError("no", status=status)


# Its end


async def hang(request: Request) -> Any:
    await asyncio.Event().wait()


async def test_a_callable_that_hangs_is_cancelled(opened: Opener) -> None:
    cancelled = asyncio.Event()

    async def hang_and_report(request: Request) -> Any:
        try:
            await hang(request)
        finally:
            cancelled.set()

    started = time.monotonic()
    failed = await failure(opened(hang_and_report), timeout_s=0.2)
    # An event loop counts in milliseconds, and may be one early.
    assert 0.19 <= time.monotonic() - started < 20
    assert verdict(failed) == Classification("timeout", "TimeoutError", "no answer within 0.2 s", None, True, True)
    assert failed.maybe_billed
    assert cancelled.is_set()


async def test_a_callable_that_ignores_being_cancelled_is_left_to_itself_and_reported_again_in_the_end(
    opened: Opener,
) -> None:
    ended = asyncio.Event()

    async def stubborn(request: Request) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    provider = opened(stubborn)
    started = time.monotonic()
    assert verdict(await failure(provider, timeout_s=0.2)).kind == "timeout"
    assert time.monotonic() - started < 20
    assert not ended.is_set()
    await provider.close()
    assert ended.is_set()


async def test_an_answer_that_comes_after_the_timeout_is_none(opened: Opener) -> None:
    async def late(request: Request) -> Any:
        try:
            await hang(request)
        except asyncio.CancelledError:
            return "late"

    assert verdict(await failure(opened(late), timeout_s=0.1)).kind == "timeout"


async def test_a_call_that_is_cancelled_cancels_its_callable(opened: Opener) -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def hang_and_report(request: Request) -> Any:
        running.set()
        try:
            await hang(request)
        finally:
            ended.set()

    task = asyncio.create_task(opened(hang_and_report).perform(call()))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_closing_cancels_what_runs(opened: Opener) -> None:
    provider = opened(hang)
    running = asyncio.create_task(failure(provider))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await provider.close()
    assert verdict(await running).class_name == "CancelledError"


async def test_fifty_run_at_once_and_each_has_its_own_answer(opened: Opener) -> None:
    together = asyncio.Barrier(50)

    async def answer(request: Request) -> Any:
        await together.wait()
        return request["input"]

    provider = opened(answer)
    answers = await asyncio.gather(*(provider.perform(call(input=number + 1)) for number in range(50)))
    assert [answer.output for answer in answers] == list(range(1, 51))


async def test_there_is_no_key_to_read_again(opened: Opener) -> None:
    assert not await opened(echo).refresh_credential(None)


# What the config names

MODULE = """
import functools
from breakwater.calls.providers.python import Reply

async def answer(request):
    return Reply(["answer", request["input"]], cost_usd="0.5")

def blocking(request):
    return 1

class Agent:
    async def __call__(self, request):
        return "called"

    async def method(self, request):
        return "method"

agent = Agent()
partial = functools.partial(agent.method)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # A name of its own for each test: a module is imported once in a process.
    name = f"agents_{abs(hash(tmp_path)):x}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "good.py").write_text(MODULE)
    (package / "broken.py").write_text("import no_such_module_anywhere\n")
    (package / "wrong.py").write_text("def (:\n")
    (package / "raising.py").write_text("raise KeyError('TOKEN')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


async def test_a_callable_is_found_by_its_name(module: str) -> None:
    provider = PythonSettings(callable=f"{module}.good:answer").open()
    assert await provider.perform(call(input=3)) == Answer(["answer", 3], Usage(None, None), 500_000_000)
    for name, output in (("agent", "called"), ("agent.method", "method"), ("partial", "method")):
        opened = PythonSettings(callable=f"{module}.good:{name}").open()
        assert (await opened.perform(call())).output == output


async def test_what_a_call_costs_may_be_configured(module: str) -> None:
    provider = PythonSettings(callable=f"{module}.good:agent", cost_per_call_usd=0.15).open()  # type: ignore[arg-type]
    assert (await provider.perform(call())).cost == 150_000_000


@each_row(
    ("name", "words"),
    [
        ("none:answer", "the module {0}.none can't be imported: ModuleNotFoundError: No module named"),
        ("broken:answer", "can't be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("wrong:answer", "the module {0}.wrong can't be imported: SyntaxError: "),
        ("raising:answer", "the module {0}.raising can't be imported: KeyError: 'TOKEN'"),
        ("good:none", "the module {0}.good has no none"),
        ("good:agent.none", "the module {0}.good has no agent.none"),
        ("good:blocking", "is not async; write it with `async def`"),
        ("good:Agent", "is not async; write it with `async def`"),
        ("good:MODULE", "the module {0}.good has no MODULE"),
    ],
)
def test_what_is_not_there_is_said_when_the_provider_is_opened(module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PythonSettings(callable=f"{module}.{name}").open()
    assert f"'{module}.{name}'" in str(caught.value)
    assert words.format(module) in str(caught.value)


@each_row("name", ["agents", "agents:", ":answer", "agents answer:f", "agents:f()", "1a:f", ""])
def test_a_name_that_could_not_be_one_is_refused(name: str) -> None:
    entry: TypeAdapter[Any] = TypeAdapter(ProviderEntry)
    with pytest.raises(ValidationError):
        entry.validate_python({"kind": "python", "callable": name})
    assert entry.validate_python({"kind": "python", "callable": "a.b:c"}) == PythonSettings(callable="a.b:c")
    assert "python" in LOCAL_KINDS
