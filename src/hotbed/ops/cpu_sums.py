# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Sum rows and columns on the CPU in an order that the source code defines.

No kernel is compiled with ``fastmath``, so LLVM must not reorder sums. Fast sums use explicit vectors instead. Sums
over rows keep many columns in registers while they iterate over rows. Columns are independent, so their number does not
change bits. Sums over columns use halving trees inside blocks of 16 columns, as `hotbed.ops.reference.block_sum` does,
for eight blocks at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotbed.ops.cpu_instructions import LINE_BYTES, address, load, prefetch_bytes, prefetch_line, widen
from hotbed.ops.cpu_narrow import (
    COLUMN_BYTES,
    INT8,
    chunks,
    cpu_has,
    exponent_address,
    for_each_kind,
    narrow_columns,
    row_address,
    splat,
)
from hotbed.ops.cpu_runtime import PREFETCH_ROWS, kernel

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_WIDEST = 128 if cpu_has("avx512f") else 64
"""Number of columns that are summed at once. They fit into half of the vector registers."""
_CHUNKS = sorted({_WIDEST, 64, 16, 4, 1}, reverse=True)


def _shuffled(builder: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _block_sums(builder: Any, vector: Any) -> Any:
    """Sum each block of 16 elements by adding its upper half to its lower half, four times."""
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
    """Return ``Σ x[x_at + i] · y[y_at + i]`` over 16 · blocks flat elements.

    Halving trees sum the elements of a block. Blocks are then added in order.
    """

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


def _sum(builder: Any, start: Any, stop: Any, row: Callable[[Any], Any]) -> Any:
    """Sum the vectors ``row(p)`` of at least one position ``start … stop − 1``, left to right, in registers."""
    one = start.type(1)
    first, second = row(start), builder.add(start, one)
    before = builder.block
    head, body, end = (builder.append_basic_block(f"rows.{name}") for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    p, total = builder.phi(start.type), builder.phi(first.type)
    builder.cbranch(builder.icmp_signed("<", p, stop), body, end)
    builder.position_at_end(body)
    longer, after = builder.fadd(total, row(p)), builder.add(p, one)
    last = builder.block
    builder.branch(head)
    for phi, incoming in ((p, (second, after)), (total, (first, longer))):
        phi.add_incoming(incoming[0], before)
        phi.add_incoming(incoming[1], last)
    builder.position_at_end(end)
    return total


def _sum_weighted(
    context: Any, builder: Any, scale_type: Any, scale: Any, start: Any, stop: Any, row: Callable[[Any], Any], out: Any
) -> None:
    """Store the `_sum` of vectors, multiplied by their factors in ``scale`` unless it is empty."""

    def scaled(p: Any) -> Any:
        vector = row(p)
        factor = builder.load(address(context, builder, scale_type, scale, p))
        return builder.fmul(vector, splat(builder, factor, vector.type.count))

    def store(total: Any) -> None:
        builder.store(total, builder.bitcast(out, total.type.as_pointer()), align=4)

    factors = context.make_array(scale_type)(context, builder, scale)
    count = builder.extract_value(factors.shape, 0)
    with builder.if_else(builder.icmp_signed("==", count, count.type(0))) as (plain, weighted):
        with plain:
            store(_sum(builder, start, stop, row))
        with weighted:
            store(_sum(builder, start, stop, scaled))


def _place(context: Any, builder: Any, index_type: Any, index: Any, p: Any) -> Any:
    """Load entry p of an index of rows as int64."""
    row = builder.load(address(context, builder, index_type, index, p))
    return row if row.type == p.type else builder.sext(row, p.type)


def _ahead(builder: Any, p: Any, last: Any) -> Any:
    """Return the position to prefetch while position p is read."""
    ahead = builder.add(p, p.type(PREFETCH_ROWS))
    return builder.select(builder.icmp_signed("<", ahead, last), ahead, builder.sub(last, p.type(1)))


def _prefetch(builder: Any, pointer: Any, nbytes: int) -> None:
    first = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    for line in range(0, nbytes, LINE_BYTES):
        prefetch_line(builder, builder.gep(first, [ir.IntType(64)(line)]))


def _sum_columns(lanes: int) -> Any:
    """Create the intrinsic of `sum_rows` for the columns ``d … d + lanes − 1``."""
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
            acc, values, dim, index, base, scale, start, stop, last, d = args
            of_acc, of_values, _, of_index, _, of_scale, *_ = signature.args

            def element(p: Any) -> Any:
                """Return a pointer to the columns of the row at entry p of the index."""
                row = builder.add(_place(context, builder, of_index, index, p), base)
                return address(context, builder, of_values, values, builder.add(builder.mul(row, dim), d))

            def row(p: Any) -> Any:
                _prefetch(builder, element(_ahead(builder, p, last)), lanes * of_values.dtype.bitwidth // 8)
                return widen(builder, element(p), kind)

            out = address(context, builder, of_acc, acc, d)
            _sum_weighted(context, builder, of_scale, scale, start, stop, row, out)
            return context.get_dummy_value()

        n = types.intp
        return types.void(acc, values, n, index, n, scale, n, n, n, n), codegen

    return sum_columns


@intrinsic
def sum_stored_rows(
    typingctx: Any,
    acc: Any,
    kind: Any,
    wide: Any,
    narrow: Any,
    exponents: Any,
    dim: Any,
    ids: Any,
    wide_rows: Any,
    first_wide: Any,
    first_narrow: Any,
    scale: Any,
    start: Any,
    stop: Any,
    last: Any,
) -> Any:
    """Sum rows of a table into ``acc[:dim]`` as `sum_rows` does. Rows from ``wide_rows`` on are low-precision rows.

    The arrays are the arrays of `hotbed.ops.cpu_rows.RowArrays`. The first rows of the table in them are ``first_wide``
    and ``first_narrow``. For example, the ids are 0, 3, 1, and the table has 2 wide rows and first rows 10 and 20::

        wide row 10 + narrow row 21 + wide row 11

    It is one intrinsic, because a Numba function would count references for every bag.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, kind, _, _, _, dim, ids, wide_rows, first_wide, first_narrow, _, start, stop, last = args
        arrays = [context.make_array(signature.args[i])(context, builder, args[i]) for i in (2, 3, 4, 10)]
        wide, narrow, exponents, factors = (array.data for array in arrays)
        # Without weights, the factor is 1. This does not change bits and avoids a second version of the loop.
        weighted = builder.icmp_signed("!=", builder.extract_value(arrays[3].shape, 0), dim.type(0))
        factors = builder.select(weighted, factors, cgutils.global_constant(builder, "one", _FLOAT(1.0)))
        weighted = builder.zext(weighted, dim.type)
        narrow_base = builder.sub(first_narrow, wide_rows)

        def find(p: Any) -> tuple[Any, Any, Any]:
            """Return whether the row of an id is wide, and its positions as a wide and as a low-precision row."""
            row = _place(context, builder, signature.args[6], ids, p)
            is_wide = builder.icmp_signed("<", row, wide_rows)
            return is_wide, builder.add(row, first_wide), builder.add(row, narrow_base)

        def prefetch(of: int, lanes: int, d: Any, p: Any) -> None:
            is_wide, in_wide, in_narrow = find(_ahead(builder, p, last))
            size = COLUMN_BYTES[of]
            with builder.if_else(is_wide, likely=False) as (yes, no):
                with yes:
                    _prefetch(builder, row_address(builder, wide, 4, dim, in_wide, d), 4 * lanes)
                with no:
                    _prefetch(builder, row_address(builder, narrow, size, dim, in_narrow, d), size * lanes)
                    if of == INT8:
                        _prefetch(builder, exponent_address(builder, exponents, dim, in_narrow, d), 1)

        def row(of: int, lanes: int, d: Any, p: Any) -> Any:
            prefetch(of, lanes, d, p)
            is_wide, in_wide, in_narrow = find(p)
            floats = ir.VectorType(_FLOAT, lanes)
            with builder.if_else(is_wide, likely=False) as (yes, no):
                with yes:
                    pointer = row_address(builder, wide, 4, dim, in_wide, d)
                    from_wide = widen(builder, builder.bitcast(pointer, _FLOAT.as_pointer()), floats)
                    after_wide = builder.block
                with no:
                    from_narrow = narrow_columns(context, builder, of, lanes, narrow, exponents, dim, in_narrow, d)
                    after_narrow = builder.block
            vector = builder.phi(floats)
            vector.add_incoming(from_wide, after_wide)
            vector.add_incoming(from_narrow, after_narrow)
            factor = builder.load(builder.gep(factors, [builder.mul(p, weighted)]))
            return builder.fmul(vector, splat(builder, factor, lanes))

        def sum_all(of: int) -> None:
            for lanes, d in chunks(builder, dim, _CHUNKS):
                total = _sum(builder, start, stop, lambda p, lanes=lanes, d=d: row(of, lanes, d, p))
                out = address(context, builder, signature.args[0], acc, d)
                builder.store(total, builder.bitcast(out, total.type.as_pointer()), align=4)

        for_each_kind(builder, kind, sum_all)
        return context.get_dummy_value()

    n = types.intp
    return types.void(acc, n, wide, narrow, exponents, n, ids, n, n, n, scale, n, n, n), codegen


_sum_widest, _sum_block = _sum_columns(_WIDEST), _sum_columns(16)


@kernel(inline="always")
def sum_rows(acc, values, dim, index, base, scale, start, stop, last):
    """Sum rows into ``acc[:dim]``, left to right.

    The rows are ``index[p] + base`` for at least one position p in ``start … stop − 1``. The flat ``values`` are
    float32 or bits of bfloat16. ``scale`` is parallel to ``index`` and has factors of rows, or is empty. Following rows
    up to position ``last`` are prefetched.
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
            factor = scale[p] if scale.shape[0] else np.float32(1)  # a factor of 1 does not change bits
            for e in range(d, dim):
                x = load(values, at + e) * factor
                acc[e] = x if p == start else acc[e] + x
