"""Tensor-core intrinsics (``mma``, ``ldmatrix``, ``cp.async``), for sm_80 and later.

All 32 lanes of a warp multiply a matrix a [16, 16] by b [16, 8], and add the product to c [16, 8]. Lane 4 g + t holds:

16-bit types: two neighbors along k per register. Registers begin at a[g][2t], a[g + 8][2t], a[g][2t + 8] and a[g +
8][2t + 8]; at b[2t][g] and b[2t + 8][g]. Accumulators: c[g][2t], c[g][2t + 1], c[g + 8][2t], c[g + 8][2t + 1].

TF32: a is [16, 8] and b [8, 8]. One number per register: a[g][t], a[g + 8][t], a[g][t + 4] and a[g + 8][t + 4]; b[t][g]
and b[t + 4][g]. ``ldmatrix`` loads a row of four such numbers as eight 16-bit numbers.

8-bit types: a is [16, 32] (int8 or uint8, kinds ``i8`` and ``u8``), b [32, 8] (int8), accumulators are int32. Four
neighbors along k per register, at 4t and 4t + 16.

Operands are in shared memory. Shared-memory addresses are int64 byte addresses, as `shared_address` returns them.
`ort_cuda_plugin.compiler.host.matrices` emulates these intrinsics on the emulated device.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.typing import signature

from ort_cuda_plugin.compiler.host.matrices import (
    COPY,
    COPY_CACHED,
    COPY_CACHED_WHERE,
    COPY_COMMIT,
    COPY_WAIT,
    COPY_WHERE,
    INTEGERS,
    LOAD,
    LOAD_TRANSPOSED,
    PAIRS,
    PRODUCTS,
    ROUND_TF32,
    SHARED_ADDRESS,
)
from ort_cuda_plugin.compiler.intrinsics.tile_intrinsics import literal

i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
sums_type = types.CPointer(types.float32)
integer_sums_type = types.CPointer(types.int32)


def _address(builder: ir.IRBuilder, base: ir.Value, index: int) -> ir.Value:
    return builder.gep(base, [i64(index)])


def matrix_functions(kind: str) -> dict[str, Any]:
    """Return ``multiply_add_matrix_*(c, at, a0, a1, a2, a3, b0, b1)``, and the function that rounds floats to an
    operand.

    The latter is ``pair_*(x, y)`` for 16-bit types. For TF32 it is ``round_tf32(x)``, which rounds to nearest: half to
    even on GPUs from sm_90 on, else half away from zero. Integer accumulators wrap around.
    """
    integers = kind in INTEGERS
    element, pointer, letter = (i32, integer_sums_type, "r") if integers else (f32, sums_type, "f")

    def multiply_add(typingctx: Any, c: Any, at: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any) -> Any:
        first = literal(at)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            places = [_address(builder, args[0], first + i) for i in range(4)]
            given = [*args[2:], *(builder.load(place) for place in places)]
            result = ir.LiteralStructType([element] * 4)
            code = ir.InlineAsm(
                ir.FunctionType(result, [i32] * 6 + [element] * 4),
                PRODUCTS[kind],
                ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4),
                side_effect=True,
            )
            sums = builder.call(code, given)
            for i, place in enumerate(places):
                builder.store(builder.extract_value(sums, i), place)
            return context.get_dummy_value()

        return signature(types.none, pointer, at, *[types.uint32] * 6), codegen

    def pair(typingctx: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return builder.call(ir.InlineAsm(ir.FunctionType(i32, [f32, f32]), PAIRS[kind], "=r,f,f"), args[::-1])

        return signature(types.uint32, types.float32, types.float32), codegen

    def round_one(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return builder.call(ir.InlineAsm(ir.FunctionType(i32, [f32]), ROUND_TF32, "=r,f"), args)

        return signature(types.uint32, types.float32), codegen

    rounds = {} if integers else {"round_tf32": round_one} if kind == "tf32" else {f"pair_{kind}": pair}
    return {f"multiply_add_matrix_{kind}": multiply_add, **rounds}


def scale_matrix_f32(typingctx: Any, c: Any, first: Any, second: Any, count: Any) -> Any:
    """Multiply the accumulators of ``count`` adjacent matrices c: rows g by ``first``, rows g + 8 by ``second``."""
    number = literal(count)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        for i in range(4 * number):
            place = _address(builder, args[0], i)
            builder.store(builder.fmul(builder.load(place), args[1 + i % 4 // 2]), place)
        return context.get_dummy_value()

    return signature(types.none, sums_type, types.float32, types.float32, count), codegen


def shared_address(typingctx: Any, pointer: Any) -> Any:
    """Return the shared-memory address of a pointer, as int64."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        code = ir.InlineAsm(ir.FunctionType(i64, [args[0].type]), SHARED_ADDRESS, "=l,l")
        return builder.call(code, args)

    return signature(types.int64, pointer), codegen


