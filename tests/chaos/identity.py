"""The record of a plane that was disturbed, replayed under the config that it ran under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nats.aio.client import Client

from breakwater.config import load_config
from breakwater.kernel.nats.lookup import Lookup
from breakwater.replay.log import read_log
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.engine import Replay
from breakwater.replay.rules.identity import UNEXPLAINED, Identity, identity
from breakwater.replay.rules.world import World

HEADER = "| decisions | equal | unequal, by cause | unexplained |\n|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class ReplayedRecord:
    """The agreement of a record with its replay.

    Attributes:
        jobs: how many jobs it has.
        parts: the agreement by what is decided.
        followed: how many decisions were taken from the record, as no rule of the replay makes them, by their reason.
    """

    jobs: int
    parts: Sequence[Identity]
    followed: Counter[str]

    @property
    def unexplained(self) -> int:
        """The decisions that differ for no reason that is known."""
        return sum(part.unequal[UNEXPLAINED] for part in self.parts)

    @property
    def examples(self) -> list[str]:
        """Some of those, in words."""
        return [example for part in self.parts for example in part.examples]


async def replayed_record(client: Client, config: Path) -> ReplayedRecord:
    """Replays all that the streams hold."""
    jobs, changes = await read_log(Lookup(lambda: client))
    policy = policy_of(load_config(config))
    world = World(logged.attempt for job in jobs for logged in job.attempts)
    replay = Replay(policy, policy, changes, world)
    replay.run(jobs)
    findings = replay.finish()
    return ReplayedRecord(len(jobs), [*identity(jobs, changes, findings).values()], findings.followed)


def table(records: Iterable[ReplayedRecord]) -> str:
    """Returns the agreement of several records, by what is decided, and what was taken from them."""
    equal: Counter[str] = Counter()
    unequal: dict[str, Counter[str]] = {}
    followed: Counter[str] = Counter()
    jobs = 0
    for record in records:
        jobs += record.jobs
        followed.update(record.followed)
        for part in record.parts:
            equal[part.subject] += part.equal
            unequal.setdefault(part.subject, Counter()).update(part.unequal)
    lines = [HEADER]
    for subject, causes in unequal.items():
        explained = {cause: count for cause, count in causes.items() if cause != UNEXPLAINED}
        lines.append(f"| {subject} | {equal[subject]:,} | {_words_of(explained)} | {causes[UNEXPLAINED]:,} |")
    races = sum(count for causes in unequal.values() for cause, count in causes.items() if cause != UNEXPLAINED)
    decisions = equal.total() + sum(causes.total() for causes in unequal.values())
    share = races / decisions if decisions else 0.0
    lines += [
        f"{jobs:,} jobs; {races:,} of {decisions:,} decisions unequal with a cause: {share:.3%}",
        f"taken from the record, as no rule makes them: {_words_of(followed)}",
    ]
    return "\n".join(lines)


def _words_of(counts: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"
