"""All limits of a config in one table, whatever they are called there."""

from __future__ import annotations

import json
from pathlib import Path

from breakwater.config import parse_config
from breakwater.limits.views import limit_document
from tests.commands import run_command

CONFIG = """
providers: {openai: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: gpt-4o, guard: off}
models: {gpt-4o: {rate_limit: {requests_per_minute: 500, tokens_per_minute: 100000, concurrent_calls: 8}}}
agents:
  writer: {budget: {daily_usd: 10, monthly_usd: "200.5", enforcement: hard}, max_cost_usd: 1}
  bot:
    rate_limit: {tokens: 5000, per: day}
    guard: {max_iterations: 7, max_tokens: off, max_cost_usd: "0.000000001", rate_limit: {requests: 9, per: hour, on_exceeded: fail}}
  free: {budget: {monthly_usd: 3, enforcement: none}}
cost_tags: [project]
budgets:
  global: {monthly_usd: 1000, soft_at_percent: [90]}
  limits:
    - {scope: "key:*", usd: 20, per: month}
    - {scope: "user:* within team:research", usd: 2, per: week, action: alert, thresholds: [90, 50]}
    - {scope: "tag:project=web", usd: 9, per: quarter, action: count}
  tenants: {"*": {daily_usd: 1, enforcement: hard, on_exceeded: fail}, acme: {daily_usd: 0, enforcement: hard}}
"""  # noqa: E501

LIMITS = [
    ("model:gpt-4o", "requests", "minute", 500, "wait", ()),
    ("model:gpt-4o", "tokens", "minute", 100_000, "wait", ()),
    ("model:gpt-4o", "concurrent", None, 8, "wait", ()),
    ("agent:writer", "usd", "day", "10.000000000", "cheaper_model", (50, 80, 100)),
    ("agent:writer", "usd", "month", "200.500000000", "cheaper_model", (50, 80, 100)),
    ("job:* within agent:writer", "usd", "total", "1.000000000", "cheaper_model", ()),
    ("agent:bot", "tokens", "rolling day", 5_000, "wait", ()),
    ("task:* within agent:bot", "requests", "total", 7, "refuse", (80, 100)),
    ("task:* within agent:bot", "usd", "total", "0.000000001", "refuse", (80, 100)),
    ("task:* within agent:bot", "requests", "hour", 9, "cheaper_model", ()),
    ("agent:free", "usd", "month", "3.000000000", "count", ()),
    ("plane", "usd", "month", "1000.000000000", "alert", (90,)),
    ("tenant:*", "usd", "day", "1.000000000", "refuse", (50, 80, 100)),
    ("tenant:acme", "usd", "day", "0.000000000", "cheaper_model", (50, 80, 100)),
    ("key:*", "usd", "month", "20.000000000", "refuse", (50, 80, 100)),
    ("user:* within team:research", "usd", "week", "2.000000000", "alert", (50, 90)),
    ("tag:project=web", "usd", "quarter", "9.000000000", "count", ()),
]


def test_every_setting_that_limits_calls_is_a_limit() -> None:
    documents = [limit_document(limit) for limit in parse_config(CONFIG).limit_table.limits]
    assert [tuple(document.values())[1:] for document in documents] == LIMITS
    ids = [document["id"] for document in documents]
    assert ids[3] == "agents.writer.budget.daily_usd"
    assert len({*ids}) == len(ids)


def test_config_check_prints_them_on_request(tmp_path: Path) -> None:
    config = tmp_path / "breakwater.yaml"
    config.write_text(CONFIG)
    printed = run_command("config", "check", str(config), "--expand").stdout
    assert "task:* within agent:bot" in printed
    assert "agents.bot.guard.rate_limit.requests" in printed
    limits = json.loads(run_command("config", "check", str(config), "--expand", "--json").stdout)["limits"]
    assert [tuple(limit.values())[1:5] for limit in limits] == [limit[:4] for limit in LIMITS]
    assert "limits" not in json.loads(run_command("config", "check", str(config), "--json").stdout)
