"""Functions that kernels can call in addition to Python's ``math`` and ``cuda``. Kernels need not import them.

float16, bfloat16 and smaller floats are storage types: kernels load and store their bits as uint16 and uint8, and
compute in float32. For a number that is too large for an 8-bit float, ``f32_to_*`` returns infinity or NaN, and
``f32_to_*_saturated`` the largest number (`small_floats`). ``f64_to_f32_odd`` rounds a float64 that will be rounded
again to fewer bits. Atomics take a raw pointer and an index. All 32 lanes of a warp must take part in shuffles and
votes. ``truncdiv`` and ``truncmod`` round toward zero, and return 0 for a divisor of 0. ``quotient_i32(x, (2**63 - 1)
// d)`` and ``quotient_i64(x, d)`` are x // d for x >= 0 and d > 0; the first requires x < 2**31 - 1. ``__init__.pyi``
has the signatures; kernel modules import them from there under ``TYPE_CHECKING``. At run time only the compiler imports
this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from ort_cuda_plugin.compiler.host import intrinsics as host_intrinsics
from ort_cuda_plugin.compiler.intrinsics import array_intrinsics, matrix_intrinsics, small_floats, vector_intrinsics
from ort_cuda_plugin.compiler.intrinsics.tile_intrinsics import strip_functions, tile_functions

__all__: list[str] = []

ir_types = {
    types.int16: ir.IntType(16),
    types.uint16: ir.IntType(16),
    types.int32: ir.IntType(32),
    types.uint32: ir.IntType(32),
    types.int64: ir.IntType(64),
    types.uint64: ir.IntType(64),
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
}
by_name = {
    "i32": types.int32,
    "u32": types.uint32,
    "i64": types.int64,
    "u64": types.uint64,
    "f32": types.float32,
    "f64": types.float64,
    "u16": types.uint16,
}
Lowering = Callable[[ir.IRBuilder, Any], ir.Value]


def export(name: str, result: types.Type, parameters: tuple[types.Type, ...], lower: Lowering) -> None:
    """Define the intrinsic ``name`` of this module; ``lower(builder, args)`` emits its code for arguments of the given
    types.
    """
    sig = signature(result, *parameters)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value = lower(builder, args)
        return context.get_dummy_value() if result == types.none else value

    # Numba reads the number of parameters from the Python function, so generate one with that many.
    names = ", ".join(f"a{index}" for index in range(len(parameters)))
    namespace: dict[str, Any] = {"sig": sig, "codegen": codegen}
    exec(f"def {name}(typingctx, {names}):\n    return sig, codegen\n", namespace)
    globals()[name] = intrinsic(namespace[name])
    __all__.append(name)


def call(name: str, result: ir.Type, *parameters: ir.Type) -> Lowering:
    """Return a `Lowering` that emits a call of the external function ``name``."""

    def lower(builder: ir.IRBuilder, args: Any) -> ir.Value:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, parameters), name)
        return builder.call(function, args)

    return lower


def assembly(code: str, constraints: str, result: ir.Type, *parameters: ir.Type) -> Lowering:
    """Return a `Lowering` that emits inline PTX. `compiler.host.intrinsics` replaces the PTX for the
    emulated device.
    """

    def lower(builder: ir.IRBuilder, args: Any) -> ir.Value:
        return builder.call(ir.InlineAsm(ir.FunctionType(result, parameters), code, constraints), args)

    return lower


# ---- storage types and bit casts ----

i8, i16, i32, i64, f16, f32, f64 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
    ir.DoubleType(),
)


def lower_bf16_to_f32(builder: ir.IRBuilder, args: Any) -> ir.Value:
    return builder.bitcast(builder.shl(builder.zext(args[0], i32), i32(16)), f32)


def lower_f16_to_f32(builder: ir.IRBuilder, args: Any) -> ir.Value:
    return builder.fpext(builder.bitcast(args[0], f16), f32)


def lower_f32_to_f16(builder: ir.IRBuilder, args: Any) -> ir.Value:
    return builder.bitcast(builder.fptrunc(args[0], f16), i16)


# Ordinary LLVM operations, not inline PTX, so that LLVM can turn a sum of two halves that is rounded to half into one
# half-precision instruction.
export("f16_to_f32", types.float32, (types.uint16,), lower_f16_to_f32)
export("f32_to_f16", types.uint16, (types.float32,), lower_f32_to_f16)
export("bf16_to_f32", types.float32, (types.uint16,), lower_bf16_to_f32)
export("f32_to_bf16", types.uint16, (types.float32,), assembly("cvt.rn.bf16.f32 $0, $1;", "=h,f", i16, f32))


for name, kind in small_floats.SMALL_FLOATS.items():
    export(f"{name}_to_f32", types.float32, (types.uint8,), kind.decode)
    for suffix, saturate in (("", False), ("_saturated", True)):
        export(
            f"f32_to_{name}{suffix}", types.uint8, (types.float32,), functools.partial(kind.encode, saturate=saturate)
        )
export("f8e8m0_to_f32", types.float32, (types.uint8,), small_floats.decode_e8m0)
for mode in ("up", "down", "nearest"):
    for suffix, saturate in (("", False), ("_saturated", True)):
        export(
            f"f32_to_f8e8m0_{mode}{suffix}",
            types.uint8,
            (types.float32,),
            functools.partial(small_floats.encode_e8m0, mode=mode, saturate=saturate),
        )
export("f64_to_f32_odd", types.float32, (types.float64,), small_floats.float64_to_float32_odd)

for a, b in (("f32", "i32"), ("f32", "u32"), ("f64", "i64"), ("f64", "u64")):
    for source, result in ((a, b), (b, a)):
        result_type = ir_types[by_name[result]]
        export(
            f"{source}_as_{result}",
            by_name[result],
            (by_name[source],),
            lambda builder, args, ty=result_type: builder.bitcast(args[0], ty),
        )


# ---- math functions that Python's math module lacks ----

for suffix, name, ty in (("f", "f32", types.float32), ("", "f64", types.float64)):
    value = ir_types[ty]
    export(f"fma_{name}", ty, (ty, ty, ty), lambda builder, args: builder.fma(*args))
    for function in ("rsqrt", "rint", "cbrt"):
        export(f"{function}_{name}", ty, (ty,), call(f"__nv_{function}{suffix}", value, value))
    for function in ("fmin", "fmax"):
        export(f"{function}_{name}", ty, (ty, ty), call(f"__nv_{function}{suffix}", value, value, value))


def lower_quotient_by_f32(builder: ir.IRBuilder, args: Any) -> ir.Value:
    """Emit x / y for y > 0 from the rounded reciprocal of y: a product, corrected by its error, which an FMA computes
    exactly.

    The result is the correctly rounded quotient (Markstein). For x below 2**-100 it may be a neighboring number, since
    the error may not be representable in float32. A product that is not finite is not corrected.
    """

    def negative(value: ir.Value) -> ir.Value:
        return builder.fsub(ir.Constant(f32, -0.0), value)

    x, y, reciprocal = args
    first = builder.fmul(x, reciprocal)
    # for an exact product the error is +0, not -0, so that zeros keep their signs
    excess = builder.fma(first, y, negative(x))
    second = builder.fma(negative(excess), reciprocal, first)
    return builder.select(builder.fcmp_ordered("ord", second, second), second, first)


export("quotient_by_f32", types.float32, (types.float32,) * 3, lower_quotient_by_f32)


HALF_ERF_END = 2.625
"""Argument from which on erf rounds to 1 in 16-bit types."""
HALF_ERF = (
    *(-9.387396744386933e-07, 3.149484837194905e-05, -4.6868715435266495e-04, 4.161106888204813e-03),
    *(-2.51460000872612e-02, 0.11139236390590668, -0.3756397068500519, 1.1283504962921143),
)
"""Coefficients of a polynomial in x * x for erf(x) / x, highest power first; the error is at most 2.6e-5."""


def lower_half_erf(builder: ir.IRBuilder, args: Any) -> ir.Value:
    """Emit erf with the accuracy of a 16-bit type; NaN for NaN."""
    (x,) = args
    end, start = ir.Constant(f32, HALF_ERF_END), ir.Constant(f32, -HALF_ERF_END)
    x = builder.select(builder.fcmp_ordered(">", x, end), end, x)
    x = builder.select(builder.fcmp_ordered("<", x, start), start, x)
    square = builder.fmul(x, x)
    value: ir.Value = ir.Constant(f32, HALF_ERF[0])
    for coefficient in HALF_ERF[1:]:
        value = builder.fma(value, square, ir.Constant(f32, coefficient))
    return builder.fmul(value, x)


export("half_erf", types.float32, (types.float32,), lower_half_erf)
# Approximations for 16-bit types. The relative error is at most 2**-16 for exp, and 2**-22 for 2**x and 1 / x;
# subnormal results become 0.
HALF_EXP = "{ .reg .f32 t; mul.ftz.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }"
HALF_EXP2 = "ex2.approx.ftz.f32 $0, $1;"
HALF_RECIPROCAL = "rcp.approx.ftz.f32 $0, $1;"
export("half_exp", types.float32, (types.float32,), assembly(HALF_EXP, "=f,f", f32, f32))
export("half_exp2", types.float32, (types.float32,), assembly(HALF_EXP2, "=f,f", f32, f32))
export("half_reciprocal", types.float32, (types.float32,), assembly(HALF_RECIPROCAL, "=f,f", f32, f32))


# ---- atomics on raw pointers; each returns the old value ----


LOAD_ACQUIRE = "ld.acquire.gpu.u32 $0, [$1];"


def atomic_rmw(operation: str) -> Lowering:
    def lower(builder: ir.IRBuilder, args: Any) -> ir.Value:
        pointer, index, value = args
        return builder.atomic_rmw(operation, builder.gep(pointer, [index]), value, "monotonic")

    return lower


def atomic_call(name: str, ty: ir.Type) -> Lowering:
    emit = call(name, ty, ty.as_pointer(), ty)

    def lower(builder: ir.IRBuilder, args: Any) -> ir.Value:
        pointer, index, value = args
        return emit(builder, (builder.gep(pointer, [index]), value))

    return lower


def lower_atomic_cas(builder: ir.IRBuilder, args: Any) -> ir.Value:
    pointer, index, expected, value = args
    pair = builder.cmpxchg(builder.gep(pointer, [index]), expected, value, "monotonic", "monotonic")
    return builder.extract_value(pair, 0)


def lower_load_acquire(builder: ir.IRBuilder, args: Any) -> ir.Value:
    address = builder.gep(*args[:1], [args[1]])
    code = ir.InlineAsm(ir.FunctionType(i32, [address.type]), LOAD_ACQUIRE, "=r,l,~{memory}", side_effect=True)
    return builder.call(code, [address])


# Acquire semantics: after this load, a thread sees the writes that another block made before its `cuda.threadfence` and
# atomic update.
export("load_acquire_i32", types.int32, (types.CPointer(types.int32), types.int64), lower_load_acquire)
for name in ("i32", "u32", "i64", "u64"):
    ty = by_name[name]
    atomic = (types.CPointer(ty), types.int64, ty)
    unsigned = "u" if name.startswith("u") else ""
    for function, operation in (
        ("add", "add"),
        ("and", "and"),
        ("or", "or"),
        ("xor", "xor"),
        ("exch", "xchg"),
        ("min", f"{unsigned}min"),
        ("max", f"{unsigned}max"),
    ):
        export(f"atomic_{function}_{name}", ty, atomic, atomic_rmw(operation))
    export(f"atomic_cas_{name}", ty, (types.CPointer(ty), types.int64, ty, ty), lower_atomic_cas)
for name, long_name in (("f32", "float"), ("f64", "double")):
    ty = by_name[name]
    atomic = (types.CPointer(ty), types.int64, ty)
    export(f"atomic_add_{name}", ty, atomic, atomic_call(f"llvm.nvvm.atomic.load.add.{name}.p0{name}", ir_types[ty]))
    for function in ("min", "max"):
        export(
            f"atomic_{function}_{name}",
            ty,
            atomic,
            atomic_call(f"___numba_atomic_{long_name}_{function}", ir_types[ty]),
        )


# ---- conditional nodes of CUDA graphs ----


# A cubin refers to this function of the device runtime by name. The driver resolves the name when it loads the module,
# as it does for `vprintf`: libcudadevrt.a does not define it, so the linker needs no further library.
export(
    "set_conditional", types.none, (types.int64, types.int32), call("cudaGraphSetConditional", ir.VoidType(), i64, i32)
)


# ---- integer division without Numba's check for zero: invalid data must not stop the emulated device ----


def lower_quotient_i32(builder: ir.IRBuilder, args: Any) -> ir.Value:
    # Multiply by the reciprocal, which is cheaper than a division. The call has no side effects, so that LLVM may hoist
    # it out of loops.
    function = ir.InlineAsm(ir.FunctionType(i32, (i32, i64)), host_intrinsics.QUOTIENT, "=r,r,l")
    return builder.call(function, args, attrs=("readnone", "nounwind"))


def truncating(remainder: bool, signed: bool) -> Lowering:
    def lower(builder: ir.IRBuilder, args: Any) -> ir.Value:
        a, b = args
        zero = builder.icmp_unsigned("==", b, b.type(0))
        safe = builder.select(zero, b.type(1), b)
        if not signed:
            result = builder.urem(a, safe) if remainder else builder.udiv(a, safe)
            return builder.select(zero, b.type(0), result)
        # On x86, the smallest integer divided by -1 traps. So divide by 1, and select the result for -1 afterwards.
        minus = builder.icmp_signed("==", b, b.type(-1))
        safe = builder.select(minus, b.type(1), safe)
        result = builder.srem(a, safe) if remainder else builder.sdiv(a, safe)
        negative = b.type(0) if remainder else builder.neg(a)
        return builder.select(zero, b.type(0), builder.select(minus, negative, result))

    return lower


for name in ("i32", "u32", "i64", "u64"):
    ty = by_name[name]
    signed = name.startswith("i")
    export(f"truncdiv_{name}", ty, (ty, ty), truncating(remainder=False, signed=signed))
    export(f"truncmod_{name}", ty, (ty, ty), truncating(remainder=True, signed=signed))
# Hides the origin of a value from LLVM, whose compile time doubles with each nested division by a constant.
export("opaque_i32", types.int32, (types.int32,), assembly("mov.b32 $0, $1;", "=r,r", i32, i32))
export("opaque_i64", types.int64, (types.int64,), assembly("mov.b64 $0, $1;", "=l,l", i64, i64))
export("quotient_i32", types.int32, (types.int32, types.int64), lower_quotient_i32)
export("quotient_i64", types.int64, (types.int64, types.int64), lambda builder, args: builder.udiv(*args))


# ---- elements of 2 or 4 bits, the first one in a byte's lowest bits; ``place`` is the index of the element ----


def lower_code(builder: ir.IRBuilder, args: Any, bits: int) -> ir.Value:
    byte, place = args
    first = builder.mul(builder.and_(builder.trunc(place, i32), i32(8 // bits - 1)), i32(bits))
    return builder.and_(builder.lshr(builder.zext(byte, i32), first), i32((1 << bits) - 1))


for bits in (2, 4):
    export(f"code{bits}", types.int32, (types.uint8, types.int64), functools.partial(lower_code, bits=bits))


# ---- warp shuffles and votes, in which all lanes take part ----

full_mask = i32(0xFFFFFFFF)
pair_type = ir.LiteralStructType([i32, ir.IntType(1)])
shuffle_modes = {"": (0, 31), "up_": (1, 0), "down_": (2, 31), "xor_": (3, 31)}


def shuffle_word(builder: ir.IRBuilder, mode: int, clamp: int, word: ir.Value, lane: ir.Value) -> ir.Value:
    emit = call("llvm.nvvm.shfl.sync.i32", pair_type, i32, i32, i32, i32, i32)
    return builder.extract_value(emit(builder, (full_mask, i32(mode), word, lane, i32(clamp))), 0)


def shuffle(mode: int, clamp: int, ty: ir.Type, bits: int) -> Lowering:
    integer = ir.IntType(bits)

    def lower(builder: ir.IRBuilder, args: Any) -> ir.Value:
        value, lane = args
        whole = value if ty == integer else builder.bitcast(value, integer)
        if bits == 32:
            moved = shuffle_word(builder, mode, clamp, whole, lane)
        else:
            low = shuffle_word(builder, mode, clamp, builder.trunc(whole, i32), lane)
            high = shuffle_word(builder, mode, clamp, builder.trunc(builder.lshr(whole, i64(32)), i32), lane)
            moved = builder.or_(builder.zext(low, i64), builder.shl(builder.zext(high, i64), i64(32)))
        return moved if ty == integer else builder.bitcast(moved, ty)

    return lower


for name in ("i32", "u32", "i64", "u64", "f32", "f64"):
    ty = by_name[name]
    for kind, (mode, clamp) in shuffle_modes.items():
        lower = shuffle(mode, clamp, ir_types[ty], int(name[1:]))
        export(f"shfl_{kind}{name}", ty, (ty, types.int32), lower)


def vote(mode: int, field: int) -> Lowering:
    def lower(builder: ir.IRBuilder, args: Any) -> ir.Value:
        emit = call("llvm.nvvm.vote.sync", pair_type, i32, i32, ir.IntType(1))
        return builder.extract_value(emit(builder, (full_mask, i32(mode), args[0])), field)

    return lower


export("vote_all", types.boolean, (types.boolean,), vote(0, 1))
export("vote_any", types.boolean, (types.boolean,), vote(1, 1))
export("ballot", types.uint32, (types.boolean,), vote(3, 0))


# ---- vectors: one access of 16 or 8 bytes, to which the address must be aligned ----


def lower_vector_load(builder: ir.IRBuilder, args: Any, lanes: int) -> ir.Value:
    pointer, index = args
    element = pointer.type.pointee
    vector = ir.VectorType(element, lanes)
    address = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    loaded = builder.load(address, align=lanes * element_bytes(element))
    return cgutils.pack_array(builder, [builder.extract_element(loaded, i32(lane)) for lane in range(lanes)])


def lower_vector_store(builder: ir.IRBuilder, args: Any, lanes: int) -> None:
    pointer, index, *values = args
    element = pointer.type.pointee
    vector = ir.VectorType(element, lanes)
    packed = ir.Constant(vector, ir.Undefined)
    for lane, value in enumerate(values):
        packed = builder.insert_element(packed, value, i32(lane))
    address = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    builder.store(packed, address, align=lanes * element_bytes(element))


def element_bytes(ty: ir.Type) -> int:
    return {f32: 4, f64: 8}.get(ty) or int(ty.width) // 8


for name, lanes in (("f32", 4), ("f32", 2), ("i32", 4), ("u32", 4), ("u16", 4), ("u16", 8), ("f64", 2), ("i64", 2)):
    ty = by_name[name]
    export(
        f"load_{name}x{lanes}",
        types.UniTuple(ty, lanes),
        (types.CPointer(ty), types.int64),
        lambda builder, args, lanes=lanes: lower_vector_load(builder, args, lanes),
    )
    export(
        f"store_{name}x{lanes}",
        types.none,
        (types.CPointer(ty), types.int64, *([ty] * lanes)),
        lambda builder, args, lanes=lanes: lower_vector_store(builder, args, lanes),
    )


# ---- shared and local arrays as raw pointers, without Numba's handling of negative indices ----


@intrinsic  # type: ignore[untyped-decorator]
def array_pointer(typingctx: Any, array: Any) -> Any:
    """Return a pointer to the first element of a one-dimensional shared or local array."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return context.make_array(sig.args[0])(context, builder, args[0]).data

    return signature(types.CPointer(array.dtype), array), codegen


