"""What kernels for narrow rows are compiled to: whole vectors, and the same bits on CPUs without some instructions."""

from __future__ import annotations

import inspect
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit, typeof

from hotbed.ops import cpu_lookup
from hotbed.ops.cpu_narrow import BF16, cpu_has, read_stored_row, write_stored_row
from hotbed.ops.cpu_rows import RowArrays
from tests.matrix import full

x86_vectors = pytest.mark.skipif(
    platform.machine() != "x86_64" or not cpu_has("f16c") or not cpu_has("avx2"),
    reason="looks for instructions of x86 with AVX2 and F16C",
)
FLOATS, LONGS, BYTES = (np.empty(0, kind) for kind in (np.float32, np.int64, np.uint8))
ROWS = RowArrays(64, 64, BF16, FLOATS, BYTES, np.empty(0, np.int8), np.empty((1, 7), np.int64))
WIDENING = {
    "bf16": r"vpmovzxwd .*%[yz]mm",
    "fp16 and fp8": r"vcvtph2psx? .*%[yz]mm",
    "int8": r"vpmovsxbd .*%[yz]mm",
    "int8, scaled": r"vcvtdq2ps .*%[yz]mm",
}


def machine_code(function: Any, **arguments: Any) -> list[str]:
    """Lines of a kernel compiled for such arguments; those that are not given are integers."""
    kinds = [typeof(arguments.get(name, 0)) for name in inspect.signature(function).parameters]
    compiled = njit(nogil=True, error_model="numpy")(function)
    compiled.compile(tuple(kinds))
    (code,) = compiled.inspect_asm().values()
    return [line.strip().replace("\t", " ") for line in code.splitlines()]


@x86_vectors
def test_lookups_widen_whole_vectors_and_count_no_references() -> None:
    arrays = {"rows": ROWS, "features": np.empty((1, 7), np.int64), "offsets": np.empty((1, 1), np.int64)}
    flat = {"ids": LONGS, "per_id": FLOATS, "acc": FLOATS, "out": FLOATS, "streamed": True}
    code = machine_code(cpu_lookup._pool_samples.py_func, **arrays, **flat)
    for dtype, instruction in WIDENING.items():
        assert any(re.match(instruction, line) for line in code), f"{dtype} rows are not widened as vectors"
    work = [i for i, line in enumerate(code) if line.startswith(("prefetch", "vmovnt"))]
    assert not [line for line in code[work[0] : work[-1]] if "NRT_" in line or line.startswith("call")]


@x86_vectors
def test_updates_round_whole_vectors() -> None:
    def step(rows: Any, w: Any, at: int, key: Any, col: int) -> None:
        read_stored_row(w, rows.kind, rows.narrow, rows.exponents, rows.dim, at)
        write_stored_row(w, rows.kind, rows.narrow, rows.exponents, rows.dim, at, key, col)

    code = machine_code(step, rows=ROWS, w=FLOATS, key=np.uint32(0))
    expected = {
        **WIDENING,
        "random bits": r"vpmulld .*%[yz]mm",
        "rounded": r"vcvttps2dq .*%[yz]mm",
    }
    for what, instruction in expected.items():
        assert any(re.match(instruction, line) for line in code), f"no vectors: {what}"


EVERY_PATTERN = """
import numpy as np
import torch
from numba import njit

from hotbed.ops.cpu_narrow import BF16, FP8, FP16, INT8, read_stored_row, write_stored_row
from hotbed.ops.cpu_rows import cell_bits, row_key
from hotbed.ops.rows import exponents_of, round_stochastic, widen


@njit
def read(out, kind, narrow, exponents):
    read_stored_row(out, kind, narrow, exponents, out.shape[0], 0)


@njit
def write(values, kind, narrow, exponents, key):
    write_stored_row(values, kind, narrow, exponents, values.shape[0], 0, key, 5)


def bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


NONE = torch.empty(0, 0, dtype=torch.int8)
KINDS = {BF16: torch.bfloat16, FP16: torch.float16, FP8: torch.float8_e4m3fn, INT8: torch.int8}
for kind, dtype in KINDS.items():
    patterns = np.arange(1 << (8 * dtype.itemsize)).astype(np.uint8 if dtype.itemsize == 1 else np.uint16)
    narrow = torch.from_numpy(np.append(patterns, patterns[:3])).view(dtype)[None]
    exponents = torch.tensor([[-9, 3, 0]], dtype=torch.int8) if dtype == torch.int8 else NONE
    out = torch.empty(narrow.shape[1])
    read(out.numpy(), kind, narrow.view(torch.uint8).view(-1).numpy(), exponents.view(-1).numpy())
    expected = widen(narrow, exponents)[0]
    assert torch.equal(out.isnan(), expected.isnan()), dtype
    same = bits(out) == bits(expected)
    assert (same | out.isnan()).all() if dtype == torch.float16 else same.all(), dtype

gen = torch.Generator().manual_seed(1)
values = torch.randn(1, 4000, generator=gen) * 2.0 ** torch.randint(-30, 20, (1, 4000), generator=gen)
values[0, :6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e38])
values[0, 300:400] /= 1e30
key = row_key(np.uint32(3), np.int64(9))
random = torch.tensor([[int(cell_bits(key, np.int64(5 + d))) for d in range(4000)]])
for kind, dtype in KINDS.items():
    narrow = torch.empty(1, 4000, dtype=dtype)
    exponents = torch.full((1, 32), -120, dtype=torch.int8) if dtype == torch.int8 else NONE
    expected = round_stochastic(values, dtype, exponents_of(values), random)
    memory = narrow.view(torch.uint8).view(-1).numpy(), exponents.view(-1).numpy()
    write(values[0].numpy(), kind, *memory, np.uint32(key))
    assert dtype != torch.int8 or torch.equal(exponents, exponents_of(values))
    same = bits(narrow) == bits(expected)
    assert same.all() if dtype == torch.int8 else (same | values.isnan()).all(), dtype
    assert widen(narrow, exponents)[values.isnan()].isnan().all(), dtype
print("same bits", INSTRUCTIONS)
"""

CPUS = {
    "host": None,
    "avx2": ("haswell", "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"),
    "avx2_without_f16c": ("haswell", "+sse4.2,+avx,+avx2,+fma,-f16c"),
    "generic": ("x86-64", "+sse2"),
}


@pytest.mark.parametrize("cpu", [full(cpu) if cpu in ("avx2", "generic") else cpu for cpu in CPUS])
def test_every_cpu_reads_and_rounds_the_same_bits(cpu: str, tmp_path: Path) -> None:
    """Without F16C a conversion of LLVM's was a call of a function that is not there."""
    asked = CPUS[cpu]
    if asked and platform.machine() != "x86_64":
        pytest.skip("CPUs of x86")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    if asked:
        env |= {"NUMBA_CPU_NAME": asked[0], "NUMBA_CPU_FEATURES": asked[1]}
    code = EVERY_PATTERN.replace("INSTRUCTIONS", repr(cpu))
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == f"same bits {cpu}\n"
