from __future__ import annotations

from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import job_digest


def test_the_same_job_has_one_digest_however_it_is_written() -> None:
    written = (
        b'{"agent": "a", "prompt": "x", "params": {"n": 1}}',
        b'{"prompt":"x","agent":"a","params":{"n":1},"job_id":"j","reply_to":"_INBOX.x","dry_run":false,"tenant":null}',
    )
    assert len({job_digest(Job.model_validate_json(job), None) for job in written}) == 1


def test_another_question_or_another_owner_is_another_digest() -> None:
    jobs = [
        Job(agent="a", prompt="x"),
        Job(agent="b", prompt="x"),
        Job(agent="a", prompt="y"),
        Job(agent="a", prompt="x", tenant="t"),
        Job(agent="a", prompt="x", metadata={"n": 1}),
        Job(agent="a", messages=[{"role": "user", "content": "x"}]),  # type: ignore[list-item]
    ]
    assert len({job_digest(job, owner) for job in jobs for owner in (None, "one", "two")}) == 3 * len(jobs)
