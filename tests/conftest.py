"""What every test may use. The real servers are in servers.py, with the rules for where they come from."""

pytest_plugins = ["tests.servers", "tests.flow.fixtures"]
