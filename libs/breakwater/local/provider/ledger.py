"""The provider's own account of the calls that it received: their outcomes and their costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from breakwater.kernel.types import format_time
from breakwater.local.provider.behaviour import Decision

KEPT_CALLS = 1_000_000
"""Number of the newest calls that are kept; all of them are in the totals."""


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """One call.

    Attributes:
        seq: order of arrival over all models; never repeats.
        number: order of arrival at this model, since the script was set.
        model: its name in the script, else the one in the request; `-` where the request could not be read.
        received_at: RFC 3339, UTC.
        client_request_id: the request's `X-Client-Request-Id`; Breakwater sends the attempt's id.
        status: the HTTP status; None where none was sent (a reset, an abandoned hang) or none has been yet.
        fault: name of the fault; None for an ordinary answer.
        answered_at: time when the answer was produced; None where none was.
        delivered: a whole HTTP answer was handed to a connection that was still open. None while in progress.
        billed: the client pays for it.
        input_tokens: billed tokens, zero when not billed; `cached_tokens` are a part of them.
        output_tokens: billed tokens of the answer.
        cached_tokens: billed tokens that were read from the cache.
        cache_write_tokens: billed tokens that were written to it for five minutes.
        cache_write_1h_tokens: billed tokens that were written to it for an hour.
        reasoning_tokens: billed tokens of the output that were thoughts.
        cost_nano: nano-dollars, zero when not billed.
    """

    seq: int
    number: int
    model: str
    received_at: str
    client_request_id: str | None
    status: int | None = None
    fault: str | None = None
    answered_at: str | None = None
    delivered: bool | None = None
    billed: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    reasoning_tokens: int = 0
    cost_nano: int = 0


@dataclass(slots=True)
class LedgerTotals:
    """Sums over ended calls, and the number in progress. `by_status` has the key `none` for no HTTP answer."""

    calls: int = 0
    in_progress: int = 0
    by_status: dict[str, int] = field(default_factory=dict[str, int])
    billed_calls: int = 0
    cost_nano: int = 0

    def count(self, call: LedgerCall) -> None:
        """Adds a call that was in progress and has ended."""
        status = "none" if call.status is None else str(call.status)
        self.in_progress -= 1
        self.calls += 1
        self.by_status[status] = self.by_status.get(status, 0) + 1
        self.billed_calls += call.billed
        self.cost_nano += call.cost_nano


class CallLedger:
    """Counts calls, and keeps the newest of them.

    Attributes:
        totals: over all models.
        by_model: of each model.
    """

    def __init__(self) -> None:
        self.totals = LedgerTotals()
        self.by_model: dict[str, LedgerTotals] = {}
        self._calls: dict[int, LedgerCall] = {}
        self._numbers: dict[str, int] = {}

    def begin(self, model: str, received_at: str, client_request_id: str | None = None) -> LedgerCall:
        """Enters a request, and numbers it."""
        seq = self.totals.calls + self.totals.in_progress + 1
        number = self._numbers[model] = self._numbers.get(model, 0) + 1
        call = self._calls[seq] = LedgerCall(seq, number, model, received_at, client_request_id)
        for totals in (self.totals, self.by_model.setdefault(model, LedgerTotals())):
            totals.in_progress += 1
        if len(self._calls) > KEPT_CALLS:
            del self._calls[next(iter(self._calls))]
        return call

    def end(self, call: LedgerCall, decision: Decision, *, delivered: bool, share: Fraction) -> None:
        """Ends a call of which a share of the answer was sent."""
        answer = decision.answer if decision.billed else None
        billed = None if answer is None else answer.usage.part(share)
        ended = replace(
            call,
            status=decision.status,
            fault=decision.fault,
            answered_at=None if decision.status is None else format_time(datetime.now(UTC)),
            delivered=delivered,
            billed=billed is not None,
            cost_nano=answer.cost_nano(billed, decision.price) if answer and billed and decision.price else 0,
            **({} if billed is None else asdict(billed)),
        )
        if call.seq in self._calls:
            self._calls[call.seq] = ended
        for totals in (self.totals, self.by_model[call.model]):
            totals.count(ended)

    @property
    def calls(self) -> tuple[LedgerCall, ...]:
        """The calls that are kept, those in progress included, in order of arrival."""
        return tuple(self._calls.values())

    def report(self) -> dict[str, Any]:
        """Returns the answer of `GET /_sim/ledger`."""
        return {"totals": self.totals, "models": self.by_model, "calls": self.calls}

    def restart_numbers(self) -> None:
        """Starts each model's numbers from 1 again, for a new script."""
        self._numbers.clear()
