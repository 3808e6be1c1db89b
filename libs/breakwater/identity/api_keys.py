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

from breakwater.identity.contract import KEY_SCOPES, MAX_TAGS, KeyScope
from breakwater.identity.rules.callers import ENTROPY_BYTES, ApiKey, mint, opens, split
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.files import write_private
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.types import Message


class ApiKeysError(BreakwaterError):
    """The keys can't be read or changed; its text says why."""

    command_code = "api_keys"


class _Document(Message):
    keys: tuple[ApiKey, ...] = ()


def create_key(
    path: Path,
    name: str,
    scopes: tuple[KeyScope, ...] = KEY_SCOPES,
    *,
    tenants: tuple[str, ...] = (),
    agents: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    user: str | None = None,
    team: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Creates a key with some scopes, which may be limited to some tenants and agents.

    Args:
        path: the file.
        name: the key's name.
        scopes: its scopes.
        tenants: the tenants that it may submit jobs for; empty: any.
        agents: the agents that it may submit jobs for; empty: all.
        models: the models that its jobs may ask for; empty: any.
        user: the user of all its jobs; None for any.
        team: the team of all its jobs; None for any.
        tags: the cost tags of all its jobs.

    Returns:
        The key itself, `bw_<id>_<secret>`, which is shown only this once.

    Raises:
        ApiKeysError: a name or the scopes are invalid, or the file can't be read or written.
    """
    try:
        key, record = mint(
            name,
            entropy=secrets.token_bytes(ENTROPY_BYTES),
            at=datetime.now(UTC),
            scopes=scopes,
            tenants=tenants,
            agents=agents,
            models=models,
            user=user,
            team=team,
            tags=tags,
        )
    except ValidationError as error:
        raise ApiKeysError(_mistake(error, name)) from error
    except ValueError as error:
        raise ApiKeysError(str(error)) from error
    with _lock(path):
        _save(path, (*list_keys(path), record))
    return key


def list_keys(path: Path) -> tuple[ApiKey, ...]:
    """Returns all keys, oldest first; empty if there is no file yet.

    Raises:
        ApiKeysError: the file can't be read, or contains no valid keys.
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


def revoke_key(path: Path, id_or_name: str) -> ApiKey:
    """Removes a key. Running services refuse it from their next request on.

    Args:
        path: the file.
        id_or_name: the key's id, or its name if no other key has it.

    Returns:
        The removed key's record.

    Raises:
        ApiKeysError: there is no such key, or several of this name, or the file can't be read or written.
    """
    with _lock(path):
        keys = list_keys(path)
        # The id comes first: a key's name may be the id of another key.
        matches = [key for key in keys if key.id == id_or_name] or [key for key in keys if key.name == id_or_name]
        if not matches:
            raise ApiKeysError(f"there is no API key {id_or_name!r}; existing keys: {_in_words(keys) or 'none'}")
        if len(matches) > 1:
            raise ApiKeysError(
                f"{len(matches)} API keys are named {id_or_name!r}; use one of the ids: {_in_words(matches)}"
            )
        _save(path, tuple(key for key in keys if key.id != matches[0].id))
    return matches[0]


class KeyRing:
    """The keys of a running service, which are read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = os.fspath(path)
        self._keys: Mapping[str, ApiKey] = {}
        self._version: tuple[int, int, int] | None = None
        self._outage = Outage("api_keys_file")

    def holder(self, text: str) -> ApiKey | None:
        """Returns the key that was sent; None if it is unknown."""
        self._refresh()
        parts = split(text)
        if parts is None:
            return None
        key_id, secret = parts
        key = self._keys.get(key_id)
        return key if key is not None and opens(key, secret) else None

    def of(self, key_id: str) -> ApiKey | None:
        """Returns the key with an id, for callers who have proved its secret before; None if it no longer exists."""
        self._refresh()
        return self._keys.get(key_id)

    def _refresh(self) -> None:
        version = self._version_now()
        if version == self._version:
            return
        try:
            keys = list_keys(self._path)
        except ApiKeysError as error:
            # The file may be in the middle of an edit: the known keys stay valid, and it is read again.
            self._outage.note_failure(error)
            return
        self._outage.note_success()
        self._keys = {key.id: key for key in keys}
        self._version = version

    def _version_now(self) -> tuple[int, int, int] | None:
        try:
            # Checked on every request, so that a revoked key is refused by the next; Path.stat() is three times slower.
            status = os.stat(self._name)  # noqa: PTH116
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def _mistake(error: ValidationError, name: str) -> str:
    """Returns the first mistake in a new key, in words."""
    mistake = error.errors(include_url=False)[0]
    match mistake["loc"]:
        case ("scopes", *_):
            return f"a key needs one or more of the scopes {', '.join(KEY_SCOPES)}"
        case ("name", *_):
            return f"{name!r} is not a valid name for a key: 1 to 128 characters, no control characters"
        case ("tags",):
            return f"a key has at most {MAX_TAGS} tags"
        case ("tags", _, "[key]"):
            return f"tags: {mistake['input']!r} is not a valid name: 1 to 64 characters, no control characters"
        case (field, *_):
            return f"{field}: {mistake['input']!r} is not valid: 1 to 128 characters, no control characters"
        case _:
            return "a key that is bound to tenants, agents or models can only have the scope submit"


def _in_words(keys: Iterable[ApiKey]) -> str:
    return ", ".join(f"{key.id} ({key.name})" for key in keys)


def _save(path: Path, keys: tuple[ApiKey, ...]) -> None:
    try:
        write_private(path, _Document(keys=keys).model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ApiKeysError(f"{path}: can't be written: {error.strerror}") from error


@contextmanager
def _lock(path: Path) -> Generator[None]:
    """Locks the file, so that two processes can't lose each other's change, above all a revocation."""
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
