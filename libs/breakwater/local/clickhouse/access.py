"""Rights of the embedded ClickHouse's users: roles that the engine enforces, and a check of each statement.

chdb runs every session as its user `default`, and lets it do everything. Here that user has its rights by roles alone;
a session takes one of them before it runs a client's statement, and no client's statement may take another. chdb checks
no right for three things; they are refused by reading the statement as the engine's own parser writes it: the client's
side of ClickHouse (`INTO OUTFILE`, `FROM INFILE`), functions that open files or connections, and
statements that act on the session, or on what other sessions run.

Grants, fixed settings and limits are the same on a real server: `deploy/clickhouse/users.xml`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

from breakwater.local.clickhouse.statements import ClickHouseError, ErrorCode

READER_GRANTS = ("GRANT SELECT ON breakwater.*",)
ANALYST_GRANTS = (*READER_GRANTS, "REVOKE SELECT ON breakwater.audit")
"""The rights of statements over the HTTP API, whose keys may not read the audit log."""

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
"""The rights that migrations and inserts need; no source of data among them: no FILE, URL, REMOTE, S3 …"""

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

_COMPILATION = ("compile_expressions", "compile_aggregate_expressions", "compile_sort_description")

MAX_EXECUTION_S = 60
"""Time limit of a reader's statement that sets no `max_execution_time`."""

READER_LIMITS = {
    "max_memory_usage": 512 << 20,
    "max_execution_time": 600,  # where the statement asks for it, as an export does
    "max_threads": 2,
    "max_rows_to_read": 1_000_000_000,
    "max_temporary_data_on_disk_size_for_query": 4 << 30,
}
"""Limits of a reader's statement, which may set lower ones, but neither higher ones nor none."""

READER_SLOTS = 3
"""Statements of readers that run at the same time; the others wait."""


class EngineRole(StrEnum):
    """Rights of a user."""

    PLANE = "plane"
    READER = "reader"
    ANALYST = "analyst"

    @property
    def only_reads(self) -> bool:
        """Returns whether the limits of readers apply."""
        return self is not EngineRole.PLANE


_TABLE_FUNCTIONS = frozenset(
    {
        "format", "generate_series", "generaterandom", "generateseries", "merge", "null", "numbers", "numbers_mt",
        "primes", "sqlstandardvalues", "values", "view", "viewexplain", "viewifpermitted", "zeros", "zeros_mt",
    }
)  # fmt: skip
"""The table functions that only compute, or read tables that the role may read. All others are refused."""

_REFUSED_ANYWHERE = frozenset({"executable", "executablepool", "file", "hascolumnintable"})
"""Scalar functions and engines that chdb checks no right for. Bare names are refused too: `SELECT * APPLY file`."""

_READS = frozenset({"DESC", "DESCRIBE", "EXISTS", "EXPLAIN", "SELECT", "SET", "SHOW", "USE", "WITH"})
_KINDS = {
    EngineRole.READER: _READS,
    EngineRole.ANALYST: _READS,
    EngineRole.PLANE: _READS
    | {
        "ALTER", "CHECK", "CREATE", "DELETE", "DROP", "EXCHANGE", "INSERT", "OPTIMIZE", "RENAME", "SYSTEM", "TRUNCATE",
        "UNDROP", "UPDATE",
    },
}  # fmt: skip

_SYSTEM = "system"
_SYSTEM_TABLES = frozenset(
    {
        "aggregate_function_combinators", "collations", "columns", "contributors", "current_roles",
        "data_type_families", "database_engines", "databases", "enabled_roles", "formats", "functions", "licenses",
        "numbers", "numbers_mt", "one", "privileges", "settings", "table_engines", "table_functions", "tables",
        "time_zones", "zeros", "zeros_mt",
    }
)  # fmt: skip
"""The tables of `system` that a reader may read: constants, and what is about itself. The rest, such as the texts of
running statements, a server refuses by `select_from_system_db_requires_grant`, which chdb does not read."""

_OF_SYSTEM = frozenset({("SHOW", "MERGES"), ("SHOW", "PROCESSLIST")})
"""Statements that the engine rewrites to reads of other tables of `system`."""

# Only for what the engine has written: literals in straight quotes with backslashes, no comments, no heredocs.
_TOKEN = re.compile(
    r"(?P<literal>'(?:[^'\\]|\\.)*')|(?P<word>[^\W\d]\w*)|[`\"](?P<quoted>(?:[^`\"\\]|\\.)*)[`\"]|\d\w*|\S", re.DOTALL
)


def source_functions(table_functions: Iterable[str]) -> frozenset[str]:
    """Returns the engine's table functions that are refused, in lower case."""
    return frozenset(name.lower() for name in table_functions) - _TABLE_FUNCTIONS


