"""`breakwater keys`: creates, lists, rotates, expires and revokes API keys, by the HTTP API or in a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import quote

import typer

from breakwater.client.commands import Api, ReasonOption, api_command
from breakwater.identity.api_keys import create_key, list_keys, revoke_key
from breakwater.identity.contract import KEY_SCOPES, KEYS_PER_PAGE, KeyScope
from breakwater.identity.rules.callers import ApiKey
from breakwater.kernel.columns import clock
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import usage_error
from breakwater.kernel.commands.formats import ahead
from breakwater.kernel.commands.output import Column
from breakwater.kernel.commands.text_input import check_no_spaces
from breakwater.kernel.types import format_time
from breakwater.limits.contract import LimitAction, LimitedKey, LimitedKeyList, LimitUnit, NewLimitedKey, SettableWindow
from breakwater.limits.views import allowance_in_words

app = typer.Typer(help="API keys of the HTTP API, and what each may do.", no_args_is_help=True)

_SEE = "breakwater keys list"


class PriorityName(StrEnum):
    """The `Priority`s as an enumeration."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class ScopeName(StrEnum):
    """The `KeyScope`s, and `all` of them, as an enumeration, because typer supports no lists of literals."""

    SUBMIT = "submit"
    READ = "read"
    OPERATE = "operate"
    APPROVE = "approve"
    AUDIT = "audit"
    LIMITS = "limits"
    ALL = "all"


FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="A file of keys, which needs no running plane: for the first key. [default: the plane's keys, over the "
        "HTTP API; $BREAKWATER_API_KEYS_FILE if that is set and no API is named]",
    ),
]

KeyArgument = Annotated[
    str,
    typer.Argument(metavar="KEY", help="Its id, as `breakwater keys list` shows it; or its name, if only it has that."),
]


@app.command()
@api_command
def create(
    api: Api,
    name: Annotated[str, typer.Argument(help="Who or what uses the key.")],
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option("--scope", help="Its purpose; may be given more than once. [default: submit]"),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", help="Bind it to a tenant; may be given more than once. Takes --scope submit alone."),
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option("--agent", help="Bind it to an agent; may be given more than once. Takes --scope submit alone."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Bind it to a model that its jobs may ask for; may be given more than once. "
            "Takes --scope submit alone.",
        ),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="The user of all its jobs; it can't name another.")] = None,
    team: Annotated[str | None, typer.Option("--team", help="The team of all its jobs; it can't name another.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="NAME=VALUE", help="A cost tag of all its jobs; may be given more than once."),
    ] = None,
    priority: Annotated[
        PriorityName | None,
        typer.Option("--priority", help="Priority of its jobs, and the highest that they may ask for."),
    ] = None,
    weight: Annotated[
        int, typer.Option("--weight", min=1, max=100, help="Its share of what several keys wait for.")
    ] = 1,
    residency: Annotated[
        str | None, typer.Option("--residency", metavar="REGION", help="The region that its calls must not leave: eu.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="WHEN", help="When it ends: 90d, or a time. [default: never]")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="LIMIT",
            help="A limit on it: 'usd 20 per month', 'requests 60 per minute wait', 'concurrent 5'; may be given more "
            "than once. An action at the end replaces refuse.",
        ),
    ] = None,
    reason: ReasonOption = None,
    file: FileOption = None,
) -> None:
    """Make a key. It is shown this once: only its digest is kept.

    Running services accept it immediately. Only the key goes to stdout. Its scopes say what it may do; without
    --scope, it has `submit`, which is all that a program needs:

    - submit: submit jobs, and read their answers, which are not redacted

    - read: look at agents, breakers, guards, budgets, alerts, dead letters and metrics

    - operate: change the state of things: reset, isolate, raise a limit, acknowledge, resolve, test, replay

    - approve: of these, acknowledge, resolve, raise a limit, let a stopped task continue

    - audit: see in the console who did what

    - limits: say who may spend what: set limits, make and revoke keys

    - all: all of these

    For example:

        breakwater keys create billing-service

        breakwater keys create acme --scope submit --tenant acme --agent content-writer

        breakwater keys create ada --scope submit --user ada@example.com --team search --tag project=ranking

        breakwater keys create acme-bot --limit 'usd 20 per month' --limit 'usd 2 per day alert'

        breakwater keys create contractor --scope submit --model gpt-4.1-mini --expires 30d

        breakwater keys create on-call --scope read --scope operate

        export BREAKWATER_API_KEY=$(breakwater keys create laptop --scope all)

        breakwater keys create first --scope all --file api_keys.json
    """
    bindings = {"--tenant": tenant, "--agent": agent, "--model": model}
    check_no_spaces({"NAME": name, **bindings})
    for option, names in bindings.items():
        for value in names or ():
            if "*" in value:
                raise usage_error(
                    f"{option} {value!r}: names have no wildcards", f"Without {option}, the key may use any."
                )
    wanted = scope or [ScopeName.SUBMIT]
    scopes = tuple[KeyScope, ...](
        key_scope for key_scope in KEY_SCOPES if key_scope in wanted or ScopeName.ALL in wanted
    )
    rights: dict[str, Any] = {
        "scopes": scopes,
        "tenants": tuple(tenant or ()),
        "agents": tuple(agent or ()),
        "models": tuple(model or ()),
        "user": user,
        "team": team,
        "tags": _tags(tag or ()),
        "priority": None if priority is None else priority.value,
        "weight": weight,
        "residency": residency,
    }
    if (path := _file_of(api, file)) is not None:
        if (expires, limit, reason) != (None, None, None):
            message = "keys of a file have no --expires, --limit or --reason"
            raise usage_error(message, "Make the key over the HTTP API.")
        _create_in_file(path, name, rights, as_json=api.as_json)
        return
    expires_at = None if expires is None else _time(expires, "--expires")
    limits = None if limit is None else [_limit(text) for text in limit]
    body = {"name": name, **rights, "expires_at": expires_at, "limits": limits, "reason": reason}
    api.show_result(api.act(NewLimitedKey, "keys", body, see=_SEE, unanswered=_UNANSWERED), _show_new)


