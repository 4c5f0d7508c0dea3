# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Convert low-precision rows to float32 and round into them, many columns at a time, in LLVM.

The bits equal the bits of `hotbed.ops.rows`. *float16* is converted by a CPU instruction if the CPU has one. Otherwise
integer arithmetic is used, because LLVM would call a function that Numba does not link. *fp8* is converted through the
float16 with the same bits, which is 2⁻⁸ times as large, because it has one more bit of exponent. Only NaN has another
bit pattern. No operation reads or returns a float32 below the smallest normal number, because a process may flush such
numbers to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from hotbed.ops.cpu_instructions import address
from hotbed.ops.layout import SCALE_BLOCK
from hotbed.ops.rows import INT8_NAN, MIN_EXPONENT

WIDE, BF16, FP16, INT8, FP8 = range(5)
"""Codes of the dtype of an arena's low-precision rows. `WIDE`: all rows are float32, and slots are positions."""

NARROW = (BF16, FP16, INT8, FP8)

_FLOAT = ir.FloatType()
_INFINITY = 0x7F800000
COLUMN_BYTES = {BF16: 2, FP16: 2, INT8: 1, FP8: 1}


def cpu_has(feature: str) -> bool:
    """Return whether kernels are compiled for CPUs with an LLVM feature, by `numba.config` or for the host's CPU."""
    asked = numba.config.CPU_FEATURES
    return f"+{feature}" in (get_host_cpu_features() if asked is None else asked).split(",")


def integers(bits: int, lanes: int) -> ir.VectorType:
    """Return the type of a vector of integers."""
    return ir.VectorType(ir.IntType(bits), lanes)


