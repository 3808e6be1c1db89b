"""Limits that an API sets, raises, lowers and deletes while fifty keys use what they limit, and everything is killed.

The keys are made, rotated, revoked and made again meanwhile. A call costs exactly what it reserves, so the record alone
says what was admitted at each moment. Rates are left out: the plane starts to count them anew when Redis loses them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from breakwater.kernel.types import nano_from_usd
from tests.chaos.faults import SERVICES, Fault
from tests.chaos.limit_checker import (
    EACH,
    UNLIMITED,
    AdmittedCall,
    Evidence,
    Place,
    RefusedCall,
    Secret,
    SentRequest,
    Setting,
    violations,
)
from tests.chaos.plane import Chaos, chaos_plane
from tests.flow.kit import model
from tests.server_sources import Servers

KEYS = 50
CLIENTS = 25
PAUSE_S = 1.5
"""The longest pause of a client between two jobs."""
EDITORS = 4
EDIT_PAUSE_S = 0.5
ROTATORS = 2
RETRY_S = 0.3
REQUEST_S = 60.0
ANSWERED_S = 300.0
RESTORED_S = 3.0
"""Workers restore what they have reserved within that time after Redis is emptied."""

TOKENS = 40
PRICE = {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0.60"}
COST = TOKENS * 600
"""What a call reserves and costs, in nano-dollars."""
MODEL = model(price=PRICE, usage={"input_tokens": 10, "output_tokens": TOKENS}, latency_ms=200)
MODELS = ("sim/a", "sim/b", "sim/c")
AGENT: dict[str, Any] = {
    "max_tokens": TOKENS,
    "concurrency": 100,
    "breaker": "off",
    "timeout_s": 10,
    "total_timeout_s": 600,
    "retry": {"max_attempts": 12, "backoff": "constant", "base_s": 0.2},
}
AGENTS = {
    "writer": {**AGENT, "model": "sim/a"},
    "reader": {**AGENT, "model": "sim/b", "fallback_models": ["sim/c"]},
}
NAMES: Mapping[str, tuple[str, ...]] = {
    "plane": ("plane",),
    "key": tuple(f"key-{number}" for number in range(KEYS)),
    "user": tuple(f"user-{number}" for number in range(20)),
    "team": ("red", "green", "blue"),
    "tenant": ("acme", "umbrella"),
    "agent": tuple(AGENTS),
    "model": MODELS,
    "provider": ("sim",),
    "tag:project": ("web", "app", "ops"),
    "tag:region": ("eu", "us"),
}
PLACES: tuple[Place, ...] = (
    (("plane",), "daily"),
    (("plane",), "monthly"),
    (("agent",), "daily"),
    (("agent",), "weekly"),
    (("tenant",), "monthly"),
    (("tenant",), "quarterly"),
    (("key",), "daily"),
    (("key",), "monthly"),
    (("user",), "daily"),
    (("user",), "quarterly"),
    (("team",), "weekly"),
    (("model",), "daily"),
    (("provider",), "monthly"),
    (("tag:project",), "daily"),
    (("tag:region",), "monthly"),
    (("key", "model"), "daily"),
    (("user", "team"), "monthly"),
    (("team", "agent"), "daily"),
    (("tag:project", "model"), "weekly"),
    (("user", "tag:region"), "daily"),
)
"""The twenty scopes and windows that have limits."""
PER = {"daily": "day", "weekly": "week", "monthly": "month", "quarterly": "quarter"}
UNUSED = "nobody"
"""A name that nothing uses."""
ACTIONS = ("refuse", "refuse", "refuse", "cheaper_model", "alert")
SHARE = {"plane": 1.0, "provider": 1.0, "agent": 0.5, "tenant": 0.5, "model": 0.4, "team": 0.3, "tag:project": 0.3}
"""The share of all calls that one name has, about; of any other kind 0.05."""
HEADER = (
    "| seed | jobs | calls | refused | changes of limits | of keys | kills | cost, in all five places | violations | "
    "seconds |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class LimitsOutcome:
    """A run, and what the checker said."""

    seed: int
    evidence: Evidence
    jobs: int
    faults: tuple[Fault, ...]
    responses: Mapping[str, int]
    took_s: float

    def faults_found(self) -> list[str]:
        """The promises that were broken."""
        return violations(self.evidence)

    def row(self) -> str:
        """A line of the table."""
        evidence = self.evidence
        changes = len(evidence.done & evidence.limit_changes)
        money = " / ".join(f"${nano / 1e9:.6f}" for nano in sorted(set(evidence.books.values())))
        figures = [
            self.seed,
            self.jobs,
            len(evidence.calls),
            len(evidence.refusals),
            changes,
            len(evidence.done) - changes,
            len(self.faults),
            money,
            len(self.faults_found()),
            f"{self.took_s:.0f}",
        ]
        return f"| {' | '.join(map(str, figures))} |"

    def account(self) -> str:
        """The faults, and how the requests that change something were answered."""
        lines = [f"  {fault.at_s:6.1f} s  {fault}" for fault in self.faults]
        answers = ", ".join(f"{count} {answer}" for answer, count in sorted(self.responses.items()))
        return "\n".join((*lines, f"  answers: {answers}"))


@dataclass(slots=True)
class Run:
    """What was done, as the clients and the editors have seen it."""

    seconds: float
    began_s: float = field(default_factory=time.time)
    evidence: Evidence = field(default_factory=Evidence)
    jobs: set[str] = field(default_factory=set[str])
    """The ids of the executions of accepted jobs."""
    responses: Counter[str] = field(default_factory=Counter[str])
    emptied: list[float] = field(default_factory=list[float])
    """When Redis was emptied."""
    secrets: dict[str, tuple[str, Secret]] = field(default_factory=dict[str, tuple[str, Secret]])
    """The secret of each key, as it is sent, by the key's name."""
    changes: int = 0

    @property
    def over(self) -> bool:
        """True when nothing further begins."""
        return time.time() >= self.began_s + self.seconds

    def begin_change(self, what: str) -> str:
        """Returns the id of a new change, which is sent as its reason."""
        self.changes += 1
        change = f"change {self.changes}, {what}"
        self.evidence.begun.add(change)
        return change


