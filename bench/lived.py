"""Predictions of `plan`, checked by living them: twenty changed policies, planned on one run and then run for real.

    python -m bench.lived [--seed 1] [--seconds 72] [--at-once 6] [--keep DIRECTORY]

A whole plane runs a made-up load once, under the policies of three agents. Each changed policy is planned on the record
of that run, and then the same jobs come at the same times to an agent that has it. The simulated provider has the same
weather for each: incidents by time, and the outcome, the latency and the tokens of each call by its job, attempt and
model, so that only the policy differs. Of each policy the refused jobs, the spend and the 95th percentile of the
durations are compared with the interval that the plan states. The exit code is 1 if for any of the three figures fewer
than 19 of 20 lie in it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import pickle
import random
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from breakwater.config import parse_config
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.local.provider.ledger import CallLedger, LedgerCall
from breakwater.replay.log import read_log
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.effects import REFUSALS, Effects, Estimate
from breakwater.replay.rules.engine import Replay
from breakwater.replay.rules.history import Changes, Policy, RecordedJob
from breakwater.replay.rules.world import World
from tests.flow.kit import Plane, config_for, running_plane
from tests.server_sources import embedded_servers

FIGURES = ("refused", "spend", "p95")
SHARE_WITHIN = 0.95
LONGEST_S = 120.0
"""The most time in seconds from the last job of a run to the last result."""

PRICE = {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60"}
RECORDED = {
    "writer": {
        "model": "sim/main",
        "fallback_models": ["sim/spare"],
        "max_tokens": 600,
        "concurrency": 200,
        "timeout_s": 4.5,
        "total_timeout_s": 30,
        "retry": {"max_attempts": 3, "base_s": 0.6, "max_delay_s": 3},
        "breaker": {"consecutive_failures": 3, "same_error": "off", "cooldown_s": 4.5},
    },
    "capped": {
        "model": "sim/main",
        "max_tokens": 600,
        "concurrency": 200,
        "timeout_s": 4.5,
        "retry": {"max_attempts": 2, "base_s": 0.6},
        "breaker": "off",
        "budget": {"daily_usd": "0.012", "enforcement": "hard"},
    },
    "stepper": {
        "model": "sim/spare",
        "max_tokens": 600,
        "concurrency": 200,
        "timeout_s": 9,
        "retry": {"max_attempts": 2, "base_s": 0.6},
        "breaker": "off",
        "guard": {"max_iterations": 5},
    },
    "other": {
        "model": "sim/third",
        "max_tokens": 600,
        "concurrency": 200,
        "retry": {"max_attempts": 1},
        "breaker": "off",
    },
}
"""The agents of the recorded run. The last is there so that its model has a record."""

JOBS_PER_S = {"writer": 4.0, "capped": 2.0, "stepper": 2.0, "other": 2.0}
STEPS = 6
"""The jobs of a task."""


@dataclass(frozen=True, slots=True)
class ChangedPolicy:
    """A change of an agent's settings.

    Attributes:
        name: in words.
        agent: the agent of the recorded run that it changes.
        settings: the settings of it that differ; those of sections are merged into it.
        price: the price of its model, if that differs.
    """

    name: str
    agent: str
    settings: Mapping[str, Any]
    price: Mapping[str, str] | None = None

    def applied(self) -> dict[str, Any]:
        """Returns the agent's settings under it."""
        settings: dict[str, Any] = copy.deepcopy(RECORDED[self.agent])
        for name, value in self.settings.items():
            section = settings.get(name)
            settings[name] = {**section, **value} if isinstance(section, dict) and isinstance(value, dict) else value
        return settings


