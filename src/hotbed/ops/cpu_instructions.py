# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Emit instructions that Numba does not expose: prefetch, streaming stores, bfloat16 and unchecked indices."""

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
    """Return a pointer to flat element ``index`` of a C-contiguous array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _load16(builder: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4, typ=_VECTOR)


def widen(builder: Any, pointer: Any, kind: Any) -> Any:
    """Load a float32 scalar or vector from a pointer to float32 or to bits of bfloat16."""
    if pointer.type.pointee == ir.FloatType():
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4, typ=kind)
    lanes = kind.count if isinstance(kind, ir.VectorType) else 0
    int16, int32 = (ir.VectorType(ir.IntType(n), lanes) if lanes else ir.IntType(n) for n in (16, 32))
    bits = builder.load(builder.bitcast(pointer, int16.as_pointer()), align=2, typ=int16)
    return builder.bitcast(builder.shl(builder.zext(bits, int32), _constant(int32, 16)), kind)


def prefetch_line(builder: Any, pointer: Any) -> None:
    """Prefetch the cache line at a pointer; see `prefetch_bytes`."""
    byte_pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
    builder.call(function, [builder.bitcast(pointer, byte_pointer), int32(0), int32(2), int32(1)])


def _constant(kind: Any, value: int) -> Any:
    return kind([value] * kind.count) if isinstance(kind, ir.VectorType) else kind(value)


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    """Round a float32 scalar or vector to the nearest bfloat16 (ties to even), and return the bits."""
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
    """Prefetch ``nbytes`` bytes from flat element i of a C-contiguous array on into the L2 cache.

    Prefetching into L1 made updates 15 % slower, because L1 has fewer buffers for pending cache lines.
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
    """Return flat element i: ``peek(array, i)``. Numba's own indexing checks the sign, which prevents vectorization."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(address(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), codegen


@intrinsic
def poke(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Set flat element i: ``poke(array, i, x)``. Like `peek`, it does not check the index."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], address(context, builder, signature.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """Return flat element i as float32: ``load(array, i)``. An array of uint16 has the bits of bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return widen(builder, address(context, builder, signature.args[0], *args), ir.FloatType())

    return types.float32(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Store float32 to flat element i: ``store(array, i, x)``. uint16 gets bfloat16, rounded to the nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, args[2], address(context, builder, signature.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


def _store(builder: Any, value: Any, pointer: Any) -> Any:
    """Store a float32 scalar or vector to a pointer to float32 or to bits of bfloat16."""
    if pointer.type.pointee != ir.FloatType():
        value = _bfloat16_bits(builder, value)
    return builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=2)


@intrinsic
def store_row(typingctx: Any, array: Any, index: Any, values: Any, at: Any, size: Any) -> Any:
    """Call `store` for n float32 values from ``values[j]`` on, 16 at a time: ``store_row(array, i, values, j, n)``.

    A loop in Numba would check before each row whether arrays overlap. These checks took longer than the row.
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
    """Store a cache line without caching it, from 16 values, or from 32 values that are rounded to bfloat16."""
    line = _load16(builder, source)
    if narrow:
        # Both halves are in one store. LLVM would replace a store of one half by a truncating store without streaming.
        second = _load16(builder, builder.gep(source, [ir.Constant(ir.IntType(64), 16)]))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 32), list(range(32)))
        line = builder.shuffle_vector(_bfloat16_bits(builder, line), _bfloat16_bits(builder, second), lanes)
    stored = builder.store(line, builder.bitcast(to, line.type.as_pointer()), align=LINE_BYTES)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


@intrinsic
def stream_row(typingctx: Any, array: Any, index: Any, values: Any, at: Any, size: Any) -> Any:
    """Store n values from ``values[j]`` on without caching them: ``stream_row(array, i, values, j, n)``.

    ``values`` have 32 bits each. ``array[i]`` must begin a cache line, and n values must fill whole cache lines. Call
    `streams_end` to make them visible to other threads.
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
    """Make the streamed stores of this thread visible to other threads."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
