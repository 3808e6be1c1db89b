"""`/api/v1/keys`: the API keys that the plane keeps, and those of the file, which are only listed."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

from pydantic import ValidationError

from breakwater.config import Config
from breakwater.identity.api_keys import KeyRing
from breakwater.identity.contract import (
    CreateKeyRequest,
    ExpireKeyRequest,
    KeyQuery,
    RevokeKeyRequest,
    RotateKeyRequest,
)
from breakwater.identity.key_log import KeyLog, PlaneKey
from breakwater.identity.operations import NATS_UNAVAILABLE, ApiRequest, operation, utc_now
from breakwater.identity.rules.callers import ENTROPY_BYTES, SECRET_BYTES, ApiKey, mint
from breakwater.identity.rules.keys import KeyRecord, KeyRefusedError, check_creation, grant_objection
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.nats.contract import ENDED_KEPT
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.types import Message
from breakwater.kernel.validation import FieldError
from breakwater.limits.contract import (
    LimitedKey,
    LimitedKeyList,
    LimitedKeyRequest,
    LimitOfKey,
    LimitSettings,
    NewLimitedKey,
)
from breakwater.limits.limit_editor import LimitEditor
from breakwater.limits.rules.limit import amount_text, default_id
from breakwater.limits.rules.limit_changes import LimitRefusedError, objection_to_keys
from breakwater.limits.rules.scopes import ScopePart

_UNKNOWN = "There is no such key (`unknown_key`)."
_CONFLICT = (
    "The key was revoked (`key_revoked`), has expired (`key_expired`), is one of the file (`key_from_file`), was "
    "changed by another caller at this moment (`key_changed`), or several keys have the name (`ambiguous_key`)."
)
LimitsOfKeys = Mapping[str, tuple[LimitOfKey, ...]]
"""The limits of keys, by the keys' names."""

_NOT_OWN = "The caller lacks the scope, or a right of the key (`forbidden`)."


