"""The record of a response that a client may ask for later. Internal to `request`."""

from __future__ import annotations

from pydantic import Field, JsonValue

from breakwater.kernel.types import Event, Timestamp


class StoredResponse(Event):
    """The request of a stored response; its answer is in the log of chunks, and in the result.

    Attributes:
        execution_id: of its job.
        job_id: of its job, which names the response.
        agent: of its job.
        tenant: of its job.
        owner: the key that it belongs to.
        model: that was asked for, in the client's words.
        created_at: when it was accepted.
        background: it was created to run without its client.
        body: the request as the client wrote it, with the input of this response alone; without texts for an agent
            that keeps no prompts. Of a large request, the input may be in the object store.
        keeps_input: `body` has the input.
        previous_response_id: the response that it continues, in the client's words.
        previous: the executions that it continues, the oldest first.
        deleted: it was deleted, and nothing else is kept of it.
    """

    execution_id: str
    job_id: str
    agent: str
    tenant: str | None = None
    owner: str | None = None
    model: str = ""
    created_at: Timestamp
    background: bool = False
    body: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    keeps_input: bool = True
    previous_response_id: str | None = None
    previous: tuple[str, ...] = ()
    deleted: bool = False
    encrypted: str | None = None
    """The texts, where they could not be encrypted: why."""
