"""What the emulated device has in place of libdevice: definitions of the ``__nv_*`` functions as LLVM IR.

Each definition is a text that is inlined into the kernel. Functions of the C library that a definition calls are in the
emulator's table of symbols; they are declared free of memory effects, so that LLVM can move them.
"""

from __future__ import annotations

from ort_cuda_plugin.runtime import host_vector_math

# fmt: off
libm_unary = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "cos", "cosh", "erf", "erfc", "exp", "exp2", "exp10",
    "expm1", "lgamma", "log", "log10", "log1p", "log2", "sin", "sinh", "tan", "tanh", "tgamma",
)
# fmt: on
libm_binary = ["atan2", "fdim", "fmod", "hypot", "nextafter", "pow", "remainder"]
llvm_unary = {
    "ceil": "ceil",
    "floor": "floor",
    "trunc": "trunc",
    "rint": "rint",
    "nearbyint": "nearbyint",
    "round": "round",
    "fabs": "fabs",
    "sqrt": "sqrt",
}
llvm_binary = {"copysign": "copysign", "fmin": "minnum", "fmax": "maxnum"}
pure = "nounwind willreturn memory(none)"


def define(result: str, name: str, parameters: str, body: str) -> str:
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    return f"define internal {result} @{name}({parameters}) alwaysinline nounwind {{\n{lines}\n}}\n"


