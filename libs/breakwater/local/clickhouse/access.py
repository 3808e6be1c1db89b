"""Rights of the embedded ClickHouse's users: two roles that the engine enforces, and a check of each statement.

chdb runs every session as its user `default`, and lets it do everything. Here that user has its rights by roles alone;
a session takes one of them before it runs a statement of a client, and no client's statement may take another. Three
things are left that chdb checks no right for; they are refused by what the engine's own parser makes of a statement:
the client's side of ClickHouse (`INTO OUTFILE`, `FROM INFILE`), functions that open files or connections, and
statements that act on the session, or on what other sessions run.

Grants, fixed settings and limits are the same on a real server: `deploy/clickhouse/users.xml`.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise

from breakwater.local.clickhouse.statements import ClickHouseError, ErrorCode

READER_GRANTS = ("GRANT SELECT ON breakwater.*",)

PLANE_GRANTS = (
    "GRANT SHOW, SELECT, INSERT, ALTER, CREATE, DROP, UNDROP TABLE, TRUNCATE, OPTIMIZE, KILL QUERY, CLUSTER,"
    " SYSTEM MERGES, SYSTEM SYNC REPLICA ON *.*",
    "REVOKE CREATE FUNCTION, CREATE DICTIONARY, CREATE WORKLOAD, CREATE RESOURCE ON *.*",
    *(
        f"GRANT TABLE ENGINE ON {prefix}{kind}MergeTree"
        for prefix in ("", "Replicated")
        for kind in ("", "Replacing", "Aggregating", "Summing")
    ),
    "GRANT TABLE ENGINE ON Memory",
)
"""All that migrations and inserts need, and no source: no FILE, URL, REMOTE, S3 …"""

FIXED_SETTINGS = (
    "dialect",  # another language is parsed by other rules
    # Formats that read files, of any path in chdb.
    "format_schema",
    "format_schema_source",
    "format_template_resultset",
    "format_template_row",
    "input_format_record_errors_file_path",  # a file that is written
)
"""Settings that no user may change."""

MAX_EXECUTION_S = 60
"""Time limit of a reader's statement that sets no `max_execution_time`."""

READER_LIMITS = {
    "max_memory_usage": 512 << 20,
    "max_execution_time": 600,  # where the statement asks for it, as an export does
    "max_threads": 2,
    "max_rows_to_read": 1_000_000_000,
    "max_temporary_data_on_disk_size_for_query": 4 << 30,
}
"""Limits of a reader's statement: less can be asked for; more, or no limit, can not."""

READER_SLOTS = 3
"""Statements of readers that run at the same time; the others wait."""


class EngineRole(StrEnum):
    """Rights of a user."""

    PLANE = "plane"
    READER = "reader"


_TABLE_FUNCTIONS = frozenset(
    {
        "format", "generate_series", "generaterandom", "generateseries", "merge", "null", "numbers", "numbers_mt",
        "primes", "sqlstandardvalues", "values", "view", "viewexplain", "viewifpermitted", "zeros", "zeros_mt",
    }
)  # fmt: skip
"""Those that only compute, or read tables that the role may read. All others that the engine knows are refused."""

_REFUSED_ANYWHERE = frozenset({"executable", "executablepool", "file", "hascolumnintable"})
"""Scalar functions and engines that no right is checked for. As names alone too: `SELECT * APPLY file`."""

_READS = frozenset({"DESC", "DESCRIBE", "EXISTS", "EXPLAIN", "SELECT", "SET", "SHOW", "USE", "WITH"})
_KINDS = {
    EngineRole.READER: _READS,
    EngineRole.PLANE: _READS
    | {
        "ALTER", "CHECK", "CREATE", "DELETE", "DROP", "EXCHANGE", "INSERT", "OPTIMIZE", "RENAME", "SYSTEM", "TRUNCATE",
        "UNDROP", "UPDATE",
    },
}  # fmt: skip

