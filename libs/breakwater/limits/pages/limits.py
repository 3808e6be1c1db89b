"""The pages of limits: what they allow and what is used of them, and the forms that set, raise and delete them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, get_args

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.client import ApiError, ApiKeyRefusedError, ApiRefusedError
from breakwater.identity.contract import AuditEvent, KeyScope
from breakwater.identity.pages.operator_actions import Fields, back_to, read_action, reason_of
from breakwater.identity.pages.rendering import NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.sessions import Session
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, render_page
from breakwater.kernel.columns import Column, columns_of_part
from breakwater.kernel.pages import charts
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.words import local, segment
from breakwater.kernel.types import format_time
from breakwater.limits.contract import (
    LimitAction,
    LimitList,
    LimitUnit,
    ListedLimit,
    ScopeKind,
    SettableWindow,
)
from breakwater.limits.pages.budgets import nano_of
from breakwater.limits.rules.limit import CALENDAR, default_id
from breakwater.limits.rules.scopes import key_of, parse_scope, scope_text
from breakwater.limits.views import (
    LISTED_LIMITS,
    WAITING,
    allowance,
    amount_in_words,
    is_of_each,
    tone_of_limit,
    used_share_of,
)
from breakwater.records.events import audit_events_of

PER_PAGE = 200
"""Number of limits on a page."""

CONFIRM_FROM = 10
"""A raise to more than this many times the amount must be confirmed, because a digit too many is easily typed."""

RAISERS: tuple[KeyScope, ...] = ("limits", "operate", "approve")
"""Each of these scopes permits raises."""

_CHANGES = ("set_limit", "raise_limit", "delete_limit")
"""The operations of the HTTP API that change a limit, as the audit log names them."""


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A limit as the page shows it."""

    limit: ListedLimit

    @property
    def tone(self) -> str:
        """`bad` if nothing is left, `warn` if little is; otherwise empty."""
        return tone_of_limit(self.limit)

    @property
    def used(self) -> float | None:
        """The share that is used or reserved; None if it is not known."""
        return used_share_of(self.limit)

    @property
    def is_of_each(self) -> bool:
        """Returns True if it is on each name by itself."""
        return is_of_each(self.limit)

    @property
    def is_raisable(self) -> bool:
        """Returns True if it can be raised: those of tasks and jobs are changed in the config."""
        return not self.limit.scope.startswith(("task:", "job:"))

    @property
    def bar(self) -> Markup | None:
        """A bar of what is used and reserved; None if it is not known."""
        limit = self.limit
        if limit.used is None:
            return None
        used = float(limit.used)
        reserved = float(limit.reserved or 0)
        amount = float(limit.amount)
        of_limit = (
            f"{amount_in_words(limit.unit, limit.used)} used and {amount_in_words(limit.unit, limit.reserved or '0')}"
        )
        colour = self.tone or "good"
        parts = [(colour, used), ("second", reserved)] if amount else [(colour, 1.0)]
        return charts.share(parts, f"{of_limit} reserved of {allowance(limit)}", full_value=amount or 1.0)

    @property
    def allowance(self) -> str:
        """The amount that it allows now, in words."""
        return allowance(self.limit)

    @property
    def fields(self) -> dict[str, Any]:
        """The values that the form for changing it has at first, by field."""
        limit = self.limit
        amount = limit.raised.configured if limit.raised is not None else limit.amount
        return {
            "id": limit.id,
            "scope": limit.scope,
            "unit": limit.unit,
            "per": limit.per,
            "amount": amount.rstrip("0").rstrip(".") if "." in amount else amount,
            "action": limit.action,
            "thresholds": ", ".join(map(str, limit.thresholds)),
            "until": None if limit.until is None else local(limit.until),
        }

    def amount(self, text: str) -> str:
        """Writes an amount in its unit."""
        return amount_in_words(self.limit.unit, text)

    @property
    def budget(self) -> str | None:
        """The name of the budget with its spend and forecast; None if it has none."""
        limit = self.limit
        window = CALENDAR.get(limit.per) if limit.unit == "usd" and limit.per is not None else None
        if window is None or self.is_of_each:
            return None
        return f"{scope_text(key_of(parse_scope(limit.scope)))}/{window}"


COLUMNS: tuple[Column[LimitRow], ...] = tuple(columns_of_part(LISTED_LIMITS, lambda row: row.limit))


def _change_text(event: AuditEvent) -> str:
    """Describes what a change of a limit asked for, such as `usd 30, until 2027-01-01`."""
    hidden = ("limit_id", "scope", "reason")
    return ", ".join(f"{name} {value}" for name, value in event.details.items() if name not in hidden and value)


HISTORY: tuple[Column[AuditEvent], ...] = (
    Column("time", lambda event: event.at, "time"),
    Column("who", lambda event: event.by),
    Column("action", lambda event: event.action, "words"),
    Column("outcome", lambda event: event.outcome, "state"),
    Column("what", _change_text, below=True),
    Column("reason", lambda event: event.reason, below=True),
)
"""The history of a limit, from the audit log."""


