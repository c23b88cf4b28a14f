"""Replacements of libdevice on the emulated device: definitions of the ``__nv_*`` functions as LLVM IR.

Each definition is inlined into the kernel. The emulator resolves functions of the C library that definitions call; they
are declared to have no memory effects, so that LLVM can move them.
"""

from __future__ import annotations

from ort_cuda_plugin.compiler.host import vector_math as host_vector_math

# fmt: off
libm_unary = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "cos", "cosh", "erf", "erfc", "exp", "exp2", "exp10",
    "expm1", "log", "log10", "log1p", "log2", "sin", "sinh", "tan", "tanh",
)
libm_binary = ("atan2", "fmod", "hypot", "pow")
llvm_unary = ("ceil", "floor", "trunc", "rint", "nearbyint", "round", "fabs", "sqrt")
llvm_binary = {"copysign": "copysign", "fmin": "minnum", "fmax": "maxnum"}
fast_functions = ("cos", "sin", "tan", "exp", "exp10", "log", "log2", "log10")
# fmt: on
pure = "nounwind willreturn memory(none)"
infinity = "0x7FF0000000000000"


def define(result: str, name: str, parameters: str, body: str) -> str:
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    return f"define internal {result} @{name}({parameters}) alwaysinline nounwind {{\n{lines}\n}}\n"


def float_functions(ty: str, bits: str, suffix: str) -> dict[str, str]:
    """Return the definitions for one float type. Names of functions end in ``suffix``, names of LLVM's intrinsics in
    ``bits``.
    """
    out: dict[str, str] = {}
    one, two = f"{ty} %x", f"{ty} %x, {ty} %y"

    def add(name: str, body: str, result: str = ty, parameters: str = one) -> None:
        out[name] = define(result, name, parameters, body)

    for name in libm_unary:
        add(f"__nv_{name}{suffix}", f"%r = call {ty} @{name}{suffix}({one})\nret {ty} %r")
    for name in libm_binary:
        add(f"__nv_{name}{suffix}", f"%r = call {ty} @{name}{suffix}({two})\nret {ty} %r", parameters=two)
    for name in llvm_unary:
        add(f"__nv_{name}{suffix}", f"%r = call {ty} @llvm.{name}.{bits}({one})\nret {ty} %r")
    for name, intrinsic in llvm_binary.items():
        add(f"__nv_{name}{suffix}", f"%r = call {ty} @llvm.{intrinsic}.{bits}({two})\nret {ty} %r", parameters=two)
    for name, rounding in (("llrint", "rint"), ("llround", "round")):
        add(
            f"__nv_{name}{suffix}",
            f"""%f = call {ty} @llvm.{rounding}.{bits}({one})
            %r = call i64 @llvm.fptosi.sat.i64.{bits}({ty} %f)
            ret i64 %r""",
            "i64",
        )
    three = f"{two}, {ty} %z"
    add(f"__nv_fma{suffix}", f"%r = call {ty} @llvm.fma.{bits}({three})\nret {ty} %r", parameters=three)
    add(f"__nv_rsqrt{suffix}", f"%s = call {ty} @llvm.sqrt.{bits}({one})\n%r = fdiv {ty} 1.0, %s\nret {ty} %r")
    with_int = f"{one}, i32 %n"
    add(f"__nv_ldexp{suffix}", f"%r = call {ty} @ldexp{suffix}({with_int})\nret {ty} %r", parameters=with_int)
    power = f"%y = sitofp i32 %n to {ty}\n%r = call {ty} @pow{suffix}({two})\nret {ty} %r"
    add(f"__nv_powi{suffix}", power, parameters=with_int)
    tag = "f" if suffix else "d"
    magnitude = f"%a = call {ty} @llvm.fabs.{bits}({one})"
    for name, condition in (
        (f"__nv_isnan{tag}", f"fcmp uno {ty} %x, 0.0"),
        (f"__nv_isinf{tag}", f"fcmp oeq {ty} %a, {infinity}"),
        ("__nv_finitef" if suffix else "__nv_isfinited", f"fcmp olt {ty} %a, {infinity}"),
    ):
        add(name, f"{magnitude}\n%c = {condition}\n%r = zext i1 %c to i32\nret i32 %r", "i32")
    return out


