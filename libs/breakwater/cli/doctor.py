"""`breakwater doctor`: is everything there, does it answer, is it set up as it should be."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import typer

from breakwater.cli import output
from breakwater.cli.connect import run
from breakwater.cli.errors import ExitCode, expected
from breakwater.cli.plane import ConfigOption, DataOption, JsonOption, Plane

if TYPE_CHECKING:
    from breakwater.cli.doctor_findings import Finding

_LEAST_WIDTH = 30


def doctor(config: ConfigOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Check the plane: config, servers, streams, schema, lags, clocks, providers. Changes nothing, calls no model.

    Each line is ok, warn or fail, with what to do about it. Ends with code 1 if anything fails.

    For example:

        breakwater doctor

        breakwater doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    from breakwater.cli.doctor_checks import all_findings, secrets
    from breakwater.cli.doctor_findings import Finding, worst

    plane = Plane(data)
    findings: list[Finding] = []
    settings = None
    try:
        settings = plane.config(config)
    except Exception as error:
        known = expected(error)
        if known is None:
            raise
        findings.append(Finding("config", "fail", known.message, "Name it with --config, and mend what is listed."))
    else:
        count = len(settings.agents)
        what = f"{plane.config_file(config)} is right, {count} {'agent' if count == 1 else 'agents'}"
        findings += [Finding("config", "ok", what), *secrets(settings)]
    findings += run(all_findings(plane, settings))
    verdict = worst(findings)
    if as_json:
        output.json_document({"verdict": verdict, "findings": findings})
    else:
        _show(findings)
    if verdict == "fail":
        raise typer.Exit(ExitCode.FAILED)


def _show(findings: list[Finding]) -> None:
    area_width = max(len(finding.area) for finding in findings)
    indent = " " * (area_width + 8)
    for finding in findings:
        first, *more = _wrapped(finding.text, len(indent)) or [""]
        output.styled(
            output.state(finding.verdict, f"{finding.verdict:<4}"), f"  {finding.area:<{area_width}}  {first}"
        )
        for line in more:
            output.styled(f"{indent}{line}")
        if finding.verdict != "ok":
            for line in _wrapped(finding.remedy, len(indent)):
                output.styled((f"{indent}{line}", "dim"))
    counts = {name: sum(finding.verdict == name for finding in findings) for name in ("ok", "warn", "fail")}
    output.styled("", *_counts(counts))


def _wrapped(text: str, indent: int) -> list[str]:
    """The lines of a text, folded to the terminal's width; left as they are in a pipe."""
    screen = output.terminal_width()
    if screen is None or screen - indent < _LEAST_WIDTH:
        return text.splitlines()
    return [part for line in text.splitlines() for part in textwrap.wrap(line, screen - indent)]


def _counts(counts: dict[str, int]) -> list[output.Cell]:
    cells: list[output.Cell] = []
    for name, count in counts.items():
        if count:
            cells += [", " if cells else "", output.state(name, f"{count} {name}")]
    return cells
