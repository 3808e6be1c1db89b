"""The graph of a plan: its jobs in columns, each behind the jobs that it depends on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from breakwater.jobs.contract.submission import PlanJob, PlanJobStatus

MAX_SINGLE_JOBS = 40
"""A plan with more jobs is drawn with one node for all jobs that are alike."""


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A job of a plan, or several jobs that are alike: of one agent, in one state, behind jobs that are alike."""

    jobs: tuple[PlanJob, ...]
    column: int
    """The number of steps before it, on the longest way."""
    row: int
    """Its place in its column, from 0."""
    dependencies: tuple[int, ...]
    """The indexes of the nodes that it depends on."""
    passed_rows: tuple[int, ...] = ()
    """The free places by which its edges pass the columns behind its own, so that they cross no node."""

    @property
    def agent(self) -> str:
        """The agent of all of its jobs."""
        return self.jobs[0].agent

    @property
    def status(self) -> PlanJobStatus:
        """The state of all of its jobs."""
        return self.jobs[0].status


def plan_graph(jobs: Sequence[PlanJob], max_single_jobs: int = MAX_SINGLE_JOBS) -> tuple[PlanNode, ...]:
    """Places the jobs of a plan.

    Args:
        jobs: the jobs. They depend on one another in no circle; dependencies that are not among them are ignored.
        max_single_jobs: the number of jobs up to which each has its own node.

    Returns:
        The nodes, column by column. Those of a column are ordered by the rows of their dependencies, so that edges
        cross little.
    """
    by_id = {job.execution_id: job for job in jobs}
    columns = _columns(by_id)
    groups = _groups(by_id, columns, merge=len(jobs) > max_single_jobs)
    group_of = {job.execution_id: index for index, group in enumerate(groups) for job in group}
    column_of = [columns[group[0].execution_id] for group in groups]
    needs = [{group_of[name] for job in group for name in job.depends_on if name in by_id} for group in groups]
    # The edges of a group pass all columns before that of the last node that depends on it.
    last_column = list(column_of)
    for index, needed_groups in enumerate(needs):
        for needed in needed_groups:
            last_column[needed] = max(last_column[needed], column_of[index])
    rows: dict[int, list[int]] = defaultdict(list)
    order: list[int] = []
    for column in range(max(column_of, default=-1) + 1):
        in_column: list[tuple[float, str, int]] = []
        for index, group in enumerate(groups):
            if column_of[index] == column:
                mean_row = sum(rows[needed][-1] for needed in needs[index]) / max(len(needs[index]), 1)
                in_column.append((mean_row, group[0].job_id, index))
            elif column_of[index] < column < last_column[index]:
                in_column.append((rows[index][-1], group[0].job_id, index))
        for row, (_, _, index) in enumerate(sorted(in_column)):
            rows[index].append(row)
            if column_of[index] == column:
                order.append(index)
    place_of = {index: place for place, index in enumerate(order)}
    return tuple(
        PlanNode(
            tuple(groups[index]),
            column_of[index],
            rows[index][0],
            tuple(sorted(place_of[needed] for needed in needs[index])),
            tuple(rows[index][1:]),
        )
        for index in order
    )


def _columns(by_id: Mapping[str, PlanJob]) -> dict[str, int]:
    """Returns the column of each job: one behind the last of its dependencies."""
    columns: dict[str, int] = {}
    for first in by_id:
        pending = [first]
        while pending:
            name = pending[-1]
            dependencies = [needed for needed in by_id[name].depends_on if needed in by_id]
            unplaced = [needed for needed in dependencies if needed not in columns]
            if unplaced and name not in columns:
                pending += unplaced
            else:
                pending.pop()
                columns[name] = max((columns[needed] + 1 for needed in dependencies), default=0)
    return columns


def _groups(by_id: Mapping[str, PlanJob], columns: Mapping[str, int], *, merge: bool) -> list[list[PlanJob]]:
    """Returns the jobs of each node."""
    groups: dict[object, list[PlanJob]] = defaultdict(list)
    kind_of: dict[object, int] = {}
    kinds: dict[str, int] = {}
    for name in sorted(by_id, key=lambda name: columns[name]):
        job = by_id[name]
        likeness: object = name
        if merge:
            dependencies = frozenset(kinds[needed] for needed in job.depends_on if needed in by_id)
            likeness = (job.agent, job.status, dependencies)
        kinds[name] = kind_of.setdefault(likeness, len(kind_of))
        groups[likeness].append(job)
    return list(groups.values())
