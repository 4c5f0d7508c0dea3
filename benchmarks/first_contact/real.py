"""Present the real log twice, as different users have it: a headerless TSV, and Parquet under other names and types.

The last 10 % in time are the test split. Nothing is written into the repository: the licence of the log forbids it.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from benchmarks.first_contact.planted import Dataset, Roles

NUMBERS, IDS = 13, 26
_OF_NUMBERS = tuple(f"Feature {i}" for i in range(NUMBERS))
_OF_IDS = tuple(f"cat-{chr(ord('a') + i)}" for i in range(IDS))
ROLES = Roles("Clicked?", ids=_OF_IDS, numbers=_OF_NUMBERS)
OPTIONS = ("--label", "Clicked?")
TSV, PARQUET = "real tsv", "real parquet"
REAL = (TSV, PARQUET)


def real_dataset(name: str, log: Path, folder: Path) -> Dataset:
    """Write the Parquet form, and for the TSV what the baselines read; hotbed gets the log itself then."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    train, test = data / "train.parquet", data / "test.parquet"
    frame = pl.read_csv(
        log,
        separator="\t",
        has_header=False,
        new_columns=[ROLES.label, *_OF_NUMBERS, *_OF_IDS],
        schema_overrides=[pl.Int64] * (1 + NUMBERS) + [pl.String] * IDS,
    )
    held_out = round(len(frame) * 0.1)
    kept = len(frame) - held_out
    if not test.exists():
        shown = frame.with_columns(pl.col(ROLES.label).cast(pl.Boolean), pl.col(_OF_NUMBERS).cast(pl.Float64))
        shown.slice(0, kept).write_parquet(train)
        shown.slice(kept).write_parquet(test)
    valid = kept // 10
    splits = {"train": (train, 0, kept - valid), "valid": (train, kept - valid, valid), "test": (test, 0, held_out)}
    return Dataset(log if name == TSV else data, () if name == TSV else OPTIONS, ROLES, splits, None)
