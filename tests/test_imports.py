"""Breaches of the import rules of pyproject.toml are noticed; `make lint` checks that there are none."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    # Before the editable install: what is linted is what lies under `root`.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "libs"), str(root)))}
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [program, "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_rule_notices_what_it_forbids(tmp_path: Path) -> None:
    for folder in ("libs", "services"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    wrong_imports = {
        "libs/breakwater/attic.py": "",
        "libs/breakwater/alerts/rules/wrong.py": "import random",
        "libs/breakwater/alerts/settings.py": "import breakwater.jobs.rules.runs",
        "libs/breakwater/limits/rules/wrong.py": "import breakwater.config",
        "libs/breakwater/breakers/store.py": "import breakwater.alerts.rules.incidents",
        "libs/breakwater/client/__init__.py": "import breakwater.kernel.process.settings",
        "libs/breakwater/config/load.py": "import breakwater.kernel.redis.connection",
        "libs/breakwater/calls/providers/wrong.py": "import chdb, clickhouse_connect, nats",
        "libs/breakwater/health/commands.py": "import breakwater.config.commands.check",
        "libs/breakwater/health/api.py": "import breakwater.services.sink.app",
        "libs/breakwater/health/store.py": "import breakwater.health.pages.agent",
        "libs/breakwater/jobs/rules/wrong.py": "import breakwater.jobs.store.plans",
        "libs/breakwater/kernel/process/wrong.py": "import breakwater.jobs.rules.runs",
        "libs/breakwater/local/clickhouse/wrong.py": "import breakwater.config",
        "services/sink/handlers.py": "import nats, redis.asyncio, breakwater.services.worker.app",
        "services/worker/app.py": "import breakwater.local.commands.setup, joserfc, prometheus_client",
    }
    for file, statement in wrong_imports.items():
        (tmp_path / file).write_text(f"{statement}\n")

    linted = lint(tmp_path)

    assert linted.returncode == 1
    with (ROOT / "pyproject.toml").open("rb") as file:
        rules = [rule["name"] for rule in tomllib.load(file)["tool"]["importlinter"]["contracts"]]
    for rule in rules:
        assert f"{rule} BROKEN" in linted.stdout
    for wrong in (
        "breakwater.attic",
        "breakwater.breakers is not allowed to import breakwater.alerts",
        "breakwater.kernel is not allowed to import breakwater.jobs",
        "breakwater.calls.providers.wrong -> nats",
        "breakwater.services.sink.handlers -> redis",
        "breakwater.services.sink.handlers -> breakwater.services.worker.app",
    ):
        assert wrong in linted.stdout


IMPORT = re.compile(r"^ *(?:from (breakwater[\w.]*) import (\([^)]*\)|.+)|import (breakwater[\w.]*))", re.MULTILINE)
"""A statement by itself; to parse all modules takes a second."""


def imports(root: Path) -> dict[str, set[str]]:
    """Our modules, and those that each imports, also within its functions."""
    files: dict[str, Path] = {}
    # `services` is a link there, which `rglob` does not follow.
    for package in (root / "libs/breakwater", root / "libs/breakwater/services"):
        for file in sorted(package.rglob("*.py")):
            files[".".join(file.relative_to(root / "libs").with_suffix("").parts).removesuffix(".__init__")] = file

    def named(file: Path) -> Iterator[str]:
        for module, names, alone in IMPORT.findall(file.read_text()):
            if alone:
                yield alone
            for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names)):
                yield f"{module}.{name}" if f"{module}.{name}" in files else module

    return {name: {other for other in named(file) if other in files} - {name} for name, file in files.items()}


def test_no_import_goes_round_in_a_circle() -> None:
    modules = imports(ROOT)
    assert set(TopologicalSorter(modules).static_order()) == set(modules)


def test_a_circle_would_be_noticed(tmp_path: Path) -> None:
    for name, line in ("a", "from breakwater import b"), ("b", "def late():\n    import breakwater.a"):
        (tmp_path / "libs" / "breakwater").mkdir(parents=True, exist_ok=True)
        (tmp_path / "libs" / "breakwater" / f"{name}.py").write_text(line)

    with pytest.raises(CycleError):
        tuple(TopologicalSorter(imports(tmp_path)).static_order())


IMPORTS = """
import json, sys
import breakwater.config.commands.check
print(json.dumps(list(sys.modules)))
import breakwater.client
print(json.dumps(list(sys.modules)))
import breakwater.cli.main, breakwater.local.commands.up, breakwater.local.stack
import breakwater.local.supervisor, breakwater.local.simulation
print(json.dumps(list(sys.modules)))
import breakwater.services.__main__, breakwater.services.request.app, breakwater.services.sink.app
from breakwater.kernel.telemetry import tracing
tracing.start("tester")
tracing.begin("x", parent=None).end()
tracing.stop()
print(json.dumps(list(sys.modules)))
"""


def test_programs_the_command_line_and_services_without_traces_import_no_more_than_they_need() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    ran = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True)
    of_config_check, of_client, of_command_line, of_services = map(json.loads, ran.stdout.splitlines())
    clients = {"aiohttp", "clickhouse_connect", "nats", "redis", "structlog"}
    assert {name.partition(".")[0] for name in of_config_check} & clients == set()
    for_jobs = ("calls.rules", "jobs.contract.execution", "redaction.rules", "dialects.rules.messages", "services")
    assert [name for name in of_config_check if name.startswith(tuple(f"breakwater.{room}" for room in for_jobs))] == []
    providers = {name for name in of_config_check if name.startswith("breakwater.calls.providers.")}
    assert providers == {"breakwater.calls.providers.registry", "breakwater.calls.providers.settings"}
    packages = {name.partition(".")[0] for name in of_client}
    assert {"breakwater", "aiohttp", "pydantic"} <= packages
    assert packages & {"faststream", "nats", "redis", "pandas", "numpy", "uvicorn", "opentelemetry"} == set()
    unneeded = ("prometheus_client", "breakwater.kernel.telemetry.tracing")
    assert [name for name in of_command_line if name.startswith(unneeded)] == []
    # Packages of others import parts of the SDK's metrics where it is installed.
    of_traces = ("opentelemetry.sdk.trace", "opentelemetry.exporter")
    assert [name for name in of_services if name.startswith(of_traces)] == []
