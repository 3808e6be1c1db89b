"""The views: figures that are right whatever was delivered twice, by the minute, the hour, the day and the opening.

Each is a file of `sql/`, and a plain view over FINAL, and not a table that a materialized view adds to: that one sees
every insert and not the rows that stay, so a batch that the bus delivers twice would count twice, in executions and in
dollars. Computing it when asked costs a read of the asked time only, as minutes, hours and days follow from the sorting
key or an index.

The names are public: they stand in people's dashboards. Columns may be added. A sum is NULL where nothing of it is
known. Executions count in the minute in which they ended, without dry runs; attempts in the one in which they began.
"""

from __future__ import annotations

import re
from importlib.resources import files

from breakwater.analytics.table import PLAIN, Layout

_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)

VIEWS = {
    file.name.removesuffix(".sql"): _COMMENT.sub("", file.read_text("utf-8"))
    for file in sorted((files("breakwater.analytics") / "sql").iterdir(), key=lambda file: file.name)
}
"""The SELECT of each, by its name."""


def create_view(name: str, layout: Layout = PLAIN) -> str:
    """The statement that makes a view, or replaces it by this version."""
    return f"CREATE OR REPLACE VIEW {name}{layout.on_cluster} AS\n{VIEWS[name]}"
