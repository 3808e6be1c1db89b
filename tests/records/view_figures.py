"""What the views must return, worked out in Python from the messages that were stored."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar

from breakwater.jobs.contract.execution import Attempt, Execution

T = TypeVar("T")
Number = TypeVar("Number", int, float)
Figures = dict[tuple[Any, ...], dict[str, Any]]
"""By what a view groups by, in the order of its columns."""


def groups(things: Iterable[T], key: Callable[[T], tuple[Hashable, ...]]) -> dict[tuple[Any, ...], list[T]]:
    found: dict[tuple[Any, ...], list[T]] = {}
    for thing in things:
        found.setdefault(key(thing), []).append(thing)
    return found


def minute(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


def usd(nano: int | None) -> Decimal | None:
    return None if nano is None else Decimal(nano).scaleb(-9)


def known(amounts: Iterable[int | None]) -> Decimal | None:
    """The sum of what is known; None where nothing is."""
    found = [amount for amount in amounts if amount is not None]
    return usd(sum(found)) if found else None


def known_count(amounts: Iterable[int | None]) -> int | None:
    found = [amount for amount in amounts if amount is not None]
    return sum(found) if found else None


def quantile(level: float, values: Sequence[Number]) -> Number | None:
    """As ClickHouse's `quantileExact`."""
    return sorted(values)[int(level * len(values))] if values else None


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def counted(executions: Iterable[Execution]) -> list[Execution]:
    return [one for one in executions if not one.dry_run]


def called(attempts: Iterable[Attempt]) -> list[Attempt]:
    return [one for one in attempts if not one.short_circuited]


def fallback_costs(executions: Iterable[Execution]) -> list[tuple[int, int]]:
    return [costs for one in executions if (costs := one.fallback_costs) is not None]


def executions_per_minute(executions: Iterable[Execution]) -> Figures:
    found = groups(counted(executions), lambda one: (one.agent, minute(one.completed_at)))
    return {
        key: {
            "executions": len(all_),
            "succeeded": sum(one.status == "succeeded" for one in all_),
            "dead_lettered": sum(one.status == "dead_lettered" for one in all_),
            "attempts": sum(one.attempts_count for one in all_),
            "tokens": sum(one.total_tokens for one in all_),
            "cost": known(one.total_cost for one in all_),
            "wasted_cost": known(one.wasted_cost for one in all_),
            "executions_of_unknown_cost": sum(one.cost_basis == "unknown" for one in all_),
            "average_duration_ms": sum(one.duration_ms for one in all_) / len(all_),
            "p50_ms": quantile(0.5, [one.duration_ms for one in all_]),
            "p95_ms": quantile(0.95, [one.duration_ms for one in all_]),
            "cache_hits": sum(one.cache_hit for one in all_),
            "answered": sum(one.is_answered_by_model for one in all_),
            "fell_back": sum(one.fell_back for one in all_),
            "fallback_cost": known(cost for cost, _ in fallback_costs(all_)),
            "requested_model_cost": known(cost for _, cost in fallback_costs(all_)),
        }
        for key, all_ in found.items()
    }


def attempts_per_minute(attempts: Iterable[Attempt]) -> Figures:
    found = groups(attempts, lambda one: (minute(one.started_at), one.agent, one.provider, one.model))
    figures: Figures = {}
    for key, all_ in found.items():
        calls = called(all_)
        failed = [one for one in calls if one.outcome != "success"]
        times = [one.duration_ms for one in calls]
        begun = [one.first_token_ms for one in all_ if one.first_token_ms is not None]
        figures[key] = {
            "calls": len(calls),
            "succeeded": len(calls) - len(failed),
            "failed": len(failed),
            "short_circuits": len(all_) - len(calls),
            "retries": sum(one.cause == "retry" for one in all_),
            "fallbacks": sum(one.cause == "fallback" for one in all_),
            "input_tokens": known_count(one.input_tokens for one in all_),
            "output_tokens": known_count(one.output_tokens for one in all_),
            "cached_tokens": known_count(one.cached_tokens for one in all_),
            "spend": known(one.cost for one in calls) if calls else 0,
            "wasted": known(one.cost for one in failed) if failed else 0,
            "unknown_costs": sum(one.cost is None for one in calls),
            "p50_ms": quantile(0.5, times),
            "p95_ms": quantile(0.95, times),
            "p99_ms": quantile(0.99, times),
            "streams": len(begun),
            "first_token_p50_ms": quantile(0.5, begun),
            "first_token_p95_ms": quantile(0.95, begun),
            "p50_tokens_per_s": quantile(0.5, [one.tokens_per_s for one in all_ if one.tokens_per_s is not None]),
        }
    return figures


