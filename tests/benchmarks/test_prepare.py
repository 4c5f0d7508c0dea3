"""The benchmark of preparing, tiny: scripts make what hotbed makes, and seconds and memory are measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import hotbed as hb
from benchmarks import prepare, prepare_scripts
from hotbed.data import SplitBinarySource


def test_a_contender_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rows", "500", "--rounds", "1", "--only", "polars_hashed", "--folder", str(tmp_path)]
    prepare.main([*options, "--json", str(tmp_path / "found.json")])
    (found,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]["polars_hashed"]
    assert found["seconds"] > 0 and found["memory_samples"] > 0
    assert 10 << 20 < found["peak_bytes"] < 16 << 30
    assert "peak, all processes" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["polars", "pandas"])
def test_scripts_make_what_hotbed_makes(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason="is no dependency of hotbed's")
    prepare.write_log(tmp_path / "log.tsv", 3_000, seed=1)
    hb.prepare(tmp_path / "log.tsv", tmp_path / "hotbed", threshold=prepare_scripts.THRESHOLD)
    (tmp_path / name).mkdir()
    prepare_scripts.SCRIPTS[name](tmp_path / "log.tsv", tmp_path / name)
    files = [file for pattern in ("train*", "part*", "test*") for file in sorted((tmp_path / name).glob(pattern))]
    made = pl.concat([pl.read_parquet(file) for file in files])
    source = SplitBinarySource(tmp_path / "hotbed")
    batches = [source.read(split, 0) for split in ("train", "test")]
    dense = np.concatenate([batch.dense.numpy() for batch in batches if batch.dense is not None])
    assert np.allclose(dense, made.select(source.schema.dense).to_numpy(), rtol=1e-3)  # hotbed's are float16
    for column in source.schema.sparse:
        ids = np.concatenate([batch.sparse[column.name].values.numpy() for batch in batches])
        theirs = made[column.name].to_numpy()
        assert ((ids == 0) == (theirs == 0)).all()
        assert sorted(np.bincount(ids).tolist()) == sorted(np.bincount(theirs).tolist())
