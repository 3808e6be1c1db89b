"""The rule of a run's id."""

from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ids import JobIds, ids_of, key_of
from breakwater.jobs.rules.ownership import job_digest
from breakwater.jobs.rules.runs import run_of
from tests.tables import each_row

TASK, SESSION, PARENT, TRACE = "a task", "a session", "acme/the parent's", "4bf92f3577b34da6a3ce929d0e0e4736"


@each_row(
    ("task_id", "session_id", "parents", "trace_id", "expected"),
    [
        (TASK, SESSION, PARENT, TRACE, "acme/a task"),
        (None, SESSION, PARENT, TRACE, "acme/a session"),
        (None, None, PARENT, TRACE, PARENT),
        (None, None, None, TRACE, f"acme/{TRACE}"),
        (None, None, None, None, "acme/e1"),
    ],
)
def test_the_first_of_task_session_parent_and_trace_names_the_run(
    task_id: str | None, session_id: str | None, parents: str | None, trace_id: str | None, expected: str
) -> None:
    ids = JobIds("j1", "e1", task_key=task_id, session_key=session_id)
    assert run_of(ids, "acme", trace_id=trace_id, run_of_parent=parents) == expected


def test_two_tenants_and_two_keys_share_no_run() -> None:
    def run(tenant: str | None, scope: str | None) -> str:
        job = Job(agent="writer", prompt="Hi.", tenant=tenant, task_id="nightly")
        return run_of(ids_of(job, scope, job_id="j1", execution_id="e1"), tenant)

    runs = [run(None, None), run("acme", None), run("globex", None), run(None, "key:shop"), run(None, "key:billing")]
    keys = [key_of(f"key:{name}", "nightly") for name in ("shop", "billing")]
    assert runs == ["nightly", "acme/nightly", "globex/nightly", *keys]


def test_the_session_is_no_part_of_the_question() -> None:
    digests = {job_digest(Job(agent="writer", prompt="Hi.", session_id=one), "shop") for one in (None, "a", "b")}
    assert len(digests) == 1
