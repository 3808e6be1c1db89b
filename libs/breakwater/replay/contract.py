"""Plans and suggestions as programs read them: the effects of changed settings on recorded jobs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from breakwater.kernel.http.contract import Moment
from breakwater.kernel.types import Count, Event, Identifier, Message, Money, Timestamp

MAX_CONFIG = 1_000_000
"""The longest config that can be sent, in characters."""


class PlannedFigure(Event):
    """A figure under the changed config beside the recorded one."""

    before: float = Field(description="As recorded.")
    after: float = Field(description="Under the changed config.")
    low: float = Field(
        description="Lower end of the interval of 95 %, which is there as some outcomes are drawn, and some unknown."
    )
    high: float = Field(description="Its upper end.")


class PlannedSpend(Event):
    """An amount under the changed config beside the recorded one."""

    before: Money = Field(description="As recorded.")
    after: Money = Field(description="Under the changed config.")
    low: Money = Field(description="Lower end of the interval of 95 %.")
    high: Money = Field(description="Its upper end.")


class PlannedChange(Event):
    """A number of events, as recorded and under the changed config."""

    name: str
    before: Count
    after: Count


class PlannedLimit(Event):
    """A limit in a period, and when its spend reached it; null if it did not."""

    budget: str = Field(description="The limit, such as `agent:writer/daily`.")
    period: str
    before: Timestamp | None
    after: Timestamp | None


class PlannedAlert(Event):
    """An incident that would have been opened more or less often."""

    key: str = Field(description="The key of the first with its title: its event, and whom it concerns.")
    title: str
    before: Count
    after: Count


class PlannedDay(Event):
    """The spend of the jobs that were started on a day."""

    day: str = Field(description="In the time zone of the budgets.")
    spend: Money
    planned_spend: Money
    wasted: Money = Field(description="Of it, the cost of calls that gave no answer.")
    planned_wasted: Money


class PlannedStep(Event):
    """The spend and the refusals of the jobs that were started in a step of time."""

    at: Timestamp = Field(description="The beginning of the step.")
    spend: Money
    planned_spend: Money
    refused: Count
    planned_refused: Count


class PlannedJob(Event):
    """A job that would have ended otherwise, or cost something else."""

    execution_id: Identifier
    agent: Identifier
    before: str = Field(description="Its end: the model that answered, or the reason.")
    after: str
    cost: Money
    planned_cost: Money
    url: str | None = Field(
        default=None, description="Its page in the console. Null unless the config has `console.url`."
    )


class ConfigPlan(Event):
    """The effects of a changed config on recorded jobs."""

    since: Timestamp
    until: Timestamp
    agent: Identifier | None = Field(description="The only agent whose jobs count; null for all.")
    jobs: Count
    summary: tuple[str, ...] = Field(description="Refusals, spend, and breakers or durations, each in a few words.")
    newly_refused: PlannedFigure = Field(description="Jobs that are refused, and were not.")
    refused_no_more: PlannedFigure
    lost: PlannedFigure = Field(description="Jobs that had an answer, and have none.")
    won: PlannedFigure
    changed_model: Count = Field(description="Jobs that another model answers.")
    sooner: Count = Field(description="Jobs that end sooner.")
    calls: PlannedChange = Field(description="Of models.")
    spend: PlannedSpend
    wasted: PlannedSpend = Field(description="The cost of calls that gave no answer.")
    duration_p50_ms: PlannedFigure
    duration_p95_ms: PlannedFigure
    changes: tuple[PlannedChange, ...] = Field(description="Breaker openings, incidents and the like.")
    limits: tuple[PlannedLimit, ...] = Field(description="Those that were reached, or would have been.")
    alerts: tuple[PlannedAlert, ...] = Field(
        description="Incidents that are opened more or less often: at most 50, those that differ most first."
    )
    days: tuple[PlannedDay, ...]
    step_s: int = Field(ge=1, description="The length of each of `over_time` in seconds.")
    over_time: tuple[PlannedStep, ...] = Field(description="Steps without jobs are left out.")
    most_changed: tuple[PlannedJob, ...] = Field(description="The ten jobs that change most.")
    unknown: Count = Field(description="Jobs whose end history can't tell.")
    left_out: Count = Field(description="Such jobs that do not count, as the plan leaves them out.")
    drawn: Count = Field(description="Jobs with a call that was never made, whose outcome is drawn.")
    taken_from_record: dict[str, int] = Field(description="Decisions that no rule of the plan makes, by their kind.")
    races: Count = Field(description="Decisions taken from the record, as the order of two events is not known.")
    notes: tuple[str, ...] = Field(description="What history can't tell, in words.")


class SuggestedSetting(Event):
    """A setting that would have served better, by the days that had no say in the choice of its value."""

    setting: str = Field(description="Its path in the config; of a limit that is not there, its id.")
    agent: Identifier | None
    before: int | float | list[str] = Field(description="Its value.")
    after: int | float | list[str] = Field(description="The suggested value.")
    merit: Literal["answers", "spend", "time"] = Field(
        description="Its use: more answers at the same price, or the same answers for less money or in less time."
    )
    days: Count
    jobs: float = Field(description="Jobs of a mean day.")
    answered: PlannedFigure = Field(description="Jobs of a mean day with an answer.")
    spend: PlannedSpend = Field(description="Spend of a mean day.")
    duration_p95_ms: PlannedFigure = Field(description="The mean of the days' 95th percentiles of durations.")
    command: str | None = Field(default=None, description="Sets a limit that is not in the config; else null.")


class SuggestedExperiment(Event):
    """A setting that may be at fault, but of which history can't tell what another value would do."""

    setting: str
    agent: Identifier | None
    before: int | float | list[str]
    value: int | float | list[str] = Field(description="A value to try.")
    reason: str = Field(description="Why history can't tell.")


