"""Protects: no text of YAML or JSON becomes more than its limits, and any text is parsed or refused by one error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from hotbed.errors import PlanError, RecipeError
from hotbed.files import read_yaml
from hotbed.parsing import MOST_DEPTH, TextError, fault_of, parse_json, parse_yaml, read_limited, yaml_text
from hotbed.plan import Plan
from hotbed.train.runs.plan_search import read_plan

EXAMPLES = int(os.environ.get("HOTBED_FUZZ", "50"))
Fuzz = settings(max_examples=EXAMPLES)

DOUBLED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 60))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "got over 10^30, expected at most 262,144"),
        (DOUBLED, "expected at most 262,144"),
        ("a: &a [*a]", "is infinite: an alias is inside of the value"),
        ("a: &a {b: [{c: *a}]}", "is infinite"),
        ("[" * 100_000, "is nested more than 100 deep"),
        ("- " * 500 + "1", "is nested more than 100 deep"),
        ("9" * 401, "number: got 401 characters, expected at most 400"),
        ("0x" + "f" * 5000, "number: got 5,002 characters"),
        ("1" + ":59" * 5000, "number: got 15,001 characters"),
        ("1" + ":59" * 5000 + ".5", "number: got 15,003 characters"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("!!python/name:os.system", "could not determine a constructor for the tag"),
        ("!!int ''", "is not YAML: a value does not match its tag (IndexError"),
        ("!!bool maybe", "is not YAML: a value does not match its tag (KeyError"),
        ("!!timestamp soon", "is not YAML: a value does not match its tag (AttributeError"),
        ("!!timestamp 2001-13-45", "is not YAML: month must be in 1..12"),
        ("a: 1\na: 2", "the key 'a' is repeated"),
        (f"{'k' * 500}: 1\n{'k' * 500}: 2", "the key 'kkkkkkkkkkkk...kkkkkkkkkkkkk' is repeated"),
        ("a: [", "is not YAML: while parsing"),
        ("a\0b", "is not YAML: unacceptable character"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(TextError) as caught:
        parse_yaml(text)
    assert message in str(caught.value) and len(str(caught.value)) < 1000


def test_yaml_of_too_many_values_is_refused_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.parsing.MOST_VALUES", 1000)
    assert parse_yaml("[" + "1," * 999 + "]") == [1] * 999
    with pytest.raises(TextError, match="has more than 1,000 keys and values"):
        parse_yaml("[" + "1," * 1000 + "}")  # the end is not reached


def test_aliases_and_merged_keys_are_what_they_stand_for() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n"
    assert parse_yaml(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": [{"x": 1, "y": 2}] * 2}
    assert parse_yaml("") is None
    deepest = "[" * (MOST_DEPTH - 1) + "1" + "]" * (MOST_DEPTH - 1)
    assert parse_yaml(deepest) == json.loads(deepest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is nested more than 100 deep"),
        ("[" * 200 + "]" * 200, "is nested more than 100 deep"),
        ('{"a": 1, "a": 2}', "has 'a' twice"),
        ("9" * 5000, "is not JSON: Exceeds the limit"),
        ("{", "is not JSON: Expecting property name"),
        (b"\xff\xff\xff", "is not JSON: 'utf-8' codec can't decode"),
    ],
    ids=lambda text: str(text[:20]),
)
def test_json_that_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(TextError) as caught:
        parse_json(text)
    assert message in str(caught.value)
    (tmp_path / "plan.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as refused:
        read_plan(str(tmp_path / "plan.json"))
    assert message in str(refused.value)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 40)
    with pytest.raises(TextError, match="is longer than 1,000 bytes"):
        read_limited(tmp_path / "long", 1000)
    with pytest.raises(PlanError, match=r"plan .*long is longer than 67,108,864 bytes"):
        read_plan(str(tmp_path / "long"))


Plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
MARKS = ["&a ", "*a", "<<: ", "!!int ", "!!set ", "!!omap ", "!!binary ", "? ", "- ", ": ", "\n", "|\n", *"[{}'"]


@Fuzz
@given(Plain)
@example("0E0")
def test_what_is_written_is_parsed(value: Any) -> None:
    assert parse_yaml(yaml_text(value)) == value


@Fuzz
@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=8), max_size=30).map("".join))
@example("!!float ''")
@example("!!binary '€'")
@example("0001-01-01 00:00:00 +99:99")
@example("<<: 1")
@example("? {a: 1}\n: 2")
def test_any_text_is_parsed_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    for parse in (parse_yaml, parse_json):
        try:
            parse(text)
        except TextError as error:
            assert str(error)
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8", errors="ignore")
    try:
        read_yaml(file)
    except RecipeError as error:
        assert str(file) in str(error)


TILE = {"table": "t", "rows": [0, 4, 1], "cols": [0, 16], "owner": 0, "readers": [], "tier": "device", "cache_rows": 0}
ODD = st.sampled_from([None, True, -1, 2**31, 2**63, 10**40, 0.5, "", "device", [], [[]], [0], [0, -1], {}, {"t": []}])


@Fuzz
@given(st.sampled_from([*TILE, "world_size", "wire", "tiles", "extra"]), ODD | Plain)
def test_a_plan_with_one_entry_changed_is_one_or_refused(key: str, value: Any) -> None:
    plan: dict[str, Any] = {"world_size": 1, "tiles": [dict(TILE)], "wire": {}}
    (plan["tiles"][0] if key in TILE else plan)[key] = value
    try:
        Plan.from_json(json.dumps(plan, default=str))
    except PlanError as error:
        assert str(error)


class _Entry(BaseModel):
    kind: Literal["a"] = "a"
    rows: int = Field(1, ge=1, strict=True)
    names: list[str] = Field(["x"], min_length=1)


class _Private(BaseModel):
    entries: dict[Annotated[str, Field(pattern="^[a-z]+$")], _Entry]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (3, "got 3, expected a mapping"),
        ({"entrys": {}}, "entries is missing; did you mean 'entrys'?"),
        ({"entries": 5}, "entries: got 5, expected a mapping"),
        ({"entries": {"a": 5}}, "entries.a: got 5, expected a mapping"),
        ({"entries": {"a": {"rows": "many"}}}, "entries.a.rows: got 'many', expected an integer"),
        ({"entries": {"a": {"rows": 0, "kind": "a"}}}, "entries.a.rows: got 0, expected at least 1"),
        ({"entries": {"a": {"rows": 0, "kind": "b"}}}, "entries.a.kind: got 'b', expected 'a' (1 more)"),
        ({"entries": {"a": {"names": 1}}}, "entries.a.names: got 1, expected a list"),
        ({"entries": {"a": {"names": [1]}}}, "entries.a.names.0: got 1, expected text"),
        ({"entries": {"a": {"names": []}}}, "entries.a.names: got [], expected a length of at least 1"),
        ({"entries": {"A": {}}}, "entries.A: got 'A', expected a plain name"),
    ],
)
def test_faults_name_key_value_and_limit(values: object, fault: str):
    with pytest.raises(ValidationError) as raised:
        _Private.model_validate(values)
    assert fault_of(raised.value, {"[key]": "a plain name"}) == fault
