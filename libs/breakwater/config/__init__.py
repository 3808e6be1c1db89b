"""The config file: reading, checking and reloading it. Its sections are the rooms' settings."""

from breakwater.config.agents import Agent, AgentDefaults, ModelSettings
from breakwater.config.document import Config, breaker_of, breakers_of, shadows_of, units_of
from breakwater.config.live import LiveConfig, changes, require_reloadable
from breakwater.config.load import (
    cipher_of,
    load_config,
    missing_parts,
    named_secrets,
    parse_config,
    read_config,
    require_usable,
    unreadable_secrets,
    unset_variables,
    variables_of,
)

__all__ = [
    "Agent",
    "AgentDefaults",
    "Config",
    "LiveConfig",
    "ModelSettings",
    "breaker_of",
    "breakers_of",
    "changes",
    "cipher_of",
    "load_config",
    "missing_parts",
    "named_secrets",
    "parse_config",
    "read_config",
    "require_reloadable",
    "require_usable",
    "shadows_of",
    "units_of",
    "unreadable_secrets",
    "unset_variables",
    "variables_of",
]
