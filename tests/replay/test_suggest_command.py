"""`breakwater suggest` on the record in ClickHouse, and the patch that it prints."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from breakwater.cli.main import main
from breakwater.limits.contract import LimitEvent, LimitSettings
from breakwater.replay.sample import DaySpan, sample_of
from breakwater.replay.suggest import patch_of
from tests.records.samples import new_database, url_of
from tests.replay.histories import Model, every, jobs_at, lived
from tests.replay.storms import rows_of
from tests.servers import RunningServer
from tests.tables import each_row

CONFIG = """\
# of the writers
providers: {p: {base_url: "http://127.0.0.1:9/v1"}}
agents:
  writer:
    model: p/small
    budget: {daily_usd: 0.2, enforcement: hard}   # for a day
    timeout_s: 20
  hasty:
    model: p/slow
    timeout_s: 0.7
  reader:
    model: p/mini
"""

OF_READER = LimitEvent(
    event_id="e",
    kind="created",
    limit_id="night shift",
    scope="agent:reader",
    after=LimitSettings.model_validate({"scope": "agent:reader", "usd": 0.03, "per": "day", "thresholds": [50]}),
    by="ann",
    reason=None,
    at=datetime(2026, 11, 1, tzinfo=UTC),
)


def test_the_command_prints_figures_and_a_patch_that_applies(
    clickhouse_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("breakwater.yaml")
    file.write_text(CONFIG)
    hourly = every(60, days=8)
    jobs = [*jobs_at("writer", every(20, days=8)), *jobs_at("hasty", hourly), *jobs_at("reader", hourly)]
    models = [Model("p/small", 0.01), Model("p/slow", 0.01), Model("p/mini", 0.008)]
    history = lived(CONFIG, jobs, models, [OF_READER])
    asked = ("suggest", str(file), "--since", "2026-11-01T00:00Z", "--until", "2026-11-20T00:00Z")
    with asyncio.Runner() as runner:
        database = new_database(clickhouse_server.url)
        analytics = runner.run(database.__aenter__())
        try:
            for table, rows in rows_of((list(history.jobs), history.changes)):
                runner.run(analytics.insert(table, rows))
            monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", url_of(analytics, clickhouse_server))
            assert main([*asked, "--json"]) == 0
            report = json.loads(capsys.readouterr().out)
            assert main(list(asked)) == 0
            shown, _ = capsys.readouterr()
            assert main([*asked, "--agent", "hasty", "--json"]) == 0
            of_hasty = json.loads(capsys.readouterr().out)
            assert main(["suggest", str(file), "--since", "1h", "--until", "30m"]) == 0
            assert "nothing is recorded of this time; the record has jobs from 2026-11-02 " in capsys.readouterr().err
            assert main([*asked, "--agent", "hasti"]) == 2
            assert "no agent 'hasti'; did you mean 'hasty'?" in capsys.readouterr().err
        finally:
            runner.run(database.__aexit__(None, None, None))
    of_plane, suggestion = report["suggestions"]
    assert (suggestion["setting"], suggestion["before"]) == ("agents.writer.budget.daily_usd", 0.2)
    assert suggestion["answered"]["before"] < suggestion["answered"]["low"]
    assert (of_plane["setting"], of_plane["before"], of_plane["after"]) == ("night shift", 0.03, 0.071)
    assert of_plane["command"] in shown
    words = ("agent:reader", "--usd", "0.071", "--per", "day", "--threshold", "50", "--id", "night shift")
    assert shlex.split(of_plane["command"]) == ["breakwater", "limits", "set", *words]
    assert report["jobs"] == report["recorded_jobs"] == len(jobs)
    [experiment] = report["experiments"]
    assert (experiment["setting"], experiment["value"]) == ("agents.hasty.timeout_s", 1.4)
    assert (of_hasty["suggestions"], of_hasty["experiments"], of_hasty["patch"]) == ([], [experiment], "")
    assert "2 settings would have served better" in shown
    assert "agents.hasty.timeout_s  0.7  1.4" in shown
    subprocess.run(["patch", str(file)], input=shown, text=True, check=True, capture_output=True)
    assert file.read_text() == CONFIG.replace("0.2,", f"{suggestion['after']},")
    assert yaml.safe_load(file.read_text())["agents"]["writer"]["budget"]["daily_usd"] == suggestion["after"]


def test_a_patch_of_a_file_without_a_last_line_end_applies(tmp_path: Path) -> None:
    file = tmp_path / "breakwater.yaml"
    file.write_text("a: 1\nb: 2")
    subprocess.run(["patch", str(file)], input=patch_of("a: 1\nb: 2", "a: 1\nb: 3", "x"), text=True, check=True)
    assert file.read_text() == "a: 1\nb: 3"


def test_a_patch_of_a_file_with_other_separators_of_lines_applies(tmp_path: Path) -> None:
    file = tmp_path / "breakwater.yaml"
    file.write_text("# a\u2028b\na: 1\n")
    patch = patch_of(file.read_text(), "# a\u2028b\na: 2\n", "x")
    subprocess.run(["patch", str(file)], input=patch, text=True, check=True)
    assert file.read_text() == "# a\u2028b\na: 2\n"


MIDNIGHT = datetime(2026, 11, 2, tzinfo=UTC)


def spans(*jobs: int) -> list[DaySpan]:
    day = timedelta(days=1)
    return [DaySpan(MIDNIGHT + day * number, MIDNIGHT + day * (number + 1), count) for number, count in enumerate(jobs)]


@each_row(
    ("days", "parts", "jobs", "hours"),
    [
        ([], 0, 0, set()),
        ([100] * 30, 1, 3000, {720}),
        ([1000] * 30, 20, 20_000, {24}),
        ([5000] * 30, 8, 20_000, {12}),
        ([50_000] * 5, 5, 20_000, {1.92}),
    ],
)
def test_a_sample_is_of_days_that_are_evenly_spread(days: list[int], parts: int, jobs: int, hours: set[float]) -> None:
    sample = sample_of(spans(*days), 20_000)
    assert (len(sample), sum(span.jobs for span in sample)) == (parts, jobs)
    assert {round((span.until - span.since) / timedelta(hours=1), 3) for span in sample} == hours
    assert all(before.until <= after.since for before, after in pairwise(sample))
    assert not sample or sample[-1].until <= MIDNIGHT + timedelta(days=len(days))
