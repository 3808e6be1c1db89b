"""What people read: on a phone, and in Slack."""

import html
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from breakwater.alerts.channels.slack import escape, slack_message
from breakwater.alerts.channels.wording import MessageText, Wording, clean, duration, plain
from breakwater.alerts.contract import AlertDigest
from breakwater.alerts.settings import AlertTemplate
from tests.services.alerter.kit import AT
from tests.services.alerter.messages import (
    acknowledged,
    alert,
    closed,
    digest,
    held,
    repeated,
    resolved,
    stopped_task,
)
from tests.tables import each_row


def link(incident_id: str, at: datetime) -> str:
    return f"https://breakwater.example/alerts/{incident_id}?expires={at:%s}&signature=abc"


WORDS = Wording()
LINKED = Wording(link=link)


def texts_of(reported: MessageText) -> list[str]:
    message = slack_message(reported)
    return [message["text"], *(block["text"]["text"] for block in message["blocks"])]


def test_an_alert_says_what_how_bad_where_since_when_what_to_do_and_where_to_click() -> None:
    reported = plain(LINKED.alert(alert()))
    title, state, where, since, text, click = reported.split("\n")
    assert title == "[critical] Breaker open: writer on gpt-4.1"
    assert state == "Critical, firing"
    assert where == "Agent writer, model gpt-4.1"
    assert since == "Since 2026-11-21 10:00:00 UTC"
    assert text.startswith(
        "The breaker of agent writer for gpt-4.1 is open. 3 jobs in a row failed (threshold: 3). To do"
    )
    assert "To do: look at `breakwater executions --agent=writer --since=1h`" in text
    assert click == f"Acknowledge or resolve it: {link(alert().incident_id, AT)}"


def test_a_repeated_alert_says_how_often_and_when_last() -> None:
    again = repeated(repeated(alert()), 3, after_s=120)
    assert "Since 2026-11-21 10:00:00 UTC, 3 times, last at 2026-11-21 10:02:00 UTC" in plain(WORDS.alert(again))
    short = plain(WORDS.again(again))
    assert short == ("Breaker open: writer on gpt-4.1\nIt happened again: 3 times now, last at 2026-11-21 10:02:00 UTC")


def test_what_waits_for_a_person_says_so_and_reminds_of_it() -> None:
    waiting = stopped_task()
    assert "Warning, firing, needs an operator\nAgent writer\n" in plain(WORDS.alert(waiting))
    reminded = waiting.model_copy(update={"change": "reminded", "reminders": 2})
    assert "Warning, firing, needs an operator (reminder 2)" in plain(WORDS.alert(reminded))
    assert "Reminder 2: it has needed an operator since 2026-11-21 10:00:00 UTC" in plain(WORDS.again(reminded))


def test_what_comes_back_says_so() -> None:
    back = repeated(closed(alert()), 10, after_s=66 * 60)
    assert back.change == "reopened"
    assert "Critical, firing again" in plain(WORDS.alert(back))
    assert "It recurred soon after it was resolved: 2 times now" in plain(WORDS.again(back))


def test_an_acknowledged_alert_says_by_whom_and_why() -> None:
    reported = plain(WORDS.alert(acknowledged(alert())))
    assert reported.startswith("[acknowledged] Breaker open: writer on gpt-4.1\nCritical, acknowledged\n")
    assert reported.endswith("\nAcknowledged by anna at 2026-11-21 10:02:00 UTC: calling the provider")


def test_a_resolved_alert_says_by_whom_and_how_long_it_took() -> None:
    reported = plain(LINKED.alert(resolved(acknowledged(alert()))))
    assert reported.startswith("[resolved] Breaker open: writer on gpt-4.1\nResolved\n")
    assert "From 2026-11-21 10:00:00 UTC to 2026-11-21 10:30:00 UTC, 30 min" in reported
    assert "\nAcknowledged by anna at 2026-11-21 10:02:00 UTC\nResolved by ben: the key was renewed\n" in reported
    assert "\nSee the incident: https://" in reported


def test_what_is_over_by_itself_says_so_once() -> None:
    reported = plain(WORDS.alert(closed(alert())))
    assert reported.startswith("[resolved] Breaker closed: writer on gpt-4.1\nResolved\n")
    assert ", 1 h 5 min" in reported
    assert reported.count("robe succeeded") == 1
    faded = resolved(alert()).model_copy(update={"resolved_by": None, "reason": "the period has ended"})
    assert plain(WORDS.alert(faded)).endswith("\nResolved automatically: the period has ended")


def test_a_shared_breaker_is_of_all_agents() -> None:
    assert "\nAll agents, model gpt-4.1\n" in plain(WORDS.alert(alert(agent="*")))


