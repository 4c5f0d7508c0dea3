"""A log with numbers of all kinds, and a recipe whose model normalizes them by all rules."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

RULES = ("standard", "log", "quantile", "asinh", "as_is")


def frame(n: int, seed: int = 0) -> pl.DataFrame:
    """Users, items and numbers of all kinds, some missing, and labels that depend on them."""
    rng = np.random.default_rng(seed)
    user, price = rng.integers(0, 60, n), rng.lognormal(3, 2, n)
    seconds = 1_700_000_000 + rng.integers(0, 86_400, n)
    score = np.sin(user) + np.log(price) - 3
    rating = np.where(rng.random(n) < 1 / (1 + np.exp(-score)), 5, rng.integers(1, 4, n))
    numbers = {f"n_{rule}": np.where(rng.random(n) < 0.1, np.nan, price) for rule in RULES}
    numbers["n_as_is"] = np.log(numbers["n_as_is"])
    return pl.DataFrame(
        {
            "row": np.arange(n),
            "user": [f"user {u}" for u in user],
            "items": [rng.integers(0, 90, k).tolist() for k in rng.integers(0, 4, n)],
            "seconds": seconds,
            **numbers,
            "rating": rating,
            "buy": rng.random(n) < 0.3,
        }
    )


def recipe_of_numbers(path: Path, labels: Any, **init_args: Any) -> Path:
    frame(2000).write_parquet(path / "log.parquet", row_group_size=300)
    schema = {
        "labels": labels,
        "dense": [
            {"name": "seconds", "rule": "standard"},
            *({"name": f"n_{rule}", "rule": rule, "missing": "indicator"} for rule in RULES),
            {"name": "row", "center": 1000, "scale": 500},
        ],
        "sparse": [{"name": "user", "rows": 256}, {"name": "items", "rows": 256, "ids": None}],
    }
    values = {
        "name": "predict",
        "data": {
            "path": str(path / "log.parquet"),
            "dim": 8,
            "source": {
                "class_path": "hotbed.data.ParquetSource",
                "init_args": {"schema": schema, "test_fraction": 0.2, **init_args},
            },
        },
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, len(labels)]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {
            "batch_size": 100,
            "eval_batch_size": 128,
            "device": "cpu",
            "precision": "fp32",
            "checkpoint": "last",
        },
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return path / "recipe.yaml"


POSITIVE = {"column": "rating", "positive": ">= 4"}
