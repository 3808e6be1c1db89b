"""The data of a person or of a tenant: which documents are theirs, and which texts to search for. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from breakwater.identity.rules.callers import Attribution
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.attribution import attribution_of
from breakwater.limits.rules.scopes import ScopePart, parts_of

_WORD = re.compile(r"[^\s\"'`,;()\[\]{}]+")
_UNESCAPED = re.compile(r"[^\x00-\x1f\x7f\"\\]+")
"""Text that every JSON writer leaves as it is, apart from letters beyond ASCII."""

CHOSEN_IDS = {"job_id": "execution_id", "task_id": "task_key", "plan_id": "plan_key"}
"""The fields of records and actions with ids that callers chose, and those with the plane's own."""

KEYS = ("task_key", "plan_key")
Key = tuple[str, str]
"""One of these fields, and its value."""

SHORTEST_TEXT = 16
"""Letters of the shortest text that is searched for: a shorter one is in too many other texts."""
LONGEST_TEXT = 48
"""Letters that are searched for. Stored texts may be cut, or continue in another message."""
SHORTEST_NAME = 4


@dataclass(frozen=True, slots=True)
class DataSubject:
    """A user, a tenant, or a user of a tenant, whose data are to be erased."""

    user: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not self.user and not self.tenant:
            raise ValueError("a user or a tenant is needed")

    @property
    def digest(self) -> str:
        """The digest by which the audit log knows them: who knows the names can compute it, and no one else."""
        return hashlib.sha256(f"user={self.user or ''}\ntenant={self.tenant or ''}".encode()).hexdigest()

    def has(self, document: Mapping[str, Any]) -> bool:
        """Returns True if an attempt or a record is theirs."""
        return all(
            wanted is None or document.get(field) == wanted
            for field, wanted in (("user", self.user), ("tenant", self.tenant))
        )

    def has_job(self, document: object, user_in_headers: str | None) -> bool:
        """Returns True if a job's message is theirs, even an invalid one.

        Args:
            document: its body as JSON; anything else for one that can't be read.
            user_in_headers: the user that `request` has resolved.
        """
        fields = _mapping(document)
        users = {user_in_headers} if user_in_headers else _own_users(fields)
        return (self.user is None or self.user in users) and (
            self.tenant is None or fields.get("tenant") == self.tenant
        )

    def has_scope(self, scope: Iterable[ScopePart]) -> bool:
        """Returns True if what counts in the scope of a limit is theirs; a user of all tenants is not one tenant's."""
        return self.user is not None and self._parts <= set(scope)

    def is_named_in(self, document: object) -> bool:
        """Returns True if an alert is about a limit on the user, or names the user as such."""
        if isinstance(document, str):
            # A title or a key: a longer name that begins alike is taken for theirs.
            return self.user is not None and all(
                re.search(rf"(?<![\w-]){re.escape(str(part))}(?![\w.@+-])", document) for part in self._parts
            )
        if isinstance(document, Mapping):
            fields = cast(Mapping[str, object], document)
            if "scope" in fields and self.has_scope(parts_of_event(fields)):
                return True
            if self.user is not None and "user" in fields and self.has(fields):
                return True
            return any(map(self.is_named_in, fields.values()))
        return isinstance(document, list | tuple) and any(map(self.is_named_in, cast(list[object], document)))

    @property
    def _parts(self) -> set[ScopePart]:
        names = {"user": self.user, "tenant": self.tenant}
        return {ScopePart(kind, name) for kind, name in names.items() if name is not None}


def parts_of_event(event: Mapping[str, object]) -> tuple[ScopePart, ...]:
    """Returns the scope of a budget's event."""
    kind = str(event.get("scope"))
    name = event.get(kind) if kind in ("agent", "tenant") else event.get("name")
    within = event.get("within")
    return (ScopePart(kind, str(name)), *(() if within is None else parts_of(str(within))))


