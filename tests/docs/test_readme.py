"""What README.md and the pages for newcomers show runs as it stands there, on the stack that they say to start."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.docs.conftest import Checkout
from tests.docs.markdown import README, ROOT, Block, blocks, inline_code
from tests.helpers import wait_until
from tests.nodejs import node_with

pytestmark = pytest.mark.long(about_s=25, together=True)

TUTORIAL = ROOT / "docs" / "tutorial.md"
NOT_RUN_HERE = (
    "make ",
    "uvx ",
    "docker ",
    "cp examples/breakwater.yaml tutorial.yaml\nmake ",
    "+import os\n from anthropic ",
    "breakwater suggest > ",
)
"""What installs, or needs Docker, or Anthropic's SDK, which `make sdks` runs, or eight days of jobs.

That these targets and services exist is tested in test_documents.py, the patch in replay/test_suggest_command.py.
"""

PAGES = (
    README,
    *(
        ROOT / "docs" / name
        for name in (
            "jobs.md",
            "apis.md",
            "python-client.md",
            "commands.md",
            "config.md",
            "adoption.md",
        )
    ),
)
"""Whose blocks run on the stack, in this order. Those of analytics.md have a test of their own."""


def runnable(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.language in {"sh", "python"} and not block.text.startswith((*NOT_RUN_HERE, "python examples/"))
    ]


def is_stored(checkout: Checkout, execution_id: str) -> bool:
    return checkout.breakwater("executions", execution_id).returncode == 0


def run_block(checkout: Checkout, block: Block, where: str, run_before: set[str] | None = None) -> None:
    """Runs the commands of a block, except those that are in a set, to which it adds the others."""
    whole = block.language != "sh" or block.text.startswith("export ")
    for command in [checkout.as_here(block.text)] if whole else checkout.commands(block.text):
        if run_before is not None and not whole:
            without_comments = shlex.join(shlex.split(command, comments=True))
            if without_comments in run_before:
                continue
            run_before.add(without_comments)
        ran = checkout.sh(command) if block.language == "sh" else checkout.python(command)
        said = f"{where}:\n{command}\n{ran.stdout}\n{ran.stderr}"
        assert ran.returncode == 0, said
        assert ran.stdout or ran.stderr or "activate" in command, f"nothing was printed: {said}"
        assert "Traceback" not in ran.stderr, said


# The breaker of an agent that several callers use opens on failures of several of them: these come before the pages
# on which other keys call it.


def test_all_blocks_of_the_tutorial_can_be_pasted_at_once(checkout: Checkout) -> None:
    example = (ROOT / "examples" / "breakwater.yaml").read_text()
    pasted = "".join(f"{block.text}\n" for block in runnable(TUTORIAL))
    said = checkout.paste(pasted)
    for text in (
        "Write a haiku about calm.",
        "gpt-4o-mini · 4 attempts",
        "Breaker open: content-writer on gpt-4o",
        "gpt-4o: answers",
        "was open, is now closed",
        "Added intern to tutorial.yaml, which the running plane has applied",
        "exit code 3: the job was dead-lettered",
        "Write one word.",
    ):
        assert text in said, f"{text}:\n{said}"
    assert (ROOT / "examples" / "breakwater.yaml").read_text() == example


def test_the_example_that_watches_hears_a_breaker_open_and_the_alert(checkout: Checkout) -> None:
    watch_an_incident(checkout, sys.executable, "examples/python/watch_alerts.py")


def test_the_node_examples_submit_and_watch(checkout: Checkout) -> None:
    node = node_with("@nats-io/transport-node", "@nats-io/jetstream")
    ran = checkout.run(node, "examples/node/submit.mjs")
    assert ran.returncode == 0, ran.stderr
    assert "Write a haiku about harbours." in ran.stdout
    watch_an_incident(checkout, node, "examples/node/watch.mjs")


def test_every_block_runs_as_written(checkout: Checkout) -> None:
    run_before: set[str] = set()
    for page in PAGES:
        assert runnable(page)
        for block in runnable(page):
            for job in re.findall(r"breakwater executions (\w+-\d+)", block.text):
                # It is there a second after it was decided, and a person takes longer than that to type.
                wait_until(lambda job=job: is_stored(checkout, job), f"{job} in ClickHouse")
            run_block(checkout, block, f"{page.name}, line {block.line}", run_before)


def test_the_jobs_of_the_page_succeeded(checkout: Checkout) -> None:
    page = ROOT / "docs" / "jobs.md"
    for block in runnable(page):
        if "order-471" in block.text:
            # Again, with the same id, as somebody does who copies it twice: the same execution answers.
            run_block(checkout, block, f"{page.name}, line {block.line}")
    shown = [found[1] for code in inline_code(page) if (found := re.fullmatch(r"GET (/\S+)", code))]
    assert shown == ["/api/v1/jobs/order-4711"]
    for path in (*shown, "/api/v1/jobs/order-4712"):
        status, result = checkout.get(path)
        assert (status, result["status"], result["attempts_count"]) == (200, "succeeded", 1), path


def test_the_plan_of_the_page_succeeded(checkout: Checkout) -> None:
    for block in runnable(ROOT / "docs" / "jobs.md"):
        if "report-47" in block.text:
            run_block(checkout, block, f"jobs.md, line {block.line}")
    wait_until(lambda: checkout.get("/api/v1/plans/report-47")[1]["state"] == "succeeded", "the plan's end")


def test_every_example_that_the_page_starts_submits_and_prints_the_answer(checkout: Checkout) -> None:
    (block,) = [one for one in blocks(ROOT / "docs" / "jobs.md") if one.text.startswith("python examples/")]
    http, nats, curl = checkout.commands(block.text)
    over_http, over_nats = checkout.sh(http), checkout.sh(nats)
    assert "examples/" in curl
    curl = checkout.run("sh", "-eu", stdin=curl.replace("examples/", "../"), within="examples/python")
    for ran in (over_http, over_nats):
        assert ran.returncode == 0, ran.stderr
        assert "Write a haiku about harbours." in ran.stdout  # the simulated provider repeats the prompt
        assert re.search(r"attempt\(s\), \$0\.\d{9}$", ran.stdout.strip())
    assert curl.returncode == 0, curl.stderr
    submitted, read_again = (json.loads(line) for line in curl.stdout.splitlines())
    assert submitted == read_again
    assert submitted["status"] == "succeeded"


def test_the_commands_that_up_prints_can_be_pasted(checkout: Checkout) -> None:
    log = checkout.path / "up.log"
    wait_until(lambda: " tail --since 1h" in log.read_text(), "what `up` prints at last")
    _, _, printed = log.read_text().partition("Next, in another terminal here:\n")
    submit, tail, *_ = (line.strip() for line in printed.splitlines())
    assert "Write a haiku about harbours." in checkout.sh(submit).stdout
    assert " tail --since 1h" in tail


def watch_an_incident(checkout: Checkout, *watcher: str) -> None:
    """Opens a breaker, and checks that the watcher prints it, and the alert; leaves the breaker closed."""
    watching = checkout.start(*watcher)
    too_long = threading.Timer(240, watching.kill)
    too_long.start()
    try:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "watching\n"
        checkout.script_provider({"gpt-4o": [{"status": 500}]})
        for _ in range(3):
            ran = checkout.breakwater("submit", "content-writer", "Is anybody there?")
            assert ran.returncode == 0, ran.stderr
            assert "gpt-4o-mini · " in ran.stderr  # the fallback
        # Soon after an earlier test the incident is the same one; and what that test did last may still be reported
        # here.
        wanted = [r"content-writer on gpt-4o: open, 3 jobs in a row failed"]
        wanted += [r"critical, (opened|reopened): Breaker open: content-writer on gpt-4o\."]
        lines: list[str] = []
        while not all(any(re.search(pattern, line) for line in lines) for pattern in wanted):
            lines.append(watching.stdout.readline())
            assert lines[-1], lines
    finally:
        too_long.cancel()
        watching.kill()
        watching.wait()
        checkout.script_provider({})
        assert checkout.breakwater("breakers", "reset", "content-writer", "gpt-4o").returncode == 0


def test_the_node_examples_are_valid_javascript() -> None:
    node = node_with()
    for program in sorted((ROOT / "examples" / "node").glob("*.mjs")):
        checked = subprocess.run([node, "--check", program], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_an_example_is_short_enough_to_be_read() -> None:
    programs = [file for file in (ROOT / "examples").glob("*/*.*") if file.suffix in {".py", ".mjs"}]
    assert len(programs) >= 5
    assert {file.name: lines for file in programs if (lines := len(file.read_text().splitlines())) >= 40} == {}