@app.command(name="list")
@api_command
def list_(
    api: Api,
    ended: Annotated[
        bool, typer.Option("--ended", help="Also those that were revoked or expired within 30 days.")
    ] = False,
    file: FileOption = None,
) -> None:
    """List the keys and their scopes, without their secrets: those of the plane, and those of its file.

    For example:

        breakwater keys list --json

        breakwater keys list --file api_keys.json
    """
    if (path := _file_of(api, file)) is not None:
        rights = [key.model_dump(exclude={"sha256"}) for key in list_keys(path)]
        keys = [LimitedKey(source="file", state="active", **fields) for fields in rights]
        _show_keys(keys, as_json=api.as_json, empty=f"no keys in {path}; `breakwater keys create NAME` makes one")
        return
    listed: list[LimitedKey] = []
    after: str | None = None
    while True:
        query = {"ended": "true" if ended else None, "after": after, "limit": KEYS_PER_PAGE}
        page = api.get(LimitedKeyList, "keys", **query)[1]
        listed += page.keys
        if (after := page.continue_after) is None:
            break
    _show_keys(listed, as_json=api.as_json, empty="no keys; `breakwater keys create NAME` makes one")


@app.command()
@api_command
def rotate(
    api: Api,
    key: KeyArgument,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="How long the old secret stays valid, too: 0, 1h, 7d.")
    ] = "24h",
    reason: ReasonOption = None,
) -> None:
    """Give a key a new secret, which is shown this once. Its id, name and limits stay.

    For example:

        breakwater keys rotate billing-service

        breakwater keys rotate billing-service --grace 0 --reason "leaked in a log"
    """
    body = {"grace_s": _seconds(grace), "reason": reason}
    api.show_result(api.act(NewLimitedKey, _path(key, "rotate"), body, see=_SEE, unanswered=_UNANSWERED), _show_new)


@app.command()
@api_command
def expire(
    api: Api,
    key: KeyArgument,
    at: Annotated[str, typer.Option("--at", metavar="WHEN", help="When it ends: 90d, a time, or never.")],
    reason: ReasonOption = None,
) -> None:
    """Set the time at which a key ends. A time that is over revokes it.

    For example:

        breakwater keys expire contractor --at 30d

        breakwater keys expire contractor --at 2027-01-31T18:00Z --reason "end of the contract"
    """
    body = {"at": at if at == "never" else _time(at, "--at"), "reason": reason}

    def show(ending: LimitedKey) -> None:
        if ending.state == "revoked":
            _show_revoked(ending)
        elif ending.expires_at is None:
            output.write(f"{ending.id} ({ending.name}) does not expire")
        else:
            output.write(f"{ending.id} ({ending.name}) expires at {clock(ending.expires_at)}")

    api.show_result(api.act(LimitedKey, _path(key, "expire"), body, see=_SEE), show)


@app.command()
@api_command
def revoke(api: Api, key: KeyArgument, reason: ReasonOption = None, file: FileOption = None) -> None:
    """Revoke a key. Running services refuse it immediately, and end what waits or is streamed for it.

    For example:

        breakwater keys revoke 3f9c01d2a77b

        breakwater keys revoke billing-service --reason "leaked in a log"
    """
    if (path := _file_of(api, file)) is not None:
        revoked = revoke_key(path, key)
        if api.as_json:
            output.json_document({"id": revoked.id, "name": revoked.name, "revoked": True})
        else:
            _show_revoked(revoked)
        return
    api.show_result(api.act(LimitedKey, _path(key, "revoke"), {"reason": reason}, see=_SEE), _show_revoked)


_UNANSWERED = "`{}` shows whether it was done; if so, `breakwater keys rotate` gives the key another secret."


