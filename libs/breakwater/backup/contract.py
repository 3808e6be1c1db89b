"""The manifest of a backup, which is written last: a folder without one holds no whole backup."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from breakwater.kernel.types import Event, Timestamp

FORMAT = 1
"""The version of everything in a backup. A reader refuses a newer one."""

MANIFEST = "manifest.json"

FileName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$", max_length=200)]


class BackupFile(Event):
    """A file of a backup, as it is stored."""

    name: FileName
    bytes: int = Field(ge=0)
    sha256: str


class StreamInBackup(Event):
    """A stream as of its copy."""

    name: str
    file: FileName
    messages: int
    first: int = Field(description="The oldest sequence.")
    last: int = Field(description="The newest sequence. The copy may have some later messages.")


class TableInBackup(Event):
    """A table of ClickHouse."""

    name: str
    columns: tuple[str, ...]
    rows: int
    files: tuple[FileName, ...]


class LocalFile(Event):
    """A file of the plane's machine."""

    name: str = Field(description="`config`, or the path in the data directory.")
    file: FileName


class Manifest(Event):
    """All that a backup has."""

    format: int
    id: str
    plane_version: str
    begun_at: Timestamp
    moment: Timestamp = Field(description="Jobs that were accepted before are in the backup.")
    completed_at: Timestamp
    key: str | None = Field(description="The id of the key that everything else is encrypted with.")
    files: tuple[BackupFile, ...]
    streams: tuple[StreamInBackup, ...] = Field(description="In the order of a restore.")
    consumers: FileName
    late_jobs: FileName = Field(description="Jobs that were put back into their queues while these were copied.")
    tables: tuple[TableInBackup, ...]
    local_files: tuple[LocalFile, ...]
    left_out: tuple[str, ...] = Field(description="Secrets that are not in it, because there was no key.")
    seal: str | None = Field(default=None, description="Authenticates the manifest, if there is a key.")

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)
