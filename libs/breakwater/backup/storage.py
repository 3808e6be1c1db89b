"""The places of backups: folders, and S3-compatible storage."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from breakwater.backup.errors import BackupError

READ_BYTES = 1024**2
PART_BYTES = 8 * 1024**2
"""The size of a part of an upload; at most 12 of them are in memory."""

S3 = "s3://"


class Writer(Protocol):
    """An open file."""

    async def write(self, data: bytes, /) -> Any:
        """Appends."""
        ...


class Storage(ABC):
    """The files of a backup, by their names. All methods raise BackupError."""

    def __init__(self, place: str) -> None:
        self.place = place

    @abstractmethod
    async def names(self) -> list[str]:
        """The names of all files, in order."""

    @abstractmethod
    def write(self, name: str) -> AbstractAsyncContextManager[Writer]:
        """Opens a file to be written; it is there when the block ends without an error."""

    @abstractmethod
    def read(self, name: str) -> AsyncIterator[bytes]:
        """Yields the bytes of a file."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Removes a file."""


def storage_of(target: str) -> Storage:
    """The place that a command's argument names. Raises BackupError."""
    return Bucket(target) if target.startswith(S3) else Folder(Path(target))


class Folder(Storage):
    """A folder, which is created when something is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    async def names(self) -> list[str]:
        """Overridden."""
        return _names_below(self._path)

    @asynccontextmanager
    async def write(self, name: str) -> AsyncGenerator[Writer]:
        """Overridden: the file has another name until it is on the disk."""
        file = _NewFile(self._path / name)
        try:
            yield file
            file.keep()
        finally:
            file.close()

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        """Overridden."""
        for chunk in _chunks_of(self._path / name):
            yield chunk

    async def remove(self, name: str) -> None:
        """Overridden."""
        with _explain_errors(self._path / name, "removed"):
            (self._path / name).unlink(missing_ok=True)


class _NewFile:
    """A new file that only its owner may read. It is removed unless it is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        with _explain_errors(path, "written"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._temporary, flags, 0o600), "wb")

    async def write(self, data: bytes, /) -> None:
        with _explain_errors(self._path, "written"):
            self._file.write(data)

    def keep(self) -> None:
        with _explain_errors(self._path, "written"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._temporary.replace(self._path)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


@contextmanager
def _explain_errors(path: Path, action: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise BackupError(f"{path} can't be {action}: {error.strerror or error}") from error


def _names_below(folder: Path) -> list[str]:
    with _explain_errors(folder, "read"):
        files = [file for file in folder.rglob("*") if file.is_file()]
    return sorted(str(file.relative_to(folder)) for file in files)


def _chunks_of(path: Path) -> Iterator[bytes]:
    if not path.exists():
        raise _missing(path)
    with _explain_errors(path, "read"), path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            yield chunk


def _missing(file: object) -> BackupError:
    return BackupError(f"{file} is missing: restore another backup, or make one with `create`")


class Bucket(Storage):
    """S3-compatible storage. Endpoint, region and credentials come from the variables `AWS_*` that all tools know."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError:
            raise BackupError(
                "S3 needs a package that is not installed: `pip install 'breakwater-plane[backup]'`"
            ) from None
        bucket, _, prefix = url.removeprefix(S3).strip("/").partition("/")
        if not bucket:
            raise BackupError(f"{url} names no bucket; write it like s3://bucket/prefix")
        self._obstore = obstore
        self._errors = (BaseError, OSError, ValueError)
        allow_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        with self._explain_errors("used"):
            self._store: Any = S3Store(bucket, prefix=prefix or None, client_options={"allow_http": allow_http})

    async def names(self) -> list[str]:
        """Overridden."""
        with self._explain_errors("listed"):
            return sorted([meta["path"] async for page in self._obstore.list(self._store) for meta in page])

    @asynccontextmanager
    async def write(self, name: str) -> AsyncGenerator[Writer]:
        """Overridden: it is uploaded in parts, and there after the last one."""
        with self._explain_errors("written"):
            file = self._obstore.open_writer_async(self._store, name, buffer_size=PART_BYTES)
        yield _Upload(file.write, partial(self._explain_errors, "written"))
        with self._explain_errors("written"):
            await file.close()

    async def read(self, name: str) -> AsyncGenerator[bytes]:
        """Overridden."""
        try:
            answer = await self._obstore.get_async(self._store, name)
        except FileNotFoundError:
            raise _missing(f"{self.place.rstrip('/')}/{name}") from None
        except self._errors as error:
            raise self._error("read", error) from error
        chunks = answer.stream(min_chunk_size=READ_BYTES).__aiter__()
        while True:
            with self._explain_errors("read"):
                try:
                    chunk = bytes(await anext(chunks))
                except StopAsyncIteration:
                    return
            yield chunk

    async def remove(self, name: str) -> None:
        """Overridden."""
        with self._explain_errors("changed"):
            await self._obstore.delete_async(self._store, name)

    @contextmanager
    def _explain_errors(self, action: str) -> Generator[None]:
        try:
            yield
        except self._errors as error:
            raise self._error(action, error) from error

    def _error(self, action: str, error: Exception) -> BackupError:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        remedy = "are AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY right?"
        return BackupError(f"{self.place} can't be {action}: {first}; {remedy}")


class _Upload:
    """An object that is being uploaded."""

    def __init__(self, write: Callable[[bytes], Awaitable[Any]], explain: Callable[[], AbstractContextManager[None]]):
        self._write = write
        self._explain = explain

    async def write(self, data: bytes, /) -> None:
        with self._explain():
            await self._write(data)
