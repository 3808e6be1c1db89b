"""Breaker state: admission, and saving what the breaker service decided."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from pydantic import TypeAdapter

from breakwater.breakers.contract import BreakerState, CountedUnit
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, CountedFailure, Slice, consecutive_failures
from breakwater.breakers.rules.failure_statistics import breaker_statistics
from breakwater.breakers.rules.shadow import Shadow
from breakwater.jobs.contract.execution import FailureStatistics
from breakwater.kernel.immutable import immutable
from breakwater.kernel.nats.subjects import decode_token
from breakwater.kernel.redis.connection import KEPT_SINCE, Redis, ScriptCommand, StateUnavailableError, scripts_of
from breakwater.kernel.redis.documents import Documents

KEEP_MS = 7 * 24 * 3_600_000
"""A breaker that sees no call for a week expires, which closes it; not one that was isolated."""

KEEP_OF_TASK_MS = 49 * 3_600_000
"""A task's breaker expires after this time, which exceeds the longest cool-down with its jitter."""

INDEX = "bw:breakers"

_FILLED = "bw:breakers:filled"
_FILLING = "bw:breakers:filling"
_SINCES = ("bw:breakers:filled-since", KEPT_SINCE)
_ALIVE = "bw:breakers:alive"

ALIVE_MS = 10_000
"""A breaker service that is silent for longer counts as dead."""

_BATCH = 1_000

_EMPTIED = "Redis was emptied, or has another primary, while the breakers were filled"

UNSAVED = "0"
"""The revision of a breaker that Redis does not have."""

_LUA = scripts_of(__file__)
_READ_LOG = ScriptCommand(_LUA["log"], (_FILLED, *_SINCES), ())


@immutable()
class BreakerAdmitted:
    """The call may be made."""

    probe: bool
    version: int
    became_half_open: bool
    """True if this admission made it half-open: the call is a probe."""


@dataclass(frozen=True, slots=True)
class BreakerRefused:
    """The breaker is open, or another attempt holds the probe, at least until then (ms since the epoch).

    0 where it was isolated: until an operator resets it.
    """

    until_ms: int
    wait_ms: int
    """Time until then, by Redis' clock."""
    probing: bool
    """Another attempt holds the probe: its lease ends then, and its call mostly long before."""
    statistics: FailureStatistics
    """The reason for its opening, and the figures."""
    reason: str
    """The reason with thresholds and names, for operators."""


@dataclass(frozen=True, slots=True)
class LoadedBreaker:
    """A breaker as it was at `now_ms` of Redis' clock. `revision` and `filling` guard its saving."""

    breaker: Breaker
    revision: str
    now_ms: int
    unpublished: str | None
    """The saved transitions that may not be published yet, as JSON."""
    filling: str = ""
    """The mark of `begin_filling` that Redis had; empty if there was none since Redis was emptied."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A breaker to be saved, as it was read and as it is to be, with the transitions to be published, as JSON."""

    key: BreakerKey
    before: LoadedBreaker
    after: Breaker
    unpublished: str | None


def shadows_in(redis: Redis) -> Documents[Shadow]:
    """The shadows of breakers, by the names of their keys."""
    return Documents(redis, "bw:shadow-breaker:", TypeAdapter(Shadow), Shadow(), KEEP_MS)


