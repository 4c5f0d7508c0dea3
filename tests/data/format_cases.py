"""The same samples in every layout that can be read, for tests of formats."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

FEATURES, NUMBERS = 3, 2
NAMES = [f"cat_{i}" for i in range(FEATURES)]
DENSE = [f"int_{i}" for i in range(NUMBERS)]
ROWS = 40
SCHEMA: dict[str, Any] = {
    "labels": ["label"],
    "dense": DENSE,
    "sparse": [{"name": name, "rows": ROWS} for name in NAMES],
}


class Day(NamedTuple):
    """Samples of a day: ids ``[n, F]`` int32, numbers ``[n, I]`` float32 that float16 holds, labels ``[n]`` int32."""

    ids: NDArray[np.int32]
    dense: NDArray[np.float32]
    labels: NDArray[np.int32]

    def table(self) -> pa.Table:
        columns: dict[str, Any] = {"label": self.labels}
        columns |= {name: self.dense[:, i] for i, name in enumerate(DENSE)}
        return pa.table(columns | {name: self.ids[:, i] for i, name in enumerate(NAMES)})


def days(count: int = 3, rows: int = 120) -> list[Day]:
    """Samples of which each value of an id is there often."""
    rng = np.random.default_rng(0)
    return [
        Day(
            rng.integers(0, ROWS, (n, FEATURES)).astype(np.int32),
            (rng.integers(-8, 8, (n, NUMBERS)) / 4).astype(np.float32),
            rng.integers(0, 2, n).astype(np.int32),
        )
        for n in range(rows, rows + count)
    ]


def write_parquet(folder: Path, samples: list[Day]) -> Path:
    """A file per day, of small row groups."""
    folder.mkdir()
    for i, day in enumerate(samples):
        pq.write_table(day.table(), folder / f"day_{i}.parquet", row_group_size=50)
    return folder


def write_hive(folder: Path, samples: list[Day]) -> Path:
    """A folder per day, whose name says which, as Spark writes them."""
    for i, day in enumerate(samples):
        (folder / f"day={i}").mkdir(parents=True)
        pq.write_table(day.table(), folder / f"day={i}" / "part-00000-c000.snappy.parquet", row_group_size=50)
    (folder / "_SUCCESS").touch()
    return folder


def write_text(folder: Path, samples: list[Day], suffix: str = ".csv") -> Path:
    """Text with a header."""
    folder.mkdir()
    options = pc_csv.WriteOptions(delimiter="\t" if suffix == ".tsv" else ",", quoting_style="none")
    for i, day in enumerate(samples):
        pc_csv.write_csv(day.table(), folder / f"{i}{suffix}", options)
    return folder


def write_npy(folder: Path, samples: list[Day], *, by_column: bool = False) -> Path:
    """Arrays as TorchRec's scripts write them."""
    folder.mkdir()
    for i, day in enumerate(samples):
        np.save(folder / f"day_{i}_sparse.npy", np.asfortranarray(day.ids) if by_column else day.ids)
        np.save(folder / f"day_{i}_dense.npy", day.dense)
        np.save(folder / f"day_{i}_labels.npy", day.labels[:, None])
    return folder


def write_multi_hot(folder: Path, samples: list[Day]) -> Path:
    """Arrays of MLPerf's DLRM v2; feature i has i + 1 ids per sample, the first of which are those of the day."""
    write_npy(folder, samples)
    for i, day in enumerate(samples):
        (folder / f"day_{i}_sparse.npy").unlink()
        np.savez(folder / f"day_{i}_sparse_multi_hot.npz", **{str(f): several(day, f) for f in range(FEATURES)})
    return folder


def several(day: Day, feature: int) -> NDArray[np.int32]:
    """Ids ``[n, feature + 1]`` of a feature."""
    return (day.ids[:, [feature]] + np.arange(feature + 1, dtype=np.int32)) % ROWS


def write_split_binary(folder: Path, samples: list[Day]) -> Path:
    """Bytes as NVIDIA's description of the format says, with nothing of hotbed's; all days are to train on."""
    (folder / "train").mkdir(parents=True)
    ids, dense, labels = (np.concatenate(part) for part in zip(*samples, strict=True))
    files = [("numerical.bin", DENSE), ("label.bin", ["label"]), *((f"{name}.bin", [name]) for name in NAMES)]
    (folder / "train/numerical.bin").write_bytes(dense.astype("<f2").tobytes())
    (folder / "train/label.bin").write_bytes(labels.astype("?").tobytes())
    for i, name in enumerate(NAMES):
        (folder / f"train/{name}.bin").write_bytes(ids[:, i].astype("<i1").tobytes())
    description: dict[str, Any] = {
        "feature_spec": {
            **{name: {"dtype": "int8", "cardinality": ROWS} for name in NAMES},
            **{name: {"dtype": "float16"} for name in DENSE},
            "label": {"dtype": "bool"},
        },
        "source_spec": {
            "train": [{"type": "split_binary", "features": of, "files": [f"train/{file}"]} for file, of in files]
        },
        "channel_spec": {"categorical": NAMES, "numerical": DENSE, "label": ["label"]},
        "metadata": {},
    }
    (folder / "feature_spec.yaml").write_text(yaml.safe_dump(description))
    return folder
