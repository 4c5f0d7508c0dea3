"""The GPU suite runs from end to end without a GPU, tiny, so that a GPU's time is never spent on its typos."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu import OPTIMIZERS as MEASURED
from benchmarks.gpu import Sizes
from hotbed.bench.ops import rule_step
from hotbed.bench.options import OpsOptions
from hotbed.optim import COMMON
from hotbed.optim.sgd import MOMENTUM, PLAIN
from hotbed.specs import RowDtype
from tests.optim_cases import OPTIMIZERS

ROOT = Path(__file__).parents[2]


def test_no_optimizer_and_no_option_is_missing():
    options = OpsOptions(tables=1, rows=1, dim=4, device="cpu")
    steps = {name: rule_step(options, torch.device("cpu"), make) for name, make in MEASURED.items()}
    rules = {kind.rule for kind in OPTIMIZERS if hasattr(kind, "rule")}
    assert {step.rule for step in steps.values()} == rules | {PLAIN, MOMENTUM}
    assert set().union(*(step.uses for step in steps.values())) == {*COMMON} - {"lr"}
    decoupled = {kind.rule for kind in OPTIMIZERS if kind.weight_decay_mode == "decoupled"}
    assert decoupled == {step.rule for step in steps.values() if "decay" in step.uses}


@pytest.mark.parametrize(("tiny", "budgets"), [("1", [math.inf, math.inf]), ("0", [150, 40])])
def test_tiny_parts_have_all_the_time_they_take(tmp_path, monkeypatch, tiny, budgets):
    pytest.importorskip("triton")
    given: list[float] = []

    def run(command: list[str], budget_s: float, env: dict[str, str]) -> tuple[str, float]:
        given.append(budget_s)
        return "ok", 0.0

    sizes = Sizes.choose()
    monkeypatch.setattr(gpu_suite, "run", run)
    monkeypatch.setattr(Sizes, "choose", lambda: replace(sizes, tiny=tiny == "1"))
    assert gpu_suite.main(tmp_path, ["bandwidth", "determinism"]) == 0
    assert given == budgets


@pytest.mark.full
def test_tiny_suite(tmp_path):
    pytest.importorskip("triton")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "OUT": str(tmp_path), "HOTBED_TINY": "1", "PATH": path}
    done = subprocess.run(
        ["bash", "benchmarks/gpu_suite.sh"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / "gpu_suite.json").read_text())
    about = summary["environment"]
    assert about["tiny"] and "mean nothing" in about["note"]
    assert about["torch"] and about["triton"]
    parts = summary["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "ok")
    assert parts["tests"]["results"]["tests"] > 0 and parts["tests"]["results"]["failed"] == []
    assert all(r["equal"] for r in parts["determinism"]["results"])
    bandwidth, tiers = parts["bandwidth"]["results"], parts["tiers"]["results"]
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
