"""Which port a server of the local stack gets."""

import asyncio
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

_TRIES = 200
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_FREE = 15_000
_DEFAULT_EPHEMERAL = 32_768


class PortInUseError(RuntimeError):
    """The port that was asked for, or every port of the range that was tried, is in use."""

    def __init__(self, first: int, host: str, last: int | None = None) -> None:
        which, holders = (f"port {first}", "it") if last is None else (f"every port from {first} to {last}", "them")
        super().__init__(
            f"{which} on {host} is in use: stop what holds {holders} (`ss -ltnp` lists it), or name another port"
        )


def _lock_file(what: str) -> int:
    """Opens a file that the stacks of this user lock, one at a time."""
    file = Path(tempfile.gettempdir()) / f"breakwater-{what}-{os.getuid()}.lock"
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


@asynccontextmanager
async def choosing() -> AsyncGenerator[None]:
    """Lets one stack of this user at a time choose its ports, until its servers listen on them.

    Two that start in the same second would choose the same ones otherwise, and one of them would take the other's
    answers for its own.
    """
    descriptor = _lock_file("ports")
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(0.05)
            else:
                break
        yield
    finally:
        os.close(descriptor)


def choose_port(preferred: int, host: str = "127.0.0.1") -> int:
    """Give the preferred port, or the next one above it that nothing listens on.

    Args:
        preferred: The server's standard port, 1 to 65535.
        host: The address the server is going to bind.

    Raises:
        PortInUseError: The next 200 ports are all taken.
    """
    last = min(preferred + _TRIES - 1, 65_535)
    for port in range(preferred, last + 1):
        if is_free(port, host):
            return port
    raise PortInUseError(preferred, host, last)


_held: list[int] = []


def hold_port(preferred: int) -> int:
    """Chooses a port as `choose_port` does, and holds it for as long as this process lives.

    A server that is started again leaves its port free for a moment. What another stack of this user holds is passed
    over meanwhile: it would take the port, or the answers of the server that comes back for those of its own.
    """
    while True:
        port = choose_port(preferred)
        descriptor = _lock_file(f"port-{port}")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            preferred = port + 1
        else:
            _held.append(descriptor)
            return port


def free_port(host: str = "127.0.0.1") -> int:
    """Give a random port that nothing listens on, outside the range the kernel hands to outgoing connections.

    A port of that ephemeral range would not do for a server that is killed and started again on the same port: in the
    meantime the kernel may give the port to some client, even to the one that tries to reconnect to it, which then
    talks to itself.
    """
    below = _ephemeral_start() - 1
    # Programs that choose at the same time must not choose the same, also where each has seeded `random` alike.
    for port in random.SystemRandom().sample(range(_LOWEST_FREE, below), k=min(_TRIES, below - _LOWEST_FREE)):
        if is_free(port, host):
            return port
    raise PortInUseError(_LOWEST_FREE, host, below)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on the port, and no other one answers on it under a wider address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        # Without this, what a server leaves in TIME_WAIT when it ends makes its port look taken for a minute.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
            server.listen(1)
        except OSError:
            return False
    # macOS lets a specific address be bound under a listener on 0.0.0.0; only a connection shows that one.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(0.2)
        return client.connect_ex((host, port)) != 0


def _ephemeral_start() -> int:
    try:
        return max(int(_RANGE_FILE.read_text().split()[0]), _LOWEST_FREE + 1_000)
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL
