"""Protects the Open Inference Protocol v2: metadata, tensors as JSON and binary, and what they may not be."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.serve.request_tensors import HEADER_LENGTH
from tests.serve.clients import ROW, Answer, Client, fake, serving
from tests.serve.fake_model import FakeModel, score_of

ROWS = [ROW, {"user": 7, "item": "inkwell", "tags": [], "price": 2.25}]
WANTED = [score_of(row, 100) for row in ROWS]
INFER = "/v2/models/clicks/infer"


@pytest.fixture(name="client", scope="module")
def _client() -> Iterator[Client]:
    with serving(fake(FakeModel(labels=("click",))), max_request_rows=50) as client:
        yield client


def inputs(**changes: Any) -> list[dict[str, Any]]:
    """Tensors of ROWS; a change replaces one's keys, None removes it."""
    made: dict[str, dict[str, Any]] = {
        "user": {"shape": [2], "datatype": "INT64", "data": [3, 7]},
        "item": {"shape": [2], "datatype": "BYTES", "data": ["pen", "inkwell"]},
        "tags": {"shape": [2], "datatype": "INT32", "data": [1, 2]},
        "tags.lengths": {"shape": [2], "datatype": "INT64", "data": [2, 0]},
        "price": {"shape": [2], "datatype": "FP64", "data": [0.5, 2.25]},
    }
    for name, change in changes.items():
        name = name.replace("__", ".")
        made[name] = {**made.get(name, {}), **(change or {})}
        if change is None:
            del made[name]
    return [{"name": name, **tensor} for name, tensor in made.items()]


def infer(client: Client, tensors: list[dict[str, Any]], **rest: Any) -> Answer:
    return client.ask("POST", INFER, {"inputs": tensors, **rest})


def binary(tensors: list[dict[str, Any]], blobs: dict[str, bytes], **rest: Any) -> tuple[bytes, dict[str, str]]:
    """A body with these tensors as binary data, and its headers."""
    for tensor in tensors:
        if tensor["name"] in blobs:
            tensor.pop("data", None)
            tensor["parameters"] = {"binary_data_size": len(blobs[tensor["name"]])}
    text = json.dumps({"inputs": tensors, **rest}).encode()
    body = text + b"".join(blobs[tensor["name"]] for tensor in tensors if tensor["name"] in blobs)
    return body, {HEADER_LENGTH: str(len(text)), "Content-Type": "application/octet-stream"}


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


BLOBS = {
    "user": np.array([3, 7], "<i8").tobytes(),
    "item": texts(b"pen", b"inkwell"),
    "tags": np.array([1, 2], "<i4").tobytes(),
    "tags.lengths": np.array([2, 0], "<i8").tobytes(),
    "price": np.array([0.5, 2.25], "<f8").tobytes(),
}


def test_what_the_server_and_its_model_say_of_themselves(client: Client) -> None:
    assert client.ask("GET", "/v2").json["extensions"] == ["binary_tensor_data"]
    assert client.ask("GET", "/v2/health/live").json == {"live": True}
    assert client.ask("GET", "/v2/health/ready").json == {"ready": True}
    said = client.ask("GET", "/v2/models/clicks").json
    assert (said["name"], said["versions"], said["platform"]) == ("clicks", ["100"], "hotbed")
    assert {"name": "tags.lengths", "datatype": "INT64", "shape": [-1]} in said["inputs"]
    assert said["outputs"] == [{"name": "score", "datatype": "FP64", "shape": [-1]}]
    assert client.ask("GET", "/v2/models/clicks/versions/100").json == said
    assert client.ask("GET", "/v2/models/clicks/ready").json == {"name": "clicks", "ready": True}
    assert client.ask("GET", "/v2/models/clicks/versions/100/ready").status == 200
    assert client.ask("GET", "/v2/models/clicks/versions/7/ready").status == 404
    missing = client.ask("GET", "/v2/models/click")
    assert (missing.status, missing.json["error"]) == (
        404,
        "model: got 'click', expected one of clicks; did you mean 'clicks'?",
    )


def test_tensors_of_json(client: Client) -> None:
    answer = infer(client, inputs(), id="a")
    assert answer.json == {
        "model_name": "clicks",
        "model_version": "100",
        "id": "a",
        "outputs": [{"name": "score", "datatype": "FP64", "shape": [2], "data": WANTED}],
    }
    column = inputs(user={"shape": [2, 1], "data": [[3], [7]]}, price={"datatype": "FP16", "shape": [2, 1]})
    assert infer(client, column).json["outputs"][0]["data"] == WANTED