def each(kind: ir.VectorType, value: float) -> ir.Constant:
    """Return a constant vector with the same value in every element."""
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """Return a vector with a scalar in every element."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, ir.Constant(one.type, ir.Undefined), each(integers(32, lanes), 0))


def float16(context: Any, builder: Any, bits: Any) -> Any:
    """Convert bits of float16 ``<n x i16>`` to float32. NaN becomes quiet and keeps its sign and payload."""
    lanes = bits.type.count
    floats, int32 = ir.VectorType(_FLOAT, lanes), integers(32, lanes)
    if cpu_has("f16c") or context.codegen().magic_tuple()[0].startswith(("aarch64", "arm64")):
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), floats)
    bits = builder.zext(bits, int32)
    magnitude = builder.and_(bits, each(int32, 0x7FFF))
    sign = builder.shl(builder.xor(bits, magnitude), each(int32, 16))
    shifted = builder.shl(magnitude, each(int32, 13))
    normal = builder.add(shifted, each(int32, (127 - 15) << 23))
    quanta = builder.fmul(builder.sitofp(magnitude, floats), each(floats, 2.0**-24))
    special = builder.or_(shifted, each(int32, 0xFF << 23))
    quiet = builder.or_(special, each(int32, 1 << 22))
    special = builder.select(builder.icmp_signed(">", magnitude, each(int32, 0x7C00)), quiet, special)
    finite = builder.icmp_signed("<", magnitude, each(int32, 0x7C00))
    subnormal = builder.icmp_signed("<", magnitude, each(int32, 0x400))
    found = builder.select(subnormal, builder.bitcast(quanta, int32), builder.select(finite, normal, special))
    return builder.bitcast(builder.or_(found, sign), floats)


def _float8(context: Any, builder: Any, bits: Any) -> Any:
    lanes = bits.type.count
    floats, int8, int16 = ir.VectorType(_FLOAT, lanes), integers(8, lanes), integers(16, lanes)
    half = builder.and_(builder.shl(builder.sext(bits, int16), each(int16, 7)), each(int16, 0xBF80))
    is_nan = builder.icmp_unsigned("==", builder.and_(bits, each(int8, 0x7F)), each(int8, 0x7F))
    half = builder.select(is_nan, builder.or_(half, each(int16, 0x4000)), half)
    return builder.fmul(float16(context, builder, half), each(floats, 256.0))


def _int8(builder: Any, q: Any, exponent: Any) -> Any:
    lanes, int32 = q.type.count, ir.IntType(32)
    floats = ir.VectorType(_FLOAT, lanes)
    scale = builder.bitcast(builder.shl(builder.add(builder.sext(exponent, int32), int32(127)), int32(23)), _FLOAT)
    values = builder.fmul(builder.sitofp(q, floats), splat(builder, scale, lanes))
    is_nan = builder.icmp_signed("==", q, each(q.type, INT8_NAN))
    return builder.select(is_nan, each(floats, float("nan")), values)


def row_address(builder: Any, array: Any, nbytes: int, dim: Any, at: Any, d: Any) -> Any:
    """Return a byte pointer to column ``d`` of row ``at``. ``array`` points to the first row."""
    column = builder.add(builder.mul(at, dim), d)
    first = builder.bitcast(array, ir.IntType(8).as_pointer())
    return builder.gep(first, [builder.mul(column, column.type(nbytes))])


def exponent_address(builder: Any, exponents: Any, dim: Any, at: Any, d: Any) -> Any:
    """Return a pointer to the exponent of column ``d`` of int8 row ``at``."""
    size = dim.type(SCALE_BLOCK)
    blocks = builder.udiv(builder.add(dim, dim.type(SCALE_BLOCK - 1)), size)
    return builder.gep(exponents, [builder.add(builder.mul(at, blocks), builder.udiv(d, size))])


def narrow_columns(
    context: Any, builder: Any, kind: int, lanes: int, narrow: Any, exponents: Any, dim: Any, at: Any, d: Any
) -> Any:
    """Read columns ``d … d + lanes − 1`` of low-precision row ``at`` as float32. ``lanes`` divides 128 and ``d``."""
    bits = integers(8 * COLUMN_BYTES[kind], lanes)
    pointer = row_address(builder, narrow, COLUMN_BYTES[kind], dim, at, d)
    values = builder.load(builder.bitcast(pointer, bits.as_pointer()), align=COLUMN_BYTES[kind], typ=bits)
    if kind == BF16:
        wide = builder.zext(values, integers(32, lanes))
        return builder.bitcast(builder.shl(wide, each(wide.type, 16)), ir.VectorType(_FLOAT, lanes))
    if kind == FP16:
        return float16(context, builder, values)
    if kind == FP8:
        return _float8(context, builder, values)
    exponent = builder.load(exponent_address(builder, exponents, dim, at, d), typ=ir.IntType(8))
    return _int8(builder, values, exponent)


def for_each_kind(builder: Any, kind: Any, body: Callable[[int], None]) -> None:
    """Emit code for every low-precision dtype. At run time, only the code of the dtype ``kind`` runs."""
    end, unknown = builder.append_basic_block("kind.end"), builder.append_basic_block("kind.unknown")
    chosen = builder.switch(kind, unknown)
    for number in NARROW:
        block = builder.append_basic_block(f"kind.{number}")
        chosen.add_case(kind.type(number), block)
        builder.position_at_end(block)
        body(number)
        builder.branch(end)
    builder.position_at_end(unknown)
    builder.unreachable()
    builder.position_at_end(end)


def chunks(builder: Any, dim: Any, sizes: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """Emit loops over ``dim`` columns in chunks of each size in turn. Yield the size and the first column."""
    done = dim.type(0)
    for size in sizes:
        count = builder.udiv(builder.sub(dim, done), dim.type(size))
        with cgutils.for_range(builder, count) as loop:
            yield size, builder.add(done, builder.mul(loop.index, dim.type(size)))
        done = builder.add(done, builder.mul(count, dim.type(size)))


@intrinsic
def read_stored_row(typingctx: Any, out: Any, kind: Any, narrow: Any, exponents: Any, dim: Any, at: Any) -> Any:
    """Read low-precision row ``at`` as float32 into ``out[:dim]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, kind, _, _, dim, at = args
        narrow, exponents = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (2, 3))

        def read(of: int) -> None:
            for lanes, d in chunks(builder, dim, (16, 4, 1)):
                values = narrow_columns(context, builder, of, lanes, narrow, exponents, dim, at, d)
                pointer = address(context, builder, signature.args[0], out, d)
                builder.store(values, builder.bitcast(pointer, values.type.as_pointer()), align=4)

        for_each_kind(builder, kind, read)
        return context.get_dummy_value()

    n = types.intp
    return types.void(out, n, narrow, exponents, n, n), codegen


