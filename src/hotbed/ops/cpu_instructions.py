# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Emit the few instructions that Numba does not expose: prefetch, streaming store, bfloat16, unchecked index."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
"""Bytes per cache line."""

_VECTOR = ir.VectorType(ir.FloatType(), 16)


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to element ``index`` of a C-contiguous array, counted over its flat data."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _load16(builder: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4, typ=_VECTOR)


def widen(builder: Any, pointer: Any, kind: Any) -> Any:
    """Load float32, a vector or one, from a pointer to float32 or to bits of bfloat16."""
    if pointer.type.pointee == ir.FloatType():
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4, typ=kind)
    lanes = kind.count if isinstance(kind, ir.VectorType) else 0
    int16, int32 = (ir.VectorType(ir.IntType(n), lanes) if lanes else ir.IntType(n) for n in (16, 32))
    bits = builder.load(builder.bitcast(pointer, int16.as_pointer()), align=2, typ=int16)
    return builder.bitcast(builder.shl(builder.zext(bits, int32), _constant(int32, 16)), kind)


def prefetch_line(builder: Any, pointer: Any) -> None:
    """Bring the cache line that a pointer points into closer; see `prefetch_bytes`."""
    byte_pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
    builder.call(function, [builder.bitcast(pointer, byte_pointer), int32(0), int32(2), int32(1)])


def _constant(kind: Any, value: int) -> Any:
    return kind([value] * kind.count) if isinstance(kind, ir.VectorType) else kind(value)


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    """Bits of a float32, or of 16, as bfloat16, rounded to the nearest even."""
    lanes = value.type.count if isinstance(value.type, ir.VectorType) else 0
    int16, int32 = (ir.VectorType(ir.IntType(n), lanes) if lanes else ir.IntType(n) for n in (16, 32))
    bits = builder.bitcast(value, int32)
    odd = builder.and_(builder.lshr(bits, _constant(int32, 16)), _constant(int32, 1))
    rounded = builder.add(bits, builder.add(odd, _constant(int32, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, builder.or_(bits, _constant(int32, 0x400000)), rounded)
    return builder.trunc(builder.lshr(rounded, _constant(int32, 16)), int16)


@intrinsic
def prefetch_bytes(typingctx: Any, array: Any, index: Any, nbytes: Any) -> Any:
    """Bring the cache lines of ``nbytes`` bytes from flat element i of a C-contiguous array on into the L2 cache.

    Not into L1, which has fewer buffers for lines on their way: there, updates took 15 % longer (docs/log.md).
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = address(context, builder, signature.args[0], *args[:2])
        first = builder.bitcast(first, ir.IntType(8).as_pointer())
        lines = builder.udiv(builder.add(args[2], args[2].type(LINE_BYTES - 1)), args[2].type(LINE_BYTES))
        with cgutils.for_range(builder, lines) as loop:
            prefetch_line(builder, builder.gep(first, [builder.mul(loop.index, loop.index.type(LINE_BYTES))]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


@intrinsic
def peek(typingctx: Any, array: Any, index: Any) -> Any:
    """``peek(array, i)``: flat element i. Numba's own index asks whether it is negative, and so no vector code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(address(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), codegen


@intrinsic
def poke(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """``poke(array, i, x)``: set flat element i, as `peek` reads it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], address(context, builder, signature.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """``load(array, i)``: flat element i as float32; an array of uint16 holds the bits of bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return widen(builder, address(context, builder, signature.args[0], *args), ir.FloatType())

    return types.float32(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """``store(array, i, x)``: float32 into flat element i; into uint16 as bfloat16, rounded to the nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[2], address(context, builder, signature.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


def _store(builder: Any, value: Any, pointer: Any) -> Any:
    """Store float32, a vector or one, to a pointer to float32 or to bits of bfloat16."""
    if pointer.type.pointee != ir.FloatType():
        value = _bfloat16_bits(builder, value)
    return builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=2)


@intrinsic
def store_row(typingctx: Any, array: Any, index: Any, values: Any, at: Any, size: Any) -> Any:
    """``store_row(array, i, values, j, n)``: `store` n values of float32 from ``values[j]`` on, 16 at a time.

    Loops in Numba ask before each row whether arrays overlap, and what will remain; that took longer than the row.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = address(context, builder, signature.args[0], *args[:2])
        source = address(context, builder, signature.args[2], *args[2:4])
        size = args[4]
        blocks = builder.lshr(size, size.type(4))
        with cgutils.for_range(builder, blocks) as loop:
            d = builder.shl(loop.index, size.type(4))
            _store(builder, _load16(builder, builder.gep(source, [d])), builder.gep(to, [d]))
        with cgutils.for_range(builder, size, start=builder.shl(blocks, size.type(4))) as loop:
            _store(builder, builder.load(builder.gep(source, [loop.index])), builder.gep(to, [loop.index]))
        return context.get_dummy_value()

    return types.void(array, types.intp, values, types.intp, types.intp), codegen


def _stream(builder: Any, source: Any, to: Any, narrow: bool) -> None:
    """Store the cache line that a pointer points to past the caches, from 16 values, or 32 that become bfloat16."""
    line = _load16(builder, source)
    if narrow:
        # Both halves in one store: LLVM turns the store of one into one that truncates and is no longer special.
        second = _load16(builder, builder.gep(source, [ir.Constant(ir.IntType(64), 16)]))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 32), list(range(32)))
        line = builder.shuffle_vector(_bfloat16_bits(builder, line), _bfloat16_bits(builder, second), lanes)
    stored = builder.store(line, builder.bitcast(to, line.type.as_pointer()), align=LINE_BYTES)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


@intrinsic
def stream_row(typingctx: Any, array: Any, index: Any, values: Any, at: Any, size: Any) -> Any:
    """``stream_row(array, i, values, j, n)``: `store` n values from ``values[j]`` on, past the caches.

    ``values`` are of 32 bits each; ``array[i]`` must begin a cache line, and n fill whole ones. `streams_end` makes
    them visible to other threads.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = address(context, builder, signature.args[0], *args[:2])
        source = address(context, builder, signature.args[2], *args[2:4])
        size, narrow = args[4], signature.args[0].dtype == types.uint16
        shift = size.type(5 if narrow else 4)
        with cgutils.for_range(builder, builder.lshr(size, shift)) as loop:
            d = builder.shl(loop.index, shift)
            _stream(builder, builder.gep(source, [d]), builder.gep(to, [d]), narrow)
        return context.get_dummy_value()

    return types.void(array, types.intp, values, types.intp, types.intp), codegen


@intrinsic
def streams_end(typingctx: Any) -> Any:
    """Make all that this thread has streamed visible to other threads that are told so from here on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
