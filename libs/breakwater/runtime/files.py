"""Files that are written whole or not at all, and how many may be open."""

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Generator[BinaryIO]:
    """A file that takes the place of another one when the block ends, and is deleted where that fails.

    A link stays one. Mode and owner stay what they were, as far as this user may set them. What is no regular file, as
    a pipe or `/dev/null`, is written to.

    Args:
        path: The file to replace, or to write.
        private: Only its owner may read it, from its first byte on, whatever it was before.

    Raises:
        OSError: The directory or the file is not writable, or the disk is full; an older version is then still there.
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
    with replacing(path, private=True) as file:
        file.write(text.encode())


def raise_file_limit(wanted: int) -> None:
    """Lets this process have so many files and sockets open, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
