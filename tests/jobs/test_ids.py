"""The ids by which the plane knows jobs: each stands for one id of one caller, and nobody can make another's."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from hypothesis import example, given
from hypothesis import strategies as st

from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ids import (
    JobIds,
    execution_of,
    ids_of,
    is_made_here,
    key_of,
    possible_executions,
    possible_keys,
    scope_of,
)
from breakwater.kernel.ids import id_at
from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.types import is_identifier

GENERATED = id_at(1, bytes(10))
HASHED = key_of("key:shop", "a")

names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=128).filter(is_identifier)
ids = names | st.sampled_from([GENERATED, HASHED, "1:a", "key:shop"])
scopes = st.sampled_from([None, "key:1", "key:11"]) | st.text(st.characters(codec="ascii"), min_size=1, max_size=140)


def caller(*scopes: str, name: str = "shop", kind: str = "key", tenants: tuple[str, ...] = ()) -> Caller:
    return Caller(kind, "id", name, scopes, datetime.now(UTC), tenants)  # type: ignore[arg-type]


@given(ids, scopes, ids, scopes)
@example("1a", "key:1", "a", "key:11")
@example(HASHED, None, "a", "key:shop")
@example(key_of(None, HASHED), None, HASHED, None)
def test_two_ids_or_two_scopes_never_have_a_key_in_common(
    first: str, of_first: str | None, second: str, of_second: str | None
) -> None:
    assert (key_of(of_first, first) == key_of(of_second, second)) == ((first, of_first) == (second, of_second))


@given(ids, scopes.filter(lambda scope: scope is not None))
def test_the_key_of_an_id_with_a_scope_says_nothing_of_either(own_id: str, scope: str) -> None:
    assert re.fullmatch(r"x-[0-9a-f]{32}", key_of(scope, own_id))
    assert is_made_here(key_of(scope, own_id))


@given(ids)
def test_an_id_without_a_scope_is_its_own_key_unless_it_looks_like_anothers(own_id: str) -> None:
    assert (key_of(None, own_id) == own_id) == (not own_id.startswith("x-") or not is_made_here(own_id))


@given(names, names, names)
@example("tenant:acme", "x", "acme")
def test_keys_tenants_and_programs_have_scopes_of_their_own(name: str, other_name: str, tenant: str) -> None:
    bound = scope_of(caller("submit", name=name, tenants=(tenant,)), tenant)
    own, others = (scope_of(caller("submit", name=key_name), tenant) for key_name in (name, other_name))
    assert bound == scope_of(caller("submit", name=other_name, tenants=(tenant, "more")), tenant)
    assert (own == others) == (name == other_name)
    assert len({own, bound, f"program-{encode_token(name)}"}) == 3
    assert own is not None
    assert own.isascii()


def test_operators_and_people_share_their_ids() -> None:
    assert scope_of(caller("submit"), "acme") == "key:shop"
    assert scope_of(caller("submit", tenants=("acme",)), "acme") == "tenant:acme"
    assert scope_of(caller("submit", "operate"), None) is None
    assert scope_of(caller("submit", kind="person"), None) is None


def test_generated_ids_name_executions_of_all_callers_but_programs() -> None:
    for generated in (GENERATED, f"{GENERATED}.3"):
        assert [execution_of(scope, generated) for scope in ("key:shop", "tenant:acme", None)] == [generated] * 3
        assert execution_of("program-desk", generated) == key_of("program-desk", generated)
        assert key_of("key:shop", generated) != generated
    assert execution_of("key:shop", "a") == HASHED


def test_a_job_refers_to_jobs_of_its_own_scope() -> None:
    job = Job(
        agent="a", prompt="x", task_id=GENERATED, plan_id="p", parent_execution_id="a", depends_on=("a", GENERATED)
    )
    assert ids_of(job, "key:shop", job_id="j", execution_id="x", session_id="s") == JobIds(
        job_id="j",
        execution_id="x",
        task_id=GENERATED,
        task_key=key_of("key:shop", GENERATED),
        session_key=key_of("key:shop", "s"),
        plan_key=key_of("key:shop", "p"),
        parent=HASHED,
        dependencies=(HASHED, GENERATED),
    )
    without_scope = ids_of(job, None, job_id="j", execution_id="j")
    assert (without_scope.task_key, without_scope.plan_key, without_scope.parent) == (GENERATED, "p", "a")


def test_a_job_is_named_by_its_own_id_or_by_that_of_its_execution() -> None:
    assert possible_executions(caller("submit"), "a") == (HASHED, "a")
    both = caller("submit", tenants=("t", "u"))
    assert possible_executions(both, "a") == (key_of("tenant:t", "a"), key_of("tenant:u", "a"), "a")
    assert possible_executions(caller("operate"), "a") == ("a",)
    assert possible_executions(caller("operate"), HASHED) == (key_of(None, HASHED), HASHED)
    assert possible_executions(caller("submit"), GENERATED) == (GENERATED, key_of("key:shop", GENERATED))
    assert possible_keys(caller("submit"), GENERATED) == (key_of("key:shop", GENERATED), GENERATED)