def _own_users(fields: Mapping[str, Any]) -> set[str]:
    """The users that a job names itself."""
    try:
        user = attribution_of(Job.model_validate(fields), Attribution(None, None)).user
    except ValidationError:
        pass
    else:
        return {user} if user else set()
    # Of an invalid or encrypted job, each of its places is believed: too much is erased rather than too little.
    request = _mapping(_mapping(fields.get("api_request")).get("body"))
    places = (
        *(_mapping(fields.get(part)).get("user") for part in ("metadata", "params")),
        *(_mapping(part).get("safety_identifier") for part in (fields.get("params"), request)),
        request.get("user"),
        _mapping(request.get("metadata")).get("user_id"),
    )
    return {place for place in places if isinstance(place, str)}


def _mapping(value: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def strings(value: object) -> Iterator[str]:
    """Yields all strings of a JSON document, without the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in cast(Mapping[str, object], value).values():
            yield from strings(part)
    elif isinstance(value, list | tuple):
        for part in cast(list[object], value):
            yield from strings(part)


def mentions(document: object, ids: Collection[str], subject: DataSubject) -> bool:
    """Returns True if an alert names one of their jobs, or the user."""
    return subject.is_named_in(document) or any(
        text in ids or any(word.rstrip(".:") in ids for word in _WORD.findall(text)) for text in strings(document)
    )


def chosen_ids(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the ids that a record's caller chose, with those of the plane."""
    pairs = ((record.get(field), record.get(own_field)) for field, own_field in CHOSEN_IDS.items())
    return {chosen: own_id for chosen, own_id in pairs if chosen and own_id and chosen != own_id}


def keys_in(record: Mapping[str, Any]) -> set[Key]:
    """Returns the task and the plan of a record or an event, as the plane knows them."""
    return {(name, key) for name in KEYS if (key := record.get(name))}


def goes(key: str, *, of_job: bool, shared: bool) -> bool:
    """Returns True if an event of a task or a plan of theirs goes.

    By the event of a task that others share, which has no texts, Redis learns that the task is stopped. Of such a plan,
    the changes by their jobs go.
    """
    return not shared or (of_job and key == "plan_key")


def with_plane_ids(
    details: Mapping[str, Any], ids: Collection[str], chosen: Mapping[str, str]
) -> dict[str, Any] | None:
    """Returns the parameters of an operator's action without ids that callers chose; None if there are none.

    Args:
        details: the parameters.
        ids: the executions.
        chosen: the plane's ids, by those that callers chose.
    """
    execution_id = details.get("execution_id")
    if execution_id is not None and execution_id not in ids:
        return None  # another caller's job, of the same name
    names = chosen if execution_id is None else {**chosen, details.get("job_id"): execution_id}
    renamed = {field: names[details[field]] for field in CHOSEN_IDS if details.get(field) in chosen}
    return {**details, **renamed} if renamed else None


def texts_of(*documents: object) -> set[str]:
    """The texts of a job to search for: of each string the first part that is long enough, without system prompts."""
    chosen: set[str] = set()
    for document in documents:
        for text in strings(_without_system_prompts(document)):
            parts = (part[:LONGEST_TEXT].strip() for part in _UNESCAPED.findall(text))
            chosen.update(part for part in parts if len(part) >= SHORTEST_TEXT)
    return chosen


def _without_system_prompts(document: object) -> object:
    if not isinstance(document, list):
        return document
    messages = cast(list[object], document)
    return [message for message in messages if _mapping(message).get("role") not in ("system", "developer")]


def name_forms(name: str) -> tuple[bytes, ...]:
    """The bytes in which a name may be stored: as it is, and in JSON that escapes; in base64 it is too short."""
    return tuple(dict.fromkeys((name.encode(), json.dumps(name)[1:-1].encode())))


def stored_forms(text: str) -> tuple[bytes, ...]:
    """The bytes in which a text may be stored: those of a name, and in base64 at each of its places."""
    plain = text.encode()
    encoded: list[bytes] = []
    for shift in range(3):
        shifted = b64encode(b"\0" * shift + plain)
        # Without the letters that depend on what stands around it.
        encoded.append(shifted[(0, 2, 3)[shift] : len(shifted) // 4 * 4 - 4])
    return tuple(dict.fromkeys((*name_forms(text), *encoded)))
