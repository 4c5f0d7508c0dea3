"""Measure, print tables, and write ``--json``: ``python -m benchmarks.kernels ops | step``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.kernels.ops import bench_ops
from benchmarks.kernels.options import OPTIONS, OpsOptions, StepOptions
from benchmarks.kernels.step import bench_step
from hotbed.cli.arguments import Command, Parser, add_json, add_parameters
from hotbed.errors import HotbedError
from hotbed.files import write_json
from hotbed.machine import fit_threads
from hotbed.train.runs.report import environment


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_commands(
        "command", {name: Command(options.__doc__ or "", partial(_add, options)) for name, options in OPTIONS.items()}
    )
    try:
        given = vars(parser.parse_args(sys.argv[1:] if argv is None else argv))
        if given["command"] is None:
            parser.error(f"no command: got none, expected one of {', '.join(OPTIONS)}")
        command, file = given.pop("command"), given.pop("json")
        found = bench(command, OPTIONS[command](**given))
    except HotbedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if file is not None:
        write_json(Path(file), found)


def _add(options: type[OpsOptions], parser: Parser) -> None:
    add_parameters(parser, options)
    add_json(parser)


def bench(command: str, options: OpsOptions) -> dict[str, Any]:
    fit_threads()

    def print_stage(stage: str) -> None:
        print(f"{stage} …", file=sys.stderr)

    found = bench_step(options, print_stage) if isinstance(options, StepOptions) else bench_ops(options, print_stage)
    (print_step if isinstance(options, StepOptions) else print_ops)(found)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    here = runner.about(numba=version("numba"), triton=triton) | environment(options.torch_device())
    print(f"{here['hardware']}, {here['threads']} threads; hotbed {here['hotbed']}, torch {here['torch']}")
    return {"command": command, "environment": here, "settings": options.settings(), **found}


def print_ops(found: Mapping[str, Any]) -> None:
    runner.show(f"streaming copy {found['copy_gb_s']:,.1f} GB/s", [_row(k) for k in found["kernels"]])
    fp32 = {k["kernel"]: k["median_s"] for k in found["dtypes"] if k["dtype"] == "fp32"}
    rows = [
        {"rows": k["dtype"], **_row(k), "of fp32": k["median_s"] / fp32[k["kernel"]] if fp32 else None}
        for k in found["dtypes"]
    ]
    runner.show("dtypes", rows)
    for dtype, reason in found["dtypes_left_out"].items():
        print(f"{dtype} rows were left out: {reason}")


def _row(k: Mapping[str, Any]) -> dict[str, object]:
    return {
        "kernel": k["kernel"],
        "ids": k["ids"] or "",
        "distinct rows": k["distinct_rows"],
        "ms": 1e3 * k["median_s"],
        "GB/s": k["gb_s"],
        "limit": k["limit"],
        "its GB/s": k["bytes"] / k["limit_s"] / 1e9,
        "reached": f"{k['median_share']:.0%}",
        "of copy": f"{k['share_of_copy']:.0%}",
    }


def print_step(found: Mapping[str, Any]) -> None:
    step, roofline = found["step"], found["roofline"]
    rows = [
        {
            "part": part["part"],
            "ms": 1e3 * part["median_s"],
            "of the step": f"{part['median_s'] / step['median_s']:.0%}",
        }
        for part in found["parts"]
    ]
    runner.show(f"step: {1e3 * step['median_s']:.2f} ms, {step['samples_per_s']:,.0f} samples/s", rows)
    limits = " + ".join(f"{1e3 * roofline[f'{name}_s']:.2f} {name}" for name in ("matmul", "gather", "scatter"))
    print(f"limit: {limits} ms; reached: {roofline['median_share']:.0%}")


if __name__ == "__main__":
    main()
