"""Words errors for parent agents and end users: type, status, the provider's message, and what can be done.

A provider's message may contain keys, paths, hosts, limits or the request. So a sentence of it is shown only if each
word looks like plain English, or is the name of a parameter or of the called model, and if nothing in it introduces a
name, a quotation or a number. The rest is left out, and so are class names that are not ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import ErrorInfo

_LATER = "This is usually temporary. Please try again later."
_KINDS: dict[ErrorKind, tuple[str, str]] = {
    "client": ("Client", "Please review the error and try again."),
    "quota": ("QuotaExceeded", "Please check your account billing status."),
    "rate_limit": ("RateLimit", f"The model's provider limits how often it is called. {_LATER}"),
    "transient": ("Transient", f"The model's provider could not take the request just now. {_LATER}"),
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
    "budget_exceeded": ("BudgetExceeded", "This agent has reached its limit for now. Please contact its owner."),
    "guard_tripped": (
        "TaskStopped",
        "This task was stopped, and people were asked to look at it. Please do not call it again until they have.",
    ),
    "retry_budget": ("RetryBudget", f"Too many calls fail at the moment to repeat this one. {_LATER}"),
    "worker_lost": ("WorkerLost", f"The work was interrupted and its answer was lost. {_LATER}"),
    "dependency_failed": (
        "DependencyFailed",
        "A request that this one was to follow did not succeed, so it was not run.",
    ),
    "cancelled": ("Cancelled", "The request was cancelled before there was an answer."),
    "invalid": ("InvalidRequest", "The request was not valid and was not run. Please correct it."),
}
_CLASSES = {
    "BadRequestError": "The request format may be invalid.",
    "UnauthorizedError": "Please check your API credentials.",
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
_PERMANENT: frozenset[ErrorKind] = frozenset(
    {"client", "quota", "context_overflow", "orphan_tool_calls", "logic", "invalid"}
)

_LONGEST = 300
"""The most characters of a provider's message that are shown."""

_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|;\s+")
_AROUND = "'\"`\u2018\u2019\u201c\u201d(),.:;!?"

# No digits, and no capitals within a word: ids and keys have both, and numbers may be limits.
_WORD = re.compile(
    r"(?:(?:non|pre|re|multi|self|up)-)?[A-Za-z]?[a-z]{0,19}(?:['\u2019](?:s|t|re|ve|ll|d))?|[A-Z]{2,5}|OpenAI"
)
_PLACE = re.compile(r"(?:messages|input|contents|tools)(?:\.\d{1,3}|\[\d{1,3}\])(?:\.(?:content|role|text|type|name))?")
_PARAMETERS = frozenset({
    "cache_control", "frequency_penalty", "function_call", "image_url", "input_schema", "json_schema", "logit_bias",
    "max_completion_tokens", "max_output_tokens", "max_tokens", "parallel_tool_calls", "presence_penalty",
    "reasoning_effort", "response_format", "service_tier", "stop_sequences", "stream_options", "tool_call_id",
    "tool_calls", "tool_choice", "tool_result", "tool_use", "tool_use_id", "top_k", "top_logprobs", "top_p",
})  # fmt: skip
_TRACE = re.compile(r"traceback|\bexception in\b|\bstack ?trace\b|\bpanic\b", re.I)
_NAMED = re.compile(
    r"\b(?:(?:organi[sz]ation|account|project|workspace|subscription|tenant|team|customer|user(?:name)?|login|password|"
    r"passphrase|secret|credential|bucket|host(?:name)?|server|upstream|backend|proxy|node|cluster|namespace|database|"
    r"deployment|directory|folder|file|path|key)s?|token)\b(?=(?P<next>[:=]?(?:\s+\S+){0,2}))",
    re.I,
)
"""Things that may have a name that looks like any other word: a customer, a machine, a key."""
_NEVER = re.compile(
    r"(?:^|[\s(:])['\"`\u2018\u201c]\w+\s|\b(?:prompt|bearer|said|says|connection|hundred|thousand|million|"
    r"billion|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|"
    r"thirty|forty|fifty|sixty|seventy|eighty|ninety|you gave)\b",
    re.I,
)
"""Signs of a quotation of the request, the name of a machine or a key, or a limit in words."""

_IS_NO_NAME = re.compile(
    r"(?:\s+(?:and|billing|but|can|cannot|could|did|do|does|has|have|if|lacks|may|must|needs|or|provided|quota|should|"
    r"tied|will|you|your|(?:is|are|was|were)\s+(?:disabled|expired|invalid|missing|not|required|revoked|suspended))"
    r"(?=[\s.,!?)]|$).*)?",
    re.I,
)


def harmless_sentences(text: str, names: Collection[str] = ()) -> str | None:
    """Returns the sentences of a provider's text that consist of harmless words; None if there are none.

    Args:
        text: the provider's message, redacted.
        names: names that the sentences may contain, such as the model's.
    """
    text = text.strip()
    if "\n" in text or _TRACE.search(text):
        return None  # a page, a listing or a trace
    clean: list[str] = []
    for sentence in _SENTENCE_ENDS.split(text):
        if len(" ".join((*clean, sentence))) > _LONGEST:
            break
        if _is_harmless(sentence, names):
            clean.append(sentence)
    return " ".join(clean) or None


def _is_harmless(sentence: str, names: Collection[str]) -> bool:
    words = sentence.split()
    return (
        len(words) > 1
        and _NEVER.search(sentence) is None
        and all(
            word in names or word in _PARAMETERS or _WORD.fullmatch(word) or _PLACE.fullmatch(word)
            for word in (word.strip(_AROUND) for word in words)
        )
        and all(_IS_NO_NAME.fullmatch(mention["next"]) for mention in _NAMED.finditer(sentence))
    )


def user_message(
    kind: ErrorKind,
    class_name: str,
    status_code: int | None,
    provider_text: str | None = None,
    names: Collection[str] = (),
) -> str:
    """Returns an assistant-style message for an error, with the harmless sentences of the provider's text."""
    title, advice = _KINDS[kind]
    if class_name in _CLASSES:
        title = class_name.removesuffix("Error")
        advice = _CLASSES[class_name]
    status = "" if status_code is None else f"**Status Code:** {status_code}\n"
    message = (
        ""
        if not provider_text or (text := harmless_sentences(provider_text, names)) is None
        else f"**Message:** {text}\n"
    )
    verdict = "It cannot be recovered automatically. " if kind in _PERMANENT else ""
    return f"I could not complete this request.\n\n**Error Type:** {title}\n{status}{message}\n{verdict}{advice}"


def user_message_for(error: ErrorInfo) -> str:
    """Returns the message that an error carries, or one for its kind, class and status."""
    return error.user_message or user_message(error.kind, error.class_, error.status_code)
