"""Read and write ``feature_spec.yaml``, NVIDIA's description of a split-binary dataset.

Its four sections: ``feature_spec`` (dtype and cardinality by column), ``channel_spec`` (columns by role: categorical,
numerical, label), ``source_spec`` (per split the files and the columns in them), ``metadata`` (free; hotbed keeps the
schema and the number of samples there).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from hotbed.data.columns import SparseColumn
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.locations import location
from hotbed.parsing import TextError, parse_yaml, read_limited
from hotbed.specs import is_int

DESCRIPTION = "feature_spec.yaml"
_DTYPES: dict[str, tuple[str, ...]] = {
    "categorical": ("int8", "int16", "int32", "int64"),
    "numerical": ("float16", "float32"),
    "label": ("bool", "int8", "uint8", "float16", "float32"),
}


@dataclass(frozen=True)
class StoredFile:
    """One ``.bin`` file: its path, dtype, and bytes per sample."""

    path: Path
    dtype: np.dtype[Any]
    sample_bytes: int


@dataclass(frozen=True)
class FeatureSpec:
    """A dataset's schema, and per split the file that holds each column (numericals share one).

    ``preparation`` says how raw values became what is stored, unchecked; None where the description does not say it.
    """

    folder: Path
    schema: Schema
    files: Mapping[str, Mapping[str, StoredFile]]
    preparation: object = None

    def absolute(self) -> FeatureSpec:
        """The same with paths that hold in any working directory."""
        files = {
            split: {name: replace(file, path=file.path.absolute()) for name, file in of_split.items()}
            for split, of_split in self.files.items()
        }
        return replace(self, folder=self.folder.absolute(), files=files)


def id_dtype(name: str, rows: int) -> np.dtype[Any]:
    """Dtype of stored ids below ``rows``: by NVIDIA's rule the smallest of int8/16/32 whose maximum is above."""
    for dtype in ("int8", "int16", "int32"):
        if rows < np.iinfo(dtype).max:
            return np.dtype(dtype).newbyteorder("<")
    raise SpecError(
        f"column '{name}': cardinality {rows:,} does not fit int32 (at most {np.iinfo('int32').max - 1:,}); "
        f"raise the frequency threshold, or use Parquet"
    )


