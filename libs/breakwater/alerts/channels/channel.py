"""Channels, by which people are notified one message at a time: signed webhooks, and callables of the operator's own.

Webhooks are signed as Standard Webhooks says: any receiver can check them with a library of its language.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from pydantic import JsonValue
from standardwebhooks import Webhook

from breakwater.alerts.contract import Alert, AlertDigest
from breakwater.alerts.rules.outbox import message_id
from breakwater.calls.providers.local import ErrorTexts
from breakwater.calls.rules.classify import retry_after_s
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.security.addresses import IpNetwork
from breakwater.kernel.security.guarded_http import AddressRefusedError, RedirectError, guarded_session
from breakwater.kernel.types import format_time

Notify = Callable[[str, dict[str, JsonValue]], Any]
Link = Callable[[str, datetime], str]
"""Makes a link to an incident by its id and a time: the same for the same alert, whenever that is sent."""

_WORTH_RETRYING = frozenset({408, 425, 429})


class SendError(BreakwaterError):
    """A message did not arrive, as far as is known. The text names no secret."""

    def __init__(
        self, message: str, *, permanent: bool = False, retry_after_s: float | None = None, disables: bool = False
    ) -> None:
        super().__init__(message)
        self.permanent = permanent
        """True if the receiver would refuse the same message again."""
        self.retry_after_s = retry_after_s
        self.disables = disables
        """True if the receiver wants no more messages at all."""


class AlertSender:
    """One way to notify people. Used by one sender at a time.

    Args:
        name: as in the config.
        fingerprint: identifies the receiver, as the config may name another one later; a hash that reveals no secret.
    """

    interval_s = 0.0
    """The least time between two sends; 0 if the receiver sets no limit."""
    is_chat = False
    """True if people read its messages one by one, as they come."""
    updates = False
    """True if it keeps an incident's message up to date, and so wants every change of it."""

    def __init__(self, name: str, fingerprint: str) -> None:
        self.name = name
        self.fingerprint = fingerprint

    async def send(self, message: Alert | AlertDigest) -> None:
        """Sends once. Raises SendError: it did not arrive."""
        raise NotImplementedError

    async def close(self) -> None:
        """Releases connections."""


class HttpChannel(AlertSender):
    """A channel over HTTP, with a session that only connects where messages may go."""

    def __init__(
        self, name: str, fingerprint: str, allowed: Sequence[IpNetwork], timeout_s: float, now: Callable[[], datetime]
    ) -> None:
        super().__init__(name, fingerprint)
        self._allowed = allowed
        self._timeout_s = timeout_s
        self._now = now
        self._opened: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        """Closes the session."""
        self._is_closed = True
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        # A closed session must not reach slack-sdk, which would open its own one, without a guard.
        if self._is_closed:
            raise SendError("the channel is closed")
        self._opened = self._opened or guarded_session(self._allowed, self._timeout_s)
        return self._opened


def check_answer(status: int, headers: Mapping[str, str], now: datetime, detail: str = "") -> None:
    """Accepts any 2xx as a delivery.

    Raises:
        SendError: the status is another one. Redirects are refusals too: they are not followed.
    """
    if 200 <= status < 300:
        return
    lowered = {name.lower(): value for name, value in headers.items()}
    hint = "; redirects are not followed: set the final URL" if 300 <= status < 400 else ""
    raise SendError(
        f"the receiver answered {status} {detail}".rstrip() + hint,
        permanent=status < 500 and status not in _WORTH_RETRYING,
        retry_after_s=retry_after_s(lowered, now),
        disables=status == HTTPStatus.GONE,
    )


def no_answer(error: Exception) -> SendError:
    """Translates an error of an HTTP client.

    The result is raised `from None`: an own text may hold the whole URL, which can be secret, and causes are logged.
    """
    match error:
        case TimeoutError():
            return SendError("no answer in time")
        case aiohttp.ClientConnectorError(os_error=AddressRefusedError() as refused):
            return SendError(
                f"nothing is sent to {error.host}:{error.port}: its address {refused.address} is refused "
                f"({refused.why}); if it is meant, put its network into `alerts.allow_networks`",
                permanent=True,
            )
        case aiohttp.ClientConnectorError():
            return SendError(str(error))  # host and port only
        case RedirectError():
            return SendError(
                f"the receiver answered {error.status}; redirects are not followed: set the final URL", permanent=True
            )
        case aiohttp.InvalidURL():
            return SendError("its URL is invalid; write the host as a name or a standard IP address", permanent=True)
        case _:
            return SendError(f"no usable answer ({type(error).__name__})")


