"""The provider's own account: every call it received, what became of it, and what it billed."""

from __future__ import annotations

import fcntl
from collections import deque
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson

from breakwater.embedded.provider.wire import AnswerUsage

KEPT_CALLS = 1_000_000
LINE_STARTS = (b'{"seq":', b'{"event":')
"""How the lines of a ledger begin."""

_SCRIPT_REPLACED = {"event": "script_replaced"}


class LedgerFileError(RuntimeError):
    """The ledger's file can't be used; the message names it and says what to do."""


class Journal:
    """An append-only file of JSON lines, held by one process at a time.

    A line has left the process when `append` returns: it then survives SIGKILL (not a power cut, there is no fsync).
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file, and locks it.

        Raises:
            LedgerFileError: it can't be opened, or another process holds it.
        """
        self._path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise LedgerFileError(f"can't open the ledger file {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise LedgerFileError(
                f"the ledger file {path} is in use by another provider; give each its own file"
            ) from error

    def read(self) -> list[dict[str, Any]]:
        """All whole lines. A last line that was cut short by the writer's death is removed from the file.

        Raises:
            LedgerFileError: a line is not JSON; the file is left as it is.
        """
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        records: list[dict[str, Any]] = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                records.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise LedgerFileError(f"{self._path}, line {number}, is not JSON: is this a ledger file?") from error
        torn = content[whole:]
        if torn and not any(start.startswith(torn[: len(start)]) for start in LINE_STARTS):
            # A text without a final line feed must not be taken for a torn line and lost.
            raise LedgerFileError(f"{self._path} does not end as a ledger file does: is this one?")
        self._file.truncate(whole)
        return records

    def append(self, record: object) -> None:
        """Writes one record; a frozen dataclass or plain values."""
        self._file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def clear(self) -> None:
        """Empties the file."""
        self._file.truncate(0)

    def close(self) -> None:
        """Closes the file and lets go of it."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """One call.

    Attributes:
        seq: order of arrival over all models; never repeats.
        number: order of arrival at this model, since the script was set.
        model: the script's name of it, else as the request named it; `-` where the request could not be read.
        status: the HTTP status; None where none was sent (a reset, an abandoned hang) or none has been yet.
        fault: the name of what went wrong; None for an ordinary answer.
        received_at: RFC 3339, UTC.
        answered_at: when the answer was produced; None where none was.
        delivered: a whole HTTP answer was handed to a connection that was still open. None while in progress.
        client_request_id: the request's `X-Client-Request-Id`; Breakwater sends the attempt's id.
        idempotency_key: the request's `Idempotency-Key`.
        billed: the client pays for it.
        input_tokens: billed tokens, zero when not billed; `cached_tokens` are a part of them.
        output_tokens: billed tokens of the answer.
        cached_tokens: billed tokens that were read from the cache.
        cost_nano: nano-dollars, zero when not billed.
    """

    seq: int
    number: int
    model: str
    status: int | None
    fault: str | None
    received_at: str
    answered_at: str | None
    delivered: bool | None
    client_request_id: str | None
    idempotency_key: str | None
    billed: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_nano: int = 0


@dataclass(slots=True)
class LedgerTotals:
    """Sums over ended calls, and how many are in progress. `by_status` has the key `none` for no HTTP answer."""

    calls: int = 0
    in_progress: int = 0
    by_status: dict[str, int] = field(default_factory=dict[str, int])
    billed_calls: int = 0
    undelivered_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_nano: int = 0

    def count(self, call: LedgerCall) -> None:
        """Adds an ended call."""
        status = "none" if call.status is None else str(call.status)
        self.calls += 1
        self.by_status[status] = self.by_status.get(status, 0) + 1
        self.billed_calls += call.billed
        self.undelivered_calls += not call.delivered
        self.input_tokens += call.input_tokens
        self.output_tokens += call.output_tokens
        self.cached_tokens += call.cached_tokens
        self.cost_nano += call.cost_nano


class CallLedger:
    """Counts and keeps calls, in memory and, given a path, in a file that the next ledger continues.

    Totals are exact for ever; of the single calls the newest `kept_calls` are held in memory, all of them in the file.
    """

    def __init__(self, path: Path | None = None, kept_calls: int = KEPT_CALLS) -> None:
        """Reads the file if there is one.

        Raises:
            LedgerFileError: the file can't be opened, is in use, or holds something else.
        """
        self._calls: deque[LedgerCall] = deque(maxlen=kept_calls)
        self._open: dict[int, LedgerCall] = {}
        self._numbers: dict[str, int] = {}
        self._totals: dict[str, LedgerTotals] = {}
        self._last_seq = 0
        self._journal: Journal | None = None
        if path is not None:
            self._journal = Journal(path)
            try:
                self._replay(self._journal.read(), path)
            except LedgerFileError:
                self._journal.close()
                raise

    def _replay(self, records: list[dict[str, Any]], path: Path) -> None:
        names = {item.name for item in fields(LedgerCall)}
        for line, record in enumerate(records, start=1):
            if record == _SCRIPT_REPLACED:
                self._numbers.clear()
            elif record.keys() == names:
                call = LedgerCall(**record)
                self._keep(call)
                self._last_seq = max(self._last_seq, call.seq)
                self._numbers[call.model] = max(self._numbers.get(call.model, 0), call.number)
            else:
                raise LedgerFileError(f"{path}, line {line}, is not a call: is this a ledger file?")

    def _keep(self, call: LedgerCall) -> None:
        self._calls.append(call)
        totals = self._totals.get(call.model)
        if totals is None:
            totals = self._totals[call.model] = LedgerTotals()
        totals.count(call)

    def begin(
        self, model: str, received_at: str, client_request_id: str | None, idempotency_key: str | None
    ) -> LedgerCall:
        """A request was received: gives it its numbers."""
        self._last_seq += 1
        number = self._numbers[model] = self._numbers.get(model, 0) + 1
        call = LedgerCall(
            self._last_seq, number, model, None, None, received_at, None, None, client_request_id, idempotency_key
        )
        self._open[call.seq] = call
        return call

    def end(
        self,
        call: LedgerCall,
        *,
        status: int | None,
        fault: str | None,
        answered_at: str | None,
        delivered: bool,
        billed: bool = False,
        usage: AnswerUsage | None = None,
        cost_nano: int = 0,
    ) -> None:
        """A call ended. It is in the file when this returns, so no answer that a client has is missing from it.

        A call that began before a `reset` is not counted.
        """
        if self._open.pop(call.seq, None) is None:
            return
        paid = usage if billed else None
        ended = replace(
            call,
            status=status,
            fault=fault,
            answered_at=answered_at,
            delivered=delivered,
            billed=billed,
            input_tokens=paid.input_tokens if paid else 0,
            output_tokens=paid.output_tokens if paid else 0,
            cached_tokens=paid.cached_tokens if paid else 0,
            cost_nano=cost_nano if billed else 0,
        )
        if self._journal is not None:
            self._journal.append(ended)
        self._keep(ended)

    @property
    def calls(self) -> tuple[LedgerCall, ...]:
        """The calls held in memory, those in progress included, in order of arrival."""
        return tuple(sorted((*self._calls, *self._open.values()), key=lambda call: call.seq))

    @property
    def by_model(self) -> dict[str, LedgerTotals]:
        """Totals of each model, as a copy."""
        copies = {model: replace(totals, by_status=dict(totals.by_status)) for model, totals in self._totals.items()}
        for call in self._open.values():
            copies.setdefault(call.model, LedgerTotals()).in_progress += 1
        return copies

    @property
    def totals(self) -> LedgerTotals:
        """Totals over all models."""
        whole = LedgerTotals()
        for part in self.by_model.values():
            for status, count in part.by_status.items():
                whole.by_status[status] = whole.by_status.get(status, 0) + count
            for name in (item.name for item in fields(LedgerTotals) if item.name != "by_status"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return whole

    def report(self, *, with_calls: bool = False) -> dict[str, Any]:
        """What `GET /_sim/ledger` answers. `calls_left_out` is how many are too old to be in memory."""
        totals = self.totals
        report: dict[str, Any] = {"totals": totals, "models": self.by_model}
        if with_calls:
            report["calls"] = self.calls
            report["calls_left_out"] = totals.calls - len(self._calls)
        return report

    def restart_numbers(self) -> None:
        """A new script was set: each model's next request is number 1 again."""
        self._numbers.clear()
        if self._journal is not None:
            self._journal.append(_SCRIPT_REPLACED)

    def reset(self) -> None:
        """Forgets all calls and numbers, and empties the file."""
        for store in (self._calls, self._open, self._numbers, self._totals):
            store.clear()
        if self._journal is not None:
            self._journal.clear()

    def close(self) -> None:
        """Closes the file."""
        if self._journal is not None:
            self._journal.close()
