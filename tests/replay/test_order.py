"""Outcomes that reach a breaker in another order than the log: the replay takes the order that the record shows."""

from __future__ import annotations

from collections import Counter

from breakwater.replay.policy import policy_of
from breakwater.replay.rules.engine import OUTCOME_ORDER
from breakwater.replay.rules.identity import UNEXPLAINED, identity
from tests.replay.made_up_storms import config, storm
from tests.replay.storms import replayed

STORMS = 40
POLICY = policy_of(config())


def test_storms_at_six_in_flight_are_replayed_as_they_were() -> None:
    causes: Counter[str] = Counter()
    equal = 0
    for seed in range(STORMS):
        recorded = storm(seed)
        outcome, ended = replayed(recorded, POLICY)
        parts = identity(*recorded, outcome)
        del parts["alerts"]  # no alerter ran
        assert not any(part.unequal[UNEXPLAINED] for part in parts.values()), (seed, parts)
        assert all(run.follows for run in ended)
        # Another order of outcomes is a cause of a transition, and not of a call.
        assert OUTCOME_ORDER not in parts["calls"].unequal
        assert parts["transitions"].equal + parts["transitions"].unequal[OUTCOME_ORDER] == len(recorded[1].transitions)
        for part in parts.values():
            causes.update(part.unequal)
            equal += part.equal
    assert causes[OUTCOME_ORDER] >= 5
    assert causes.total() <= equal / 100
