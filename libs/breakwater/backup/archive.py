"""The files of a backup: compressed, encrypted if there is a key, and listed with their checksums in the manifest."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from typing import Any

import orjson
from pydantic import ValidationError

from breakwater.backup.contract import FORMAT, MANIFEST, BackupFile, Manifest
from breakwater.backup.encryption import SALT_BYTES, BackupKey, Decryptor, Encryptor
from breakwater.backup.errors import BackupError
from breakwater.backup.storage import Storage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSED = ".zst"
"""The end of the names of files that are compressed."""

INCOMPLETE = "incomplete"
"""A file that is there until the manifest is: the others are leftovers, and no files of somebody else."""


class ArchiveWriter:
    """Writes a backup into a place. `files` has what was written."""

    def __init__(self, storage: Storage, key: BackupKey | None, note_bytes: Callable[[int], None]) -> None:
        self.files: list[BackupFile] = []
        self._storage = storage
        self._key = key
        self._note_bytes = note_bytes

    async def begin(self) -> None:
        """Removes the files of a backup that was not completed. Raises BackupError: there is a whole one."""
        names = await self._storage.names()
        if MANIFEST in names:
            raise BackupError(f"{self._storage.place} has a backup already: name another folder, or remove that one")
        if names and INCOMPLETE not in names:
            raise BackupError(
                f"{self._storage.place} has files of something else, such as {names[0]}: name an empty folder"
            )
        for name in names:
            if name != INCOMPLETE:
                await self._storage.remove(name)
        async with self._storage.write(INCOMPLETE) as file:
            await file.write(b"`breakwater backup create` has not completed this backup.\n")

    async def write(self, name: str, chunks: AsyncIterable[bytes]) -> None:
        """Writes a file. Raises BackupError, and what `chunks` raises."""
        digest = hashlib.sha256()
        size = 0
        encryptor = None if self._key is None else Encryptor(self._key, name, secrets.token_bytes(SALT_BYTES))
        compressor = zstd.ZstdCompressor() if name.endswith(COMPRESSED) else None
        async with self._storage.write(name) as file:

            async def store(data: bytes) -> None:
                nonlocal size
                if data:
                    digest.update(data)
                    size += len(data)
                    self._note_bytes(len(data))
                    await file.write(data)

            async for chunk in chunks:
                packed = chunk if compressor is None else compressor.compress(chunk)
                await store(packed if encryptor is None else encryptor.update(packed))
            tail = b"" if compressor is None else compressor.flush()
            await store(tail if encryptor is None else encryptor.update(tail) + encryptor.end())
        self.files.append(BackupFile(name=name, bytes=size, sha256=digest.hexdigest()))

    async def write_manifest(self, manifest: Manifest) -> None:
        """Completes the backup. Raises BackupError."""
        if self._key is not None:
            manifest = manifest.model_copy(update={"seal": self._key.seal_of(_sealed_part(manifest))})
        async with self._storage.write(MANIFEST) as file:
            await file.write(manifest.model_dump_json(indent=1).encode() + b"\n")
        await self._storage.remove(INCOMPLETE)


class ArchiveReader:
    """Reads a whole backup.

    Args:
        storage: its place.
        manifest: as `read_manifest` gave it.
        key: its key; None if it is not encrypted, or if only checksums are to be checked.
        note_bytes: called with the number of bytes that were read.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, key: BackupKey | None, note_bytes: Callable[[int], None]
    ) -> None:
        self._storage = storage
        self._key = key
        self._note_bytes = note_bytes
        self._files = {file.name: file for file in manifest.files}
        self._encrypted = manifest.key is not None

    async def check_all(self) -> None:
        """Reads every file to its end. Raises BackupError, which names the first that is cut or was changed."""
        present = set(await self._storage.names())
        if missing := sorted(self._files.keys() - present):
            raise _damage(missing[0], "is missing")
        for name in self._files:
            async with aclosing(self.read(name)) as chunks:
                async for _ in chunks:
                    pass

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        """Yields the content of a file. Only who gets to the end without an error has all of it. Raises BackupError."""
        expected = self._files.get(name)
        if expected is None:
            raise _damage(name, "is not listed in the manifest")
        digest = hashlib.sha256()
        size = 0
        reads_plain = self._key is not None or not self._encrypted
        decryptor = None if self._key is None or not self._encrypted else Decryptor(self._key, name)
        decompressor = zstd.ZstdDecompressor() if name.endswith(COMPRESSED) and reads_plain else None
        async for stored in self._storage.read(name):
            digest.update(stored)
            size += len(stored)
            self._note_bytes(len(stored))
            plain = stored if decryptor is None else decryptor.update(stored)
            if content := _unpacked(decompressor, plain, name):
                yield content
        if size != expected.bytes:
            raise _damage(name, f"has {size:,} bytes instead of {expected.bytes:,}")
        if digest.hexdigest() != expected.sha256:
            raise _damage(name, "was changed")
        if decryptor is not None and (content := _unpacked(decompressor, decryptor.end(), name)):
            yield content
        if decompressor is not None and not decompressor.eof:
            raise _damage(name, "ends too early")


async def read_manifest(storage: Storage, key: BackupKey | None, *, checks_only: bool = False) -> Manifest:
    """Reads and checks the manifest of a backup.

    Args:
        storage: the backup's place.
        key: the key at hand.
        checks_only: True if an encrypted backup may be read without its key, for its checksums.

    Raises:
        BackupError: there is no whole backup, it is of a newer version, was encrypted with another key, or is not
            encrypted although there is a key.
    """
    names = await storage.names()
    if MANIFEST not in names:
        state = "is incomplete: run `breakwater backup create` again" if INCOMPLETE in names else "has no backup"
        raise BackupError(f"{storage.place} {state}")
    document = b"".join([chunk async for chunk in storage.read(MANIFEST)])
    try:
        fields: Any = orjson.loads(document)
        version = int(fields["format"])
        if version > FORMAT:
            raise BackupError(
                f"{storage.place} was made by version {fields.get('plane_version')}, whose format {version} this one "
                "can't read: install that version"
            )
        manifest = Manifest.model_validate(fields)
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        raise _damage(MANIFEST, "is not readable") from error
    if manifest.key is None and key is not None:
        # Nothing seals it: anyone who can write to the place could have put it there instead of an encrypted one.
        raise BackupError(
            f"{storage.place} is not encrypted, and BREAKWATER_BACKUP_KEY is set: unset it, if you trust this backup"
        )
    if manifest.key is None or (key is None and checks_only):
        return manifest
    if key is None or key.id != manifest.key:
        at_hand = "BREAKWATER_BACKUP_KEY is not set" if key is None else f"BREAKWATER_BACKUP_KEY is {key.id}"
        raise BackupError(f"{storage.place} is encrypted with key {manifest.key}, and {at_hand}")
    if manifest.seal != key.seal_of(_sealed_part(manifest)):
        raise _damage(MANIFEST, "was changed")
    return manifest


def _unpacked(decompressor: Any, data: bytes, name: str) -> bytes:
    if decompressor is None or not data:
        return data
    try:
        return decompressor.decompress(data)
    except (zstd.ZstdError, EOFError) as error:
        raise _damage(name, "can't be decompressed") from error


def _damage(name: str, problem: str) -> BackupError:
    return BackupError(f"{name} {problem}: restore another backup, or make one with `breakwater backup create`")


def _sealed_part(manifest: Manifest) -> bytes:
    return orjson.dumps(manifest.model_dump(mode="json", exclude={"seal"}), option=orjson.OPT_SORT_KEYS)