def _loader(code: str) -> Any:
    def load(typingctx: Any, address: Any) -> Any:
        """Load four 8 x 8 matrices of 16-bit numbers; lanes 8 i to 8 i + 7 pass the row addresses of matrix i.

        Lane 4 g + t gets, in register i, the elements 2 t and 2 t + 1 of row g, or of column g if transposed.
        """

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            kind = ir.FunctionType(ir.LiteralStructType([i32] * 4), [i64])
            assembly = ir.InlineAsm(kind, code, "=r,=r,=r,=r,l,~{memory}", side_effect=True)
            words = builder.call(assembly, args)
            return cgutils.pack_array(builder, [builder.extract_value(words, i) for i in range(4)])

        return signature(types.UniTuple(types.uint32, 4), types.int64), codegen

    return load


def _copier(code: str) -> Any:
    def copy(typingctx: Any, address: Any, pointer: Any, index: Any) -> Any:
        """Begin an asynchronous copy of 16 bytes to shared memory; both addresses must be multiples of 16.

        ``copy_async_cached`` also caches the bytes in the L1, for data that the block will read again.
        """

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            source = builder.bitcast(builder.gep(args[1], [args[2]]), ir.IntType(8).as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [i64, source.type])
            builder.call(ir.InlineAsm(kind, code, "l,l,~{memory}", side_effect=True), [args[0], source])
            return context.get_dummy_value()

        return signature(types.none, types.int64, pointer, types.int64), codegen

    return copy


def _copier_where(code: str) -> Any:
    def copy(typingctx: Any, address: Any, pointer: Any, index: Any, condition: Any) -> Any:
        """Do ``copy_async`` or ``copy_async_cached`` if ``condition`` holds, else write zeros.

        If ``condition`` does not hold, the index may be invalid: a GPU reads nothing, the emulated device index 0.
        """

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            address, pointer, index, condition = args
            bytes_type = ir.IntType(8).as_pointer()
            sources = [builder.bitcast(place, bytes_type) for place in (builder.gep(pointer, [index]), pointer)]
            kind = ir.FunctionType(ir.VoidType(), [i64, bytes_type, bytes_type, i32])
            number = builder.zext(condition, i32)
            builder.call(ir.InlineAsm(kind, code, "l,l,l,r,~{memory}", side_effect=True), [address, *sources, number])
            return context.get_dummy_value()

        return signature(types.none, types.int64, pointer, types.int64, types.boolean), codegen

    return copy


def copy_async_commit(typingctx: Any) -> Any:
    """Commit the copies that the thread has begun since the last commit, as a group."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, COPY_COMMIT, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return signature(types.none), codegen


def copy_async_wait(typingctx: Any, pending: Any) -> Any:
    """Wait for the thread's copies, except those of the ``pending`` (0 or 1) most recent groups."""
    number = literal(pending)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, COPY_WAIT[number], "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return signature(types.none, pending), codegen


FUNCTIONS: dict[str, Any] = {
    "shared_address": shared_address,
    "load_matrices": _loader(LOAD),
    "load_matrices_transposed": _loader(LOAD_TRANSPOSED),
    "copy_async": _copier(COPY),
    "copy_async_cached": _copier(COPY_CACHED),
    "copy_async_where": _copier_where(COPY_WHERE),
    "copy_async_cached_where": _copier_where(COPY_CACHED_WHERE),
    "copy_async_commit": copy_async_commit,
    "copy_async_wait": copy_async_wait,
    **matrix_functions("f16"),
    **matrix_functions("bf16"),
    **matrix_functions("tf32"),
    **matrix_functions("i8"),
    **matrix_functions("u8"),
    "scale_matrix_f32": scale_matrix_f32,
}
