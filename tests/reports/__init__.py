"""What providers were reported to answer, and what must come of each: calls, cost, class, and what the client is given.

`cases.py` has the cases as data, `wire.py` the provider that answers as they say, and `plane.py` runs them all in one
plane: the HTTP API and a worker in this process, on real NATS and Redis.
"""
