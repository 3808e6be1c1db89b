"""`breakwater plan` where the record, the config or ClickHouse is not as it should be: said in words."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from breakwater.cli.main import main
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.commands.errors import ExitCode
from breakwater.records import rows, schema
from breakwater.replay import commands
from tests.records.samples import attempt, execution, new_database, url_of
from tests.servers import RunningServer

CONFIG = """
providers: {openai: {base_url: "http://127.0.0.1:9/v1"}}
models: {gpt-4.1: {provider: openai, price: {input_usd_per_mtok: 2, output_usd_per_mtok: 8}}}
agents: {NAME: {model: gpt-4.1}}
"""

Output = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "breakwater.yaml"
    path.write_text(CONFIG.replace("NAME", "writer"))
    return path


@contextmanager
def database(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[asyncio.Runner, Analytics]]:
    with asyncio.Runner() as runner:
        context = new_database(server.url)
        analytics = runner.run(context.__aenter__())
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", url_of(analytics, server))
        try:
            yield runner, analytics
        finally:
            runner.run(context.__aexit__(None, None, None))


def report_of(out: Output, *arguments: object) -> Any:
    assert main(["plan", *map(str, arguments), "--json"]) == ExitCode.OK
    return json.loads(out.readouterr().out)


def test_what_the_record_lacks_is_said_and_renamed_agents_are_the_same(
    config: Path, tmp_path: Path, clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    renamed = tmp_path / "renamed.yaml"
    renamed.write_text(CONFIG.replace("NAME", "author"))
    at = datetime.now(UTC) - timedelta(hours=2)
    of_job = {"queued_at": at, "dispatched_at": at, "completed_at": at + timedelta(seconds=1)}
    call = attempt("e1", started_at=at, outcome="success", reserved=2_000_000, reserved_at=at)
    job = execution(
        "e1", attempts=(call,), attempts_count=1, chosen_model="gpt-4.1", fallback_chain=("gpt-4.1",), **of_job
    )
    of_plane = ("--before", config)
    with database(clickhouse_server, monkeypatch) as (runner, analytics):
        assert report_of(capsys, config, *of_plane)["notes"] == ["nothing is recorded at any time"]
        runner.run(analytics.insert(schema.EXECUTIONS, [rows.execution_row(job, 1)]))
        runner.run(analytics.insert(schema.ATTEMPTS, [rows.attempt_row(call, 2, at)]))
        [elsewhere] = report_of(capsys, config, *of_plane, "--since", "1h")["notes"]
        assert main(["plan", str(config), "--before", str(config), "--since", "1h"]) == ExitCode.OK
        assert elsewhere in capsys.readouterr().err
        long = report_of(capsys, config, *of_plane, "--since", "2000d")
        gone = report_of(capsys, renamed, *of_plane)
        excluded = report_of(capsys, renamed, *of_plane, "--unknown", "exclude")
        same = report_of(capsys, renamed, *of_plane, "--rename", "writer=author")
        by_old_name = report_of(capsys, renamed, *of_plane, "--rename", "writer=author", "--agent", "writer")
    moment = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    assert elsewhere == f"nothing is recorded of this time; the record has jobs from {moment} to {moment}"
    assert long["jobs"] == 1
    [cut] = long["notes"]
    assert cut.startswith("jobs from before ")
    assert cut.endswith(" days")
    assert (gone["jobs"], gone["unknown"], gone["left_out"]) == (1, 1, 0)
    assert (excluded["jobs"], excluded["unknown"], excluded["left_out"]) == (0, 0, 1)
    assert (same["jobs"], same["unknown"], same["spend"]["after"]) == (1, 0, same["spend"]["before"])
    assert same["most_changed"] == []
    assert (by_old_name["jobs"], by_old_name["agent"]) == (1, "author")


def test_a_wrong_config_or_option_is_named_and_nothing_is_asked(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", "http://127.0.0.1:9/none")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIG.replace("model: gpt-4.1}}", "modle: gpt-4.1}}"))
    assert main(["plan", str(wrong), "--before", str(config)]) == ExitCode.FAILED
    error = capsys.readouterr().err
    assert "wrong.yaml: " in error
    assert "did you mean 'model'? (line 4)" in error
    for rename, words in {
        "writer": "names no two agents",
        "writer=wirter": "the changed config has no agent 'wirter'; did you mean 'writer'?",
        "wirter=writer": "the recorded config has no agent 'wirter'; did you mean 'writer'?",
    }.items():
        assert main(["plan", str(config), "--before", str(config), "--rename", rename]) == ExitCode.USAGE
        assert words in " ".join(capsys.readouterr().err.split())


def test_clickhouse_that_does_not_answer_ends_the_plan_in_words(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(commands, "MAX_SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, words in ((silent.getsockname()[1], "Timeout on reading"), (9, "127.0.0.1:9")):
            monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"http://127.0.0.1:{port}/none")
            assert main(["plan", str(config), "--before", str(config)]) == ExitCode.UNREACHABLE
            error = capsys.readouterr().err
            assert "ClickHouse" in error
            assert words in error


def test_tables_of_an_earlier_version_are_said_to_be(
    config: Path, clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    with asyncio.Runner() as runner:
        context = new_database(clickhouse_server.url, brand_new=True)
        analytics = runner.run(context.__aenter__())
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", url_of(analytics, clickhouse_server))
        try:
            runner.run(analytics.execute("DROP TABLE limit_events"))
            assert main(["plan", str(config), "--before", str(config)]) == ExitCode.FAILED
            assert "`breakwater setup`" in capsys.readouterr().err
        finally:
            runner.run(context.__aexit__(None, None, None))
