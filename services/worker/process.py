"""Ids of worker processes, and a look whether one still runs, by its id."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from uuid import uuid4


def own_id() -> str:
    """The id of the worker that this process is: machine, pid, and when the process began."""
    pid = os.getpid()
    began = _began(pid)
    # Without /proc, one of a machine without other workers.
    return f"{_machine() or uuid4().hex[:12]}-{pid}-{began or 0}"


def runs(worker_id: str) -> bool | None:
    """True if a worker's process runs; None for one of another machine, or of another container on this one."""
    machine, pid, began = worker_id.split("-")
    if machine != _machine():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    found = _began(int(pid))
    return found is None or found == int(began)


def _machine() -> str | None:
    """This machine since it was started, and where on it pids are the same; None where that is not known."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return None
    # Copies of a virtual machine share the other two.
    return sha256(f"{os.uname().nodename} {booted} {namespace}".encode()).hexdigest()[:12]


def _began(pid: int) -> int | None:
    """Start of a process, in ticks since the machine's; -1 for one that is dead and not yet reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return -1 if state in "ZX" else int(fields[18])
