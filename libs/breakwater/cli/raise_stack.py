"""Starting a planned stack: servers, what they must hold, the first API key, services. `up` and `demo` share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from breakwater.api_keys import create_key, list_keys
from breakwater.cli.setup import prepare
from breakwater.config import load_config
from breakwater.embedded.datadir import DataDir
from breakwater.embedded.process import ProcessSpec
from breakwater.embedded.stack import Stack
from breakwater.embedded.supervisor import Supervisor
from breakwater.files import write_private
from breakwater.settings import Settings


async def raise_stack(
    supervisor: Supervisor, data: DataDir, stack: Stack, *, beside: Sequence[ProcessSpec] = ()
) -> str | None:
    """Starts all processes of a stack in their order, and tells other programs where it is.

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
    (data.path / "alive").mkdir(mode=0o700, exist_ok=True)
    await supervisor.start([*beside, *stack.servers], together=True)
    values: Mapping[str, Any] = {
        name.removeprefix("BREAKWATER_").lower(): value for name, value in stack.setup_env.items()
    }
    settings = Settings(**values)
    await prepare(settings, load_config(settings.config))
    key = _first_key(stack)
    await supervisor.start(stack.services, together=True)
    data.write_endpoints(stack.endpoints)
    return key


def _first_key(stack: Stack) -> str | None:
    keys_file = Path(stack.setup_env["BREAKWATER_API_KEYS_FILE"])
    if stack.endpoints.api_key_file.exists() and list_keys(keys_file):
        return None
    key = create_key(keys_file, "first")
    write_private(stack.endpoints.api_key_file, key)
    return key