# -- rounding --------------------------------------------------------------------------------------------------------


def _random(builder: Any, key: Any, first: Any, lanes: int) -> Any:
    """Compute `hotbed.ops.cpu_rows.cell_bits` for columns from ``first`` on."""
    int32 = integers(32, lanes)
    columns = builder.add(splat(builder, first, lanes), ir.Constant(int32, list(range(lanes))))
    x = builder.add(splat(builder, key, lanes), builder.mul(columns, each(int32, 0x9E3779B9)))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = builder.mul(builder.xor(x, builder.lshr(x, each(int32, shift))), each(int32, factor))
    return builder.xor(x, builder.lshr(x, each(int32, 16)))


def _up_or_down(builder: Any, y: Any, random: Any) -> Any:
    """Round ``0 ≤ y < 2³¹`` stochastically to an adjacent integer."""
    low = builder.fptosi(y, random.type)
    above = builder.fsub(y, builder.sitofp(low, y.type))
    u = builder.fmul(builder.uitofp(builder.lshr(random, each(random.type, 8)), y.type), each(y.type, 2.0**-24))
    return builder.add(low, builder.zext(builder.fcmp_ordered("<", u, above), random.type))


def _round(builder: Any, kind: int, bits: Any, random: Any, inverse: Any) -> Any:
    """Round float32 ``bits`` stochastically. The result is in the lower bits. ``inverse`` is 1 / scale for int8."""
    int32 = bits.type
    lanes = int32.count
    magnitude = builder.and_(bits, each(int32, 0x7FFFFFFF))
    finite = builder.icmp_signed("<", magnitude, each(int32, _INFINITY))
    is_nan = builder.icmp_signed(">", magnitude, each(int32, _INFINITY))
    if kind == BF16:
        moved = builder.add(bits, builder.lshr(random, each(int32, 16)))
        moved = builder.select(finite, moved, builder.select(is_nan, builder.or_(bits, each(int32, 1 << 22)), bits))
        return builder.lshr(moved, each(int32, 16))
    value = builder.bitcast(magnitude, ir.VectorType(_FLOAT, lanes))
    negative = builder.icmp_signed("<", bits, each(int32, 0))
    if kind == INT8:
        q = _up_or_down(builder, builder.fmul(value, splat(builder, inverse, lanes)), random)
        return builder.select(
            finite, builder.select(negative, builder.sub(each(int32, 0), q), q), each(int32, INT8_NAN)
        )
    # The value is q · 2^(exponent − digits). If q is rounded up to the next power of two, it carries into the exponent.
    # At the smallest exponent, a q without the leading digit is a subnormal number.
    digits, bias, largest = (10, 15, 0x7C00) if kind == FP16 else (3, 7, 0x7F)
    exponent = builder.sub(builder.lshr(magnitude, each(int32, 23)), each(int32, 127))
    small = builder.icmp_signed("<", exponent, each(int32, 1 - bias))
    exponent = builder.select(small, each(int32, 1 - bias), exponent)
    quanta = builder.shl(builder.sub(each(int32, 127 + digits), exponent), each(int32, 23))
    q = _up_or_down(builder, builder.fmul(value, builder.bitcast(quanta, value.type)), random)
    rounded = builder.add(builder.shl(builder.add(exponent, each(int32, bias - 1)), each(int32, digits)), q)
    within = builder.and_(finite, builder.icmp_signed("<", rounded, each(int32, largest)))
    beyond = each(int32, largest)  # infinity; NaN of fp8
    if kind == FP16:
        payload = builder.and_(builder.lshr(magnitude, each(int32, 13)), each(int32, 0x3FF))
        beyond = builder.select(is_nan, builder.or_(payload, each(int32, 0x7E00)), beyond)
    sign = builder.shl(builder.lshr(bits, each(int32, 31)), each(int32, 8 * COLUMN_BYTES[kind] - 1))
    return builder.or_(builder.select(within, rounded, beyond), sign)


