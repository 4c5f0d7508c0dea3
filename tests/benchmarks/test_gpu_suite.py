"""The GPU suite runs from end to end without a GPU, tiny, so that a GPU's time is never spent on its typos."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hotbed.bench.ops import rule_step
from hotbed.bench.options import OpsOptions

from benchmarks import gpu_suite
from benchmarks.gpu import OPTIMIZERS as MEASURED
from hotbed.optim import COMMON
from hotbed.optim.sgd import MOMENTUM, PLAIN
from hotbed.specs import RowDtype
from tests.optim_cases import OPTIMIZERS

ROOT = Path(__file__).parents[2]
UNNEEDED = (
    *("yaml", "pyarrow", "polars", "pydantic", "jsonargparse", "hypothesis", "xdist", "moto", "boto3", "obstore"),
    *("scipy", "optuna", "matplotlib", "tensorboard", "pandas"),
)
"""What is installed with hotbed or its tests, and the suite does without."""


def test_no_optimizer_and_no_option_is_missing():
    options = OpsOptions(tables=1, rows=1, dim=4, device="cpu")
    steps = {name: rule_step(options, torch.device("cpu"), make) for name, make in MEASURED.items()}
    rules = {kind.rule for kind in OPTIMIZERS if hasattr(kind, "rule")}
    assert {step.rule for step in steps.values()} == rules | {PLAIN, MOMENTUM}
    assert set().union(*(step.uses for step in steps.values())) == {*COMMON} - {"lr"}
    decoupled = {kind.rule for kind in OPTIMIZERS if kind.weight_decay_mode == "decoupled"}
    assert decoupled == {step.rule for step in steps.values() if "decay" in step.uses}


@pytest.mark.parametrize(("tiny", "budgets"), [("1", [math.inf, math.inf]), ("0", [120, 60])])
def test_tiny_parts_have_all_the_time_they_take(tmp_path, monkeypatch, tiny, budgets):
    pytest.importorskip("triton")
    given: list[float] = []

    def run(command: list[str], budget_s: float, env: dict[str, str]) -> tuple[str, float, list[str]]:
        given.append(budget_s)
        return "ok", 0.0, []

    monkeypatch.setattr(gpu_suite, "run", run)
    monkeypatch.setattr(gpu_suite, "environment", lambda summary: (tiny == "1", False))
    assert gpu_suite.main(tmp_path, ["bandwidth", "determinism"]) == 0
    assert given == budgets


BLOCK = """
import importlib.util
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


sys.meta_path.insert(0, Block())
found = importlib.util.find_spec  # by which others ask whether a package is there
importlib.util.find_spec = lambda name, of=None: None if name.split(".")[0] in BLOCKED else found(name, of)
"""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """Environment of processes that do not find these packages, nor pytest's plugins among them."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(f"BLOCKED = {packages!r}\n{BLOCK}", encoding="utf-8")
    return {"PYTHONPATH": str(folder / "path"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def suite(out: Path, *parts: str, **more: str) -> tuple[int, dict[str, Any], str]:
    """Run the suite, tiny; its exit status, what it has written, and its output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "OUT": str(out), "HOTBED_TINY": "1", "PATH": path, **more}
    command = ["bash", "benchmarks/gpu_suite.sh", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, json.loads((out / "gpu_suite.json").read_text()), done.stdout + done.stderr


def test_what_lacks_a_package_is_skipped_and_says_which(tmp_path: Path) -> None:
    """No part of ours needs more; one that does is told from one that fails."""
    status, summary, shown = suite(tmp_path, "census", **without(tmp_path, "numba"))
    part = summary["parts"]["census"]
    assert status == 1 and part["status"] == "skipped", shown[-2000:]
    assert "  needs the package numba, which is not here" in part["last_lines"]


def test_parts_can_be_imported_without_what_they_do_not_need(tmp_path: Path) -> None:
    """The whole suite without these packages is a test of its own, which takes longer."""
    modules = [gpu_suite.FUNCTIONS.get(part, (f"benchmarks.gpu_{part}",))[0] for part in gpu_suite.PARTS]
    path = os.pathsep.join([without(tmp_path, *UNNEEDED)["PYTHONPATH"], str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-c", "\n".join(f"import {module}" for module in modules)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_results_are_written_whatever_fails(tmp_path: Path) -> None:
    """Where torch itself cannot be imported, the environment says so and each part has how it ended."""
    status, summary, shown = suite(tmp_path, "step", "nonsense", "census", **without(tmp_path, "torch"))
    assert status == 1, shown
    assert "torch" in summary["environment"]["error"]
    assert {name: part["status"] for name, part in summary["parts"].items()} == {
        "step": "skipped",
        "nonsense": "failed",
        "census": "skipped",
    }
    assert "needs the package torch" in " ".join(summary["parts"]["step"]["last_lines"])


def test_correctness_needs_no_more_than_it_says(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    status, summary, shown = suite(tmp_path, "tests", **without(tmp_path, *UNNEEDED))
    assert status == 0, shown[-3000:]
    assert summary["parts"]["tests"]["results"]["tests"] > 0


@pytest.mark.full
def test_tiny_suite(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    status, summary, shown = suite(tmp_path, **without(tmp_path, *UNNEEDED))
    assert status == 0, shown[-4000:]
    about = summary["environment"]
    assert about["tiny"] and "mean nothing" in about["note"]
    assert about["torch"] and about["triton"]
    parts = summary["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "ok")
    assert parts["tests"]["results"]["tests"] > 0 and parts["tests"]["results"]["failed"] == []
    assert all(r["equal"] for r in parts["determinism"]["results"])
    bandwidth, tiers = parts["bandwidth"]["results"], parts["tiers"]["results"] + parts["t0"]["results"]
    assert {r["kernel"] for r in bandwidth} == {
        "copy", "initial_values", "lookup", "lookup_to_bf16", "weight_gradient", "occurrences", "group",
        "interaction", "interaction_backward", *(f"update_{name}" for name in MEASURED),
    }  # fmt: skip
    assert {r["kernel"] for r in tiers} == {
        "copy", "copy_to_device", "copy_from_device", "in_place", "step",
        "cache_find", "cache_take", "cache_use", "cache_read", "cache_write",
    }  # fmt: skip
    steps = {r["placement"]: r for r in tiers if r["kernel"] == "step"}
    assert set(steps) == {"in_place", "host_cached", "disk_cached"}
    assert all(r["steps_per_s"] > 0 and (r["misses"] > 0) == (name != "in_place") for name, r in steps.items())
    updates = {(r["kernel"], r["dtype"]) for r in bandwidth if r["kernel"].startswith("update")}
    assert updates == {(f"update_{name}", dtype) for name in MEASURED for dtype in get_args(RowDtype)}
    of_kernels = [r for r in [*bandwidth, *tiers] if r["kernel"] not in ("copy", "step")]
    assert all(r["bytes"] > 0 and r["median_s"] > 0 and r["gb_s"] > 0 and r["limit_s"] > 0 for r in of_kernels)
    assert {r["limit"] for r in of_kernels} == {"gather", "scatter", "copy", "copy_to_device"}
    census = {found["case"]: found for found in parts["census"]["results"]}
    assert set(census) == {"rowwise_adagrad", "adam, lr moves", "ragged", "int8"}
    assert all(found["waits"] == [] for found in census.values())
    for found in parts["step"]["results"]:
        assert found["step"]["samples_per_s"] > 0 and found["roofline"]["median_share"] > 0
        assert all(part["median_s"] > 0 for part in found["parts"])
