"""Score one row with a model that ``hotbed checkpoint convert RUN PROGRAM --to torch`` wrote. It needs only torch.

python score_program.py PROGRAM '{"user": 17, "item": "pen", "price": null}'
"""

import json
import sys
from bisect import bisect_right
from itertools import product
from pathlib import Path

import torch

BITS = 2**64 - 1


def mix(x: int) -> int:
    """Return a hash of a 64-bit integer."""
    x = x + 0x9E3779B97F4A7C15 & BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & BITS
    return x ^ x >> 31


def hash_of(value: int | str) -> int:
    """Return the hash of an integer or a text."""
    if isinstance(value, int):
        return mix(value & BITS)
    text = value.encode()
    h = mix(len(text))
    for at in range(0, len(text), 8):
        h = mix(h ^ int.from_bytes(text[at : at + 8], "little"))
    return h


def row_of(encoding: str, value, rows: int) -> int:
    """Return the row of a value in a table."""
    if encoding == "rows":
        return value
    if value is None or (encoding == "cross" and None in value):
        return 0
    if encoding == "bucket":
        return value
    h = mix(len(value)) if encoding == "cross" else hash_of(value)
    for part in value if encoding == "cross" else ():
        h = mix(h ^ hash_of(part))
    return 1 + h % (rows - 1)


def listed(value) -> list:
    """Return a list, or a list of a single value."""
    return value if isinstance(value, list) else [value]


def derived(feature: dict, sample: dict):
    """Compute a derived input: a cross, a bucket or a lookup."""
    if "cross" in feature:
        return list(product(*(listed(sample[name]) for name in feature["cross"])))
    if "bucket" in feature:
        x = sample[feature["bucket"]]
        return None if x is None or x != x else 1 + bisect_right(feature["boundaries"], x)
    key, values = sample[feature["lookup"]], dict(feature["table"])
    return [values.get(k) for k in key] if isinstance(key, list) else values.get(key, feature["missing"])


def score(program: Path, sample: dict) -> dict[str, float]:
    """Return the probability of each label for a sample, which maps columns to values."""
    about = json.loads((program / "inputs.json").read_text())
    for feature in about["features"]:
        sample[feature["name"]] = derived(feature, sample)
    dense, ids, weights = [], {}, {}
    for column in about["dense"]:
        name, missing = (column, 0.0) if isinstance(column, str) else (column["name"], float("nan"))
        dense.append(missing if sample[name] is None else float(sample[name]))
    for name, column in about["ids"].items():
        found = [] if sample[name] is None and column["ids"] is None else listed(sample[name])
        rows = [row_of(column["encoding"], value, column["rows"]) for value in found]
        values = torch.tensor(rows, dtype=torch.int64)
        ids[name] = (values, torch.tensor([len(rows)])) if column["ids"] is None else values[None]
        if "weights" in column:
            each = torch.tensor(listed(sample[column["weights"]]) if rows else [], dtype=torch.float32)
            weights[name] = each if column["ids"] is None else each[None]
    numbers = torch.tensor([dense], dtype=getattr(torch, about["dense_dtype"])) if dense else None
    logits = torch.export.load(program / "model.pt2").module()(numbers, ids, *([weights] if weights else []))
    return dict(zip(about["labels"], logits[0].double().sigmoid().tolist(), strict=True))


if __name__ == "__main__":
    print(json.dumps(score(Path(sys.argv[1]), json.loads(sys.argv[2]))))
