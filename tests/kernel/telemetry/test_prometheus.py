"""The rules for Prometheus: whatever they name is exported by a service, and they raise what they are to raise."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from breakwater.alerts.contract import IncidentStatus
from breakwater.breakers.contract import BreakerState, Health
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import Status
from breakwater.kernel.nats.subjects import Stream
from breakwater.limits.contract import BudgetScope, Enforcement
from breakwater.services.__main__ import NAMES
from tests.kernel.telemetry.test_metrics import documented
from tests.tables import each_row

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DIRECTORY / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
CONFIG: dict[str, Any] = yaml.safe_load((DIRECTORY / "prometheus.yaml").read_text())
[SCRAPED] = CONFIG["scrape_configs"]
TARGET = {"job", "instance", "service"}
"""The labels that a scrape adds."""

VALUES: dict[str, set[str]] = {
    "job": {SCRAPED["job_name"]},
    "service": set(NAMES),
    "state": set(get_args(BreakerState)),
    "health": set(get_args(Health)),
    "kind": set(get_args(ErrorKind)),
    "status": {*get_args(Status), *get_args(IncidentStatus)},
    "enforcement": set(get_args(Enforcement)),
    "scope": set(get_args(BudgetScope)),
    "stream": {stream.value for stream in Stream},
}
"""The values of labels that rules may select by."""

SELECTION = re.compile(r"([a-z_:]+[a-z0-9_:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")
NAMED = re.compile(r"\bbreakwater[_:][a-z0-9_:]+|\bup\b")


def labels_of(metric: str) -> set[str] | None:
    """The labels of a metric, or of what a rule records; None where nothing exports it."""
    if metric == "up":
        return TARGET
    if ":" in metric:
        found = [rule["expr"] for rule in RULES if rule.get("record") == metric]
        return None if len(found) != 1 else labels_left(found[0])
    for name, (kind, labels) in documented().items():
        if metric == name:
            return {*labels, *TARGET}
        if kind == "histogram" and metric == f"{name}_bucket":
            return {*labels, *TARGET, "le"}
        if kind == "histogram" and metric in (f"{name}_count", f"{name}_sum"):
            return {*labels, *TARGET}
    return None


def labels_left(expression: str) -> set[str]:
    """The labels of what an expression gives: those it is grouped by, without groups those of its metrics."""
    groups = GROUPING.findall(expression)
    if groups:
        return {label.strip() for label in groups[0].split(",")} - {"le"}
    if re.match(r"(min|max|sum)\(", expression):
        return set()
    return {label for metric in NAMED.findall(expression) for label in labels_of(metric) or ()}


def problems(expression: str) -> Iterator[str]:
    """What an expression names that no service exports."""
    metrics = NAMED.findall(expression)
    if not metrics:
        yield "no metric of ours is named"
    known = {metric: labels_of(metric) for metric in metrics}
    yield from (f"nobody exports {metric}" for metric, labels in known.items() if labels is None)
    for metric, selected in SELECTION.findall(expression):
        for label, values in MATCHER.findall(selected):
            if label not in (known.get(metric) or ()):
                yield f"{metric} has no label {label}"
            yield from (f"{label} is never {value}" for value in values.split("|") if value not in VALUES[label])
    every = {label for labels in known.values() for label in labels or ()}
    for group in GROUPING.findall(expression):
        yield from (f"none has the label {label.strip()}" for label in group.split(",") if label.strip() not in every)


@each_row("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_names_nothing_that_no_service_exports(rule: dict[str, Any]) -> None:
    assert list(problems(rule["expr"])) == []
    texts = " ".join(rule.get("annotations", {}).values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels_left(rule["expr"])


@each_row(
    ("expression", "said"),
    [
        ("rate(breakwater_jobs_totals[5m]) > 0", "nobody exports breakwater_jobs_totals"),
        ("breakwater_jobs_total_bucket > 0", "nobody exports breakwater_jobs_total_bucket"),
        ("breakwater:never_recorded:max > 0", "nobody exports breakwater:never_recorded:max"),
        ('breakwater_jobs_total{state="open"}', "breakwater_jobs_total has no label state"),
        ('breakwater_breaker_state{state=~"open|opened"} == 1', "state is never opened"),
        ("sum by (channel) (breakwater_jobs_total)", "none has the label channel"),
        ("vector(1)", "no metric of ours is named"),
    ],
)
def test_what_nobody_exports_is_found(expression: str, said: str) -> None:
    assert said in list(problems(expression))


def test_the_dashboards_ask_nothing_of_prometheus_that_it_does_not_have() -> None:
    def expressions(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from (part["expr"],) if isinstance(part.get("expr"), str) else ()
            for inner in part.values():
                yield from expressions(inner)
        elif isinstance(part, list):
            for inner in part:
                yield from expressions(inner)

    files = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    assert files
    for file in files:
        for expression in expressions(json.loads(file.read_text())):
            assert list(problems(expression)) == [], file.name


def test_alerts_say_how_bad_they_are_and_what_to_do() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 15
    for rule in alerts:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_every_service_of_the_compose_file_is_scraped_and_missed() -> None:
    [targets] = SCRAPED["dns_sd_configs"]
    assert set(targets["names"]) == set(NAMES)
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {services[name]["environment"]["BREAKWATER_METRICS_PORT"] for name in NAMES} == {targets["port"]}
    [missing] = [rule["expr"] for rule in RULES if rule.get("alert") == "BreakwaterServiceMissing"]
    assert set(re.findall(r'absent\(up\{job="breakwater", service="(\w+)"\}\)', missing)) == set(NAMES)
    assert CONFIG["rule_files"] == ["rules.yaml"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package `prometheus` has it)")
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yaml"), ("test", "rules", "rules.test.yaml")], ids=" ".join
)
def test_prometheus_takes_the_files_and_the_rules_raise_what_they_are_to_raise(arguments: tuple[str, ...]) -> None:
    ran = subprocess.run(["promtool", *arguments], cwd=DIRECTORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
