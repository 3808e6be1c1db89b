"""One HTTP request of ClickHouse's protocol as a value: who asks, under which settings, how to answer."""

import base64
import binascii
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from breakwater.embedded.clickhouse.access import Role
from breakwater.embedded.clickhouse.errors import ClickHouseError, Code, unavailable

Users = Mapping[str, tuple[str, Role]]
"""The password and the role of each user."""

# Parameters of the transport; everything else in the URL is a setting, and the engine judges it.
_NOT_SETTINGS = frozenset(
    {
        "buffer_size", "client_protocol_version", "close_session", "compress", "database", "decompress",
        "default_format", "enable_http_compression", "http_zlib_compression_level", "password", "query", "query_id",
        "quota_key", "role", "session_check", "session_id", "session_timeout", "stacktrace", "user",
        "wait_end_of_query",
    }
)  # fmt: skip
_UNAVAILABLE = {
    "compress": "ClickHouse's own compression (ask for gzip by Accept-Encoding)",
    "decompress": "ClickHouse's own compression (send gzip, and a Content-Encoding)",
    "session_check": "a session",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_TRUE = ("1", "true", "on")


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants apart from its body.

    Attributes:
        role: whose request it is.
        readonly: refuse writes, as GET does.
        query: the SQL, or its beginning, from the URL.
        database: the current one; empty for `default`.
        default_format: for statements that name none.
        settings: names and values, in the order they came; the engine judges them.
        parameters: values of `{name:Type}`, in the engine's escaped text form, without `param_`.
        in_session: it names a session. Some clients always do, so this alone is not refused.
        gzip: compress the response.
        whole: answer only when the statement has ended.
    """

    role: Role
    readonly: bool
    query: str
    database: str
    default_format: str
    settings: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    in_session: bool
    gzip: bool
    whole: bool


def authenticate(users: Users, headers: Mapping[str, str], params: Mapping[str, str]) -> Role:
    """Give the role of who sent a request, by the ClickHouse headers, Basic authentication or the URL, in this order.

    Raises:
        ClickHouseError: AUTHENTICATION_FAILED, the same for a wrong user and a wrong password.
    """
    name, password = _credentials(headers, params)
    found: Role | None = None
    for user, (right, role) in users.items():  # compared in constant time
        same_name = hmac.compare_digest(user.encode(), name.encode(errors="surrogateescape"))
        same_password = hmac.compare_digest(right.encode(), password.encode(errors="surrogateescape"))
        found = role if same_name and same_password else found
    if found is None:
        raise ClickHouseError.of(
            Code.AUTHENTICATION_FAILED,
            f"{name}: Authentication failed: password is incorrect, or there is no user with such name.",
        )
    return found


def _credentials(headers: Mapping[str, str], params: Mapping[str, str]) -> tuple[str, str]:
    if "X-ClickHouse-User" in headers or "X-ClickHouse-Key" in headers:
        return headers.get("X-ClickHouse-User", "default"), headers.get("X-ClickHouse-Key", "")
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return params.get("user", "default"), params.get("password", "")
    try:
        user, _, password = base64.b64decode(token, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ClickHouseError.of(Code.AUTHENTICATION_FAILED, "the Authorization header is not valid Basic") from error
    return user, password


def read_ask(role: Role, method: str, pairs: Iterable[tuple[str, str]], headers: Mapping[str, str]) -> Ask:
    """Read URL parameters (and form fields) and headers.

    Args:
        role: from `authenticate`.
        method: of the request.
        pairs: parameters in their order; the last of a name counts.
        headers: of the request, case-insensitive.

    Raises:
        ClickHouseError: a parameter that cannot be a setting's name, or asks for what is not here.
    """
    params = dict(pairs)
    for name, what in _UNAVAILABLE.items():
        if params.get(name, "") in _TRUE:
            raise unavailable(what)
    default_format = params.get("default_format") or headers.get("X-ClickHouse-Format") or "TabSeparated"
    if _NAME.fullmatch(default_format) is None:
        raise ClickHouseError.of(Code.BAD_ARGUMENTS, f"{default_format!r} is not the name of a format.")
    given = {name: value for name, value in params.items() if name and name not in _NOT_SETTINGS}
    wrong = next((name for name in given if _NAME.fullmatch(name) is None), None)
    if wrong is not None:
        raise ClickHouseError.of(Code.UNKNOWN_SETTING, f"Unknown setting '{wrong}'.")
    compressed = params.get("enable_http_compression", "1") in _TRUE
    return Ask(
        role=role,
        readonly=method != "POST",
        query=params.get("query", ""),
        database=params.get("database") or headers.get("X-ClickHouse-Database", ""),
        default_format=default_format,
        settings=tuple(item for item in given.items() if not item[0].startswith("param_")),
        parameters=tuple(
            (name.removeprefix("param_"), value) for name, value in given.items() if name.startswith("param_")
        ),
        in_session=bool(params.get("session_id")),
        gzip=compressed and _accepts_gzip(headers.get("Accept-Encoding", "")),
        whole=params.get("wait_end_of_query", "") in _TRUE,
    )


def _accepts_gzip(accept_encoding: str) -> bool:
    codings = (coding.partition(";") for coding in accept_encoding.lower().split(","))
    return any(name.strip() == "gzip" and weight.strip() not in ("q=0", "q=0.0") for name, _, weight in codings)
