"""Ids inside the plane: each names one id of one owner, and its owner is shown what it chose."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import assume, example, given
from hypothesis import strategies as st

from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import (
    as_chosen,
    names_of,
    scope_in,
    scope_of,
    scope_references,
    scoped,
    scoped_execution,
    shown,
)
from breakwater.kernel.ids import id_at
from breakwater.kernel.types import is_full_id, is_identifier

ids = st.text(st.characters(blacklist_categories=["Cs"]) | st.sampled_from("@%:"), min_size=1, max_size=128).filter(
    is_identifier
)
tenants = st.none() | ids
scopes = st.none() | st.builds(scope_in, ids, tenants)


@given(ids, scopes, ids, scopes)
@example("a@b", None, "a", scope_in("b@", None))
@example("a@x", scope_in("y", None), "a", scope_in("x@y", None))
def test_two_ids_or_two_scopes_never_have_a_name_in_common(
    one: str, of: str | None, other: str, by: str | None
) -> None:
    assert (scoped(one, of) == scoped(other, by)) == ((one, of) == (other, by))


@given(ids, scopes)
def test_an_owner_is_shown_what_it_chose(chosen: str, scope: str | None) -> None:
    full = scoped(chosen, scope)
    assert shown(full) == chosen
    assert is_full_id(full)


@given(ids, tenants, ids, tenants)
@example("tenant:acme", None, "x", "acme")
@example("x@y", None, "x%40y", None)
def test_owners_have_scopes_of_their_own(one: str, of: str | None, other: str, by: str | None) -> None:
    same = of == by if of is not None or by is not None else one == other
    assert (scope_in(one, of) == scope_in(other, by)) == same


@given(ids)
def test_what_has_no_owner_of_its_own_keeps_its_ids(chosen: str) -> None:
    assume("@" not in chosen)
    assert scoped(chosen, None) == chosen


def caller(*scopes: str, kind: str = "key", tenants: tuple[str, ...] = ()) -> Caller:
    return Caller(kind, "id", "shop", scopes, datetime.now(UTC), tenants)  # type: ignore[arg-type]


def test_operators_and_people_have_their_names_in_common() -> None:
    assert scope_of(caller("submit"), "acme") == "shop"
    assert scope_of(caller("submit", tenants=("acme",)), "acme") == "tenant:acme"
    assert scope_of(caller("submit", "operate"), None) is None
    assert scope_of(caller("submit", kind="person"), None) is None


def test_a_job_may_be_named_as_it_was_chosen_or_in_full() -> None:
    assert names_of(caller("submit"), "a") == ("a@shop", "a")
    assert names_of(caller("submit", tenants=("t", "u")), "a") == ("a@tenant:t", "a@tenant:u", "a")
    assert names_of(caller("operate"), "a") == ("a",)
    assert names_of(caller("operate"), "a@shop") == ("a@shop@", "a@shop")
    made = id_at(1, bytes(10))
    assert names_of(caller("submit"), made) == (made, f"{made}@shop")


def test_made_ids_stay_as_they_are_where_they_name_executions() -> None:
    made = id_at(1, bytes(10))
    assert [scoped_execution(one, "shop") for one in (made, f"{made}.3", "a")] == [made, f"{made}.3", "a@shop"]
    job = Job(agent="a", prompt="x", task_id=made, plan_id="p", parent_execution_id=made, depends_on=("a", made))
    inside = scope_references(job, "shop")
    assert (inside.task_id, inside.plan_id, inside.parent_execution_id) == (f"{made}@shop", "p@shop", made)
    assert inside.depends_on == ("a@shop", made)
    assert (
        scope_references(job.model_copy(update={"job_id": "x@y"}), None).model_dump()
        == job.model_copy(update={"job_id": "x@y"}).model_dump()
    )


def test_a_document_is_shown_with_the_ids_that_were_chosen() -> None:
    attempt = {"attempt_id": "a@shop:1", "execution_id": "a@shop", "number": 1, "task_id": "t@shop"}
    document = {"job_id": "a@shop", "execution_id": "a@shop", "task_id": None, "output": "x@y", "attempts": [attempt]}
    assert as_chosen(document) == {
        **document,
        "job_id": "a",
        "execution_id": "a",
        "attempts": [{"attempt_id": "a:1", "execution_id": "a", "number": 1, "task_id": "t"}],
    }
