"""Protects that what is no exported model, or no longer the one that was written, is refused before it is used."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checkpoint import directory, save_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError, DamagedError, SpecError
from hotbed.nn.dense_program import DensePart, trace_dense_part
from hotbed.serve.model_files import ExportedModel
from hotbed.specs import Feature, Table
from hotbed.train.runs.model_export import write_model
from tests.serve.models import FORMS, Wide, described


class ByValue(Wide):
    def forward(self, batch: Batch) -> Tensor:
        logits = super().forward(batch)
        return logits if float(logits.sum()) > 0 else -logits


class OfIds(Wide):
    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + batch.sparse["t"].values[:, None]


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([Table("t", 9, 4)], [Feature("f", "t", pooling="none")])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            ByValue([Table("t", 9, 4)]),
            r"ByValue cannot be traced: .*must not branch on values",
        ),
        (OfIds([Table("t", 9, 4)]), r"reads the ids batch.sparse\['t'\], .* or export it with --single"),
        (Sequences(), "feature 'f': max_len: got none with pooling 'none'"),
    ],
)
def test_what_cannot_be_a_program_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises((CheckpointError, SpecError), match=message):
        trace_dense_part(DensePart(model), 0)


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> Path:
    model = Wide(FORMS[:2])
    save_checkpoint(tmp_path / "last-00000001", {"model": model}, step=1)
    about, program = described(model)
    write_model(tmp_path / "out", directory(tmp_path / "last-00000001"), about, program)
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "hotbed-change"}, "format: got 'hotbed-change', expected hotbed-model"),
        ({"version": 2}, "version: got 2, expected 1"),
        ({"labels": "y"}, "labels: got 'y', expected a list"),
        ({"encoder": {}}, "encoder.schema"),
        ({"extra": 1}, "extra: got 1, expected no such key"),
        ({"tables.embeddings.fp32.rows": 299}, "files.tables/embeddings.fp32.rows.bytes: got 8,400"),
        ({"tables.embeddings.fp32.file": "../x"}, "tables.embeddings.fp32.file: got '../x': string should match"),
        ({"tables.embeddings.fp32.file": "gone"}, "file: got gone, expected a key of files"),
        ({"tables.embeddings.fp32.record_bytes": 32}, "record_bytes: got 32, expected 28 for fp32 rows of 7 columns"),
        ({"tables.embeddings.fp32.fp32_rows": 301}, "fp32_rows: got 301, expected at most rows 300"),
        ({"features.embeddings.fp32.table": "x"}, "table: got 'x'"),
        ({"features.embeddings.fp32.pooling": "none"}, "features.embeddings.fp32.max_len"),
        ({"dense.inputs": 3}, "dense.inputs: got 3"),
    ],
)
def test_a_manifest_is_checked_before_it_is_used(made: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads((made / "manifest.json").read_text())
    for key, value in change.items():
        first, _, rest = key.partition(".")
        if rest.count(".") == 2:
            path, _, last = rest.rpartition(".")
            values[first][path][last] = value
        elif rest:
            values[first][rest] = value
        else:
            values[first] = value
    (made / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        ExportedModel.open(made)
    assert message in str(caught.value)


def test_damage_is_found(made: Path) -> None:
    model = ExportedModel.open(made)
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        ExportedModel.open(made / "tables")
    rows = made / "tables" / "embeddings.bf16.rows"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedError, match=r"bf16.rows is damaged"):
        model.verify()
    rows.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match=r"bf16.rows: got 4,799 bytes, expected 4,800"):
        model.records("embeddings.bf16")
    rows.unlink()
    with pytest.raises(DamagedError, match=r"bf16.rows is missing"):
        model.records("embeddings.bf16")
    (made / "dense.pt2").write_bytes(b"x" * (made / "dense.pt2").stat().st_size)
    with pytest.raises(DamagedError, match=r"dense.pt2 is damaged"):
        model.dense()


def test_what_a_killed_export_left_is_cleared(made: Path) -> None:
    (made / "manifest.json").rename(made / "unfinished.json")
    with pytest.raises(CheckpointError, match="has no manifest"):
        ExportedModel.open(made)
    model = Wide(FORMS[:2])
    about, program = described(model)
    write_model(made, directory(made.parent / "last-00000001"), about, program)
    ExportedModel.open(made).verify()
    assert not (made / "unfinished.json").exists()
