"""The APIs of others that this service speaks besides its own: parsed to one job, and answered from its result."""
