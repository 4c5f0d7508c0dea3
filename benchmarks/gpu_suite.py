"""Find out in a few minutes on a GPU whether it is right, whether it is the same twice, and how fast it is.

Parts run one after the other, each in a process of its own with its own time budget (580 s together), and
``gpu_suite.json`` is written after each, so a part that hangs, crashes or runs out of time takes nothing else with it.
Needs torch, triton, numba, numpy, pytest and hypothesis; no network. Without a CUDA device, or with ``HOTBED_TINY=1``,
everything runs tiny and to its end, whatever time it takes; timings then mean nothing, and the JSON says so.

    OUT=results bash benchmarks/gpu_suite.sh [step] [census] [bandwidth] [tiers] [determinism] [tests]
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import INCOMPLETE, Sizes

ROOT = Path(__file__).resolve().parents[1]
TEST_FOLDERS = ("ops", "store", "embed", "nn", "equivalence")
PARTS = {"step": 85, "census": 45, "bandwidth": 150, "tiers": 120, "determinism": 40, "tests": 140}
"""Seconds of each part."""


def environment(sizes: Sizes) -> dict[str, Any]:
    """What was measured, on what."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    cuda = sizes.device.type == "cuda"
    return {
        "commit": git.stdout.strip() or None,
        "tiny": sizes.tiny,
        "interpreted": not cuda,
        "note": "timings mean nothing: tiny sizes" + ("" if cuda else ", Triton's interpreter") if sizes.tiny else None,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "triton", "numba", "numpy")},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def run(command: list[str], budget_s: float, env: dict[str, str]) -> tuple[str, float]:
    """Run a part; how it ended (``ok``, ``incomplete``, ``failed``, ``timed out``) and its seconds."""
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        status = {0: "ok", INCOMPLETE: "incomplete"}.get(process.wait(budget_s), "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = "timed out"
    return status, time.monotonic() - start


def test_command(sizes: Sizes, report: Path) -> list[str]:
    """Pytest over the folders that exist; in parallel on a GPU, where most of the time is compiling kernels."""
    folders = [f"tests/{name}" for name in TEST_FOLDERS if (ROOT / "tests" / name).is_dir()]
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider"]
    if sizes.tiny:
        return [*command, "tests/ops/test_lookup.py", "-k", "triton and one_hot and 16"]
    # Where there is no GPU, the same tests run with the other backends.
    command += ["-k", "not reference and not (ops and cpu)"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(os.cpu_count() or 1, 16))]
    return [*command, *folders]


def read_tests(report: Path) -> dict[str, Any]:
    """Counts of a JUnit report, and the names of what failed."""
    suites = ET.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    failed: list[str] = []
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, 0))
        failed += [
            f"{case.get('classname')}.{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    return {**counts, "failed": failed}


def read_json(report: Path) -> Any:
    return json.loads(report.read_text())


def main(out: Path, parts: list[str]) -> int:
    """Run the parts; 0 if all of them ended well."""
    out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes.choose()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PYTHONUNBUFFERED": "1"}
    if sizes.device.type == "cpu":
        env["TRITON_INTERPRET"] = "1"
    summary: dict[str, Any] = {"environment": environment(sizes), "parts": {}}
    readers: dict[str, Callable[[Path], Any]] = {"tests": read_tests}
    for part in parts:
        budget = math.inf if sizes.tiny else PARTS[part]
        report = out / (f"{part}.xml" if part == "tests" else f"{part}.json")
        report.unlink(missing_ok=True)
        print(f"== {part}" if sizes.tiny else f"== {part} (at most {budget} s)", flush=True)
        if part == "tests":
            command = test_command(sizes, report)
        else:
            # The last seconds of a budget are for a measurement that is still running.
            command = [sys.executable, "-m", f"benchmarks.gpu_{part}", str(report), str(budget - 20)]
        status, seconds = run(command, budget, env)
        results = readers.get(part, read_json)(report) if report.exists() else None
        summary["parts"][part] = {"status": status, "seconds": round(seconds, 1), "results": results}
        (out / "gpu_suite.json").write_text(json.dumps(summary, indent=1))
        print(f"== {part}: {status} after {seconds:.0f} s", flush=True)
    return 0 if all(p["status"] == "ok" for p in summary["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(os.environ.get("OUT", "gpu_results")).resolve(), sys.argv[1:] or list(PARTS)))