class Editor:
    """Changes the limits of some places at random, one after the other."""

    def __init__(self, http: aiohttp.ClientSession, chance: random.Random, run: Run) -> None:
        self._http, self._chance, self._run = http, chance, run
        self._present: dict[str, int] = {}
        """The amounts of the limits that this editor has made, by their ids."""
        self._raised: dict[str, int] = {}
        """The amounts that it has raised them to."""

    async def prepare(self, places: tuple[Place, ...]) -> None:
        """Makes a limit that stays in each place, so that all places are counted from the beginning."""
        for place in places:
            await self._set(place, _anchor(place), COST * 10**6, "refuse")

    async def work(self, places: tuple[Place, ...]) -> None:
        """Changes limits until the run is over."""
        while not self._run.over:
            place = self._chance.choice(places)
            names = tuple(EACH if self._chance.random() < 0.3 else self._chance.choice(NAMES[k]) for k in place[0])
            names = tuple("plane" if kind == "plane" else name for kind, name in zip(place[0], names, strict=True))
            present, roll = self._present.get(_id(place, names)), self._chance.random()
            if present is not None and roll < 0.2 and names != _anchor(place):
                await self._delete(place, names)
            elif present is not None and roll < 0.4 and EACH not in names:
                await self._raise(place, names, present + COST * self._chance.randint(1, 20))
            else:
                # The same amount would change nothing, and end no raise.
                amount = self._amount(place[0])
                amount += COST * (amount == present)
                await self._set(place, names, amount, self._chance.choice(ACTIONS))
            await asyncio.sleep(self._chance.uniform(0, EDIT_PAUSE_S))

    def _amount(self, kinds: tuple[str, ...]) -> int:
        share = 1.0
        for kind in kinds:
            share *= SHARE.get(kind, 0.05 if kind != "tag:region" else 0.5)
        # About what the calls of the scope cost in the run: half of the limits are met.
        expected = max(4.0, share * self._run.seconds * CLIENTS / PAUSE_S)
        return COST * round(self._chance.uniform(0.3, 4.0) * expected + 1)

    async def _set(self, place: Place, names: tuple[str, ...], amount: int, action: str) -> None:
        body = {"scope": _scope(place[0], names), "usd": _usd(amount), "per": PER[place[1]], "action": action}
        allows = UNLIMITED if action == "alert" else amount
        if await self._change(place, names, "PUT", "", {**body, "stop": True}, allows):
            self._present[_id(place, names)] = amount

    async def _raise(self, place: Place, names: tuple[str, ...], amount: int) -> None:
        """Raises a limit; one that refuses nothing still does not."""
        settings = self._run.evidence.settings[place, names]
        # The same amount again would be no change.
        amount += COST * (amount == self._raised.get(_id(place, names)))
        self._raised[_id(place, names)] = amount
        allows = UNLIMITED if settings[-1].amount == UNLIMITED else amount
        await self._change(place, names, "POST", "/raise", {"amount": _usd(amount)}, allows)

    async def _delete(self, place: Place, names: tuple[str, ...]) -> None:
        if await self._change(place, names, "DELETE", "", {}, None):
            del self._present[_id(place, names)]

    async def _change(
        self, place: Place, names: tuple[str, ...], method: str, path: str, body: dict[str, Any], amount: int | None
    ) -> bool:
        """Makes a change, repeated until its caller knows its end. Returns True if it is done."""
        run, change = self._run, self._run.begin_change(f"{method}{path} {_id(place, names)}")
        run.evidence.limit_changes.add(change)
        settings = run.evidence.settings.setdefault((place, names), [])
        begun_s, is_unsure = time.time(), False
        settings.append(Setting(amount, begun_s, float("inf")))
        url = f"/api/v1/limits/{quote(_id(place, names), safe='')}{path}"
        while True:
            status, answer = await _ask(self._http, method, url, {**body, "reason": change})
            run.responses[f"{method} {answer}"] += 1
            is_unsure = is_unsure or status is None or status >= 500
            # A deletion that is repeated finds nothing.
            is_done = status == 200 or (method == "DELETE" and status == 404)
            if is_done or (status is not None and status < 500 and answer != "limit_changed") or run.over:
                break
            await asyncio.sleep(RETRY_S)
        if is_done:
            settings[-1] = Setting(amount, begun_s, time.time())
            if status == 200:
                run.evidence.done.add(change)
        elif not is_unsure:
            del settings[-1]
        return is_done


