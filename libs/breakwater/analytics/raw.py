"""An answer that is a file: its bytes, and whether they are all of it.

ClickHouse says 200 before it has worked. What goes wrong later stands at the end of the answer, behind rows that look
well, between two marks (since 25.11) or as plain text (before); and the connection breaks, or does not.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable

from aiohttp import ClientError

from breakwater.analytics.errors import AnalyticsUnavailable

_TAIL = 32 * 1024
"""The server writes at most 16 KiB about an error."""

_MARKED = re.compile(rb"\r\n__exception__\r\n(\w+)\r\n(.*)\n\d+ \1\r\n__exception__\r\n\Z", re.DOTALL)
_PLAIN = re.compile(rb"(Code: \d+\. DB::Exception: [^\n]*\(version [^\n]*\))\n?\Z")
"""No row ends so: one of JSON ends with a brace, and a Parquet file with its mark."""


class BrokenOffError(Exception):
    """The server gave up; the text is its own, with `Code: N.` at its beginning."""


async def whole(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Hands bytes on, the last ones only when it is known that the answer is whole.

    Raises:
        BrokenOffError: the server says what went wrong.
        AnalyticsUnavailable: the connection broke.
    """
    held = b""
    try:
        async for chunk in chunks:
            held += chunk
            if len(held) > 2 * _TAIL:
                yield held[:-_TAIL]
                held = held[-_TAIL:]
    except ClientError as error:
        _complain(held)
        raise AnalyticsUnavailable(
            f"ClickHouse broke off in the middle of its answer: {str(error) or type(error).__name__}"
        ) from error
    _complain(held)
    yield held


def _complain(held: bytes) -> None:
    if found := _MARKED.search(held):
        raise BrokenOffError(found[2].decode(errors="replace"))
    if found := _PLAIN.search(held):
        raise BrokenOffError(found[1].decode(errors="replace"))
