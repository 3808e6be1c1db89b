"""`breakwater executions ID`, alone and with its tree, from rows of the real engine."""

from __future__ import annotations

import io
import re
import sys
from datetime import timedelta
from typing import Any

import pytest

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.commands.errors import ExitCode
from breakwater.records.commands import executions
from tests.cli.conftest import Run, Terminal, in_thread, store
from tests.records.samples import NOON, RATE_LIMITED, attempt, execution

FAMILY = [
    execution("root", total_cost=1_000, completed_at=NOON + timedelta(seconds=9), duration_ms=9_000),
    execution("b", agent="tagger", parent_execution_id="root", total_cost=20, wasted_cost=5, duration_ms=10),
    execution("a", parent_execution_id="root", total_cost=0, cache_hit=True, duration_ms=20),
    execution(
        "a1",
        parent_execution_id="a",
        total_cost=None,
        wasted_cost=None,
        cost_basis="unknown",
        status="dead_lettered",
        reason="timeout",
        chosen_model=None,
    ),
]
DRAWN = """\
root  writer  succeeded  gpt-4.1  $0.000001  9.0 s  including children $0.00000102+
├── a  writer  succeeded  gpt-4.1  from the cache  $0.00  20 ms  including children $0.00+
│   └── a1  writer  dead_lettered: timeout  unknown  1.0 s
└── b  tagger  succeeded  gpt-4.1  $0.00000002  10 ms
total  4 executions, $0.00000102+, of it $0.000000005 wasted
"""


async def test_one_is_shown_with_its_facts_and_its_attempts(run: Run, analytics: Analytics) -> None:
    wasted = {"fallback": 700_000, "retry": 1_400_000, "worker_lost": 0}
    attempts = (attempt(outcome="error", error=RATE_LIMITED), attempt(number=2, first_token_ms=300, chunks=20))
    costs: dict[str, Any] = {"total_cost": 3_000_000, "wasted_cost": 2_100_000, "wasted_by_cause": wasted}
    await store(analytics, [execution(attempts=attempts, attempts_count=2, **costs)])
    shown = (await in_thread(run, "executions", "e1")).out
    assert "  cost            $0.003\n  wasted          $0.0021 (retry $0.0014, fallback $0.0007)\n" in shown
    header, first, second = shown.splitlines()[-3:]
    assert "first token  tokens/s" in header
    assert "rate_limit 429: slow down" in first
    assert "300 ms        38" in second
    reported = (await in_thread(run, "executions", "e1", "--json")).json
    assert reported["wasted_by_cause"] == {
        "fallback": "0.000700000",
        "retry": "0.001400000",
        "worker_lost": "0.000000000",
    }


async def test_a_list_is_filtered_by_user_and_team(run: Run, analytics: Analytics) -> None:
    await store(analytics, [execution("a", user="ada", team="search"), execution("b", user="bob", team="search")])
    for options, expected in (
        (("--user", "ada"), {"a"}),
        (("--team", "search"), {"a", "b"}),
        (("--team", "search", "--user", "eve"), set[str]()),
    ):
        listed = (await in_thread(run, "executions", *options, "--json")).json
        assert {execution["execution_id"] for execution in listed} == expected
    facts = (await in_thread(run, "executions", "a")).out
    assert re.search(r"user +ada\n +team +search\n", facts)


@pytest.mark.parametrize("asked", ["root", "a1"])
async def test_a_tree_in_a_pipe_has_a_line_for_each_execution(run: Run, analytics: Analytics, asked: str) -> None:
    await store(analytics, FAMILY)
    ran = await in_thread(run, "executions", asked, "--tree")
    assert (ran.code, ran.out, ran.err) == (ExitCode.OK, DRAWN, "")


async def test_lines_of_a_tree_in_a_pipe_are_never_folded(run: Run, analytics: Analytics) -> None:
    long = "x" * 128
    await store(analytics, [execution(long), execution("child", parent_execution_id=long, agent=f"[red]{'y' * 100}")])
    first, second, _ = (await in_thread(run, "executions", long, "--tree")).out.splitlines()
    assert first.startswith(f"{long}  writer  succeeded  ")
    assert second.startswith(f"└── child  [red]{'y' * 100}  ")


async def test_a_tree_as_json_is_nested(run: Run, analytics: Analytics) -> None:
    await store(analytics, FAMILY)
    tree = (await in_thread(run, "executions", "a1", "--tree", "--json")).json
    assert (tree["execution_id"], tree["cut"], tree["circular"]) == ("a1", [], False)
    root = tree["root"]
    sums = {"executions": 4, "total_cost": "0.000001020", "wasted_cost": "0.000000005", "unknown_costs": 1}
    assert root["subtree"] == sums
    assert (root["recorded"], root["total_cost"], root["completed_at"]) == (
        True,
        "0.000001000",
        "2026-11-21T12:00:09.000Z",
    )
    (leaf,) = root["children"][0]["children"]
    assert (leaf["execution_id"], leaf["reason"], leaf["total_cost"], leaf["children"]) == ("a1", "timeout", None, [])


