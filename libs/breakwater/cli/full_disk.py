"""Starting the NATS of a local stack again after its disk was full: before that, it takes nothing into its streams."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from breakwater.cli import connect
from breakwater.cli.errors import CliError

if TYPE_CHECKING:
    from breakwater.embedded.datadir import DataDir
    from breakwater.embedded.stack import Stack
    from breakwater.embedded.supervisor import Supervisor

LOOK_EVERY_S = 5.0

ROOM_BYTES = 64 * 2**20
"""With less space, it would soon be the same again."""

Report = Callable[[Literal["nats_cannot_write", "nats_can_write_again"], str], None]


class FullDisk:
    """Looks after a NATS that could not write, and starts it again as soon as there is room."""

    def __init__(self, supervisor: Supervisor, data: DataDir, stack: Stack, report: Report) -> None:
        self._supervisor, self._data, self._report = supervisor, data, report
        self._url = stack.setup_env["BREAKWATER_NATS_URL"]

    async def run(self) -> None:
        """Looks every few seconds, until cancelled; returns at once where NATS is not ours to start again."""
        from breakwater.bus.server_health import unhealthy_servers

        nats, reported = self._supervisor.keepers.get("nats"), False
        while nats is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                async with connect.bus(self._url) as client:
                    error = next((one.error for one in await unhealthy_servers(client) if one.cannot_write), None)
            except CliError:
                continue  # it is starting, or stands still: the supervisor and the services say so
            if error is None:
                reported = False
            elif shutil.disk_usage(self._data.path).free >= ROOM_BYTES:
                self._report("nats_can_write_again", f"it could not write ({error}); there is room, so it starts again")
                nats.signal(nats.spec.stop_signal)
            elif not reported:
                self._report("nats_cannot_write", f"{error}: make space; then it is started again")
                reported = True
