"""The times by which all gates go."""

LEASE_MARGIN_S = 120.0
"""The time for which a grant outlives its call: enough for a redelivery to record a lost attempt."""

POLL_S = 0.25
"""The interval at which a call that waits for capacity asks again; random jitter at most doubles it."""
