"""The priority of a job: what `request` or the config allows, whatever the sender asks for."""

from __future__ import annotations

import json
from typing import Any

from nats.aio.msg import Msg

from breakwater.calls.assignment import Assignment
from breakwater.config import Config
from breakwater.identity.contract import Priority
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.subjects import Header, job, job_by
from breakwater.services.worker.parsing import JobReader
from tests.flow.kit import config_for
from tests.services.worker.assignments import worker_without_servers
from tests.tables import each_row

OVER_HTTP = {Header.SUBMITTED_BY.value: "bot", Header.EXECUTION_ID.value: "e"}
PROGRAMS = {"free": {"agents": ["writer"]}, "low": {"agents": ["writer"], "priority": "low", "weight": 3}}


def read(subject: str, headers: dict[str, str], **fields: Any) -> Assignment:
    agents = {"writer": {"model": "sim/m", "priority": fields.pop("of_agent", None)}}
    config = Config.of(config_for("http://127.0.0.1:1", agents, programs=PROGRAMS), "")
    reader = JobReader(worker_without_servers(config), "writer", config.agents["writer"])
    client: Any = None
    reply = "$JS.ACK.JOBS.worker.1.1.1.1764000000000000000.0"
    body = {"agent": "writer", "prompt": "x", **{name: value for name, value in fields.items() if value is not None}}
    return reader.read(Delivery(Msg(client, subject, reply, json.dumps(body).encode(), headers)))


@each_row(
    ("header", "of_agent", "asked", "expected"),
    [
        (None, None, None, ("normal", 1)),
        (None, "high", None, ("normal", 1)),  # its key allows no more
        (None, "low", None, ("normal", 1)),  # the agent's was set after `request` had decided
        ("high 5", None, None, ("high", 5)),
        ("low 1", "high", "low", ("low", 1)),
        ("urgent x", "high", None, ("normal", 1)),
    ],
)
def test_request_decides_on_the_priority_of_a_job_over_http(
    header: str | None, of_agent: Priority | None, asked: Priority | None, expected: tuple[Priority, int]
) -> None:
    headers = OVER_HTTP if header is None else OVER_HTTP | {Header.PRIORITY.value: header}
    turn = read(job("writer"), headers, of_agent=of_agent, priority=asked).turn
    assert (turn.key, turn.priority, turn.weight) == ("bot", *expected)


@each_row(
    ("user", "of_agent", "asked", "expected"),
    [
        ("client", None, None, ("normal", 1)),
        ("client", "high", None, ("high", 1)),
        ("client", "high", "high", ("high", 1)),
        ("client", None, "low", ("low", 1)),
        ("client", None, "high", None),
        ("program-free", None, "high", None),
        ("program-free", "high", "high", ("high", 1)),
        ("program-low", "high", None, ("low", 3)),
        ("program-low", "high", "normal", None),
    ],
)
def test_a_job_over_nats_has_at_most_the_priority_that_its_agent_and_its_program_allow(
    user: str, of_agent: Priority | None, asked: Priority | None, expected: tuple[Priority, int] | None
) -> None:
    forged = OVER_HTTP | {Header.PRIORITY.value: "high 100"}
    assignment = read(job_by("writer", user), forged, of_agent=of_agent, priority=asked)
    if expected is None:
        assert assignment.problem.startswith("priority: at most ")
    else:
        assert assignment.problem == ""
        assert (assignment.turn.priority, assignment.turn.weight) == expected
