"""Folders that say themselves what they have, in every format."""

from collections.abc import Callable
from pathlib import Path

from hotbed.cli.main import main
from tests.data.format_cases import days, write_multi_hot, write_npy, write_parquet, write_split_binary


def prepared(path: Path) -> Path:
    """A dataset of Parquet that `hotbed prepare` made."""
    raw = write_parquet(path.parent / "raw", days(3, 400))
    assert main(["prepare", str(raw), str(path), "--threshold", "2", "--valid_rows", "50", "--test_rows", "50"]) == 0
    return path


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "NumPy": lambda path: write_npy(path, days(3, 400)),
    "NumPy, several ids": lambda path: write_multi_hot(path, days(3, 400)),
    "split-binary": lambda path: write_split_binary(path, days(3, 400)),
    "prepared Parquet": prepared,
}
