"""The keys of tasks: runs of jobs that are counted and stopped together."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from breakwater.kernel.nats.subjects import encode_token

LONGEST_NAME = 48


@dataclass(frozen=True, slots=True)
class TaskKey:
    """Identity of a task. Tenants do not share tasks, even under the same name."""

    tenant: str | None
    task_key: str

    @property
    def name(self) -> str:
        """The task's name: `<tenant>/<task>`, each encoded as a subject token; the tenant is empty for none."""
        return f"{'' if self.tenant is None else encode_token(self.tenant)}/{encode_token(self.task_key)}"

    @property
    def short_name(self) -> str:
        """The task's name in keys of Redis, of a bounded size."""
        return short_name(self.name)

    @property
    def redis_key(self) -> str:
        """The task's key in Redis."""
        return f"bw:task:{self.short_name}"


def short_name(name: str) -> str:
    """The name of a task or job in Redis; for a long name, its digest.

    Senders of jobs choose names, of up to 3 KB each, encoded; and a hash with a field of more than 64 bytes takes three
    times the memory.
    """
    if len(name) <= LONGEST_NAME and not name.startswith("~"):
        return name
    return f"~{blake2b(name.encode(), digest_size=16).hexdigest()}"
