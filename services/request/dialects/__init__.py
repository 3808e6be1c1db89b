"""APIs of others that this service speaks, too: parsed to one job, and answered from its result."""
