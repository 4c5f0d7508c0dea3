"""What compilers make of the kernels keeps within limits: no spills, and enough bytes in flight for a GPU's memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hotbed.ops import BagLayout, triton_lookup
from tests.ops.cases import random_rows

from . import machines
from .code import loads

ROOT = Path(__file__).parents[2]
FEW = {
    *("lookup", "runs, single", "runs, several", "long", "list", "interaction", "interaction_backward"),
    *("count_groups", "place_groups", "add_runs", "place_runs"),
}
OTHERS = {
    *("weight_gradient", "occurrences", "spread", "initial", "find", "use", "sets", "take", "copy"),
    *("cross_entropy", "total", "step_seeds", "count_steps"),
}
LOOKUP, UPDATE = 1.25 * 0.85, 1.25 * 0.60
"""Of the bandwidth of an H100: 125 % of what lookups and updates are to reach."""


def report(amount: str, *targets: str, file: Path) -> dict[str, Any]:
    """Run the report in a process that does not interpret kernels."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.gpu.report", amount, "--json", str(file), "--targets", *targets]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text(encoding="utf-8"))


def check(found: dict[str, Any]) -> None:
    """Nothing is spilled, and reads of one id per bag and of float32 rows are in flight; others: docs/gpu.md."""
    assert not [line for line in found["lines"] if line["spilled_bytes"]]
    of_interest = re.compile(r"[^,]*, one,|\d+ fp32, (?!any|fixed|lamb)")
    asked = [line for line in found["lines"] if line["share"] is not None and of_interest.match(line["about"])]
    assert asked
    low = [f"{line['kernel']}, {line['about']}: {line['share']}" for line in asked if line["share"] < line["need"]]
    assert not low


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is measured")
def test_rows_of_128_columns_on_an_h100(tmp_path: Path) -> None:
    found = report("few", "sm_90", file=tmp_path / "report.json")
    assert {line["kernel"] for line in found["lines"]} == FEW
    check(found)
    lookup = next(line for line in found["lines"] if line["kernel"] == "lookup")
    assert lookup["share"] >= LOOKUP
    assert min(found["updates"]["sm_90, 128 columns"].values()) >= UPDATE


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is measured")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel(target: str, tmp_path: Path) -> None:
    """On an H100 within all limits; elsewhere it compiles, and spills nothing."""
    found = report("each", target, file=tmp_path / "report.json")
    assert {line["kernel"] for line in found["lines"]} == FEW | OTHERS
    assert not [line for line in found["lines"] if line["spilled_bytes"]]
    if target == "sm_90":
        check(found)
        assert min(found["updates"]["sm_90, 64 columns"].values()) >= UPDATE


def test_loads_that_wait_for_each_other_are_counted() -> None:
    """Two loads side by side, one whose address was loaded, one behind shared memory, and one in a loop."""
    ptx = """
        ld.param.b64 %rd1, [kernel_param_0];
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.b64 %rd2, [%rd1+8];
        add.s64 %rd3, %rd2, 4;
        ld.global.b16 %rs1, [%rd3];
        st.shared.b16 [%r9], %rs1;
        bar.sync 0;
        ld.shared.b32 %r5, [%r9];
        mad.wide.s32 %rd4, %r5, 4, %rd1;
        ld.global.b32 %r6, [%rd4];
    $L__BB0_1:
        ld.global.b32 %r7, [%rd1];
        setp.lt.s32 %p2, %r7, 5;
        @%p2 bra $L__BB0_1;
        ret;
    """
    path, turn = loads(ptx, 0)
    assert [dict(level) for level in path.levels] == [{16: 1, 8: 1}, {2: 1}, {4: 1}]
    assert (path.chain, path.in_flight, path.widths) == (3, 24, {2: 1, 4: 1, 8: 1, 16: 1})
    assert [dict(level) for level in turn.levels] == [{4: 1}]


def test_shares_follow_littles_law() -> None:
    """25.4 KB in flight on each multiprocessor of an H100 are its bandwidth times a microsecond."""
    h100 = machines.MACHINES["sm_90"]
    assert machines.share(h100, 2, 3.35e12 * 1e-6 / 132 / 2, 1) == pytest.approx(1)
    assert machines.share(h100, 2, 3.35e12 * 1e-6 / 132 / 2, 3) == pytest.approx(1 / 3)
    assert [machines.resident(h100, *usage) for usage in ((128, 4, 0), (129, 4, 0), (16, 1, 0), (16, 4, 100_000))] == [
        4,
        3,
        32,
        2,
    ]


def test_a_grid_holds_more_features_than_its_second_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends at 65,535; the first one is the only one, and ends at 2³¹ − 1."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    for name in ("_lookup_kernel", "_weight_gradient_kernel"):
        monkeypatch.setattr(triton_lookup, name, Recorder())
    features = 70_000
    bags = BagLayout(
        torch.zeros(2 * features, dtype=torch.int64),
        torch.zeros(features, 7, dtype=torch.int64),
        torch.zeros(0, 3, dtype=torch.int64),
        None,
        2,
        2 * features,
        False,
        1,
    )
    rows, out = random_rows([4], [0], 16, torch.float32), torch.zeros(2, 1, 16)
    triton_lookup.lookup(rows, bags, out)
    triton_lookup.weight_gradient(rows, bags, out, torch.zeros(2 * features))
    assert grids == [(features,), (features,)]
