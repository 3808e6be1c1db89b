"""What people do from a page: it is asked for, told of, and the page is shown again."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from services.console.door import DoorError, SignedOut
from services.console.sessions import Session


async def done(session: Session, asked: Awaitable[Any], told: str, unchanged: str) -> bool:
    """Waits for what was asked for, and has the next page say what came of it.

    Args:
        session: who asked.
        asked: of the HTTP interface.
        told: what the page says where it was done.
        unchanged: what it says where there was nothing to do.

    Returns:
        Whether it was accepted; False where it was refused, which the page tells as well.

    Raises:
        SignedOut: the key is not known any more.
    """
    try:
        answer = await asked
    except SignedOut:
        raise
    except DoorError as error:
        session.notify(f"This was not done: {error.message}", "bad")
        return False
    session.notify(unchanged if isinstance(answer, dict) and "unchanged" in answer else told)
    return True


def why(given: str) -> str | None:
    """A reason as the interface takes it: one line; None where none was given."""
    return " ".join(given.split()) or None


def whole(given: str) -> int:
    """A whole number that the interface takes; 0 for what is none."""
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 19 else 0


def back(path: str, query: Mapping[str, str | None] | None = None) -> Response:
    """303: to a page, by GET, so that loading it again does nothing again."""
    given = {name: value for name, value in (query or {}).items() if value}
    return RedirectResponse(f"{path}?{urlencode(given)}" if given else path, 303)
