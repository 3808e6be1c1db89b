"""HTTP sessions that only connect to permitted addresses.

The check is where a socket is created for an address. So it sees the very addresses that DNS has returned, however the
host is written, and nothing is resolved again after it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from breakwater.kernel.errors import BreakwaterError, ConfigError
from breakwater.kernel.security.addresses import IpNetwork, refusal

LONGEST_ANSWER = 64 * 1024
"""The most bytes of an answer that are read; receivers' answers are far shorter."""

AddrInfo = tuple[Any, Any, int, str, tuple[Any, ...]]


class AddressRefusedError(BreakwaterError, OSError):
    """An address is refused. The message is always the same, so that aiohttp raises one error for several addresses."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(errno.EACCES, "nothing is sent there")
        self.address = address
        self.why = why


class RedirectError(BreakwaterError, aiohttp.ClientError):
    """The receiver redirects us. The message contains no URL."""

    def __init__(self, status: int) -> None:
        super().__init__(f"redirected ({status})")
        self.status = status


class _Answer(aiohttp.ClientResponse):
    """A response of bounded length. aiohttp reads without a bound."""

    async def read(self) -> bytes:
        if self._body is None:
            body = bytearray()
            while part := await self.content.read(LONGEST_ANSWER):
                body += part
                if len(body) > LONGEST_ANSWER:
                    raise aiohttp.ClientPayloadError("the response is too long")
            self._body = bytes(body)
        return self._body


def guarded_session(allowed: Sequence[IpNetwork], timeout_s: float) -> aiohttp.ClientSession:
    """Creates a session that refuses addresses which are not public; an event loop must be running.

    The session follows no redirects, keeps no cookies, and ignores the environment: through a proxy, the check would
    only see the proxy's address, and the proxy would connect to any host.

    Args:
        allowed: networks that are not refused.
        timeout_s: the time limit of a whole request, its answer included.
    """
    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_refuse_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(socket_factory=guard(allowed)),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        response_class=_Answer,
        trace_configs=[tracing],
        trust_env=False,
    )


def guard(allowed: Sequence[IpNetwork]) -> Callable[[AddrInfo], socket.socket]:
    """Returns a factory of sockets, which raises AddressRefusedError for refused addresses."""

    def make(info: AddrInfo) -> socket.socket:
        family, kind, protocol, _, where = info
        host = str(where[0])
        try:
            address = ip_address(host)
        except ValueError:
            # Such as 0177.0.0.1: what we can't read, the system might.
            raise AddressRefusedError(host, "neither an IPv4 nor an IPv6 address") from None
        why = refusal(address, allowed)
        if why is not None:
            raise AddressRefusedError(host, why)
        return socket.socket(family, kind, protocol)

    return make


def usable_url(url: str, setting: str) -> str:
    """Checks a URL; errors do not show it.

    Raises:
        ConfigError: it is not an http or https URL with a host.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        usable = usable and url.isprintable() and " " not in url
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{setting}: must be a URL that begins with https:// or http://")
    return url


async def _refuse_redirect(
    _session: aiohttp.ClientSession, _context: SimpleNamespace, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    # slack-sdk has no option not to follow redirects, and a POST that was followed as a GET would pass for a delivery.
    raise RedirectError(redirect.response.status)
