"""The ports of the local stack's servers, all on loopback."""

import socket
import sys
from collections import deque

LOOPBACK = "127.0.0.1"

_MAX_HELD = 256  # more than a stack needs; a run of the tests takes thousands, and holds the last of them
_held: deque[socket.socket] = deque()


class PortInUseError(RuntimeError):
    """The port that was asked for is in use."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on {LOOPBACK} is in use: stop what holds it (`ss -ltnp` lists it), or name another port"
        )


def free_port(port: int = 0) -> int:
    """Takes a port for a server: the one asked for, or one that the kernel gives.

    On Linux, nobody else gets it while this process lives, also when its server is just started again: a socket stays
    bound to it. Otherwise the kernel could give it to a client that tries to reconnect to that server, which would then
    be connected to itself. The server can bind it all the same, as both sockets set SO_REUSEADDR and this one does not
    listen. So could another stack that asks for this very port: that one finds the port's name taken.

    Raises:
        PortInUseError: Something listens on it, or another stack has it.
    """
    holder, name = socket.socket(), socket.socket(socket.AF_UNIX)
    # Without this, what a server leaves in TIME_WAIT when it ends makes its port look taken for a minute.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    linux = sys.platform == "linux"
    try:
        holder.bind((LOOPBACK, port))
        if linux and port:
            name.bind(f"\0breakwater-port-{port}")
    except OSError as error:
        holder.close()
        name.close()
        raise PortInUseError(port) from error
    given = holder.getsockname()[1]
    _held.extend((holder, name))
    while len(_held) > (_MAX_HELD if linux else 0):  # elsewhere a server can't bind a port that is held
        _held.popleft().close()
    return given


def standard_port(standard: int) -> int:
    """Takes a server's standard port, or one that the kernel gives where that is in use."""
    try:
        return free_port(standard)
    except PortInUseError:
        return free_port()
