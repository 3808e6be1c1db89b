"""A request to a provider's API: the job that it becomes, and how its answer is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from breakwater.dialects.api.streams import Encoder
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.job import Job
from breakwater.kernel.immutable import immutable

LONGEST_REQUEST_S = 90_000.0
"""The time limit of a request: more than the longest `total_timeout_s` and wait in the queue. The client decides."""


class ApiAnswer(Protocol):
    """Writes the answer to one request as its API has it."""

    def body(self, sent: Submission, result: dict[str, Any]) -> bytes:
        """Returns the JSON of the answer. `result` is that of a job that succeeded."""
        ...

    def encoder(self, sent: Submission) -> Encoder:
        """Returns an encoder of the events of a streamed answer."""
        ...

    def fails_in_stream(self, result: dict[str, Any]) -> bool:
        """Returns True if the API begins a stream to report this failure. `result` is that of a job that failed."""
        ...


@immutable()
class ParsedRequest:
    """A request as a job, and how to answer it.

    Attributes:
        job: the request as a job.
        answer: writes the answer as the API has it.
        accepted: awaited once the job is accepted, and before its answer.
        detached: responds to a request that does not wait for its job, once the job is accepted. It takes the request,
            the job, and True if the job was sent before.
    """

    job: Job
    answer: ApiAnswer
    accepted: Callable[[Submission], Awaitable[object]] | None = None
    detached: Callable[[Request, Submission, bool], Awaitable[Response]] | None = None


@immutable(kw_only=True)
class PendingRequest:
    """A request that waits for its job.

    Attributes:
        sent: the job.
        answer: writes the answer as the API has it.
        accepted: awaited once the job is accepted, and before its answer.
        path: the path of the request.
        request_id: the id of the request.
        key_id: the id of the API key.
        request_key: identifies equal requests while they are in flight; None if no other request needs to find it.
        attaches: the request waits for an equal request in flight, if there is one.
        repeats: the client's SDK has sent the request before and got no response.
        cancels: the job ends with the last client that waits for it.
        authorize: returns the same job with another id: a chosen one, or else a generated one.
    """

    sent: Submission
    answer: ApiAnswer
    accepted: Callable[[Submission], Awaitable[object]] | None
    path: str
    request_id: str
    key_id: str
    request_key: str | None
    attaches: bool
    repeats: bool
    cancels: bool
    authorize: Callable[[str | None, str], Submission]

    def drop_texts(self) -> bool:
        """Drops the texts of a chat whose job is stored. Returns False if the answer to the request needs them."""
        if self.repeats or self.accepted is not None or self.sent.job.api_request is not None:
            return False
        self.sent.drop_texts()
        object.__setattr__(self, "authorize", None)  # only for a request that repeats another
        return True