def test_binary_tensors_both_ways(client: Client) -> None:
    body, headers = binary(inputs(), BLOBS, parameters={"binary_data_output": True})
    answer = client.ask("POST", INFER, body, headers)
    length = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.body[:length])["outputs"]
    assert output == {"name": "score", "datatype": "FP64", "shape": [2], "parameters": {"binary_data_size": 16}}
    assert np.frombuffer(answer.body[length:], "<f8").tolist() == WANTED
    body, headers = binary(inputs(), {"item": BLOBS["item"]}, outputs=[{"name": "score"}])
    assert client.ask("POST", INFER, body, headers).json["outputs"][0]["data"] == WANTED


@pytest.mark.parametrize("datatype", ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"])
def test_integers_of_any_width(client: Client, datatype: str) -> None:
    width = int(datatype.lstrip("UINT")) // 8
    blob = np.array([3, 7], f"<{'u' if datatype[0] == 'U' else 'i'}{width}").tobytes()
    body, headers = binary(inputs(user={"datatype": datatype}), {"user": blob})
    assert client.ask("POST", INFER, body, headers).json["outputs"][0]["data"] == WANTED
    assert infer(client, inputs(user={"datatype": datatype})).json["outputs"][0]["data"] == WANTED


def test_missing_values(client: Client) -> None:
    wanted = [score_of({**ROWS[0], "user": None, "item": None, "price": None}, 100), WANTED[1]]
    nulls = inputs(user={"data": [None, 7]}, item={"data": [None, "inkwell"]}, price={"data": [None, 2.25]})
    told = {"shape": [2], "datatype": "BOOL", "data": [True, False]}
    marked = inputs(user__missing=told, item__missing=told, price__missing=told)
    for tensors in (nulls, marked):
        assert infer(client, tensors).json["outputs"][0]["data"] == wanted


def test_lists_of_one_length(client: Client) -> None:
    wanted = [score_of({**row, "tags": tags}, 100) for row, tags in zip(ROWS, ([1, 2], [3, 4]), strict=True)]
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
        tensors = inputs(tags={"shape": [2, 2], "data": data}, tags__lengths=None)
        assert infer(client, tensors).json["outputs"][0]["data"] == wanted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"user": None}, "input 'user' is missing: the model needs this input as INT64"),
    (
        {"usr": {"shape": [2], "datatype": "INT8", "data": [1, 2]}},
        "input 'usr' is not an input of the model; did you mean 'user'",
    ),
    (
        {"tags.missing": {"shape": [2], "datatype": "BOOL", "data": [True, False]}},
        "input 'tags.missing' is not supported, because 'tags' has lists. Send length 0 in 'tags.lengths'",
    ),
    ({"user": {"datatype": "INT65"}}, "inputs.0.datatype: got 'INT65', expected 'BOOL'"),
    ({"user": {"shape": [-1]}}, "inputs.0.shape.0: got -1, expected at least 0"),
    ({"user": {"shape": [3]}}, "input 'user': got 2 values, expected 3"),
    ({"user": {"shape": [2, 2]}}, "input 'user': got 2 values, expected 4"),
    ({"user": {"shape": [1, 2]}}, "input 'user': got shape [1, 2], expected [B]"),
    ({"user": {"shape": []}}, "input 'user': got 2 values, expected 1"),
    ({"user": {"shape": [2, 1], "data": [[3], [7, 8]]}}, "expected lists of 1 values in dimension 1"),
    ({"user": {"shape": [10**15, 0], "data": []}}, "input 'user': got shape [1000000000000000, 0]"),
    (
        {"tags": {"shape": [10**15, 0], "data": []}, "tags__lengths": None},
        "got 1,000,000,000,000,000, expected at most 50",
    ),
    (
        {"user": {"datatype": "BYTES", "data": ["3", "7"]}},
        "input 'user': got BYTES, expected INT64",
    ),
    ({"user": {"datatype": "FP32"}}, "input 'user': got FP32, expected INT64"),
    ({"item": {"datatype": "INT64", "data": [1, 2]}}, "input 'item': got INT64, expected BYTES"),
    (
        {"price": {"datatype": "BYTES", "data": ["1", "2"]}},
        "input 'price': got BYTES, expected FP64",
    ),
    ({"user": {"data": [3, "7"]}}, "input 'user', value 1: got '7', expected an integer"),
    ({"user": {"data": [3, True]}}, "value 1: got True, expected an integer"),
    ({"user": {"data": [3, 2.5]}}, "value 1: got 2.5, expected an integer"),
    ({"user": {"datatype": "INT8", "data": [3, 300]}}, "input 'user': got a value outside INT8"),
    ({"user": {"data": [3, 2**80]}}, "input 'user': got a value outside INT64"),
    ({"price": {"data": [0.5, 10**400]}}, "input 'price': got a value outside FP64"),
    ({"item": {"data": ["pen", "\ud800"]}}, "input 'item': got text that is not valid Unicode"),
    (
        {"user__missing": {"shape": [1], "datatype": "BOOL", "data": [True]}},
        "input 'user.missing': got BOOL of shape [1], expected BOOL [2]",
    ),
    ({"tags__lengths": None}, "input 'tags': got shape"),
    ({"tags__lengths": {"data": [2, 1]}}, "input 'tags.lengths': got the sum 3"),
    ({"tags__lengths": {"data": [3, -1]}}, "input 'tags.lengths': got the sum 2"),
    (
        {"tags__lengths": {"data": [2, None]}},
        "input 'tags.lengths': got INT64 of shape [2], expected INT64 [B] without null",
    ),
    ({"price": {"shape": [1], "data": [1.0]}}, "input 'price': got 1 rows, expected 2 as in 'user'"),
    ({"user": {"data": None}}, "input 'user': got neither data"),
    ({"user": {"parameters": {"binary_data_size": 8}}}, "input 'user': got both data"),
    (
        {"user": {"data": None, "parameters": {"binary_data_size": 8}}},
        "binary_data_size 8, expected at most the 0 bytes",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: repr(value)[:50])
