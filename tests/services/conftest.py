"""Fixtures of the services' tests."""

from tests.state.conftest import redis

__all__ = ["redis"]