__all__.append("array_pointer")


@intrinsic  # type: ignore[untyped-decorator]
def address_of(typingctx: Any, pointer: Any) -> Any:
    """Return a pointer's address as int64, to test whether two parameters refer to the same memory."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.ptrtoint(args[0], i64)

    return signature(types.int64, pointer), codegen


__all__.append("address_of")


# ---- selection without a branch: Numba's compile time is high for functions of many basic blocks ----


@intrinsic  # type: ignore[untyped-decorator]
def choose(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    """Return ``a if condition else b`` for values of one type; both are evaluated."""
    ty = types.unliteral(a)
    if types.unliteral(b) != ty:
        return None

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(*args)

    return signature(ty, types.boolean, ty, ty), codegen


__all__.append("choose")


# ---- tiles and strips of accumulators in registers ----

for name in ("f32", "f64", "i32", "i64", "u32", "u64"):
    for function_name, function in tile_functions(name, by_name[name], ir_types[by_name[name]]).items():
        globals()[function_name] = intrinsic(function)
        __all__.append(function_name)
for name, storage in (("f32", "f32"), ("f64", "f64"), ("i32", "i32"), ("f32", "f16"), ("f32", "bf16")):
    memory = by_name["u16" if storage.endswith("f16") else storage]
    for function_name, function in strip_functions(storage, memory, by_name[name], ir_types[by_name[name]]).items():
        globals()[function_name] = intrinsic(function)
        __all__.append(function_name)
for function_name, function in {
    **array_intrinsics.FUNCTIONS,
    **matrix_intrinsics.FUNCTIONS,
    **vector_intrinsics.FUNCTIONS,
}.items():
    globals()[function_name] = intrinsic(function)
    __all__.append(function_name)
