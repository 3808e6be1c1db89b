"""The ids of jobs: those that callers choose, and those by which the plane knows their executions, tasks and plans.

Callers choose ids independently of one another, so each caller has a scope of its own, and the plane knows `order-1` of
the key `shop` by a hash of both. The hash is made where a job comes in. Nothing parses it or turns it back: the
caller's own id stands beside it. Operators have no scope, and their ids are used as they are.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.job import Job
from breakwater.kernel.immutable import immutable
from breakwater.kernel.nats.subjects import PROGRAM, encode_token

_GENERATED = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(\.[0-9]+)?")
_HASHED = re.compile(r"x-[0-9a-f]{32}")
_DIGEST_BYTES = 16


@immutable()
class JobIds:
    """The ids of one job.

    Attributes:
        job_id: its own id, as its caller chose it; the execution's if the caller chose none.
        execution_id: its execution.
        task_id: its task, as its caller named it; None if it names neither a task nor a parent.
        task_key: its task, as the plane knows it.
        session_key: its session.
        plan_key: its plan.
        parent: the execution that it is part of.
        dependencies: the executions that it depends on, in the order of `depends_on`.
    """

    job_id: str
    execution_id: str
    task_id: str | None = None
    task_key: str | None = None
    session_key: str | None = None
    plan_key: str | None = None
    parent: str | None = None
    dependencies: tuple[str, ...] = ()

    @property
    def own_task_key(self) -> str:
        """The key of its task. A job without a task is a task of its own."""
        return self.task_key or self.execution_id

    @property
    def own_task_id(self) -> str:
        """The name of that task."""
        return self.task_id or self.job_id


def scope_of(caller: Caller, tenant: str | None) -> str | None:
    """Returns the scope of the ids of a job; None for those of operators and people, who share theirs.

    Args:
        caller: the sender.
        tenant: the job's tenant. Keys that are bound to a tenant share their ids with its other keys.

    The scope of a named program is its NATS user. A scope can be the value of a header.
    """
    if caller.kind == "person" or caller.may(("operate",)) or not caller.may(("submit",)):
        return None
    return f"tenant:{encode_token(str(tenant))}" if caller.tenants else f"key:{encode_token(caller.name)}"


def key_of(scope: str | None, own_id: str) -> str:
    """Returns the key by which the plane knows a task, a plan or a session.

    An id without a scope is its own key, unless it looks like the key of another.
    """
    if scope is None:
        if _HASHED.fullmatch(own_id) is None:
            return own_id
        scope = ""
    scope_bytes = scope.encode()
    # With the length of the scope, no two pairs of a scope and an id have the same text.
    text = b"%d:%s%s" % (len(scope_bytes), scope_bytes, own_id.encode())
    return f"x-{blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()}"


def execution_of(scope: str | None, job_id: str) -> str:
    """Returns the execution id of a job. Generated ids, which nobody can guess, are used as they are."""
    if is_generated(job_id) and not (scope or "").startswith(PROGRAM):
        return job_id
    # Named programs hear the generated ids of others in progress.
    return key_of(scope, job_id)


def ids_of(job: Job, scope: str | None, *, job_id: str, execution_id: str, session_id: str | None = None) -> JobIds:
    """Returns the ids of a job.

    Args:
        job: the job.
        scope: the scope of its ids.
        job_id: its own id.
        execution_id: its execution.
        session_id: its session, redacted where its own id must not be stored.
    """
    return JobIds(
        job_id=job_id,
        execution_id=execution_id,
        task_id=job.task_id,
        task_key=job.task_id and key_of(scope, job.task_id),
        session_key=session_id and key_of(scope, session_id),
        plan_key=job.plan_id and key_of(scope, job.plan_id),
        parent=job.parent_execution_id and execution_of(scope, job.parent_execution_id),
        dependencies=tuple([execution_of(scope, job_id) for job_id in job.depends_on]) if job.depends_on else (),
    )


def is_generated(written_id: str) -> bool:
    """Returns True if an id has the form of those made for jobs without one: of `new_id`, or a plan's job."""
    return _GENERATED.fullmatch(written_id) is not None


def is_made_here(written_id: str) -> bool:
    """Returns True if an id may be that of an execution, whose job has another id or none of its own."""
    return is_generated(written_id) or _HASHED.fullmatch(written_id) is not None


def possible_executions(caller: Caller, written_id: str) -> tuple[str, ...]:
    """Returns the executions that a caller may mean: those of its own ids first, then the one with this very id."""
    keys = possible_keys(caller, written_id)
    # A generated id of a key's own job is hashed only if it is that of another's job.
    return tuple(dict.fromkeys((written_id, *keys) if is_generated(written_id) else keys))


def possible_keys(caller: Caller, written_id: str) -> tuple[str, ...]:
    """Returns the keys of the tasks or plans that a caller may mean: its own first, then the one with this very key."""
    scopes = [scope_of(caller, tenant) for tenant in caller.tenants or (None,)]
    return tuple(dict.fromkeys((*(key_of(scope, written_id) for scope in scopes), written_id)))