POLICIES = (
    ChangedPolicy("a cap at half of the spend", "writer", {"budget": {"daily_usd": "0.025", "enforcement": "hard"}}),
    ChangedPolicy("at most $0.0004 a job", "writer", {"max_cost_usd": "0.0004"}),
    ChangedPolicy("no breaker", "writer", {"breaker": "off"}),
    ChangedPolicy("a breaker of one failure", "writer", {"breaker": {"consecutive_failures": 1}}),
    ChangedPolicy("a breaker by the rate of failures", "writer", {"breaker": {"failure_rate": 0.5, "within_s": 12}}),
    ChangedPolicy("a cool-down of 15 s", "writer", {"breaker": {"cooldown_s": 15}}),
    ChangedPolicy("a cool-down of 1.5 s", "writer", {"breaker": {"cooldown_s": 1.5}}),
    ChangedPolicy("one attempt", "writer", {"retry": {"max_attempts": 1}}),
    ChangedPolicy("five attempts", "writer", {"retry": {"max_attempts": 5}}),
    ChangedPolicy("a back-off of 3 s", "writer", {"retry": {"base_s": 3}}),
    ChangedPolicy("1.8 s an attempt", "writer", {"timeout_s": 1.8}),
    ChangedPolicy("4 s a job", "writer", {"total_timeout_s": 4}),
    ChangedPolicy("no fallback", "writer", {"fallback_models": []}),
    ChangedPolicy("another fallback", "writer", {"fallback_models": ["sim/third"]}),
    ChangedPolicy("the fallback first", "writer", {"model": "sim/spare", "fallback_models": ["sim/main"]}),
    ChangedPolicy("a cap of three quarters", "capped", {"budget": {"daily_usd": "0.009"}}),
    ChangedPolicy("twice the cap", "capped", {"budget": {"daily_usd": "0.024"}}),
    ChangedPolicy(
        "a model of twice the price", "capped", {}, {name: f"{2 * float(usd)}" for name, usd in PRICE.items()}
    ),
    ChangedPolicy("three steps a task", "stepper", {"guard": {"max_iterations": 3}}),
    ChangedPolicy("steps without a limit", "stepper", {"guard": {"max_iterations": 50}}),
)

CONTROLS = tuple(ChangedPolicy("unchanged, lived again", agent, {}) for agent in ("writer", "capped", "stepper"))
"""The recorded policies, which show how much differs by chance and by the speed of the machine alone."""

LIVED = (*POLICIES, *CONTROLS)


def provider_script(seed: int) -> dict[str, Any]:
    """Returns the behaviour of the models: two incidents of the first, and faults by chance of all."""
    usage = {"input_tokens": [60, 180], "output_tokens": [20, 500]}
    errors = [{"rate": 0.02, "status": 400}, {"rate": 0.05, "status": 500}]
    incidents = [
        {"from_s": 18, "to_s": 30, "rate": 0.9, "status": 503},
        {"from_s": 54, "to_s": 62, "rate": 0.7, "status": 500},
    ]
    return {
        "seed": seed,
        "models": {
            "sim/main": {
                "price": PRICE,
                "usage": usage,
                "latency_ms": {"p50": 800, "p95": 2100},
                "faults": [*incidents, {"rate": 0.02, "hang_s": 8}, *errors],
            },
            "sim/spare": {"price": PRICE, "usage": usage, "latency_ms": {"p50": 1200, "p95": 2700}, "faults": errors},
            "sim/third": {"price": PRICE, "usage": usage, "latency_ms": {"p50": 500, "p95": 900}, "faults": errors},
        },
    }


