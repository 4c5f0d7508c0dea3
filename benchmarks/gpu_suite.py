"""Check in ten minutes on a GPU whether results are right and repeatable, and measure how fast they are.

Parts run one after the other, each in a process of its own with a time budget (580 s together), so a part that hangs or
crashes stops no other part. ``gpu_suite.json`` is written after each part, with the last lines of parts that failed.
Needs torch ≥ 2.9, triton, numba, numpy, pydantic, safetensors, rich and pytest. Tests that need more are skipped with
the reason. No network. Without a GPU or with ``HOTBED_TINY=1``, sizes are tiny and budgets are off. Times then mean
nothing, and the JSON says so.

    OUT=results bash benchmarks/gpu_suite.sh [step] [census] [bandwidth] [tiers] [t0] [determinism] [tests]
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter, deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWN = ("hotbed", "benchmarks", "tests")
TEST_FOLDERS = ("ops", "store", "embed", "nn", "equivalence")
PARTS = {"step": 115, "census": 75, "bandwidth": 120, "tiers": 60, "t0": 50, "determinism": 60, "tests": 100}
"""Seconds of each part."""
FUNCTIONS = {"t0": ("benchmarks.gpu_tiers", "t0")}
"""Functions of parts that are not ``benchmarks.gpu_PART.main``."""
INCOMPLETE, SKIPPED = 3, 4
"""Exit statuses of a part that had too little time, and of a part that lacks a package."""
STATUSES = {0: "ok", INCOMPLETE: "incomplete", SKIPPED: "skipped"}
PACKAGES = ("torch", "triton", "numba", "numpy", "pydantic", "safetensors", "rich", "pytest")


def environment(about: dict[str, Any]) -> tuple[bool, bool]:
    """Note versions and devices, and return whether sizes are tiny, and whether there is a CUDA device.

    Errors are noted, and full sizes are assumed.
    """
    git = ["git", "rev-parse", "HEAD"]
    about["commit"] = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None
    for name in PACKAGES:
        about[name] = importlib.metadata.version(name) if importlib.util.find_spec(name) else None
    tiny, cuda = os.environ.get("HOTBED_TINY") == "1", False
    try:
        import torch

        cuda = torch.cuda.is_available()
        tiny = tiny or not cuda
        about["cuda"] = torch.version.cuda
        about["gpu"] = torch.cuda.get_device_name() if cuda else None
        about["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory if cuda else None
    except Exception as error:
        about["error"] = f"{type(error).__name__}: {error}"
    note = "times mean nothing: tiny sizes" + ("" if cuda else ", Triton's interpreter")
    about.update({"tiny": tiny, "interpreted": not cuda, "note": note if tiny else None})
    return tiny, cuda


def run(command: list[str], budget_s: float, env: dict[str, str]) -> tuple[str, float, list[str]]:
    """Run a part, and return its status (`STATUSES`, ``failed``, ``timed out``), its seconds and its last lines."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, start_new_session=True, text=True, errors="replace", bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    last = deque[str](maxlen=40)

    def show() -> None:
        for line in process.stdout or ():
            last.append(line.rstrip())
            print(line, end="", flush=True)

    shows = threading.Thread(target=show, daemon=True)
    shows.start()
    try:
        status = STATUSES.get(process.wait(budget_s if budget_s < math.inf else None), "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = "timed out"
    shows.join(10)
    return status, time.monotonic() - start, list(last)


def missing_package(error: BaseException | None) -> str | None:
    """Return the package of others that an error misses, or None for another error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or error.name.split(".")[0] in OWN:
        return None
    return error.name


def run_part(part: str, report: Path, budget_s: float) -> int:
    """Run a part in this process, and return its exit status."""
    module, function = FUNCTIONS.get(part, (f"benchmarks.gpu_{part}", "main"))
    try:
        return int(getattr(importlib.import_module(module), function)(report, budget_s) or 0)
    except ModuleNotFoundError as error:
        if (name := missing_package(error)) is None:
            raise
        print(f"  the package {name} is missing", flush=True)
        return SKIPPED


def test_command(tiny: bool, report: Path) -> list[str]:
    """Return the command of pytest. It is parallel on a GPU, where compiling kernels takes most of the time."""
    folders = [f"tests/{name}" for name in TEST_FOLDERS if (ROOT / "tests" / name).is_dir()]
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider"]
    # Some options in pyproject.toml need a plugin, and pytest-benchmark warns of xdist.
    command += ["-o", "addopts=", "-q", "--strict-markers", "-p", "benchmarks.gpu_tests", "-p", "no:benchmark"]
    if tiny:
        return [*command, "tests/ops/test_lookup.py", "-k", "triton and one_hot and 16"]
    command += ["-k", "not reference and not (ops and cpu)"]  # machines without a GPU run these
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(os.cpu_count() or 1, 16)), "--dist", "worksteal"]
    return [*command, *folders]


def read_tests(report: Path) -> dict[str, Any]:
    """Return the counts of a JUnit report, the failed tests, and the reasons of skipped ones."""
    counts, reasons = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0), Counter[str]()
    failed: list[str] = []
    for suite in ET.parse(report).getroot().iter("testsuite"):
        for key in counts:
            counts[key] += int(suite.get(key, 0))
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}.{case.get('name')}")
            if (skipped := case.find("skipped")) is not None:
                text = skipped.text or skipped.get("message") or ""
                reasons[text.rpartition("Skipped: ")[2].strip("')")] += 1
    return {**counts, "failed": failed, "skipped_because": dict(reasons.most_common(20))}


def results_of(part: str, report: Path) -> dict[str, Any]:
    """Return what a part has written, even if it was killed."""
    if not report.exists():
        return {"results": None}
    try:
        return {"results": read_tests(report) if part == "tests" else json.loads(report.read_text())}
    except (ValueError, ET.ParseError) as error:
        return {"results": None, "results_error": str(error)}


def main(out: Path, parts: list[str]) -> int:
    """Run the parts. The status is 0 if all of them ended well."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about: dict[str, Any] = {"started": started, "python": platform.python_version(), "command": sys.argv}
    summary: dict[str, Any] = {"environment": about, "parts": {part: {"status": "not run"} for part in parts}}
    tiny, cuda = environment(about)
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    env |= {} if cuda else {"TRITON_INTERPRET": "1"}
    for part in parts:
        budget = math.inf if tiny else PARTS[part]
        report = out / (f"{part}.xml" if part == "tests" else f"{part}.json")
        report.unlink(missing_ok=True)
        print(f"== {part} (at most {budget} s)", flush=True)
        # The last seconds of a budget are for a measurement that is still running.
        command = [sys.executable, "-m", "benchmarks.gpu_suite", "--part", part, str(report), str(budget - 20)]
        status, seconds, last = run(test_command(tiny, report) if part == "tests" else command, budget, env)
        found = {"status": status, "seconds": round(seconds, 1), **results_of(part, report)}
        summary["parts"][part] = found | ({} if status == "ok" else {"last_lines": last})
        print(f"== {part}: {status} after {seconds:.0f} s", flush=True)
        (out / "gpu_suite.json").write_text(json.dumps(summary, indent=1))
    return 0 if all(p["status"] == "ok" for p in summary["parts"].values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        sys.exit(run_part(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])))
    sys.exit(main(Path(os.environ.get("OUT", "gpu_results")).resolve(), sys.argv[1:] or list(PARTS)))
