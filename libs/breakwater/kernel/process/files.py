"""Atomic file writes, and the limit of open files."""

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, *, private: bool = False) -> Generator[BinaryIO]:
    """Yields a temporary file that replaces `path` when the block ends, and is deleted if that fails.

    Symbolic links, mode and owner are preserved, as far as this user may set them. Anything but a regular file, such
    as a pipe or `/dev/null`, is written to directly.

    Args:
        path: The file to replace, or to write.
        private: Makes the file readable by its owner only, from its first byte on.

    Raises:
        OSError: The directory or the file is not writable, or the disk is full. An older version stays.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    before = target.stat() if target.exists() else None
    if before is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied", str(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    try:
        mode = 0o600 if private or before is not None else 0o666
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w+b") as file:
            if before is not None and not private:
                with suppress(PermissionError):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, S_IMODE(before.st_mode))
            yield file
            file.flush()
            os.fsync(descriptor)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Writes a text that only its owner may read. Raises OSError as `replacing` does."""
    with atomic_write(path, private=True) as file:
        file.write(text.encode())


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Returns what differs after any change of a file: its time, size and inode. None while there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def raise_file_limit(wanted: int) -> None:
    """Raises this process's limit of open files and sockets, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
