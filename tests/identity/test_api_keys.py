"""API keys and the file they are in."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from breakwater.identity.api_keys import ApiKeysError, KeyRing, create_key, list_keys, revoke_key
from breakwater.identity.contract import KEY_SCOPES, KeyScope
from breakwater.identity.rules.callers import ENTROPY_BYTES, mint, opens, scopes_for, split
from tests.tables import each_row

AT = datetime(2026, 11, 21, 10, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "api_keys.json"


def test_a_key_is_made_of_its_entropy_alone() -> None:
    entropy = bytes(range(ENTROPY_BYTES))
    text, kept = mint("ci", entropy=entropy, at=AT)
    assert (text, kept) == mint("ci", entropy=entropy, at=AT)
    assert text == "bw_000102030405_BgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCU"
    assert kept.id == "000102030405"


def test_a_secret_with_underscores_in_it_is_split_off_whole() -> None:
    text, kept = mint("ci", entropy=b"\xff" * ENTROPY_BYTES, at=AT)
    assert text.count("_") > 2
    parts = split(text)
    assert parts is not None
    assert opens(kept, parts[1])
    assert not opens(kept, parts[1][:-1])


def test_too_little_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="random bytes"):
        mint("ci", entropy=b"short", at=AT)


@each_row("text", ["", "bw", "bw_", "bw_id", "bw_id_", "bw__secret", "sk_id_secret", "Bearer bw_id_x"])
def test_text_of_another_form_is_no_key(text: str) -> None:
    assert split(text) is None


def test_a_created_key_opens_and_only_its_digest_is_kept(path: Path) -> None:
    key = create_key(path, "ci")
    holder = KeyRing(path).holder(key)
    assert holder is not None
    assert holder.name == "ci"
    assert key.split("_", 2)[2] not in path.read_text()
    assert [kept["name"] for kept in json.loads(path.read_text())["keys"]] == ["ci"]


def test_the_file_is_for_its_owner_only(path: Path) -> None:
    create_key(path, "ci")
    create_key(path, "other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("change", [lambda key: key + "x", lambda key: key[:-1], lambda key: key.swapcase()])
def test_a_key_that_is_nearly_right_does_not_open(path: Path, change: object) -> None:
    key = create_key(path, "ci")
    assert KeyRing(path).holder(change(key)) is None


def test_a_revoked_key_is_refused_at_once_and_the_others_stay(path: Path) -> None:
    kept, gone = create_key(path, "kept"), create_key(path, "gone")
    ring = KeyRing(path)
    assert ring.holder(gone) is not None
    assert revoke_key(path, gone.split("_")[1]).name == "gone"
    assert ring.holder(gone) is None
    assert ring.holder(kept) is not None
    assert [key.name for key in list_keys(path)] == ["kept"]


def test_a_key_that_is_created_later_is_known_at_once(path: Path) -> None:
    ring = KeyRing(path)
    assert ring.holder("bw_000000000000_x") is None
    assert ring.holder(create_key(path, "late")) is not None


def test_without_the_file_nobody_gets_in_any_more(path: Path) -> None:
    key = create_key(path, "ci")
    ring = KeyRing(path)
    assert ring.holder(key) is not None
    path.unlink()
    assert ring.holder(key) is None


def test_a_file_that_is_broken_by_an_edit_keeps_the_keys_that_were_read_before(path: Path) -> None:
    key = create_key(path, "ci")
    ring = KeyRing(path)
    assert ring.holder(key) is not None
    good = path.read_text()
    path.write_text(good[:-10])
    assert ring.holder(key) is not None
    path.write_text(good.replace("ci", "renamed"))
    holder = ring.holder(key)
    assert holder is not None
    assert holder.name == "renamed"


def test_a_broken_file_lets_nobody_in_who_was_not_in_before(path: Path) -> None:
    key = create_key(path, "ci")
    path.write_text("{")
    assert KeyRing(path).holder(key) is None
    with pytest.raises(ApiKeysError, match=r"api_keys\.json: is not a valid file of API keys"):
        list_keys(path)


def test_a_broken_file_is_not_overwritten(path: Path) -> None:
    create_key(path, "ci")
    path.write_text("{")
    with pytest.raises(ApiKeysError, match="is not a valid file of API keys"):
        create_key(path, "second")
    assert path.read_text() == "{"


def test_revoking_an_unknown_key_names_the_known_ones(path: Path) -> None:
    ids = [create_key(path, name).split("_")[1] for name in ("ci", "laptop")]
    with pytest.raises(ApiKeysError) as refused:
        revoke_key(path, "nope")
    assert str(refused.value) == f"there is no API key 'nope'; existing keys: {ids[0]} (ci), {ids[1]} (laptop)"


def test_a_key_is_revoked_by_a_name_that_no_other_has(path: Path) -> None:
    ids = [create_key(path, name).split("_")[1] for name in ("ci", "laptop", "ci")]
    assert revoke_key(path, "laptop").id == ids[1]
    with pytest.raises(ApiKeysError) as refused:
        revoke_key(path, "ci")
    assert str(refused.value) == f"2 API keys are named 'ci'; use one of the ids: {ids[0]} (ci), {ids[2]} (ci)"
    assert [key.id for key in list_keys(path)] == [ids[0], ids[2]]


def test_an_id_is_meant_before_a_name_that_reads_alike(path: Path) -> None:
    key_id = create_key(path, "ci").split("_")[1]
    create_key(path, key_id)
    assert revoke_key(path, key_id).name == "ci"
    assert [key.name for key in list_keys(path)] == [key_id]


@pytest.mark.parametrize("name", ["", "n" * 129, "line\nbreak"])
def test_a_name_that_can_name_nothing_is_refused(path: Path, name: str) -> None:
    with pytest.raises(ApiKeysError, match="is not a valid name for a key"):
        create_key(path, name)
    assert list_keys(path) == ()


def test_a_directory_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ApiKeysError, match="can't be written"):
        create_key(tmp_path / "file" / "api_keys.json", "ci")


def test_keys_created_at_the_same_time_are_all_kept(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda number: create_key(path, f"key {number}"), range(32)))
    ring = KeyRing(path)
    assert all(ring.holder(key) is not None for key in keys)
    assert {key.name for key in list_keys(path)} == {f"key {number}" for number in range(32)}
    assert not list(path.parent.glob(f"*.{os.getpid()}.new"))


def test_a_key_is_for_everything_where_nothing_is_said(path: Path) -> None:
    holder = KeyRing(path).holder(create_key(path, "ci"))
    assert holder is not None
    assert holder.scopes == KEY_SCOPES


def test_scopes_are_kept_once_each_and_in_one_order(path: Path) -> None:
    create_key(path, "ci", ("operate", "read", "operate"))
    assert [key.scopes for key in list_keys(path)] == [("read", "operate")]


@pytest.mark.parametrize("scopes", [(), ("admin",), ("read", "")])
def test_a_key_without_a_scope_or_with_one_that_is_not_known_is_not_made(path: Path, scopes: Any) -> None:
    with pytest.raises(ApiKeysError, match="one or more of the scopes submit, read, operate"):
        create_key(path, "ci", scopes)
    assert list_keys(path) == ()


def test_a_file_of_before_there_were_scopes_opens_everything_still(path: Path) -> None:
    key = create_key(path, "old", ("read",))
    document = json.loads(path.read_text())
    del document["keys"][0]["scopes"]
    path.write_text(json.dumps(document))
    holder = KeyRing(path).holder(key)
    assert holder is not None
    assert holder.scopes == KEY_SCOPES
    create_key(path, "new", ("submit",))
    assert [kept.scopes for kept in list_keys(path)] == [KEY_SCOPES, ("submit",)]


@pytest.mark.parametrize("scopes", [[], ["read", "root"], None, "operate"])
def test_scopes_that_are_broken_by_an_edit_open_nothing_more(path: Path, scopes: Any) -> None:
    key = create_key(path, "ci", ("read",))
    ring, document = KeyRing(path), json.loads(path.read_text())
    assert ring.holder(key) is not None
    document["keys"][0]["scopes"] = scopes
    path.write_text(json.dumps(document))
    holder = ring.holder(key)
    assert holder is not None
    assert holder.scopes == ("read",)
    assert KeyRing(path).holder(key) is None
    with pytest.raises(ApiKeysError, match=r"is not a valid file of API keys: keys\.0\.scopes"):
        list_keys(path)


def test_a_key_has_the_user_team_and_tags_of_its_making(path: Path) -> None:
    bound = create_key(path, "ada", ("submit",), user="ada@example.com", team="search", tags={"project": "ranking"})
    ring = KeyRing(path)
    caller, free_caller = ring.holder(bound), ring.holder(create_key(path, "free"))
    assert caller is not None
    assert free_caller is not None
    assert (caller.user, caller.team, caller.tags) == ("ada@example.com", "search", {"project": "ranking"})
    assert (free_caller.user, free_caller.team, free_caller.tags) == (None, None, {})


@each_row(
    ("bounds", "mistake"),
    [
        ({"user": ""}, "user: '' is not valid: 1 to 128 characters, no control characters"),
        ({"user": "u" * 129}, "is not valid: 1 to 128 characters"),
        ({"team": "two\nlines"}, r"team: 'two\\nlines' is not valid"),
        ({"tags": {"": "x"}}, "tags: '' is not a valid name: 1 to 64 characters"),
        ({"tags": {"project": "x\x00"}}, r"tags: 'x\\x00' is not valid"),
        ({"tags": dict.fromkeys("abcdefghijk", "x")}, "a key has at most 10 tags"),
    ],
)
def test_a_user_team_or_tag_that_can_not_be_recorded_makes_no_key(
    path: Path, bounds: dict[str, Any], mistake: str
) -> None:
    with pytest.raises(ApiKeysError, match=mistake):
        create_key(path, "ada", ("submit",), **bounds)
    assert list_keys(path) == ()


def test_scopes_that_are_edited_hold_at_once(path: Path) -> None:
    key = create_key(path, "ci", ("read",))
    ring = KeyRing(path)
    assert ring.holder(key) is not None
    path.write_text(path.read_text().replace('"read"', '"submit"'))
    holder = ring.holder(key)
    assert holder is not None
    assert holder.scopes == ("submit",)


NEEDED: list[tuple[str, str, tuple[KeyScope, ...]]] = [
    ("POST", "/api/v1/jobs", ("submit",)),
    ("GET", "/api/v1/jobs/j", ("submit",)),
    ("HEAD", "/api/v1/jobs/j", ("submit",)),
    ("GET", "/api/v1/jobs/a/b", ("submit",)),
    ("GET", "/api/v1/jobs/", ("submit",)),
    ("GET", "/api/v1/jobs/progress", ("submit",)),
    ("GET", "/api/v1/jobs/my-progress", ("submit",)),
    ("GET", "/api/v1/jobs/j/progress/", ("submit",)),
    ("GET", "/api/v1/jobs/j/progress", ("read", "submit")),
    ("HEAD", "/api/v1/jobs/a/b/progress", ("read", "submit")),
    ("POST", "/api/v1/jobs/j", ("operate",)),
    ("POST", "/api/v1/jobs/j/progress", ("operate",)),
    ("GET", "/api/v1/jobs", ("read", "submit")),
    ("GET", "/api/v1/jobsomething", ("read",)),
    ("POST", "/api/v1/jobsomething", ("operate",)),
    ("GET", "/api/v1/agents", ("read",)),
    ("HEAD", "/api/v1/budgets/reconciliation", ("read",)),
    ("GET", "/api/v1/alerts/inc_3f9a1c07", ("read",)),
    ("GET", "/api/v1/of/a/later/version", ("read",)),
    ("POST", "/api/v1/breakers/reset", ("operate",)),
    ("POST", "/api/v1/alerts/ack", ("approve", "operate")),
    ("POST", "/api/v1/alerts/test", ("operate",)),
    ("POST", "/api/v1/openid/begin/x", ("operate",)),
    ("POST", "/api/v1/of/a/later/version", ("operate",)),
    ("DELETE", "/api/v1/jobs", ("operate",)),
    ("PUT", "/api/v1/agents", ("operate",)),
    ("get", "/api/v1/agents", ("operate",)),
    ("GET", "/metrics", ("read",)),
    ("GET", "/metrics/", ("read",)),
    ("POST", "/metrics", ("read",)),
    ("GET", "/api/v1/keys", ("read", "limits")),
    ("HEAD", "/api/v1/keys/3f9c01d2a77b", ("read", "limits")),
    ("POST", "/api/v1/keys", ("limits",)),
    ("POST", "/api/v1/keys/3f9c01d2a77b/rotate", ("limits",)),
    ("DELETE", "/api/v1/keys/3f9c01d2a77b", ("limits",)),
    ("POST", "/api/v1/keysomething", ("operate",)),
    ("GET", "/api/v1/key", KEY_SCOPES),
    ("HEAD", "/api/v1/key", KEY_SCOPES),
    ("POST", "/api/v1/key", ("operate",)),
    ("GET", "/api/v1/key/s", ("read",)),
    ("GET", "/api", KEY_SCOPES),
    ("POST", "/api/", KEY_SCOPES),
    ("GET", "/api/v1", KEY_SCOPES),
    ("POST", "/api/v2/jobs", KEY_SCOPES),
]


@each_row(("method", "path", "scopes"), NEEDED)
def test_each_request_needs_its_scope(method: str, path: str, scopes: tuple[KeyScope, ...]) -> None:
    assert scopes_for(method, path) == scopes


ENDS_SO = [
    ("/api/v1/jobs/a%2Fb/progress", ("read", "submit")),
    ("/api/v1/jobs/a/b%2Fprogress", ("submit",)),
    ("/api/v1/jobs/a%2Fb%2fprogress", ("submit",)),
    ("/api%2Fv1%2Fjobs%2Fa%2Fb%2Fprogress", ("submit",)),
    ("/api/v1/jobs/a%2Fb%2Fpr%6Fgress", ("submit",)),
    ("", ("submit",)),
]


@each_row(("sent", "scopes"), ENDS_SO)
def test_a_job_whose_name_ends_in_progress_is_not_mistaken_for_progress(
    sent: str, scopes: tuple[KeyScope, ...]
) -> None:
    assert scopes_for("GET", "/api/v1/jobs/a/b/progress", sent) == scopes


def test_a_job_called_progress_is_a_job_however_it_is_sent() -> None:
    for sent in ("/api/v1/jobs/progress", "/api/v1/jobs%2Fprogress"):
        assert scopes_for("GET", "/api/v1/jobs/progress", sent) == ("submit",)
