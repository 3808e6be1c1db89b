"""The agents that a program may call, on request over NATS."""

from __future__ import annotations

from collections.abc import Iterable

from breakwater.config import Config
from breakwater.jobs.contract.submission import CallableAgent, CallableAgents
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import AGENTS, PROGRAM


class CallableAgentTable:
    """The response for each NATS user; unknown users may call no agent."""

    def __init__(self, config: Config) -> None:
        self._by_subject = {AGENTS: _response(config, config.agents)}
        for name, program in config.programs.items():
            self._by_subject[subjects.agents_by(f"{PROGRAM}{name}")] = _response(config, program.agents)

    def response(self, subject: str) -> bytes:
        """Returns the response to a request, whose subject names the NATS user."""
        return self._by_subject.get(subject) or CallableAgents(agents=()).json_bytes()


def _response(config: Config, agents: Iterable[str]) -> bytes:
    return CallableAgents(
        agents=tuple(
            CallableAgent(agent=name, subject=subjects.job(name), model=config.agents[name].model) for name in agents
        )
    ).json_bytes()
