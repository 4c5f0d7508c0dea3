"""Find out in a few minutes on a GPU whether it is right, whether it is the same twice, and how fast it is.

Parts run one after the other, each in a process of its own with its own time budget (580 s together), so a part that
hangs, crashes or runs out of time takes nothing else with it. ``gpu_suite.json`` is there from the first moment and is
written again after each part, with the last lines of those that failed. Needs torch ≥ 2.9, triton, numba, numpy,
pydantic, safetensors, rich and pytest; what needs more is skipped, with the reason. No network. Without a GPU, or with
``HOTBED_TINY=1``, everything runs tiny and to its end, whatever time it takes; timings then mean nothing, and the JSON
says so.

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
import traceback
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
"""Where a part is, if it is not ``benchmarks.gpu_PART.main``."""
INCOMPLETE, SKIPPED = 3, 4
"""Exit statuses of a part that had no time for everything, or lacks a package."""
STATUSES = {0: "ok", INCOMPLETE: "incomplete", SKIPPED: "skipped"}
PACKAGES = ("torch", "triton", "numba", "numpy", "pydantic", "safetensors", "rich", "pytest")
LAST_LINES = 40


def environment(summary: dict[str, Any]) -> tuple[bool, bool]:
    """Note what is measured, on what; whether sizes are tiny, and whether there is a CUDA device.

    What cannot be found out is noted as an error, and full sizes are assumed to be wanted.
    """
    about = summary["environment"]
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        about["commit"] = git.stdout.strip() or None
    except OSError as error:
        about["commit"], about["commit_error"] = None, str(error)
    for name in PACKAGES:
        try:
            about[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            about[name] = None
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
    note = "timings mean nothing: tiny sizes" + ("" if cuda else ", Triton's interpreter")
    about.update({"tiny": tiny, "interpreted": not cuda, "note": note if tiny else None})
    return tiny, cuda


def run(command: list[str], budget_s: float, env: dict[str, str]) -> tuple[str, float, list[str]]:
    """Run a part; how it ended (`STATUSES`, ``failed``, ``timed out``), its seconds, its last lines."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, start_new_session=True, text=True, errors="replace", bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    last = deque[str](maxlen=LAST_LINES)

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
    """Name the package that an error is about, if it is that one of others is not there."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or error.name.split(".")[0] in OWN:
        return None
    return error.name


def run_part(part: str, report: Path, budget_s: float) -> int:
    """Run a part in this process; its exit status."""
    module, function = FUNCTIONS.get(part, (f"benchmarks.gpu_{part}", "main"))
    try:
        return int(getattr(importlib.import_module(module), function)(report, budget_s) or 0)
    except ModuleNotFoundError as error:
        if (name := missing_package(error)) is None:
            raise
        print(f"  needs the package {name}, which is not here", flush=True)
        return SKIPPED


def test_command(tiny: bool, report: Path) -> list[str]:
    """Pytest over the folders that exist; in parallel on a GPU, where most of the time is compiling kernels."""
    folders = [f"tests/{name}" for name in TEST_FOLDERS if (ROOT / "tests" / name).is_dir()]
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider"]
    # Of the options in pyproject.toml, some need a plugin.
    command += ["-o", "addopts=", "-q", "--strict-markers", "-p", "benchmarks.gpu_tests"]
    command += ["-p", "no:benchmark"]  # where it is installed, it warns of xdist
    if tiny:
        return [*command, "tests/ops/test_lookup.py", "-k", "triton and one_hot and 16"]
    # Where there is no GPU, the same tests run with the other backends.
    command += ["-k", "not reference and not (ops and cpu)"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(os.cpu_count() or 1, 16)), "--dist", "worksteal"]
    return [*command, *folders]


def read_tests(report: Path) -> dict[str, Any]:
    """Counts of a JUnit report, the names of what failed, and why others were skipped."""
    suites = ET.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    failed: list[str] = []
    reasons: Counter[str] = Counter()
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, 0))
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}.{case.get('name')}")
            if (skipped := case.find("skipped")) is not None:
                text = skipped.text or skipped.get("message") or ""
                reasons[text[text.find("Skipped: ") + 1 and text.find("Skipped: ") + 9 :].strip("')")] += 1
    return {**counts, "failed": failed, "skipped_because": dict(reasons.most_common(20))}


def results_of(part: str, report: Path) -> dict[str, Any]:
    """What a part has written, whole or not."""
    if not report.exists():
        return {"results": None}
    try:
        return {"results": read_tests(report) if part == "tests" else json.loads(report.read_text())}
    except (ValueError, ET.ParseError) as error:  # it was killed while it wrote
        return {"results": None, "results_error": str(error)}


def main(out: Path, parts: list[str]) -> int:
    """Run the parts; 0 if all of them ended well."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = {"started": started, "python": platform.python_version(), "command": sys.argv}
    summary: dict[str, Any] = {"environment": about, "parts": {part: {"status": "not run"} for part in parts}}

    def write() -> None:
        (out / "gpu_suite.json").write_text(json.dumps(summary, indent=1))

    write()
    tiny, cuda = environment(summary)
    write()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *_given_path()])}
    env["PYTHONUNBUFFERED"] = "1"
    if not cuda:
        env["TRITON_INTERPRET"] = "1"
    for part in parts:
        found: dict[str, Any] = {"status": "failed"}
        summary["parts"][part] = found
        try:
            budget = math.inf if tiny else PARTS[part]
            report = out / (f"{part}.xml" if part == "tests" else f"{part}.json")
            report.unlink(missing_ok=True)
            print(f"== {part}" if tiny else f"== {part} (at most {budget} s)", flush=True)
            # The last seconds of a budget are for a measurement that is still running.
            command = [sys.executable, "-m", "benchmarks.gpu_suite", "--part", part, str(report), str(budget - 20)]
            status, seconds, last = run(test_command(tiny, report) if part == "tests" else command, budget, env)
            found.update({"status": status, "seconds": round(seconds, 1), **results_of(part, report)})
            if status != "ok":
                found["last_lines"] = last
            print(f"== {part}: {status} after {seconds:.0f} s", flush=True)
        except Exception as error:  # the rest goes on
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"
        write()
    return 0 if all(p["status"] == "ok" for p in summary["parts"].values()) else 1


def _given_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        sys.exit(run_part(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])))
    sys.exit(main(Path(os.environ.get("OUT", "gpu_results")).resolve(), sys.argv[1:] or list(PARTS)))
