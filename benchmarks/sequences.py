"""Time histories against ``nn.Embedding`` on padded ids: ``python -m benchmarks.sequences [--json FILE]``.

Samples have up to ``--length`` items, uniformly; all sides give ``[B, L, D]`` of each history, and a step adds backward
and SGD. *plain* looks every place up, padding too, and has sparse gradients; *jagged* looks ids up and pads the vectors
(`Embeddings.padded`); *padded* looks them up into padded memory (``Feature(padding="right")``). All sides take turns in
one process; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hotbed as hb
from hotbed.files import write_json
from hotbed.train.report import environment

SIDES = ("plain", "jagged", "padded")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--histories", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    results = [measure(n, args.samples, args.length, args.dim, args.rows, args.rounds) for n in args.histories]
    here = environment(torch.device("cpu"))
    table = Table("histories", "", *SIDES, "plain ÷ padded", title=here["hardware"])
    for result in results:
        for what in ("lookup", "step"):
            times = [statistics.median(result[what][side]) for side in SIDES]
            table.add_row(str(result["histories"]), what, *(f"{t:.1f} ms" for t in times), f"{times[0] / times[2]:.2f}")
    Console(width=120).print(table)
    if args.json:
        measured = {**here, "threads": torch.get_num_threads(), **{k: v for k, v in vars(args).items() if k != "json"}}
        write_json(args.json, {"measured": measured, "results": results})


def measure(histories: int, samples: int, length: int, dim: int, rows: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of lookups and steps of so many histories, by side."""
    names = [f"h{i}" for i in range(histories)]
    ids = {name: _bags(samples, length, rows, i) for i, name in enumerate(names)}
    gradients = {name: torch.randn(samples, length, dim) for name in names}
    sides = {"plain": _plain(ids, length, dim, rows)}
    sides |= {side: _ours(ids, length, dim, rows, side == "padded") for side in SIDES[1:]}
    expected = sides["jagged"][0]()
    for name, vectors in sides["padded"][0]().items():
        assert torch.equal(vectors, expected[name])
    found: dict[str, dict[str, list[float]]] = {w: {side: [] for side in SIDES} for w in ("lookup", "step")}

    def step(look_up: Callable[[], dict[str, Tensor]], optimizer: torch.optim.Optimizer) -> None:
        vectors = look_up()
        torch.autograd.backward(list(vectors.values()), [gradients[name] for name in vectors])
        optimizer.step()
        optimizer.zero_grad()

    for turn in range(rounds + 2):
        for side, (look_up, optimizer) in sides.items():
            with torch.no_grad():
                times = {"lookup": _ms(look_up)}
            times["step"] = _ms(lambda pair=(look_up, optimizer): step(*pair))
            for what, ms in times.items():
                found[what][side] += [ms] * (turn >= 2)
    return {"histories": histories, **found}


def _bags(samples: int, length: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    offsets = torch.zeros(samples + 1, dtype=torch.int64)
    offsets[1:] = torch.randint(0, length + 1, (samples,), generator=draw).cumsum(0)
    return torch.randint(0, rows, (int(offsets[-1]),), generator=draw), offsets


_Side = tuple[Callable[[], dict[str, Tensor]], torch.optim.Optimizer]


def _plain(bags: dict[str, tuple[Tensor, Tensor]], length: int, dim: int, rows: int) -> _Side:
    tables = nn.ModuleDict({name: nn.Embedding(rows + 1, dim, padding_idx=0, sparse=True) for name in bags})
    padded: dict[str, Tensor] = {}
    for name, (ids, offsets) in bags.items():
        padded[name] = torch.zeros(len(offsets) - 1, length, dtype=torch.int64)
        padded[name][torch.arange(length) < offsets.diff()[:, None]] = ids + 1
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.01)
    return lambda: {name: table(padded[name]) for name, table in tables.items()}, optimizer


def _ours(bags: dict[str, tuple[Tensor, Tensor]], length: int, dim: int, rows: int, padded: bool) -> _Side:
    tables = [hb.Table(name, rows=rows, dim=dim) for name in bags]
    how = {"pooling": "none", "max_len": length, "padding": "right" if padded else None}
    model = hb.EmbeddingCollection(tables, [hb.Feature(name, name, **how) for name in bags])

    def look_up() -> dict[str, Tensor]:
        found = model(hb.Jagged.from_dict(bags))
        return {name: found.padded(name)[0] for name in bags}

    return look_up, hb.optim.SGD(model, lr=0.01)


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
