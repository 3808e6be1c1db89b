"""A callable of the operator's own: `notify(event, payload)`, plain or async."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from pydantic import JsonValue

from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.providers.local import Shown
from services.alerter.channel import SendError, fingerprint

Notify = Callable[[str, dict[str, JsonValue]], Any]


class PythonCallable:
    """Calls a function for each message. An async one runs in the alerter's loop, a plain one in a thread."""

    interval_s = 0.0
    updates = False

    def __init__(self, name: str, called: str, notify: Notify, timeout_s: float, shown: Shown) -> None:
        """Makes the channel. `called` is the name of `notify` in the config; `timeout_s` is for one call."""
        self.name = name
        self.fingerprint = fingerprint("python", called)
        self._notify = notify
        self._timeout_s = timeout_s
        self._shown = shown
        self._running: asyncio.Future[Any] | None = None

    async def open(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """Cancels a call that still runs; a thread can't be, and ends with the process."""
        if self._running is not None:
            self._running.cancel()

    async def send(self, message: Alert | AlertDigest) -> None:
        """Calls it once. Raises SendError."""
        if self._running is not None and not self._running.done():
            # It would get the next message while it still holds this one, and leave a thread behind at each try.
            raise SendError("the callable still runs since an earlier try")
        event = message.event if isinstance(message, Alert) else "digest"
        call = self._running = self._start(event, message.model_dump(mode="json"))
        call.add_done_callback(_look)
        done, _ = await asyncio.wait({call}, timeout=self._timeout_s)
        if not done:
            if isinstance(call, asyncio.Task):
                call.cancel()
            raise SendError(f"the callable did not return within {self._timeout_s:g} s")
        if call.cancelled():
            raise SendError("the callable has cancelled itself")
        error = call.exception()
        if error is not None:
            raise SendError(f"{type(error).__name__}: {self._shown.text(str(error))}".removesuffix(": ")) from error

    def _start(self, event: str, payload: dict[str, JsonValue]) -> asyncio.Future[Any]:
        if _is_async(self._notify):
            return asyncio.create_task(_guarded(self._notify, event, payload))
        return _in_thread(self._notify, event, payload)


def _look(ended: asyncio.Future[Any]) -> None:
    # Of one that fails after its timeout asyncio would log an exception that was never retrieved.
    if not ended.cancelled():
        ended.exception()


async def _guarded(notify: Notify, event: str, payload: dict[str, JsonValue]) -> None:
    try:
        await notify(event, payload)
    except SystemExit as error:
        # asyncio would end the alerter with it.
        raise RuntimeError(f"the callable tried to exit with {error.code!r}") from error


def _in_thread(notify: Notify, event: str, payload: dict[str, JsonValue]) -> asyncio.Future[Any]:
    """Runs it in a thread of its own: one that hangs takes none that others wait for, and does not keep the process."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            if inspect.isawaitable(returned := notify(event, payload)):
                if inspect.iscoroutine(returned):
                    returned.close()
                failure = TypeError("the callable returned a coroutine; write it with `async def`")
        except SystemExit as error:
            failure = RuntimeError(f"the callable tried to exit with {error.code!r}")
        except StopIteration as error:
            failure = RuntimeError(f"StopIteration: {error}")  # a future takes none
        except Exception as error:  # noqa: BLE001  the operator's own code may raise anything; it is reported
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=run, name="alert-callable", daemon=True).start()
    return ended


def _is_async(notify: Notify) -> bool:
    kind: type[Any] = type(notify)
    return inspect.iscoroutinefunction(notify) or inspect.iscoroutinefunction(getattr(kind, "__call__", None))  # noqa: B004  looked at, not called
