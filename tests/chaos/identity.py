"""The record of a plane that was disturbed, replayed under the config that it ran under."""

from __future__ import annotations

import pickle
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from breakwater.config import load_config
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.subjects import Stream
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


class KeptStreams:
    """The messages of the streams of a record, in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def keep(self, lookup: Lookup, config: Path) -> None:
        """Copies all that a replay reads: the streams, and the config of that time."""
        self._directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(config, self._directory / "breakwater.yaml")
        for stream in (Stream.EVENTS, Stream.ALERTS):
            async with aclosing(lookup.scan(stream, "bw.>", complete=True)) as stored:
                messages = [message async for message in stored]
            (self._directory / f"{stream}.pickle").write_bytes(pickle.dumps(messages))

    async def scan(self, stream: Stream, *_: object, **__: object) -> AsyncGenerator[StoredMessage]:
        """Yields what the stream held, as `Lookup.scan` does."""
        for message in pickle.loads((self._directory / f"{stream}.pickle").read_bytes()):
            yield message


async def replayed_record(source: Lookup | KeptStreams, config: Path) -> ReplayedRecord:
    """Replays all that the streams hold."""
    jobs, changes = await read_log(source)
    policy = policy_of(load_config(config))
    world = World(logged.attempt for job in jobs for logged in job.attempts)
    replay = Replay(policy, policy, changes, world)
    replay.run(jobs)
    findings = replay.finish()
    return ReplayedRecord(len(jobs), [*identity(jobs, changes, findings).values()], findings.followed)


async def replayed_again(directory: Path) -> ReplayedRecord:
    """Replays a record that was kept."""
    return await replayed_record(KeptStreams(directory), directory / "breakwater.yaml")


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
