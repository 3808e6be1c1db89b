"""Starts services as forks of one process that has imported them: `multiprocessing`'s fork server, on Linux.

Importing a service takes 0.7 s of CPU and 75 MB. The server imports all of them once; each service is then a fork of
it, which does the same as `python -m breakwater.services NAME`, is ready in a fraction of that time, and shares the
memory of the imported modules. On other systems services are started as any program is.

The end of the process that started the server is the end of the server and of every service (see preload.py). The
server has no secret: each service's environment is sent to its fork alone.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, reduction
from multiprocessing.popen_forkserver import Popen
from pathlib import Path
from typing import Any, cast

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process import prctl
from breakwater.kernel.process.programs import for_program

SUPPORTED = sys.platform == "linux"
_CONTEXT = get_context("forkserver")
# By name: of the rooms, only the command line may know the services.
_SERVICES = "breakwater.services.__main__"

_LONGEST_DIRECTORY = 70
"""Bytes. `multiprocessing` makes the server's socket in the temporary directory, and its path may have 107 bytes."""


class ForkServerError(BreakwaterError, OSError):
    """The fork server did not start a service."""


def start() -> None:
    """Starts the server, which then imports the services, unless it runs.

    From the main thread: the kernel kills the server when the thread that started it ends.

    Raises:
        OSError: it could not be started.
    """
    _CONTEXT.set_forkserver_preload(_preloaded())
    with _environment(for_program(os.environ)):
        forkserver.ensure_running()


def _preloaded() -> list[str]:
    """The modules that the server imports, in this order."""
    from breakwater.local.stack import SERVICES  # which plans stacks, as the server does not

    services = (f"breakwater.services.{name}.app" for name in SERVICES)
    return ["breakwater.local.preload", __name__, _SERVICES, *services, "breakwater.local.forked_start"]


def stop() -> None:
    """Kills the server, and with it every service that still runs."""
    pid = cast("int | None", forkserver._forkserver._forkserver_pid)  # pyright: ignore
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the next start reaps it


def fork(service: str, log: int, environment: Mapping[str, str], *, inherit: Sequence[int] = ()) -> Popen:
    """Starts a service in its own session. Waits until the server has imported all services.

    Args:
        service: its name.
        log: an open descriptor for stdout and stderr, which the caller still has to close.
        environment: all variables of the service.
        inherit: descriptors that the service keeps open.

    Raises:
        OSError: the server does not work.
    """
    inherited = [_Descriptor(number) for number in inherit]
    try:
        return Popen(_CONTEXT.Process(target=_run, args=(service, dict(environment), _Descriptor(log), inherited)))
    except EOFError as error:
        raise ForkServerError(f"the fork server ended while it started {service}") from error


async def fork_within(
    timeout_s: float, service: str, log: int, environment: Mapping[str, str], *, inherit: Sequence[int]
) -> Popen:
    """Starts a service as `fork` does; kills a server that takes longer than `timeout_s`."""
    start()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(fork, service, log, environment, inherit=inherit)
    except TimeoutError as error:
        stop()
        raise ForkServerError(f"the fork server did not start {service} within {timeout_s:g} s") from error


class _Descriptor:
    """A file descriptor, of which the fork that it is sent to gets a duplicate."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _receive, (reduction.DupFd(self.number),)


def _receive(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


def _run(service: str, environment: dict[str, str], log: _Descriptor, inherited: list[_Descriptor]) -> None:  # noqa: ARG001
    """Makes a fork a process of its own, tied to the server's life, and runs the service in it."""
    from breakwater.local.preload import SERVER_PID  # which ties the process that imports it

    gc.freeze()  # imported modules are not garbage: a collection would copy their pages
    os.setsid()
    prctl.end_with_parent()
    if os.getppid() != SERVER_PID:
        sys.exit("the fork server ended while it started this")
    for stream in (1, 2):
        os.dup2(log.number, stream)
    os.close(log.number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(Path.cwd()), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.exit(importlib.import_module(_SERVICES).run_service(service))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Replaces this process' variables, which a process that it starts inherits, and a temporary directory too long."""
    own_variables = dict(os.environ)
    own_directory = tempfile.gettempdir()
    os.environ.clear()
    os.environ.update(variables)
    if len(os.fsencode(own_directory)) > _LONGEST_DIRECTORY:
        tempfile.tempdir = "/tmp"  # noqa: S108  the directory that is made there is its owner's alone
    try:
        yield
    finally:
        tempfile.tempdir = own_directory
        os.environ.clear()
        os.environ.update(own_variables)
