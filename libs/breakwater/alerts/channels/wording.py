"""The words of an alert or a digest, in the order in which people need them on a phone.

What happened and how bad it is, where, since when, what to do, who looks after it, and a link.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from breakwater.alerts.channels.channel import Link
from breakwater.alerts.contract import Alert, AlertDigest, AlertEvent, HeldBack
from breakwater.alerts.rules.alert_rules import SEVERITIES, agents_of, fill
from breakwater.alerts.settings import AlertTemplate
from breakwater.kernel.formats import moment, quantity, sentence

SHOWN_TITLES = 20
SHOWN_AGENTS = 5

_LINK_HERE = "\ue000"
"""Placeholder of the link while a template is filled; of a plane that no text uses."""
_TURNING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the direction of what follows: they make a text look like another one."""
_UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but for the line feed, and lone surrogates."""
_WHY = {"rate_limit": "rate limit", "quiet_hours": "quiet hours"}


@dataclass(frozen=True, slots=True)
class Url:
    """A part of a line that leads somewhere."""

    text: str
    url: str


Line = tuple[str | Url, ...]


@dataclass(frozen=True, slots=True)
class MessageText:
    """A message: its title, and paragraphs of lines."""

    title: Line
    paragraphs: tuple[tuple[Line, ...], ...]


@dataclass(frozen=True, slots=True)
class Wording:
    """The words of messages, with the operator's templates and links, if there are any."""

    templates: Mapping[AlertEvent, AlertTemplate] = field(default_factory=dict[AlertEvent, AlertTemplate])
    link: Link | None = None

    def message(self, message: Alert | AlertDigest) -> MessageText:
        """Returns the words of an alert or a digest."""
        return self.alert(message) if isinstance(message, Alert) else self.digest(message)

    def alert(self, alert: Alert) -> MessageText:
        """Describes an incident as it is now."""
        url = self.url(alert.incident_id, alert.at)
        template = self.templates.get(alert.event)
        title = self._title(alert)
        text = _fill_line(None if template is None else template.text, alert, url, alert.text)
        linked = any(isinstance(part, Url) for part in (*title, *text))
        facts = [(line,) for line in (_state(alert), _where(alert), _since(alert)) if line]
        people = [(line,) for line in _people(alert)]
        doing = "See the incident" if alert.status == "resolved" else "Acknowledge or resolve it"
        link: list[Line] = [(Url(doing, url),)] if url and not linked else []
        paragraphs = (tuple(facts), (text,), tuple(people), tuple(link))
        return MessageText((f"[{_marker(alert)}] ", *title), tuple(filter(None, paragraphs)))

    def again(self, alert: Alert) -> MessageText:
        """Returns a short reply for readers of the incident's message: it happened again, or it still waits."""
        times = f"{_times(alert.count)} now, last at {moment(alert.last_at)}"
        match alert.change:
            case "reminded":
                words = f"Reminder {alert.reminders}: it has needed an operator since {moment(alert.opened_at)}"
            case "worsened":
                words = f"It has become {alert.severity}: {alert.text}"
            case "reopened":
                words = f"It recurred soon after it was resolved: {times}"
            case _:
                words = f"It happened again: {times}"
        return MessageText(self._title(alert), (((words,),),))

    def digest(self, digest: AlertDigest) -> MessageText:
        """Describes the alerts that were held back: their numbers, and the titles of the worst."""
        total = sum(digest.counts.values())
        were = "alert was" if total == 1 else "alerts were"
        title = f"{total:,} {were} delayed {_span(digest)} ({_WHY.get(digest.why)})"
        if digest.why == "notices":
            title = f"{quantity(total, 'notice')} {_span(digest)}, nothing to do"
        titled = sorted(digest.alerts, key=_urgency)[:SHOWN_TITLES]
        lines = [self._digest_line(alert, digest.at) for alert in titled]
        if total > len(titled):
            lines.append((f"and {total - len(titled):,} more",))
        return MessageText((title,), tuple(filter(None, (((_figures(digest),),), tuple(lines)))))

    def url(self, incident_id: str, at: datetime) -> str:
        """Returns the link to an incident; empty if links are not set up."""
        return "" if self.link is None else self.link(incident_id, at)

    def _title(self, alert: Alert) -> Line:
        template = self.templates.get(alert.event)
        words = None if template is None else template.title
        title = _fill_line(words, alert, self.url(alert.incident_id, alert.at), alert.title)
        return tuple(part.replace("\n", " ") if isinstance(part, str) else part for part in title)

    def _digest_line(self, alert: HeldBack, at: datetime) -> Line:
        marker = alert.status if alert.status in {"resolved", "acknowledged"} else f"{alert.severity}, {alert.status}"
        title = clean(alert.title).replace("\n", " ")
        url = self.url(alert.incident_id, at)
        times = f", {_times(alert.count)}" if alert.count > 1 else ""
        return (f"[{marker}] ", Url(title, url) if url else title, times)


def plain(worded: MessageText) -> str:
    """Returns a message as plain text."""
    paragraphs = ((worded.title,), *worded.paragraphs)
    return "\n".join("".join(map(_plain, line)) for lines in paragraphs for line in lines)


def clean(text: str) -> str:
    """Returns a text without control characters, and without those that change the direction of writing."""
    lines = text.replace("\r\n", "\n").replace("\u2028", "\n").replace("\u2029", "\n")
    return _UNSEEN.sub(" ", _TURNING.sub("", lines))


