"""When a deployment is an incident: by its refusals, or by nothing that succeeds on it while others answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from functools import reduce
from typing import Any

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.deployments import LAPSE, DeploymentWatch, continued_by_breaker, is_explained, refusal_of
from breakwater.alerts.rules.incidents import IncidentRules, decide, due
from breakwater.alerts.rules.incidents import Incidents as KnownIncidents
from breakwater.alerts.rules.signals import Firing, Resolved, Signal, key_of, of_execution, signals_of
from breakwater.alerts.settings import DeploymentRules, Reminders
from breakwater.jobs.contract.execution import ErrorInfo, Execution
from tests.records.samples import NOON, attempt, execution
from tests.services.alerter.kit import opened
from tests.tables import each_row

PRIMARY, FALLBACK = "openai/gpt-4o", "openai/gpt-4o-mini"
KEY = key_of("deployment_failing", "openai", PRIMARY)
RULES = IncidentRules(("deployment_failing", "breaker_open"), 600, (), Reminders())
REFUSED = {"kind": "client", "class": "UnauthorizedError", "message": "Incorrect API key provided", "status_code": 401}
NO_ACCESS = {"kind": "client", "class": "ForbiddenError", "message": "no access", "status_code": 403}
BROKEN = {"kind": "server", "class": "ServerError", "message": "internal error", "status_code": 500}
TOO_LONG = {"kind": "context_overflow", "class": "ContextOverflowError", "message": "too long", "status_code": 400}
SPENT = {"kind": "quota", "class": "QuotaExceededError", "message": "spent", "status_code": 429}


def fell_back(
    number: int, error: dict[str, Any] = REFUSED, *, at: datetime | None = None, answered: bool = True, **fields: Any
) -> Execution:
    """A job that the primary failed, and that the fallback answered at 2.1 times the cost, unless told otherwise."""
    at = at or NOON + timedelta(seconds=number)
    agent = fields.get("agent", "content-writer")
    name = f"e{number}"
    failed = attempt(name, 1, agent=agent, model=PRIMARY, outcome="error", error=error, started_at=at, cost=0)
    second = attempt(name, 2, agent=agent, model=FALLBACK, started_at=at, cause="fallback", cost=21_000)
    costs = {"total_cost": 21_000, "requested_model_cost": 10_000, "chosen_model": FALLBACK}
    unanswered = {"status": "dead_lettered", "reason": "error", "chosen_model": None, "error": error}
    given: dict[str, Any] = {"agent": agent, "requested_model": PRIMARY, "completed_at": failed.completed_at}
    given |= {"attempts": (failed, second), **costs} if answered else {"attempts": (failed,), **unanswered}
    return execution(name, **given | fields)


def served(number: int, *, at: datetime | None = None, model: str = PRIMARY, **fields: Any) -> Execution:
    """A job that its requested model answered."""
    agent = fields.pop("agent", "content-writer")
    only = attempt(
        f"e{number}", agent=agent, model=model, started_at=at or NOON + timedelta(seconds=number), duration_ms=500
    )
    return execution(f"e{number}", agent=agent, requested_model=model, chosen_model=model, attempts=(only,), **fields)


class Incidents:
    """A watch, and the incidents that its signals make."""

    def __init__(self, rules: DeploymentRules | None = None) -> None:
        self.rules = rules or DeploymentRules()
        self.alerts: dict[str, Alert] = {}
        self.restart()

    def restart(self) -> None:
        """Loses what the watch has in memory; the incidents stay."""
        self.watch = DeploymentWatch(self.rules, self.alerts.get)

    def end(self, *executions: Execution) -> list[str]:
        """Takes ended jobs. Returns the changes of incidents."""
        changes: list[str] = []
        for ended in executions:
            for signal in self.watch.add(ended):
                alert = decide(signal, self.alerts.get(signal.key), RULES)
                if alert is not None:
                    self.alerts[signal.key] = alert
                    changes.append(alert.change)
        return changes


def test_a_revoked_key_is_told_with_the_share_that_the_fallback_carries_and_its_cost() -> None:
    incidents = Incidents()
    assert incidents.end(*map(fell_back, range(19))) == ["opened"] + ["repeated"] * 18
    [alert] = incidents.alerts.values()
    assert (alert.key, alert.event, alert.severity, alert.agent) == (
        KEY,
        "deployment_failing",
        "critical",
        "*",
    )
    assert alert.title == (
        "openai refuses the key: all of content-writer's traffic is on openai/gpt-4o-mini, at 2.1 times the cost"
    )
    assert alert.text == (
        "Since 2026-11-21 12:00:00 UTC nothing has succeeded on openai/gpt-4o of openai: 19 jobs of content-writer "
        "failed there, the last one with UnauthorizedError, HTTP 401. To do: replace the key that "
        "`providers.openai.api_key` in the config refers to. `breakwater executions e18` shows that job."
    )
    assert {name: alert.payload[name] for name in ("refusal", "jobs", "fallback_share", "cost_factor")} == {
        "refusal": "key",
        "jobs": 19,
        "fallback_share": 1.0,
        "cost_factor": 2.1,
    }


def test_it_is_resolved_by_the_first_success_of_that_deployment_and_by_no_other() -> None:
    incidents = Incidents()
    incidents.end(fell_back(1))
    under_way = served(2, at=NOON)
    assert incidents.end(served(3, model=FALLBACK), served(4, model="openai/other"), under_way) == []
    assert incidents.end(served(5), served(6)) == ["resolved"]
    [alert] = incidents.alerts.values()
    assert (alert.status, alert.title, alert.resolved_by) == ("resolved", "openai/gpt-4o answers again", None)


def test_an_incident_survives_an_alerter_that_forgets_everything() -> None:
    incidents = Incidents()
    assert incidents.end(fell_back(1)) == ["opened"]
    incidents.restart()
    assert incidents.end(fell_back(2)) == ["repeated"], "one incident"
    incidents.restart()
    assert incidents.end(served(3)) == ["resolved"]
    incidents.restart()
    assert incidents.end(served(4)) == []


def test_one_incident_names_all_agents_of_a_deployment() -> None:
    incidents = Incidents()
    for number, agent in enumerate(("a", "b", "c", "d", "e", "a")):
        incidents.end(fell_back(number, agent=agent))
    [alert] = incidents.alerts.values()
    assert alert.title == (
        "openai refuses the key: all of the traffic of a, b, c and 2 other agents is on openai/gpt-4o-mini, "
        "at 2.1 times the cost"
    )
    assert alert.payload["agents"] == ["a", "b", "c", "d", "e"]
    assert alert.agent == "*", "channels of all agents are told"


@each_row(
    ("change", "traffic"),
    [
        ({}, "all of content-writer's traffic is on openai/gpt-4o-mini, at 2.1 times the cost"),
        ({"requested_model_cost": None}, "all of content-writer's traffic is on openai/gpt-4o-mini"),
        ({"requested_model_cost": 0}, "all of content-writer's traffic is on openai/gpt-4o-mini"),
        ({"cost_basis": "unknown"}, "all of content-writer's traffic is on openai/gpt-4o-mini"),
        ({"total_cost": 10_200}, "all of content-writer's traffic is on openai/gpt-4o-mini, at the same cost"),
        ({"total_cost": 600}, "all of content-writer's traffic is on openai/gpt-4o-mini, at 0.06 times the cost"),
        (
            {"total_cost": 24_000, "wasted_cost": 3_000},
            "all of content-writer's traffic is on openai/gpt-4o-mini, at 2.1 times the cost",
        ),
    ],
)
def test_the_share_and_the_cost_are_from_what_is_known_and_unknown_is_left_out(
    change: dict[str, Any], traffic: str
) -> None:
    incidents = Incidents()
    incidents.end(fell_back(1, **change))
    assert incidents.alerts[KEY].title == f"openai refuses the key: {traffic}"


def test_the_share_counts_what_the_agent_has_answered_by_other_models() -> None:
    incidents = Incidents()
    jobs = [fell_back(1), served(2, model="openai/other"), served(3, model="openai/other", agent="another")]
    incidents.end(*jobs, fell_back(4), served(5, model="openai/other", cache_hit=True), fell_back(6))
    assert incidents.alerts[KEY].payload["fallback_share"] == 0.75
    assert "75 % of content-writer's traffic is on openai/gpt-4o-mini" in incidents.alerts[KEY].title


def test_a_refused_key_without_a_fallback_says_so() -> None:
    incidents = Incidents()
    incidents.end(fell_back(1, answered=False))
    assert incidents.alerts[KEY].title == "openai refuses the key: no fallback answers the jobs of content-writer"
    assert incidents.alerts[KEY].payload["fallback_share"] is None


def test_a_fallback_that_fails_between_two_others_says_that_others_answer() -> None:
    incidents = Incidents()
    incidents.end(fell_back(1, requested_model="openai/first"))
    assert incidents.alerts[KEY].title == "openai refuses the key: other models answer the jobs of content-writer"
    assert incidents.alerts[KEY].payload["cost_factor"] is None


@each_row(
    ("error", "answered", "title"),
    [
        (NO_ACCESS, True, "openai denies access to openai/gpt-4o: "),
        (NO_ACCESS, False, None),  # it may be the request's fault; that the job failed is an incident of its own
        ({**NO_ACCESS, "message": "Your prompt was flagged by moderation"}, True, None),
        (
            {**REFUSED, "class": "NotFoundError", "status_code": 404},
            True,
            "openai does not know the model openai/gpt-4o: ",
        ),
        (
            {
                **REFUSED,
                "class": "BadRequestError",
                "status_code": 400,
                "message": "The model `x` has been decommissioned",
            },
            True,
            "openai does not know the model openai/gpt-4o: ",
        ),
        (
            {
                **REFUSED,
                "class": "BadRequestError",
                "status_code": 400,
                "message": "API key not valid. Pass a valid one.",
            },
            True,
            "openai refuses the key: ",
        ),
        ({**REFUSED, "class": "BadRequestError", "status_code": 400, "message": "temperature: too high"}, True, None),
        (TOO_LONG, True, None),
        (SPENT, True, None),  # has an incident of its own
        (BROKEN, True, None),  # one is none
    ],
)
def test_a_refusal_for_reasons_of_the_deployment_is_an_incident_and_one_that_follows_the_request_is_none(
    error: dict[str, Any], answered: bool, title: str | None
) -> None:
    incidents = Incidents()
    incidents.end(fell_back(1, error, answered=answered))
    titles = [alert.title.partition(": ")[0] + ": " for alert in incidents.alerts.values()]
    assert titles == ([] if title is None else [title])


@each_row(
    ("rules", "jobs", "every_s", "answered", "opened_at"),
    [
        ({}, 20, 1, True, 10),
        ({}, 20, 1, False, None),
        ({}, 2, 400, True, None),
        ({}, 5, 160, True, 3),
        ({"failed_jobs": None}, 20, 1, True, None),
        ({"failed_jobs": None}, 20, 100, True, 4),
        ({"failed_s": None}, 9, 1000, True, None),
        ({"failed_s": None}, 20, 1000, True, 10),
        ({"failed_jobs": 2}, 3, 1, True, 2),
        ({}, 20, LAPSE.total_seconds() + 1, True, None),
    ],
)
def test_nothing_that_succeeds_for_so_many_jobs_or_minutes_while_another_model_answers_is_an_incident(
    rules: dict[str, Any], jobs: int, every_s: float, answered: bool, opened_at: int | None
) -> None:
    incidents = Incidents(DeploymentRules.model_validate(rules))
    changes = [
        incidents.end(fell_back(number, BROKEN, at=NOON + number * timedelta(seconds=every_s), answered=answered))
        for number in range(jobs)
    ]
    opened_after = [number for number, made in enumerate(changes, 1) if made == ["opened"]]
    assert opened_after == ([] if opened_at is None else [opened_at])
    if opened_at is not None:
        assert incidents.alerts[KEY].title.startswith(
            "openai/gpt-4o answers nothing: all of content-writer's traffic is"
        )


def test_a_success_between_failures_begins_the_count_again() -> None:
    incidents = Incidents()
    for number in range(0, 60, 3):
        assert incidents.end(fell_back(number, BROKEN), fell_back(number + 1, BROKEN), served(number + 2)) == []


def test_a_job_counts_once_however_often_it_tried_and_by_how_it_ended_there() -> None:
    tries = [attempt("e1", n, model=PRIMARY, outcome="error", error=BROKEN, cause="retry") for n in range(1, 15)]
    refreshed = [attempt("e1", 1, model=PRIMARY, outcome="error", error=REFUSED), attempt("e1", 2, model=PRIMARY)]
    for attempts in (tries, refreshed):
        ended = execution(
            "e1", agent="content-writer", requested_model=PRIMARY, chosen_model=FALLBACK, attempts=attempts
        )
        assert Incidents().end(ended) == []


def test_what_made_no_call_says_nothing() -> None:
    refused = attempt("e1", model=PRIMARY, outcome="short_circuited", short_circuited=True, error=REFUSED)
    lost = attempt("e1", model=PRIMARY, outcome="worker_lost", error=REFUSED)
    for job in (execution("e1", attempts=(refused,)), execution("e1", attempts=(lost,)), fell_back(1, dry_run=True)):
        assert Incidents().end(job) == []


def test_it_ends_by_itself_when_no_job_has_called_it_for_two_hours() -> None:
    incidents = Incidents()
    incidents.end(fell_back(1))
    alert = incidents.alerts[KEY]
    assert due(alert, alert.last_at + LAPSE - timedelta(seconds=1), RULES) is None
    ended = due(alert, alert.last_at + LAPSE, RULES)
    assert ended is not None
    assert ended.text.endswith(
        "It has not happened again since 2026-11-21 12:00:01 UTC. What caused it may be so still."
    )


def breaker(agent: str, model: str = PRIMARY, scope: str = "agent_model") -> Alert:
    event = opened(agent=agent, model=model, scope=scope)
    alert = decide(signals_of(event)[0], None, RULES)
    assert alert is not None
    return alert


def always(open_incidents: Collection[Alert]) -> Callable[[datetime], Collection[Alert]]:
    return lambda _: open_incidents


def no_incident(_: str) -> None:
    """Knows no incident."""


def firing(*jobs: Execution) -> Firing:
    watch = DeploymentWatch(DeploymentRules(), no_incident)
    signals: list[Signal] = []
    for job in jobs:
        signals = list(watch.add(job))
    [signal] = signals
    assert isinstance(signal, Firing)
    return signal


@each_row(
    ("agents", "breakers", "explained"),
    [
        (["a"], [], False),
        (["a"], [("a",)], True),
        (["a"], [("b",)], False),
        (["a"], [("a", FALLBACK)], False),
        (["a", "b"], [("a",)], False),
        (["a", "b"], [("a",), ("b",)], True),
        (["a", "b"], [("*", PRIMARY, "model")], True),
        (["a", "b"], [("*", "openai/*", "provider")], True),
    ],
)
def test_an_open_breaker_is_the_one_incident_and_the_deployment_is_no_second(
    agents: list[str], breakers: list[tuple[str, ...]], explained: bool
) -> None:
    signal = firing(*(fell_back(number, agent=agent) for number, agent in enumerate(agents)))
    assert is_explained(signal, always([breaker(*place) for place in breakers])) is explained
    for_one = [breaker(*place).model_copy(update={"payload": {"open_for": "key app"}}) for place in breakers]
    assert not is_explained(signal, always(for_one)), "it says nothing about other callers"


def test_a_breaker_that_opens_goes_on_with_the_incident_of_the_deployment() -> None:
    incidents = Incidents()
    incidents.end(fell_back(1, agent="a"))
    [of_deployment] = incidents.alerts.values()

    def ends(**fields: Any) -> list[Resolved]:
        [opening] = signals_of(opened(**fields))
        assert isinstance(opening, Firing)
        return continued_by_breaker(opening, [of_deployment, breaker("other")])

    assert ends(agent="b", model=PRIMARY) == ends(agent="a", model=FALLBACK) == []
    assert ends(agent="a", model=PRIMARY, from_state="open", to_state="half_open", waits=True) == []
    assert ends(agent="a", model=PRIMARY, open_for="key app") == [], "all others still fail there"
    [end] = ends(agent="a", model=PRIMARY)
    alert = decide(end, of_deployment, RULES)
    assert alert is not None
    assert (alert.change, alert.reason) == ("resolved", "the breaker of the model has opened")
    assert len(ends(agent="*", model=PRIMARY, scope="model")) == 1


def test_jobs_that_fail_behind_a_failing_deployment_are_no_second_incident() -> None:
    incidents = Incidents()
    job = fell_back(1, answered=False)
    incidents.end(job)
    [failed] = of_execution(job, None, None)
    assert is_explained(failed, always(incidents.alerts.values()))
    for other in (fell_back(2, answered=False, agent="b"), fell_back(3, answered=False, requested_model=FALLBACK)):
        [failed] = of_execution(other, None, None)
        assert not is_explained(failed, always(incidents.alerts.values()))


def test_jobs_that_fail_on_several_models_are_explained_where_each_is() -> None:
    jobs = [fell_back(1, answered=False, agent="a"), fell_back(2, answered=False, agent="a", requested_model=FALLBACK)]
    first, second = (of_execution(job, None, None)[0] for job in jobs)
    assert is_explained(first, always([breaker("a")]))
    for merged in (first.after(second), second.after(first), first.after(second.after(first))):
        assert not is_explained(merged, always([breaker("a")]))
        assert is_explained(merged, always([breaker("a"), breaker("a", FALLBACK)]))


def test_jobs_are_explained_by_what_was_open_when_the_first_and_the_last_failed() -> None:
    incidents = KnownIncidents()
    for number, (seconds, state) in enumerate([(60, "open"), (120, "closed"), (300, "open")]):
        states = {"from_state": "closed" if state == "open" else "half_open", "to_state": state}
        at = NOON + timedelta(seconds=seconds)
        for signal in signals_of(opened(number, agent="a", model=PRIMARY, at=at, **states)):
            alert = decide(signal, incidents.of(signal.key), RULES)
            assert alert is not None
            incidents.take(alert)
    [alert] = incidents.explaining()
    assert alert.change == "reopened"

    def explained(*seconds: int) -> bool:
        signals = [
            of_execution(fell_back(1, at=NOON + timedelta(seconds=at), answered=False, agent="a"), None, None)[0]
            for at in seconds
        ]
        return is_explained(reduce(lambda before, signal: signal.after(before), signals), incidents.explaining)

    assert [explained(at) for at in (40, 57, 117, 121, 280, 297, 900)] == [False, True, True, False, False, True, True]
    assert explained(57, 200, 297)
    assert not explained(57, 200)
    assert not explained(40, 57)


def test_each_deployment_of_a_model_is_an_incident_and_a_job_is_explained_where_all_are() -> None:
    places = {"west/m#KEY_W": "KEY_W", "west/m": None}
    incidents = Incidents()
    attempts = [
        attempt(
            "e1",
            number,
            agent="content-writer",
            model=PRIMARY,
            deployment=place,
            provider_key=key,
            provider="west",
            outcome="error",
            error=REFUSED,
            started_at=NOON + timedelta(seconds=number),
        )
        for number, (place, key) in enumerate(places.items(), 1)
    ]
    unanswered = {"status": "dead_lettered", "reason": "error", "chosen_model": None, "error": REFUSED}
    job = execution("e1", agent="content-writer", requested_model=PRIMARY, attempts=tuple(attempts), **unanswered)
    incidents.end(job)
    alerts = {alert.model: alert for alert in incidents.alerts.values()}
    assert list(alerts) == list(places)
    assert "replace the key that `KEY_W` in the config" in alerts["west/m#KEY_W"].text
    assert "`providers.west.api_key`" in alerts["west/m"].text
    [failed] = of_execution(job, None, None)
    assert is_explained(failed, always(alerts.values()))
    assert not is_explained(failed, always([alerts["west/m"]])), "the other one has a reason of its own"


def test_the_quota_of_a_provider_is_told_with_the_traffic_that_its_fallback_carries() -> None:
    watch = DeploymentWatch(DeploymentRules(), no_incident)
    assert watch.add(fell_back(1, SPENT)) == ()
    assert watch.traffic_in_words("openai", PRIMARY) == (
        "all of content-writer's traffic is on openai/gpt-4o-mini, at 2.1 times the cost"
    )
    assert watch.traffic_in_words("openai", FALLBACK) is None


def test_memory_is_bounded() -> None:
    watch = DeploymentWatch(DeploymentRules(), no_incident)
    for number in range(1_000):
        watch.add(fell_back(number, agent=f"agent-{number}"))
        name = f"own/{number}"
        failed = attempt("e1", model=name, provider="own", outcome="error", error=BROKEN)
        watch.add(execution("e1", requested_model=name, chosen_model=None, status="dead_lettered", attempts=(failed,)))
    assert len(vars(watch)["_outages"]) <= 500
    assert all(len(outage.agents) <= 100 for outage in vars(watch)["_outages"].values())


def test_what_is_no_error_of_a_client_is_no_refusal() -> None:
    assert refusal_of(ErrorInfo.model_validate({**BROKEN, "message": "invalid api key"})) is None