def test_tensors_that_are_refused(client: Client, change: dict[str, Any], message: str) -> None:
    answer = infer(client, inputs(**change))
    assert answer.status in (400, 413)
    assert message in answer.json["error"]
    assert infer(client, inputs()).status == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the request: got [], expected a mapping"),
        ({}, "inputs is missing"),
        ({"inputs": []}, "inputs: got [], expected a length of at least 1"),
        ({"inputs": inputs(), "id": 3}, "id: got 3, expected text"),
        (
            {"inputs": inputs(), "outputs": [{"name": "scor"}]},
            "output: got 'scor', expected one of score; did you mean",
        ),
        ({"inputs": inputs() + inputs()}, "input 'user': got two inputs with this name"),
        (b"{", "the JSON of the request is not JSON"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_requests_that_are_none(client: Client, body: Any, message: str) -> None:
    answer = client.ask("POST", INFER, body)
    assert (answer.status, message in answer.json["error"]) == (400, True), answer.body


def test_binary_data_that_are_refused(client: Client) -> None:
    for name, blob, message in [
        ("user", b"\0" * 15, "got binary_data_size 15, expected 16 for INT64"),
        ("item", texts(b"pen"), "got 7 bytes, expected 2 texts"),
        ("item", texts(b"pen", b"x", b"y"), "expected 2 texts"),
        ("item", struct.pack("<I", 1 << 31) + b"x", "expected 2 texts"),
        ("item", texts(b"pen", b"\xff"), "input 'item': got text that is not UTF-8"),
    ]:
        body, headers = binary(inputs(), {name: blob})
        answer = client.ask("POST", INFER, body, headers)
        assert (answer.status, message in answer.json["error"]) == (400, True), answer.body
    body, headers = binary(inputs(), BLOBS)
    for length, message in (
        ("x", "got 'x', expected the number of bytes"),
        ("-1", "got '-1'"),
        ("99999", "got '99999'"),
    ):
        answer = client.ask("POST", INFER, body, headers | {HEADER_LENGTH: length})
        assert (answer.status, message in answer.json["error"]) == (400, True), answer.body
    assert "got 3 bytes after" in client.ask("POST", INFER, body + b"abc", headers).json["error"]
    told = {"shape": [2], "datatype": "BOOL", "data": [True, False]}
    body, headers = binary(inputs(user__missing=told), {"user.missing": b"\2\0"})
    assert "got byte 2, expected 0 or 1 for BOOL" in client.ask("POST", INFER, body, headers).json["error"]


def test_no_rows_are_refused(client: Client) -> None:
    empty = {"shape": [0], "data": []}
    tensors = inputs(user=empty, item=empty, tags=empty, tags__lengths=empty, price=empty)
    answer = infer(client, tensors)
    assert (answer.status, "got no rows" in answer.json["error"]) == (400, True)


def test_a_version_is_asked_for_or_refused() -> None:
    model = FakeModel()
    with serving(fake(model)) as client:
        path = "/v2/models/clicks/versions/100/infer"
        assert client.ask("POST", path, {"inputs": inputs()}).json["model_version"] == "100"
        model.step = 120
        answer = client.ask("POST", path, {"inputs": inputs()})
        assert answer.status == 404 and "got '100', expected 120" in answer.json["error"]
        assert infer(client, inputs()).json["model_version"] == "120"


@settings(max_examples=100)
@given(data=st.data())
def test_broken_requests_have_right_scores_or_an_error(client: Client, data: st.DataObject) -> None:
    """One byte, or a few, of a request are others, or gone."""
    whole, headers = binary(inputs(), BLOBS)
    at = data.draw(st.integers(0, len(whole) - 1))
    body = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + data.draw(st.integers(0, 3)) :]
    answer = client.ask("POST", INFER, body, headers)
    assert answer.status in (200, 400, 413), answer.body
    assert ("error" in answer.json) == (answer.status != 200)
    if answer.status == 200 and body == whole:
        assert answer.json["outputs"][0]["data"] == WANTED
