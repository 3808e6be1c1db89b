"""The data directory of one local stack: its lock, its secrets, and the addresses of its parts."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.files import write_private
from breakwater.kernel.security.secret_refs import mask_url
from breakwater.kernel.types import format_time

ROOM_MB = 300
"""The free space in which a stack can start: ClickHouse stores nothing while less than 268 MB are free."""
ROOM_OF_NEW_MB = 900
"""The free space that a new stack needs, so that it does not stop storing within its first hours."""

_LOCK = "up.lock"
_SECRETS = "secrets"
_ENDPOINTS = "endpoints.json"
_SECRET_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_HANDOVER_S = 5.0
_POLL_S = 0.05


class Endpoints(BaseModel):
    """The addresses of one stack; URLs include user and password, so that any client of the protocol works.

    Attributes:
        nats_server: the same address as `nats_url` for clients that take user and password apart, such as Node.js'.
        clickhouse_url: ClickHouse's HTTP protocol, as `reader`, who only reads.
        api_key_file: holds a key for the HTTP API.
        config_file: the config; the services read a copy of it.
        edited_config_file: the file that `config_file` is made of, where the providers are simulated; else None.
        simulated_provider_url: the provider that takes the place of all others; None where real ones are called.
        metrics: URLs for Prometheus, by process.
        pid: of the process that runs the stack.
        started_at: RFC 3339 UTC with milliseconds in JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_url: str
    console_url: str
    nats_url: str
    nats_server: str | None = None
    nats_user: str | None = None
    nats_password: str | None = Field(default=None, repr=False)
    redis_url: str
    clickhouse_url: str
    api_key_file: Path
    config_file: Path
    edited_config_file: Path | None = None
    data_dir: Path
    simulated_provider_url: str | None = None
    metrics: dict[str, str] = Field(default_factory=dict[str, str])
    pid: int
    started_at: Annotated[AwareDatetime, PlainSerializer(format_time, when_used="json")]

    def __repr_args__(self) -> Generator[tuple[str | None, Any]]:
        """Masks passwords in repr() and str(), which end up in logs and tracebacks."""
        for name, value in super().__repr_args__():
            yield name, mask_url(value) if isinstance(value, str) else value


class DataDirError(BreakwaterError, RuntimeError):
    """The data directory, or the file in it that `path` names, cannot be used."""

    command_code = "data_dir"

    def __init__(self, problem: str, path: Path, remedy: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}. {remedy}")


class AlreadyRunningError(DataDirError):
    """Another stack uses the directory: the one of process `pid`, or None if it has not written its pid yet."""

    def __init__(self, pid: int | None, path: Path) -> None:
        self.pid = pid
        holder = "a process that has not written its pid yet" if pid is None else f"process {pid}"
        if pid is not None and not is_alive(pid):
            holder = f"children of process {pid} that are still running (`fuser {path / _LOCK}` lists them)"
        super().__init__(
            f"a stack is already running here, held by {holder}", path, "Stop that one, or name another data directory."
        )


class NotRunningError(DataDirError):
    """No stack has written its endpoints into the directory."""

    def __init__(self, path: Path) -> None:
        super().__init__("no stack is running here", path, "Start one with `breakwater up`.")


_MENDING = {
    errno.EACCES: "Give its owner write permission",
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room",
}


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Generator[None]:
    """Translates the operating system's errors about a path."""
    try:
        yield
    except OSError as error:
        mending = _MENDING.get(error.errno or 0)
        remedy = f"{mending}, or name another data directory." if mending else "Name another data directory."
        raise DataDirError(error.strerror or str(error), path, remedy) from error


