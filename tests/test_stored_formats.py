"""What the previous and the next version wrote: stored documents with fields that this version does not know."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import typing
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import breakwater
from breakwater.calls.assignment import Checkpoint
from breakwater.dialects.contract.stored_response import StoredResponse
from breakwater.identity.api_keys import ApiKeysError, list_keys
from breakwater.identity.rules.callers import ApiKey
from breakwater.identity.rules.keys import KeyRecord
from breakwater.jobs.contract.execution import Result
from breakwater.kernel.security.encryption import Cipher, DecryptionError
from breakwater.kernel.types import Event
from breakwater.limits.contract import LimitEvent, LimitRecord, LimitSettings
from breakwater.limits.rules.limit_changes import unreadable_limit
from breakwater.local.datadir import DataDirError, read_endpoints
from tests.records import samples
from tests.services.worker.test_checkpoint import FORMAT
from tests.tables import each_row

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
BINDING = {ApiKey, LimitSettings}
"""Settings that permit or forbid something, which are not to be understood in part."""

_FACES = re.compile(r"__main__|\.(api|pages|commands|services|local|cli|client|providers)\b")
"""Modules that define nothing that is stored."""

KEY = {"id": "0123456789ab", "name": "shop", "sha256": "0" * 64, "created_at": "2026-11-21T12:00:00.000Z"}
RECORD = {"by": "ops", "reason": None, "at": "2026-11-21T12:00:00.000Z"}
KEY_RECORD = {**RECORD, "key": KEY, "change": "created"}
LIMIT = {"scope": "key:shop", "usd": "5", "per": "day"}
LIMIT_RECORD = {**RECORD, "id": "key:shop.usd.day", "change_id": "1", "change": "created", "limit": LIMIT}
RESPONSE = {"execution_id": "e", "job_id": "j", "agent": "a", "created_at": "2026-11-21T12:00:00.000Z"}
STORED: list[Event] = [
    samples.full_attempt(),
    samples.full_execution(),
    samples.full_transition(),
    samples.full_guard_event(),
    samples.full_budget_event(),
    samples.plan_change(),
    samples.limit_event(),
    samples.full_alert(),
    samples.audit_event(),
    Result.model_validate(samples.full_execution().model_dump(mode="json", by_alias=True)),
    Checkpoint.model_validate(FORMAT),
    StoredResponse.model_validate(RESPONSE),
    KeyRecord.model_validate(KEY_RECORD),
    LimitRecord.model_validate(LIMIT_RECORD),
]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        yield each
        yield from subclasses(each)


def test_no_part_of_a_document_that_breakwater_writes_refuses_unknown_fields() -> None:
    for module in pkgutil.walk_packages(breakwater.__path__, "breakwater."):
        if not _FACES.search(module.name):
            importlib.import_module(module.name)
    seen: set[type[BaseModel]] = set()
    waiting = [Event, *subclasses(Event)]
    while waiting:
        model = waiting.pop()
        if model in seen or model in BINDING:
            continue
        seen.add(model)
        assert model.model_config.get("extra") in ("ignore", "allow"), model
        for field in model.model_fields.values():
            waiting += models_in(field.annotation)
    assert len(seen) > 100


def with_unknown(value: Any, model: type[BaseModel], unknown: dict[str, Any]) -> Any:
    """Returns a document that has other fields, too, in every object that is a message."""
    if not isinstance(value, dict):
        return value
    document: dict[str, Any] = {}
    for name, part in value.items():
        field = next((one for key, one in model.model_fields.items() if name in (key, one.alias)), None)
        inner = None if field is None else next(models_in(field.annotation), None)
        if inner is None:
            document[name] = part
        elif isinstance(part, list):
            document[name] = [with_unknown(each, inner, unknown) for each in part]
        else:
            document[name] = with_unknown(part, inner, unknown)
    binding = dict.fromkeys(unknown) if model in BINDING else unknown
    return document | {f"x_{name}": other for name, other in binding.items()}


@settings(max_examples=40)
@given(
    event=st.sampled_from(STORED),
    unknown=st.dictionaries(st.text("abc_", min_size=1), st.none() | st.integers() | st.text() | st.just({"a": [1]})),
)
def test_fields_of_a_later_version_change_nothing(event: Event, unknown: dict[str, Any]) -> None:
    written = event.model_dump(mode="json", by_alias=True)
    later = with_unknown(written, type(event), unknown)
    assert type(event).model_validate_json(json.dumps(later)) == event


@each_row("event", STORED, ids=lambda event: type(event).__name__)
def test_optional_fields_that_an_earlier_version_did_not_write_have_their_defaults(event: Event) -> None:
    written = event.model_dump(mode="json", by_alias=True)
    required = {field.alias or name for name, field in type(event).model_fields.items() if field.is_required()}
    earlier = {name: value for name, value in written.items() if name in required}
    assert type(event).model_validate_json(json.dumps(earlier)) is not None


def test_a_restriction_that_this_version_does_not_know_is_not_ignored() -> None:
    """A key is refused, and calls that a limit may be of wait, until this version is replaced, too."""
    key = {**KEY, "only_on_weekdays": True}
    with pytest.raises(ValidationError, match="only_on_weekdays"):
        KeyRecord.model_validate_json(json.dumps({**KEY_RECORD, "key": key}))
    limit = {**LIMIT_RECORD, "limit": {**LIMIT, "only_on_weekdays": True}}
    with pytest.raises(ValidationError, match="only_on_weekdays"):
        LimitRecord.model_validate_json(json.dumps(limit))
    waiting = unreadable_limit(json.dumps(limit).encode(), None)
    assert waiting is not None
    assert [part.name for part in waiting.unreadable_scope or ()] == ["shop"]
    # What was in force before, and what history tells, restricts nothing.
    past = {**LIMIT_RECORD, "before": limit["limit"]}
    assert LimitRecord.model_validate_json(json.dumps(past)).before == LimitSettings.model_validate(LIMIT)
    event = {**samples.limit_event().model_dump(mode="json"), "after": limit["limit"]}
    assert LimitEvent.model_validate_json(json.dumps(event)).after == LimitSettings.model_validate(LIMIT)


def test_a_file_of_keys_of_a_later_version_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{**KEY, "later": None}]}))
    assert [key.name for key in list_keys(file)] == ["shop"]
    file.write_text(json.dumps({"version": 1, "keys": [KEY]}))
    assert len(list_keys(file)) == 1
    file.write_text(json.dumps({"version": 2, "holders": {}}))
    with pytest.raises(ApiKeysError, match="was written by a later version"):
        list_keys(file)


def test_the_addresses_of_a_stack_of_another_version_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "endpoints.json").write_text('{"later": 1}')
    with pytest.raises(DataDirError, match="written by another version"):
        read_endpoints(tmp_path)


def test_texts_encrypted_in_a_later_format_are_refused_and_not_taken_for_plain() -> None:
    cipher = Cipher(plane_key="a secret that is long enough for a key")
    document = cipher.encrypt_document(b'{"execution_id":"e","output":"hello"}', private=True)
    assert json.loads(cipher.decrypt_document(document))["output"] == "hello"
    with pytest.raises(DecryptionError, match="not in a format that this version knows"):
        cipher.decrypt_document(document.replace(b"bwe1.", b"bwe2."))


def test_the_contract_says_of_each_format_which_test_holds_its_sentence() -> None:
    root = Path(__file__).parent.parent
    page = (root / "proto" / "README.md").read_text()
    table = page.partition("## Stored formats")[2].partition("\n## ")[0]
    tests = re.findall(r"`(tests/[\w/]+\.py)`", table)
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert all("`tests/" in row for row in rows)
    for name in tests:
        assert (root / name).exists(), name
