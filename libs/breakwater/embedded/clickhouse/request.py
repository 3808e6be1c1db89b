"""One HTTP request of ClickHouse's protocol as a value: who asks, under which settings, how to answer."""

import base64
import binascii
import hmac
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from breakwater.embedded.clickhouse.access import Role
from breakwater.embedded.clickhouse.codec import choose_coding
from breakwater.embedded.clickhouse.errors import ClickHouseError, Code

# Parameters of the transport; everything else in the URL is a setting, and the engine judges it.
_NOT_SETTINGS = frozenset(
    {
        "buffer_size", "client_protocol_version", "close_session", "compress", "database", "decompress",
        "default_format", "password", "query", "query_id", "quota_key", "role", "session_check", "session_id",
        "session_timeout", "stacktrace", "user", "wait_end_of_query",
    }
)  # fmt: skip
_SETTING_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_TRUE = ("1", "true", "on")
_BUFFER_BYTES = 1 << 20  # a failure within the first bytes still gets an HTTP status of its own


@dataclass(frozen=True, slots=True)
class User:
    """Who may send statements, and as what."""

    name: str
    password: str = field(repr=False)
    role: Role


@dataclass(frozen=True, slots=True)
class Users:
    """All users there are."""

    users: tuple[User, ...]

    def role_of(self, name: str, password: str) -> Role:
        """Compare in constant time.

        Returns:
            What the user may do.

        Raises:
            ClickHouseError: AUTHENTICATION_FAILED, the same for a wrong user and a wrong password.
        """
        found: Role | None = None
        for user in self.users:
            same_name = hmac.compare_digest(user.name.encode(), name.encode(errors="surrogateescape"))
            same_password = hmac.compare_digest(user.password.encode(), password.encode(errors="surrogateescape"))
            found = user.role if same_name and same_password else found
        if found is None:
            raise ClickHouseError.of(
                Code.AUTHENTICATION_FAILED,
                f"{name}: Authentication failed: password is incorrect, or there is no user with such name.",
            )
        return found


def given_credentials(headers: Mapping[str, str], params: Mapping[str, str]) -> tuple[str, str]:
    """Read user and password from the ClickHouse headers, Basic authentication or the URL, in this order."""
    if "X-ClickHouse-User" in headers or "X-ClickHouse-Key" in headers:
        return headers.get("X-ClickHouse-User", "default"), headers.get("X-ClickHouse-Key", "")
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(token, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ClickHouseError.of(
                Code.AUTHENTICATION_FAILED, "the Authorization header is not valid Basic"
            ) from error
        return user, password
    return params.get("user", "default"), params.get("password", "")


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """What a request wants apart from its SQL.

    Attributes:
        query: the SQL, or its beginning, from the URL.
        query_id: the client's or a new one.
        database: empty for the engine's default.
        default_format: for statements that name none.
        settings: for the engine, in the order they came.
        parameters: `{name:Type}` values without `param_`.
        session_id: empty for none.
        session_timeout_s: how long the session is kept after its last request.
        session_check: fail when the session is unknown.
        coding: the response's Content-Encoding, or None.
        native_in: the request body is in ClickHouse's compressed blocks.
        native_out: the response shall be.
        compression_level: for gzip and deflate.
        whole: answer only when the statement has ended.
        buffer_bytes: how much to hold back before the answer begins.
    """

    query: str
    query_id: str
    database: str
    default_format: str
    settings: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    session_id: str
    session_timeout_s: int
    session_check: bool
    coding: str | None
    native_in: bool
    native_out: bool
    compression_level: int
    whole: bool
    buffer_bytes: int


def read_query_request(
    pairs: Iterable[tuple[str, str]], headers: Mapping[str, str], external: frozenset[str]
) -> QueryRequest:
    """Read URL parameters (and form fields) and headers.

    Args:
        pairs: parameters in their order; the last of a name counts.
        headers: of the request, case-insensitive.
        external: parameter names that describe tables sent along.

    Returns:
        The request as a value.

    Raises:
        ClickHouseError: a parameter that cannot be a setting's name, or a number that is none.
    """
    params = dict(pairs)
    settings: list[tuple[str, str]] = []
    parameters: list[tuple[str, str]] = []
    for name, value in params.items():
        if name.startswith("param_"):
            parameters.append((_valid_name(name.removeprefix("param_")), value))
        elif name and name not in _NOT_SETTINGS and name not in external:
            settings.append((_valid_name(name), value))
    native_out = params.get("compress", "") in _TRUE
    compresses = params.get("enable_http_compression", "1") in _TRUE and not native_out
    return QueryRequest(
        query=params.get("query", ""),
        query_id=params.get("query_id") or headers.get("X-ClickHouse-Query-Id") or str(uuid.uuid4()),
        database=params.get("database") or headers.get("X-ClickHouse-Database", ""),
        default_format=_valid_name(
            params.get("default_format") or headers.get("X-ClickHouse-Format") or "TabSeparated", "format"
        ),
        settings=tuple(settings),
        parameters=tuple(parameters),
        session_id=params.get("session_id", ""),
        session_timeout_s=min(_number(params, "session_timeout", 60), 3600),
        session_check=params.get("session_check", "") in _TRUE,
        coding=choose_coding(headers.get("Accept-Encoding", "")) if compresses else None,
        native_in=params.get("decompress", "") in _TRUE,
        native_out=native_out,
        compression_level=min(max(_number(params, "http_zlib_compression_level", 3), 1), 9),
        whole=params.get("wait_end_of_query", "") in _TRUE,
        buffer_bytes=_number(params, "buffer_size", _BUFFER_BYTES),
    )


def _valid_name(name: str, kind: str = "setting") -> str:
    if _SETTING_NAME.fullmatch(name) is None:
        if kind == "setting":
            raise ClickHouseError.of(Code.UNKNOWN_SETTING, f"Unknown setting '{name}'.")
        raise ClickHouseError.of(Code.BAD_ARGUMENTS, f"{name!r} is not the name of a {kind}.")
    return name


def _number(params: Mapping[str, str], name: str, default: int) -> int:
    text = params.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise ClickHouseError.of(Code.BAD_ARGUMENTS, f"{name} is a whole number, not {text!r}.")
    return int(text)
