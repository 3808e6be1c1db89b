"""Errors as parent agents and end users see them: type, status and what can be done.

Never the provider's own text, and no class name that is not ours: both may hold keys, paths, limits or the request.
"""

from __future__ import annotations

from breakwater.contracts.execution import ErrorInfo, ErrorKind

_LATER = "This is usually temporary. Please try again later."
_KINDS: dict[ErrorKind, tuple[str, str]] = {
    "client": ("Client", "Please review the error and try again."),
    "rate_limit": ("RateLimit", f"The model's provider limits how often it is called. {_LATER}"),
    "server": ("Server", f"The model's provider has a problem of its own. {_LATER}"),
    "timeout": ("Timeout", f"No answer came in time. {_LATER}"),
    "network": ("Network", f"The model's provider could not be reached. {_LATER}"),
    "logic": ("InvalidOutput", "The answer never had the required form. Please put the request more simply."),
    "context_overflow": ("ContextOverflow", "The conversation is too long for this model; please shorten it."),
    "orphan_tool_calls": (
        "OrphanToolCalls",
        "The conversation has tool calls without results, or results without calls; please complete or remove them.",
    ),
    "breaker_open": ("CircuitBreakerOpen", f"This agent is paused because of recent failures. {_LATER}"),
    "budget_exceeded": ("BudgetExceeded", "This agent has used up its budget for now. Please contact its owner."),
    "guard_tripped": (
        "TaskStopped",
        "This task was stopped, and people were asked to look at it. Please do not call it again until they have.",
    ),
    "retry_budget": ("RetryBudget", f"Too many calls fail at the moment to repeat this one. {_LATER}"),
    "worker_lost": ("WorkerLost", f"The work was interrupted and its answer was lost. {_LATER}"),
    "cancelled": ("Cancelled", "The request was cancelled before there was an answer."),
    "invalid": ("InvalidRequest", "The request was not valid and was not run. Please correct it."),
}
_CLASSES = {
    "BadRequestError": "The request format may be invalid.",
    "UnauthorizedError": "Please check your API credentials.",
    "PaymentRequiredError": "Please check your account billing status.",
    "QuotaExceededError": "Please check your account billing status.",
    "ForbiddenError": "You may not have permission to access this resource.",
    "NotFoundError": "The model or resource does not exist or is not available to you.",
    "RequestTooLargeError": "The request is too large; please send less.",
    "UnprocessableEntityError": "A parameter's value may be invalid.",
    "ContentFilteredError": "The provider's content filter withheld the answer. Please rephrase the request.",
    "OutputLimitError": "The model reached its output limit before it said anything. Please allow it more tokens.",
    "DnsError": "The address of the model's provider could not be found. Please contact the agent's owner.",
    "TlsError": "No secure connection to the model's provider could be made. Please contact the agent's owner.",
    "ServiceUnavailableError": f"The model's provider is not available. {_LATER}",
    "OverloadedError": f"The model's provider is overloaded. {_LATER}",
}
_PERMANENT: frozenset[ErrorKind] = frozenset({"client", "context_overflow", "orphan_tool_calls", "logic", "invalid"})


def user_message(kind: ErrorKind, class_name: str, status_code: int | None) -> str:
    """An assistant-style message for an error of any kind."""
    title, advice = _KINDS[kind]
    if class_name in _CLASSES:
        title, advice = class_name.removesuffix("Error"), _CLASSES[class_name]
    status = "" if status_code is None else f"**Status Code:** {status_code}\n"
    verdict = "It cannot be recovered automatically. " if kind in _PERMANENT else ""
    return f"I could not complete this request.\n\n**Error Type:** {title}\n{status}\n{verdict}{advice}"


def user_message_for(error: ErrorInfo) -> str:
    """The message that an error carries, or one made from its kind, class and status."""
    return error.user_message or user_message(error.kind, error.class_, error.status_code)
