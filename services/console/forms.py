"""What the forms on our pages send."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import Request

MAX_BYTES = 65_536
BODY_TIMEOUT_S = 30.0
_MOST_FIELDS = 1_100


class FormError(Exception):
    """What was sent is no form of ours; its text says why."""


class Fields:
    """The fields of a form. One that several boxes share has several values."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._pairs = pairs

    def get(self, name: str, default: str = "") -> str:
        """The last value, or the default where there is none."""
        return next((value for key, value in reversed(self._pairs) if key == name), default)

    def all(self, name: str) -> list[str]:
        """Every value."""
        return [value for key, value in self._pairs if key == name]


async def read_form(request: Request) -> Fields:
    """Reads the body of a request.

    Raises:
        FormError: it is too large, or not what a form sends.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    raise FormError(f"this is longer than {MAX_BYTES:,} bytes")
    except TimeoutError:
        raise FormError(f"this did not arrive within {BODY_TIMEOUT_S:g} s") from None
    try:
        return Fields(parse_qsl(bytes(body).decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as error:
        raise FormError("this is not what a form of ours sends") from error