class Breakers:
    """The breakers of the fleet."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    @staticmethod
    def admit_command(
        key: BreakerKey, attempt_id: str, probe_lease_ms: int | None, caller: str = "", task: str = ""
    ) -> ScriptCommand:
        """Asks for an admission; read its answer with `read_admission`.

        Args:
            key: the breaker.
            attempt_id: the call.
            probe_lease_ms: of a probe; None only looks.
            caller: as `breakers.rules.caller_of` names it; empty where that is not known.
            task: as `breakers.rules.task_of` names it, where it has a breaker of its own.
        """
        lease = "" if probe_lease_ms is None else probe_lease_ms
        return ScriptCommand(_LUA["admit"], [_redis_key(key)], [attempt_id, lease, caller, task])

    @staticmethod
    def read_admission(answer: Sequence[object]) -> BreakerAdmitted | BreakerRefused:
        """Reads the answer to `admit_command`."""
        verdict, until_ms, version, changed, wait_ms, *why = answer
        if verdict in {"refused", "probing"}:
            reason, in_a_row, total, errors = (text or "" for text in cast(list[str | None], why[0]))
            statistics = breaker_statistics(
                reason,
                consecutive_failures=int(in_a_row or 0),
                total_failures=int(total or 0),
                unique_errors=len(errors.split(",")) if errors else 0,
            )
            waits = int(cast(int, until_ms)), int(cast(int, wait_ms))
            return BreakerRefused(*waits, verdict == "probing", statistics, reason)
        return BreakerAdmitted(verdict == "probe", int(cast(int, version)), bool(changed))

    @staticmethod
    def return_probe_command(key: BreakerKey, attempt_id: str) -> ScriptCommand:
        """Releases the probe if this attempt holds it; answers nothing."""
        return ScriptCommand(_LUA["return_probe"], [_redis_key(key)], [attempt_id])

    @staticmethod
    def succeeded_command(key: BreakerKey, version: int, sequence: int, caller: str = "") -> ScriptCommand:
        """Notes the success of a call that a version of a breaker let pass, by the sequence of its event."""
        return ScriptCommand(_LUA["succeeded"], [_redis_key(key)], [version, sequence, caller, KEEP_MS])

    async def load(self, keys: Sequence[BreakerKey]) -> list[LoadedBreaker]:
        """Reads breakers in one round trip. Raises StateUnavailableError."""
        return [_read_loaded(*answer) for answer in await self._redis.run([_load_command(key) for key in keys])]

    async def load_with_log(self, keys: Sequence[BreakerKey]) -> tuple[str | None, list[LoadedBreaker]]:
        """The answers of `filled_from` and `load`, in one round trip. Raises StateUnavailableError."""
        # The log comes last: were it read before Redis is emptied and a breaker after it, `save` would see no change.
        *answers, log = await self._redis.run(
            [*map(_load_command, keys), ScriptCommand(_LUA["log"], [_FILLED, *_SINCES], [])]
        )
        return cast(str | None, log), [_read_loaded(*answer) for answer in answers]

    async def save(self, changes: Sequence[Saving]) -> list[bool]:
        """Saves breakers in one round trip. False for each that was changed since it was read: decide again.

        Also False if Redis was emptied meanwhile: a breaker that begins anew has versions that the log already has.

        Raises:
            StateUnavailableError: they may or may not be saved; read them again to find out.
        """
        if not changes:
            return []
        commands: list[ScriptCommand] = []
        for change in changes:
            fields = _fields(change.after) | {"unpublished": change.unpublished or ""}
            flat = [part for pair in fields.items() for part in pair]
            keep_ms = 0 if change.after.state == "isolated" else KEEP_MS if change.key.task is None else KEEP_OF_TASK_MS
            commands.append(
                ScriptCommand(
                    _LUA["save"],
                    [_redis_key(change.key), _FILLING],
                    [change.before.revision, change.before.filling, keep_ms, *flat],
                )
            )
        # Listed before the save, each time: the list may name too many breakers, but after a crash it must lack none.
        of_fleet = [change for change in changes if change.key.task is None]
        listed = [ScriptCommand(_LUA["list"], [INDEX], [change.key.name for change in of_fleet])] if of_fleet else []
        saved = [bool(answer) for answer in (await self._redis.run([*listed, *commands]))[len(listed) :]]
        new_names = [change.key.name for change in of_fleet if change.before.revision == UNSAVED]
        if new_names:
            # Listed again: a reader that did not find the breaker yet may have removed it from the list.
            await self._redis.client.sadd(INDEX, *new_names)
        return saved

    async def all(self) -> list[tuple[BreakerKey, LoadedBreaker]]:
        """All known breakers, by name. Raises StateUnavailableError."""
        listed = cast(AsyncIterator[str], self._redis.client.sscan_iter(INDEX, count=_BATCH))
        names = sorted({name async for name in listed})
        keys = [_key(name) for name in names]
        loaded_breakers: list[tuple[BreakerKey, LoadedBreaker]] = []
        for begin in range(0, len(keys), _BATCH):
            batch = keys[begin : begin + _BATCH]
            loaded_breakers += zip(batch, await self.load(batch), strict=True)
        forgotten = [key.name for key, loaded in loaded_breakers if loaded.revision == UNSAVED]
        if forgotten:
            await self._redis.client.srem(INDEX, *forgotten)
            # A breaker that was made meanwhile belongs in the list.
            lost = [_key(name) for name in forgotten]
            again = [
                key.name
                for key, reloaded in zip(lost, await self.load(lost), strict=True)
                if reloaded.revision != UNSAVED
            ]
            if again:
                await self._redis.client.sadd(INDEX, *again)
        return [(key, loaded) for key, loaded in loaded_breakers if loaded.revision != UNSAVED]

    async def filled_from(self) -> str | None:
        """The log from which the breakers were derived; None if they are lost or may lag.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        [log] = await self._redis.run([_READ_LOG])
        return cast(str | None, log)

    async def begin_filling(self) -> str:
        """A mark that is lost with all that is filled after it. Raises StateUnavailableError."""
        keys = [_FILLING, _FILLED, *_SINCES]
        [filling] = await self._redis.run([ScriptCommand(_LUA["begin_filling"], keys, [secrets.token_hex(8)])])
        return str(filling)

    async def require_filling(self, filling: str) -> None:
        """Raises StateUnavailableError if Redis does not answer, or has lost the filling with this mark: fill again."""
        if await self._redis.client.get(_FILLING) != filling:
            raise StateUnavailableError(_EMPTIED)

    async def mark_filled(self, log: str, filling: str | None = None) -> None:
        """Records that the breakers are derived from that log.

        Args:
            log: the log's identity.
            filling: the mark of `begin_filling`; None to mark them filled in any case.

        Raises:
            StateUnavailableError: Redis does not answer, or has lost the filling: fill again.
        """
        filling = filling or await self.begin_filling()
        keys = [_FILLED, _FILLING, *_SINCES]
        [marked] = await self._redis.run([ScriptCommand(_LUA["mark_filled"], keys, [log, filling])])
        if not marked:
            raise StateUnavailableError(_EMPTIED)

    async def takes_turn(self, key: BreakerKey, every_s: float) -> bool:
        """Returns True to one process of the fleet in each period: it may probe the breaker.

        Raises:
            StateUnavailableError: the turn may be taken.
        """
        name = f"bw:breakers:probed:{key.name}"
        return bool(await self._redis.client.set(name, 1, px=round(every_s * 1000), nx=True))

    async def beat(self) -> None:
        """Reports that a breaker service is alive, for the next `ALIVE_MS`. Raises StateUnavailableError."""
        await self._redis.command("SET", _ALIVE, 1, "PX", ALIVE_MS)

    async def alive(self) -> bool:
        """Returns True if a breaker service runs, and derives breakers from the log. Raises StateUnavailableError."""
        return bool(await self._redis.command("EXISTS", _ALIVE))

    async def mark_published(self, key: BreakerKey, transition: str) -> None:
        """Records that a transition has been published, unless another one has taken its place meanwhile.

        Raises:
            StateUnavailableError: it may be published once more, which changes nothing.
        """
        await self._redis.run([ScriptCommand(_LUA["published"], [_redis_key(key)], [transition])])