@dataclass(frozen=True, slots=True)
class KeyRoutes:
    """The API keys."""

    config: Config
    ring: KeyRing
    editor: LimitEditor

    @operation(
        "GET",
        "/api/v1/keys",
        tag="keys",
        summary="API keys, without their secrets",
        result="A page of them.",
        errors={404: "There is no key with the id `after` (`unknown_key`)."},
    )
    async def list_keys(self, request: ApiRequest[KeyQuery]) -> LimitedKeyList:
        """Lists the keys of the file, then the plane's own, each by the time of creation."""
        query = request.input
        now = utc_now()
        plane_keys = self._log.keys.values()
        long_ago = (now - ENDED_KEPT).timestamp()
        at = now.timestamp()
        in_order = [
            *sorted(self.ring.of_file, key=lambda key: (key.created_at, key.id)),
            *sorted(
                (key for key in plane_keys if (not key.ended_by(long_ago) if query.ended else key.is_active(at))),
                key=lambda key: (key.created_at, key.holder.id),
            ),
        ]
        begin = 0
        if query.after is not None:
            ids = [key.id if isinstance(key, ApiKey) else key.holder.id for key in in_order]
            if query.after not in ids:
                raise _unknown(query.after)
            begin = ids.index(query.after) + 1
        page = in_order[begin : begin + query.limit]
        limits = self._limits()
        keys = tuple(self._listed(key, now, limits) for key in page)
        return LimitedKeyList(keys=keys, continue_after=keys[-1].id if begin + len(page) < len(in_order) else None)

    @operation(
        "GET",
        "/api/v1/keys/{key}",
        tag="keys",
        summary="One API key, by its id or name",
        result="The key, without its secret.",
        errors={404: _UNKNOWN, 409: "Several keys have the name (`ambiguous_key`)."},
    )
    async def show_api_key(self, request: ApiRequest[Message]) -> LimitedKey:
        """Shows one key."""
        return self._listed(self._find(request.path["key"]), utc_now())

    @operation(
        "POST",
        "/api/v1/keys",
        tag="keys",
        summary="Create an API key",
        description="The caller can give it only rights of its own. It is valid in every process immediately, and with "
        "all of its `limits` or not made.",
        result="The key, with its secret.",
        errors={
            409: "Another key has the name (`key_exists`), there are 10,000 keys (`too_many_keys`), or one of the "
            "limits conflicts with another, as in `PUT /api/v1/limits/{limit_id}`.",
            422: "The body is invalid (`invalid_request`): no scope or an unknown one, tenants, agents or models with "
            "another scope than `submit`, an agent or a model that the config does not know, or an end that is over.",
            503: f"{NATS_UNAVAILABLE} If it did not answer, the key may exist: rotating it gives a secret.",
        },
    )
    async def create_key(self, request: ApiRequest[LimitedKeyRequest]) -> NewLimitedKey:
        """Creates a key."""
        new_key = request.input
        now = utc_now()
        self._check(new_key, now)
        try:
            text, key = mint(
                new_key.name,
                entropy=secrets.token_bytes(ENTROPY_BYTES),
                at=now,
                scopes=new_key.scopes,
                tenants=new_key.tenants,
                agents=new_key.agents,
                models=new_key.models,
                user=new_key.user,
                team=new_key.team,
                tags=new_key.tags,
                priority=new_key.priority,
                weight=new_key.weight,
                residency=new_key.residency,
            )
        except ValidationError as error:
            message = str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")
            raise _invalid("scopes", message) from None
        except ValueError as error:
            raise _invalid("name", str(error)) from None
        self._check_grant(request, key, new_key.expires_at)
        record = KeyRecord(
            key=key, expires_at=new_key.expires_at, change="created", by=request.by, reason=request.why or None, at=now
        )

        def decide() -> KeyRecord:
            in_file = {key.name for key in self.ring.of_file}
            at = now.timestamp()
            active = {key.holder.name for key in self._log.keys.values() if key.is_active(at)}
            check_creation(key.name, active | in_file)
            return record

        with _refusals():
            decide()
        binding = {"user": key.user, "team": key.team} | {f"tag:{tag}": value for tag, value in key.tags.items()}
        parts = [ScopePart(kind, name) for kind, name in binding.items() if name is not None]
        created = await self._set_limits(request, parts, now)
        try:
            with _refusals():
                await self._log.change(decide)
        except RequestError:
            await self._withdraw(request, created, parts, now)
            raise
        request.log("key_created", key=key.name, id=key.id)
        return self._new(record, text, now)

    @operation(
        "POST",
        "/api/v1/keys/{key}/rotate",
        tag="keys",
        summary="Give an API key a new secret",
        description="The old one stays valid for `grace_s`. The caller needs all rights of the key.",
        result="The key, with its new secret.",
        errors={403: _NOT_OWN, 404: _UNKNOWN, 409: _CONFLICT, 503: NATS_UNAVAILABLE},
    )
    async def rotate_key(self, request: ApiRequest[RotateKeyRequest]) -> NewLimitedKey:
        """Rotates the secret of a key."""
        key_id = self._changeable(request.path["key"])
        entropy = secrets.token_bytes(SECRET_BYTES)
        grace = timedelta(seconds=request.input.grace_s)
        texts: list[str] = []

        def decide() -> KeyRecord:
            before = self._plane_key(key_id).record
            self._check_grant(request, before.key, before.expires_at)
            text, record = before.rotate(entropy, grace, by=request.by, reason=request.why or None, at=utc_now())
            texts[:] = [text]
            return record

        with _refusals():
            record = await self._log.change(decide, key_id)
        request.log("key_rotated", key=record.key.name, id=key_id, grace_s=request.input.grace_s)
        return self._new(record, texts[0], record.at)

    @operation(
        "POST",
        "/api/v1/keys/{key}/revoke",
        tag="keys",
        summary="Revoke an API key",
        description="It is refused in every process immediately, and what waits or is streamed for it ends. Jobs that "
        "were accepted go on. A key may revoke itself. Revoking an ended key changes nothing.",
        result="The key.",
        errors={404: _UNKNOWN, 409: _CONFLICT, 503: NATS_UNAVAILABLE},
    )
    async def revoke_key(self, request: ApiRequest[RevokeKeyRequest]) -> LimitedKey:
        """Revokes a key."""
        key_id = self._changeable(request.path["key"])

        def decide() -> KeyRecord:
            return self._plane_key(key_id).record.revoke(by=request.by, reason=request.why or None, at=utc_now())

        try:
            record = await self._log.change(decide, key_id)
        except KeyRefusedError as refused:
            if refused.code == "key_changed":
                raise _conflict(refused) from None
            # It has ended already, which is what the caller wants.
            return self._listed(self._plane_key(key_id), utc_now())
        request.log("key_revoked", key=record.key.name, id=key_id)
        return self._listed_record(record, utc_now())

    @operation(
        "POST",
        "/api/v1/keys/{key}/expire",
        tag="keys",
        summary="Set the time at which an API key ends",
        description="A time that is over revokes the key. To end it later than it would, the caller needs all rights "
        "of the key.",
        result="The key.",
        errors={403: _NOT_OWN, 404: _UNKNOWN, 409: _CONFLICT, 503: NATS_UNAVAILABLE},
    )
    async def expire_key(self, request: ApiRequest[ExpireKeyRequest]) -> LimitedKey:
        """Changes the time at which a key ends."""
        key_id = self._changeable(request.path["key"])
        ends_at = None if request.input.at == "never" else request.input.at

        def decide() -> KeyRecord:
            before = self._plane_key(key_id).record
            is_later = before.expires_at is not None and (ends_at is None or ends_at > before.expires_at)
            if is_later:
                self._check_grant(request, before.key, ends_at)
            return before.expire(ends_at, by=request.by, reason=request.why or None, at=utc_now())

        with _refusals():
            record = await self._log.change(decide, key_id)
        request.log("key_expires", key=record.key.name, id=key_id, at=record.ends_at)
        return self._listed_record(record, utc_now())

    @property
    def _log(self) -> KeyLog:
        assert self.ring.log is not None
        if not self.ring.is_filled:
            raise unavailable("unavailable", "the API keys can't be read yet; retry")
        return self.ring.log

    def _listed(self, key: ApiKey | PlaneKey, now: datetime, limits: LimitsOfKeys | None = None) -> LimitedKey:
        if isinstance(key, PlaneKey):
            return self._listed_record(key.record, now, limits)
        of_key = (self._limits() if limits is None else limits).get(key.name, ())
        return LimitedKey(source="file", state="active", limits=of_key, **_rights(key))

    def _listed_record(self, record: KeyRecord, now: datetime, limits: LimitsOfKeys | None = None) -> LimitedKey:
        of_key = (self._limits() if limits is None else limits).get(record.key.name, ())
        return LimitedKey(limits=of_key, **_fields(record, now))

    def _new(self, record: KeyRecord, text: str, now: datetime) -> NewLimitedKey:
        return NewLimitedKey(key=text, limits=self._limits().get(record.key.name, ()), **_fields(record, now))

    def _limits(self) -> LimitsOfKeys:
        """Returns the limits that are on a key alone, by the key's name."""
        table = self.editor.limits()
        limits: defaultdict[str, tuple[LimitOfKey, ...]] = defaultdict(tuple)
        for limit in chain(table.limits, table.plane_limits.limits.values()):
            if len(limit.parts) == 1 and limit.parts[0].kind == "key":
                amount = amount_text(limit.unit, limit.amount)
                terms = LimitOfKey(id=limit.id, unit=limit.unit, amount=amount, per=limit.window, action=limit.action)
                limits[limit.parts[0].name] += (terms,)
        return limits

    async def _set_limits(
        self, request: ApiRequest[LimitedKeyRequest], binding: Collection[ScopePart], now: datetime
    ) -> list[str]:
        """Sets the limits of a key that is about to be made, all or none. Returns the ids of those that are new.

        Raises RequestError: one of them can't be set.
        """
        scope = f"key:{request.input.name}"
        terms = [LimitSettings(scope=scope, **limit.model_dump(mode="json")) for limit in request.input.limits]
        settings = {default_id(scope, limit.unit, limit.per): limit for limit in terms}
        if len(settings) < len(terms):
            raise _invalid("limits", "two of them are of one unit and window; leave one out")
        created: list[str] = []
        try:
            for number, (limit_id, limit) in enumerate(settings.items()):
                with _refusals_of_limit(number):
                    await self.editor.check(limit_id, limit, request.caller, now, key_binding=binding)
            for number, (limit_id, limit) in enumerate(settings.items()):
                with _refusals_of_limit(number):
                    record = await self.editor.set_limit(
                        limit_id, limit, request.caller, request.why or None, now, key_binding=binding
                    )
                if record.change == "created":
                    created.append(limit_id)
        except RequestError:
            await self._withdraw(request, created, binding, now)
            raise
        return created

    async def _withdraw(
        self, request: ApiRequest[Any], limit_ids: Iterable[str], binding: Collection[ScopePart], now: datetime
    ) -> None:
        """Deletes limits of a key that is not made. One that stays counts nothing, as no key has the name."""
        for limit_id in limit_ids:
            with suppress(LimitRefusedError, BusError, UnavailableError):
                await self.editor.delete_limit(
                    limit_id, request.caller, "the key was not made", now, key_binding=binding
                )

    def _check_grant(self, request: ApiRequest[Any], key: ApiKey, expires_at: datetime | None) -> None:
        """Raises RequestError: 403, the caller may not give the rights of a key to others, or get its secret."""
        objection = grant_objection(request.caller, key, expires_at)
        if objection is None and key.id != request.caller.id and {"submit", "limits"} & set(key.scopes):
            table = self.editor.limits()
            objection = objection_to_keys(request.caller, chain(table.limits, table.plane_limits.limits.values()))
        if objection is not None:
            raise RequestError(403, "forbidden", objection)

    def _check(self, new_key: CreateKeyRequest, now: datetime) -> None:
        """Raises RequestError: 422, the config does not know an agent or a model, or the key would have ended."""
        if new_key.expires_at is not None and new_key.expires_at <= now:
            raise _invalid("expires_at", "is over; leave it out, or choose a later time")
        for field, names in (("tenants", new_key.tenants), ("agents", new_key.agents), ("models", new_key.models)):
            if any("*" in name for name in names):
                raise _invalid(field, "names have no wildcards; leave it out to allow any")
        agents = self.config.agents
        for name in new_key.agents:
            if name not in agents:
                raise _invalid("agents", f"no agent {name!r} is configured{suggestion(name, agents)}")
        usable = [agent for name, agent in agents.items() if not new_key.agents or name in new_key.agents]
        permitted_models = {model for agent in usable for model in (*agent.chain, *agent.allowed_models)}
        for model in new_key.models:
            if "*" not in permitted_models and model not in permitted_models:
                raise _invalid("models", f"no agent of the key allows {model!r}{suggestion(model, permitted_models)}")

    def _find(self, id_or_name: str) -> ApiKey | PlaneKey:
        """Returns a key: by its id, or by its name if only one has it. Of the plane's, one that has not ended is meant.

        Raises RequestError: 404 or 409.
        """
        log = self._log
        in_file = self.ring.of_file
        if (plane_key := log.keys.get(id_or_name)) is not None:
            return plane_key
        now = utc_now().timestamp()
        of_name = [key for key in log.keys.values() if key.holder.name == id_or_name]
        matches: list[ApiKey | PlaneKey] = [key for key in in_file if key.id == id_or_name]
        matches = matches or [
            *(key for key in in_file if key.name == id_or_name),
            *([key for key in of_name if key.is_active(now)] or of_name),
        ]
        if not matches:
            raise _unknown(id_or_name)
        if len(matches) > 1:
            ids = ", ".join(key.id if isinstance(key, ApiKey) else key.holder.id for key in matches)
            message = f"{len(matches)} keys are named {id_or_name!r}; use one of the ids: {ids}"
            raise RequestError(409, "ambiguous_key", message)
        return matches[0]

    def _plane_key(self, key_id: str) -> PlaneKey:
        """Returns a key of the plane. Raises RequestError: 404, it has gone since it was found."""
        if (key := self._log.keys.get(key_id)) is None:
            raise _unknown(key_id)
        return key

    def _changeable(self, id_or_name: str) -> str:
        """Returns the id of a key of the plane. Raises RequestError: as `_find`, or it is a key of the file."""
        key = self._find(id_or_name)
        if isinstance(key, PlaneKey):
            return key.holder.id
        message = (
            f"the key {key.name!r} is in the file of `request` (BREAKWATER_API_KEYS_FILE), which the API does not "
            f"change: use `breakwater keys revoke {key.id} --file FILE` where the file is made"
        )
        raise RequestError(409, "key_from_file", message)