class FormFields(NamedTuple):
    """A rejected form, which is shown again as it was filled in."""

    form: str
    """The form: `set`, `raise` or `delete`."""
    fields: Mapping[str, str]
    problem: str
    confirm: str = ""
    """The statement to confirm; empty if a confirmation would not help."""
    confirmed: str = ""
    """The value of the checkbox."""


LINK = NavigationLink("/limits", "Limits", "u")


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""

    async def show_limits(request: Request, rejected: FormFields | None = None) -> Response:
        return await render_page(context, request, "limits.html", partial(view, rejected=rejected), limits=_limits)

    async def show_limit(request: Request, rejected: FormFields | None = None) -> Response:
        view_with_form = partial(view_limit, rejected=rejected)
        return await render_page(context, request, "limit.html", view_with_form, limit=_limit, history=_history)

    async def set_limit(request: Request) -> Response:
        session, fields = await read_action(request, scopes=("limits",))
        limit_id = fields.get("id").strip() or _default_id(fields)
        rejected = await _submit(session, "PUT", f"limits/{segment(limit_id)}", fields, "set", _limit_body)
        if rejected is not None:
            show = show_limit if "limit_id" in request.path_params else show_limits
            return await show(request, rejected)
        session.notify(f"The limit {limit_id} is in effect.")
        return back_to(f"/limits/{segment(limit_id)}")

    async def raise_limit(request: Request) -> Response:
        session, fields = await read_action(request, scopes=RAISERS)
        limit_id = request.path_params["limit_id"]
        listed = await fetch_part(session.api.read(ListedLimit, f"limits/{segment(limit_id)}"))
        rejected = _unconfirmed(fields, listed.value)
        if rejected is None:
            path = f"limits/{segment(limit_id)}/raise"
            rejected = await _submit(session, "POST", path, fields, "raise", _raise_body)
        if rejected is not None:
            return await show_limit(request, rejected)
        session.notify(f"The limit {limit_id} is raised to {fields.get('amount').strip()}.")
        scope = fields.get("scope").strip()
        return back_to(f"/limits/{segment(limit_id)}", {"scope": scope})

    async def delete_limit(request: Request) -> Response:
        session, fields = await read_action(request, scopes=("limits",))
        limit_id = request.path_params["limit_id"]
        path = f"limits/{segment(limit_id)}"
        rejected = await _submit(session, "DELETE", path, fields, "delete", _delete_body)
        if rejected is not None:
            return await show_limit(request, rejected)
        session.notify(f"The limit {limit_id} is deleted.")
        return back_to("/limits")

    return [
        Route("/limits", show_limits, methods=["GET"]),
        # The URLs are the same, so that a rejected form is shown on its page.
        Route("/limits", set_limit, methods=["POST"]),
        Route("/limits/{limit_id:path}/set", set_limit, methods=["POST"]),
        Route("/limits/{limit_id:path}/raise", raise_limit, methods=["POST"]),
        Route("/limits/{limit_id:path}/delete", delete_limit, methods=["POST"]),
        Route("/limits/{limit_id:path}", show_limit, methods=["GET"]),
    ]


def view(visit: Visit, limits: PagePart[LimitList], rejected: FormFields | None = None) -> dict[str, Any]:
    """The values of the page of all limits."""
    listed = limits.value
    rows = [LimitRow(limit) for limit in listed.limits] if listed else []
    after = listed.continue_after if listed else None
    return {
        "status": 200 if rejected is None else 422,
        "rejected": rejected,
        "table": PageTable(visit.address, "all", "Limits", COLUMNS, rows, filters=("scope", "kind")),
        "tried": listed.tried if listed else (),
        "tried_columns": LISTED_LIMITS,
        "scope": visit.get("scope"),
        "kind": visit.get("kind"),
        "kinds": get_args(ScopeKind),
        "choices": CHOICES,
        "next_link": visit.address.link("all", after=after) if after else None,
        "first_link": visit.address.link("all", after="") if visit.get("after") else None,
    }


def view_limit(
    visit: Visit,
    limit: PagePart[ListedLimit],
    history: PagePart[tuple[AuditEvent, ...]],
    rejected: FormFields | None = None,
) -> dict[str, Any] | NotFound:
    """The values of the page of one limit."""
    limit_id = visit.path_params["limit_id"]
    if limit.problem == UNKNOWN:
        return NotFound("Limit not found", f"There is no limit {limit_id!r}: it was deleted, or never set.")
    return {
        "status": 200 if rejected is None else 422,
        "rejected": rejected,
        "limit_id": limit_id,
        "row": None if limit.value is None else LimitRow(limit.value),
        "scope": visit.get("scope"),
        "choices": CHOICES,
        "changes": history.value or (),
        "history_columns": HISTORY,
        "waiting_columns": WAITING,
    }


