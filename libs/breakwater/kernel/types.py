"""Field types shared by all messages: identifiers, times and money, with their JSON forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, ParamSpec, Self, TypeVar, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from breakwater.kernel.event_json import json_of

NANO_PER_USD = 1_000_000_000
MAX_NANO = 10**18 - 1
"""The largest amount in ClickHouse's Decimal(18, 9): just under a billion dollars."""

MAX_COUNTED = 2**53
"""Nine million dollars. Scripts in Redis can't count larger amounts to the nano-dollar."""


@lru_cache(maxsize=1024)  # a job's cost is written in its attempt, its result and its record
def usd_from_nano(nano: int) -> str:
    """Renders integer nano-dollars as a decimal string in USD with nine places: `1_500_000` → `"0.001500000"`."""
    sign, nano = ("-", -nano) if nano < 0 else ("", nano)
    return f"{sign}{nano // NANO_PER_USD}.{nano % NANO_PER_USD:09d}"


@lru_cache(maxsize=1024)  # an execution has its amounts again in its attempts, and many of them are nothing
def nano_from_usd(usd: str | Decimal) -> int:
    """Parses a decimal USD amount into integer nano-dollars.

    Raises:
        ValueError: the text is no finite decimal number, or is finer than a nano-dollar.
    """
    try:
        nano = Decimal(usd) * NANO_PER_USD
        integer = int(nano)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{usd!r} is not an amount in USD; write it like '12.50'") from error
    if abs(integer) > MAX_NANO:
        raise ValueError(f"{usd!r} is more than a billion dollars, the largest amount that is stored exactly")
    if nano != integer:
        raise ValueError(f"{usd!r} is finer than a nano-dollar (nine decimal places)")
    return integer


def _parse_money(value: object) -> object:
    return nano_from_usd(value) if isinstance(value, str | Decimal) else value


def _usd(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be an amount in USD, such as 12.50")  # noqa: TRY004  pydantic reports ValueError
    # YAML gives 0.15 as a float; its shortest decimal form is what the person wrote.
    nano = nano_from_usd(str(value))
    if nano < 0:
        raise ValueError(f"must not be negative (found {value})")
    return nano


@lru_cache(maxsize=1024)  # each of a job's few moments is written several times
def format_time(moment: datetime) -> str:
    """Formats a time by RFC 3339, in UTC with milliseconds: `2026-11-21T10:00:00.000Z`."""
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    second = _format_second(moment.year, moment.month, moment.day, moment.hour, moment.minute, moment.second)
    return f"{second}.{moment.microsecond // 1000:03}Z"


@lru_cache(maxsize=64)  # many moments are in the same second
def _format_second(year: int, month: int, day: int, hour: int, minute: int, second: int) -> str:
    return datetime(year, month, day, hour, minute, second).isoformat()


def time_from_ms(epoch_ms: int) -> datetime:
    """Returns an aware UTC time from milliseconds since the epoch, without rounding."""
    return datetime.fromtimestamp(epoch_ms // 1000, UTC).replace(microsecond=epoch_ms % 1000 * 1000)


def ms_from_time(moment: datetime) -> int:
    """Returns whole milliseconds since the epoch."""
    return int(moment.timestamp()) * 1000 + moment.microsecond // 1000


Money = Annotated[
    # First as the integer that it is in our own code, where nothing is to be parsed.
    Annotated[int, Strict()] | Annotated[int, BeforeValidator(_parse_money)],
    Field(union_mode="left_to_right"),
    PlainSerializer(usd_from_nano, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^-?\d+(\.\d{1,9})?$", "examples": ["0.001500000"]}),
]
"""Integer nano-dollars in Python, a decimal string in USD on the wire."""

UsdAmount = Annotated[
    int,
    Field(ge=0, le=MAX_COUNTED),
    BeforeValidator(_usd),
    PlainSerializer(usd_from_nano),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^\d+(\.\d{1,9})?$"}]}),
]
"""An amount in the config, `12.5` or `"12.50"`, in USD; integer nano-dollars in Python."""

Timestamp = Annotated[
    datetime,
    PlainSerializer(format_time, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-11-21T10:00:00.000Z"]}),
]

_CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
NO_CONTROLS = rf"^[^{_CONTROLS}]+$"
NO_CONTROLS_OR_EMPTY = rf"^[^{_CONTROLS}]*$"
"""Patterns of a single line without control characters and without characters that change the direction of writing."""

Identifier = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=NO_CONTROLS)]
"""A name chosen by people or programs: any text without control characters. Subjects contain it encoded."""


def _check_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is not a time zone; write it like 'Europe/Berlin' or 'UTC'") from error
    return name


ZoneName = Annotated[str, AfterValidator(_check_zone)]
"""The name of a time zone in the config, such as `Europe/Berlin`."""

NO_SPACES = rf"^[^\s{_CONTROLS}]+$"

Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=NO_SPACES)]
"""An identifier in the config, without spaces, because people type it into commands."""