async def test_a_parent_that_still_runs_is_shown_and_what_is_missing_is_said(run: Run, analytics: Analytics) -> None:
    await store(analytics, [execution("child", parent_execution_id="running")])
    ran = await in_thread(run, "executions", "running", "--tree")
    assert ran.out.startswith("running  not recorded (yet)  including children $0.00100\n└── child  ")
    assert ran.out.endswith("total  1 execution, $0.00100\n")
    reported = (await in_thread(run, "executions", "child", "--tree", "--json")).json
    assert (reported["root"]["recorded"], "agent" in reported["root"]) == (False, False)

    await store(analytics, [execution("egg", parent_execution_id="hen"), execution("hen", parent_execution_id="egg")])
    circular = await in_thread(run, "executions", "egg", "--tree")
    assert circular.out.startswith("hen  ")
    assert "these jobs name each other as parents" in circular.err


async def test_at_80_columns_the_time_and_the_reason_are_shown_and_the_id_is_shortened(
    run: Run, analytics: Analytics, terminal: Terminal
) -> None:
    name = "nightly-digest-of-everything-2026-11-29-0001"
    failed = {"status": "dead_lettered", "reason": "timeout", "completed_at": NOON, "queued_at": NOON}
    await store(analytics, [execution(name, job_id=name, **failed)])
    terminal(80)
    ran = await in_thread(run, "executions", "--since", "3650d")
    heading, line, *below = [text.rstrip() for text in ran.out.splitlines()]
    assert heading.split()[:2] == ["ended", "id"]
    assert "nightly-…9-0001" in line
    assert "timeout" in " ".join([line, *below])
    assert max(map(len, [heading, line, *below])) <= 80


async def test_a_tree_needs_an_execution_that_somebody_knows(run: Run, analytics: Analytics) -> None:
    ran = await in_thread(run, "executions", "nobody", "--tree", "--json")
    assert (ran.code, ran.error["code"], ran.out) == (ExitCode.FAILED, "unknown_execution", "")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_tree_on_a_terminal_has_colours_and_marks_the_one_asked_for(
    analytics: Analytics, monkeypatch: pytest.MonkeyPatch
) -> None:
    from breakwater.records.tree import execution_tree as find

    await store(analytics, FAMILY)
    tree = await find(analytics, "b")
    assert tree is not None
    screen = Screen()
    for name, value in {"TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        executions.show_tree(tree, as_json=False)
    lines = screen.getvalue().splitlines()
    assert "└── \x1b[1mb\x1b[0m  tagger  \x1b[32msucceeded\x1b[0m" in lines[3]
    assert "\x1b[31mdead_lettered: timeout\x1b[0m" in lines[2]
    assert "\x1b[1mtotal  4 executions" in lines[4]


async def test_a_run_of_twenty_steps_is_one_line_and_unfolds_into_its_tree(run: Run, analytics: Analytics) -> None:
    loop = [
        execution(
            f"step-{number:02}",
            run_id="research",
            parent_execution_id=None if number == 0 else "step-00" if number < 19 else "step-07",
            queued_at=NOON + timedelta(seconds=number),
            completed_at=NOON + timedelta(seconds=number + 1),
            total_cost=1_000_001,
            wasted_cost=5 if number == 3 else 0,
            **({"status": "dead_lettered", "reason": "timeout"} if number == 3 else {}),
        )
        for number in range(20)
    ]
    alone = execution("alone", completed_at=NOON + timedelta(minutes=1), total_cost=7)
    await store(analytics, [*loop, alone])
    rows = [line.split() for line in (await in_thread(run, "executions", "--runs")).out.splitlines()]
    assert [row[0] for row in rows] == ["run", "alone", "research"]
    assert rows[0][1:8] == ["agent", "status", "steps", "cost", "wasted", "started", "took"]
    assert rows[2][1:][:2] == ["writer", "dead_lettered"]
    assert "20" in rows[2]
    [_, one] = (await in_thread(run, "executions", "--runs", "--json")).json
    assert (one["total_cost"], one["wasted_cost"], one["duration_ms"]) == ("0.020000020", "0.000000005", 20_000)
    # A filter finds the run by one of its steps.
    [failed] = (await in_thread(run, "executions", "--runs", "--status", "dead_lettered", "--json")).json
    assert failed == one
    steps = (await in_thread(run, "executions", "--run", "research")).out.splitlines()[1:]
    assert [line.split("  ")[0] for line in steps[:1]] == ["step-00"]
    assert steps[7].startswith("  step-07")
    assert steps[8].startswith("    step-19")
    unknown = await in_thread(run, "executions", "--run", "nobody")
    assert unknown.code == ExitCode.FAILED
