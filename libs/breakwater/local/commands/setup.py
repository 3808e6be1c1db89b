"""`breakwater setup`: creates and updates streams, consumers and ClickHouse's tables, as an administrator.

`config apply` does the same for running services, and refuses what they can't take over.
"""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import SecretStr

from breakwater.config.servers import apply_to_servers, statements
from breakwater.kernel.commands import output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.process.settings import Settings
from breakwater.local.plane import ConfigOption, DataOption, JsonOption, PlaneLocation


def setup(
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
    print_sql: Annotated[
        bool,
        typer.Option(
            "--print-sql", help="Change nothing; print the SQL for ClickHouse, so that you can run it yourself."
        ),
    ] = False,
) -> None:
    """Create and update the streams and consumers on NATS, and the tables of ClickHouse, as the config asks.

    Changes only what differs, so it can be run at any time: after an upgrade, after an agent was added. It removes
    nothing: streams and jobs of agents that were removed from the config stay. `breakwater up` does all this too.
    It notes the config as the one that services start with, and notifies people if it has changed, as
    `breakwater config apply` does, which refuses what takes a restart.

    For example:

        breakwater setup

        BREAKWATER_NATS_REPLICAS=3 breakwater setup --config deploy/breakwater.yaml

        breakwater setup --print-sql > clickhouse.sql
    """
    plane = PlaneLocation(data)
    if print_sql:
        output.write("\n".join(statements(plane.clickhouse_url, plane.config(config))))
        return
    addresses = {
        "nats_url": SecretStr(plane.admin_nats_url),
        "redis_url": SecretStr(plane.redis_url),
        "clickhouse_url": SecretStr(plane.admin_clickhouse_url),
    }
    settings = Settings().model_copy(update=addresses)
    prepared, _ = run(apply_to_servers(settings, plane.config(config), "setup", at_start=True))
    if as_json:
        output.json_document({"ok": True, "done": prepared.server_changes})
    else:
        output.write("\n".join(prepared.server_changes) or "everything is up to date; nothing was changed")
