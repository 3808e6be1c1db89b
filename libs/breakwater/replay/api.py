"""`/api/v1/config/plan`: what a changed config would have done with recorded jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response

from breakwater.config import Config
from breakwater.config.store import Configs
from breakwater.identity.event_stream import OpenStreams
from breakwater.identity.operations import CLICKHOUSE_UNAVAILABLE, operation, utc_now
from breakwater.kernel.http.bodies import A_REQUEST, read_body
from breakwater.kernel.http.parsing import read_command
from breakwater.kernel.http.problems import RequestError, not_read, unavailable
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.records.api.streamed_rows import StreamedRows
from breakwater.replay.contract import MAX_CONFIG, ConfigPlanError, ConfigPlanLine, ConfigPlanRequest
from breakwater.replay.process import LONGEST_S, PlanTask, plan_in_process


@dataclass(slots=True)
class Planner:
    """The plans of this process, of which one runs at a time.

    Args:
        clickhouse_url: the URL of the record.
        running: the plans that run.
    """

    clickhouse_url: SecretStr
    running: OpenStreams = field(default_factory=lambda: OpenStreams(1, "config plans"))


@dataclass(frozen=True, slots=True)
class ConfigPlanRoutes:
    """Plans of changed configs."""

    config: Config
    configs: Configs
    planner: Planner

    @operation(
        "POST",
        "/api/v1/config/plan",
        tag="config",
        summary="Say what a changed config would have done",
        description="Replays the recorded jobs of a stretch of time under the changed config, as `breakwater plan` "
        "does, in a process of its own with the lowest priority; the config that is in use now is taken for the one "
        "that they ran under. The response is JSON in lines, each a `ConfigPlanLine`: `progress` and `jobs` now and "
        "then, and at the end the `report` (`ConfigPlan`), or an `error`. It takes seconds to minutes, at most ten. "
        "A client that leaves stops the plan. Nothing changes, and nothing is recorded in the audit log.",
        body=ConfigPlanRequest,
        results={200: ("The progress and the report.", str)},
        content_type="application/x-ndjson",
        errors={
            404: "No config of this version is stored (`unknown_version`); configs are stored for 30 days.",
            422: "The request (`invalid_request`) or the config is invalid, and the message names each mistake with "
            "its line (`invalid_config`); no config has such an agent (`unknown_agent`).",
            503: f"{CLICKHOUSE_UNAVAILABLE} Or another plan runs in this process (`too_many_config_plans`).",
        },
    )
    async def plan_config(self, request: Request) -> Response:
        """Streams the progress and the report. Raises RequestError: the request is invalid."""
        body = await read_body(request, 4 * MAX_CONFIG, A_REQUEST)
        plan_request = read_command(body, ConfigPlanRequest)
        until = plan_request.until or utc_now()
        if plan_request.since >= until:
            raise RequestError(422, "invalid_request", "`since` must be before `until`")
        text = plan_request.config
        if text is None:
            text = await self._applied_config(plan_request.version or "")
        url = self.planner.clickhouse_url.get_secret_value()
        task = PlanTask(
            clickhouse_url=url,
            config=text,
            before=self.config.text,
            since=plan_request.since,
            until=until,
            agent=plan_request.agent,
            renames=plan_request.renames,
            leaves_out_unknown=plan_request.unknown == "exclude",
        )
        return StreamedRows(
            request,
            self.planner.running,
            lambda: _lines(task),
            content_type="application/x-ndjson",
            limit_s=LONGEST_S,
            noun="plan",
            last_piece=lambda problem: _line(
                ConfigPlanLine(error=ConfigPlanError(code=problem.code, message=problem.message))
            ),
        )

    async def _applied_config(self, version: str) -> str:
        """Returns the text of a config that was applied. Raises RequestError: it is not stored, or can't be read."""
        try:
            text = await self.configs.load(version)
        except StateUnavailableError as error:
            raise not_read(error) from error
        if text is None:
            message = f"no config of version {version} is stored; configs are stored for 30 days after their last use"
            raise RequestError(404, "unknown_version", message)
        return text


async def _lines(task: PlanTask) -> AsyncGenerator[bytes]:
    """Yields the lines of a plan. Raises RequestError: an error instead of a report."""
    async with aclosing(plan_in_process(task)) as lines:
        async for line in lines:
            if line.error is None:
                yield _line(line)
            elif line.error.code == "unavailable":
                raise unavailable("unavailable", line.error.message)
            else:
                raise RequestError(422, line.error.code, line.error.message)


def _line(line: ConfigPlanLine) -> bytes:
    return line.model_dump_json(exclude_defaults=True).encode() + b"\n"
