"""Whether a request to cancel holds for a job, and how its record says who cancelled it and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from breakwater.contracts.execution import Cancellation, ErrorInfo, PendingCancel

_WHO = {
    "api_key": "the API key",
    "person": "the user",
    "program": "the NATS user",
    "client_disconnect": "the client's disconnect",
}


def cancelled_by(
    cancels: Iterable[PendingCancel], agent: str, owner: str | None = None, tenant: str | None = None
) -> Cancellation | None:
    """The first cancellation that was asked for by somebody who may cancel the job; None where nobody did.

    Args:
        cancels: for one job, in any order.
        agent: of the job.
        owner: the key or the named program that it belongs to.
        tenant: of the job.
    """
    valid = [
        cancel.cancellation
        for cancel in cancels
        if (not cancel.agents or agent in cancel.agents)
        and (not cancel.tenants or tenant in cancel.tenants)
        and cancel.owner in (None, owner)
    ]
    return min(valid, key=lambda one: one.at, default=None)


def ends_with_client(on_disconnect: Literal["finish", "cancel"] | None, *, has_key: bool) -> bool:
    """Whether the job of a stream is cancelled when its client leaves.

    Args:
        on_disconnect: the agent's setting.
        has_key: the client has given an idempotency key, and can ask for the answer again.
    """
    return not has_key if on_disconnect is None else on_disconnect == "cancel"


def error_of(cancellation: Cancellation) -> ErrorInfo:
    """The error of a cancelled job, and of its call that was aborted."""
    name = "" if cancellation.name is None else f" {cancellation.name!r}"
    why = f": {cancellation.reason}" if cancellation.reason else ""
    message = f"cancelled by {_WHO[cancellation.by]}{name}{why}"
    return ErrorInfo(kind="cancelled", class_="JobCancelledError", message=message)
