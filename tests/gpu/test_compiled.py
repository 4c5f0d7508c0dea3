"""What compilers make of the kernels keeps within limits: no spills, and enough bytes in flight for a GPU's memory."""

from __future__ import annotations

import json
import os
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

from . import amd, machines
from .code import loads
from .theirs import KERNELS, MAIN, UTILS

ROOT = Path(__file__).parents[2]
FEW = {
    *("lookup", "runs, single", "runs, several", "long", "list", "interaction", "interaction_backward"),
    *("count_groups", "place_groups", "add_runs", "place_runs"),
}
OTHERS = {
    *("gather", "weight_gradient", "occurrences", "spread", "initial", "find", "use", "sets", "take", "copy"),
    *("cross_entropy", "total", "step_seeds", "count_steps", "relu_backward", "add_parts"),
    *("mean_of_rows", "add_along_tree"),
}
LOOKUP, UPDATE = 1.25 * 0.85, 1.25 * 0.60
"""Of the bandwidth of an H100: 125 % of what lookups and updates are to reach."""
BELOW = {
    "sm_90": {
        "lookup, 128 bf16 behind fp32, fixed, into fp32": 0.6,
        "lookup, 128 bf16 behind fp32, any, into fp32": 0.9,
        "lookup, 128 int8 behind fp32, fixed, into fp32": 0.5,
        "lookup, 128 int8 behind fp32, any, into fp32": 0.65,
        "lookup, 128 fp8, any, into fp32": 0.95,
        "lookup, 128 int8, any, into fp32": 0.94,
        "runs, single, 128 bf16 behind fp32, rowwise_adagrad": 0.85,
        "runs, single, 128 int8 behind fp32, rowwise_adagrad": 0.85,
        "runs, several, 128 bf16, rowwise_adagrad": 0.85,
        "runs, several, 128 bf16 behind fp32, rowwise_adagrad": 0.85,
        "runs, several, 128 fp16, rowwise_adagrad": 0.85,
        "runs, several, 128 fp8, rowwise_adagrad": 0.85,
        "runs, several, 128 int8, rowwise_adagrad": 0.6,
        "runs, several, 128 int8 behind fp32, rowwise_adagrad": 0.85,
        "runs, several, 128 fp32, lamb": 0.85,
        "runs, several, 64 fp32, cut rows, rowwise_adagrad": 0.95,
    },
    "sm_80": {
        "lookup, 128 int8 behind fp32, fixed, into fp32": 0.65,
        "lookup, 128 int8 behind fp32, any, into fp32": 0.85,
        "runs, several, 128 int8 behind fp32, rowwise_adagrad": 0.85,
    },
}
"""By target, kernels that ask its memory for less than they need with Triton 3.9 or 3.6 (why: docs/gpu.md), and the
share of it that they keep; of rows of 17 columns nothing is asked."""
SPILLED = {("3.6.0", "sm_80", "runs, several, 128 int8 behind fp32, rowwise_adagrad, gradient fp32"): 8}
"""Bytes that Triton, for a target, spills of a kernel; nothing else is spilled (docs/gpu.md)."""