class ConfigSuggestions(Event):
    """Settings that would have served recorded jobs better."""

    since: Timestamp
    until: Timestamp
    agent: Identifier | None = Field(description="The only agent whose settings were tried; null for all.")
    jobs: Count = Field(description="Jobs that were replayed.")
    recorded_jobs: Count = Field(description="Jobs that the record has.")
    suggestions: tuple[SuggestedSetting, ...] = Field(description="Each on top of those before it.")
    experiments: tuple[SuggestedExperiment, ...]
    replays: Count
    is_complete: bool = Field(description="False if the time limit left values untried.")
    notes: tuple[str, ...] = Field(description="What was left out, in words.")
    patch: str = Field(description="The suggestions for the config as its unified diff; empty without any.")


class ConfigPlanRequest(Message):
    """A changed config, and the jobs to replay under it: those that were started in a stretch of time."""

    config: Annotated[str, StringConstraints(min_length=1, max_length=MAX_CONFIG)] | None = Field(
        default=None, description="The changed config in YAML."
    )
    version: Identifier | None = Field(
        default=None, description="Or the version of a config that was applied within 30 days."
    )
    since: Moment = Field(description="Earliest start of a job (inclusive): a time in RFC 3339.")
    until: Moment | None = Field(default=None, description="Latest start (exclusive); default: now.")
    agent: Identifier | None = Field(default=None, description="Report on the jobs of one agent.")
    renames: dict[Identifier, Identifier] = Field(
        default_factory=dict,
        max_length=100,
        description="Agents with another name in the changed config: their new names, by those in the record.",
    )
    unknown: Literal["count", "exclude"] = Field(default="count", description="Jobs whose end history can't tell.")

    @model_validator(mode="after")
    def _is_one_config(self) -> Self:
        if (self.config is None) == (self.version is None):
            raise ValueError("either `config` or `version` must be set")
        return self


class ConfigPlanError(Event):
    """The reason why there is no report."""

    code: str
    message: str


class ConfigPlanLine(Event):
    """A line of the response: the progress, and at the end the report or an error."""

    progress: float | None = Field(default=None, description="The share of the time that is replayed, from 0 to 1.")
    jobs: Count | None = Field(default=None, description="How many jobs were replayed.")
    report: ConfigPlan | None = None
    error: ConfigPlanError | None = None