def table() -> dict[str, str]:
    """Name of each ``__nv_*`` function that kernels may call, with its definition."""
    out: dict[str, str] = {}
    for suffix, ty, bits, integer in (("f", "float", "f32", "i32"), ("", "double", "f64", "i64")):
        one = f"{ty} %x"
        two = f"{ty} %x, {ty} %y"

        def unary(name: str, body: str, result: str = ty, one: str = one) -> None:
            out[name] = define(result, name, one, body)

        for function in libm_unary:
            unary(f"__nv_{function}{suffix}", f"%r = call {ty} @{function}{suffix}({ty} %x)\nret {ty} %r")
        for function in libm_binary:
            name = f"__nv_{function}{suffix}"
            out[name] = define(ty, name, two, f"%r = call {ty} @{function}{suffix}({ty} %x, {ty} %y)\nret {ty} %r")
        for function, intrinsic in llvm_unary.items():
            unary(f"__nv_{function}{suffix}", f"%r = call {ty} @llvm.{intrinsic}.{bits}({ty} %x)\nret {ty} %r")
        for function, intrinsic in llvm_binary.items():
            name = f"__nv_{function}{suffix}"
            body = f"%r = call {ty} @llvm.{intrinsic}.{bits}({ty} %x, {ty} %y)\nret {ty} %r"
            out[name] = define(ty, name, two, body)
        name = f"__nv_fma{suffix}"
        out[name] = define(
            ty,
            name,
            f"{ty} %x, {ty} %y, {ty} %z",
            f"%r = call {ty} @llvm.fma.{bits}({ty} %x, {ty} %y, {ty} %z)\nret {ty} %r",
        )
        unary(f"__nv_rsqrt{suffix}", f"%s = call {ty} @llvm.sqrt.{bits}({ty} %x)\n%r = fdiv {ty} 1.0, %s\nret {ty} %r")
        unary(f"__nv_rcbrt{suffix}", f"%s = call {ty} @cbrt{suffix}({ty} %x)\n%r = fdiv {ty} 1.0, %s\nret {ty} %r")
        for function in ("ldexp", "scalbn"):
            name = f"__nv_{function}{suffix}"
            body = f"%r = call {ty} @ldexp{suffix}({ty} %x, i32 %n)\nret {ty} %r"
            out[name] = define(ty, name, f"{ty} %x, i32 %n", body)
        name = f"__nv_powi{suffix}"
        body = f"%y = sitofp i32 %n to {ty}\n%r = call {ty} @pow{suffix}({ty} %x, {ty} %y)\nret {ty} %r"
        out[name] = define(ty, name, f"{ty} %x, i32 %n", body)
        for function, rounding in (("llrint", "rint"), ("llround", "round")):
            unary(
                f"__nv_{function}{suffix}",
                f"%f = call {ty} @llvm.{rounding}.{bits}({ty} %x)\n"
                f"%r = call i64 @llvm.fptosi.sat.i64.{bits}({ty} %f)\nret i64 %r",
                "i64",
            )
        out[f"__nv_modf{suffix}"] = define(
            ty,
            f"__nv_modf{suffix}",
            f"{ty} %x, ptr %whole",
            f"""%t = call {ty} @llvm.trunc.{bits}({ty} %x)
            store {ty} %t, ptr %whole
            %d = fsub {ty} %x, %t
            %a = call {ty} @llvm.fabs.{bits}({ty} %x)
            %inf = fcmp oeq {ty} %a, 0x7FF0000000000000
            %f = select i1 %inf, {ty} 0.0, {ty} %d
            %r = call {ty} @llvm.copysign.{bits}({ty} %f, {ty} %x)
            ret {ty} %r""",
        )
        infinity = "0x7FF0000000000000"
        tag = "f" if suffix else "d"
        isnan, isinf = (f"__nv_isnan{tag}", f"__nv_isinf{tag}")
        finite = "__nv_finitef" if suffix else "__nv_isfinited"
        unary(isnan, f"%c = fcmp uno {ty} %x, 0.0\n%r = zext i1 %c to i32\nret i32 %r", "i32")
        absolute = f"%a = call {ty} @llvm.fabs.{bits}({ty} %x)\n"
        unary(isinf, absolute + f"%c = fcmp oeq {ty} %a, {infinity}\n%r = zext i1 %c to i32\nret i32 %r", "i32")
        unary(finite, absolute + f"%c = fcmp olt {ty} %a, {infinity}\n%r = zext i1 %c to i32\nret i32 %r", "i32")
        unary(
            f"__nv_signbit{tag}",
            f"%i = bitcast {ty} %x to {integer}\n%c = icmp slt {integer} %i, 0\n%r = zext i1 %c to i32\nret i32 %r",
            "i32",
        )
        sqrt_half = "0x3FE6A09E60000000" if suffix else "0x3FE6A09E667F3BCD"
        unary(
            f"__nv_normcdf{suffix}",
            f"""%n = fneg {ty} %x
            %s = fmul {ty} %n, {sqrt_half}
            %e = call {ty} @erfc{suffix}({ty} %s)
            %r = fmul {ty} %e, 0.5
            ret {ty} %r""",
        )
    for function in ("cos", "sin", "tan", "exp", "exp10", "log", "log2", "log10"):
        name = f"__nv_fast_{function}f"
        out[name] = define("float", name, "float %x", f"%r = call float @{function}f(float %x)\nret float %r")
    two_floats = "float %x, float %y"
    out["__nv_fast_powf"] = define(
        "float", "__nv_fast_powf", two_floats, "%r = call float @powf(float %x, float %y)\nret float %r"
    )
    out["__nv_fast_fdividef"] = define(
        "float", "__nv_fast_fdividef", two_floats, "%r = fdiv float %x, %y\nret float %r"
    )
    out["__nv_saturatef"] = define(
        "float",
        "__nv_saturatef",
        "float %x",
        """%a = call float @llvm.maxnum.f32(float %x, float 0.0)
        %r = call float @llvm.minnum.f32(float %a, float 1.0)
        ret float %r""",
    )
    for bits, suffix in (("i32", ""), ("i64", "ll")):
        to_int = "" if bits == "i32" else "%r = trunc i64 %w to i32\n"
        result = "%w" if bits == "i32" else "%r"
        for function, expression in (
            ("popc", f"call {bits} @llvm.ctpop.{bits}({bits} %x)"),
            ("clz", f"call {bits} @llvm.ctlz.{bits}({bits} %x, i1 false)"),
        ):
            name = f"__nv_{function}{suffix}"
            out[name] = define("i32", name, f"{bits} %x", f"%w = {expression}\n{to_int}ret i32 {result}")
        name = f"__nv_brev{suffix}"
        out[name] = define(
            bits, name, f"{bits} %x", f"%r = call {bits} @llvm.bitreverse.{bits}({bits} %x)\nret {bits} %r"
        )
        name = f"__nv_ffs{suffix}"
        out[name] = define(
            "i32",
            name,
            f"{bits} %x",
            f"""%t = call {bits} @llvm.cttz.{bits}({bits} %x, i1 false)
            %n = add {bits} %t, 1
            %z = icmp eq {bits} %x, 0
            %w = select i1 %z, {bits} 0, {bits} %n
            {to_int}ret i32 {result}""",
        )
        name = "__nv_abs" if bits == "i32" else "__nv_llabs"
        body = f"%r = call {bits} @llvm.abs.{bits}({bits} %x, i1 false)\nret {bits} %r"
        out[name] = define(bits, name, f"{bits} %x", body)
    for function, extend, bits, wide in (
        ("mulhi", "sext", "i32", "i64"),
        ("umulhi", "zext", "i32", "i64"),
        ("mul64hi", "sext", "i64", "i128"),
        ("umul64hi", "zext", "i64", "i128"),
    ):
        name = f"__nv_{function}"
        out[name] = define(
            bits,
            name,
            f"{bits} %x, {bits} %y",
            f"""%a = {extend} {bits} %x to {wide}
            %b = {extend} {bits} %y to {wide}
            %m = mul {wide} %a, %b
            %s = lshr {wide} %m, {bits[1:]}
            %r = trunc {wide} %s to {bits}
            ret {bits} %r""",
        )
    return out


libm_declarations = {
    **{f"{name}f": f"declare float @{name}f(float) {pure}" for name in libm_unary},
    **{name: f"declare double @{name}(double) {pure}" for name in libm_unary},
    **{f"{name}f": f"declare float @{name}f(float, float) {pure}" for name in libm_binary},
    **{name: f"declare double @{name}(double, double) {pure}" for name in libm_binary},
    "ldexpf": f"declare float @ldexpf(float, i32) {pure}",
    "ldexp": f"declare double @ldexp(double, i32) {pure}",
}

definitions = {**table(), **host_vector_math.definitions}