UNKNOWN = "there is no such limit"
"""The problem of the part of a limit that does not exist."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "unit": get_args(LimitUnit),
    "per": get_args(SettableWindow),
    "action": get_args(LimitAction),
}
"""The choices of the form that sets a limit, by field."""


def _limits(visit: Visit, models: ReadModels) -> Awaitable[PagePart[LimitList]]:
    query = {name: visit.get(name) or None for name in ("scope", "kind", "after")}
    return fetch_part(models.api.read(LimitList, "limits", {**query, "limit": PER_PAGE}))


async def _limit(visit: Visit, models: ReadModels) -> PagePart[ListedLimit]:
    path = f"limits/{segment(visit.path_params['limit_id'])}"
    try:
        return PagePart(await models.api.read(ListedLimit, path, {"scope": visit.get("scope") or None}))
    except ApiRefusedError as error:
        return PagePart(None, UNKNOWN if error.status == 404 else error.message)


async def _history(visit: Visit, models: ReadModels) -> PagePart[tuple[AuditEvent, ...]]:
    """Reads who changed the limit, and why, from the audit log, which not everybody may see."""
    if not visit.session.may_audit:
        return PagePart(())
    return await fetch_part(audit_events_of(models.analytics, _CHANGES, "limit_id", visit.path_params["limit_id"]))


async def _submit(
    session: Session,
    method: str,
    path: str,
    fields: Fields,
    form: str,
    body: Callable[[Fields], Mapping[str, object]],
) -> FormFields | None:
    """Has the HTTP API carry out a form. Returns the rejected form; None if it was done."""
    sent = dict(fields.items())
    try:
        await session.api.post(path, body(fields), method=method)
    except ValueError as error:
        return FormFields(form, sent, str(error))
    except ApiKeyRefusedError:
        raise
    except ApiRefusedError as error:
        if error.code == "below_spent":
            return FormFields(form, sent, error.message, "refuse calls from now on", "stop")
        details = "; ".join(f"{path}: {text}" for path, text in error.details if path and text not in error.message)
        return FormFields(form, sent, f"{error.message}{details and f' ({details})'}")
    except ApiError as error:
        return FormFields(form, sent, error.message)
    return None


def _limit_body(fields: Fields) -> dict[str, object]:
    """Returns the limit of a form. Raises ValueError: the amount or the time is none."""
    unit = fields.get("unit")
    return {
        "scope": fields.get("scope").strip(),
        unit: _amount(unit, fields.get("amount")),
        "per": fields.get("per") or None,
        "action": fields.get("action") or None,
        "thresholds": _thresholds(fields.get("thresholds")),
        "until": _until(fields),
        "stop": True if fields.get("confirmed") == "stop" else None,
        "reason": reason_of(fields),
    }


def _raise_body(fields: Fields) -> dict[str, object]:
    """Returns the raise of a form. Raises ValueError: the amount or the time is none."""
    return {
        "amount": _amount(fields.get("unit"), fields.get("amount")),
        "until": _until(fields),
        "scope": fields.get("scope").strip() or None,
        "reason": reason_of(fields),
    }


def _thresholds(text: str) -> list[int] | None:
    """Returns the percentages of a form; None for the usual ones. Raises ValueError: one is no whole number."""
    try:
        return [int(percentage) for percentage in re.findall(r"[^\s,%]+", text)] or None
    except ValueError:
        raise ValueError(f"{text!r} are no percentages: write them as 50, 80, 100") from None


def _delete_body(fields: Fields) -> dict[str, object]:
    return {"reason": reason_of(fields)}


def _amount(unit: str, text: str) -> str | int:
    """Returns an amount as the HTTP API takes it. Raises ValueError: it is invalid or ambiguous."""
    amount = text.strip().removeprefix("$").strip()
    if unit == "usd":
        nano_of(amount)
        return amount
    if not (amount.isascii() and amount.isdecimal()):
        raise ValueError(f"{text!r} is no whole number: write it without separators, such as 400000")
    return int(amount)


def _until(fields: Fields) -> str | None:
    text = fields.get("until").strip()
    return format_time(datetime.fromisoformat(text).replace(tzinfo=UTC)) if text else None


def _default_id(fields: Fields) -> str:
    unit: Any = fields.get("unit")
    per: Any = fields.get("per") or None
    return default_id(fields.get("scope").strip(), unit, per)


def _unconfirmed(fields: Fields, limit: ListedLimit | None) -> FormFields | None:
    """Returns the form of a raise that must be confirmed first; None for another one."""
    text = fields.get("amount").strip().removeprefix("$").strip()
    if limit is None or not re.fullmatch(r"\d+(\.\d+)?", text) or fields.get("confirmed") == text:
        return None
    if Decimal(text) <= Decimal(limit.amount) * CONFIRM_FROM:
        return None
    amount = amount_in_words(limit.unit, limit.amount)
    confirm = f"raise it to {amount_in_words(limit.unit, text)}, more than ten times {amount}"
    problem = "this is more than ten times the limit; confirm it below"
    return FormFields("raise", dict(fields.items()), problem, confirm, text)