def duration(lasted: timedelta) -> str:
    """Formats a time span in its two largest units: `45 s`, `1 h 5 min`, `3 d`."""
    seconds = max(0, round(lasted.total_seconds()))
    days = seconds // 86_400
    hours = seconds // 3600 % 24
    minutes = seconds // 60 % 60
    for units in (
        ((days, "d"), (hours, "h")),
        ((hours, "h"), (minutes, "min")),
        ((minutes, "min"), (seconds % 60, "s")),
    ):
        if units[0][0]:
            return " ".join(f"{number} {unit}" for number, unit in units if number)
    return f"{seconds} s"


def _fill_line(template: str | None, alert: Alert, url: str, otherwise: str) -> Line:
    words = otherwise if template is None else fill(template, alert, _LINK_HERE if url else "")
    first, *parts = clean(words).split(_LINK_HERE) if url else (clean(words).replace(_LINK_HERE, ""),)
    line: list[str | Url] = [first]
    for part in parts:
        line += [Url(url, url), part]
    return tuple(line)


def _marker(alert: Alert) -> str:
    return alert.status if alert.status in {"resolved", "acknowledged"} else alert.severity


def _state(alert: Alert) -> str:
    if alert.status == "resolved":
        return "Resolved"
    again = {"reopened": " again", "worsened": ", worse than before"}.get(alert.change, "")
    words = {
        "firing": f"firing{again}",
        "pending": f"firing{again}, needs an operator",
        "acknowledged": "acknowledged",
    }
    reminder = f" (reminder {alert.reminders})" if alert.change == "reminded" else ""
    return f"{alert.severity.capitalize()}, {words[alert.status]}{reminder}"


def _where(alert: Alert) -> str:
    agents = agents_of(alert)
    if agents:
        further = len(agents) - SHOWN_AGENTS
        named = [*agents[:SHOWN_AGENTS], *([f"{further:,} more"] if further > 0 else [])]
        agent = f"agent{'' if len(agents) == 1 else 's'} {', '.join(named)}"
    else:
        agent = "all agents" if alert.agent == "*" else alert.agent and f"agent {alert.agent}"
    names = (agent, alert.model and f"model {alert.model}", alert.tenant and f"tenant {alert.tenant}")
    where = ", ".join(filter(None, names))
    return clean(where[:1].upper() + where[1:])


def _since(alert: Alert) -> str:
    often = f", {_times(alert.count)}, last at {moment(alert.last_at)}" if alert.count > 1 else ""
    if alert.status == "resolved" and alert.resolved_at is not None:
        lasted = duration(alert.resolved_at - alert.opened_at)
        return f"From {moment(alert.opened_at)} to {moment(alert.resolved_at)}, {lasted}{often}"
    return f"Since {moment(alert.opened_at)}{often}"


def _people(alert: Alert) -> list[str]:
    reason = f": {alert.reason}" if alert.reason and sentence(alert.reason) not in alert.text else ""
    people: list[str] = []
    if alert.acknowledged_by is not None:
        at = "" if alert.acknowledged_at is None else f" at {moment(alert.acknowledged_at)}"
        people.append(f"Acknowledged by {alert.acknowledged_by}{at}{'' if alert.status == 'resolved' else reason}")
    if alert.status == "resolved" and alert.resolved_by is not None:
        people.append(f"Resolved by {alert.resolved_by}{reason}")
    elif alert.status == "resolved" and reason:
        people.append(f"Resolved automatically{reason}")
    return [clean(line) for line in people]


def _figures(digest: AlertDigest) -> str:
    agents: dict[str, Counter[str]] = {}
    for alert in digest.alerts:
        if alert.agent is not None:
            agents.setdefault(alert.event, Counter())[alert.agent] += 1
    ordered = sorted(digest.counts.items(), key=lambda counted: (-counted[1], counted[0]))
    return clean(", ".join(_figure(event, count, agents.get(event, Counter())) for event, count in ordered if count))


def _figure(event: str, count: int, agents: Counter[str]) -> str:
    listed = agents.most_common(SHOWN_AGENTS)
    unlisted = count - sum(number for _, number in listed)
    if not listed or unlisted < 0:
        return f"{event} {count:,}"
    named = [f"{'all agents' if agent == '*' else agent} {number:,}" for agent, number in listed]
    return f"{event} {count:,} ({', '.join([*named, *([f'others {unlisted:,}'] if unlisted else [])])})"


def _span(digest: AlertDigest) -> str:
    begin = digest.held_from.astimezone(UTC)
    end = digest.held_until.astimezone(UTC)
    if f"{begin:%Y-%m-%d %H:%M}" == f"{end:%Y-%m-%d %H:%M}":
        return f"at {begin:%H:%M} UTC"
    if begin.date() == end.date():
        return f"between {begin:%H:%M} and {end:%H:%M} UTC"
    return f"between {begin:%Y-%m-%d %H:%M} and {end:%Y-%m-%d %H:%M} UTC"


def _urgency(alert: HeldBack) -> tuple[bool, int]:
    return alert.status == "resolved", -SEVERITIES.index(alert.severity)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _plain(part: str | Url) -> str:
    if isinstance(part, str):
        return part
    return part.url if part.text == part.url else f"{part.text}: {part.url}"
