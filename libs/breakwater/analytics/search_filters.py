"""What executions people look for, and where a page of them ends."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Self

from breakwater.contracts.types import is_identifier, ms_from_time, time_from_ms

_EQUAL = {
    "status": "status",
    "reason": "reason",
    "model": "ifNull(chosen_model, requested_model)",
    "tenant": "tenant",
    "task_id": "task_id",
    "error_kind": "error_kind",
}
_LAST_MS = 4_291_747_199_999
"""The end of 2105, the last year whose times are stored."""

_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Filters:
    """What is left out restricts nothing."""

    agent: str | None = None
    status: str | None = None
    reason: str | None = None
    model: str | None = None
    """The one that answered, or was asked for where none did."""
    tenant: str | None = None
    task_id: str | None = None
    error_kind: str | None = None
    text: str | None = None
    """An id: whole, which finds it whenever it ended; or its beginning. Or words of an error's message, an output or a
    prompt, in any case, which are looked for in the newest executions only: `search.WORDS_WITHIN`."""
    min_cost: int | None = None
    """In nano-dollars. Those of unknown cost are left out."""
    since: datetime | None = None
    """By when they ended; aware."""
    until: datetime | None = None
    """The first moment that is no part of it."""
    dry_runs: bool = True

    @property
    def start_ms(self) -> int:
        """Milliseconds since the epoch."""
        return 0 if self.since is None else max(0, ms_from_time(self.since))

    @property
    def end_ms(self) -> int:
        """Milliseconds since the epoch, the first that is no part of it."""
        return _LAST_MS if self.until is None else min(_LAST_MS, ms_from_time(self.until))

    def prewhere(self) -> str:
        """What the sorting key decides, as SQL; with `from_ms` and `to_ms` for the times."""
        times = (
            "completed_at >= fromUnixTimestamp64Milli({from_ms:Int64})"
            " AND completed_at < fromUnixTimestamp64Milli({to_ms:Int64})"
        )
        return times if self.agent is None else f"{times} AND agent = {{agent:String}}"

    def where(self) -> str:
        """The rest but for the text, as SQL."""
        parts = [f"{column} = {{{name}:String}}" for name, column in _EQUAL.items() if getattr(self, name) is not None]
        if self.min_cost is not None:
            parts.append("total_cost >= {min_cost:Decimal(18, 9)}")
        if not self.dry_runs:
            parts.append("NOT dry_run")
        return " AND ".join(parts) or "1"

    def parameters(self) -> dict[str, object]:
        """The values of both."""
        given: dict[str, object] = {
            name: value for name in ("agent", *_EQUAL) if (value := getattr(self, name)) is not None
        }
        if self.min_cost is not None:
            given["min_cost"] = f"{Decimal(self.min_cost).scaleb(-9):f}"
        return given


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in the list of executions, which is ordered by these two."""

    completed_at: datetime
    execution_id: str

    @property
    def text(self) -> str:
        """As it stands in URLs, where it is to be quoted: the milliseconds of the time, a dot, and the id."""
        return f"{ms_from_time(self.completed_at)}.{self.execution_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cursor of a text.

        Raises:
            ValueError: it is none; the message says what is wrong.
        """
        time, dot, execution_id = text.partition(".")
        if not dot:
            raise ValueError("a page's address must look like 1795255200000.<execution id>; this one has no dot")
        if not (time.isascii() and time.isdigit() and len(time) <= _MOST_DIGITS) or int(time) > _LAST_MS:
            raise ValueError(f"a page's address begins with milliseconds since 1970, and not with {time[:40]!r}")
        if not is_identifier(execution_id):
            raise ValueError("a page's address ends with the id of an execution, and what stands there can't be one")
        return cls(time_from_ms(int(time)), execution_id)
