"""Commands in processes of their own that are forks: starting Python and importing all of it takes `up` 2 s of CPU.

And the servers that are programs of Python, of which each would take a quarter of a second to half of one.
"""

from __future__ import annotations

import gc
import os
import runpy
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

from breakwater.kernel.process import prctl
from breakwater.local import fork_server, supervisor
from breakwater.local.fork_server import _Descriptor  # pyright: ignore[reportPrivateUsage]
from breakwater.local.process import ProcessSpec, open_log, spawn

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


def spawn_program(spec: ProcessSpec, *, inherit: Sequence[int] = ()) -> CommandProcess:
    """Starts a program as `spawn` does; one of Python is a fork, as a service is, which ends with the fork server."""
    if not fork_server.SUPPORTED or spec.argv[:2] != (sys.executable, "-m"):
        return spawn(spec, inherit=inherit)
    fork_server.start()
    directory = spec.cwd or Path.cwd()
    inherited = [_Descriptor(number) for number in inherit]
    with open_log(spec.log_file) as log:
        arguments = (spec.argv[2:], directory, spec.environment, _Descriptor(log), inherited)
        return Popen(get_context("forkserver").Process(target=_run_module, args=arguments))


def _run_module(
    arguments: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    log: _Descriptor,
    inherited: Sequence[_Descriptor],
) -> None:
    """Runs `python -m` with arguments in a fork."""
    os.setsid()
    prctl.end_with_parent()
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    _become(directory, environment, stdout=log, stderr=log)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _become(directory: Path, environment: Mapping[str, str], stdout: _Descriptor, stderr: _Descriptor) -> None:
    """Gives a fork the directory, the variables and the streams of another program."""
    gc.freeze()  # a collection would copy the pages of all modules
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None
    current_process()._config.pop("tempdir", None)  # pyright: ignore  # where multiprocessing puts its sockets
    for number, stream in enumerate((stdout, stderr), start=1):
        os.dup2(stream.number, number)
    for number in {stdout.number, stderr.number}:
        os.close(number)


def _run(
    arguments: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    stdout: _Descriptor,
    stderr: _Descriptor,
) -> None:
    """Runs a command in a fork, as a program does that is executed."""
    _become(directory, environment, stdout, stderr)
    sys.argv = ["breakwater", *arguments]
    util.spawnv_passfds = _fork_python  # multiprocessing's own, by which it starts a fork server
    supervisor.spawn = spawn_program
    from breakwater.cli.__main__ import main

    sys.exit(main())


def _fork_python(_: object, command: Sequence[object], descriptors: Sequence[int]) -> int:
    """Runs `python -c CODE …`, which is a fork server's, in a fork of this process. Returns its pid."""
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
        code, *arguments = map(str, command[command.index("-c") + 1 :])
        sys.argv = ["-c", *arguments]
        exec(code, {})
    except SystemExit:
        os._exit(0)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    os._exit(1)
