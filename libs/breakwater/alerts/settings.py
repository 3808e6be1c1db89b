"""The section `alerts` of the config: incidents, anomalies, reminders, channels and templates."""

from __future__ import annotations

from datetime import time
from string import Template
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from breakwater.alerts.contract import AlertEvent, Severity
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.addresses import NetworkSetting
from breakwater.kernel.security.secret_refs import Secret
from breakwater.kernel.types import HttpUrl, Identifier, Message, Name, Off, UsdAmount, ZoneName

MIN_SECRET_LENGTH = 32
"""The fewest characters of the secret that signs links."""


class Reminders(Message):
    """Reminders of incidents that wait for an operator: a `repeat_interval` that doubles with each one."""

    first_s: float = Field(
        default=3600,
        ge=1,
        le=604_800,
        description="Time until the first reminder; doubled for each further one.",
    )
    max_s: float = Field(default=86_400, ge=1, le=604_800, description="Longest time between reminders.")


class AnomalyRules(Message):
    """Rules for a minute of an agent, or a single execution, to be an anomaly."""

    deviations: Annotated[Annotated[float, Field(ge=3, le=100)] | None, Off] = Field(
        default=6.0, description="Number of typical deviations above the baseline that count as an anomaly, or `off`."
    )
    minimum_minutes: int = Field(
        default=30, ge=5, le=10_000, description="Minutes with calls that the baseline needs first."
    )
    minimum_calls: int = Field(default=10, ge=1, le=1_000_000, description="Minutes with fewer calls are ignored.")
    sustained_minutes: int = Field(
        default=3, ge=1, le=60, description="Consecutive minutes that must deviate, or be back at the baseline."
    )
    fallback_share: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Off] = Field(
        default=0.5,
        description="Highest share of an agent's answers from fallback models that is no anomaly, or `off`.",
    )
    fallback_cost_factor: Annotated[Annotated[float, Field(gt=0, le=10_000)] | None, Off] = Field(
        default=2.0,
        description="Highest normal cost of answers of fallback models, as a multiple of that on the requested "
        "model, or `off`.",
    )
    execution_cost_usd: UsdAmount | None = Field(
        default=None, description="An execution that costs more is an anomaly."
    )
    execution_duration_s: float | None = Field(
        default=None, gt=0, description="An execution that takes longer is an anomaly."
    )
    cut_off_share: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Off] = Field(
        default=0.2,
        description=(
            "Share of an agent's last 50 answers (at least 10) truncated by the output limit "
            "(`finish_reason: length`) that counts as an anomaly, or `off`."
        ),
    )


class DeploymentRules(Message):
    """Rules for a model of a provider that nothing succeeds on, while other models answer the same jobs, to fail."""

    failed_jobs: Annotated[Annotated[int, Field(ge=1, le=100_000)] | None, Off] = Field(
        default=10, description="Jobs in a row that it did not answer, or `off`."
    )
    failed_s: Annotated[Annotated[float, Field(gt=0, le=86_400)] | None, Off] = Field(
        default=300, description="Time in which it answered none of at least 3 jobs, or `off`."
    )


class QuietHours(Message):
    """Hours in which a channel holds back alerts, which are sent as one digest afterwards."""

    start: time = Field(description="Such as `22:00`.")
    end: time = Field(description="Such as `07:00`; on the next day if earlier than `start`.")
    timezone: ZoneName = "UTC"
    but: Severity | None = Field(
        default="critical", description="Alerts of at least this severity are sent immediately."
    )

    @field_validator("start", "end", mode="before")
    @classmethod
    def _in_quotes(cls, setting: object) -> object:
        # Without quotes YAML reads 22:00 as the number 1320.
        if not isinstance(setting, str | time):
            raise ValueError("write the time in quotes, such as '22:00'")  # noqa: TRY004  pydantic reads ValueErrors
        return setting

    @model_validator(mode="after")
    def _some_time(self) -> QuietHours:
        if self.start == self.end:
            raise ValueError("start and end are the same time")
        return self


class MessageLimit(Message):
    """The limit on the messages to a channel; further ones become one digest."""

    messages: int = Field(default=10, ge=1, le=10_000)
    within_s: float = Field(default=300, gt=0, le=86_400)


class Route(Message):
    """Alerts that a channel is for, and times. What is left out restricts nothing."""

    events: tuple[AlertEvent, ...] | None = None
    agents: tuple[Identifier, ...] | None = Field(
        default=None,
        description="Filter by agents; incidents of a shared breaker (`*`) belong to every agent.",
    )
    tenants: tuple[Identifier, ...] | None = Field(default=None, description="Filter by tenants.")
    severity: Severity | None = Field(default=None, description="Minimum severity.")
    quiet_hours: QuietHours | None = None
    rate_limit: Annotated[MessageLimit | None, Off] = Field(
        default=MessageLimit(),
        description=("Maximum number of messages; alerts beyond it are sent together as a digest. Or `off`."),
    )


PendingEvent = Literal["guard_tripped", "budget_hard_cap"]
"""The events that can stay pending until an operator acts."""

ALERT_FIELDS = (
    "title",
    "text",
    "event",
    "severity",
    "status",
    "change",
    "agent",
    "model",
    "tenant",
    "incident_id",
    "reason",
)
"""The placeholders that are fields of an alert."""

