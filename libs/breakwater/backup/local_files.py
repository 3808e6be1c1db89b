"""The files of the plane's machine that belong into a backup, and the places where they are restored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from breakwater.backup.errors import BackupError

API_KEYS = "api_keys.json"
_SECRETS = "secrets"
_CONFIG = "config"
_DATA = "data/"
_HERE = "here/"


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files of one machine.

    Attributes:
        config: the config file.
        data: the data directory of `breakwater up`; None where the servers are elsewhere.
        api_keys: the file of the first API keys.
        extra: files that the caller names, such as `.env`.
    """

    config: Path
    data: Path | None
    api_keys: Path
    extra: Sequence[Path] = ()

    def plain(self) -> dict[str, Path]:
        """The files without secrets, by their names in a backup. The keys are digests."""
        api_keys = {_DATA + API_KEYS: self.api_keys} if self.api_keys.is_file() else {}
        return {_CONFIG: self.config, **api_keys}

    def secret(self) -> dict[str, Path]:
        """The files with secrets."""
        folder = None if self.data is None else self.data / _SECRETS
        secrets = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
        return {f"{_DATA}{_SECRETS}/{path.name}": path for path in secrets if path.is_file()} | {
            f"{_HERE}{path.name}": path for path in self.extra
        }

    def place(self, name: str) -> Path | None:
        """The place of a file of a backup; None if it has none on this machine."""
        if name == _CONFIG:
            return self.config
        if name == _DATA + API_KEYS:
            return self.api_keys
        folder, _, file = name.rpartition("/")
        if not file or file.startswith(".."):
            return None
        if folder == _DATA + _SECRETS:
            return None if self.data is None else self.data / _SECRETS / file
        return Path(file) if f"{folder}/" == _HERE else None


def write_new(path: Path, content: bytes) -> bool:
    """Writes a file that only its owner may read, unless there is one; returns False then. Raises BackupError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise BackupError(f"{path} can't be written: {error.strerror or error}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return True
