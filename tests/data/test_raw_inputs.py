"""What is given to a preparation is found, and files that do not fit together are refused."""

from pathlib import Path

import pytest
from prepare_cases import dataset

from hotbed.data.prepare import prepare


@pytest.mark.parametrize(
    "given", ["./day_0.parquet", "../_raw/day_0.parquet", "{folder}/day_0.parquet", "memory://raw/parquet/"]
)
def test_tables_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Hidden is what is below the path that was given."""
    folder = tmp_path / "_raw"
    folder.mkdir()
    dataset(folder, files=1)
    monkeypatch.chdir(folder)
    if "://" in given:
        fsspec = pytest.importorskip("fsspec")
        store = fsspec.filesystem("memory")
        store.pipe_file("/raw/parquet/day_0.parquet", (folder / "day_0.parquet").read_bytes())
    report = prepare(given.format(folder=folder), tmp_path / "out", threshold=2, test_fraction=0)
    assert report.samples == {"train": 400}
    assert (tmp_path / "out/source.yaml").is_file()
