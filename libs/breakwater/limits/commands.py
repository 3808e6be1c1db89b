"""`breakwater limits`, and `breakwater budgets`: limits, and the money that is counted for them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, get_args
from urllib.parse import quote

import typer

from breakwater.client.commands import Api, DefaultListGroup, ReasonOption, api_command
from breakwater.kernel.columns import clock, with_display
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import CliError, ExitCode, usage_error
from breakwater.kernel.commands.formats import ahead
from breakwater.kernel.formats import exact_money, money, moneys, quantity, typed_money
from breakwater.kernel.types import format_time
from breakwater.limits.contract import (
    LIMITS_PER_PAGE,
    BudgetEvent,
    BudgetList,
    BudgetStatus,
    LimitAction,
    LimitEvent,
    LimitList,
    LimitUnit,
    ListedLimit,
    Reconciliation,
    ScopeKind,
    SettableWindow,
    UnchangedBudget,
)
from breakwater.limits.rules.limit import default_id
from breakwater.limits.rules.scopes import parse_scope, patterns_of, scope_of
from breakwater.limits.views import COLUMNS, LISTED_LIMITS, RECONCILIATION, WAITING, allowance, amount_in_words, differs

NOT_FILLED = "the counters are being rebuilt: the figures are meaningless, and hard limits refuse calls until then"

UNITS: tuple[LimitUnit, ...] = get_args(LimitUnit)
_WHEN = "2h, 7d, 18:00, tomorrow, 2026-12-01"

_HELP = """List limits and what is left of them; set, raise or delete them. Without a command it lists them.