def is_alive(pid: int) -> bool:
    """Returns True if a process has that pid."""
    try:
        with contextlib.suppress(PermissionError):  # it belongs to another user
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class DataDir:
    """A directory that holds all data of a stack, and one lock so that only one stack uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def logs(self) -> Path:
        """The directory of the processes' log files."""
        return self.path / "logs"

    def create(self) -> None:
        """Makes the directory, for its owner alone, unless it is there already, and checks that it can be written.

        Raises:
            DataDirError: a file is in the way, a permission is missing, or the disk is full.
        """
        with explain_os_errors(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only a write shows that writing works: read-only mounts and full disks answer access() with yes.
            write_private(self.path / ".writable", "x" * 4096)
            (self.path / ".writable").unlink()
            for name in (_SECRETS, self.logs.name):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            # An older or copied directory may be open to others; the keys in it must not be.
            (self.path / _SECRETS).chmod(0o700)

    def require_room(self) -> None:
        """Raises DataDirError if the disk has too little free space for the stack to start, or is about to have."""
        is_new = not (self.path / _LOCK).exists()
        needed = ROOM_OF_NEW_MB if is_new else ROOM_MB
        with explain_os_errors(self.path):
            free = shutil.disk_usage(self.path).free // 10**6
        if free < needed:
            problem = f"needs {needed} MB of free disk space, has {free} MB"
            raise DataDirError(problem, self.path, "Make room, or name another data directory.")

    @contextlib.contextmanager
    def lock(self) -> Generator[int]:
        """Holds the directory for this stack, and yields the lock's file descriptor.

        Processes of the stack inherit the descriptor (`Supervisor(inherit=…)`): the directory then stays locked until
        the last one is gone, even if this process was killed. Such a leftover gets a few seconds to end, because the
        kernel is about to kill it; the kernel drops the lock of a dead process, so a stale file is no obstacle.

        Raises:
            AlreadyRunningError: another stack holds it.
            DataDirError: the lock file cannot be written.
        """
        lock = self.path / _LOCK
        with explain_os_errors(lock):
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _HANDOVER_S
            while not _locks(descriptor, fcntl.LOCK_EX):
                pid = _read_pid(descriptor)
                # No living owner: leftovers of a killed stack are dying, or another process is reading the holder.
                if (pid is not None and is_alive(pid)) or time.monotonic() > deadline:
                    raise AlreadyRunningError(pid, self.path)
                time.sleep(_POLL_S)
            with explain_os_errors(lock):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            try:
                yield descriptor
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def secret(self, name: str) -> str:
        """Returns the secret of that name, which is made at random the first time.

        Raises:
            DataDirError: it cannot be read or written, or its file is empty.
        """
        path = self.secret_file(name)
        with explain_os_errors(path):
            if not path.exists():
                write_private(path, secrets.token_urlsafe(32))
            value = path.read_text(encoding="utf-8").strip()
        if not value:
            raise DataDirError("the file of this secret is empty", path, "Delete it; a new secret is then created.")
        return value

    def secret_file(self, name: str) -> Path:
        """Returns the file of a secret, for a process that reads it itself.

        Raises:
            ValueError: the name has other characters than lower-case letters, digits, `-` and `_`.
        """
        if _SECRET_NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a valid name for a secret: use lower-case letters, digits, '-' and '_'")
        return self.path / _SECRETS / name

    def write_endpoints(self, endpoints: Endpoints) -> None:
        """Writes the stack's addresses for other programs of this user, atomically and readable by the owner."""
        with explain_os_errors(self.path / _ENDPOINTS):
            write_private(self.path / _ENDPOINTS, endpoints.model_dump_json(indent=2) + "\n")

    def remove_endpoints(self) -> None:
        """Removes the addresses when the stack stops."""
        with explain_os_errors(self.path / _ENDPOINTS):
            (self.path / _ENDPOINTS).unlink(missing_ok=True)

    def holder(self) -> int | None:
        """Returns the pid of the stack that runs here now, or None."""
        with explain_os_errors(self.path / _LOCK):
            try:
                descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
        try:
            return None if _locks(descriptor, fcntl.LOCK_SH) else _read_pid(descriptor)
        finally:
            os.close(descriptor)


def read_endpoints(path: Path) -> Endpoints:
    """Reads the addresses of the stack in a data directory.

    A stack that was killed leaves them behind: `DataDir(path).holder()` is None then.

    Raises:
        NotRunningError: there are none.
        DataDirError: they cannot be read, or are not in the form of this version.
    """
    file = path.expanduser().absolute() / _ENDPOINTS
    with explain_os_errors(file):
        try:
            stored = file.read_bytes()
        except FileNotFoundError:
            raise NotRunningError(path) from None
    try:
        return Endpoints.model_validate_json(stored)
    except ValueError as error:
        raise DataDirError(
            "these endpoints were written by another version", file, "Start `breakwater up` again."
        ) from error


def _read_pid(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _locks(descriptor: int, kind: int) -> bool:
    """Locks a file; returns False if another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
