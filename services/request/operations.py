"""Every operation of the HTTP API, as data: its routes and the OpenAPI document are made from this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from breakwater.contracts.access import (
    BackChannelLogout,
    EndedSession,
    EndedSessions,
    KeyDetails,
    NewSession,
    OpenIdCallback,
    OpenIdRedirect,
)
from breakwater.contracts.alerts import (
    Alert,
    AlertList,
    AlertQuery,
    AlertReplays,
    AlertRequest,
    ChannelRequest,
    ChannelTest,
    ReplayAlertsRequest,
    UnchangedAlert,
    UndeliveredList,
    UndeliveredQuery,
)
from breakwater.contracts.breakers import (
    AgentHealth,
    BreakerList,
    BreakerRequest,
    GuardRequest,
    StoppedTasks,
    UnchangedBreaker,
)
from breakwater.contracts.budgets import (
    BudgetList,
    BudgetQuery,
    Costs,
    CostsListQuery,
    CostsQuery,
    RaiseCapRequest,
    UnchangedBudget,
)
from breakwater.contracts.dead_letters import (
    MAX_DEAD_LETTERS,
    DeadLetterDetails,
    DeadLetterList,
    DeadLetterQuery,
    DeadLetterReplays,
    ReplayDeadLettersRequest,
)
from breakwater.contracts.events import BreakerTransition, BudgetEvent, GuardEvent, Reconciliation
from breakwater.contracts.execution import Execution, ExecutionList, ExecutionQuery, Result
from breakwater.contracts.http import ErrorBody, EventQuery, Queues, ServiceStatus
from breakwater.contracts.job import Job
from breakwater.contracts.openai import ChatCompletion, ChatCompletionRequest, ModelName, ModelNames, OpenAIErrorBody
from breakwater.contracts.submission import (
    AcceptedJob,
    AcceptedPlan,
    CancelledJob,
    CancelRequest,
    PlanList,
    PlanQuery,
    PlanRequest,
    PlanStatus,
    SubmitQuery,
    UndecidedJob,
)
from breakwater.contracts.types import Event, Message

NATS_UNAVAILABLE = "NATS is unavailable (`unavailable`)."
CLICKHOUSE_UNAVAILABLE = "ClickHouse is unavailable (`unavailable`); the message says why."
REDIS_UNAVAILABLE = "Redis is unavailable (`unavailable`)."
NO_OPENID = "The config names no OpenID provider (`no_openid`)."
OPENID_UNAVAILABLE = (
    "The OpenID provider is unavailable (`openid_unavailable`), or too many people are signing in (`openid_busy`)."
)
TOO_MANY = "The API key has as many requests under way in this process as it may (`too_many_requests`)."
PERHAPS_DONE = "It may have been done all the same; asking again is safe."
UNKNOWN_INCIDENT = {
    404: "No such incident is known (`unknown_incident`).",
    409: "More than one incident has this prefix (`ambiguous_incident`).",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: a method on a path."""

    id: str
    path: str
    tag: str
    summary: str
    description: str = ""
    method: Literal["GET", "POST"] = "GET"
    query: type[Message] | None = None
    """The parameters of the URL."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """The headers that the request may have, and what each is."""
    body: type[Message] | None = None
    body_type: str = "application/json"
    results: Mapping[int, tuple[str, Any]]
    """By status below 400: what it means, and the type of the body."""
    content_type: str = "application/json"
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    """By status: what it means. What any operation of its kind may answer is added."""
    error_body: type[Event] | type[Message] = ErrorBody
    etag: bool = False
    """Whether a caller who has the body already is answered 304, without it."""


OPERATIONS = (
    Operation(
        id="submit_job",
        method="POST",
        path="/api/v1/jobs",
        tag="jobs",
        summary="Submit a job",
        description="Responds once the job is stored on the bus. `job_id` makes it idempotent: the same id again "
        "returns the first execution from its record, whatever else the second body contains, including its agent.",
        query=SubmitQuery,
        headers={
            "Idempotency-Key": "The job's id, if the body has none: 1 to 128 characters of printable ASCII.",
            "traceparent": "W3C trace context that the job becomes a part of.",
        },
        body=Job,
        results={
            200: ("Ended within `wait_s`; `status` says how.", Result),
            202: ("Accepted. `Location` is where the result will be.", AcceptedJob),
        },
        errors={
            404: "The agent is not configured (`unknown_agent`).",
            409: "The job id is that of another job, or of another key's (`id_conflict`).",
            422: "The body is not a job (`invalid_job`), or the query is wrong (`invalid_query`).",
            429: TOO_MANY,
            503: "Nothing was accepted: NATS is unavailable (`unavailable`) or full (`refused`); or the breakers of "
            "all the agent's models are open, and it has `refuse_when_open` (`agent_unavailable`; without Retry-After "
            "if all of them are isolated). This never applies to dry runs and jobs that were accepted before.",
        },
    ),
    Operation(
        id="follow_job",
        path="/api/v1/jobs/{job_id}/progress",
        tag="jobs",
        summary="Follow a job live",
        description="Server-sent events. The data of each `progress` is a `Progress`. The stream starts with what is "
        "recorded: `queued`, or the attempts so far, and the current step. The last event is `decided`, "
        "with `execution_id`, `status` and `reason`, and the stream ends. It contains neither outputs nor prompts. A "
        "stream that ends without `decided` was interrupted: connect again. Each stream starts over; `Last-Event-ID` "
        "is ignored. Comments keep an idle stream open.",
        results={200: ("The stream.", str)},
        content_type="text/event-stream",
        errors={
            404: "There is no such job (`unknown_job`).",
            429: "The API key already has 50 streams open in this process (`too_many_streams`).",
            503: "The status can't be read now (`unavailable`), or this process already has 200 streams open, "
            "the maximum (`too_many_streams`).",
        },
    ),
    Operation(
        id="show_job",
        path="/api/v1/jobs/{job_id}",
        tag="jobs",
        summary="The result or the status of a job",
        description="The result for 24 hours; after that the execution's record, where its output is redacted.",
        query=SubmitQuery,
        results={200: ("Ended.", Result), 202: ("Accepted, and not ended yet.", UndecidedJob)},
        errors={
            404: "There is no such job (`unknown_job`).",
            429: TOO_MANY,
            503: "The status can't be read now (`unavailable`).",
        },
    ),
    Operation(
        id="cancel_job",
        method="POST",
        path="/api/v1/jobs/{job_id}/cancel",
        tag="jobs",
        summary="Cancel a job",
        description="A job that waits or sleeps ends without a call. A call under way is aborted within a second, and "
        "recorded with what it may have cost. The job's result and record have the status `cancelled`, and say who "
        "cancelled it and why. Repeating the request is safe. The body may be empty.",
        query=SubmitQuery,
        body=CancelRequest,
        results={
            200: ("The job has ended, `cancelled` or, before that, otherwise: see `status`.", CancelledJob),
            202: ("It is being cancelled, whatever crashes. With `wait_s`: still.", CancelledJob),
        },
        errors={
            404: "There is no such job (`unknown_job`).",
            422: "The body is not a request to cancel (`invalid_request`), or the query is wrong (`invalid_query`).",
            429: TOO_MANY,
            503: f"NATS or Redis is unavailable (`unavailable`). {PERHAPS_DONE}",
        },
    ),
    Operation(
        id="submit_plan",
        method="POST",
        path="/api/v1/plans",
        tag="plans",
        summary="Submit a plan",
        description="Its jobs, all or none: each is validated before one is accepted. Sending the same plan again "
        "accepts nothing twice, and further jobs join it. While the breakers of all models of one of its agents are "
        "open, the plan is refused whatever `refuse_when_open` says, and has failed.",
        headers={"traceparent": "W3C trace context that the jobs become a part of."},
        body=PlanRequest,
        results={202: ("Accepted, or a draft. `Location` is where its state is.", AcceptedPlan)},
        errors={
            404: "An agent is not configured (`unknown_agent`).",
            409: "A job id is that of another job, or of another key's (`id_conflict`).",
            422: "The body is not a plan (`invalid_request`), or a job in it is invalid (`invalid_job`).",
            429: TOO_MANY,
            503: "The plan was refused (`agent_unavailable`). Or NATS or Redis is unavailable (`unavailable`), or NATS "
            "is full (`refused`): some of the jobs may have been accepted, and sending the plan again adds the others.",
        },
    ),
    Operation(
        id="list_plans",
        path="/api/v1/plans",
        tag="plans",
        summary="Plans",
        description="Without their jobs. Those of which a job has ended are listed for 30 days, others for 72 hours. "
        "Of jobs submitted over NATS, those count that a worker has taken.",
        query=PlanQuery,
        results={200: ("The newest first.", PlanList)},
        errors={503: "ClickHouse, Redis or NATS is unavailable (`unavailable`); the message says which."},
    ),
    Operation(
        id="show_plan",
        path="/api/v1/plans/{plan_id}",
        tag="plans",
        summary="One plan, with its jobs",
        description="A key without the scope `read` sees its own jobs of a plan.",
        results={200: ("The plan as it stands now.", PlanStatus)},
        errors={
            404: "There is no such plan (`unknown_plan`).",
            503: "ClickHouse, Redis or NATS is unavailable (`unavailable`); the message says which.",
        },
    ),
    Operation(
        id="create_chat_completion",
        method="POST",
        path="/v1/chat/completions",
        tag="openai",
        summary="Create a chat completion, as at OpenAI",
        description="A call is a job, and is answered when it has ended, with the provider's own object; from a "
        "provider of another dialect, with one of the same form. The headers `x-breakwater-execution-id`, "
        "`-model`, `-attempts`, `-cost-usd` and `-cache` say how it came about, and `-dropped-params` which "
        "params the model that answered was not sent, as its provider has nothing like them. `x-should-retry: false` "
        "is set whenever Breakwater has retried already. With `stream`, the response is server-sent events: OpenAI's "
        "`chat.completion.chunk` objects and `[DONE]`, or an `error` after some of the answer.",
        headers={
            "Idempotency-Key": "The job's id: 1 to 128 characters of printable ASCII.",
            "x-breakwater-tenant": "As `breakwater.tenant` in the body, which comes first; so for the other options.",
            "traceparent": "W3C trace context that the job becomes a part of.",
        },
        body=ChatCompletionRequest,
        results={200: ("The answer.", ChatCompletion)},
        errors={
            400: "The request is invalid; `param` is the field at fault. Or it is too long for the model "
            "(`context_length_exceeded`), or the provider refuses it (`invalid_request`).",
            403: "The task was stopped (`guard_tripped`), or the key may not do this (`forbidden`).",
            404: "There is no such agent or model for this key (`model_not_found`).",
            409: "The idempotency key is that of another call (`id_conflict`), or the job was cancelled (`cancelled`).",
            429: "A budget is used up (`insufficient_quota`), or a rate limit (`rate_limit_exceeded`). " + TOO_MANY,
            502: "No model gave a usable answer: `provider_error`, `provider_unreachable`, `invalid_output`, "
            "`worker_lost`.",
            503: "The breakers of all models are open (`breaker_open`, `agent_unavailable`), or nothing was accepted "
            "(`unavailable`, `refused`).",
            504: "The job's time was over (`timeout`).",
        },
        error_body=OpenAIErrorBody,
    ),
    Operation(
        id="list_models",
        path="/v1/models",
        tag="openai",
        summary="What `model` may be in a chat completion",
        description="Agents, and each with the models that it lists; for a key that is bound to one agent, the models "
        "alone too. A model that is allowed by `*` only is not listed.",
        results={200: ("Those that the key may use.", ModelNames)},
        error_body=OpenAIErrorBody,
    ),
    Operation(
        id="show_model",
        path="/v1/models/{model}",
        tag="openai",
        summary="Whether `model` may be this in a chat completion",
        results={200: ("It may.", ModelName)},
        errors={404: "There is no such agent or model for this key (`model_not_found`)."},
        error_body=OpenAIErrorBody,
    ),
    Operation(
        id="list_executions",
        path="/api/v1/executions",
        tag="executions",
        summary="Executions",
        description="The latest first, by when they ended; in the list about a second after that. `older` and `newer` "
        "of a page are cursors: sent as `after` or `before`, with the same other parameters, they give the next page "
        "in that direction. A cursor is a place between two executions and stays right whatever is recorded later; it "
        "never expires, and gives no rights. What is recorded late is missing in pages that were read before.",
        query=ExecutionQuery,
        results={200: ("A page of the executions that match.", ExecutionList)},
        errors={503: CLICKHOUSE_UNAVAILABLE},
    ),
    Operation(
        id="show_execution",
        path="/api/v1/executions/{execution_id}",
        tag="executions",
        summary="One execution, with its attempts",
        description="Its record, redacted. With encrypted texts whose key is missing, `encrypted` is in their place. "
        "`ETag` is a digest of the body.",
        headers={"If-None-Match": "The `ETag` of the body that you have."},
        results={200: ("The record.", Execution)},
        etag=True,
        errors={404: "It is not recorded (`unknown_execution`).", 503: CLICKHOUSE_UNAVAILABLE},
    ),
    Operation(
        id="follow_events",
        path="/api/v1/events",
        tag="events",
        summary="Follow all events live",
        description="Server-sent events. The name of each is its kind, and its data an `Attempt` (`attempts`), "
        "`ExecutionSummary` (`executions`), `BreakerTransition` (`breakers`), `BudgetEvent` (`budgets`), `GuardEvent` "
        "(`guards`) or `Alert` (`alerts`). Events of one stream of the bus come in its order and each once; alerts are "
        "in a stream of their own. The stream begins now, or after the event that `Last-Event-ID` names, as "
        "long as it is stored: for 72 hours by default, and alerts for thirty days. What is not stored any more is "
        "reported by an event `gap`, with an `EventGap`. Comments keep an idle stream open; they carry an id, too. A "
        "reader that takes nothing for a minute is cut off; it misses nothing if it connects again with its last id.",
        query=EventQuery,
        headers={"Last-Event-ID": "The id of the last event that was received, such as `1042-17`."},
        results={200: ("The stream.", str)},
        content_type="text/event-stream",
        errors={
            422: "A parameter is wrong (`invalid_query`), or the id (`invalid_last_event_id`).",
            429: "The API key already has 50 streams open in this process (`too_many_streams`).",
            503: "NATS is unavailable (`unavailable`), or this process already has 200 streams open, the maximum "
            "(`too_many_streams`).",
        },
    ),
    Operation(
        id="list_agents",
        path="/api/v1/agents",
        tag="agents",
        summary="The health of every agent",
        description="`circuit_open_until` is always in the future. It is absent while a call may be made, even if only "
        "a probe, as with an open breaker whose cool-down has ended; and if the breaker is isolated.",
        results={200: ("All agents of the config, in its order.", list[AgentHealth])},
        errors={503: REDIS_UNAVAILABLE},
    ),
    Operation(
        id="list_breakers",
        path="/api/v1/breakers",
        tag="breakers",
        summary="The state of every breaker",
        description="Those of the agents' own models, and all others used within the last week.",
        results={200: ("By agent and model.", BreakerList)},
        errors={503: REDIS_UNAVAILABLE},
    ),
    *(
        Operation(
            id=operation_id,
            method="POST",
            path=path,
            tag="breakers",
            summary=summary,
            description=description,
            body=BreakerRequest,
            results={
                200: (
                    "The transition; or, if there was nothing to do, the breaker with `unchanged`.",
                    BreakerTransition | UnchangedBreaker,
                )
            },
            errors={
                404: "Neither the config nor Redis knows the breaker (`unknown_breaker`).",
                503: f"Redis or NATS is unavailable (`unavailable`). {PERHAPS_DONE} Or it was done and its event waits "
                "for NATS (`not_published`): a breaker service publishes it.",
            },
        )
        for operation_id, path, summary, description in (
            (
                "isolate_breaker",
                "/api/v1/breakers/isolate",
                "Isolate a breaker",
                "It admits no call, not even a probe, until it is reset. It need not have counted anything yet. If it "
                "is isolated already, the response is an `UnchangedBreaker`.",
            ),
            (
                "reset_breaker",
                "/api/v1/breakers/reset",
                "Close a breaker and clear its counts",
                "From any state, even closed. If it has never counted anything, the response is an `UnchangedBreaker`.",
            ),
        )
    ),
    Operation(
        id="list_stopped_tasks",
        path="/api/v1/guards",
        tag="guards",
        summary="The tasks stopped by their guards",
        description="Jobs of these tasks end `guard_tripped` without calling a model.",
        results={200: ("In the order in which they were stopped.", StoppedTasks)},
        errors={503: REDIS_UNAVAILABLE},
    ),
    Operation(
        id="reset_task",
        method="POST",
        path="/api/v1/guards/reset",
        tag="guards",
        summary="Let a stopped task continue",
        description="Clears all counts of the task. A task that is not stopped can be reset, too; its event has the "
        "agent `*`.",
        body=GuardRequest,
        results={200: ("Done and published.", GuardEvent)},
        errors={
            404: "Nothing is known of the task (`unknown_task`).",
            503: "Redis or NATS is unavailable (`unavailable`). The task may still be stopped: ask again; nothing "
            "is published twice.",
        },
    ),
    Operation(
        id="list_budgets",
        path="/api/v1/budgets",
        tag="budgets",
        summary="The state of every budget",
        description="Those of the current day and month, for all agents and tenants in the config and all others that "
        "called a model. With a parameter, only those that such a call counts against.",
        query=BudgetQuery,
        results={200: ("Global, then agents, then tenants.", BudgetList)},
        errors={404: "The agent is not known (`unknown_agent`).", 503: REDIS_UNAVAILABLE},
    ),
    Operation(
        id="reconcile_budgets",
        path="/api/v1/budgets/reconciliation",
        tag="budgets",
        summary="Compare the counters in Redis with the record",
        description="Reads the counters in Redis, and adds up all attempts in ClickHouse and the event log, as of the "
        "same moment. The budget service repairs differences by itself.",
        results={200: ("Both figures for every budget, whether they agree or not.", Reconciliation)},
        errors={
            503: "Redis, NATS or ClickHouse is unavailable (`unavailable`), or the counters are being rebuilt "
            "(`not_filled`)."
        },
    ),
    Operation(
        id="raise_cap",
        method="POST",
        path="/api/v1/budgets/raise",
        tag="budgets",
        summary="Raise a cap until its day or month ends",
        description="Setting exactly the config's cap revokes an earlier raise. If the cap already has this "
        "value, the response is an `UnchangedBudget`.",
        body=RaiseCapRequest,
        results={
            200: (
                "The raise, which is now in effect; or, if there was nothing to do, the budget with `unchanged`.",
                BudgetEvent | UnchangedBudget,
            )
        },
        errors={
            404: "There is no such budget (`unknown_budget`).",
            409: "The config gives this budget no cap (`no_cap`).",
            422: "The body is invalid (`invalid_request`), or the cap is below the config's (`below_cap`).",
            503: "Redis or NATS is unavailable (`unavailable`), or the counters are being rebuilt (`not_filled`). Ask "
            "again: repeating the request is safe.",
        },
    ),
    Operation(
        id="show_costs",
        path="/api/v1/costs",
        tag="costs",
        summary="What the calls of a month cost",
        description="By agent, tenant, model, provider, API key or tag, beside the month before, caps, what failed "
        "calls cost, and a forecast. The amounts are those that the budgets count. A call is included about a second "
        "after it has ended.",
        query=CostsListQuery,
        results={200: ("The month.", Costs)},
        errors={503: CLICKHOUSE_UNAVAILABLE},
    ),
    Operation(
        id="export_costs",
        path="/api/v1/costs.csv",
        tag="costs",
        summary="What the calls of a month cost, as CSV",
        description="All lines of `/api/v1/costs`, without the total. Amounts are in USD with nine decimal places; "
        "unknown ones are empty. A name that a spreadsheet would take for a formula has an apostrophe in front.",
        query=CostsQuery,
        results={200: ("A heading and the lines.", str)},
        content_type="text/csv",
        errors={503: CLICKHOUSE_UNAVAILABLE},
    ),
    Operation(
        id="list_incidents",
        path="/api/v1/alerts",
        tag="alerts",
        summary="Incidents",
        description="The current state of each incident, the latest first. Resolved incidents are listed for thirty "
        "days, at most the latest two thousand.",
        query=AlertQuery,
        results={200: ("The incidents that match.", AlertList)},
        errors={404: "The agent is not known (`unknown_agent`).", 503: NATS_UNAVAILABLE},
    ),
    Operation(
        id="show_incident",
        path="/api/v1/alerts/{incident_id}",
        tag="alerts",
        summary="One incident",
        description="Its state after the newest alert.",
        results={200: ("The incident.", Alert)},
        errors={**UNKNOWN_INCIDENT, 503: NATS_UNAVAILABLE},
    ),
    *(
        Operation(
            id=operation_id,
            method="POST",
            path=path,
            tag="alerts",
            summary=summary,
            description=description,
            body=AlertRequest,
            results={
                200: (
                    "The incident; if there was nothing to do, with `unchanged`.",
                    UnchangedAlert | Alert,
                )
            },
            errors={**UNKNOWN_INCIDENT, 503: f"{NATS_UNAVAILABLE} {PERHAPS_DONE}"},
        )
        for operation_id, path, summary, description in (
            (
                "acknowledge_incident",
                "/api/v1/alerts/ack",
                "Acknowledge an incident",
                "Ends its reminders. It is resolved by its opposite event or by an operator. If it is acknowledged or "
                "resolved already, the response is an `UnchangedAlert`.",
            ),
            (
                "resolve_incident",
                "/api/v1/alerts/resolve",
                "Resolve an incident",
                "If the problem recurs soon, the incident is reopened. If it is resolved already, the response is an "
                "`UnchangedAlert`. This changes only the incident: it closes no breaker and resumes no task.",
            ),
        )
    ),
    Operation(
        id="test_channel",
        method="POST",
        path="/api/v1/alerts/test",
        tag="alerts",
        summary="Send a test message to a channel",
        description="An alerter sends it like an alert; if it cannot be delivered, the response says why.",
        body=ChannelRequest,
        results={200: ("The outcome of the test.", ChannelTest)},
        errors={
            404: "The config has no such channel (`unknown_channel`).",
            503: "No alerter is running (`no_alerter`). Or it did not respond within 20 s, or NATS is unavailable "
            "(`unavailable`): the message may have been sent all the same.",
        },
    ),
    Operation(
        id="list_undelivered_alerts",
        path="/api/v1/alerts/undelivered",
        tag="alerts",
        summary="Undelivered alerts",
        description="Alerts that were given up within the last thirty days, the latest first.",
        query=UndeliveredQuery,
        results={200: ("The latest ones.", UndeliveredList)},
        errors={503: NATS_UNAVAILABLE},
    ),
    Operation(
        id="replay_alerts",
        method="POST",
        path="/api/v1/alerts/replay",
        tag="alerts",
        summary="Send undelivered alerts again",
        description="Each is sent again once, unchanged and with the same id; those that were sent again before are "
        "skipped, unless `dead_letter_id` names one. One request covers up to a thousand; if there are more, the "
        "response says where to continue.",
        body=ReplayAlertsRequest,
        results={200: ("They will be sent again.", AlertReplays)},
        errors={
            404: "There is no such channel (`unknown_channel`) or dead letter (`unknown_dead_letter`).",
            503: f"{NATS_UNAVAILABLE} Ask again: none is sent twice.",
        },
    ),
    Operation(
        id="list_dead_letters",
        path="/api/v1/dlq",
        tag="dead letters",
        summary="Dead letters",
        description="The latest first: jobs that failed for good or are not valid jobs, alerts that could not be "
        "delivered, events that could not be stored. They are kept for 30 days.",
        query=DeadLetterQuery,
        results={200: ("The dead letters that match.", DeadLetterList)},
        errors={503: NATS_UNAVAILABLE},
    ),
    Operation(
        id="show_dead_letter",
        path="/api/v1/dlq/{dead_letter_id}",
        tag="dead letters",
        summary="One dead letter",
        description="With the original message, redacted by the rules of the config, and truncated at 64 KiB.",
        results={200: ("The dead letter.", DeadLetterDetails)},
        errors={404: "There is no such dead letter (`unknown_dead_letter`).", 503: NATS_UNAVAILABLE},
    ),
    Operation(
        id="replay_dead_letters",
        method="POST",
        path="/api/v1/dlq/replay",
        tag="dead letters",
        summary="Replay dead letters",
        description="Each once: its job is queued unchanged, under an id derived from the dead letter, with the "
        "original execution as `metadata.replay_of`. A dead letter that was replayed before is skipped; a replay that "
        f"fails becomes a dead letter of its own. One request covers up to {MAX_DEAD_LETTERS:,} dead letters; if "
        "there are more, the response says where to continue.",
        body=ReplayDeadLettersRequest,
        results={200: ("The jobs that were queued.", DeadLetterReplays)},
        errors={
            503: "NATS is unavailable (`unavailable`), or JOBS is full (`refused`). Nothing is lost, and "
            "nothing is replayed twice: ask again."
        },
    ),
    Operation(
        id="list_queues",
        path="/api/v1/queues",
        tag="queues",
        summary="Queues",
        description="For each agent, the jobs that are waiting and in progress; the jobs waiting for their next "
        "attempt; and how far services are behind the event log. At most about a second old.",
        results={200: ("The queues.", Queues)},
        errors={503: NATS_UNAVAILABLE},
    ),
    Operation(
        id="show_key",
        path="/api/v1/key",
        tag="keys",
        summary="The API key of this request, and what it may be used for",
        description="For programs that sign people in by their key. With a session's token, whose session it is.",
        results={200: ("The key, or the person.", KeyDetails)},
    ),
    Operation(
        id="sign_in",
        method="POST",
        path="/api/v1/sessions",
        tag="keys",
        summary="Begin a session",
        description="For programs that sign people in, such as the console: a session's token stands for the key, and "
        "may be kept where the key may not. It lasts for twelve hours, until it is ended, or until the key is revoked. "
        "Of one key there are at most 20; beyond them, the oldest ends.",
        results={200: ("The session.", NewSession)},
        errors={409: "The request was sent with a session's token (`is_a_session`).", 503: REDIS_UNAVAILABLE},
    ),
    Operation(
        id="sign_out",
        method="POST",
        path="/api/v1/sessions/end",
        tag="keys",
        summary="End the session whose token the request is sent with",
        results={200: ("It has ended, everywhere.", EndedSession)},
        errors={409: "It was sent with an API key (`not_a_session`).", 503: REDIS_UNAVAILABLE},
    ),
    Operation(
        id="begin_openid",
        method="POST",
        path="/api/v1/openid/begin",
        tag="openid",
        summary="Begin to sign somebody in with OpenID Connect",
        description="For the console, which keeps `flow` in a cookie, and sends the browser to `url`.",
        results={200: ("Where the browser goes.", OpenIdRedirect)},
        errors={404: NO_OPENID, 503: OPENID_UNAVAILABLE},
    ),
    Operation(
        id="complete_openid",
        method="POST",
        path="/api/v1/openid/complete",
        tag="openid",
        summary="Sign somebody in who comes back from the OpenID provider",
        description="The session has the name of the person, and the scopes that the config gives their roles at the "
        "time of each request. It lasts for twelve hours, until it is ended, or until the config gives it no role.",
        body=OpenIdCallback,
        results={200: ("The session.", NewSession)},
        errors={
            403: "This browser has not asked for it (`openid_state`); the person has no role (`no_role`); the provider "
            "refused (`openid_denied`, `openid_refused`); its answer can't be trusted (`openid_invalid`); the clocks "
            "differ (`openid_clock_skew`).",
            404: NO_OPENID,
            409: "It was completed before, or tried (`openid_refused`).",
            502: "The provider does not accept the client (`openid_client_refused`), or refuses in another way "
            "(`openid_refused`).",
            429: "Too many sign-ins from this address have failed within a minute, or are under way "
            "(`too_many_sign_ins`).",
            503: f"{OPENID_UNAVAILABLE} Or Redis is (`unavailable`).",
        },
    ),
    Operation(
        id="logout_openid",
        method="POST",
        path="/api/v1/openid/backchannel-logout",
        tag="openid",
        summary="End the sessions of somebody who has signed out at the OpenID provider",
        description="For the provider, by OpenID Connect Back-Channel Logout 1.0: `sid` ends the sessions that have "
        "come from its own one, and `sub` alone all of the person.",
        body=BackChannelLogout,
        body_type="application/x-www-form-urlencoded",
        results={200: ("They have ended, everywhere.", EndedSessions)},
        errors={
            400: "The logout token is not signed by the provider, is for another client, too old, or was used before "
            "(`invalid_logout_token`).",
            404: NO_OPENID,
            429: "Too many tokens from this address were wrong within a minute (`too_many_sign_ins`).",
            503: "The OpenID provider (`openid_unavailable`) or Redis (`unavailable`) is unavailable.",
        },
    ),
    Operation(
        id="alive",
        path="/healthz",
        tag="health",
        summary="Whether the process is alive",
        results={200: ("It is.", ServiceStatus)},
    ),
    Operation(
        id="ready",
        path="/readyz",
        tag="health",
        summary="Whether jobs can be accepted",
        results={200: ("They can.", ServiceStatus)},
        errors={503: "NATS is unavailable (`not_ready`)."},
    ),
    Operation(
        id="metrics",
        path="/metrics",
        tag="metrics",
        summary="Metrics of this process, for Prometheus",
        description="In OpenMetrics format if the scraper accepts it.",
        results={200: ("All metrics.", str)},
        content_type="text/plain",
    ),
)

PATH_PARAMETERS: dict[str, dict[str, Any]] = {
    "job_id": {
        "description": "Percent-encoded, slashes too: `a%2Fprogress` is the job `a/progress`.",
        "schema": {"type": "string", "examples": ["019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"]},
    },
    "execution_id": {
        "description": "The job's id. Slashes in it may be percent-encoded.",
        "schema": {"type": "string", "examples": ["019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"]},
    },
    "plan_id": {
        "description": "Slashes in it may be percent-encoded.",
        "schema": {"type": "string", "examples": ["report-47"]},
    },
    "model": {
        "description": "It may hold slashes.",
        "schema": {"type": "string", "examples": ["content-writer/gpt-4.1-mini"]},
    },
    "incident_id": {
        "description": "Or a prefix that no other incident has: `inc_` and at least 6 characters.",
        "schema": {"type": "string", "examples": ["inc_3f9a1c07d2e84b56a1c0d375", "inc_3f9a1c07"]},
    },
    "dead_letter_id": {
        "description": "Its sequence in DLQ.",
        "schema": {"type": "integer", "minimum": 1, "examples": [17]},
    },
}