def test_a_global_budget_has_no_place_and_no_empty_line() -> None:
    reported = plain(WORDS.alert(alert(agent=None, model=None, tenant=None)))
    assert "\n\n" not in reported
    assert reported.split("\n")[2].startswith("Since ")


def test_a_template_replaces_the_words_and_nothing_else() -> None:
    template = AlertTemplate(title="${agent} is in trouble", text="Call 555, ${count} times. See ${link}.")
    reported = plain(Wording({"breaker_open": template}, link).alert(alert()))
    assert reported.split("\n") == [
        "[critical] writer is in trouble",
        "Critical, firing",
        "Agent writer, model gpt-4.1",
        "Since 2026-11-21 10:00:00 UTC",
        f"Call 555, 1 times. See {link(alert().incident_id, AT)}.",
    ]
    [*_, text] = texts_of(Wording({"breaker_open": template}, link).alert(alert()))
    assert text == f"Call 555, 1 times. See <{escape(link(alert().incident_id, AT), 3000)}>."
    assert "See ." in plain(Wording({"breaker_open": template}).alert(alert()))
    assert "Breaker closed" in plain(Wording({"breaker_open": template}).alert(closed(alert())))


def test_a_template_may_have_a_title_alone_also_in_threads() -> None:
    words = Wording({"breaker_open": AlertTemplate(title="Trouble: ${model}")})
    assert plain(words.alert(alert())).startswith("[critical] Trouble: gpt-4.1\n")
    assert "threshold: 3" in plain(words.alert(alert()))
    assert plain(words.again(repeated(alert()))).startswith("Trouble: gpt-4.1\n")


def test_names_can_neither_mention_people_nor_make_links() -> None:
    name = "<!channel> & <https://evil.example|ok> @here"
    for reported in (
        LINKED.alert(alert(title=name, text=name, agent=name, reason=name, acknowledged_by=name)),
        LINKED.again(repeated(alert()).model_copy(update={"title": name})),
        LINKED.digest(digest([held(1, title=name, agent=name)])),
    ):
        for text in texts_of(reported):
            assert "<!" not in text
            assert "<https://evil" not in text
    message = slack_message(WORDS.alert(alert(title=name)))
    assert "&lt;!channel&gt; &amp; &lt;https://evil.example|ok&gt;" in message["text"]
    assert all(block["text"]["verbatim"] for block in message["blocks"])


def test_a_bar_in_a_link_does_not_end_it() -> None:
    reported = Wording(link=lambda *_: "https://bw.example/a|b>c").alert(alert())
    assert texts_of(reported)[-1] == "<https://bw.example/a%7Cb&gt;c|Acknowledge or resolve it>"


def test_characters_that_are_not_to_be_seen_are_removed() -> None:
    assert clean("a\x00b\x1b[31mc\u202ed\u2066e\r\nf\u2028g\ud800h") == "a b [31mcde\nf\ng h"
    reported = WORDS.alert(alert(title="one\ntwo\x07", text="three\nfour", reason="five\x1b"))
    assert reported.title == ("[critical] ", "one two ")
    assert "three\nfour" in plain(reported)


def test_a_stopped_task_with_long_ids_is_reported_whole_with_the_command_that_lets_it_go_on() -> None:
    task_id, tenant = f"task-{uuid4()}", f"tenant-{uuid4()}"
    drift = "confidence fell through 12 answers: ..., " + ", ".join(f"0.{digits}" for digits in range(9123, 9023, -10))
    found = stopped_task(task_id=task_id, tenant=tenant, agent="a" * 40, reason=drift)
    shown = texts_of(WORDS.alert(found))[3]
    assert f"`breakwater guards reset --tenant={tenant} {task_id}` resumes it" in shown


def test_the_longest_texts_fit_into_what_slack_takes() -> None:
    words = Wording({"breaker_open": AlertTemplate(title="${agent}" * 60, text="${text}" * 700)}, link)
    long = alert(agent="&" * 128, model="&" * 256, text="<" * 9000, reason=">" * 9000, acknowledged_by="&" * 9000)
    check_limits(words.alert(long))
    check_limits(words.again(long))
    shown = texts_of(words.alert(long))
    assert all(not text.endswith(("&", "&a", "&am", "&amp", "&l", "&lt", "&g", "&gt")) for text in shown)


def check_limits(reported: MessageText) -> None:
    message = slack_message(reported)
    assert 1 <= len(message["blocks"]) <= 50
    assert len(message["text"]) <= 4000
    assert all(1 <= len(block["text"]["text"]) <= 3000 for block in message["blocks"])


WORD = st.text(max_size=400)


@given(title=WORD, text=WORD, agent=WORD, reason=WORD, by=WORD)
def test_no_text_of_anybody_breaks_a_message(title: str, text: str, agent: str, reason: str, by: str) -> None:
    found = alert(title=title, text=text, agent=agent, reason=reason, acknowledged_by=by, status="acknowledged")
    reported = Wording(link=link).alert(found)
    check_limits(reported)
    for shown in texts_of(reported):
        without_links = shown.replace("<https://breakwater.example/", "")
        assert "<" not in without_links