class LedgerByJob(CallLedger):
    """A ledger that numbers calls by their job and attempt, so that these decide what a model answers."""

    def begin(self, model: str, received_at: str, client_request_id: str | None = None) -> LedgerCall:
        """Enters a request, whose number depends on the job and the attempt alone, and on no agent's name."""
        call = super().begin(model, received_at, client_request_id)
        of_job = (client_request_id or "").partition(".")[2]
        number = int.from_bytes(blake2b(of_job.encode(), digest_size=6).digest()) + 1
        numbered = LedgerCall(call.seq, number, model, received_at, client_request_id)
        self._calls[call.seq] = numbered
        return numbered


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of the load.

    Attributes:
        at_s: when it is published, in seconds since the start.
        name: of the job, the same in each run.
        task: its task; None without one.
    """

    at_s: float
    name: str
    task: str | None


def load_of(agent: str, seed: int, seconds: float) -> list[PlannedJob]:
    """Returns the jobs of an agent, in the order of their times."""
    chance = random.Random(f"{seed} {agent}")
    jobs: list[PlannedJob] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(JOBS_PER_S[agent])) < seconds:
        number = len(jobs)
        task = f"t{number // (STEPS * 4) * 4 + number % 4}" if agent == "stepper" else None
        jobs.append(PlannedJob(at_s, f"{agent}-{number}", task))
    return jobs


async def run_at_once(plane: Plane, agents: Mapping[str, str], seed: int, seconds: float) -> None:
    """Runs the load of recorded agents through others, all at once, until each job has its result.

    Args:
        plane: the plane.
        agents: the recorded agent whose load it takes, by the name of the agent.
        seed: of the load.
        seconds: its length.
    """
    waiting: set[str] = set()
    done = asyncio.Event()

    async def on_result(message: Any) -> None:
        waiting.discard(message.subject)
        if not waiting:
            done.set()

    jobs = sorted(
        ((job, name) for name, recorded in agents.items() for job in load_of(recorded, seed, seconds)),
        key=lambda entry: entry[0].at_s,
    )
    waiting.update(subjects.result(f"{name}.{job.name}") for job, name in jobs)
    subscription = await plane.client.subscribe("bw.results.*", cb=on_result)
    loop = asyncio.get_running_loop()
    plane.sim.restart_clock()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for job, name in jobs:
            await asyncio.sleep(began + job.at_s - loop.time())
            body = {"agent": name, "job_id": f"{name}.{job.name}", "prompt": "How do I return a parcel?"}
            if job.task is not None:
                body["task_id"] = f"{name}.{job.task}"
            group.create_task(plane.publish(body))
    async with asyncio.timeout(LONGEST_S):
        await done.wait()
    await subscription.unsubscribe()


@dataclass(frozen=True, slots=True)
class Lived:
    """The record of all runs.

    Attributes:
        jobs: those of the recorded run.
        changes: what the services decided in it.
        runs: the jobs that were lived, by the number of their policy: those of the controls come last.
    """

    jobs: Sequence[RecordedJob]
    changes: Changes
    runs: Sequence[Sequence[RecordedJob]]


def lived_name(number: int) -> str:
    """Returns the name of the agent that lives a policy."""
    return f"lived-{number:02}"


def agents_of_runs() -> dict[str, dict[str, Any]]:
    """Returns all agents of the plane: those of the recorded run, and one for each policy.

    Where a policy has another price of a model, its agent calls that model by another name.
    """
    agents: dict[str, dict[str, Any]] = {**RECORDED}
    for number, changed in enumerate(LIVED):
        agent = agents[lived_name(number)] = changed.applied()
        if changed.price is not None:
            agent["model"] = f"{agent['model']}-{number}"
    return agents


def models_at_other_prices() -> dict[str, dict[str, Any]]:
    """Returns the further names of models, with their prices."""
    return {
        f"{RECORDED[changed.agent]['model']}-{number}": {
            "name": RECORDED[changed.agent]["model"],
            "provider": "sim",
            "price": changed.price,
        }
        for number, changed in enumerate(LIVED)
        if changed.price is not None
    }


@asynccontextmanager
async def seeded_plane(seed: int) -> AsyncGenerator[Plane]:
    """A plane of one worker on servers of its own, whose provider has the same weather for each policy."""
    with embedded_servers() as (servers, directory):
        async with running_plane(
            directory,
            nats_url=servers.nats().url,
            redis_url=servers.redis().url,
            script=provider_script(seed),
            agents=agents_of_runs(),
            retry_budget="off",
            more_models=models_at_other_prices(),
        ) as plane:
            plane.sim.ledger = LedgerByJob()
            await plane.ready("worker")
            yield plane


async def live(seed: int, seconds: float, at_once: int) -> Lived:
    """Runs the recorded policies, and then each changed one."""
    async with seeded_plane(seed) as plane:
        groups = [{name: name for name in RECORDED}]
        names = [(lived_name(number), policy.agent) for number, policy in enumerate(LIVED)]
        groups += [dict(names[first : first + at_once]) for first in range(0, len(names), at_once)]
        for group in groups:
            await run_at_once(plane, group, seed, seconds)
            await asyncio.sleep(2)
            sys.stderr.write(f"run: {', '.join(group)}\n")
        jobs, changes = await read_log(Lookup(lambda: plane.client))
    of_recorded = Changes(
        [event for event in changes.transitions if event.agent in RECORDED],
        [event for event in changes.budgets if event.agent in RECORDED],
        [event for event in changes.guards if event.agent in RECORDED],
    )
    runs = [[job for job in jobs if job.record.agent == lived_name(number)] for number in range(len(LIVED))]
    return Lived([job for job in jobs if job.record.agent in RECORDED], of_recorded, runs)


def policy_with(changed: ChangedPolicy | None) -> Policy:
    """Returns the policy of the recorded run with a change, as a config has it."""
    agents = {**RECORDED, **({} if changed is None else {changed.agent: changed.applied()})}
    models: dict[str, Any] = {}
    if changed is not None and changed.price is not None:
        models[RECORDED[changed.agent]["model"]] = {"price": changed.price}
    document = config_for("http://127.0.0.1:9/v1", agents, retry_budget="off", more_models=models)
    return policy_of(parse_config(json.dumps(document)))


def planned(lived: Lived, changed: ChangedPolicy) -> Effects:
    """Plans a policy on the recorded run, as the command does."""
    policy = policy_with(changed)
    effects = Effects(policy.zone, changed.agent)
    world = World(logged.attempt for job in lived.jobs for logged in job.attempts)
    replay = Replay(policy, policy_with(None), lived.changes, world, on_end=effects.add)
    replay.run(lived.jobs)
    replay.finish()
    return effects


@dataclass(frozen=True, slots=True)
class Checked:
    """A figure: as planned, and as it was when it was lived."""

    planned: Estimate
    truth: float

    @property
    def holds(self) -> bool:
        """True if the truth lies in the interval."""
        return self.planned.low <= self.truth <= self.planned.high


def checked(effects: Effects, records: Sequence[Execution]) -> dict[str, Checked]:
    """Compares the three figures of a plan with what was lived."""
    refused = sum(record.reason in REFUSALS for record in records)
    spend = sum(record.total_cost or 0 for record in records)
    return {
        "refused": Checked(effects.refused, refused),
        "spend": Checked(effects.spend, spend),
        "p95": Checked(effects.duration_ms(0.95), p95_of(records)),
    }


def p95_of(records: Iterable[Execution]) -> float:
    """Returns the duration that 95 % of jobs do not exceed, in milliseconds."""
    durations = sorted(record.duration_ms for record in records)
    return float(durations[math.ceil(0.95 * len(durations)) - 1]) if durations else 0.0


_SCALES = {"refused": 1.0, "spend": 1e6, "p95": 1.0}
_UNITS = {"refused": "jobs", "spend": "thousandths of a USD", "p95": "ms"}


def report(lived: Lived) -> int:
    """Prints the table. Returns the exit code."""
    titles = [f"{name} ({_UNITS[name]})" for name in FIGURES]
    print(f"| policy | jobs | {' | '.join(titles)} |\n|---|---|---|---|---|")
    within = dict.fromkeys(FIGURES, 0)
    for changed, jobs in zip(LIVED, lived.runs, strict=True):
        effects = planned(lived, changed)
        figures = checked(effects, [job.record for job in jobs])
        cells = [_cell(figures[name], _SCALES[name], is_control=changed in CONTROLS) for name in FIGURES]
        for name, figure in figures.items() if changed in POLICIES else ():
            within[name] += figure.holds
        print(f"| {changed.agent}: {changed.name} | {effects.jobs} | {' | '.join(cells)} |", flush=True)
    print("in their intervals:", ", ".join(f"{name} {count} of {len(POLICIES)}" for name, count in within.items()))
    return 0 if all(count >= SHARE_WITHIN * len(POLICIES) for count in within.values()) else 1


def _cell(figure: Checked, scale: float, *, is_control: bool) -> str:
    numbers = (figure.planned.before, figure.planned.after, figure.planned.low, figure.planned.high, figure.truth)
    digits = 1 if scale > 1 else 0
    before, after, low, high, truth = (f"{number / scale:,.{digits}f}" for number in numbers)
    if is_control:
        return f"{before}, lived {truth}"
    return f"{before} → {after} ({low} to {high}), lived {truth}{'' if figure.holds else ' **outside**'}"


def main() -> int:
    """Runs all, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the load and the weather (default 1)")
    parser.add_argument("--seconds", type=float, default=72.0, help="of each run (default 72)")
    parser.add_argument("--at-once", type=int, default=6, help="policies that are lived at a time (default 6)")
    parser.add_argument("--keep", type=Path, help="file for the record, which is read if it is there")
    options = parser.parse_args()
    if options.keep is not None and options.keep.exists():
        lived = pickle.loads(options.keep.read_bytes())
    else:
        lived = asyncio.run(live(options.seed, options.seconds, options.at_once))
        if options.keep is not None:
            options.keep.write_bytes(pickle.dumps(lived))
    return report(lived)


if __name__ == "__main__":
    sys.exit(main())
