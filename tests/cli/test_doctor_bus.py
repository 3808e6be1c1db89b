"""What the doctor finds of a consumer whose messages nothing can take."""

from breakwater.cli.doctor_nats import copy_findings, held_finding
from breakwater.kernel.nats.provision import ConsumerStatus, StreamStatus
from tests.tables import each_row


@each_row(
    ("consumer", "again", "found"),
    [
        ("worker-writer", 2, True),
        ("worker-writer", 1, False),
        ("worker-writer", None, False),
        ("sink-events", 9, False),
    ],
)
def test_an_agent_whose_slots_are_all_held_by_jobs_that_were_delivered_before_is_named(
    consumer: str, again: int | None, found: bool
) -> None:
    one = ConsumerStatus("JOBS", consumer, "right", waiting=5, in_progress=2, again=again, readers=0)
    finding = held_finding(one, {"writer": 2, "reader": 1})
    assert (finding is not None) == found
    if finding is not None:
        assert (finding.area, finding.verdict) == ("lag", "warn")
        assert (
            finding.text == "worker-writer: all 2 slots of agent 'writer' are held by jobs that were delivered before"
        )
        assert "`job_handling_failed`" in finding.remedy


@each_row(
    ("copies", "late", "servers", "said"),
    [
        (1, (), 1, []),
        (1, (), 3, [("warn", "JOBS have one copy on a cluster of 3 servers")]),
        (3, (), 3, [("ok", "each stream has 3 copies, and all of them agree")]),
        (3, ("nats-2",), 3, [("warn", "copies of JOBS are behind or away on nats-2")]),
    ],
)
def test_streams_that_the_loss_of_a_server_would_stop_are_named(
    copies: int, late: tuple[str, ...], servers: int, said: list[tuple[str, str]]
) -> None:
    stream = StreamStatus("JOBS", "right", copies=copies, late_copies=late)
    assert [(finding.verdict, finding.text) for finding in copy_findings([stream], servers=servers)] == said
