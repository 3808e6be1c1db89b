"""The file of API keys: one JSON document, readable by its owner only, replaced as a whole."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from breakwater.identity.contract import KEY_SCOPES, KeyScope
from breakwater.identity.rules.callers import ENTROPY_BYTES, ApiKey, mint, opens, split
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.files import write_private
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.types import Message


class ApiKeysError(BreakwaterError):
    """The keys can't be read or changed; its text says why."""


class _Document(Message):
    keys: tuple[ApiKey, ...] = ()


def create_key(
    path: Path,
    name: str,
    scopes: tuple[KeyScope, ...] = KEY_SCOPES,
    *,
    tenants: tuple[str, ...] = (),
    agents: tuple[str, ...] = (),
) -> str:
    """Adds a key that may do what its scopes say, for some tenants and agents alone where these are named.

    Returns:
        The key itself, `bw_<id>_<secret>`, shown this once.

    Raises:
        ApiKeysError: the name or the scopes can't be used, or the file can't be read or written.
    """
    try:
        key, kept = mint(
            name,
            entropy=secrets.token_bytes(ENTROPY_BYTES),
            at=datetime.now(UTC),
            scopes=scopes,
            tenants=tenants,
            agents=agents,
        )
    except ValidationError as error:
        if any(mistake["loc"][:1] == ("scopes",) for mistake in error.errors(include_url=False)):
            raise ApiKeysError(f"a key needs one or more of the scopes {', '.join(KEY_SCOPES)}") from error
        if any(not mistake["loc"] for mistake in error.errors(include_url=False)):
            raise ApiKeysError("a key that is bound to tenants or agents can only have the scope submit") from error
        raise ApiKeysError(
            f"{name!r} is not a valid name for a key: 1 to 128 characters, no control characters"
        ) from error
    with _locked(path):
        _save(path, (*list_keys(path), kept))
    return key


def list_keys(path: Path) -> tuple[ApiKey, ...]:
    """All keys, oldest first; none where there is no file yet.

    Raises:
        ApiKeysError: the file can't be read, or is not one of keys.
    """
    try:
        return _Document.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ApiKeysError(f"{path}: can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiKeysError(
            f"{path}: is not a valid file of API keys: {where}{(': ' if where else '')}{first['msg']}"
        ) from None


def revoke_key(path: Path, which: str) -> ApiKey:
    """Removes a key. Running services refuse it from their next request on.

    Args:
        path: the file.
        which: its id; or its name, where no other key has it.

    Returns:
        What was kept of it.

    Raises:
        ApiKeysError: there is no such key, or more than one of this name, or the file can't be read or written.
    """
    with _locked(path):
        keys = list_keys(path)
        # An id first: a key may be named like the id of another one.
        found = [key for key in keys if key.id == which] or [key for key in keys if key.name == which]
        if not found:
            raise ApiKeysError(f"there is no API key {which!r}; existing keys: {_listed(keys) or 'none'}")
        if len(found) > 1:
            raise ApiKeysError(f"{len(found)} API keys are named {which!r}; use one of the ids: {_listed(found)}")
        _save(path, tuple(key for key in keys if key.id != found[0].id))
    return found[0]


class KeyRing:
    """The keys as a running service knows them; read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = os.fspath(path)
        self._keys: Mapping[str, ApiKey] = {}
        self._version: tuple[int, int, int] | None = None
        self._outage = Outage("api_keys_file")

    def holder(self, text: str) -> ApiKey | None:
        """The key that was sent, or None where it is unknown."""
        self._refresh()
        parts = split(text)
        if parts is None:
            return None
        key_id, secret = parts
        key = self._keys.get(key_id)
        return key if key is not None and opens(key, secret) else None

    def of(self, key_id: str) -> ApiKey | None:
        """The key of an id, for those who have shown its secret before; None where it is unknown by now."""
        self._refresh()
        return self._keys.get(key_id)

    def _refresh(self) -> None:
        version = self._version_now()
        if version == self._version:
            return
        try:
            keys = list_keys(self._path)
        except ApiKeysError as error:
            # In the middle of an edit: the keys that were right stay right, and the file is tried again.
            self._outage.failed(error)
            return
        self._outage.worked()
        self._keys = {key.id: key for key in keys}
        self._version = version

    def _version_now(self) -> tuple[int, int, int] | None:
        try:
            # On every request, so that a revoked key is refused by the next one; Path.stat() costs three times more.
            found = os.stat(self._name)  # noqa: PTH116
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def _listed(keys: Iterable[ApiKey]) -> str:
    return ", ".join(f"{key.id} ({key.name})" for key in keys)


def _save(path: Path, keys: tuple[ApiKey, ...]) -> None:
    try:
        write_private(path, _Document(keys=keys).model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ApiKeysError(f"{path}: can't be written: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Keeps two processes from losing each other's change, above all a revocation."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ApiKeysError(f"{path}: can't be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
