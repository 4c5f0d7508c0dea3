"""Compile every Triton kernel to machine code for an H100/H200, on a machine without a GPU.

The interpreter accepts programs that the compiler refuses. So this launches the operations on CPU tensors, under a
driver that claims to be a GPU of compute capability 9.0, with launches replaced by "compile only". Prints one line per
compiled kernel. Run by test_triton_gpu.py in a process of its own, where TRITON_INTERPRET is not set. The argument says
how much: ``few`` kernels of two dtypes and three rules; ``each`` dtype and each rule once; or ``all``, every rule for
every dtype and width (some minutes).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import cycle, product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hotbed.ops import CacheTags
from hotbed.ops import triton as kernels
from hotbed.ops.layout import FREE

from .arenas import OPTIONS, SEGMENTS, WIDE, Arena
from .cases import CASES, occurrences_of
from .formats import DTYPES
from .naive_rules import RULES

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _compile_launches() -> None:
    run = JITFunction.run
    seen: set[str] = set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            code = len(kernel.asm["cubin"])
            print(f"{self.fn.__name__}: {code} bytes, {kernel.metadata.num_warps} warps", flush=True)
        return kernel

    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = compile_only


def _compile_bags(name: str, dim: int, dtype: torch.dtype, wide: bool, out: torch.dtype) -> None:
    """Lookup, gradient of its weights and occurrences."""
    case = CASES[name]
    bags, rows = case.layout(), (case if wide else replace(case, wide=[0] * len(case.tables))).rows(dim, dtype)
    grad = torch.zeros(case.batch, case.width, dim, dtype=out)
    kernels.lookup(rows, bags, grad)
    kernels.weight_gradient(rows, bags, grad, torch.zeros(len(bags.ids)))
    kernels.occurrences(bags)


def _compile_step(rule: str, dim: int, dtype: torch.dtype, wide: bool, grad: torch.dtype, options: str) -> None:
    arena = Arena.make(RULES[rule], dim, dtype, wide=WIDE if wide else [0, 0, 0], options=OPTIONS[options])
    found = occurrences_of(SEGMENTS["one_row"], 12, scaled=options == "none")
    step = arena.step(arena.seeds, torch.tensor(1.0), torch.tensor(True))
    groups = kernels.group(found)
    kernels.update(step, arena.rows, arena.moments, found, groups, torch.zeros(12, dim, dtype=grad))
    kernels.segment_sum(found, groups, torch.zeros(12, dim, dtype=grad), None, torch.zeros(1, dim))
    kernels.spread(groups, groups.rows)


def _compile_interaction(dim: int, dtype: torch.dtype) -> None:
    vectors, grad = torch.zeros(2, 27, dim, dtype=dtype), torch.zeros(2, dim + 352, dtype=dtype)
    kernels.interaction(vectors, grad.shape[1])
    kernels.interaction_backward(grad, vectors)


def _compile_cache(ways: int, by_count: bool, words: int) -> None:
    wanted, slab = torch.arange(5), torch.zeros(2 * ways, 4 * words, dtype=torch.uint8)
    free = torch.full((2 * ways,), FREE)
    tags = CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), ways, by_count)
    kernels.cache_use(tags, kernels.cache_find(tags, wanted), 3)
    places, _ = kernels.cache_take(tags, wanted, 3)
    kernels.cache_read(slab, places, slab[:5].clone())
    kernels.cache_write(slab, places, slab[:5].clone())


def main(amount: str) -> None:
    few, everything = amount == "few", amount == "all"
    _compile_launches()
    kernels.initial_values_(torch.zeros(9, 16), seed=2**32 - 1, rows=range(9), cols=range(16), bound=0.1)
    conditions = list(zip((128, 17, 128, 200, 16), DTYPES.values(), (True, False, True, False, True), strict=True))
    if few:
        conditions = conditions[:2]
    if everything:
        conditions = list(product((16, 40, 128, 200, 1024), DTYPES.values(), (True, False)))
    conditions = [(*each, out) for each, out in zip(conditions, cycle(FLOATS), strict=False)]
    for name, each in product(("weighted", "one_hot") if everything else ("weighted",), conditions):
        _compile_bags(name, *each)
    rules = ("adam", "lamb", "rowwise_adagrad") if few else RULES
    steps = product(rules, conditions) if everything else zip(rules, cycle(conditions), strict=False)
    for (rule, each), options in zip(steps, cycle(("mixed", "mixed", "none")), strict=False):
        _compile_step(rule, *each, options)
    for dim, dtype in [(128, torch.bfloat16)] if few else product((16, 128), FLOATS):
        _compile_interaction(dim, dtype)
    for ways, by_count, words in ((32, False, 129), (32, True, 8), (5, False, 16))[: 1 if few else None]:
        _compile_cache(ways, by_count, words)


if __name__ == "__main__":
    main(sys.argv[1])