def fast_float_functions() -> dict[str, str]:
    """Return the definitions of the fast-math functions; on the host they are as exact and as slow as the others."""
    out = {}
    for function in fast_functions:
        name = f"__nv_fast_{function}f"
        out[name] = define("float", name, "float %x", f"%r = call float @{function}f(float %x)\nret float %r")
    two = "float %x, float %y"
    for name, result in (("__nv_fast_powf", f"call float @powf({two})"), ("__nv_fast_fdividef", "fdiv float %x, %y")):
        out[name] = define("float", name, two, f"%r = {result}\nret float %r")
    return out


def integer_functions(bits: str, suffix: str) -> dict[str, str]:
    """Return the definitions for i32, or with suffix ``ll`` for i64. Functions that count bits return i32."""
    out: dict[str, str] = {}
    narrow = "" if bits == "i32" else "%r = trunc i64 %w to i32\n"
    count = f"{narrow}ret i32 {'%r' if narrow else '%w'}"

    def add(name: str, body: str, result: str) -> None:
        out[name] = define(result, name, f"{bits} %x", body)

    add(f"__nv_popc{suffix}", f"%w = call {bits} @llvm.ctpop.{bits}({bits} %x)\n{count}", "i32")
    add(f"__nv_clz{suffix}", f"%w = call {bits} @llvm.ctlz.{bits}({bits} %x, i1 false)\n{count}", "i32")
    add(
        f"__nv_ffs{suffix}",
        f"""%t = call {bits} @llvm.cttz.{bits}({bits} %x, i1 false)
        %n = add {bits} %t, 1
        %z = icmp eq {bits} %x, 0
        %w = select i1 %z, {bits} 0, {bits} %n
        {count}""",
        "i32",
    )
    add(f"__nv_brev{suffix}", f"%r = call {bits} @llvm.bitreverse.{bits}({bits} %x)\nret {bits} %r", bits)
    absolute = "__nv_abs" if bits == "i32" else "__nv_llabs"
    add(absolute, f"%r = call {bits} @llvm.abs.{bits}({bits} %x, i1 false)\nret {bits} %r", bits)
    return out


def high_product(name: str, extend: str, bits: int) -> str:
    """Return the definition of a function that returns the upper half of the product of two integers."""
    return define(
        f"i{bits}",
        name,
        f"i{bits} %x, i{bits} %y",
        f"""%a = {extend} i{bits} %x to i{2 * bits}
        %b = {extend} i{bits} %y to i{2 * bits}
        %m = mul i{2 * bits} %a, %b
        %s = lshr i{2 * bits} %m, {bits}
        %r = trunc i{2 * bits} %s to i{bits}
        ret i{bits} %r""",
    )


definitions = {
    **float_functions("float", "f32", "f"),
    **float_functions("double", "f64", ""),
    **fast_float_functions(),
    **integer_functions("i32", ""),
    **integer_functions("i64", "ll"),
    "__nv_mulhi": high_product("__nv_mulhi", "sext", 32),
    "__nv_umulhi": high_product("__nv_umulhi", "zext", 32),
    "__nv_mul64hi": high_product("__nv_mul64hi", "sext", 64),
    "__nv_umul64hi": high_product("__nv_umul64hi", "zext", 64),
    **host_vector_math.definitions,
}
"""Definitions of the ``__nv_*`` functions that kernels may call, by name."""

libm_declarations = {
    f"{name}{suffix}": f"declare {ty} @{name}{suffix}({parameters}) {pure}"
    for ty, suffix in (("float", "f"), ("double", ""))
    for names, parameters in ((libm_unary, ty), (libm_binary, f"{ty}, {ty}"), (("ldexp",), f"{ty}, i32"))
    for name in names
}