@contextmanager
def _refusals() -> Generator[None]:
    """Turns the refusal of a change into 409."""
    try:
        yield
    except KeyRefusedError as refused:
        raise _conflict(refused) from None


@contextmanager
def _refusals_of_limit(number: int) -> Generator[None]:
    """Turns the refusal of one of a key's limits into an error that names it."""
    try:
        yield
    except LimitRefusedError as refused:
        path = f"limits.{number}" if refused.field is None else f"limits.{number}.{refused.field}"
        details = [FieldError(path, str(refused))]
        raise RequestError(refused.status, refused.code, f"{path}: {refused}", details) from None


def _conflict(refused: KeyRefusedError) -> RequestError:
    return RequestError(409, refused.code, str(refused))


def _fields(record: KeyRecord, now: datetime) -> dict[str, Any]:
    old = record.old_secret
    return {
        **_rights(record.key),
        "source": "plane",
        "state": record.state(now),
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "old_secret_until": None if old is None or old.valid_until <= now else old.valid_until,
        "change": record.change,
        "changed_by": record.by,
        "changed_at": record.at,
        "reason": record.reason,
    }


def _rights(key: ApiKey) -> dict[str, Any]:
    return key.model_dump(exclude={"sha256"})


def _unknown(id_or_name: str) -> RequestError:
    message = f"there is no API key {id_or_name!r}; `breakwater keys list` lists them"
    return RequestError(404, "unknown_key", message)


def _invalid(field: str, message: str) -> RequestError:
    return RequestError(422, "invalid_request", f"{field}: {message}", [FieldError(path=field, message=message)])
