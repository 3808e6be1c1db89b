"""What the documents name is there: files, links, commands, options, variables, subjects, tables, decisions."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import SecretStr

from breakwater.breakers.settings import BreakerRules
from breakwater.cli.main import every_command
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.nats.topology import Plan, streams
from breakwater.kernel.process.settings import Settings
from breakwater.limits.contract import BudgetScope
from breakwater.records.channels import CHANNELS
from breakwater.records.commands.executions import ListOrShowGroup
from breakwater.services.__main__ import NAMES
from breakwater.services.request.openapi import document
from tests.docs.markdown import (
    ADRS,
    DOCUMENTS,
    PAGES,
    README,
    ROOT,
    all_code,
    blocks,
    headings,
    inline_code,
    links,
    rows,
    section,
)
from tests.prices import usage_table
from tests.sdks import programs
from tests.sdks.__main__ import CLIENTS, version
from tests.services.worker.error_table import ROWS
from tests.tables import each_row

COMMANDS: Any = every_command()
SETTINGS = ROOT / "docs" / "settings.md"
NAMING = (*DOCUMENTS, ROOT / "deploy" / "prometheus" / "rules.yaml")
"""What names commands and files to whoever reads it."""
NOT_A_PATH = re.compile(r"[*<>{}…\s]|NNNN")
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMPOSE_SERVICES = set(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@each_row("document", DOCUMENTS, ids=named)
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in links(document):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        file = document if not target else (document.parent / target)
        assert file.exists(), f"{named(document)} links to {link}"
        if anchor:
            slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings(file)}
            assert anchor in slugs, f"{named(document)} links to {link}"


@each_row("document", NAMING, ids=named)
def test_every_path_that_is_named_exists(document: Path) -> None:
    roots = {file.name for file in ROOT.iterdir()}
    for code in inline_code(document):
        if "/" in code and code.split("/")[0] in roots and not NOT_A_PATH.search(code):
            assert (ROOT / code).exists(), f"{named(document)} names {code}"


@each_row("document", NAMING, ids=named)
def test_every_command_that_is_named_exists_with_its_options(document: Path) -> None:
    for code in all_code(document):
        for found in re.finditer(r"(?<![\w/.-])breakwater ([a-z][^|#`;]*)", code):
            words = re.findall(r"[^\s\"']+", found[1])
            command = COMMANDS.commands.get(words[0])
            assert command is not None, f"{named(document)} names `breakwater {words[0]}`"
            if hasattr(command, "commands") and len(words) > 1:
                shown = command.commands["list"] if isinstance(command, ListOrShowGroup) else None
                command = command.commands.get(words[1], shown)
                assert command is not None, f"{named(document)} names `breakwater {words[0]} {words[1]}`"
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            wrong = [word for word in words if word.startswith("--") and word not in known]
            assert wrong == [], f"{named(document)}: `breakwater {found[1]}`"


@each_row("document", DOCUMENTS, ids=named)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    for code in all_code(document):
        for target in re.findall(r"(?:^|[;&] *)make ([a-z]+)", code):
            assert target in MAKE_TARGETS, f"{named(document)} names `make {target}`"


def test_every_make_target_runs_a_command_that_exists() -> None:
    called = set(re.findall(r"\$\(BIN\)/breakwater ([a-z]+)", (ROOT / "Makefile").read_text()))
    assert called
    assert called <= set(COMMANDS.commands)


def test_every_container_that_is_named_exists() -> None:
    shown = [
        found
        for page in PAGES
        for block in blocks(page)
        for found in re.findall(
            r"(?:^|do )(docker compose .+?)(?:; done)?$", block.text.replace("\\\n", ""), re.MULTILINE
        )
    ]
    assert len(shown) > 10
    for line in shown:
        words = shlex.split(line, comments=True)
        assert words[:2] == ["docker", "compose"]
        if words[2] == "exec":
            assert words[3] in COMPOSE_SERVICES, line
        for word in words:
            if "=" in word:
                assert word.partition("=")[0] in COMPOSE_SERVICES


def test_the_table_of_variables_is_that_of_the_settings() -> None:
    def shown(default: object) -> str:
        if default is None:
            return "none"
        text = default.get_secret_value() if isinstance(default, SecretStr) else str(default)
        return f"`{text.lower() if isinstance(default, bool) else text}`"

    table = {name.strip("`"): default for name, default, _ in rows(SETTINGS, "variable")}
    assert table == {
        f"BREAKWATER_{name.upper()}": shown(field.default)
        for name, field in Settings.model_fields.items()
        if not field.exclude
    }


def test_the_table_of_exit_codes_is_that_of_the_program() -> None:
    assert {int(code) for code, _ in rows(SETTINGS, "code")} == {int(code) for code in ExitCode}


def test_the_table_of_subjects_is_the_contract() -> None:
    ages = {config.name: config.max_age for config in streams(Plan(agents={"any": 1}))}

    def kept(stream: str | None) -> str:
        if stream is None:
            return "not stored"
        hours = round((ages[stream] or 0) / 3600)
        return stream if not hours else f"{stream}, {hours} h" if hours <= 72 else f"{stream}, {hours // 24} days"

    table = {subject.strip("`"): stream for subject, stream, _ in rows(ROOT / "docs" / "subjects.md", "subject")}
    assert table == {channel.address: kept(channel.stream) for channel in CHANNELS}


def test_the_table_of_failures_is_the_one_that_is_walked_through_the_plane() -> None:
    yes = {True: "yes", False: "no"}
    table = rows(ROOT / "docs" / "reliability.md", "a call ends in")
    assert sorted((failure, *outcome) for failures, *outcome in table for failure in failures.split("; ")) == sorted(
        (row.name, f"`{row.kind}`", row.again, yes[row.counted], row.cost) for row in ROWS
    )


def test_the_table_of_what_providers_report_is_the_one_that_is_tested() -> None:
    table = "\n".join(map(str, usage_table.ROWS))
    assert f"|---|---|---|---|---|\n{table}\n\n" in (ROOT / "docs" / "costs.md").read_text()


def test_the_table_of_sdks_is_of_the_versions_that_are_pinned() -> None:
    found = {client.replace("`", ""): number for client, number, *_ in rows(ROOT / "docs" / "sdks.md", "client")}
    assert found == {client: version(client) for client in CLIENTS}


def test_the_conformance_testers_are_of_the_versions_that_are_pinned() -> None:
    pins = (ROOT / "tests" / "sdks" / "requirements.txt").read_text()
    packages = json.loads((ROOT / "tests" / "sdks" / "node" / "package.json").read_text())["dependencies"]
    found = {tester.partition(",")[0] for tester, *_ in rows(ROOT / "docs" / "sdks.md", "tester")}
    [comply] = re.findall(r"^llm-comply==(\S+)", pins, re.MULTILINE)
    assert found == {f"`llm-comply` {comply}", f"`compatcanary` {packages['compatcanary']}"}


def test_the_table_of_coding_agents_is_of_those_that_are_run() -> None:
    assert rows(ROOT / "docs" / "sdks.md", "program") == [
        (f"`{one.client}`", programs.VERSIONS[one.client], one.door, one.what) for one in programs.RUNS
    ]


def test_the_services_are_named() -> None:
    assert "`, `".join(NAMES) in README.read_text()


def test_what_is_shown_of_the_config_stands_in_the_example() -> None:
    example = [line.rstrip() for line in (ROOT / "examples" / "breakwater.yaml").read_text().splitlines()]
    page = ROOT / "docs" / "config.md"
    shown = [(file, block) for file in (README, page) for block in blocks(file) if block.language == "yaml"]
    assert len(shown) >= 5
    for file, block in shown:
        at = 0
        for line in block.text.splitlines():
            where = f"{named(file)}, line {block.line}"
            assert line in example[at:], f"{where}: {line!r} is not in the example, or not here"
            at = example.index(line, at) + 1


def test_the_pipelines_that_try_a_change_do_the_same() -> None:
    pipelines = [yaml.safe_load(block.text) for block in blocks(ROOT / "docs" / "config.md") if block.language == "yml"]
    of_github = [step["run"] for step in pipelines[0]["jobs"]["plan"]["steps"] if "run" in step]
    of_gitlab = pipelines[1]["plan"]["script"]
    [plan] = {line for line in (*of_github, *of_gitlab) if line.startswith("breakwater ")}
    assert plan in of_github
    assert plan in of_gitlab
    assert plan.endswith(f" > {pipelines[1]['plan']['artifacts']['paths'][0]}")


def test_what_is_said_to_be_missing_is_missing() -> None:
    """Whoever adds one of these takes it off the list."""
    text = section(README, "Not there yet")
    paths = set(document()["paths"])
    there = {
        "`dlq list`": "dlq" in COMMANDS.commands,
        "`/metrics`": "/metrics" in paths,
        "the OpenAI-compatible endpoint": "/v1/chat/completions" in paths,
        "budgets by tenant": "tenant" in get_args(BudgetScope),
        "`same_error`": "same_error" in BreakerRules.model_fields,
        "`failure_rate`": "failure_rate" in BreakerRules.model_fields,
    }
    assert {name: name in text for name in there} == {name: not is_there for name, is_there in there.items()}


def test_the_readme_stays_readable() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_says_what_jobs_executions_attempts_runs_tasks_sessions_and_plans_are() -> None:
    words = README.read_text().partition("\n## Words\n")[2].partition("\n## ")[0]
    assert len(words.strip().split("\n\n")) == 1, "it is one paragraph"
    terms = {"job", "execution", "attempt", "run", "task", "session", "plan", "Alerts", "incident", "dead letter"}
    assert terms <= set(re.findall(r"\*\*([^*]+)\*\*", words))


def test_the_pages_have_no_more_than_32_000_words() -> None:
    # That of providers has a limit of its own: it is looked up, not read.
    pages = set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "providers.md"}
    words = {page.name: len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= 32_000, sorted(words.items(), key=lambda page: -page[1])


def test_the_changelog_is_kept_as_agreed() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]$", text, re.MULTILINE)
    first = text.partition("\n## [0.1.0]")[2]
    assert 0 < first.count("\n") <= 55, "the first version needs no history: it says what 0.1.0 is"
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_every_decision_has_its_number_its_three_parts_and_a_place_in_the_index() -> None:
    numbers = [file.name[:4] for file in ADRS]
    assert len(set(numbers)) == len(numbers)
    assert len(ADRS) >= 13
    index = [link for link in links(ROOT / "docs" / "adr" / "README.md") if not link.startswith("..")]
    assert sorted(index) == [file.name for file in ADRS]
    for file in ADRS:
        title, *parts = headings(file)
        assert title.startswith(f"{file.name[:4]}: "), file.name
        assert parts == ["Context", "Decision", "Consequences"], file.name