# Only for what the engine has written: literals in straight quotes with backslashes, no comments, no heredocs.
_TOKEN = re.compile(
    r"(?P<literal>'(?:[^'\\]|\\.)*')|(?P<word>[^\W\d]\w*)|[`\"](?P<quoted>(?:[^`\"\\]|\\.)*)[`\"]|\d\w*|\S", re.DOTALL
)


def source_functions(known: Iterable[str]) -> frozenset[str]:
    """Returns those of the engine's table functions that are refused, in lower case."""
    return frozenset(name.lower() for name in known) - _TABLE_FUNCTIONS


def users_xml() -> str:
    """Returns the engine's configuration of users."""
    fixed = "".join(f"<{name}><const/></{name}>" for name in FIXED_SETTINGS)
    roles = {EngineRole.PLANE: PLANE_GRANTS, EngineRole.READER: READER_GRANTS, "engine": ("GRANT ALL ON *.*",)}
    written = "".join(
        f"<{role}><grants>{''.join(f'<query>{grant}</query>' for grant in grants)}</grants></{role}>"
        for role, grants in roles.items()
    )
    # An explicit 0: the engine then refuses a reader that asks for this profile in place of its own.
    unlimited = "<max_memory_usage>0</max_memory_usage>"
    # 0 means no limit, and only a time may be a fraction.
    least = {"max_execution_time": "0.001"}
    within = "".join(
        f"<{name}><min>{least.get(name, 1)}</min><max>{most}</max></{name}>" for name, most in READER_LIMITS.items()
    )
    common = "<implicit_select>0</implicit_select>"  # on in chdb, off in a server: `1 + 1` is a syntax error
    return (
        f"<clickhouse><profiles><default>{common}{unlimited}<constraints>{fixed}</constraints></default>"
        f"<reader>{common}<constraints>{fixed}{within}</constraints></reader>"
        "</profiles>"
        f"<roles>{written}</roles><quotas><default/></quotas><users><default><password/><profile>default</profile>"
        "<networks><ip>::/0</ip></networks><quota>default</quota>"
        f"<grants><query>GRANT {', '.join(roles)}</query></grants></default></users></clickhouse>\n"
    )


def check(canonical: str, role: EngineRole, sources: frozenset[str], file: str | None = None) -> None:
    """Refuses what the role may not do and the engine would let it.

    Args:
        canonical: the statement as the engine's `formatQuery` writes it.
        role: of the user who sent it.
        sources: from `source_functions`.
        file: the only literal that may follow INTO OUTFILE or FROM INFILE, once, and must; None for neither of them.

    Raises:
        ClickHouseError: ACCESS_DENIED or INTO_OUTFILE_NOT_ALLOWED.
    """
    tokens: list[tuple[str, str]] = []
    for found in _TOKEN.finditer(canonical):
        kind = found.lastgroup or "other"
        tokens.append((kind, found[kind] if found.lastgroup else found[0]))
    tokens.append(("other", ""))
    keywords = [text.upper() if kind == "word" else "" for kind, text in tokens]
    pairs = list(pairwise(keywords))
    first = next(filter(None, keywords), "")
    sets_no_setting = first == "SET" and tokens[2] != ("other", "=")  # SET ROLE, for one
    if first not in _KINDS[role] or sets_no_setting or ("PARALLEL", "WITH") in pairs:
        raise _denied(role, f"a statement of the kind {first}")
    named = [tokens[at + 2] for at, pair in enumerate(pairs) if pair in (("INTO", "OUTFILE"), ("FROM", "INFILE"))]
    if named != ([] if file is None else [("literal", file)]):
        raise ClickHouseError.of(ErrorCode.INTO_OUTFILE_NOT_ALLOWED, "INTO OUTFILE is not allowed, nor is FROM INFILE")
    for (kind, text), (_, after) in pairwise(tokens):
        name = text.lower() if kind in ("word", "quoted") else ""
        if name in _REFUSED_ANYWHERE or (after == "(" and name in sources):
            raise _denied(role, f"the function or engine {text}")


def _denied(role: EngineRole, refused: str) -> ClickHouseError:
    message = f"Not enough privileges: {refused} is not allowed for the role {role}"
    return ClickHouseError.of(ErrorCode.ACCESS_DENIED, message)
