"""What the interpreter cannot show: that kernels compile for a GPU, and that a step never asks the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotbed.ops import RuleStep, select
from hotbed.optim import RowWiseAdagrad

from .cases import CASES, Kernels
from .test_update import Arena

KERNELS = {
    "_initial_kernel",
    "_lookup_kernel",
    "_occurrences_kernel",
    "_mark_groups_kernel",
    "_place_groups_kernel",
    "_mark_runs_kernel",
    "_place_runs_kernel",
    "_runs_kernel",
    "_announce_kernel",
    "_long_kernel",
    "_interaction_kernel",
    "_interaction_backward_kernel",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU every test compiles")
def test_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.ops.compile_for_hopper"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == KERNELS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["one_hot", "weighted"])
def test_a_step_runs_as_a_cuda_graph(name):
    """Captured once, replayed with other ids: no size is read back by the host, in any operation of a step."""
    case = CASES[name]
    backend = Kernels("triton", torch.device("cuda"), select("cuda"))
    before = Arena.make(RowWiseAdagrad.rule, 40, tables=case.tables, active=(1,) * len(case.tables))
    arena, bags = backend.put(before), backend.put(case.layout())
    grad = torch.randn(case.batch * len(case.features), 40, device="cuda")
    inv_scale, gate = torch.ones((), device="cuda"), torch.ones((), dtype=torch.bool, device="cuda")

    def step(arena: Arena) -> torch.Tensor:
        out = backend.ops.lookup(arena.weight, bags)
        found = backend.ops.occurrences(bags)
        groups = backend.ops.group(found.slots)
        backend.ops.update(
            RuleStep(rule=arena.rule, bases=arena.bases, hyper=arena.hyper, inv_scale=inv_scale, gate=gate),
            arena.weight, arena.moments, found, groups, grad,
        )  # fmt: skip
        return out

    step(backend.put(before))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            captured = step(arena)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        bags.ids.copy_(case.layout(seed).ids)
        eager = backend.put(arena)
        out = step(eager)
        graph.replay()
        assert torch.equal(captured, out)
        assert torch.equal(arena.weight, eager.weight)
        assert torch.equal(arena.moments["sum_of_squares"], eager.moments["sum_of_squares"])
