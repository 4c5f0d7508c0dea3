"""Whatever scheme fsspec knows is read: one of its own (``local://``), and one that an installed library registers."""

from pathlib import Path

import pytest
from data_cases import log_line, write_log
from prepare_cases import SMALL, dataset, digests

from hotbed.data import Loader, ParquetSource, open_readers
from hotbed.data.drafting.draft import draft
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.testing.source_contract import assert_same

fsspec = pytest.importorskip("fsspec")
local = pytest.importorskip("fsspec.implementations.local")


class Shelf(local.LocalFileSystem):
    """Local files under a scheme that neither pyarrow nor fsspec knows, as gcsfs and sshfs bring theirs."""

    protocol = ("shelf",)


fsspec.register_implementation("shelf", Shelf, clobber=True)


@pytest.mark.parametrize("scheme", ["local", "shelf"])
def test_parquet_of_any_scheme(tmp_path: Path, scheme: str) -> None:
    """Drafted, read and prepared as the same files at their path are."""
    folder = tmp_path / "raw"
    folder.mkdir()
    uri = f"{scheme}://{dataset(folder, files=2)}"
    drafted = draft(folder)
    assert draft(uri) == drafted
    for batch, expected in zip(
        *(Loader(ParquetSource(path, drafted.schema), "train", 100) for path in (uri, folder)), strict=True
    ):
        assert_same(batch, expected)
    for name, path in (("a", uri), ("b", folder)):
        prepare(path, tmp_path / name, **SMALL)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_other_processes_read_them(tmp_path: Path) -> None:
    schema = draft(dataset(tmp_path, files=1)).schema
    source = ParquetSource(f"local://{tmp_path}", schema)
    with open_readers("processes", workers=1) as readers:
        found = list(Loader(source, "train", 100, shuffle=True, executor=readers))
    for batch, expected in zip(found, Loader(source, "train", 100, shuffle=True), strict=True):
        assert_same(batch, expected)


@pytest.mark.parametrize("scheme", ["local", "shelf"])
def test_text_of_any_scheme(tmp_path: Path, scheme: str) -> None:
    """A log of Criteo, and a table with a header."""
    log = write_log(tmp_path / "log.tsv", [log_line() for _ in range(100)])
    report = prepare(f"{scheme}://{log}", tmp_path / "out", threshold=1)
    assert report.samples == {"train": 90, "test": 10}
    table = tmp_path / "clicks.csv"
    table.write_text("user,click\n" + "".join(f"u{i % 7},{i % 2}\n" for i in range(100)), encoding="utf-8")
    assert draft(f"{scheme}://{table}").schema == draft(table).schema
