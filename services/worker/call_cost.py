"""The usage and the cost of a call, as far as they are reported, and estimates of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, InFlight, JobEnd
from breakwater.calls.providers.base import Answer
from breakwater.calls.rules.repairs import JsonMessage
from breakwater.calls.targets import Target
from breakwater.jobs.contract.execution import CostBasis
from breakwater.jobs.rules.chat_messages import fields
from breakwater.kernel.immutable import immutable
from breakwater.kernel.types import MAX_COUNTED
from breakwater.prices.price_list import Pricing
from breakwater.prices.rules.price import estimate_input_tokens, size_of_messages
from breakwater.prices.rules.usage import Usage, credible
from breakwater.services.worker.context import WorkerContext


@immutable()
class CallCost:
    """The usage and cost of a call as far as they are credible. The fields are those of its attempt."""

    cost: int | None = 0
    cost_basis: CostBasis = "billed"
    usage: Usage | None = None
    usage_problem: str | None = None
    response_model: str | None = None


NO_COST = CallCost()


def spent_at_most(flight: InFlight) -> CallCost:
    """Estimates the cost of a call about which nothing is reported: its reservation, and its estimated input."""
    basis: CostBasis = "unknown" if flight.reserved is None else "estimated"
    return CallCost(flight.reserved, basis, with_estimates(flight, None))


def cost_of(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    usage: Usage | None,
    cost: int | None,
    *,
    maybe_billed: bool,
    part: Usage | None = None,
) -> CallCost:
    """Returns the reported usage and cost of a call. A missing cost is estimated, at most as its reservation.

    `part` is the usage with its missing figures estimated from the received part of the answer.
    """
    target = worker.targets.of(job.agent_name, flight.model, flight.deployment)
    reported = usage or part
    answering_model = None if reported is None else reported.model
    substitute = (
        None
        if answering_model is None or answering_model == target.name
        else worker.targets.substitute(target, answering_model)
    )
    price = partial(_priced, flight, usage, cost, maybe_billed=maybe_billed, part=part)
    if substitute is None or answering_model is None:
        spent = price(target.pricing, max_estimate=flight.reserved)
    else:
        spent = price(
            substitute.pricing or target.pricing, max_estimate=None if substitute.pricing else flight.reserved
        )
        name = substitute.known_name or worker.storable_word(job.agent, answering_model)
        worker.targets.log_substitute(target, name)
        spent = _of_substitute(spent, name, doubtful=substitute.pricing is None and cost is None)
    if spent.usage_problem is None or reported is None:
        return spent
    return replace(spent, usage_problem=_storable_problem(worker, job, spent.usage_problem, reported.terms))


def cost_on_requested_model(worker: WorkerContext, job: Assignment, end: JobEnd) -> int | None:
    """Returns what the answer of a fallback model would have cost on the requested model.

    None if the requested model answered, or if a price or a number of tokens is unknown.
    """
    chosen = end.chosen_model
    if chosen is None or chosen == job.chain[0] or end.cached_from is not None:
        return None
    pricing = worker.targets.all_of(job.agent_name, job.chain[0])[0].pricing
    total = 0
    for attempt in end.checkpoint.attempts:
        if attempt.model == chosen and attempt.outcome == "success":
            usage = Usage(attempt.input_tokens, attempt.output_tokens, attempt.cached_tokens)
            cost = None if pricing is None else pricing.cost(usage)
            if cost is None or cost.unknown is not None:
                return None
            total += cost.nano
    return total


def _of_substitute(spent: CallCost, name: str, *, doubtful: bool) -> CallCost:
    """Returns the cost of a call that another model answered; `doubtful` if its price is that of the requested one."""
    if not doubtful:
        return replace(spent, response_model=name)
    doubt = f"the model {name} answered, which has no price"
    basis: CostBasis = "estimated" if spent.cost_basis == "billed" else spent.cost_basis
    problem = "; ".join(filter(None, (spent.usage_problem, doubt)))
    return replace(spent, response_model=name, cost_basis=basis, usage_problem=problem)


def _storable_problem(worker: WorkerContext, job: Assignment, problem: str, terms: Iterable[str]) -> str:
    """Replaces the provider's terms in the problem of a usage by their storable forms."""
    for term in terms:
        problem = problem.replace(repr(term), repr(worker.storable_word(job.agent, term)))
    return problem


def _priced(
    flight: InFlight,
    usage: Usage | None,
    cost: int | None,
    pricing: Pricing | None,
    *,
    maybe_billed: bool,
    part: Usage | None,
    max_estimate: int | None = None,
) -> CallCost:
    """Returns the usage and cost of a call at the given prices. An estimate is at most `max_estimate`."""
    problem = None if usage is None else usage.problem
    if cost is not None:
        return CallCost(cost, "billed", with_estimates(flight, usage) if maybe_billed else usage, problem)
    if usage is not None and pricing is not None and (usage_cost := pricing.cost(usage)) is not None:
        if usage_cost.unknown is not None:
            return CallCost(None, "unknown", usage, problem or usage_cost.unknown)
        if usage_cost.nano <= MAX_COUNTED:
            problem = problem or usage_cost.doubt
            return CallCost(usage_cost.nano, "billed" if problem is None else "estimated", usage, problem)
        problem = "the reported usage exceeds what can be counted at the model's price"
    part_cost = pricing.cost(part) if part is not None and pricing is not None else None
    if part_cost is not None:
        estimate = part_cost.nano if max_estimate is None else min(part_cost.nano, max_estimate)
        return CallCost(estimate, "estimated", part, problem)
    usage = part or usage
    if not maybe_billed:
        return replace(NO_COST, usage=usage, usage_problem=problem)
    return replace(spent_at_most(flight), usage=with_estimates(flight, usage), usage_problem=problem)


def usage_of_part(
    flight: InFlight, target: Target, generated: Iterable[JsonValue | JsonMessage], reported: Usage | None
) -> Usage:
    """Estimates the usage of an answer that broke off from its received part.

    If more output tokens were reported than estimated, the reported number counts.
    """
    reported_usage = credible(reported or Usage(None, None))
    part = with_estimates(flight, replace(reported_usage, output_tokens=None), target, generated)
    return replace(part, output_tokens=max(part.output_tokens or 0, reported_usage.output_tokens or 0) or None)


def with_estimates(
    flight: InFlight,
    usage: Usage | None,
    target: Target | None = None,
    generated: Iterable[JsonValue | JsonMessage] = (),
) -> Usage:
    """Fills the missing figures of a call's reported usage with estimates.

    There are none for a program, whose input and output need not be tokens of a model.

    Args:
        flight: the attempt, with its input tokens as estimated before the call.
        usage: the reported usage.
        target: the model, if a part of an answer was received.
        generated: everything received of the answer.
    """
    usage = usage or Usage(None, None)
    if flight.input_tokens is None:
        return usage
    if usage.input_tokens is None:
        usage = replace(usage, input_tokens=flight.input_tokens)
    if usage.output_tokens is None and target is not None:
        size = size_of_messages(
            message if isinstance(message, Mapping) else {"content": message} for message in generated
        )
        usage = replace(usage, output_tokens=estimate_input_tokens(size, target.token_rules))
    return usage


def generated_messages(answer: Answer) -> list[JsonValue | JsonMessage]:
    """Returns everything that a model generated: its output, and its thoughts if it shows them."""
    response = answer.response or {}
    choices = response.get("choices")
    content = response.get("content")
    if isinstance(choices, list):
        return [dict(fields(fields(choice).get("message"))) for choice in choices]
    return [{"content": answer.output if content is None else content}]
