"""Callables of the operator's own, from a module that is made for each test."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from breakwater.alerts.channels.channel import AlertSender, PythonCallable, SendError
from breakwater.alerts.channels.configured_channels import channels_of
from breakwater.calls.providers.local import ErrorTexts
from breakwater.kernel.errors import ConfigError
from breakwater.redaction.settings import DEFAULT_REDACTION
from tests.helpers import until
from tests.services.alerter.kit import AT, config_of
from tests.services.alerter.messages import alert, digest, held

Make = Callable[..., AlertSender]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Make:
    """Makes a channel of the lines of a module; `notify` is the callable."""
    name = f"ours_{abs(hash(request.node.nodeid))}"
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(code: str, called: str = "notify", timeout_s: float = 5.0) -> AlertSender:
        (tmp_path / f"{name}.py").write_text(f"import asyncio, threading, time\nreceived = []\n{code}\n")
        setting = {"callable": f"{name}:{called}", "timeout_s": timeout_s}
        config = config_of(channels={"own": {"python": setting}})
        [one] = channels_of(config.alerts, sent_messages=_none, now=lambda: AT)
        return one

    made.module = lambda: sys.modules[name]  # type: ignore[attr-defined]
    return made


def received(make: Make) -> list[Any]:
    return make.module().received  # type: ignore[attr-defined]


@pytest.mark.parametrize("word", ["def", "async def"])
async def test_a_callable_is_given_the_event_and_all_there_is(make: Make, word: str) -> None:
    one = make(f"{word} notify(event, payload):\n    received.append((event, payload))")
    assert (one.name, one.updates, one.interval_s) == ("own", False, 0.0)
    await one.send(alert())
    await one.send(digest([held(1)]))
    await one.close()
    assert received(make) == [
        ("breaker_open", alert().model_dump(mode="json")),
        ("digest", digest([held(1)]).model_dump(mode="json")),
    ]


@pytest.mark.parametrize("kind", ["def __call__", "async def __call__"])
async def test_an_object_that_can_be_called_is_a_callable(make: Make, kind: str) -> None:
    one = make(f"class Notify:\n    {kind}(self, event, payload):\n        received.append(event)\nnotify = Notify()")
    await one.send(alert())
    assert received(make) == ["breaker_open"]


async def test_a_method_is_found_by_its_path(make: Make) -> None:
    one = make(
        "class Notify:\n    @staticmethod\n    def now(event, payload):\n        received.append(event)",
        called="Notify.now",
    )
    await one.send(alert())
    assert received(make) == ["breaker_open"]


async def test_a_plain_callable_does_not_hold_up_the_alerter(make: Make) -> None:
    one = make("def notify(event, payload):\n    received.append(threading.current_thread().name)")
    await one.send(alert())
    assert received(make) != [threading.current_thread().name]


@pytest.mark.parametrize("word", ["def", "async def"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("raise ValueError('the pager is off')", "ValueError: the pager is off"),
        ("raise KeyError()", "KeyError"),
        ("raise StopIteration('odd')", "RuntimeError: "),
        ("raise SystemExit(3)", "RuntimeError: the callable tried to exit with 3"),
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
async def test_what_it_raises_is_reported_and_worth_another_try(make: Make, word: str, line: str, words: str) -> None:
    one = make(f"{word} notify(event, payload):\n    {line}")
    with pytest.raises(SendError) as caught:
        await one.send(alert())
    assert str(caught.value).startswith(words)
    assert (caught.value.permanent, caught.value.disables) == (False, False)


async def test_a_plain_callable_that_returns_a_coroutine_is_no_delivery(make: Make) -> None:
    one = make("async def real(event, payload): ...\nnotify = lambda event, payload: real(event, payload)")
    with pytest.raises(SendError, match="write it with `async def`"):
        await one.send(alert())


@pytest.mark.parametrize(
    "code",
    [
        "async def notify(event, payload):\n    received.append(event)\n    await asyncio.sleep(60)",
        "def notify(event, payload):\n    received.append(event)\n    time.sleep(1)",
    ],
)
async def test_one_that_does_not_return_is_not_waited_for(make: Make, code: str) -> None:
    one = make(code, timeout_s=0.1)
    started = asyncio.get_running_loop().time()
    with pytest.raises(SendError, match=r"did not return within 0\.1 s") as caught:
        await one.send(alert())
    assert asyncio.get_running_loop().time() - started < 0.9
    assert not caught.value.permanent
    await one.close()


async def test_one_that_hangs_is_not_called_again_while_it_does(make: Make) -> None:
    one = make(
        "gate = threading.Event()\ndef notify(event, payload):\n    received.append(event)\n    gate.wait(20)",
        timeout_s=0.1,
    )
    with pytest.raises(SendError, match="did not return"):
        await one.send(alert())
    with pytest.raises(SendError, match="is still running from an earlier try"):
        await one.send(alert())
    assert received(make) == ["breaker_open"]
    make.module().gate.set()  # type: ignore[attr-defined]
    await until(lambda: not [t for t in threading.enumerate() if t.name == "alert-callable"], "the thread")
    await asyncio.sleep(0)
    await one.send(alert())
    assert received(make) == ["breaker_open"] * 2


async def test_its_error_is_redacted(make: Make) -> None:
    one = make("def notify(event, payload):\n    raise ValueError('password=hunter22 was refused')")
    with pytest.raises(SendError, match=r"^ValueError: password=\[REDACTED\] was refused$"):
        await one.send(alert())


async def test_its_payload_is_its_own(make: Make) -> None:
    one = make("def notify(event, payload):\n    received.append(dict(payload)); payload.clear()")
    message = alert()
    await one.send(message)
    await one.send(message)
    assert received(make)[0] == received(make)[1]
    assert message.payload


@pytest.mark.parametrize(
    ("code", "called", "words"),
    [
        ("", "notify", "has no notify"),
        ("notify = 7", "notify", "is int, which is not callable"),
        ("class A: ...", "A.b", "has no A.b"),
        ("raise RuntimeError('not today')", "notify", "can't be imported: RuntimeError: not today"),
        ("def notify(:", "notify", "can't be imported: SyntaxError"),
    ],
)
def test_a_callable_that_can_not_be_loaded_is_named_by_its_setting(
    make: Make, code: str, called: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(code, called=called)
    assert str(caught.value).startswith("alerts.channels.own.python.callable: ")
    assert words in str(caught.value)


def test_a_module_that_is_not_there_is_named() -> None:
    config = config_of(channels={"own": {"python": {"callable": "nothing.of.ours:notify"}}})
    with pytest.raises(
        ConfigError,
        match=r"alerts\.channels\.own\.python\.callable: the callable 'nothing\.of\.ours:notify': the module",
    ):
        channels_of(config.alerts, sent_messages=_none, now=lambda: AT)


def _send_to_a_callable_that_hangs() -> None:
    texts = ErrorTexts(DEFAULT_REDACTION)
    channel = PythonCallable("own", "x:y", lambda _event, _payload: time.sleep(60), 0.1, texts)
    with pytest.raises(SendError, match="did not return within"):
        asyncio.run(channel.send(alert()))


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    # Forked, as an interpreter takes two seconds to import it all. This, too, waits for threads that are not daemons.
    process = get_context("fork").Process(target=_send_to_a_callable_that_hangs)
    process.start()
    try:
        process.join(45)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def _none(name: str) -> Any:
    raise AssertionError("a callable remembers no messages")
