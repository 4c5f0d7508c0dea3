"""Compare all sides: workers take turns, then ratios are printed and written. See the package's docstring.

python -m benchmarks.peers [--only PART] [--rounds 5] [--rows N] [--json FILE] [--quick]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import runner
from benchmarks.peers import report
from benchmarks.peers.worker import batches_needed
from benchmarks.peers.workloads import HUGE_PAGES, STEPS, WORKLOADS, Side, Workload, sides_of, tiny, write_ids
from benchmarks.process_memory import kib_of
from hotbed.files import write_json
from hotbed.large_tensors import HUGE_PAGES as HUGE_PAGE_SETTING
from hotbed.train.numerics import bf16_instructions

SECTIONS = {
    "numerics": (),  # first, because the speed of other results would mean nothing
    "embedding": ("embedding", "multi_hot", "narrow"),
    "step": ("step",),
    "world2": ("world2", "world2_uniform", "world2_step"),
}
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Variables that limit the instruction sets."""
DISTURBED, ATTEMPTS = 0.1, 3
"""A worker runs again if its `disturbance` is larger, up to this number of attempts. The least disturbed one counts."""


def run_worker(kind: str, side: Side, workload: Workload, ids: Path) -> dict[str, float]:
    """Measure one side once, in a new process per rank."""
    tables = 2 if kind == "step" and workload.ranks == 1 else 1  # plain PyTorch copies hotbed's
    needed = tables * workload.table_bytes + (4 << 30 if workload.table_bytes > 1 << 30 else 0)
    free = 1024 * kib_of(Path("/proc/meminfo"))["MemAvailable"]
    if free < needed:
        raise SystemExit(f"{workload} needs {needed >> 30} GiB of memory: got {free >> 30} GiB. Free memory.")
    env = {name: value for name, value in os.environ.items() if name != HUGE_PAGES} | side.environment
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(port)}
    where |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(workload.ranks))
    command = [sys.executable, "-m", "benchmarks.peers.worker", kind, side.module, json.dumps(asdict(workload))]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen(
            [*command, json.dumps(side.options), str(ids)],
            cwd=runner.ROOT,
            env=env | ({**where, "RANK": str(i), "LOCAL_RANK": str(i)} if workload.ranks > 1 else {}),
            text=True,
            **pipes,
        )
        for i in range(workload.ranks)
    ]
    return json.loads(runner.outputs_of_ranks(processes)[0].splitlines()[-1])


def disturbance(workload: Workload, run: Mapping[str, float]) -> float:
    """Return the share of time in which threads waited for a core, or for several ranks that others had one."""
    return run["others_share" if workload.ranks > 1 else "cpu_wait_share"]


def undisturbed(kind: str, side: Side, workload: Workload, ids: Path, attempts: int) -> dict[str, float]:
    """Measure one side until no other process disturbs it. The rule is the same for all sides."""
    tried: list[dict[str, float]] = []
    while len(tried) < attempts and all(disturbance(workload, run) > DISTURBED for run in tried):
        tried.append(run_worker(kind, side, workload, ids))
    return {**min(tried, key=lambda run: disturbance(workload, run)), "attempts": len(tried)}


def alternate(section: str, workload: Workload, rounds: int, attempts: int) -> list[dict[str, dict[str, float]]]:
    """Measure all sides in turns on the same ids, and return what they reported in each round."""
    kind = "step" if section in STEPS else "embedding"
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.npy"
        write_ids(workload, batches_needed(kind, workload), ids)
        turns = {
            name: lambda side=side: undisturbed(kind, side, workload, ids, attempts)
            for name, side in sides_of(section).items()
        }
        found = runner.in_turns(turns, rounds, title=section)
    return [{name: of_side[i] for name, of_side in found.items()} for i in range(rounds)]


def main() -> int:
    """Run the chosen parts. The exit status is 1 if hotbed and FBGEMM disagree."""
    parser = runner.arguments(__doc__)
    parser.add_argument("--only", choices=SECTIONS, help="One part (default: all).")
    parser.add_argument("--rounds", type=int, default=5, help="Alternations of the sides.")
    parser.add_argument("--rows", type=int, help="Rows of the tables of `embedding`, if 13 GB do not fit into memory.")
    parser.add_argument("--quick", action="store_true", help="Tiny sizes, to see that everything runs.")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("fbgemm-gpu-cpu", "torchrec", "numba")}
    limited = {name: os.environ[name] for name in LIMITS if name in os.environ}
    huge_pages = HUGE_PAGE_SETTING.read_text(encoding="utf-8").strip() if HUGE_PAGE_SETTING.exists() else "none"
    about = runner.about(
        rounds=args.rounds, quick=args.quick, limited_to=limited, transparent_hugepage=huge_pages, **versions
    )
    data, passed = runner.read_json(args.json), True

    for part in (args.only,) if args.only else SECTIONS:
        if part == "numerics":
            from benchmarks.peers import numerics  # imports FBGEMM

            data["numerics"] = numerics.run()
            data.setdefault("measured", {})["numerics"] = about
            if args.json is not None:
                write_json(args.json, data)
            passed = data["numerics"]["passed"]
            cases = data["numerics"]["cases"].items()
            keys = ("outcome", "max_abs_diff", "why")
            rows = [{"optimizer": name} | {key: case.get(key, "") for key in keys} for name, case in cases]
            runner.show("the same numbers as FBGEMM?", rows)
        for section in SECTIONS[part]:
            workload = tiny(WORKLOADS[section]) if args.quick else WORKLOADS[section]
            if section == "embedding" and args.rows:
                workload = replace(workload, rows=args.rows)
            if not bf16_instructions(torch.device("cpu")):
                workload = replace(workload, precisions=("fp32",))
            rounds = alternate(section, workload, args.rounds, 1 if args.quick else ATTEMPTS)
            found = report.summary(section, rounds, workload.batch)
            data.setdefault("raw", {})[section] = rounds
            data[section], threads = found, 1 if workload.ranks > 1 else about["threads"]
            data.setdefault("measured", {})[section] = about | {"threads": threads, "workload": asdict(workload)}
            if args.json is not None:
                write_json(args.json, data)
            report.show(section, found, rounds, str(workload))
            most = max(disturbance(workload, side) for of_round in rounds for side in of_round.values())
            print(f"disturbed for up to {most:.0%} of the time; more than a few percent means noise")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
