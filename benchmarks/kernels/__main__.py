"""Measure, print tables, and write what ``--json`` asks for: ``python -m benchmarks.kernels ops | step``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numba
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.kernels.ops import bench_ops
from benchmarks.kernels.options import OPTIONS, OpsOptions, StepOptions
from benchmarks.kernels.step import bench_step
from hotbed.cli.arguments import Command, Parser, add_json, add_parameters
from hotbed.errors import HotbedError
from hotbed.files import write_json
from hotbed.machine import fit_threads
from hotbed.train.runs.report import environment

EIGHTHS = " ▏▎▍▌▋▊▉█"
_NUMBERS = ("ms", "GB/s", "of copy", "of fp32")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the figures."""
    parser = Parser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_commands(
        "command", {name: Command(options.__doc__ or "", partial(_add, options)) for name, options in OPTIONS.items()}
    )
    try:
        given = vars(parser.parse_args(sys.argv[1:] if argv is None else argv))
        if given["command"] is None:
            parser.error(f"no command: got none, expected one of {', '.join(OPTIONS)}")
        command, file = given.pop("command"), given.pop("json")
        found = bench(command, given, Console(), Console(stderr=True))
    except HotbedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if file is not None:
        write_json(Path(file), found)


def _add(options: type[OpsOptions], parser: Parser) -> None:
    add_parameters(parser, options)
    add_json(parser)


def bench(what: str, given: Mapping[str, Any], out: Console, progress: Console) -> dict[str, Any]:
    """Measure ``"ops"`` or ``"step"`` with fields of its options, and print."""
    options = OPTIONS[what](**given)
    fit_threads()

    def tell(stage: str) -> None:
        progress.print(f"{stage} …")

    found = bench_step(options, tell) if isinstance(options, StepOptions) else bench_ops(options, tell)
    result = {"command": what, "environment": _environment(options), "settings": options.settings(), **found}
    (print_step if what == "step" else print_ops)(out, result)
    return result


def _environment(options: OpsOptions) -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        **environment(options.place()),
        "threads": torch.get_num_threads(),
        "numba": numba.__version__,
        "triton": triton,
    }


# -- what is printed ----------------------------------------------------------------------------------------------


def bar(share: float, width: int = 10) -> str:
    """A horizontal bar of ``width`` characters, full at 1, in steps of an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + EIGHTHS[rest] * (full < width)).ljust(width)


def print_ops(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `bench_ops` found."""
    table = _table("kernel", "ms", "GB/s", "limit", "its GB/s", "reached", "of copy")
    for k in result["kernels"]:
        share = k["median_share"]
        name = " ".join(filter(None, (k["kernel"], k["ids"])))
        cells = [_ms(k["median_s"]), f"{k['gb_s']:,.1f}", k["limit"], f"{k['bytes'] / k['limit_s'] / 1e9:,.1f}"]
        table.add_row(name, *cells, f"{share:4.0%} {bar(share)}", f"{k['share_of_copy']:.0%}")
    console.print(table)
    _print_dtypes(console, result)
    distinct = {k["ids"]: f"{k['ids']} {k['distinct_rows']:,}" for k in result["kernels"] if k["ids"]}
    console.print(f"streaming copy {result['copy_gb_s']:,.1f} GB/s; distinct rows: {', '.join(distinct.values())}")
    _print_conditions(console, result)


def _print_dtypes(console: Console, result: Mapping[str, Any]) -> None:
    """Rows of every dtype beside float32 ones, each against the limit of its own bytes."""
    found = {(k["kernel"], k["dtype"]): k for k in result["dtypes"]}
    kernels, dtypes = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    table = _table("rows", *(title for kernel in kernels for title in (f"{kernel} ms", "of fp32", "reached")))
    for dtype in dtypes:
        cells: list[str] = []
        for kernel in kernels:
            k, fp32 = found[kernel, dtype], found.get((kernel, "fp32"))
            beside = f"{k['median_s'] / fp32['median_s']:.0%}" if fp32 else "–"
            cells += [_ms(k["median_s"]), beside, f"{k['median_share']:4.0%} {bar(k['median_share'])}"]
        table.add_row(dtype, *cells)
    console.print(table)
    for dtype, reason in result["dtypes_left_out"].items():
        console.print(f"{dtype} rows were left out: {reason}", soft_wrap=True)


def print_step(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `bench_step` found."""
    step, roofline = result["step"], result["roofline"]
    table = _table("part", "ms", "of the step")
    for part in result["parts"]:
        share = part["median_s"] / step["median_s"]
        table.add_row(part["part"], _ms(part["median_s"]), f"{share:4.0%} {bar(share)}")
    console.print(table)
    console.print(
        f"step: {_ms(step['median_s'])} ms ({_ms(step['min_s'])} to {_ms(step['max_s'])}), "
        f"{step['samples_per_s']:,.0f} samples/s"
    )
    limits = " + ".join(f"{_ms(roofline[f'{name}_s'])} {name}" for name in ("matmul", "gather", "scatter"))
    share = roofline["median_share"]
    console.print(f"limit: {limits} ms; reached: {share:.0%} {bar(share)}")
    _print_conditions(console, result)


def _table(*columns: str) -> RichTable:
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS or column.endswith(" ms") else "left")
    return table


def _print_conditions(console: Console, result: Mapping[str, Any]) -> None:
    e, s = result["environment"], result["settings"]
    rows = s["rows"] if isinstance(s["rows"], int) else sum(s["rows"])
    each = "each" if isinstance(s["rows"], int) else "in all"
    console.print(
        f"{s['tables']} tables of {rows:,} rows {each} × {s['dim']} columns {s['dtype']}, batches of "
        f"{s['batch_size']:,} samples × {s['pooling']} {s['ids']} ids, Zipf {s['zipf']}, {s['optimizer']}",
        soft_wrap=True,
    )
    console.print(
        f"{e['hardware']}, {e['threads']} threads; hotbed {e['hotbed']}, torch {e['torch']}; medians of "
        f"{s['repeats']} repeats",
        soft_wrap=True,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


if __name__ == "__main__":
    main()
