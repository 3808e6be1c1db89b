from __future__ import annotations

from typing import Any

from breakwater.alerts.rules.job_ends import CutOffAnswers
from tests.records.samples import execution


def told(answers: CutOffAnswers, *reasons: str | None, **fields: Any) -> list[int]:
    """After which of these answers the agent is warned of."""
    return [
        number
        for number, reason in enumerate(reasons, 1)
        if answers.add(execution(f"e{number}", finish_reason=reason, **fields))
    ]


def test_an_agent_is_warned_of_while_many_of_its_answers_are_cut_off() -> None:
    answers = CutOffAnswers(0.2)
    assert told(answers, "length", *["stop"] * 8, "length", "stop", "length") == [10, 12]
    [signal] = answers.add(execution("e13", finish_reason="length"))
    assert (signal.key, signal.event, signal.fades) == ("agent_anomaly/writer/finish_reason", "agent_anomaly", True)
    assert signal.title.startswith("Truncated answers: writer")
    assert (
        "Job e13 of writer was truncated by its output limit, as were 4 of the agent's last 13 answers" in signal.text
    )
    assert told(answers, *["stop"] * 50, "length") == []


def test_few_answers_other_agents_and_those_from_the_cache_are_no_reason_to_warn() -> None:
    answers = CutOffAnswers(0.5)
    assert told(answers, *["length"] * 9) == []
    assert told(answers, *["length"] * 9, agent="other") == []
    assert told(answers, *["length"] * 9, cache_hit=True) == []
    assert told(answers, None, "stop") == []
    assert told(answers, "length") == [1]


def test_the_warning_can_be_switched_off() -> None:
    assert told(CutOffAnswers(None), *["length"] * 50) == []
