"""What only a GPU can show: that a step never asks the host, and that rows beyond 2³¹ elements are reached."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotbed.ops import BagLayout, Occurrences, select

from .arenas import OPTIONS, Arena, assert_same
from .cases import CASES, Kernels, random_rows, values_of
from .formats import DTYPES
from .naive_rules import RULES


@pytest.fixture
def gpu() -> Kernels:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return Kernels("triton", torch.device("cuda"), select("cuda"))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("name", ["one_hot", "weighted"])
def test_a_step_runs_as_a_cuda_graph(gpu, name, rule, dtype):
    """Captured once, replayed with other ids: no size is read back by the host, in any operation of a step."""
    case = CASES[name]
    before = Arena.make(RULES[rule], 40, dtype, tables=case.tables, wide=case.wide, options=OPTIONS["mixed"])
    arena, bags = gpu.put(before), gpu.put(case.layout())
    grad = torch.randn(case.batch * case.width, 40, device="cuda")
    one = torch.ones((), device="cuda")

    def step(arena: Arena) -> tuple[torch.Tensor, ...]:
        out = torch.zeros(case.batch, case.width, 40, dtype=torch.bfloat16, device="cuda")
        weights = torch.zeros(len(bags.ids), device="cuda")
        gpu.ops.lookup(arena.rows, bags, out)
        gpu.ops.weight_gradient(arena.rows, bags, grad, weights)
        found = gpu.ops.occurrences(bags)
        groups = gpu.ops.group(found)
        sums = torch.zeros(bags.total, 40, device="cuda")
        gpu.ops.segment_sum(found, groups, grad, None, sums)
        slots = gpu.ops.spread(groups, groups.rows)
        gpu.ops.update(arena.step(arena.seeds, one, one), arena.rows, arena.moments, found, groups, grad)
        return out, weights, sums, slots

    step(gpu.put(before))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.graph(graph):
            captured = step(arena)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        bags.ids.copy_(case.layout(seed).ids)
        eager = gpu.put(arena)
        expected = step(eager)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))
        assert_same(gpu.back(arena), gpu.back(eager))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_rows_beyond_two_billion_elements_are_reached(gpu, dtype):
    """Offsets are 64 bits wide: the last rows of an arena of 2³¹ elements are read and written, and no others."""
    rows, dim, few = 2**31 // 128 + 8, 128, 8
    small = random_rows([few], [0], dim, dtype)
    names = ("wide",) if dtype == torch.float32 else ("narrow", "exponents")
    large = gpu.put(small)
    for name in names:
        tensor = torch.zeros(rows, getattr(small, name).shape[1], dtype=getattr(small, name).dtype, device="cuda")
        tensor[-few:] = getattr(small, name).cuda()
        large = replace(large, **{name: tensor})
    ids = torch.arange(rows - few, rows, device="cuda")
    features = torch.tensor([[0, 1, 0, 0, 0, 0, 0]], device="cuda")
    offsets = torch.empty(0, few + 1, dtype=torch.int64, device="cuda")
    out = torch.zeros(few, 1, dim, device="cuda")
    gpu.ops.lookup(large, BagLayout(ids, features, offsets, None, few, few, False, 1), out)
    assert torch.equal(out[:, 0].cpu(), torch.from_numpy(values_of(small)).float())

    arena = gpu.put(Arena.make(RULES["sgd"], dim, dtype, tables=[few], wide=[0], active=(1,), options={"decay": [1.0]}))
    one = torch.ones((), device="cuda")
    found = Occurrences(ids, torch.zeros_like(ids), None)
    step = arena.step(arena.seeds, one, one)
    gpu.ops.update(step, large, {}, found, gpu.ops.group(found), torch.zeros(1, dim, device="cuda"))
    for name in names[:1]:
        assert not getattr(large, name)[-few:].any() and not getattr(large, name)[:few].any()
