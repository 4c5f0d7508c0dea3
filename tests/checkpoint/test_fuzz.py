"""Protects: whatever the bytes of a checkpoint are, reading it works or ends with a CheckpointError, never another.

Real checkpoints are changed in one place: an entry of the manifest or of a header is removed or replaced and the hashes
are made right, so that only the checks of content are left; or bytes of a file are, and the hashes stay or are made
right. What was once found is kept as an example. ``HOTBED_FUZZ=20000`` in the environment looks further.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotbed.checkpoint import init_from, load_checkpoint, verify_checkpoint
from hotbed.checkpoint.convert import convert
from hotbed.errors import CheckpointError
from tests.fixtures.make import FOLDER
from tests.fixtures.models import CASES, build, train

NAMES = ("whole", "narrow", "lazy", "dynamic", "tiles")
"""Checkpoints with dense parts, rows of all dtypes, keyed tiles, a dynamic table, and tiles of several files."""
EXAMPLES = int(os.environ.get("HOTBED_FUZZ", "25"))
MANIFEST = "manifest.json"
REMOVED = "(removed)"

Path_ = tuple[Any, ...]
Values = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 3, 16, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**40]
    ),
    st.sampled_from([-0.0, 0.5, 1e300, 1e39, -1e39, math.nan, math.inf, -math.inf]),
    st.sampled_from(
        ["", "fp32", "int8", "fp4", "F32", "I64", "row", "../x.safetensors", "/etc/passwd", "a\0b", "\ud800"]
    ),
    st.sampled_from(["sparse.safetensors", "tables-00000-00000.safetensors", "é.safetensors", "x" * 5000, "0" * 64]),
    st.sampled_from(
        [[], {}, [[]], [0], [0, 0], [0, 0, 0], [5, 1, 1], [0, 2**63, 1], [-1, 4], [1.0, 2.0], ["a"], [None]]
    ),
    st.sampled_from(
        [{"$tensor": "x"}, {"$tensor": 1}, {"$tuple": 3}, {"$items": [[1]]}, {"$items": [[[], 1]]}, {"$x": 1}]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)


def nodes(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Paths of all entries of JSON."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(inner, (*path, key))


def changed(values: Any, path: Path_, value: Any) -> Any:
    """A copy in which the entry at a path is another, or none."""
    values = copy.deepcopy(values)
    at = values
    for key in path[:-1]:
        at = at[key]
    if value == REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return values


def manifest_of(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / MANIFEST).read_text())
    del values["sha256"]
    return values


def sign(folder: Path, values: dict[str, Any]) -> None:
    """Write a manifest with its right hash."""
    text = json.dumps(values, indent=1)
    (folder / MANIFEST).write_text(
        json.dumps({**values, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=1)
    )


def sign_files(folder: Path) -> None:
    """Make a manifest right about the bytes of its files."""
    values = manifest_of(folder)
    for name, entry in values["files"].items():
        data = (folder / name).read_bytes()
        entry["bytes"], entry["sha256"] = len(data), [hashlib.sha256(data).hexdigest()] * bool(data)
    sign(folder, values)


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def put_header(file: Path, values: Any, data: bytes) -> None:
    text = json.dumps(values).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(name: str, folder: Path) -> bool:
    """Read a checkpoint in all ways; whether all worked."""
    worked = True
    parts = build(CASES[name])

    def load() -> None:
        load_checkpoint(folder, parts)

    for way in (
        lambda: verify_checkpoint(folder),
        load,
        lambda: init_from(folder, build(CASES[name])),
        lambda: convert(folder, folder / "converted", compact=True),
    ):
        try:
            way()
        except CheckpointError as error:
            assert str(error)
            worked = False
        else:
            if way is load:
                train(CASES[name], parts, range(100, 101))  # and what was loaded serves
    return worked


def copied(name: str) -> tempfile.TemporaryDirectory[str]:
    place = tempfile.TemporaryDirectory()
    shutil.copytree(FOLDER / name, Path(place.name) / name)
    return place


Fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def of_manifests(draw: st.DrawFn) -> tuple[str, Path_, Any]:
    name = draw(st.sampled_from(NAMES))
    path = draw(st.sampled_from(list(nodes(manifest_of(FOLDER / name)))))
    return name, path, draw(st.one_of(st.just(REMOVED), Values))


@Fuzz
@given(of_manifests())
@example(("lazy", ("tables", "embeddings.popular", "moments", "sum_of_squares", "initial"), -(2**63) - 1))
@example(("whole", ("parts", "sparse", "state", "$items", 1, 1, "step"), REMOVED))
@example(("whole", ("parts", "sparse", "state", "$items", 2, 1, "step", "$tensor"), REMOVED))
@example(("whole", ("parts", "dense", "param_groups", 0, "momentum"), REMOVED))
@example(("whole", ("parts", "dense", "param_groups", 0, "lr"), 2**64))
@example(("whole", ("tables", "embeddings.users", "tiles", 0, "rows", 2), 0))
@example(("whole", ("tables", "embeddings.users", "tiles", 0, "rows"), [5, 1, 1]))
@example(("lazy", ("files",), []))
def test_an_entry_of_the_manifest_is_another(change: tuple[str, Path_, Any]) -> None:
    name, path, value = change
    with copied(name) as place:
        folder = Path(place) / name
        sign(folder, changed(manifest_of(folder), path, value))
        read(name, folder)


@st.composite
def of_headers(draw: st.DrawFn) -> tuple[str, str, Path_, Any]:
    name = draw(st.sampled_from(NAMES))
    file = draw(st.sampled_from(sorted(f.name for f in (FOLDER / name).glob("*.safetensors"))))
    path = draw(st.sampled_from(list(nodes(header_of(FOLDER / name / file)[0]))))
    return name, file, path, draw(st.one_of(st.just(REMOVED), Values))


@Fuzz
@given(of_headers())
@example(("whole", "model.safetensors", ("out.bias",), []))
@example(("whole", "model.safetensors", ("out.bias", "shape"), [2.0]))
@example(("whole", "model.safetensors", ("out.bias", "shape"), [-1, -2]))
def test_an_entry_of_a_header_is_another(change: tuple[str, str, Path_, Any]) -> None:
    name, file, path, value = change
    with copied(name) as place:
        folder = Path(place) / name
        header, data = header_of(folder / file)
        put_header(folder / file, changed(header, path, value), data)
        sign_files(folder)
        read(name, folder)


@st.composite
def of_bytes(draw: st.DrawFn) -> tuple[str, str, str, int, int, bool]:
    name = draw(st.sampled_from(NAMES))
    file = draw(st.sampled_from(sorted(f.name for f in (FOLDER / name).iterdir())))
    size = (FOLDER / name / file).stat().st_size
    at = draw(st.one_of(st.integers(0, min(size, 600) - 1), st.integers(0, size - 1)))
    how = draw(st.sampled_from(["flip", "cut", "insert", "double"]))
    return name, file, how, at, draw(st.integers(0, 255)), draw(st.booleans())


@Fuzz
@given(of_bytes())
@example(("whole", "dense.safetensors", "cut", 0, 0, True))
@example(("whole", MANIFEST, "cut", 0, 0, False))
def test_bytes_of_a_file_are_others(change: tuple[str, str, str, int, int, bool]) -> None:
    name, file, how, at, byte, is_signed = change
    with copied(name) as place:
        folder = Path(place) / name
        data = (folder / file).read_bytes()
        put = {"flip": bytes([byte]) + data[at + 1 :], "cut": b"", "insert": bytes([byte]) + data[at:], "double": data}
        (folder / file).write_bytes(data[:at] + put[how])
        if is_signed and file != MANIFEST:
            sign_files(folder)
        read(name, folder)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_changed_is_read(name: str) -> None:
    """So the errors above are of the change."""
    with copied(name) as place:
        sign_files(Path(place) / name)
        torch.manual_seed(0)
        assert read(name, Path(place) / name)
