"""One request over HTTP/1.1 and its response, on a connection that is kept for further ones.

aiohttp opens and keeps the connections, through proxies and with TLS, and reads the responses. Its session and its
objects for requests and responses do far more, and take longer than all of that for each request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, cast

import aiohttp
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_writer import _serialize_headers  # pyright: ignore[reportPrivateUsage]
from yarl import URL

from breakwater.calls.providers.connection import Proxy

_UNLIMITED = aiohttp.ClientTimeout(total=None)
"""The caller limits the time of the whole exchange."""

_MOST_TARGETS = 1_000


class Connections:
    """The connections to one provider."""

    def __init__(self, headers: Mapping[str, str], proxy: Proxy) -> None:
        """Takes the headers of all requests, and the proxy."""
        self._headers = headers
        self._proxy = proxy
        self._connector: aiohttp.TCPConnector | None = None
        self._context: ssl.SSLContext | None = None
        self._requests: dict[str, ClientRequest] = {}
        """The common part of requests with this TLS context, by their target."""

    async def connect(self, target: str, context: ssl.SSLContext | None) -> tuple[ClientRequest, Connection]:
        """Returns the common part of all requests to a target, and a connection to it.

        Raises:
            aiohttp.ClientError, OSError: there is no connection.
        """
        if self._connector is None:
            # The number of concurrent calls is bounded by the agents' concurrency; a second limit would hide it.
            self._connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        if context is not self._context:
            self._requests.clear()  # a replaced context, of up to a megabyte, is not needed again
            self._context = context
        request = self._requests.get(target)
        if request is None:
            request = self._request(target, context)
        return request, await self._connector.connect(request, [], _UNLIMITED)

    def _request(self, target: str, context: ssl.SSLContext | None) -> ClientRequest:
        url = URL(target, encoded=True)
        proxy = self._proxy
        is_read_by_proxy = url.scheme == "http"  # and not only the CONNECT before it
        request = ClientRequest(
            "POST",
            url,
            headers={**self._headers, **proxy.headers} if is_read_by_proxy else self._headers,
            loop=asyncio.get_running_loop(),
            proxy=None if proxy.url is None else URL(proxy.url),
            proxy_headers=proxy.headers,
            ssl=True if context is None else context,
        )
        if proxy.url is None:  # connecting to a proxy changes the request
            if len(self._requests) >= _MOST_TARGETS:
                self._requests.clear()
            self._requests[target] = request
        return request

    async def close(self) -> None:
        """Closes idle connections."""
        if self._connector is not None:
            await self._connector.close()
            self._connector = None


class Exchange(AbstractAsyncContextManager["Exchange"]):
    """A POST request, which is sent on entry, and its response; without redirects and retries.

    Args:
        connections: to the provider.
        target: the URL.
        headers: those of this request, which replace common ones.
        data: the body.
        context: for TLS; None for the default one.

    Attributes:
        sent: True once the request has begun to leave this process.
        status: of the response.
        headers: of the response.
        content: reads the body of the response, decompressed.
    """

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader

    def __init__(
        self,
        connections: Connections,
        target: str,
        headers: Mapping[str, str],
        data: bytes,
        context: ssl.SSLContext | None,
    ) -> None:
        self.sent = False
        self._connections = connections
        self._target = target
        self._own_headers = headers
        self._data = data
        self._context = context
        self._connection: Connection | None = None

    @property
    def content_type(self) -> str:
        """The media type of the response in lower case, without parameters; empty if it says none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def transport(self) -> asyncio.Transport | None:
        """The transport of its connection, until all of the response was read."""
        return None if self._connection is None else self._connection.transport

    async def __aenter__(self) -> Exchange:
        """Sends the request, and returns when the headers of the response are there.

        Raises:
            aiohttp.ClientError, OSError: there is no connection, it broke, or the response is none.
        """
        request, connection = await self._connections.connect(self._target, self._context)
        self._connection = connection
        try:
            await self._send(request, connection)
        except HttpProcessingError as error:
            connection.close()
            raise aiohttp.ClientResponseError(
                request.request_info, (), status=error.code, message=error.message, headers=error.headers
            ) from error
        except BaseException:
            connection.close()
            raise
        self.content.on_eof(partial(_release, connection))
        return self

    async def _send(self, request: ClientRequest, connection: Connection) -> None:
        headers = request.headers.copy()
        headers.update(self._own_headers)
        headers["Content-Length"] = str(len(self._data))
        path = str(request.url) if request.proxy and not request.is_ssl() else request.url.raw_path_qs
        head: bytes = cast(Any, _serialize_headers)(f"POST {path} HTTP/1.1", headers)
        protocol = connection.protocol
        transport = connection.transport
        if protocol is None or transport is None or transport.is_closing():
            raise aiohttp.ServerDisconnectedError
        protocol.set_response_params(read_until_eof=True)
        self.sent = True
        transport.writelines((head, self._data))
        message, self.content = await protocol.read()
        while 100 <= message.code <= 199 and message.code != 101:
            message, self.content = await protocol.read()
        self.status = message.code
        self.headers = message.headers

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connection, unless all of the response was read."""
        if self._connection is not None:
            self._connection.release()


def _release(connection: Connection) -> None:
    """Keeps a connection for further requests, if it can be used for them."""
    transport = connection.transport
    # A server may answer before it has read the request, and need not read the rest: a further one would wait.
    if transport is not None and transport.get_write_buffer_size():
        connection.close()
    else:
        connection.release()