class Rotator:
    """Rotates some keys at random, and revokes them and makes them again."""

    def __init__(self, http: aiohttp.ClientSession, chance: random.Random, run: Run, keys: tuple[str, ...]) -> None:
        self._http, self._chance, self._run, self._keys = http, chance, run, keys

    async def prepare(self) -> None:
        """Makes the keys."""
        for key in self._keys:
            await self._make(key)

    async def work(self) -> None:
        """Changes keys until the run is over."""
        while not self._run.over:
            key = self._chance.choice(self._keys)
            if self._chance.random() < 0.7:
                await self._rotate(key)
            else:
                await self._revoke(key)
                await self._make(key)
            await asyncio.sleep(self._chance.uniform(0, 2 * EDIT_PAUSE_S))

    async def _rotate(self, key: str) -> None:
        _, secret = self._run.secrets[key]
        secret.end_begun_s = time.time()
        grace_s = self._chance.choice((0, 0, 2))
        made = await self._change(f"/api/v1/keys/{key}/rotate", {"grace_s": grace_s})
        secret.ended_s = time.time() + grace_s
        self._run.secrets[key] = made["key"], Secret(key, time.time())

    async def _revoke(self, key: str) -> None:
        text, secret = self._run.secrets[key]
        secret.end_begun_s = time.time()
        # By its id: when the request is repeated, several ended keys may have the name.
        await self._change(f"/api/v1/keys/{text.split('_')[1]}/revoke", {})
        secret.ended_s = time.time()

    async def _make(self, key: str) -> None:
        made = await self._change("/api/v1/keys", {"name": key})
        self._run.secrets[key] = made["key"], Secret(key, time.time())

    async def _change(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Makes a change, repeated until it is done."""
        run = self._run
        while True:
            change = run.begin_change(f"POST {path}")
            answers: list[dict[str, Any]] = []
            status, answer = await _ask(self._http, "POST", path, {**body, "reason": change}, answers)
            run.responses[f"POST {answer}"] += 1
            if status == 200:
                run.evidence.done.add(change)
                return answers[0]
            if answer == "key_exists":  # it was made, and the answer was lost: nobody has its secret
                return await self._change(f"/api/v1/keys/{body['name']}/rotate", {"grace_s": 0})
            assert status is None or status >= 500 or answer == "key_changed", f"{path}: {status} {answer}"
            await asyncio.sleep(RETRY_S)


class Client:
    """Sends jobs with the keys, one after the other."""

    def __init__(self, number: int, http: aiohttp.ClientSession, chance: random.Random, run: Run) -> None:
        self._number, self._http, self._chance, self._run = number, http, chance, run

    async def work(self) -> None:
        """Sends jobs until the run is over."""
        for job in range(10**6):
            if self._run.over:
                return
            await self._send(f"job-{self._number}-{job}")
            await asyncio.sleep(self._chance.uniform(0, PAUSE_S))

    async def _send(self, job_id: str) -> None:
        """Sends a job until it is accepted, with whatever secret its key has then."""
        key = self._chance.choice(NAMES["key"])
        metadata = {kind.removeprefix("tag:"): self._chance.choice(NAMES[kind]) for kind in _OF_METADATA}
        job = {
            "agent": self._chance.choice(NAMES["agent"]),
            "job_id": job_id,
            "prompt": "x" * 30,
            "tenant": self._chance.choice(NAMES["tenant"]),
            "metadata": metadata,
        }
        while True:
            text, secret = self._run.secrets[key]
            begun_s = time.time()
            answers: list[dict[str, Any]] = []
            status, answer = await _ask(self._http, "POST", "/api/v1/jobs", job, answers, key=text)
            if status is not None and status in (200, 202, 401):
                request = SentRequest(secret, begun_s, time.time(), is_accepted=status != 401)
                self._run.evidence.requests.append(request)
            if answers:
                self._run.jobs.add(answers[0]["execution_id"])
                return
            assert status is None or status in (401, 429) or status >= 500, f"{job_id}: {status} {answer}"
            if self._run.over:
                return
            await asyncio.sleep(RETRY_S)


_CONFIGURED = frozenset({"plane", "agent", "model", "provider"})
"""The kinds whose names the config knows."""
_OF_METADATA = ("user", "team", "tag:project", "tag:region")


async def run_limits(directory: Path, servers: Servers, seed: int, seconds: float) -> LimitsOutcome:
    """Runs for so many seconds, waits until all jobs have ended, and gathers the evidence."""
    began_s, chance = time.monotonic(), random.Random(seed)
    started = chaos_plane(
        directory,
        servers,
        nodes=1,
        disks={},
        clocks={},
        models=dict.fromkeys(MODELS, MODEL),
        agents=AGENTS,
        more_models={name: {"price": PRICE} for name in MODELS},
        cost_tags=["project", "region"],
    )
    async with started as chaos:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=5)
        async with (
            aiohttp.ClientSession(chaos.url, headers=chaos.headers, timeout=timeout) as http,
            aiohttp.ClientSession(chaos.url, timeout=timeout) as clients_http,
        ):
            run = Run(seconds)
            editors = [Editor(http, random.Random(chance.random()), run) for _ in range(EDITORS)]
            shares = [PLACES[number::EDITORS] for number in range(EDITORS)]
            keys = NAMES["key"]
            rotators = [
                Rotator(http, random.Random(chance.random()), run, keys[number::ROTATORS]) for number in range(ROTATORS)
            ]
            for editor, places in zip(editors, shares, strict=True):
                await editor.prepare(places)
            for rotator in rotators:
                await rotator.prepare()
            run.began_s = time.time()
            clients = [Client(number, clients_http, random.Random(chance.random()), run) for number in range(CLIENTS)]
            async with asyncio.TaskGroup() as group:
                killing = group.create_task(_kill(chaos, random.Random(chance.random()), run))
                for editor, places in zip(editors, shares, strict=True):
                    group.create_task(editor.work(places))
                for worker in (*rotators, *clients):
                    group.create_task(worker.work())
            for execution_id in sorted(run.jobs):
                await chaos.plane.result(execution_id, timeout_s=ANSWERED_S)
            await _gather(chaos, http, run)
    took_s = time.monotonic() - began_s
    return LimitsOutcome(seed, run.evidence, len(run.jobs), killing.result(), run.responses, took_s)


async def _kill(chaos: Chaos, chance: random.Random, run: Run) -> tuple[Fault, ...]:
    """Kills every service and Redis, one after the other, and empties Redis, again and again until the run is over."""
    faults: list[Fault] = []
    while not run.over:
        parts = [*SERVICES, "redis", "flush"]
        chance.shuffle(parts)
        for part in parts:
            await asyncio.sleep(chance.uniform(1.0, 5.0))
            if run.over:
                break
            at_s = time.time() - run.began_s
            kind, name = ("flush", "redis") if part == "flush" else ("kill", part)
            fault = Fault(kind, name, chance.choice((0.0, 0.5, 1.0, 3.0)), at_s)  # pyright: ignore[reportArgumentType]
            faults.append(fault)
            if kind == "flush":
                run.emptied.append(time.time())
            await chaos.cause(fault)
    return tuple(faults)


async def _gather(chaos: Chaos, http: aiohttp.ClientSession, run: Run) -> None:
    """Waits until the plane is quiet, and reads what it has recorded."""
    evidence = run.evidence
    record = await chaos.settled_record()
    attempts = record.attempts
    evidence.calls = [
        AdmittedCall(one["attempt_id"], *_admitted_between(one, run.emptied), _nano(one), _names_of(one))
        for one in attempts
        if not one["short_circuited"]
    ]
    evidence.refusals = [_refusal(one) for one in attempts if one["short_circuited"] and one["refused_by"]]
    evidence.failures = [
        f"{execution['execution_id']}: {execution['status']}, {json.dumps(execution['error'])}"
        for execution in record.executions
        if execution["status"] != "succeeded" and (execution["error"] or {}).get("class") not in _BY_LIMITS
    ]
    changes = [event["reason"] for event in await chaos.plane.messages("EVENTS", "bw.limits.>")]
    evidence.logged = [change for change in changes if change is not None]
    actions = await chaos.plane.messages("AUDIT", "bw.audit.>")
    evidence.audited = [action["reason"] for action in actions if action["outcome"] == "done" and action["reason"]]
    evidence.books = record.sums
    differences: list[str] = []
    if record.reserved or record.stuck:
        differences.append(f"{record.reserved} nano-dollars are reserved, and {record.stuck} are stuck")

    async def comparison() -> dict[str, Any]:
        async with http.get("/api/v1/budgets/reconciliation") as response:
            return await response.json() if response.status == 200 else {"budgets": [], "equal": False}

    compared = await chaos.last(comparison, lambda found: bool(found["equal"]), 60.0)
    differences += [
        f"{one['budget']} of {one['period']}: {one['difference']}"
        for one in compared["budgets"]
        if nano_from_usd(one["difference"] or "0")
    ]
    if not compared["equal"] and not differences:
        differences.append("the comparison says that something is reserved that no call holds")
    evidence.differences = differences


_BY_LIMITS = ("BudgetExceededError", "CallOverCapError")


def _names_of(attempt: Mapping[str, Any]) -> dict[str, str]:
    """The names that a call counts under, by their kinds."""
    fields = {"key": "submitted_by", "user": "user", "team": "team", "tenant": "tenant"}
    names = {kind: attempt[name] for kind, name in fields.items()}
    names |= {kind: attempt[kind] for kind in ("agent", "model", "provider")}
    names |= {f"tag:{tag}": value for tag, value in attempt["cost_tags"].items()}
    return {"plane": "plane", **{kind: name for kind, name in names.items() if name is not None}}


def _admitted_between(attempt: Mapping[str, Any], emptied: Sequence[float]) -> tuple[float, float]:
    """Returns when a call was admitted, at the earliest and at the latest.

    A worker that was killed may not have said when. What it had reserved is not restored if Redis is emptied before
    its jobs are recovered (docs/reliability.md): such a call counts once Redis hears of its record, at an unknown time.
    """
    begin_s = _seconds(attempt["reserved_at"] or attempt["started_at"])
    recorded_s = _seconds(attempt["completed_at"])
    is_lost = attempt["outcome"] == "worker_lost"
    if is_lost and any(begin_s - RESTORED_S <= at_s <= recorded_s for at_s in emptied):
        return 0.0, float("inf")
    return (begin_s, begin_s) if attempt["reserved_at"] is not None else (0.0, recorded_s)


def _refusal(attempt: Mapping[str, Any]) -> RefusedCall:
    """A refused call, with the scope that `refused_by` names: `user:ann within team:red/monthly`."""
    scope, _, window = attempt["refused_by"].rpartition("/")
    kinds: list[str] = []
    names: list[str] = []
    for part in scope.split(" within "):
        kind, _, name = part.partition(":")
        if kind == "tag":
            tag, _, name = name.partition("=")
            kind = f"tag:{tag}"
        kinds.append("plane" if kind == "global" else kind)
        names.append(name or "plane")
    place = tuple(kinds), window
    return RefusedCall(attempt["attempt_id"], _seconds(attempt["completed_at"]), place, tuple(names), COST)


def _nano(attempt: Mapping[str, Any]) -> int:
    cost = attempt["cost"] if attempt["cost"] is not None else attempt["reserved"]
    return nano_from_usd(cost or "0")


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _scope(kinds: tuple[str, ...], names: tuple[str, ...]) -> str:
    parts = [
        "plane" if kind == "plane" else f"{kind}={name}" if kind.startswith("tag:") else f"{kind}:{name}"
        for kind, name in zip(kinds, names, strict=True)
    ]
    return " within ".join(parts)


def _id(place: Place, names: tuple[str, ...]) -> str:
    return f"{_scope(place[0], names)} {place[1]}"


def _anchor(place: Place) -> tuple[str, ...]:
    """Returns the names of the limit that is never deleted, so that its place is counted: a new one lacks calls."""
    return tuple(NAMES[kind][0] if kind in _CONFIGURED else UNUSED for kind in place[0])


def _usd(nano: int) -> str:
    return f"{nano / 1e9:.9f}"


async def _ask(
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    body: Mapping[str, Any],
    answers: list[dict[str, Any]] | None = None,
    *,
    key: str | None = None,
) -> tuple[int | None, str]:
    """Returns the status of a response and its code, and adds its body to `answers`; no status if there was none."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        sent: dict[str, Any] = {"params": body} if method == "DELETE" else {"json": body}
        async with http.request(method, path, **sent, headers=headers) as response:
            text = await response.text()
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return None, type(error).__name__
    answer: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
    if answers is not None and status in (200, 202):
        answers.append(answer)
    return status, "done" if status in (200, 202) else answer.get("error", {}).get("code", str(status))
