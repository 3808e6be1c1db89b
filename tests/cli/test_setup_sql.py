"""`breakwater setup --print-sql`: printed, and not executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from breakwater.kernel.commands.errors import ExitCode
from tests.cli.conftest import Run

CONFIG = "providers: {p: {base_url: 'http://x'}}\nagents: {a: {model: m}}\nclickhouse: {cluster: main}\n"


def test_statements_are_printed_though_no_server_answers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breakwater.yaml").write_text(CONFIG)
    monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", "http://breakwater:hidden@127.0.0.1:1/plane")
    ran = run("setup", "--print-sql")
    assert ran.code == 0
    assert ran.out.startswith("CREATE DATABASE IF NOT EXISTS `plane` ON CLUSTER 'main';\n")
    assert "CREATE TABLE IF NOT EXISTS executions ON CLUSTER 'main' (" in ran.out
    assert "hidden" not in ran.out + ran.err
    assert run("setup").code == ExitCode.UNREACHABLE


def test_an_address_that_is_none_is_wrong_usage(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breakwater.yaml").write_text(CONFIG)
    monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", "nats://breakwater:hidden@127.0.0.1:1")
    ran = run("setup", "--print-sql")
    assert ran.code == ExitCode.USAGE
    assert "hidden" not in ran.out + ran.err
