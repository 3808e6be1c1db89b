"""Starting the NATS of a local stack again after its disk was full: before that, it takes nothing into its streams."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from breakwater.cli import connect
from breakwater.cli.errors import CliError

if TYPE_CHECKING:
    from breakwater.bus.server_health import Unhealthy
    from breakwater.embedded.datadir import DataDir
    from breakwater.embedded.stack import Stack
    from breakwater.embedded.supervisor import Keeper, Supervisor

LOOK_EVERY_S = 5.0

ROOM_BYTES = 64 * 2**20
"""With less space, it would soon be the same again."""

Report = Callable[[Literal["nats_cannot_write", "nats_can_write_again"], str], None]


class FullDisk:
    """Looks after a NATS that could not write, and starts it again as soon as there is room."""

    def __init__(self, supervisor: Supervisor, data: DataDir, stack: Stack, report: Report) -> None:
        self._supervisor, self._data, self._report = supervisor, data, report
        self._url = stack.setup.nats_url.get_secret_value()
        self._reported = False

    async def run(self) -> None:
        """Looks every few seconds, until cancelled; returns at once where NATS is not ours to start again."""
        from breakwater.bus.server_health import unhealthy_servers

        nats = self._supervisor.keepers.get("nats")
        while nats is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            with suppress(CliError):  # it is starting, or stands still: the supervisor and the services say so
                async with connect.bus(self._url) as client:
                    while client.is_connected:
                        self._act_on(await unhealthy_servers(client), nats)
                        await asyncio.sleep(LOOK_EVERY_S)

    def _act_on(self, unhealthy: Sequence[Unhealthy], nats: Keeper) -> None:
        error = next((one.error for one in unhealthy if one.cannot_write), None)
        if error is None:
            self._reported = False
        elif shutil.disk_usage(self._data.path).free >= ROOM_BYTES:
            self._report("nats_can_write_again", f"it could not write ({error}); there is room, so it starts again")
            nats.signal(signal.SIGTERM)
        elif not self._reported:
            self._report("nats_cannot_write", f"{error}: make space; then it is started again")
            self._reported = True