PLACEHOLDERS = (*ALERT_FIELDS, "count", "opened_at", "last_at", "by", "link")
"""The names for `${…}` in a template. Fields that an alert lacks are empty."""


class SlackChannel(Message):
    """Slack: an incoming webhook posts; a bot also updates its messages, and answers repeats in their threads."""

    webhook_url: Secret | None = None
    bot_token: Secret | None = Field(default=None, description="`xoxb-…`, with the scope `chat:write`.")
    channel: str | None = Field(
        default=None,
        min_length=1,
        max_length=80,
        description="The channel of the bot's messages, by its id, such as `C0123456`.",
    )
    api_url: HttpUrl = Field(default="https://slack.com/api/", description="The base URL of Slack's Web API.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.webhook_url is None) == (self.bot_token is None):
            raise ValueError("give either webhook_url, or bot_token and channel")
        if (self.bot_token is None) != (self.channel is None):
            raise ValueError("bot_token and channel belong together")
        return self


class WebhookChannel(Message):
    """Any HTTP receiver; requests are signed according to Standard Webhooks."""

    url: HttpUrl
    secret: Secret = Field(description="The signing secret, `whsec_…`.")
    previous_secret: Secret | None = Field(
        default=None, description="During key rotation: requests carry a signature by each secret."
    )
    timeout_s: float = Field(default=10.0, gt=0, le=60)


class PythonChannel(Message):
    """A callable of your own, called as `notify(event, payload)`; plain or async. An exception is retried."""

    callable: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", description="Such as `ours.alerts:notify`.")
    timeout_s: float = Field(default=10.0, gt=0, le=300)


class AlertChannel(Route):
    """A channel that alerts are sent to: exactly one of `slack`, `webhook` and `python`."""

    slack: SlackChannel | None = None
    webhook: WebhookChannel | None = None
    python: PythonChannel | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(kind is not None for kind in (self.slack, self.webhook, self.python)) != 1:
            raise ValueError("give exactly one of slack, webhook and python")
        return self


class AlertTemplate(Message):
    """An operator's wording of an event; `${name}` is replaced by a field of the alert."""

    title: str | None = Field(default=None, min_length=1, max_length=500)
    text: str | None = Field(default=None, min_length=1, max_length=5000)

    @field_validator("title", "text")
    @classmethod
    def _check_names(cls, words: str | None) -> str | None:
        if words is None:
            return None
        template = Template(words)
        if not template.is_valid():
            raise ValueError("write `$$` for a `$` that starts no ${name}")
        if unknown := sorted(set(template.get_identifiers()) - set(PLACEHOLDERS)):
            raise ValueError(f"${{{unknown[0]}}} is not known; known are {', '.join(PLACEHOLDERS)}")
        return words


class AlertLinks(Message):
    """Links in messages that acknowledge or resolve an incident for any person who opens one."""

    base_url: HttpUrl = Field(description="The public URL of the HTTP API.")
    secret: Secret = Field(description="Signs the links; at least 32 characters. The alerter and request need it.")
    valid_h: float = Field(default=168, gt=0, le=720, description="Lifetime of a link.")

    def signing_secret(self) -> str:
        """Returns the key that signs links. Raises ConfigError if it can't be read, or is too short."""
        try:
            secret = self.secret.read()
        except ConfigError as error:
            raise ConfigError(f"alerts.links.secret: {error}") from error
        if len(secret) < MIN_SECRET_LENGTH:
            raise ConfigError(
                f"alerts.links.secret: it has {len(secret)} characters, but needs at least {MIN_SECRET_LENGTH}; "
                "create one with `openssl rand -hex 32`"
            )
        return secret


class Alerts(Message):
    """Alerting: the events that become incidents, and the channels that are notified."""

    on_events: tuple[AlertEvent, ...] = Field(
        default=get_args(AlertEvent),
        description="Events that open incidents and are sent to channels.",
    )
    quiet_s: float = Field(
        default=600,
        ge=0,
        le=86_400,
        description="A problem that recurs within this time after it was resolved reopens the same incident. Channels "
        "that cannot update a message are notified of a recovery once it has lasted this long, and incidents of "
        "failures resolve once none has occurred for this long.",
    )
    escalate: tuple[PendingEvent, ...] = Field(
        default=("guard_tripped",),
        description="Events whose incidents stay pending until an operator acknowledges or resolves them.",
    )
    reminders: Reminders = Reminders()
    deployments: DeploymentRules = DeploymentRules()
    anomalies: AnomalyRules = AnomalyRules()
    links: AlertLinks | None = None
    templates: dict[AlertEvent, AlertTemplate] = Field(default_factory=dict)
    allow_networks: tuple[NetworkSetting, ...] = Field(
        default=(),
        description="Private networks that messages may be sent to, such as `10.1.0.0/16`; others are refused.",
    )
    channels: dict[Name, AlertChannel] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _channels_have_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for kind in ("slack", "webhook"):
                if kind in data:
                    raise ValueError(f"{kind}: a channel has a name, as in `channels: {{ops: {{{kind}: …}}}}`")
        return data
