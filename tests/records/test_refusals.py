"""What held calls back, against rows whose answer was computed beforehand."""

from datetime import timedelta

from breakwater.jobs.contract.execution import Attempt, ErrorInfo
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.time_window import TimeWindow
from breakwater.records import schema
from breakwater.records.figures import RefusalLine, refusals
from tests.records.samples import NOON, RATE_LIMITED, attempt, attempt_row

DAY = timedelta(days=1)
WINDOW = TimeWindow(NOON - DAY, NOON + DAY, 3_600)


def refused(execution_id: str, kind: str, by: str | None = None, **fields: object) -> Attempt:
    error = ErrorInfo.model_validate({"kind": kind, "class": "Refused", "message": "no call was made"})
    more = {"outcome": "short_circuited", "short_circuited": True, "cost": None, "error": error, "refused_by": by}
    return attempt(execution_id, 1, **(more | fields))


ATTEMPTS = [
    # Called, and refused by the provider.
    attempt("a1", 1, cost=0, outcome="error", error=RATE_LIMITED),
    attempt("a2", 1, cost=0, outcome="error", error=RATE_LIMITED, started_at=NOON + timedelta(minutes=3)),
    # Refused by a limit and a budget of the plane: distinguished from the same kind of error above.
    refused("a3", "rate_limit", "provider:openai"),
    refused("a4", "budget_exceeded", "agent:writer/daily"),
    refused("a5", "breaker_open"),
    # No refusals at all.
    attempt("a6", 1),
    attempt("a7", 1, outcome="error", error=RATE_LIMITED.model_copy(update={"kind": "server"})),
    # Another agent, and a time that is no part of the window.
    refused("b1", "breaker_open", agent="reader"),
    refused("b2", "breaker_open", agent="reader", started_at=NOON + DAY),
]


async def test_what_held_calls_back_is_counted_by_what_it_was(analytics: Analytics):
    # Twice, as a redelivered batch is.
    for first in (0, len(ATTEMPTS)):
        stored = [attempt_row(one, first + index) for index, one in enumerate(ATTEMPTS)]
        await analytics.insert(schema.ATTEMPTS, stored)
    own = [
        RefusalLine("writer", "rate_limit", None, True, 2, NOON + timedelta(minutes=3)),
        RefusalLine("writer", "breaker_open", None, False, 1, NOON),
        RefusalLine("writer", "budget_exceeded", "agent:writer/daily", False, 1, NOON),
        RefusalLine("writer", "rate_limit", "provider:openai", False, 1, NOON),
    ]
    others = RefusalLine("reader", "breaker_open", None, False, 1, NOON)
    assert await refusals(analytics, WINDOW) == (own[0], others, *own[1:])
    assert await refusals(analytics, WINDOW, agent="writer") == tuple(own)
    assert await refusals(analytics, WINDOW, agent="nobody") == ()
