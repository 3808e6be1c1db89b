"""Errors of backups."""

from __future__ import annotations

from breakwater.kernel.errors import BreakwaterError


class BackupError(BreakwaterError):
    """A backup can't be made, read or restored. The message says what to do."""

    command_code = "backup"