def errors_per_minute(attempts: Iterable[Attempt]) -> Figures:
    failed = [one for one in attempts if one.outcome != "success"]

    def key(one: Attempt) -> tuple[Hashable, ...]:
        kind = "unknown" if one.error is None else one.error.kind
        return (minute(one.started_at), one.agent, one.provider, one.model, kind)

    figures: Figures = {}
    for names, all_ in groups(failed, key).items():
        reported = [one for one in all_ if one.error is not None]
        latest = max(reported, key=lambda one: (one.started_at, one.attempt_id), default=None)
        figures[names] = {
            "errors": len(all_),
            "cost": known(one.cost for one in all_),
            "latest_message": None if latest is None or latest.error is None else latest.error.message,
        }
    return figures


def waste_per_minute(executions: Iterable[Execution]) -> Figures:
    wasted = [(one, cause) for one in counted(executions) for cause in one.wasted_by_cause]
    found = groups(wasted, lambda pair: (minute(pair[0].completed_at), pair[0].agent, pair[1]))
    return {
        key: {"cost": usd(sum(one.wasted_by_cause[cause] for one, cause in all_)), "executions": len(all_)}
        for key, all_ in found.items()
    }


def retries_per_day(executions: Iterable[Execution]) -> Figures:
    def those(all_: Iterable[Execution], cause: str) -> list[Execution]:
        return [one for one in all_ if any(tried.cause == cause for tried in called(one.attempts))]

    def cost(all_: Iterable[Execution], cause: str) -> Decimal | None:
        return usd(sum(t.cost or 0 for one in all_ for t in called(one.attempts) if t.cause == cause))

    figures: Figures = {}
    for key, all_ in groups(counted(executions), lambda one: (one.completed_at.date(), one.agent)).items():
        retried, fell_back = those(all_, "retry"), those(all_, "fallback")
        saved, saved_by_fallback = (sum(one.status == "succeeded" for one in some) for some in (retried, fell_back))
        figures[key] = {
            "executions": len(all_),
            "retried": len(retried),
            "saved": saved,
            "retry_success_rate": share(saved, len(retried)),
            "cost_of_retries": cost(all_, "retry"),
            "fell_back": len(fell_back),
            "saved_by_fallback": saved_by_fallback,
            "fallback_success_rate": share(saved_by_fallback, len(fell_back)),
            "cost_of_fallbacks": cost(all_, "fallback"),
        }
    return figures


def provider_health(attempts: Iterable[Attempt]) -> Figures:
    def kinds(all_: Iterable[Attempt], *wanted: str) -> int:
        return sum(one.error is not None and one.error.kind in wanted for one in all_)

    return {
        key: {
            "calls": len(all_),
            "availability": any(one.outcome == "success" for one in all_)
            and 1 - kinds(all_, "server", "timeout", "network") / len(all_),
            "rate_limited": kinds(all_, "rate_limit"),
            "server_errors": kinds(all_, "server"),
            "timeouts": kinds(all_, "timeout"),
            "p95_ms": quantile(0.95, [one.duration_ms for one in all_]),
        }
        for key, all_ in groups(
            called(attempts), lambda one: (minute(one.started_at), one.provider, one.model, one.deployment)
        ).items()
    }


