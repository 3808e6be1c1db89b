"""The config file: what it may hold, and how it is read and checked."""

from breakwater.config.errors import ConfigError
from breakwater.config.load import load_config, parse_config
from breakwater.config.models import (
    Agent,
    AgentDefaults,
    Alerts,
    Budgets,
    Config,
    Limits,
    ModelSettings,
    Provider,
    SecretRef,
    SlackChannel,
    WebhookChannel,
    objection,
    unreadable_secrets,
)

__all__ = [
    "Agent",
    "AgentDefaults",
    "Alerts",
    "Budgets",
    "Config",
    "ConfigError",
    "Limits",
    "ModelSettings",
    "Provider",
    "SecretRef",
    "SlackChannel",
    "WebhookChannel",
    "load_config",
    "objection",
    "parse_config",
    "unreadable_secrets",
]
