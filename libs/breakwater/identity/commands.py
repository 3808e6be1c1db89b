"""`breakwater keys`: creates, lists and revokes API keys."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from breakwater.identity.api_keys import create_key, list_keys, revoke_key
from breakwater.identity.contract import KEY_SCOPES, KeyScope
from breakwater.identity.rules.callers import ApiKey
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import usage_error
from breakwater.kernel.commands.output import Column
from breakwater.kernel.commands.text_input import check_no_spaces
from breakwater.local.plane import DEFAULT_DATA, DataOption, JsonOption

app = typer.Typer(help="API keys of the HTTP API, and what each may do.", no_args_is_help=True)


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
        help="The file of keys. [default: $BREAKWATER_API_KEYS_FILE, or api_keys.json in the data directory or here]",
    ),
]


@app.command()
def create(
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
    file: FileOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key. It is shown this once: only its digest is kept.

    Running services accept it immediately. Only the key goes to stdout. Its scopes say what it may do; without
    --scope, it has `submit`, which is all that a program needs:

    - submit: submit jobs, and read their answers, which are not redacted

    - read: look at agents, breakers, guards, budgets, alerts, dead letters and metrics

    - operate: change the state of things: reset, isolate, raise a cap, acknowledge, resolve, test, replay

    - approve: of these, acknowledge, resolve, raise a cap, let a stopped task continue

    - audit: see in the console who did what

    - limits: say who may spend what: set limits, make and revoke keys

    - all: all of these

    For example:

        breakwater keys create billing-service

        breakwater keys create acme --scope submit --tenant acme --agent content-writer

        breakwater keys create ada --scope submit --user ada@example.com --team search --tag project=ranking

        breakwater keys create on-call --scope read --scope operate

        export BREAKWATER_API_KEY=$(breakwater keys create laptop --scope all)
    """
    check_no_spaces({"NAME": name, "--tenant": tenant, "--agent": agent, "--model": model})
    for option, names in (("--tenant", tenant), ("--agent", agent), ("--model", model)):
        for value in names or ():
            if "*" in value:
                raise usage_error(
                    f"{option} {value!r}: names have no wildcards", f"Without {option}, the key may use any."
                )
    path = keys_file(file, data)
    namesakes = [key.id for key in list_keys(path) if key.name == name]
    wanted = scope or [ScopeName.SUBMIT]
    scopes = tuple[KeyScope, ...](name for name in KEY_SCOPES if name in wanted or ScopeName.ALL in wanted)
    tenants = tuple(tenant or ())
    agents = tuple(agent or ())
    models = tuple(model or ())
    tags = _tags(tag or ())
    key = create_key(path, name, scopes, tenants=tenants, agents=agents, models=models, user=user, team=team, tags=tags)
    if as_json:
        bounds = {"tenants": tenants, "agents": agents, "models": models, "user": user, "team": team, "tags": tags}
        output.json_document({"name": name, "scopes": scopes, **bounds, "key": key, "file": str(path)})
    else:
        output.write(key)
        output.note(f"Its scopes: {', '.join(scopes)}. This is the only time it is shown. Its digest is in {path}.")
    if namesakes:
        other_ids = ", ".join(namesakes)
        output.note(f"{name!r} has another key already ({other_ids}); `breakwater keys revoke ID` revokes one.")


@app.command(name="list")
def list_(file: FileOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:
    """List the keys and their scopes, without their secrets.

    For example:

        breakwater keys list --json
    """
    path = keys_file(file, data)
    keys = list_keys(path)
    if as_json:
        output.json_document([key.model_dump(exclude={"sha256"}) for key in keys])
        return
    columns: list[Column[ApiKey]] = [
        Column("id", lambda key: key.id),
        Column("name", lambda key: key.name),
        Column("scopes", lambda key: ", ".join(key.scopes)),
        Column("tenants", lambda key: ", ".join(key.tenants) or "any"),
        Column("agents", lambda key: ", ".join(key.agents) or "any"),
        Column("models", lambda key: ", ".join(key.models) or "any", drop=5),
        Column("user", lambda key: key.user, drop=2),
        Column("team", lambda key: key.team, drop=3),
        Column("tags", lambda key: ", ".join(f"{name}={value}" for name, value in key.tags.items()), drop=4),
        Column("created", lambda key: key.created_at, drop=1),
    ]
    output.table(columns, keys, empty=f"no keys in {path}; `breakwater keys create NAME` makes one")


@app.command()
def revoke(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="Its id, as `breakwater keys list` shows it; or its name, if only it has that."
        ),
    ],
    file: FileOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key. Running services refuse it from the next request on.

    For example:

        breakwater keys revoke 3f9c01d2a77b

        breakwater keys revoke billing-service
    """
    revoked = revoke_key(keys_file(file, data), key)
    if as_json:
        output.json_document({"id": revoked.id, "name": revoked.name, "revoked": True})
    else:
        output.write(f"revoked {revoked.id} ({revoked.name})")


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


def keys_file(file: Path | None, data: Path | None) -> Path:
    """The file of the keys: that of the option, of the environment, in the data directory, or here."""
    if file is not None:
        return file
    if data is None and (variable := os.environ.get("BREAKWATER_API_KEYS_FILE")):
        return Path(variable)
    directory = data or DEFAULT_DATA
    return directory / "api_keys.json" if data is not None or directory.is_dir() else Path("api_keys.json")