def estimate_accuracy(attempts: Iterable[Attempt]) -> Figures:
    telling = [
        (one, one.cost, one.reserved)
        for one in attempts
        if one.outcome == "success" and one.cost_basis == "billed"
        if one.cost is not None and one.reserved is not None
    ]
    figures: Figures = {}
    for key, all_ in groups(
        telling, lambda reported: (reported[0].started_at.date(), reported[0].agent, reported[0].model)
    ).items():
        cost, reserved = sum(cost for _, cost, _ in all_), sum(reserved for _, _, reserved in all_)
        figures[key] = {
            "calls": len(all_),
            "reserved": usd(reserved),
            "cost": usd(cost),
            "ratio": share(cost, reserved),
            "exceeded": sum(cost > reserved for _, cost, reserved in all_),
        }
    return figures


def spend_per_hour(attempts: Iterable[Attempt]) -> Figures:
    def key(one: Attempt) -> tuple[Hashable, ...]:
        return (minute(one.reserved_at or one.started_at).replace(minute=0), one.agent, one.tenant, one.model)

    return {
        names: {"spend": known(one.cost for one in all_), "calls": len(all_)}
        for names, all_ in groups(called(attempts), key).items()
    }


def cost_and_usage(attempts: Iterable[Attempt]) -> Figures:
    def key(one: Attempt) -> tuple[Hashable, ...]:
        charged_at = minute(one.reserved_at or one.started_at)
        quarter = charged_at.replace(minute=charged_at.minute // 15 * 15)
        names = (one.provider, one.agent, one.tenant, one.model, one.submitted_by, one.user, one.team)
        return (quarter, *names, one.deployment, one.provider_key)

    figures: Figures = {}
    for names, all_ in groups(called(attempts), key).items():
        start, provider, agent, tenant, model, *_ = names
        month = start.replace(day=1, hour=0, minute=0)
        tokens = [one for attempt in all_ for one in (attempt.input_tokens, attempt.output_tokens)]
        failed = [one for one in all_ if one.outcome != "success"]
        cost, quantity = known(one.cost for one in all_), known_count(tokens)
        figures[names] = {
            "Tags": all_[0].cost_tags,
            "ChargePeriodEnd": start + timedelta(minutes=15),
            "BillingPeriodStart": month,
            "BillingPeriodEnd": (month + timedelta(days=32)).replace(day=1),
            **dict.fromkeys(("BilledCost", "EffectiveCost", "ListCost", "ContractedCost"), cost),
            "BillingCurrency": "USD",
            **dict.fromkeys(("BillingAccountId", "BillingAccountName", "PublisherName", "InvoiceIssuerName"), provider),
            "SubAccountName": tenant,
            "ServiceCategory": "AI and Machine Learning",
            "ServiceSubcategory": "Generative AI",
            "ServiceName": "LLM inference",
            "ResourceName": agent,
            "ResourceType": "Agent",
            "ChargeCategory": "Usage",
            "ChargeClass": None,
            "ChargeDescription": f"Calls of {model} by agent {agent}",
            "ChargeFrequency": "Usage-Based",
            "PricingCategory": "Standard",
            **dict.fromkeys(("ConsumedQuantity", "PricingQuantity"), quantity),
            **dict.fromkeys(("ConsumedUnit", "PricingUnit"), "Tokens"),
            "x_InputTokens": known_count(one.input_tokens for one in all_),
            "x_OutputTokens": known_count(one.output_tokens for one in all_),
            "x_CachedTokens": known_count(one.cached_tokens for one in all_),
            "x_Calls": len(all_),
            "x_FailedCalls": len(failed),
            "x_WastedCost": known(one.cost for one in failed) if failed else Decimal(0),
            "x_EstimatedCost": known(one.cost for one in all_ if one.cost_basis == "estimated") or Decimal(0),
            "x_CallsOfUnknownCost": sum(one.cost is None for one in all_),
        }
    return figures
