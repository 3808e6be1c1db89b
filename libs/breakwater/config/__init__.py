"""The config file: what it may hold, and how it is read and checked."""

from breakwater.config.agents import Agent, AgentDefaults, CacheRules
from breakwater.config.alerts import AlertChannel, Alerts, PythonChannel, SlackChannel, WebhookChannel
from breakwater.config.checks import named_secrets, objection, unreadable_secrets, unusable_programs
from breakwater.config.clickhouse import ClickHouse, RetentionDays
from breakwater.config.live import LiveCaps
from breakwater.config.load import load_config, parse_config
from breakwater.config.models import BudgetSettings, Config, Limits, ModelSettings
from breakwater.errors import ConfigError
from breakwater.secret_refs import SecretRef

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
    "Limits",
    "LiveCaps",
    "ModelSettings",
    "PythonChannel",
    "RetentionDays",
    "SecretRef",
    "SlackChannel",
    "WebhookChannel",
    "load_config",
    "named_secrets",
    "objection",
    "parse_config",
    "unreadable_secrets",
    "unusable_programs",
]
