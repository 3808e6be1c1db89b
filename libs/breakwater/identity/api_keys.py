"""API keys: the file of the first ones, and the ring of all that a process accepts.

The file is one JSON document, readable by its owner only, replaced as a whole. The plane keeps all other keys.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from breakwater.identity.contract import KEY_SCOPES, MAX_TAGS, KeyScope, Priority
from breakwater.identity.rules.callers import (
    ENTROPY_BYTES,
    ApiKey,
    Caller,
    StoredApiKey,
    digest_of,
    holder_of_key,
    mint,
    opens,
    split,
)
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.files import write_private
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.types import Message

if TYPE_CHECKING:
    from breakwater.identity.key_log import KeyLog, PlaneKey


TIMER_MARGIN_S = 0.01


class ApiKeysError(BreakwaterError):
    """The keys can't be read or changed; its text says why."""

    command_code = "api_keys"


class _Document(Message):
    version: Literal[1] = 1  # not written: files without one are of the first version
    keys: tuple[StoredApiKey, ...] = ()


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
    priority: Priority | None = None,
    weight: int = 1,
    residency: str | None = None,
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
        priority: the priority of its jobs, and the highest that they may ask for; None for no such limit.
        weight: its share of what callers wait for.
        residency: the region that its calls must not leave; None for any.

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
            priority=priority,
            weight=weight,
            residency=residency,
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
        problems = error.errors(include_url=False, include_input=False)
        if any(problem["loc"] == ("version",) for problem in problems):
            raise ApiKeysError(f"{path}: was written by a later version of Breakwater") from None
        first = problems[0]
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


@dataclass(slots=True)
class KeyWatchers:
    """The functions to call when the access that a key gives may have changed, and the timer for its next end."""

    looks: set[Callable[[], None]] = field(default_factory=set[Callable[[], None]])
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Stops the timer, if there is one."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class KeyRing:
    """The keys of a running service: those that the plane keeps, and the file's, which is read again when it changes.

    Args:
        path: the file.
        log: the keys that the plane keeps; None for a service without them.
    """

    def __init__(self, path: Path, log: KeyLog | None = None) -> None:
        self._path = path
        self.log = log
        if log is not None:
            log.note_change = self._look_at
        self._watchers: dict[str, KeyWatchers] = {}
        """Those of each key with requests that are being answered, by the key's id."""
        self._name = os.fspath(path)
        self._keys: Mapping[str, ApiKey] = {}
        self._version: tuple[int, int, int] | None = None
        self._outage = Outage("api_keys_file")

    def holder(self, text: str) -> Caller | None:
        """Returns the holder of the key that was sent; None if it is unknown or has ended."""
        self._refresh()
        parts = split(text)
        if parts is None:
            return None
        key_id, secret = parts
        if (plane_key := self._plane_key(key_id)) is not None:
            return plane_key.holder_by(digest_of(secret), time.time())
        key = self._keys.get(key_id)
        return holder_of_key(key) if key is not None and opens(key, secret) else None

    def holder_by_digest(self, key_id: str, digest: str) -> Caller | None:
        """Returns the holder of a key, who has proved a secret before; None if the key or the secret has ended."""
        self._refresh()
        if (plane_key := self._plane_key(key_id)) is not None:
            return plane_key.holder_by(digest, time.time())
        key = self._keys.get(key_id)
        return holder_of_key(key) if key is not None and key.sha256 == digest else None

    def why_refused(self, text: str) -> str | None:
        """Returns why a key that was valid once has no holder any more; None if it is unknown."""
        parts = split(text)
        plane_key = None if parts is None else self._plane_key(parts[0])
        return None if parts is None or plane_key is None else plane_key.why_refused(parts[1])

    def watch(self, caller: Caller, look: Callable[[], None]) -> None:
        """Calls `look` whenever the access of a key's holder may have changed, until `unwatch`."""
        if self.log is None or caller.kind != "key":
            return
        watchers = self._watchers.get(caller.id)
        if watchers is None:
            watchers = self._watchers[caller.id] = KeyWatchers()
            self._set_timer(caller.id, watchers)
        watchers.looks.add(look)

    def unwatch(self, caller: Caller, look: Callable[[], None]) -> None:
        """Undoes `watch`."""
        watchers = self._watchers.get(caller.id)
        if watchers is None:
            return
        watchers.looks.discard(look)
        if not watchers.looks:
            del self._watchers[caller.id]
            watchers.stop_timer()

    def _look_at(self, key_ids: Iterable[str]) -> None:
        for key_id in key_ids:
            if (watchers := self._watchers.get(key_id)) is not None:
                for look in watchers.looks:
                    look()
                self._set_timer(key_id, watchers)

    def _set_timer(self, key_id: str, watchers: KeyWatchers) -> None:
        watchers.stop_timer()
        key = self._plane_key(key_id)
        now = time.time()
        ends = () if key is None else [end for end in (key.ends_at, key.old_until) if end is not None and end > now]
        if ends:
            # A timer may fire a moment early.
            left_s = min(ends) - now + TIMER_MARGIN_S
            watchers.timer = asyncio.get_running_loop().call_later(left_s, self._look_at, (key_id,))

    @property
    def is_filled(self) -> bool:
        """Returns True once the keys that the plane keeps are known."""
        return self.log is None or self.log.filled.is_set()

    @property
    def of_file(self) -> tuple[ApiKey, ...]:
        """The keys of the file."""
        self._refresh()
        return tuple(self._keys.values())

    def _plane_key(self, key_id: str) -> PlaneKey | None:
        return None if self.log is None else self.log.keys.get(key_id)

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
        write_private(path, _Document(keys=keys).model_dump_json(indent=2, exclude={"version"}) + "\n")
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
