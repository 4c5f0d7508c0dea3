"""Time products of fully connected layers by torch and by oneDNN: ``python -m benchmarks.linear [--json FILE]``.

For each shape the forward product and the gradients of input and weight, float32, as `hotbed.nn.linear` computes them,
both libraries in turns in one process: median GFLOP/s of each and the median ratio. This is what its limits were
chosen by.
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

from hotbed.files import write_json
from hotbed.nn.linear import _weight_gradient, faster_library, has_onednn_linear, onednn_product
from hotbed.train.report import environment

SHAPES = [
    *((13, 512), (512, 256), (256, 128), (480, 1024), (1024, 1024), (1024, 512), (256, 1)),  # NVIDIA's DLRM
    *((4, 64), (16, 256), (64, 256), (128, 256), (256, 64), (256, 16), (256, 8)),
]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not has_onednn_linear():
        raise SystemExit("this build of torch has no oneDNN, so there is nothing to compare")
    results = [measure(batch, *shape, args.repeats) for batch in args.batches for shape in SHAPES]
    here = environment(torch.device("cpu"))
    table = Table("batch", "layer", "forward", "input's gradient", "weight's gradient", title=here["hardware"])
    for r in results:
        cells = [
            f"{r[f'{p}_torch']:.0f} → {r[f'{p}_onednn']:.0f} ({r[f'{p}_ratio']:.2f})"
            for p in ("forward", "input", "weight")
        ]
        table.add_row(f"{r['batch']:,}", f"{r['inputs']} → {r['outputs']}", *cells)
    Console(width=120).print(table, "GFLOP/s by torch → by oneDNN (times as fast)", f"here: {faster_library()}")
    if args.json:
        write_json(args.json, {"measured": {**here, "threads": torch.get_num_threads()}, "results": results})


def measure(batch: int, inputs: int, outputs: int, repeats: int) -> dict[str, Any]:
    """GFLOP/s of one layer's three products."""
    x, weight, bias = torch.randn(batch, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    grad = torch.randn(batch, outputs)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (
            lambda: torch.nn.functional.linear(x, weight, bias),
            lambda: onednn_product(x, weight, bias),
        ),
        "input": (lambda: grad @ weight, lambda: onednn_product(grad, weight.t())),
        "weight": (lambda: grad.t() @ x, lambda: _weight_gradient(grad, x)),
    }
    found: dict[str, Any] = {"batch": batch, "inputs": inputs, "outputs": outputs}
    gflop = 2e-9 * batch * inputs * outputs
    for name, pair in ways.items():
        times = [tuple(_seconds(way) for way in pair) for _ in range(1 + repeats)][1:]
        for library, seconds in zip(("torch", "onednn"), zip(*times, strict=True), strict=True):
            found[f"{name}_{library}"] = gflop / statistics.median(seconds)
        found[f"{name}_ratio"] = statistics.median(a / b for a, b in times)
    return found


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
