# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Sums on the CPU, with the order of additions part of the source.

No kernel is compiled with ``fastmath``: LLVM may not reorder a sum. Where a sum is to be fast, its lanes are written
out as vectors here. Sums over rows keep as many columns in registers as fit, while they go from row to row; columns do
not meet, so how many these are changes no bit. Sums over columns halve inside blocks of 16 lanes, as
`hotbed.ops.reference_rules.block_sum` does, eight blocks side by side.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotbed.ops.cpu_instructions import LINE_BYTES, address, load, prefetch_bytes, prefetch_line, widen
from hotbed.ops.cpu_runtime import PREFETCH_ROWS, kernel

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_WIDEST = 128 if llvm.get_host_cpu_features().get("avx512f") else 64
"""Columns that are summed at once: what fits into half of the vector registers."""


def _shuffled(builder: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _block_sums(builder: Any, vector: Any) -> Any:
    """Sum each block of 16 lanes: its upper half onto its lower half, four times."""
    width = 16
    while width > 1:
        starts = range(0, vector.type.count, width)
        width //= 2
        low = _shuffled(builder, vector, [s + i for s in starts for i in range(width)])
        high = _shuffled(builder, vector, [s + width + i for s in starts for i in range(width)])
        vector = builder.fadd(low, high)
    return vector


@intrinsic
def sum_of_products(typingctx: Any, x: Any, x_at: Any, y: Any, y_at: Any, blocks: Any) -> Any:
    """``Σ x[x_at + i] · y[y_at + i]`` over 16 · blocks flat elements: halving trees inside blocks, blocks in order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int_type = args[4].type
        total = cgutils.alloca_once_value(builder, _FLOAT(0.0))

        def add(first: Any, count: Any, together: int) -> None:
            kind = ir.VectorType(_FLOAT, 16 * together)

            def values(which: int, at: Any) -> Any:
                pointer = address(
                    context, builder, signature.args[which], args[which], builder.add(args[which + 1], at)
                )
                return widen(builder, pointer, kind)

            with cgutils.for_range(builder, count) as loop:
                at = builder.add(first, builder.mul(loop.index, int_type(16 * together)))
                partials = _block_sums(builder, builder.fmul(values(0, at), values(2, at)))
                so_far = builder.load(total)
                for i in range(together):
                    so_far = builder.fadd(so_far, builder.extract_element(partials, _INT32(i)))
                builder.store(so_far, total)

        eights = builder.udiv(args[4], int_type(8))
        add(int_type(0), eights, 8)
        add(builder.mul(eights, int_type(128)), builder.urem(args[4], int_type(8)), 1)
        return builder.load(total)

    return types.float32(x, types.intp, y, types.intp, types.intp), codegen


def _sum_columns(lanes: int) -> Any:
    """Make the part of `sum_rows` that does the columns ``d … d + lanes − 1``."""
    kind = ir.VectorType(_FLOAT, lanes)

    @intrinsic
    def sum_columns(
        typingctx: Any,
        acc: Any,
        values: Any,
        dim: Any,
        index: Any,
        base: Any,
        scale: Any,
        start: Any,
        stop: Any,
        last: Any,
        d: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, _, dim, _, base, _, start, stop, last, d = args
            one = start.type(1)

            def element(p: Any) -> Any:
                """Pointer to the columns of the row that place p of the index names."""
                row = builder.load(address(context, builder, signature.args[3], args[3], p))
                if row.type != dim.type:
                    row = builder.sext(row, dim.type)
                at = builder.add(builder.mul(builder.add(row, base), dim), d)
                return address(context, builder, signature.args[1], args[1], at)

            def row(p: Any, scaled: bool) -> Any:
                ahead = builder.add(p, start.type(PREFETCH_ROWS))
                ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, builder.sub(last, one))
                pointer = element(ahead)
                for line in range(0, lanes, LINE_BYTES // (signature.args[1].dtype.bitwidth // 8)):
                    prefetch_line(builder, builder.gep(pointer, [start.type(line)]))
                vector = widen(builder, element(p), kind)
                if scaled:
                    factor = builder.load(address(context, builder, signature.args[5], args[5], p))
                    undefined = ir.Constant(kind, ir.Undefined)
                    one_lane = builder.insert_element(undefined, factor, _INT32(0))
                    vector = builder.fmul(vector, _shuffled(builder, one_lane, [0] * lanes))
                return vector

            def add_all(scaled: bool) -> None:
                first, second, before = row(start, scaled), builder.add(start, one), builder.block
                head, body, end = (builder.append_basic_block(f"rows.{name}") for name in ("head", "body", "end"))
                builder.branch(head)
                builder.position_at_end(head)
                p, total = builder.phi(start.type), builder.phi(kind)
                builder.cbranch(builder.icmp_signed("<", p, stop), body, end)
                builder.position_at_end(body)
                longer, after = builder.fadd(total, row(p, scaled)), builder.add(p, one)
                builder.branch(head)
                for phi, incoming in ((p, (second, after)), (total, (first, longer))):
                    phi.add_incoming(incoming[0], before)
                    phi.add_incoming(incoming[1], body)
                builder.position_at_end(end)
                out = address(context, builder, signature.args[0], args[0], d)
                builder.store(total, builder.bitcast(out, kind.as_pointer()), align=4)

            factors = context.make_array(signature.args[5])(context, builder, args[5])
            count = builder.extract_value(factors.shape, 0)
            with builder.if_else(builder.icmp_signed("==", count, count.type(0))) as (plain, weighted):
                with plain:
                    add_all(scaled=False)
                with weighted:
                    add_all(scaled=True)
            return context.get_dummy_value()

        n = types.intp
        return types.void(acc, values, n, index, n, scale, n, n, n, n), codegen

    return sum_columns


_sum_widest, _sum_block = _sum_columns(_WIDEST), _sum_columns(16)


@kernel(inline="always")
def sum_rows(acc, values, dim, index, base, scale, start, stop, last):
    """Sum rows into ``acc[:dim]``, left to right.

    Places ``start … stop − 1``, at least one, of ``index`` and ``base`` name the rows of the flat ``values`` (float32,
    or bits of bfloat16); ``scale``, parallel to ``index``, has their factors, or is empty. Rows that follow up to
    ``last`` are prefetched.
    """
    d = 0
    while d + _WIDEST <= dim:
        _sum_widest(acc, values, dim, index, base, scale, start, stop, last, d)
        d += _WIDEST
    while d + 16 <= dim:
        _sum_block(acc, values, dim, index, base, scale, start, stop, last, d)
        d += 16
    if d < dim:
        for p in range(start, stop):
            ahead = (np.int64(index[min(p + PREFETCH_ROWS, last - 1)]) + base) * dim + d
            prefetch_bytes(values, ahead, (dim - d) * values.itemsize)
            at = (np.int64(index[p]) + base) * dim
            factor = scale[p] if scale.shape[0] else np.float32(1)  # times 1 changes no bit
            for e in range(d, dim):
                x = load(values, at + e) * factor
                acc[e] = x if p == start else acc[e] + x