@given(st.text(alphabet="&<>a", max_size=50), st.integers(0, 60))
def test_an_escaped_text_is_cut_between_characters(text: str, limit: int) -> None:
    cut = escape(text, limit)
    assert len(cut) <= max(limit, 0)
    back = cut.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert text.startswith(back.removesuffix("…"))
    assert (back == text) == (len(html.escape(text, quote=False)) <= limit)


def test_a_digest_says_how_many_of_what_and_the_worst_titles_first() -> None:
    alerts = [
        *(held(number, agent="writer") for number in range(20)),
        *(held(number, agent="tagger") for number in range(20, 30)),
        *(held(number, event="budget_soft_cap", severity="warning", agent=None) for number in range(30, 36)),
        held(36, event="guard_tripped", status="pending", count=3, title="Task stopped: t1"),
    ]
    title, figures, *titles = plain(WORDS.digest(digest(list(reversed(alerts))))).split("\n")
    assert title == "37 alerts were delayed between 10:00 and 10:05 UTC (rate limit)"
    assert figures == "breaker_open 30 (writer 20, tagger 10), budget_soft_cap 6, guard_tripped 1 (writer 1)"
    assert len(titles) == 21
    assert titles[0] == "[critical, pending] Task stopped: t1, 3 times"
    assert titles[-1] == "and 17 more"


def test_a_digest_of_one_night_has_its_dates_and_its_links() -> None:
    night = digest(
        [held(1, status="resolved"), held(2, severity="warning")],
        why="quiet_hours",
        held_from=AT - timedelta(hours=12),
        held_until=AT,
    )
    reported = LINKED.digest(night)
    title, _, *titles = plain(reported).split("\n")
    assert title == "2 alerts were delayed between 2026-11-20 22:00 and 2026-11-21 10:00 UTC (quiet hours)"
    assert titles[0].startswith("[warning, firing] Breaker open: number 2: https://breakwater.example/alerts/inc_2?")
    assert titles[1].startswith("[resolved] Breaker open: number 1: https://")
    assert "|Breaker open: number 2>" in texts_of(reported)[-1]


def test_a_digest_of_one_alert_says_when() -> None:
    one = digest([held(1)], held_until=AT)
    assert plain(WORDS.digest(one)).startswith("1 alert was delayed at 10:00 UTC (rate limit)\nbreaker_open 1 (writer")


@given(
    st.lists(
        st.builds(
            lambda event, agent, number: held(number, event=event, agent=agent),
            st.sampled_from(["breaker_open", "agent_anomaly", "guard_tripped"]),
            st.none() | st.sampled_from([f"agent {number}" for number in range(9)]),
            st.integers(0, 999),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_the_figures_of_a_digest_sum_up(alerts: list[Any]) -> None:
    reported = WORDS.digest(digest(alerts))
    check_limits(reported)
    title, figures, *titles = plain(reported).split("\n")
    assert int(title.split()[0]) == len(alerts)
    events, agents = [int(word) for word in _top_level(figures)], 0
    assert sum(events) == len(alerts)
    for part in figures.split("(")[1:]:
        agents = sum(int(entry.rsplit(" ", 1)[1]) for entry in part.split(")")[0].split(", "))
        assert agents in events
    more = int(titles[-1].split()[1]) if titles[-1].startswith("and ") else 0
    assert len([line for line in titles if line.startswith("[")]) + more == len(alerts)


def _top_level(figures: str) -> list[str]:
    outside = "".join(part.split(")")[-1] for part in figures.split("("))
    return [word for word in outside.replace(",", " ").split() if word.isdigit()]


def test_a_digest_of_many_agents_names_the_first_and_counts_the_others() -> None:
    many = digest([held(number, agent=f"agent-{number % 8}") for number in range(80)])
    figures = plain(WORDS.digest(many)).split("\n")[1]
    assert figures.startswith("breaker_open 80 (agent-0 10, ")
    assert figures.endswith(", others 30)")


def test_a_digest_that_lists_fewer_than_it_counts_still_sums_up() -> None:
    short: AlertDigest = digest([held(1)], counts={"breaker_open": 500})
    title, figures, _, more = plain(WORDS.digest(short)).split("\n")
    assert title.startswith("500 alerts were")
    assert figures == "breaker_open 500 (writer 1, others 499)"
    assert more == "and 499 more"


@each_row(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (45, "45 s"),
        (60, "1 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (3900, "1 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_a_time_span_has_two_units_at_most(seconds: int, words: str) -> None:
    assert duration(timedelta(seconds=seconds)) == words
