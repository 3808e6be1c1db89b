"""Actions of operators: a form is checked, the HTTP API carries it out, and the next page shows the outcome."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from breakwater.client import ApiError, ApiKeyRefusedError
from breakwater.identity.contract import KeyScope
from breakwater.identity.pages.sessions import Session, session_of
from breakwater.kernel.errors import BreakwaterError

T = TypeVar("T")

MAX_BYTES = 65_536
BODY_TIMEOUT_S = 30.0
_MAX_FIELDS = 1_100


class FormError(BreakwaterError):
    """The error of a rejected form.

    Attributes:
        status: 403 if the form comes from another site or its sender lacks the scope; 422 if it can't be read.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Fields:
    """The fields of a form. A name has several values if checkboxes share it."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._pairs = pairs

    def get(self, name: str, default: str = "") -> str:
        """The last value of a field, or the default if there is none."""
        return next((value for key, value in reversed(self._pairs) if key == name), default)

    def items(self) -> list[tuple[str, str]]:
        """All fields with their values."""
        return list(self._pairs)

    def all(self, name: str) -> list[str]:
        """All values of a field."""
        return [value for key, value in self._pairs if key == name]


async def read_form(request: Request, limit: int = MAX_BYTES, within_s: float = BODY_TIMEOUT_S) -> Fields:
    """Reads the form in the body of a request.

    Args:
        request: the request.
        limit: maximum length of the body in bytes.
        within_s: seconds to wait for the body.

    Raises:
        FormError: if the body is too large, too slow, or not a form.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise FormError(422, f"The form is larger than {limit:,} bytes.")
    except TimeoutError:
        raise FormError(422, f"The form did not arrive within {within_s:g} s.") from None
    try:
        return Fields(parse_qsl(bytes(body).decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError as error:
        raise FormError(422, "The request body is not a form.") from error


async def read_action(
    request: Request,
    *,
    approval: bool = False,
    scopes: tuple[KeyScope, ...] = ("operate",),
    limit: int = MAX_BYTES,
) -> tuple[Session, Fields]:
    """Reads and checks the form of an action. Returns its sender and its fields.

    Args:
        request: the request with the form.
        approval: True if the scope `approve` is enough for the action.
        scopes: the scopes of which one is enough.
        limit: maximum length of the form in bytes.

    Raises:
        FormError: if the form was not sent from a page of the console, or the sender may not take the action.
    """
    session = session_of(request)
    fields = await read_form(request, limit)
    if not hmac.compare_digest(fields.get("csrf", "").encode(), session.csrf.encode()):
        raise FormError(403, "This form is too old, or was sent by another site. Reload the page and try again.")
    sufficient = ("operate", "approve") if approval else scopes
    if not session.may(*sufficient):
        names = " or ".join(f"`{scope}`" for scope in sufficient)
        raise FormError(403, f"{session.name!r} may not do that: it requires the scope {names}.")
    return session, fields


async def act(session: Session, form: type[T], path: str, body: Mapping[str, object]) -> T | None:
    """Requests an action from the HTTP API.

    Returns:
        The result; None if the action failed, and then the next page says why.

    Raises:
        ApiKeyRefusedError: if the key is no longer valid.
    """
    try:
        return await session.api.act(form, path, body)
    except ApiKeyRefusedError:
        raise
    except ApiError as error:
        session.notify(f"The action failed: {error.message}", "bad")
        return None


def action(
    path: str,
    api_path: str,
    form: type[T],
    body: Callable[[Fields], Mapping[str, object]],
    outcome: Callable[[Fields, T], str],
    back: Callable[[Fields], str],
    *,
    approval: bool = False,
) -> Route:
    """Makes the route of an action, which the HTTP API carries out and whose outcome the next page shows.

    Args:
        path: path of the route.
        api_path: path of the HTTP API, below `api/v1`.
        form: class of the message that the HTTP API returns.
        body: returns the body for the HTTP API, without the reason.
        outcome: returns the notice after a success.
        back: returns the path of the next page.
        approval: True if the scope `approve` is enough for the action.
    """

    async def carry_out(request: Request) -> Response:
        session, fields = await read_action(request, approval=approval)
        result = await act(session, form, api_path, {**body(fields), "reason": reason_of(fields)})
        if result is not None:
            session.notify(outcome(fields, result))
        return back_to(back(fields))

    return Route(path, carry_out, methods=["POST"])


def reason_of(fields: Fields, name: str = "reason") -> str | None:
    """The reason to record, in one line; None if the field is empty."""
    return " ".join(fields.get(name).split()) or None


def whole_number(text: str) -> int:
    """Parses a positive whole number that the API accepts; 0 for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0


def back_to(path: str, query: Mapping[str, str | None] | None = None) -> Response:
    """Redirects (303) to a page, so that reloading it does not repeat the action. Empty parameters are omitted."""
    parameters = {name: value for name, value in (query or {}).items() if value}
    return RedirectResponse(f"{path}?{urlencode(parameters)}" if parameters else path, 303)
