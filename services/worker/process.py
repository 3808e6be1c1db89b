"""Ids of worker processes, and a check by id whether a process still runs."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from uuid import uuid4


def own_id() -> str:
    """Returns this worker's id: its machine, its pid, and the start time of the process."""
    pid = os.getpid()
    began = _began(pid)
    # Without /proc, the machine gets a random id, so that no other worker seems to share it.
    return f"{_machine() or uuid4().hex[:12]}-{pid}-{began or 0}"


def runs(worker_id: str) -> bool | None:
    """Returns True if a worker's process runs; None if it belongs to another machine or another container."""
    machine, pid, began = worker_id.split("-")
    if machine != _machine():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process exists, and belongs to another user
    current_began = _began(int(pid))
    return current_began is None or current_began == int(began)


def _machine() -> str | None:
    """Identifies this machine since its last boot, and the namespace of its pids; None if that is unknown."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return None
    # The node's name is included as copies of a virtual machine share the other two.
    return sha256(f"{os.uname().nodename} {booted} {namespace}".encode()).hexdigest()[:12]


def _began(pid: int) -> int | None:
    """Returns the start of a process in ticks since boot; -1 if it is dead and not yet reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return -1 if state in "ZX" else int(fields[18])
