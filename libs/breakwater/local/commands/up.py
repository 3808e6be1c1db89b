"""`breakwater up`: runs the whole plane on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from breakwater.config import Config, load_config, require_usable
from breakwater.config.first_config import simulated_config
from breakwater.config.servers import prepare_clickhouse, prepare_nats
from breakwater.identity.api_keys import create_key, list_keys
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import CliError, usage_error
from breakwater.kernel.nats.core import unhealthy_servers
from breakwater.kernel.process import background, prctl
from breakwater.kernel.process.background import run_together
from breakwater.kernel.process.files import write_private
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.security.secret_refs import ENV_FILE
from breakwater.local.commands.console import sign_in_link
from breakwater.local.datadir import DataDir, Endpoints
from breakwater.local.plane import DEFAULT_DATA
from breakwater.local.process import ProcessSpec
from breakwater.local.reload import ConfigFollower, StackEvents
from breakwater.local.simulation import write_simulation
from breakwater.local.stack import Stack, plan_stack
from breakwater.local.supervisor import Supervisor

DISK_CHECK_EVERY_S = 5.0

LEAST_FREE_BYTES = 64 * 2**20
"""Free disk space from which on NATS is restarted; with less, it would soon be unable to write again."""


def up(
    config: Annotated[Path, typer.Option("--config", "-c", help="The config file.", show_default=True)] = Path(
        "breakwater.yaml"
    ),
    data: Annotated[
        Path, typer.Option("--data", "-d", help="Data directory: streams, state, tables, secrets, logs.")
    ] = DEFAULT_DATA,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of worker processes.")] = 1,
    http_port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port of the API.", show_default="8080 or a free one")
    ] = None,
    console_port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="Port of the console.", show_default="8081 or a free one"),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(help="Replace every provider by a simulated one: no real calls, no cost."),
    ] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(
            "--env-file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="File of NAME=value lines for {env: NAME} secrets; SIGHUP has it read again.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events and endpoints as JSON lines.")] = False,
) -> int:
    """Run the whole plane on this machine: NATS, Redis, ClickHouse and all services.

    Needs no Docker and no installed server. With --simulate and without a config file, it writes a first one.
    Everything listens on loopback only, with passwords made at the first start. A process that dies is restarted;
    Ctrl-C stops everything, and the next start continues with the same data.

    When the config file is saved, it is checked and applied without a restart; an invalid one changes nothing.

    A server that is already there is used instead of starting one: set BREAKWATER_NATS_URL, BREAKWATER_REDIS_URL or
    BREAKWATER_CLICKHOUSE_URL.

    For example:

        breakwater up --config examples/breakwater.yaml --simulate

        breakwater up --config breakwater.yaml --data /var/lib/breakwater --workers 4
    """
    if env_file is not None:
        os.environ[ENV_FILE] = str(env_file.absolute())
    if not config.exists() and str(config) == "breakwater.yaml":
        if not simulate:
            raise usage_error(
                "there is no breakwater.yaml here",
                "`breakwater init` writes one; or name one with --config FILE.",
            )
        simulated_config(config)
    # Checks the config before it starts or creates anything.
    require_usable(config, load_config(config), simulate=simulate)
    directory = DataDir(data)
    directory.create()
    directory.require_room()
    with directory.lock() as lock:
        events = StackEvents(directory.logs, as_json)
        return connect.run(
            _run(directory, lock, config, events, simulate=simulate, workers=workers, ports=(http_port, console_port))
        )


async def _run(
    data: DataDir,
    lock: int,
    config_file: Path,
    events: StackEvents,
    *,
    simulate: bool,
    workers: int,
    ports: tuple[int | None, int | None],
) -> int:
    background_tasks: list[asyncio.Task[None]] = []

    def reread_secrets() -> None:
        for spec in supervisor.keepers.values():
            if spec.spec.service is not None:
                spec.signal(signal.SIGHUP)
        events.show("secrets_reread", f"  the services read {os.environ[ENV_FILE]} again")

    supervisor = Supervisor(
        on_event=events.show_process_event,
        inherit=[lock],
        fork=True,
        on_hangup=reread_secrets if ENV_FILE in os.environ else None,
    )

    async def stay_up() -> NoReturn:
        simulation = write_simulation(data, config_file) if simulate else None
        effective_config = config_file if simulation is None else simulation.config_file
        api, console = ports
        stack = plan_stack(
            data, effective_config, workers=workers, environment=os.environ, http_port=api, console_port=console
        )
        if simulation is not None:
            urls = {"simulated_provider_url": simulation.control_url, "edited_config_file": simulation.edited_file}
            stack = replace(stack, endpoints=stack.endpoints.model_copy(update=urls))
        key = await start_stack(supervisor, data, stack, also=[] if simulation is None else [simulation.process])
        if events.as_json:
            output.json_line({"event": "up", **stack.endpoints.model_dump(mode="json"), "first_api_key": key})
        else:
            link = await link_to_show(stack.endpoints)
            _show_endpoints(stack, key, link, next(iter(load_config(stack.setup.config).agents)), simulate=simulate)
        follower = ConfigFollower(supervisor, data, stack, config_file, events, simulation)
        background_tasks.append(asyncio.create_task(follower.run()))
        background_tasks.append(asyncio.create_task(_restart_nats_after_full_disk(supervisor, data, stack, events)))
        while True:
            await asyncio.Event().wait()

    try:
        code = 128 + await supervisor.run(stay_up)
    finally:
        await background.stop(*background_tasks)
        data.remove_endpoints()
    if not events.as_json:
        output.note(f"stopped; the data stays in {data.path}")
    return code


async def start_stack(
    supervisor: Supervisor, data: DataDir, stack: Stack, *, also: Sequence[ProcessSpec] = ()
) -> str | None:
    """Starts all processes of a stack in order, and writes its endpoints to a file for other programs.

    Args:
        supervisor: the supervisor that keeps the processes alive.
        data: the stack's data directory, which is locked.
        stack: the processes, in order.
        also: processes to start together with the servers.

    Returns:
        The first API key, which is shown only once; None if there already is one.

    Raises:
        ProcessFailedError: if a process does not start.
        CliError: if a server does not answer.
    """
    prctl.hide_memory()  # the environment contains the secrets of all services
    (data.path / "alive").mkdir(mode=0o700, exist_ok=True)
    settings = stack.setup
    config = load_config(settings.config)

    async def when_ready(server: str, prepare: Callable[[Settings, Config], Awaitable[object]]) -> None:
        if server not in stack.external:
            await supervisor.keepers[server].until_ready()
        await prepare(settings, config)

    await run_together(  # ClickHouse takes two seconds to start; the others start immediately
        supervisor.start([*also, *stack.servers]),
        when_ready("nats", prepare_nats),
        when_ready("clickhouse", prepare_clickhouse),
    )
    key = None
    if not stack.endpoints.api_key_file.exists() or not list_keys(settings.api_keys_file):
        key = create_key(settings.api_keys_file, "local-operator")
        write_private(stack.endpoints.api_key_file, key)
    await supervisor.start(stack.services)
    data.write_endpoints(stack.endpoints)
    return key


async def link_to_show(endpoints: Endpoints) -> str | None:
    """Creates a sign-in link; None if that fails, because the stack runs without one, too."""
    try:
        return await sign_in_link(endpoints)
    except (CliError, StateUnavailableError, OSError, ValueError):
        return None


async def _restart_nats_after_full_disk(
    supervisor: Supervisor, data: DataDir, stack: Stack, events: StackEvents
) -> None:
    """Restarts NATS once a full disk has space again, because its streams accept nothing until then.

    Checks every few seconds, until cancelled. Returns immediately if this stack did not start NATS.
    """
    nats = supervisor.keepers.get("nats")
    is_reported = False
    while nats is not None:
        await asyncio.sleep(DISK_CHECK_EVERY_S)
        # If NATS is starting or hangs, the supervisor and the services report it.
        with suppress(CliError):
            async with connect.bus(stack.setup.nats_url.get_secret_value()) as client:
                while client.is_connected:
                    errors = [server.error for server in await unhealthy_servers(client) if server.cannot_write]
                    if not errors:
                        is_reported = False
                    elif shutil.disk_usage(data.path).free >= LEAST_FREE_BYTES:
                        text = f"it could not write ({errors[0]}); there is space again, so it restarts"
                        events.show("nats_can_write_again", f"  nats: {text}", "yellow", process="nats", message=text)
                        nats.signal(signal.SIGTERM)
                    elif not is_reported:
                        text = f"{errors[0]}: free disk space; then it restarts"
                        events.show("nats_cannot_write", f"  nats: {text}", "yellow", process="nats", message=text)
                        is_reported = True
                    await asyncio.sleep(DISK_CHECK_EVERY_S)


def _show_endpoints(stack: Stack, key: str | None, link: str | None, agent: str, *, simulate: bool) -> None:
    endpoints = stack.endpoints
    metrics = list(endpoints.metrics.values())

    def server(name: str, url: str) -> tuple[str, str]:
        return name, connect.without_password(url) + (" (given)" if name in stack.external else "")

    output.print_styled(("Breakwater is up.", "bold green"))
    for name, value in (
        ("console", endpoints.console_url),
        *([] if link is None else [("sign-in link", f"{link} (works once, within 10 minutes)")]),
        ("API", endpoints.request_url + "/docs"),
        server("nats", endpoints.nats_url),
        server("redis", endpoints.redis_url),
        server("clickhouse", endpoints.clickhouse_url),
        ("metrics", f"{metrics[0]} ({len(metrics)} processes, listed in endpoints.json)"),
        ("data", str(endpoints.data_dir)),
        ("URLs with passwords", str(endpoints.data_dir / "endpoints.json")),
        ("API key", str(endpoints.api_key_file)),
    ):
        output.print_styled((f"  {name:<19}  ", "dim"), value)
    for note in stack.port_notes:
        output.print_styled((f"\n  {note}", "yellow"))
    if key is not None:
        output.print_styled("\n  The first API key, shown once: ", (key, "bold"))
    if simulate:
        output.print_styled(("\n  Every provider is simulated: no real calls, no cost.", "yellow"))
    is_default = endpoints.data_dir == DEFAULT_DATA.absolute()
    data_option = "" if is_default else f" --data {shlex.quote(str(endpoints.data_dir))}"
    output.print_styled("\n  Next, in another terminal here:")
    for arguments in (f'submit {shlex.quote(agent)} "Write a haiku about harbours."', "tail --since 1h"):
        output.print_styled((f"    {formats.breakwater_command()} {arguments}{data_option}", "bold"))
    output.print_styled(("  Ctrl-C stops everything.", "dim"))
