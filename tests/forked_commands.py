"""Commands in processes of their own that are forks: starting Python and importing all of it takes `up` 2 s of CPU."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import current_process, get_context, util
from multiprocessing.popen_forkserver import Popen
from pathlib import Path

from breakwater.local import fork_server
from breakwater.local.fork_server import _Descriptor  # pyright: ignore[reportPrivateUsage]

CommandProcess = subprocess.Popen[bytes] | Popen


def start_command(
    *arguments: str, directory: Path, environment: Mapping[str, str], stdout: int, stderr: int
) -> CommandProcess:
    """Starts `breakwater` with arguments, as a fork of the process that the services of the tests are forks of.

    It is a process with a pid, children and signals of its own, and ends on its own. A stack that it starts has a fork
    server of its own, too, which is a fork of it. What depends on how the program begins, or on the memory that it
    takes, needs a program that is executed.

    Args:
        arguments: of the command.
        directory: to run it in.
        environment: all its variables.
        stdout: an open descriptor, which the caller still has to close.
        stderr: likewise.
    """
    if not fork_server.SUPPORTED:
        command = (sys.executable, "-m", "breakwater.cli", *arguments)
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=stdout, stderr=stderr)
    fork_server.start()
    streams = [_Descriptor(number) for number in (stdout, stderr)]
    process = get_context("forkserver").Process(target=_run, args=(arguments, directory, dict(environment), *streams))
    return Popen(process)


def _run(
    arguments: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    stdout: _Descriptor,
    stderr: _Descriptor,
) -> None:
    """Runs a command in a fork, as a program does that is executed."""
    gc.freeze()  # a collection would copy the pages of all modules
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None
    current_process()._config.pop("tempdir", None)  # pyright: ignore  # where multiprocessing puts its sockets
    for stream, file in enumerate((stdout, stderr), start=1):
        os.dup2(file.number, stream)
        os.close(file.number)
    sys.argv = ["breakwater", *arguments]
    util.spawnv_passfds = _fork_python  # multiprocessing's own, by which it starts a fork server
    from breakwater.cli.__main__ import main

    sys.exit(main())


def _fork_python(_: object, command: Sequence[object], descriptors: Sequence[int]) -> int:
    """Runs `python -c CODE`, which is a fork server's, in a fork of this process. Returns its pid."""
    if pid := os.fork():
        return pid
    try:
        open_descriptors = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
        for number in open_descriptors - {0, 1, 2, *descriptors}:
            with suppress(OSError):  # that of the directory
                os.close(number)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.modules.pop("breakwater.local.preload", None)  # which has the pid of another server
        exec(str(command[-1]), {})
    except SystemExit:
        os._exit(0)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    os._exit(1)