def _create_in_file(path: Path, name: str, rights: dict[str, Any], *, as_json: bool) -> None:
    namesakes = [key.id for key in list_keys(path) if key.name == name]
    key = create_key(path, name, **rights)
    if as_json:
        output.json_document({"name": name, **rights, "key": key, "file": str(path)})
    else:
        output.write(key)
        scopes = ", ".join(rights["scopes"])
        output.note(f"Its scopes: {scopes}. This is the only time it is shown. Its digest is in {path}.")
    if namesakes:
        other_ids = ", ".join(namesakes)
        output.note(f"{name!r} has another key already ({other_ids}); `breakwater keys revoke ID` revokes one.")


def _show_new(new_key: NewLimitedKey) -> None:
    output.write(new_key.key)
    until = (
        "" if new_key.old_secret_until is None else f" The old secret is valid until {clock(new_key.old_secret_until)}."
    )
    end = "" if new_key.expires_at is None else f" It expires at {clock(new_key.expires_at)}."
    output.note(f"Its scopes: {', '.join(new_key.scopes)}.{end} This is the only time it is shown.{until}")


def _show_revoked(revoked: LimitedKey | ApiKey) -> None:
    output.write(f"revoked {revoked.id} ({revoked.name})")


def _show_keys(keys: Sequence[LimitedKey], *, as_json: bool, empty: str) -> None:
    if as_json:
        output.json_document([key.model_dump(mode="json") for key in keys])
        return
    columns: list[Column[LimitedKey]] = [
        Column("id", lambda key: key.id),
        Column("name", lambda key: key.name),
        Column("scopes", lambda key: ", ".join(key.scopes)),
        Column("from", lambda key: key.source, drop=6),
        Column("tenants", lambda key: ", ".join(key.tenants) or "any"),
        Column("agents", lambda key: ", ".join(key.agents) or "any"),
        Column("models", lambda key: ", ".join(key.models) or "any", drop=5),
        Column("user", lambda key: key.user, drop=2),
        Column("team", lambda key: key.team, drop=3),
        Column("tags", lambda key: ", ".join(f"{name}={value}" for name, value in key.tags.items()), drop=4),
        Column("limits", _limits_in_words, drop=4),
        Column("ends", lambda key: key.state if key.state != "active" else key.expires_at, drop=7),
        Column("created", lambda key: key.created_at, drop=1),
    ]
    output.table(columns, keys, empty=empty)


def _file_of(api: Api, file: Path | None) -> Path | None:
    """Returns the file that a command is about; None if it is about the keys of a running plane."""
    named = (api.url, api.api_key, api.data, os.environ.get("BREAKWATER_URL"), os.environ.get("BREAKWATER_API_KEY"))
    if file is not None or any(named):
        return file
    variable = os.environ.get("BREAKWATER_API_KEYS_FILE")
    return Path(variable) if variable else None


def _path(key: str, action: str) -> str:
    return f"keys/{quote(key, safe='')}/{action}"


def _time(text: str, option: str) -> str:
    return format_time(ahead(text, datetime.now(UTC), option))


def _seconds(text: str) -> int:
    now = datetime.now(UTC)
    if not re.fullmatch(r"\d+(\.\d+)?\s*[a-z]*", text):
        raise usage_error(f"--grace {text!r} is no duration", "Write it like 0, 90s, 2h or 7d.")
    return 0 if text == "0" else int((ahead(text, now, "--grace") - now).total_seconds())


_LIMIT = re.compile(
    rf"({'|'.join(get_args(LimitUnit))}) (\S+)(?: per ({'|'.join(get_args(SettableWindow))}))?"
    rf"(?: ({'|'.join(get_args(LimitAction))}))?"
)


def _limit(option: str) -> dict[str, Any]:
    """Returns the limit of a `--limit`. Raises CliError: it has another form."""
    match = _LIMIT.fullmatch(" ".join(option.split()))
    if match is None:
        units, windows, actions = ("|".join(get_args(words)) for words in (LimitUnit, SettableWindow, LimitAction))
        remedy = f"Write it as {units}, the amount, `per` {windows} (not for concurrent), and perhaps {actions}."
        raise usage_error(f"--limit {option!r} is no limit", remedy)
    unit, amount, window, action = match.groups()
    stated = amount if unit == "usd" or not amount.isdecimal() else int(amount)
    terms = {unit: stated, "per": window, "action": action}
    return {name: value for name, value in terms.items() if value is not None}


def _limits_in_words(key: LimitedKey) -> str:
    return ", ".join(allowance_in_words(limit.unit, limit.amount, limit.per) for limit in key.limits)


def _tags(options: Iterable[str]) -> dict[str, str]:
    """Returns the tags of `NAME=VALUE` options. Raises CliError: one has another form, or a name comes twice."""
    tags = dict[str, str]()
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise usage_error(f"--tag {option!r}: has no value", "Write it as --tag NAME=VALUE.")
        if name in tags:
            raise usage_error(f"--tag {option!r}: {name} is given twice", "A key has one value for each tag.")
        tags[name] = value
    return tags