def users_xml() -> str:
    """Returns the engine's configuration of users."""
    fixed = "".join(f"<{name}><const/></{name}>" for name in FIXED_SETTINGS)
    roles = {
        EngineRole.PLANE: PLANE_GRANTS,
        EngineRole.READER: READER_GRANTS,
        EngineRole.ANALYST: ANALYST_GRANTS,
        "engine": ("GRANT ALL ON *.*",),
    }
    role_elements = "".join(
        f"<{role}><grants>{''.join(f'<query>{grant}</query>' for grant in grants)}</grants></{role}>"
        for role, grants in roles.items()
    )
    # An explicit 0: the engine then refuses a reader that asks for this profile in place of its own.
    unlimited = "<max_memory_usage>0</max_memory_usage>"
    # 0 means no limit, and only a time may be a fraction.
    minimums = {"max_execution_time": "0.001"}
    limits = "".join(
        f"<{name}><min>{minimums.get(name, 1)}</min><max>{limit}</max></{name}>"
        for name, limit in READER_LIMITS.items()
    )
    common = "<implicit_select>0</implicit_select>"  # on in chdb, off in a server: `1 + 1` is a syntax error
    # A quarter of the CPU of statements on a small plane, as each form of one is compiled anew after every start. On
    # two million rows it makes none of our views faster.
    common += "".join(f"<{name}>0</{name}>" for name in _COMPILATION)
    return (
        f"<clickhouse><profiles><default>{common}{unlimited}<constraints>{fixed}</constraints></default>"
        f"<reader>{common}<constraints>{fixed}{limits}</constraints></reader>"
        "</profiles>"
        f"<roles>{role_elements}</roles><quotas><default/></quotas><users><default><password/><profile>default</profile>"
        "<networks><ip>::/0</ip></networks><quota>default</quota>"
        f"<grants><query>GRANT {', '.join(roles)}</query></grants></default></users></clickhouse>\n"
    )


def check(canonical: str, role: EngineRole, sources: frozenset[str], file: str | None = None) -> None:
    """Refuses what the role may not do but the engine would allow.

    Args:
        canonical: the statement as the engine's `formatQuery` writes it.
        role: of the user who sent it.
        sources: from `source_functions`.
        file: the only literal that may follow INTO OUTFILE or FROM INFILE, once, and must; None for neither of them.

    Raises:
        ClickHouseError: ACCESS_DENIED or INTO_OUTFILE_NOT_ALLOWED.
    """
    tokens: list[tuple[str, str]] = []
    for match in _TOKEN.finditer(canonical):
        kind = match.lastgroup or "other"
        tokens.append((kind, match[kind] if match.lastgroup else match[0]))
    tokens.append(("other", ""))
    keywords = [text.upper() if kind == "word" else "" for kind, text in tokens]
    pairs = list(pairwise(keywords))
    first = next(filter(None, keywords), "")
    sets_no_setting = first == "SET" and tokens[2] != ("other", "=")  # SET ROLE, for one
    if first not in _KINDS[role] or sets_no_setting or ("PARALLEL", "WITH") in pairs:
        raise _access_denied(role, f"a statement of the kind {first}")
    file_names = [tokens[at + 2] for at, pair in enumerate(pairs) if pair in (("INTO", "OUTFILE"), ("FROM", "INFILE"))]
    if file_names != ([] if file is None else [("literal", file)]):
        raise ClickHouseError.of(ErrorCode.INTO_OUTFILE_NOT_ALLOWED, "INTO OUTFILE is not allowed, nor is FROM INFILE")
    for (kind, text), (_, after) in pairwise(tokens):
        name = text.lower() if kind in ("word", "quoted") else ""
        if name in _REFUSED_ANYWHERE or (after == "(" and name in sources):
            raise _access_denied(role, f"the function or engine {text}")
    if role.only_reads:
        _check_system_tables(tokens, pairs, role)


def check_names(canonical: str, role: EngineRole, database: str, parameters: Mapping[str, str]) -> None:
    """Refuses a reader the database `system` where a request names it beside its statement.

    Args:
        canonical: the statement as the engine's `formatQuery` writes it.
        role: of the user who sent it.
        database: the current one.
        parameters: the values of the statement's placeholders.

    Raises:
        ClickHouseError: ACCESS_DENIED.
    """
    names = [database, *(parameters.values() if ":Identifier}" in canonical else ())]
    if role.only_reads and any(re.match(rf"[`\"]?{_SYSTEM}\b", name) for name in names):
        raise _access_denied(role, f"the database {_SYSTEM} as a parameter")


def _check_system_tables(tokens: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str]], role: EngineRole) -> None:
    """Refuses a reader the tables of `system` that a server refuses, and what could name them by an expression."""
    for (kind, text), (_, after), (following_kind, following) in zip(tokens, tokens[1:], tokens[2:], strict=False):
        is_name = kind in ("word", "quoted")
        if is_name and text == _SYSTEM and after == "." and following not in _SYSTEM_TABLES:
            raise _access_denied(role, f"the table {_SYSTEM}.{following}")
        names_database = following_kind == "literal" and following != f"'{_SYSTEM}'"
        if is_name and text.lower() == "merge" and after == "(" and not names_database:
            raise _access_denied(role, "the function merge of a database that it does not name, or of system")
    if pairs[0] == ("USE", _SYSTEM.upper()) or not _OF_SYSTEM.isdisjoint(pairs):
        raise _access_denied(role, f"reading the database {_SYSTEM}")


def _access_denied(role: EngineRole, refused: str) -> ClickHouseError:
    message = f"Not enough privileges: {refused} is not allowed for the role {role}"
    return ClickHouseError.of(ErrorCode.ACCESS_DENIED, message)
