"""The generated contract is valid in its own formats, and agrees with what is sent."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from breakwater.alerts.channels.channel import envelope
from breakwater.alerts.contract import Alert, AlertDigest, HeldBack, WebhookEnvelope
from breakwater.breakers.contract import BreakerTransition
from breakwater.cli.commands.contract import config_schema, files
from breakwater.config import parse_config
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution, Progress, Result
from breakwater.kernel.nats import subjects, topology
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.types import Event
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.records.channels import CHANNELS
from breakwater.records.schemas import ON_WEBHOOKS
from tests.cli.conftest import Run
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
ATTEMPT = Attempt(
    attempt_id="j:1",
    execution_id="j",
    job_id="j",
    agent="a",
    number=1,
    model="m",
    provider="p",
    started_at=NOW,
    completed_at=NOW,
    duration_ms=5,
    cost=42_000,
    cost_basis="billed",
    outcome="error",
    error=ErrorInfo(kind="server", class_="InternalServerError", message="no", status_code=500, retryable=True),
    cause="first",
)
ENDED: dict[str, Any] = {
    "execution_id": "j",
    "job_id": "j",
    "agent": "a",
    "status": "dead_lettered",
    "reason": "error",
    "attempts": (ATTEMPT,),
    "queued_at": NOW,
    "dispatched_at": NOW,
    "completed_at": NOW,
    "duration_ms": 9,
}
ALERT = Alert(
    alert_id="alert_i_1",
    incident_id="inc_i",
    key="breaker_open/a/m",
    change="opened",
    status="firing",
    event="breaker_open",
    severity="critical",
    title="t",
    text="x",
    payload={},
    count=1,
    version=1,
    opened_at=NOW,
    last_at=NOW,
    source_id="s",
    at=NOW,
)
DIGEST = AlertDigest(
    digest_id="digest_i",
    why="quiet_hours",
    severity="critical",
    held_from=NOW,
    held_until=NOW,
    counts={"breaker_open": 1},
    alerts=(HeldBack.model_validate(ALERT.model_dump()),),
    at=NOW,
)
EVENTS: list[Event] = [
    ATTEMPT,
    Execution(**ENDED),
    Result(**ENDED),
    Progress(execution_id="j", job_id="j", agent="a", state="queued", at=NOW),
    BreakerTransition(
        transition_id="a/m#0.1",
        agent="a",
        model="m",
        from_state="closed",
        to_state="open",
        reason="3 in a row",
        consecutive_failures=3,
        errors=3,
        cooldown_s=60,
        version=1,
        at=NOW,
    ),
    GuardEvent(
        event_id="g",
        kind="tripped",
        agent="a",
        task_id="t",
        task_key="t",
        rule="max_iterations",
        reason="10 iterations (limit: 10)",
        iterations=10,
        tokens=1,
        cost=42_000,
        consecutive_failures=0,
        total_failures=0,
        unique_errors=0,
        at=NOW,
    ),
    BudgetEvent(
        event_id="e",
        kind="hard_cap",
        scope="global",
        window="daily",
        period="2026-11-21",
        threshold_percent=100,
        limit=1,
        total=2,
        enforcement="hard",
        at=NOW,
    ),
    ALERT,
    DIGEST,
    WebhookEnvelope(type="breaker_open", timestamp=NOW, data=ALERT, link="https://breakwater.example.com/i"),
    DeadLetter(reason="invalid", error="no", stream="JOBS", subject="bw.jobs.a", sequence=1, payload_base64="", at=NOW),
]


@pytest.fixture(scope="module")
def contract() -> dict[str, str]:
    return files()


def schema(contract: dict[str, str], name: str) -> dict[str, Any]:
    return json.loads(contract[f"schemas/{name}.json"])


def validate(document: object, schema: dict[str, Any]) -> None:
    """Raises ValidationError if a document does not match. That a schema is one is tested once, for all of them."""
    jsonschema.Draft202012Validator(schema).validate(document)


def test_every_schema_is_a_schema_and_names_itself(contract: dict[str, str]) -> None:
    names = [name for name in contract if name.startswith("schemas/")]
    assert len(names) == len({channel.message for channel in CHANNELS}) + len(ON_WEBHOOKS)
    parts: dict[str, dict[str, Any]] = {}
    for name in [*names, "breakwater.schema.json"]:
        document = json.loads(contract[name])
        assert list(document)[:3] == ["$schema", "$id", "title"]
        # What several schemas define alike is checked once.
        definitions = document.pop("$defs", {})
        parts |= {json.dumps(part): part for part in (document, *definitions.values())}
    for part in parts.values():
        jsonschema.Draft202012Validator.check_schema(part)


@each_row("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_is_sent_is_valid_and_a_schema_that_forgets_a_field_would_be_noticed(
    contract: dict[str, str], event: Event
) -> None:
    document = schema(contract, type(event).__name__)
    sent = json.loads(event.json_bytes())
    validate(sent, document)
    assert set(sent) == set(document["properties"])
    with pytest.raises(jsonschema.ValidationError):
        validate({name: value for name, value in sent.items() if name != document["required"][0]}, document)


def test_what_webhooks_are_sent_is_valid_and_something_else_is_not(contract: dict[str, str]) -> None:
    document = schema(contract, "WebhookEnvelope")
    for sent in (envelope(ALERT, None), envelope(ALERT, lambda *_: "https://x.example.com"), envelope(DIGEST, None)):
        validate(json.loads(sent), document)
        for wrong in ({"type": "news"}, {"data": {"title": "t"}}):
            with pytest.raises(jsonschema.ValidationError):
                validate({**json.loads(sent), **wrong}, document)


@each_row(
    "job",
    [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}], "prompt": None}, {"input": {"x": 1}}],
    ids=str,
)
def test_jobs_that_are_accepted_are_valid(contract: dict[str, str], job: dict[str, Any]) -> None:
    validate({"agent": "a", **job}, schema(contract, "Job"))


@each_row(
    "job",
    [{}, {"prompt": "hi", "input": 1}, {"prompt": "hi", "promt": "x"}, {"prompt": "hi", "total_timeout_s": 0}],
    ids=str,
)
def test_jobs_that_are_refused_are_invalid(contract: dict[str, str], job: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate({"agent": "a", **job}, schema(contract, "Job"))


def test_asyncapi_has_no_dangling_reference(contract: dict[str, str]) -> None:
    document = yaml.safe_load(contract["asyncapi.yaml"])
    references = list(references_in(document))
    assert len(references) > 3 * len(CHANNELS)
    for reference in references:
        file, _, pointer = reference.partition("#")
        target = document if not file else json.loads(contract[file.removeprefix("./")])
        for part in pointer.strip("/").split("/") if pointer else ():
            target = target[part]
        assert target


def references_in(node: Any) -> Any:
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference
        for value in node.values():
            yield from references_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from references_in(value)


def test_asyncapi_has_the_parts_that_version_3_asks_for(contract: dict[str, str]) -> None:
    document = yaml.safe_load(contract["asyncapi.yaml"])
    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(document["info"])
    for channel in document["channels"].values():
        assert set(re.findall(r"{(\w+)}", channel["address"])) == set(channel["parameters"])
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel = document["channels"][operation["channel"]["$ref"].rpartition("/")[2]]
        for message in operation["messages"]:
            assert message["$ref"].rpartition("/")[2] in channel["messages"]


def test_the_addresses_are_the_subjects_that_the_code_uses_and_their_streams_take_them() -> None:
    made = {
        "jobs": subjects.job("A"),
        "cancel": subjects.cancel("J"),
        "agents": subjects.AGENTS,
        "results": subjects.result("J"),
        "attempts": subjects.attempt("A", "E", 1),
        "executions": subjects.execution("A", "E"),
        "breakers": subjects.breaker("A", "M"),
        "shadow_breakers": subjects.shadow_breaker("A", "M"),
        "shadow_budgets": subjects.shadow_budget("global", "daily"),
        "guards": subjects.guard("A"),
        "plans": subjects.plan("P"),
        "budgets": subjects.budget("global", "daily"),
        "limits": subjects.limit("raised"),
        "alerts": subjects.alert("breaker_open"),
        "audit": subjects.audit("raise_cap"),
        "progress": subjects.progress("A", "E"),
        "chunks": subjects.chunks("A", "E"),
        "dead_letters": subjects.dead_letter("invalid", "A"),
    }
    streams = {stream.name: stream.subjects or [] for stream in topology.streams(Plan(agents={"A": 1}))}
    assert made.keys() == {channel.name for channel in CHANNELS}
    for channel in CHANNELS:
        form = re.sub(r"{\w+}", "[^.]+", channel.address.replace(".", r"\."))
        assert re.fullmatch(form, made[channel.name])
        if channel.stream is not None:
            prefixes = tuple(subject.removesuffix(">") for subject in streams[channel.stream.value])
            assert made[channel.name].startswith(prefixes)


CONFIG = """
providers: {local: {base_url: "http://127.0.0.1:9/v1", api_key: {env: KEY}}}
models: {m: {price: {input_usd_per_mtok: 0.15, output_usd_per_mtok: "0.60"}}}
budgets: {timezone: Europe/Berlin, global: {daily_usd: 10, enforcement: hard}}
agents: {a: {model: m, breaker: off}, b: {model: m, breaker: {consecutive_failures: 5}}}
"""


def test_the_config_schema_takes_what_the_program_takes(contract: dict[str, str]) -> None:
    document = yaml.safe_load(CONFIG)
    assert parse_config(CONFIG).agents["a"].breaker is None
    validate(document, json.loads(contract["breakwater.schema.json"]))
    document["agents"]["a"]["modle"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        validate(document, config_schema())


@each_row("example", sorted(ROOT.glob("examples/**/breakwater*.yaml")), ids=lambda path: path.name)
def test_the_example_configs_are_valid(example: Path) -> None:
    validate(yaml.safe_load(example.read_text()), config_schema())


def test_the_same_code_gives_the_same_bytes(contract: dict[str, str]) -> None:
    assert files() == contract


def test_check_lists_what_is_stale_and_writes_nothing(
    run: Run, tmp_path: Path, contract: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.cli.commands.contract.files", lambda: contract)
    out = tmp_path / "proto"
    assert run("contract", "--out", str(out)).code == 0
    (out / "openapi.json").write_text("{}")
    (out / "schemas" / "Job.json").unlink()
    (out / "schemas" / "Old.json").write_text("{}")
    ran = run("contract", "--out", str(out), "--check", "--json")
    assert ran.code == 1
    assert ran.json["stale"] == {
        "openapi.json": "differs",
        "schemas/Job.json": "is missing",
        "schemas/Old.json": "is no longer part of the contract",
    }
    assert (out / "openapi.json").read_text() == "{}"
    assert run("contract", "--out", str(out)).code == 0
    assert not (out / "schemas" / "Old.json").exists()
    assert run("contract", "--out", str(out), "--check").out.endswith("all up to date\n")


def test_the_readme_covers_every_file_and_no_other() -> None:
    text = (ROOT / "proto" / "README.md").read_text()
    for name in ("schemas/<Message>.json", "asyncapi.yaml", "openapi.json", "breakwater.schema.json"):
        assert name in text


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
def test_the_readmes_javascript_encodes_as_the_code_does() -> None:
    text = (ROOT / "proto" / "README.md").read_text()
    functions = re.search(r"```js\n(.*?)\n\nawait", text, re.DOTALL)
    assert functions is not None
    names = ["gpt-4.1:mini", "écrivain > all/*", "a'b(c)!~d", "日本"]
    script = f"{functions[1]}\nconsole.log(JSON.stringify({json.dumps(names)}.map(encodeToken)))"
    ran = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [subjects.encode_token(name) for name in names]