@lru_cache(maxsize=4096)
def _redis_key(key: BreakerKey) -> str:
    return f"bw:breaker:{key.name}"


def _key(name: str) -> BreakerKey:
    agent, _, model = name.partition("/")
    return BreakerKey(decode_token(agent), decode_token(model))


_NUMBERS = (
    "forgotten",
    "last_success",
    "open_until_ms",
    "openings",
    "probe_until_ms",
    "version",
    "closed_version",
    "closed_at",
    "total_failures",
    "last_failure_ms",
    "last_success_ms",
    "limited_since_ms",
    "changed_ms",
)


def _fields(breaker: Breaker) -> dict[str, str | int]:
    numbers: dict[str, str | int] = {name: getattr(breaker, name) for name in _NUMBERS}
    return numbers | {
        "state": breaker.state,
        "count": breaker.count,
        "waits": int(breaker.waits),
        "probe": breaker.probe or "",
        "reason": breaker.reason,
        "failures": json.dumps([_failure_fields(failure) for failure in breaker.failures]),
        "successes": " ".join(f"{name}={sequence}" for name, sequence in breaker.successes),
        "counts_from": breaker.counts_from,
        "task": breaker.task,
        "callers": " ".join(f"{name}={at_ms}" for name, at_ms in breaker.callers),
        "alone": breaker.alone,
        "alone_name": breaker.alone_name,
        "closed_for": breaker.closed_for,
        "probed_by": breaker.probed_by,
        "errors_seen": ",".join(breaker.errors_seen),
        "consecutive_failures": consecutive_failures(breaker),  # for refusals
        "slices": json.dumps(
            [[slice_.number, slice_.calls, slice_.failed, slice_.caller] for slice_ in breaker.slices]
        ),
        "counted": json.dumps(breaker.counted),
    }


