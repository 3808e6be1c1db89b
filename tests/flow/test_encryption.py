"""With encryption on, no prompt and no answer stands on a disk or in a database; and people read them still."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis

from breakwater.kernel.security.encryption import Cipher, new_key
from breakwater.records.schema import TABLES
from breakwater.records.search import find_execution
from tests.commands import run_command
from tests.flow.kit import model
from tests.flow.test_plane import ALL, Whole, start_whole
from tests.helpers import until
from tests.servers import RunningServer

__all__ = ["start_whole"]

PROMPT, ANSWER = "Codeword Kingfisher: shall we buy?", "Buy at noon, says Albatross."
MARKS = (b"Kingfisher", b"Albatross")


def files_of(directory: Path) -> bytes:
    """All that a server has written."""
    return b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())


def directory_of(nats_server: RunningServer) -> Path:
    arguments = Path(f"/proc/{nats_server.pid}/cmdline").read_bytes().split(b"\0")
    return next(Path(os.fsdecode(one)).parent for one in arguments if one.endswith(b".conf"))


def put_in_front(config: Path, key: Path, before: Path) -> None:
    document = json.loads(config.read_text())
    assert document["encryption"]["keys"] == [{"file": str(before)}]
    document["encryption"]["keys"].insert(0, {"file": str(key)})
    config.write_text(json.dumps(document))


async def stored(whole: Whole, name: str) -> None:
    async def there() -> bool:
        return await find_execution(whole.analytics, name) is not None

    await until(there, f"the record of {name}")


async def breakwater(whole: Whole, *arguments: str, stdin: bytes = b"") -> str:
    ran = await asyncio.to_thread(run_command, *arguments, environment=whole.plane.environment, stdin=stdin)
    assert ran.returncode in {0, 1}, ran.stderr
    return ran.stdout


@pytest.mark.long(about_s=5)
async def test_no_text_stands_at_rest_and_results_replays_records_and_exports_are_readable(
    start_whole: Any, tmp_path: Path, own_nats_server: RunningServer
) -> None:
    old, new = tmp_path / "old.key", tmp_path / "new.key"
    old.write_text(new_key())
    new.write_text(new_key())
    quoting = {"status": 400, "error": {"message": f"not with {PROMPT!r}", "type": "invalid_request_error"}}
    models = {"sim/good": model(answer=ANSWER), "sim/bad": model(quoting)}
    agents = {"good": {"model": "sim/good", "cache": {"ttl_s": 600}}, "bad": {"model": "sim/bad"}}
    keys = {"keys": [{"file": str(old)}]}
    async with start_whole(models, agents, encryption=keys) as whole:
        plane = whole.plane
        job = {"agent": "good", "prompt": PROMPT, "params": {"stop": [PROMPT]}, "metadata": {"bird": "Cormorant"}}
        answers = [(await whole.submit({**job, "job_id": f"g{number}"}, wait_s=60))[1] for number in (1, 2)]
        assert [(one["output"], one["cache_hit"]) for one in answers] == [(ANSWER, False), (ANSWER, True)]
        status, failed = await whole.submit({"agent": "bad", "job_id": "b1", "prompt": PROMPT}, wait_s=60)
        assert (status, failed["status"]) == (200, "dead_lettered")
        inbox = await plane.client.subscribe("_INBOX.program")
        await plane.publish(
            Cipher([old.read_text()]).encrypt_document(
                json.dumps({"agent": "good", "job_id": "n1", "prompt": PROMPT, "reply_to": "_INBOX.program"}).encode()
            )
        )
        assert json.loads((await inbox.next_msg(timeout=60)).data)["output"] == ANSWER
        for name in ("g1", "g2", "b1", "n1"):
            await stored(whole, name)

        async with whole.http.get(f"{whole.url}/api/v1/jobs/g1") as response:
            assert (await response.json())["output"] == ANSWER
        async with whole.http.get(f"{whole.url}/api/v1/dlq/1") as response:
            shown = await response.json()
        assert shown["payload"]["prompt"] == PROMPT
        # Rotation: a new key in front, and the services started again.
        put_in_front(Path(plane.environment["BREAKWATER_CONFIG"]), new, old)
        for service in ("worker", "request"):
            assert await plane.terminate(service) == 0
            plane.start(service)
        await ready(whole)
        async with whole.http.post(f"{whole.url}/api/v1/dlq/replay", json={"dead_letters": [1]}) as response:
            [replayed] = (await response.json())["replayed"]
        await stored(whole, replayed["execution_id"])

        cipher = Cipher([new.read_text(), old.read_text()])
        used = await whole.analytics.query("SELECT execution_id, encryption_key FROM executions FINAL ORDER BY 1")
        assert dict(used.rows) == {
            **dict.fromkeys(("g1", "g2", "b1", "n1"), cipher.key_ids[1]),
            replayed["execution_id"]: cipher.key_ids[0],
        }
        record = await find_execution(whole.analytics, "g1")
        assert record is not None
        assert (record.output, record.messages, record.metadata) == (None, None, {"bird": "Cormorant"})
        record = cipher.decrypt_record(record)
        assert (record.output, record.messages) == (ANSWER, [{"role": "user", "content": PROMPT}])
        exported = await breakwater(whole, "executions", "export", "--format", "jsonl", "--output", "-")
        lines = await breakwater(whole, "encryption", "decrypt", stdin=exported.encode())
        shown_here = await breakwater(whole, "executions", "g1")
        doctor = await breakwater(whole, "doctor", "--verbose")
        new.write_text(new_key())
        old.write_text(new_key())
        lost = await breakwater(whole, "doctor")

        rows = [await whole.analytics.query(f"SELECT * FROM {table.name}") for table in TABLES]
        redis = aioredis.from_url(plane.environment["BREAKWATER_REDIS_URL"])
        async with redis:
            written = Path((await redis.config_get("dir"))["dir"])
        at_rest = {
            "NATS": files_of(directory_of(own_nats_server)),
            "Redis": files_of(written),
            "ClickHouse": str([table.rows for table in rows]).encode(),
            "logs": "".join(plane.log(name) for name in ALL).encode(),
        }
    assert [(place, mark) for place, found in at_rest.items() for mark in MARKS if mark in found] == []
    assert all(b"g1" in found for place, found in at_rest.items() if place != "logs"), (
        "it was looked in the right place"
    )
    assert ANSWER not in exported
    assert sorted(json.loads(line)["output"] or "" for line in lines.splitlines()) == ["", "", *[ANSWER] * 3]
    assert ANSWER in shown_here
    assert f"new texts are encrypted with key {cipher.key_ids[0]}, and all stored can be read" in doctor
    assert f"4 executions are encrypted with key {cipher.key_ids[1]}, which is not in encryption.keys" in lost


async def ready(whole: Whole) -> None:
    async def says_so() -> bool:
        try:
            async with whole.http.get(f"{whole.url}/readyz") as response:
                return response.status == 200
        except OSError:
            return False

    await until(says_so, "the request service")
