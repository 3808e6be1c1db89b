"""The report of an erasure."""

from __future__ import annotations

from pydantic import Field

from breakwater.kernel.types import Count, Event, Timestamp


class Trace(Event):
    """A place in which a search has found something of the data subject."""

    store: str = Field(description="Stream, table or server.")
    place: str = Field(description="Sequence, column, key or file.")
    kind: str = Field(description="`text` of a prompt or an answer, `id` that a caller chose, or the user's `name`.")
    count: Count


class SearchReport(Event):
    """A search through all that the stores hold."""

    texts: Count = Field(description="Number of texts that were searched for, from the newest jobs.")
    jobs: Count = Field(description="Number of jobs that they are from.")
    ids: Count = Field(description="Number of ids of callers that were searched for.")
    name: bool = Field(description="Whether the user's name was searched for: not one that is in many other texts.")
    searched: dict[str, Count] = Field(description="Messages, values, bytes or rows that were searched, by store.")
    unread: dict[str, Count] = Field(description="Files and folders that may not be read, by server: not searched.")
    actions: Count = Field(default=0, description="Operators' actions in AUDIT with an id or the name: they stay.")
    traces: tuple[Trace, ...] = ()


class ErasureReport(Event):
    """An erasure, or with `--dry-run` its extent."""

    digest: str = Field(description="SHA-256 of the user and the tenant, as in the audit log: 64 hex digits.")
    dry_run: bool
    at: Timestamp = Field(description="Jobs that were accepted later are left as they are.")
    jobs: Count
    unfinished: Count = Field(description="Jobs that have not ended. With any, nothing is erased.")
    stores: dict[str, Count] = Field(description="Messages, rows and keys by stream, table or kind of key.")
    remaining: tuple[str, ...] = Field(default=(), description="What is left, and until when.")
    search: SearchReport | None = None