def _exponent_for(builder: Any, values: Any, count: Any) -> Any:
    """Return the smallest int8 exponent that holds all finite values of ``count`` values, as i32."""
    int32 = ir.IntType(32)
    largest = {lanes: cgutils.alloca_once(builder, integers(32, lanes)) for lanes in (16, 1)}
    for lanes, so_far in largest.items():
        builder.store(each(integers(32, lanes), 0), so_far)

    def larger(x: Any, y: Any) -> Any:
        return builder.select(builder.icmp_signed(">", x, y), x, y)

    for lanes, d in chunks(builder, count, largest):
        magnitude = builder.and_(_bits(builder, values, d, lanes), each(integers(32, lanes), 0x7FFFFFFF))
        finite = builder.icmp_signed("<", magnitude, each(magnitude.type, _INFINITY))
        magnitude = builder.select(finite, magnitude, each(magnitude.type, 0))
        builder.store(larger(magnitude, builder.load(largest[lanes])), largest[lanes])
    sixteen = builder.load(largest[16])
    bits = builder.extract_element(builder.load(largest[1]), int32(0))
    for lane in range(16):
        bits = larger(bits, builder.extract_element(sixteen, int32(lane)))
    needed = builder.sub(builder.lshr(bits, int32(23)), int32(127 + 6))
    more = builder.icmp_signed(">", builder.and_(bits, int32(0x7FFFFF)), int32(0x7E0000))
    return larger(builder.add(needed, builder.zext(more, int32)), int32(MIN_EXPONENT))


def _bits(builder: Any, values: Any, d: Any, lanes: int) -> Any:
    """Load the bits of float32 ``values[d : d + lanes]``. ``values`` points to the first value."""
    pointer = builder.bitcast(builder.gep(values, [d]), integers(32, lanes).as_pointer())
    return builder.load(pointer, align=4, typ=integers(32, lanes))


@intrinsic
def write_stored_row(
    typingctx: Any,
    values: Any,
    kind: Any,
    narrow: Any,
    exponents: Any,
    dim: Any,
    at: Any,
    key: Any,
    first_col: Any,
) -> Any:
    """Round ``values[:dim]`` stochastically into low-precision row ``at``, with the random bits of a `row_key`.

    For example, an int8 row has the exponent −9 and gets the values 1.0 and 0.3::

        exponent   −6: the smallest with 127 · 2^e ≥ 1.0
        1.0        64 · 2⁻⁶, exactly
        0.3        19.2 · 2⁻⁶: 20 if the upper 24 random bits are below 0.2 · 2²⁴, else 19
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, kind, _, _, dim, at, key, first_col = args
        values, narrow, exponents = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2, 3)
        )
        first_col = builder.trunc(first_col, ir.IntType(32))

        def write(of: int, begin: Any, count: Any, inverse: Any) -> None:
            size = COLUMN_BYTES[of]
            for lanes, chunk in chunks(builder, count, (16, 4, 1)):
                d = builder.add(begin, chunk)
                random = _random(builder, key, builder.add(first_col, builder.trunc(d, first_col.type)), lanes)
                rounded = _round(builder, of, _bits(builder, values, d, lanes), random, inverse)
                rounded = builder.trunc(rounded, integers(8 * size, lanes))
                pointer = row_address(builder, narrow, size, dim, at, d)
                builder.store(rounded, builder.bitcast(pointer, rounded.type.as_pointer()), align=size)

        def write_all(of: int) -> None:
            if of != INT8:
                write(of, dim.type(0), dim, None)
                return
            block = dim.type(SCALE_BLOCK)
            blocks = builder.udiv(builder.add(dim, dim.type(SCALE_BLOCK - 1)), block)
            with cgutils.for_range(builder, blocks) as loop:
                begin = builder.mul(loop.index, block)
                left = builder.sub(dim, begin)
                count = builder.select(builder.icmp_signed("<", left, block), left, block)
                kept = exponent_address(builder, exponents, dim, at, begin)
                needed = _exponent_for(builder, builder.gep(values, [begin]), count)
                before = builder.sext(builder.load(kept), needed.type)
                exponent = builder.select(builder.icmp_signed(">", needed, before), needed, before)
                builder.store(builder.trunc(exponent, ir.IntType(8)), kept)
                inverse = builder.shl(builder.sub(needed.type(127), exponent), needed.type(23))
                write(of, begin, count, builder.bitcast(inverse, _FLOAT))

        for_each_kind(builder, kind, write_all)
        return context.get_dummy_value()

    n = types.intp
    return types.void(values, n, narrow, exponents, n, n, types.uint32, n), codegen
