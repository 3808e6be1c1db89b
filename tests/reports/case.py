"""What a case is, what is mostly expected of one, and how one becomes several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.reports.wire import TEXT, Answer, Body, Dialect, Reply

PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2", "cached_input_usd_per_mtok": "0.5"}
COST = 200_000


@dataclass(frozen=True, slots=True)
class Check:
    """Something expected that is no single value."""

    words: str
    holds: Callable[[Any], bool]

    def __call__(self, found: Any) -> bool:
        """Whether it holds."""
        return self.holds(found)

    def __repr__(self) -> str:
        return self.words


def least(amount: int) -> Check:
    """An amount that is known, and not below this one."""
    return Check(f"{amount:,} or more", lambda found: found is not None and found >= amount)


def among(*values: Any) -> Check:
    """One of these."""
    return Check(" or ".join(map(str, values)), lambda found: found in values)


FALLBACK = "From the fallback."
COUNTED = frozenset({"server", "network", "timeout", "transient"})
OSLO = ("find", '{"city": "Oslo"}')
ROME = ("book", '{"city": "Rome"}')
SOME = Check("some", bool)
"""Neither nothing nor zero."""

ASK = ({"role": "user", "content": "When does the ferry leave?"},)


@dataclass(frozen=True, slots=True)
class Case:
    """One of them.

    Attributes:
        row: of the table it belongs to.
        name: of its model, too.
        answers: of the model, one for each call; the last stands for all that follow.
        expected: by the names of what is looked at.
        dialect: of the provider.
        stream: the client wants a stream.
        params: of the client's request.
        messages: the same.
        agent: settings of an agent of its own.
        model: settings of the model, instead of its price.
        fallback: there is one.
        times: how often the client asks; what is seen is of the last time, calls are all.
    """

    row: str
    name: str
    answers: Sequence[Answer]
    expected: Mapping[str, Any]
    dialect: Dialect = "openai"
    stream: bool = False
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Body] = ASK
    agent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: Mapping[str, Any] | None = None
    fallback: bool = True
    times: int = 1

    @property
    def sent_as(self) -> str:
        """What the provider is told as the model."""
        return (self.model or {}).get("name", self.name)

    @property
    def agent_name(self) -> str:
        """The agent that the client asks for."""
        return f"judge-{self.name}" if self.agent else "judge"


def good(text: str | None = TEXT, cost: Any = COST, **more: Any) -> Body:
    """The first call answers."""
    said: Body = {"calls": 1, "fallback": 0, "status": "succeeded", "output": text, "text": text}
    return said | {"cost": cost, "basis": "billed", "malformed": []} | more


def bad(calls: Any, kind: Any = None, counted: Any = None, **more: Any) -> Body:
    """The model has failed after so many calls, and the fallback answers; an error costs nothing."""
    said = {"calls": calls, "fallback": 1, "status": "succeeded", "cost": 0, "output": FALLBACK, "text": FALLBACK}
    named = {} if kind is None else {"kind": kind}
    return said | named | {"counted": kind in COUNTED if counted is None else counted} | more


def tools(*wanted: tuple[str, str], **more: Any) -> Body:
    """The first call answers with tool calls, and no text."""
    none = among(None, "")
    return {**good(None, **more), "output": none, "text": none, "tools": list(wanted)}


def ways(answers: Mapping[str, Reply]) -> Iterator[tuple[str, Reply, dict[str, Any]]]:
    """By the name of a way, which says the dialect and whether it is streamed."""
    for way, reply in answers.items():
        yield way, reply, {"dialect": "anthropic" if "anthropic" in way else "openai", "stream": "streamed" in way}


def each(row: str, name: str, expected: Body, **answers: Reply) -> Iterator[Case]:
    """The same in several ways: `plain`, `streamed`, `anthropic`, `anthropic_streamed`."""
    for way, reply, how in ways(answers):
        yield Case(row, f"{name}-{way}".replace("_", "-"), [reply], expected, **how)


def without(given: Body, name: str) -> Body:
    """An object that lacks one field."""
    return {key: value for key, value in given.items() if key != name}
