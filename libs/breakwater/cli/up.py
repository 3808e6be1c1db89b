"""`breakwater up`: the whole plane on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from breakwater import prctl
from breakwater.cli import connect, formats, output
from breakwater.cli.errors import wrong_usage
from breakwater.cli.plane import DEFAULT_DATA
from breakwater.files import write_private

if TYPE_CHECKING:
    from breakwater.cli.reload import Applied, NotApplied, Report
    from breakwater.config import Config
    from breakwater.embedded.datadir import DataDir
    from breakwater.embedded.process import ProcessSpec
    from breakwater.embedded.stack import Stack
    from breakwater.embedded.supervisor import ProcessEvent, Supervisor
    from breakwater.settings import Settings


def up(
    config: Annotated[Path, typer.Option("--config", "-c", help="The config file.", show_default=True)] = Path(
        "breakwater.yaml"
    ),
    data: Annotated[
        Path, typer.Option("--data", "-d", help="Where everything is kept: streams, state, tables, secrets, logs.")
    ] = DEFAULT_DATA,
    workers: Annotated[int, typer.Option(min=1, max=64, help="How many worker processes to run.")] = 1,
    http_port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Where the API listens.", show_default="8080 or a free one")
    ] = None,
    console_port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="Where the console's pages are.", show_default="8081 or a free one"),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(help="Replace every provider by a simulated one: nothing is called, nothing is spent."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events and endpoints as JSON lines.")] = False,
) -> int:
    """Run the whole plane on this machine: NATS, Redis, ClickHouse and all services.

    Needs no Docker and no installed server. Everything listens on loopback only, with passwords made at the first
    start. A part that dies is started again; Ctrl-C stops everything, and the next start goes on with the same data.

    When the config file is saved, it is checked and put in force without a restart; a broken one changes nothing.

    A server that is already there is used instead of starting one: set BREAKWATER_NATS_URL, BREAKWATER_REDIS_URL or
    BREAKWATER_CLICKHOUSE_URL.

    For example:

        breakwater up --config examples/breakwater.yaml --simulate

        breakwater up --config breakwater.yaml --data /var/lib/breakwater --workers 4
    """
    from breakwater.cli.reload import require_usable
    from breakwater.config import load_config
    from breakwater.embedded.datadir import DataDir

    if not config.exists() and str(config) == "breakwater.yaml":
        raise wrong_usage(
            "there is no breakwater.yaml here",
            "`breakwater init` writes one; or name one with --config FILE.",
        )
    # Before anything is started or created.
    require_usable(config, load_config(config), simulate=simulate)
    directory = DataDir(data)
    directory.create()
    with directory.locked() as lock:
        return connect.run(
            _run(directory, lock, config, workers, http_port, console_port, simulate=simulate, as_json=as_json)
        )


async def _run(
    data: DataDir,
    lock: int,
    config_file: Path,
    workers: int,
    http_port: int | None,
    console_port: int | None,
    *,
    simulate: bool,
    as_json: bool,
) -> int:
    from breakwater import background
    from breakwater.cli.full_disk import FullDisk
    from breakwater.cli.reload import ConfigFollower
    from breakwater.config import load_config
    from breakwater.embedded.stack import plan_stack
    from breakwater.embedded.supervisor import Supervisor

    supervisor = Supervisor(
        on_event=_printer(data.logs, as_json=as_json),
        inherit=[lock],
        stop_s=12.0,
        fork_log=data.logs / "fork-server.log",
    )

    following: list[asyncio.Task[None]] = []

    async def stay_up() -> NoReturn:
        effective, simulation = config_file, None
        if simulate:
            from breakwater.embedded.simulation import simulated

            simulation = simulated(data, config_file)
            effective = simulation.config_file
        stack = plan_stack(
            data,
            effective,
            workers=workers,
            environment=os.environ,
            http_port=http_port,
            console_port=console_port,
        )
        if simulation is not None:
            where = {"simulated_provider_url": simulation.control_url}
            stack = replace(stack, endpoints=stack.endpoints.model_copy(update=where))
        key = await start_stack(supervisor, data, stack, beside=[] if simulation is None else [simulation.process])
        agent = next(iter(load_config(stack.setup.config).agents))
        _show_endpoints(stack, key, agent, as_json=as_json, simulate=simulate)
        follower = ConfigFollower(supervisor, data, stack, config_file, _reporter(as_json=as_json), simulation)
        following.append(asyncio.create_task(follower.run()))
        full_disk = FullDisk(supervisor, data, stack, partial(_show_disk, as_json=as_json))
        following.append(asyncio.create_task(full_disk.run()))
        while True:
            await asyncio.Event().wait()

    try:
        code = 128 + await supervisor.run(stay_up)
    finally:
        await background.stop(*following)
        data.remove_endpoints()
    if not as_json:
        output.note("stopped; the data stays in " + str(data.path))
    return code


async def start_stack(
    supervisor: Supervisor, data: DataDir, stack: Stack, *, beside: Sequence[ProcessSpec] = ()
) -> str | None:
    """Starts all processes of a stack in their order, and writes down where it is, for other programs.

    Args:
        supervisor: what keeps them alive.
        data: the stack's data directory, locked.
        stack: what to start.
        beside: what else to start, together with the servers.

    Returns:
        The first API key, the one time that it may be shown; None where there is one already.

    Raises:
        ProcessFailedError: a process did not come up.
        CliError: a server does not answer.
    """
    from breakwater.background import run_together
    from breakwater.cli.setup import prepare_clickhouse, prepare_nats
    from breakwater.config import load_config

    prctl.hide_memory()  # the secrets of all services are in its environment
    (data.path / "alive").mkdir(mode=0o700, exist_ok=True)
    settings = stack.setup
    config = load_config(settings.config)

    async def when_ready(server: str, prepare: Callable[[Settings, Config], Awaitable[object]]) -> None:
        if server not in stack.given:
            await supervisor.keepers[server].until_ready()
        await prepare(settings, config)

    await run_together(  # NATS is there at once, and ClickHouse takes two seconds
        supervisor.start([*beside, *stack.servers]),
        when_ready("nats", prepare_nats),
        when_ready("clickhouse", prepare_clickhouse),
    )
    key = _first_key(stack)
    await supervisor.start(stack.services)
    data.write_endpoints(stack.endpoints)
    return key


def _first_key(stack: Stack) -> str | None:
    from breakwater.api_keys import create_key, list_keys

    keys_file = stack.setup.api_keys_file
    if stack.endpoints.api_key_file.exists() and list_keys(keys_file):
        return None
    key = create_key(keys_file, "first")
    write_private(stack.endpoints.api_key_file, key)
    return key


def _show_endpoints(stack: Stack, key: str | None, agent: str, *, as_json: bool, simulate: bool) -> None:
    from breakwater.embedded.datadir import mask_url

    endpoints = stack.endpoints
    if as_json:
        output.json_line({"event": "up", **endpoints.model_dump(mode="json"), "first_api_key": key})
        return

    def row(name: str, url: str) -> tuple[str, str]:
        return name, mask_url(url) + (" (given)" if name in stack.given else "")

    rows = [
        ("console", f"{endpoints.console_url} (sign in with the API key)"),
        ("API", endpoints.request_url + "/docs"),
        row("nats", endpoints.nats_url),
        row("redis", endpoints.redis_url),
        row("clickhouse", endpoints.clickhouse_url),
        ("metrics", _span_of(list(endpoints.metrics.values()))),
        ("data", str(endpoints.data_dir)),
        ("URLs with passwords", str(endpoints.data_dir / "endpoints.json")),
        ("API key", str(endpoints.api_key_file)),
    ]
    output.styled(("Breakwater is up.", "bold green"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        output.styled((f"  {name.ljust(width)}  ", "dim"), value)
    if key is not None:
        output.styled(("\n  The first API key, shown once: ", ""), (key, "bold"))
    if simulate:
        output.styled(("\n  Every provider is simulated: nothing is called, nothing is spent.", "yellow"))
    where = "" if endpoints.data_dir == DEFAULT_DATA.absolute() else f" --data {shlex.quote(str(endpoints.data_dir))}"
    output.styled("\n  Next, in another terminal here:")
    for arguments in (f'submit {shlex.quote(agent)} "Write a haiku about harbours."', "tail --since 1h"):
        output.styled((f"    {formats.program()} {arguments}{where}", "bold"))
    output.styled(("  Ctrl-C stops everything.", "dim"))


def _reporter(*, as_json: bool) -> Report:
    from breakwater.cli.reload import NotApplied

    def show(happened: Applied | NotApplied) -> None:
        if as_json:
            output.json_line(
                {
                    "event": "config_not_applied" if isinstance(happened, NotApplied) else "config_applied",
                    **asdict(happened),
                }
            )
        elif isinstance(happened, NotApplied):
            output.styled((f"  the config is not applied, and version {happened.version} stays in force:", "red"))
            output.note(happened.error)
        else:
            output.note(f"  config version {happened.version} is applied, in place of {happened.before}:")
            output.note("\n".join(f"    {line}" for line in happened.changes))
            for name in happened.restarted:
                output.note(f"  {name} is started again, with the environment variables that it needs now")

    return show


def _show_disk(event: str, message: str, *, as_json: bool) -> None:
    if as_json:
        output.json_line({"event": event, "process": "nats", "message": message})
    else:
        output.styled((f"  nats: {message}", "yellow"))


def _span_of(urls: list[str]) -> str:
    return f"{urls[0]} ({len(urls)} processes, listed in endpoints.json)"


def _printer(logs: Path, *, as_json: bool) -> Any:
    def show(event: ProcessEvent) -> None:
        if as_json:
            line = {"event": event.kind, "process": event.name, "pid": event.pid, "code": event.code}
            more = {"delay_s": event.delay_s, "failures": event.failures or None, "message": event.message}
            output.json_line(line | {name: value for name, value in more.items() if value is not None})
            return
        match event.kind:
            case "ready":
                again = " again" if event.restarts else ""
                output.note(f"  {event.name} is ready{again} (pid {event.pid})")
            case "restarting_in":
                times = f", {event.failures} times in a row" if event.failures > 1 else ""
                log = f" (its log: {logs / event.name}.log)" if times else ""
                text = f"  {event.name} {event.message}{times}; it is started again in {event.delay_s:g} s{log}"
                output.styled((text, "yellow"))
            case "gave_up":
                output.styled((f"  {event.name} can't go on: {event.message}", "red"))
            case "stopping":
                output.note(f"  stopping {event.name}")
            case _:
                pass

    return show
