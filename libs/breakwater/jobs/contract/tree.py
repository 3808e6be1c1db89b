"""The tree of executions: an agent that has others run names itself in their jobs, as `parent_execution_id`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.jobs.contract.execution import CostBasis, ParentExecutionId, Reason, Status
from breakwater.kernel.types import Count, Event, Identifier, ModelId, Money, Timestamp

Cut = Literal["ancestors", "levels", "nodes"]
"""A reason why a tree is incomplete: its root is further up, it is deeper, or it has more executions."""


class TreeExecution(Event):
    """An execution as a tree shows it."""

    execution_id: Identifier
    job_id: Identifier = Field(description="Id of its job.")
    parent_execution_id: ParentExecutionId = None
    agent: Identifier
    status: Status
    reason: Reason | None = None
    chosen_model: ModelId | None = None
    total_cost: Money | None = Field(default=None, description="Null if no part of it is known.")
    wasted_cost: Money | None = None
    cost_basis: CostBasis
    duration_ms: Count
    cache_hit: bool
    dry_run: bool
    queued_at: Timestamp
    completed_at: Timestamp


class Subtree(Event):
    """Sums over an execution and its descendants."""

    executions: Count = Field(description="Number of recorded executions.")
    total_cost: Money | None = Field(description="Null, as `wasted_cost` is, if no part of it is known.")
    wasted_cost: Money | None
    unknown_costs: Count = Field(
        description="Executions whose cost is not completely known; with any, the sums are lower bounds."
    )


class TreeNode(Event):
    """An execution with its descendants."""

    execution_id: Identifier
    execution: TreeExecution | None = Field(
        description="Null if there is no record of it, perhaps not yet; its children name it as their parent."
    )
    subtree: Subtree
    children: tuple[TreeNode, ...] = Field(description="In the order in which they were queued.")


class Tree(Event):
    """The whole tree that an execution belongs to."""

    execution_id: Identifier = Field(description="The requested execution; it is always in the tree.")
    root: TreeNode
    cut: tuple[Cut, ...] = Field(description="Why executions are missing; empty if the tree is complete.")
    circular: bool = Field(
        description="True if jobs named each other as parents: there is no root, and the tree begins at one of them."
    )
