"""Requests for embeddings, and answers: what is refused, measured, put in order, packed and unpacked."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.dialects.rules.embeddings import (
    MAX_VECTOR_BYTES,
    BrokenEmbeddingsError,
    answer_of,
    fallback_objection,
    inputs_of,
    pack_vectors,
    recorded_input,
    request_objection,
    size_of,
    summary,
    too_many,
)
from breakwater.prices.rules.price import BASE_TOKENS, GENERIC, estimate_input_tokens
from breakwater.prices.rules.usage import Usage, of_embeddings
from tests.tables import each_row


def base64_of(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def answer(*vectors: Any, **more: Any) -> dict[str, Any]:
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 5, "total_tokens": 5}, **more}


def asking(count: int, **more: Any) -> dict[str, Any]:
    return {"input": ["x"] * count, **more}


REQUESTS: list[tuple[dict[str, Any], str | None]] = [
    ({"input": "a"}, None), ({"input": ["a", ""]}, None), ({"input": [1, 2]}, None),
    ({"input": [[1], [2, 3]]}, None),
    ({"input": ["a"], "dimensions": 8, "encoding_format": "base64", "user": "u", "made_up": 1}, None),
    ({"input": "a", "dimensions": None, "encoding_format": None}, None),
    ({}, "input"), ({"input": None}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input"),
    ({"input": ["a", 1]}, "input"), ({"input": [True]}, "input"), ({"input": [1.5]}, "input"),
    ({"input": {}}, "input"),
    ({"input": {"text": "a"}}, "input"), ({"input": [{"text": "a"}]}, "input"), ({"input": 7}, "input"),
    ({"input": [[1], ["a"]]}, "input"), ({"input": [[1], []]}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"), ({"input": "a", "dimensions": "8"}, "dimensions"),
    ({"input": "a", "dimensions": True}, "dimensions"),
    ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
    ({"input": "a", "encoding_format": ["float"]}, "encoding_format"),
]  # fmt: skip


@each_row(("body", "path"), REQUESTS)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(body: dict[str, Any], path: str | None) -> None:
    problem = request_objection(body)
    assert (None if problem is None else problem.path) == path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON, JSON)
def test_each_request_is_measured_or_refused(given_input: Any, dimensions: Any, form: Any) -> None:
    body = {"input": given_input, "dimensions": dimensions, "encoding_format": form}
    if request_objection(body) is None:
        assert estimate_input_tokens(size_of(body), GENERIC) >= BASE_TOKENS
        assert len(inputs_of(body)) > 0
        assert recorded_input(body) is not None


def test_texts_and_token_ids_are_estimated_by_their_length() -> None:
    def tokens(given: Any) -> int:
        return estimate_input_tokens(size_of({"input": given}), GENERIC) - BASE_TOKENS

    assert tokens(list(range(500))) == 500 + GENERIC.message_tokens
    assert tokens([[7] * 300, [8] * 200]) == 500 + 2 * GENERIC.message_tokens
    assert tokens("a" * 175) == 100 + GENERIC.message_tokens
    assert tokens(["a" * 175] * 3) == 300 + 3 * GENERIC.message_tokens
    assert tokens("漢字") == 6 + GENERIC.message_tokens


def test_a_record_has_texts_and_only_counts_token_ids() -> None:
    assert recorded_input({"input": "a"}) == "a"
    assert recorded_input({"input": ["a", "b"]}) == ["a", "b"]
    assert recorded_input({"input": [1, 2, 3]}) == ["3 token ids"]
    assert recorded_input({"input": [[1, 2], [3]]}) == ["2 token ids", "1 token ids"]


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
OF_32_BITS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(
    st.integers(1, 5).flatmap(
        lambda size: st.lists(
            st.lists(NUMBERS, min_size=size, max_size=size) | st.lists(OF_32_BITS, min_size=size, max_size=size),
            min_size=1,
            max_size=4,
        )
    )
)
def test_floats_come_through_as_the_same_doubles(vectors: list[list[float]]) -> None:
    sent = orjson.loads(orjson.dumps(answer(*vectors)))
    body = asking(len(vectors))
    kept = orjson.loads(orjson.dumps(pack_vectors(sent, body)))
    read = orjson.loads(orjson.dumps(answer_of(kept, "float")))
    assert read == answer_of(kept, None) == answer(*vectors)
    bits = [[struct.pack("<d", number) for number in vector] for vector in vectors]
    assert [[struct.pack("<d", number) for number in item["embedding"]] for item in read["data"]] == bits
    assert summary(kept) == {"embeddings": len(vectors), "dimensions": len(vectors[0])}


@given(st.lists(st.lists(OF_32_BITS, min_size=3, max_size=3), min_size=1, max_size=4))
def test_base64_comes_through_byte_for_byte(vectors: list[list[float]]) -> None:
    texts = [base64_of(*vector) for vector in vectors]
    body = asking(len(vectors), encoding_format="base64")
    kept = orjson.loads(orjson.dumps(pack_vectors(answer(*texts), body)))
    assert answer_of(kept, "base64") == answer(*texts)
    assert summary(kept) == {"embeddings": len(vectors), "dimensions": 3}


def test_an_answer_in_the_other_form_is_changed_into_the_one_that_was_asked_for() -> None:
    exact = answer([0.5, -0.25])
    asked = asking(1, encoding_format="base64")
    assert answer_of(pack_vectors(exact, asked), "base64") == answer(base64_of(0.5, -0.25))
    assert answer_of(pack_vectors(answer([0.1, 2]), asked), "base64") == answer(base64_of(0.1, 2.0))
    assert answer_of(pack_vectors(answer(base64_of(0.5, -0.25)), asking(1)), "float") == exact


def test_quantized_vectors_come_through_as_they_are() -> None:
    numbers, asked = answer([-128, 127, 0, 5]), asking(1, output_dtype="int8")
    assert answer_of(pack_vectors(numbers, asked), None) == numbers
    of_bytes = answer(base64.b64encode(b"\xff\xff\xff\x7f\x00").decode())
    asked["encoding_format"] = "base64"
    assert answer_of(pack_vectors(of_bytes, asked), "base64") == of_bytes


def test_a_vector_of_32_bits_is_stored_in_half_the_room() -> None:
    exact = struct.unpack("<64f", struct.pack("<64f", *(math.sin(number) for number in range(64))))
    [short] = pack_vectors(answer(list(exact)), asking(1))["data"]
    [long] = pack_vectors(answer([math.sin(number) for number in range(64)]), asking(1))["data"]
    assert [len(*short["embedding"].values()), len(*long["embedding"].values())] == [344, 684]


@pytest.mark.parametrize(
    "data",
    [
        [{"embedding": [1.5]}, {"embedding": [2.5]}],
        [{"embedding": [2.5], "index": 1}, {"embedding": [1.5], "index": 0}],
        [{"embedding": [1.5], "index": None}, {"embedding": [2.5]}],
    ],
)
def test_embeddings_are_in_the_order_of_their_inputs(data: list[Any]) -> None:
    found = answer_of(pack_vectors({"data": data, "model": "m", "usage": None}, asking(2)), None)
    items = [{"object": "embedding", "index": index, "embedding": [index + 1.5]} for index in range(2)]
    assert found == {"object": "list", "model": "m", "data": items}


INF = base64_of(math.inf)


@each_row(
    "data",
    [
        None, [], {}, "x", [None], [[1.5]], [{"index": 0}], [{"embedding": None}], [{"embedding": []}],
        [{"embedding": [None]}], [{"embedding": [0.5, None]}], [{"embedding": ["0.5"]}], [{"embedding": [[0.5]]}],
        [{"embedding": [0.5, math.nan]}], [{"embedding": [0.5, math.inf]}], [{"embedding": {"float64": "AAAA"}}],
        [{"embedding": [0.5, 10**400]}], [{"embedding": ""}], [{"embedding": "AAA"}], [{"embedding": "not base64!"}],
        [{"embedding": "AAAA"}], [{"embedding": INF}], [{"embedding": base64_of(math.nan)}], [{"embedding": 7}],
        [{"embedding": [0.5]}, {"embedding": [0.5]}], [{"embedding": [0.5], "index": 1}],
        [{"embedding": [0.5], "index": "0"}], [{"embedding": [0.5], "index": -1}],
    ],
)  # fmt: skip
@each_row("form", [None, "base64"])
def test_an_answer_without_a_vector_for_each_input_is_broken(data: Any, form: str | None) -> None:
    with pytest.raises(BrokenEmbeddingsError):
        pack_vectors({"data": data}, asking(1, encoding_format=form))


@pytest.mark.parametrize("data", [[[0.5], [0.5, 0.5]], ["AAAAAA==", "AAAAAAAAAAA="], [[1, 2], [0.5]]])
def test_vectors_of_different_lengths_are_broken(data: list[Any]) -> None:
    with pytest.raises(BrokenEmbeddingsError):
        pack_vectors(answer(*data), asking(2))


@pytest.mark.parametrize("indices", [[0, 0], [1, 2], [0, None]])
def test_indices_that_are_not_those_of_the_inputs_are_broken(indices: list[Any]) -> None:
    data = [{"embedding": [0.5], "index": index} for index in indices]
    with pytest.raises(BrokenEmbeddingsError):
        pack_vectors({"data": data}, asking(2))


def test_a_number_that_32_bits_do_not_hold_is_broken_only_as_base64() -> None:
    with pytest.raises(BrokenEmbeddingsError):
        pack_vectors(answer([1e300]), asking(1, encoding_format="base64"))
    assert answer_of(pack_vectors(answer([1e300]), asking(1)), None) == answer([1e300])


@given(JSON)
def test_any_answer_is_packed_or_broken(given_data: Any) -> None:
    for form in ("float", "base64"):
        try:
            kept = pack_vectors({"data": given_data}, asking(1, encoding_format=form))
        except BrokenEmbeddingsError:
            continue
        assert summary(kept)["embeddings"] == len(answer_of(kept, form)["data"]) == 1


def test_what_can_not_fit_into_an_answer_is_refused_before_the_call() -> None:
    most = MAX_VECTOR_BYTES // (3072 * 8 * 4 // 3)
    assert too_many(asking(most), 3072) is None
    assert (found := too_many(asking(most + 1), 3072)) is not None
    assert found.path == "input"
    assert too_many(asking(2 * most, encoding_format="base64"), 3072) is None
    assert too_many(asking(100_000), None) is None
    assert too_many({"input": "x"}, 3072) is None


def test_an_answer_that_is_too_large_is_broken() -> None:
    vector = base64.b64encode(bytes(900_000)).decode()
    with pytest.raises(BrokenEmbeddingsError, match="fewer inputs"):
        pack_vectors(answer(*[vector] * 5), asking(5, encoding_format="base64"))
    assert summary(pack_vectors(answer(*[vector] * 4), asking(4))) == {"embeddings": 4, "dimensions": 225_000}


@each_row(
    ("reported", "usage"),
    [
        ({"prompt_tokens": 8, "total_tokens": 8}, Usage(8, 0)),
        ({"total_tokens": 8}, Usage(8, 0)),
        ({"prompt_tokens": 8}, Usage(8, 0)),
        ({"prompt_tokens": 8, "total_tokens": 9}, Usage(9, 0)),
        ({"prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8}, Usage(8, 0)),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_all_reported_tokens_are_input(reported: Any, usage: Usage | None) -> None:
    assert of_embeddings({"usage": reported, "model": "m"}) == usage


@pytest.mark.parametrize("reported", [{"prompt_tokens": 0, "total_tokens": 0}, {"prompt_tokens": "many"}])
def test_usage_that_can_not_be_true_is_a_problem(reported: Any) -> None:
    usage = of_embeddings({"usage": reported})
    assert usage is not None
    assert usage.input_tokens is None
    assert usage.problem is not None


@each_row(
    ("lengths", "named"),
    [
        ({}, None), ({"a": None}, None), ({"a": 8}, None), ({"a": 8, "b": 8}, None),
        ({"a": 8, "b": None}, "models.b.dimensions"), ({"a": None, "b": None}, "models.a.dimensions"),
        ({"a": 8, "b": 9}, "models.b.dimensions is 9"),
    ],
)  # fmt: skip
def test_models_stand_in_for_one_another_only_with_the_same_declared_dimensions(
    lengths: dict[str, int | None], named: str | None
) -> None:
    problem = fallback_objection(lengths)
    assert (problem is None) if named is None else (problem is not None and named in problem)
