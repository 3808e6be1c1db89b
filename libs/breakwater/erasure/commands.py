"""`breakwater erase`: takes a person's or a tenant's texts and names out of all stores."""

from __future__ import annotations

import getpass
import sys
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from breakwater.config.servers import layout
from breakwater.erasure.contract import ErasureReport, SearchReport
from breakwater.erasure.erase import ErasableData, Eraser
from breakwater.erasure.rules import DataSubject
from breakwater.erasure.search import NATS, Samples, StoreSearch, samples_of
from breakwater.identity.audit import Actor, AuditLog
from breakwater.kernel.commands import connect, output
from breakwater.kernel.commands.errors import CliError, ExitCode, usage_error
from breakwater.kernel.formats import quantity
from breakwater.kernel.nats.publisher import Publisher
from breakwater.local.plane import ConfigOption, DataOption, JsonOption, PlaneLocation
from breakwater.redaction.rules.redact import Redactor

ANSWER_TIMEOUT_S = 3_600.0
"""The longest silence of ClickHouse, which rewrites months of rows."""


def erase(
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="The user, as `breakwater executions --user` has it.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="The tenant; with --user, both.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be erased.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Search all stores afterwards for texts of the newest 100 jobs, callers' ids, and the user's name; "
            "exit code 1 if anything is there, or a file may not be read.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Erase the prompts, answers and names of a user or a tenant in NATS, Redis and ClickHouse; money and counts stay.

    Records keep their times, models, tokens and costs, without the user. Jobs that have not ended stop it: cancel them,
    or wait. If it is interrupted, run it again. The audit log gets a digest of the names, and the numbers.

    What it can't reach: backups, logs and exports, providers, receivers of alerts, API keys and limits that name the
    user. docs/security.md lists what is left, and for how long.

    For example:

        breakwater erase --user anna@example.com --dry-run

        breakwater erase --user anna@example.com --verify

        breakwater erase --tenant acme --yes --json
    """
    if not user and not tenant:
        raise usage_error("say whose data: --user, --tenant, or both")
    subject = DataSubject(user or None, tenant or None)
    plane = PlaneLocation(data)
    if not (yes or dry_run) and (as_json or not output.is_terminal(sys.stdin)):
        raise usage_error("erasing can't be undone", "Look at --dry-run, and repeat it with --yes.")
    report = connect.run(_run(plane, config, subject, dry_run=dry_run, verify=verify, ask=not yes))
    if as_json:
        output.json_document(report)
    else:
        _print(report, subject)
    if report.search is not None and (report.search.traces or report.search.unread):
        raise typer.Exit(ExitCode.FAILED)


async def _run(
    plane: PlaneLocation, config_option: Path | None, subject: DataSubject, *, dry_run: bool, verify: bool, ask: bool
) -> ErasureReport:
    config = plane.config(config_option)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect.bus(plane.admin_nats_url, reconnects=True))
        redis = await stack.enter_async_context(connect.state(plane.redis_url))
        timeout = {"answer_timeout_s": ANSWER_TIMEOUT_S}
        analytics = await stack.enter_async_context(connect.analytics(plane.admin_clickhouse_url, **timeout))
        audit = AuditLog(Publisher(lambda: client, "erase"), Redactor.compile(config.redaction))
        eraser = Eraser(lambda: client, redis, analytics, audit, subject, datetime.now(UTC), layout=layout(config))
        data = await eraser.find()
        if dry_run:
            return eraser.report(data, dry_run=True)
        if ask:
            _ask(data)
        samples = await samples_of(eraser.rows, data.rows, subject) if verify else Samples()
        report = await eraser.erase(data, Actor(getpass.getuser(), "command"), output.note)
        if not verify:
            return report
        output.note("searching all stores")
        folders = {NATS: plane.data / "nats", "Redis": await eraser.keys.folder()}
        search = await StoreSearch(lambda: client, redis, analytics, folders).run(samples)
        return report.model_copy(update={"search": search})


def _ask(data: ErasableData) -> None:
    jobs = quantity(len(data.messages.ids), "job")
    if not typer.confirm(f"Erase the texts and names of {jobs}, which can't be undone?", err=True):
        raise CliError("not_confirmed", "nothing was erased")


def _print(report: ErasureReport, subject: DataSubject) -> None:
    verb = "would be erased" if report.dry_run else "were erased"
    output.write(f"texts and names of {quantity(report.jobs, 'job')} {verb}")
    for store, count in report.stores.items():
        output.write(f"  {store}: {count:,}")
    if report.unfinished:
        output.write(f"{quantity(report.unfinished, 'job')} not ended: cancel, or wait; nothing is erased before")
    for text in report.remaining:
        output.note(f"left: {text}")
    if report.search is not None:
        print_search(report.search, subject)


def print_search(search: SearchReport, subject: DataSubject) -> None:
    """Prints what was searched for, where, and what was found."""
    texts = f"{quantity(search.texts, 'text')} of {quantity(search.jobs, 'job')}, {quantity(search.ids, 'id')}"
    output.write(f"searched for {texts}{' and the name' if search.name else ''}, in:")
    for store, count in search.searched.items():
        output.write(f"  {store}: {count:,}")
    if subject.user is not None and not search.name:
        output.note("not searched for: the name, which is too short, or its tenant's")
    for store, count in search.unread.items():
        output.note(f"not searched: {count:,} of the files and folders of {store}, which you may not read")
    if search.actions:
        actions = quantity(search.actions, "operators' action")
        output.note(f"kept: {actions} in AUDIT with the name or an id, for 30 days, as that log is never changed")
    if not search.traces:
        output.write("found nothing")
    for trace in search.traces:
        output.write(f"found: {trace.kind} in {trace.store}, {trace.place}, {trace.count}")
