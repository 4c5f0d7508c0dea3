# pyright: reportUnknownParameterType=false
"""Open a folder that says itself what its columns are, as `hotbed.prepare` writes it: `open_described`.

NVIDIA's split-binary format has ``feature_spec.yaml``, Parquet ``source.yaml``: what a recipe says as ``data.source``.
"""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, cast

from pyarrow import fs

from hotbed.data.encoding import MARKERS
from hotbed.data.parquet import ParquetSource
from hotbed.data.source import Source
from hotbed.data.split_binary import SplitBinarySource
from hotbed.errors import DataError
from hotbed.locations import opened
from hotbed.parsing import TextError, parse_yaml

_PARQUET = "hotbed.data.ParquetSource"
_SPLIT_BINARY = "hotbed.data.SplitBinarySource"
_MOST_BYTES = 64 << 20


class Described(NamedTuple):
    """A source, and what a recipe says of it."""

    source: Source
    said: Mapping[str, object]


def open_described(path: str | Path) -> Described | None:
    """Open a prepared dataset by its folder or the marker file in it; return None for any other path.

    At a URI (a string) only Parquet is found.
    """
    if isinstance(path, Path):
        path = path.parent if path.name in MARKERS.values() else path
        if (path / MARKERS["split_binary"]).is_file():
            return Described(SplitBinarySource(path), {"class_path": _SPLIT_BINARY})
        if not path.is_dir():
            return None
    return _parquet(path)


def _parquet(path: str | Path) -> Described | None:
    try:
        store, root = (fs.LocalFileSystem(), str(path)) if isinstance(path, Path) else opened(path)
    except ValueError:  # said when files are looked for
        return None
    file = f"{root.rstrip('/')}/{MARKERS['parquet']}"
    if not store.get_file_info(file).is_file:
        return None
    with store.open_input_stream(file) as stream:
        text: bytes = stream.read(_MOST_BYTES)
    try:
        said: Any = parse_yaml(text.decode("utf-8"))
    except (UnicodeDecodeError, TextError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file} cannot be read as YAML: {reason}; prepare the data again") from None
    arguments = cast("Mapping[str, Any]", said).get("init_args") if isinstance(said, Mapping) else None
    if not isinstance(arguments, Mapping) or cast("Mapping[str, Any]", said).get("class_path") != _PARQUET:
        raise DataError(f"{file} must say class_path: {_PARQUET} and its init_args; prepare the data again")
    try:
        signature(ParquetSource).bind(path, **cast("Mapping[str, Any]", arguments))
    except TypeError as error:
        raise DataError(f"{file}: init_args: {error}; prepare the data again") from None
    return Described(ParquetSource(path, **cast("Mapping[str, Any]", arguments)), cast("Mapping[str, object]", said))