A limit says how much a scope may use in a window, and what happens to a call beyond it. Those of the config can only
be raised here. Changes need a key with the scope `limits`; for a raise, `approve` or `operate` is enough.
"""

limits = typer.Typer(cls=DefaultListGroup, help=_HELP)

_SEE = "breakwater limits"

LimitArgument = Annotated[
    str,
    typer.Argument(
        metavar="LIMIT",
        help="Its id, as `breakwater limits` lists it; or its scope, if only one limit is on that, with --per in that "
        "window.",
    ),
]

WindowOption = Annotated[
    SettableWindow | None, typer.Option("--per", help="Its window, if several limits are on the scope.")
]


@limits.command(name="list")
@api_command
def list_limits(
    api: Api,
    scope: Annotated[
        str | None,
        typer.Option("--scope", metavar="SCOPE", help="Filter by scope, or by a part of one: team:research."),
    ] = None,
    kind: Annotated[
        ScopeKind | None, typer.Option("--kind", help="Filter by kind of scope, also of what a scope is within.")
    ] = None,
) -> None:
    """List the limits of the config and those that were set here, with what of them is used and left.

    A limit on each name by itself, such as `key:*`, has no use of its own; `breakwater limits show` has that of one.

    For example:

        breakwater limits list

        breakwater limits list --scope key:acme-bot

        breakwater limits list --kind team --json | jq '.limits[] | select(.remaining == "0.000000000")'
    """
    listed: list[ListedLimit] = []
    tried: list[ListedLimit] = []
    documents: dict[str, list[Any]] = {"limits": []}
    after: str | None = None
    while True:
        query = {"scope": scope, "kind": kind, "after": after, "limit": LIMITS_PER_PAGE}
        document, page = api.get(LimitList, "limits", **query)
        documents["limits"] += document["limits"]
        if page.tried:
            documents["tried"] = document["tried"]
        listed += page.limits
        tried += page.tried
        if (after := page.continue_after) is None:
            break
    if api.as_json:
        output.json_document(documents)
        return
    output.table(LISTED_LIMITS, listed, empty="there are no limits; see `breakwater limits set --help`")
    for limit in listed:
        _note(limit)
    if tried:
        output.note("limits that are only tried, and refuse nothing:")
        output.table(LISTED_LIMITS, tried)


@limits.command(name="show")
@api_command
def show_limit(
    api: Api,
    limit: LimitArgument,
    per: WindowOption = None,
    scope: Annotated[
        str | None, typer.Option("--scope", metavar="SCOPE", help="Of a limit on each name by itself (`*`): whose use.")
    ] = None,
) -> None:
    """Show one limit, with what of it is used and left.

    For example:

        breakwater limits show key:acme-bot

        breakwater limits show "key:*.usd.month" --scope key:acme-bot
    """
    place = _find(api, limit, per)
    api.show_result(api.get(ListedLimit, _path(place.id), scope=scope or place.scope), _show_limit)


@limits.command(name="set")
@api_command
def set_(
    api: Api,
    scope: Annotated[
        str,
        typer.Argument(
            metavar="SCOPE",
            help="Whose calls it counts: plane, agent:NAME, model:NAME, provider:NAME, tenant:NAME, key:NAME, "
            "user:NAME or team:NAME; with `*` as the name, each by itself; tag:NAME=VALUE; or two of them: "
            "'user:* within team:research'.",
        ),
    ],
    usd: Annotated[str | None, typer.Option("--usd", metavar="AMOUNT", help="Spend in USD.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="NUMBER", help="Input and output tokens.")] = None,
    requests: Annotated[int | None, typer.Option("--requests", metavar="NUMBER", help="Calls.")] = None,
    concurrent: Annotated[
        int | None, typer.Option("--concurrent", metavar="NUMBER", help="Calls at the same time; without --per.")
    ] = None,
    per: Annotated[
        SettableWindow | None,
        typer.Option("--per", help="Minutes and hours slide; longer ones are those of the plane's calendar."),
    ] = None,
    action: Annotated[
        LimitAction | None,
        typer.Option("--action", help="What happens to a call beyond it.", show_default="refuse"),
    ] = None,
    threshold: Annotated[
        list[int] | None,
        typer.Option(
            "--threshold",
            metavar="PERCENT",
            help="A percentage that raises an alert; may be given more than once. [default: 50, 80, 100]",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="WHEN", help=f"When it ends: {_WHEN}. [default: never]")
    ] = None,
    limit_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Its id. [default: of scope, unit and window]")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Accept an amount that is spent already.")] = False,
    reason: ReasonOption = None,
) -> None:
    """Set a limit, or replace it: a second call with another amount changes it. It is effective immediately.

    For example:

        breakwater limits set key:acme-bot --usd 20 --per month

        breakwater limits set "user:* within team:research" --usd 5 --per week --action alert

        breakwater limits set tag:project=web --usd 900 --per quarter --until 2027-01-01 --reason "pilot"
    """
    amounts = {"usd": usd, "tokens": tokens, "requests": requests, "concurrent": concurrent}
    units: list[LimitUnit] = [unit for unit in UNITS if amounts[unit] is not None]
    if len(units) != 1:
        raise usage_error("a limit has one amount", "Give one of --usd, --tokens, --requests and --concurrent.")
    limit_id = limit_id or default_id(scope, units[0], per)
    body = {
        "scope": scope,
        **amounts,
        "per": per,
        "action": action,
        "thresholds": threshold,
        "until": None if until is None else _time(until),
        "stop": stop or None,
        "reason": reason,
    }
    api.show_result(api.act(ListedLimit, _path(limit_id), body, method="PUT", see=_SEE), _show_set)


@limits.command(name="raise")
@api_command
def raise_limit(
    api: Api,
    limit: LimitArgument,
    to: Annotated[str, typer.Option("--to", metavar="AMOUNT", help="The new amount, in the limit's unit.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason; it is recorded.")],
    per: WindowOption = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="WHEN", help=f"When the raise ends: {_WHEN}. [default: with the period]"),
    ] = None,
    scope: Annotated[
        str | None, typer.Option("--scope", metavar="SCOPE", help="Of a limit on each name by itself (`*`): whose.")
    ] = None,
) -> None:
    """Raise a limit for some time, also one of the config. To end a raise, raise it to its own amount.

    For example:

        breakwater limits raise key:acme-bot --to 30 --until tomorrow --reason "launch day"

        breakwater limits raise agent:writer --per day --to 50 --until 18:00 --reason "launch day"

        breakwater limits raise "key:*.usd.month" --scope key:acme-bot --to 30 --reason "launch day"
    """
    place = _find(api, limit, per)
    body = {
        "amount": to,
        "until": None if until is None else _time(until),
        "scope": scope or place.scope,
        "reason": reason,
    }
    api.show_result(api.act(ListedLimit, f"{_path(place.id)}/raise", body, see=_SEE), _show_raised_limit)


@limits.command()
@api_command
def delete(api: Api, limit: LimitArgument, per: WindowOption = None, reason: ReasonOption = None) -> None:
    """Delete a limit that was set here. What it counted stays in the record.

    For example:

        breakwater limits delete key:acme-bot --reason "the pilot is over"
    """

    def show_deleted(deleted: LimitEvent) -> None:
        output.write(f"deleted {deleted.limit_id}, a limit of {deleted.scope}")

    path = _path(_find(api, limit, per).id)
    api.show_result(api.act(LimitEvent, path, {"reason": reason}, method="DELETE", see=_SEE), show_deleted)


class _Place(NamedTuple):
    """A limit, and whose use of it is meant."""

    id: str
    scope: str | None = None


def _find(api: Api, text: str, per: SettableWindow | None) -> _Place:
    """Returns the limit of an id, or the only one on a scope or, without any, on each name of its kind.

    Raises CliError: there is none, or several.
    """
    if _exists(api, text):
        return _Place(text)
    try:
        parts = parse_scope(text)
    except ValueError:
        raise CliError("unknown_limit", f"there is no limit {text!r}", f"`{_SEE}` lists them.") from None
    for pattern in patterns_of(parts):
        scope = scope_of(pattern)
        listed = api.get(LimitList, "limits", scope=scope, limit=LIMITS_PER_PAGE)[1]
        ids = [limit.id for limit in listed.limits if limit.scope == scope and per in (None, limit.per)]
        if len(ids) > 1:
            raise CliError("ambiguous_limit", f"{scope} has {len(ids)} limits", f"Name one: {', '.join(ids)}.")
        if ids:
            return _Place(ids[0], None if scope == text else text)
    raise CliError("unknown_limit", f"there is no limit on {text}", f"`{_SEE}` lists them.")


def _exists(api: Api, limit_id: str) -> bool:
    try:
        api.get(ListedLimit, _path(limit_id))
    except CliError as error:
        if error.code != "unknown_limit":
            raise
        return False
    return True


def _path(limit_id: str) -> str:
    return f"limits/{quote(limit_id, safe='')}"


def _time(text: str) -> str:
    return format_time(ahead(text, datetime.now(UTC), "--until"))


def _note(limit: ListedLimit) -> None:
    """Notes that a limit is raised, or does not count."""
    if (raised := limit.raised) is not None:
        raised_scope = raised.scope or limit.scope
        change = f"{amount_in_words(limit.unit, raised.configured)} to {amount_in_words(limit.unit, raised.amount)}"
        output.note(f"{raised_scope} raised from {change} until {clock(raised.until)}, by {raised.by}: {raised.reason}")
    if limit.shadowed_by is not None:
        output.note(f"{limit.id} does not count: the config has {limit.shadowed_by} in its place", "yellow")


def _show_limit(limit: ListedLimit) -> None:
    columns = [column for column in LISTED_LIMITS if column.key not in ("id", "unit", "per")]
    output.facts([(limit.id, "bold")], columns, limit)
    if limit.waiting:
        output.write(f"{quantity(limit.waiting, 'call')} waiting; the first, which are admitted as room becomes free:")
        output.table(WAITING, limit.waiting_calls)
    _note(limit)


def _show_set(limit: ListedLimit) -> None:
    until = "" if limit.until is None else f" until {clock(limit.until)}"
    output.write(f"{limit.id}: {limit.scope} may use {allowance(limit)}{until}; beyond it: {limit.action}")
    if limit.used is not None:
        output.note(f"{amount_in_words(limit.unit, limit.used)} of it is used")
    _note(limit)


def _show_raised_limit(limit: ListedLimit) -> None:
    if limit.raised is None:
        output.write(f"{limit.id} is not raised: {allowance(limit)}")
        return
    _note(limit)
    typed = limit.raised.configured.removesuffix(".000000000")
    undo = f"breakwater limits raise {shlex.quote(limit.id)} --to {typed} --reason TEXT"
    output.note(f"`{undo}` ends the raise")


_BUDGETS_HELP = """List spend by day, month and so on, with or without a limit; compare it with the record.
Without a command it lists it. `breakwater limits` has limits of all units, and sets them.
"""

budgets = typer.Typer(cls=DefaultListGroup, help=_BUDGETS_HELP)


@budgets.command(name="list")
@api_command
def list_(
    api: Api,
    agent: Annotated[
        str | None,
        typer.Option("--agent", metavar="NAME", help="Filter by agent: budgets that its calls count against."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", help="Filter by tenant: budgets that calls for it count against."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="NAME", help="Filter by API key: budgets that its calls count against."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", metavar="NAME", help="The same by user.")] = None,
    team: Annotated[str | None, typer.Option("--team", metavar="NAME", help="The same by team.")] = None,
) -> None:
    """List the budgets of the current periods. `mode` is how a limit is enforced: hard, soft or none.

    `in flight` is reserved by running calls, and `free` is left for others. `est.` is the cost of calls as a
    percentage of their reservations. A `+` after the spend marks calls of unknown cost.

    For example:

        breakwater budgets list

        breakwater budgets list --agent content-writer --tenant acme

        breakwater budgets list --json | jq '.budgets[] | select(.reached)'
    """
    names = {"agent": agent, "tenant": tenant, "key": key, "user": user, "team": team}
    document, budget_list = api.get(BudgetList, "budgets", **names)
    budgets = [*budget_list.budgets]
    while budget_list.continue_after is not None:
        page, budget_list = api.get(BudgetList, "budgets", **names, after=budget_list.continue_after)
        document = page | {"budgets": document["budgets"] + page["budgets"]}
        budgets += budget_list.budgets
    api.show_result((document, budget_list.model_copy(update={"budgets": tuple(budgets)})), _show)


@budgets.command()
@api_command
def reconcile(api: Api) -> None:
    """Compare the counters in Redis with the record in ClickHouse and EVENTS. Changes nothing.

    Exits with code 1 if they differ. `unrecorded` is the estimated cost of calls whose worker died.

    For example:

        breakwater budgets reconcile

        breakwater budgets reconcile --json | jq '.budgets[] | select(.difference != "0.000000000")'
    """
    if not api.show_result(api.get(Reconciliation, "budgets/reconciliation"), _show_reconciliation).equal:
        raise typer.Exit(ExitCode.FAILED)


@budgets.command(name="raise")
@api_command
def raise_(
    api: Api,
    budget: Annotated[
        str, typer.Argument(metavar="BUDGET", help="Budget as `breakwater budgets` lists it, such as global/daily.")
    ],
    limit: Annotated[str, typer.Argument(metavar="LIMIT", help="New limit in USD.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason; it is recorded.")],
) -> None:
    """Raise a limit until its period ends. To revoke a raise, set the config's limit.

    For example:

        breakwater budgets raise agent:content-writer/daily 50 --reason "launch day"
    """

    def show(result: BudgetEvent | UnchangedBudget) -> None:
        if isinstance(result, BudgetEvent):
            _show_raised(result, budget)
            return
        by = "" if result.raised is None else f", by {result.raised.by}: {result.raised.reason}"
        output.write(f"the limit of {result.budget} is already {money(result.limit)}{by}")

    body = {"budget": budget, "limit_usd": limit, "reason": reason}
    api.show_result(api.act((BudgetEvent, UnchangedBudget), "budgets/raise", body, see="breakwater budgets"), show)


def _show(budget_list: BudgetList) -> None:
    """Prints the budgets, and notes on raised limits and on limits that can be exceeded.

    While the counters are being rebuilt, `?` replaces their figures.
    """
    columns = COLUMNS if budget_list.filled else with_display(COLUMNS, ["spent", "reserved", "free"], lambda _: "?")
    output.table(columns, budget_list.budgets, empty="there are no budgets")
    if not budget_list.filled:
        output.note(NOT_FILLED, "yellow")
    for budget in budget_list.budgets:
        if (raised := budget.raised) is not None:
            until = clock(raised.until)
            output.note(
                f"{budget.budget} raised to {money(raised.amount)} until {until}, by {raised.by}: {raised.reason}"
            )
    _note_exceeded(budget_list.budgets)


def _note_exceeded(budgets: Sequence[BudgetStatus]) -> None:
    """Notes budgets with calls that cost more than was reserved for them."""
    # One note per agent: the same calls also count for its day, for its tenant, and for all agents.
    monthly = [
        budget
        for budget in budgets
        if budget.window == "monthly" and budget.estimate is not None and budget.estimate.exceeded
    ]
    for budget in [budget for budget in monthly if budget.scope == "agent"] or monthly[:1]:
        assert budget.estimate is not None
        output.note(
            (
                f"{budget.budget}: of {quantity(budget.estimate.calls, 'call')} {budget.estimate.exceeded:,} cost "
                "more than was reserved for them; a hard limit can be exceeded by that amount"
            ),
            "yellow",
        )


def _show_reconciliation(reconciliation: Reconciliation) -> None:
    """Prints the counters, the record, and whether they agree."""
    output.table(RECONCILIATION, reconciliation.budgets, empty="nothing is counted or recorded")
    if reconciliation.equal:
        output.print_styled(("the counters agree with the record", "green"))
        return
    output.print_styled(("the counters differ from the record", "red"), f": {_differences(reconciliation)}")
    output.note("the budget service compares them too, and repairs the counters; the record is not changed")


def _show_raised(event: BudgetEvent, budget: str) -> None:
    """Prints what a limit was raised to, and how to undo it."""
    if event.kind == "raise_ended":
        output.write(
            f"the config's limit of {budget}, {money(event.limit)}, is effective again; before: {money(event.previous)}"
        )
        return
    until = "" if event.resets_at is None else f" until {clock(event.resets_at)}"
    was, now = moneys(event.previous or 0, event.limit or 0)
    change = f"was {was}, is now {now}{until}"
    output.write(f"the limit of {budget} {change}, by {event.by}: {event.reason}")
    undo = f"breakwater budgets raise {shlex.quote(budget)} {typed_money(event.configured or 0)} --reason TEXT"
    output.note(f"{money(event.total)} of it is spent; `{undo}` restores the config's limit")


def _differences(reconciliation: Reconciliation) -> str:
    differences = [f"{budget.budget} of {budget.period}" for budget in reconciliation.budgets if differs(budget)]
    if reconciliation.reserved != reconciliation.held:
        reserved = exact_money(reconciliation.reserved)
        held_by_calls = exact_money(reconciliation.held)
        differences.append(f"{reserved} reserved for calls that hold {held_by_calls}")
    return ", ".join(differences) or "not in the spend, but in reservations or estimates"
