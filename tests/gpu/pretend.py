"""Compile launches for GPUs that are not here.

The operations are called with CPU tensors under a driver that claims to be a GPU; launches compile their kernel, and
stop there. Needs a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Compiled:
    """A kernel as compiled for a launch.

    `grid` is the launch's, `constants` are what it is compiled for, `asm` its code (``ptx`` and
    ``cubin``, or ``amdgcn``).
    """

    kernel: str
    target: str
    grid: tuple[int, ...]
    constants: dict[str, Any]
    asm: Any
    warps: int
    shared_bytes: int


class _Driver:
    """A GPU for each target: compiled kernels are kept by number of the device."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return list(TARGETS).index(self._target)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._target]


@contextmanager
def compiling(target: str, found: Callable[[Compiled], None]) -> Iterator[None]:
    """Compile what is launched, and hand it to a function."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        meta = kernel.metadata
        found(Compiled(self.fn.__name__, target, grid, kwargs, kernel.asm, meta.num_warps, meta.shared))
        return kernel

    triton.runtime.driver.set_active(_Driver(target))
    JITFunction.run = compile_only
    try:
        with mock.patch.object(torch.version, "hip", "pretended" if TARGETS[target].backend == "hip" else None):
            yield
    finally:
        JITFunction.run = run