def fingerprint(*parts: str) -> str:
    """A hash of a receiver's address: 16 characters that reveal no secret."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class SignedWebhook(HttpChannel):
    """Posts to one receiver. `webhook-id` is the message's id, the same at every try, as is the body."""

    def __init__(
        self,
        name: str,
        url: str,
        secrets: Sequence[str],
        timeout_s: float,
        allowed: Sequence[IpNetwork],
        link: Link | None,
        now: Callable[[], datetime],
    ) -> None:
        """Makes the channel. Each of `secrets` signs: the receiver takes any signature that it can check."""
        super().__init__(name, fingerprint("webhook", url), allowed, timeout_s, now)
        self._url = url
        self._signers = tuple(Webhook(secret) for secret in secrets)
        self._link = link

    async def send(self, message: Alert | AlertDigest) -> None:
        """Posts the message once. Raises SendError."""
        body = envelope(message, self._link)
        now = self._now().astimezone(UTC)
        identity = message_id(message)
        signed = {
            "content-type": "application/json",
            "user-agent": "breakwater-alerter",
            "webhook-id": identity,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signer.sign(identity, now, body.decode()) for signer in self._signers),
        }
        try:
            # The body of the answer says nothing that is needed, and is not read.
            async with self._session.post(self._url, data=body, headers=signed, allow_redirects=False) as answer:
                status = answer.status
                headers = answer.headers
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from None
        check_answer(status, headers, self._now())


def envelope(message: Alert | AlertDigest, link: Link | None) -> bytes:
    """Returns the body: the same bytes at every try of a message. A digest has no `link`, as it has many incidents."""
    filled: dict[str, JsonValue] = {
        "type": message.event if isinstance(message, Alert) else "digest",
        "timestamp": format_time(message.at),
        "data": message.model_dump(mode="json"),
    }
    if link is not None and isinstance(message, Alert) and (url := link(message.incident_id, message.at)):
        filled["link"] = url
    return orjson.dumps(filled)


class PythonCallable(AlertSender):
    """Calls the operator's `notify(event, payload)`: an async one in the alerter's loop, a plain one in a thread.

    Args:
        name: of the channel.
        called: the name of `notify` in the config.
        notify: the callable.
        timeout_s: for one call.
        error_texts: redacts its errors.
    """

    def __init__(self, name: str, called: str, notify: Notify, timeout_s: float, error_texts: ErrorTexts) -> None:
        super().__init__(name, fingerprint("python", called))
        self._notify = notify
        self._timeout_s = timeout_s
        self._error_texts = error_texts
        self._running: asyncio.Future[Any] | None = None

    async def close(self) -> None:
        """Cancels a call that still runs; a thread can't be, and ends with the process."""
        if self._running is not None:
            self._running.cancel()

    async def send(self, message: Alert | AlertDigest) -> None:
        """Calls the callable once. Raises SendError."""
        if self._running is not None and not self._running.done():
            # It would get the next message while it still has the last one, and leave a thread behind at each try.
            raise SendError("the callable is still running from an earlier try")
        event = message.event if isinstance(message, Alert) else "digest"
        kind: type[Any] = type(self._notify)
        called = getattr(kind, "__call__", None)  # noqa: B004  looked at, not called
        is_async = inspect.iscoroutinefunction(self._notify) or inspect.iscoroutinefunction(called)
        start = _in_loop if is_async else _in_thread
        call = self._running = start(self._notify, event, message.model_dump(mode="json"))
        call.add_done_callback(_look)
        finished, _ = await asyncio.wait({call}, timeout=self._timeout_s)
        if not finished:
            if isinstance(call, asyncio.Task):
                call.cancel()
            raise SendError(f"the callable did not return within {self._timeout_s:g} s")
        if call.cancelled():
            raise SendError("the callable cancelled itself")
        error = call.exception()
        if error is not None:
            raise SendError(
                f"{type(error).__name__}: {self._error_texts.text(str(error))}".removesuffix(": ")
            ) from error


def _look(ended: asyncio.Future[Any]) -> None:
    # Of one that fails after its timeout asyncio would log an exception that was never retrieved.
    if not ended.cancelled():
        ended.exception()


def _in_loop(notify: Notify, event: str, payload: dict[str, JsonValue]) -> asyncio.Future[Any]:
    async def call() -> None:
        try:
            await notify(event, payload)
        except SystemExit as error:
            # asyncio would end the alerter with it.
            raise RuntimeError(f"the callable tried to exit with {error.code!r}") from error

    return asyncio.create_task(call())


def _in_thread(notify: Notify, event: str, payload: dict[str, JsonValue]) -> asyncio.Future[Any]:
    """Runs a callable in a thread of its own. If it hangs, it blocks no shared thread, and the process can end."""
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
