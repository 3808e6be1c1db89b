"""Files that only their owner may read."""

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write a file whole or not at all, with mode 0600 from its first byte on.

    Raises:
        OSError: The directory is not writable, or the disk is full; an older version of the file is then still there.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