def read_feature_spec(path: str | Path) -> FeatureSpec:
    """Read and check a description; see `SplitBinarySource` for the errors."""
    place = location(path) if isinstance(path, str) else path
    if isinstance(place, str):
        raise DataError(f"{path}: split-binary data is read from local disks only; copy it there, or use Parquet")
    path = place
    file = path if path.is_file() else path / DESCRIPTION
    if not file.is_file():
        raise DataError(
            f"{file} does not exist; make one with `hotbed prepare`, or give its directory; for data in another format "
            "`hotbed init` drafts a recipe"
        )
    try:
        content: object = parse_yaml(read_limited(file).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not YAML: {error}") from None
    except TextError as error:
        raise DataError(f"{file} {error}") from None
    return _Reader(file, _mapping(content, f"{file}")).read()


class _Reader:
    """The checks of one description, each error naming the file."""

    def __init__(self, file: Path, content: Mapping[str, Any]) -> None:
        self.file = file
        self.columns = _mapping(self._get(content, "feature_spec"), f"{file}: feature_spec")
        channels = _mapping(self._get(content, "channel_spec"), f"{file}: channel_spec")
        self.source = _mapping(self._get(content, "source_spec"), f"{file}: source_spec")
        self.metadata: object = content.get("metadata")
        self.channels = {role: self._names(channels.get(role) or [], f"channel_spec.{role}") for role in _DTYPES}
        self.role = {name: role for role, names in self.channels.items() for name in names}

    def read(self) -> FeatureSpec:
        dtypes = {name: self._dtype(name) for name in self.role}
        files: dict[str, dict[str, StoredFile]] = {}
        for split, entries in self.source.items():
            if not re.fullmatch(r"\w[\w.-]*", str(split)):
                raise DataError(
                    f"{self.file}: source_spec names split {split!r}, must be a plain name, as of a directory"
                )
            files[str(split)] = self._files(str(split), entries, dtypes)
        if not files:
            raise DataError(f"{self.file}: source_spec has no split; expected at least `train`")
        preparation = self.metadata.get("preparation") if isinstance(self.metadata, Mapping) else None
        return FeatureSpec(folder=self.file.parent, schema=self._schema(), files=files, preparation=preparation)

    def _get(self, content: Mapping[str, Any], key: str) -> object:
        if key not in content:
            raise DataError(f"{self.file} has no `{key}`{did_you_mean(key, map(str, content))}")
        return content[key]

    def _names(self, value: object, where: str) -> list[str]:
        if not isinstance(value, list):
            raise DataError(f"{self.file}: {where} is {value!r}, must be a list of column names")
        return [str(name) for name in cast("list[object]", value)]

    def _dtype(self, name: str) -> np.dtype[Any]:
        if name not in self.columns:
            raise DataError(
                f"{self.file}: channel_spec names column '{name}', which feature_spec does not describe"
                f"{did_you_mean(name, map(str, self.columns))}"
            )
        given = _mapping(self.columns[name], f"{self.file}: feature_spec.{name}").get("dtype")
        allowed = _DTYPES[self.role[name]]
        if given not in allowed:
            raise DataError(
                f"{self.file}: column '{name}' has dtype {given!r}, must be one of {', '.join(allowed)} for a "
                f"{self.role[name]} column"
            )
        dtype = np.dtype(str(given)).newbyteorder("<")
        if self.role[name] == "categorical":
            cardinality = self._cardinality(name)
            if cardinality - 1 > np.iinfo(dtype).max:
                raise DataError(
                    f"{self.file}: column '{name}' has cardinality {cardinality:,}, but its dtype {given} holds ids up "
                    f"to {np.iinfo(dtype).max:,}; correct one of them, or prepare the dataset again"
                )
        return dtype

    def _cardinality(self, name: str) -> int:
        value: object = self.columns[name].get("cardinality")
        if not is_int(value) or not 1 <= value < 1 << 63:
            raise DataError(
                f"{self.file}: column '{name}' has cardinality {value!r}, must be an integer of at least 1, below 2^63"
            )
        return value

    def _files(self, split: str, entries: object, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, StoredFile]:
        where = f"{self.file}: source_spec.{split}"
        if not isinstance(entries, list):
            raise DataError(f"{where} is {entries!r}, must be a list")
        files: dict[str, StoredFile] = {}
        for entry in cast("list[object]", entries):
            part = _mapping(entry, where)
            names = self._names(part.get("features"), f"source_spec.{split}.features")
            paths = self._names(part.get("files"), f"source_spec.{split}.files")
            if part.get("type") != "split_binary" or len(paths) != 1:
                raise DataError(f"{where}: {paths} of type {part.get('type')!r} must be one file of type split_binary")
            numerical = self.channels["numerical"]
            if len(names) != 1 and names != numerical:
                raise DataError(
                    f"{where}: {paths[0]} holds columns {names}; a file holds one column or all numericals, ordered "
                    f"as in channel_spec ({numerical})"
                )
            for name in names:
                if name not in dtypes:
                    raise DataError(f"{where}: column '{name}' is in no channel of channel_spec")
                path = self._within(paths[0], where)
                files[name] = StoredFile(path, dtypes[name], dtypes[name].itemsize * len(names))
        missing = [name for name in dtypes if name not in files]
        if missing:
            raise DataError(f"{where} lists no file for column '{missing[0]}'")
        # Numericals must be one matrix: [N, 1] files of several columns would be read as something else.
        numerical = self.channels["numerical"]
        if len({files[name].path for name in numerical}) > 1:
            raise DataError(f"{where}: the numericals must be in one file [N, {len(numerical)}], not several")
        return {_plain(name): file for name, file in files.items()}

    def _within(self, name: str, where: str) -> Path:
        """A file below the dataset's own directory; a `DataError` for any other, also behind a link."""
        root = self.file.parent
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise DataError(f"{where}: file {name!r} must be a path below {root}, without '..'")
        try:
            found = (root / name).resolve()
            found.is_file()  # raises if the name is too long
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{where}: file {name!r} cannot be found: {error}") from None
        if not found.is_relative_to(root.resolve()):
            raise DataError(f"{where}: {name} is a link to {found}, out of the dataset; move the file itself there")
        return root / name

    def _schema(self) -> Schema:
        kept = self.metadata.get("schema") if isinstance(self.metadata, Mapping) else None
        try:
            sparse = tuple(
                SparseColumn(name=_plain(name), rows=self._cardinality(name)) for name in self.channels["categorical"]
            )
            dense, labels = (tuple(map(_plain, self.channels[role])) for role in ("numerical", "label"))
            plain = Schema(sparse=sparse, dense=dense, labels=labels)
            schema = plain if kept is None else Schema.from_dict(_mapping(kept, f"{self.file}: metadata.schema"))
        except SpecError as error:
            raise DataError(f"{self.file}: {error}") from None
        if [(c.name, c.rows) for c in schema.sparse] != [(c.name, c.rows) for c in sparse] or (
            (schema.dense, schema.labels) != (dense, labels) or schema.scaling or schema.numericals or schema.positives
        ):
            raise DataError(
                f"{self.file}: metadata.schema and feature_spec disagree about the columns; remove metadata.schema"
            )
        return schema


def _plain(name: str) -> str:
    """Column name without the ``.bin`` that NVIDIA's scripts put at the end of names of categorical columns."""
    return name.removesuffix(".bin")


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {type(value).__name__}, must be a mapping")
    return cast("Mapping[str, Any]", value)
