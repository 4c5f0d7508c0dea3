"""Protects `POST /score`: what it takes, what it refuses and with which words, and which model answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.clients import ROW, Client, fake, serving
from tests.serve.fake_model import FakeModel, score_of

ROWS = [ROW, {**ROW, "user": 9, "tags": []}, {"user": None, "item": None, "tags": None, "price": None}]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROW}


@pytest.fixture(name="client", scope="module")
def _client() -> Iterator[Client]:
    with serving(max_request_rows=50, max_body_bytes=20_000) as client:
        yield client


def test_rows_columns_and_lines_have_the_same_scores(client: Client) -> None:
    wanted = [score_of(row, 100) for row in ROWS]
    lines = "\n".join(json.dumps(row) for row in ROWS).encode()
    assert client.score(*ROWS) == wanted
    answer = client.ask("POST", "/score", {"rows": ROWS, "id": "a"})
    assert answer.json == {"id": "a", "scores": wanted, "model": "clicks", "version": "100"}
    assert client.ask("POST", "/score", {"columns": {**COLUMNS, "z": [0] * 3}}).json["scores"] == wanted
    for kind in ("application/x-ndjson", "application/jsonl; charset=utf-8"):
        assert client.ask("POST", "/score", lines, {"Content-Type": kind}).json["scores"] == wanted
    assert client.ask("POST", "/score", ROWS, {"Content-Type": "application/x-www-form-urlencoded"}).status == 200


def test_columns_that_the_model_does_not_need_are_left_out(client: Client) -> None:
    assert client.score({**ROW, "label": 1, "other": {"a": [1]}}) == [score_of(ROW, 100)]


def test_no_rows_have_no_scores(client: Client) -> None:
    assert client.ask("POST", "/score", []).json == {"scores": [], "model": "clicks", "version": "100"}


def test_several_labels_are_named() -> None:
    with serving(fake(FakeModel(labels=("click", "buy")))) as client:
        assert client.score(ROW) == [{"click": score_of(ROW, 100), "buy": score_of(ROW, 100) + 1}]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body is not JSON: Expecting value"),
        (b"\xff\xfe{", 400, "the body is not JSON"),
        (b'[{"user": 1, "user": 2}]', 400, "the body has 'user' twice"),
        (b"[" * 5000 + b"]" * 5000, 400, "the body is nested more than 100 deep"),
        (b"[" + b"9" * 5000 + b"]", 400, "the body is not JSON: Exceeds the limit"),
        (7, 400, "the body: got 7, expected a list of rows"),
        ({}, 400, "got {}"),
        ({"inputs": []}, 400, "got an object with 'inputs'"),
        ({"rows": [], "columns": {}}, 400, "got an object with 'rows', 'columns'"),
        ({"rows": 3}, 400, "rows: got 3, expected a list of objects, one per row"),
        ({"rows": [], "id": 3}, 400, "id: got 3, expected text"),
        ([ROW, 5], 400, "row 1: got 5"),
        (
            [ROW, {**ROW, "User": 1} | {"item": "a"}, {"User": 3}],
            400,
            "row 2: got no 'user'; did you mean 'User'?",
        ),
        ({"columns": 3}, 400, "columns: got 3, expected an object with a list per column"),
        ({"columns": {"user": "abc"}}, 400, "columns.user: got 'abc', expected a list"),
        ({"columns": {"user": [1]}}, 400, "columns: got no 'item'"),
        ({"columns": {"user": [1], "item": [], "tags": [], "price": []}}, 400, "different lengths"),
        ({"columns": {"z": [], **COLUMNS}}, 400, "got 3 values in column 'user', expected 0 as in column 'z'"),
        ({"columns": {"z": [9], **COLUMNS}}, 400, "got 3 values in column 'user', expected 1 as in column 'z'"),
        ({"columns": {**COLUMNS, "z": [9]}}, 400, "got 1 values in column 'z', expected 3 as in column 'user'"),
        ({"columns": {"z": [9], **{name: [0] * 51 for name in ROW}}}, 400, "got 51 values in column 'user'"),
        ({"columns": {name: [0] * 51 for name in ["z", *ROW]}}, 413, "got 51, expected at most 50"),
        ({"columns": {"z": []}}, 400, "columns: got no 'user'"),
        ({"columns": {}}, 400, "columns: got no 'user'"),
        ([{**ROW, "user": "3"}], 400, "column 'user', row 0: '3' is not integers"),
        ([{**ROW, "user": 2**70}], 400, "beyond its kind"),
        ([{**ROW, "item": "\ud800"}], 400, "beyond its kind"),
        ([{**ROW, "item": "fail"}], 400, "row 0: the item cannot be scored"),
        ([ROW, {**ROW, "item": "nan"}], 400, "the score of row 1 is not a number"),
        ([{**ROW, "item": "store"}], 503, "cannot read the model's rows"),
        ([{**ROW, "item": "crash"}], 500, "failed to score these rows"),
        ([ROW] * 51, 413, "got 51, expected at most 50"),
        ([{**ROW, "item": "x" * 30_000}], 413, "expected at most 20,000 (--max_body_bytes)"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_refused(client: Client, body: Any, status: int, message: str) -> None:
    answer = client.ask("POST", "/score", body)
    assert answer.status == status
    assert list(answer.json) == ["error"]
    assert message in answer.json["error"]
    assert len(answer.body) < 600
    assert "secret" not in answer.json["error"]
    assert client.score(ROW) == [score_of(ROW, 100)]


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Content-Type": "text/csv"}, 415, "got 'text/csv', expected application/json"),
        ({"Content-Encoding": "gzip"}, 415, "Content-Encoding: got 'gzip'"),
    ],
)
def test_bodies_that_are_not_taken(client: Client, headers: dict[str, str], status: int, message: str) -> None:
    answer = client.ask("POST", "/score", [ROW], headers)
    assert (answer.status, message in answer.json["error"]) == (status, True)


def test_lines_that_are_wrong_are_named(client: Client) -> None:
    answer = client.ask("POST", "/score", b'{"user": 1}\n\n{', {"Content-Type": "application/x-ndjson"})
    assert answer.json["error"].startswith("line 1 is not JSON")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ROW, "rows", "columns", "id"]), inner)
    ),
    max_leaves=12,
)
VALUES = {"user": st.integers(-5, 5), "item": st.sampled_from(["", "fail", "nan", "pen"]), "tags": st.just([1])}


@settings(max_examples=60)
@given(body=JSON | st.lists(st.fixed_dictionaries({**VALUES, "price": JSON})) | st.binary(max_size=60))
def test_any_body_has_right_scores_or_an_error(client: Client, body: Any) -> None:
    answer = client.ask("POST", "/score", body)
    if answer.status != 200:
        assert answer.status == 400
        assert list(answer.json) == ["error"]
    elif isinstance(body, list):
        assert answer.json["scores"] == pytest.approx([score_of(row, 100) for row in body])
    assert client.score(ROW) == [score_of(ROW, 100)]


# -- which model answers -------------------------------------------------------------------------------------------


def test_models_side_by_side_answer_by_name_and_the_first_one_answers_score() -> None:
    with serving(fake(FakeModel(100), "old"), fake(FakeModel(200), "new")) as client:
        answer = client.ask("POST", "/score", [ROW]).json
        assert (answer["model"], answer["version"]) == ("old", "100")
        for name, step in (("old", 100), ("new", 200)):
            assert client.ask("GET", f"/v2/models/{name}").json["versions"] == [str(step)]
