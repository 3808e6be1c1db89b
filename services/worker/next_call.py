"""The admission of a job's next call: its model, its worst case, and the parameters that it leaves out."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.calls.assignment import Assignment, Checkpoint, InFlight
from breakwater.calls.gate import Admission
from breakwater.calls.rules.repairs import NO_REPAIRS, Repairs
from breakwater.calls.rules.waits import LEASE_MARGIN_S
from breakwater.calls.targets import Target
from breakwater.dialects.rules.provider_state import substitutes_in
from breakwater.jobs.contract.execution import Reason
from breakwater.jobs.contract.job import CallApi
from breakwater.prices.rules.price import (
    OUTPUT_LIMITS,
    InputSize,
    estimate_input_tokens,
    observed_limit,
    size_of_added,
    worst_input_tokens,
)
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.streaming import continuing


def params_key(job: Assignment, target: Target) -> tuple[str, str, CallApi]:
    """Returns the key under which refused parameters are remembered: agent, deployment, and the API of the call."""
    api = job.job.api
    return job.agent_name, target.unit, api if api in target.apis else "chat"


def _input_size(worker: WorkerContext, job: Assignment, checkpoint: Checkpoint, target: Target) -> InputSize:
    """Returns the size of all that the next call sends, with its repairs and the answer that it continues."""
    size = job.input_size(as_written=job.job.api in target.unchanged_apis)
    repairs = checkpoint.repairs or NO_REPAIRS
    if substitutes := substitutes_in(job.messages, {*worker.state_repairs.get(target.unit, ()), *repairs.state}):
        size += size_of_added(substitutes)
    if checkpoint.repairs is not None:
        size += repairs.correction_size
    if checkpoint.partial:
        size += size_of_added(continuing(checkpoint.partial))
    return size


def _observed_limit(worker: WorkerContext, job: Assignment, checkpoint: Checkpoint, target: Target) -> int | None:
    """Returns the output limit by the model's latest outputs, if the agent reserves by observation."""
    repairs = checkpoint.repairs or NO_REPAIRS
    # Not for a stream: if it is cut off, its published part can't be taken back.
    if job.agent.reserve != "observed" or job.job.api == "embeddings" or job.job.stream or repairs.full_output:
        return None
    outputs = worker.outcomes.outputs(job.agent_name, target.model)
    return observed_limit(job.parameters.values, job.agent.max_tokens, outputs)


def params_left_out(worker: WorkerContext, job: Assignment, target: Target, repairs: Repairs) -> tuple[str, ...]:
    """Returns the parameters to omit from a call because its model refused them, in this job or an earlier one."""
    if not worker.left_out and not repairs.left_out:
        return ()
    key = params_key(job, target)
    names = {*worker.left_out.get(key, ()), *repairs.left_out}
    if names.intersection(OUTPUT_LIMITS) and is_bounded(worker, job):
        # An uncapped job may have found them. A capped job may omit one of the two names, but not both.
        names = names.difference(OUTPUT_LIMITS) if key[2] == "responses" or {*OUTPUT_LIMITS} <= names else names
    return job.droppable(names) if names else ()


def is_bounded(worker: WorkerContext, job: Assignment) -> bool:
    """Returns True if a limit depends on the output limit of the job's calls."""
    return worker.config.strict_params(job.agent, job.job, worker.limits()) is not None


def worst_tokens(worker: WorkerContext, job: Assignment, checkpoint: Checkpoint, target: Target) -> int:
    """Returns the most tokens that a job's next call can use."""
    size = _input_size(worker, job, checkpoint, target)
    return estimate_input_tokens(size, target.token_rules) + job.parameters.max_output_tokens


def admission_for(
    worker: WorkerContext,
    job: Assignment,
    checkpoint: Checkpoint,
    target: Target,
    timeout_s: float,
    dropped: int = 0,
    *,
    lease_s: float | None = None,
    waited: Mapping[Reason, float] | None = None,
    is_dry_run: bool = False,
    has_alternatives: bool = False,
) -> Admission:
    """Prepares the admission of a job's next call, on a deployment of its current model.

    The call omits `dropped` messages of the job. `lease_s` covers a whole streamed answer. `waited` has the time that
    the job has waited for capacity, by reason.
    """
    size = _input_size(worker, job, checkpoint, target)
    input_tokens = estimate_input_tokens(size, target.token_rules)
    limit = _observed_limit(worker, job, checkpoint, target)
    output_tokens = limit or job.parameters.max_output_tokens
    worst = worst_input_tokens(input_tokens, size, target.token_rules, target.name)
    flight = InFlight(
        number=len(checkpoint.attempts) + 1,
        model=target.model,
        provider=target.provider,
        deployment=target.listed,
        provider_key=target.key,
        cause=checkpoint.cause_of_next(target.model, target.listed),
        started_at=job.now(),
        backoff_ms=checkpoint.backoff_ms,
        reserved=None if target.pricing is None else target.pricing.worst_case(worst, output_tokens, size),
        reserved_tokens=input_tokens + output_tokens,
        input_tokens=None if worker.config.is_local(target.provider) else input_tokens,
        dropped_messages=dropped,
        left_out=params_left_out(worker, job, target, checkpoint.repairs or NO_REPAIRS),
        max_tokens=limit,
    )
    return Admission(
        job=job,
        target=target,
        checkpoint=checkpoint,
        flight=flight,
        timeout_s=timeout_s,
        attempt_id=job.attempt_id(flight.number),
        lease_ms=None if is_dry_run else round(((lease_s or timeout_s) + LEASE_MARGIN_S) * 1000),
        waited={} if waited is None else waited,
        has_alternatives=has_alternatives,
    )
