"""`/api/v1/limits`: all limits with what of them is used, and those that the API sets, deletes and raises."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from breakwater.identity.operations import NATS_UNAVAILABLE, REDIS_UNAVAILABLE, ApiRequest, operation, utc_now
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.types import time_from_ms
from breakwater.kernel.validation import FieldError
from breakwater.limits.contract import (
    DeleteLimitRequest,
    LimitEvent,
    LimitList,
    LimitQuery,
    LimitRaise,
    LimitSettings,
    LimitUnit,
    LimitUseQuery,
    ListedLimit,
    RaiseLimitRequest,
    SetLimitRequest,
    WaitingCall,
)
from breakwater.limits.limit_editor import LimitEditor, unknown_limit
from breakwater.limits.rules.budget import Period, periods_at
from breakwater.limits.rules.limit import Limit, amount_of, amount_text
from breakwater.limits.rules.limit_changes import LimitRefusedError, event_of, raised_scope
from breakwater.limits.rules.scopes import key_of
from breakwater.limits.store.budgets import NotFilledError

_WRONG = "The request is invalid (`invalid_request`), with the field that is wrong"
_SPENT = "or a limit that refuses is below what is spent in the present period, and `stop` is not set (`below_spent`)"
_NO_LIMIT = "There is no such limit (`unknown_limit`)."
BOUND = "The caller lacks the scope, or is bound to a team or a user and this is not a part of it (`forbidden`)."
_OF_CONFIG = "The limit is in the config (`limit_from_config`)"
MEANWHILE = "another caller changed the limit at this moment (`limit_changed`)"
UNSURE = f"{NATS_UNAVAILABLE} {REDIS_UNAVAILABLE} It may have been done; repeating the request is safe."


MAX_WAITING = 20
"""Number of waiting calls that are shown of a limit."""


@dataclass(slots=True)
class LimitRoutes:
    """The limits."""

    editor: LimitEditor
    list_tried: Callable[[Callable[[Limit], bool]], Awaitable[tuple[ListedLimit, ...]]]
    """Lists the limits that are only tried and that a condition holds for."""
    _ids: tuple[str, Sequence[str]] = field(default=("", ()), init=False)
    """The ids of the limits that the plane keeps, in order, with the version that they are of."""

    @operation(
        "GET",
        "/api/v1/limits",
        tag="limits",
        summary="All limits, with what of them is used",
        result="A page of them.",
        errors={503: f"{REDIS_UNAVAILABLE} The limits may not be read yet."},
    )
    async def list_limits(self, request: ApiRequest[LimitQuery]) -> LimitList:
        """Lists the limits of the config, then those that the plane keeps, and those that are only tried."""
        self._check_read()
        query = request.input
        page: list[Limit] = []
        for limit in self._limits_after(query.after):
            if _is_wanted(limit, query):
                page.append(limit)
                if len(page) > query.limit:
                    break
        listed = await self._listed([(limit, limit.key if limit.is_named else None) for limit in page[: query.limit]])
        tried = () if query.after else await self.list_tried(lambda limit: _is_wanted(limit, query))
        return LimitList(limits=listed, tried=tried, continue_after=listed[-1].id if len(page) > query.limit else None)

    @operation(
        "GET",
        "/api/v1/limits/{limit_id}",
        tag="limits",
        summary="One limit, with what of it is used",
        result="The limit.",
        errors={404: _NO_LIMIT, 422: f"{_WRONG}.", 503: REDIS_UNAVAILABLE},
    )
    async def show_limit(self, request: ApiRequest[LimitUseQuery]) -> ListedLimit:
        """Shows a limit; of one on each name by itself, for one name."""
        with refusals_as_errors():
            limit = self._find(request.path["limit_id"])
            is_of_one = limit.is_named or request.input.scope is not None
            key = key_of(raised_scope(limit, request.input.scope)) if is_of_one else None
        [listed] = await self._listed([(limit, key)])
        if not listed.waiting or key is None:
            return listed
        queue = await self.editor.counters.queue_of_rate(limit, key, MAX_WAITING)
        calls = (WaitingCall(key=call.key, tenant=call.tenant, since=time_from_ms(call.since_ms)) for call in queue)
        return listed.model_copy(update={"waiting_calls": tuple(calls)})

    @operation(
        "PUT",
        "/api/v1/limits/{limit_id}",
        tag="limits",
        summary="Make or change a limit",
        description="It is in force in every process immediately. The id is chosen by the caller; setting a limit as "
        "it is changes nothing.",
        result="The limit.",
        errors={
            403: BOUND,
            409: f"{_OF_CONFIG}; another limit is on the same scope, unit and window (`limit_exists`); {MEANWHILE}; "
            "there are 30,000 limits (`too_many_limits`), or limits of 20 combinations of kinds of scopes and windows "
            "(`too_many_dimensions`).",
            422: f"{_WRONG}: a scope that can't be, an unknown agent, model or provider, too large an amount, an end "
            f"that is over, or what can't be enforced; {_SPENT}.",
            503: UNSURE,
        },
    )
    async def set_limit(self, request: ApiRequest[SetLimitRequest]) -> ListedLimit:
        """Makes or changes a limit."""
        limit_id = request.path["limit_id"]
        fields = request.input.model_dump(include=set(LimitSettings.model_fields))
        with refusals_as_errors():
            record = await self.editor.set_limit(
                limit_id,
                LimitSettings.model_validate(fields),
                request.caller,
                request.why or None,
                utc_now(),
                stop=request.input.stop,
            )
            limit = self._find(limit_id)
        request.log("limit_set", limit=limit_id, scope=limit.scope, change=record.change)
        return (await self._listed([(limit, limit.key if limit.is_named else None)]))[0]

    @operation(
        "DELETE",
        "/api/v1/limits/{limit_id}",
        tag="limits",
        summary="Delete a limit",
        result="The event of that.",
        errors={403: BOUND, 404: _NO_LIMIT, 409: f"{_OF_CONFIG}, or {MEANWHILE}.", 503: UNSURE},
    )
    async def delete_limit(self, request: ApiRequest[DeleteLimitRequest]) -> LimitEvent:
        """Deletes a limit."""
        limit_id = request.path["limit_id"]
        with refusals_as_errors():
            self._check_read()
            record = await self.editor.delete_limit(limit_id, request.caller, request.why or None, utc_now())
        scope = "" if record.before is None else record.before.scope
        request.log("limit_deleted", limit=limit_id, scope=scope)
        return event_of(record, scope)

    @operation(
        "POST",
        "/api/v1/limits/{limit_id}/raise",
        tag="limits",
        summary="Raise a limit for some time",
        description="Also one of the config. The amount of the limit itself ends an earlier raise.",
        result="The limit, as it is raised now.",
        errors={
            403: BOUND,
            404: _NO_LIMIT,
            409: "The limit is on tasks or jobs (`not_raisable`), a more particular limit counts for the scope "
            f"(`limit_not_effective`), {MEANWHILE}, or the limit is raised for 1,000 names (`too_many_raises`).",
            422: f"{_WRONG}, or the amount is below the limit itself (`below_limit`).",
            503: f"{UNSURE} Or the counters are being rebuilt (`not_filled`).",
        },
    )
    async def raise_limit(self, request: ApiRequest[RaiseLimitRequest]) -> ListedLimit:
        """Raises a limit, or ends its raise."""
        limit_id = request.path["limit_id"]
        stated = request.input
        await self.editor.log.catch_up()
        with refusals_as_errors():
            limit = self._find(limit_id)
            parts = raised_scope(limit, stated.scope)
            raised = await self.editor.raise_limit(
                limit, parts, stated.amount, stated.until, request.caller, request.why, utc_now()
            )
        request.log("limit_raised", limit=limit_id, amount=stated.amount, changed=raised is not None)
        return (await self._listed([(self._find(limit_id), key_of(parts))]))[0]

    def _find(self, limit_id: str) -> Limit:
        if (limit := self.editor.find(limit_id)) is None:
            self._check_read()
            raise unknown_limit(limit_id)
        return limit

    def _check_read(self) -> None:
        """Raises RequestError: 503, not all limits are known yet."""
        if not self.editor.log.filled.is_set():
            raise unavailable("unavailable", "the limits can't be read yet; retry")

    def _limits_after(self, after: str | None) -> Iterable[Limit]:
        """Yields the limits in their order, from behind one of them."""
        table = self.editor.limits()
        ids_of_config = [limit.id for limit in table.limits]
        begin = 0
        if after in ids_of_config:
            yield from table.limits[ids_of_config.index(after) + 1 :]
        elif after is None:
            yield from table.limits
        plane_limits = table.plane_limits.limits
        if self._ids[0] != table.version or len(self._ids[1]) != len(plane_limits):
            self._ids = table.version, sorted(plane_limits)
        ids = self._ids[1]
        if after is not None and after not in ids_of_config:
            begin = bisect_right(ids, after)
        for limit_id in ids[begin:]:
            if (limit := plane_limits.get(limit_id)) is not None:
                yield limit

    async def _listed(self, limits: Sequence[tuple[Limit, str | None]]) -> tuple[ListedLimit, ...]:
        """Returns limits as the contract has them, each with its use by a scope; None for each by itself."""
        table = self.editor.limits()
        periods = periods_at(utc_now(), self.editor.counters.zone)
        counted: dict[int, tuple[Period, str, LimitUnit]] = {}
        rates: dict[int, tuple[Limit, str]] = {}
        for number, (limit, key) in enumerate(limits):
            if key is not None and (dimension := limit.calendar_dimension) is not None:
                counted[number] = periods.of(dimension.window), key, limit.unit
            elif key is not None and limit.is_rate:
                rates[number] = limit, key
        counters = self.editor.counters
        uses = dict(zip(counted, await counters.use(list(counted.values())), strict=True))
        used_of_rates = await counters.use_of_rates(list(rates.values()))
        uses |= {number: (used, None) for number, used in zip(rates, used_of_rates, strict=True)}
        waiting = dict(zip(rates, await counters.queues_of_rates(list(rates.values())), strict=True))
        listed: list[ListedLimit] = []
        for number, (limit, key) in enumerate(limits):
            limit_raise = None if key is None else table.plane_limits.raise_of(limit, key)
            dimension = limit.calendar_dimension
            period = None if dimension is None else periods.of(dimension.window)
            listed_limit = self._with_use(limit, uses.get(number), limit_raise, period)
            listed.append(listed_limit.model_copy(update={"waiting": waiting.get(number)}))
        return tuple(listed)

    def _with_use(
        self, limit: Limit, use: tuple[int, int | None] | None, limit_raise: LimitRaise | None, period: Period | None
    ) -> ListedLimit:
        table = self.editor.limits()
        amount = limit.amount if limit_raise is None else amount_of(limit.unit, limit_raise.amount)
        state = self.editor.log.states.get(limit.id)
        record = None if state is None or state.limit is None else state.record
        same = None if record is None else table.limit_like(limit)

        used, reserved = use or (None, None)

        def text(figure: int) -> str:
            return amount_text(limit.unit, figure)

        return ListedLimit(
            id=limit.id,
            source="config" if record is None else "api",
            scope=limit.scope,
            unit=limit.unit,
            amount=text(amount),
            **cast(dict[str, Any], {limit.unit: limit.amount}),
            per=limit.window,
            action=limit.action,
            thresholds=limit.thresholds,
            until=None if limit.until_ms is None else time_from_ms(limit.until_ms),
            used=None if used is None else text(used),
            reserved=None if reserved is None else text(reserved),
            remaining=None if used is None else text(max(0, amount - used - (reserved or 0))),
            resets_at=None if period is None else period.resets_at,
            raised=limit_raise,
            shadowed_by=None if same is None or same.id == limit.id else same.id,
            by=None if record is None else record.by,
            reason=None if record is None else record.reason,
            at=None if record is None else record.at,
        )


def _is_wanted(limit: Limit, query: LimitQuery) -> bool:
    kinds = {"plane" if part.kind == "global" else part.kind.partition(":")[0] for part in limit.parts}
    if query.kind is not None and query.kind not in kinds:
        return False
    return query.scope is None or query.scope == limit.scope or query.scope in map(str, limit.parts)


@contextmanager
def refusals_as_errors(fields: Mapping[str, str] = MappingProxyType({})) -> Generator[None]:
    """Turns refusals into errors of the API. `fields` has the names of fields that the request names otherwise."""
    try:
        yield
    except LimitRefusedError as refused:
        field_name = None if refused.field is None else fields.get(refused.field, refused.field)
        details = [] if field_name is None else [FieldError(path=field_name, message=str(refused))]
        path = f"{field_name}: " if field_name and refused.code == "invalid_request" else ""
        raise RequestError(refused.status, refused.code, f"{path}{refused}", details) from None
    except NotFilledError:
        message = "the counters are being rebuilt from the record; retry in a moment"
        raise unavailable("not_filled", message) from None
    except (AnalyticsUnavailableError, QueryError) as error:
        message = f"what is spent can't be read now: {error}. Retry, or set `stop` if the limit may be below that"
        raise unavailable("unavailable", message) from error
