"""The example config on a simulated provider, for containers: `make contract` writes it."""
