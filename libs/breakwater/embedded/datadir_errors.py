"""What can be wrong with a data directory, where, and what to do about it."""

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path


class DataDirError(RuntimeError):
    """The data directory cannot be used.

    Attributes:
        path: The directory or the file in it.
    """

    def __init__(self, problem: str, path: Path, remedy: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}. {remedy}")


class AlreadyRunningError(DataDirError):
    """Another stack uses the directory.

    Attributes:
        pid: The process that started it, or None if it has not said so yet.
    """

    def __init__(self, pid: int | None, path: Path) -> None:
        self.pid = pid
        who = "a process that has not told its pid yet" if pid is None else f"process {pid}"
        if pid is not None and not is_alive(pid):
            who = f"what process {pid} has left behind (`fuser {path / 'up.lock'}` lists it)"
        super().__init__(
            f"a stack is already running here, held by {who}", path, "Stop that one, or name another data directory."
        )


class NotRunningError(DataDirError):
    """No stack has written its endpoints into the directory."""

    def __init__(self, path: Path) -> None:
        super().__init__("no stack is running here", path, "Start one with `breakwater up`.")


_REMEDIES = {
    errno.EACCES: ("no permission", "Give its owner write permission, or name another data directory."),
    errno.EPERM: ("the system does not permit it", "Name another data directory."),
    errno.EROFS: ("the file system is read-only", "Name a data directory on a writable one."),
    errno.ENOSPC: ("the disk is full", "Make room, or name a data directory on another disk."),
    errno.EDQUOT: ("the disk quota is used up", "Make room, or name a data directory on another disk."),
    errno.EEXIST: ("a file is in the way of the data directory", "Move it, or name another data directory."),
    errno.ENOTDIR: ("a part of this path is a file, not a directory", "Name another data directory."),
}


@contextlib.contextmanager
def explained(path: Path) -> Generator[None]:
    """Translate what the operating system says; a missing file is left to the caller, who knows what it means."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        problem, remedy = _REMEDIES.get(
            error.errno or 0, (error.strerror or str(error), "Name another data directory.")
        )
        raise DataDirError(problem, path, remedy) from error


def is_alive(pid: int) -> bool:
    """Tell whether a process has that pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
