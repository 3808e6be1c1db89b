"""The servers of a local stack without its services, for a restore into a new data directory."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from breakwater.backup.local_files import LocalFiles
from breakwater.kernel.process.settings import Settings
from breakwater.local.datadir import DataDir
from breakwater.local.stack import plan_stack
from breakwater.local.supervisor import Supervisor


@asynccontextmanager
async def local_servers(
    local_files: LocalFiles, restore_files: Callable[[LocalFiles], Awaitable[list[str]]]
) -> AsyncGenerator[tuple[Settings, list[str]]]:
    """Restores the files, starts the servers in the data directory, and stops them when the block ends.

    Yields:
        Their addresses as an administrator, and the files that were there already.

    Raises:
        BackupError: a file can't be restored.
        DataDirError: the directory can't be used, or a plane is running there.
        ProcessFailedError: a server did not start.
    """
    assert local_files.data is not None
    data = DataDir(local_files.data)
    data.create()
    data.require_room()
    with data.lock() as lock:
        existing_files = await restore_files(local_files)
        stack = plan_stack(data, local_files.config, environment=os.environ)
        async with Supervisor(inherit=[lock]) as supervisor:
            await supervisor.start(stack.servers)
            yield stack.setup, existing_files
