"""What executions can be filtered by, as far as there are any that have it."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.analytics.client import Analytics
from breakwater.analytics.figures import SETTINGS
from breakwater.analytics.window import Window

MOST_FACETS = 50

_FACETS = ("agent", "model", "tenant", "reason", "error_kind")
FACETS = f"""
SELECT agent, ifNull(chosen_model, requested_model) AS model, tenant, reason, error_kind, count() AS executions,
    {", ".join(f"grouping({name}) AS by_{name}" for name in _FACETS)}
FROM executions FINAL
PREWHERE completed_at >= fromUnixTimestamp64Milli({{start_ms:Int64}})
    AND completed_at < fromUnixTimestamp64Milli({{end_ms:Int64}})
GROUP BY GROUPING SETS ({", ".join(f"({name})" for name in _FACETS)})
{SETTINGS}"""  # noqa: S608  of constants


@dataclass(frozen=True, slots=True)
class Facets:
    """What can be asked for: each value with how many executions have it, the most frequent first, at most 50."""

    agents: tuple[tuple[str, int], ...]
    models: tuple[tuple[str, int], ...]
    tenants: tuple[tuple[str, int], ...]
    reasons: tuple[tuple[str, int], ...]
    error_kinds: tuple[tuple[str, int], ...]


async def facets(analytics: Analytics, window: Window) -> Facets:
    """What executions of a window have, dry runs included. Raises as `Analytics.query` does."""
    parameters = {"start_ms": window.start_ms, "end_ms": window.end_ms}
    rows = list((await analytics.query(FACETS, parameters)).named())

    def seen(name: str) -> tuple[tuple[str, int], ...]:
        # `grouping` is 0 for the one column that a row is a group of.
        found = [(row[name], row["executions"]) for row in rows if row[f"by_{name}"] == 0 and row[name] is not None]
        return tuple(sorted(found, key=lambda one: (-one[1], one[0]))[:MOST_FACETS])

    return Facets(*(seen(name) for name in _FACETS))
