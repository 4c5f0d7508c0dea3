"""Tests of the memory estimate of a dry run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hotbed import large_tensors
from hotbed.cli.dry_run import memory_plan
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.train.runs.memory_estimate import HEAP_KEEPS, TAG_BYTES, nbytes_of, peak_of
from tests.cli.cases import Output
from tests.matrix import full

MIB = 1 << 20
MEASURED = """
import atexit, runpy, sys
atexit.register(lambda: print(open("/proc/self/status").read(), file=sys.stderr))
sys.argv[0] = "hotbed"
runpy.run_module("hotbed", run_name="__main__", alter_sys=True)
"""
"""Run hotbed, and print Linux's counts of its memory. The usage that a parent gets begins with the parent's own."""


class Run(NamedTuple):
    """A recipe whose memory is measured."""

    rows: list[int]
    batch_size: int
    samples: int
    bottom: list[int]
    top: list[int]
    memory: dict[str, Any] = {}  # noqa: RUF012
    train: dict[str, Any] = {}  # noqa: RUF012
    plan: str = "table"


SMALL = [64, 64], [64, 1]
RUNS = {
    "memory": Run([1_000_000] * 2, 128, 25_600, *SMALL),
    "host": Run([2_000_000] * 2, 4096, 163_840, *SMALL, memory={"tier": "host", "device_bytes": 64 * MIB}),
    "disk": Run(
        [4_000_000, 2_000_000],
        4096,
        81_920,
        *SMALL,
        memory={"tier": "disk", "device_bytes": 64 * MIB, "cache_rows": 200_000},
    ),
    "large batch": Run([10_000] * 26, 16_384, 65_536, [512, 256, 64], [1024, 512, 1], train={"precision": "fp32"}),
}


def recipe_of(folder: Path, run: Run) -> Recipe:
    folder.mkdir(exist_ok=True)
    (folder / "rows.json").write_text(json.dumps({"rows": run.rows, "dense": 13}))
    init_args = {"train_samples": run.samples, "test_samples": 20_000}
    return Recipe.from_dict(
        {
            "name": "run",
            "data": {
                "source": {"class_path": "hotbed.data.ZipfSource", "init_args": init_args},
                "path": str(folder / "rows.json"),
                "dim": run.bottom[-1],
            },
            "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": run.bottom, "top": run.top}},
            "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
            "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.01}},
            "train": {"batch_size": run.batch_size, "device": "cpu", **run.train},
            "memory": run.memory,
            "parallel": {"plan": run.plan},
        }
    )


def recipe_file(folder: Path, run: Run) -> str:
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe_of(folder, run).to_dict()))
    return str(file)


def started(folder: Path, *args: str, rank: int = 0, ranks: int = 1, port: int = 0) -> subprocess.Popen[str]:
    env = dict(os.environ)
    if ranks > 1:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-c", MEASURED, "train", str(folder / "recipe.json"), *args]
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def peak_bytes(process: subprocess.Popen[str]) -> int:
    """Most memory that a process had, when it is over."""
    assert process.stderr is not None
    with process.stderr as stream:
        said = stream.read()
    assert process.wait() == 0, said
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", said, re.MULTILINE)
    return int(peak) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux counts it")
@pytest.mark.parametrize(
    ("name", "ranks"), [full(name, 1, id=name) for name in RUNS] + [full("memory", 2, id="2 ranks")]
)
def test_the_peak_is_near_the_forecast(tmp_path: Path, name: str, ranks: int) -> None:
    recipe_file(tmp_path, RUNS[name])
    for _ in range(2):  # the first may compile kernels, whose memory it would forecast
        peak_bytes(started(tmp_path, "--dry_run", "--json", str(tmp_path / "plan.json"), ranks=ranks))
    forecast = [found["peak_bytes"]["host"] for found in json.loads((tmp_path / "plan.json").read_text())["memory"]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    out = ["--out", str(tmp_path / "runs")]
    running = [started(tmp_path, *out, rank=rank, ranks=ranks, port=port) for rank in range(ranks)]
    # Of large steps glibc's heap has 1.6 to 1.9 GiB from run to run: free pieces, in which other blocks do not fit.
    within = 0.2 if name == "large batch" else 0.1
    for expected, process in zip(forecast, running, strict=True):
        assert expected == pytest.approx(peak_bytes(process), rel=within)


def test_rows_are_forecast_in_the_tiers_that_the_recipe_says(tmp_path: Path) -> None:
    rows = [3000, 50]
    memory = {"tier": "disk", "device_bytes": 60_000, "host_bytes": 30_000, "cache_rows": 100}
    run = Run(rows, 64, 6400, [16], [8, 1], memory)
    everything = memory_plan(recipe_of(tmp_path, run._replace(memory={})))["memory"][0]["tiers"]
    assert everything == {"device": 0, "host": sum(rows) * (16 + 1) * 4, "disk": 0}
    plan = memory_plan(recipe_of(tmp_path, run))
    (found,) = plan["memory"]
    # The CPU's memory is the host's: rows in place, and those of the host's budget that training touches.
    assert 60_000 * 0.95 < found["tiers"]["host"] < 90_000
    assert 0 < found["tiers"]["disk"] < sum(rows) * (16 + 1) * 4 - 90_000
    assert {"tables", "cache", "index of rows", "process", "step", "batches"} <= found["parts"].keys() | {
        "step",
        "batches",
    }
    assert sum(found["parts"].values()) == found["peak_bytes"]["host"] + found["peak_bytes"]["device"]
    assert {entry["tier"] for entry in plan["tables"]} <= {"host", "host + disk", "disk"}


def test_rows_that_samples_touch_are_counted_by_popularity(tmp_path: Path) -> None:
    run = Run([20_000], 64, 6400, [16], [8, 1], {"tier": "host"}, train={"epochs": 2})
    (found,) = memory_plan(recipe_of(tmp_path, run))["memory"]
    draws = np.random.default_rng(0).random(12_800)
    shares = np.cumsum(np.arange(1, 20_001) ** -1.05)
    distinct = len(np.unique(np.searchsorted(shares / shares[-1], draws)))
    assert found["tiers"]["host"] == pytest.approx(distinct * (16 + 1) * 4, rel=0.05)


def test_activations_that_are_computed_again_are_not_counted(tmp_path: Path) -> None:
    options = {"precision": "fp32", "eval_batch_size": 64}
    run = Run([2000], 4096, 40_960, [256, 256, 16], [256, 256, 1], train=options)
    steps: list[int] = []
    for recompute in (False, True):
        recipe = recipe_of(tmp_path, run._replace(train={**run.train, "recompute": recompute}))
        steps.append(memory_plan(recipe)["memory"][0]["parts"]["step"])
    # Of two blocks of two layers of 256 columns, one at a time is kept.
    assert 4096 * 256 * 4 < steps[0] - steps[1] < 4096 * 256 * 4 * 4


def test_steps_with_scaled_or_clipped_gradients_are_forecast(tmp_path: Path) -> None:
    run = Run([100] * 2, 16, 64, *SMALL, train={"precision": "fp16", "clip_grad_norm": 1.0, "device": "cpu"})
    assert memory_plan(recipe_of(tmp_path, run))["table_bytes"] > 0


def test_free_pieces_are_counted_of_a_heap_that_keeps_what_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run([2000], 4096, 40_960, [256, 256, 16], [256, 256, 1], train={"precision": "fp32", "eval_batch_size": 64})
    parts: list[dict[str, int]] = []
    for kept in (False, True):
        monkeypatch.setattr("hotbed.train.runs.memory_estimate.heap_is_kept", lambda kept=kept: kept)  # pyright: ignore[reportUnknownLambdaType]
        (found,) = memory_plan(recipe_of(tmp_path, run))["memory"]
        assert sum(found["parts"].values()) == found["peak_bytes"]["host"] + found["peak_bytes"]["device"]
        parts.append(found["parts"])
    assert "kept heap" not in parts[0]
    assert parts[1]["kept heap"] == pytest.approx(HEAP_KEEPS * parts[1]["step"], rel=0.01)  # all of the step is in it


def test_a_cache_in_huge_pages_is_all_there_once_a_few_of_its_rows_are(tmp_path: Path) -> None:
    memory = {"tier": "disk", "device_bytes": 60_000, "cache_rows": 50_000}
    (found,) = memory_plan(recipe_of(tmp_path, Run([100_000], 64, 640, [16], [8, 1], memory)))["memory"]
    record = (16 + 1) * 4
    # Of 640 samples about a hundredth of these rows, which lie in two pages of 2 MiB.
    assert found["parts"]["cache"] == pytest.approx(50_000 * (record + TAG_BYTES), rel=0.01)
    assert found["tiers"]["disk"] < 640 * record


def test_of_a_cache_in_small_pages_those_that_are_touched_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(large_tensors, "HUGE_PAGES", tmp_path / "enabled")
    memory = {"tier": "disk", "device_bytes": 60_000, "cache_rows": 50_000}
    (found,) = memory_plan(recipe_of(tmp_path, Run([100_000], 64, 640, [16], [8, 1], memory)))["memory"]
    rows = found["parts"]["cache"] - 50_000 * TAG_BYTES
    assert 100 * large_tensors.PAGE_BYTES < rows < 640 * large_tensors.PAGE_BYTES
    memory["cache_rows"] = 1000
    (found,) = memory_plan(recipe_of(tmp_path, Run([2000], 64, 64_000, [1024], [8, 1], memory)))["memory"]
    all_of_it = 1000 * (4 * (1024 + 1) + TAG_BYTES)  # a row is larger than a page
    assert found["parts"]["cache"] == pytest.approx(all_of_it, rel=0.01)


def test_what_does_not_fit_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    argv = ["train", recipe_file(tmp_path, Run([3000], 64, 640, [16], [8, 1])), "--dry_run"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "peak of the fullest rank: tables" in shown
    assert "does not fit" not in shown
    monkeypatch.setattr("hotbed.cli.dry_run.available_bytes", lambda device: 1 << 20)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr("hotbed.cli.dry_run.resident_bytes", lambda: 2 << 20)
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "and 3.0 MiB are free" in shown  # what this process has is in what is needed, too
    assert "set memory.tier to host or disk" in shown and "memory.cache_rows" not in shown
    assert main([*argv, "--memory.tier", "disk", "--memory.cache_rows", "50"]) == 0
    shown = capsys.readouterr().out
    assert "lower memory.cache_rows (now 50), lower train.batch_size (now 64)" in shown
    assert "set memory.tier" not in shown


def test_what_fits_with_the_memory_of_this_process_is_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run([3000], 64, 640, [16], [8, 1])
    (peak,) = (found["peak_bytes"]["host"] for found in memory_plan(recipe_of(tmp_path, run))["memory"])
    monkeypatch.setattr("hotbed.cli.dry_run.available_bytes", lambda device: peak // 4)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr("hotbed.cli.dry_run.resident_bytes", lambda: peak)
    assert main(["train", recipe_file(tmp_path, run), "--dry_run"]) == 0
    assert "does not fit" not in capsys.readouterr().out


@pytest.mark.parametrize("memory", [{}, {"tier": "disk", "device_bytes": 150 * MIB}])
def test_what_cannot_fit_is_refused_before_a_table_is_made(
    memory: dict[str, Any], tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a table was made")

    file = recipe_file(tmp_path, Run([2_000_000, 1_000_000], 64, 640, [16], [8, 1], memory))
    monkeypatch.setattr("hotbed.store.memory.available_bytes", lambda device: 100 * MIB)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr("hotbed.large_tensors.zeros", never)
    assert main(["train", file, "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert f"expected at most the {100 * MIB:,} free bytes. Use memory.tier disk" in said
    rows = 3_000_000 * (16 + 1) * 4
    if memory:
        assert "host 0, disk " in said
    else:
        assert f"Bytes by tier: device {rows:,}, host 0, disk 0" in said
    assert not (tmp_path / "runs").exists()


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_peak_is_of_what_is_there_at_once() -> None:
    def phase() -> None:
        for _ in range(3):
            a = torch.zeros(1000)
            b = a + 1
            del a
            b.view(10, 100).mul_(2)

    def larger() -> None:
        torch.zeros(5000)

    assert peak_of(lambda _: [phase], 1, 1).nbytes == pytest.approx(8000, abs=4000)
    assert peak_of(lambda _: [phase, larger], 1, 1).nbytes == 20_000


def test_gradients_and_what_backward_needs_count() -> None:
    weight = torch.ones(1000, 1000, requires_grad=True)

    def step(samples: int) -> list[Any]:
        x = torch.ones(samples, 1000)

        def backward() -> None:
            torch.autograd.backward(((x @ weight).relu() @ weight).sum())

        return [backward]

    found = peak_of(step, 3000, 100).nbytes
    assert found == pytest.approx(peak_of(step, 3000, 3000).nbytes, rel=0.1)
    assert found > 3 * 3000 * 1000 * 4


def test_bytes_of_tensors_in_containers() -> None:
    assert nbytes_of({"a": [torch.zeros(3), (torch.zeros(2, dtype=torch.int64), 5)], "b": None}) == 12 + 16
