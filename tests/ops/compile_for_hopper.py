"""Compile every Triton kernel to machine code for an H100/H200, on a machine without a GPU.

The interpreter accepts programs that the compiler refuses. So this launches the operations on CPU tensors, under a
driver that claims to be a GPU of compute capability 9.0, with launches replaced by "compile only". Prints one line per
compiled kernel. Run by test_triton_compiles.py in a process of its own, where TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hotbed.ops import RuleStep
from hotbed.ops import triton as kernels
from hotbed.optim import SGD, RowWiseAdagrad

from .cases import CASES


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _compile_launches() -> None:
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        print(f"{self.fn.__name__}: {len(kernel.asm['cubin'])} bytes, {kernel.metadata.num_warps} warps", flush=True)
        return kernel

    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = compile_only


def main() -> None:
    _compile_launches()
    zero, one = torch.tensor(0.0), torch.tensor(True)
    for dim, name, rule in ((16, "weighted", RowWiseAdagrad.rule), (40, "one_hot", SGD.rule), (128, "mixed", SGD.rule)):
        case = CASES[name]
        bags = case.layout()
        weight = torch.zeros(case.slots, dim)
        kernels.initial_values_(weight, seed=2**32 - 1, rows=range(case.slots), cols=range(dim), bound=0.1)
        kernels.lookup(weight, bags)
        found = kernels.occurrences(bags)
        groups = kernels.group(torch.zeros(bags.total, dtype=torch.int64))
        kernels.update(
            RuleStep(
                rule=rule,
                bases=case.bases,
                hyper=torch.zeros(len(case.tables), 1 + len(rule.hyper)),
                inv_scale=zero,
                gate=one,
            ),
            weight,
            {"sum_of_squares": torch.zeros(case.slots)},
            found,
            groups,
            torch.zeros(case.batch * len(case.features), dim),
        )
        for dtype in (torch.float32, torch.bfloat16):
            dense, embeddings = torch.zeros(2, dim, dtype=dtype), torch.zeros(2, 26, dim, dtype=dtype)
            grad = torch.zeros(2, dim + 352, dtype=dtype)
            kernels.interaction(dense, embeddings, grad.shape[1])
            kernels.interaction_backward(grad, dense, embeddings)


if __name__ == "__main__":
    main()
