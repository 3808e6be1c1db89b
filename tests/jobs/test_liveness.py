"""When a worker is taken for dead."""

from __future__ import annotations

from breakwater.jobs.rules.workers import LIVENESS, Silence, is_dead
from tests.tables import each_row

ELSEWHERE = {"runs": None, "connected": False, "same_nats": True, "watched_s": LIVENESS.missed_s}
"""Of another machine, with its connection gone."""
HERE = {"connected": False, "same_nats": False, "watched_s": 0.0}


@each_row(
    ("what", "silence", "dead"),
    [
        ("its process has ended", Silence(1.6, runs=False, **HERE), True),
        ("and NATS never had its connection", Silence(1.6, runs=False, **HERE | {"connected": None}), True),
        ("NATS may still send it jobs", Silence(1.6, runs=False, **HERE | {"connected": True}), False),
        (
            "as a proxy keeps its connection",
            Silence(LIVENESS.latest_s + 1, runs=False, **HERE | {"connected": True}),
            True,
        ),
        ("it stands still, or is cut off from both", Silence(60, runs=True, **HERE), False),
        ("elsewhere, and gone", Silence(LIVENESS.missed_s, **ELSEWHERE), True),
        ("it may come back", Silence(LIVENESS.missed_s - 0.1, **ELSEWHERE), False),
        ("it stood still for so long that NATS gave it up", Silence(LIVENESS.latest_s + 0.1, **ELSEWHERE), False),
        ("it stands still, or the network is silent", Silence(5, **ELSEWHERE | {"connected": True}), False),
        ("NATS does not let it listen", Silence(5, **ELSEWHERE | {"connected": None}), False),
        ("NATS was started again", Silence(5, **ELSEWHERE | {"same_nats": False}), False),
        ("Redis was away for all", Silence(5, **ELSEWHERE | {"watched_s": LIVENESS.missed_s - 0.1}), False),
    ],
)
def test_a_worker_is_dead_when_nothing_else_explains_its_silence(what: str, silence: Silence, dead: bool) -> None:
    assert is_dead(silence) is dead, what
