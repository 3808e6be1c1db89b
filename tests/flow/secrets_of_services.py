"""Secrets for services, what each may hold of them, and a program that looks for those of others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

SECRETS = {
    "TEST_PROVIDER_KEY": "marker-of-the-provider-7f3a",
    "TEST_WEBHOOK_SECRET": "whsec_bWFya2VyLW9mLXRoZS13ZWJob29rLTdmM2EtMDEyMzQ1Njc4OQ==",
    "TEST_LINKS_SECRET": "marker-of-the-links-7f3a-0123456789abcdef",
    "TEST_CALLABLE_TOKEN": "marker-of-the-callable-7f3a",
    "TEST_UNRELATED": "marker-of-something-else-7f3a",
}
NEEDED = {
    "worker": {"TEST_PROVIDER_KEY", "TEST_CALLABLE_TOKEN"},
    "alerter": {"TEST_WEBHOOK_SECRET", "TEST_LINKS_SECRET"},
    "request": {"TEST_LINKS_SECRET"},
}

SPY = """
import glob, json, os, sys
json.load(sys.stdin)
found, read = {}, 0
for directory in glob.glob("/proc/[0-9]*"):
    try:
        environment = open(directory + "/environ", "rb").read()
    except OSError:
        continue
    read += 1
    if names := [name for name in ("TEST_PROVIDER_KEY", "TEST_WEBHOOK_SECRET", "TEST_UNRELATED", "BREAKWATER_REDIS_URL")
                 if (name + "=").encode() in environment]:
        found[open(directory + "/comm").read().strip() + " " + open(directory + "/cmdline").read()] = names
try:
    open(f"/proc/{os.getppid()}/mem", "rb").close()
    memory = "open"
except OSError:
    memory = "refused"
print(json.dumps({"status": "success", "code": 0, "result": {"found": found, "read": read, "memory": memory}}))
"""

AS_USER = """
import ctypes, os, sys
for capability in range(64):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: root is then a user like any other
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def add_secrets(document: dict[str, Any], spy: Path) -> None:
    """Gives a config the secrets, and an agent `spy`, whose program looks for them."""
    spy.write_text(SPY)
    document["providers"]["spy"] = {"kind": "process", "command": [sys.executable, str(spy)]}
    document["agents"]["spy"] = {"provider": "spy", "timeout_s": 60}
    document["alerts"] = {
        "links": {"base_url": "http://127.0.0.1:8080", "secret": {"env": "TEST_LINKS_SECRET"}},
        "channels": {"ops": {"webhook": {"url": "http://127.0.0.1:9/", "secret": {"env": "TEST_WEBHOOK_SECRET"}}}},
    }
    document["environment"] = {"worker": ["TEST_CALLABLE_TOKEN"]}


def secrets_of(pid: int) -> set[str]:
    """Those that are anywhere in the memory of a process that it can have written."""
    process, found = Path(f"/proc/{pid}"), set[str]()
    with (process / "maps").open() as maps, (process / "mem").open("rb", buffering=0) as memory:
        for line in maps:
            mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw(.*)", line)
            if mapping is None or "[vvar" in line or "[vsyscall" in line:
                continue
            start, end = int(mapping[1], 16), int(mapping[2], 16)
            memory.seek(start)
            try:
                held = memory.read(end - start)
            except OSError:
                continue  # a mapping of a device
            found |= {name for name, secret in SECRETS.items() if secret.encode() in held}
    return found
