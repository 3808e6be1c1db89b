"""The error of whatever a person has set up wrongly: the config file, the environment, a secret."""


class ConfigError(Exception):
    """Something that was set can't be used. The text says what, where and what would be right."""