_TRIED_AGAIN = "again"


def _failure_fields(failure: CountedFailure) -> tuple[int, int, str, str, str]:
    # Three values in one: workers of an earlier version, which run next to newer ones, read five values.
    job = f"{failure.job} {failure.task} {_TRIED_AGAIN if failure.tried_again else ''}".rstrip()
    return failure.sequence, failure.at_ms, failure.error, job, failure.caller


def _read_failure(sequence: int, at_ms: int, error: str = "", job: str = "", caller: str = "") -> CountedFailure:
    job, _, task_and_mark = job.partition(" ")
    task, _, mark = task_and_mark.partition(" ")
    return CountedFailure(sequence, at_ms, error, job, caller, task, mark == _TRIED_AGAIN)


def _load_command(key: BreakerKey) -> ScriptCommand:
    return ScriptCommand(_LUA["load"], [_redis_key(key), _FILLING], [])


def _read_loaded(now_ms: int, filling: str, flat: Sequence[str]) -> LoadedBreaker:
    """Reads the answer of a `_load_command`."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    errors_seen = fields.get("errors_seen")
    callers, successes = (
        tuple(
            (name, int(number)) for name, _, number in (entry.partition("=") for entry in fields.get(field, "").split())
        )
        for field in ("callers", "successes")
    )
    breaker = Breaker(
        state=cast(BreakerState, fields.get("state", "closed")),
        count=cast(CountedUnit, fields.get("count", "jobs")),
        waits=fields.get("waits") == "1",
        probe=fields.get("probe") or None,
        reason=fields.get("reason", ""),
        failures=tuple(_read_failure(*values) for values in json.loads(fields.get("failures", "[]"))),
        errors_seen=tuple(errors_seen.split(",")) if errors_seen else (),
        slices=tuple(Slice(*values) for values in json.loads(fields.get("slices", "[]"))),
        counted=tuple(json.loads(fields.get("counted", "[]"))),
        callers=callers,
        successes=tuple(sorted(successes)),
        counts_from=int(fields.get("counts_from", fields.get("version", 0))),
        alone=fields.get("alone", ""),
        alone_name=fields.get("alone_name", ""),
        closed_for=fields.get("closed_for", ""),
        task=fields.get("task", ""),
        probed_by=fields.get("probed_by", ""),
        **{name: int(fields.get(name, 0)) for name in _NUMBERS},
    )
    return LoadedBreaker(breaker, fields.get("revision", UNSAVED), now_ms, fields.get("unpublished") or None, filling)
