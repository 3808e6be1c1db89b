"""Reads recorded jobs from the streams: all that they hold, in memory."""

from __future__ import annotations

from collections import defaultdict
from contextlib import aclosing

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.replay.rules.history import Changes, LoggedAttempt, RecordedJob, in_order


async def read_log(lookup: Lookup) -> tuple[list[RecordedJob], Changes]:
    """Returns the jobs that have ended, in the order in which they began, and what the services decided meanwhile.

    Raises:
        BusUnavailableError, BusError: as `Lookup.scan`.
    """
    attempts: dict[str, list[LoggedAttempt]] = defaultdict(list)
    records: list[Execution] = []
    transitions: list[BreakerTransition] = []
    budgets: list[BudgetEvent] = []
    guards: list[GuardEvent] = []
    limits: list[LimitEvent] = []
    alerts: list[Alert] = []
    async with aclosing(lookup.scan(Stream.EVENTS, "bw.>", complete=True)) as stored:
        async for message in stored:
            match message.subject.split(".")[1]:
                case "attempts":
                    if (attempt := message.read(Attempt)) is not None:
                        logged = LoggedAttempt.of(message.sequence, message.stored_at, attempt)
                        attempts[attempt.execution_id].append(logged)
                case "executions":
                    records += [record] if (record := message.read(Execution)) is not None else []
                case "breakers":
                    transitions += [event] if (event := message.read(BreakerTransition)) is not None else []
                case "budgets":
                    budgets += [event] if (event := message.read(BudgetEvent)) is not None else []
                case "guards":
                    guards += [event] if (event := message.read(GuardEvent)) is not None else []
                case "limits":
                    limits += [event] if (event := message.read(LimitEvent)) is not None else []
                case _:
                    pass
    async with aclosing(lookup.scan(Stream.ALERTS, "bw.alerts.>", complete=True)) as stored:
        async for message in stored:
            alerts += [alert] if (alert := message.read(Alert)) is not None else []
    jobs = (
        RecordedJob(record, tuple(sorted(attempts[record.execution_id], key=lambda logged: logged.attempt.number)))
        for record in records
    )
    return in_order(jobs, guards), Changes(transitions, budgets, guards, alerts, limits)
