from __future__ import annotations

from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml

from breakwater.config import Agent, Config, load_config, parse_config
from breakwater.local.demo import scenario
from breakwater.local.provider import build_script
from breakwater.prices.rules.price import tariff_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "breakwater.yaml"


def document(jobs: int = 300) -> dict[str, Any]:
    return scenario.config("http://127.0.0.1:1/v1", "http://127.0.0.1:2/alerts", Path("secrets"), jobs)


def demo_config(jobs: int = 300) -> Config:
    return parse_config(yaml.safe_dump(document(jobs)))


def without_cooldown(agent: Agent) -> Agent:
    assert agent.breaker is not None
    return agent.model_copy(update={"breaker": agent.breaker.model_copy(update={"cooldown_s": 0.0})})


def test_the_example_agents_are_those_of_the_example_but_for_their_cool_down() -> None:
    example, demo = load_config(EXAMPLE), demo_config()
    for name, agent in example.agents.items():
        assert without_cooldown(demo.agents[name]) == without_cooldown(agent)


def test_prices_and_the_budget_of_all_agents_are_those_of_the_example() -> None:
    example, demo = load_config(EXAMPLE), demo_config()
    assert {model: demo.models[model] for model in example.models} == example.models
    assert demo.budgets == example.budgets
    assert demo.alerts.on_events == example.alerts.on_events


def test_the_receiver_on_this_machine_is_the_one_channel_and_may_be_reached() -> None:
    alerts = demo_config().alerts
    assert list(alerts.channels) == [scenario.ALERT_CHANNEL]
    assert any(ip_address("127.0.0.1") in network for network in alerts.allow_networks)
    assert alerts.channels[scenario.ALERT_CHANNEL].rate_limit is None
    assert alerts.quiet_s < scenario.COOLDOWN_S


def test_the_provider_serves_every_model_at_the_price_of_the_config() -> None:
    script, config = build_script(scenario.provider_script(document(), 300, 1, "key")), demo_config()
    assert {model for agent in config.agents.values() for model in agent.chain} <= set(script.models)
    for model, rules in script.models.items():
        price = config.models[model].price
        assert price is not None
        assert (
            rules.price.input_usd_per_mtok,
            rules.price.output_usd_per_mtok,
            rules.price.cached_input_usd_per_mtok,
        ) == (price.input_usd_per_mtok, price.output_usd_per_mtok, price.cached_input_usd_per_mtok)


@pytest.mark.parametrize("jobs", [100, 300, 2000])
def test_the_small_budget_has_room_for_some_of_its_calls_and_not_for_all(jobs: int) -> None:
    agent = demo_config(jobs).agents["small-budget"]
    price = demo_config(jobs).models["gpt-4.1-mini"].price
    assert price is not None
    worst_case, cap = tariff_of(price).worst_case(300, agent.max_tokens), agent.budget.daily_usd
    assert worst_case is not None
    assert cap is not None
    least = 130 * 1_600  # nano-dollars for the shortest answer
    assert worst_case < cap < Counter(job.agent for _, job in scenario.plan_load(jobs, 1))["small-budget"] * least


@pytest.mark.parametrize("jobs", [100, 101, 300, 1999])
def test_half_of_the_jobs_of_every_agent_goes_each_way(jobs: int) -> None:
    planned = [job for _, job in scenario.plan_load(jobs, 1)]
    ways = Counter(job.metadata["way"] for job in planned)
    assert ways["http"] - ways["nats"] == jobs % 2
    assert len({job.job_id for job in planned}) == jobs
    for way in ("http", "nats"):
        assert {job.agent for job in planned if job.metadata["way"] == way} == set(scenario.SHARES)


def test_jobs_are_in_the_order_of_their_times_and_writers_come_before_in_and_after_the_outage() -> None:
    planned = scenario.plan_load(300, 1)
    begin, end = scenario.OUTAGE_S
    times = [at_s for at_s, _ in planned]
    assert times == sorted(times)
    assert times[-1] < scenario.LOAD_S
    for way in ("http", "nats"):
        writers = [at_s for at_s, job in planned if (job.agent, job.metadata["way"]) == ("content-writer", way)]
        assert sum(at_s < begin for at_s in writers) > 5
        assert sum(begin <= at_s < end for at_s in writers) > 5
        assert sum(at_s > end + scenario.COOLDOWN_S for at_s in writers) > 5


@pytest.mark.parametrize("seed", range(10))
def test_researchers_meet_the_hang_whatever_the_seed(seed: int) -> None:
    begin, end = scenario.HANG_S
    assert sum(job.agent == "deep-research" and begin <= at_s < end for at_s, job in scenario.plan_load(100, seed)) >= 3


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    assert scenario.plan_load(100, 7) == scenario.plan_load(100, 7)
    assert scenario.plan_load(100, 7) != scenario.plan_load(100, 8)
