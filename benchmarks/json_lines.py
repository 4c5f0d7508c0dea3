"""Read samples that are lines of JSON by a source in Python, which is a format that is slow to decode.

A recipe names the source by ``data.source.class_path`` (``benchmarks.json_lines.JsonLines``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import hotbed as hb
from hotbed.data import Schema, Source, SparseColumn
from hotbed.data.formats.zipf_source import ZipfLaw

SPARSE, DENSE, ROWS = 26, 13, 10_000
CHUNK = 8_192  # samples of a file


class JsonLines(Source):
    """Files ``0.jsonl …`` of a folder. A line is ``[label, ids, numbers]``."""

    def __init__(self, path: str) -> None:
        self._paths = sorted(Path(path).glob("*.jsonl"), key=lambda file: int(file.stem))
        self.schema = Schema(
            sparse=tuple(SparseColumn(name=f"C{i}", rows=ROWS) for i in range(SPARSE)),
            dense=tuple(f"I{i}" for i in range(DENSE)),
            labels=("label",),
        )
        self.splits = ("train",)
        self._sizes = [file.read_bytes().count(b"\n") for file in self._paths]

    def _chunks(self, split: str) -> Sequence[int]:
        return self._sizes

    def _read(self, split: str, i: int) -> hb.Batch:
        with self._paths[i].open(encoding="utf-8") as lines:
            labels, ids, numbers = zip(*map(json.loads, lines), strict=True)
        names = [column.name for column in self.schema.sparse]
        return hb.Batch(
            sparse=hb.Jagged(names, torch.tensor(ids).T.flatten(), batch_size=len(labels)),
            dense=torch.tensor(numbers),
            labels=torch.tensor(labels, dtype=torch.float32)[:, None],
        )


def write_json_lines(folder: Path, samples: int) -> None:
    folder.mkdir(parents=True)
    draw, law = np.random.default_rng(0), ZipfLaw(ROWS, 1.05)
    for number, start in enumerate(range(0, samples, CHUNK)):
        count = min(CHUNK, samples - start)
        positions = np.arange(start * SPARSE, (start + count) * SPARSE, dtype=np.uint64)
        ids = law.draw((0,), positions).reshape(count, SPARSE).tolist()
        numbers = draw.random((count, DENSE)).round(4).tolist()
        labels = draw.integers(0, 2, count).tolist()
        lines = (json.dumps(sample) + "\n" for sample in zip(labels, ids, numbers, strict=True))
        (folder / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
