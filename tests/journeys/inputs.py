"""Write the files that journeys begin with."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from hotbed.data import write_synthetic_log

MODEL = """\
model:
  class_path: hotbed.nn.DLRM
  init_args: {bottom: [8, 4], top: [8, 1]}
dense_optimizer:
  class_path: torch.optim.Adam
  init_args: {lr: 0.01}
sparse_optimizer:
  class_path: hotbed.optim.RowWiseAdagrad
  init_args: {lr: 0.1}
"""
"""Model and optimizers of all recipes here."""

PREPARED = f"""\
name: small
data: {{path: data, dim: 4, valid_split: test}}
{MODEL}schedule: {{warmup_steps: 3}}
"""
"""A recipe for prepared data, without its section ``train``."""

SMALL = f"""\
{PREPARED}train: {{batch_size: 64, device: cpu, precision: fp32, seed: 3, steps: 10, eval_every: 5}}
"""

DAILY = f"""\
name: daily
data:
  path: logs/day={{date}}
  dim: 4
  on_bad_id: hash
  source:
    class_path: hotbed.data.ParquetSource
    init_args:
      schema:
        sparse: [{{name: user, rows: 101}}, {{name: item, rows: 51}}]
        dense: [price]
        labels: [click]
{MODEL}train: {{batch_size: 64, device: cpu, precision: fp32, seed: 3}}
"""


def write_inputs(folder: Path) -> None:
    """Write a raw log, a table of clicks, days of clicks, recipes and rows to score."""
    write_synthetic_log(folder / "log.tsv", 1200, seed=1)
    write_synthetic_log(folder / "fresh.tsv", 100, seed=2)
    (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
    wide = SMALL.replace("dim: 4", "dim: 32").replace("bottom: [8, 4]", "bottom: [8, 32]")
    (folder / "wide.yaml").write_text(wide, encoding="utf-8")
    (folder / "daily.yaml").write_text(DAILY, encoding="utf-8")
    pq.write_table(clicks(2400, seed=1), folder / "clicks.parquet", row_group_size=600)
    pa.csv.write_csv(clicks(60, seed=2), folder / "new.csv")
    for number in range(3):
        day = folder / "logs" / f"day={date(2026, 1, 1) + timedelta(days=number)}"
        day.mkdir(parents=True)
        pq.write_table(clicks(600, seed=10 + number).drop(["time", "liked"]), day / "part.parquet")
    rows = clicks(3, seed=2).drop(["click", "liked"]).to_pylist()
    (folder / "rows.json").write_text(json.dumps(rows, default=str), encoding="utf-8")


def clicks(rows: int, seed: int) -> pa.Table:
    """Draw clicks that depend on the user and the price."""
    draw = np.random.default_rng(seed)
    user, item = draw.zipf(1.3, rows) % 97, draw.integers(0, 50, rows)
    price = draw.gamma(2.0, 10.0, rows).round(2)
    click = draw.random(rows) < 1 / (1 + np.exp(2 - (user % 7) / 2 + price / 40))
    liked = click & (draw.random(rows) < 0.4)
    moments = np.datetime64("2026-01-01T00:00:00") + np.arange(rows).astype("timedelta64[m]")
    return pa.table(
        {
            "time": pa.array(moments, pa.timestamp("s")),
            "user": [f"u{n}" for n in user] if seed < 10 else user,
            "item": [f"i{n}" for n in item] if seed < 10 else item,
            "price": price,
            "click": click.astype(np.int8),
            "liked": liked.astype(np.int8),
        }
    )
