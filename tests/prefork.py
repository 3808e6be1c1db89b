"""xdist's workers as forks of one process that has imported all tests, instead of each importing them: 7 s of CPU.

xdist starts a worker as `python -u -c CODE` and talks to it through stdin and stdout. Here `python` is this file, run
as a program, which hands its three streams to the process with the tests; a fork of that runs CODE and has them from
then on. Linux alone; elsewhere workers are started as ever.
"""

from __future__ import annotations

import json
import socket
import sys

_STREAMS = 3


def start(modules: list[str]) -> str:
    """Starts the process that imports modules and is forked; gives what to run in place of Python."""
    directory = tempfile.mkdtemp(prefix="breakwater-prefork-")
    address = f"{directory}/socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            _serve(listening, theirs, modules)
        finally:
            util._run_finalizers()  # the fork server's socket
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(0)
    _kept.append(ours)  # its end is the end of this process
    listening.close()
    theirs.close()
    return shlex.join((sys.executable, "-I", "-S", __file__, address))


_kept: list[socket.socket] = []


def _serve(listening: socket.socket, parent: socket.socket, modules: list[str]) -> None:
    fork_server.start()  # from which the services of all workers are forked
    # Each core compiles its share, through pytest's rewriting of assertions: 17 s of CPU. The rest is read from there.
    cores = len(os.sched_getaffinity(0))
    compiling: list[int] = []
    for share in range(1, cores):
        if (pid := os.fork()) == 0:
            _import(modules[share::cores])
            os._exit(0)
        compiling.append(pid)
    _import(modules[::cores])
    for pid in compiling:
        os.waitpid(pid, 0)
    _import(modules)
    gc.collect()
    gc.freeze()  # a collection would copy its pages into each worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        readable, _, _ = select.select([listening, parent], [], [])
        if parent in readable:
            return
        connection, _ = listening.accept()
        message, streams, _, _ = socket.recv_fds(connection, 1 << 16, _STREAMS)
        if os.fork() == 0:
            listening.close()
            parent.close()
            # The connection stays open in the fork, and ends with it.
            os._exit(_become_worker(streams, json.loads(message)))
        connection.close()
        for stream in streams:
            os.close(stream)


def _import(modules: list[str]) -> None:
    for module in modules:
        with suppress(Exception, pytest.skip.Exception):  # left to the workers to report
            importlib.import_module(module)


def _become_worker(streams: list[int], code: str) -> int:
    """Runs code as `python -c` does, with nothing left of what the parent had begun."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    atexit._clear()
    logging.getLogger().handlers.clear()
    random.seed()
    # It runs, as a child of this process' parent.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115  for as long as the process is
        for number, mode in enumerate("rww")
    )
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(code, main.__dict__)
    except BaseException:  # noqa: BLE001  as the interpreter does at its end
        traceback.print_exc()
        return 1
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # the same
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        socket.send_fds(server, [json.dumps(sys.argv[-1]).encode()], range(_STREAMS))
        server.recv(1)  # until it has ended
else:
    import atexit
    import gc
    import importlib
    import logging
    import os
    import random
    import select
    import shlex
    import shutil
    import signal
    import tempfile
    import threading
    import traceback
    import types
    from contextlib import suppress
    from multiprocessing import forkserver, util

    import pytest

    from breakwater.local import fork_server
