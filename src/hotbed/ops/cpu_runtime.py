# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""How Numba kernels are compiled, cached and launched, and the few instructions Numba has no words for.

*Cache.* Numba's on-disk cache does not notice an edited helper in another module, so the cache directory is named after
a hash of all kernel sources.

*Threads.* Kernels use ``torch.get_num_threads()`` threads. Two Python threads may launch kernels at once under OpenMP;
Numba's own ``workqueue`` layer would abort the process, so where OpenMP is missing launches take turns behind a lock.

*Order of sums.* No kernel is compiled with ``fastmath``: LLVM may not reorder a sum. Where a sum over columns is to be
fast, the 16 lanes are written out as vector instructions below, so the order is part of the source.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PREFETCH_BAGS = 12
"""How many rows ahead kernels prefetch (8 to 16 measured equal within noise; see docs/log.md)."""

LINE = 16
"""Float32 values per cache line."""


def _sources_hash() -> str:
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for path in [*sorted(here.glob("cpu*.py")), here / "layout.py"]:  # layout.py: constants that are compiled in
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache_dir() -> Path:
    """``$XDG_CACHE_HOME/hotbed/…``, or where that is read-only a new temporary directory."""
    name = f"numba-{_sources_hash()}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed" / name
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # A new one, because what is in a cache is executed: others could have filled a predictable name.
        elsewhere = Path(tempfile.mkdtemp(prefix="hotbed-"))
        _log.warning("kernels are compiled anew by every process, into %s: %s", elsewhere, error)
        return elsewhere
    return home


_log = logging.getLogger("hotbed")
_CACHE_DIR = _cache_dir()


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with Numba at its first call, cached on disk; never with ``fastmath``."""

    def decorate(function: Callable[..., Any]) -> Any:
        previous = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = previous or str(_CACHE_DIR)
        try:
            return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        finally:
            numba.config.CACHE_DIR = previous

    return decorate


def _openmp_available() -> bool:
    try:
        from numba.np.ufunc import omppool  # noqa: F401
    except ImportError:
        return False
    return True


if numba.config.THREADING_LAYER == "default" and _openmp_available():
    numba.config.THREADING_LAYER = "omp"
_turns: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if numba.config.THREADING_LAYER not in ("omp", "tbb"):
    _turns = threading.Lock()
    _log.warning(
        "Numba's threading layer is '%s', which cannot be entered twice: kernels started by two threads take turns; "
        "install libgomp1 for OpenMP",
        numba.config.THREADING_LAYER,
    )


def launch(compiled: Callable[..., Any], *args: Any) -> Any:
    """Run a parallel kernel on torch's number of threads."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    with _turns:
        return compiled(*args)


# -- instructions --------------------------------------------------------------------------------------------------

_VECTOR = ir.VectorType(ir.FloatType(), 16)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to element ``index`` of a C-contiguous array, counted over its flat data."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _load16(builder: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4, typ=_VECTOR)


def _halving_sum(builder: Any, vector: Any) -> Any:
    """Sum 16 lanes as `hotbed.ops.reference.block_sum` does: upper half onto lower half, four times."""
    width = 16
    while width > 1:
        width //= 2
        mask = ir.VectorType(ir.IntType(32), width)
        undef = ir.Constant(vector.type, ir.Undefined)
        low = builder.shuffle_vector(vector, undef, ir.Constant(mask, list(range(width))))
        high = builder.shuffle_vector(vector, undef, ir.Constant(mask, list(range(width, 2 * width))))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """``prefetch(array, i)``: bring the cache line of flat element i of a C-contiguous array closer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        pointer = builder.bitcast(_address(context, builder, signature.args[0], *args), byte_pointer)
        builder.call(function, [pointer, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def sum_of_squares(typingctx: Any, row: Any, blocks: Any) -> Any:
    """``sum_of_squares(row, b)``: Σ row² over 16 · b columns; halving trees inside blocks, blocks in order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = cgutils.alloca_once_value(builder, ir.FloatType()(0.0))
        with cgutils.for_range(builder, args[1]) as loop:
            at = builder.mul(loop.index, loop.index.type(16))
            x = _load16(builder, _address(context, builder, signature.args[0], args[0], at))
            partial = _halving_sum(builder, builder.fmul(x, x))
            builder.store(builder.fadd(builder.load(total), partial), total)
        return builder.load(total)

    return types.float32(row, types.intp), codegen


@intrinsic
def dot_rows(typingctx: Any, rows: Any, first: Any, second: Any, blocks: Any) -> Any:
    """``dot_rows(rows, i, j, b)``: Σ rows[i + c] · rows[j + c] over 16 · b flat elements, in 16 lanes, then halving."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * 16))
        with cgutils.for_range(builder, args[3]) as loop:
            at = builder.mul(loop.index, loop.index.type(16))
            x = _load16(builder, _address(context, builder, signature.args[0], args[0], builder.add(args[1], at)))
            y = _load16(builder, _address(context, builder, signature.args[0], args[0], builder.add(args[2], at)))
            builder.store(builder.fadd(builder.load(total), builder.fmul(x, y)), total)
        return _halving_sum(builder, builder.load(total))

    return types.float32(rows, types.intp, types.intp, types.intp), codegen
