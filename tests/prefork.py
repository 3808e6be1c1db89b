"""Forks xdist's workers from one process that has imported and collected all tests: it takes each worker 9 s of CPU.

xdist starts a worker as `python -u -c CODE` and talks to it through stdin and stdout. Here `python` is this file, run
as a program: it sends its three standard streams to the process that has collected the tests. A fork of that process
takes them over and runs CODE. Only Linux is supported; elsewhere xdist starts its workers as usual.
"""

from __future__ import annotations

import json
import socket
import sys

_STREAMS = 3
_FEW = 20
"""Modules that one process compiles sooner than another is forked and has imported what they need."""


def start(modules: list[str], collect: Callable[[], None], meanwhile: Callable[[], None] | None) -> str:
    """Starts the process that imports modules, collects and forks; returns the command to run in place of Python.

    Args:
        modules: to import.
        collect: collects the tests.
        meanwhile: runs in a process of its own, as the other cores have nothing to do until all is collected.
    """
    directory = tempfile.mkdtemp(prefix="breakwater-prefork-")
    address = f"{directory}/socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    lifeline, server_end = socket.socketpair()
    if os.fork() == 0:
        lifeline.close()
        try:
            _serve(listening, server_end, modules, collect, meanwhile)
        finally:
            util._run_finalizers()  # removes the fork server's socket
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(0)
    _lifelines.append(lifeline)  # it closes when this process ends, which ends the server
    listening.close()
    server_end.close()
    return shlex.join((sys.executable, "-I", "-S", __file__, address))


_lifelines: list[socket.socket] = []


def _serve(
    listening: socket.socket,
    parent: socket.socket,
    modules: list[str],
    collect: Callable[[], None],
    meanwhile: Callable[[], None] | None,
) -> None:
    """Imports, collects, and forks a worker for each connection until the parent's end of its socket closes."""
    gc.disable()  # what is imported stays; a worker enables it once it has collected its tests
    fork_server.start()  # one for the services of all workers
    if meanwhile is not None and os.fork() == 0:
        _run_apart(meanwhile)
    # Rewriting assertions costs 17 s of CPU, so each core does it for a share of the modules, and caches the bytecode.
    changed = [module for module in modules if not _is_cached(module)]
    cores = len(os.sched_getaffinity(0))
    compiling: list[int] = []
    for share in range(1, cores if len(changed) > _FEW else 1):
        if (pid := os.fork()) == 0:
            _import_all(changed[share::cores])
            os._exit(0)
        compiling.append(pid)
    if compiling:
        _import_all(changed[::cores])
    for pid in compiling:
        os.waitpid(pid, 0)
    _import_all(modules)
    _find_constants()
    if openapi := sys.modules.get("breakwater.services.request.openapi"):
        openapi.document()  # which each process else builds for itself, in 0.2 s
    _collect_silently(collect)
    if len(threads := list(Path("/proc/self/task").iterdir())) > 1:
        # A fork has none but its own, and would wait for the others for ever.
        message = f"a module of the tests has started {len(threads) - 1} threads when it was imported: import it later"
        print(message, file=sys.stderr, flush=True)
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    while True:
        readable, _, _ = select.select([listening, parent], [], [])
        if parent in readable:
            return
        connection, _ = listening.accept()
        message, streams, _, _ = socket.recv_fds(connection, 1 << 16, _STREAMS)
        if os.fork() == 0:
            listening.close()
            parent.close()
            # The connection stays open until the fork ends, and shows the program that it has.
            os._exit(_become_worker(streams, json.loads(message)))
        connection.close()
        for stream in streams:
            os.close(stream)


def _run_apart(work: Callable[[], None]) -> NoReturn:
    """Runs work in a fork, which ends with its parent."""
    prctl.end_with_parent()
    _use_fork_server_of_parent()
    try:
        work()
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    os._exit(0)


def _use_fork_server_of_parent() -> None:
    """Has services forked from the server that runs already, as a child of this process' parent."""
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


def _is_cached(module: str) -> bool:
    """Tells whether pytest has cached a module's bytecode since the module was changed."""
    source = Path(*module.split(".")).with_suffix(".py").resolve()
    bytecode = get_cache_dir(source) / (source.stem + PYC_TAIL)
    return bytecode.exists() and bytecode.stat().st_mtime >= source.stat().st_mtime


def _find_constants() -> None:
    """Has Hypothesis read the constants in all modules, as it does in each process before its first example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisSideeffectWarning)  # that it is slow before the tests are collected
        given(integers())(lambda _: None)()  # one that draws nothing needs none


def _collect_silently(collect: Callable[[], None]) -> None:
    """Collects without a word on standard output, which the controller tells what was collected."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    collect()


def _import_all(modules: list[str]) -> None:
    for module in modules:
        with suppress(Exception, pytest.skip.Exception):  # the workers report it
            importlib.import_module(module)


def _become_worker(streams: list[int], code: str) -> int:
    """Runs code as `python -c` does, without the parent's handlers, streams and random state."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    atexit._clear()
    logging.getLogger().handlers.clear()
    random.seed()
    _use_fork_server_of_parent()
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    # Open until the process ends.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        return 1
    finally:
        # The interpreter's own steps when it ends.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        socket.send_fds(server, [json.dumps(sys.argv[-1]).encode()], range(_STREAMS))
        server.recv(1)  # returns when the worker has ended
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
    import warnings
    from collections.abc import Callable
    from contextlib import suppress
    from multiprocessing import forkserver, util
    from pathlib import Path
    from typing import NoReturn

    import pytest
    from _pytest.assertion.rewrite import PYC_TAIL, get_cache_dir
    from hypothesis import given
    from hypothesis.errors import HypothesisSideeffectWarning
    from hypothesis.strategies import integers

    from breakwater.kernel.process import prctl
    from breakwater.local import fork_server
