"""The failure statistics of a breaker that refuses calls, for results."""

from __future__ import annotations

from breakwater.jobs.contract.execution import FailureStatistics


def breaker_statistics(
    reason: str, *, consecutive_failures: int, total_failures: int, unique_errors: int
) -> FailureStatistics:
    """Returns the statistics of a breaker that refuses calls; `reason` is the stored reason for its opening."""
    # Readers of results must not see who isolated the breaker and why.
    isolated = reason.startswith("isolated by ")
    return FailureStatistics(
        consecutive_failures=consecutive_failures,
        total_failures=total_failures,
        unique_errors=unique_errors,
        reason="isolated by an operator" if isolated else without_threshold(reason),
    )


def without_threshold(reason: str) -> str:
    """Returns the reason of a trip without the threshold of its rule."""
    return reason.partition(" (threshold: ")[0]