Region = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
"""A region such as `eu` or `eu-west-1`, which is within `eu`."""

_IDENTIFIER = TypeAdapter(Identifier)
_REGION = TypeAdapter(Region)


def is_region(text: str) -> bool:
    """Returns True if a text may be a region."""
    return _is_valid(_REGION, text)


def is_identifier(text: str) -> bool:
    """Returns True if a text may be an id or a name, which fits into subjects and into every record."""
    return _is_valid(_IDENTIFIER, text)


def _is_valid(adapter: TypeAdapter[str], text: str) -> bool:
    try:
        adapter.validate_python(text)
    except ValidationError:
        return False
    return True


ModelId = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=NO_CONTROLS)]

Count = Annotated[int, Field(ge=0)]


class _SwitchedOff:
    """Reads `off` as None, and adds it to the JSON schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # YAML 1.1 reads a bare `off` as false; both spellings mean the same to the person who wrote them.
        def read(value: object) -> object:
            return None if value is False or value == "off" else value

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler(schema)
        json_schema["anyOf"].append({"enum": ["off", False]})
        return json_schema


Off = _SwitchedOff()
"""Lets a setting that may be None be switched off in words: `off`."""


class Message(BaseModel):
    """Base of messages that others write: immutable; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def of_any_version(model: type[Message], *, binding: bool) -> BeforeValidator:
    """Lets what another message stores of a caller's settings have fields of a later version.

    Args:
        model: the settings, which the caller may write without unknown fields only.
        binding: an unknown field stays an error unless it is empty: whoever ignores a restriction permits what it
            forbids. Otherwise unknown fields are ignored.
    """
    fields = set(model.model_fields)

    def without_unknown(values: object) -> object:
        if not isinstance(values, dict):
            return values
        items = cast(dict[str, object], values).items()
        return {name: value for name, value in items if name in fields or (binding and value not in (None, [], {}))}

    return BeforeValidator(without_unknown)


@cache
def _fields_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


class Event(BaseModel):
    """Base of messages that Breakwater writes: immutable; readers ignore unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", serialize_by_alias=True, validate_by_name=True, hide_input_in_errors=True
    )

    holds_texts: ClassVar[bool] = False
    """True if its texts are encrypted where the config says so."""
    is_sent_to_programs: ClassVar[bool] = False
    """True if it also goes to a subject of a program, where nothing is compressed."""

    @classmethod
    def of_valid(cls, values: dict[str, Any]) -> Self:
        """Makes a message of valid values for exactly its fields, which need no check."""
        message = cls.__new__(cls)
        object.__setattr__(message, "__dict__", values)
        object.__setattr__(message, "__pydantic_fields_set__", _fields_of(cls))
        object.__setattr__(message, "__pydantic_extra__", None)
        object.__setattr__(message, "__pydantic_private__", None)
        return message

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Overridden as pydantic copies each part of a message by a call."""
        if deep or self.__pydantic_extra__ is not None or self.__pydantic_private__ is not None:
            return super().model_copy(update=update, deep=deep)
        return self.of_valid({**self.__dict__, **(update or {})})

    def json_bytes(self) -> bytes:
        """Returns the message as JSON, as it is on the wire."""
        return json_of(self)


_Fields = ParamSpec("_Fields")
_Made = TypeVar("_Made", bound=Event)


def unchecked(message: Callable[_Fields, _Made]) -> Callable[_Fields, _Made]:
    """Returns the constructor of a message that only the type checker checks, for values that we have made ourselves.

    A job has some messages of fifty fields, whose checks take a tenth as long as a call without the provider.
    """
    model = cast(type[_Made], message)
    # In their order, which is that of its JSON.
    defaults = {name: field.get_default(call_default_factory=True) for name, field in model.model_fields.items()}

    def make(*_: _Fields.args, **values: _Fields.kwargs) -> _Made:
        return model.of_valid({**defaults, **values})

    return make


Encrypted = Annotated[
    str | None,
    Field(
        description="Encrypted text fields, which are then missing: if `encryption` is on, and in "
        "results and dead letters of agents that keep no prompts or responses. Without a "
        "key, the reason why they are missing."
    ),
]


def _without_user(url: object) -> object:
    # The config is shown and logged with its URLs, which must not contain secrets.
    if isinstance(url, str) and "@" in re.split(r"[/?#\\]", url.partition("://")[2], maxsplit=1)[0]:
        raise ValueError("must not contain user and password; set the secret separately")
    return url


HttpUrl = Annotated[str, Field(pattern=r"^https?://[^\s]+$"), BeforeValidator(_without_user)]
"""A URL that requests are sent to. It contains no secrets."""