def report(amount: str, *targets: str, file: Path) -> dict[str, Any]:
    """Run the report in a process that does not interpret kernels."""
    done = run(amount, "--json", str(file), "--targets", *targets)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text(encoding="utf-8"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the report's command with these arguments; the first entry of PYTHONPATH may have another Triton."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", ""), str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.gpu.report", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def name_of(line: dict[str, Any]) -> str:
    return f"{line['kernel']}, {line['about']}"


def refuse_spills(found: dict[str, Any]) -> None:
    """Nothing is spilled that is not known."""
    for line in found["lines"]:
        known = SPILLED.get((line["triton"], line["target"], name_of(line)), 0)
        assert line["spilled_bytes"] <= known, line


def check(found: dict[str, Any]) -> None:
    """Nothing is spilled, and enough reads are in flight, but for the kernels that are known to have too few."""
    refuse_spills(found)
    asked = [of for of in found["lines"] if of["share"] is not None and not of["about"].startswith("17 ")]
    assert asked
    for line in asked:
        kept = BELOW[line["target"]].get(name_of(line).split(", gradient")[0], 1)
        assert line["share"] >= kept * line["need"], line


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
    """On an H100 and an A100 within all limits, on an MI300X batches are; spilled is only what is known."""
    found = report("each", target, file=tmp_path / "report.json")
    assert {line["kernel"] for line in found["lines"]} == FEW | OTHERS
    refuse_spills(found)
    if target in ("sm_80", "sm_90"):
        check(found)
    if target != "sm_100":
        updates = [found["updates"][f"{target}, {dim} columns"].values() for dim in (16, 64, 128)]
        assert min(map(min, updates)) >= UPDATE


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


def test_a_block_that_runs_last_and_is_written_first_waits_for_the_others() -> None:
    """The end of a loop stands before its head: the load in it waits for two in the head, and for the branch."""
    ptx = """
        ld.global.b32 %r1, [%rd1];
        bra.uni $L__BB0_2;
    $L__BB0_1:
        ld.global.b32 %r3, [%rd3];
        setp.lt.s32 %p1, %r9, 5;
        @%p1 bra $L__BB0_4;
    $L__BB0_2:
        ld.global.b64 %rd2, [%rd1];
        ld.global.b64 %rd3, [%rd2];
        setp.lt.s32 %p2, %r1, 5;
        @%p2 bra $L__BB0_1;
        ld.global.b32 %r4, [%rd9];
        bra.uni $L__BB0_1;
    $L__BB0_4:
        ret;
    """
    path, turn = loads(ptx, 1)
    assert [dict(level) for level in path.levels] == [{4: 1, 8: 1}, {8: 1, 4: 1}, {4: 1}]
    assert turn.chain == 0
    path, turn = loads(ptx, 0)
    assert [dict(level) for level in path.levels] == [{4: 1}]
    assert turn.chain == 3


def test_waits_of_amds_gpus_are_those_that_the_code_has() -> None:
    """Arguments are there at once; the second load is issued before the first is there, the third after it."""
    text = """
    kernel:
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        s_waitcnt lgkmcnt(0)
        s_load_dword s8, s[4:5], 0x0
        s_mov_b32 s0, s8
        buffer_load_dwordx2 v[0:1], v2, s[4:7], 0 offen
        global_load_ubyte v3, v9, s[6:7]
        s_waitcnt vmcnt(1)
        global_load_dword v4, v[0:1], off
        s_waitcnt vmcnt(1)
    .LBB0_1:
        s_load_dword s9, s[0:1], 0x0
        s_waitcnt vmcnt(0) lgkmcnt(0)
        buffer_load_dwordx4 v[4:7], v4, s[4:7], 0 offen
        buffer_store_dwordx4 v[4:7], v4, s[4:7], 0 offen
        s_cbranch_vccnz .LBB0_1
        s_endpgm
    .Lfunc_end0:
        .vgpr_count:     26
        .private_segment_fixed_size: 8
    """
    path, turn = amd.loads(text, 0)
    assert [dict(level) for level in path.levels] == [{8: 1, 1: 1}, {4: 1}]
    assert [dict(level) for level in turn.levels] == [{}, {16: 1}]
    assert amd.usage(text) == (26, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is measured")
def test_kernels_of_others_are_compiled_from_a_folder(tmp_path: Path) -> None:
    """Here are a few that load a row by an index, and import what is not installed."""
    for name in (MAIN, UTILS):
        code = ["import triton", "import triton.language as tl", "from fbgemm_gpu.config import FeatureGateName"]
        for kernel, (module, *_) in KERNELS.items():
            if module == name:
                code += ["@triton.jit", f"def {kernel}(output_ptr, indices_ptr, weight_ptr, BLOCK_SIZE: tl.constexpr):"]
                code += ["    at = tl.load(indices_ptr + tl.program_id(0)) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)"]
                code += ["    tl.store(output_ptr + at, tl.load(weight_ptr + at))"]
        (tmp_path / f"{name}.py").write_text("\n".join(code), encoding="utf-8")
    done = run("few", "--targets", "sm_90", "--theirs", str(tmp_path), "--json", str(tmp_path / "theirs.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "theirs.json").read_text(encoding="utf-8"))["lines"]
    assert len(found) == 3 * len(KERNELS)
    assert {line["chain"] for line in found} == {2}
    lookup = next(line for line in found if (line["kernel"], line["about"]) == ("lookup", "128 fp32"))
    assert lookup["share"] == pytest.approx(machines.share(machines.MACHINES["sm_90"], 32, 512, 2), abs=1e-3)


def test_what_is_missing_in_the_folder_is_said(tmp_path: Path) -> None:
    done = run("few", "--targets", "sm_90", "--theirs", str(tmp_path))
    assert done.returncode != 0
    assert f"{tmp_path / UTILS}.py is not there" in done.stderr


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
    mi300x = machines.MACHINES["gfx942"]
    assert [machines.resident(mi300x, *usage) for usage in ((88, 4, 0), (26, 4, 0), (26, 1, 0), (26, 4, 30_000))] == [
        5,
        8,
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
