"""The config file: its settings, and reading and checking it."""

from breakwater.alerts.settings import AlertChannel, Alerts, PythonChannel, SlackChannel, WebhookChannel
from breakwater.calls.settings import CacheRules
from breakwater.config.live import LiveConfig, changes, require_reloadable
from breakwater.config.load import (
    cipher_of,
    load_config,
    named_secrets,
    parse_config,
    read_config,
    unreadable_secrets,
    unusable_programs,
    variables_of,
)
from breakwater.config.models import Agent, AgentDefaults, Config, ModelSettings, breaker_of, breakers_of, validate_job
from breakwater.identity.settings import ConsoleSettings, NatsProgram, OpenId
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.settings import Limits
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.limits.settings import BudgetSettings
from breakwater.records.settings import ClickHouse, RetentionDays

__all__ = [
    "Agent",
    "AgentDefaults",
    "AlertChannel",
    "Alerts",
    "BudgetSettings",
    "CacheRules",
    "ClickHouse",
    "Config",
    "ConfigError",
    "ConsoleSettings",
    "Limits",
    "LiveConfig",
    "ModelSettings",
    "NatsProgram",
    "OpenId",
    "PythonChannel",
    "RetentionDays",
    "SecretRef",
    "SlackChannel",
    "WebhookChannel",
    "breaker_of",
    "breakers_of",
    "changes",
    "cipher_of",
    "load_config",
    "named_secrets",
    "parse_config",
    "read_config",
    "require_reloadable",
    "unreadable_secrets",
    "unusable_programs",
    "validate_job",
    "variables_of",
]
