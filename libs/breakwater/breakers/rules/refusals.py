"""The error of a call that an open breaker refused."""

from __future__ import annotations

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.calls.rules.refusals import command, refusal
from breakwater.jobs.contract.execution import ErrorInfo


def breaker_open(
    key: BreakerKey,
    reason: str,
    *,
    state: str | None,
    task_id: str | None = None,
    retry_after_s: float | None = None,
    user_message: str | None = None,
) -> ErrorInfo:
    """Builds the error of a call that an open breaker refused.

    Args:
        key: the breaker's key.
        reason: why it opened, with figures.
        state: its state in words, with the time at which it ends; None if an operator has isolated it.
        task_id: the task that the breaker belongs to, as its caller named it.
        retry_after_s: the seconds until a call may pass; None if unknown.
        user_message: the text for models and end users.
    """
    agent = None if key.agent == "*" else key.agent
    owner = "the agents that share it" if agent is None else f"agent {agent}"
    failures = command("executions", None, agent=agent, since="1h")
    reset = command("breakers", "reset", key.agent, key.model)
    to_do = f"look at `{failures}` and at the provider's status page; `{reset}` admits calls now"
    if state is None:
        state = "isolated until an operator resets it"
        to_do = f"`{reset}` once calls may resume"
    elif key.task is not None:
        owner = f"task {task_id}"
        to_do = "fix what fails, or submit the job with looser `breaker` rules"
    target = f"provider {key.model.removesuffix('/*')}" if key.model.endswith("/*") else key.model
    return refusal(
        "breaker_open",
        "CircuitBreakerOpenError",
        f"the breaker of {owner} for {target} is {state}",
        figures=reason,
        to_do=to_do,
        retry_after_s=retry_after_s,
        user_message=user_message,
    )
