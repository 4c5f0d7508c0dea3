"""Score rows with a model that ``hotbed export`` wrote. It needs torch and NumPy, but not hotbed.

It supports pooled features of tables that are not dynamic. Ids must be in range, and bags must have no limits.
"""

import json
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import embedding_bag

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "int8": "int8"}


def mix(x):
    """Return a hash of a 64-bit integer."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def row_of(value, rows):
    """Return the row of an integer, a text or None (a missing value) in a table with hashed ids."""
    text = value.encode() if isinstance(value, str) else b""
    words = [len(text), *np.frombuffer(text + bytes(-len(text) % 8), "<u8").tolist()]
    words = words if isinstance(value, str) else [value]
    return 0 if value is None else 1 + reduce(lambda h, word: mix(h ^ word % 2**64), words, 0) % (rows - 1)


class Model:
    """An exported model in the directory ``place``. Set ``encoded`` if rows are prepared ids and numbers."""

    def __init__(self, place, encoded=False):
        self.place, self.about = place, json.loads(Path(place, "manifest.json").read_text())
        assert encoded or "preparation" not in self.about["encoder"], "rows must be encoded as hotbed prepare does"
        self.program = torch.export.load(f"{place}/{self.about['dense']['file']}").module()

    def vectors(self, table, ids):
        """Read the float32 vectors ``[n, dim]`` of rows ``[n]`` of a table."""
        dim, dtype, wide = table["dim"], getattr(torch, DTYPES[table["dtype"]]), ids < table["fp32_rows"]
        stored = np.memmap(f"{self.place}/{table['file']}", np.uint8, "r", shape=(table["rows"], table["record_bytes"]))
        records = torch.tensor(stored[ids])
        values = records[:, : dim * dtype.itemsize].contiguous().view(dtype).float()
        if dtype == torch.int8:
            exponents = records[:, dim : dim - (-dim // 128)].view(dtype)
            values = torch.ldexp(values, exponents.repeat_interleave(128, 1)[:, :dim])
        if wide.any():
            values[wide] = records[wide, : 4 * dim].view(torch.float32)
        return values

    def scores(self, samples):
        """Return the scores ``[B, T]`` of samples, which map columns to values."""
        columns, kinds = self.about["encoder"]["schema"], self.about["encoder"]["id_kinds"]
        rows, numbers, given = {c["name"]: c["rows"] for c in columns["sparse"]}, [], {}
        for entry in (c if isinstance(c, dict) else {"name": c} for c in columns["dense"]):
            x = np.array([s[entry["name"]] for s in samples], np.float64)  # None is NaN
            if "rule" not in entry:  # else the program normalizes it
                x = np.nan_to_num(np.arcsinh((x - entry["center"]) / entry["scale"]) if "scale" in entry else x)
            numbers.append(x)
        for name, feature in self.about["features"].items():
            column, mode = feature["feature"], feature["pooling"]
            bags = [s[column] if isinstance(s[column], list) else [s[column]] for s in samples]
            ids = np.array([row_of(v, rows[column]) if column in kinds else v for bag in bags for v in bag], np.int64)
            starts = torch.tensor([0, *map(len, bags)]).cumsum(0)[:-1]
            found = self.vectors(self.about["tables"][feature["table"]], ids)
            given[name] = embedding_bag(torch.arange(len(ids)), found, starts, mode=mode)
        dtype = getattr(torch, self.about["dense"]["dtype"] or "float32")
        dense = torch.tensor(np.stack(numbers, 1), dtype=dtype) if numbers else None
        return self.program(dense, given).double().sigmoid()
