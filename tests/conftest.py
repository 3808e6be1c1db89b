"""What every test may use. The real servers are in servers.py, with the rules for where they come from."""

from hypothesis import settings

pytest_plugins = ["tests.servers", "tests.flow.fixtures"]

# How long one example takes says more of the machine than of the code; benchmarks measure, and pytest has a timeout.
settings.register_profile("breakwater", deadline=None)
settings.load_profile("breakwater")
